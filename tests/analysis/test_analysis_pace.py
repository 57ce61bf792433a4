"""How far an answer is follows from the engine's own steps, also where the server stood still in between."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_run import BLOCK, T0, USABLE, MadeRun, request, sample

from pytest_kvcache.analysis.accounting import Accounting
from pytest_kvcache.analysis.pace import seconds, step_clock
from pytest_kvcache.analysis.rows import read_rows
from pytest_kvcache.analysis.series import Series
from pytest_kvcache.analysis.timeline import analyse


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


def test_a_request_that_was_put_back_twice_stays_within_its_bounds(tmp_path: Path) -> None:
    """Its row keeps its longest pause only: in the other one the others' steps bound what it can have."""
    pace, total = 0.05, 8.0
    stays = request(0, 0.0, prompt=100, output=160, ttft_s=0.0, length_s=total, longest_gap_s=0.05, longest_gap_at_s=T0)
    away = [(1.0, 2.0), (3.0, 6.0)]
    steps = [i * pace for i in range(int(total / pace)) if not any(a <= i * pace < b for a, b in away)]
    twice = request(1, 0.0, prompt=100, output=len(steps), ttft_s=0.0, length_s=steps[-1] + pace, longest_gap_s=3.0, longest_gap_at_s=T0 + 3.0)
    samples = []
    for i in range(1, 85):
        t = i / 10 - 0.001
        first = min(int(t / pace) + 1, 160) if t < total else 0
        second = sum(step <= t for step in steps) if t < steps[-1] + pace else 0
        there = second and not any(a <= t < b for a, b in away)
        used = sum(math.ceil((100 + k - 1) / BLOCK) for k in (first, second * bool(there)) if k)
        made = min(int(t / pace) + 1, 160) + sum(step <= t for step in steps)
        values: dict[str, Any] = {
            "used_blocks": float(used),
            "usage": used / USABLE,
            "running": float(bool(first)) + float(bool(there)),
            "waiting": float(bool(second) and not there),
        }
        samples.append(sample([], T0 + t, generation_tokens=float(made), preemptions=float((t > 2.0) + (t > 6.0)), **values))
    accounting = analyse(MadeRun(rows=[stays, twice], samples=samples).write(tmp_path / "1-normal")).accounting
    assert isinstance(accounting, Accounting)
    assert accounting.put_back == 1
    whole = accounting.whole
    inside = (whole.t_s > 0) & ~((whole.t_s >= 0.9) & (whole.t_s <= 2.1))
    wrong = np.flatnonzero(inside & ~whole.agrees)
    assert not len(wrong), [(whole.t_s[i], whole.used[i], whole.low[i], whole.high[i]) for i in wrong[:6]]
