"""What a change of the pool means: memory, another way of counting tokens, or a fault of sharding.

The size that an engine prints in tokens is a definition and not a measurement: builds and models with window layers count differently. Blocks
and bytes are what is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_kvcache import units
from pytest_kvcache.analysis.three import beside
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import RunRecord

_SAME = 0.02
_NEEDED = 0.1
_GIB = 1 << 30
_BLOCK = 128
_EXACT = 0.005
_MOST_RANKS = 64
_NARROW = ("fp8", "int8", "q8_0", "e4m3", "e5m2")
_HALVED = (1.90, 2.02)
"""What a cache of half the width gives once blocks are rounded; less says that some layers kept theirs."""


def notes(before: RunRecord, after: RunRecord) -> list[str]:
    """Return what the two pools tell beside their sizes; empty where they are alike or not told."""
    tokens, blocks, size = (_ratio(name, before, after) for name in ("pool_tokens", "pool_blocks", "pool_bytes"))
    found = []
    if tokens is not None and not _alike(tokens):
        found += _tokens(tokens, blocks, size, before, after)
    main = blocks if blocks is not None else tokens
    if main is not None and main < 1 - _SAME:
        less = f"the pool lost {(1 - main) * 100:.1f} % of its {'blocks' if blocks is not None else 'tokens'}"
        if before.engine_version != after.engine_version:
            less += " with another build: the smaller figure may be the right one, if the old pool went over its budget; the card's ledger tells"
        found.append(less)
    return found + _line(before, after)


def unneeded(before: Sequence[Analysis], after: Sequence[Analysis]) -> list[str]:
    """Return what a larger pool is worth to a load that never used a tenth of the smaller one: nothing. Empty where that is not so, or not told."""
    if not before or not after:
        return []
    sizes = [_number(name, side[0].run.record) for name in ("pool_tokens", "pool_blocks", "pool_bytes") for side in (before, after)]
    grown = next(((old, new) for old, new in zip(sizes[::2], sizes[1::2], strict=True) if old and new), None)
    if grown is None or grown[1] <= grown[0] * (1 + _SAME):
        return []
    tops = []
    for side in (before, after):
        known = [(value.number(), one) for one in side if isinstance(value := one.values.get("usage.peak"), Reading) and one.facts.loaded]
        if not known:
            return []
        tops.append(max(known, key=lambda pair: pair[0]))
    if max(top for top, _ in tops) >= _NEEDED:
        return []
    top, fullest = tops[0]
    return [
        f"the pool grew {grown[1] / grown[0]:.2f} times, and this load never used more than {units.show(top, 'ratio')} of the smaller one ({beside(fullest)}): "
        f"below {_NEEDED * 100:g} % a saving of KV memory is worth nothing to it, so judge the change by what it cost (prefix hits, time to first token, quality)"
    ]


def _line(before: RunRecord, after: RunRecord) -> list[str]:
    """Return the fixed part and the rate of a request's cost, where two max lengths of one build, type and parallelism tell two points of a line.

    A request of max length costs pool / concurrency; with state or window layers that is no multiple of its length.
    """
    if before.engine_version != after.engine_version or any(_text(name, before) != _text(name, after) for name in ("kv_dtype", "block_size")):
        return []
    points = []
    for record in (before, after):
        length, requests, pool = (_number(name, record) for name in ("max_model_len", "max_concurrency", "pool_bytes"))
        if not length or not requests or not pool or "num_gpu_blocks_override" in record.config:
            return []
        # two printed decimals of each figure, and a last block that is not full
        doubt = 0.005 / requests + 0.005 * _GIB / pool + (_number("block_size", record) or _BLOCK) / length
        points.append((length, pool / requests, doubt * pool / requests))
    (first, cost, doubt), (second, later, more) = points
    if _alike(second / first):
        return []
    rate = (later - cost) / (second - first)
    fixed = cost - rate * first
    error = (doubt * second + more * first) / abs(second - first)
    lengths = (
        f"a request of {first:,.0f} tokens takes {units.show_bytes(cost)} (pool / concurrency) and one of {second:,.0f} {units.show_bytes(later)}"
    )
    if rate <= 0 or fixed < -error:
        return [f"{lengths}: no fixed part and rate explain both, so memory, parallelism or the way of counting changed too"]
    if fixed <= error:
        return []
    return [f"{lengths}: about {units.show_bytes(fixed)} for each request and {rate:,.0f} B a token; memory / tokens of one of them is no rate"]


def _number(name: str, record: RunRecord) -> float | None:
    """Return a positive number that a server states; None where it does not."""
    value = record.config[name].to_value() if name in record.config else None
    number = value.number() if isinstance(value, Reading) and not isinstance(value.value, str) else 0.0
    return number if 0 < number < math.inf else None


def _tokens(tokens: float, blocks: float | None, size: float | None, before: RunRecord, after: RunRecord) -> list[str]:
    """Return what a changed number of tokens is: relabelled, a narrower type, or a whole multiple that memory does not explain."""
    found = []
    times = f"{tokens:.2f} times the tokens"
    narrower = _text("kv_dtype", before) != _text("kv_dtype", after) and any(word in _text("kv_dtype", after) for word in _NARROW)
    size_of_block = _ratio("block_size", before, after)
    if blocks is not None and _alike(blocks) and (size_of_block is None or _alike(size_of_block)):
        found.append(f"{times} in the same number of blocks: tokens are counted another way, and the memory is the same")
    elif size is not None and _alike(size) and not narrower:
        found.append(f"{times} in the same memory: part of that may be counting; whether it is room for requests, only their peak tells")
    if narrower and tokens > 1 + _SAME and not _HALVED[0] <= tokens <= _HALVED[1]:
        found.append(f"{times} with the type {_text('kv_dtype', after)}, where about 2 were to be expected: some layers may have kept their type")
    ranks = round(tokens) if tokens >= 1 else round(1 / tokens)
    exact = abs(math.log(tokens if tokens >= 1 else 1 / tokens) - math.log(ranks)) <= _EXACT if ranks else False
    resized = (size is not None and not _alike(size)) or (size_of_block is not None and not _alike(size_of_block))
    if exact and 2 <= ranks <= _MOST_RANKS and not narrower and not resized and before.engine_version != after.engine_version:
        found.append(
            f"the pool changed by {ranks} times, to {_EXACT * 100:g} %: with another build that points at how heads are shared among ranks, not at memory"
        )
    return found


def _alike(ratio: float) -> bool:
    return abs(ratio - 1) <= _SAME


def _ratio(name: str, before: RunRecord, after: RunRecord) -> float | None:
    """Return after over before of a size that both servers state; None where one does not."""
    first, second = _number(name, before), _number(name, after)
    return second / first if first and second else None


def _text(name: str, record: RunRecord) -> str:
    held = record.config.get(name)
    return str(held.value).lower() if held is not None and held.value is not None else ""
