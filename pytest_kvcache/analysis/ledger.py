"""Reconciliation 1, the pool against the card: where the memory of one card goes, and whether the pool is as large as it should be.

Every part says how it is known: measured (NVML, DCGM, the kernel), stated (start-up log, the server), computed from the others, or
unknown with the reason. The parts of a ledger are disjoint and add up to the card. Without a card the same is said of the machine's
memory and the server's processes on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pytest_kvcache import units
from pytest_kvcache.analysis.card_parts import (
    COMPUTED,
    DETAILS,
    GPU,
    HOST,
    MEASURED,
    ROUNDING,
    STATED,
    TITLES,
    UNKNOWN,
    CardLedger,
    Facts,
    Part,
    show,
)
from pytest_kvcache.analysis.squeeze import with_reasons
from pytest_kvcache.quantities import Missing, Reading, Value

__all__ = ["COMPUTED", "GPU", "HOST", "MEASURED", "STATED", "UNKNOWN", "CardLedger", "Facts", "Part", "reconcile"]


def reconcile(facts: Facts) -> CardLedger:
    """Return the ledger of one card. Never raises; what is not known is Missing with the reason, and nothing is guessed."""
    measured, stated = facts.measured, facts.stated
    total = _part("total", measured, MEASURED)
    if total.bytes is None and isinstance(stated.get("total"), Reading):
        total = _part("total", stated, STATED)
    free, used = _part("free", measured, MEASURED), _part("used", measured, MEASURED)
    reserved, server = _part("reserved", measured, MEASURED), _part("server", measured, MEASURED)
    pool, weights = _held("pool", facts), _held("weights", facts)
    details = tuple(part for name in DETAILS if (part := _part(name, stated, STATED)).bytes is not None)
    others = _others(measured, used, server, facts.kind)
    notes = list(facts.notes)
    rest, parts = _split(facts, total, free, reserved, server, others, pool, weights, details, notes)
    utilization, budget = _share(stated, total, facts)
    if facts.kind == HOST and isinstance(budget, Reading) and not isinstance(stated.get("budget"), Reading) and _elsewhere(server, weights):
        budget = Missing("its processes hold less of the machine's memory than its weights alone: they lie on cards that nobody reads here")
    expected = _less(budget, weights, "the share of the card less the weights" + (" as computed" if weights.how == COMPUTED else ""))
    squeezed = _squeezed(expected, pool, weights, facts)
    outside = _idle_outside(free, budget, server, pool, weights)
    ledger = CardLedger(
        facts.name,
        facts.kind,
        facts.wall_s,
        total,
        used,
        free,
        server,
        others,
        pool,
        weights,
        rest,
        details,
        parts,
        utilization,
        budget,
        expected,
        squeezed,
        outside,
        outside
        if isinstance(outside, Missing)
        else Reading((free.bytes or 0.0) - outside.number(), "bytes", "free memory within the engine's share"),
        _over(budget, pool, weights, details, stated),
        _highest(stated, total),
        notes=tuple(notes),
    )
    return with_reasons(ledger, facts)


def _part(name: str, values: Mapping[str, Value], how: str) -> Part:
    value = values.get(name)
    if value is None:
        value = Missing(f"{TITLES[name]}: {'not measured' if how == MEASURED else 'no start-up log states it'}")
    return Part(name, TITLES[name], value, how if isinstance(value, Reading) else UNKNOWN)


def _held(name: str, facts: Facts) -> Part:
    """Return pool or weights: as the log or the server states them, else as they follow from the model's files."""
    part = _part(name, facts.stated, STATED)
    value = facts.computed.get(name)
    if part.bytes is not None or value is None:
        return part
    if isinstance(value, Missing):
        # what would tell it: the log, or why the files do not
        return dataclasses.replace(part, value=Missing(f"{part.value.reason if isinstance(part.value, Missing) else ''}; {value.reason}"))
    return Part(name, TITLES[name], value, COMPUTED, facts.spread.get(name, 0.0))


def _computed(name: str, size: float, source: str, title: str = "") -> Part:
    return Part(name, title or TITLES[name], Reading(float(size), "bytes", source), COMPUTED)


