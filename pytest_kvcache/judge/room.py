"""Whether requests of a shape fit the pool that a server has: arithmetic on the server's own figures, and on the model's where it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, PASS
from pytest_kvcache.judge.wording import gate, missing
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GateRecord, SnapshotRecord, ValueRecord

_ARITHMETIC = ("moved", "restart")
"""What spoils arithmetic on the server's own figures; how well the load went does not matter to it."""

Cost = Callable[[SnapshotRecord], Callable[[int], int] | Missing]
"""How many blocks a request of a length takes on a server (``capacity.serving.cost_on``)."""


@dataclass(frozen=True)
class _Room:
    verdict: str
    quantity: str
    text: str
    value: Value
    bound: float | None = None


def fits(analyses: Sequence[Analysis], *, concurrency: int, length: int, cost: Cost | None = None) -> GateRecord:
    """Judge by arithmetic whether ``concurrency`` requests of ``length`` tokens (prompt and output) fit the pool at once.

    Blocks round up per request, and a request must fit into one server whole. Where the engine's own figures show that a request
    costs other blocks than its length alone (window or hybrid models), ``cost`` tells them; without it the cost at max_model_len is taken
    as the upper bound, and what that does not settle is INCONCLUSIVE.
    """
    decisive = analyses[-1]
    found = _room(decisive.run.record.before, concurrency, length, cost)
    bound = _bound(concurrency, length)
    if isinstance(found.value, Missing):
        return missing("fits", found.quantity, found.value, analyses, bound_text=bound, spoilt_by=_ARITHMETIC)
    return gate(
        "fits", found.quantity, found.verdict, found.text, analyses, value=found.value, spoilt_by=_ARITHMETIC, bound=found.bound, bound_text=bound
    )


def fits_now(servers: Sequence[SnapshotRecord], *, concurrency: int, length: int, cost: Cost | None = None) -> GateRecord:
    """Judge the same on servers that were just read, without a Run."""
    found = _room(servers, concurrency, length, cost)
    unit = found.value.unit if isinstance(found.value, Reading) else ""
    return GateRecord(
        "fits",
        found.quantity,
        found.verdict,
        found.text,
        unit=unit,
        value=ValueRecord.of(found.value),
        bound=found.bound,
        bound_text=_bound(concurrency, length),
        evidence=", ".join(server.endpoint for server in servers)[:300],
    )


def _bound(concurrency: int, length: int) -> str:
    return f"{concurrency} requests of {length:,} tokens at once"


def _unknown(quantity: str, value: Missing) -> _Room:
    return _Room(INCONCLUSIVE, quantity, f"cannot judge {quantity}: {value.reason}", value)


def _room(servers: Sequence[SnapshotRecord], concurrency: int, length: int, cost: Cost | None) -> _Room:
    quantity = "pool_blocks"
    if not servers:
        return _unknown(quantity, Missing("the server was not read"))
    room, surely, reasons = 0, 0, []
    for server in servers:
        limit, seats = server.value("max_model_len"), server.value("max_num_seqs")
        if isinstance(limit, Missing):
            return _unknown("max_model_len", limit)
        if length > limit.number():
            text = f"a request of {length:,} tokens is longer than max_model_len {limit.number():,.0f}"
            return _Room(FAIL, "max_model_len", text, limit, float(length))
        space = _planned(server, length, cost) if cost is not None else _requests(server, length)
        if isinstance(space, Missing):
            return _unknown(quantity, space)
        most, least, reason = space
        cap = int(seats.number()) if isinstance(seats, Reading) else None
        reasons.append(reason + (f", {cap} seats" if cap is not None else ", seats not told"))
        room += most if cap is None else min(most, cap)
        surely += least if cap is None else min(least, cap)
    verdict = PASS if surely >= concurrency else FAIL if room < concurrency else INCONCLUSIVE
    holds = f"{surely}" if surely == room else f"between {surely} and {room}"
    text = f"the pool holds {holds} requests of {length:,} tokens at once, {concurrency} are asked for ({'; '.join(reasons)})"
    if verdict == INCONCLUSIVE:
        text = f"cannot judge: {text}; this model's requests cost other blocks than their length alone: with the model's config it can be told"
    return _Room(verdict, quantity, text, Reading(surely, "requests", "; ".join(reasons)), float(concurrency))


def _planned(server: SnapshotRecord, length: int, cost: Cost) -> tuple[int, int, str] | Missing:
    """Return how many requests of a length one server holds, by the cost that the model's configuration gives; each of its ranks for itself."""
    blocks_for = cost(server)
    if isinstance(blocks_for, Missing):
        return blocks_for
    need = blocks_for(length)
    pools = [values for values in server.per_rank.values() if "usable_blocks" in values or "pool_tokens" in values] or [server.quantities]
    holds = 0
    for values in pools:
        told = next((values[name].to_value() for name in ("usable_blocks", "pool_tokens") if name in values and values[name].missing is None), None)
        if not isinstance(told, Reading):
            lacking = server.value("usable_blocks")
            return lacking if isinstance(lacking, Missing) else Missing("a rank of the server does not tell its pool")
        holds += int(told.number() // need) if need else 0
        reason = f"{told.number():,.0f} usable {told.unit}, {need} a request by the model's own layers"
    return holds, holds, reason if len(pools) == 1 else f"{len(pools)} ranks, the last: {reason}"


def _requests(server: SnapshotRecord, length: int) -> tuple[int, int, str] | Missing:
    """Return how many requests of a length one server holds at most and at least, and why; Missing where it does not tell."""
    blocks, size = server.value("usable_blocks"), server.value("block_size")
    if isinstance(blocks, Reading) and isinstance(size, Reading) and size.number() > 0:
        plain = math.ceil(length / size.number())
        dear = _blocks_at_max(server)
        limit = server.value("max_model_len")
        usual = math.ceil(limit.number() / size.number()) if isinstance(limit, Reading) else None
        holds = int(blocks.number() // plain)
        reason = f"{blocks.number():,.0f} usable blocks of {size.number():.0f} tokens, {plain} a request"
        if dear is None or dear == usual:
            return holds, holds, reason
        return int(blocks.number()), int(blocks.number() // dear), f"{reason} by length alone, {dear} at max_model_len by the engine's own figure"
    tokens = server.value("pool_tokens")
    if isinstance(tokens, Reading):
        holds = int(tokens.number() // length)
        return holds, holds, f"{tokens.number():,.0f} tokens"
    if not tokens.cannot_happen:
        return tokens
    return blocks if isinstance(blocks, Missing) else Missing("the server tells its blocks and not their size")


def _blocks_at_max(server: SnapshotRecord) -> int | None:
    """Return the blocks of one request at max_model_len, by the engine's own pool and concurrency (vLLM: their quotient, rounded)."""
    pool, most = server.value("pool_blocks"), server.value("max_concurrency")
    if isinstance(pool, Reading) and isinstance(most, Reading) and most.number() > 0:
        return max(1, round(pool.number() / most.number()))
    return None
