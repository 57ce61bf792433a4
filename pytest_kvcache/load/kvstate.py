"""What a server's telemetry says of its KV cache while a load by hand runs: the last hours, for Locust's page and the console."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pytest_kvcache.engines import Dialect, RawState, read_values
from pytest_kvcache.quantities import Reading, Value
from pytest_kvcache.units import show

READ = frozenset({"usage", "free_blocks", "free_tokens", "usable_blocks", "pool_blocks", "pool_tokens", "running", "waiting"})
_KEPT = 7200
_SHOWN = 600
_SERIES = ("usage", "free", "running", "waiting")


@dataclass(frozen=True)
class Point:
    """One look: Unix seconds, usage as a share, free blocks (or tokens), requests that run and wait; None where it was not told."""

    wall_s: float
    usage: float | None = None
    free: float | None = None
    running: float | None = None
    waiting: float | None = None


@dataclass
class Replica:
    """One server and its points. ``unit`` is what its pool is counted in, ``pool`` how many there are, ``trouble`` why a look told nothing."""

    name: str
    engine: str = ""
    unit: str = "blocks"
    pool: float | None = None
    trouble: str = ""
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def take(self, dialect: Dialect, raw: RawState, wall_s: float) -> None:
        """Take one look at the server."""
        told = read_values(dialect, raw, wall_s, only=READ).whole
        self.engine = dialect.title
        counted = next((unit for unit in ("blocks", "tokens") if _number(told.get(f"free_{unit}")) is not None), self.unit)
        self.unit = counted
        sizes = ("usable_blocks", "pool_blocks") if counted == "blocks" else ("pool_tokens",)
        self.pool = next((size for name in sizes if (size := _number(told.get(name))) is not None), self.pool)
        point = Point(
            wall_s, _number(told.get("usage")), _number(told.get(f"free_{counted}")), *(_number(told.get(n)) for n in ("running", "waiting"))
        )
        self.points.append(point)
        nothing = point.usage is None and point.free is None and point.running is None
        reason = raw.metrics_reason if raw.metrics is None else ""
        self.trouble = (reason or "its telemetry tells nothing about the KV cache") if nothing else ""

    def failed(self, reason: str, wall_s: float) -> None:
        """Take a look that told nothing; the series then have a gap."""
        self.trouble = reason[:300]
        if self.points and self.points[-1].usage is not None:
            self.points.append(Point(wall_s))

    def line(self) -> str:
        """Return the state now as one line: usage, never without free space and the requests that run and wait."""
        if self.trouble or not self.points:
            return f"KV {self.name}: {self.trouble or 'not read yet'}"
        last = self.points[-1]
        parts = []
        if last.usage is not None:
            parts.append(f"usage {show(last.usage, 'ratio')}")
        if last.free is not None:
            of = f" of {self.pool:,.0f}" if self.pool is not None else ""
            parts.append(f"{last.free:,.0f}{of} {self.unit} free")
        parts += [f"{value:,.0f} {name}" for name, value in (("running", last.running), ("waiting", last.waiting)) if value is not None]
        return f"KV {self.name}: {', '.join(parts)}"

    def series(self) -> dict[str, Any]:
        """Return the points as columns for the page: at most 600, of each stretch the one with the highest usage, for peaks count."""
        points = list(self.points)
        stride = -(-len(points) // _SHOWN)
        if stride > 1:
            stretches = (points[at : at + stride] for at in range(0, len(points), stride))
            points = [max(stretch, key=lambda point: point.usage if point.usage is not None else -1.0) for stretch in stretches]
        now_s = time.time()
        return {
            "name": self.name,
            "engine": self.engine,
            "unit": self.unit,
            "pool": self.pool,
            "trouble": self.trouble,
            "state": self.line(),
            "ago_s": [round(now_s - point.wall_s, 1) for point in points],
            **{name: [getattr(point, name) for point in points] for name in _SERIES},
        }


def _number(value: Value | None) -> float | None:
    """Return a finite number; None for everything else, which JSON could not say."""
    if not isinstance(value, Reading) or isinstance(value.value, str):
        return None
    number = value.number()
    return number if math.isfinite(number) else None
