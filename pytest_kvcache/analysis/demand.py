"""Peak against pool: what our requests ask for at once at their full length, what is left for one more of each lane, and what gave way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.holding import Footprint
from pytest_kvcache.analysis.levels import Levels, Window, pool_of
from pytest_kvcache.analysis.payload import REFUSED
from pytest_kvcache.analysis.rows import Frame, Rows
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import RunRecord

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class LaneDemand:
    """What one lane asks for: ``needs`` (its largest request) and ``needs_mean`` in the engine's unit, at full planned length; the most
    of its requests ``at_once`` and what those asked for (``peak``); how many of the largest an empty pool holds (``fits``), and how many
    more would have fitted at the tightest moment (``headroom``)."""

    lane: str
    requests: int
    needs: float
    needs_mean: float
    at_once: int
    peak: float
    fits: int | None
    headroom: Value


@dataclass(frozen=True)
class Demand:
    """Peak against pool for one Run. ``unit`` is blocks or tokens, ``usable`` one server's pool (None: not told), ``lanes`` the largest
    requests first. ``happened`` says in sentences what gave way when it did not fit. ``values`` are named as conditions name them."""

    unit: str
    usable: float | None
    lanes: tuple[LaneDemand, ...]
    happened: tuple[str, ...]
    values: dict[str, Value]
    missing: str = ""


_NAMES = ("demand.peak", "demand.planned", "demand.largest", "headroom")


def demand(
    record: RunRecord,
    rows: Rows,
    frame: Frame,
    seen: Levels,
    window: Window,
    shape: Footprint | Missing,
    lost: Mask,
    rejected: Mapping[str, Mapping[str, int]],
) -> Demand:
    """Return what was asked of the pool. Requests are counted from sending to end, also while they wait: that is what must fit."""
    import numpy as np

    values, happened = _gave_way(rows, seen, window, lost, rejected)
    held = ~rows.outcome_in(REFUSED)
    missing = shape.reason if isinstance(shape, Missing) else "" if held.any() else "no request reached the server"
    pools = [pool for snapshot in record.before if (pool := pool_of(snapshot)) is not None]
    usable = min(pools) if pools and len(pools) == len(record.before) else None
    if missing or isinstance(shape, Missing):
        values.update(dict.fromkeys(_NAMES, Missing(missing)))
        return Demand(seen.counts, usable, (), happened, values, missing)
    output = np.where(np.isfinite(rows.output_planned), rows.output_planned, np.where(np.isfinite(rows.output), rows.output, rows.chunks))
    prompt = np.nan_to_num(rows.prompt)
    # what is asked for, not what came of it: a clamped or broken answer asked for its whole length
    tokens = prompt + np.maximum(output, 1.0) - 1.0
    need = np.maximum(shape.blocks(tokens), shape.blocks(prompt, sliding=False))
    servers = sorted({int(number) for number in np.unique(rows.endpoint[held])})
    peaks = [_peak(rows, held & (rows.endpoint == number), need) for number in servers]
    peak = max((level for level, _ in peaks), default=0.0)
    free = (
        seen.values.get(f"free_{seen.counts}.tightest", Missing("what is free is not known")) if seen.counts else Missing("what is free is not known")
    )
    lanes = []
    for lane in rows.lanes:
        mine = held & rows.lane_is(lane)
        if not mine.any():
            continue
        largest = float(need[mine].max())
        level, _ = _peak(rows, mine, need)
        at_once, _ = _peak(rows, mine, np.ones(len(rows)))
        fits = int(usable // largest) * max(len(servers), 1) if usable is not None and largest else None
        lanes.append(
            LaneDemand(lane, int(mine.sum()), largest, float(need[mine].mean()), round(at_once), level, fits, _headroom(free, largest, lane))
        )
    lanes.sort(key=lambda one: -one.needs)
    no_pool = Missing("the size of the pool is not known")
    source = f"our request log: what was live at once at its full length, {seen.counts or 'blocks'}"
    if usable:
        values["demand.peak"] = Reading(peak / usable, "ratio", f"{source}: {peak:,.0f} of {usable:,.0f} of one server")
        users = _users(record, frame)
        largest = max((one.needs for one in lanes), default=0.0)
        per_server = -(-users // max(len(servers), 1))
        values["demand.largest"] = Reading(largest / usable, "ratio", f"our request log: {largest:,.0f} of {usable:,.0f} {seen.counts or 'blocks'}")
        values["demand.planned"] = (
            Reading(
                largest * per_server / usable,
                "ratio",
                f"{per_server} users with the longest request at once: {largest * per_server:,.0f} of {usable:,.0f}",
            )
            if users
            else Missing("the load names no number of users and no most in flight")
        )
    else:
        values["demand.peak"] = values["demand.planned"] = values["demand.largest"] = no_pool
    known = [one.headroom for one in lanes if isinstance(one.headroom, Reading)]
    values["headroom"] = min(known, key=Reading.number) if known else lanes[0].headroom if lanes else no_pool
    return Demand(seen.counts, usable, tuple(lanes), happened, values)


def _peak(rows: Rows, chosen: Mask, weight: Floats) -> tuple[float, float]:
    """Return the highest sum of weights over requests that were live at once, and its moment."""
    import numpy as np

    if not chosen.any():
        return 0.0, 0.0
    moments = np.concatenate([rows.end_s[chosen], rows.sent_s[chosen]])
    steps = np.concatenate([-weight[chosen], weight[chosen]])
    order = np.argsort(moments, kind="stable")  # who leaves at a moment makes room for who comes at it
    level = np.cumsum(steps[order])
    top = int(np.argmax(level))
    return float(level[top]), float(moments[order][top])


def _headroom(free: Value, largest: float, lane: str) -> Value:
    if isinstance(free, Missing):
        return free
    if largest <= 0:
        return Missing(f"a request of lane {lane} needs nothing")
    count = float(free.number() // largest)
    return Reading(count, "requests", f"{free.number():,.0f} free at the tightest moment, {largest:,.0f} for the largest request of lane {lane}")


def _users(record: RunRecord, frame: Frame) -> int:
    """Return how many requests the load was to have at once: its users, or the cap of an open loop; 0 where it names neither."""
    said = [record.options, *(start.options for start in frame.starts)]

    def first(name: str) -> int:
        told = (options.get(name) for options in said)
        return next((int(number) for number in told if isinstance(number, int | float) and not isinstance(number, bool) and number > 0), 0)

    open_loop = any(options.get("rate") for options in said)
    return first("max_in_flight" if open_loop else "users")


def _gave_way(
    rows: Rows, seen: Levels, window: Window, lost: Mask, rejected: Mapping[str, Mapping[str, int]]
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Return what happened when it did not fit: waiting by reason, requests put back and what they computed again, rejections."""
    import numpy as np

    since = seen.wall_s >= window.since_s
    values: dict[str, Value] = {}
    said: list[str] = []

    def highest(name: str, column: Floats, what: str, lacking: str) -> float:
        there = column[since & np.isfinite(column)] if len(column) else column
        values[name] = Reading(float(there.max()), "requests", f"{what}, polled, a lower bound") if len(there) else Missing(lacking)
        return float(there.max()) if len(there) else 0.0

    waiting, capacity = seen.columns["waiting"], seen.columns.get("waiting_capacity", np.full(len(seen.wall_s), np.nan))
    most = highest("waiting.capacity_peak", capacity, "waited for blocks or a seat", "the engine does not say why a request waits")
    deferred = highest("waiting.deferred_peak", waiting - capacity, "waited for another reason", "the engine does not say why a request waits")
    if most:
        said.append(f"at most {most:.0f} requests waited for blocks or a seat")
    if deferred:
        said.append(f"at most {deferred:.0f} requests waited for another reason (an adapter, a transfer, a blocked request)")
    events = seen.counters["preemptions"].value
    if isinstance(events, Missing):
        values["preempted.tokens"] = events
    elif not events.number():
        values["preempted.tokens"] = Reading(0.0, "tokens", "no request was put back into the queue")
    else:
        again = float(_computed_again(rows, lost).sum())
        values["preempted.tokens"] = (
            Reading(
                again, "tokens", f"prompt and answer so far of the {int(lost.sum())} requests whose longest pause was a preemption: a lower bound"
            )
            if lost.any()
            else Missing("requests were put back, and none of ours shows a pause for it")
        )
        tail = f", and had to compute at least {again:,.0f} tokens again" if lost.any() else ""
        said.append(f"{events.number():.0f} times a running request was put back into the queue{tail}")
    for outcome, lanes in sorted(rejected.items(), key=lambda entry: -sum(entry[1].values())):
        said.append(
            f"{sum(lanes.values()):,} requests ended as {outcome.replace('_', ' ')} ({', '.join(f'{lane} {n:,}' for lane, n in list(lanes.items())[:6])})"
        )
    return values, tuple(said)


def _computed_again(rows: Rows, lost: Mask) -> Floats:
    """Return the tokens that each preempted request had in the cache when it was put back."""
    import numpy as np

    output = np.where(np.isfinite(rows.output), rows.output, rows.chunks)[lost]
    first, end, gap, pause = rows.first_s[lost], rows.end_s[lost], rows.gap_at_s[lost], rows.gap_s[lost]
    share = np.clip((gap - first) / np.maximum(end - first - pause, 1e-9), 0.0, 1.0)
    return np.asarray(np.nan_to_num(rows.prompt[lost]) + share * output, dtype=np.float64)


def lanes_of(found: Demand, lanes: Sequence[str]) -> dict[str, Value]:
    """Return the headroom of each lane, by its name."""
    told = {one.lane: one.headroom for one in found.lanes}
    return {lane: told.get(lane, Missing(found.missing or f"no request of lane {lane} reached the server")) for lane in lanes}
