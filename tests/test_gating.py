"""``pytest-kvcache gate`` and ``schema``: exit codes, what is written, and what cannot be meant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from jsonschema import Draft202012Validator
from made_run import T0, MadeRun, closed_loop, quality_run, sample

from pytest_kvcache.cli import main
from pytest_kvcache.gating import SCHEMAS, schema_text
from pytest_kvcache.records import GateRecord, VerdictRecord

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


def _session(name: str, length_s: float = 0.5, windows: int = 3) -> None:
    for window in range(windows):
        made = MadeRun(rows=closed_loop(length_s=length_s), record={"window": window, "seed": window, "workload": f"w{window}"})
        made.write(Path(name) / "runs" / f"{window + 1}-normal")
    quality_run(300).write(Path(name) / "runs" / "9-quality")


def _verdict() -> VerdictRecord:
    (path,) = Path("reports").glob("*/verdict.json")
    return msgspec.json.decode(path.read_bytes(), type=VerdictRecord)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('fail = ["usage.peak < 0.9", "quality.pass_rate >= 0.98"]', 0),
        ('fail = ["usage.peak < 0.001"]', 1),
        ('fail = ["rejections{lane=nearmax} == 0"]', 3),
        ('on_inconclusive = "pass"\nfail = ["rejections{lane=nearmax} == 0"]', 0),
        ('fail = ["usage.peak < 0.9"]\nwarn = ["usage.peak < 0.001"]', 0),
        ('fail = ["usage.peak < baseline"]', 2),
        ('fail = ["usage.peak <"]', 2),
    ],
)
def test_a_stored_session_meets_its_thresholds_with_the_right_exit_code(text: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    _session("kept")
    Path("kvgate.toml").write_text(text)
    assert main(["gate", "kept"]) == code
    assert "Traceback" not in "".join(capsys.readouterr())


def test_a_verdict_says_in_what_recorded_traffic_was_sent_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    images = "1 of 3 requests of the trace came with images"
    for window in range(2):
        record = {"window": window, "seed": window, "workload": f"w{window}", "profile": "trace", "load_argv": ["locust"], "notes": [images]}
        MadeRun(rows=closed_loop(length_s=0.5), record=record).write(Path("kept") / "runs" / f"{window + 1}-trace")
    assert main(["gate", "kept", "--require", "usage.peak < 0.9"]) == 0
    assert f"trace: {images}" in " ".join(capsys.readouterr().out.split())
    assert _verdict().notes.count(f"trace: {images}") == 1
    (summary,) = Path("reports").glob("*/summary.md")
    assert images in summary.read_text()


def test_what_was_judged_is_a_session_with_its_report_and_the_lines_it_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    _session("kept")
    Path("kvgate.toml").write_text('fail = ["usage.peak < 0.9"]\nwarn = ["throughput > 1e9"]')
    assert main(["gate", "kept"]) == 0
    out = capsys.readouterr().out
    assert "warning" in out
    assert "report.html" in out
    verdict = _verdict()
    assert [(g.quantity, g.verdict, g.level) for g in verdict.gates] == [("usage.peak", "PASS", ""), ("throughput", "FAIL", "warn")]
    assert all(g.rule.startswith("kvgate.toml") for g in verdict.gates)
    (folder,) = Path("reports").glob("*/verdict.json")
    assert "warning" in (folder.parent / "summary.md").read_text()
    assert "warning" in (folder.parent / "report.html").read_text()


def test_a_baseline_of_another_load_makes_a_line_against_it_invalid(capsys: pytest.CaptureFixture[str]) -> None:
    _session("before")
    _session("after")
    for path in Path("after").glob("runs/*/run.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "workload": "another"}))
    command = ["gate", "after", "--baseline", "before", "--require", "usage.peak <= baseline + 0.02"]
    assert main(command) == 4
    assert "another load" in capsys.readouterr().out
    assert main([*command[:3], "after", *command[4:]]) == 0


def test_no_thresholds_at_all_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    _session("kept")
    assert main(["gate", "kept"]) == 2
    assert "kvgate.toml" in capsys.readouterr().err


def test_a_job_in_github_actions_shows_the_summary_on_its_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _session("kept")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "job.md")
    Path("job.md").write_text("# from a step before\n")
    assert main(["gate", "kept", "--require", "usage.peak < 0.9"]) == 0
    text = Path("job.md").read_text()
    assert text.startswith("# from a step before")
    assert "usage" in text
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "no-such-folder/job.md")
    capsys.readouterr()
    assert main(["gate", "kept", "--require", "usage.peak < 0.9"]) == 0
    assert "job summary" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_the_published_schemas_are_those_of_the_records(name: str) -> None:
    assert (DOCS / "schemas" / f"{name}.json").read_text() == schema_text(name), "run nox -s docs"


def test_the_schema_says_which_verdicts_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    properties = schema["$defs"]["VerdictRecord"]["properties"]
    assert properties["verdict"]["enum"] == ["PASS", "FAIL", "INCONCLUSIVE", "INVALID"]
    assert set(schema["$defs"]["GateRecord"]["properties"]) == set(GateRecord.__struct_fields__)


IMPORTS = Path(__file__).parent / "data" / "imports"


@pytest.mark.parametrize("name", ["vllm_bench_detailed.json", "aiperf.json", "guidellm.json", "sglang_bench.jsonl"])
def test_the_numbers_of_another_load_tool_meet_the_same_thresholds(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(IMPORTS / name)
    assert main(["gate", file, "--require", "ttft.p95 <= 1.5s", "--require", "requests.ok > 0"]) == 0
    assert main(["gate", file, "--require", "ttft.p95 <= 1ms"]) == 1
    assert "report.html" in capsys.readouterr().out
    # none of them sees the KV cache
    for condition in ("usage.peak < 0.9", "preemptions == 0", "free_blocks.min >= 1", "quality.pass_rate >= 0"):
        assert main(["gate", file, "--require", condition]) == 3
        said = " ".join(capsys.readouterr().out.split())
        assert "does not tell it" in said or "no Run answers it" in said


def test_a_benchmark_without_an_answer_passes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(IMPORTS / "vllm_bench_dead.json")
    assert main(["gate", file, "--require", "rejections <= 100"]) == 4
    assert main(["gate", file, "--require", "ttft.p95 <= 9s"]) in {3, 4}
    assert "no request was answered" in capsys.readouterr().out


def test_an_imported_result_is_a_run_that_can_be_told_again_without_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = json.loads((IMPORTS / "guidellm.json").read_text())
    raw["config"]["spec"]["backend"]["api_key"] = "sk-not-for-reports"
    Path("guide.json").write_text(json.dumps(raw))
    assert main(["gate", "guide.json", "--require", "throughput > 1"]) == 0
    (folder,) = [path.parent for path in Path("reports").glob("*/verdict.json")]
    Path("guide.json").unlink()
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "PASS" in out
    for path in folder.rglob("*"):
        assert not path.is_file() or b"sk-not-for-reports" not in path.read_bytes(), path
    page = (folder / "report.html").read_text()
    assert "imported from GuideLLM" in page
    assert "guidellm-concurrent-c2" in page
    # what could not be looked at is no sound evidence of anything, and no rule that held
    assert "No rule of validity was broken" not in page
    assert "it is not known whether its client was out of CPU" in page
    assert "Is the percentage real?" not in page


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (0.8, 1)])
def test_runs_of_another_tool_are_judged_against_its_earlier_ones(factor: float, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    raw = json.loads((IMPORTS / "vllm_bench.json").read_text())
    for name, share in (("before.json", 1.0), ("after.json", factor)):
        runs = [{**raw, "output_throughput": raw["output_throughput"] * share * (1 + 0.01 * (run % 3)), "run_number": run} for run in range(5)]
        Path(name).write_text(json.dumps(runs))
    assert main(["gate", "after.json", "--baseline", "before.json", "--require", "throughput >= baseline * 0.97"]) == code
    assert "tokens/s" in capsys.readouterr().out


def test_requests_that_end_before_they_were_sent_are_unsound_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [msgspec.structs.replace(row, end_s=row.sent_s - 3600.0) for row in closed_loop()]
    MadeRun(rows=rows, samples=[sample(closed_loop(), T0 + i / 10) for i in range(40)]).write(Path("back") / "runs" / "1-normal")
    assert main(["gate", "back", "--require", "usage.peak < 0.9"]) == 4
    assert main(["diagnose", "back"]) == 0
    assert "unsound evidence" in capsys.readouterr().out


def test_a_session_compared_with_its_copy_says_so_where_the_verdict_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    _session("kept")
    shutil.copytree("kept", "a copy")
    assert main(["compare", "kept", "a copy"]) == 0
    said = "But the same measurement stands on both sides (1-normal, 2-normal, 3-normal)"
    assert said in " ".join(capsys.readouterr().out.split())
    (summary,) = Path("reports").glob("*/summary.md")
    assert "the same measurement stands on both sides" in summary.read_text()


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_schema_prints_is_a_json_schema_of_2020_12(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)


def test_a_stored_run_meets_the_schema_of_runs_and_a_broken_verdict_does_not_meet_its_own() -> None:
    _session("kept", windows=1)
    Draft202012Validator(json.loads(schema_text("run"))).validate(json.loads(Path("kept/runs/1-normal/run.json").read_text()))
    verdict = Draft202012Validator(json.loads(schema_text("verdict")))
    assert not verdict.is_valid({"schema_version": 1, "verdict": "MAYBE", "session": "s"})
    assert not verdict.is_valid({"verdict": "PASS"})
