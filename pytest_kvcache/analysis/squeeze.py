"""Why a pool is smaller than share and weights leave: what took the bytes, and what else about a card does not add up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pytest_kvcache import units
from pytest_kvcache.analysis.card_parts import HOST, ROUNDING, CardLedger, Facts, Part, show
from pytest_kvcache.quantities import Reading, Value


def with_reasons(ledger: CardLedger, facts: Facts) -> CardLedger:
    """Return the ledger with what took the squeezed bytes, the largest first, and notes on what else does not add up."""
    notes = list(ledger.notes)
    stated = facts.stated
    if isinstance(ledger.over_budget, Reading) and ledger.over_budget.number():
        notes.append(f"what the log states is {show(ledger.over_budget)} over the share of the card ({show(ledger.budget)})")
    if isinstance(ledger.budget, Reading) and ledger.weights.bytes and ledger.weights.bytes > ledger.budget.number():
        free = stated.get("free_at_start")
        whole = free.number() if facts.share_of_free and isinstance(free, Reading) else ledger.total.bytes
        least = f": the share would have to be above {ledger.weights.bytes / whole:.3f}" if whole else ""
        notes.append(f"the weights alone ({show(ledger.weights.value)}) exceed the share of the card ({show(ledger.budget)}){least}")
    held_before = _held_before(stated, ledger.total)
    if held_before:
        notes.append(f"{units.show(held_before, 'bytes')} of the card were in use before the server started")
    notes += _of_hand(ledger, facts)
    notes += _of_graphs(stated)
    notes += _of_share(ledger, facts)
    if not isinstance(ledger.squeezed, Reading) or not ledger.squeezed.number():
        return _replaced(ledger, (), tuple(notes))
    return _replaced(ledger, _causes(ledger, facts, ledger.squeezed.number(), held_before), tuple(notes))


def _causes(ledger: CardLedger, facts: Facts, squeezed: float, held_before: float) -> tuple[str, ...]:
    """Return what took the squeezed bytes, the largest first. What is measured and not stated explains no more than what is left."""
    causes: list[tuple[float, str]] = []
    stated, left = facts.stated, squeezed
    allowed = stated.get("pool_allowed")
    gap = allowed.number() - (ledger.pool.bytes or 0.0) if isinstance(allowed, Reading) else 0.0
    if facts.by_hand:
        # where the log does not say what had been found for the pool, nothing was: vLLM then measures no memory
        chosen = gap if isinstance(allowed, Reading) and gap > 0 else left
        causes.append((float("inf"), f"a pool that was set by hand ({facts.by_hand})"))
        left -= chosen
    elif gap > ROUNDING:
        causes.append((gap, f"another worker that has room for {units.show(gap, 'bytes')} less, while all hold as many blocks"))
        left -= gap
    named = 0.0
    for part in ledger.details:
        named += part.bytes or 0.0
        if part.name != "graphs" and left > ROUNDING / 6:
            causes.append((part.bytes or 0.0, f"{part.title} {show(part.value)}"))
            left -= part.bytes or 0.0
    graphs = next((part for part in ledger.details if part.name == "graphs"), None)
    planned = stated.get("graphs_planned")
    if isinstance(planned, Reading) and left > ROUNDING / 6:
        causes.append((planned.number(), f"room kept for graphs {show(planned)}"))
        left -= planned.number()
    elif graphs is not None and not facts.share_of_free and left > ROUNDING:
        # graphs are captured after the pool was sized: without a plan for them they explain only what nothing else does
        size = min(graphs.bytes or 0.0, left)
        causes.append((size, f"{graphs.title} {units.show(size, 'bytes')}"))
        left -= size
    if ledger.rest.bytes and (further := min(ledger.rest.bytes - named, left)) > ROUNDING:
        title = f"further {ledger.rest.title}" if ledger.details else ledger.rest.title
        causes.append((further, f"{title} {units.show(further, 'bytes')}"))
        left -= further
    # what others hold beside the share costs the pool nothing: they count only for what nothing else explains
    others = ledger.others.bytes or held_before
    if left > ROUNDING and others:
        causes.append((min(left, others), f"other processes {units.show(min(left, others), 'bytes')}"))
        left -= min(left, others)
    idle = ledger.idle_inside.number() if isinstance(ledger.idle_inside, Reading) else 0.0
    if left > ROUNDING and idle > ROUNDING:
        causes.append((min(left, idle), f"{units.show(min(left, idle), 'bytes')} of the share that nothing holds"))
        left -= min(left, idle)
    if left > max(ROUNDING, 0.05 * squeezed):
        causes.append((left, f"{units.show(left, 'bytes')} that neither log nor card explains"))
    causes.sort(key=lambda cause: -cause[0])
    return tuple(text for size, text in causes if size > ROUNDING / 6)


def _of_hand(ledger: CardLedger, facts: Facts) -> list[str]:
    """Return what a pool that was set by hand leaves unused of the memory that was found for it, or takes beyond it."""
    allowed = facts.stated.get("pool_allowed")
    if not facts.by_hand or not isinstance(allowed, Reading) or ledger.pool.bytes is None:
        return []
    unused = allowed.number() - ledger.pool.bytes
    if abs(unused) <= max(1 << 20, 0.01 * allowed.number()):
        return []
    if unused > 0:
        return [
            f"the pool was set by hand ({facts.by_hand}) and takes {show(ledger.pool.value)} of the {show(allowed)} that was found or asked for it:"
            f" {units.show(unused, 'bytes')} of that are no part of the pool"
        ]
    return [
        f"the pool was set by hand ({facts.by_hand}) and takes {show(ledger.pool.value)}, {units.show(-unused, 'bytes')} more than the {show(allowed)}"
        " that was found for it: the server may run out of memory"
    ]


def _of_graphs(stated: Mapping[str, Value]) -> list[str]:
    """Return by how much the graphs outgrew, or undercut, the room that was kept for them when the pool was sized."""
    graphs, planned = stated.get("graphs"), stated.get("graphs_planned")
    if not isinstance(graphs, Reading) or not isinstance(planned, Reading):
        return []
    more = graphs.number() - planned.number()
    if abs(more) <= ROUNDING:
        return []
    told = f"graphs took {show(graphs)} and {show(planned)} were kept for them when the pool was sized"
    return [f"{told}: {units.show(abs(more), 'bytes')} {'beyond the share' if more > 0 else 'of the share lie unused'}"]


def _of_share(ledger: CardLedger, facts: Facts) -> list[str]:
    """Return what a share below the engine's default keeps from the pool: no squeeze, and the same for the traffic."""
    if not facts.usual_share or not isinstance(ledger.utilization, Reading) or facts.kind == HOST or not ledger.total.bytes:
        return []
    more = (facts.usual_share - ledger.utilization.number()) * ledger.total.bytes
    if more <= max(ROUNDING, 0.05 * ledger.total.bytes):
        return []
    free = (
        f", of which {show(ledger.idle_outside)} are free now"
        if isinstance(ledger.idle_outside, Reading) and ledger.idle_outside.number() < more
        else ""
    )
    return [
        f"the share of {ledger.utilization.number():g} is below the engine's default of {facts.usual_share:g}, which would be"
        f" {units.show(more, 'bytes')} more of the card{free}"
    ]


def _held_before(stated: Mapping[str, Value], total: Part) -> float:
    free = stated.get("free_at_start")
    held = total.bytes - free.number() if isinstance(free, Reading) and total.bytes else 0.0
    return held if held > ROUNDING else 0.0


def _replaced(ledger: CardLedger, reasons: tuple[str, ...], notes: tuple[str, ...]) -> CardLedger:
    return dataclasses.replace(ledger, reasons=reasons, notes=notes)
