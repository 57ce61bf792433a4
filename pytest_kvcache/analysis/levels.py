"""What the server said over the load: peaks, means and what stands beside them, growth of counters, and the level when idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.payload import Payload
from pytest_kvcache.analysis.series import Growth, Series, combined, growth, total_growth
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value
from pytest_kvcache.records import RunRecord, SnapshotRecord

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

ADDS = ("pool_blocks", "usable_blocks", "pool_tokens", "pool_bytes", "max_num_seqs", "max_concurrency")


@dataclass(frozen=True)
class Window:
    """When the load pressed: from the first intended start to the last end, and until telemetry ended (Unix seconds)."""

    since_s: float
    until_s: float
    hz: float


def config_values(record: RunRecord) -> dict[str, Value]:
    """Return the effective configuration: pools and seats add over replicas, the rest is what all of them state."""
    found: dict[str, Value] = {}
    for name, quantity in QUANTITIES.items():
        if quantity.kind != "config":
            continue
        values = [snapshot.value(name) for snapshot in record.before]
        readings = [value for value in values if isinstance(value, Reading)]
        if name in ADDS and len(values) > 1 and len(readings) == len(values):
            found[name] = Reading(sum(r.number() for r in readings), quantity.unit, f"sum of {len(values)} servers", readings[-1].wall_s)
        elif name in record.config:
            found[name] = record.config[name].to_value()
        elif values:
            found[name] = values[0]
        else:
            found[name] = Missing("the server was not read")
    return found


def pool_of(snapshot: SnapshotRecord) -> float | None:
    """Return the pool that usage is a share of, in blocks or tokens; None where the server does not tell."""
    for name in ("usable_blocks", "pool_blocks", "pool_tokens"):
        value = snapshot.value(name)
        if isinstance(value, Reading):
            return value.number()
    return None


@dataclass(frozen=True)
class Levels:
    """The gauges of all servers on one clock with the values drawn from them. ``counts`` is blocks, tokens or empty."""

    wall_s: Floats
    columns: dict[str, Floats]
    values: dict[str, Value]
    counters: dict[str, Growth]
    counts: str


def levels(record: RunRecord, series: Sequence[Series], window: Window, load: Payload) -> Levels:
    """Return what the telemetry and the snapshots of one Run say. A polled peak is a lower bound, and its source says so."""
    import numpy as np

    pools = [pool_of(snapshot) for snapshot in record.before[: len(series)]]
    pools += [None] * (len(series) - len(pools))
    wall_s, columns = combined(series, pools, hold_s=max(3.0 / window.hz, 1.0) if window.hz else 1.0)
    pressed = (wall_s >= window.since_s) & (wall_s <= window.until_s)
    since = wall_s >= window.since_s
    polled = f"polled at {window.hz:g} Hz, a lower bound" if window.hz else "polled, a lower bound"
    lowest = f"polled at {window.hz:g} Hz, an upper bound" if window.hz else "polled, an upper bound"
    values: dict[str, Value] = {}

    def drawn(name: str, column: str, mask: Any, how: Any, source: str) -> None:
        there = columns[column][mask] if len(wall_s) else np.empty(0)
        there = there[np.isfinite(there)]
        values[name] = Reading(float(how(there)), QUANTITIES[column].unit, f"{column} {source}") if len(there) else absent(record, column, series)

    for column in ("usage", "used_blocks", "used_tokens", "running", "waiting"):
        drawn(f"{column}.peak", column, since, np.max, polled)
    for column in ("free_blocks", "free_tokens"):
        drawn(f"{column}.min", column, since, np.min, lowest)
        values[f"{column}.tightest"] = _tightest(column, series, window, lowest, values[f"{column}.min"])
    for column in ("usage", "running"):
        drawn(f"{column}.mean", column, pressed, np.mean, "mean of the samples inside the load")
    values["usage.hottest"] = _hottest(series, window, polled, values["usage.peak"])
    _at_peak(values, wall_s, columns, since, load)
    counters = {
        name: total_growth(name, [growth(name, one, *_around(record, i), window.since_s) for i, one in enumerate(series)])
        for name in ("preemptions", "rejections", "prefix_hits", "prefix_queries", "finished", "prompt_tokens", "generation_tokens")
    }
    values["preemptions"] = counters["preemptions"].value
    values["rejections_engine"] = counters["rejections"].value
    values["prefix_hits"] = counters["prefix_hits"].value
    counts = "blocks" if np.isfinite(columns["used_blocks"]).any() else "tokens" if np.isfinite(columns["used_tokens"]).any() else ""
    return Levels(wall_s, columns, values, counters, counts)


def absent(record: RunRecord, name: str, series: Sequence[Series] = ()) -> Missing:
    """Return why a gauge has no sample: the dialect's own reason, else what reading the server said."""
    reasons = [value for snapshot in record.before if isinstance(value := snapshot.value(name), Missing)]
    if reasons:
        return reasons[0]
    errors = [error for one in series for error in one.errors]
    return Missing(f"{name}: no sample inside the load" + (f" ({errors[0]})" if errors else ""))


