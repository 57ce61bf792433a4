"""Result files of other load tools: what they tell becomes ours, and what they cannot tell never passes a gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.errors import CannotJudge, KvError, UsageError
from pytest_kvcache.imports import read_results
from pytest_kvcache.imports.result import Result
from pytest_kvcache.quantities import KNOWN, Missing, Reading

DATA = Path(__file__).parent.parent / "data" / "imports"


def _number(result: Result, name: str) -> float:
    value = result.values[name]
    assert isinstance(value, Reading), value
    assert value.unit == KNOWN[name].unit
    return value.number()


def _written(folder: Path, value: Any) -> Path:
    path = folder / "result.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_vllm_bench_is_read_in_our_units() -> None:
    (result,) = read_results(DATA / "vllm_bench_detailed.json")
    raw = json.loads((DATA / "vllm_bench_detailed.json").read_text())
    assert (result.tool, result.model, result.options["users"]) == ("vllm bench", "mock", 4)
    assert _number(result, "ttft.p95") == pytest.approx(raw["p95_ttft_ms"] / 1e3)
    assert 0.015 < _number(result, "ttft.p50") < 0.2
    assert _number(result, "latency.p95") == pytest.approx(raw["p95_e2el_ms"] / 1e3)
    assert (_number(result, "requests.sent"), _number(result, "requests.ok"), _number(result, "rejections")) == (8, 8, 0)
    assert _number(result, "output_tokens") == 128
    assert _number(result, "throughput") == pytest.approx(raw["output_throughput"])
    assert _number(result, "prompt_length.max") == max(raw["input_lens"])
    assert result.began_wall_s > 1.7e9


def test_a_percentile_that_was_not_written_is_missing_and_says_how_to_get_it() -> None:
    (result,) = read_results(DATA / "vllm_bench.json")
    assert isinstance(result.values["ttft.p50"], Reading)
    lacking = result.values["ttft.p95"]
    assert isinstance(lacking, Missing)
    assert "--metric-percentiles" in lacking.reason


def test_times_that_leave_out_the_wait_for_a_cap_are_not_taken_for_times_from_the_intended_start(tmp_path: Path) -> None:
    (result,) = read_results(DATA / "vllm_bench_rate.json")
    raw = json.loads((DATA / "vllm_bench_rate.json").read_text())
    assert isinstance(result.values["ttft_sent.p95"], Reading)
    hidden = result.values["ttft.p95"]
    assert isinstance(hidden, Missing)
    assert "cap" in hidden.reason
    assert result.options["rate"] == 50
    # the waits stand beside the latencies, so that those are known from the intended start
    waited = {**raw, "queue_times": [value + 3 for value in raw["queue_times"]]}
    (late,) = read_results(_written(tmp_path, waited))
    assert _number(late, "latency.p95") == pytest.approx(_number(result, "latency.p95") + 3)
    assert _number(late, "latency_sent.p95") == pytest.approx(_number(result, "latency_sent.p95"))
    (unknown,) = read_results(_written(tmp_path, {name: value for name, value in raw.items() if name != "queue_times"}))
    assert isinstance(unknown.values["latency.p95"], Missing)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vllm_bench.json", {"num_prompts": 400, "completed": 400, "duration": 60.0}),
        ("sglang_bench.jsonl", {"completed": 400, "concurrency": 0.7}),
        ("aiperf.json", {"request_count": {"avg": 400.0}, "effective_concurrency": {"avg": 0.7}}),
    ],
)
def test_a_client_that_could_not_keep_its_concurrency_is_no_evidence(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    raw = json.loads((DATA / name).read_text().splitlines()[0])
    assert not read_results(_written(tmp_path, raw))[0].problems
    (result,) = read_results(_written(tmp_path, {**raw, **changes}))
    assert "in flight on average" in result.problems[0]
    # with a rate there is nothing to keep
    if name != "aiperf.json":
        assert not read_results(_written(tmp_path, {**raw, **changes, "request_rate": 5.0}))[0].problems


def test_failed_requests_stand_beside_times_that_leave_them_out(tmp_path: Path) -> None:
    raw = json.loads((DATA / "vllm_bench.json").read_text())
    (result,) = read_results(_written(tmp_path, {**raw, "completed": 6, "failed": 2}))
    assert "2 of 8 requests failed" in result.notes[0]
    assert _number(result, "rejections") == 2


def test_a_benchmark_of_a_dead_server_has_no_times_of_zero() -> None:
    raw = json.loads((DATA / "vllm_bench_dead.json").read_text())
    assert raw["p99_ttft_ms"] == 0  # what the tool writes
    (result,) = read_results(DATA / "vllm_bench_dead.json")
    assert result.problems
    assert not any(name.startswith(("ttft", "latency", "throughput")) for name in result.values)
    assert _number(result, "rejections") == 8


def test_the_runs_of_a_sweep_are_windows_of_one_load() -> None:
    results = read_results(DATA / "vllm_sweep_summary.json")
    assert [result.name for result in results] == ["vllm-bench-c4", "vllm-bench-c4"]


def test_aiperf_is_read_with_the_tokens_that_the_server_counted() -> None:
    (result,) = read_results(DATA / "aiperf.json")
    raw = json.loads((DATA / "aiperf.json").read_text())
    # its own tokenizer counted twice as many
    assert (raw["output_sequence_length"]["sum"], _number(result, "output_tokens")) == (768, 384)
    assert _number(result, "throughput") == pytest.approx(384 / raw["benchmark_duration"]["avg"])
    assert _number(result, "ttft.p95") == pytest.approx(raw["time_to_first_token"]["p95"] / 1e3)
    assert _number(result, "latency.p50") == pytest.approx(raw["request_latency"]["p50"] / 1e3)
    assert (_number(result, "requests.sent"), _number(result, "rejections")) == (24, 0)
    assert (result.version, result.model, result.options["users"]) == ("0.13.0", "mock", 4)
    assert not result.problems


def test_an_aiperf_run_that_was_cancelled_or_had_errors_says_so(tmp_path: Path) -> None:
    raw = json.loads((DATA / "aiperf.json").read_text())
    broken = {**raw, "was_cancelled": True, "error_summary": [{"error_details": {"message": "x"}, "count": 3}]}
    (result,) = read_results(_written(tmp_path, broken))
    assert "broken off" in result.problems[0]
    assert (_number(result, "rejections"), _number(result, "requests.sent")) == (3, 27)


def test_each_benchmark_of_a_guidellm_report_is_a_load() -> None:
    one, two = read_results(DATA / "guidellm.json")
    assert [one.name, two.name] == ["guidellm-concurrent-c1", "guidellm-concurrent-c2"]
    assert (one.version, one.model) == ("0.8.1", "mock")
    assert 0.015 < _number(one, "ttft.p50") < 0.2
    assert 0.04 < _number(two, "latency.p95") < 1
    assert (_number(two, "requests.sent"), _number(two, "output_tokens")) == (6, 96)
    assert one.began_wall_s < two.began_wall_s


def test_sglang_tells_of_failures_only_with_its_details(tmp_path: Path) -> None:
    plain, detailed = read_results(DATA / "sglang_bench.jsonl")
    unknown = plain.values["rejections"]
    assert isinstance(unknown, Missing)
    assert "--output-details" in unknown.reason
    assert (_number(detailed, "rejections"), _number(detailed, "requests.sent"), _number(detailed, "requests.ok")) == (0, 8, 8)
    raw = json.loads((DATA / "sglang_bench.jsonl").read_text().splitlines()[1])
    assert _number(detailed, "ttft.p95") == pytest.approx(raw["p95_ttft_ms"] / 1e3)
    assert _number(detailed, "latency.p50") == pytest.approx(raw["median_e2e_latency_ms"] / 1e3)
    assert _number(detailed, "output_tokens") == 128
    assert plain.options["users"] == 4
    # a request that failed has a time of 0 in the lists, and is no quick one
    older = {name: value for name, value in raw.items() if name not in {"p90_ttft_ms", "p95_ttft_ms"}}
    broken = {**older, "completed": 7, "ttfts": [*raw["ttfts"][:7], 0.0], "errors": [*raw["errors"][:7], "Bad Gateway"]}
    (result,) = read_results(_written(tmp_path, broken))
    assert (_number(result, "rejections"), _number(result, "requests.sent"), _number(result, "requests.ok")) == (1, 8, 7)
    assert min(raw["ttfts"][:7]) < _number(result, "ttft.p95") <= max(raw["ttfts"][:7])


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json*")), ids=lambda path: path.name)
def test_no_tool_tells_of_the_kv_cache(path: Path) -> None:
    for result in read_results(path):
        assert result.values.keys() <= KNOWN.keys()
        assert not any(name.startswith(("usage", "free_", "used_", "preemptions", "pool_", "idle.")) for name in result.values)


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}", '{"benchmarks": []}', '[{"completed": 1}]', "[1, 2]", "null", "1\n2\n", "[" * 20000])
def test_a_file_of_no_known_tool_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(CannotJudge):
        read_results(_written(tmp_path, text))


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_results(tmp_path / "nothing.json")


_NAMES = ["vllm_bench_detailed.json", "aiperf.json", "guidellm.json", "sglang_bench.jsonl"]
_JUNK: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2) | st.just({})
)


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(_NAMES), data=st.data())
def test_a_damaged_file_is_read_or_refused_and_never_breaks(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    raw = json.loads((DATA / name).read_text().splitlines()[0])
    place: Any = raw
    for _ in range(data.draw(st.integers(0, 3))):
        inner = [value for value in (place.values() if isinstance(place, dict) else place) if isinstance(value, dict | list) and value]
        if not inner:
            break
        place = data.draw(st.sampled_from(inner))
    key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else list(range(len(place)))))
    place[key] = data.draw(_JUNK)
    path = _written(tmp_path_factory.mktemp("damaged"), raw)
    try:
        for result in read_results(path):
            for value in result.values.values():
                assert isinstance(value, Reading | Missing)
    except KvError:
        pass
