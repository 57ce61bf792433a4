"""The gates of a change: the windows of one profile before and after, each quantity by its own test, an equal candidate passing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_kvcache import units
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, PASS
from pytest_kvcache.judge import stats
from pytest_kvcache.judge.gates import total
from pytest_kvcache.judge.windows import COUNT_MARGIN, TIME_FLOOR_S, Asked, Margins, asked, numbers, pair, pilot
from pytest_kvcache.judge.wording import MISSED, beside, gate, missing, readings, show
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import GateRecord, ValueRecord

_SURE = f"{stats.CONFIDENCE * 100:.0f} %"
_BOTH_WAYS = f"{(2 * stats.CONFIDENCE - 1) * 100:.0f} % interval"
_PAIRED = f"non-inferiority by the t interval of paired windows (same prompts before and after), one-sided {_SURE}"
_TWO_STAGE = f"non-inferiority by Stein's two-stage t interval of paired windows, whose number the spread of the first {{}} chose, one-sided {_SURE}"
_WELCH = f"non-inferiority by Welch's t interval over windows, one-sided {_SURE}"

__all__ = ["COUNT_MARGIN", "TIME_FLOOR_S", "Margins", "not_worse", "probe_not_worse"]
_COUNTED = (("rejections_not_worse", "rejections"), ("preemptions_not_worse", "preemptions"))


def not_worse(before: Sequence[Analysis], after: Sequence[Analysis], margins: Margins) -> list[GateRecord]:
    """Return the gates on the windows of one profile before and after a change: usage, free space, times, throughput, counts."""
    found: list[GateRecord] = []
    reuse: list[GateRecord] = []
    for one in asked(before, after, margins):
        note = _pools(before, after) if one.quantity == "usage.hottest" else ""
        (reuse if one.quantity == "prefix.hit_rate" else found).append(_windows(one, before, after, note))
    counts = [_counts(name, quantity, before, after, margins) for name, quantity in _COUNTED]
    return [*found, *counts, *reuse]


def _mean(numbers: Sequence[float], unit: str) -> Reading:
    mean = sum(numbers) / len(numbers)
    return Reading(float(round(mean)) if unit in {"blocks", "tokens"} else mean, unit, f"mean of {len(numbers)} window{'s' * (len(numbers) != 1)}")


def _windows(one: Asked, before: Sequence[Analysis], after: Sequence[Analysis], note: str = "") -> GateRecord:
    before, after, paired = pair(before, after)
    both = [*before, *after]
    chosen = pilot(before, after) if paired else 0
    method = (_TWO_STAGE.format(chosen) if chosen and chosen < len(before) else _PAIRED) if paired else _WELCH
    values = one.values(before, after)
    if isinstance(values, Missing):
        return missing(one.name, one.quantity, values, both, side="after", method=method)
    left, right = values
    unit, quantity, margin, relative = one.unit(before), one.quantity, one.margin, one.relative
    found = stats.not_worse(left, right, margin, lower_is_better=one.higher_is_worse, relative=relative, paired=paired, pilot=chosen)
    old, new = _mean(left, unit), _mean(right, unit)
    amount = "ratio" if relative else unit
    step = " of the pool" if unit == "ratio" and quantity.startswith("usage") else ""
    allowed = units.show(margin, amount) + step
    direction, opposite = ("higher", "lower") if one.higher_is_worse else ("lower", "higher")
    better = ""
    text = f"{show(old)} before, {show(new)} after (means of {len(left)} and {len(right)} windows)"
    if found.estimate is None or found.high is None or found.low is None:
        text = f"cannot tell: {text}: {found.why}"
    else:
        ends = [max(end, 0.0) for end in (found.low, found.high)]
        if amount in {"blocks", "tokens"}:
            ends = [float(math.floor(ends[0])), float(math.ceil(ends[1]))]
        least, most = (units.show(end, amount) + step for end in ends)
        if found.high < 0:
            better = _better(found, amount, step, opposite)
        amount_text = f"at least {least}" if found.verdict == FAIL else f"at most {most}" if ends[1] > 0 else "not"
        text += f": {better}, and {allowed} {direction} may be" if better else f": {amount_text} {direction} ({_SURE}), and {allowed} may be"
    if found.verdict == INCONCLUSIVE:
        text += f"; {_more(found, len(left), len(right))}"
        text += _drifts(before, after) if quantity.startswith("usage") and found.estimate is not None else ""
    if missed := one.missed(before, after):
        text += f"; in {missed} of {len(both)} windows our own request log shows more than was polled, and counts"
    # polled after the change, a peak is at least what was seen: only what was missed before it could excuse it
    polled = quantity.startswith(("usage", "free")) and not any(problem.rule in MISSED for analysis in before for problem in analysis.problems)
    usage = f"before: {beside(_fullest(before))}; after: {beside(_fullest(after))}" if quantity.startswith("usage") else ""
    return gate(
        one.name,
        quantity,
        found.verdict,
        text + (f"; {note}" if note else ""),
        both,
        decisive=after[0],
        unit=amount,
        before=ValueRecord.of(old),
        after=ValueRecord.of(new),
        bound=margin,
        bound_text=f"at most {allowed} {direction}",
        low=found.low,
        high=found.high,
        method=method + (", of logarithms" if relative else ""),
        beside=usage,
        better=better,
        side="after",
        fails_despite=MISSED if polled else (),
    )


def _better(found: stats.Worsening, amount: str, step: str, way: str) -> str:
    """Return by how much the side after is better, with both ends of the interval, none of which is generous."""
    assert found.estimate is not None
    assert found.high is not None
    assert found.low is not None
    ends = [-found.high, -found.low]
    if amount in {"blocks", "tokens"}:
        ends = [float(math.floor(ends[0])), float(math.ceil(ends[1]))]
    least, most = (units.show(end, amount) for end in ends)
    if least == most:
        return f"{most}{step} {way}"
    middle = -found.estimate
    shown = units.show(float(round(middle)) if amount in {"blocks", "tokens"} else middle, amount)
    return f"{shown}{step} {way}, between {least} and {most} ({_BOTH_WAYS})"


def _fullest(analyses: Sequence[Analysis]) -> Analysis:
    """Return the window with the highest peak usage: the one whose three numbers stand beside the ratios of its side."""
    return max(analyses, key=lambda a: peak.number() if isinstance(peak := a.values.get("usage.peak"), Reading) else -1.0)


def _more(found: stats.Worsening, left: int, right: int) -> str:
    if found.needed is None:
        return "more windows of this spread would hardly decide it"
    return f"about {found.needed} windows a side would decide it (there are {left} and {right})"


def _drifts(before: Sequence[Analysis], after: Sequence[Analysis]) -> str:
    """Return what helps where a peak spreads because users who wait for each other's answers drift apart from one run to the next."""
    both = [*before, *after]
    closed = not any(analysis.facts.due or analysis.run.record.imported_from for analysis in both)
    helps = ["an open loop (--kv-rate) sends both sides the same arrivals, and a peak then spreads less"] if closed else []
    if all(analysis.run.record.launch_id for analysis in both) and not pilot(before, after):
        helps.append("--kv-most-repeats takes as many repeats as the spread asks for")
    if not helps:
        return ""
    why = "; users who ask again when they are answered overlap otherwise each time" if closed else ""
    return f"{why}: {'; '.join(helps)}" if why else f"; {helps[0]}"


