"""AIPerf's export of what the server's /metrics told during its benchmark: server_metrics_export as JSON, CSV or Parquet.

Each series comes as the least, mean and highest value of a gauge, or as what a counter grew by. So the server is read three times by its engine's own
dialect, as it was with every gauge at its highest, its mean and its lowest, and each quantity is taken from the reading that is worst for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_kvcache.engines import RawState, Sample, Samples, detect
from pytest_kvcache.engines import read as read_engine
from pytest_kvcache.errors import CannotJudge, UnknownEngine
from pytest_kvcache.imports.aiperf import TOOL
from pytest_kvcache.imports.reading import Columns, Table, read_cell
from pytest_kvcache.imports.result import ISO, Figures, Result, as_number, section, text, utc_s
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading
from pytest_kvcache.records import SnapshotRecord

_SEEN = ("max", "avg", "min")
_COUNTER = "counter"
_KINDS = ("gauge", "unknown", _COUNTER)
_OWN = ("endpoint_url", "metric_name", "metric_type", "unit", "description", "timestamp_ns", "value", "sum", "count", "bucket_le", "bucket_count")
_FIRST = ("Endpoint", "Type", "Metric", "Unit")
_INFO = ["Endpoint", "Metric", "Key", "Value", "Description"]
_SHARES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_STATISTICS = frozenset(
    {"avg", "min", "max", "std", "total", "rate", "rate_avg", "rate_min", "rate_max", "rate_std", *(f"p{share}" for share in _SHARES)}
)


@dataclass(frozen=True)
class _Series:
    """One series of one endpoint: its name, type and labels, and its statistics (``min``, ``avg`` and ``max``, or ``total``)."""

    endpoint: str
    name: str
    kind: str
    labels: Mapping[str, str]
    stats: Mapping[str, float]


@dataclass(frozen=True)
class _Export:
    """An export of any format. ``interval_ms`` is the time between two reads where it is told."""

    series: list[_Series]
    version: str = ""
    benchmark: str = ""
    began_wall_s: float = 0.0
    ended_wall_s: float = 0.0
    interval_ms: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""


def claims(raw: Any) -> bool:
    """Return whether this is such an export."""
    if isinstance(raw, Table):
        return any(name.startswith("AIPerf Server Metrics") for name in raw.comments) or tuple(raw.head[:4]) == _FIRST
    if isinstance(raw, Columns):
        return {"endpoint_url", "metric_name", "metric_type", "value"} <= set(raw.table.column_names)
    return (
        isinstance(raw, dict)
        and "aiperf_version" in raw
        and isinstance(raw.get("metrics"), dict)
        and "endpoints_configured" in section(raw, "summary")
    )


def read(raw: dict[str, Any] | Table | Columns) -> list[Result]:
    """Return what the export tells of the server, as one load. Raises CannotJudge where no dialect reads it."""
    export = _of_table(raw) if isinstance(raw, Table) else _of_columns(raw) if isinstance(raw, Columns) else _of_json(raw)
    sides: list[dict[str, SnapshotRecord]] = []
    unread: list[str] = []
    for endpoint in dict.fromkeys(series.endpoint for series in export.series):
        own = [series for series in export.series if series.endpoint == endpoint]
        try:
            sides.append({seen: _read_at(own, seen, endpoint) for seen in _SEEN})
        except UnknownEngine as error:
            unread.append(error.what.removeprefix("cannot judge: "))
    if not sides:
        raise CannotJudge(
            f"cannot judge: {unread[0] if unread else 'it holds no gauge and no counter'}", hint="which /metrics was read? --server-metrics"
        )
    engines = list(dict.fromkeys(side["max"].engine for side in sides))
    if len(engines) > 1:
        raise CannotJudge(f"cannot judge: the servers are of several engines: {', '.join(engines)}", hint="name the file of one deployment")
    figures = Figures(TOOL)
    _take(figures, sides)
    pace = f"every {export.interval_ms:.0f} ms" if export.interval_ms else "some times a second"
    config = {name: sides[0]["max"].value(name) for name, quantity in QUANTITIES.items() if quantity.kind == "config"}
    for name, value in config.items():
        if isinstance(value, Reading) and QUANTITIES[name].unit and len(sides) == 1:
            figures.values[name] = value
    return [
        Result(
            TOOL,
            "aiperf-server",
            figures.values,
            version=export.version,
            model=export.model,
            options=dict(export.options),
            began_wall_s=export.began_wall_s,
            ended_wall_s=export.ended_wall_s,
            notes=(
                f"levels of the server were polled {pace}: a peak between two reads is not seen, so each is at least what stands here",
                *([f"{len(unread)} of the endpoints that were read tell nothing of a KV cache"] if unread else []),
            ),
            benchmark=export.benchmark,
            engine=engines[0],
            engine_version=sides[0]["max"].version,
            config={name: value for name, value in config.items() if isinstance(value, Reading)},
        )
    ]


def _read_at(series: Sequence[_Series], seen: str, endpoint: str) -> SnapshotRecord:
    """Return the server as its engine's dialect reads it with every gauge at one of its statistics. Raises UnknownEngine."""
    rows: dict[str, list[Sample]] = {}
    for one in series:
        value = one.stats.get("total" if one.kind == _COUNTER else seen)
        if value is None:
            continue
        rows.setdefault(one.name, []).append(Sample(one.labels, value))
        if one.kind == _COUNTER and not one.name.endswith("_total"):  # the reader that AIPerf uses takes that word off
            rows.setdefault(f"{one.name}_total", []).append(Sample(one.labels, value))
    raw = RawState(metrics=Samples(rows, frozenset(rows)))
    return read_engine(detect(raw), raw, 0.0, endpoint)


