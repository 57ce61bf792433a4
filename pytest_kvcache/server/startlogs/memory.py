"""The memory lines of a start-up log, part by part for each worker: card, share, weights, activations, graphs, context, pool.

Sources: vLLM 0.32 ``v1/worker/gpu_worker.py``, ``gpu_model_runner.py`` and ``utils/mem_utils.py``, V0's ``worker/worker.py``; SGLang 0.5
``model_executor/model_runner.py``; llama.cpp b11434 ``src/llama-model.cpp``, ``llama-kv-cache.cpp`` and ``llama-context.cpp``;
TensorRT-LLM ``kvCacheManager.cpp`` and ``_torch/pyexecutor/_util.py``. All of them divide by 2^30 (2^20) and some print "GB" all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import StartMemory, ValueRecord
from pytest_kvcache.server.redaction import redact
from pytest_kvcache.server.rootcause import log_lines
from pytest_kvcache.server.startlogs.overrides import ASKED, OVERRIDE, pair, room_of
from pytest_kvcache.server.startlogs.reading import FLOAT

_GIB, _MIB = float(1 << 30), float(1 << 20)
_MOST_WORKERS = 4096
_HINT = re.compile(r"GiB|GB|MiB|bytes|emory|KV cache|LLM engine|server_args=|Overriding num_gpu_blocks", re.IGNORECASE)
_START = re.compile(r"Initializing an? [^\n]{0,80}LLM engine |server_args=ServerArgs\(|vLLM API server version ")
_WORKER = re.compile(r"\(((?:Vllm)?(?:Ray)?Worker[\w =]{0,60}?|EngineCore(?:_DP[0-9]{1,5})?)(?:,? ?pid=([0-9]{1,9}))?(?:, ip=[0-9a-fA-F.:]{1,45})?\)")
_RANK = re.compile(r"^\W{0,3}[0-9-]{8,10} [0-9:.,]{5,16}((?: [A-Z]{2,5}[0-9]{1,4}){1,6})\]")

# Part, pattern and the size of its unit; the first group is the figure.
_ONE: tuple[tuple[str, re.Pattern[str], float], ...] = (
    ("weights", re.compile(rf"\b(?:model weights took|Model loading took) {FLOAT} ?(?:GiB|GB)", re.IGNORECASE), _GIB),
    ("weights", re.compile(rf"\bmodel weights take {FLOAT} ?GiB"), _GIB),
    ("weights", re.compile(rf"\bweights memory: {FLOAT} ?GiB"), _GIB),
    ("weights", re.compile(rf"Actual usage is {FLOAT} GiB for weight\b"), _GIB),
    ("consumed", re.compile(rf"Actual usage is {FLOAT} GiB for consumed memory \(weights \+ non-torch\)"), _GIB),
    ("consumed", re.compile(rf"\btotal consumed \(from mem_get_info\): {FLOAT} ?GiB"), _GIB),
    ("activation", re.compile(rf"\b{FLOAT} GiB for peak activation"), _GIB),
    ("activation", re.compile(rf"PyTorch activation peak memory takes {FLOAT} ?GiB"), _GIB),
    ("activation", re.compile(rf"\btorch peak memory increase: {FLOAT} ?GiB"), _GIB),
    ("context", re.compile(rf"\bnon_torch_memory takes {FLOAT} ?GiB"), _GIB),
    ("context", re.compile(rf"\b{FLOAT} GiB for non-torch memory"), _GIB),
    ("context", re.compile(rf"\bnon_torch_memory={FLOAT} ?GiB"), _GIB),
    ("context", re.compile(rf"\bnon-torch forward increase memory: {FLOAT} ?GiB"), _GIB),
    ("weights", re.compile(rf"model weights \(inside torch\) in memory usage profiling: {FLOAT} GiB"), _GIB),
    ("consumed", re.compile(rf"Peak memory during memory usage profiling \(torch \+ non-torch\): {FLOAT} GiB"), _GIB),
    ("total", re.compile(rf"\bdevice total memory {FLOAT} GiB"), _GIB),
    ("pool_allowed", re.compile(rf"available KV cache memory when calculating max tokens: {FLOAT} GiB"), _GIB),
    ("graphs", re.compile(rf"\b{FLOAT} GiB for CUDAGraph memory"), _GIB),
    ("graphs", re.compile(rf"Graph capturing finished in [0-9.]{{1,12}} secs, took {FLOAT} GiB"), _GIB),
    ("graphs", re.compile(rf"CUDA graph pool memory: {FLOAT} GiB \(actual\)"), _GIB),
    ("graphs_planned", re.compile(rf"CUDA graph pool memory: [0-9.]{{1,20}} GiB \(actual\), {FLOAT} GiB \(estimated\)"), _GIB),
    ("graphs", re.compile(rf"Capture cuda graph end\.[^\n]{{0,80}}?\bmem usage={FLOAT} ?GB"), _GIB),
    ("total", re.compile(rf"\btotal_gpu_memory[ =]\(?{FLOAT} ?GiB"), _GIB),
    ("total", re.compile(rf"Free memory on device[^(]{{0,40}}\([0-9.]{{1,20}}/{FLOAT} GiB\)"), _GIB),
    ("total", re.compile(rf"(?:Explicitly|Auto) set \([0-9.]{{1,20}}/{FLOAT}\)+ GiB for KV cache"), _GIB),
    ("budget", re.compile(rf"on node [0-9]{{1,6}}, with {FLOAT} GiB requested memory for the worker"), _GIB),
    ("consumed", re.compile(rf"\b{FLOAT} GiB memory was consumed by non-kv usages"), _GIB),
    ("by_hand", re.compile(rf"Explicitly set \({FLOAT}/[0-9.]{{1,20}}\)+ GiB for KV cache"), _GIB),
    ("by_hand", re.compile(rf"\breserved {FLOAT} GiB memory for KV Cache as specified"), _GIB),
    ("total", re.compile(rf"Memory usage when calculating max tokens in paged kv cache: total: {FLOAT} GiB"), _GIB),
    ("free_at_start", re.compile(rf"Free memory on device[^(]{{0,40}}\({FLOAT}/"), _GIB),
    ("free_at_start", re.compile(rf"\bInitial free memory:? {FLOAT} GiB"), _GIB),
    ("free_at_start", re.compile(rf"Load weight begin\. avail mem={FLOAT} ?GB"), _GIB),
    ("weights", re.compile(rf"Load weight end\.[^\n]{{0,200}}?\bmem usage={FLOAT} ?GB"), _GIB),
    ("budget", re.compile(rf"Desired GPU memory utilization is \([0-9.]{{1,20}}, {FLOAT} GiB\)"), _GIB),
    ("budget", re.compile(rf"desired GPU memory utilization \([0-9.]{{1,20}}, {FLOAT} GiB\)"), _GIB),
    ("budget", re.compile(rf"\bRequested memory: [0-9.]{{1,20}} \(util\), {FLOAT} GiB"), _GIB),
    ("budget", re.compile(rf"x gpu_memory_utilization \([0-9.]{{1,20}}\) = {FLOAT} ?GiB"), _GIB),
    ("utilization", re.compile(rf"Desired GPU memory utilization is \({FLOAT},"), 1.0),
    ("utilization", re.compile(rf"desired GPU memory utilization \({FLOAT},"), 1.0),
    ("utilization", re.compile(rf"x gpu_memory_utilization \({FLOAT}\)"), 1.0),
    ("utilization", re.compile(rf"\bgpu_memory_utilization={FLOAT}\s*$"), 1.0),
    ("utilization", re.compile(rf"\bRequested memory: {FLOAT} \(util\)"), 1.0),
    ("utilization", re.compile(rf"\bserver_args=ServerArgs\([^\n]{{0,6000}}?\bmem_fraction_static={FLOAT}"), 1.0),
    # "in use" is what this worker found for its pool: it allocates fewer blocks where another one found less, or where they were overridden
    ("pool_allowed", re.compile(r"Current kv cache memory in use is ([0-9]{1,18}) bytes"), 1.0),
    ("pool_allowed", re.compile(rf"Current kv cache memory in use is {FLOAT} GiB"), _GIB),
    ("pool_allowed", re.compile(rf"\breserved {FLOAT} GiB memory for KV Cache as specified"), _GIB),
    ("pool_allowed", re.compile(rf"(?:Explicitly|Auto) set \({FLOAT}/[0-9.]{{1,20}}\)+ GiB for KV cache"), _GIB),
    ("pool", re.compile(rf"\[MemUsageChange\] Allocated {FLOAT} GiB for max tokens\b"), _GIB),
    ("pool", re.compile(r"Allocate ([0-9]{1,18}) bytes for k/v cache"), 1.0),
    ("pool_allowed", re.compile(rf"\bAvailable KV cache memory: {FLOAT} GiB"), _GIB),
    ("pool_allowed", re.compile(rf"reserved for KV Cache is {FLOAT} ?GiB", re.IGNORECASE), _GIB),
    ("pool_allowed", re.compile(rf"\bkv_cache_size={FLOAT} ?GiB"), _GIB),
)  # fmt: skip
# What a whole engine states of all its workers: how the model is split, and whether the graphs were kept room for.
_SPLIT: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("tensor_parallel", re.compile(r"\btensor_parallel_size=([0-9]{1,5})\b")),
    ("pipeline_parallel", re.compile(r"\bpipeline_parallel_size=([0-9]{1,5})\b")),
    ("tensor_parallel", re.compile(r"\bserver_args=ServerArgs\([^\n]{0,6000}?\btp_size=([0-9]{1,5})\b")),
    ("pipeline_parallel", re.compile(r"\bserver_args=ServerArgs\([^\n]{0,6000}?\bpp_size=([0-9]{1,5})\b")),
)
_TOKENS = re.compile(r"\bKV cache size: ([0-9][0-9,]{0,17}) tokens")
_NOT_PLANNED = "CUDA graph memory profiling is disabled"
_UNITS = {
    "pool_tokens": "tokens",
    "utilization": "ratio",
    "tensor_parallel": "",
    "pipeline_parallel": "",
    "blocks": "blocks",
    "blocks_allowed": "blocks",
}
_SGLANG_POOL = re.compile(
    rf"KV Cache is allocated\.[^\n]{{0,200}}?(?:K size: {FLOAT} (?:GB|GiB), V size: {FLOAT} (?:GB|GiB)|KV size: {FLOAT} (?:GB|GiB))"
)
_LLAMA = re.compile(
    rf"\b(?:load_tensors|llm_load_tensors|llama_model_load\w{{0,20}}|llama_kv_cache\w{{0,20}}|llama_memory_recurrent|llama_context|sched_reserve|llama_new_context_with_model):"
    rf"\s+(\w{{2,30}})\s+(model|KV|RS|compute|output)\s+buffer size =\s*{FLOAT} MiB"
)
_LLAMA_CONTEXT = re.compile(r"\bllama_context: constructing llama_context")
_LLAMA_PARTS = {"model": "weights", "KV": "pool", "RS": "pool", "compute": "workspace", "output": "workspace"}
_ADDED_UP = frozenset({"model", "KV", "RS"})


@dataclass
class _Worker:
    """What one worker's lines stated so far: part to (bytes, line)."""

    pid: int | None = None
    parts: dict[str, tuple[float, str]] = field(default_factory=dict)


