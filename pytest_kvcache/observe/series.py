"""Series as a Prometheus server answers them: rows of labels with values, sorted by the server that was scraped.

Source: Prometheus HTTP API v1, the result types ``vector`` and ``matrix`` of ``/api/v1/query`` and ``/api/v1/query_range``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_kvcache.engines import Sample, Samples, clean
from pytest_kvcache.errors import UsageError

MOST_TARGETS = 1_000
_LATEST_S = 1e11
# What tells one scraped target from another. What is left of a series' labels is the engine's own.
TARGET = ("cluster", "namespace", "job", "instance", "pod", "node")

Key = tuple[tuple[str, str], ...]
Series = tuple[dict[str, str], list[tuple[float, float]]]
Marked = tuple[dict[str, str], list[tuple[int, float]]]  # times in milliseconds


def series_of(rows: Iterable[Any]) -> list[Series] | None:
    """Return the series of a result with their points in order, those without a point left out; None where the rows have another form."""
    series: list[Series] = []
    for row in rows:
        labels, values = (row.get("metric"), row.get("values", [row.get("value")])) if isinstance(row, dict) else (None, None)
        if not isinstance(labels, dict) or not isinstance(values, list):
            return None
        points = [point for value in values if (point := _point(value)) is not None]
        if points:
            series.append(({str(name): str(text) for name, text in labels.items()}, points))
    return series


def _point(value: object) -> tuple[float, float] | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    try:
        at_s, read = float(value[0]), float(value[1])
    except (TypeError, ValueError, OverflowError):
        return None
    return (at_s, read) if 0 <= at_s < _LATEST_S else None


def millis(wall_s: float) -> int:
    """Return a time in milliseconds, which is how fine Prometheus counts."""
    return round(wall_s * 1000)


def by_target(series: Iterable[Series]) -> dict[Key, list[Marked]]:
    """Return the series of each scraped target, their times in milliseconds. Raises UsageError for more than 1,000 targets."""
    found: dict[Key, list[Marked]] = {}
    for labels, points in series:
        key = key_of(labels)
        if key not in found and len(found) >= MOST_TARGETS:
            raise UsageError(f"the selector matches more than {MOST_TARGETS:,} targets", hint="a narrower selector")
        found.setdefault(key, []).append((labels, [(millis(at), value) for at, value in points]))
    return found


def key_of(labels: Mapping[str, str]) -> Key:
    """Return the labels of a series that name the target it was scraped from."""
    return tuple((name, labels[name]) for name in TARGET if labels.get(name))


def samples_of(series: Iterable[tuple[Mapping[str, str], float]]) -> Samples:
    """Return series, each with its value, as the samples of an exposition."""
    rows: dict[str, list[Sample]] = {}
    for labels, value in series:
        rows.setdefault(labels.get("__name__", ""), []).append(Sample({name: text for name, text in labels.items() if name != "__name__"}, value))
    return Samples(rows, frozenset(rows))


def name_of(key: Key) -> str:
    """Return the name of a target: its instance, with its job and namespace where they are told."""
    labels = dict(key)
    words = [labels[name] for name in ("cluster", "namespace", "job", "pod") if name in labels]
    words.append(labels.get("instance", labels.get("node", "")))
    return clean("/".join(word for word in words if word) or "(no target labels)", 200)


def utc(wall_s: float) -> str:
    """Return Unix seconds as a time of day in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))
    except (ValueError, OverflowError, OSError):
        return f"{wall_s:g}"
