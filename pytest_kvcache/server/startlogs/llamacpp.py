"""The start-up lines of llama.cpp's server. Source: llama.cpp b11434, ``src/llama-kv-cache.cpp`` and ``tools/server``."""

from __future__ import annotations

import re
from typing import ClassVar

from pytest_kvcache.server.startlogs.reading import FLOAT, INT, Found, LogReader, Rule, Sourced, to_bytes, to_int


class LlamaLog(LogReader):
    """A sliding-window or hybrid model has several caches: memory is their sum, tokens are those of the largest."""

    ENGINE = "llamacpp"
    TITLE = "llama.cpp"
    HINT = re.compile(r"\bllama_|n_slots|new slot")
    SIGN = re.compile(r"\bllama_(?:context|kv_cache|model|memory|init)\w*:|\bgguf_init|^\s*(?:srv|slot) +\w+: |\bggml_")
    VERSION = re.compile(r"\bbuild(?:_info)?: (b?[0-9]{3,6}(?:[- (]{1,2}[0-9a-f]{6,12}\)?)?)")
    ONE: ClassVar[tuple[Rule, ...]] = (
        ("max_num_seqs", re.compile(rf"\bllama_context: n_seq_max\s*= {INT}"), to_int),
        ("max_num_seqs", re.compile(rf"\binitializing(?: slots)?, n_slots = {INT}"), to_int),
        ("max_model_len", re.compile(rf"\bllama_context: n_ctx_(?:seq|per_seq)\s*= {INT}"), to_int),
        ("max_model_len", re.compile(rf"\binitializing(?: slots)?, n_slots = [0-9]{{1,9}}, n_ctx_slot = {INT}"), to_int),
        ("max_model_len", re.compile(rf"\bnew slot,? n_ctx(?:_slot)? = {INT}"), to_int),
    )
    CACHE = re.compile(
        rf"\bllama_kv_cache\w{{0,20}}: size =\s*{FLOAT} (MiB) \(\s*{INT} cells,\s*{INT} layers,\s*(?:{INT}/)?{INT} seqs\)"
        rf"(?:, K \((\w{{1,16}})\):.{{0,40}}?, V \((\w{{1,16}})\))?"
    )
    STATE = re.compile(rf"\bllama_memory_recurrent: size =\s*{FLOAT} (MiB) \(")
    CONTEXT = re.compile(r"\bllama_context: constructing llama_context|\bllama_context: n_seq_max ")

    def __init__(self) -> None:
        super().__init__()
        self.caches: list[tuple[float, int, str]] = []
        self.dtype: tuple[str, str] | None = None
        self.is_draft = False

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
