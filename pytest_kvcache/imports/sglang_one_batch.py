"""A line of the file that SGLang's ``bench_one_batch_server --result-filename`` appends to: one batch of requests, all sent at once.

Fields as SGLang 0.5 writes them (sglang/benchmark/one_batch_server.py), in seconds and tokens a second. ``output_throughput`` there counts from the
moment at which the last request has its first token; ours counts from the start. A request that fails ends that program, so that a line tells of none.
"""

from __future__ import annotations

from typing import Any

from pytest_kvcache.imports.result import Figures, Result, as_number, text

TOOL = "sglang bench_one_batch_server"


def claims(raw: Any) -> bool:
    """Return whether this is such a line."""
    return isinstance(raw, dict) and all(name in raw for name in ("batch_size", "input_len", "output_len", "last_ttft", "overall_throughput"))


def read(raw: dict[str, Any]) -> list[Result]:
    """Return the one batch that it tells of."""
    figures = Figures(TOOL)
    batch, prompt, output = (as_number(raw.get(name)) for name in ("batch_size", "input_len", "output_len"))
    latency, last = as_number(raw.get("latency")), as_number(raw.get("last_ttft"))
    produced = as_number(raw.get("total_output_tokens"))
    if produced is None and batch is not None and output is not None:
        produced = batch * output
    figures.requests(batch, 0.0, "batch_size")
    figures.put("requests.stopped_early", raw.get("num_early_stopped"), "num_early_stopped")
    figures.put("output_tokens", produced, "total_output_tokens")
    figures.put("prompt_tokens", batch * prompt if batch is not None and prompt is not None else None, "batch_size x input_len")
    figures.put("prompt_length.mean", prompt, "input_len")
    figures.put("throughput", produced / latency if produced is not None and latency else None, "output tokens over latency")
    figures.put("prefix.hit_rate", raw.get("cache_hit_rate"), "cache_hit_rate")
    for name, field, value in (("ttft", "last_ttft", last), ("latency", "latency", latency)):
        told = f"{value:.3g} s" if value is not None else "nothing"
        for share in (50, 95):
            for kind in (name, f"{name}_sent"):
                figures.lack(f"{kind}.p{share}", f"{TOOL} tells that of the last request alone ({field}: {told}); bench_serving tells percentiles")
    options = {"users": batch, "duration_s": latency, "output_tokens": output}
    shape = "-".join(f"{letter}{value:g}" for letter, value in (("b", batch), ("i", prompt), ("o", output)) if value is not None)
    return [
        Result(
            TOOL,
            f"sglang-one-batch-{shape}",
            figures.values,
            options={key: value for key, value in options.items() if value is not None},
            problems=() if batch and produced else ("no request was answered, so its times are none",),
            notes=(f"run {text(raw.get('run_name'), 40)}; one batch, all sent at once: it tells no time of single requests",),
        )
    ]
