"""What one load of another tool is, and how its figures become our quantities."""

from __future__ import annotations

import calendar
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_kvcache.quantities import KNOWN, Missing, Reading, Value

SHARES = (50, 95)
FEWEST_ROUNDS = 5
FEWEST_IN_FLIGHT = 0.8
ISO = "%Y-%m-%dT%H:%M:%S"
"""How AIPerf writes a moment."""


@dataclass(frozen=True)
class Result:
    """One load: the tool, its version where it says so, a short name, the model, our quantities, and what the load was.

    ``problems`` is what makes its figures no evidence (cancelled, no request answered), ``notes`` what one must know to read them. ``benchmark``
    names the measurement across files of one tool. Where the tool also read the server, ``engine``, its version and its ``config`` say which it was.
    """

    tool: str
    name: str
    values: Mapping[str, Value]
    version: str = ""
    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    began_wall_s: float = 0.0
    ended_wall_s: float = 0.0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    benchmark: str = ""
    engine: str = ""
    engine_version: str = ""
    config: Mapping[str, Value] = field(default_factory=dict)


def merged(load: Result, server: Result, note: str) -> Result:
    """Return a load with what the same tool read of the server meanwhile. What both tell is taken from the load."""
    told = {name: value for name, value in server.values.items() if isinstance(value, Reading) or name not in load.values}
    return replace(
        load,
        values={**told, **{name: value for name, value in load.values.items() if isinstance(value, Reading) or name not in told}},
        problems=(*load.problems, *server.problems),
        notes=(*load.notes, note, *server.notes),
        engine=server.engine,
        engine_version=server.engine_version,
        config=server.config,
    )


class Figures:
    """Collects the quantities of one load; whatever is not put in stays Missing, with the tool's name in the reason."""

    def __init__(self, tool: str) -> None:
        self.tool = tool
        self.values: dict[str, Value] = {}

    def put(self, name: str, value: Any, source: str, *, scale: float = 1.0) -> None:
        """Take a figure times ``scale``; what is no finite number is left out."""
        if (number := as_number(value)) is not None:
            self.values[name] = Reading(number * scale, KNOWN[name].unit, f"{self.tool}: {source}")

    def lack(self, name: str, why: str) -> None:
        """Say why a quantity is not there, unless it is."""
        if not isinstance(self.values.get(name), Reading):
            self.values[name] = Missing(why)

    def times(self, name: str, by_share: Mapping[int, Any], source: str, *, scale: float, held_back: str = "", ask: str = "") -> None:
        """Take the percentiles of a time that counts from the moment of sending, as all these tools count.

        From the intended start they are the same where nothing held a request back; ``held_back`` says what did. ``ask`` says how the tool
        is told to write a percentile that it did not.
        """
        for share in SHARES:
            self.put(f"{name}_sent.p{share}", by_share.get(share), source, scale=scale)
            self.lack(f"{name}_sent.p{share}", f"{self.tool} did not write it{f': {ask}' if ask else ''}")
            if held_back:
                self.lack(f"{name}.p{share}", f"{held_back}, and {self.tool} counts from the moment of sending: name {name}_sent.p{share}")
            else:
                self.put(f"{name}.p{share}", by_share.get(share), f"{source}, from the moment of sending", scale=scale)
                self.lack(f"{name}.p{share}", f"{self.tool} did not write it{f': {ask}' if ask else ''}")

    def requests(self, ok: Any, failed: Any, source: str) -> None:
        """Take the counts of requests: those answered, and those that failed (None: not told)."""
        self.put("requests.ok", ok, source)
        if as_number(ok) is None or as_number(failed) is None:
            self.lack("rejections", f"{self.tool} does not say how many requests failed")
            return
        self.put("rejections", failed, source)
        self.put("requests.sent", float(ok) + float(failed), source)


def held_up(achieved: float | None, asked: float | None, sent: float | None) -> tuple[str, ...]:
    """Return why a closed loop is no evidence: fewer requests in flight on average than it was to keep there; nothing where that cannot be told.

    A load of few rounds has fewer at its beginning and end, which is no fault.
    """
    if achieved is None or not asked or not sent or sent < FEWEST_ROUNDS * asked or achieved >= FEWEST_IN_FLIGHT * asked:
        return ()
    return (f"{achieved:.1f} requests were in flight on average, and {asked:g} were to be: the load client may have been the bottleneck",)


def failures(failed: float | None, ok: float | None) -> tuple[str, ...]:
    """Return what must stand beside times that leave failed requests out: a server that refuses is quick."""
    return (f"{failed:g} of {failed + ok:g} requests failed, and none of its times counts them",) if failed and ok is not None else ()


def as_number(value: Any) -> float | None:
    """Return a finite number; None for all else, also for a truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers(value: Any) -> list[float]:
    """Return the finite numbers of a list; none where it is no list."""
    return [number for item in value if (number := as_number(item)) is not None] if isinstance(value, list) else []


def quantiles(values: Sequence[float]) -> dict[int, float]:
    """Return the percentiles that we name, linear between neighbours; none of nothing."""
    ordered = sorted(values)
    found = {}
    for share in SHARES if ordered else ():
        at = (len(ordered) - 1) * share / 100
        low = math.floor(at)
        high = min(low + 1, len(ordered) - 1)
        found[share] = ordered[low] + (ordered[high] - ordered[low]) * (at - low)
    return found


def section(value: Any, *keys: str) -> dict[str, Any]:
    """Return a dictionary inside dictionaries; an empty one where it is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def utc_s(moment: str, form: str) -> float:
    """Return the Unix time of a moment in a form of ``strptime`` that bears no zone and is taken as UTC; 0 where it is none. Fractions are left out."""
    try:
        return float(calendar.timegm(time.strptime(moment.split(".", maxsplit=1)[0], form)))
    except ValueError:
        return 0.0


def text(value: Any, limit: int = 120) -> str:
    """Return a short text; empty where it is none."""
    return value[:limit] if isinstance(value, str) else ""
