"""The three reconciliations of one Run in sentences: pool against card, payload against usage, peak against pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_kvcache import units
from pytest_kvcache.analysis.accounting import Accounting
from pytest_kvcache.analysis.demand import Demand
from pytest_kvcache.analysis.holding import GROUPING, Footprint
from pytest_kvcache.analysis.memory_seen import course
from pytest_kvcache.quantities import Missing, Reading, Value

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

MOST_LINES = 12
MOST_NOTES = 4
NAMES = ("pool against card", "payload against usage", "peak against pool")
_MOVED = 64 << 20
_WASTES = {
    "waste.rounding": "empty ends of last blocks",
    "waste.shared": "prefixes held once",
    "waste.reserved": "reserved ahead",
    "waste.not_ours": "held by requests that are not ours",
    "waste.held_after": "held after the request ended",
    "waste.unexplained": "not explained",
}


@dataclass(frozen=True)
class Reconciliation:
    """One of the three: its name, what was found in sentences, and what could not be told with what would tell it (empty: nothing)."""

    name: str
    lines: tuple[str, ...]
    lacking: str = ""


def reconciliations(analysis: Analysis) -> tuple[Reconciliation, Reconciliation, Reconciliation]:
    """Return the three, always in this order. What is not known is said, never left out."""
    return _card(analysis), _payload(analysis), _peak(analysis)


def _say(analysis: Analysis, name: str) -> str:
    value = analysis.values.get(name, Missing("not measured"))
    return units.show(value.value, value.unit) if isinstance(value, Reading) else "an unknown number"


def _card(analysis: Analysis) -> Reconciliation:
    lines: list[str] = []
    for ledger in analysis.ledgers[:MOST_LINES]:
        lines.append(ledger.text)
        if ledger.parts:
            lines.append(", ".join(f"{part.title} {units.show_bytes(part.bytes or 0.0)} ({part.how})" for part in ledger.parts))
        if isinstance(ledger.idle_outside, Reading) and ledger.idle_outside.number() > 0:
            lines.append(f"{units.show_bytes(ledger.idle_outside.number())} are free and outside the engine's share")
        lines += ledger.notes[:MOST_NOTES]
    lines += _moved(analysis)
    lacking = ""
    if not analysis.ledgers:
        lacking = (
            "no card, no process of the server and no start-up log was seen; the log (--log FILE), DCGM (--dcgm-url), "
            "or looking from the server's own machine would tell it"
        )
    elif all(isinstance(ledger.squeezed, Missing) for ledger in analysis.ledgers) and any(
        isinstance(part.value, Missing) for ledger in analysis.ledgers for part in (ledger.pool, ledger.weights)
    ):
        unknown = {part.title for ledger in analysis.ledgers for part in (ledger.weights, ledger.pool) if isinstance(part.value, Missing)}
        named = " and ".join(sorted(unknown, reverse=True))
        with_log = any(worker.parts for worker in analysis.run.record.start_memory)
        lacking = f"the start-up log does not state {named}" if with_log else f"the server's start-up log would tell {named} (--log FILE)"
        if not analysis.run.record.model_parts and analysis.run.record.engine in GROUPING:
            lacking += "; the model's folder would let it be computed (--kv-model-config, of diagnose --model-config)"
    return Reconciliation(NAMES[0], tuple(lines), lacking)


def _moved(analysis: Analysis) -> list[str]:
    """Return how memory moved over the window, where it did."""
    said = []
    for line in (*analysis.timeline.cards, *analysis.timeline.hosts)[:MOST_LINES]:
        server = course(line, "server") or course(line, "used")
        if server is None or server.most - server.least < _MOVED:
            continue
        whose = "this server's processes" if course(line, "server") is not None else "what is in use"
        said.append(
            f"{line.label}: {whose} went from {units.show_bytes(server.first)} to {units.show_bytes(server.last)} over the window, at most"
            f" {units.show_bytes(server.most)}"
        )
    return said


def _payload(analysis: Analysis) -> Reconciliation:
    sent = analysis.values.get("requests.sent")
    running, slots = analysis.values.get("running.peak"), analysis.values.get("slots.per_request")
    if not isinstance(sent, Reading) or not sent.number():
        lines = [f"usage up to {_say(analysis, 'usage.peak')} with at most {_say(analysis, 'running.peak')} running"]
        if isinstance(slots, Reading) and isinstance(running, Reading) and running.number():
            shape = analysis.accounting.footprint if isinstance(analysis.accounting, Accounting) else None
            bound = ": its length is at most that" if isinstance(shape, Footprint) and shape.full else ""
            held = f"a running request held {units.show(round(slots.number()), 'tokens')} of the pool on average at the highest level{bound}"
            lines.append(held if bound else f"{held}; window or state layers hide its length")
        return Reconciliation(
            NAMES[1],
            tuple(lines),
            "how many tokens the requests really have: there is no request log; a load of ours (pytest-kvcache load), or its Run, would tell it",
        )
    accounting = analysis.accounting
    if isinstance(accounting, Missing) or isinstance(analysis.values.get("fill.mean"), Missing):
        value: Value = analysis.values.get("fill.mean", Missing("not measured"))
        reason = accounting.reason if isinstance(accounting, Missing) else value.reason if isinstance(value, Missing) else ""
        return Reconciliation(NAMES[1], (f"our requests had at least {_say(analysis, 'payload.peak')} in the cache at their most",), reason)
    lines = [
        f"{_say(analysis, 'fill.mean')} of the slots held carried a token of ours ({_say(analysis, 'fill.at_peak')} at the highest level); "
        f"running requests had {_say(analysis, 'live_length.mean')} on average, {_say(analysis, 'live_length.max')} at most"
    ]
    wastes = [(title, share) for name, title in _WASTES.items() if isinstance(share := analysis.values.get(name), Reading)]
    told = [f"{title} {units.show(share.value, 'ratio')}" for title, share in wastes if abs(share.number()) >= 0.005]
    if told:
        lines.append("of the slots held: " + ", ".join(told))
    lines.append(
        f"at the highest level: prompts {_say(analysis, 'level.prompt')}, generated {_say(analysis, 'level.generated')}, shared {_say(analysis, 'level.common')}"
    )
    lacking = accounting.missing if isinstance(accounting, Accounting) else ""
    return Reconciliation(NAMES[1], tuple(lines), lacking)


def _peak(analysis: Analysis) -> Reconciliation:
    demand = analysis.demand
    room = analysis.values.get("nearmax.room", Missing("not measured"))
    lines: list[str] = []
    if isinstance(room, Reading):
        lines.append(
            f"beside the mean level of {_say(analysis, 'usage.mean')} there is room for {units.show(round(room.number(), 2), 'requests')} "
            f"of {_say(analysis, 'max_model_len')}"
        )
    if isinstance(demand, Demand):
        for lane in demand.lanes[:MOST_LINES]:
            fits = f"an empty pool holds {lane.fits:,}" if lane.fits is not None else "how many the pool holds is not known"
            left = f", and {lane.headroom.number():,.0f} more would have fitted at the tightest moment" if isinstance(lane.headroom, Reading) else ""
            lines.append(
                f"{lane.lane}: the largest request needs {lane.needs:,.0f} {demand.unit}, {lane.at_once:,} were there at once; {fits} of the largest{left}"
            )
        if demand.lanes:
            lines.append(f"asked for at once: {_say(analysis, 'demand.peak')} of one server's pool")
        lines += demand.happened[:MOST_LINES]
    sent = analysis.values.get("requests.sent")
    if not isinstance(sent, Reading) or not sent.number():
        happened = analysis.values["preemptions"]
        never = isinstance(happened, Missing) and happened.cannot_happen
        put_back = "this engine puts none back" if never else f"{_say(analysis, 'preemptions')} of preemption in the window"
        lines.append(f"at most {_say(analysis, 'waiting.peak')} waited, {put_back}")
        return Reconciliation(
            NAMES[2], tuple(lines), "how long the longest requests are and how many come at once: a request log or a plan would tell it"
        )
    missing = demand.reason if isinstance(demand, Missing) else demand.missing
    return Reconciliation(NAMES[2], tuple(lines), missing or (room.reason if isinstance(room, Missing) else ""))
