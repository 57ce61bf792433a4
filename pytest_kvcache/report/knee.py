"""A search for the largest load that holds, as a table, a chart and words: made from search.json and the Runs beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvcache import units
from pytest_kvcache.conditions import Limit, limits_in, parse
from pytest_kvcache.errors import UsageError
from pytest_kvcache.judge.search import Level, Probe, levels_of
from pytest_kvcache.judge.search_file import SearchRecord, read_search
from pytest_kvcache.quantities import KNOWN, Reading
from pytest_kvcache.report.charts import compact
from pytest_kvcache.report.escape import plain
from pytest_kvcache.report.model import SessionView, show_number
from pytest_kvcache.report.sections import Table
from pytest_kvcache.report.svg import AFTER, BOUND, INK, MUTED, canvas, context, to_text

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_kvcache.analysis.timeline import Analysis

MOST_PANELS = 4
MOST_ROWS = 60


@dataclass(frozen=True)
class Panel:
    """One quantity over the levels: a point a probe, as (level, value, broke); ``bound`` is where the stop condition draws its line."""

    title: str
    unit: str
    points: tuple[tuple[float, float, bool | None], ...]
    bound: float | None = None


def level_name(level: float, axis: str) -> str:
    """Return a level as people read it."""
    return f"{level:,.10g} users" if axis == "users" else f"{level:,.4g} requests/s"


def _condition(record: SearchRecord) -> list[Limit]:
    try:
        return list(limits_in(parse(record.until)))
    except UsageError:
        return []


def panels(record: SearchRecord, analyses: Sequence[Analysis]) -> list[Panel]:
    """Return what is drawn: each quantity of the stop condition that was told, then the output rate."""
    by_folder = {analysis.run.folder.name: analysis for analysis in analyses}
    wanted: dict[str, tuple[Limit, float | None]] = {limit.key: (limit, limit.bound) for limit in _condition(record)}
    wanted.setdefault("throughput", (Limit("throughput", ">", 0.0), None))
    found = []
    for key, (limit, bound) in wanted.items():
        points = []
        for probe in record.probes:
            value = by_folder[probe.folder].value(limit) if probe.folder in by_folder else None
            if isinstance(value, Reading) and not isinstance(value.value, str) and math.isfinite(value.number()):
                points.append((probe.level, value.number(), probe.broke))
        if points:
            found.append(Panel(plain(f"{KNOWN[limit.name].title}{key.removeprefix(limit.name)}", 80), KNOWN[limit.name].unit, tuple(points), bound))
    return [*found[: MOST_PANELS - 1], *found[-1:]] if len(found) > MOST_PANELS else found


def draw(record: SearchRecord, drawn: Sequence[Panel], *, key: str = "knee") -> str:
    """Return the chart as SVG: what was measured at each level, where it held and where it broke. Raises ValueError where there is nothing to draw."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if not drawn:
        raise ValueError("no probe told what the stop condition names")
    levels = [point[0] for panel in drawn for point in panel.points]
    low, high = min(levels), max(levels)
    marked = [level for level in (record.computed, record.computed_mean) if level and record.axis == "users" and level <= 3 * high]
    wide = high / low > 20 if low > 0 else False
    with context():
        height = 1.75 * len(drawn) + 0.55
        figure = canvas(7.6, height)
        grid = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)
        for axes, panel in zip(grid[:, 0], drawn, strict=True):
            if wide:
                axes.set_xscale("log", base=2)
                axes.set_xlim(low / 1.15, max([high, *marked]) * 1.15)
            else:
                room = 0.04 * max(max([high, *marked]) - low, 1e-9)
                axes.set_xlim(low - room, max([high, *marked]) + room)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
            if record.holds is not None and record.breaks is not None:
                axes.axvspan(record.holds, record.breaks, color=BOUND, alpha=0.13, linewidth=0, label="the knee lies here")
            for number, level in enumerate(marked):
                axes.axvline(level, color=MUTED, linewidth=0.9, linestyle=(0, (1, 1.5)), label="" if number else "fits by arithmetic")
            top = max([point[1] for point in panel.points] + ([panel.bound] if panel.bound is not None else []))
            if panel.bound is not None:
                axes.axhline(panel.bound, color=BOUND, linewidth=0.9, linestyle=(0, (4, 2)), label=f"limit {units.show(panel.bound, panel.unit)}")
            for broke, marker, colour, name in ((False, "o", AFTER, "held"), (True, "X", BOUND, "broke"), (None, "d", MUTED, "cannot be judged")):
                chosen = [(x, y) for x, y, said in panel.points if said is broke]
                if chosen:
                    axes.plot(
                        *zip(*chosen, strict=True),
                        linestyle="none",
                        marker=marker,
                        markersize=5.5,
                        color=colour,
                        alpha=0.8,
                        label=name,
                        clip_on=False,
                    )
            axes.set_ylim(0, top * 1.12 if top > 0 else 1)
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=panel.unit not in {"ratio", "s", "bytes"} and top >= 2))
            axes.yaxis.set_major_formatter(FuncFormatter(_formatter(panel.unit, top)))
            axes.set_title(panel.title, loc="left", fontsize=8, color=INK, pad=4)
        grid[-1, 0].set_xlabel("users" if record.axis == "users" else "requests a second", fontsize=7.5)
        labelled: dict[str, Any] = {}
        for axes in grid[:, 0]:
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                labelled.setdefault(name, handle)
        figure.legend(
            list(labelled.values()), list(labelled), loc="lower center", ncols=5, labelcolor=MUTED, handlelength=1.4, columnspacing=1.2, handletextpad=0.5,
            borderpad=0,
        )  # fmt: skip
        figure.subplots_adjust(left=0.085, right=0.985, top=1 - 0.24 / height, bottom=0.72 / height, hspace=0.3)
        found = level_name(record.holds, record.axis) if record.holds is not None else "no level"
        return to_text(figure, key, f"What was measured at each level of a search until {plain(record.until, 120)}: {found} hold")


