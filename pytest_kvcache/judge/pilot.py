"""How many repeats an experiment takes, chosen from how much its first pairs spread and from nothing else.

The first pairs are an internal pilot. What is read of them is the spread of their differences about their own mean; the difference itself,
which is what the verdict rests on, is never looked at, so that the choice cannot favour a side (ICH E9, section 4.4; Kieser and Friede
2003). The verdict is then given once, by the two-stage interval of Stein (1945), which keeps its level whatever number was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_kvcache import units
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.experimentrecords import RepeatChoice, SpreadRecord
from pytest_kvcache.judge import stats
from pytest_kvcache.judge.windows import Asked, Margins, asked, pair, title
from pytest_kvcache.quantities import Missing

CHANCE = 0.90
"""The least chance with which an equal candidate is to pass all gates on window values."""
HOPELESS = 0.10
"""Where the widest quantity passes with a smaller chance than this even with the most pairs, none are added: they would be spent for nothing."""
FEWEST = 3
"""Fewest pairs whose spread may choose: two of them tell next to nothing of it."""
_SPACE = ("usage", "free_blocks", "free_tokens")


@dataclass(frozen=True)
class _Spread:
    """One quantity of one profile: how much it spreads from pair to pair, on the scale of its margin."""

    lane: str
    one: Asked
    unit: str
    spread: float

    @property
    def group(self) -> tuple[str, str]:
        """What misses together: usage and free space are one level, counted from its two ends."""
        base = self.one.quantity.split(".")[0]
        return self.lane, "space" if base in _SPACE else self.one.quantity

    def miss(self, pairs: int, pilot: int) -> float:
        return 1.0 - stats.two_stage_chance(pairs, pilot, self.spread, self.one.bound)


def choose(before: Sequence[Analysis], after: Sequence[Analysis], margins: Margins, pilot: int, most: int) -> RepeatChoice:
    """Return how many pairs an experiment takes in all, from ``pilot`` up to ``most``, by the spread of the first ``pilot`` pairs.

    The number is the least with which an equal candidate passes the gates of all profiles with a chance of CHANCE at least: the chances to miss add
    up at most (Bonferroni), however the quantities hang together; where the cap makes it hopeless, it stays at ``pilot``. Single requests, counts and quality items do not enter. Raises ValueError where
    a pilot is shorter than FEWEST.
    """
    if pilot < FEWEST:
        raise ValueError(f"a pilot has {FEWEST} pairs or more, not {pilot}")
    spreads, left_out = _spreads(before, after, margins, pilot)
    wanted = next((n for n in range(pilot, stats.MOST_WINDOWS + 1) if _misses(spreads, n, pilot) <= 1 - CHANCE), None)
    repeats = min(wanted if wanted is not None else most, most)
    if repeats != wanted and any(found.miss(most, pilot) > 1 - HOPELESS for found in spreads):
        repeats = pilot
    records = [
        SpreadRecord(
            gate=found.one.name,
            quantity=found.one.quantity,
            lane=found.lane,
            spread=found.spread,
            margin=found.one.bound,
            unit=found.unit,
            relative=found.one.relative,
            needs=next((n for n in range(pilot, stats.MOST_WINDOWS + 1) if found.miss(n, pilot) <= 1 - CHANCE), None),
        )
        for found in sorted(spreads, key=_width, reverse=True)
    ]
    return RepeatChoice(pilot, repeats, most, wanted, max(0.0, 1.0 - _misses(spreads, repeats, pilot)), records, left_out)


def _width(found: _Spread) -> float:
    """Return a spread in margins, so coarsely that usage stands before free space, which is its other end."""
    return round(found.spread / found.one.bound, 2) if found.one.bound > 0 else math.inf


def _misses(spreads: Sequence[_Spread], pairs: int, pilot: int) -> float:
    groups: dict[tuple[str, str], float] = {}
    for found in spreads:
        groups[found.group] = max(groups.get(found.group, 0.0), found.miss(pairs, pilot))
    return sum(groups.values())


def _spreads(before: Sequence[Analysis], after: Sequence[Analysis], margins: Margins, pilot: int) -> tuple[list[_Spread], list[str]]:
    """Return the spreads of the first ``pilot`` pairs of every profile, and what has none with the reason."""
    found: list[_Spread] = []
    left_out: list[str] = []
    sides = [_windows(side, pilot) for side in (before, after)]
    for lane in sides[0]:
        left, right, paired = pair(sides[0][lane], sides[1].get(lane, []))
        if not paired or len(left) != pilot:
            left_out.append(f"{lane}: its windows do not pair")
            continue
        for one in asked(left, right, margins):
            values = one.values(left, right)
            if isinstance(values, Missing):
                left_out += [f"{lane} {one.quantity}: {values.reason}"] if not values.cannot_happen else []
                continue
            spread = stats.pair_spread(*values, relative=one.relative)
            if spread is None:
                left_out.append(f"{lane} {one.quantity}: a value of zero has no ratio")
                continue
            found.append(_Spread(lane, one, one.unit(left), spread))
    return found, left_out


def _windows(analyses: Sequence[Analysis], pilot: int) -> dict[str, list[Analysis]]:
    """Return the first windows of each profile that a load pressed."""
    found: dict[str, list[Analysis]] = {}
    for analysis in analyses:
        record = analysis.run.record
        if analysis.facts.loaded and not record.options.get("requests") and record.window < pilot:
            found.setdefault(record.profile, []).append(analysis)
    return found


def said(choice: RepeatChoice) -> str:
    """Return what was chosen and why, in one sentence."""
    first = next(iter(choice.spreads), None)
    if first is None:
        return f"{choice.repeats} repeats: no quantity of the first {choice.pilot} pairs has a spread"
    what = f"{_shown(first)}, and its margin is {_amount(first, first.margin)}"
    if choice.wanted == choice.pilot:
        return f"the {choice.pilot} repeats are enough: {what}"
    if choice.wanted is not None and choice.wanted <= choice.most:
        return f"{choice.repeats} repeats: {what}; an equal candidate then passes with a chance of {CHANCE * 100:.0f} % or more"
    needed = f"{choice.wanted} repeats" if choice.wanted is not None else f"more than {stats.MOST_WINDOWS} repeats"
    if choice.repeats == choice.pilot:
        less = "longer windows, the same arrivals on both sides (--kv-rate) or a quieter machine spread less"
        return f"no more than {choice.repeats} repeats: {needed} would be needed, which --kv-most-repeats={choice.most} is far from: {what}; {less}"
    rest = f"an equal candidate passes with a chance of at least {choice.chance * 100:.0f} %"
    return f"{choice.repeats} repeats, where {needed} would be needed (--kv-most-repeats cuts them): {what}; {rest}"


def _shown(record: SpreadRecord) -> str:
    return f"the {title(record.quantity)} [{record.lane}] spreads {_amount(record, record.spread)} from pair to pair"


def _amount(record: SpreadRecord, size: float) -> str:
    if record.relative:
        return units.show(-math.expm1(-size) if record.quantity == "throughput" else math.expm1(size), "ratio")
    if record.unit in {"blocks", "tokens"}:
        size = float(round(size))
    return units.show(size, record.unit) + (" of the pool" if record.quantity.startswith("usage") else "")
