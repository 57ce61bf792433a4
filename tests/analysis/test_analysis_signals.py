"""The derived values: whatever a server says, they are numbers or Missing with a reason, and the rules can be asked."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from finding_cases import busy, made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_run import T0, MadeRun, closed_loop, request, snapshot

from pytest_kvcache.analysis.findings import find
from pytest_kvcache.analysis.reconciliations import reconciliations
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.quantities import KNOWN, Missing, Reading
from pytest_kvcache.records import TelemetryRow

NAMES = (
    "usage", "used_blocks", "free_blocks", "used_tokens", "running", "waiting", "waiting_capacity", "preemptions", "prefix_hits", "prefix_queries",
    "generation_tokens", "prompt_tokens", "finished",
)  # fmt: skip
VALUES = st.one_of(st.floats(0, 1), st.floats(-1e3, 1e9), st.sampled_from([0.0, 1.0, 1e300]))
folders = itertools.count()


def number(analysis: Analysis, name: str) -> float:
    value = analysis.values[name]
    assert isinstance(value, Reading), f"{name}: {value}"
    return value.number()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES), max_size=12),
    missing=st.sets(st.sampled_from(["max_num_seqs", "block_size", "usable_blocks", "pool_blocks", "max_model_len", "pool_tokens"])),
    loaded=st.booleans(),
)
def test_nothing_that_a_server_says_breaks_the_diagnosis(tmp_path: Path, rows: list[dict[str, float]], missing: set[str], loaded: bool) -> None:
    samples = [TelemetryRow(wall_s=T0 + i / 5, values=values) for i, values in enumerate(rows)]
    load = [request(i, 0.2 * i) for i in range(3)] if loaded else []
    state = snapshot(T0 - 0.5, missing=tuple(missing))
    record = {} if loaded else {"load_started_wall_s": T0 - 0.2, "load_ended_wall_s": T0 + 3}
    run = MadeRun(rows=load, samples=samples, before=[state], after=[state], record=record).write(tmp_path / f"{next(folders)}-x")
    analysis = analyse(run)
    found = find(analysis)
    assert asdict(found)
    assert len(reconciliations(analysis)) == 3
    for name, value in analysis.values.items():
        assert isinstance(value, Reading) or (isinstance(value, Missing) and value.reason), name
        assert name not in KNOWN or not isinstance(value, Reading) or value.unit == KNOWN[name].unit, name


def test_seats_are_full_only_while_they_are(tmp_path: Path) -> None:
    analysis = made(tmp_path, None, lambda i: busy(0.4, 8.0, 3.0) if i < 24 else busy(0.4, 5.0, 0.0))
    assert number(analysis, "bound.seats") == pytest.approx(0.5, abs=0.05)
    assert number(analysis, "bound.kv") == 0
    assert number(analysis, "seats.used") == 1.0


def test_a_request_that_came_within_a_step_is_not_bound_by_tokens(tmp_path: Path) -> None:
    analysis = made(tmp_path, closed_loop(users=8), lambda i: busy(0.4, 4.0, float(i % 4 == 0)))
    assert number(analysis, "bound.budget") == 0


def test_room_is_counted_in_the_longest_requests_beside_the_mean_level(tmp_path: Path) -> None:
    analysis = made(tmp_path, None, busy(0.5, 2.0, 0.0), usable=256)
    assert number(analysis, "nearmax.room") == pytest.approx(256 * 0.5 / 64)


def test_tokens_that_the_server_counted_tell_whose_metrics_these_are(tmp_path: Path) -> None:
    def counted(share: float) -> Any:
        return lambda i: {"generation_tokens": round(800 * share * min(max(i - 3, 0) / 40, 1.0))}

    analysis = made(tmp_path, None, counted(0.5), before={"generation_tokens": 0.0}, after={"generation_tokens": 400.0})
    assert number(analysis, "endpoint.seen") == 0.5
    assert isinstance(made(tmp_path / "b", None).values["endpoint.seen"], Missing)
