"""Applies a dialect to what was read from a server: canonical quantities for the whole server and for each engine rank.

One exposition may hold several engines: data-parallel ranks, replicas, targets of a federation. Rows are first sorted into
parts by the labels that tell parts apart; each part is read by itself, and the parts are then combined by the rule of each
quantity: pools and requests add, usage is weighted by the pool, what is configured must agree. A part that lacks a quantity makes
it Missing for the whole: a partial sum would look like a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_kvcache.engines._dialect import Derived, Dialect, FirstOf, InfoLabel, JsonField, LogFact, NoReading, Parse, Rule, Series, spellings
from pytest_kvcache.engines._parts import Parts
from pytest_kvcache.engines._state import RawState, Sample, Samples, clean
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value

# A gauge may pass full by rounding alone. More is another scale (percent) or another engine's gauge: engines.md, trap 1.
FULL = 1.0001
_SAME = frozenset({"block_size", "kv_dtype", "prefix_caching", "gpu_memory_utilization", "num_gpu_blocks_override"})
_LEAST = frozenset({"max_model_len"})
_LATEST = frozenset({"start_time"})
_ADDED = frozenset(QUANTITIES) - _SAME - _LEAST - _LATEST - {"usage"}
_REASON_LIMIT = 300


@dataclass(frozen=True)
class Values:
    """Canonical quantities of one look at a server: for the whole, and by part where it has several. ``notes`` is what to know of them."""

    whole: dict[str, Value]
    ranks: dict[str, dict[str, Value]]
    notes: list[str]
    version: str


def read_values(dialect: Dialect, raw: RawState, wall_s: float = 0.0, only: Collection[str] | None = None) -> Values:
    """Return the quantities of ``only`` (default: all) and, when all are read, the notes and the version.

    What cannot be read is Missing with its reason. ``wall_s`` is the Unix time that each Reading carries.
    """
    samples = _samples(dialect, raw)
    parts = Parts(dialect, samples)
    names = [name for name in QUANTITIES if only is None or name in only]
    views = [View(dialect, raw, samples, parts, number, wall_s) for number in range(len(parts.keys))]
    for view in views:
        view.parts = views
    everything = only is None
    if len(views) == 1:
        view = views[0]
        whole = {name: view.value(name) for name in names}
        return Values(whole, {}, _notes(view) if everything else [], _version(view) if everything else "")
    rest = View(dialect, raw, samples, parts, None, wall_s)
    rest.parts = views
    whole = {}
    for name in names:
        combined = _combine(name, views, parts.names)
        if isinstance(combined, Missing) and not combined.cannot_happen and not isinstance(dialect.reads[name], Derived):
            # Series that name no part (vLLM's admission_rejections_total) speak of the whole server. What is computed from several
            # series is not asked: one of them might speak of one part only.
            of_all = rest.value(name)
            combined = of_all if isinstance(of_all, Reading) else combined
        whole[name] = combined
    ranks = {part: {name: view.value(name) for name in names} for part, view in zip(parts.names, views, strict=True)}
    notes = [*_notes(rest), *_spread(ranks)] if everything else []
    return Values(whole, ranks, notes, _version(rest) if everything else "")


def _samples(dialect: Dialect, raw: RawState) -> Samples | None:
    """Return the exposition with the series that the dialect makes of JSON bodies."""
    made = dialect.rows(raw) if dialect.rows is not None else {}
    if not made:
        return raw.metrics
    told = raw.metrics if raw.metrics is not None else Samples({}, frozenset())
    return Samples({**told.rows, **made}, told.names | made.keys(), told.bad_lines)


class View:
    """What one part of a server says; with part None, what belongs to no single part. Values are computed once."""

    parts: list[View]

    def __init__(self, dialect: Dialect, raw: RawState, samples: Samples | None, parts: Parts, part: int | None, wall_s: float) -> None:
        self.dialect = dialect
        self.raw = raw
        self.samples = samples
        self.wall_s = wall_s
        self._parts = parts
        self._part = part
        self._values: dict[str, Value] = {}

    def value(self, name: str) -> Value:
        """Return the canonical quantity called ``name``."""
        known = self._values.get(name)
        if known is None:
            self._values[name] = Missing(f"{name} is derived from itself")
            known = self._values[name] = self.apply(self.dialect.reads[name], name)
        return known

    def number(self, name: str) -> float | Missing:
        """Return a quantity as a number, or why there is none."""
        value = self.value(name)
        return value if isinstance(value, Missing) else value.number()

    def reading(self, name: str, value: float | str | bool, source: str) -> Reading:
        """Return a Reading of quantity ``name`` in its unit, at the time of this look."""
        unit = QUANTITIES[name].unit
        return Reading(_plain(value, unit), unit, source, self.wall_s)

    @property
    def peers(self) -> list[View]:
        """The engine ranks behind this part's front end, itself among them."""
        if self._part is None:
            return [self]
        mine = self._parts.front_end(self._part)
        return [view for number, view in enumerate(self.parts) if self._parts.front_end(number) == mine]

    @property
    def models(self) -> list[str]:
        """The models that share this part's engine, where the exposition tells more than one apart."""
        at = self._parts.model_at
        if at is None or self._part is None:
            return []
        mine = self._parts.keys[self._part]
        twins = [key for key in self._parts.keys if all(a == b for i, (a, b) in enumerate(zip(mine, key, strict=True)) if i != at)]
        return [clean(key[at] or "-", 80) for key in twins] if len(twins) > 1 else []

    def has(self, *families: str) -> bool:
        """Say whether the exposition names any of these series, in any spelling."""
        metrics = self.samples
        return metrics is not None and any(spelled in metrics.names for family in families for spelled in spellings(family))

    def rows(self, family: str, *, shared: bool = False) -> tuple[str, list[Sample]]:
        """Return the series' name as spelled here and its rows of this part.

        ``shared`` takes rows that all ranks of one front end share as well (an info series without the rank's label).
        """
        metrics = self.samples
        if metrics is not None:
            for spelled in spellings(family):
                rows = [row for row in metrics.rows.get(spelled, ()) if self._mine(row, shared)]
                if rows:
                    return spelled, rows
        return family, []

    def _mine(self, row: Sample, shared: bool) -> bool:
        if len(self._parts.keys) == 1:
            return True
        of = self._parts.of(row)
        if self._part is None:
            return len(of) != 1
        if of == (self._part,):
            return True
        return shared and self._part in of and len({self._parts.front_end(n) for n in of}) == 1

    def label(self, family: str, label: str) -> tuple[str, str | Missing]:
        """Return the source and the text of an info label; Missing where it is not there, unset or not one value."""
        if self.raw.metrics is None:
            return family, Missing(self.raw.metrics_reason)
        spelled, rows = self.rows(family, shared=True)
        source = f"{spelled}{{{label}}}"
        if not rows:
            models = self.models
            if models and self.has(family):
                return source, Missing(f"{family} names no model, and {len(models)} models share this engine: {', '.join(models)}"[:_REASON_LIMIT])
            return source, Missing(f"{family} is not in /metrics")
        texts = {row.labels[label] for row in rows if label in row.labels}
        if not texts:
            return source, Missing(f"{spelled} has no label {label}")
        if len(texts) > 1:
            return source, Missing(f"{spelled} has {len(texts)} values of {label}: {clean(', '.join(sorted(texts)), 100)}")
        text = texts.pop()
        return source, Missing(f'{spelled} says {label}="{text}"') if text in {"None", ""} else text

    def json(self, path: str) -> Any | Missing:
        """Return a parsed JSON body, or why there is none."""
        return self.raw.json.get(path, Missing(f"{path} was not read"))

    def apply(self, rule: Rule, name: str) -> Value:
        """Return quantity ``name`` as one rule of the dialect reads it."""
        if isinstance(rule, Series):
            return self._series(rule, name)
        if isinstance(rule, InfoLabel):
            source, text = self.label(rule.family, rule.label)
            return text if isinstance(text, Missing) else self._parsed(name, text, rule.parse, source)
        if isinstance(rule, JsonField):
            return self._json_field(rule, name)
        if isinstance(rule, LogFact):
            return self._log_fact(rule.name or name, name)
        if isinstance(rule, Derived):
            return rule.compute(self)
        if isinstance(rule, FirstOf):
            return self._first(rule, name)
        return Missing(rule.why, cannot_happen=rule.never)

    def _first(self, rule: FirstOf, name: str) -> Value:
        reasons: dict[str, None] = {}
        for inner in rule.rules:
            value = self.apply(inner, name)
            if isinstance(value, Reading):
                return value
            if isinstance(inner, NoReading) and inner.never:
                return value
            reasons[value.reason] = None
        return Missing(clean("; ".join(reasons), _REASON_LIMIT))

    def _series(self, rule: Series, name: str) -> Value:
        if self.samples is None:
            return Missing(self.raw.metrics_reason)
        narrowed = ""
        for family in rule.names:
            spelled, rows = self.rows(family, shared=rule.shared)
            if rows and rule.where:
                rows = [row for row in rows if _matches(row, rule.where)]
                narrowed = narrowed or f"{spelled} has no row where {rule.describe().partition(' where ')[2]}"
            if rows:
                source = rule.source(spelled)
                value = _fold(rows, rule.over, name, source, self.dialect.mirror_labels)
                return value if isinstance(value, Missing) else self.checked(name, value * rule.scale, source)
        if rule.unborn and self._part is not None and all(self.rows(family)[1] for family in rule.alive):
            return self.reading(name, 0, f"{rule.names[0]} is not there, which is 0: {rule.unborn}")
        if self.raw.metrics is None and not rule.names[0].startswith("/"):
            return Missing(self.raw.metrics_reason)
        hint = f": {rule.hint}" if rule.hint else ""
        return Missing((narrowed or f"{rule.names[0]} is not in /metrics") + hint)

    def _parsed(self, name: str, text: str, parse: Parse, source: str) -> Value:
        if parse == "text":
            return self.reading(name, clean(text, 100), source)
        if parse == "flag":
            lower = text.strip().lower()
            if lower in {"true", "1", "false", "0"}:
                return self.reading(name, lower in {"true", "1"}, source)
            return Missing(f"{source} is {clean(text, 40)!r}, which is neither true nor false")
        try:
            number = math.nan if "_" in text else float(text)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            return Missing(f"{source} is {clean(text, 40)!r}, which is no number")
        return self.checked(name, number, source)

    def checked(self, name: str, value: float, source: str) -> Value:
        """Return a number as a Reading; Missing where it cannot be meant: NaN, infinite, negative, or a ratio above a full pool."""
        if not math.isfinite(value) or value < 0:
            return Missing(f"{source} reads {value:g}")
        if QUANTITIES[name].unit == "ratio":
            if name == "usage":
                value /= self.dialect.gauge_scale
            if value > FULL:
                return Missing(f"{source} reads {value:g}, above a full pool of 1: a gauge of another scale or another engine; it is not clamped")
        return self.reading(name, value, source)

    def _json_field(self, rule: JsonField, name: str) -> Value:
        body = self.json(rule.path)
        if isinstance(body, Missing):
            return body
        source = rule.describe()
        for key in rule.keys:
            try:
                body = body[key]
            except (KeyError, IndexError, TypeError):
                return Missing(f"{source} is not there")
        if isinstance(body, bool):
            return self.reading(name, body, source) if rule.parse == "flag" else Missing(f"{source} is {body}")
        if isinstance(body, (int, float)) and rule.parse == "number":
            return self.checked(name, float(body), source)
        if isinstance(body, str):
            return self._parsed(name, body, rule.parse, source)
        return Missing(f"{source} is of an unexpected type: {type(body).__name__}")

    def _log_fact(self, fact: str, name: str) -> Value:
        value = self.raw.log_facts.get(fact)
        if value is not None and self._part is not None and len(self.parts) > 1 and name in _ADDED:
            return Missing("the start-up log states it for the whole server")
        if value is None:
            return Missing("the start-up log does not state it" if self.raw.log_facts else "no start-up log is at hand")
        return value