@dataclass
class _Engine:
    """What is printed once for all workers: how the model is split, the pools that were overridden (per engine), and the memory asked for."""

    split: dict[str, tuple[float, str]] = field(default_factory=dict)
    overrides: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    tokens: dict[str, tuple[float, str]] = field(default_factory=dict)
    asked: float = 0.0
    graphs_planned: bool = True

    def take(self, line: str) -> None:
        """Keep what one line states."""
        for part, pattern in _SPLIT:
            match = pattern.search(line)
            if match is not None:
                self.split[part] = (float(match.group(1)), line)
        match = OVERRIDE.search(line)
        if match is not None:
            self.overrides.setdefault(_engine_of(_who(line)[0]), []).append((int(match.group(1)), int(match.group(2)), line))
        match = _TOKENS.search(line)
        if match is not None:
            self.tokens[_engine_of(_who(line)[0])] = (float(match.group(1).replace(",", "")), line)
        match = ASKED.search(line)
        if match is not None:
            self.asked = float(match.group(1))
        if _NOT_PLANNED in line:
            self.graphs_planned = False


def read_memory(text: str, endpoint: int = 0) -> list[StartMemory]:
    """Return what a start-up log states of memory, one record a worker in the order of their names; [] where it states nothing. Never raises.

    Of a log with several starts the last one counts. ``pool`` of a vLLM worker is what the worker with the least room allows, since all
    of them hold as many blocks, or what the blocks take that were set by hand; ``pool_allowed`` is what this one had room for.
    """
    workers: dict[str, _Worker] = {}
    engine = _Engine()
    contexts = 0
    buffers: dict[tuple[str, str, int], tuple[float, str]] = {}
    for line in log_lines(text[: 8 << 20], 8000):
        if _LLAMA_CONTEXT.search(line):
            contexts += 1
            continue
        if _HINT.search(line) is None:
            continue
        if _START.search(line):
            _begin(workers, engine, line)
        engine.take(line)
        llama = _LLAMA.search(line)
        if llama is not None:
            device, kind, size = llama.groups()
            key = (_device(device), kind, contexts)
            held = float(size) * _MIB
            # a compute buffer is reserved again while the graph is sized: the largest stays; caches of several kinds and split weights add up
            before = buffers.get(key, (0.0, line))[0]
            buffers[key] = (before + held if kind in _ADDED_UP else max(before, held), line)
            continue
        _take(workers, line)
    for (device, kind, _), (held, line) in buffers.items():
        parts = workers.setdefault(device, _Worker()).parts
        part = _LLAMA_PARTS[kind]
        parts[part] = (parts[part][0] + held if part in parts else held, line)
    _settle(workers, engine)
    return [
        StartMemory(name, worker.pid, endpoint, {part: _record(part, held, line) for part, (held, line) in worker.parts.items()})
        for name, worker in sorted(workers.items(), key=lambda item: _order(item[0]))
        if worker.parts
    ]


