"""Memory over time: each card (or the machine's memory) with this server's processes, other processes and what is free, on the load's clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_kvcache import units
from pytest_kvcache.analysis.ledger import GPU, CardLedger
from pytest_kvcache.analysis.memory_seen import MemoryLine, course
from pytest_kvcache.quantities import Reading
from pytest_kvcache.report.charts import thin
from pytest_kvcache.report.escape import plain
from pytest_kvcache.report.model import SessionView, at_peak
from pytest_kvcache.report.sections import Table
from pytest_kvcache.report.svg import AFTER, GRID, INK, MUTED, WAITING, canvas, context, to_text

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

    Floats = np.ndarray[Any, np.dtype[np.float64]]

POINTS = 300
MAX_LINES = 8
_GIB = float(1 << 30)
_BANDS = (
    ("server", "this server's processes", AFTER, 0.6),
    ("others", "other processes", WAITING, 0.6),
    ("rest", "in use, of no process named", MUTED, 0.45),
)
_COURSES = (("server", "this server"), ("others", "other processes"), ("used", "in use"), ("free", "free"))


@dataclass(frozen=True)
class Drawn:
    """One chart of memory: whose it is, how it is drawn, and its figures in words."""

    side: str
    caption: str
    draw: Callable[[], str]


@dataclass(frozen=True)
class OverTime:
    """What the page shows of memory over time: charts, and one table of figures, whose notes say how many lines are not drawn."""

    charts: list[Drawn] = field(default_factory=list)
    table: Table = field(default_factory=lambda: Table([""]))


def over_time(view: SessionView) -> OverTime:
    """Return the cards and servers of each side, of the window whose ledgers are shown; what was looked at only once has no course."""
    table = Table(["memory", "side", *(title for _, title in _COURSES)], labels=2)
    charts = []
    for number, (side, analyses) in enumerate(view.sides()):
        peak = at_peak([one for one in analyses if one.ledgers and (one.timeline.cards or one.timeline.hosts)])
        if peak is None:
            continue
        lines = [line for line in (*peak.timeline.cards, *peak.timeline.hosts) if len(line.t_s) > 1]
        # the machine's memory is the server's own only where it is not on cards; beside cards it stays in the table
        shown = [line for line in lines if line.kind == GPU] or lines
        table.rows += [_row(line, side) for line in lines]
        for part, start in enumerate(range(0, min(len(shown), MAX_LINES), 4)):
            some = shown[start : start + 4]
            label = "Memory over time. " + " ".join(f"{line.label}: {words(line)}." for line in some)
            draw = partial(memory_chart, some, peak.ledgers, key=f"m{number}{part}", label=label)
            charts.append(Drawn(side, f"{plain(peak.run.record.profile, 60)}: " + ", ".join(plain(line.label, 90) for line in some), draw))
        if len(shown) > MAX_LINES:
            table.notes.append(f"The first {MAX_LINES} of {len(shown)} are drawn.")
    if table.rows:
        table.notes.insert(
            0,
            "At the first look → at the last look, with the most in between (of what is free the least) and when, in seconds from the start of the load. — was not told.",
        )
        if not view.compared:
            table.labels = 1
            for row in (table.columns, *table.rows):
                del row[1]
    return OverTime(charts, table)


def words(line: MemoryLine) -> str:
    """Return how the memory of a line moved, in one sentence without its full stop."""
    said = []
    for name, title in _COURSES:
        one = course(line, name)
        if one is None:
            continue
        moved = units.show_bytes(one.first) if one.most - one.least < 1 << 20 else f"{units.show_bytes(one.least)} to {units.show_bytes(one.most)}"
        said.append(f"{title} {moved}")
    return plain(", ".join(said), 300)


def _row(line: MemoryLine, side: str) -> list[str]:
    cells = []
    for name, _ in _COURSES:
        one = course(line, name)
        if one is None:
            cells.append("—")
        elif one.most - one.least < 1 << 20:
            cells.append(units.show_bytes(one.first))
        else:
            extreme, at, size = ("least", one.least_at_s, one.least) if name == "free" else ("most", one.most_at_s, one.most)
            shown = f"({extreme} {units.show_bytes(size)} at {max(at, 0.0):.0f} s)"
            cells.append(f"{units.show_bytes(one.first)} → {units.show_bytes(one.last)} {shown}")
    return [plain(line.label, 90), side or "measured", *cells]


def memory_chart(lines: Sequence[MemoryLine], ledgers: Sequence[CardLedger], *, key: str, label: str) -> str:
    """Return one panel a card (or machine) under the other, on one clock and one scale, as SVG. Raises ValueError where nothing was looked at."""
    import numpy as np

    if not any(np.isfinite(line.used).any() for line in lines):
        raise ValueError("memory was not looked at")
    start = min(line.t_s[0] for line in lines)
    end = max(line.t_s[-1] for line in lines)
    with context():
        height = 1.05 + 1.25 * len(lines)
        figure = canvas(7.6, height)
        panels = figure.subplots(len(lines), 1, sharex=True, squeeze=False)[:, 0]
        for axes, line in zip(panels, lines, strict=True):
            _panel(axes, line, next((one for one in ledgers if (one.kind, one.name) == (line.kind, line.label)), None))
            axes.set_xlim(start, max(end, start + 1e-3))
        panels[-1].set_xlabel("seconds from the start of the load", fontsize=7.5)
        handles: dict[str, Any] = {}
        for axes in panels:
            handles.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="lower left",
            bbox_to_anchor=(0.055, 0.0),
            ncols=6,
            handlelength=1.3,
            columnspacing=1.2,
            labelcolor=MUTED,
        )
        figure.subplots_adjust(left=0.065, right=0.985, top=1 - 0.22 / height, bottom=0.75 / height, hspace=0.42)
        return to_text(figure, key, label)


def _panel(axes: Axes, line: MemoryLine, ledger: CardLedger | None) -> None:
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    def column(name: str) -> Floats:
        return np.asarray(getattr(line, name), dtype=np.float64) / _GIB

    moments = np.asarray(line.t_s, dtype=np.float64)
    used, server, others, total = column("used"), column("server"), column("others"), column("total")
    known = np.nan_to_num(server) + np.nan_to_num(others)
    bands = {"server": server, "others": others, "rest": np.maximum(used - known, 0.0)}
    at = _chosen(line.t_s, used.tolist())
    bottom = np.zeros(len(at))
    for name, title, colour, strength in _BANDS:
        band = bands[name][at]
        if not np.nansum(band) > 0.002 * float(np.nanmax(total)):
            continue
        there = np.where(np.isfinite(used[at]), np.nan_to_num(band), np.nan)
        axes.fill_between(moments[at], bottom, bottom + there, color=colour, alpha=strength, linewidth=0, label=title)
        bottom = bottom + np.nan_to_num(band)
    axes.plot(moments[at], used[at], color=INK, linewidth=0.9, label="in use")
    for since, until in _pauses(line):
        axes.axvspan(since, until, facecolor=GRID, alpha=0.55, linewidth=0, label="not looked at")
    whole, most = float(np.nanmax(total)), float(np.nanmax(used))
    # a machine has many times what a server holds: drawn to its size nothing could be seen to move
    close = line.kind != GPU and most < 0.4 * whole
    if not close:
        axes.axhline(whole, color=MUTED, linewidth=0.8, label="all of it")
    if ledger is not None and isinstance(ledger.budget, Reading) and not close:
        axes.axhline(ledger.budget.number() / _GIB, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), label="the engine's share")
    axes.set_ylim(0, most * 1.25 if close else whole * 1.06)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=not close and whole > 4))
    head = f"{line.label}, GiB" + (f" (it has {whole:,.1f})" if close else "")
    axes.set_title(plain(head, 90), loc="left", fontsize=8, color=INK, pad=4)


def _chosen(t_s: Sequence[float], values: Sequence[float]) -> Any:
    """Return the indices that are drawn: at most about ``POINTS``, with the highest, the lowest and the gaps of each stretch."""
    import numpy as np

    if len(t_s) <= POINTS:
        return np.arange(len(t_s))
    moments, _ = thin(t_s, values, POINTS)
    return np.searchsorted(np.asarray(t_s), np.asarray(moments))


def _pauses(line: MemoryLine) -> list[tuple[float, float]]:
    """Return from when to when nothing was looked at: a row of NaN stands in the middle of each."""
    return [(line.t_s[i - 1], line.t_s[i + 1]) for i, value in enumerate(line.used) if math.isnan(value) and 0 < i < len(line.used) - 1]
