"""What a card's memory is made of, as values: its parts, what is known of it before it is reconciled, and the reconciled ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_kvcache import units
from pytest_kvcache.quantities import Missing, Reading, Value

MEASURED, STATED, COMPUTED, UNKNOWN = "measured", "stated", "computed", "unknown"
GPU, HOST = "gpu", "host"

ROUNDING = 0.06 * (1 << 30)
"""Figures of a log are printed in GiB with two decimals each, and several of them are added up."""
TITLES = {
    "pool": "KV pool", "weights": "weights", "rest": "graphs, workspace, context", "others": "other processes", "reserved": "kept by the driver",
    "unattributed": "in use, of no process that the driver names", "free": "free", "activation": "activation peak", "graphs": "graphs",
    "context": "context and libraries", "workspace": "workspace", "server": "this server", "total": "total", "used": "used",
}  # fmt: skip
DETAILS = ("activation", "graphs", "workspace", "context")


@dataclass(frozen=True)
class Part:
    """One part of a card's memory in bytes. ``how`` is measured, stated, computed or unknown; an unknown part's value is Missing.

    ``spread`` is by how many bytes a computed figure may be off to either side.
    """

    name: str
    title: str
    value: Value
    how: str
    spread: float = 0.0

    @property
    def bytes(self) -> float | None:
        """The size; None where it is unknown."""
        return self.value.number() if isinstance(self.value, Reading) else None


@dataclass(frozen=True)
class Facts:
    """What is known of one card before it is reconciled: ``measured`` by name of part, ``stated`` by the start-up log or the server.

    ``measured`` knows total, used, free, reserved, server, others; ``stated`` knows pool, weights, activation, graphs, graphs_planned, workspace,
    context, budget, utilization, total, free_at_start, pool_allowed, consumed. ``computed`` holds pool and weights that follow from the model's
    files, ``spread`` how far they may be off. ``by_hand`` says how the pool's size was set, "" where the engine chose.
    ``share_of_free``: the utilization is a share of what was free at the start (SGLang), and not of the card; activations and graphs then lie
    outside of it. ``usual_share`` is the engine's default utilization (0: not known).
    """

    name: str
    kind: str
    measured: Mapping[str, Value] = field(default_factory=dict)
    stated: Mapping[str, Value] = field(default_factory=dict)
    computed: Mapping[str, Value] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    by_hand: str = ""
    has_share: bool = True
    share_of_free: bool = False
    usual_share: float = 0.0
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
        pool, expected, about = show(self.pool.value), show(self.expected_pool), self._about
        if isinstance(self.squeezed, Missing):
            told = f"the pool has {pool}{about}; " if isinstance(self.pool.value, Reading) else ""
            return f"{self.name}: {told}whether the pool is squeezed is not known: {self.squeezed.reason}"
        if not self.squeezed.number():
            more = (self.pool.bytes or 0.0) - (self.expected_pool.number() if isinstance(self.expected_pool, Reading) else 0.0)
            if more > ROUNDING + self.pool.spread + self.weights.spread:
                return f"{self.name}: the pool of {pool} is {units.show(more, 'bytes')} more than share and weights leave ({expected}){about}"
            return f"{self.name}: the pool of {pool} is what share and weights leave ({expected}){about}"
        why = "; ".join(self.reasons) or "what was neither measured nor stated"
        return f"{self.name}: the pool is {pool} of the {expected} that share and weights leave{about}: squeezed by {show(self.squeezed)} because of {why}"

    @property
    def _about(self) -> str:
        """Which of pool and weights are computed, and how far they may be off; "" where both are stated."""
        computed = [part for part in (self.weights, self.pool) if part.how == COMPUTED]
        told = [part.title + (f" ± {units.show(part.spread, 'bytes')}" if part.spread else "") for part in computed]
        return f" ({' and '.join(told)} computed)" if told else ""


def show(value: Value) -> str:
    """Return a size as people read it."""
    return units.show(value.value, value.unit) if isinstance(value, Reading) else "an unknown size"
