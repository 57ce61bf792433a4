"""The result of ``vllm bench serve --save-result`` or ``--append-result``, and what ``vllm bench sweep serve`` makes of them. Times are in milliseconds.

Fields as vLLM 0.32 writes them (vllm/benchmarks/serve.py); the latencies and, with ``--save-detailed``, the times of each request are in seconds.
A sweep joins the results of one combination in its summary.json and those of all in summary.csv, each with what the combination set.
"""

from __future__ import annotations

import re
from typing import Any

from pytest_kvcache.imports.reading import Table
from pytest_kvcache.imports.result import Figures, Result, as_number, failures, held_up, numbers, quantiles, text, utc_s

TOOL = "vllm bench"
_ASK = "--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,95,99"


_SIGNS = ("endpoint_type", "completed", "request_throughput")
_FIELDS = frozenset(
    (
        "backend", "burstiness", "completed", "date", "duration", "endpoint_type", "errors", "failed", "generated_texts", "input_lens",
        "itls", "label", "latencies", "max_concurrency", "max_concurrent_requests", "max_output_tokens_per_s", "model_id", "num_prompts",
        "output_lens", "output_throughput", "queue_times", "ramp_up_end_rps", "ramp_up_start_rps", "ramp_up_strategy", "request_goodput",
        "request_rate", "request_throughput", "rtfx", "run_number", "start_times", "tokenizer_id", "total_input_tokens",
        "total_output_tokens", "total_token_throughput", "ttfts",
    )
)  # fmt: skip
_STATISTIC = re.compile(r"(mean|median|std|p\d+(\.\d+)?)_\w+")
_MOST_SET = 6


def claims(raw: Any) -> bool:
    """Return whether this is such a result, or the table of a sweep."""
    return all(sign in (raw.head if isinstance(raw, Table) else raw if isinstance(raw, dict) else ()) for sign in _SIGNS)


def read(raw: dict[str, Any] | Table) -> list[Result]:
    """Return the loads that it tells of: one, or one for each row of a table."""
    return [_one(row) for row in raw.records()] if isinstance(raw, Table) else [_one(raw)]


def _set_by_sweep(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what a sweep set for this result, which makes it another load than those of other settings."""
    if "run_number" not in raw:
        return {}
    found = {
        key: value
        for key, value in raw.items()
        if key and key not in _FIELDS and not _STATISTIC.fullmatch(key) and not key.startswith("Unnamed") and isinstance(value, str | int | float)
    }
    return dict(sorted(found.items())[:_MOST_SET])


def _one(raw: dict[str, Any]) -> Result:
    figures = Figures(TOOL)
    completed = as_number(raw["completed"])
    failed = as_number(raw.get("failed"))
    planned = as_number(raw.get("num_prompts"))
    if failed is None and planned is not None and completed is not None:
        failed = max(planned - completed, 0.0)
    figures.requests(completed, failed, "completed and failed")
    rate, cap = as_number(raw.get("request_rate")), as_number(raw.get("max_concurrency"))
    held_back = "requests had a rate and a cap on how many are in flight" if rate is not None and cap is not None else ""
    duration = as_number(raw.get("duration"))
    problems: tuple[str, ...] = () if completed else ("no request was answered, so its times are none",)
    if completed:
        figures.put("output_tokens", raw.get("total_output_tokens"), "total_output_tokens")
        figures.put("prompt_tokens", raw.get("total_input_tokens"), "total_input_tokens")
        figures.put("throughput", raw.get("output_throughput"), "output_throughput")
        inputs = numbers(raw.get("input_lens"))
        total = as_number(raw.get("total_input_tokens"))
        figures.put("prompt_length.mean", total / completed if total is not None else None, "total_input_tokens / completed")
        figures.put("prompt_length.max", max(inputs) if inputs else None, "input_lens")
        figures.lack("prompt_length.max", f"{TOOL} did not write it: --save-detailed")
        gaps = [gap for row in raw.get("itls") or [] for gap in numbers(row)]
        figures.put("gap.max", max(gaps) if gaps else None, "itls")
        figures.lack("gap.max", f"{TOOL} did not write it: --save-detailed")
        figures.times("ttft", _percentiles(raw, "ttft"), "ttft_ms", scale=1e-3, held_back=held_back, ask=_ASK)
        ends = quantiles([value for value in numbers(raw.get("latencies")) if value > 0]) if not failed else {}
        stated = {share: value / 1e3 for share, value in _percentiles(raw, "e2el").items()}
        figures.times("latency", stated or ends, "e2el_ms" if stated else "latencies", scale=1.0, held_back=held_back, ask=_ASK)
        if held_back and not failed:
            _from_arrival(figures, raw)
        if rate is None and duration:
            problems = held_up(sum(numbers(raw.get("latencies"))) / duration if raw.get("latencies") else None, cap, completed)
    swept = _set_by_sweep(raw)
    options: dict[str, Any] = {"users": cap, "rate": rate, "requests_planned": planned, "duration_s": duration, **swept}
    label = [f"{key.replace('_', '-')}-{text(str(value), 20)}" for key, value in swept.items() if key not in {"max_concurrency", "request_rate"}]
    name = "-".join([TOOL.replace(" ", "-"), *([f"c{cap:g}"] if cap else []), *([f"r{rate:g}"] if rate else []), *label])
    return Result(
        TOOL,
        name,
        figures.values,
        model=text(raw.get("model_id")),
        options={key: value for key, value in options.items() if value is not None},
        began_wall_s=utc_s(text(raw.get("date")), "%Y%m%d-%H%M%S"),
        problems=problems,
        notes=(
            *failures(failed, completed),
            f"backend {text(raw.get('backend'), 40)}; the times are the client's own, and it was not checked whether it was out of CPU",
        ),
    )


def _from_arrival(figures: Figures, raw: dict[str, Any]) -> None:
    """Take the times from the intended start where the waits for the cap stand beside those of each request (vLLM 0.32)."""
    waits = numbers(raw.get("queue_times"))
    for name, field in (("latency", "latencies"), ("ttft", "ttfts")):
        times = numbers(raw.get(field))
        if times and len(times) == len(waits):
            found = quantiles([time + wait for time, wait in zip(times, waits, strict=True)])
            for share, value in found.items():
                figures.put(f"{name}.p{share}", value, f"{field} + queue_times")


def _percentiles(raw: dict[str, Any], name: str) -> dict[int, float]:
    found = {share: value for share in (50, 95) if (value := as_number(raw.get(f"p{share}_{name}_ms"))) is not None}
    if 50 not in found and (median := as_number(raw.get(f"median_{name}_ms"))) is not None:
        found[50] = median
    if 95 not in found and name == "ttft" and not any(raw.get("errors") or []):
        found |= {share: value * 1e3 for share, value in quantiles(numbers(raw.get("ttfts"))).items() if share not in found}
    return found
