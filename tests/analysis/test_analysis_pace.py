"""How far an answer is follows from the engine's own steps, also where the server stood still in between."""

from __future__ import annotations

import numpy as np
import pytest
from made_run import T0, request

from pytest_kvcache.analysis.pace import seconds, step_clock
from pytest_kvcache.analysis.rows import read_rows
from pytest_kvcache.analysis.series import Series


def series(times: list[float], made: list[float]) -> Series:
    return Series(np.array(times) + T0, {"generation_tokens": np.array(made)})


ROWS, _ = read_rows([request(i, 0.0, ttft_s=0.0, output=100, length_s=10.0) for i in range(2)])
EVERY = np.ones(2, dtype=bool)


def test_steps_are_tokens_over_those_that_run() -> None:
    clock = step_clock("vllm", series([0, 1, 2, 6, 7], [0, 20, 40, 40, 60]), ROWS, EVERY, ~EVERY)
    ticks = clock(np.array([0.0, 1.0, 2.0, 6.0, 7.0]) + T0)
    assert ticks == pytest.approx([0, 10, 20, 20, 30], abs=0.02)
    assert (np.diff(ticks) > 0).all(), "it never stands still altogether"


def test_a_request_that_was_put_back_takes_no_step() -> None:
    rows, _ = read_rows([request(i, 0.0, ttft_s=0.0, output=100, length_s=10.0, longest_gap_s=5.0 * i, longest_gap_at_s=T0 + 2.0) for i in range(2)])
    lost = np.array([False, True])
    clock = step_clock("vllm", series([0, 2, 4, 6, 8], [0, 40, 60, 80, 120]), rows, EVERY, lost)
    assert np.diff(clock(np.array([0.0, 2.0, 4.0, 6.0, 8.0]) + T0)) == pytest.approx([20, 20, 20, 20], abs=0.02)


def test_where_the_counter_does_not_grow_with_every_step_seconds_count() -> None:
    told = series([0, 1, 2, 3], [0, 0, 200, 200])
    assert step_clock("llamacpp", told, ROWS, EVERY, ~EVERY) is seconds
    assert step_clock("vllm", series([0, 1, 2, 3], [50, 60, 0, 10]), ROWS, EVERY, ~EVERY) is seconds, "it began anew"
    assert step_clock("vllm", Series(np.array([T0]), {}), ROWS, EVERY, ~EVERY) is seconds


def test_moments_outside_the_samples_stay_in_order() -> None:
    clock = step_clock("vllm", series([0, 1, 2], [0, 20, 40]), ROWS, EVERY, ~EVERY)
    ticks = clock(np.array([-5.0, -1.0, 0.5, 3.0, 9.0]) + T0)
    assert (np.diff(ticks) > 0).all()