def _others(measured: Mapping[str, Value], used: Part, server: Part, kind: str) -> Part:
    told = _part("others", measured, MEASURED)
    if told.bytes is not None or kind == GPU or used.bytes is None or server.bytes is None:
        return told
    return _computed("others", max(used.bytes - server.bytes, 0.0), "used less this server's processes")


def _split(
    facts: Facts,
    total: Part,
    free: Part,
    reserved: Part,
    server: Part,
    others: Part,
    pool: Part,
    weights: Part,
    details: Sequence[Part],
    notes: list[str],
) -> tuple[Part, tuple[Part, ...]]:
    """Return the rest of the server, and the disjoint parts that add up to the total."""
    nothing = Part("rest", TITLES["rest"], Missing("what this server's processes hold is not known"), UNKNOWN)
    if total.bytes is None:
        return nothing, ()
    known = [part for part in (pool, weights) if part.bytes is not None]
    spoken = sum(part.bytes or 0.0 for part in known)
    lacking = [part.title for part in (pool, weights) if part.bytes is None]
    outside = [part for part in (others, reserved, free) if part.bytes]
    if server.bytes is None:
        # who holds what is not told: what the log states stands apart, and everything else in use is one part
        if free.bytes is None:
            outside = [part for part in outside if part.name != "others"]
        stated = [*known, *details]
        left = total.bytes - sum(part.bytes or 0.0 for part in (*stated, *outside))
        if left < 0:
            stated, left = [], total.bytes - sum(part.bytes or 0.0 for part in outside)
            if any(part.how == COMPUTED for part in known):
                notes.append(
                    "pool and weights as computed are more than the card has in use: the model named, or the number of its GPUs, is not this server's"
                )
            else:
                notes.append("the start-up log states more than the card has in use: it is of another start, or not all of it was touched yet")
        what = "everything else in use" if free.bytes is not None else "everything else, in use or free"
        apart = [*stated, _computed("unattributed", left, "the total less the other parts", what)] if left else stated
        return nothing, (*apart, *outside)
    left = server.bytes - spoken
    if known and left < -ROUNDING - sum(part.spread for part in known):
        stated_bytes = units.show(spoken, "bytes")
        computed = any(part.how == COMPUTED for part in known)
        why = "the model named is not this server's, it has more GPUs than were seen," if computed else "the log is of another start,"
        notes.append(
            f"pool and weights are {'computed' if computed else 'stated'} as {stated_bytes} and this server's processes hold {show(server.value)}:"
            f" {why} or memory was not touched yet"
        )
        known, left, rest = [], server.bytes, nothing
    else:
        left = max(left, 0.0)
        title = ", ".join([TITLES["rest"], *lacking[:-1]]) + (f" and {lacking[-1]}" if lacking else "")
        without = f"this server's processes less {' and '.join(part.title for part in known)}" if known else "all that this server's processes hold"
        rest = _computed("rest", left, without, title)
    body = [*known, rest] if rest.bytes is not None else [Part("server", TITLES["server"], server.value, server.how)]
    gap = total.bytes - sum(part.bytes or 0.0 for part in (*body, *outside))
    if gap > 0:
        unnamed = "in use or free, not told apart" if free.bytes is None else TITLES["unattributed"]
        body.append(_computed("unattributed", gap, "the total less the other parts", unnamed))
    elif gap < 0:
        # rounding of the log, or figures of two moments: the part that is computed anyway bears it, so that the sum holds
        body, outside = _absorb(body, outside, gap)
    return rest, tuple(part for part in (*body, *outside) if part.bytes)


def _absorb(body: list[Part], outside: list[Part], gap: float) -> tuple[list[Part], list[Part]]:
    parts = [*body, *outside]
    order = sorted(range(len(parts)), key=lambda i: (parts[i].how != COMPUTED, -(parts[i].bytes or 0.0)))
    for index in order:
        size = parts[index].bytes or 0.0
        taken = min(size, -gap)
        parts[index] = Part(parts[index].name, parts[index].title, Reading(size - taken, "bytes", "so that the parts add up to the total"), COMPUTED)
        gap += taken
        if gap >= 0:
            break
    return parts[: len(body)], parts[len(body) :]


