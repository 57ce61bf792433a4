"""A Run as a benchmark report of llm-d, format 0.2: what the requests saw, and beside it what the server held.

Fields and units are those of the package llmd-benchmark-report (its class BenchmarkReportV02 reads what is written here). It is JSON, which is
YAML as well. The engine is a component of kind ``generic``: kind ``inference_engine`` must state how it is spread over its cards, which a
server does not tell. What was not measured is left out, never 0.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_kvcache import __version__
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.errors import CannotJudge
from pytest_kvcache.load.contract import CUT_OFF, OK, STOPPED_EARLY
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import RequestRow
from pytest_kvcache.report.model import SessionView
from pytest_kvcache.runfolder import write_atomic

VERSION = "0.2"
MOST_POINTS = 300
_SHARES = {"p1": 1, "p5": 5, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99}


def export(view: SessionView, out: Path) -> list[Path]:
    """Write a report for each Run with a load and return their paths: ``out`` where there is one, else ``out`` with the Run's folder in its name.

    Raises CannotWrite, CannotJudge where no Run has a load.
    """
    loads = [analysis for analysis in (*view.before, *view.after) if analysis.facts.loaded]
    if not loads:
        raise CannotJudge("no Run of this session has a load, so there is nothing to export", where=str(view.folder))
    paths = []
    for analysis in loads:
        path = out if len(loads) == 1 else out.with_name(f"{out.stem}-{analysis.run.folder.name}{out.suffix}")
        write_atomic(path, json.dumps(benchmark_report(view, analysis), indent=1, allow_nan=False) + "\n")
        paths.append(path)
    return paths


def benchmark_report(view: SessionView, analysis: Analysis) -> dict[str, Any]:
    """Return the report of one Run as plain values."""
    record = analysis.run.record
    label = record.engine or record.imported_from or "server"
    return {
        "version": VERSION,
        "run": _run(view, analysis),
        "scenario": {"stack": [_engine(analysis, label)], "load": _load(analysis)},
        "results": {"request_performance": {"aggregate": _requests(analysis)}, "observability": _observability(view, analysis, label)},
    }


def _id(*parts: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, "/".join(("pytest-kvcache", *parts))).hex


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _moment(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _run(view: SessionView, analysis: Analysis) -> dict[str, Any]:
    record = analysis.run.record
    began, ended = record.load_started_wall_s or record.started_wall_s, record.load_ended_wall_s or record.ended_wall_s
    found: dict[str, Any] = {"uid": _id(view.verdict.session, record.id, analysis.run.folder.name), "eid": _id(view.verdict.session)}
    if 0 < began <= ended < 4e9:
        found["time"] = {"start": _moment(began), "end": _moment(ended), "duration": f"PT{ended - began:.3f}S"}
    found["description"] = f"profile {record.profile}, window {record.window + 1}" + (f", side {record.side}" if record.side else "")
    found["keywords"] = list(filter(None, ["pytest-kvcache", record.engine, record.profile, record.side, record.variant]))
    return found


def _engine(analysis: Analysis, label: str) -> dict[str, Any]:
    record = analysis.run.record
    config = {name: value.value for name, held in record.config.items() if isinstance(value := held.to_value(), Reading) and value.value is not None}
    standardized: dict[str, Any] = {"kind": "generic", "tool": label, "tool_version": record.engine_version or "unknown"}
    standardized |= {"model": {"name": record.model}, "replicas": max(len(record.endpoints), 1)}
    native = {"args": {"command": list(record.launch_command)} if record.launch_command else None, "config": config}
    return {
        "metadata": {"label": label, "cfg_id": _hash([config, record.launch_command])},
        "standardized": standardized,
        "native": {key: value for key, value in native.items() if value},
    }


def _load(analysis: Analysis) -> dict[str, Any]:
    record = analysis.run.record
    rows = analysis.run.requests()
    standardized: dict[str, Any] = {
        "tool": record.imported_from or "pytest-kvcache",
        "tool_version": record.versions.get(record.imported_from, "unknown") if record.imported_from else __version__,
        "source": "unknown",
        "stage": max(record.window, 0),
    }
    for name, lengths in (
        ("input_seq_len", [row.prompt_tokens or row.prompt_tokens_planned or 0 for row in rows]),
        ("output_seq_len", [row.output_tokens_planned or 0 for row in rows]),
    ):
        known = [length for length in lengths if length > 0]
        if known:
            standardized[name] = {"distribution": "other", "value": _mean(known), "min": min(known), "max": max(known)}
    mean = analysis.values.get("prompt_length.mean")
    if "input_seq_len" not in standardized:
        standardized["input_seq_len"] = {"distribution": "other", "value": mean.number() if isinstance(mean, Reading) else 0}
    rate, users = _number(record.options.get("rate")), _number(record.options.get("users"))
    if rate:
        standardized["rate_qps"] = rate
    elif users and users >= 1:
        standardized["concurrency"] = int(users)
    options = {**record.options, "profile": record.profile, "seed": record.seed}
    metadata = {"cfg_id": record.workload or _hash(options), "description": f"profile {record.profile}"}
    return {"metadata": metadata, "standardized": standardized, "native": {"config": options}}


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _statistics(values: Iterable[float], units: str, scale: float = 1.0) -> dict[str, Any] | None:
    """Return a distribution as the format has it; None of nothing."""
    import numpy as np

    column = np.asarray(list(values), dtype=np.float64) * scale
    column = column[np.isfinite(column)]
    if not len(column):
        return None
    found = {"units": units, "mean": float(column.mean()), "stddev": float(column.std()), "min": float(column.min())}
    found |= {name: float(value) for name, value in zip(_SHARES, np.percentile(column, list(_SHARES.values())), strict=True)}
    return {**found, "max": float(column.max())}


def _there(**parts: Any) -> dict[str, Any]:
    return {name: value for name, value in parts.items() if value is not None}


def _one(analysis: Analysis, name: str, units: str) -> dict[str, Any] | None:
    """Return a figure that is one number as a distribution of it: the format has nothing else."""
    value = analysis.values.get(name)
    return {"units": units, "mean": value.number()} if isinstance(value, Reading) else None


def _requests(analysis: Analysis) -> dict[str, Any]:
    rows = analysis.run.requests()
    if not rows:
        return _told(analysis)
    good = [row for row in rows if row.outcome in {OK, STOPPED_EARLY}]
    cut = sum(row.outcome == CUT_OFF for row in rows)
    since, until = min(row.intended_s for row in rows), max(row.end_s for row in rows)
    span = max(until - since, 1e-9)
    requests = _there(
        total=len(rows),
        failures=len(rows) - len(good) - cut,
        incomplete=cut,
        input_length=_statistics((row.prompt_tokens for row in good if row.prompt_tokens is not None), "count"),
        output_length=_statistics((row.completion_tokens for row in good if row.completion_tokens is not None), "count"),
    )
    latency = _there(
        time_to_first_token=_statistics((row.first_token_s - row.intended_s for row in good if row.first_token_s is not None), "s"),
        request_latency=_statistics((row.end_s - row.intended_s for row in good), "s"),
        time_per_output_token=_statistics(_per_token(good), "s/token"),
    )
    told = [row.prompt_tokens for row in good if row.prompt_tokens is not None]
    output = _one(analysis, "throughput", "tokens/s")
    throughput = _there(
        request_rate={"units": "queries/s", "mean": len(good) / span},
        input_token_rate={"units": "tokens/s", "mean": sum(told) / span} if told else None,
        output_token_rate=output,
        total_token_rate={"units": "tokens/s", "mean": sum(told) / span + output["mean"]} if told and output else None,
    )
    return {"requests": requests, "latency": latency, "throughput": throughput}


def _per_token(rows: Iterable[RequestRow]) -> Iterable[float]:
    for row in rows:
        if row.first_token_s is not None and row.completion_tokens is not None and row.completion_tokens > 1:
            yield (row.end_s - row.first_token_s) / (row.completion_tokens - 1)


def _told(analysis: Analysis) -> dict[str, Any]:
    """Return what a Run without rows tells: the figures that another load tool wrote. Its percentiles have no mean, and are left out."""

    def count(name: str) -> int | None:
        value = analysis.values.get(name)
        return round(value.number()) if isinstance(value, Reading) else None

    total = count("requests.sent") if count("requests.sent") is not None else count("requests.ok")
    requests = _there(
        total=total, failures=count("rejections"), incomplete=count("requests.cut_off"), input_length=_one(analysis, "prompt_length.mean", "count")
    )
    found = {"requests": requests if total is not None else None, "throughput": _there(output_token_rate=_one(analysis, "throughput", "tokens/s"))}
    return {name: value for name, value in found.items() if value}


def _observability(view: SessionView, analysis: Analysis, label: str) -> dict[str, Any]:
    line = analysis.timeline
    aggregate = _there(
        kv_cache_usage=_statistics(line.usage, "percent", 100.0),
        running_requests=_statistics(line.running, "count"),
        waiting_requests=_statistics(line.waiting, "count"),
        preemptions=_one(analysis, "preemptions", "count"),
    )
    hits = analysis.values.get("prefix.hit_rate")
    if isinstance(hits, Reading):
        aggregate["cache_hit_rate"] = {"units": "percent", "mean": hits.number() * 100}
    component: dict[str, Any] = {"component_label": label, "aggregate": aggregate}
    series = _series(analysis)
    if series:
        component["time_series"] = {"kv_cache_usage": {"units": "percent", "series": series}}
    gates = [
        {"name": gate.name, "quantity": gate.quantity, "verdict": gate.verdict, "lane": gate.lane, "text": gate.text} for gate in view.verdict.gates
    ]
    own = {
        name: {"value": value.value, "unit": value.unit, "source": value.source}
        for name, value in analysis.values.items()
        if isinstance(value, Reading) and (not isinstance(value.value, float) or math.isfinite(value.value))
    }
    lacking = {name: value.reason for name, value in analysis.values.items() if isinstance(value, Missing) and name in {"usage.peak", "preemptions"}}
    ours = {
        "verdict": view.verdict.verdict,
        "gates": gates,
        "problems": [problem.text for problem in analysis.problems],
        "values": own,
        "missing": lacking,
    }
    return {"components": [component] if aggregate else [], "pytest_kvcache": ours}


def _series(analysis: Analysis) -> list[dict[str, Any]]:
    """Return usage over time, at most ``MOST_POINTS`` points, each the peak of its stretch."""
    import numpy as np

    line, began = analysis.timeline, analysis.run.record.load_started_wall_s
    usage, t = np.asarray(line.usage, dtype=np.float64), np.asarray(line.t_s, dtype=np.float64)
    keep = np.isfinite(usage) & np.isfinite(t)
    usage, t = usage[keep], t[keep]
    if not len(usage) or not 0 < began < 4e9:
        return []
    edges = np.unique(np.linspace(0, len(usage), min(MOST_POINTS, len(usage)) + 1).astype(int))
    found = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = usage[start:stop] * 100
        found.append({"ts": _moment(began + float(t[start])), "mean": float(part.mean()), "max": float(part.max())})
    return found