def _begin(workers: dict[str, _Worker], engine: _Engine, line: str) -> None:
    """Forget an earlier start: of one engine where its line says so, else of all. The memory that was asked for is printed before it."""
    match = _WORKER.search(line)
    name = match.group(1) if match else ""
    if name.startswith("EngineCore_DP"):
        workers.pop(name, None)
        engine.overrides.pop(_engine_of(name), None)
        engine.tokens.pop(_engine_of(name), None)
        return
    workers.clear()
    engine.overrides.clear()
    engine.tokens.clear()
    engine.graphs_planned = True
    if "API server version" in line:
        engine.asked = 0.0


def _take(workers: dict[str, _Worker], line: str) -> None:
    found: dict[str, float] = {}
    for part, pattern, size in _ONE:
        match = pattern.search(line)
        if match is not None:
            found.setdefault(part, float(match.group(1)) * size)
    match = _SGLANG_POOL.search(line)
    if match is not None:
        k_size, v_size, both = match.groups()
        found["pool"] = (float(both) if both else float(k_size) + float(v_size)) * _GIB
    if not found:
        return
    name, pid = _who(line)
    if name not in workers and len(workers) >= _MOST_WORKERS:
        return
    worker = workers.setdefault(name, _Worker())
    worker.pid = worker.pid or pid
    is_pool = match is not None
    for part, held in found.items():
        known = worker.parts.get(part)
        # several caches in one rank (full attention, sliding window, state) print a line each
        worker.parts[part] = (held + known[0] if part == "pool" and is_pool and known else held, line)


