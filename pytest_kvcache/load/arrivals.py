"""When requests of an open loop start, and how many users or requests a second there are over time: stages and ramps.

A schedule is computed once from the seed: every worker goes through all of it and takes each n-th arrival, so that together
they send it once, whatever earlier requests do. Arrivals are drawn at a mean of one a second and then moved to where the
integral of the rate reaches them, so that they are exact under any stages.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_kvcache import units
from pytest_kvcache.errors import UsageError

CONSTANT = "constant"
POISSON = "poisson"
GAMMA = "gamma"
BURST = "burst"
PROCESSES = (POISSON, CONSTANT, GAMMA, BURST)

# Shapes by name: (share of the time, level at its begin and at its end as shares of --kv-rate or of the users).
_SHAPES: dict[str, tuple[tuple[float, float, float], ...]] = {
    "step": ((0.25, 0.25, 0.25), (0.25, 0.5, 0.5), (0.25, 0.75, 0.75), (0.25, 1.0, 1.0)),
    "ramp": ((1.0, 0.0, 1.0),),
    "spike": ((0.4, 0.25, 0.25), (0.2, 1.0, 1.0), (0.4, 0.25, 0.25)),
    "soak": ((0.1, 0.0, 1.0), (0.9, 1.0, 1.0)),
}
SHAPES = tuple(_SHAPES)
SOAK_RAMP_S = 60.0
_LEVEL = re.compile(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?\Z")
_MOST_STAGES = 1000
_HINT = f"name one of {', '.join(SHAPES)}, or list them as 30s:2,1m:2-8,2m:8 (time, then the level or where it goes from and to)"


@dataclass(frozen=True)
class Stage:
    """A part of the load: over ``seconds`` the level goes evenly from ``first`` to ``last`` (users, or requests a second)."""

    seconds: float
    first: float
    last: float


def is_listed(text: str) -> bool:
    """Return whether stages are listed one by one, with times of their own, and not named."""
    return bool(text.strip()) and text.strip() not in _SHAPES


def parse_stages(text: str, base: float, duration_s: float) -> tuple[Stage, ...]:
    """Return the stages that ``text`` names or lists; empty for an empty text. Raises UsageError.

    A named shape (step, ramp, spike, soak) reaches ``base`` at most and lasts ``duration_s``; listed stages hold their own.
    """
    text = text.strip()
    if not text:
        return ()
    if text in _SHAPES:
        if not 0 < duration_s < math.inf:
            raise UsageError(f"the stages {text!r} need a length of the load", hint="--kv-duration-s, or -t by hand")
        shares = _SHAPES[text]
        if text == "soak" and 0.1 * duration_s > SOAK_RAMP_S:
            rest = 1.0 - SOAK_RAMP_S / duration_s
            shares = ((1.0 - rest, 0.0, 1.0), (rest, 1.0, 1.0))
        return tuple(Stage(share * duration_s, first * base, last * base) for share, first, last in shares)
    found = []
    for part in text.split(",")[: _MOST_STAGES + 1]:
        time_text, colon, level_text = part.strip().partition(":")
        level = _LEVEL.match(level_text.strip())
        if not colon or level is None:
            raise UsageError(f"{part.strip()[:60]!r} is no stage of a load", hint=_HINT)
        seconds = units.parse_seconds(time_text.strip())
        if not 0 < seconds < 1e9:
            raise UsageError(f"a stage of {time_text.strip()[:40]!r} has no length", hint=_HINT)
        first = float(level[1])
        found.append(Stage(seconds, first, float(level[2]) if level[2] else first))
    if len(found) > _MOST_STAGES:
        raise UsageError(f"more than {_MOST_STAGES} stages", hint="a ramp is one stage: 10m:0-500")
    if not any(stage.first or stage.last for stage in found):
        raise UsageError("every stage is 0", hint=_HINT)
    return tuple(found)


def total_s(stages: Sequence[Stage]) -> float:
    """Return how long the stages last together, in seconds."""
    return sum(stage.seconds for stage in stages)


def level_at(stages: Sequence[Stage], at_s: float) -> float:
    """Return the level ``at_s`` seconds after the begin; after the last stage it stays where that ended."""
    for stage in stages:
        if at_s < stage.seconds:
            return stage.first + (stage.last - stage.first) * max(0.0, at_s) / stage.seconds
        at_s -= stage.seconds
    return stages[-1].last if stages else 0.0


def arrivals(process: str, stages: Sequence[Stage], seed: int, *, burstiness: float = 1.0, burst_size: int = 1) -> Iterator[float]:
    """Yield the seconds from the begin at which requests start, in order, until the stages end.

    constant: evenly. poisson: independent of one another. gamma: gaps of a gamma distribution with shape ``burstiness``, so below
    1 more uneven than Poisson and above it more even (the coefficient of variation is its inverse square root). burst:
    ``burst_size`` at once, and then none until the rate allows the next.
    """
    pace = _Pace(stages)
    for count in _units(process, seed, burstiness, burst_size):
        at_s = pace.when(count)
        if at_s is None:
            return
        yield at_s


def _units(process: str, seed: int, burstiness: float, burst_size: int) -> Iterator[float]:
    """Yield arrivals with a mean of one a second."""
    drawn = random.Random(f"{seed}/arrivals")  # noqa: S311
    at, number = 0.0, 0
    while True:
        if process == CONSTANT:
            yield float(number)
        elif process == BURST:
            yield float(number - number % burst_size)
        else:
            at += drawn.gammavariate(burstiness, 1.0 / burstiness) if process == GAMMA else drawn.expovariate(1.0)
            yield at
        number += 1


class _Pace:
    """The integral of the rate over time, read backwards: when it reaches a count."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = iter(stages)
        self._stage: Stage | None = next(self._stages, None)
        self._begun_s = self._passed = 0.0

    def when(self, count: float) -> float | None:
        """Return the seconds at which ``count`` is reached, None once the stages are over. Counts come in rising order."""
        while (stage := self._stage) is not None:
            area = (stage.first + stage.last) / 2 * stage.seconds
            part = count - self._passed
            if part < area:
                slope = (stage.last - stage.first) / stage.seconds
                # the root of first x t + slope x t^2 / 2 = part, in the form that also holds for a slope of 0
                root = math.sqrt(max(stage.first**2 + 2 * slope * part, 0.0))
                within_s = 2 * part / (stage.first + root) if part > 0 else 0.0
                return self._begun_s + min(within_s, stage.seconds)
            self._begun_s += stage.seconds
            self._passed += area
            self._stage = next(self._stages, None)
        return None
