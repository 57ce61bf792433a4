"""Reconciliation 1, the pool against the card: where the memory of one card goes, and whether the pool is as large as it should be.

Every part says how it is known: measured (NVML, DCGM, the kernel), stated (start-up log, the server), computed from the others, or
unknown with the reason. The parts of a ledger are disjoint and add up to the card. Without a card the same is said of the machine's
memory and the server's processes on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_kvcache import units
from pytest_kvcache.quantities import Missing, Reading, Value

MEASURED, STATED, COMPUTED, UNKNOWN = "measured", "stated", "computed", "unknown"
GPU, HOST = "gpu", "host"

# Figures of a log are printed in GiB with two decimals each, and several of them are added up.
_ROUNDING = 0.06 * (1 << 30)
_TITLES = {
    "pool": "KV pool", "weights": "weights", "rest": "graphs, workspace, context", "others": "other processes", "reserved": "kept by the driver",
    "unattributed": "in use, of no process that the driver names", "free": "free", "activation": "activation peak", "graphs": "graphs",
    "context": "context and libraries", "workspace": "workspace", "server": "this server", "total": "total", "used": "used",
}  # fmt: skip
DETAILS = ("activation", "graphs", "workspace", "context")


@dataclass(frozen=True)
class Part:
    """One part of a card's memory in bytes. ``how`` is measured, stated, computed or unknown; an unknown part's value is Missing."""

    name: str
    title: str
    value: Value
    how: str

    @property
    def bytes(self) -> float | None:
        """The size; None where it is unknown."""
        return self.value.number() if isinstance(self.value, Reading) else None


@dataclass(frozen=True)
class Facts:
    """What is known of one card before it is reconciled: ``measured`` by name of part, ``stated`` by the start-up log or the server.

    ``measured`` knows total, used, free, reserved, server, others; ``stated`` knows pool, weights, activation, graphs, workspace, context,
    budget, utilization, total, free_at_start, pool_allowed, consumed. ``by_hand`` says how the pool's size was set, "" where the engine chose.
    ``share_of_free``: the utilization is a share of what was free at the start (SGLang), and not of the card.
    """

    name: str
    kind: str
    measured: Mapping[str, Value] = field(default_factory=dict)
    stated: Mapping[str, Value] = field(default_factory=dict)
    by_hand: str = ""
    has_share: bool = True
    share_of_free: bool = False
    wall_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CardLedger:
    """The memory of one card (or of the machine: ``kind`` host), reconciled.

    ``parts`` are disjoint and add up to ``total``; ``details`` are what the log states of the rest. ``expected_pool`` is the share of the card that
    the engine may use less the weights; ``squeezed`` what the pool lacks of it, ``reasons`` why. ``idle_outside`` is free memory that the engine may
    not take, ``idle_inside`` the other free memory: its share, unused; ``over_budget`` what was taken beyond the share; ``highest_utilization`` what the free memory at the start would have borne.
    """

    name: str
    kind: str
    wall_s: float
    total: Part
    used: Part
    free: Part
    server: Part
    others: Part
    pool: Part
    weights: Part
    rest: Part
    details: tuple[Part, ...]
    parts: tuple[Part, ...]
    utilization: Value
    budget: Value
    expected_pool: Value
    squeezed: Value
    idle_outside: Value
    idle_inside: Value
    over_budget: Value
    highest_utilization: Value
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The reconciliation in one sentence, with its numbers."""
        if isinstance(self.squeezed, Missing):
            return f"{self.name}: whether the pool is squeezed is not known: {self.squeezed.reason}"
        pool, expected = _show(self.pool.value), _show(self.expected_pool)
        if not self.squeezed.number():
            return f"{self.name}: the pool of {pool} is what share and weights leave ({expected})"
        why = "; ".join(self.reasons) or "what was neither measured nor stated"
        return f"{self.name}: the pool is {pool} of the {expected} that share and weights leave: squeezed by {_show(self.squeezed)} because of {why}"