def _matches(row: Sample, where: Mapping[tuple[str, ...], tuple[str, ...]]) -> bool:
    labels = row.labels
    return all(any(labels.get(f"exported_{key}", labels.get(key)) in values for key in keys) for keys, values in where.items())


def _fold(rows: Sequence[Sample], over: tuple[str, ...], name: str, source: str, mirrors: frozenset[str] = frozenset()) -> float | Missing:
    """Return one number for the rows of one series in one part, or why that cannot be done."""
    if len(rows) == 1:
        return rows[0].value
    kind = QUANTITIES[name].kind
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for row in rows:
        groups.setdefault(tuple(sorted((k, v) for k, v in row.labels.items() if k != "pid" and k not in mirrors)), []).append(row)
    total = 0.0
    for same in groups.values():
        values = [row.value for row in same]
        by_process = len({row.labels.get("pid") for row in same}) == len(same)
        mirrored = bool(mirrors) and len({tuple(row.labels.get(label) for label in mirrors) for row in same}) == len(same)
        if len(set(values)) > 1 and not by_process and not mirrored:
            return Missing(f"{source} is there {len(same)} times with different values")
        if mirrored and not by_process:
            # Ranks that hold slices of one pool tell of it each: what the worst of them tells holds (engines.md, trap 7).
            total += min(values) if kind == "config" or name.startswith("free_") else max(values)
        else:
            # One live process and stale ones: engines.md, trap 8. Counters of processes are shares of one count.
            total += sum(values) if kind == "counter" and by_process else max(values)
    keys = [dict(key) for key in groups]
    differing = {label for key in keys for label in key if any(other.get(label) != key[label] for other in keys)}
    if differing - set(over):
        return Missing(
            f"{source} has {len(groups)} rows that differ in {', '.join(sorted(differing - set(over)))[:100]}: which of them counts is not known"
        )
    return total


