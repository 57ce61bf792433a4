"""When requests start: exact under any stages, the same for the same seed, shared by workers without a request lost or sent twice."""

from __future__ import annotations

import math
import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.errors import UsageError
from pytest_kvcache.load.arrivals import PROCESSES, SHAPES, Stage, arrivals, is_listed, level_at, parse_stages, total_s

STEADY = (Stage(math.inf, 5.0, 5.0),)


def test_constant_arrivals_come_evenly_from_the_begin_on() -> None:
    assert list(islice(arrivals("constant", STEADY, 1), 4)) == pytest.approx([0.0, 0.2, 0.4, 0.6])


def test_bursts_come_together_and_keep_the_rate() -> None:
    assert list(islice(arrivals("burst", STEADY, 1, burst_size=3), 7)) == pytest.approx([0, 0, 0, 0.6, 0.6, 0.6, 1.2])


@pytest.mark.parametrize(("process", "burstiness", "spread"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)])
def test_random_arrivals_have_the_rate_and_the_unevenness_asked_for(process: str, burstiness: float, spread: float) -> None:
    times = list(islice(arrivals(process, STEADY, 3, burstiness=burstiness), 20_000))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.05)
    assert times == list(islice(arrivals(process, STEADY, 3, burstiness=burstiness), 20_000))
    assert times[:5] != list(islice(arrivals(process, STEADY, 4, burstiness=burstiness), 5))


@settings(max_examples=60)
@given(
    stages=st.lists(st.tuples(st.floats(0.5, 20), st.floats(0, 30), st.floats(0, 30)), min_size=1, max_size=5),
    process=st.sampled_from(PROCESSES),
    seed=st.integers(0, 1000),
)
def test_arrivals_rise_lie_inside_the_stages_and_are_as_many_as_the_rate_makes(
    stages: list[tuple[float, float, float]], process: str, seed: int
) -> None:
    plan = [Stage(*stage) for stage in stages]
    times = list(arrivals(process, plan, seed, burst_size=4))
    assert times == sorted(times)
    assert all(0 <= at_s <= total_s(plan) for at_s in times)
    if process == "constant":
        assert abs(len(times) - sum((stage.first + stage.last) / 2 * stage.seconds for stage in plan)) <= 1.001
        for at_s in times[1::7]:
            passed = sum(min(stage.seconds, max(0.0, at_s - begun)) * (stage.first + level_at([stage], min(stage.seconds, max(0.0, at_s - begun)))) / 2
                         for stage, begun in zip(plan, [total_s(plan[:n]) for n in range(len(plan))], strict=True))  # fmt: skip
            assert passed == pytest.approx(round(passed), abs=1e-3)


def test_a_ramp_puts_arrivals_where_the_integral_reaches_them() -> None:
    times = list(arrivals("constant", (Stage(10.0, 0.0, 10.0),), 1))
    assert times == pytest.approx([math.sqrt(2 * number) for number in range(50)])


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_share_one_schedule(workers: int) -> None:
    whole = list(arrivals("poisson", (Stage(20.0, 3.0, 9.0),), 7))
    parts = [list(islice(arrivals("poisson", (Stage(20.0, 3.0, 9.0),), 7), worker, None, workers)) for worker in range(workers)]
    assert sorted(at_s for part in parts for at_s in part) == whole


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_fill_the_load_and_reach_the_level_asked_for(name: str) -> None:
    stages = parse_stages(name, 8.0, 100.0)
    assert total_s(stages) == pytest.approx(100.0)
    assert max(max(stage.first, stage.last) for stage in stages) == 8.0
    assert not is_listed(name)


def test_a_soak_ramps_for_a_minute_at_most() -> None:
    assert parse_stages("soak", 8.0, 7200.0)[0].seconds == pytest.approx(60.0)
    assert parse_stages("soak", 8.0, 100.0)[0] == Stage(10.0, 0.0, 8.0)


def test_listed_stages_hold_their_own_times_and_levels() -> None:
    stages = parse_stages("30s:2, 1m:2-8,1.5m:0.5", 99.0, 0.0)
    assert stages == (Stage(30.0, 2.0, 2.0), Stage(60.0, 2.0, 8.0), Stage(90.0, 0.5, 0.5))
    assert [level_at(stages, at_s) for at_s in (0.0, 29.9, 60.0, 100.0, 1e6)] == [2.0, 2.0, 5.0, 0.5, 0.5]


@pytest.mark.parametrize(
    "text", ["fast", "30s", "30s:", "x:3", "10s:-1", "0s:2", "10s:2,,", "10s:0,5s:0", "10s:nan", "5s:3-", ",".join(["1s:1"] * 1001)]
)
def test_stages_that_cannot_be_meant_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_stages(text, 1.0, 30.0)
    assert "\n" not in caught.value.what


def test_a_named_shape_needs_a_length() -> None:
    with pytest.raises(UsageError, match="need a length"):
        parse_stages("spike", 1.0, 0.0)
