"""What the periodic lines of a log say one after the other: full and working, stuck, leaking, or one answer that does not end.

A single line cannot tell them apart: 99 % with tokens flowing is saturation, 0 % with requests waiting may be a deadlock, and usage that only
climbs may be one long generation. Sources: vLLM ``v1/metrics/loggers.py`` and V0's ``engine/metrics.py``; SGLang's scheduler.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from pytest_kvcache.server.rootcause import log_lines
from pytest_kvcache.server.startlogs.live import fullest
from pytest_kvcache.server.startlogs.reading import FLOAT, INT, to_int

_VLLM = re.compile(
    rf"(?:Avg prompt throughput: {FLOAT} tokens/s, Avg generation throughput: {FLOAT} tokens/s, )?Running: {INT} reqs,(?: Swapped: [0-9,]{{1,18}} reqs,)?"
    rf" (?:Waiting|Pending): {INT} reqs,[^\n]{{0,200}}?KV cache usage: {FLOAT}%"
)
_SGLANG = re.compile(
    rf"#running-req: {INT}, [^\n]{{0,200}}?\btoken usage: {FLOAT}\b[^\n]{{0,200}}?gen throughput \(token/s\): {FLOAT}, #queue-req: {INT}"
)
_ENGINE = re.compile(r"\bEngine ([0-9]{1,5}): |\b(DP[0-9]{1,4})\b")
_TIME = re.compile(r"\b(?:(20[0-9]{2})-)?([0-9]{2}-[0-9]{2}) ([0-9]{2}:[0-9]{2}:[0-9]{2})")
_USUAL_S = 10.0  # vLLM prints a line every ten seconds
_LONG_S = 60.0
_FULL = 0.95
_MOST_LINES = 5000


@dataclass(frozen=True)
class Point:
    """One periodic line: seconds since the first, requests, usage 0 to 1, and tokens a second (None where the line tells none)."""

    at_s: float
    running: int
    waiting: int
    usage: float
    prompt_rate: float | None
    rate: float | None

    @property
    def flows(self) -> bool | None:
        """Whether tokens are processed or generated; None where the line does not tell."""
        if self.rate is None:
            return None
        return self.rate > 0 or bool(self.prompt_rate)


def trend_notes(text: str, pool_tokens: float | None = None) -> list[str]:
    """Return what the periodic lines of each engine say together, worst first. Never raises. ``pool_tokens`` is one engine's pool, if known."""
    notes = []
    for engine, points in _points(text).items():
        said = _of(points, pool_tokens)
        if said:
            notes.append(f"engine {engine}: {said}" if engine else said)
    return notes[:8]


def _points(text: str) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    began: dict[str, datetime] = {}
    for line in log_lines(text[-(4 << 20) :], 2000):
        if "usage: " not in line:
            continue
        match = _VLLM.search(line)
        if match is not None:
            prompt, rate, running, waiting, percent = match.groups()
            told = (to_int(running), to_int(waiting), float(percent) / 100, float(prompt) if prompt else None, float(rate) if rate else None)
        else:
            match = _SGLANG.search(line)
            if match is None:
                continue
            running, _, rate, waiting = match.groups()
            told = (to_int(running), to_int(waiting), fullest(line), None, float(rate))
        name = _ENGINE.search(line)
        engine = (name.group(1) or name.group(2)) if name else ""
        points = found.setdefault(engine, [])
        moment = _moment(line)
        if moment is not None:
            began.setdefault(engine, moment)
        at = (moment - began[engine]).total_seconds() if moment is not None else len(points) * _USUAL_S
        if len(points) < _MOST_LINES:
            points.append(Point(at, *told))
    return found


def _moment(line: str) -> datetime | None:
    match = _TIME.search(line)
    try:
        return datetime.strptime(f"{match.group(1) or 2024}-{match.group(2)} {match.group(3)}", "%Y-%m-%d %H:%M:%S") if match else None
    except ValueError:
        return None


def _of(points: Sequence[Point], pool_tokens: float | None) -> str:
    """Return the one sentence on the end of a series; "" where nothing stands out."""
    if not points:
        return ""
    last = points[-1]
    idle = _tail(points, lambda point: point.running == 0 and point.waiting == 0 and point.usage > 0)
    if len(idle) > 1 and idle[-1].at_s - idle[0].at_s >= _LONG_S:
        return (
            f"nothing has run or waited for {_span(idle)} and {last.usage:.1%} of the pool is still held: blocks that never came back (a leak),"
            " as after aborted or remote loads"
        )
    stuck = _tail(points, lambda point: point.waiting > 0 and point.running == 0 and point.flows is False)
    if len(stuck) > 1 and stuck[-1].at_s - stuck[0].at_s >= _LONG_S:
        return f"{last.waiting} requests have waited for {_span(stuck)} while nothing ran and no token came, at {last.usage:.1%} usage: stuck, and not full"
    if last.running == 1 and (said := _alone(points, pool_tokens)):
        return said
    if last.usage >= _FULL and last.running > 0 and last.flows is not False:
        rate = f" and {last.rate:g} tokens/s" if last.rate else ""
        return (
            f"{last.usage:.1%} used with {last.running} running{rate}: the pool is full and works (running requests grow, the rest wait or are put back);"
            " this is no leak"
        )
    return ""


def _alone(points: Sequence[Point], pool_tokens: float | None) -> str:
    """One request that grows: the slope of its usage times the pool is its token rate."""
    alone = _tail(points, lambda point: point.running == 1)
    rise, seconds = alone[-1].usage - alone[0].usage, alone[-1].at_s - alone[0].at_s
    if len(alone) < 2 or seconds <= 0 or rise < 0.0009 or any(b.usage < a.usage - 1e-9 for a, b in pairwise(alone)):
        return ""
    rates = [point.rate for point in alone[1:] if point.rate is not None]
    said = f"usage climbed from {alone[0].usage:.1%} to {alone[-1].usage:.1%} in {_span(alone)} with one request running"
    if rates:
        rate = sum(rates) / len(rates)
        said += f" at {rate:.3g} tokens/s: {rate * seconds:,.0f} tokens for {rise:.2%} of the pool, which is then about {_rough(rate * seconds / rise)} tokens"
        if pool_tokens:
            said += f" (the log states {pool_tokens:,.0f})"
    said += "; one long answer and no leak: set max_tokens"
    if alone[-1].waiting:
        free = 1 - alone[-1].usage
        said += f"; {alone[-1].waiting} wait behind it with {free:.1%} free: the next prompt needs more than that, or one seat is all there is"
    return said


def _tail(points: Sequence[Point], test: Callable[[Point], bool]) -> list[Point]:
    found: list[Point] = []
    for point in reversed(points):
        if not test(point):
            break
        found.append(point)
    return found[::-1]


def _rough(number: float) -> str:
    """Return a number with three digits that mean something."""
    return f"{round(number, 2 - math.floor(math.log10(number))):,.0f}" if number > 0 else "0"


def _span(points: Sequence[Point]) -> str:
    seconds = points[-1].at_s - points[0].at_s
    return f"{seconds:.0f} s" if seconds < 180 else f"{seconds / 60:.0f} min"
