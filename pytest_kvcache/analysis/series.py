"""telemetry.jsonl as columns: each server by itself, all of them on one clock, and counters as what they grew by in the window."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pytest_kvcache.errors import CannotJudge
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value
from pytest_kvcache.records import GpuRow, SnapshotRecord, TelemetryRow

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]

GAUGES = ("usage", "used_blocks", "free_blocks", "used_tokens", "free_tokens", "running", "waiting", "waiting_capacity")
MOST_ENDPOINTS = 4096
_MOST_PROCESSES = 64
COUNTERS = tuple(q.name for q in QUANTITIES.values() if q.kind == "counter")
_WATCHED = (*GAUGES, *COUNTERS, "start_time", "pool_blocks", "pool_tokens", "usable_blocks", "max_model_len")


@dataclass(frozen=True)
class Card:
    """The memory of one card over time, in bytes; ``processes`` maps each pid that the driver told of to its bytes (NaN: not told then)."""

    index: int
    uuid: str
    name: str
    host: str
    wall_s: Floats
    used: Floats
    free: Floats
    total: Floats
    processes: dict[str, Floats] = field(default_factory=dict)


@dataclass
class Series:
    """The samples of one server in order of time. ``columns`` holds NaN where a sample lacks a quantity; ``failed_s`` failed reads.

    ``parts`` holds the gauges of each engine rank where the server tells them apart.
    ``read_s`` is how long each look took: its gauges are of some moment between ``wall_s`` and ``wall_s + read_s``. ``cards``
    is what the driver told beside them.
    """

    wall_s: Floats
    columns: dict[str, Floats]
    failed_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    parts: dict[str, Series] = field(default_factory=dict)
    read_s: Floats | None = None
    cards: list[Card] = field(default_factory=list)

    def column(self, name: str) -> Floats:
        """Return the quantity's column; all NaN where the server never told it."""
        import numpy as np

        found = self.columns.get(name)
        return found if found is not None else np.full(len(self.wall_s), np.nan)


_LEAST = 1e-12


def read_series(rows: Iterable[TelemetryRow], endpoints: int) -> list[Series]:
    """Return one Series per endpoint, with the gauges of its engine ranks. Raises CannotJudge for a row of no server."""
    import numpy as np

    samples: list[list[TelemetryRow]] = [[] for _ in range(max(endpoints, 1))]
    failed: list[list[float]] = [[] for _ in samples]
    errors: list[list[str]] = [[] for _ in samples]
    for row in rows:
        if not 0 <= row.endpoint < MOST_ENDPOINTS:
            raise CannotJudge(
                f"telemetry of server number {row.endpoint}: there is no such server", hint="the file was changed after it was written; measure again"
            )
        while row.endpoint >= len(samples):
            samples.append([])
            failed.append([])
            errors.append([])
        if row.error:
            failed[row.endpoint].append(row.wall_s)
            if row.error not in errors[row.endpoint] and len(errors[row.endpoint]) < 5:
                errors[row.endpoint].append(row.error[:300])
            continue
        samples[row.endpoint].append(row)
    found = []
    for index, mine in enumerate(samples):
        mine.sort(key=lambda row: row.wall_s)
        wall = np.array([row.wall_s for row in mine], dtype=np.float64)
        columns = {name: _column(row.values.get(name, np.nan) for row in mine) for name in _WATCHED}
        columns = {name: column for name, column in columns.items() if np.isfinite(column).any()}
        read_s = np.array([row.read_s for row in mine], dtype=np.float64)
        found.append(Series(wall, columns, failed[index], errors[index], _ranks(mine), read_s, _cards(mine)))
    return found


def _column(values: Iterable[float]) -> Floats:
    """Return the values of a gauge; what is closer to zero than any share, block or request is zero, since nothing can be divided by it."""
    import numpy as np

    column = np.fromiter(values, dtype=np.float64)
    column[np.abs(column) < _LEAST] = 0.0
    return column


def _ranks(rows: Sequence[TelemetryRow]) -> dict[str, Series]:
    """Return the gauges of each engine rank of one server, in order of time."""
    import numpy as np

    walls: dict[str, list[float]] = {}
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for rank, told in row.ranks.items():
            if rank not in walls and len(walls) >= MOST_ENDPOINTS:
                continue
            walls.setdefault(rank, []).append(row.wall_s)
            columns = values.setdefault(rank, {name: [] for name in GAUGES})
            for name in GAUGES:
                columns[name].append(told.get(name, np.nan))
    return {rank: Series(np.array(wall), {name: _column(column) for name, column in values[rank].items()}) for rank, wall in walls.items()}


def _cards(rows: Sequence[TelemetryRow]) -> list[Card]:
    """Return the memory of each card over time, in order of host and index."""
    import numpy as np

    told: dict[tuple[str, int, str], list[tuple[float, GpuRow]]] = {}
    for row in rows:
        for card in row.gpus:
            told.setdefault((card.host, card.index, card.uuid), []).append((row.wall_s, card))
    found = []
    for (host, index, uuid), samples in sorted(told.items()):
        used, free, total = (np.array([read(card) for _, card in samples], dtype=np.float64) for read in (_used, _free, _total))
        pids = list(dict.fromkeys(pid for _, card in samples for pid in card.processes))[:_MOST_PROCESSES]
        processes = {pid: np.array([card.processes.get(pid, np.nan) for _, card in samples], dtype=np.float64) for pid in pids}
        wall = np.array([wall_s for wall_s, _ in samples], dtype=np.float64)
        found.append(Card(index, uuid, samples[0][1].name, host, wall, used, free, total, processes))
    return found


