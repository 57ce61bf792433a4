"""The engine's own clock: how many decode steps it has made, out of its counter of generated tokens.

Every running request gets one token a step, so the steps tell how far each answer is, also where the server pauses or slows down in
between: a client that records a first and a last token only knows that they came evenly in steps, not in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.analysis.series import Series
from pytest_kvcache.engines import DIALECTS

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]

Clock = Callable[["Floats"], "Floats"]

# Where the counter stood still or was not read, time itself counts a little: the clock never stops and never goes back.
_STEPS_PER_S = 1e-3


def seconds(wall_s: Floats) -> Floats:
    """Return the moments themselves: the clock of an engine whose steps are not told."""
    return wall_s


def step_clock(engine: str, one: Series, rows: Rows, chosen: Mask, lost: Mask) -> Clock:
    """Return what turns Unix seconds into decode steps of one server; seconds where its counter does not grow with every step."""
    import numpy as np

    dialect = DIALECTS.get(engine)
    column = one.column("generation_tokens")
    there = np.isfinite(column)
    if dialect is None or not dialect.generates_by_step or there.sum() < 3 or (np.diff(column[there]) < 0).any():
        return seconds
    wall_s, made = one.wall_s[there], column[there]
    answering = chosen & np.isfinite(rows.first_s)
    away = answering & lost & np.isfinite(rows.gap_at_s)
    middle = (wall_s[:-1] + wall_s[1:]) / 2

    def running(begin: Floats, end: Floats) -> Floats:
        count = np.searchsorted(np.sort(begin), middle, side="right") - np.searchsorted(np.sort(end), middle, side="right")
        return np.asarray(count, dtype=np.float64)

    count = running(rows.first_s[answering], rows.end_s[answering]) - running(rows.gap_at_s[away], (rows.gap_at_s + rows.gap_s)[away])
    # the engine's own figure also knows others, and who was put back without our seeing it; who reads a prompt makes no token yet
    waiting = np.nan_to_num(one.column("waiting")[there])
    sent = running(rows.sent_s[chosen], rows.end_s[chosen])
    reading = np.clip(sent - running(rows.first_s[answering], rows.end_s[answering]) - (waiting[1:] + waiting[:-1]) / 2, 0.0, None)
    told = one.column("running")[there]
    told = (told[1:] + told[:-1]) / 2 - reading
    count = np.where(np.isfinite(told) & (np.abs(told + reading - count) > 0.75 + reading), told, count)
    steps = np.diff(made) / np.maximum(count, 1.0) + _STEPS_PER_S * np.diff(wall_s)
    clock = np.concatenate([[0.0], np.cumsum(steps)])

    def at(moments: Floats) -> Floats:
        inside = np.interp(moments, wall_s, clock)
        before, after = np.minimum(moments - wall_s[0], 0.0), np.maximum(moments - wall_s[-1], 0.0)
        return np.asarray(inside + _STEPS_PER_S * (before + after), dtype=np.float64)

    return at
