"""The statistics, against figures that are known exactly and against simulation: a gate is worth what its errors are."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, PASS
from pytest_kvcache.judge import stats


@pytest.mark.parametrize(("count", "of"), [(0, 48), (0, 299), (0, 1), (0, 10_000)])
def test_none_in_n_is_bounded_by_the_exact_rule_of_three(count: int, of: int) -> None:
    assert stats.proportion_upper(count, of) == pytest.approx(1 - 0.05 ** (1 / of))


def test_no_loss_in_48_items_bounds_it_at_6_percent_and_299_bound_it_at_1() -> None:
    assert stats.proportion_upper(0, 48) == pytest.approx(0.0605, abs=1e-4)
    assert stats.proportion_upper(0, 298) > 0.01 > stats.proportion_upper(0, 299)
    assert stats.items_needed(0, 48, 0.01) == 299
    assert stats.items_needed(0, 48, 0.02) == 149


def test_bounds_hold_their_level() -> None:
    # at the upper bound p of k in n, the chance of k or fewer is exactly 5 %
    for count, of in ((3, 50), (40, 50), (17, 300)):
        p = stats.proportion_upper(count, of)
        assert sum(math.comb(of, i) * p**i * (1 - p) ** (of - i) for i in range(count + 1)) == pytest.approx(0.05)
        assert stats.proportion_lower(of - count, of) == pytest.approx(1 - p)
    assert (stats.proportion_upper(0, 0), stats.proportion_lower(0, 0)) == (1.0, 0.0)


def test_the_paired_test_is_exact_mcnemar() -> None:
    assert stats.paired_quality(5, 0, 300, 0.02).p_worse == pytest.approx(1 / 32)
    assert stats.paired_quality(5, 0, 300, 0.02).verdict == FAIL
    assert stats.paired_quality(4, 0, 300, 0.02).p_worse == pytest.approx(1 / 16)
    assert stats.paired_quality(4, 0, 300, 0.02).verdict == INCONCLUSIVE
    assert stats.paired_quality(8, 1, 300, 0.02).p_worse == pytest.approx(10 / 512)


@pytest.mark.parametrize(
    ("lost", "gained", "items", "margin", "verdict"),
    [
        (0, 0, 300, 0.01, PASS),
        (0, 0, 298, 0.01, INCONCLUSIVE),
        (0, 30, 300, 0.01, PASS),
        (3, 3, 300, 0.02, INCONCLUSIVE),
        (12, 14, 3000, 0.02, PASS),
        (247, 0, 300, 0.02, FAIL),
    ],
)
def test_quality_passes_only_where_the_loss_is_bounded(lost: int, gained: int, items: int, margin: float, verdict: str) -> None:
    assert stats.paired_quality(lost, gained, items, margin).verdict == verdict


def test_items_that_would_decide_do_decide() -> None:
    for lost, items, margin in ((1, 100, 0.02), (3, 300, 0.02), (2, 300, 0.01)):
        needed = stats.items_needed(lost, items, margin)
        assert needed is not None
        assert stats.proportion_upper(math.ceil(lost / items * needed), needed) <= margin
    assert stats.items_needed(6, 300, 0.02) is None


def test_an_equal_candidate_passes() -> None:
    windows = [0.50, 0.52, 0.51, 0.49, 0.50]
    found = stats.not_worse(windows, list(reversed(windows)), 0.02, lower_is_better=True, relative=False)
    assert found.verdict == PASS
    assert found.estimate == pytest.approx(0.0)


def test_welch_gives_the_textbook_interval() -> None:
    # difference 1, variances 2.5 and 2.5 over 5: se 1, 8 degrees of freedom, t = 1.8595
    found = stats.not_worse([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], 2.0, lower_is_better=True, relative=False)
    assert found.low is not None
    assert found.high is not None
    assert found.low == pytest.approx(1 - 1.8595, abs=1e-3)
    assert found.high == pytest.approx(1 + 1.8595, abs=1e-3)
    assert found.verdict == INCONCLUSIVE
    assert found.needed is not None
    assert found.needed > 5


def test_pairs_give_the_textbook_interval() -> None:
    # differences 1, 2, 3: mean 2, standard error 0.5774, 2 degrees of freedom, t = 2.9200
    found = stats.not_worse([10, 20, 30], [11, 22, 33], 5.0, lower_is_better=True, relative=False, paired=True)
    assert found.low == pytest.approx(2 - 1.6859, abs=1e-3)
    assert found.high == pytest.approx(2 + 1.6859, abs=1e-3)
    assert found.verdict == PASS
    assert stats.not_worse([10, 20, 30], [11, 22, 33], 5.0, lower_is_better=True, relative=False).verdict == INCONCLUSIVE
    with pytest.raises(ValueError, match="zip"):
        stats.not_worse([1, 2], [1, 2, 3], 1.0, lower_is_better=True, relative=False, paired=True)


def test_one_window_a_side_cannot_pass_and_says_what_is_missing() -> None:
    for before, after in (([1.0], [1.0]), ([1.0] * 5, [1.0]), ([1.0], [1.0] * 5)):
        found = stats.not_worse(before, after, 0.5, lower_is_better=True, relative=False)
        assert found.verdict == INCONCLUSIVE
        assert found.needed == 2


def test_what_repeats_exactly_is_known_exactly() -> None:
    same = stats.not_worse([0.3] * 5, [0.3] * 5, 0.0, lower_is_better=True, relative=False)
    assert (same.verdict, same.low, same.high) == (PASS, 0.0, 0.0)
    assert stats.not_worse([0.3] * 5, [0.33] * 5, 0.02, lower_is_better=True, relative=False).verdict == FAIL
    assert stats.not_worse([0.1 + 0.2] * 3, [0.1 + 0.2] * 3, 0.0, lower_is_better=True, relative=False).verdict == PASS


def test_ratios_are_told_as_shares() -> None:
    slower = stats.not_worse([1.0, 1.0], [1.5, 1.5], 0.25, lower_is_better=True, relative=True)
    assert slower.verdict == FAIL
    assert slower.estimate == pytest.approx(0.5)
    less = stats.not_worse([100.0, 100.0], [80.0, 80.0], 0.25, lower_is_better=False, relative=True)
    assert less.verdict == PASS
    assert less.estimate == pytest.approx(0.2)
    assert stats.not_worse([0.0, 0.0], [1.0, 1.0], 0.25, lower_is_better=True, relative=True).verdict == INCONCLUSIVE


def test_counts_by_the_conditional_test() -> None:
    # five after against none before, equal exposure: 1/32 at equal rates, 0.6 to the fifth where the rate may be half as high again
    assert stats.counts_not_worse([(0, 100)], [(5, 100)], 0.0).p_worse == pytest.approx(1 / 32)
    assert stats.counts_not_worse([(0, 100)], [(5, 100)], 0.5).p_worse == pytest.approx(0.6**5)
    assert stats.counts_not_worse([(0, 100)], [(6, 100)], 0.5).verdict == FAIL
    assert stats.counts_not_worse([(0, 100)], [(5, 100)], 0.5).verdict == INCONCLUSIVE
    zero = stats.counts_not_worse([(0, 200)], [(0, 200)], 0.5)
    assert zero.verdict == PASS
    assert zero.rate_upper == pytest.approx(-math.log(0.05) / 200)
    assert stats.counts_not_worse([(7, 100)], [(0, 100)], 0.5).verdict == PASS
    assert stats.counts_not_worse([(500, 1000)], [(500, 1000)], 0.5).verdict == PASS
    assert stats.counts_not_worse([(0, 0)], [(0, 100)], 0.5).verdict == INCONCLUSIVE


def test_events_that_come_in_bursts_weigh_less() -> None:
    calm = stats.counts_not_worse([(10, 100)] * 4, [(22, 100)] * 4, 0.5)
    bursts = stats.counts_not_worse([(0, 100), (40, 100), (0, 100), (0, 100)], [(60, 100), (0, 100), (0, 100), (0, 100)], 0.5)
    assert calm.verdict == FAIL
    assert bursts.verdict == INCONCLUSIVE
    assert bursts.dispersion > 10


def simulate(rng: random.Random, trials: int, shift: float, spread: float, windows: int, margin: float, paired: bool = False) -> dict[str, int]:
    found = {PASS: 0, FAIL: 0, INCONCLUSIVE: 0}
    for _ in range(trials):
        seeds = [rng.gauss(0.5, 3 * spread if paired else 0.0) for _ in range(windows)]
        before = [rng.gauss(seed, spread) for seed in seeds]
        after = [rng.gauss(seed + shift, spread) for seed in seeds]
        found[stats.not_worse(before, after, margin, lower_is_better=True, relative=False, paired=paired).verdict] += 1
    return found


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("windows", [2, 5])
def test_false_pass_stays_under_its_level(windows: int, paired: bool) -> None:
    # worse by exactly the margin, the hardest case of those that must not pass; 1,500 trials put 5 % within 1.5 points
    found = simulate(random.Random(7), 1500, 0.02, 0.01, windows, 0.02, paired)
    assert found[PASS] / 1500 < 0.065
    assert found[FAIL] / 1500 < 0.065


def test_false_fail_of_an_equal_candidate_is_rare_and_power_grows_with_windows() -> None:
    few, many = (simulate(random.Random(3), 400, 0.0, 0.01, windows, 0.02) for windows in (3, 8))
    assert few[FAIL] + many[FAIL] == 0
    assert many[PASS] > few[PASS]
    assert many[PASS] / 400 > 0.9


def test_false_fail_of_equal_rates_stays_under_its_level() -> None:
    rng = random.Random(11)

    def count(of: int, rate: float) -> int:
        return sum(rng.random() < rate for _ in range(of))

    trials = 600
    failed = sum(
        stats.counts_not_worse([(count(60, 0.1), 60.0) for _ in range(3)], [(count(60, 0.1), 60.0) for _ in range(3)], 0.5).verdict == FAIL
        for _ in range(trials)
    )
    assert failed / trials < 0.06


def test_none_in_few_requests_is_no_pass_and_says_how_many_would_do() -> None:
    few = stats.counts_not_worse([(0, 20)], [(0, 20)], 0.5, 0.10)
    assert few.verdict == INCONCLUSIVE
    assert few.needed is not None
    assert few.needed == pytest.approx(-math.log(0.05) / 0.10)
    assert stats.counts_not_worse([(0, 20)], [(0, few.needed + 0.01)], 0.5, 0.10).verdict == PASS


def test_the_exposure_that_would_decide_counts_does_decide() -> None:
    found = stats.counts_not_worse([(4, 100)], [(5, 100)], 0.5)
    assert found.verdict == INCONCLUSIVE
    assert found.needed is not None
    times = round(found.needed / 100)
    assert stats.counts_not_worse([(4 * times, 100 * times)], [(5 * times, 100 * times)], 0.5).verdict != INCONCLUSIVE


windows = st.lists(st.floats(min_value=1e-6, max_value=1e6, allow_nan=False), min_size=2, max_size=6)


@given(windows, windows, st.floats(min_value=0, max_value=0.9), st.booleans(), st.booleans())
def test_verdict_and_interval_agree(before: list[float], after: list[float], margin: float, lower: bool, relative: bool) -> None:
    found = stats.not_worse(before, after, margin, lower_is_better=lower, relative=relative)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.high
    if found.verdict == PASS:
        assert found.high <= margin + 1e-9
    if found.verdict == FAIL:
        assert found.low >= margin - 1e-9


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 400), st.floats(min_value=0.001, max_value=0.5))
def test_paired_quality_never_passes_and_fails_by_its_own_figures(lost: int, gained: int, more: int, margin: float) -> None:
    found = stats.paired_quality(lost, gained, lost + gained + more, margin)
    if found.verdict == PASS:
        assert found.loss_upper <= margin
        assert found.p_worse >= 0.05
    if found.verdict == FAIL:
        assert lost > gained


@pytest.mark.parametrize(("spread", "worse", "at_least"), [(1.0, 0.0, 0.75), (2.0, 0.0, 0.55), (1.0, 0.5, 0.5), (2.0, 2.0, 0.5)])
def test_as_many_windows_as_an_inconclusive_gate_asks_for_mostly_decide_it(spread: float, worse: float, at_least: float) -> None:
    # one unit is a margin; what is simulated: five pairs that cannot tell, and then as many as were asked for
    random_ = random.Random(11)
    asked: list[int] = []
    decided: list[bool] = []
    enough: list[float] = []
    while len(asked) < 120:
        pairs = [random_.gauss(worse, spread) for _ in range(stats.MOST_WINDOWS)]

        def judge(n: int, pairs: Sequence[float] = pairs) -> stats.Worsening:
            return stats.not_worse([0.0] * n, pairs[:n], 1.0, lower_is_better=True, relative=False, paired=True)

        found = judge(5)
        if found.verdict != INCONCLUSIVE or found.needed is None:
            continue
        asked.append(found.needed)
        decided.append(judge(found.needed).verdict != INCONCLUSIVE)
        enough.append(next((n for n in range(6, stats.MOST_WINDOWS) if judge(n).verdict != INCONCLUSIVE), stats.MOST_WINDOWS) / found.needed)
    assert sum(decided) / len(decided) >= at_least
    assert statistics.median(enough) <= 1.05, "in the median no more are needed than it says"


def test_as_many_items_or_requests_as_are_asked_for_mostly_decide_it() -> None:
    random_ = random.Random(5)
    decided = []
    for _ in range(100):
        lost = [random_.random() < 0.002 for _ in range(2000)]
        found = stats.paired_quality(sum(lost[:60]), 0, 60, 0.02)
        if found.verdict == INCONCLUSIVE and found.needed is not None and found.needed <= len(lost):
            decided.append(stats.paired_quality(sum(lost[: found.needed]), 0, found.needed, 0.02).verdict != INCONCLUSIVE)
    assert len(decided) > 80
    assert sum(decided) / len(decided) > 0.7
    none = stats.counts_not_worse([(0, 10.0)], [(0, 10.0)], 0.5)
    assert none.needed is not None
    assert stats.counts_not_worse([(0, 10.0)], [(0, math.ceil(none.needed))], 0.5).verdict == PASS
    few = stats.counts_not_worse([(6, 60.0)], [(6, 60.0)], 0.5)
    assert few.verdict == INCONCLUSIVE
    assert few.needed is not None
    times = few.needed / 60
    assert stats.counts_not_worse([(round(6 * times), 60 * times)], [(round(6 * times), 60 * times)], 0.5).verdict == PASS