def _who(line: str) -> tuple[str, int | None]:
    match = _WORKER.search(line)
    if match is not None:
        return match.group(1).strip(), int(match.group(2)) if match.group(2) else None
    match = _RANK.match(line)
    return (match.group(1).strip() if match else ""), None


def _device(name: str) -> str:
    """Return the device that holds a buffer: memory pinned for a card, and mapped or repacked weights, are the host's."""
    return "CPU" if name.startswith("CPU") or name.endswith("_Host") else name


def _engine_of(name: str) -> str:
    """Return the number of the data-parallel engine that a worker's or an engine's name holds; "" without one."""
    match = re.search(r"DP([0-9]{1,5})", name)
    return match.group(1) if match else ""


def _settle(workers: dict[str, _Worker], engine: _Engine) -> None:
    """Fill in what several lines tell together: the pool in use, and the context where only weights and it are known together."""
    common = workers[""].parts.get("utilization") if len(workers) > 1 and "" in workers else None
    rooms: dict[str, list[_Worker]] = {}
    for name, worker in sorted(workers.items(), key=lambda item: _order(item[0])):
        parts = worker.parts
        if common is not None:
            parts.setdefault("utilization", common)  # the arguments are printed once for all ranks
        if "pool_allowed" in parts:
            rooms.setdefault(_engine_of(name), []).append(worker)
        if "context" not in parts and "consumed" in parts and "weights" in parts:
            parts["context"] = (max(parts["consumed"][0] - parts["weights"][0], 0.0), parts["consumed"][1])
        if "graphs_planned" in parts and not engine.graphs_planned:
            del parts["graphs_planned"]
        if "graphs_planned" in parts and "activation" in parts:
            # since 0.21 the peak activation that vLLM prints holds the graphs that it kept room for
            held, line = parts["activation"]
            parts["activation"] = (max(held - parts["graphs_planned"][0], 0.0), line)
        for part, stated in engine.split.items():
            parts.setdefault(part, stated)
        if (tokens := engine.tokens.get(_engine_of(name))) is not None:
            parts["pool_tokens"] = tokens
    for name, mine in rooms.items():
        _pools(mine, engine, engine.overrides.get(name, []))


