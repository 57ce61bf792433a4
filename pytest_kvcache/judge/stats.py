"""The statistics of the gates, on scipy's distribution functions (scipy.special: a tenth of the import of scipy.stats). Every bound is one-sided at CONFIDENCE unless it says otherwise.

Window values (a peak, a percentile, a rate) are compared by the t interval of their paired differences where windows of the two sides
had the same prompts, by Welch's t interval where they had not; counts by the exact conditional binomial test of two Poisson rates,
quality by the exact McNemar test on paired items, and single rates by Clopper-Pearson.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, PASS

CONFIDENCE = 0.95
FEWEST_WINDOWS = 2
MOST_WINDOWS = 200
MOST_ITEMS = 100_000
MOST_TIMES = 50
RARE = 0.10
"""How high the upper bound of a rate may be, per request, where no event was seen: 30 requests without one bound it by a tenth."""


def proportion_upper(count: int, of: int, confidence: float = CONFIDENCE) -> float:
    """Return the upper Clopper-Pearson bound of a share; of 0 in n it is about 3/n. 1 where nothing was seen."""
    if of <= 0:
        return 1.0
    return float(_special().betaincinv(count + 1, of - count, confidence)) if count < of else 1.0


def proportion_lower(count: int, of: int, confidence: float = CONFIDENCE) -> float:
    """Return the lower Clopper-Pearson bound of a share. 0 where nothing was seen."""
    if of <= 0:
        return 0.0
    return float(_special().betaincinv(count, of - count + 1, 1 - confidence)) if count else 0.0


def binomial_tail(count: int, of: int, share: float) -> float:
    """Return the chance of ``count`` or more successes in ``of`` tries of chance ``share``: the exact one-sided p-value."""
    return float(_special().bdtrc(count - 1, of, share)) if count > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Worsening:
    """How much worse the side after the change is, in the unit of the margin: ``estimate`` with one-sided bounds ``low`` and ``high``.

    ``needed`` is how many windows a side would decide, were the spread to stay as it is: None where that is not known.
    """

    verdict: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    needed: int | None = None
    why: str = ""


def not_worse(
    before: Sequence[float],
    after: Sequence[float],
    margin: float,
    *,
    lower_is_better: bool,
    relative: bool,
    paired: bool = False,
    pilot: int = 0,
) -> Worsening:
    """Judge non-inferiority of window values: PASS where the worsening is below ``margin`` at CONFIDENCE, FAIL where it is above.

    ``paired`` says that the n-th value of both sides belongs to one pair (equal seeds): then their differences are judged, and what
    seeds alone bring falls out; ValueError where the sides then have different lengths.

    ``relative`` compares logarithms, and then ``margin`` is a share of the side before: 0.25 lets a time grow, or a rate fall, by
    25 %. Where nothing varies at all, the interval is the point: what repeats exactly is known exactly.

    ``pilot`` says that the number of pairs was chosen from the spread of that many first ones. The interval is then Stein's (1945), of that
    spread and its degrees of freedom, which holds whatever number was chosen; the spread of all pairs is taken where it is larger.
    """
    n, m = len(before), len(after)
    if min(n, m) < FEWEST_WINDOWS:
        return Worsening(INCONCLUSIVE, needed=FEWEST_WINDOWS, why=f"{n} window{'s' * (n != 1)} before and {m} after; their spread is not known")
    if relative:
        if min(*before, *after) <= 0:
            return Worsening(INCONCLUSIVE, why="a value of zero has no ratio")
        left, right = [math.log(v) for v in before], [math.log(v) for v in after]
    else:
        left, right = list(before), list(after)
    bound = scaled_margin(margin, lower_is_better=lower_is_better, relative=relative)
    sign = 1.0 if lower_is_better else -1.0
    estimate = sign * (_mean(right) - _mean(left))
    if paired:
        pairs = [sign * (b - a) for a, b in zip(left, right, strict=True)]
        spread, fixed = _variance(pairs), 0
        if FEWEST_WINDOWS <= pilot < n:
            spread, fixed = max(spread, _variance(pairs[:pilot])), pilot - 1
        half = float(_special().stdtrit(fixed or n - 1, CONFIDENCE)) * math.sqrt(spread / n)
        low, high, freedom = estimate - half, estimate + half, 1
    else:
        low, high = _welch(left, right, estimate)
        spread, freedom, fixed = _variance(left) + _variance(right), 2, 0
    verdict = PASS if high <= bound else FAIL if low > bound else INCONCLUSIVE
    needed = _windows_needed(max(n, m), spread, freedom, abs(bound - estimate), fixed) if verdict == INCONCLUSIVE else None

    def shown(value: float) -> float:
        if not relative:
            return value
        return math.expm1(value) if lower_is_better else -math.expm1(-value)

    return Worsening(verdict, shown(estimate), shown(low), shown(high), needed)


def scaled_margin(margin: float, *, lower_is_better: bool, relative: bool) -> float:
    """Return a margin on the scale on which values are compared: of logarithms where it is a share of the side before."""
    if not relative:
        return margin
    return math.log1p(margin) if lower_is_better else -math.log1p(-margin) if margin < 1 else math.inf


def pair_spread(before: Sequence[float], after: Sequence[float], *, relative: bool) -> float | None:
    """Return by how much the differences of pairs spread (their standard deviation, on the scale of ``scaled_margin``), whatever their mean is.

    None where there are fewer than two pairs, or a value has no logarithm.
    """
    if len(before) < FEWEST_WINDOWS or (relative and min(*before, *after) <= 0):
        return None
    return math.sqrt(_variance([(math.log(b / a) if relative else b - a) for a, b in zip(before, after, strict=True)]))


def two_stage_chance(pairs: int, pilot: int, spread: float, margin: float) -> float:
    """Return the least chance that an equal candidate passes with ``pairs`` pairs, chosen from a ``spread`` that ``pilot`` pairs showed.

    By Stein (1945): given the number, the mean over the pilot's standard error of it has Student's t distribution with ``pilot - 1`` degrees of
    freedom, whatever the true spread is. ``margin`` is on the scale of the spread.
    """
    if spread <= 0 or margin == math.inf:
        return 1.0
    special = _special()
    return float(special.stdtr(pilot - 1, margin * math.sqrt(pairs) / spread - float(special.stdtrit(pilot - 1, CONFIDENCE))))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    # equal values have no variance, whatever rounding makes of their mean
    if min(values) == max(values):
        return 0.0
    mean = _mean(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def _welch(left: Sequence[float], right: Sequence[float], estimate: float) -> tuple[float, float]:
    """Return the one-sided bounds of a difference of means, by Welch's t with Satterthwaite's degrees of freedom."""
    parts = [_variance(left) / len(left), _variance(right) / len(right)]
    spread = sum(parts)
    if spread <= 0:
        return estimate, estimate
    freedom = spread**2 / (parts[0] ** 2 / (len(left) - 1) + parts[1] ** 2 / (len(right) - 1))
    half = float(_special().stdtrit(freedom, CONFIDENCE)) * math.sqrt(spread)
    return estimate - half, estimate + half


def _windows_needed(there: int, spread: float, freedom: int, distance: float, fixed: int = 0) -> int | None:
    """Return the windows a side at which the interval would be shorter than the distance to the margin; None beyond MOST_WINDOWS.

    ``fixed`` degrees of freedom are those of a pilot, which more windows do not add to.
    """
    quantile = _special().stdtrit
    for n in range(there + 1, MOST_WINDOWS + 1):
        if float(quantile(fixed or freedom * (n - 1), CONFIDENCE)) * math.sqrt(spread / n) < distance:
            return n
    return None


@dataclass(frozen=True, slots=True)
class RateChange:
    """Two counts over their exposures: ``p_worse`` of the exact one-sided test that the rate rose by more than the margin, the upper bound of
    the ratio of the rates, and that of the rate after the change.

    ``dispersion`` above 1 says that events come in bursts; the counts were then weighed as that many times fewer. ``needed`` is how
    much exposure a side would decide, were the rates to stay as they are: None where that is not known.
    """

    verdict: str
    p_worse: float
    ratio_upper: float
    rate_upper: float
    dispersion: float = 1.0
    needed: float | None = None


def counts_not_worse(before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]], margin: float, rare: float = RARE) -> RateChange:
    """Judge event counts, each window as (events, exposure): whether their rate after the change is higher by no more than ``margin``.

    PASS where none happened after the change and the upper bound of their rate is at most ``rare`` (an exact Poisson bound), or where the
    ratio of rates is below ``1 + margin``; FAIL where the exact conditional test shows it above; else INCONCLUSIVE.
    """
    k1, e1 = sum(k for k, _ in before), sum(e for _, e in before)
    k2, e2 = sum(k for k, _ in after), sum(e for _, e in after)
    if e1 <= 0 or e2 <= 0:
        return RateChange(INCONCLUSIVE, 1.0, math.inf, math.inf)
    rate_upper = float(_special().gammaincinv(k2 + 1, CONFIDENCE)) / e2
    if k2 == 0:
        ratio = math.inf if k1 == 0 else 1.0
        if rate_upper <= rare:
            return RateChange(PASS, 1.0, ratio, rate_upper)
        return RateChange(INCONCLUSIVE, 1.0, ratio, rate_upper, needed=rate_upper * e2 / rare if rare > 0 else None)
    phi = max(1.0, _dispersion([before, after]))
    weighed = round(k1 / phi), max(1, round(k2 / phi))
    verdict, p_worse, ratio_upper = _two_rates(*weighed, e1, e2, margin)
    needed = None
    if verdict == INCONCLUSIVE:
        scales = range(2, MOST_TIMES + 1)
        times = next((n for n in scales if _two_rates(weighed[0] * n, weighed[1] * n, e1, e2, margin)[0] != INCONCLUSIVE), None)
        needed = times * e2 if times is not None else None
    return RateChange(verdict, p_worse, ratio_upper, rate_upper, phi, needed)


def _two_rates(k1: int, k2: int, e1: float, e2: float, margin: float) -> tuple[str, float, float]:
    """Return (verdict, p of a ratio above 1 + margin, upper bound of the ratio): given their sum, one count of two Poisson counts is binomial."""
    p_worse = binomial_tail(k2, k1 + k2, e2 * (1 + margin) / (e1 + e2 * (1 + margin)))
    upper = proportion_upper(k2, k1 + k2)
    ratio_upper = upper / (1 - upper) * e1 / e2 if upper < 1 else math.inf
    return (FAIL if p_worse < 1 - CONFIDENCE else PASS if ratio_upper <= 1 + margin else INCONCLUSIVE), p_worse, ratio_upper


def _dispersion(sides: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Return Pearson's chi-square over its degrees of freedom, within the sides: 1 for independent events, more for bursts."""
    total, freedom = 0.0, 0
    for side in sides:
        events, exposure = sum(k for k, _ in side), sum(e for _, e in side)
        if not events or len(side) < 2:
            continue
        rate = events / exposure
        total += sum((k - rate * e) ** 2 / (rate * e) for k, e in side if e > 0)
        freedom += len(side) - 1
    return total / freedom if freedom else 1.0