def _around(record: RunRecord, index: int) -> tuple[SnapshotRecord | None, SnapshotRecord | None]:
    return tuple(side[index] if index < len(side) else None for side in (record.before, record.after))  # type: ignore[return-value]


def _tightest(column: str, series: Sequence[Series], window: Window, source: str, alone: Value) -> Value:
    """Return the fewest free of any one server: a request must fit into one, not into their sum."""
    import numpy as np

    if len(series) == 1:
        return alone
    lowest = []
    for one in series:
        there = one.column(column)[one.wall_s >= window.since_s]
        there = there[np.isfinite(there)]
        if not len(there):
            return alone if isinstance(alone, Missing) else Missing(f"{column}: a server gave no sample")
        lowest.append(float(there.min()))
    return Reading(min(lowest), QUANTITIES[column].unit, f"{column} {source}, lowest of {len(lowest)} servers")


def _hottest(series: Sequence[Series], window: Window, source: str, alone: Value) -> Value:
    """Return the peak usage of the fullest server or rank."""
    import numpy as np

    peaks: dict[str, float] = {}
    for number, one in enumerate(series, start=1):
        parts = {f"server {number}, rank {rank}": part for rank, part in one.parts.items()} if len(one.parts) > 1 else {f"server {number}": one}
        for name, part in parts.items():
            usage = part.column("usage")[part.wall_s >= window.since_s]
            usage = usage[np.isfinite(usage)]
            if len(usage):
                peaks[name] = float(usage.max())
    if len(peaks) < 2:
        return alone
    top = max(peaks, key=peaks.__getitem__)
    return Reading(peaks[top], "ratio", f"usage of {top}, {source}")


def _at_peak(values: dict[str, Value], wall_s: Floats, columns: dict[str, Floats], mask: Any, load: Payload) -> None:
    """Fill in what stood beside the peak: running requests, their mean length, and the payload's own peak."""
    import numpy as np

    usage = np.where(mask, columns["usage"], np.nan) if len(wall_s) else np.empty(0)
    lower, moment = load.lower.peak()
    upper, _ = load.upper.peak()
    if np.isfinite(usage).any():
        index = int(np.nanargmax(usage))
        moment = float(wall_s[index])
        running = columns["running"][index]
        values["running.at_peak"] = (
            Reading(float(running), "requests", "running at peak usage") if np.isfinite(running) else Missing("running was not told")
        )
    else:
        values["running.at_peak"] = Missing("the moment of peak usage is not known")
        moment -= 1e-6  # the payload's peak is where a request ends: what counts is what stood just before
    at = np.array([moment])
    count, level = float(load.decoding(at)[0]), float(load.lower(at)[0])
    where = "decoding"
    if count < 1:
        count, level, where = float(load.live(at)[0]), float(load.upper(at)[0]), "sent and not yet answering"
    values["mean_length.at_peak"] = (
        Reading(float(round(level / round(count))), "tokens", f"our request log: {level:.0f} tokens of {count:.0f} requests {where}")
        if count >= 1
        else Missing("no request of ours was live at the peak")
    )
    log = "our request log: prompt and output so far"
    if upper > 0:
        values["payload.peak"] = Reading(lower, "tokens", f"{log}, prompts from their first token on: a lower bound")
        values["payload.peak_upper"] = Reading(upper, "tokens", f"{log}, prompts from the moment of sending: an upper bound")
    else:
        values["payload.peak"] = values["payload.peak_upper"] = Missing("no request of ours held cache")


def idle_values(record: RunRecord) -> dict[str, Value]:
    """Return the level after the load, from the snapshots taken then; requests and space add over replicas, usage is the highest."""
    found: dict[str, Value] = {}
    for name in ("usage", "used_blocks", "used_tokens", "running", "waiting"):
        values = [snapshot.value(name) for snapshot in record.after]
        readings = [value for value in values if isinstance(value, Reading)]
        if values and len(readings) == len(values):
            total = max(r.number() for r in readings) if name == "usage" else sum(r.number() for r in readings)
            found[f"idle.{name}"] = Reading(total, QUANTITIES[name].unit, "after the load: " + readings[0].source, readings[0].wall_s)
        else:
            missing = [value for value in values if isinstance(value, Missing)]
            found[f"idle.{name}"] = missing[0] if missing else Missing("the server was not read after the load")
    return found