def _formatter(unit: str, top: float) -> Any:
    if unit in {"ratio", "s", "bytes"}:
        return lambda value, _: units.show(round(value, 6), unit)
    return lambda value, _: compact(round(value, 6), top)


def levels(record: SearchRecord) -> list[Level]:
    """Return the probed levels in ascending order."""
    return levels_of([Probe(probe.level, probe.broke, probe.text) for probe in record.probes])


def table(record: SearchRecord, drawn: Sequence[Panel]) -> Table:
    """Return the levels with how often each held and broke, the interval of the share that breaks, and what was measured there."""
    found = Table(
        [record.axis if record.axis == "users" else "requests/s", "held", "broke", "breaks, 95 % each way", *(panel.title for panel in drawn)]
    )
    for level in levels(record)[:MOST_ROWS]:
        mark = ", holds" if level.level == record.holds else ", breaks" if level.level == record.breaks else ""
        share = f"{units.show(level.low, 'ratio')} to {units.show(level.high, 'ratio')}" if level.held + level.broke else "not judged"
        cells = [_range([value for at, value, _ in panel.points if at == level.level], panel.unit) for panel in drawn]
        found.rows.append([f"{level.level:,.6g}{mark}", str(level.held), str(level.broke), share, *cells])
    found.notes = [plain(line, 900) for line in (f"Until {record.until}: {record.text.rstrip('. ')}.", record.against) if line]
    return found


def _range(values: Sequence[float], unit: str) -> str:
    if not values:
        return "—"
    low, high = show_number(min(values), unit), show_number(max(values), unit)
    return low if low == high else f"{low} to {high}"


def section(view: SessionView) -> dict[str, Any] | None:
    """Return what the page shows of a search: words, table and how to draw its chart; None where the session searched nothing."""
    record = read_search(view.folder)
    if record is None or not record.probes:
        return None
    found = panels(record, view.after)
    return {"table": table(record, found), "draw": lambda: draw(record, found)}


def shown(folder: Path, analyses: Sequence[Analysis]) -> str:
    """Return a search as plain text for a terminal; empty where the folder holds none."""
    import textwrap

    from tabulate import tabulate

    record = read_search(folder)
    if record is None:
        return ""
    found = table(record, panels(record, analyses))
    notes = [line for note in found.notes for line in textwrap.wrap(note, 100)]
    return "\n".join([tabulate(found.rows, headers=found.columns, disable_numparse=True), "", *notes])
