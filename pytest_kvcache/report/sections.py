"""The tables of a report as values: HTML and Markdown render the same ones, so they cannot disagree."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.report.escape import plain
from pytest_kvcache.report.model import SessionView, at_peak, is_probe, load_name, number, show_number, show_value

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

MAX_ROWS = 400


@dataclass
class Table:
    """Column heads, rows of text, and the notes below; the first ``labels`` columns are names, the others figures."""

    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    labels: int = 1

    def missing(self, value: Value | None, what: str) -> str:
        """Return the cell of a value; why one is missing is noted once below the table."""
        if isinstance(value, Missing):
            reason = plain(value.reason, 300)
            known = next((i for i, note in enumerate(self.notes) if note.endswith(f": {reason}")), None)
            if known is None and len(self.notes) < 12:
                self.notes.append(f"{what}: {reason}")
            elif known is not None and what not in (names := self.notes[known].removesuffix(f": {reason}")).split(", "):
                self.notes[known] = f"{names}, {what}: {reason}"
        return show_value(value) or "—"


def _fold(analyses: Sequence[Analysis], read: Callable[[Analysis], Value | None], how: Callable[[Sequence[float]], float]) -> Value:
    """Return one value for the windows of a side; Missing, with the first reason, where no window has it."""
    values = [value for analysis in analyses if (value := read(analysis)) is not None]
    readings = [value for value in values if isinstance(value, Reading) and not isinstance(value.value, str)]
    if readings:
        return Reading(how([reading.number() for reading in readings]), readings[0].unit, readings[0].source)
    texts = [value for value in values if isinstance(value, Reading)]
    return texts[0] if texts else next((v for v in values if isinstance(v, Missing)), Missing("not measured"))


def _spread(analyses: Sequence[Analysis], read: Callable[[Analysis], Value | None]) -> str:
    """Return the median of the windows and, where there are several, their range in the same unit: ``380 ms (360 to 420)``."""
    readings = [v for a in analyses if isinstance(v := read(a), Reading) and not isinstance(v.value, str)]
    if not readings:
        return ""
    numbers, unit = [v.number() for v in readings], readings[0].unit
    middle, low, high = statistics.median(numbers), min(numbers), max(numbers)
    if low == high:
        return show_number(middle, unit)
    if unit == "s":
        scale, name, digits = (1e3, "ms", 0) if high < 1 else (1.0, "s", 2)
        return f"{middle * scale:.{digits}f} {name} ({low * scale:.{digits}f} to {high * scale:.{digits}f})"
    return f"{show_number(middle, unit)} ({show_number(low, '')} to {show_number(high, '')})"


def _of(name: str) -> Callable[[Analysis], Value | None]:
    return lambda analysis: analysis.values.get(name)


def _in_lane(lane: str, name: str) -> Callable[[Analysis], Value | None]:
    return lambda analysis: analysis.lanes[lane].get(name)


def _first(*names: str) -> Callable[[Analysis], Value | None]:
    def read(analysis: Analysis) -> Value | None:
        values = [analysis.values.get(name) for name in names]
        return next((v for v in values if isinstance(v, Reading)), next((v for v in values if v is not None), None))

    return read


def _moment(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s)) if 0 < wall_s < 4e9 else "not recorded"


def sides(view: SessionView) -> Table:
    """Return what was compared, or measured: server, engine, model, pool and load of each side."""
    columns = [(side, list(analyses)) for side, analyses in view.sides()]
    table = Table(["", *(side or "measured" for side, _ in columns)])

    def row(title: str, read: Callable[[Analysis], str]) -> None:
        cells = []
        for _, analyses in columns:
            seen = list(dict.fromkeys(text for a in analyses if (text := plain(read(a), 300))))
            cells.append("; ".join(seen[:4]) + (f"; and {len(seen) - 4} more" if len(seen) > 4 else "") or "—")
        if any(cell != "—" for cell in cells):
            table.rows.append([title, *cells])

    def stated(name: str) -> Callable[[Analysis], str]:
        def read(analysis: Analysis) -> str:
            value = analysis.values.get(name)
            return show_value(value) if isinstance(value, Reading) else ""

        return read

    row("server", lambda a: " ".join(a.run.record.launch_command) or ", ".join(a.run.record.endpoints))
    row("engine", lambda a: f"{a.run.record.engine} {a.run.record.engine_version}")
    row("model", lambda a: a.run.record.model)
    row("KV dtype", stated("kv_dtype"))
    row("pool", lambda a: _phrase(a, ("pool_tokens", "{}"), ("pool_blocks", "{}"), ("block_size", "{} a block"), ("pool_bytes", "{}")))
    row("limits", lambda a: _phrase(a, ("max_model_len", "{} a request"), ("max_num_seqs", "{} at once")))
    if any(analyses for _, analyses in columns):
        table.rows.append(["windows", *(_windows(analyses) for _, analyses in columns)])
        table.rows.append(["measured from", *(_moment(min((a.run.record.started_wall_s for a in analyses), default=0.0)) for _, analyses in columns)])
    row("prefix cache at start", lambda a: a.run.record.cache_state)
    row("seeds", lambda a: str(a.run.record.seed) if a.run.record.load_started_wall_s else "")
    row("workload", lambda a: f"{load_name(a)} {a.run.record.workload[:12]}" if a.run.record.workload else "")
    return table


def _phrase(analysis: Analysis, *parts: tuple[str, str]) -> str:
    """Return the values that the server states, each in its words, as one phrase."""
    values = ((words, analysis.values.get(name)) for name, words in parts)
    return ", ".join(words.format(show_value(value)) for words, value in values if isinstance(value, Reading))


def _windows(analyses: Sequence[Analysis]) -> str:
    profiles: dict[str, int] = {}
    for analysis in analyses:
        profiles[load_name(analysis)] = profiles.get(load_name(analysis), 0) + 1
    return plain(", ".join(f"{name} × {count}" for name, count in profiles.items()), 300) or "—"


def three_numbers(view: SessionView) -> Table:
    """Return pool usage, free space and running requests with their mean length, beside each other, of each side's tightest window."""
    table = Table(
        ["load", "side", "pool", "usage, peak", "free, fewest", "running then", "mean length then", "payload, peak", "waiting, peak", "preemptions"],
        labels=2,
    )
    for profile in view.profiles():
        for side, _ in view.sides():
            windows = view.of(profile, side)
            peak = at_peak([a for a in windows if number(a, "usage.peak") is not None] or windows)
            if peak is None or not (peak.run.record.sample_hz or number(peak, "usage.peak") is not None):
                continue
            cell = peak.values.get
            free = _first("free_blocks.min", "free_tokens.min")(peak)
            table.rows.append(
                [
                    plain(profile, 40),
                    side or "measured",
                    table.missing(_first("pool_tokens", "pool_blocks")(peak), "pool"),
                    table.missing(cell("usage.peak"), "usage"),
                    table.missing(free, "free space"),
                    table.missing(_first("running.at_peak", "running.peak")(peak), "running"),
                    table.missing(cell("mean_length.at_peak"), "mean length"),
                    table.missing(cell("payload.peak"), "payload"),
                    table.missing(cell("waiting.peak"), "waiting"),
                    table.missing(_fold(windows, _of("preemptions"), sum), "preemptions"),
                ]
            )
    _only_if(view.compared, table)
    if view.compared:
        table.notes.insert(0, "Each line shows the window with the highest peak of its side; preemptions are summed over its windows.")
    table.notes.insert(
        0, "Peaks are polled, so the true peak is at least what is shown; preemptions and rejections are counted and cannot be missed."
    )
    return table