def _take(figures: Figures, sides: Sequence[Mapping[str, SnapshotRecord]]) -> None:
    """Take the quantities of all servers together. Of several servers peaks need not coincide, so that only the worst server's are told."""

    def told(name: str, *seen: str) -> list[list[float]]:
        """Return for each server the readings of a quantity that are there."""
        return [[value.number() for at in seen if isinstance(value := side[at].value(name), Reading)] for side in sides]

    alone = len(sides) == 1
    whole = Missing("several servers were read, and what they held at one moment is not told")
    spread = "polled, with every gauge at its highest and at its lowest"

    def put(name: str, values: list[float], source: str = spread) -> None:
        figures.put(name, values[0] if len(values) == 1 else None, source)

    for name, quantity in (("usage.hottest", "usage"), ("usage.peak", "usage")):
        most = [max(values) for values in told(quantity, "max", "min") if values]
        put(name, [max(most)] if most and len(most) == len(sides) else [], "the highest that was polled, of the fullest server")
    means = [value for values in told("usage", "avg") for value in values]
    put("usage.mean", [sum(means) / len(means)] if len(means) == len(sides) and means else [], "mean of what was polled")
    for unit in ("blocks", "tokens"):
        least = [min(values) for values in told(f"free_{unit}", "max", "min") if values]
        held = [max(values) for values in told(f"used_{unit}", "max", "min") if values]
        if len(least) == len(sides):
            put(f"free_{unit}.tightest", [min(least)])
        if alone:
            put(f"free_{unit}.min", least)
            put(f"used_{unit}.peak", held)
    for name, quantity in (("running.peak", "running"), ("waiting.peak", "waiting"), ("waiting.capacity_peak", "waiting_capacity")):
        most = [max(values) for values in told(quantity, "max") if values]
        put(name, most if alone else [], "the most that was polled")
        if not alone and most:
            figures.values[name] = whole
    for name, quantity in (
        ("preemptions", "preemptions"),
        ("rejections_engine", "rejections"),
        ("prefix_hits", "prefix_hits"),
        ("requests.finished", "finished"),
    ):
        grown = [value for values in told(quantity, "max") for value in values]
        put(name, [sum(grown)] if len(grown) == len(sides) else [], "what its counter grew by while the load ran")
    hits, queries = ([value for values in told(name, "max") for value in values] for name in ("prefix_hits", "prefix_queries"))
    if len(hits) == len(queries) == len(sides) and sum(queries) > 0:
        put("prefix.hit_rate", [sum(hits) / sum(queries)], "prefix hits over queries")
    _reasons(figures, sides)


