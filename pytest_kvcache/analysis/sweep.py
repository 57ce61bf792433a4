"""What a setting costs, measured: the values of one option side by side, and a recommendation that says on what it rests."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_kvcache import units
from pytest_kvcache.analysis.three import beside
from pytest_kvcache.quantities import Missing, Reading, Value

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

CPU_MARGIN = 0.10


@dataclass(frozen=True)
class Figure:
    """One quantity of one variant: the median of its windows with the lowest and the highest of them; Missing where a window lacks it."""

    value: Value
    low: float = 0.0
    high: float = 0.0

    @property
    def number(self) -> float | None:
        """The median; None where it is missing."""
        return self.value.number() if isinstance(self.value, Reading) else None

    @property
    def text(self) -> str:
        """The figure with the range of its windows where they differ."""
        if isinstance(self.value, Missing):
            return "—"
        shown = units.show(round(self.value.number(), 4), self.value.unit)
        if self.low == self.high:
            return shown
        return f"{shown} ({units.show(round(self.low, 4), self.value.unit)} to {units.show(round(self.high, 4), self.value.unit)})"


@dataclass(frozen=True)
class Variant:
    """One value of the swept option as measured. ``cpu`` is CPU seconds of the server per thousand output tokens; ``unsound`` says why it cannot be judged.

    ``beside`` is what its peak usage is never shown without, of its fullest window.
    """

    name: str
    windows: int
    usage: Figure
    payload_share: Figure
    throughput: Figure
    ttft: Figure
    cpu: Figure
    preemptions: Figure
    rejections: Figure
    unsound: str = ""
    beside: str = ""


@dataclass(frozen=True)
class Sweep:
    """The variants in the order in which they were measured, which of them is recommended ("" where none can be), and why in words."""

    variants: tuple[Variant, ...]
    recommended: str
    text: str
    rests_on: str


def variants_of(analyses: Sequence[Analysis]) -> dict[str, list[Analysis]]:
    """Return the Analyses that belong to a sweep, by the setting that each was measured with."""
    found: dict[str, list[Analysis]] = {}
    for analysis in analyses:
        if analysis.run.record.variant:
            found.setdefault(analysis.run.record.variant, []).append(analysis)
    return found


def sweep(groups: Mapping[str, Sequence[Analysis]], *, usage_margin: float, throughput_margin: float, ttft_margin: float) -> Sweep | None:
    """Return the comparison of the variants; None where there are fewer than two.

    The one that the others must beat is the first named. Another is recommended where its peak usage is lower by more than ``usage_margin`` of the pool and by more
    than the windows of both spread, and neither its throughput, its TTFT nor its CPU time is worse by more than the margins (shares).
    """
    variants = tuple(_variant(name, list(analyses)) for name, analyses in groups.items())
    if len(variants) < 2:
        return None
    first, *others = variants
    rests_on = _rests_on(groups)
    sound = [one for one in variants if not one.unsound and one.usage.number is not None]
    if first not in sound or len(sound) < 2:
        why = first.unsound or next((one.unsound for one in others if one.unsound), "") or "peak usage is not known"
        return Sweep(variants, "", f"No recommendation: {why}.", rests_on)
    reasons: list[str] = []
    better: list[Variant] = []
    for one in others:
        if one not in sound:
            reasons.append(f"{one.name} was not judged ({one.unsound or 'its peak usage is not known'})")
            continue
        lower = (first.usage.number or 0.0) - (one.usage.number or 0.0)
        if lower <= usage_margin or one.usage.high >= first.usage.low:
            reasons.append(f"{one.name} does not lower peak usage ({one.usage.text} against {first.usage.text})")
            continue
        cost = _cost(one, first, throughput_margin, ttft_margin)
        if cost:
            reasons.append(f"{one.name} lowers peak usage to {one.usage.text} and costs {cost}")
        else:
            better.append(one)
    if not better:
        return Sweep(variants, first.name, f"Keep {first.name}: {'; '.join(reasons)}.", rests_on)
    best = min(better, key=lambda one: one.usage.number or 0.0)
    text = f"Use {best.name}: peak usage {best.usage.text} against {first.usage.text} with {first.name}, {_compared(best, first)}"
    return Sweep(variants, best.name, text + (f"; {'; '.join(reasons)}" if reasons else "") + ".", rests_on)


def _variant(name: str, analyses: Sequence[Analysis]) -> Variant:
    def figure(quantity: str) -> Figure:
        return _figure([analysis.values.get(quantity, Missing(f"{quantity} was not measured")) for analysis in analyses])

    problems = [problem.text for analysis in analyses for problem in analysis.problems]
    return Variant(
        name,
        len(analyses),
        figure("usage.peak"),
        figure("waste.paged_share"),
        figure("throughput"),
        figure("ttft.p50"),
        _figure([_cpu(analysis) for analysis in analyses]),
        figure("preemptions"),
        figure("rejections"),
        f"the evidence of {name} is unsound: {problems[0]}" if problems else "",
        beside(max(analyses, key=lambda a: peak.number() if isinstance(peak := a.values.get("usage.peak"), Reading) else -1.0)),
    )


def _cpu(analysis: Analysis) -> Value:
    used, tokens = analysis.values.get("server.cpu_s", Missing("not measured")), analysis.values.get("output_tokens", Missing("not measured"))
    if isinstance(used, Missing):
        return used
    if isinstance(tokens, Missing) or not tokens.number():
        return tokens if isinstance(tokens, Missing) else Missing("no token came")
    return Reading(used.number() / tokens.number() * 1000, "s", f"{used.source}, per thousand output tokens")


def _figure(values: Sequence[Value]) -> Figure:
    missing = next((value for value in values if isinstance(value, Missing)), None)
    if missing is not None or not values:
        return Figure(missing if missing is not None else Missing("no window was measured"))
    readings = [value for value in values if isinstance(value, Reading)]
    numbers = [reading.number() for reading in readings]
    return Figure(Reading(statistics.median(numbers), readings[0].unit, readings[0].source), min(numbers), max(numbers))


def _share(one: Figure, first: Figure) -> float | None:
    return one.number / first.number if one.number is not None and first.number else None


def _cost(one: Variant, first: Variant, throughput_margin: float, ttft_margin: float) -> str:
    """Return what a variant costs beyond the margins, "" where nothing; what is not known on one side counts as a cost that nobody can rule out."""
    costs = []
    speed, wait, cpu = _share(one.throughput, first.throughput), _share(one.ttft, first.ttft), _share(one.cpu, first.cpu)
    if speed is None or speed < 1 - throughput_margin:
        costs.append(f"throughput ({one.throughput.text} against {first.throughput.text})")
    if wait is None or wait > 1 + ttft_margin:
        costs.append(f"time to first token ({one.ttft.text} against {first.ttft.text})")
    if cpu is not None and cpu > 1 + CPU_MARGIN:
        costs.append(f"CPU time ({one.cpu.text} against {first.cpu.text} per thousand tokens)")
    for name, mine, before in (("preemptions", one.preemptions, first.preemptions), ("rejections", one.rejections, first.rejections)):
        if (mine.number or 0.0) > (before.number or 0.0):
            costs.append(f"{name} ({mine.text} against {before.text})")
    return " and ".join(costs)


def _compared(best: Variant, first: Variant) -> str:
    parts = []
    for title, mine, before in (
        ("throughput", best.throughput, first.throughput),
        ("TTFT p50", best.ttft, first.ttft),
        ("CPU time", best.cpu, first.cpu),
    ):
        share = _share(mine, before)
        parts.append(f"{title} {share * 100:.0f} % of it" if share is not None else f"{title} not known")
    return ", ".join(parts)


def _rests_on(groups: Mapping[str, Sequence[Analysis]]) -> str:
    """Return what the comparison rests on, and what it does not cover."""
    everything = [analysis for analyses in groups.values() for analysis in analyses]
    counts = {len(analyses) for analyses in groups.values()}
    first = everything[0].run.record
    mean = [value.number() for analysis in everything if isinstance(value := analysis.values.get("length.mean"), Reading)]
    pools = {value.number() for analysis in everything if isinstance(value := analysis.values.get("pool_bytes"), Reading)}
    windows = f"{min(counts)} window{'s' if max(counts) > 1 else ''}" if len(counts) == 1 else f"{min(counts)} to {max(counts)} windows"
    text = f"It rests on {windows} of profile {first.profile} on each value, each value launched once"
    text += f", requests of {statistics.mean(mean):,.0f} tokens on average" if mean else ""
    text += "; the spread between restarts is not covered, and other lengths may answer otherwise"
    if max(counts) == 1:
        text += "; one window shows no spread, so small differences may be noise"
    if len(pools) > 1:
        text += f"; the pools differ ({', '.join(units.show(pool, 'bytes') for pool in sorted(pools))}), so usages are not of one size"
    return text + "."
