"""The payload of our own requests: never below zero, never above what was sent, and gone when the last answer is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import T0, MadeRun, request, sample

from pytest_kvcache.analysis.payload import payload
from pytest_kvcache.analysis.rows import read_rows
from pytest_kvcache.analysis.series import coverage, read_series
from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.errors import CannotJudge
from pytest_kvcache.records import RequestRow, TelemetryRow

requests = st.builds(
    lambda start, wait, length, prompt, output, outcome: request(
        0,
        start,
        prompt=prompt,
        output=output,
        ttft_s=wait * length,
        length_s=length,
        outcome=outcome,
        first_token_s=None if outcome == "queue_full" else T0 + start + wait * length,
    ),
    st.floats(0, 100),
    st.floats(0, 1),
    st.floats(0.001, 50),
    st.integers(1, 5000),
    st.integers(0, 500),
    st.sampled_from(["ok", "stopped_early", "truncated", "cut_off", "queue_full"]),
)


@given(st.lists(requests, max_size=12), st.lists(st.floats(-10, 200), min_size=1, max_size=20))
def test_the_bounds_hold_at_every_moment(rows: list[RequestRow], moments: list[float]) -> None:
    load = payload(read_rows(rows)[0])
    at = np.array(moments) + T0
    lower, upper = load.lower(at), load.upper(at)
    for moment, low, high in zip(moments, lower, upper, strict=True):
        live = [row for row in rows if row.outcome != "queue_full" and row.sent_s <= T0 + moment < row.end_s]
        most = sum((row.prompt_tokens or 0) + (row.completion_tokens or 0) for row in live)
        assert -1e-3 <= low <= high + 1e-3
        assert high <= most + 1e-3 * (1 + len(rows))
    peak, when = load.lower.peak()
    assert peak >= lower.max() - 1e-2
    if peak > 0:
        assert any(row.sent_s - 1e-6 <= when <= row.end_s + 1e-6 for row in rows)


def test_a_stream_that_broke_off_counts_what_came(tmp_path: Path) -> None:
    row = request(0, 0.0, prompt=100, output=40, ttft_s=0.5, length_s=1.0, outcome="truncated", completion_tokens=None, chunks=30)
    assert payload(read_rows([row])[0]).lower.peak()[0] == pytest.approx(130)


@given(st.lists(st.floats(0, 10), max_size=60), st.floats(0.05, 2))
def test_coverage_is_a_share_and_its_gap_lies_in_the_window(times: list[float], fresh_s: float) -> None:
    share, gap = coverage(np.array(sorted(times)), 2.0, 8.0, fresh_s)
    assert 0 <= share <= 1
    assert 0 <= gap <= 6.0
    every, _ = coverage(np.arange(0, 10, fresh_s / 2), 2.0, 8.0, fresh_s)
    assert every == pytest.approx(1.0)


def test_a_damaged_server_number_is_refused_and_fills_no_memory(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge, match="no such server"):
        read_series([TelemetryRow(T0, endpoint=10**9)], 1)
    with pytest.raises(CannotJudge, match="no such server"):
        read_series([TelemetryRow(T0, endpoint=-1)], 1)


def test_a_thousand_lanes_stay_apart(tmp_path: Path) -> None:
    rows = [request(i, i * 0.001, lane=f"lane{i}") for i in range(1000)]
    analysis = analyse(MadeRun(rows=rows, samples=[sample(rows, T0 + i / 10) for i in range(16)]).write(tmp_path / "1-normal"))
    assert len(analysis.lanes) == 1000


def test_an_answer_that_came_in_one_piece_was_held_in_full() -> None:
    row = request(0, 0.0, prompt=2008, output=32, ttft_s=0.2, length_s=0.2)
    load = payload(read_rows([row])[0])
    assert load.lower.peak()[0] == pytest.approx(2040)
    assert load.upper.peak()[0] == pytest.approx(2040)
