"""Files that come from load tools, or near them, and that a gate cannot judge: what each is, and which file to name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_kvcache.imports.reading import Columns, Table
from pytest_kvcache.imports.result import section

_Sign = Callable[[dict[str, Any]], Any]
_OFFLINE = "which runs without a server; bench serve has one"


def _keys(*names: str) -> _Sign:
    return lambda raw: all(name in raw for name in names)


def _first(found: Any) -> dict[str, Any]:
    """Return the first object of a list; an empty one where there is none."""
    return next((one for one in found if isinstance(one, dict)), {}) if isinstance(found, list) else {}


_FILES: tuple[tuple[_Sign, str, str], ...] = (
    (_keys("benchmark", "metric", "model"), "vLLM's copy of a benchmark for the dashboard of PyTorch", "name the JSON beside it, without .pytorch"),
    (_keys("error_type", "serve_overrides"), "a combination of vllm bench sweep that failed", "name summary.csv, or another combination's summary.json"),
    (_keys("avg_latency", "percentiles"), "a result of vllm bench latency", _OFFLINE),
    (_keys("elapsed_time", "num_requests", "tokens_per_second"), "a result of vllm bench throughput", _OFFLINE),
    (lambda raw: "metrics" in raw and "benchmark_phase" in section(raw, "metadata"), "AIPerf's record of single requests", "name profile_export_aiperf.json beside it"),
    (lambda raw: "session_id" in _first(raw.get("data")), "the prompts of AIPerf", "name profile_export_aiperf.json beside it"),
    (_keys("endpoint_url", "timestamp_ns", "metrics"), "AIPerf's record of single scrapes", "name server_metrics_export.json or .csv beside it"),
    (_keys("dcgm_url", "timestamp_ns"), "AIPerf's record of the GPUs", "name profile_export_aiperf.json beside it"),
    (_keys("aiperf_version"), "a file of AIPerf", "name profile_export_aiperf.json of one run: those of several are named together, each is a window"),
    (_keys("run_name", "batch_size", "prefill_latency"), "a result of SGLang's bench_one_batch", "it runs without a server; bench_one_batch_server has one"),
    (_keys("successful_requests", "total_latency"), "a result of SGLang's bench_offline_throughput", "it runs without a server; bench_serving has one"),
    (_keys("load_summary", "successes"), "a report of inference-perf", "it is not read: press from here with pytest-kvcache load"),
    (_keys("version", "scenario", "results"), "a benchmark report of llm-d", "it is not read: name the file that the load tool itself wrote"),
    (_keys("root_group", "metrics"), "a summary of k6", "k6 does not see tokens: press from here with pytest-kvcache load"),
    (_keys("results", "configs", "versions"), "results of lm-evaluation-harness", "its sample logs are judged by pytest-kvcache quality BEFORE AFTER"),
    (_keys("doc_id", "target_hash"), "a sample log of lm-evaluation-harness", "it is judged by pytest-kvcache quality BEFORE AFTER"),
    (_keys("Number of concurrency", "Total requests"), "a summary of EvalScope", "it is not read: press from here with pytest-kvcache load"),
    (_keys("schema_version", "gates", "verdict"), "a verdict of ours", "name its session's folder"),
    (_keys("schema_version", "profile"), "a file of a Run of ours", "name its folder"),
    (_keys("benchmarks"), "a report of GuideLLM without a benchmark that it counted", "let it come to its end"),
)  # fmt: skip
_TABLES: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset({"Metric", "avg", "p99"}), "AIPerf's table for people", "name profile_export_aiperf.json beside it"),
    (frozenset({"Name", "Request Count", "Failure Count"}), "statistics of Locust", "press with pytest-kvcache load, which keeps every request"),
    (frozenset({"metric_name", "timestamp", "metric_value"}), "a table of k6", "k6 does not see tokens: press from here with pytest-kvcache load"),
)


def looks_like(found: Any) -> tuple[str, str]:
    """Return (what a file looks like, which file to name in its place); two empty texts where it is like nothing that is known."""
    if isinstance(found, Columns):
        return "a Parquet table of another tool", "of Parquet, server_metrics_export.parquet of AIPerf is read"
    if isinstance(found, Table):
        return next(((what, hint) for names, what, hint in _TABLES if names <= set(found.head)), ("", ""))
    raw = found if isinstance(found, dict) else _first(found)
    return next(((what, hint) for sign, what, hint in _FILES if sign(raw)), ("", ""))
