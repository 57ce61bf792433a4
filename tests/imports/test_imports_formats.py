"""Every kind of file that a load tool writes of one measurement tells the same, or is named with the one that tells more."""

from __future__ import annotations

import builtins
import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.analysis.three import beside
from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.cli import main
from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.importing import LONGEST_NAME, import_results
from pytest_kvcache.imports import read_results
from pytest_kvcache.imports.result import Result
from pytest_kvcache.quantities import KNOWN, Missing, Reading

DATA = Path(__file__).parent.parent / "data" / "imports"
AIPERF = DATA / "aiperf"


def numbers(result: Result) -> dict[str, float]:
    for name, value in result.values.items():
        assert not isinstance(value, Reading) or value.unit == KNOWN[name].unit, name
    return {name: value.number() for name, value in result.values.items() if isinstance(value, Reading)}


def alone(folder: Path, name: str) -> Path:
    """Return a copy of a file of AIPerf with nothing beside it."""
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(AIPERF / name, folder))


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_what_aiperf_read_of_the_server_is_the_kv_cache_by_its_engines_own_dialect(kind: str) -> None:
    (result,) = read_results(AIPERF / f"server_metrics_export.{kind}")
    found = numbers(result)
    # four requests of 13 blocks each, of 1,023 that can be used
    assert found["usage.peak"] == pytest.approx(52 / 1023, abs=1e-4)
    assert (found["used_blocks.peak"], found["free_blocks.min"], found["free_blocks.tightest"]) == (52, 971, 971)
    assert (found["running.peak"], found["waiting.peak"], found["preemptions"], found["requests.finished"]) == (4, 1, 3, 40)
    assert found["prefix.hit_rate"] == 0.25
    assert (found["pool_blocks"], found["usable_blocks"], found["block_size"]) == (1024, 1023, 16)
    assert 0 < found["usage.mean"] < found["usage.peak"]
    assert (result.engine, result.version, result.benchmark) == ("vllm", "0.13.0", "d417ba03f2a8")
    assert "a peak between two reads is not seen" in result.notes[0]
    assert isinstance(result.values["rejections_engine"], Missing), "this server told none"


def test_a_load_of_aiperf_is_read_with_what_it_read_of_the_server_beside_it(tmp_path: Path) -> None:
    (both,) = read_results(AIPERF / "profile_export_aiperf.json")
    (load,) = read_results(alone(tmp_path / "a", "profile_export_aiperf.json"))
    (server,) = read_results(AIPERF / "server_metrics_export.json")
    assert numbers(both) == {**numbers(server), **numbers(load)}
    assert "usage.peak" not in numbers(load)
    assert any("server_metrics_export.json of the same benchmark" in note for note in both.notes)
    # of another benchmark it is none of its business
    other = alone(tmp_path / "a", "server_metrics_export.json")
    other.write_text(other.read_text().replace("d417ba03f2a8", "ffffffffffff"))
    (apart,) = read_results(tmp_path / "a" / "profile_export_aiperf.json")
    assert numbers(apart) == numbers(load)
    other.write_text("{")
    assert numbers(read_results(tmp_path / "a" / "profile_export_aiperf.json")[0]) == numbers(load)
    # nor is a load what the server told, whatever its file is called
    (tmp_path / "a" / "profile_export_aiperf.json").rename(tmp_path / "a" / "my_server_metrics.json")
    assert numbers(read_results(tmp_path / "a" / "my_server_metrics.json")[0]) == numbers(load)


def test_a_gate_on_the_cache_passes_and_fails_by_what_aiperf_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(AIPERF / "profile_export_aiperf.json")
    assert main(["gate", file, "--require", "usage.mean < 0.5", "--require", "ttft.p95 <= 1.5s"]) == 0
    assert main(["gate", file, "--require", "preemptions == 0"]) == 1
    # three preemptions prove that the pool was full, whatever was polled every second
    assert main(["gate", file, "--require", "usage.peak < 0.9"]) == 1
    assert "3 preemptions prove" in " ".join(capsys.readouterr().out.split())


def test_the_output_folder_of_a_tool_stands_for_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["gate", str(AIPERF), "--require", "preemptions == 0"]) == 1
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    shutil.copy(DATA / "vllm_sweep_summary.csv", sweep / "summary.csv")
    assert main(["gate", str(sweep), "--baseline", str(sweep), "--require", "throughput >= baseline * 0.5"]) == 3, "one window a side tells no spread"
    said = " ".join(capsys.readouterr().out.split())
    assert "their spread is not known" in said
    assert "the same measurement stands on both sides" in said
    (sweep / "runs").mkdir()
    assert main(["gate", str(sweep), "--require", "throughput > 1"]) == 3, "a session of ours is one, whatever else lies in it"


