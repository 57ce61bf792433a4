"""The start-up lines of vLLM: V1 and V0, on GPU, CPU and XPU.

Source: vLLM 0.32.0, ``vllm/v1/core/kv_cache_utils.py``, ``vllm/v1/worker/gpu_worker.py`` and ``cpu_worker.py``; V0's from
``vllm/executor`` and ``vllm/worker/worker.py`` of releases 0.4 to 0.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from pytest_kvcache.server.startlogs.overrides import ASKED, OVERRIDE, pair, room_of
from pytest_kvcache.server.startlogs.reading import FLOAT, INT, Found, LogReader, Rule, Sourced, to_bytes, to_flag, to_int

# Anchored, so that a hostile line that repeats the words costs no more than one that has them once.
_CONFIG = r"\A[^\n]{0,300}?Initializing an? [^\n]{0,80}LLM engine [^\n]{0,6000}?"
_ARGS = r"\A[^\n]{0,300}?(?:non-default args|args): [^\n]{0,6000}?"
_LESS = 1e-9


class VllmLog(LogReader):
    """Figures of a whole engine are kept per data-parallel rank, memory per worker, until ``totals``."""

    ENGINE = "vllm"
    TITLE = "vLLM"
    HINT = re.compile(
        r"blocks|KV cache|max.model.len|LLM engine|Maximum concurrency|args: |gpu_memory_utilization|kv.cache|block size", re.IGNORECASE
    )
    SIGN = re.compile(
        r"\bv(?:llm|LLM)\b|EngineCore|\(APIServer pid=|max_num_(?:batched_tokens|seqs) \(|argument --block-size|Bfloat16 is only supported on GPUs"
        r"|attention heads \([0-9]+\) must be|[Gg]pu.memory.utilization|GPU memory utilization|reqs, (?:Waiting|Swapped|Deferred)\b|# ?\w{1,20} blocks: [0-9]"
        r"|max seq len \([0-9]|Available memory on node [0-9]|HiSparse|for the cache blocks|No common block size|Error in memory profiling",
    )
    VERSION = re.compile(r"(?:LLM engine \(v|vLLM API server version |vLLM version )([0-9][\w.+]{0,30})")
    START = "vLLM API server version "
    ONE: ClassVar[tuple[Rule, ...]] = (
        ("max_model_len", re.compile(rf"\bUsing max model len {INT}"), to_int),
        ("max_model_len", re.compile(rf"Auto-fit max_model_len: reduced from [0-9]{{1,18}} to {INT}"), to_int),
        ("max_model_len", re.compile(rf"{_CONFIG}\bmax_seq_len={INT}"), to_int),
        ("max_model_len", re.compile(rf"Maximum concurrency for {INT} tokens per request"), to_int),
        ("kv_dtype", re.compile(rf"{_CONFIG}\bkv_cache_dtype=([\w.]{{1,40}})"), str),
        ("kv_dtype", re.compile(r"\bUsing ([\w.]{1,40}) data type to store kv cache", re.IGNORECASE), str),
        ("prefix_caching", re.compile(rf"{_CONFIG}\benable_prefix_caching=(True|False)"), to_flag),
        ("num_gpu_blocks_override", re.compile(rf"Overriding num_gpu_blocks=[0-9]{{1,18}} with num_gpu_blocks_override={INT}"), to_int),
        ("gpu_memory_utilization", re.compile(rf"\bgpu_memory_utilization \({FLOAT}\)"), float),
        ("gpu_memory_utilization", re.compile(rf"Desired GPU memory utilization is \({FLOAT},"), float),
        ("gpu_memory_utilization", re.compile(rf"{_ARGS}'?gpu_memory_utilization'?[:=] ?{FLOAT}"), float),
        ("max_num_seqs", re.compile(rf"{_ARGS}'?max_num_seqs'?[:=] ?{INT}"), to_int),
        # Hybrid models: the label of /metrics may hold the size from before this alignment (vLLM issue 42966).
        ("block_size", re.compile(rf"Setting attention block size to {INT} tokens"), to_int),
    )
    PER_ENGINE: ClassVar[tuple[tuple[str, re.Pattern[str], Callable[[str], float]], ...]] = (
        ("pool_tokens", re.compile(rf"\bKV cache size: {INT} tokens"), to_int),
        ("max_concurrency", re.compile(rf"Maximum concurrency for [0-9,]{{1,18}} tokens per request: {FLOAT}x"), float),
        # "# CPU blocks" is the swap pool, unless it is V0's CPU backend, whose own pool comes first and in small letters.
        ("pool_blocks", re.compile(rf"# ?(?!CPU\b)\w{{1,20}} blocks: {INT}"), to_int),
    )
    PER_WORKER = (
        re.compile(rf"\bAvailable KV cache memory: {FLOAT} (GiB)"),
        re.compile(rf"(?:Explicitly set|Auto set) \({FLOAT}/[0-9.]{{1,20}}\) (GiB) for KV cache"),
        re.compile(rf"reserved for KV Cache is {FLOAT} ?(GiB)", re.IGNORECASE),
        re.compile(rf"\breserved {FLOAT} ?(GiB) memory for KV Cache as specified", re.IGNORECASE),
        re.compile(rf"\bkv_cache_size={FLOAT} ?(GiB)"),
        re.compile(rf"\bKV cache size: {FLOAT} (GiB|GB|MiB)\b"),
    )
    IN_USE = re.compile(r"Current kv cache memory in use is ([0-9]{1,18}) bytes")
    ENGINE_NAME = re.compile(r"\bEngineCore_DP([0-9]{1,5})\b")
    WORKER_NAME = re.compile(r"\((?:Vllm)?(?:Ray)?Worker[^()]{0,80}\)")
    CONFIGURED = re.compile(r"\bInitializing an? [^\n]{0,80}LLM engine ")

    def __init__(self) -> None:
        super().__init__()
        self.engines: dict[str, dict[str, tuple[float, str]]] = {}
        self.workers: dict[str, tuple[float, str]] = {}
        self.overrides: list[tuple[int, int]] = []
        self.asked = 0.0

    def restart(self) -> None:
        """Forget the pools and the memory of an earlier start."""
        self.engines.clear()
        self.workers.clear()
        self.overrides.clear()
        self.asked = 0.0

    def read(self, line: str) -> Found:
        """Return what one line states, and keep what counts per engine or per worker."""
        found = super().read(line)
        match = self.ENGINE_NAME.search(line)
        name = match.group(1) if match else ""
        if self.CONFIGURED.search(line):
            self.engines.pop(name, None)
            if not name:
                self.workers.clear()
                self.overrides.clear()
        engine = self.engines.setdefault(name, {})
        for quantity, pattern, number in self.PER_ENGINE:
            match = pattern.search(line)
            if match is not None:
                self.score += 2
                _keep_least(engine, quantity, number(match.group(1)), line)
        match = OVERRIDE.search(line)
        if match is not None:
            engine["pool_blocks"] = (float(match.group(2)), line)
            self.overrides.append((int(match.group(1)), int(match.group(2))))
        match = ASKED.search(line)
        if match is not None:
            self.asked = float(match.group(1))
        worker = self.WORKER_NAME.search(line)
        for memory in self.PER_WORKER:
            match = memory.search(line)
            if match is not None:
                self.score += 2
                _keep_least(self.workers, worker.group(0) if worker else "", to_bytes(match.group(1), match.group(2)), line)
        match = self.IN_USE.search(line)
        if match is not None:
            self.workers[worker.group(0) if worker else ""] = (float(match.group(1)), line)
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
        if self.workers and "num_gpu_blocks_override" in self.found:
            found.update(self._overridden())
        elif self.workers:
            # Every worker holds as many blocks as the one with the least memory.
            least, line = min(self.workers.values())
            count = len(self.workers)
            found["pool_bytes"] = (least * count, line if count == 1 else f"{count} workers, the one with the least memory: {line}")
        return found

    def _overridden(self) -> Sourced:
        """Return the memory of a pool that was set in blocks: it does not take the memory that vLLM had found for it."""
        rooms = [room_of(size, self.asked) for _, (size, _) in sorted(self.workers.items())]
        pools = [pool for pool in pair(rooms, self.overrides) if pool is not None]
        if not pools or len(pools) != len(rooms):
            return {}
        words = pools[0].text if len(pools) == 1 else f"{len(pools)} workers, the first: {pools[0].text}"
        return {"pool_bytes": (sum(pool.size for pool in pools), f"{words}: {self.found['num_gpu_blocks_override'][1]}")}

    def notes(self) -> list[str]:
        """Return what the printed figures hide."""
        notes = []
        for _, line in self.workers.values():
            if re.search(r"KV cache size: [0-9.]+ GB\b", line):
                notes.append("the log prints the pool in GB, and engines mean 2^30 bytes by it: it is read as GiB")
                break
        if "num_gpu_blocks_override" in self.found:
            notes.append(f"num_gpu_blocks_override={self.found['num_gpu_blocks_override'][0]}: the pool is artificial")
        for values in self.engines.values():
            if "pool_blocks" in values and "max_concurrency" in values and "max_model_len" in self.found and "pool_tokens" not in values:
                blocks = values["pool_blocks"][0]
                size = round(values["max_concurrency"][0] * float(self.found["max_model_len"][0]) / blocks) if blocks else 0
                if size in {8, 16, 32, 64, 128}:
                    notes.append(
                        f"{blocks:,.0f} blocks x {size} tokens = {blocks * size:,.0f} tokens; {size} is the block size that the concurrency implies"
                    )
            if "pool_tokens" in values and "max_concurrency" in values and "max_model_len" in self.found:
                tokens, length = values["pool_tokens"][0], float(self.found["max_model_len"][0])
                if abs(values["max_concurrency"][0] - tokens / length) > max(0.011, 0.011 * tokens / length):
                    notes.append(
                        f"{tokens:,.0f} tokens / max length {length:,.0f} = {tokens / length:.2f}, and the engine states {values['max_concurrency'][0]:g}"
                        " requests: window or state layers, or several KV groups; capacity is the engine's figure and not that quotient"
                    )
                break
        return notes


def _keep_least(kept: dict[str, tuple[float, str]], name: str, value: float, line: str) -> None:
    """Keep the least of figures that ranks of one engine print: all of them hold as much as the one with the least."""
    if name not in kept or value < kept[name][0] - _LESS:
        kept[name] = (value, line)
