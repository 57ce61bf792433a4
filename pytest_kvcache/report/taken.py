"""The level taken apart, as the report shows it: what fills the pool over time, in one table, and whether the peak fits the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pytest_kvcache.analysis.accounting import Accounting
from pytest_kvcache.analysis.demand import Demand, LaneDemand
from pytest_kvcache.analysis.phases import Phases
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.report.escape import plain
from pytest_kvcache.report.model import SessionView, at_peak, is_probe, three_numbers
from pytest_kvcache.report.sections import Table
from pytest_kvcache.report.stacked import level_chart

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

MAX_LEVELS = 8
MAX_LANES = 40
MAX_COLUMNS = 12


@dataclass(frozen=True)
class Level:
    """One chart of a level: whose it is, how it is drawn, and what stands below it."""

    name: str
    side: str
    caption: str
    draw: Callable[[], str]
    notes: list[str] = field(default_factory=list)


def _windows(view: SessionView) -> list[tuple[str, str, Analysis]]:
    """Return the window with the highest peak of each load and side, with its accounting there."""
    found = []
    for profile in view.profiles():
        for side, _ in view.sides():
            windows = [a for a in view.of(profile, side) if isinstance(a.accounting, Accounting) and not is_probe(a)]
            peak = at_peak(windows)
            if peak is not None:
                found.append((profile, side, peak))
    return found


def _pool_slots(analysis: Analysis) -> float | None:
    values = analysis.values
    blocks, size, tokens = values.get("usable_blocks"), values.get("block_size"), values.get("pool_tokens")
    if analysis.timeline.unit == "blocks" and isinstance(blocks, Reading) and isinstance(size, Reading):
        return blocks.number() * size.number()
    return tokens.number() if analysis.timeline.unit == "tokens" and isinstance(tokens, Reading) else None


def levels(view: SessionView) -> list[Level]:
    """Return the levels that are drawn: of each load and side the window with the highest peak, at most ``MAX_LEVELS``."""
    found = []
    for number, (profile, side, analysis) in enumerate(_windows(view)):
        accounting = analysis.accounting
        # where nothing was held there is nothing to take apart; a model that is not known is said in the table
        if not isinstance(accounting, Accounting) or accounting.missing or not (accounting.whole.used > 0).any():
            continue
        spans = analysis.phases.spans if isinstance(analysis.phases, Phases) else ()
        numbers = three_numbers(analysis)
        label = f"{plain(profile, 60)} {side}: what fills the pool over time. {numbers}"
        draw = partial(level_chart, accounting.whole, spans, _pool_slots(analysis), key=f"p{number}", label=label)
        notes = [plain(note, 300) for note in accounting.notes]
        if any(span.name == "prefill" for span in spans):
            notes.append("Shaded below: at least as many requests read their prompt as decode.")
        found.append(Level(plain(profile, 60), side, numbers, draw, notes))
    return found[:MAX_LEVELS]


_ROWS = {
    "fill.mean": "fill: tokens of our requests over slots held, mean",
    "fill.at_peak": "fill at the highest level",
    "waste.rounding": "empty rest of last blocks",
    "waste.shared": "shared prefixes",
    "waste.reserved": "reserved ahead",
    "waste.not_ours": "held by requests that are not ours",
    "waste.unexplained": "not explained",
    "accounting.agreement": "samples explained within one step",
    "level.prompt": "prompts at the highest level, of one request each",
    "level.common": "shared by several requests, held once",
    "level.generated": "generated at the highest level",
    "live_length.mean": "mean length of what runs",
    "live_length.max": "longest of what runs",
    "phase.prefill": "time in which as many read their prompt as decode",
    "prefix.shared": "share of our prompts that repeats another",
    "prefix.saved": "prompt tokens that the prefix cache gave",
    "prefix.would_save": "prompt tokens that a prefix cache could give",
}


def payload_table(view: SessionView) -> Table:
    """Return fill and waste by cause, as shares of the slots held, with lengths and phases: a column for each load and side."""
    windows = _windows(view)[:MAX_COLUMNS]
    table = Table(["", *(plain(f"{profile}, {side}" if side else profile, 60) for profile, side, _ in windows)])
    if not windows:
        return table
    table.notes.append("Shares of the slots that were held. Shared prefixes are below zero: they are held once, and count for each request.")
    table.rows.append(["pool", *(table.missing(_stated(analysis, "pool_tokens", "pool_blocks"), "pool") for _, _, analysis in windows)])
    for name, title in _ROWS.items():
        table.rows.append([title, *(table.missing(analysis.values.get(name), title) for _, _, analysis in windows)])
    table.rows.append(["held while idle, after the load", *(table.missing(_left(analysis), "held while idle") for _, _, analysis in windows)])
    for profile, side, analysis in windows:
        where = plain(f"{profile}, {side}" if side else profile, 60)
        other = analysis.values.get("other_traffic.running")
        if isinstance(other, Reading) and other.number() >= 1:
            table.notes.append(f"{where}: up to {other.number():.0f} requests on the server were not ours.")
        if isinstance(analysis.demand, Demand):
            table.notes += [f"{where}: {plain(text, 300)}." for text in analysis.demand.happened[:4]]
    return table


def _stated(analysis: Analysis, *names: str) -> Value | None:
    values = [analysis.values.get(name) for name in names]
    return next((value for value in values if isinstance(value, Reading)), values[0])


def _left(analysis: Analysis) -> Value | None:
    blocks = analysis.values.get("leak.blocks")
    return analysis.values.get("leak.tokens") if isinstance(blocks, Missing) and blocks.cannot_happen else blocks


def demand_table(view: SessionView) -> Table:
    """Return what each lane asks for at its full length, how many of its largest requests the pool holds, and how many more would have fitted."""
    table = Table(
        ["load", "side", "lane", "largest request", "mean", "at once", "asked for at once", "pool of one server", "pool holds", "room left for"],
        labels=3,
    )
    for profile, side, analysis in _windows(view):
        demand = analysis.demand
        if not isinstance(demand, Demand):
            continue
        if demand.missing and demand.missing not in " ".join(table.notes):
            table.notes.append(plain(f"{profile}: {demand.missing}", 400))
        pool = f"{demand.usable:,.0f} {demand.unit}".strip() if demand.usable is not None else "—"
        for lane in demand.lanes[:MAX_LANES]:
            table.rows.append([plain(profile, 40), side or "measured", *_lane(table, lane, demand.unit, pool)])
    if table.rows:
        table.notes.insert(
            0, "Largest: prompt and planned answer in whole blocks. Room left: how many more of the largest would have fitted when fewest were free."
        )
    _drop_side(view, table)
    return table


def _lane(table: Table, lane: LaneDemand, unit: str, pool: str) -> Sequence[str]:
    fits = f"{lane.fits:,} of the largest" if lane.fits is not None else "—"
    room = table.missing(lane.headroom, "room left")
    return [
        plain(lane.lane, 40),
        f"{lane.needs:,.0f} {unit}".strip(),
        f"{lane.needs_mean:,.1f}",
        f"{lane.at_once:,}",
        f"{lane.peak:,.0f} {unit}".strip(),
        pool,
        fits,
        room.removesuffix(" requests"),
    ]


def _drop_side(view: SessionView, table: Table) -> None:
    if not view.compared:
        table.labels -= 1
        for row in (table.columns, *table.rows):
            del row[1]
