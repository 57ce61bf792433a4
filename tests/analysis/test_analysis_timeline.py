"""What a Run says once it is taken apart: a wrong number here is a wrong verdict."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from made_run import BLOCK, T0, USABLE, MadeRun, closed_loop, quality_run, refused, request, sample, snapshot

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conditions import Limit
from pytest_kvcache.errors import CannotJudge
from pytest_kvcache.quantities import KNOWN, QUANTITIES, Missing, Reading
from pytest_kvcache.records import RequestRow, TelemetryRow
from pytest_kvcache.runfolder import read_run


def number(analysis: Analysis, name: str, lane: str = "") -> float:
    value = analysis.lanes[lane][name] if lane else analysis.values[name]
    assert isinstance(value, Reading), value
    return value.number()


def reason(analysis: Analysis, name: str) -> Missing:
    value = analysis.values[name]
    assert isinstance(value, Missing), value
    return value


def test_a_sound_run_has_no_problem_and_its_known_figures(tmp_path: Path) -> None:
    analysis = analyse(MadeRun().write(tmp_path / "1-normal"))
    assert analysis.problems == []
    assert number(analysis, "requests.sent") == number(analysis, "requests.ok") == 16
    assert number(analysis, "prompt_tokens") == 1600
    assert number(analysis, "output_tokens") == 800
    assert number(analysis, "ttft.p50") == pytest.approx(0.1)
    assert number(analysis, "latency.p95") == pytest.approx(0.5)
    assert number(analysis, "throughput") == pytest.approx(800 / 4.01, rel=0.01)
    assert number(analysis, "rejections") == number(analysis, "preemptions") == 0
    assert number(analysis, "running.peak") == number(analysis, "running.at_peak") == 2
    assert number(analysis, "pool_blocks") == USABLE + 1
    assert number(analysis, "scrape.coverage") == pytest.approx(1.0)
    assert number(analysis, "idle.usage") == 0


def test_every_value_can_be_named_in_a_condition(tmp_path: Path) -> None:
    analysis = analyse(MadeRun().write(tmp_path / "1-normal"))
    texts = {name for name, quantity in QUANTITIES.items() if quantity.kind == "config" and not quantity.unit}
    assert set(analysis.values) - texts == set(KNOWN)
    assert set(analysis.lanes["normal"]) == {name for name, known in KNOWN.items() if known.lanes}
    quality = analyse(quality_run(300).write(tmp_path / "2-quality"))
    assert set(quality.values) - texts == set(KNOWN)


def test_a_polled_peak_says_that_it_is_a_lower_bound(tmp_path: Path) -> None:
    analysis = analyse(MadeRun().write(tmp_path / "1-normal"))
    peak = analysis.values["usage.peak"]
    assert isinstance(peak, Reading)
    assert "polled at 10 Hz, a lower bound" in peak.source
    blocks = number(analysis, "used_blocks.peak")
    assert 2 * math.ceil(140 / BLOCK) <= blocks <= 2 * math.ceil(150 / BLOCK)
    assert number(analysis, "usage.peak") == pytest.approx(blocks / USABLE)
    assert number(analysis, "free_blocks.min") == USABLE - blocks


def test_the_payload_lies_between_its_bounds(tmp_path: Path) -> None:
    analysis = analyse(MadeRun(rows=[request(0, 0.0, prompt=200, output=100, ttft_s=0.5, length_s=1.0)] * 3).write(tmp_path / "1-normal"))
    assert number(analysis, "payload.peak") == pytest.approx(900, rel=0.01)
    assert number(analysis, "payload.peak_upper") == pytest.approx(900, rel=0.01)
    at = dict(zip(analysis.timeline.t_s, zip(analysis.timeline.payload_tokens, analysis.timeline.payload_upper, strict=True), strict=True))
    during_prefill = next(pair for t, pair in at.items() if 0.2 < t < 0.4)
    assert during_prefill == (0.0, 600.0)
    halfway = next(pair for t, pair in at.items() if 0.69 < t < 0.81)
    assert halfway[0] == halfway[1] == pytest.approx(750, abs=40)


def test_mean_length_beside_the_peak_comes_from_our_own_log(tmp_path: Path) -> None:
    rows = [request(i, 0.0, prompt=100 * (i + 1), output=10, ttft_s=0.1, length_s=2.0) for i in range(3)]
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))
    assert number(analysis, "mean_length.at_peak") == pytest.approx(205, abs=6)


def test_preemptions_between_two_polls_are_not_lost(tmp_path: Path) -> None:
    made = MadeRun(after=[snapshot(T0 + 4.6, preemptions=3)])
    assert number(analyse(made.write(tmp_path / "1-normal")), "preemptions") == 3


def test_what_the_server_counted_before_the_load_is_not_ours(tmp_path: Path) -> None:
    rows = closed_loop()
    samples = [sample(rows, T0 - 0.3 + i / 10, preemptions=7.0) for i in range(48)]
    made = MadeRun(rows=rows, samples=samples, before=[snapshot(T0 - 5, preemptions=5)], after=[snapshot(T0 + 5, preemptions=7)])
    assert number(analyse(made.write(tmp_path / "1-normal")), "preemptions") == 0


def test_a_counter_that_fell_is_a_restart_and_not_a_negative_count(tmp_path: Path) -> None:
    rows = closed_loop()
    samples = [sample(rows, T0 - 0.3 + i / 10, preemptions=9.0 if i < 20 else 2.0) for i in range(48)]
    made = MadeRun(rows=rows, samples=samples, before=[snapshot(T0 - 0.5, preemptions=9)], after=[snapshot(T0 + 5, preemptions=2)])
    analysis = analyse(made.write(tmp_path / "1-normal"))
    assert number(analysis, "preemptions") == 2
    assert [problem.rule for problem in analysis.problems] == ["restart"]


def test_what_cannot_happen_stays_apart_from_what_is_not_told(tmp_path: Path) -> None:
    made = MadeRun(
        samples=[TelemetryRow(T0 - 0.3 + i / 10, values={"running": 1.0}) for i in range(48)],
        before=[snapshot(T0 - 0.5, missing=["usage"], never=["preemptions"])],
        after=[snapshot(T0 + 5, missing=["usage"], never=["preemptions"])],
    )
    analysis = analyse(made.write(tmp_path / "1-normal"))
    assert reason(analysis, "preemptions").cannot_happen
    assert not reason(analysis, "usage.peak").cannot_happen
    assert reason(analysis, "usage.peak").reason == "usage is not told"


def test_rejections_are_counted_by_class_and_lane(tmp_path: Path) -> None:
    rows = [
        *closed_loop(),
        refused(90, 1.0, "queue_full", "busy"),
        refused(91, 1.1, "timeout", lane="nearmax"),
        refused(92, 1.2, "queue_full", lane="nearmax"),
    ]
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))
    assert analysis.rejections == {"queue_full": {"normal": 1, "nearmax": 1}, "timeout": {"nearmax": 1}}
    assert number(analysis, "rejections") == 3
    assert number(analysis, "rejections", "nearmax") == 2
    assert analysis.errors["queue_full"] == "busy"
    for limit, count in ((Limit("rejections", "==", 0, "nearmax", "timeout"), 1), (Limit("rejections", "==", 0, "", "queue_full"), 2)):
        value = analysis.value(limit)
        assert isinstance(value, Reading)
        assert value.number() == count
    assert isinstance(analysis.value(Limit("ttft.p50", "<", 1, lane="longctx")), Missing)


def test_requests_cut_off_at_the_end_are_neither_success_nor_rejection(tmp_path: Path) -> None:
    rows = [*closed_loop(), request(90, 3.8, outcome="cut_off", completion_tokens=None, chunks=3, length_s=0.2)]
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))
    assert number(analysis, "rejections") == 0
    assert number(analysis, "requests.ok") == 16
    assert number(analysis, "requests.cut_off") == 1


def test_times_count_from_the_intended_start(tmp_path: Path) -> None:
    rows = [msgspec.structs.replace(row, intended_s=row.sent_s - 0.2) for row in closed_loop()]
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))
    assert number(analysis, "ttft.p50") == pytest.approx(0.3)
    assert number(analysis, "ttft_sent.p50") == pytest.approx(0.1)


def test_failed_requests_do_not_make_the_times_look_better(tmp_path: Path) -> None:
    rows = [*closed_loop(), *(refused(90 + i, 1.0, "server_error", end_s=T0 + 1.001) for i in range(50))]
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))
    assert number(analysis, "latency.p50") == pytest.approx(0.5)


def test_a_straggler_does_not_stretch_the_window_of_the_throughput(tmp_path: Path) -> None:
    rows = [*closed_loop(), request(90, 3.9, length_s=40.0)]
    made = MadeRun(rows=rows, record={"options": {"duration_s": 4.0}})
    assert number(analyse(made.write(tmp_path / "1-normal")), "throughput") == pytest.approx(200, rel=0.02)


def test_several_servers_add_up_and_the_fullest_stands_beside(tmp_path: Path) -> None:
    left = [request(i, 0.0, prompt=400, output=10, length_s=2.0) for i in range(4)]
    right = [request(9, 0.0, prompt=40, output=10, length_s=2.0, endpoint=1)]
    samples = []
    for i in range(30):
        at = T0 - 0.3 + i / 10
        samples.append(sample(left, at))
        samples.append(msgspec.structs.replace(sample(right, at + 0.01, usable=2 * USABLE), endpoint=1))
    pairs = [[snapshot(at), snapshot(at, usable=2 * USABLE)] for at in (T0 - 0.5, T0 + 3)]
    analysis = analyse(MadeRun(rows=[*left, *right], samples=samples, before=pairs[0], after=pairs[1]).write(tmp_path / "1-normal"))
    used = 4 * math.ceil(410 / BLOCK) + math.ceil(50 / BLOCK)
    assert number(analysis, "usable_blocks") == 3 * USABLE
    assert number(analysis, "used_blocks.peak") == used
    assert number(analysis, "usage.peak") == pytest.approx(used / (3 * USABLE))
    assert number(analysis, "usage.hottest") == pytest.approx(4 * 26 / USABLE)
    assert number(analysis, "free_blocks.min") == 3 * USABLE - used
    assert number(analysis, "free_blocks.tightest") == USABLE - 4 * 26
    assert number(analysis, "usage.spread") > 0.7
    assert len(analysis.timeline.endpoints) == 2
    assert max(v for v in analysis.timeline.endpoints[1].payload_tokens if not math.isnan(v)) == pytest.approx(50, abs=2)


def test_one_server_has_nothing_to_balance(tmp_path: Path) -> None:
    assert reason(analyse(MadeRun().write(tmp_path / "1-normal")), "usage.spread").cannot_happen


def test_a_pause_in_the_telemetry_is_a_gap_and_not_a_line(tmp_path: Path) -> None:
    rows = closed_loop()
    samples = [sample(rows, T0 - 0.3 + i / 10) for i in range(48) if not 10 <= i < 25]
    timeline = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / "1-normal")).timeline
    inside = [u for t, u in zip(timeline.t_s, timeline.usage, strict=True) if 0.7 < t < 2.1]
    assert len(inside) == 1
    assert math.isnan(inside[0])
    assert all(
        len(getattr(timeline, name)) == len(timeline.t_s) for name in ("used", "free", "running", "waiting", "payload_tokens", "payload_upper")
    )


def test_an_engine_that_counts_tokens_is_charted_in_tokens(tmp_path: Path) -> None:
    rows = closed_loop()
    told = {"usage": 0.25, "used_tokens": 256.0, "free_tokens": 768.0, "running": 2.0, "waiting": 0.0}
    samples = [TelemetryRow(T0 - 0.3 + i / 10, values=told) for i in range(48)]
    idle = snapshot(T0 - 0.5, missing=["used_blocks", "free_blocks", "usable_blocks", "pool_blocks"], used_tokens=0, free_tokens=1024)
    analysis = analyse(MadeRun(rows=rows, samples=samples, before=[idle]).write(tmp_path / "1-normal"))
    assert analysis.timeline.unit == "tokens"
    assert set(analysis.timeline.free) == {768.0}
    assert number(analysis, "free_tokens.min") == 768
    assert isinstance(analysis.values["free_blocks.min"], Missing)


def test_a_run_of_quality_items_alone_says_that_no_load_was_run(tmp_path: Path) -> None:
    analysis = analyse(quality_run(295).write(tmp_path / "1-quality"))
    assert number(analysis, "quality.pass_rate") == pytest.approx(295 / 300)
    assert reason(analysis, "usage.peak").reason == "no load was run"
    assert analysis.problems == []
    assert not isinstance(analysis.quality, Missing)
    assert analysis.quality.by_length == {64: (295, 300)}


def test_a_run_is_analysed_from_its_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "1-normal"
    written = analyse(MadeRun().write(folder))
    moved = folder.rename(tmp_path / "elsewhere")
    again = analyse(read_run(moved))
    assert {name: value.number() for name, value in again.values.items() if isinstance(value, Reading) and not isinstance(value.value, str)} == {
        name: value.number() for name, value in written.values.items() if isinstance(value, Reading) and not isinstance(value.value, str)
    }


def test_a_damaged_line_is_an_error_and_not_a_smaller_run(tmp_path: Path) -> None:
    run = MadeRun().write(tmp_path / "1-normal")
    path = run.folder / "requests.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = b'{"kind":"request","id":\n'
    path.write_bytes(b"".join(lines))
    with pytest.raises(CannotJudge, match="line 4"):
        analyse(run)


def test_rows_without_any_token_counts_leave_holes_and_no_zeros(tmp_path: Path) -> None:
    rows: list[RequestRow] = [
        msgspec.structs.replace(row, prompt_tokens=None, completion_tokens=None, prompt_tokens_planned=None) for row in closed_loop()
    ]
    analysis = analyse(MadeRun(rows=rows, samples=[sample([], T0 + i / 10 - 0.3, running=2.0) for i in range(48)]).write(tmp_path / "1-normal"))
    for name in ("prompt_tokens", "output_tokens", "throughput", "prompt_length.mean"):
        assert isinstance(analysis.values[name], Missing)