def reconcile(facts: Facts) -> CardLedger:
    """Return the ledger of one card. Never raises; what is not known is Missing with the reason, and nothing is guessed."""
    measured, stated = facts.measured, facts.stated
    total = _part("total", measured, MEASURED)
    if total.bytes is None and isinstance(stated.get("total"), Reading):
        total = _part("total", stated, STATED)
    free, used = _part("free", measured, MEASURED), _part("used", measured, MEASURED)
    reserved, server = _part("reserved", measured, MEASURED), _part("server", measured, MEASURED)
    pool, weights = _part("pool", stated, STATED), _part("weights", stated, STATED)
    details = tuple(part for name in DETAILS if (part := _part(name, stated, STATED)).bytes is not None)
    others = _others(measured, used, server, facts.kind)
    notes = list(facts.notes)
    rest, parts = _split(facts, total, free, reserved, server, others, pool, weights, details, notes)
    utilization, budget = _share(stated, total, facts)
    expected = _less(budget, weights, "the share of the card less the weights")
    squeezed = _squeezed(expected, pool, facts)
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
    return _with_reasons(ledger, facts)


def _show(value: Value) -> str:
    return units.show(value.value, value.unit) if isinstance(value, Reading) else "an unknown size"


def _part(name: str, values: Mapping[str, Value], how: str) -> Part:
    value = values.get(name)
    if value is None:
        value = Missing(f"{_TITLES[name]}: {'not measured' if how == MEASURED else 'no start-up log states it'}")
    return Part(name, _TITLES[name], value, how if isinstance(value, Reading) else UNKNOWN)


def _computed(name: str, size: float, source: str, title: str = "") -> Part:
    return Part(name, title or _TITLES[name], Reading(float(size), "bytes", source), COMPUTED)


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
    nothing = Part("rest", _TITLES["rest"], Missing("what this server's processes hold is not known"), UNKNOWN)
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
            notes.append("the start-up log states more than the card has in use: it is of another start, or not all of it was touched yet")
        what = "everything else in use" if free.bytes is not None else "everything else, in use or free"
        apart = [*stated, _computed("unattributed", left, "the total less the other parts", what)] if left else stated
        return nothing, (*apart, *outside)
    left = server.bytes - spoken
    if known and left < -_ROUNDING:
        stated_bytes = units.show(spoken, "bytes")
        notes.append(
            f"pool and weights are stated as {stated_bytes} and this server's processes hold {_show(server.value)}:"
            " the log is of another start, or memory was not touched yet"
        )
        known, left, rest = [], server.bytes, nothing
    else:
        left = max(left, 0.0)
        title = _TITLES["rest"] + (f" and {' and '.join(lacking)}" if lacking else "")
        rest = _computed("rest", left, "this server's processes less " + (" and ".join(part.title for part in known) or "nothing"), title)
    body = [*known, rest] if rest.bytes is not None else [Part("server", _TITLES["server"], server.value, server.how)]
    gap = total.bytes - sum(part.bytes or 0.0 for part in (*body, *outside))
    if gap > 0:
        unnamed = "in use or free, not told apart" if free.bytes is None else _TITLES["unattributed"]
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
    if isinstance(budget, Reading):
        return utilization, budget
    if isinstance(utilization, Missing) or (total.bytes is None and not (facts.share_of_free and isinstance(stated.get("free_at_start"), Reading))):
        return utilization, utilization if isinstance(utilization, Missing) else Missing("the size of the card is not known")
    free = stated.get("free_at_start")
    if facts.share_of_free and isinstance(free, Reading):
        return utilization, Reading(utilization.number() * free.number(), "bytes", f"{utilization.number():g} x what was free at the start")
    return utilization, Reading(utilization.number() * (total.bytes or 0.0), "bytes", f"{utilization.number():g} x the card's total")


def _less(budget: Value, part: Part, source: str) -> Value:
    if isinstance(budget, Missing):
        return budget
    if isinstance(part.value, Missing):
        return Missing(f"{part.title}: {part.value.reason}" if not part.value.reason.startswith(part.title) else part.value.reason)
    return Reading(max(budget.number() - part.value.number(), 0.0), "bytes", source)


def _squeezed(expected: Value, pool: Part, facts: Facts) -> Value:
    if facts.kind == HOST and facts.by_hand:
        return Missing(f"the pool was set by hand ({facts.by_hand}), and the machine's memory has other uses")
    if isinstance(expected, Missing):
        return expected
    if isinstance(pool.value, Missing):
        return pool.value
    lacking = expected.number() - pool.value.number()
    return Reading(lacking if lacking > _ROUNDING else 0.0, "bytes", "the expected pool less the real one")


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
    held = weights.bytes
    if held is None and isinstance(consumed := stated.get("consumed"), Reading):
        held, details = consumed.number(), [part for part in details if part.name != "context"]
    if held is None or pool.bytes is None:
        return Missing("the start-up log does not state weights and pool")
    over = held + pool.bytes + sum(part.bytes or 0.0 for part in details) - budget.number()
    return Reading(over if over > _ROUNDING else 0.0, "bytes", "weights, pool and what the log states of the rest, less the share of the card")


