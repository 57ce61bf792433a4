"""Peak, not average: what traffic holds, how likely the pool overflows, and how much of it is safe."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import MadeRun

from pytest_kvcache.capacity.documents import read_checklist, read_traffic
from pytest_kvcache.capacity.traffic import Lane, Traffic, demand, longest_request, one_shape, overflow, safe_concurrency
from pytest_kvcache.errors import CannotJudge, UsageError


def blocks(tokens: int) -> int:
    return math.ceil(tokens / 16)


MIX = Traffic((Lane("chat", 24, ((2048, 1.0),)), Lane("documents", 4, ((8192, 7.0), (32768, 3.0)))))


def test_the_peak_counts_every_request_at_the_longest_of_its_lane() -> None:
    found = demand(MIX, blocks)
    assert found.peak_blocks == 24 * 128 + 4 * 2048
    assert found.mean_blocks == pytest.approx(24 * 128 + 4 * (0.7 * 512 + 0.3 * 2048))
    assert found.by_lane[1] == ("documents", 4, 32768, 8192)


def test_the_chance_of_overflow_is_that_of_the_binomial_within_its_error() -> None:
    # three or more of four documents long: 24 x 128 + 3 x 2048 + 512 = 9,728 blocks
    true = 4 * 0.3**3 * 0.7 + 0.3**4
    found = overflow(MIX, blocks, 9727, seed=5)
    assert found.trials == 10_000
    assert found.low <= true <= found.high
    assert 0.004 < found.error < 0.008
    assert overflow(MIX, blocks, 9727, seed=5) == found
    assert overflow(MIX, blocks, 9727, seed=6) != found


def test_no_overflow_seen_is_not_a_chance_of_zero() -> None:
    found = overflow(MIX, blocks, 24 * 128 + 4 * 2048)
    assert found.hits == 0
    assert 0 < found.high < 0.001


def test_one_shape_needs_no_draw() -> None:
    assert overflow(one_shape(10, 100), blocks, 70).probability == 0
    assert overflow(one_shape(10, 100), blocks, 69).probability == 1


def test_the_safe_concurrency_never_overflows_and_the_risky_one_rarely() -> None:
    traffic = Traffic((Lane("all", 10, ((100, 90.0), (10_000, 10.0))),))
    safe = safe_concurrency(traffic, blocks, 6250, risk=0.01, seed=3)
    assert safe.always == 10
    assert safe.at_risk > 40
    draws = random.Random(9)
    over = sum(sum(draws.choices([7, 625], [90, 10], k=safe.at_risk)) > 6250 for _ in range(4000)) / 4000
    assert over < 0.013
    one_more = sum(sum(draws.choices([7, 625], [90, 10], k=safe.at_risk + 6)) > 6250 for _ in range(4000)) / 4000
    assert one_more > 0.008  # and it is not far too careful


def test_a_pool_too_small_for_any_request_is_safe_for_none() -> None:
    traffic = Traffic((Lane("all", 2, ((100, 1.0), (200, 1.0))),))
    assert safe_concurrency(traffic, blocks, 6).at_risk == 0


def test_safe_concurrency_of_one_length_is_a_quotient() -> None:
    safe = safe_concurrency(one_shape(3, 33), blocks, 100)
    assert (safe.always, safe.at_risk) == (33, 33)


@given(st.integers(1, 10_000), st.integers(1, 50))
def test_the_longest_request_fits_and_one_token_more_does_not(pool: int, concurrency: int) -> None:
    found = longest_request(blocks, pool, concurrency=concurrency)
    assert concurrency * blocks(found) <= pool
    assert concurrency * blocks(found + 1) > pool


@pytest.mark.parametrize("seed", range(5))
def test_any_histogram_is_judged_and_its_bounds_hold(seed: int) -> None:
    draws = random.Random(seed)
    lanes = tuple(
        Lane(f"l{n}", draws.randint(1, 20), tuple((draws.randint(1, 5000), draws.random() + 0.01) for _ in range(draws.randint(1, 9))))
        for n in range(3)
    )
    traffic = Traffic(lanes)
    found = demand(traffic, blocks)
    assert found.mean_blocks <= found.peak_blocks
    assert overflow(traffic, blocks, found.peak_blocks, trials=300).hits == 0
    safe = safe_concurrency(traffic, blocks, 2000)
    assert safe.always <= safe.at_risk


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_lanes_are_read_from_toml_and_json_alike(tmp_path: Path) -> None:
    toml = '[[lane]]\nname="chat"\nconcurrency=24\nlength=2048\n[[lane]]\nname="documents"\nconcurrency=4\nlengths={8192=7, 32768=3}\n'
    body = '[{"name":"chat","concurrency":24,"prompt":2000,"output":48},{"name":"documents","concurrency":4,"lengths":[[8192,7],[32768,3]]}]'
    first = read_traffic(write(tmp_path / "t.toml", toml))
    second = read_traffic(write(tmp_path / "t.json", body))
    assert first.lanes == second.lanes == MIX.lanes


def test_a_plain_histogram_is_one_lane(tmp_path: Path) -> None:
    traffic = read_traffic(write(tmp_path / "t.json", '{"concurrency": 9, "histogram": {"100": 1, "200": 2}}'))
    assert traffic.lanes[0].lengths == ((100, 1.0), (200, 2.0))
    assert traffic.concurrency == 9


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        "3",
        '[{"concurrency": 1}]',
        '[{"concurrency": 0, "length": 5}]',
        '[{"concurrency": 1, "length": -5}]',
        '[{"concurrency": 1, "length": 5, "lenght": 6}]',
        '[{"concurrency": 1, "length": 5, "lengths": {"5": 1}}]',
        '[{"concurrency": 1, "lengths": {"5": -1}}]',
        '[{"concurrency": 1, "lengths": {"5": 0}}]',
        '[{"concurrency": 1, "lengths": {"x": 1}}]',
        '[{"concurrency": 1, "lengths": [[5, NaN]]}]',
        '[{"concurrency": true, "length": 5}]',
        "[" * 100_000,
        '[{"concurrency": 1, "length": 1e400}]',
    ],
)
def test_traffic_that_cannot_be_meant_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        read_traffic(write(tmp_path / "t.json", text))


def test_a_real_run_is_traffic_with_its_own_peak(tmp_path: Path) -> None:
    run = MadeRun().write(tmp_path / "runs" / "1-normal")
    traffic = read_traffic(run.folder)
    rows = [row for row in run.requests() if row.prompt_tokens]
    assert traffic.longest == max((row.prompt_tokens or 0) + (row.completion_tokens or 0) for row in rows)
    found = demand(traffic, blocks)
    assert found.replayed_blocks is not None
    assert 0 < found.replayed_blocks <= found.peak_blocks
    assert read_traffic(run.folder / "requests.jsonl").lanes == traffic.lanes


def test_a_run_without_lengths_cannot_be_planned_with(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge):
        read_traffic(write(tmp_path / "requests.jsonl", ""))
    with pytest.raises(UsageError):
        read_traffic(tmp_path / "none.jsonl")


def test_the_replay_counts_what_overlapped(tmp_path: Path) -> None:
    spans = ((0.0, 2.0, 160), (1.0, 3.0, 320), (2.0, 4.0, 480))
    traffic = Traffic((Lane("all", 2, ((160, 1.0), (320, 1.0), (480, 1.0))),), "run", spans)
    assert demand(traffic, blocks).replayed_blocks == 50  # 20 + 30; the first has ended when the third starts


def test_a_checklist_names_every_input(tmp_path: Path) -> None:
    found = read_checklist(
        write(
            tmp_path / "c.toml",
            '[[input]]\nname="contract"\nprompt=30000\noutput=2000\nconcurrency=4\n[[input]]\nname="chat"\nprompt=500\noutput=500\n',
        )
    )
    assert [(one.name, one.tokens, one.concurrency) for one in found] == [("contract", 32000, 4), ("chat", 1000, 1)]
    assert read_checklist(write(tmp_path / "c.json", '[{"name":"chat","prompt":500,"output":500}]'))[0] == found[1]


@pytest.mark.parametrize(
    "text", ["", "[]", '[{"name":"x"}]', '[{"name":"x","prompt":0,"output":5}]', '[{"prompt":5,"output":5,"promt":4}]', '{"input": 3}', "[3]"]
)
def test_a_checklist_that_cannot_be_meant_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        read_checklist(write(tmp_path / "c.json", text))
