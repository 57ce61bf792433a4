"""Applies a dialect to what was read of one part of a server: a rank, a replica, or the whole of a server that has no parts.

Each quantity is read by its rule, and its unit, scale and range are checked. What cannot be read is Missing with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_kvcache.engines._dialect import Derived, Dialect, FirstOf, InfoLabel, JsonField, LogFact, NoReading, Parse, Rule, Series, spellings
from pytest_kvcache.engines._parts import Parts
from pytest_kvcache.engines._state import RawState, Sample, Samples, clean
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value
from pytest_kvcache.units import HUGE

# A gauge may pass full by rounding alone. More is another scale (percent) or another engine's gauge: engines.md, trap 1.
FULL = 1.0001
REASON_LIMIT = 300
# How the parts of a server make a whole: what must agree, of which the least or the latest counts, and what adds. Usage is weighted.
SAME = frozenset({"block_size", "kv_dtype", "prefix_caching", "gpu_memory_utilization", "num_gpu_blocks_override", "sliding_window"})
LEAST = frozenset({"max_model_len"})
LATEST = frozenset({"start_time"})
MOST = frozenset({"weights_bytes"})
ADDED = frozenset(QUANTITIES) - SAME - LEAST - LATEST - MOST - {"usage"}


def _most(unit: str) -> float:
    """Return from where on a number of that unit is no measurement: nobody has a million billions of tokens, or of KiB."""
    return HUGE * 1024 if unit == "bytes" else HUGE


def samples_of(dialect: Dialect, raw: RawState) -> Samples | None:
    """Return the exposition with the series that the dialect makes of JSON bodies."""
    made = dialect.rows(raw) if dialect.rows is not None else {}
    if raw.metrics is None and not made:
        return None
    told = raw.metrics if raw.metrics is not None else Samples({}, frozenset())
    # What other dialects wanted, or what only remarks look at, must not tell parts apart.
    rows = {name: rows for name, rows in told.rows.items() if name in dialect.read_names}
    return Samples({**rows, **made}, told.names | made.keys(), told.bad_lines, told.in_blocks)


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
        return Reading(plain(value, unit), unit, source, self.wall_s)

    @property
    def peers(self) -> list[View]:
        """The engine ranks behind this part's front end, itself among them."""
        if self._part is None:
            return [self]
        mine = self._parts.front_end(self._part)
        return [view for view in self.parts if view._part is not None and self._parts.front_end(view._part) == mine]

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
        for alias, before in () if rows else self.dialect.info_aliases.get(family, ()):
            other, found = self.rows(alias, shared=True)
            if found:
                spelled, rows, label = other, found, before + label
                break
        source = f"{spelled}{{{label}}}"
        if not rows:
            models = self.models
            if models and self.has(family):
                return source, Missing(f"{family} names no model, and {len(models)} models share this engine: {', '.join(models)}"[:REASON_LIMIT])
            return source, Missing(f"{family} is not in /metrics")
        texts = {row.labels[label] for row in rows if label in row.labels}
        if not texts:
            return source, Missing(f"{spelled} has no label {label}")
        if len(texts) > 1:
            return source, Missing(f"{spelled} has {len(texts)} values of {label}: {clean(', '.join(sorted(texts)), 100)}")
        text = texts.pop()
        return source, Missing(f'{spelled} says {label}="{text}"') if text in {"None", ""} else text

    def pool_in_tokens(self) -> Value:
        """Return ``pool_tokens`` as blocks x tokens per block."""
        pool, size = self.value("pool_blocks"), self.value("block_size")
        if isinstance(pool, Missing):
            return pool
        return size if isinstance(size, Missing) else self.reading("pool_tokens", pool.number() * size.number(), f"{pool.source} x {size.source}")

    def rest(self, name: str, whole: Value, part: Value, source: str = "") -> Value:
        """Return what ``part`` leaves of ``whole``."""
        if isinstance(whole, Missing):
            return whole
        return part if isinstance(part, Missing) else self.checked(name, whole.number() - part.number(), source or f"{whole.source} - {part.source}")

    def share(self, part: Value, whole: Value, source: str = "") -> Value:
        """Return ``usage`` as ``part`` of ``whole``."""
        if isinstance(whole, Missing):
            return whole
        if isinstance(part, Missing):
            return part
        if not whole.number():
            return Missing("the pool has no block" if whole.unit == "blocks" else f"{whole.source} is 0")
        return self.checked("usage", part.number() / whole.number(), source or f"{part.source} / {whole.source}")

    def listed_length(self) -> Value:
        """Return the least ``max_model_len`` of the base models that /v1/models lists; LoRA rows (with a parent) have none."""
        body = self.json("/v1/models")
        if isinstance(body, Missing):
            return body
        rows = body.get("data") if isinstance(body, dict) else None
        models = [row for row in rows if isinstance(row, dict) and row.get("parent") is None] if isinstance(rows, list) else []
        asked = [row for row in models if row.get("id") == self.raw.model] or models
        lengths = [n for row in asked if isinstance(n := row.get("max_model_len"), int) and not isinstance(n, bool) and n > 0]
        return self.reading("max_model_len", min(lengths), "/v1/models max_model_len") if lengths else Missing("/v1/models states no max_model_len")

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
        return Missing(clean("; ".join(reasons), REASON_LIMIT))

    def _series(self, rule: Series, name: str) -> Value:
        if self.samples is None:
            return Missing(self.raw.metrics_reason)
        narrowed = ""
        for family in rule.names:
            spelled, rows = self.rows(family, shared=rule.shared)
            if rows and rule.where:
                rows = [row for row in rows if _matches(row, rule.where)]
                narrowed = narrowed or f"{spelled} has no row where {rule.describe().partition(' where ')[2]}"
            rows = _totals(rows, self.dialect.share_labels)
            if rows:
                source = rule.source(spelled)
                value = _fold(rows, rule.over, name, source, self.dialect.mirror_labels)
                return value if isinstance(value, Missing) else self.checked(name, value * rule.scale, source)
        if rule.unborn and self._part is not None and all(self.rows(family)[1] for family in rule.alive):
            return self.reading(name, 0, f"{rule.names[0]} is not there, which is 0: {rule.unborn}")
        if rule.names[0].startswith("/"):
            path, _, field = rule.names[0].partition(" ")
            body = self.json(path)
            return body if isinstance(body, Missing) else Missing(f"{path} states no {field}")
        if self.raw.metrics is None:
            return Missing(self.raw.metrics_reason)
        hint = f": {rule.hint}" if rule.hint else ""
        if rule.followed and self.has(*rule.followed):
            hint = ": the engine's metrics are on, so this version does not show it, or not before its first event"
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
        """Return a number as a Reading; Missing where it cannot be meant: NaN, infinite, negative, beyond all measure, or a ratio above a full pool."""
        if not math.isfinite(value) or value < 0:
            return Missing(f"{source} reads {value:g}")
        if value >= _most(QUANTITIES[name].unit):
            return Missing(f"{source} reads {value:.3g}, which no server holds or has ever done")
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
        if value is not None and self._part is not None and len(self.parts) > 1 and name in ADDED:
            return Missing("the start-up log states it for the whole server")
        if value is None:
            return Missing("the start-up log does not state it" if self.raw.log_facts or self.raw.log_given else "no start-up log is at hand")
        if isinstance(value, Reading) and not isinstance(value.value, str | bool) and abs(value.value) >= _most(value.unit):
            return Missing(f"{value.source[:120]} states a number that no server holds")
        return value