def _reasons(figures: Figures, sides: Sequence[Mapping[str, SnapshotRecord]]) -> None:
    """Say of what is not there why the engine's dialect does not tell it."""
    for name, quantity in (("usage.peak", "usage"), ("usage.hottest", "usage"), ("free_blocks.min", "free_blocks"), ("free_tokens.min", "free_tokens"),
                           ("free_blocks.tightest", "free_blocks"), ("free_tokens.tightest", "free_tokens"), ("preemptions", "preemptions"),
                           ("rejections_engine", "rejections"), ("running.peak", "running"), ("waiting.peak", "waiting")):  # fmt: skip
        why = next((value for side in sides if isinstance(value := side["max"].value(quantity), Missing)), None)
        if why is not None and not isinstance(figures.values.get(name), Reading):
            figures.values[name] = why


def _of_json(raw: dict[str, Any]) -> _Export:
    summary = section(raw, "summary")
    infos = [info for info in section(summary, "endpoint_info").values() if isinstance(info, dict)]
    paces = [pace for info in infos if (pace := as_number(info.get("median_update_interval_ms")) or as_number(info.get("avg_update_interval_ms")))]
    items = section(raw, "input_config", "models").get("items")
    first = items[0] if isinstance(items, list) and items else {}
    return _Export(
        list(_json_series(raw["metrics"])),
        version=text(raw.get("aiperf_version")),
        benchmark=text(raw.get("benchmark_id")),
        began_wall_s=utc_s(text(summary.get("start_time")), ISO),
        ended_wall_s=utc_s(text(summary.get("end_time")), ISO),
        interval_ms=max(paces, default=None),
        model=text(section(first).get("name")),
    )


def _json_series(metrics: Mapping[str, Any]) -> Iterator[_Series]:
    for name, metric in metrics.items():
        kind = metric.get("type")
        for one in metric.get("series") or [] if kind in _KINDS else []:
            stats = {key: value for key in (*_SEEN, "total") if (value := as_number(section(one, "stats").get(key))) is not None}
            labels = {str(key): str(value) for key, value in section(one, "labels").items()}
            yield _Series(text(one.get("endpoint_url")), str(name), kind, labels, stats)


def _of_table(raw: Table) -> _Export:
    found: list[_Series] = []
    infos: dict[tuple[str, str], dict[str, str]] = {}
    head: list[str] = []
    for row in raw.rows:
        if tuple(row[:4]) == _FIRST or row == _INFO:
            head = row
        elif head == _INFO and len(row) == len(_INFO):
            infos.setdefault((row[0], row[1]), {})[row[2]] = row[3]
        elif head and len(row) == len(head) and row[1] in _KINDS:
            cells = dict(zip(head, row, strict=True))
            stats = {key: value for key in (*_SEEN, "total") if (value := as_number(read_cell(cells.get(key, "")))) is not None}
            labels = {name: cell for name, cell in cells.items() if cell and name not in {*_FIRST, *_STATISTICS, "Description"}}
            found.append(_Series(row[0], row[2], row[1], labels, stats))
    ones = dict.fromkeys(_SEEN, 1.0)
    found += [_Series(endpoint, name, "gauge", labels, ones) for (endpoint, name), labels in infos.items()]
    return _Export(found, version=raw.comments.get("aiperf_version", ""), benchmark=raw.comments.get("benchmark_id", ""))


def _of_columns(raw: Columns) -> _Export:
    frame = raw.table.to_pandas()
    frame = frame[frame["metric_type"].isin(_KINDS) & frame["value"].notna()]
    names = [name for name in frame.columns if name not in _OWN]
    found: list[_Series] = []
    moments = frame["timestamp_ns"]
    for key, rows in frame.groupby(["endpoint_url", "metric_name", "metric_type", *names], dropna=False, sort=False):
        labels = {name: str(value) for name, value in zip(names, key[3:], strict=True) if isinstance(value, str) and value}
        values = rows["value"]
        stats = {"min": float(values.min()), "avg": float(values.mean()), "max": float(values.max()), "total": float(values.max())}
        found.append(_Series(str(key[0]), str(key[1]), str(key[2]), labels, stats))
    began, ended = (float(moments.min()) / 1e9, float(moments.max()) / 1e9) if len(moments) else (0.0, 0.0)
    version, benchmark = (raw.metadata.get(f"aiperf.{name}", "") for name in ("version", "benchmark_id"))
    return _Export(found, version=version, benchmark=benchmark, began_wall_s=began, ended_wall_s=ended)