def _lanes(view: SessionView) -> list[tuple[str, str, bool]]:
    """Return the lanes in the order in which they were first pressed, as (title, lane, probe): a probe's requests are no window's."""
    seen = {(lane, is_probe(a)): None for _, side in view.sides() for a in side for lane in a.lanes}
    return [(plain(f"{lane} (probe)" if probe else lane, 50), lane, probe) for lane, probe in list(seen)[:40]]


def rejections(view: SessionView) -> Table:
    """Return rejected requests by class, lane and side, summed over windows, with how many were sent."""
    classes = sorted({name for _, side in view.sides() for a in side for name in a.rejections})[:30]
    table = Table(["lane", "side", "sent", "ok", "stopped early", *(plain(name.replace("_", " "), 60) for name in classes), "rejected"])
    table.labels = 2
    for title, lane, probe in _lanes(view):
        for side, analyses in view.sides():
            here = [a for a in analyses if lane in a.lanes and is_probe(a) is probe]
            if not here:
                continue
            counts = [sum(a.rejections.get(name, {}).get(lane, 0) for a in here) for name in classes]
            figures = [
                table.missing(_fold(here, _in_lane(lane, name), sum), name) for name in ("requests.sent", "requests.ok", "requests.stopped_early")
            ]
            table.rows.append([title, side, *figures, *(f"{n:,}" for n in counts), f"{sum(counts):,}"])
    _only_if(view.compared, table)
    errors = {name: text for _, side in view.sides() for a in side for name, text in a.errors.items() if name in classes}
    table.notes += [plain(f"{name.replace('_', ' ')}, the first: {text}", 400) for name, text in list(errors.items())[:12]]
    return table


def _only_if(compared: bool, table: Table) -> None:
    """Take out the column of sides where there is one side, and the units that a column's head says already."""
    for row in table.rows:
        row[:] = [cell.removesuffix(" requests").removesuffix(" events") for cell in row]
    if not compared:
        table.labels = 1
        for row in (table.columns, *table.rows):
            del row[1]