def test_two_servers_are_not_added_up_where_their_moments_are_not_told(tmp_path: Path) -> None:
    raw = json.loads((AIPERF / "server_metrics_export.json").read_text())
    for metric in raw["metrics"].values():
        metric["series"] += [{**one, "endpoint_url": "http://other:1/metrics"} for one in metric["series"]]
    path = tmp_path / "two.json"
    path.write_text(json.dumps(raw))
    (result,) = read_results(path)
    found = numbers(result)
    assert (found["preemptions"], found["free_blocks.tightest"]) == (6, 971)
    assert found["usage.hottest"] == pytest.approx(52 / 1023, rel=1e-3)
    for name in ("running.peak", "free_blocks.min", "used_blocks.peak"):
        assert not isinstance(result.values.get(name), Reading), name
    raw["metrics"] = {"node_cpu_seconds": raw["metrics"]["vllm:num_preemptions"]}
    path.write_text(json.dumps(raw))
    with pytest.raises(CannotJudge, match="no dialect reads"):
        read_results(path)


@pytest.mark.parametrize("kind", ["csv", "yaml"])
def test_guidellm_tells_the_same_in_each_of_its_formats(kind: str) -> None:
    one, two = read_results(DATA / f"guidellm.{kind}")
    assert [one.name, two.name] == ["guidellm-concurrent-c1", "guidellm-concurrent-c2"]
    assert (one.version, one.model, two.options["users"]) == ("0.8.1", "mock", 2)
    found = numbers(two)
    assert found["throughput"] == pytest.approx(79.728, rel=1e-4)
    assert found["ttft.p95"] == pytest.approx(0.0306, abs=1e-4)
    assert found["latency.p50"] == pytest.approx(0.3774, abs=1e-4)
    assert (found["requests.sent"], found["prompt_tokens"], found["output_tokens"], found["prompt_length.max"]) == (6, 109, 96, 19)


def test_reading_a_table_of_results_leaves_the_bound_of_other_tables() -> None:
    usual = csv.field_size_limit()
    read_results(DATA / "guidellm.csv")
    with pytest.raises(CannotJudge):
        read_results(DATA / "aiperf" / "profile_export_aiperf.csv")
    assert csv.field_size_limit() == usual


def test_results_that_were_appended_are_loads_in_their_order() -> None:
    two, four = read_results(DATA / "vllm_append.jsonl")
    assert [two.name, four.name] == ["vllm-bench-c2", "vllm-bench-c4"]
    assert numbers(two)["ttft.p95"] == pytest.approx(0.0292, abs=1e-4)


def test_each_setting_of_a_sweep_is_a_load_of_its_own(tmp_path: Path) -> None:
    results = read_results(DATA / "vllm_sweep_summary.csv")
    assert [result.name for result in results] == [f"vllm-bench-c{users}-itl-{itl}" for itl in ("0.005", "0.02") for users in (2, 4)]
    assert [result.options["itl"] for result in results] == [0.005, 0.005, 0.02, 0.02]
    assert numbers(results[0])["throughput"] == pytest.approx(283.026, rel=1e-4)
    assert all(numbers(result)["rejections"] == 0 for result in results)
    runs = import_results(DATA / "vllm_sweep_summary.csv", tmp_path)
    assert len({run.record.profile for run in runs}) == 4
    # names that are too long are still apart
    rows = (DATA / "vllm_sweep_summary.csv").read_text().splitlines()
    long = tmp_path / "long.csv"
    long.write_text("\n".join([rows[0].replace(",itl", f",{'x' * 70}"), *rows[1:]]))
    names = [run.record.profile for run in import_results(long, tmp_path / "long")]
    assert len(set(names)) == 4
    assert max(map(len, names)) == LONGEST_NAME


def test_a_batch_of_sglang_tells_no_percentile_and_counts_from_the_start() -> None:
    small, _ = read_results(DATA / "sglang_one_batch.jsonl")
    found = numbers(small)
    assert small.name == "sglang-one-batch-b16-i1024-o64"
    assert (found["requests.ok"], found["output_tokens"], found["prompt_length.mean"]) == (16, 1024, 1024)
    assert found["throughput"] == pytest.approx(1024 / 1.2345), "not the rate after the last first token, which is higher"
    lacking = small.values["ttft.p95"]
    assert isinstance(lacking, Missing)
    assert "last request alone (last_ttft: 0.234 s)" in lacking.reason or "0.235 s" in lacking.reason


