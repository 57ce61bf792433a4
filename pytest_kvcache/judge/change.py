"""The gates of a change: the windows of one profile before and after, each quantity by its own test, an equal candidate passing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_kvcache import units
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, PASS
from pytest_kvcache.judge import stats
from pytest_kvcache.judge.gates import readings, total
from pytest_kvcache.judge.wording import MISSED, beside, gate, missing, show
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import GateRecord, ValueRecord
from pytest_kvcache.settings import Settings

_SURE = f"{stats.CONFIDENCE * 100:.0f} %"
_PAIRED = f"non-inferiority by the t interval of paired windows (same prompts before and after), one-sided {_SURE}"
_WELCH = f"non-inferiority by Welch's t interval over windows, one-sided {_SURE}"
TIME_FLOOR_S = 0.010
"""A time to first token may always grow by this much: a quarter of two milliseconds is nothing that anybody waits for."""
COUNT_MARGIN = 0.5
"""By how much the rate of rejections or preemptions may be higher, as a share, before a change counts as worse."""


@dataclass(frozen=True, slots=True)
class Margins:
    """How much worse a change may be: usage and free space as a share of the pool, the others as a share of their value before.

    ``rare`` is how high the rate of rejections or preemptions need not be excluded where none was seen. The 95th percentiles are judged
    where a margin for them is given: of short windows they rest on few requests. ``reuse`` is how much of the prefix cache's hit rate may be lost.
    """

    usage: float = 0.02
    ttft: float = 0.25
    throughput: float = 0.10
    quality: float = 0.02
    counts: float = COUNT_MARGIN
    rare: float = stats.RARE
    ttft_p95: float | None = None
    latency_p95: float | None = None
    reuse: float = 0.05

    @classmethod
    def of(cls, settings: Settings) -> Margins:
        """Return the margins of a session."""
        return cls(settings.usage_margin, settings.ttft_margin, settings.throughput_margin, settings.quality_margin, rare=settings.rare_margin)


def not_worse(before: Sequence[Analysis], after: Sequence[Analysis], margins: Margins) -> list[GateRecord]:
    """Return the gates on the windows of one profile before and after a change: usage, free space, times, throughput, counts."""
    free = next((unit for unit in ("blocks", "tokens") if _known(before, after, f"free_{unit}.tightest")), "blocks")
    tails = {"ttft.p95": margins.ttft_p95, "latency.p95": margins.latency_p95}
    return [
        _windows("usage_not_worse", "usage.hottest", before, after, margins.usage, higher_is_worse=True, relative=False, note=_pools(before, after)),
        _free(f"free_{free}.tightest", before, after, margins.usage),
        _time("ttft_not_worse", "ttft.p50", before, after, margins.ttft),
        *(_time(f"{name.replace('.', '_')}_not_worse", name, before, after, margin) for name, margin in tails.items() if margin is not None),
        _windows("throughput_not_worse", "throughput", before, after, margins.throughput, higher_is_worse=False, relative=True),
        _counts("rejections_not_worse", "rejections", before, after, margins),
        _counts("preemptions_not_worse", "preemptions", before, after, margins),
        *_reuse(before, after, margins.reuse),
    ]


def _reuse(before: Sequence[Analysis], after: Sequence[Analysis], margin: float) -> list[GateRecord]:
    """Return the gate on what the prefix cache gives, where the profile shares prefixes and the side before told: a cache that went off shows here."""
    if not any(analysis.facts.sharing_meant for analysis in before) or isinstance(readings(before, "prefix.hit_rate"), Missing):
        return []
    return [_windows("prefix_reuse_not_worse", "prefix.hit_rate", before, after, margin, higher_is_worse=False, relative=False)]


def _known(before: Sequence[Analysis], after: Sequence[Analysis], name: str) -> bool:
    return not any(isinstance(readings(side, name), Missing) for side in (before, after))


def _numbers(analyses: Sequence[Analysis], name: str) -> list[float] | Missing:
    found = readings(analyses, name)
    return found if isinstance(found, Missing) else [reading.number() for _, reading in found]


def _mean(numbers: Sequence[float], unit: str) -> Reading:
    mean = sum(numbers) / len(numbers)
    return Reading(float(round(mean)) if unit in {"blocks", "tokens"} else mean, unit, f"mean of {len(numbers)} window{'s' * (len(numbers) != 1)}")


def _pair(before: Sequence[Analysis], after: Sequence[Analysis]) -> tuple[Sequence[Analysis], Sequence[Analysis], bool]:
    """Return the windows of both sides in one order, and whether they pair: each number once a side, with an equal workload."""
    sides = [{analysis.run.record.window: analysis for analysis in side} for side in (before, after)]
    if len(sides[0]) != len(before) or len(sides[1]) != len(after) or set(sides[0]) != set(sides[1]):
        return before, after, False
    order = sorted(sides[0])
    alike = all(sides[0][n].run.record.workload == sides[1][n].run.record.workload for n in order)
    return [sides[0][n] for n in order], [sides[1][n] for n in order], alike


def _windows(
    name: str,
    quantity: str,
    before: Sequence[Analysis],
    after: Sequence[Analysis],
    margin: float,
    *,
    higher_is_worse: bool,
    relative: bool,
    note: str = "",
    tokens_a_block: tuple[float, float] | None = None,
) -> GateRecord:
    before, after, paired = _pair(before, after)
    method = _PAIRED if paired else _WELCH
    both = [*before, *after]
    left, right = _numbers(before, quantity), _numbers(after, quantity)
    if isinstance(left, Missing) or isinstance(right, Missing):
        lacking = left if isinstance(left, Missing) else right
        assert isinstance(lacking, Missing)
        side = "before" if isinstance(left, Missing) else "after"
        reason = lacking if lacking.cannot_happen else Missing(f"{side} the change: {lacking.reason}")
        return missing(name, quantity, reason, both, side="after", method=method)
    unit = both[0].values[quantity].unit  # type: ignore[union-attr]
    if tokens_a_block is not None:
        unit = "tokens"
        left, right = ([number * size for number in side] for side, size in zip((left, right), tokens_a_block, strict=True))
    found = stats.not_worse(left, right, margin, lower_is_better=higher_is_worse, relative=relative, paired=paired)
    old, new = _mean(left, unit), _mean(right, unit)
    amount = "ratio" if relative else unit
    step = " of the pool" if unit == "ratio" and quantity.startswith("usage") else ""
    allowed = units.show(margin, amount) + step
    direction = "higher" if higher_is_worse else "lower"
    text = f"{show(old)} before, {show(new)} after (means of {len(left)} and {len(right)} windows)"
    if found.estimate is None or found.high is None or found.low is None:
        text = f"cannot tell: {text}: {found.why}"
    else:
        ends = [max(end, 0.0) for end in (found.low, found.high)]
        if amount in {"blocks", "tokens"}:
            ends = [float(math.floor(ends[0])), float(math.ceil(ends[1]))]
        least, most = (units.show(end, amount) + step for end in ends)
        amount_text = f"at least {least}" if found.verdict == FAIL else f"at most {most}" if ends[1] > 0 else "not"
        text += f": {amount_text} {direction} ({_SURE}), and {allowed} may be"
    if found.verdict == INCONCLUSIVE:
        text += f"; {_more(found, len(left), len(right))}"
    # polled after the change, a peak is at least what was seen: only what was missed before it could excuse it
    polled = quantity.startswith(("usage", "free")) and not any(problem.rule in MISSED for analysis in before for problem in analysis.problems)
    usage = f"before: {beside(_fullest(before))}; after: {beside(_fullest(after))}" if quantity.startswith("usage") else ""
    return gate(
        name,
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
        side="after",
        fails_despite=MISSED if polled else (),
    )


def _fullest(analyses: Sequence[Analysis]) -> Analysis:
    """Return the window with the highest peak usage: the one whose three numbers stand beside the ratios of its side."""
    return max(analyses, key=lambda a: peak.number() if isinstance(peak := a.values.get("usage.peak"), Reading) else -1.0)


def _more(found: stats.Worsening, left: int, right: int) -> str:
    if found.needed is None:
        return "more windows of this spread would hardly decide it"
    return f"about {found.needed} windows a side would decide it (there are {left} and {right})"


def _free(quantity: str, before: Sequence[Analysis], after: Sequence[Analysis], share: float) -> GateRecord:
    """Judge free space: it may fall by the usage margin of the pool before."""
    unit = quantity.removeprefix("free_").removesuffix(".tightest")
    pools = [_pool(analysis, unit) for analysis in before]
    known = [pool for pool in pools if pool is not None]
    if not known:
        return missing("free_not_worse", quantity, Missing("the size of the pool before is not known"), [*before, *after], side="after")
    margin = float(max(round(share * sum(known) / len(known)), 1))
    sizes = [_block_size(side) for side in (before, after)] if unit == "blocks" else [None, None]
    if sizes[0] is not None and sizes[1] is not None and sizes[0] != sizes[1]:
        # blocks of two sizes are two units: what they hold is compared
        scales = (sizes[0], sizes[1])
        return _windows("free_not_worse", quantity, before, after, margin * sizes[0], higher_is_worse=False, relative=False, tokens_a_block=scales)
    return _windows("free_not_worse", quantity, before, after, margin, higher_is_worse=False, relative=False)


def _block_size(analyses: Sequence[Analysis]) -> float | None:
    value = analyses[0].values.get("block_size")
    return value.number() if isinstance(value, Reading) else None


def _pool(analysis: Analysis, unit: str) -> float | None:
    names = ("usable_blocks", "pool_blocks") if unit == "blocks" else ("pool_tokens",)
    return next((v.number() for name in names if isinstance(v := analysis.values.get(name), Reading)), None)


def _pools(before: Sequence[Analysis], after: Sequence[Analysis]) -> str:
    """Return how the pool itself changed, in words; a smaller ratio of a larger pool is not less use."""
    parts = []
    for name, peak in (("pool_blocks", "used_blocks.peak"), ("pool_tokens", "used_tokens.peak"), ("pool_bytes", "")):
        old, new = before[0].values.get(name), after[0].values.get(name)
        if not isinstance(old, Reading) or not isinstance(new, Reading) or old.value == new.value:
            continue
        text = f"the pool was {show(old)} and is {show(new)}"
        most = [max(side) for side in (_numbers(before, peak), _numbers(after, peak)) if not isinstance(side, Missing)] if peak else []
        if len(most) == 2:
            text += f" (used at most {most[0]:,.0f} and {most[1]:,.0f})"
        parts.append(text)
    return "; ".join(parts)


def _time(name: str, quantity: str, before: Sequence[Analysis], after: Sequence[Analysis], margin: float) -> GateRecord:
    left = _numbers(before, quantity)
    mean = 0.0 if isinstance(left, Missing) else sum(left) / len(left)
    if 0 < margin * mean < TIME_FLOOR_S:
        return _windows(name, quantity, before, after, TIME_FLOOR_S, higher_is_worse=True, relative=False)
    return _windows(name, quantity, before, after, margin, higher_is_worse=True, relative=True)


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
