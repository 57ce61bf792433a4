"""The export to llm-d's benchmark report 0.2, read by llm-d's own library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmd_benchmark_report import load_benchmark_report
from made_run import MadeRun, quality_run

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.cli import main
from pytest_kvcache.errors import CannotJudge
from pytest_kvcache.quantities import Reading
from pytest_kvcache.report.llmd import benchmark_report, export
from pytest_kvcache.report.model import SessionView
from pytest_kvcache.report.write import write_session


def _number(analysis: Analysis, name: str) -> float:
    value = analysis.values[name]
    assert isinstance(value, Reading)
    return value.number()


def test_each_run_with_a_load_becomes_a_report_that_llm_d_reads(single: SessionView, tmp_path: Path) -> None:
    paths = export(single, tmp_path / "out.json")
    loads = [analysis for analysis in single.after if analysis.facts.loaded]
    assert len(paths) == len(loads) == 3
    for path, analysis in zip(paths, loads, strict=True):
        report: Any = load_benchmark_report(json.loads(path.read_text()))
        aggregate = report.results.request_performance.aggregate
        assert aggregate.requests.total == len(analysis.run.requests())
        assert aggregate.latency.time_to_first_token.p95 == pytest.approx(_number(analysis, "ttft.p95"), rel=1e-6)
        assert aggregate.throughput.output_token_rate.mean == _number(analysis, "throughput")
        engine = report.results.observability.components[0]
        assert engine.component_label == report.scenario.stack[0].metadata.label == "vllm"
        assert engine.aggregate.kv_cache_usage.max == pytest.approx(100 * _number(analysis, "usage.peak"))
        assert max(point.max for point in engine.time_series.kv_cache_usage.series) == pytest.approx(engine.aggregate.kv_cache_usage.max)
        assert len(engine.time_series.kv_cache_usage.series) <= 300
    assert len({json.loads(path.read_text())["run"]["uid"] for path in paths}) == 3
    assert len({json.loads(path.read_text())["run"]["eid"] for path in paths}) == 1


def test_what_was_not_measured_is_left_out_and_never_zero(tmp_path: Path) -> None:
    made = MadeRun(samples=[], after=[])
    analysis = analyse(made.write(tmp_path / "session" / "runs" / "1-normal"))
    report = benchmark_report(_view(tmp_path, analysis), analysis)
    load_benchmark_report(report)
    assert report["results"]["observability"]["components"] == [] or "kv_cache_usage" not in str(report["results"]["observability"]["components"])


def _view(tmp_path: Path, *analyses: object) -> SessionView:
    from made_sessions import Server, verdict_of

    return SessionView(tmp_path / "session", verdict_of("PASS", tmp_path / "session", [], Server()), (), list(analyses))  # type: ignore[arg-type]


def test_the_figures_of_another_load_tool_are_exported_as_far_as_they_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(__file__).parent.parent / "data" / "imports" / "aiperf.json"
    assert main(["gate", str(file), "--require", "requests.ok > 0"]) == 0
    (folder,) = (path.parent for path in Path("reports").glob("*/verdict.json"))
    assert main(["report", str(folder), "--export", "llm-d", "out.yaml"]) == 0
    report: Any = load_benchmark_report(json.loads(Path("out.yaml").read_text()))
    assert report.scenario.load.standardized.tool == "AIPerf"
    assert report.results.request_performance.aggregate.requests.total == 24
    assert not report.results.observability.components


def test_a_session_without_a_load_exports_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    analysis = analyse(quality_run(10, 10).write(tmp_path / "session" / "runs" / "1-quality"))
    view = _view(tmp_path, analysis)
    with pytest.raises(CannotJudge):
        export(view, tmp_path / "out.json")
    write_session(view.folder, view.verdict, (), view.after)
    assert main(["report", str(view.folder), "--export", "guidellm", "x"]) == 2
    assert "--export llm-d" in capsys.readouterr().err