def _highest(stated: Mapping[str, Value], total: Part) -> Value:
    free = stated.get("free_at_start")
    if not isinstance(free, Reading) or not total.bytes:
        return Missing("the start-up log does not state how much was free at the start")
    return Reading(free.number() / total.bytes, "ratio", f"{_show(free)} of {_show(total.value)} were free at the start")


def _with_reasons(ledger: CardLedger, facts: Facts) -> CardLedger:
    """Return the ledger with what took the squeezed bytes, the largest first, and notes on what else does not add up."""
    notes = list(ledger.notes)
    stated = facts.stated
    if isinstance(ledger.over_budget, Reading) and ledger.over_budget.number():
        notes.append(f"what the log states is {_show(ledger.over_budget)} over the share of the card ({_show(ledger.budget)})")
    if isinstance(ledger.budget, Reading) and ledger.weights.bytes and ledger.weights.bytes > ledger.budget.number():
        free = stated.get("free_at_start")
        whole = free.number() if facts.share_of_free and isinstance(free, Reading) else ledger.total.bytes
        least = f": the share would have to be above {ledger.weights.bytes / whole:.3f}" if whole else ""
        notes.append(f"the weights alone ({_show(ledger.weights.value)}) exceed the share of the card ({_show(ledger.budget)}){least}")
    held_before = _held_before(stated, ledger.total)
    if held_before:
        notes.append(f"{units.show(held_before, 'bytes')} of the card were in use before the server started")
    if not isinstance(ledger.squeezed, Reading) or not ledger.squeezed.number():
        return _replaced(ledger, (), tuple(notes))
    causes: list[tuple[float, str]] = []
    if facts.by_hand:
        causes.append((float("inf"), f"a pool that was set by hand ({facts.by_hand})"))
    allowed = stated.get("pool_allowed")
    if isinstance(allowed, Reading) and ledger.pool.bytes is not None and allowed.number() - ledger.pool.bytes > _ROUNDING:
        gap = allowed.number() - ledger.pool.bytes
        causes.append((gap, f"another worker that has room for {units.show(gap, 'bytes')} less, while all hold as many blocks"))
    causes += [(part.bytes or 0.0, f"{part.title} {_show(part.value)}") for part in ledger.details]
    named = sum(part.bytes or 0.0 for part in ledger.details)
    if ledger.rest.bytes and ledger.rest.bytes - named > _ROUNDING:
        further = f"further {ledger.rest.title}" if ledger.details else ledger.rest.title
        causes.append((ledger.rest.bytes - named, f"{further} {units.show(ledger.rest.bytes - named, 'bytes')}"))
    left = ledger.squeezed.number() - sum(size for size, _ in causes)
    # what others hold beside the share costs the pool nothing: they count only for what nothing else explains
    others = ledger.others.bytes or held_before
    if left > _ROUNDING and others:
        causes.append((min(left, others), f"other processes {units.show(others, 'bytes')}"))
        left -= min(left, others)
    idle = ledger.idle_inside.number() if isinstance(ledger.idle_inside, Reading) else 0.0
    if left > _ROUNDING and idle > _ROUNDING:
        causes.append((min(left, idle), f"{units.show(min(left, idle), 'bytes')} of the share that nothing holds"))
        left -= min(left, idle)
    if left > max(_ROUNDING, 0.05 * ledger.squeezed.number()):
        causes.append((left, f"{units.show(left, 'bytes')} that neither log nor card explains"))
    causes.sort(key=lambda cause: -cause[0])
    return _replaced(ledger, tuple(text for size, text in causes if size > _ROUNDING / 6), tuple(notes))


def _held_before(stated: Mapping[str, Value], total: Part) -> float:
    free = stated.get("free_at_start")
    held = total.bytes - free.number() if isinstance(free, Reading) and total.bytes else 0.0
    return held if held > _ROUNDING else 0.0


def _replaced(ledger: CardLedger, reasons: tuple[str, ...], notes: tuple[str, ...]) -> CardLedger:
    return dataclasses.replace(ledger, reasons=reasons, notes=notes)
