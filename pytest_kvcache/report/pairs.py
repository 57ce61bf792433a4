"""Pair by pair: what each repeat measured before and after a change, so that one that differs is seen beside the spread of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_kvcache.analysis.three import beside
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.judge.windows import Asked, Margins, asked, pair
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import GateRecord
from pytest_kvcache.report.escape import plain
from pytest_kvcache.report.model import SessionView, at_peak, is_probe, show_number
from pytest_kvcache.report.sections import Table
from pytest_kvcache.report.svg import AFTER, BOUND, INK, MUTED, canvas, context, to_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PAIRS = 60


@dataclass(frozen=True)
class Compared:
    """One quantity of the pairs of a load: its values on both sides in the order of the pairs, and the gate on it where there is one."""

    one: Asked
    unit: str
    before: Sequence[float]
    after: Sequence[float]
    gate: GateRecord | None

    @property
    def changes(self) -> list[float]:
        """By how much each pair changed, in percent: of the value before, or points of a ratio; in its own unit otherwise."""
        pairs = zip(self.before, self.after, strict=True)
        if self.one.relative:
            return [100 * (new / old - 1) if old else math.nan for old, new in pairs]
        return [(100 if self.unit == "ratio" else 1) * (new - old) for old, new in pairs]

    def on_scale(self, worse: float) -> float:
        """Return an end of the gate's interval, or its bound, on the scale of ``changes``; there it is how much worse, and here which way."""
        way = 1.0 if self.one.higher_is_worse else -1.0
        return way * worse * (100 if self.one.relative or self.unit == "ratio" else 1)

    @property
    def scale(self) -> str:
        """The unit of ``changes``."""
        if self.one.relative:
            return "%"
        return ("% of the pool" if self.one.quantity.startswith("usage") else "points") if self.unit == "ratio" else self.unit


@dataclass(frozen=True)
class Pairs:
    """The pairs of one load. ``repeats`` are their numbers from 1, ``first`` the side that was measured first in each.

    ``beside`` is what a usage ratio is never shown without, of the fullest window of each side.
    """

    name: str
    repeats: Sequence[int]
    first: Sequence[str]
    compared: Sequence[Compared]
    beside: str = ""

    def table(self) -> Table:
        """Return each pair with what it measured on both sides."""
        table = Table(["pair", "first", *(found.one.title for found in self.compared)], labels=2)
        for row, (number, first) in enumerate(zip(self.repeats, self.first, strict=True)):
            cells = [f"{show_number(c.before[row], c.unit)} → {show_number(c.after[row], c.unit)}" for c in self.compared]
            table.rows.append([str(number), first, *cells])
        table.notes += [self.beside] if self.beside and any(found.one.quantity == "usage.hottest" for found in self.compared) else []
        farthest = [text for found in self.compared if (text := self._farthest(found))]
        table.notes += [f"Farthest from the others: {'; '.join(farthest)}."] if farthest else []
        return table

    def _farthest(self, found: Compared) -> str:
        """Return the pair whose difference is farthest from the middle one, where that is far: over the margin, and three times as far as half of them are."""
        changes = found.changes
        if len(changes) < 4 or any(map(math.isnan, changes)):
            return ""
        middle = _median(changes)
        away = [abs(change - middle) for change in changes]
        usual = _median(away)
        most = max(range(len(away)), key=away.__getitem__)
        if away[most] <= max(3 * usual, abs(found.on_scale(found.one.margin))):
            return ""
        return f"{found.one.title} in pair {self.repeats[most]} ({changes[most]:+.3g} {found.scale}, the middle is {middle:+.3g})"

    def draw(self, key: str) -> str:
        """Return a panel for each quantity as SVG: the change of every pair, the interval of their mean, and the margin."""
        wide = max(len(self.compared), 1)
        with context():
            figure = canvas(2.7 * wide, 1.75)
            grid = figure.subplots(1, wide, squeeze=False)
            for axes, found in zip(grid[0], self.compared, strict=False):
                _panel(axes, found, self.repeats)
            figure.subplots_adjust(left=0.16 / wide, right=1 - 0.03 / wide, top=0.86, bottom=0.22, wspace=0.24)
            words = "; ".join(f"{c.one.title}: {', '.join(f'{change:+.3g}' for change in c.changes)} {c.scale}" for c in self.compared)
            return to_text(figure, key, f"{self.name}, change of each pair. {words}")


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _panel(axes: Axes, found: Compared, repeats: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    changes, gate = found.changes, found.gate
    axes.axhline(0, color=MUTED, linewidth=0.8)
    if gate is not None and gate.low is not None and gate.high is not None:
        ends = sorted(found.on_scale(end) for end in (gate.low, gate.high))
        axes.axhspan(*ends, color=AFTER, alpha=0.15, linewidth=0)
    if gate is not None and gate.bound is not None:
        axes.axhline(found.on_scale(gate.bound), color=BOUND, linewidth=0.9, linestyle=(0, (4, 2)))
    axes.plot(repeats, changes, linestyle="none", marker="o", markersize=3.5, color=AFTER)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlim(min(repeats) - 0.6, max(repeats) + 0.6)
    axes.set_xlabel("pair", fontsize=7.5, labelpad=1)
    axes.grid(visible=False, axis="x")
    axes.set_title(f"{found.one.title}, change in {found.scale}", loc="left", fontsize=8, color=INK, pad=4)


def pairs(view: SessionView) -> list[Pairs]:
    """Return the loads whose windows pair, two or more of them; a session in which nothing was compared has none."""
    found: list[Pairs] = []
    for profile in view.profiles() if view.compared else ():
        sides = [[a for a in view.of(profile, side) if a.facts.loaded and not is_probe(a)] for side in ("before", "after")]
        before, after, paired = pair(*sides)
        if not paired or not 2 <= len(before) <= MAX_PAIRS:
            continue
        gates = {gate.name: gate for gate in view.verdict.gates if gate.lane == before[0].run.record.profile and gate.applicable}
        compared = []
        for one in asked(before, after, Margins()):
            values = one.values(before, after)
            if isinstance(values, Missing) or one.name == "free_not_worse":
                continue
            gate = gates.get(one.name)
            if gate is not None and gate.bound is not None and (gate.unit == "ratio") != (one.relative or one.unit(before) == "ratio"):
                gate = None  # judged on another scale than that of these margins
            compared.append(Compared(one, one.unit(before), *values, gate))
        if compared:
            starts = [[a.run.record.load_started_wall_s for a in side] for side in (before, after)]
            first = ["after" if new < old else "before" for old, new in zip(*starts, strict=True)]
            found.append(Pairs(plain(profile, 60), [a.run.record.window + 1 for a in before], first, compared, _beside(before, after)))
    return found


def _beside(before: Sequence[Analysis], after: Sequence[Analysis]) -> str:
    fullest = {"before": at_peak(before), "after": at_peak(after)}
    return "; ".join(f"{word}: {plain(beside(analysis), 400)}" for word, analysis in fullest.items() if analysis is not None)
