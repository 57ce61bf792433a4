"""What an engine printed or exposes of its pool, in the planner's terms: per engine and per worker, each with how exactly it is told."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_kvcache.quantities import Reading

if TYPE_CHECKING:
    from pytest_kvcache.observe.inspecting import Inspection

GIB = 1 << 30
_UNITS = {"GiB": GIB, "GB": GIB, "MiB": 1 << 20, "MB": 1 << 20}  # engines mean powers of 1024 by GB
_PRINTED = re.compile(r"[0-9]{1,9}\.([0-9]{1,9}) ?(GiB|GB|MiB|MB)\b")
_WORKERS = re.compile(r"\b([0-9]{1,5}) workers\b")
_SUMMED = re.compile(r"\bsum over ([0-9]{1,5}) (?:engines|data-parallel ranks)")
_NEEDED = re.compile(
    r"max seq len \(([0-9]{1,12})\), \(([0-9]{1,9}(?:\.[0-9]{1,9})?) GiB KV cache is needed, which is larger than the available KV cache memory"
    r" \(([0-9]{1,9}(?:\.[0-9]{1,9})?) GiB\)(?:[^\n]{0,80}?estimated maximum model length is ([0-9]{1,12}))?"
)
_STORED = re.compile(r"max seq len \(([0-9]{1,12})\) is larger than the maximum number of tokens that can be stored in KV cache \(([0-9]{1,12})\)")
_SWAP = re.compile(r"\bblocks: [0-9]{1,18}, # CPU blocks: ([0-9]{1,12})\b")
_MODEL = re.compile(r"(?:\bmodel=|\bmodel_path=)['\"]([^'\"\n]{1,300})['\"]")
ENGINE_OF = {
    "vllm": "vllm", "ray_vllm": "vllm", "llm_d_sim": "vllm", "nim": "vllm", "dynamo": "vllm", "sglang": "sglang", "llamacpp": "llamacpp",
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A figure as told: from ``low`` to ``high``, with where it is from. Printed decimals are rounded; labels and counts are exact."""

    low: float
    high: float
    source: str = ""

    @property
    def middle(self) -> float:
        """The figure itself."""
        return (self.low + self.high) / 2

    def holds(self, low: float, high: float) -> bool:
        """Whether a figure of ours, itself a span, can be this one."""
        return low <= self.high + 1e-9 and high >= self.low - 1e-9


@dataclass(frozen=True)
class Told:
    """What is told of one engine. None stands for what is not told; ``settings`` are those of ``EngineShape`` that the engine states.

    ``kv_bytes`` is one worker's pool. ``needed`` and ``estimate`` are of a start that failed: the memory that one request of ``max_model_len`` needs, and
    the longest length that the engine offers instead. ``parts`` is the memory of a card as its log adds it up, in GiB. ``model`` is the name that its log
    gives the model. ``swap_blocks`` are those that V0 keeps in host memory.
    """

    engine: str = ""
    blocks: Span | None = None
    tokens: Span | None = None
    concurrency: Span | None = None
    kv_bytes: Span | None = None
    needed: Span | None = None
    estimate: Span | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    model: str = ""
    old: bool = False
    swap_blocks: int | None = None
    cpu: bool = False


def told(found: Inspection, log: str = "") -> Told:
    """Return what an inspection says. ``log`` is the text of a start-up log, where one was given: it adds the card's parts and a failed start."""
    from pytest_kvcache.engines import clean
    from pytest_kvcache.server.startlogs.ledger import memory_parts

    q = found.quantities
    workers = _count(_WORKERS, q.get("pool_bytes"))
    engines = max(_count(_SUMMED, q.get("pool_tokens")), len(found.ranks), 1)
    length, size = _number(q.get("max_model_len")), _number(q.get("block_size"))
    settings: dict[str, Any] = {}
    dtype = q.get("kv_dtype")
    if isinstance(dtype, Reading) and str(dtype.value) != "auto":
        settings["kv_dtype"] = _pair(str(dtype.value))
    override = _number(q.get("num_gpu_blocks_override"))
    if override:
        settings["num_gpu_blocks_override"] = override
    caching, seats = q.get("prefix_caching"), _number(q.get("max_num_seqs"))
    if isinstance(caching, Reading):
        settings["prefix_caching"] = bool(caching.value)
    if seats:
        settings["max_num_seqs"] = seats
    if found.engine == "llamacpp" and seats and length:
        settings |= _slots(seats, length, _number(q.get("pool_tokens")))
    if engines > 1 and ENGINE_OF.get(found.engine) == "vllm":
        settings["dp"] = engines
    needed = estimate = None
    kv_bytes = None if override else _bytes(q.get("pool_bytes"), max(workers, engines if found.engine == "sglang" else 1))
    tokens = _span(q.get("pool_tokens"), engines)
    if (match := _NEEDED.search(log)) is not None:
        length = int(match.group(1))
        needed, kv_bytes = _gib(match.group(2)), _gib(match.group(3))
        estimate = Span(int(match.group(4)), int(match.group(4)), "the log's estimate") if match.group(4) else None
    elif (match := _STORED.search(log)) is not None:
        length = int(match.group(1))
        tokens = Span(int(match.group(2)), int(match.group(2)), "the log of a start that failed")
    concurrency = _span(q.get("max_concurrency"), engines if _SUMMED.search(_source(q.get("max_concurrency"))) else 1)
    if length is None and tokens is not None and concurrency is not None and "kv_cache_size_tokens" in tokens.source:
        length = _length(tokens.middle, concurrency)
    source = _source(q.get("pool_tokens")) + _source(q.get("pool_bytes"))
    return Told(
        engine=ENGINE_OF.get(found.engine, "paged" if found.engine else ""),
        blocks=_span(q.get("pool_blocks"), engines),
        tokens=tokens,
        concurrency=concurrency,
        kv_bytes=kv_bytes,
        needed=needed,
        estimate=estimate,
        block_size=size,
        max_model_len=length,
        settings=settings,
        parts=memory_parts(log) if log else {},
        model=clean(match.group(1), 100) if (match := _MODEL.search(log)) else "",
        old=_is_old(found, log),
        swap_blocks=int(host[-1]) or None if (host := _SWAP.findall(log)) else None,
        cpu="CPU KV cache size" in source or "GiB for KV cache on node" in source,
    )


