"""profile_export_aiperf.json of AIPerf: for each metric its unit, mean and percentiles over the answered requests.

AIPerf counts tokens with a tokenizer of its own; what the server itself counted stands beside it as ``usage_*`` and is taken where it is there.
"""

from __future__ import annotations

from typing import Any

from pytest_kvcache.imports.result import ISO, Figures, Result, as_number, failures, held_up, section, text, utc_s

TOOL = "AIPerf"
_SECONDS = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9, "sec": 1.0, "s": 1.0, "seconds": 1.0}


def claims(raw: Any) -> bool:
    """Return whether this is such an export."""
    return isinstance(raw, dict) and "input_config" in raw and "metrics" not in raw and ("aiperf_version" in raw or "request_latency" in raw)


def read(raw: dict[str, Any]) -> list[Result]:
    """Return the one load that it tells of."""
    figures = Figures(TOOL)
    ok = as_number(section(raw, "request_count").get("avg"))
    failed = as_number(section(raw, "error_request_count").get("avg"))
    if failed is None and raw.get("error_summary") == []:
        failed = 0.0
    elif failed is None and isinstance(raw.get("error_summary"), list):
        failed = sum(as_number(error.get("count")) or 0.0 for error in raw["error_summary"] if isinstance(error, dict))
    figures.requests(ok, failed, "request_count and error_summary")
    phase, cap, rate = _pressing(raw)
    held_back = "requests had a rate and a cap on how many are in flight" if rate is not None and cap is not None else ""
    duration = as_number(section(raw, "benchmark_duration").get("avg"))
    own = section(raw, "usage_completion_tokens") or section(raw, "output_sequence_length")
    prompts = section(raw, "usage_prompt_tokens") or section(raw, "input_sequence_length")
    notes = ["the times are the client's own, and it was not checked whether it was out of CPU"]
    if ok:
        produced = as_number(own.get("sum"))
        figures.put("output_tokens", produced, "usage_completion_tokens" if raw.get("usage_completion_tokens") else "output_sequence_length")
        figures.put("prompt_tokens", prompts.get("sum"), "usage_prompt_tokens" if raw.get("usage_prompt_tokens") else "input_sequence_length")
        figures.put("prompt_length.mean", prompts.get("avg"), "prompt tokens")
        figures.put("prompt_length.max", prompts.get("max"), "prompt tokens")
        if produced is not None and duration and raw.get("usage_completion_tokens"):
            figures.put("throughput", produced / duration, "usage_completion_tokens over benchmark_duration")
        else:
            figures.put("throughput", section(raw, "output_token_throughput").get("avg"), "output_token_throughput, by AIPerf's own tokenizer")
        for name, metric in (("ttft", "time_to_first_token"), ("latency", "request_latency")):
            stated = section(raw, metric)
            scale = _SECONDS.get(text(stated.get("unit")))
            if scale is not None:
                figures.times(name, {50: stated.get("p50"), 95: stated.get("p95")}, metric, scale=scale, held_back=held_back)
            figures.lack(
                f"{name}.p95", "AIPerf tells it of streamed answers alone: --streaming" if name == "ttft" else f"AIPerf does not tell {metric}"
            )
        gap = section(raw, "inter_chunk_latency")
        if (scale := _SECONDS.get(text(gap.get("unit")))) is not None:
            figures.put("gap.max", gap.get("max"), "inter_chunk_latency", scale=scale)
    in_flight = as_number(section(raw, "effective_concurrency").get("avg"))
    problems = list(held_up(in_flight, cap, ok) if rate is None else ()) if ok else ["no request was answered, so its times are none"]
    if raw.get("was_cancelled") is True or raw.get("is_complete") is False:
        problems.append("the benchmark was broken off")
    options = {"users": cap, "rate": rate, "duration_s": duration}
    return [
        Result(
            TOOL,
            "-".join(["aiperf", *([f"c{cap:g}"] if cap else []), *([f"r{rate:g}"] if rate else [])]),
            figures.values,
            version=text(raw.get("aiperf_version")),
            model=_model(raw),
            options={key: value for key, value in options.items() if value is not None},
            began_wall_s=utc_s(text(raw.get("start_time")), ISO),
            ended_wall_s=utc_s(text(raw.get("end_time")), ISO),
            problems=tuple(problems),
            notes=(*failures(failed, ok), *notes, *([f"phase {phase}"] if phase else [])),
            benchmark=text(raw.get("benchmark_id")),
        )
    ]


def _pressing(raw: dict[str, Any]) -> tuple[str, float | None, float | None]:
    """Return the phase that was measured, its concurrency and its request rate; the older layout had them in ``loadgen``."""
    phases = raw["input_config"].get("phases")
    phase = next((one for one in phases if isinstance(one, dict) and one.get("name") == "profiling"), {}) if isinstance(phases, list) else {}
    older = section(raw, "input_config", "loadgen")
    cap = as_number(phase.get("concurrency", older.get("concurrency")))
    rate = as_number(phase.get("rate", phase.get("request_rate", older.get("request_rate"))))
    return text(phase.get("name"), 40), cap, rate


def _model(raw: dict[str, Any]) -> str:
    items = section(raw, "input_config", "models").get("items")
    first = items[0] if isinstance(items, list) and items and isinstance(items[0], dict) else {}
    names = section(raw, "input_config", "endpoint").get("model_names")
    return text(first.get("name")) or (text(names[0]) if isinstance(names, list) and names else "")