@dataclass(frozen=True, slots=True)
class PairedLoss:
    """Quality items asked on both sides: ``lost`` passed only before, ``gained`` only after. ``loss_upper`` bounds the share lost.

    ``needed`` is how many items would decide, were the share lost to stay as it is; None where more items cannot make it a PASS.
    """

    verdict: str
    items: int
    lost: int
    gained: int
    p_worse: float
    loss_upper: float
    needed: int | None = None


def paired_quality(lost: int, gained: int, items: int, margin: float) -> PairedLoss:
    """Judge paired items: FAIL by the exact one-sided McNemar test, PASS where the upper bound of the loss is under ``margin``.

    The bound counts losses alone and no gains, which makes it too wide rather than too narrow.
    """
    p_worse = binomial_tail(lost, lost + gained, 0.5)
    upper = proportion_upper(lost, items)
    if p_worse < 1 - CONFIDENCE:
        return PairedLoss(FAIL, items, lost, gained, p_worse, upper)
    if upper <= margin:
        return PairedLoss(PASS, items, lost, gained, p_worse, upper)
    return PairedLoss(INCONCLUSIVE, items, lost, gained, p_worse, upper, items_needed(lost, items, margin))


def items_needed(lost: int, items: int, margin: float) -> int | None:
    """Return the items at which the loss would be bounded by ``margin``, were its share to stay; None where it never would be."""
    share = lost / items if items else 0.0
    if share >= margin:
        return None
    low, high = max(items, 1), max(items, 1)
    while proportion_upper(math.ceil(share * high), high) > margin:
        low, high = high, high * 2
        if high > MOST_ITEMS:
            return None
    while low < high:
        middle = (low + high) // 2
        if proportion_upper(math.ceil(share * middle), middle) > margin:
            low = middle + 1
        else:
            high = middle
    return high


def _special() -> Any:
    from scipy import special

    return special
