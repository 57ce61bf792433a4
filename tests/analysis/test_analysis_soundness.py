"""Each thing that spoils a measurement is broken on purpose here: unseen, it would let a verdict rest on unsound evidence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_run import T0, MadeRun, closed_loop, refused, request, sample, snapshot

from pytest_kvcache.analysis import soundness
from pytest_kvcache.analysis.soundness import Facts, Limits, problems
from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.conditions import INCONCLUSIVE, INVALID, Limit, parse
from pytest_kvcache.judge import gates
from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import LoadEnd, LoadNote, LoadStart, RequestRow, TelemetryRow


def late(rows: list[RequestRow], by_s: float) -> list[RequestRow]:
    return [msgspec.structs.replace(row, intended_s=row.sent_s - by_s) for row in rows]


def polled(rows: list[RequestRow], keep: Callable[[int], bool], **values: Any) -> list[TelemetryRow]:
    return [sample(rows, T0 - 0.3 + i / 10, **values) for i in range(48) if keep(i)]


def failing_reads(rows: list[RequestRow]) -> list[TelemetryRow]:
    found = polled(rows, lambda i: i % 5 == 0)
    return found + [TelemetryRow(T0 - 0.29 + i / 10, error="HTTP 503") for i in range(48)]


def of_worker(offset_s: float, error_s: float | None) -> LoadEnd:
    return LoadEnd(T0 + 4, rows=16, reason="duration", worker="w0", clock_offset_s=offset_s, clock_error_s=error_s)


def limit(text: str) -> Limit:
    found = parse(text)
    assert isinstance(found, Limit)
    return found


ROWS = closed_loop()
WRONG = [request(i, i * 0.2, prompt_tokens=130) for i in range(10)]

BROKEN: dict[str, tuple[str, MadeRun]] = {
    "a load without its end line": ("incomplete", MadeRun(no_end=True)),
    "a load that was killed": ("incomplete", MadeRun(end=LoadEnd(T0 + 4, rows=16, reason="signal"))),
    "rows that are missing": ("incomplete", MadeRun(end=LoadEnd(T0 + 4, rows=17, reason="duration"))),
    "a profile that raised": ("exception", MadeRun(notes=[LoadNote(T0 + 1, "task exception", "KeyError: 'x'")])),
    "a tool that broke": ("tool", MadeRun(record={"problems": ["the sampler's disk was full"]})),
    "no request at all": ("no_requests", MadeRun(rows=[])),
    "a client that sends late": ("client_bound", MadeRun(rows=late(ROWS, 0.4))),
    "a client whose event loop lags": ("client_bound", MadeRun(end=LoadEnd(T0 + 4, rows=16, reason="duration", lag_p99_s=0.6, lag_max_s=0.8))),
    "a client that stood still": ("client_bound", MadeRun(end=LoadEnd(T0 + 4, rows=16, reason="duration", lag_p99_s=1.5, lag_max_s=1.5))),
    "too few requests": ("too_few", MadeRun(rows=[request(0, 0.0, length_s=2.0), request(1, 0.1, length_s=2.0)])),
    "too few requests in one lane": ("too_few", MadeRun(rows=[*ROWS, request(99, 1.0, lane="nearmax")])),
    "prompts of another length": ("lengths", MadeRun(rows=WRONG)),
    "prompts that are shorter": ("lengths", MadeRun(rows=[request(i, i * 0.2, prompt_tokens=90) for i in range(10)])),
    "a usage below zero": ("impossible", MadeRun(samples=polled(ROWS, lambda i: True, usage=-5.0))),
    "clocks that disagree": ("clock", MadeRun(record={"load_started_wall_s": T0 + 30, "load_ended_wall_s": T0 + 60})),
    "a clock that was set forward": ("clock", MadeRun(record={"clock_step_s": 3600.0})),
    "a clock that was set back": ("clock", MadeRun(record={"clock_step_s": -2.5})),
    "fewer users than planned": ("under_load", MadeRun(options={"users": 8, "think_s": 0.0})),
    "an open loop that fell behind": ("under_load", MadeRun(options={"scheduled": 40})),
    "a load worker whose clock is set wrong": ("worker_clock", MadeRun(end=of_worker(-3.5, 0.001))),
    "a load worker whose clock is not known well": ("worker_clock", MadeRun(end=of_worker(0.0, 0.3))),
    "a load worker whose clock was never measured": ("worker_clock", MadeRun(end=of_worker(0.0, None))),
    "telemetry that covers a part": ("coverage", MadeRun(samples=polled(ROWS, lambda i: i < 24))),
    "telemetry that mostly fails": ("coverage", MadeRun(samples=failing_reads(ROWS))),
    "no telemetry": ("coverage", MadeRun(samples=[])),
    "a counter that fell": ("restart", MadeRun(samples=polled(ROWS, lambda i: True, preemptions=1.0), before=[snapshot(T0 - 0.5, preemptions=4)])),
    "a start time that moved": ("restart", MadeRun(after=[snapshot(T0 + 5, start_time=T0 + 2)])),
    "a pool that changed": ("moved", MadeRun(after=[snapshot(T0 + 5, usable=63)])),
    "a KV dtype that changed": ("moved", MadeRun(after=[snapshot(T0 + 5, kv_dtype="fp8")])),
    "requests of others that finished": ("other_traffic", MadeRun(before=[snapshot(T0 - 1, finished=100)], after=[snapshot(T0 + 5, finished=160)])),
    "prompt tokens of others": (
        "other_traffic",
        MadeRun(before=[snapshot(T0 - 1, prompt_tokens=0)], after=[snapshot(T0 + 5, prompt_tokens=5000)]),
    ),
    "requests of others that run": ("other_traffic", MadeRun(samples=polled(ROWS, lambda i: True, running=5.0))),
    "a warm prefix cache": ("warm_cache", MadeRun(before=[snapshot(T0 - 1, prefix_hits=0)], after=[snapshot(T0 + 5, prefix_hits=800)])),
    "a warm prefix cache that only the answers tell": ("warm_cache", MadeRun(rows=closed_loop(cached_tokens=64))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_seen(tmp_path: Path, name: str) -> None:
    rule, made = BROKEN[name]
    found = analyse(made.write(tmp_path / "1-normal")).problems
    assert [problem.rule for problem in found] == [rule], found
    assert found[0].text
    assert found[0].mend


@pytest.mark.parametrize("name", BROKEN)
def test_a_gate_on_it_is_invalid_and_says_what_broke_it_and_how_to_mend_it(tmp_path: Path, name: str) -> None:
    analysis = analyse(BROKEN[name][1].write(tmp_path / "1-normal"))
    (problem,) = analysis.problems
    for judged in (gates.peak_usage([analysis], 1.0), gates.no_rejections([analysis]), gates.threshold([analysis], limit("requests.sent >= 0"))):
        if judged.verdict != INCONCLUSIVE:  # nothing was polled, or nothing was sent: then there is nothing to judge either
            assert judged.verdict == INVALID, judged.text
            assert problem.text in judged.text
            assert f"to mend it: {problem.mend}" in judged.text


def test_each_rule_of_soundness_is_broken_by_a_test() -> None:
    rules = set(re.findall(r'Problem\(\s*"(\w+)"', Path(soundness.__file__).read_text()))
    assert len(rules) >= 18
    assert rules == {rule for rule, _ in BROKEN.values()} | {"gap", "capped"}, "gap and capped have tests of their own below"


def test_a_long_gap_is_seen_where_the_rest_is_covered(tmp_path: Path) -> None:
    rows = closed_loop(seconds=40.0)
    samples = [sample(rows, T0 - 0.3 + i / 10) for i in range(410) if not 100 <= i < 135]
    found = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / "1-normal")).problems
    assert [problem.rule for problem in found] == ["gap"]
    assert "3.60 s" in found[0].text


DECLARED = {"expect_change": {"value": "max_num_seqs, --enable-prefix-caching", "source": "command line"}}


def test_a_declared_change_of_the_prefix_cache_means_that_prompts_share_where_the_cache_was_empty(tmp_path: Path) -> None:
    made = MadeRun(rows=closed_loop(cached_tokens=64), record={"settings": DECLARED, "launch_id": "a"})
    assert analyse(made.write(tmp_path / "1-normal")).problems == []
    made.record["launch_id"] = ""
    assert [problem.rule for problem in analyse(made.write(tmp_path / "2-normal")).problems] == ["warm_cache"], "a server that was there before"
    made.record = {"settings": {"expect_change": {"value": "kv_dtype"}}, "launch_id": "a"}
    assert [problem.rule for problem in analyse(made.write(tmp_path / "3-normal")).problems] == ["warm_cache"]


@pytest.mark.parametrize(
    "made",
    [
        MadeRun(rows=[request(0, 0.0, length_s=2.0)], record={"options": {"requests": 1}}),
        MadeRun(rows=closed_loop(cached_tokens=64), record={"options": {"shared_prefix": 64}}),
        MadeRun(rows=late(closed_loop(), 0.2)),
        MadeRun(end=LoadEnd(T0 + 4, rows=16, reason="duration", lag_p99_s=0.6, lag_max_s=0.6)),
        MadeRun(end=of_worker(0.8, 0.02)),
        MadeRun(rows=[request(i, i * 0.2, prompt_tokens=103) for i in range(10)]),
        MadeRun(before=[snapshot(T0 - 1, finished=100)], after=[snapshot(T0 + 5, finished=118)]),
        MadeRun(
            before=[snapshot(T0 - 1, prompt_tokens=0)],
            after=[snapshot(T0 + 5, prompt_tokens=2400)],
            notes=[LoadNote(T0 - 0.1, "prepared", values={"requests": 4, "prompt_tokens": 800})],
        ),
        MadeRun(samples=polled(ROWS, lambda i: i % 3 != 1)),
        MadeRun(options={"users": 8, "think_s": 1.0}),
        MadeRun(options={"users": 2}),
        MadeRun(rows=[*ROWS, refused(99, 1.0, "queue_full")], options={"users": 8}),
        MadeRun(options={"scheduled": 16, "users": 64}),
        MadeRun(record={"clock_step_s": 0.2}),
    ],
    ids=[
        "one request asked for",
        "sharing meant",
        "a little late",
        "one short stall",
        "a worker's clock that was corrected",
        "lengths within reach",
        "a nudge beside the load",
        "what preparation asked",
        "lost samples",
        "users who think",
        "all users at work",
        "users who back off after a refusal",
        "an open loop that kept its schedule",
        "a clock that is slewed",
    ],
)
def test_what_is_sound_is_not_called_unsound(tmp_path: Path, made: MadeRun) -> None:
    assert analyse(made.write(tmp_path / "1-normal")).problems == []


def test_a_slow_server_may_have_a_client_that_lags_in_proportion() -> None:
    assert problems(Facts(sent=10, lag_p99_s=0.9, ttft_p50_s=10.0)) == []
    assert [problem.rule for problem in problems(Facts(sent=10, lag_p99_s=1.1, ttft_p50_s=10.0))] == ["client_bound"]


def test_limits_can_be_set(tmp_path: Path) -> None:
    run = MadeRun(rows=late(ROWS, 0.4)).write(tmp_path / "1-normal")
    assert analyse(run, Limits(lag_s=0.5)).problems == []


def test_an_unknown_worker_does_not_hide_missing_rows(tmp_path: Path) -> None:
    run = MadeRun().write(tmp_path / "1-normal")
    path = run.folder / "requests.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5] + lines[6:]))
    assert [problem.rule for problem in analyse(run).problems] == ["incomplete"]
    assert msgspec.json.decode(lines[0], type=LoadStart).profile == "normal"


def test_a_load_process_out_of_cpu_is_client_bound_by_its_own_count_or_by_locusts_warning(tmp_path: Path) -> None:
    run = MadeRun(end=LoadEnd(T0 + 4, rows=16, reason="duration", cpu_s=3.9, ran_s=4.0)).write(tmp_path / "1-normal")
    analysis = analyse(run)
    assert [(problem.rule, "98 % of one core" in problem.text) for problem in analysis.problems] == [("client_bound", True)]
    share = analysis.values["client.cpu_share"]
    assert isinstance(share, Reading)
    assert share.value == pytest.approx(0.975)
    warned = MadeRun(notes=[LoadNote(T0 + 1, "cpu warning", values={"percent": 95.0})]).write(tmp_path / "2-normal")
    assert [problem.rule for problem in analyse(warned).problems] == ["client_bound"]
    calm = MadeRun(end=LoadEnd(T0 + 4, rows=16, reason="duration", cpu_s=2.0, ran_s=4.0)).write(tmp_path / "3-normal")
    assert analyse(calm).problems == []


def test_arrivals_that_wait_for_the_cap_are_named_as_that_and_not_as_a_late_client(tmp_path: Path) -> None:
    note = LoadNote(T0 + 4, "in-flight cap", values={"cap": 4, "held": 9, "longest_wait_s": 0.6})
    analysis = analyse(MadeRun(rows=late(ROWS, 0.6), notes=[note]).write(tmp_path / "1-normal"))
    assert [problem.rule for problem in analysis.problems] == ["capped"]
    assert "9 arrivals waited" in analysis.problems[0].text
    held = analysis.values["client.held"]
    assert isinstance(held, Reading)
    assert held.value == 9


def test_a_share_that_is_too_small_also_reads_so() -> None:
    (problem,) = problems(Facts(sent=10, coverage=0.7996), Limits(coverage=0.8))
    assert problem.text == "telemetry covers 79.9 % of the load, and 80 % is needed"


def test_a_usage_a_block_below_zero_spoils_nothing(tmp_path: Path) -> None:
    made = MadeRun(samples=[*polled(ROWS, lambda i: i < 47), sample(ROWS, T0 + 4.4, usage=-1 / 127)])
    assert not [problem for problem in analyse(made.write(tmp_path / "run")).problems if problem.rule == "impossible"]