def _pools(workers: list[_Worker], engine: _Engine, overrides: list[tuple[int, int, str]]) -> None:
    """Fill in the pool of each worker of one engine: all hold as many blocks as the one with the least room, or as many as were set by hand."""
    allowed = [worker.parts["pool_allowed"] for worker in workers]
    pools = pair([room_of(held, engine.asked) for held, _ in allowed], [(found, blocks) for found, blocks, _ in overrides])
    for worker, pool in zip(workers, pools, strict=True):
        if not overrides:
            worker.parts.setdefault("pool", min(allowed))
            continue
        line = overrides[0][2]
        worker.parts.pop("pool", None)
        worker.parts["blocks"] = (float(overrides[0][1]), line)
        if pool is not None:
            worker.parts["blocks_allowed"] = (float(pool.found), line)
            worker.parts["pool"] = (pool.size, f"{pool.text}: {line}")


def _order(name: str) -> tuple[str, int]:
    digits = re.search(r"([0-9]{1,6})\D*$", name)
    return (name[: digits.start(1)] if digits else name, int(digits.group(1)) if digits else 0)


def _record(part: str, held: float, line: str) -> ValueRecord:
    source = redact(" ".join(line.split()))
    source = "start-up log: " + (source if len(source) <= 200 else source[:199] + "…")
    unit = _UNITS.get(part, "bytes")
    return ValueRecord.of(Reading(held if unit == "ratio" else float(round(held)), unit, source))
