"""The start-up lines of llama.cpp's server. Source: llama.cpp b11434, ``src/llama-kv-cache.cpp`` and ``tools/server``;
releases before b5500 (2024, 2025) printed the whole cache as its "KV self size", over ``n_ctx`` cells.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pytest_kvcache.server.startlogs.reading import FLOAT, INT, Found, LogReader, Rule, Sourced, to_bytes, to_int

_NEW_CONTEXT = r"llama_(?:new_context_with_model|init_from_model)"


class LlamaLog(LogReader):
    """A sliding-window or hybrid model has several caches: memory is their sum, tokens are those of the largest."""

    ENGINE = "llamacpp"
    TITLE = "llama.cpp"
    HINT = re.compile(r"\bllama_|n_slots|new slot")
    SIGN = re.compile(r"\bllama_(?:context|kv_cache|model|memory|init|new_context)\w*:|\bgguf_init|^\s*(?:srv|slot) +\w+: |\bggml_")
    VERSION = re.compile(r"\bbuild(?:_info)?: (b?[0-9]{3,6}(?:[- (]{1,2}[0-9a-f]{6,12}\)?)?)")
    ONE: ClassVar[tuple[Rule, ...]] = (
        ("max_num_seqs", re.compile(rf"\bllama_context: n_seq_max\s*= {INT}"), to_int),
        ("max_num_seqs", re.compile(rf"\binitializing(?: slots)?, n_slots = {INT}"), to_int),
        ("max_num_seqs", re.compile(rf"\binitializing slots \|[^\n]{{0,200}}?\bn_slots={INT}"), to_int),
        ("max_num_seqs", re.compile(rf"\b{_NEW_CONTEXT}: n_seq_max\s*= {INT}"), to_int),
        ("max_model_len", re.compile(rf"\b(?:llama_context|{_NEW_CONTEXT}): n_ctx_(?:seq|per_seq)\s*= {INT}"), to_int),
        ("max_model_len", re.compile(rf"\binitializing(?: slots)?, n_slots = [0-9]{{1,9}}, n_ctx_slot = {INT}"), to_int),
        ("max_model_len", re.compile(rf"\bnew slot \|[^\n]{{0,200}}?\bn_ctx_slot={INT}"), to_int),
        ("max_model_len", re.compile(rf"\bnew slot,? n_ctx(?:_slot)? = {INT}"), to_int),
    )
    CACHE = re.compile(
        rf"\bllama_kv_cache\w{{0,20}}: size =\s*{FLOAT} (MiB) \(\s*{INT} cells,\s*{INT} layers,\s*(?:{INT}/)?{INT} seqs\)"
        rf"(?:, K \((\w{{1,16}})\):.{{0,40}}?, V \((\w{{1,16}})\))?"
    )
    STATE = re.compile(rf"\bllama_memory_recurrent: size =\s*{FLOAT} (MiB) \(")
    WHOLE = re.compile(rf"\bllama_\w{{1,40}}: KV self size  = +{FLOAT} (MiB)(?:, K \((\w{{1,16}})\):.{{0,40}}?, V \((\w{{1,16}})\))?")
    LENGTH = re.compile(rf"\bllama_\w{{1,40}}: n_ctx\s*= {INT}")
    CELLS = re.compile(rf"\bllama_kv_cache\w{{0,20}}: kv_size = {INT},")
    CONTEXT = re.compile(rf"\bllama_context: constructing llama_context|\bllama_context: n_seq_max |\b{_NEW_CONTEXT}: n_(?:seq_max|ctx) ")

    def __init__(self) -> None:
        super().__init__()
        self.caches: list[tuple[float, int, str]] = []
        self.dtype: tuple[str, str] | None = None
        self.is_draft = False
        self.length = self.cells = 0

    def read(self, line: str) -> Found:
        """Return what one line states.

        The first context is the model's; a second one is that of a draft model for speculative decoding, with a pool of its own.
        """
        if "llama_" in line:
            self.is_draft = self.is_draft or (bool(self.caches) and self.CONTEXT.search(line) is not None)
            if self.is_draft:
                return {}
            self._cache(line)
        return super().read(line)

    def _cache(self, line: str) -> None:
        match = self.CACHE.search(line)
        if match is not None:
            size, unit, cells, _, seqs, streams, k_type, v_type = match.groups()
            # Cells are those of one stream; before streams came, the number stood alone and all sequences shared the cells.
            count = to_int(cells) * (to_int(streams) if seqs else 1)
            self.caches.append((to_bytes(size, unit), count, line))
            if k_type:
                self.dtype = (k_type if k_type == v_type else f"K {k_type}, V {v_type}", line)
        match = self.STATE.search(line)
        if match is not None:
            self.caches.append((to_bytes(match.group(1), match.group(2)), 0, line))
        for pattern, name in ((self.LENGTH, "length"), (self.CELLS, "cells")):
            match = pattern.search(line)
            if match is not None:
                setattr(self, name, to_int(match.group(1)))
        match = self.WHOLE.search(line)
        if match is not None and not self.caches:
            size, unit, k_type, v_type = match.groups()
            # A state model has a cell for each sequence, and those are no tokens.
            tokens = self.length if self.cells in {0, self.length} else 0
            self.caches.append((to_bytes(size, unit), tokens, f"{line} (over n_ctx = {tokens} cells)" if tokens else line))
            if k_type:
                self.dtype = (k_type if k_type == v_type else f"K {k_type}, V {v_type}", line)

    def totals(self) -> Sourced:
        """Return the pool: its memory is the sum over caches, its tokens those of the largest (a window cache holds fewer)."""
        found: Sourced = {}
        if not self.caches:
            return found
        count = len(self.caches)
        _, tokens, line = max(self.caches, key=lambda cache: cache[1])
        if tokens:
            found["pool_tokens"] = (tokens, line)
        found["pool_bytes"] = (sum(size for size, _, _ in self.caches), line if count == 1 else f"the sum of {count} caches, the largest: {line}")
        if self.dtype is not None:
            found["kv_dtype"] = self.dtype
        return found
