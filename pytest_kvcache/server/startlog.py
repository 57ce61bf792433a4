"""What a server's own log says: the facts of its start, its last lines, and why it did not start.

A line about the KV pool is no proof of a running server: vLLM prints it before the engine is up, and a failure can follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

from pytest_kvcache.quantities import QUANTITIES, Reading, Value
from pytest_kvcache.server.redaction import redact
from pytest_kvcache.server.rootcause import last_lines, log_lines, root_cause, strip_escapes

__all__ = ["facts", "last_lines", "read_facts", "read_log_tail", "redact", "root_cause", "strip_escapes"]

_INT = r"([0-9][0-9,]{0,17})"
_FLOAT = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)"
_BYTES = {"MiB": 1 << 20, "GiB": 1 << 30}
_MAX_TEXT = 16 << 20
_MAX_LINE = 8000  # vLLM prints its whole configuration in one
_MAX_SOURCE = 200

_CONFIG = r"Initializing an? [^\n]{0,80}LLM engine [^\n]{0,6000}?"

Fact = float | str | bool
Found = dict[str, Fact]
Sourced = dict[str, tuple[Fact, str]]
Convert = Callable[[str], Fact]


def read_log_tail(path: Path, limit_bytes: int = 1 << 20) -> str:
    """Return the last ``limit_bytes`` of a log as text, from the start of a line where it was cut; "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - limit_bytes))
            data = file.read(limit_bytes)
    except OSError:
        return ""
    if size > limit_bytes:
        data = data.partition(b"\n")[2] or data
    return data.decode("utf-8", "replace")