def _pools(before: Sequence[Analysis], after: Sequence[Analysis]) -> str:
    """Return how the pool itself changed, in words; a smaller ratio of a larger pool is not less use."""
    parts = []
    for name, peak in (("pool_blocks", "used_blocks.peak"), ("pool_tokens", "used_tokens.peak"), ("pool_bytes", "")):
        old, new = before[0].values.get(name), after[0].values.get(name)
        if not isinstance(old, Reading) or not isinstance(new, Reading) or old.value == new.value:
            continue
        text = f"the pool was {show(old)} and is {show(new)}"
        most = [max(side) for side in (numbers(before, peak), numbers(after, peak)) if not isinstance(side, Missing)] if peak else []
        if len(most) == 2:
            text += f" (used at most {most[0]:,.0f} and {most[1]:,.0f})"
        parts.append(text)
    return "; ".join(parts)


def _counts(name: str, quantity: str, before: Sequence[Analysis], after: Sequence[Analysis], margins: Margins) -> GateRecord:
    margin = margins.counts
    both = [*before, *after]
    sides: list[list[tuple[int, float]]] = []
    for side in (before, after):
        events, sent = readings(side, quantity), readings(side, "requests.sent")
        if isinstance(events, Missing) or isinstance(sent, Missing):
            lacking = events if isinstance(events, Missing) else sent
            assert isinstance(lacking, Missing)
            return missing(name, quantity, lacking, both, side="after")
        sides.append([(int(k.number()), e.number()) for (_, k), (_, e) in zip(events, sent, strict=True)])
    old, new = total(before, quantity), total(after, quantity)
    found = stats.counts_not_worse(sides[0], sides[1], margin, margins.rare)
    exposure = [sum(e for _, e in side) for side in sides]
    counts = [sum(k for k, _ in side) for side in sides]
    text = f"{counts[0]} of {exposure[0]:.0f} requests before, {counts[1]} of {exposure[1]:.0f} after"
    if quantity == "preemptions":
        text = f"{counts[0]} over {exposure[0]:.0f} requests before, {counts[1]} over {exposure[1]:.0f} after"
    if counts[1] == 0:
        text += f": none after the change; at most {units.show(found.rate_upper, 'ratio')} of requests ({_SURE})"
        text += f", and {units.show(margins.rare, 'ratio')} may be" if found.verdict != PASS else ""
    elif found.verdict == PASS:
        text += f": at most {found.ratio_upper:.2f} times the rate before ({_SURE}), and {1 + margin:.2f} times may be"
    elif found.verdict == FAIL:
        text += f": the rate rose to more than {1 + margin:.2f} times (p = {found.p_worse:.2g})"
    else:
        text += f": a rise above {1 + margin:.2f} times is neither shown (p = {found.p_worse:.2g}) nor excluded"
    if found.verdict == INCONCLUSIVE:
        there = exposure[1]
        text += (
            f"; about {found.needed:,.0f} requests a side would decide it (there are {there:,.0f})"
            if found.needed
            else "; more would hardly decide it"
        )
        windows = len(after)
        text += f", or {math.ceil(found.needed / there * windows)} windows of these" if found.needed and there else ""
    if found.dispersion > 1.5:
        text += f"; they come in bursts, so they were weighed as {found.dispersion:.1f} times fewer"
    return gate(
        name,
        quantity,
        found.verdict,
        text,
        both,
        decisive=after[0],
        before=ValueRecord.of(old),
        after=ValueRecord.of(new),
        unit=old.unit if isinstance(old, Reading) else "",
        bound=1 + margin,
        bound_text=f"at most {1 + margin:.2f} times the rate before; where there is none, at most {units.show(margins.rare, 'ratio')} not excluded",
        method=f"exact Poisson bound of none, exact conditional binomial test of two rates, one-sided {_SURE}",
        side="after",
        fails_despite=MISSED,
    )


def probe_not_worse(before: Sequence[Analysis], after: Sequence[Analysis]) -> GateRecord:
    """Judge single requests: one that was answered before must be answered after, one that was refused may also be answered."""
    name, quantity = "probe_not_worse", "requests.ok"
    both = [*before, *after]
    outcome = [_outcome(side) for side in (before, after)]
    verdict = PASS if outcome[1] in {outcome[0], "answered"} else FAIL
    text = f"the request was {outcome[0]} before and {outcome[1]} after"
    old, new = total(before, quantity), total(after, quantity)
    return gate(name, quantity, verdict, text, both, decisive=after[0], before=ValueRecord.of(old), after=ValueRecord.of(new), side="after")


def _outcome(analyses: Sequence[Analysis]) -> str:
    kinds = sorted({kind for analysis in analyses for kind in analysis.rejections})
    if kinds:
        return ", ".join(kinds)
    served = total(analyses, "requests.ok")
    return "answered" if isinstance(served, Reading) and served.number() else "not answered in full"
