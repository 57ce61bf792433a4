"""What is asked of a pool, judged: traffic at its peak, the inputs of a checklist, and the verdict on both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_kvcache import units
from pytest_kvcache.capacity.card import COUNTS, Need, card_for
from pytest_kvcache.capacity.documents import Input
from pytest_kvcache.capacity.sizing import Answer, answer
from pytest_kvcache.capacity.traffic import Chance, Demand, SafeConcurrency, Traffic, demand, longest_request, overflow, safe_concurrency
from pytest_kvcache.errors import UsageError

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"


@dataclass(frozen=True)
class Load:
    """What traffic means for a pool. ``chance`` and ``safe`` are None without a pool; ``needs`` are the cards that would hold it.

    ``per_engine`` is the traffic of one engine: under data parallelism its fair share, rounded up.
    """

    traffic: Traffic
    per_engine: Traffic
    demand: Demand
    kv_bytes: int
    chance: Chance | None = None
    safe: SafeConcurrency | None = None
    longest: int = 0
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True)
class Checked:
    """One input of a checklist: the blocks of its peak, their share of the usable pool, how many fit, and the verdict with its reason."""

    input: Input
    blocks: int
    share: float
    fits: int
    verdict: str
    reason: str


def load_on(given: Answer, stated: Traffic, risk: float, seed: int, utilization: float) -> Load:
    """Return what the traffic means for one engine. Under data parallelism an engine takes its fair share, rounded up."""
    engines = given.question.shape.dp
    share = replace(stated, lanes=tuple(replace(lane, concurrency=math.ceil(lane.concurrency / engines)) for lane in stated.lanes))
    held = demand(share, given.blocks)
    kv_bytes = given.kv_bytes_for(held.peak_blocks)
    load = Load(stated, share, held, kv_bytes, needs=_needs(given, share, utilization))
    if given.pool is None or not given.starts:
        return load
    usable = given.pool.usable_blocks
    return replace(
        load,
        chance=overflow(share, given.blocks, usable, seed=seed),
        safe=_seated(safe_concurrency(share, given.blocks, usable, risk=risk, seed=seed), given.seats),
        longest=longest_request(given.blocks, usable, concurrency=share.concurrency, limit=given.max_model_len),
    )


def _seated(safe: SafeConcurrency, seats: int | None) -> SafeConcurrency:
    """Return the safe concurrency, which seats bound as well as the pool."""
    return safe if seats is None else replace(safe, always=min(safe.always, seats), at_risk=min(safe.at_risk, seats))


def _needs(given: Answer, share: Traffic, utilization: float) -> tuple[Need, ...]:
    """Return the card that holds the traffic's peak, for each number of cards that the model can be divided among."""
    question = given.question
    total = question.weights_total
    if total is None or question.shape.engine == "llamacpp":
        return ()
    beside = (
        sum(value or 0 for value in (question.card.activation_bytes, question.card.graphs_bytes, question.card.other_bytes)) if question.card else 0
    )
    found = []
    for count in COUNTS:
        try:
            other = answer(replace(question.with_shape(tp=count, pp=1, num_gpu_blocks_override=None), card=None, kv_bytes=None))
        except UsageError:  # the heads cannot be divided so
            continue
        need = other.kv_bytes_for(max(demand(share, other.blocks).peak_blocks, other.blocks(other.max_model_len)))
        found.append(card_for(need, -(-total // count), cards=count, utilization=utilization, engine=question.shape.engine, beside_bytes=beside))
    return tuple(found)


def check(given: Answer, one: Input) -> Checked:
    """Return the verdict on one input of a checklist, alone in the pool."""
    if one.tokens > given.max_model_len:
        reason = f"{one.tokens:,} tokens are more than max_model_len {given.max_model_len:,}: refused or cut"
        return Checked(one, 0, math.inf, 0, FAIL, reason)
    engines = given.question.shape.dp
    at_once = math.ceil(one.concurrency / engines)
    need = given.blocks(one.tokens) * at_once
    if given.pool is None:
        return Checked(one, need, math.nan, 0, "", "no pool was stated")
    if not given.starts:
        return Checked(one, need, math.inf, 0, FAIL, "the engine would not start")
    usable = given.pool.usable_blocks
    room = given.requests(one.tokens)
    share = need / usable if usable else math.inf
    if room >= at_once:
        return Checked(one, need, share, room * engines, PASS, f"{usable - need:,} of {usable:,} {given.layout.unit} stay free")
    seats = given.seats
    if seats is not None and need <= usable:
        return Checked(one, need, share, room * engines, FAIL, f"{seats * engines} seats: the others wait")
    return Checked(one, need, share, room * engines, FAIL, f"{need:,} of {usable:,} {given.layout.unit}; {room * engines} fit at once")


def judge(given: Answer, load: Load | None, checked: Sequence[Checked], at: int, asked: bool, risk: float) -> tuple[str, str]:
    """Return the verdict on all that was asked, and its reason in a sentence."""
    if not given.starts:
        return FAIL, f"the engine would refuse to start: {given.reason}"
    limit, pool = given.max_model_len, given.pool
    if at > limit and (load is not None or asked):
        return FAIL, f"a request of {at:,} tokens is longer than max_model_len {limit:,}"
    if pool is None:
        return "", "no pool was stated: --kv-memory, or --gpu-memory with --weights, gives a verdict"
    failed = [one.input.name for one in checked if one.verdict == FAIL]
    if failed:
        return FAIL, f"{len(failed)} of {len(checked)} inputs of the checklist do not fit: {', '.join(failed)[:300]}"
    if load is None:
        one = given.blocks(at)
        if one > pool.usable_blocks:
            return FAIL, f"one request of {at:,} tokens takes {one:,} {given.layout.unit}, and {pool.usable_blocks:,} can be held"
        room = given.requests(at) * pool.engines
        fit = f"{room:,} requests of {at:,} tokens fit at once" if room != 1 else f"one request of {at:,} tokens fits at a time"
        return PASS, f"{'the checklist fits' if checked else 'it starts'}; {fit}"
    return _traffic_verdict(given, load, risk)


def _traffic_verdict(given: Answer, load: Load, risk: float) -> tuple[str, str]:
    pool = given.pool
    assert pool is not None
    unit, usable, peak = given.layout.unit, pool.usable_blocks, load.demand.peak_blocks
    each = " on each engine" if pool.engines > 1 else ""
    share = f"{peak:,} of {usable:,} usable {unit}{each} ({units.show(peak / usable if usable else math.inf, 'ratio')})"
    seats = given.seats
    if seats is not None and load.per_engine.concurrency > seats:
        return FAIL, f"{load.per_engine.concurrency} requests at once{each}, and there are {seats} seats: the others wait"
    if peak <= usable:
        return PASS, f"at its peak the traffic holds {share}; {usable - peak:,} stay free"
    chance = load.chance
    if load.traffic.is_one_shape or chance is None:
        fit = given.requests(load.traffic.longest) * pool.engines
        tail = f"{fit:,} fit" if len(load.traffic.lanes) == 1 else "it does not fit"
        return FAIL, f"at its peak the traffic would hold {share}: {tail}"
    odds = f"the pool overflows with probability {chance.probability:.4f} ({chance.low:.4f} to {chance.high:.4f}, {chance.trials:,} trials, seed {chance.seed})"
    if chance.high <= risk:
        return PASS, f"every request at its longest would hold {share}, but {odds}, within the risk of {risk:g}"
    if chance.low <= risk:
        return INCONCLUSIVE, f"every request at its longest would hold {share}, and {odds}: too few trials to tell it from the risk of {risk:g}"
    return FAIL, f"every request at its longest would hold {share}, and {odds}, over the risk of {risk:g}"