def read_facts(path: Path, limit_bytes: int = 8 << 20) -> dict[str, Value]:
    """Return what the start-up lines of a log file state; they stand in its first ``limit_bytes``. {} where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes)
    except OSError:
        return {}
    return facts(data.decode("utf-8", "replace"))


def facts(text: str) -> dict[str, Value]:
    """Return the quantities that a start-up log states, each a Reading whose source is its line. Never raises.

    Read are the lines of vLLM (V1 and V0) and of llama.cpp. Engines of one data-parallel server have a pool each, and these are
    added up; ranks of one engine share one, and are not. ``pool_bytes`` is the memory of the pool over all cards.
    """
    found: Sourced = {}
    vllm, llama = _Vllm(), _Llama()
    for line in log_lines(text[:_MAX_TEXT], _MAX_LINE):
        for reader in (vllm, llama):
            for name, value in reader.read(line).items():
                found[name] = (value, line)
    for name, (value, line) in (vllm.totals() | llama.totals()).items():
        found[name] = (value, line)
    if "num_gpu_blocks_override" in found and vllm.workers:
        # The pool was set by hand: the memory that vLLM had found for it is not the memory that it takes.
        del found["pool_bytes"]
    return {name: Reading(value, QUANTITIES[name].unit, _source(line)) for name, (value, line) in found.items()}


def _source(line: str) -> str:
    line = redact(" ".join(line.split()))
    return "start-up log: " + (line if len(line) <= _MAX_SOURCE else line[: _MAX_SOURCE - 1] + "…")


def _int(text: str) -> int:
    return int(text.replace(",", ""))


def _bytes(number: str, unit: str) -> float:
    # The engine printed it rounded, so a fraction of a byte would only pretend to be exact.
    return float(round(float(number) * _BYTES[unit]))


class _Vllm:
    """The lines of vLLM. Figures of a whole engine are kept per data-parallel rank, memory per worker, until ``totals``."""

    ONE: ClassVar[tuple[tuple[str, re.Pattern[str], Convert], ...]] = (
        ("max_model_len", re.compile(rf"\bUsing max model len {_INT}"), _int),
        ("max_model_len", re.compile(rf"Auto-fit max_model_len: reduced from [0-9]{{1,18}} to {_INT}"), _int),
        ("max_model_len", re.compile(rf"{_CONFIG}\bmax_seq_len={_INT}"), _int),
        ("max_model_len", re.compile(rf"Maximum concurrency for {_INT} tokens per request"), _int),
        ("kv_dtype", re.compile(rf"{_CONFIG}\bkv_cache_dtype=([\w.]{{1,40}})"), str),
        ("kv_dtype", re.compile(r"\bUsing ([\w.]{1,40}) data type to store kv cache", re.IGNORECASE), str),
        ("prefix_caching", re.compile(rf"{_CONFIG}\benable_prefix_caching=(True|False)"), lambda text: text == "True"),
        ("num_gpu_blocks_override", re.compile(rf"Overriding num_gpu_blocks=[0-9]{{1,18}} with num_gpu_blocks_override={_INT}"), _int),
        ("gpu_memory_utilization", re.compile(rf"\bgpu_memory_utilization \({_FLOAT}\)"), float),
    )
    ENGINE: ClassVar[tuple[tuple[str, re.Pattern[str], Callable[[str], float]], ...]] = (
        ("pool_tokens", re.compile(rf"\bKV cache size: {_INT} tokens"), _int),
        ("max_concurrency", re.compile(rf"Maximum concurrency for [0-9,]{{1,18}} tokens per request: {_FLOAT}x"), float),
        ("pool_blocks", re.compile(rf"# ?\w{{1,20}} blocks: {_INT}, # ?CPU blocks: [0-9]"), _int),
        ("pool_blocks", re.compile(rf"Overriding num_gpu_blocks=[0-9]{{1,18}} with num_gpu_blocks_override={_INT}"), _int),
    )
    WORKER = (
        re.compile(rf"\bAvailable KV cache memory: {_FLOAT} (GiB)"),
        re.compile(rf"(?:Explicitly set|Auto set) \({_FLOAT}/[0-9.]{{1,20}}\) (GiB) for KV cache"),
        re.compile(rf"reserved for KV Cache is {_FLOAT} ?(GiB)", re.IGNORECASE),
    )
    ENGINE_NAME = re.compile(r"\bEngineCore_DP([0-9]{1,5})\b")
    WORKER_NAME = re.compile(r"\((?:Vllm)?(?:Ray)?Worker[^()]{0,80}\)")

    def __init__(self) -> None:
        self.engines: dict[str, dict[str, tuple[float, str]]] = {}
        self.workers: dict[str, tuple[float, str]] = {}

    def read(self, line: str) -> Found:
        found: Found = {}
        for name, pattern, convert in self.ONE:
            match = pattern.search(line)
            if match is not None:
                found[name] = convert(match.group(1))
        engine = self.ENGINE_NAME.search(line)
        for name, pattern, number in self.ENGINE:
            match = pattern.search(line)
            if match is not None:
                self.engines.setdefault(engine.group(1) if engine else "", {})[name] = (number(match.group(1)), line)
        for pattern in self.WORKER:
            match = pattern.search(line)
            if match is not None:
                worker = self.WORKER_NAME.search(line)
                self.workers[worker.group(0) if worker else ""] = (_bytes(match.group(1), match.group(2)), line)
        return found

    def totals(self) -> Sourced:
        """Return the sums over data-parallel engines, and the memory of all workers."""
        found: Sourced = {}
        for name in ("pool_tokens", "pool_blocks", "max_concurrency"):
            parts = [values[name] for values in self.engines.values() if name in values]
            if len(parts) > 1:
                found[name] = (sum(value for value, _ in parts), f"the sum over {len(parts)} engines, the last of them: {parts[-1][1]}")
            elif parts:
                found[name] = parts[0]
        if self.workers:
            # Every worker holds as many blocks as the one with the least memory.
            least, line = min(self.workers.values())
            count = len(self.workers)
            found["pool_bytes"] = (least * count, line if count == 1 else f"{count} workers, the one with the least memory: {line}")
        return found


class _Llama:
    """The lines of llama.cpp's server. A sliding-window or hybrid model has several caches: memory is their sum."""

    CACHE = re.compile(
        rf"\bllama_kv_cache\w{{0,20}}: size =\s*{_FLOAT} (MiB) \(\s*{_INT} cells,\s*{_INT} layers,\s*(?:{_INT}/)?{_INT} seqs\)"
        rf"(?:, K \((\w{{1,16}})\):.{{0,40}}?, V \((\w{{1,16}})\))?"
    )
    STATE = re.compile(rf"\bllama_memory_recurrent: size =\s*{_FLOAT} (MiB) \(")
    CONTEXT = re.compile(r"\bllama_context: constructing llama_context|\bllama_context: n_seq_max ")
    ONE = (
        ("max_num_seqs", re.compile(rf"\bllama_context: n_seq_max\s*= {_INT}")),
        ("max_num_seqs", re.compile(rf"\binitializing(?: slots)?, n_slots = {_INT}")),
        ("max_model_len", re.compile(rf"\bllama_context: n_ctx_(?:seq|per_seq)\s*= {_INT}")),
        ("max_model_len", re.compile(rf"\binitializing(?: slots)?, n_slots = [0-9]{{1,9}}, n_ctx_slot = {_INT}")),
        ("max_model_len", re.compile(rf"\bnew slot,? n_ctx(?:_slot)? = {_INT}")),
    )

    def __init__(self) -> None:
        self.caches: list[tuple[float, int, str]] = []
        self.dtype: tuple[str, str] | None = None
        self.is_draft = False

    def read(self, line: str) -> Found:
        # The first context is the model's; a second one is that of a draft model for speculative decoding, with a pool of its own.
        if "llama_" in line:
            self.is_draft = self.is_draft or (bool(self.caches) and self.CONTEXT.search(line) is not None)
            if self.is_draft:
                return {}
            self._cache(line)
        found: Found = {}
        for name, pattern in self.ONE:
            match = pattern.search(line)
            if match is not None:
                found[name] = _int(match.group(1))
        return found

    def _cache(self, line: str) -> None:
        match = self.CACHE.search(line)
        if match is not None:
            size, unit, cells, _, seqs, streams, k_type, v_type = match.groups()
            # Cells are those of one stream; before streams came, the number stood alone and all sequences shared the cells.
            count = _int(cells) * (_int(streams) if seqs else 1)
            self.caches.append((_bytes(size, unit), count, line))
            if k_type:
                self.dtype = (k_type if k_type == v_type else f"K {k_type}, V {v_type}", line)
        match = self.STATE.search(line)
        if match is not None:
            self.caches.append((_bytes(match.group(1), match.group(2)), 0, line))

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


def known_facts() -> Iterable[str]:
    """Return the names of the quantities that ``facts`` can give."""
    names = {name for name, *_ in _Vllm.ONE} | {name for name, *_ in _Vllm.ENGINE} | {name for name, _ in _Llama.ONE}
    return sorted(names | {"pool_bytes", "kv_dtype"})