def _share(stated: Mapping[str, Value], total: Part, facts: Facts) -> tuple[Value, Value]:
    """Return the utilization and the bytes that the engine may use."""
    utilization = stated.get("utilization", Missing("the server does not state its share of the card"))
    budget = stated.get("budget")
    if not facts.has_share:
        never = Missing("this engine sizes its pool by tokens and not by a share of the card")
        return never, never
    if facts.kind == HOST and facts.by_hand:
        return utilization, Missing("the pool was set by hand, and a share of the machine decides nothing")
    if isinstance(budget, Reading):
        return utilization, budget
    if isinstance(utilization, Missing) or (total.bytes is None and not (facts.share_of_free and isinstance(stated.get("free_at_start"), Reading))):
        return utilization, utilization if isinstance(utilization, Missing) else Missing("the size of the card is not known")
    free = stated.get("free_at_start")
    if facts.share_of_free and isinstance(free, Reading):
        return utilization, Reading(utilization.number() * free.number(), "bytes", f"{utilization.number():g} x what was free at the start")
    return utilization, Reading(utilization.number() * (total.bytes or 0.0), "bytes", f"{utilization.number():g} x the card's total")


def _elsewhere(server: Part, weights: Part) -> bool:
    """Return whether a server's memory is not the machine's: cards of another maker, or whose driver's library is not here."""
    return server.bytes is not None and weights.bytes is not None and server.bytes < weights.bytes


def _less(budget: Value, part: Part, source: str) -> Value:
    if isinstance(budget, Missing):
        return budget
    if isinstance(part.value, Missing):
        return Missing(f"{part.title}: {part.value.reason}" if not part.value.reason.startswith(part.title) else part.value.reason)
    return Reading(max(budget.number() - part.value.number(), 0.0), "bytes", source)


def _squeezed(expected: Value, pool: Part, weights: Part, facts: Facts) -> Value:
    if facts.kind == HOST and facts.by_hand:
        return Missing(f"the pool was set by hand ({facts.by_hand}), and the machine's memory has other uses")
    if isinstance(expected, Missing):
        return expected
    if isinstance(pool.value, Missing):
        return pool.value
    lacking = expected.number() - pool.value.number()
    # a computed figure that may be off by more than what is lacking proves no squeeze
    unsure = ROUNDING + pool.spread + weights.spread
    source = "the expected pool less the real one" + (f", ± {units.show(unsure - ROUNDING, 'bytes')}" if unsure > ROUNDING else "")
    return Reading(lacking if lacking > unsure else 0.0, "bytes", source)


def _idle_outside(free: Part, budget: Value, server: Part, pool: Part, weights: Part) -> Value:
    """Return the free memory that the engine may not take: what is free beyond the rest of its share."""
    if isinstance(free.value, Missing):
        return free.value
    if isinstance(budget, Missing):
        return budget
    held = server.bytes
    source = "free memory beyond what the engine's share still leaves to it"
    if held is None:
        held = sum(part.bytes or 0.0 for part in (pool, weights))
        source += ", a lower bound: what its processes hold is not known"
    return Reading(max(free.value.number() - max(budget.number() - held, 0.0), 0.0), "bytes", source)


def _over(budget: Value, pool: Part, weights: Part, details: Sequence[Part], stated: Mapping[str, Value]) -> Value:
    """Return by how much the parts that the log states exceed the share: a pool that was sized before the graphs were there."""
    if isinstance(budget, Missing):
        return budget
    if pool.how == COMPUTED:
        return Missing("the start-up log does not state the pool")
    held = weights.bytes if weights.how != COMPUTED else None
    if held is None and isinstance(consumed := stated.get("consumed"), Reading):
        held, details = consumed.number(), [part for part in details if part.name != "context"]
    if held is None or pool.bytes is None:
        return Missing("the start-up log does not state weights and pool")
    over = held + pool.bytes + sum(part.bytes or 0.0 for part in details) - budget.number()
    return Reading(over if over > ROUNDING else 0.0, "bytes", "weights, pool and what the log states of the rest, less the share of the card")


def _highest(stated: Mapping[str, Value], total: Part) -> Value:
    free = stated.get("free_at_start")
    if not isinstance(free, Reading) or not total.bytes:
        return Missing("the start-up log does not state how much was free at the start")
    return Reading(free.number() / total.bytes, "ratio", f"{show(free)} of {show(total.value)} were free at the start")