def latency(view: SessionView) -> Table:
    """Return times of the requests that succeeded, by lane and side: the median of the windows and their range."""
    names = {"ttft.p50": "TTFT p50", "ttft.p95": "TTFT p95", "latency.p50": "whole p50", "latency.p95": "whole p95", "gap.max": "longest gap"}
    table = Table(["lane", "side", *names.values(), "output rate"], labels=2)
    for name_of_lane, lane, probe in _lanes(view):
        for side, analyses in view.sides():
            here = [a for a in analyses if lane in a.lanes and is_probe(a) is probe]
            if not here:
                continue
            cells = [
                _spread(here, _in_lane(lane, name)) or table.missing(_fold(here, _in_lane(lane, name), max), title)
                for name, title in {**names, "throughput": "output rate"}.items()
            ]
            table.rows.append([name_of_lane, side or "measured", *cells])
    _only_if(view.compared, table)
    if any(len(view.of(profile, side)) > 1 for profile in view.profiles() for side, _ in view.sides()):
        table.notes.insert(0, "The median of the windows, and their range.")
    return table


def quality(view: SessionView) -> dict[str, dict[int, tuple[int, int]]]:
    """Return passed and asked items by prompt length of each side, summed over its windows; a side that asked none is left out."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for side, analyses in view.sides():
        lengths: dict[int, tuple[int, int]] = {}
        for analysis in analyses:
            if not isinstance(analysis.quality, Missing):
                for length, (passed, asked) in analysis.quality.by_length.items():
                    before = lengths.get(length, (0, 0))
                    lengths[length] = (before[0] + passed, before[1] + asked)
        if lengths:
            found[side] = dict(sorted(lengths.items()))
    return found


def broken_lengths(sides_by_length: dict[str, dict[int, tuple[int, int]]]) -> list[str]:
    """Return the lengths that answer worse after than before, or, with one side, not all right; each with its figures."""
    after = sides_by_length.get("after") or sides_by_length.get("") or {}
    before = sides_by_length.get("before")
    lines = []
    for length, (passed, asked) in after.items():
        was = before.get(length) if before else (asked, asked)
        if was and asked and was[1] and passed / asked < was[0] / was[1]:
            lines.append(f"{length:,} tokens: {passed} of {asked}" + (f", was {was[0]} of {was[1]}" if before else ""))
    return lines


def problems(view: SessionView) -> list[tuple[str, str, str]]:
    """Return what makes the evidence unsound or incomplete as ``(where, what, how to mend it)``."""
    found = {plain(p.text) for _, analyses in view.sides() for a in analyses for p in a.problems}
    rows = [("session", text, "") for raw in (*view.verdict.problems, *view.unread) if (text := plain(raw)) not in found]
    for side, analyses in view.sides():
        for analysis in analyses:
            where = plain(" ".join(part for part in (side, analysis.run.folder.name) if part), 120)
            rows.extend((where, plain(p.text), plain(p.mend)) for p in analysis.problems)
            known = {p.text for p in analysis.problems}
            rows.extend((where, plain(text), "") for text in analysis.run.record.problems if text not in known)
            if tool := analysis.run.record.imported_from:
                unseen = f"of a load that {tool} ran it is not known whether its client was out of CPU, the server restarted or had other users"
                rows.append((where, plain(unseen), "press it from here: pytest-kvcache load"))
    return list(dict.fromkeys(rows))[:MAX_ROWS]


def settings(view: SessionView) -> Table:
    """Return the options of the first Run with their sources; those that were given stand before the defaults."""
    table = Table(["option", "value", "from"], labels=3)
    record = next((a.run.record for _, side in view.sides() for a in side), None)
    given: list[list[str]] = []
    default: list[list[str]] = []
    for name, entry in (record.settings if record else {}).items():
        source = plain(entry.get("source", ""), 40)
        value = entry.get("value", "")
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        (default if source == "default" else given).append([plain(name, 60), plain(text, 200) or "(empty)", source])
    table.rows = (given + default)[:MAX_ROWS]
    return table


def config(view: SessionView) -> Table:
    """Return the effective configuration that each side's server was read back with, and where each value was read."""
    columns = [(side, next(iter(analyses), None)) for side, analyses in view.sides()]
    names = list(dict.fromkeys(name for _, a in columns if a for name in a.run.record.config))[:MAX_ROWS]
    table = Table(["name", *(side or "value" for side, _ in columns), "read from"], labels=1 + len(columns) + 1)
    for name in names:
        records = [a.run.record.config.get(name) if a else None for _, a in columns]
        source = next((r.source for r in records if r is not None and r.source), "")
        table.rows.append([plain(name, 60), *(table.missing(r.to_value(), name) if r else "—" for r in records), plain(source, 120)])
    return table


def flat(mapping: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """Return a nested mapping as rows of dotted name and text, at most ``MAX_ROWS``."""
    rows: list[list[str]] = []
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and prefix.count(".") < 4:
            rows.extend(flat(value, f"{name}."))
        else:
            rows.append([plain(name, 80), plain(", ".join(map(str, value)) if isinstance(value, list | tuple) else value, 200)])
    return rows[:MAX_ROWS]
