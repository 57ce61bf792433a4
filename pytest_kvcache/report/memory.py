"""Where the memory goes, what padding would waste, how evenly servers are used, and what a sweep found: the parts of report.html for these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_kvcache import units
from pytest_kvcache.analysis.balance import Idling
from pytest_kvcache.analysis.ledger import CardLedger, Part
from pytest_kvcache.analysis.sweep import sweep, variants_of
from pytest_kvcache.analysis.waste import together, waste
from pytest_kvcache.judge.search_file import read_search
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.report.escape import plain
from pytest_kvcache.report.model import SessionView, at_peak, is_probe, show_value
from pytest_kvcache.report.sections import Table

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

MAX_CARDS = 16
MAX_PROFILES = 6
WIDTH = 1000.0
_COLOURS = {
    "pool": "after", "weights": "payload", "rest": "waiting", "server": "before", "activation": "waiting", "graphs": "waiting", "workspace": "waiting",
    "context": "waiting", "others": "unsound", "unattributed": "muted", "reserved": "muted", "free": "grid",
}  # fmt: skip


@dataclass
class Bar:
    """One piece of a stacked bar: where it begins and how wide it is, of ``WIDTH`` units, its colour and what it is."""

    x: float
    width: float
    colour: str
    title: str
    faint: bool = False


@dataclass
class Ledger:
    """One card as the page shows it: a title, the bar with the line of the engine's share, rows of parts, sentences."""

    title: str
    side: str
    label: str
    bars: list[Bar] = field(default_factory=list)
    fence: float | None = None
    fence_text: str = ""
    rows: list[tuple[str, str, str, str, str, str]] = field(default_factory=list)
    text: str = ""
    notes: list[str] = field(default_factory=list)


def ledgers(view: SessionView) -> list[Ledger]:
    """Return the cards of each side, of the window in which it was fullest."""
    found: list[Ledger] = []
    for side, analyses in view.sides():
        peak = at_peak([analysis for analysis in analyses if analysis.ledgers])
        if peak is not None:
            found += [_ledger(one, side) for one in peak.ledgers[:MAX_CARDS]]
    return found


def _ledger(one: CardLedger, side: str) -> Ledger:
    total = one.total.bytes or 0.0
    shown = Ledger(plain(one.name, 120), side, plain(f"Memory of {one.name}: " + ", ".join(_phrase(part, total) for part in one.parts), 600))
    at = 0.0
    for part in one.parts:
        size = part.bytes or 0.0
        share = size / total if total else 0.0
        width = round(max(share * WIDTH, 1.5), 1)
        colour = _COLOURS.get(part.name, "muted")
        shown.bars.append(Bar(round(min(at, WIDTH - width), 1), width, colour, plain(_phrase(part, total), 200), part.name == "reserved"))
        at += share * WIDTH
        shown.rows.append(_row(part, colour, f"{share * 100:.1f} %"))
        if part.name == "rest":
            shown.rows += [_row(detail, "", "", "of which: ") for detail in one.details]
    if not one.parts:  # a log that does not say how large the card is
        shown.rows += [_row(part, "", "") for part in (one.pool, one.weights, *one.details) if isinstance(part.value, Reading)]
    unknown = [part for part in (one.pool, one.weights, one.server, one.others) if isinstance(part.value, Missing)]
    shown.rows += [_row(part, "", "") for part in unknown]
    if isinstance(one.budget, Reading) and total:
        shown.fence = round(min(one.budget.number() / total, 1.0) * WIDTH, 1)
        share_text = f"{one.utilization.number():g}, " if isinstance(one.utilization, Reading) else ""
        shown.fence_text = f"the engine may use up to the line: {share_text}{units.show(one.budget.number(), 'bytes')}"
    figures = (("free inside its share", one.idle_inside), ("free outside it", one.idle_outside), ("over its share", one.over_budget))
    text = plain(one.text.removeprefix(f"{one.name}: "), 900)
    shown.text = f"{text[:1].upper()}{text[1:]}."
    sizes = [f"{units.show(value.number(), 'bytes')} {title}" for title, value in figures if isinstance(value, Reading) and value.number()]
    shown.notes = [*([", ".join(sizes)] if sizes else []), *(plain(note, 400) for note in one.notes[:8])]
    if isinstance(one.highest_utilization, Reading):
        shown.notes.append(
            f"A share of up to {one.highest_utilization.number():.3f} would have started: {plain(one.highest_utilization.source, 200)}"
        )
    return shown


def _phrase(part: Part, total: float) -> str:
    share = f" ({(part.bytes or 0.0) / total * 100:.1f} %)" if total else ""
    return f"{part.title} {show_value(part.value)}{share}"


def _row(part: Part, colour: str, share: str, before: str = "") -> tuple[str, str, str, str, str, str]:
    """Return colour, title, size, share, how it is known, and from where (or why not)."""
    source = part.value.reason if isinstance(part.value, Missing) else part.value.source
    return colour, plain(before + part.title, 120), show_value(part.value) or "—", share, part.how, plain(source, 300)