WRONG: list[tuple[str, Any, str]] = [
    ("x.json", [{"benchmark": {}, "metric": {"name": "ttft"}, "model": {}}], "name the JSON beside it, without .pytorch"),
    ("x.json", {"avg_latency": 1.0, "latencies": [1.0], "percentiles": {"50": 1.0}}, "vllm bench latency"),
    (
        "x.json",
        {"elapsed_time": 1.0, "num_requests": 3, "total_num_tokens": 9, "requests_per_second": 3, "tokens_per_second": 9},
        "vllm bench throughput",
    ),
    ("x.json", {"error_type": "E", "error": "x", "serve_overrides": {}, "run_number": 0}, "a combination of vllm bench sweep that failed"),
    ("x.jsonl", {"run_name": "d", "batch_size": 1, "input_len": 1, "output_len": 1, "prefill_latency": 1.0}, "SGLang's bench_one_batch"),
    ("x.json", {"load_summary": {}, "successes": {}, "failures": {}}, "inference-perf"),
    ("x.json", {"version": "0.2", "run": {}, "scenario": {}, "results": {}}, "llm-d"),
    ("x.json", {"root_group": {}, "metrics": {}}, "k6"),
    ("x.json", {"results": {}, "configs": {}, "versions": {}, "n-shot": {}}, "pytest-kvcache quality"),
    ("x.json", {"schema_version": 1, "verdict": "PASS", "session": "s", "gates": []}, "name its session's folder"),
    ("x.json", {"schema_version": 1, "id": "r", "profile": "normal"}, "name its folder"),
    ("x.csv", "Type,Name,Request Count,Failure Count\n,Aggregated,4,0\n", "Locust"),
    ("x.json", {"data": [{"session_id": "a", "payloads": []}]}, "the prompts of AIPerf"),
]


@pytest.mark.parametrize(("name", "held", "says"), WRONG, ids=lambda value: value if isinstance(value, str) and " " in value else "")
def test_a_file_of_another_kind_is_named_with_what_to_name_instead(tmp_path: Path, name: str, held: Any, says: str) -> None:
    path = tmp_path / name
    path.write_text(held if isinstance(held, str) else json.dumps(held))
    with pytest.raises(CannotJudge) as refused:
        read_results(path)
    assert "this looks like" in refused.value.what
    assert says in f"{refused.value.what}: {refused.value.hint}"


@pytest.mark.parametrize("held", [{"data": [1.5, 2]}, {"data": []}, {"data": ["session_id"]}, [[1, 2]], [3], "text", {"metadata": [], "metrics": 1}])
def test_json_of_nobody_is_refused_with_the_tools_that_are_known(tmp_path: Path, held: Any) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(held))
    with pytest.raises(CannotJudge, match="no load tool that is known wrote this file") as refused:
        read_results(path)
    assert "AIPerf, AIPerf's server metrics, GuideLLM, SGLang" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("profile_export.jsonl", "profile_export_aiperf.json"),
        ("profile_export_aiperf.csv", "profile_export_aiperf.json"),
        ("server_metrics_export.jsonl", "server_metrics_export.json"),
    ],
)
def test_the_other_files_of_aiperf_name_the_one_that_is_read(name: str, says: str) -> None:
    with pytest.raises(CannotJudge) as refused:
        read_results(AIPERF / name)
    assert "AIPerf" in refused.value.what
    assert says in refused.value.hint


@pytest.mark.parametrize(
    ("name", "module", "says"), [("guidellm.yaml", "yaml", "PyYAML"), ("aiperf/server_metrics_export.parquet", "pyarrow", "pyarrow")]
)
def test_a_format_whose_library_is_not_installed_says_which(name: str, module: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(wanted: str, *rest: Any, **more: Any) -> Any:
        if wanted.split(".", maxsplit=1)[0] == module:
            raise ImportError(wanted)
        return real(wanted, *rest, **more)

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=says) as refused:
        read_results(DATA / name)
    assert "pytest-kvcache[imports]" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("x.yaml", b"a: [1\n"),
        ("x.parquet", b"PAR1nonsense"),
        ("x.csv", b"\xff\xfe\x00"),
        ("x.csv", b"a,b\n"),
        ("x.yml", b"plain\n"),
        ("x.csv", b"#\n#\n"),
    ],
)
def test_a_damaged_file_of_each_format_is_refused(tmp_path: Path, name: str, held: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(held)
    with pytest.raises(CannotJudge):
        read_results(path)


@pytest.mark.parametrize("name", ["guidellm.csv", "vllm_sweep_summary.csv", "aiperf/server_metrics_export.csv"])
@pytest.mark.parametrize(
    "damage", [lambda rows: [*rows[:-1], rows[-1][: len(rows[-1]) // 2]], lambda rows: [row[::2] for row in rows], lambda rows: rows[1:]]
)
def test_a_table_that_was_cut_is_read_or_refused_and_never_breaks(tmp_path: Path, name: str, damage: Any) -> None:
    path = tmp_path / "cut.csv"
    path.write_text("\n".join(damage((DATA / name).read_text().splitlines())))
    try:
        for result in read_results(path):
            assert all(isinstance(value, Reading | Missing) for value in result.values.values())
    except (CannotJudge, UsageError):
        pass


def test_an_imported_run_that_tells_of_the_server_shows_the_three_numbers(tmp_path: Path) -> None:
    (run,) = import_results(AIPERF / "profile_export_aiperf.json", tmp_path)
    analysis = analyse(run)
    assert (run.record.engine, run.record.imported_from) == ("vllm", "AIPerf")

    assert beside(analysis).startswith("pool 1,023 blocks of 16 tokens; 971 blocks free at the tightest; 4 requests running at the peak")
