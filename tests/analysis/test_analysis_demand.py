"""Whether what was asked at once fits, what is left for one more of each lane, and what gave way when it did not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import oracle_traces as oracle
import pytest
from made_run import T0, USABLE, MadeRun, closed_loop, refused, request, sample, snapshot

from pytest_kvcache.analysis.demand import Demand
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conditions import Limit
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import LoadStart


def demand_of(analysis: Analysis) -> Demand:
    assert isinstance(analysis.demand, Demand)
    return analysis.demand


def number(analysis: Analysis, name: str) -> float:
    value = analysis.values[name]
    assert isinstance(value, Reading), f"{name}: {value}"
    return value.number()


def test_eight_long_answers_ask_for_more_than_the_pool_holds(tmp_path: Path) -> None:
    """rules.md: 8 requests of 200 + 100 tokens in 64 blocks of 32: 80 blocks at full length, two requests are put back."""
    analysis = analyse(oracle.run("overload", tmp_path / "1-normal"))
    assert number(analysis, "demand.peak") == pytest.approx(80 / 64)
    (lane,) = demand_of(analysis).lanes
    assert (lane.needs, lane.at_once, lane.peak, lane.fits) == (10, 8, 80, 6)
    assert number(analysis, "headroom") == 0
    assert any("2 times" in text and "compute at least" in text for text in demand_of(analysis).happened)


def test_each_lane_has_its_own_headroom(tmp_path: Path) -> None:
    rows = [*closed_loop(users=2, seconds=3.0), request(900, 0.5, prompt=900, output=100, lane="nearmax", length_s=2.0)]
    rows = [msgspec.structs.replace(row, id=number_) for number_, row in enumerate(rows)]
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))
    free = number(analysis, "free_blocks.min")
    near = analysis.value(Limit("headroom", ">=", 1.0, lane="nearmax"))
    normal = analysis.value(Limit("headroom", ">=", 1.0, lane="normal"))
    assert isinstance(near, Reading)
    assert isinstance(normal, Reading)
    assert near.number() == free // 63
    assert normal.number() == free // 10
    assert number(analysis, "headroom") == min(near.number(), normal.number())
    lanes = {one.lane: one for one in demand_of(analysis).lanes}
    assert lanes["nearmax"].fits == USABLE // 63
    assert demand_of(analysis).lanes[0].lane == "nearmax", "the largest first"


def test_a_campaign_day_shows_in_the_plan_before_it_shows_in_usage(tmp_path: Path) -> None:
    """The article: a pool resting at 50 % went to 95 % on a day of long uploads."""
    rows = [*closed_loop(users=2, seconds=3.0), request(900, 0.5, prompt=1000, output=20, lane="nearmax", length_s=1.0)]
    made = MadeRun(rows=rows, record={"options": {"users": 6}})
    analysis = analyse(made.write(tmp_path / "1-normal"))
    assert number(analysis, "usage.peak") < 0.75
    assert number(analysis, "demand.planned") == pytest.approx(6 * 64 / USABLE)


def test_the_users_of_the_load_itself_count_where_none_were_asked_for(tmp_path: Path) -> None:
    run = MadeRun(rows=closed_loop(users=2)).write(tmp_path / "1-normal")
    lines = (run.folder / "requests.jsonl").read_bytes().splitlines()
    start = msgspec.json.decode(lines[0], type=LoadStart)
    for options, planned in (({"users": 12}, 12), ({"users": 12, "rate": 5.0, "max_in_flight": 30}, 30)):
        lines[0] = msgspec.json.encode(msgspec.structs.replace(start, options=options))
        (run.folder / "requests.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        assert number(analyse(run), "demand.planned") == pytest.approx(planned * 10 / USABLE)
    assert isinstance(analyse(MadeRun(rows=closed_loop()).write(tmp_path / "2-normal")).values["demand.planned"], Missing)


def test_who_waits_and_why_is_told_apart(tmp_path: Path) -> None:
    rows = closed_loop(users=2, seconds=3.0)
    samples = [sample(rows, T0 + i / 10, waiting=6.0, waiting_capacity=4.0) for i in range(30)]
    analysis = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / "1-normal"))
    assert number(analysis, "waiting.capacity_peak") == 4
    assert number(analysis, "waiting.deferred_peak") == 2
    assert isinstance(analyse(MadeRun(rows=rows).write(tmp_path / "2-normal")).values["waiting.capacity_peak"], Missing)


def test_rejections_are_said_by_class(tmp_path: Path) -> None:
    rows = [*closed_loop(users=2, seconds=2.0), refused(99, 0.2, "queue_full"), refused(100, 0.3, "over_length")]
    happened = demand_of(analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))).happened
    assert any("queue full" in text for text in happened)
    assert any("over length" in text for text in happened)


def test_a_replica_must_hold_its_requests_alone(tmp_path: Path) -> None:
    rows = [request(i, 0.0, prompt=800, output=100, length_s=2.0, endpoint=i % 2) for i in range(4)]
    values: dict[str, Any] = {"rows": rows, "before": [snapshot(T0 - 0.5), snapshot(T0 - 0.5)], "after": []}
    analysis = analyse(MadeRun(**values).write(tmp_path / "1-normal"))
    assert number(analysis, "demand.peak") == pytest.approx(2 * 57 / USABLE), "two on each server, not four in the sum of both pools"
    (lane,) = demand_of(analysis).lanes
    assert lane.fits == 2 * (USABLE // 57)


def test_an_unknown_pool_is_missing(tmp_path: Path) -> None:
    before = snapshot(T0 - 0.5, missing=("usable_blocks", "pool_blocks", "pool_tokens"))
    analysis = analyse(MadeRun(before=[before]).write(tmp_path / "1-normal"))
    assert isinstance(analysis.values["demand.peak"], Missing)
    assert demand_of(analysis).lanes[0].fits is None


def test_a_fixed_slice_for_every_request_bounds_how_many_fit(tmp_path: Path) -> None:
    """Field case D07: tokens over pool say 148 short requests, and every request pins a quarter of the pool: three fit, four never."""
    groups = [{"size": 16, "count": 1}, {"size": 16, "count": 1, "fixed": 32}]
    rows = [request(i, 0.01 * i, prompt=20, output=10, length_s=2.0) for i in range(4)]
    analysis = analyse(MadeRun(rows=rows, record={"kv_groups": groups}).write(tmp_path / "1-normal"))
    (lane,) = demand_of(analysis).lanes
    assert lane.needs == 2 + 32
    assert lane.fits == 3
    assert number(analysis, "demand.peak") == pytest.approx(4 * 34 / USABLE)
