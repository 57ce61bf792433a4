"""The moments of a past window at which a Prometheus server is asked: how far apart, and both ends of the window among them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from pytest_kvcache.errors import UsageError
from pytest_kvcache.observe.series import millis

MOST_POINTS = 11_000
"""Points a series that Prometheus answers with at most (its own limit, ``web/api/v1``: "exceeded maximum resolution of 11,000 points")."""
LONGEST_STEP_S = 15.0
SHORTEST_STEP_S = 1.0
_SHARE = 60
_Told = TypeVar("_Told")


class TooMany(UsageError):
    """More was asked of Prometheus than it gives or than we take; a longer step asks for less."""


def step_for(length_s: float) -> float:
    """Return the step of a window of ``length_s`` where the user names none, in seconds.

    A sixtieth of the window, at least 1 s and at most 15 s; longer where the window would have more than ``MOST_POINTS`` otherwise.
    """
    if not math.isfinite(length_s) or length_s <= 0:
        return SHORTEST_STEP_S
    step_s = min(LONGEST_STEP_S, max(SHORTEST_STEP_S, length_s / _SHARE))
    return math.ceil(max(step_s, length_s / (MOST_POINTS - 1)) * 1000) / 1000


def moments(start_wall_s: float, end_wall_s: float, step_s: float) -> list[int]:
    """Return Unix milliseconds from ``start_wall_s``, one a step, and always the end. Raises UsageError for a window that cannot be meant."""
    if not all(map(math.isfinite, (start_wall_s, end_wall_s, step_s))) or step_s < 0.001 or end_wall_s < start_wall_s:
        raise UsageError("this window cannot be meant", hint="a start before its end, and a step above zero")
    points = int((end_wall_s - start_wall_s) / step_s) + 1
    if points > MOST_POINTS:
        least = (end_wall_s - start_wall_s) / (MOST_POINTS - 1)
        raise UsageError(f"{points:,} points a series, and Prometheus gives {MOST_POINTS:,}", hint=f"a step of at least {least:.3g} s")
    last = millis(end_wall_s)
    every = list(range(last - millis(end_wall_s - start_wall_s), last + 1, millis(step_s)))
    return every if every[-1] == last else [*every, last]


def at_steps(length_s: float, step_s: float | None, ask: Callable[[float], _Told]) -> _Told:
    """Return what ``ask`` tells at the user's step; where none is named, at the default one or at the first longer one that is not TooMany."""
    if step_s is not None:
        return ask(step_s)
    step = step_for(length_s)
    while True:
        try:
            return ask(step)
        except TooMany:
            if step >= length_s:
                raise
            step = min(math.ceil(step * 4000) / 1000, max(length_s, SHORTEST_STEP_S))
