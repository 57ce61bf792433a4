"""The JSON or YAML report of GuideLLM: a list of benchmarks, each with distributions over its successful requests.

``metrics`` is laid out alike in report versions 1 and 2; latencies of requests are in seconds, times to first token in milliseconds.
"""

from __future__ import annotations

from typing import Any

from pytest_kvcache.imports.result import Figures, Result, as_number, failures, held_up, section, text

TOOL = "GuideLLM"


def claims(raw: Any) -> bool:
    """Return whether this is such a report."""
    benchmarks = raw.get("benchmarks") if isinstance(raw, dict) else None
    return isinstance(benchmarks, list) and bool(benchmarks) and bool(section(benchmarks[0], "metrics").get("request_totals"))


def read(raw: dict[str, Any]) -> list[Result]:
    """Return a load for each benchmark of the report."""
    version = text(section(raw, "metadata").get("guidellm_version"))
    return [_one(raw, benchmark, version) for benchmark in raw["benchmarks"]]


def _one(raw: dict[str, Any], benchmark: dict[str, Any], version: str) -> Result:
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    figures = Figures(TOOL)
    ok, failed, cut = (as_number(totals.get(key)) or 0.0 for key in ("successful", "errored", "incomplete"))
    figures.put("requests.sent", ok + failed + cut, "request_totals")
    figures.put("requests.ok", ok, "request_totals.successful")
    figures.put("rejections", failed, "request_totals.errored")
    figures.put("requests.cut_off", cut, "request_totals.incomplete")
    strategy = section(benchmark, "config", "strategy")
    kind = text(strategy.get("type_"), 40)
    users, rate = as_number(strategy.get("streams")), as_number(strategy.get("rate"))
    cap = as_number(strategy.get("max_concurrency"))
    held_back = "requests had a rate and a cap on how many are in flight" if rate is not None and cap is not None else ""
    duration = as_number(benchmark.get("duration"))
    if ok:
        prompts, outputs = (section(metrics, name, "successful") for name in ("prompt_token_count", "output_token_count"))
        for name, spread in (("prompt_token", prompts), ("output_token", outputs)):
            total = as_number(spread.get("total_sum"))  # by its way of adding up, a fraction beside a whole number
            figures.put(f"{name}s", round(total) if total is not None else None, f"{name}_count")
        figures.put("prompt_length.mean", prompts.get("mean"), "prompt_token_count")
        figures.put("prompt_length.max", prompts.get("max"), "prompt_token_count")
        produced = as_number(outputs.get("total_sum"))
        if produced is not None and duration:
            figures.put("throughput", produced / duration, "output_token_count over duration")
        else:
            figures.put("throughput", section(metrics, "output_tokens_per_second", "successful").get("mean"), "output_tokens_per_second")
        figures.times("ttft", _percentiles(metrics, "time_to_first_token_ms"), "time_to_first_token_ms", scale=1e-3, held_back=held_back)
        figures.times("latency", _percentiles(metrics, "request_latency"), "request_latency", scale=1.0, held_back=held_back)
    in_flight = as_number(section(metrics, "request_concurrency", "successful").get("mean"))
    problems = held_up(in_flight, users, ok) if rate is None else ()
    options = {"users": users, "rate": rate, "duration_s": duration}
    label = f"c{users:g}" if users is not None else f"r{rate:.4g}" if rate is not None else ""
    return Result(
        TOOL,
        "-".join(filter(None, ["guidellm", kind, label])),
        figures.values,
        version=version,
        model=text(section(raw, "config", "spec", "backend").get("model")) or text(section(raw, "args").get("model")),
        options={key: value for key, value in options.items() if value is not None},
        began_wall_s=as_number(benchmark.get("start_time")) or 0.0,
        ended_wall_s=as_number(benchmark.get("end_time")) or 0.0,
        problems=problems if ok else ("no request was answered, so its times are none",),
        notes=(
            *failures(failed, ok),
            "the times are the client's own, and it was not checked whether it was out of CPU",
        ),
    )


def _percentiles(metrics: dict[str, Any], name: str) -> dict[int, Any]:
    shares = section(metrics, name, "successful", "percentiles")
    return {50: shares.get("p50"), 95: shares.get("p95")}
