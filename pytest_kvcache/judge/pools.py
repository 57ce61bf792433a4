"""What a change of the pool means: memory, another way of counting tokens, or a fault of sharding.

The size that an engine prints in tokens is a definition and not a measurement: builds and models with window layers count differently. Blocks
and bytes are what is there.
"""

from __future__ import annotations

import math

from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import RunRecord

_SAME = 0.02
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
    return found


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
    values = [record.config[name].to_value() if name in record.config else None for record in (before, after)]
    numbers = [value.number() for value in values if isinstance(value, Reading) and not isinstance(value.value, str)]
    return numbers[1] / numbers[0] if len(numbers) == 2 and numbers[0] > 0 and numbers[1] > 0 else None


def _text(name: str, record: RunRecord) -> str:
    held = record.config.get(name)
    return str(held.value).lower() if held is not None and held.value is not None else ""
