"""A line of the file that ``python -m sglang.bench_serving --output-file`` appends to. Times are in milliseconds.

Fields as SGLang 0.5 writes them (sglang/benchmark/serving.py); ``--output-details`` adds the times of each request in seconds, 0 for one that failed.
"""

from __future__ import annotations

from typing import Any

from pytest_kvcache.imports.result import Figures, Result, as_number, failures, held_up, numbers, quantiles, section, text

TOOL = "sglang bench_serving"


def claims(raw: Any) -> bool:
    """Return whether this is such a line."""
    return isinstance(raw, dict) and "completed" in raw and "total_output_tokens_retokenized" in raw and "median_ttft_ms" in raw


def read(raw: dict[str, Any]) -> list[Result]:
    """Return the one load that it tells of."""
    figures = Figures(TOOL)
    completed = as_number(raw["completed"])
    errors = raw.get("errors")
    # without the details it does not say how many were sent: only how many were answered
    failed = float(sum(bool(error) for error in errors)) if isinstance(errors, list) else None
    figures.requests(completed, failed, "completed and errors")
    figures.lack("rejections", f"{TOOL} did not write it: --output-details")
    figures.lack("requests.sent", f"{TOOL} did not write it: --output-details")
    rate, cap = as_number(raw.get("request_rate")), as_number(raw.get("max_concurrency"))
    held_back = "requests had a rate and a cap on how many are in flight" if rate is not None and cap is not None else ""
    if completed:
        figures.put("output_tokens", raw.get("total_output_tokens"), "total_output_tokens")
        figures.put("prompt_tokens", raw.get("total_input_tokens"), "total_input_tokens")
        figures.put("throughput", raw.get("output_throughput"), "output_throughput")
        total = as_number(raw.get("total_input_tokens"))
        figures.put("prompt_length.mean", total / completed if total is not None else None, "total_input_tokens / completed")
        inputs = numbers(raw.get("input_lens"))
        figures.put("prompt_length.max", max(inputs) if inputs else None, "input_lens")
        gaps = [gap for row in raw.get("itls") or [] for gap in numbers(row)]
        figures.put("gap.max", max(gaps) if gaps else None, "itls")
        ttft = _percentiles(raw, "ttft")
        served = [value for value, error in zip(numbers(raw.get("ttfts")), errors or [], strict=False) if not error]
        if 95 not in ttft:  # builds before 0.5.6 wrote the median and p99 alone
            ttft |= {share: value * 1e3 for share, value in quantiles(served).items() if share not in ttft}
        figures.times("ttft", ttft, "ttft_ms", scale=1e-3, held_back=held_back, ask="--output-details, or a newer SGLang")
        figures.times("latency", _percentiles(raw, "e2e_latency"), "e2e_latency_ms", scale=1e-3, held_back=held_back, ask="a newer SGLang")
    options = {"users": cap, "rate": rate, "duration_s": as_number(raw.get("duration"))}
    name = "-".join(["sglang-bench", *([f"c{cap:g}"] if cap else []), *([f"r{rate:g}"] if rate else [])])
    server = section(raw, "server_info")
    return [
        Result(
            TOOL,
            name,
            figures.values,
            model=text(server.get("model_path")),
            options={key: value for key, value in options.items() if value is not None},
            problems=_crowd(raw, rate, cap, completed) if completed else ("no request was answered, so its times are none",),
            notes=(
                *failures(failed, completed),
                f"backend {text(raw.get('backend'), 40)}; the times are the client's own, and it was not checked whether it was out of CPU",
            ),
        )
    ]


def _crowd(raw: dict[str, Any], rate: float | None, cap: float | None, completed: float) -> tuple[str, ...]:
    return held_up(as_number(raw.get("concurrency")), cap, completed) if rate is None else ()


def _percentiles(raw: dict[str, Any], name: str) -> dict[int, float]:
    found = {50: as_number(raw.get(f"median_{name}_ms")), 95: as_number(raw.get(f"p95_{name}_ms"))}
    return {share: value for share, value in found.items() if value is not None}
