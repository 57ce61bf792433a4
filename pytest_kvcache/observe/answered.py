"""What a Prometheus server answered, saved in a file: bodies of ``/api/v1/query`` and ``/api/v1/query_range``.

The series are read as those of a scrape, at their last moment; of a range it is told as well how high it went.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_kvcache import units
from pytest_kvcache.engines import Dialect, Samples, clean
from pytest_kvcache.errors import UsageError
from pytest_kvcache.observe.extremes import COUNTED, extremes
from pytest_kvcache.observe.prometheus import MOST_LOOKS, Target, read_target
from pytest_kvcache.observe.series import Key, Marked, Series, by_target, name_of, samples_of, series_of, utc

_MOST_SHOWN = 16
# Prometheus repeats a value for so long; answers that are further apart are not of one moment.
_APART_S = 300.0


@dataclass
class Answered:
    """What the answers hold: ``samples`` at the last moment (None where there is no series), of how many ``targets``, and what to know of them."""

    samples: Samples | None = None
    targets: int = 0
    notes: list[str] = field(default_factory=list)


def read_answers(bodies: Sequence[Any], dialects: Sequence[Dialect]) -> Answered:
    """Return what several answers hold together. Never raises: what cannot be used is told in the notes."""
    found = Answered()
    series: list[Series] = []
    nameless = 0
    for body in bodies:
        kind, result = body["data"]["resultType"], body["data"]["result"]
        rows = series_of(result) if isinstance(result, list) and kind in {"vector", "matrix"} else None
        if rows is None:
            found.notes.append(f"Prometheus' answer holds a {kind} and no series: query the engine's series by name")
            continue
        if not rows:
            found.notes.append("Prometheus' answer holds no series: nothing matched at that time, which is not zero")
        named = [(labels, points) for labels, points in rows if labels.get("__name__")]
        nameless += len(rows) - len(named)
        series += named
        told = body.get("warnings")
        found.notes += [f"Prometheus warns: {clean(str(text), 200)}" for text in (told if isinstance(told, list) else [])[:3]]
    if nameless:
        found.notes.append(
            f"{nameless} series of Prometheus' answer have no name: an expression (sum, rate, avg, ...) was asked for, which adds or averages"
            ' already; query the engine\'s own series, as in {__name__=~"vllm:.*"}'
        )
    if not series:
        return found
    try:
        targets = by_target(series)
    except UsageError as error:
        found.notes.append(error.what)
        return found
    found.targets = len(targets)
    newest = max(points[-1][0] for _, points in series)
    oldest = min(max(values[-1][0] for _, values in of_one) for of_one in targets.values()) / 1000
    found.samples = samples_of(pair for of_one in targets.values() for pair in _last(of_one))
    servers = f"{len(targets)} servers" if len(targets) > 1 else name_of(next(iter(targets)))
    found.notes.append(f"Prometheus' answer of {servers}, as of {utc(newest)}: a value is repeated until the next scrape")
    if newest - oldest > _APART_S:
        found.notes.append(f"the oldest server of it was last seen at {utc(oldest)}: they are not of one moment")
    found.notes += _ranges(targets, dialects)
    return found


def _last(of_one: Sequence[Marked]) -> Iterable[tuple[dict[str, str], float]]:
    """Yield the series of one target with their values at its last moment; one that had ended by then is left out."""
    ranged = [values[-1][0] for _, values in of_one if len(values) > 1]
    until = max(ranged, default=0)
    for labels, values in of_one:
        if len(values) == 1 or values[-1][0] == until:
            yield labels, values[-1][1]


def _ranges(targets: dict[Key, list[Marked]], dialects: Sequence[Dialect]) -> list[str]:
    """Return for each target of a range how far its gauges went and by how much its counters rose."""
    notes: list[str] = []
    looks = 0
    for number, (key, found) in enumerate(sorted(targets.items())):
        times = sorted({at for _, values in found if len(values) > 1 for at, _ in values})
        if not times:
            continue
        looks += len(times)
        if number >= _MOST_SHOWN or looks > MOST_LOOKS:
            notes.append("of the other servers the range was not looked through")
            break
        target = read_target(dialects, key, found, times)
        if target is not None and target.dialect is not None:
            notes.append(f"{target.name}, {len(times)} points from {utc(times[0] / 1000)} to {utc(times[-1] / 1000)}: {_went(target)}")
    return notes


def _went(target: Target) -> str:
    told = extremes(target.rows)
    said = []
    if "usage.peak" in told:
        at_s = next(row.wall_s for row in target.rows if row.values.get("usage") == told["usage.peak"])
        said.append(f"usage at most {units.show(told['usage.peak'], 'ratio')} (at {utc(at_s)})")
    said += [f"free at least {told[f'free_{unit}.min']:,.0f} {unit}" for unit in ("blocks", "tokens") if f"free_{unit}.min" in told]
    said += [f"{name} at most {told[f'{name}.peak']:,.0f}" for name in ("running", "waiting") if f"{name}.peak" in told]
    said += [f"{told[name]:,.0f} {name}" for name in COUNTED if name in told]
    gaps = sum(bool(row.error) for row in target.rows)
    said += [f"{gaps} points without a value"] if gaps else []
    return ", ".join(said) or "no quantity could be read"
