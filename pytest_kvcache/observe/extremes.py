"""How high and how low a target went in a window, and by how much its counters rose."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from pytest_kvcache.records import TelemetryRow

COUNTED = ("preemptions", "rejections")
_EXTREMES = (("usage", max), ("free_blocks", min), ("free_tokens", min), ("running", max), ("waiting", max))
_LATEST = ("usable_blocks", "pool_tokens")


def extremes(rows: Iterable[TelemetryRow]) -> dict[str, float]:
    """Return ``usage.peak``, ``free_blocks.min``, ... of rows in order of time, the latest size of the pool, and what counters rose by.

    A counter that falls was begun again at zero (a restart).
    """
    told: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.values.items():
            told.setdefault(name, []).append(value)
    found = {f"{name}.{'peak' if pick is max else 'min'}": pick(told[name]) for name, pick in _EXTREMES if name in told}
    found |= {name: sum(b - a if b >= a else b for a, b in pairwise(told[name])) for name in COUNTED if name in told}
    return found | {name: told[name][-1] for name in _LATEST if name in told}
