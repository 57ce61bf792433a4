"""The CSV report of GuideLLM: three rows of heads (group, field, statistic), then a row for each benchmark.

It holds what the JSON report holds, without sums; so it is brought into that report's shape and read as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_kvcache.imports import guidellm
from pytest_kvcache.imports.reading import Table, read_cell
from pytest_kvcache.imports.result import Result, as_number, numbers, utc_s

_HEADS = 3
_MOMENT = "%Y-%m-%d %H:%M:%S"
_COUNTS = ("Successful", "Incomplete", "Errored", "Total")
_SHARES = ("min", "p001", "p01", "p05", "p10", "p25", "p75", "p90", "p95", "p99", "max")
_METRICS = {
    "request_latency": ("Request Latency", "Successful Sec"),
    "time_to_first_token_ms": ("Time to First Token", "Successful ms"),
    "prompt_token_count": ("Token Metrics", "Successful Input Tokens"),
    "output_token_count": ("Token Metrics", "Successful Output Tokens"),
    "output_tokens_per_second": ("Token Throughput", "Successful Output Tokens/Sec"),
    "request_concurrency": ("Server Throughput", "Successful Concurrency"),
}
_Cells = Mapping[tuple[str, str, str], str]


def claims(raw: Any) -> bool:
    """Return whether this is such a table."""
    return isinstance(raw, Table) and len(raw.rows) > _HEADS and "Run Info" in raw.head and "Request Counts" in raw.head


def read(raw: Table) -> list[Result]:
    """Return a load for each benchmark of the report."""
    heads = list(zip(*raw.rows[:_HEADS], strict=True))
    cells = [dict(zip(heads, row, strict=True)) for row in raw.rows[_HEADS:] if any(row)]
    first = cells[0]
    report = {
        "metadata": read_cell(first.get(("Runtime Info", "Metadata", ""), "")) or {},
        "config": read_cell(first.get(("Runtime Info", "Arguments", ""), "")) or {},
        "benchmarks": [_benchmark(row) for row in cells],
    }
    return guidellm.read(report)


def _benchmark(row: _Cells) -> dict[str, Any]:
    counts = {name.lower(): as_number(read_cell(row.get(("Request Counts", name, ""), ""))) for name in _COUNTS}
    kind, _, level = row.get(("Benchmark", "Strategy", ""), "").partition("@")
    profile = read_cell(row.get(("Run Info", "Profile", ""), ""))
    strategy = {
        "type_": kind,
        "streams" if kind in {"concurrent", "throughput"} else "rate": as_number(read_cell(level)) if level else None,
        "max_concurrency": profile.get("max_concurrency") if isinstance(profile, dict) else None,
    }
    return {
        "config": {"strategy": strategy},
        "duration": as_number(read_cell(row.get(("Timings", "Duration", "Sec"), ""))),
        "start_time": utc_s(row.get(("Timings", "Start Time", ""), ""), _MOMENT),
        "end_time": utc_s(row.get(("Timings", "End Time", ""), ""), _MOMENT),
        "metrics": {
            "request_totals": counts,
            **{name: {"successful": _spread(row, where, counts["successful"])} for name, where in _METRICS.items()},
        },
    }


def _spread(row: _Cells, where: tuple[str, str], count: float | None) -> dict[str, Any]:
    def cell(name: str) -> Any:
        return read_cell(row.get((*where, name), ""))

    mean, listed = as_number(cell("Mean")), numbers(cell("Percentiles"))
    shares = dict(zip(_SHARES, listed, strict=True)) if len(listed) == len(_SHARES) else {}
    return {
        "mean": mean,
        "max": shares.get("max"),
        "total_sum": mean * count if mean is not None and count is not None else None,
        "percentiles": {**shares, "p50": as_number(cell("Median"))},
    }