def _combine(name: str, views: Sequence[View], names: Sequence[str]) -> Value:
    values = [view.value(name) for view in views]
    if all(isinstance(value, Missing) and value.cannot_happen for value in values):
        return values[0]
    lacking = [value for value in values if isinstance(value, Missing)]
    if len(lacking) == len(values) and len({value.reason for value in lacking}) == 1:
        return lacking[0]
    for value, part in zip(values, names, strict=True):
        if isinstance(value, Missing):
            return Missing(f"engine {part}: {value.reason}"[:_REASON_LIMIT])
    readings = [value for value in values if isinstance(value, Reading)]
    first, many = readings[0], len(readings)
    if name in _SAME:
        shown = sorted({str(reading.value) for reading in readings})
        return first if len(shown) == 1 else Missing(f"{many} engines differ: {', '.join(shown)[:100]}")
    if name == "usage":
        return _weighted(readings, views)
    numbers = [reading.number() for reading in readings]
    rule: tuple[str, Callable[[list[float]], float]] = ("sum", sum)
    if name in _LEAST:
        rule = ("least", min)
    elif name in _LATEST:
        rule = ("latest", max)
    total = rule[1](numbers)
    return Reading(_plain(total, first.unit), first.unit, f"{rule[0]} over {many} engines of {first.source}", first.wall_s)