def waste_table(view: SessionView) -> Table:
    """Return the payload share of each way of reserving, a column a load; the lengths are those that the judged side's requests reached."""
    judged = view.after if view.compared or not view.before else (*view.before, *view.after)
    loads: dict[str, list[Analysis]] = {}
    for analysis in judged:
        if not is_probe(analysis):  # variants of a sweep were pressed alike
            loads.setdefault(analysis.run.record.profile, []).append(analysis)
    known = {profile: one for profile, analyses in loads.items() if (one := together([a.lengths for a in analyses])).requests > 1}
    profiles = list(known)[:MAX_PROFILES]
    table = Table(["each request reserves", *(plain(profile, 40) for profile in profiles)])
    rows: dict[str, dict[str, str]] = {}
    for profile in profiles:
        limit = next((int(value.number()) for a in loads[profile] if isinstance(value := a.values.get("max_model_len"), Reading)), 0)
        for row in waste(known[profile], reserve=(limit,) if limit else ()):
            names = {
                "padded": "the longest length",
                "reserved": "the server's max length",
                "buckets": "its bucket's limit",
                "paged": f"pages, {row.detail}",
            }
            name = (
                names.get(row.scheme, f"its bucket's limit, {row.scheme}").replace(", best", ", the best").replace("pages, in blocks of", "pages of")
            )
            detail = f" ({row.detail.removeprefix('to the longest, ').removesuffix(' for each')})" if row.scheme != "paged" else ""
            share = f"{row.share.number() * 100:.0f} %{detail}" if isinstance(row.share, Reading) else f"— ({plain(row.share.reason, 100)})"
            rows.setdefault(name, {})[profile] = share
    table.rows = [[name, *(cells.get(profile, "") for profile in profiles)] for name, cells in rows.items()]
    for profile in profiles:
        one = known[profile]
        table.notes.append(f"{plain(profile, 60)}: {one.requests:,} requests, {one.mean:,.0f} tokens on average, the longest {one.longest:,}.")
    if table.rows:
        table.notes.insert(0, "Share of the reserved tokens that is payload, at the length that each request reached (prompt and output).")
    return table


def balance_table(view: SessionView) -> Table:
    """Return how far servers, ranks and cards lie apart in the window of each load in which they did most."""
    table = Table(["load", "side", "quantity", "most", "least", "highest over mean"], labels=3)
    for profile in view.profiles():
        for side, _ in view.sides():
            windows = [a for a in view.of(profile, side) if a.balance.spreads and not is_probe(a)]
            worst = max(windows, key=_unevenness, default=None)
            if worst is None:
                continue
            for spread in worst.balance.spreads:
                cells = [f"{show_value(Reading(spread.members[who], spread.unit, ''))} ({plain(who, 90)})" for who in (spread.highest, spread.lowest)]
                over = f"{spread.over_mean.number():.2f}" if isinstance(spread.over_mean, Reading) else "—"
                table.rows.append(
                    [plain(profile, 40), side or "measured", f"{plain(spread.title, 60)}, {len(spread.members)} {spread.kind}", *cells, over]
                )
            if isinstance(worst.balance.idling, Idling) and worst.balance.idling.share > 0:
                table.notes.append(plain(f"{profile}{f', {side}' if side else ''}: {worst.balance.idling.text}.", 300))
    if not view.compared:
        table.labels = 2
        for row in (table.columns, *table.rows):
            del row[1]
    if table.rows:
        table.notes.insert(0, "Means over the load; memory at its highest. An average of servers hides what this shows.")
    return table


def _unevenness(analysis: Analysis) -> float:
    value: Value = analysis.balance.usage_spread
    return value.number() if isinstance(value, Reading) else -1.0


def sweep_table(view: SessionView) -> Table:
    """Return the variants of a sweep side by side with the recommendation, an empty table where nothing was swept."""
    table = Table(["setting", "usage, peak", "payload in pages", "output rate", "TTFT p50", "CPU per 1,000 tokens", "preemptions", "rejected"])
    groups = variants_of(view.after) if read_search(view.folder) is None else {}  # levels of a search are no values of a setting
    record = next((analyses[0].run.record for analyses in groups.values()), None)
    if record is None:
        return table

    def margin(name: str, default: float) -> float:
        value = record.settings.get(name, {}).get("value", default)
        return float(value) if isinstance(value, int | float) else default

    margins = {name: margin(name, default) for name, default in (("usage_margin", 0.02), ("throughput_margin", 0.1), ("ttft_margin", 0.25))}
    found = sweep(groups, **margins)
    if found is None:
        return table
    for one in found.variants:
        figures = (one.usage, one.payload_share, one.throughput, one.ttft, one.cpu, one.preemptions, one.rejections)
        mark = ", recommended" if one.name == found.recommended else ""
        table.rows.append([plain(one.name, 60) + mark, *(figure.text for figure in figures)])
    table.notes = [*(plain(f"{one.name}: {one.beside}", 400) for one in found.variants), plain(found.text, 900), plain(found.rests_on, 600)]
    return table
