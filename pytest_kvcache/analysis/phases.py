"""What the server was doing at each sample: idle, mostly reading prompts, decoding, or draining after the load's last request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.accounting import Account, highest
from pytest_kvcache.analysis.levels import Levels, Window
from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.analysis.series import Series
from pytest_kvcache.quantities import Missing, Reading, Value

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

IDLE, PREFILL, DECODE, DRAIN, GAP = "idle", "prefill", "decode", "drain", "gap"
NAMES = (IDLE, PREFILL, DECODE, DRAIN, GAP)


@dataclass(frozen=True)
class Phase:
    """One phase over the whole load: its time, and how full the pool was in it at most (None: not told)."""

    name: str
    seconds: float
    usage_peak: float | None


@dataclass(frozen=True)
class Span:
    """A stretch of one phase, in seconds from the start of the load."""

    name: str
    since_s: float
    until_s: float


@dataclass(frozen=True)
class Phases:
    """The phases of a Run: their totals, their spans in order, and the values drawn from them.

    ``prefill``: at least as many requests read their prompt as decode. ``drain``: nothing new is sent, and a request has ended that none
    followed. ``gap``: no sample for longer than the sampler should take.
    """

    phases: tuple[Phase, ...]
    spans: tuple[Span, ...]
    values: dict[str, Value]


def phases(one: Account, seen: Levels, series: Sequence[Series], rows: Rows, window: Window, fresh_s: float, *, by_step: bool = True) -> Phases:
    """Return the phases of the load and of what follows it. ``fresh_s`` is how long a sample speaks for the time after it."""
    import numpy as np

    names = [f"phase.{name}" for name in (IDLE, PREFILL, DECODE, DRAIN)]
    wall_s = one.t_s + window.since_s
    if len(wall_s) < 2:
        reason = Missing("fewer than two samples were taken")
        return Phases((), (), dict.fromkeys([*names, "prefill.at_peak"], reason))
    usage, running, waiting = (_at(seen, name, wall_s) for name in ("usage", "running", "waiting"))
    answering = one.answering
    ours = np.maximum(one.sent - answering - np.nan_to_num(waiting), 0.0)
    reading = np.where(
        np.isfinite(running) & (np.nan_to_num(one.beyond) <= 0.5), np.clip(running - answering, 0.0, np.maximum(one.sent - answering, 0.0)), ours
    )
    made = _output(series, wall_s)
    others = (np.nan_to_num(one.beyond) > 0.5) & np.isfinite(made)
    # where requests are not ours, tokens tell reading from answering: not of an engine that counts them when requests end, nor where none moved
    untold = others & (not by_step or not np.nansum(made) > 0)
    prefill = np.where(others, (made <= 0) & ~untold, (reading >= 1) & (reading >= answering))
    busy = np.where(np.isfinite(running), (running > 0) | (np.nan_to_num(waiting) > 0), one.sent > 0)
    code = np.where(~busy, 0, np.where(prefill, 1, 2))
    code = np.where((code > 0) & (wall_s >= _drain_begin(rows)), 3, code)
    step = np.minimum(np.diff(wall_s, append=wall_s[-1] + np.median(np.diff(wall_s))), fresh_s)
    spans = _spans(code, one.t_s, step, fresh_s)
    inside = (wall_s >= window.since_s) & (wall_s <= window.until_s)
    total = float(step[inside].sum())
    found, values = [], {}
    for number, name in enumerate((IDLE, PREFILL, DECODE, DRAIN)):
        mine = code == number
        level = usage[mine & np.isfinite(usage)]
        seconds = float(step[mine].sum())
        found.append(Phase(name, seconds, float(level.max()) if len(level) else None))
        share = float(step[mine & inside].sum()) / total if total > 0 else 0.0
        values[f"phase.{name}"] = (
            Reading(share, "ratio", f"share of {total:.1f} s of the load that the samples speak for")
            if total > 0
            else Missing("no sample lies inside the load")
        )
    if (untold & busy & inside).any():
        how = "this engine counts tokens when requests end" if not by_step else "no token was counted"
        reason = Missing(f"requests that are not ours ran and {how}: reading and answering cannot be told apart")
        values.update({"phase.prefill": reason, "phase.decode": reason})
    gaps = sum(span.until_s - span.since_s for span in spans if span.name == GAP)
    found.append(Phase(GAP, gaps, None))
    values["prefill.at_peak"] = _at_peak(usage, reading, answering, wall_s >= window.since_s)
    return Phases(tuple(found), spans, values)


def _at(seen: Levels, name: str, wall_s: Floats) -> Floats:
    """Return a gauge at some of the moments of all samples."""
    import numpy as np

    index = np.clip(np.searchsorted(seen.wall_s, wall_s), 0, max(len(seen.wall_s) - 1, 0))
    return seen.columns[name][index] if len(seen.wall_s) else np.full(len(wall_s), np.nan)


def _output(series: Sequence[Series], wall_s: Floats) -> Floats:
    """Return the tokens that all servers made between each moment and the next; NaN where they do not tell."""
    import numpy as np

    total = np.zeros(len(wall_s))
    for one in series:
        column = one.column("generation_tokens")
        there = np.isfinite(column)
        if there.sum() < 2:
            return np.full(len(wall_s), np.nan)
        count = np.interp(wall_s, one.wall_s[there], column[there])
        total += np.maximum(np.diff(count, append=count[-1]), 0.0)
    return total


def _drain_begin(rows: Rows) -> float:
    """Return when the first request ended that none was sent after."""
    if not len(rows):
        return float("inf")
    last = float(rows.sent_s.max())
    ended = rows.end_s[rows.end_s >= last]
    return float(ended.min()) if len(ended) else last  # none ended after it: a clock was set back


def _spans(code: Any, t_s: Floats, step: Floats, fresh_s: float) -> tuple[Span, ...]:
    import numpy as np

    pause = np.diff(t_s) > fresh_s + 1e-9
    edges = np.concatenate([[0], np.flatnonzero((code[1:] != code[:-1]) | pause) + 1, [len(code)]])
    found: list[Span] = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        until = float(t_s[stop]) if stop < len(t_s) else float(t_s[-1] + step[-1])
        if stop < len(t_s) and pause[stop - 1]:
            ended = float(t_s[stop - 1] + step[stop - 1])
            found += [Span(NAMES[int(code[start])], float(t_s[start]), ended), Span(GAP, ended, until)]
        else:
            found.append(Span(NAMES[int(code[start])], float(t_s[start]), until))
    return tuple(found)


def _at_peak(usage: Floats, reading: Floats, answering: Floats, since: Any) -> Value:
    """Return the share of our live requests that were reading their prompt when the pool was fullest."""
    import numpy as np

    level = np.where(since, usage, np.nan)
    if not np.isfinite(level).any():
        return Missing("the moment of peak usage is not known")
    peak = highest(level)
    both = float(reading[peak] + answering[peak])
    if both < 1:
        return Missing("no request of ours was live at the peak")
    return Reading(float(reading[peak]) / both, "ratio", f"{reading[peak]:.0f} of {both:.0f} live requests had no token yet at peak usage")