def _weighted(usages: Sequence[Reading], views: Sequence[View]) -> Value:
    """Return the pool-weighted mean of the engines' usage (never their sum, and no plain mean: engines.md, trap 6)."""
    pool = "usable_blocks" if views[0].dialect.counts == "blocks" else "pool_tokens"
    weights = [view.number(pool) for view in views]
    for weight in weights:
        if isinstance(weight, Missing):
            return Missing(f"usage of {len(views)} engines cannot be weighted without their pools: {weight.reason}"[:_REASON_LIMIT])
    sizes = [weight for weight in weights if not isinstance(weight, Missing)]
    if not sum(sizes):
        return Missing("the pools of all engines are empty")
    mean = sum(usage.number() * size for usage, size in zip(usages, sizes, strict=True)) / sum(sizes)
    return Reading(mean, "ratio", f"{usages[0].source} of {len(views)} engines, weighted by {pool}", usages[0].wall_s)


def _plain(value: float | str | bool, unit: str) -> float | str | bool:
    if isinstance(value, float) and unit not in {"ratio", "s"} and value.is_integer():
        return int(value)
    return value


def _version(view: View) -> str:
    value = view.apply(view.dialect.version, "kv_dtype")  # read as any text quantity is
    return clean(str(value.value), 60) if isinstance(value, Reading) else ""


def _notes(view: View) -> list[str]:
    notes = list(view.dialect.remarks(view)) if view.dialect.remarks is not None else []
    if view.dialect.meaning:
        notes.append(view.dialect.meaning)
    metrics = view.raw.metrics
    if metrics is not None and metrics.bad_lines:
        notes.append(f"{len(metrics.bad_lines)} lines of /metrics could not be read, such as {metrics.bad_lines[0]!r}")
    return notes


def _spread(ranks: Mapping[str, Mapping[str, Value]]) -> list[str]:
    """Return the note that shows each engine's usage with its free and usable pool: a mean hides the full one."""
    shown = []
    for part, values in ranks.items():
        usage = values["usage"]
        if not isinstance(usage, Reading):
            continue
        room = ""
        for free, pool, unit in (
            (values["free_blocks"], values["usable_blocks"], "blocks"),
            (values["free_tokens"], values["pool_tokens"], "tokens"),
        ):
            if isinstance(free, Reading) and isinstance(pool, Reading) and not room:
                room = f" ({free.number():.0f} of {pool.number():.0f} {unit} free)"
        shown.append((usage.number(), f"{part}: {usage.number() * 100:.1f} %{room}"))
    if not shown:
        return []
    fullest = sorted(shown, reverse=True)[:8]
    more = f"; {len(shown) - len(fullest)} more" if len(shown) > len(fullest) else ""
    return [f"usage by engine, fullest first: {'; '.join(text for _, text in fullest)}{more}"]