_used, _free, _total = attrgetter("used_bytes"), attrgetter("free_bytes"), attrgetter("total_bytes")


def combined(series: Sequence[Series], pools: Sequence[float | None], hold_s: float) -> tuple[Floats, dict[str, Floats]]:
    """Return the moments and the gauges of all servers together: space and requests add, usage is weighted by pool.

    One server keeps its own moments. Of several, each moment of any is kept, and the others count with their newest value that
    is no older than ``hold_s``; where one has none, the sum is NaN, which is a gap and not a zero.
    """
    import numpy as np

    if len(series) == 1:
        return series[0].wall_s, {name: series[0].column(name) for name in GAUGES}
    moments = np.unique(np.concatenate([one.wall_s for one in series])) if series else np.empty(0)
    held: list[dict[str, Floats]] = []
    for one in series:
        index = np.searchsorted(one.wall_s, moments, side="right") - 1
        there = index >= 0
        there[there] &= moments[there] - one.wall_s[index[there]] <= hold_s
        held.append({})
        for name in GAUGES:
            column = one.column(name)
            held[-1][name] = np.where(there, column[index], np.nan) if len(column) else np.full(len(moments), np.nan)
    columns = {name: np.sum([h[name] for h in held], axis=0) for name in GAUGES if name != "usage"}
    weights = [np.full(len(moments), pool) if pool is not None else _space(h) for h, pool in zip(held, pools, strict=True)]
    with np.errstate(invalid="ignore", divide="ignore"):
        columns["usage"] = np.sum([h["usage"] * w for h, w in zip(held, weights, strict=True)], axis=0) / np.sum(weights, axis=0)
    return moments, columns


def _space(columns: Mapping[str, Floats]) -> Floats:
    import numpy as np

    blocks = columns["used_blocks"] + columns["free_blocks"]
    return np.where(np.isfinite(blocks), blocks, columns["used_tokens"] + columns["free_tokens"])


@dataclass(frozen=True)
class Growth:
    """What a counter grew by in the window: ``value``, and ``resets`` where it fell, which means that the server began anew."""

    value: Value
    resets: int = 0


def growth(name: str, series: Series, before: SnapshotRecord | None, after: SnapshotRecord | None, since_s: float) -> Growth:
    """Return how much a counter of one server grew between the last value before ``since_s`` and the last of all.

    The snapshots around the load belong to it, so nothing before, between or after polls is lost. After a fall the new value counts whole.
    """
    import numpy as np

    points: list[tuple[float, float]] = []
    missing: Missing | None = None
    for snapshot in (before, after):
        value = snapshot.value(name) if snapshot is not None else Missing("no snapshot was taken")
        if isinstance(value, Reading) and snapshot is not None:
            points.append((snapshot.wall_s, value.number()))
        elif isinstance(value, Missing) and (missing is None or value.cannot_happen):
            missing = value
    column = series.column(name)
    there = np.isfinite(column)
    points += list(zip(series.wall_s[there].tolist(), column[there].tolist(), strict=True))
    points.sort()
    first = max((i for i, (wall, _) in enumerate(points) if wall <= since_s), default=0)
    inside = points[first:]
    if len(inside) < 2:
        return Growth(missing if missing is not None else Missing(f"{name}: fewer than two values in the window"))
    total, resets = 0.0, 0
    for (_, left), (_, right) in pairwise(inside):
        resets += right < left
        total += right - left if right >= left else right
    unit = QUANTITIES[name].unit
    return Growth(Reading(total, unit, f"growth of the counter from {inside[0][1]:g} to {inside[-1][1]:g} in the window", inside[-1][0]), resets)


def total_growth(name: str, parts: Sequence[Growth]) -> Growth:
    """Return the growth of all servers together; Missing where one of them does not tell."""
    missing = [part.value for part in parts if isinstance(part.value, Missing)]
    if missing:
        never = all(value.cannot_happen for value in missing) and len(missing) == len(parts)
        told = next((value for value in missing if not value.cannot_happen), missing[0])
        return Growth(Missing(told.reason, never), sum(part.resets for part in parts))
    readings = [part.value for part in parts if isinstance(part.value, Reading)]
    if not readings:
        return Growth(Missing(f"{name}: no server was read"))
    source = readings[0].source if len(readings) == 1 else f"{name}: sum of {len(readings)} servers"
    return Growth(Reading(sum(r.number() for r in readings), readings[0].unit, source, readings[-1].wall_s), sum(part.resets for part in parts))


def coverage(wall_s: Floats, since_s: float, until_s: float, fresh_s: float) -> tuple[float, float]:
    """Return the share of the window in which the newest sample was no older than ``fresh_s``, and the longest time without one (s)."""
    import numpy as np

    if until_s <= since_s:
        return (1.0 if len(wall_s) else 0.0), 0.0
    inside = wall_s[(wall_s > since_s) & (wall_s < until_s)]
    edges = np.concatenate([[since_s], inside, [until_s]])
    steps = np.diff(edges)
    # the window's own edges are no samples: the first step is fresh only where a sample lies just before it
    before = wall_s[wall_s <= since_s]
    age = since_s - float(before[-1]) if len(before) else fresh_s
    allowed = np.full(len(steps), fresh_s)
    allowed[0] = max(fresh_s - age, 0.0) if len(before) else 0.0
    covered = float(np.minimum(steps, allowed).sum()) / (until_s - since_s)
    return min(covered, 1.0), float(steps.max())
