"""Thresholds of a file: what each line is judged on, what noise and missing Runs make of it, and what a file cannot say."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_run import MadeRun, closed_loop, quality_run, refused, sample

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.errors import UsageError
from pytest_kvcache.judge.gates import session_verdict
from pytest_kvcache.judge.thresholds import judge_thresholds, of_limits, of_texts, read_thresholds
from pytest_kvcache.records import PressureRecord, QualityRow


def _load(folder: Path, profile: str = "normal", window: int = 0, length_s: float = 0.5, **record: object) -> Analysis:
    made = MadeRun(rows=closed_loop(length_s=length_s, lane=profile), record={"profile": profile, "window": window, **record})
    return analyse(made.write(folder / f"{profile}-{window}-{length_s}"))


def _file(folder: Path, text: str) -> Path:
    path = folder / "kvgate.toml"
    path.write_text(text)
    return path


def test_a_line_outside_of_a_profile_is_judged_on_every_load_that_has_what_it_names(tmp_path: Path) -> None:
    lines = read_thresholds(
        _file(
            tmp_path,
            """
            fail = ["usage.peak < 0.9 and rejections == 0", "rejections{lane=nearmax} == 0"]
            [profile.quality]
            fail = ["quality.pass_rate >= 0.98"]
            """,
        )
    ).lines
    loads = [_load(tmp_path, "normal"), _load(tmp_path, "nearmax"), analyse(quality_run(300).write(tmp_path / "q"))]
    judged = judge_thresholds(lines, loads)
    assert [(gate.quantity, gate.lane, gate.verdict) for gate in judged] == [
        ("usage.peak", "normal", "PASS"),
        ("usage.peak", "nearmax", "PASS"),
        ("rejections", "normal", "PASS"),
        ("rejections", "nearmax", "PASS"),
        ("rejections{lane=nearmax}", "nearmax", "PASS"),
        ("quality.pass_rate", "quality", "PASS"),
    ]
    assert all("pool 127 blocks" in gate.beside for gate in judged if gate.quantity.startswith("usage"))
    assert "kvgate.toml: fail, line 1" in judged[0].rule


def test_a_line_that_nothing_measured_answers_never_passes(tmp_path: Path) -> None:
    judged = judge_thresholds(of_texts(["rejections{lane=longctx} == 0", "quality.pass_rate > 0.5"], "x"), [_load(tmp_path)])
    assert [gate.verdict for gate in judged] == ["INCONCLUSIVE", "INCONCLUSIVE"]
    assert "lane longctx" in judged[0].text
    assert session_verdict(judged)[0] == "INCONCLUSIVE"


def test_a_warning_is_judged_and_decides_nothing(tmp_path: Path) -> None:
    lines = read_thresholds(_file(tmp_path, 'fail = ["rejections == 0"]\nwarn = ["usage.peak < 0.01"]')).lines
    judged = judge_thresholds(lines, [_load(tmp_path)])
    assert [(gate.verdict, gate.level) for gate in judged] == [("PASS", ""), ("FAIL", "warn")]
    assert session_verdict(judged)[0] == "PASS"


def test_a_rejection_above_the_bound_fails_with_its_number(tmp_path: Path) -> None:
    rows = [*closed_loop(), refused(900, 1.0, "queue_full", "busy")]
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "r"))
    (gate,) = judge_thresholds(of_texts(["rejections{class=queue_full} == 0"], "x"), [analysis])
    assert gate.verdict == "FAIL"
    assert "is 1 " in gate.text


def test_a_peak_between_two_polls_is_not_passed_over_where_a_counter_proves_the_pool_full(tmp_path: Path) -> None:
    rows = closed_loop()
    samples = [sample(rows, 1_800_000_000.0 - 0.3 + i / 10, preemptions=0.0 if i < 20 else 2.0) for i in range(48)]
    made = MadeRun(rows=rows, samples=samples)
    made.after = [made.before[0].__class__(**{n: getattr(made.before[0], n) for n in made.before[0].__struct_fields__})]
    made.after[0].quantities["preemptions"] = made.before[0].quantities["preemptions"].__class__(2.0, "events", "series preemptions")
    made.before[0].quantities["preemptions"] = made.after[0].quantities["preemptions"].__class__(0.0, "events", "series preemptions")
    analysis = analyse(made.write(tmp_path / "r"))
    (gate,) = judge_thresholds(of_texts(["free_blocks.min >= 1"], "x"), [analysis])
    assert gate.verdict in {"FAIL", "INVALID"}, gate.text


@pytest.mark.parametrize(
    ("after_s", "text", "verdict"),
    [
        ([0.5] * 5, "latency.p50 <= baseline * 1.1", "PASS"),
        ([0.7] * 5, "latency.p50 <= baseline * 1.1", "FAIL"),
        ([0.45, 0.62, 0.5, 0.66, 0.49], "latency.p50 <= baseline * 1.1", "INCONCLUSIVE"),
        ([0.5], "latency.p50 <= baseline * 1.1", "INCONCLUSIVE"),
        ([0.25] * 5, "latency.p50 <= baseline * 0.8", "PASS"),
        ([0.5] * 5, "latency.p50 <= baseline * 0.8", "FAIL"),
        ([0.5] * 5, "usage.peak <= baseline + 0.02", "PASS"),
        ([0.5] * 5, "throughput >= baseline * 0.97", "PASS"),
        ([0.7] * 5, "throughput >= baseline * 0.97", "FAIL"),
    ],
)
def test_a_line_against_the_baseline_weighs_the_noise_of_both_sides(tmp_path: Path, after_s: list[float], text: str, verdict: str) -> None:
    before = [_load(tmp_path / "b", window=n) for n in range(len(after_s))]
    after = [_load(tmp_path / "a", window=n, length_s=s) for n, s in enumerate(after_s)]
    (gate,) = judge_thresholds(of_texts([text], "x"), after, before)
    assert gate.verdict == verdict, gate.text
    if len(after_s) > 1:
        assert gate.before is not None


def test_quality_against_the_baseline_pairs_the_items(tmp_path: Path) -> None:
    before, worse = (analyse(quality_run(passed).write(tmp_path / str(passed))) for passed in (300, 250))
    assert [g.verdict for g in judge_thresholds(of_texts(["quality.pass_rate >= baseline - 0.02"], "x"), [before], [before])] == ["PASS"]
    assert [g.verdict for g in judge_thresholds(of_texts(["quality.pass_rate >= baseline - 0.02"], "x"), [worse], [before])] == ["FAIL"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no threshold"),
        ("fail = []", "no threshold"),
        ("fail = ['usage.peek < 1']", "unknown quantity"),
        ("fail = ['usage.peak < 1 GiB']", "no unit"),
        ("fail = 'usage.peak < 1'", "list"),
        ("fail = [1]", "no condition"),
        ("fial = ['usage.peak < 1']", "unknown key"),
        ("on_inconclusive = 'shrug'\nfail = ['usage.peak < 1']", "not one of"),
        ("[profile.x]\nwran = []", "unknown key"),
        ("profile = 3", "table"),
        ("[profile]\nx = 3", "no table"),
        ("fail = [", "no TOML"),
        ("fail = ['__import__(\"os\")']", "condition"),
    ],
)
def test_a_file_that_cannot_be_meant_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_thresholds(_file(tmp_path, text))
    assert words in str(caught.value)
    assert "kvgate.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        read_thresholds(tmp_path / "nowhere.toml")


def test_limits_of_a_mark_belong_to_their_profile(tmp_path: Path) -> None:
    lines = of_limits("normal", {"usage_peak": 0.9, "ttft_p95": "1.5s", "rejections": "< 3"})
    judged = judge_thresholds(lines, [_load(tmp_path), _load(tmp_path, "longctx")])
    assert [(gate.lane, gate.verdict) for gate in judged] == [("normal", "PASS")] * 3


def test_answers_under_pressure_and_greedy_agreement_can_be_bounded(tmp_path: Path) -> None:
    made = quality_run(300)
    made.quality += [QualityRow(f"pressed-{i}", i < 8, part="fill", length_tokens=64, expected_hash="h") for i in range(10)]
    made.record["pressure"] = [PressureRecord("fill", pressed=True)]
    run = analyse(made.write(tmp_path / "q"))
    judged = judge_thresholds(of_texts(["quality.pressed >= 0.9", "quality.pass_rate >= 0.9", "agreement.equal >= 0.9"], "x"), [run])
    assert [gate.verdict for gate in judged] == ["FAIL", "PASS", "INCONCLUSIVE"]