def _is_old(found: Inspection, log: str) -> bool:
    """Whether it is vLLM's engine V0, which keeps no null block."""
    pool, usable = found.quantities.get("pool_blocks"), found.quantities.get("usable_blocks")
    same = isinstance(pool, Reading) and isinstance(usable, Reading) and pool.value == usable.value
    return found.engine == "vllm" and (same or re.search(r"# ?(?:GPU|CUDA|cuda) blocks: ", log) is not None)


def _length(tokens: float, concurrency: Span) -> int | None:
    """Return the max length that vLLM's labels imply: since 0.22 their tokens are int(concurrency x max length). None where none does."""
    share = concurrency.middle
    if not 1 <= share < 1e9 or "kv_cache_max_concurrency" not in concurrency.source:
        return None
    least = max(int(tokens / share), 1)
    return next((length for length in range(least, least + 3) if int(share * length) == round(tokens)), None)


def _slots(seats: int, length: int, cells: int | None) -> dict[str, Any]:
    """Return llama.cpp's slots, and whether they share one cache: a slot of a shared one has all its cells."""
    if seats == 1 or cells not in (length, length * seats):
        return {"slots": seats}
    return {"slots": seats, "unified": cells == length}


def _source(value: object) -> str:
    return value.source if isinstance(value, Reading) else ""


def _count(pattern: re.Pattern[str], value: object) -> int:
    match = pattern.search(_source(value))
    return max(int(match.group(1)), 1) if match else 1


def _number(value: object) -> int | None:
    if not isinstance(value, Reading) or isinstance(value.value, (str, bool)) or not math.isfinite(value.number()) or value.number() < 1:
        return None
    return int(value.number())


def _span(value: object, share: int) -> Span | None:
    if not isinstance(value, Reading) or isinstance(value.value, str) or not math.isfinite(value.number()):
        return None
    number = value.number() / share
    printed = value.unit == "requests" and value.source.startswith("start-up log")
    half = 0.005 + 1e-9 if printed else 1e-9 * abs(number)
    return Span(number - half, number + half, value.source)


def _bytes(value: object, share: int) -> Span | None:
    if not isinstance(value, Reading) or isinstance(value.value, str) or value.number() <= 0:
        return None
    number = value.number() / share
    matches = _PRINTED.findall(value.source)
    half = 0.0
    if matches and "bytes" not in value.source.replace("kv_cache_memory_bytes", ""):
        decimals, unit = matches[-1]
        # two figures printed apart (keys and values) round twice
        half = (
            0.5 * 10.0 ** -len(decimals) * _UNITS[unit] * len(matches[-2:])
            if "V size" in value.source
            else 0.5 * 10.0 ** -len(decimals) * _UNITS[unit]
        )
    return Span(number - half, number + half, value.source)


def _gib(text: str) -> Span:
    half = 0.5 * 10.0 ** -len(text.partition(".")[2]) * GIB
    return Span(float(text) * GIB - half, float(text) * GIB + half, "the log of a start that failed")


def _pair(text: str) -> str:
    """Return ``q8_0/q4_0`` of llama.cpp's "K q8_0, V q4_0"; any other name as it is."""
    match = re.fullmatch(r"K (\w{1,16}), V (\w{1,16})", text)
    return f"{match.group(1)}/{match.group(2)}" if match else text