def _matches(row: Sample, where: Mapping[tuple[str, ...], tuple[str, ...]]) -> bool:
    labels = row.labels
    return all(any(labels.get(f"exported_{key}", labels.get(key)) in values for key in keys) for keys, values in where.items())


def _totals(rows: list[Sample], shares: frozenset[str]) -> list[Sample]:
    """Return the rows without those that are a share of another one. Prometheus keeps no empty label: the total has it empty or not at all."""
    whole = [row for row in rows if not any(row.labels.get(label) for label in shares)] if shares else rows
    return whole or rows


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


def plain(value: float | str | bool, unit: str) -> float | str | bool:
    if isinstance(value, float) and unit not in {"ratio", "s"} and value.is_integer():
        return int(value)
    return value


def version_of(view: View) -> str:
    value = view.apply(view.dialect.version, "kv_dtype")  # read as any text quantity is
    return clean(str(value.value), 60) if isinstance(value, Reading) else ""


def notes_of(view: View) -> list[str]:
    notes = list(view.dialect.remarks(view)) if view.dialect.remarks is not None else []
    if view.dialect.meaning:
        notes.append(view.dialect.meaning)
    metrics = view.raw.metrics
    if metrics is not None and metrics.bad_lines:
        notes.append(f"{len(metrics.bad_lines)} lines of /metrics could not be read, such as {metrics.bad_lines[0]!r}")
    return notes
