"""What each lever would do to this model and this traffic, with what it costs. Every row is the same question asked again with one thing changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from pytest_kvcache import units
from pytest_kvcache.capacity.layers import Architecture
from pytest_kvcache.capacity.sizing import Answer, Question, answer
from pytest_kvcache.capacity.traffic import Traffic, demand
from pytest_kvcache.errors import KvError, UsageError

_SMALLER = {"llamacpp": ("q8_0", "q4_0"), "vllm": ("fp8",), "sglang": ("fp8_e4m3",), "paged": ("fp8",)}
_WINDOW = 4096
_EVERY = 6
_QUALITY = "the answers may change: run the quality gate before and after"


@dataclass(frozen=True)
class Sharing:
    """What prefix caching could share: tokens that prompts have in common, and the share of requests that find them cached."""

    tokens: int = 0
    hits: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.hits) and 0 <= self.hits <= 1):
            raise UsageError(f"a hit share of {self.hits:g} is none", hint="0.8 means that 80 % of the requests find the prefix")
        if self.tokens < 0:
            raise UsageError(f"{self.tokens} shared tokens", hint="0 or more")


@dataclass(frozen=True)
class Lever:
    """One lever: what changes, what it would come to, and its cost. None stands for what does not apply or cannot be told, with ``cost`` saying why.

    ``sequence_bytes`` is one request of the length asked about, on one GPU; ``pool_blocks`` one engine's pool; ``requests`` how many such requests run at
    once, over all engines; ``demand_blocks`` the peak of the traffic.
    """

    name: str
    change: str
    sequence_bytes: int | None
    pool_blocks: int | None
    requests: int | None
    demand_blocks: int | None
    cost: str


def levers(given: Answer, traffic: Traffic | None, length: int, sharing: Sharing) -> list[Lever]:
    """Return a row for what is, and one for each lever."""
    question = given.question
    shape = question.shape
    rows = [_row("as asked", "-", given, traffic, length, "")]

    def ask(name: str, change: str, other: Callable[[], Question], cost: str) -> None:
        try:
            rows.append(_row(name, change, answer(other()), traffic, length, cost))
        except KvError as error:
            rows.append(Lever(name, change, None, None, None, None, f"not possible: {error.what}"))

    current = given.growth.kv_dtype
    for kind in _SMALLER[shape.engine]:
        if kind != current and not current.startswith(kind):
            ask("KV dtype", f"{current} -> {kind}", partial(question.with_shape, kv_dtype=kind), _QUALITY)
    rows.append(_length_cap(given, traffic, length))
    rows.append(_seats(given, traffic, length))
    for other in dict.fromkeys((given.layout.block_size // 2, given.layout.block_size * 2)):
        if other >= 1 and shape.engine in ("vllm", "paged") and given.layout.groups:
            cost = "less rounding waste, more CPU per step" if other < given.layout.block_size else "less CPU per step, more rounding waste"
            if shape.engine == "vllm" and shape.platform == "gpu" and other % 16:
                cost += "; the fast kernels take multiples of 16 only"
            ask("block size", f"{given.layout.block_size} -> {other}", partial(question.with_shape, block_size=other), cost)
    rows.append(_sharing(given, traffic, length, sharing))
    architecture = question.architecture
    windowed = _windowed(architecture)
    if windowed is not None:
        ask(
            "sliding window",
            f"a sibling with {_WINDOW:,} tokens of window in 5 of 6 layers",
            lambda: replace(question, architecture=windowed),
            f"another model; {_QUALITY}",
        )
    elif shape.engine == "vllm":
        ask(
            "sliding window",
            f"hybrid manager {'on -> off' if shape.hybrid else 'off -> on'}",
            lambda: question.with_shape(hybrid=not shape.hybrid),
            "none",
        )
    sibling, change = _fewer_heads(architecture)
    if sibling is not None:
        ask("GQA sibling", change, lambda: replace(question, architecture=sibling), f"another model; {_QUALITY}")
    rows += _memory(given, traffic, length)
    return rows


def _row(name: str, change: str, found: Answer, traffic: Traffic | None, length: int, cost: str) -> Lever:
    growth, pool = found.growth, found.pool
    held = demand(traffic, found.blocks).peak_blocks if traffic is not None else None
    if not found.starts:
        cost = f"does not start: {found.reason}"
    requests = None if pool is None else found.requests(length) * pool.engines
    return Lever(name, change, growth.sequence_bytes(length), pool.pool_blocks if pool is not None else None, requests, held, cost)


def _length_cap(given: Answer, traffic: Traffic | None, length: int) -> Lever:
    longest = traffic.longest if traffic is not None else length
    limit = given.max_model_len
    if longest >= limit:
        longest = max(limit // 2, 1)
    question = given.question.with_shape(max_model_len=longest)
    row = _row(
        "max length cap", f"max-model-len {limit:,} -> {longest:,}", answer(question), traffic, min(length, longest), "longer requests are refused"
    )
    if longest < length:
        row = replace(row, cost=f"{row.cost}; the requests counted are of {longest:,} tokens")
    return row


def _seats(given: Answer, traffic: Traffic | None, length: int) -> Lever:
    pool, now = given.pool, given.question.shape.max_num_seqs
    asked = given.question.with_shape(max_num_seqs=None)
    room = answer(asked).requests(length) if pool is not None else None
    if room is None or pool is None:
        return Lever("max-num-seqs", "-", None, None, None, None, "needs a pool to say how many seats it bears")
    room = min(room, 1 << 20)
    held = room * given.blocks(length)
    change = f"{now if now is not None else 'unset'} -> {room}" if room else "-"
    cost = "requests beyond it queue; none is preempted" if room else "no number of seats helps: not even one request fits"
    return Lever(
        "max-num-seqs",
        change,
        given.growth.sequence_bytes(length),
        pool.pool_blocks,
        room * pool.engines,
        held if traffic is not None else None,
        cost,
    )


def _sharing(given: Answer, traffic: Traffic | None, length: int, sharing: Sharing) -> Lever:
    """Return what prefix caching saves: whole blocks of the shared tokens, held once, for the requests that find them."""
    if not sharing.tokens or not sharing.hits:
        return Lever("prefix caching", "-", None, None, None, None, "state what is shared: --shared-prefix 2000 --hit-share 0.8")
    size = max(given.layout.block_size, 1)
    shared = given.blocks(min(sharing.tokens, length) // size * size) if min(sharing.tokens, length) >= size else 0
    need = given.blocks(length)
    mean = need - sharing.hits * min(shared, need)
    pool = given.pool
    requests = None
    if pool is not None and given.starts and mean > 0:
        room = max(pool.usable_blocks - shared, 0) / mean
        requests = int(room if given.seats is None else min(room, given.seats)) * pool.engines
    held = None
    if traffic is not None:
        peak = demand(traffic, given.blocks).peak_blocks
        held = math.ceil(peak - sharing.hits * traffic.concurrency * shared + shared)
    on = given.question.shape.prefix_caching
    cost = "holds while the prefix stays the same and cached; measure the hit share"
    if any(group.window is not None for group in given.layout.groups):
        cost += "; window groups keep less of a prefix than counted here"
    saved = math.ceil(given.growth.sequence_bytes(length) - sharing.hits * given.growth.sequence_bytes(min(sharing.tokens, length) // size * size))
    change = f"{'on' if on else 'off -> on'}, {sharing.tokens:,} tokens shared by {units.show(sharing.hits, 'ratio')}"
    return Lever("prefix caching", change, saved, pool.pool_blocks if pool else None, requests, held, cost)


def _windowed(architecture: Architecture) -> Architecture | None:
    """Return a sibling in which five of six full layers slide; None where layers slide already or none is full."""
    if architecture.of_kind("sliding", "chunked") or not architecture.of_kind("full"):
        return None
    layers = tuple(
        replace(layer, kind="sliding", window=_WINDOW) if layer.kind == "full" and index % _EVERY != _EVERY - 1 else layer
        for index, layer in enumerate(architecture.layers)
    )
    return replace(architecture, layers=layers)


def _fewer_heads(architecture: Architecture) -> tuple[Architecture | None, str]:
    """Return a sibling with a quarter of the KV heads (at least one), and how to call it; None where there is one head or a latent."""
    most = max((layer.kv_heads for layer in architecture.of_kind("full", "sliding", "chunked")), default=0)
    if most <= 1 or architecture.latent:
        return None, ""
    fewer = max(1, most // 4)
    layers = tuple(
        replace(layer, kv_heads=max(1, layer.kv_heads * fewer // most)) if layer.kind in ("full", "sliding", "chunked") else layer
        for layer in architecture.layers
    )
    return replace(architecture, layers=layers), f"{most} -> {fewer} KV heads"


def _memory(given: Answer, traffic: Traffic | None, length: int) -> list[Lever]:
    """Return the levers that are memory: the share of the card, and more cards."""
    question, shape = given.question, given.question.shape
    rows = []
    if question.card is not None and shape.engine != "llamacpp":
        for change in (0.05, -0.02):
            share = round(question.card.utilization + change, 4)
            if not 0 < share < 1:
                continue
            cost = "less slack for activations and graphs: out of memory is nearer" if change > 0 else "more slack: often steadier than more"
            other = replace(question, card=replace(question.card, utilization=share))
            rows.append(_row("utilization", f"{question.card.utilization:g} -> {share:g}", answer(other), traffic, length, cost))
    elif question.card is None:
        rows.append(Lever("utilization", "-", None, None, None, None, "state the card: --gpu-memory 80GiB --utilization 0.9 --weights 14GiB"))
    if question.card is None and question.weights_total is None and given.pool is not None:
        rows.append(
            _row(
                "another GPU",
                f"dp {shape.dp} -> {shape.dp + 1}",
                answer(question.with_shape(dp=shape.dp + 1)),
                _shared(traffic, shape.dp),
                length,
                "its price; a router",
            )
        )
        return rows
    if shape.engine == "llamacpp":  # it splits layers among cards by itself
        if question.card is not None:
            pair = replace(question, card=replace(question.card, total_bytes=2 * question.card.total_bytes))
            rows.append(
                _row("another GPU", "1 -> 2 cards", answer(pair), traffic, length, "its price; layers are split, and one card works at a time")
            )
        second = answer(question.with_shape(dp=shape.dp + 1))
        rows.append(_row("another GPU", "a second server", second, _shared(traffic, shape.dp), length, "its price; the weights once more, a router"))
        return rows
    try:
        doubled = answer(question.with_shape(tp=shape.tp * 2))
        cost = "its price; every step waits for both cards"
        if doubled.layout.bytes_per_block == given.layout.bytes_per_block and given.layout.groups:
            cost += "; the KV heads are replicated, so a card's pool holds no more per byte"
        rows.append(_row("another GPU", f"tp {shape.tp} -> {shape.tp * 2}", doubled, traffic, length, cost))
    except KvError as error:
        rows.append(Lever("another GPU", f"tp {shape.tp} -> {shape.tp * 2}", None, None, None, None, f"not possible: {error.what}"))
    more = answer(question.with_shape(dp=shape.dp + 1))
    rows.append(
        _row(
            "another GPU", f"dp {shape.dp} -> {shape.dp + 1}", more, _shared(traffic, shape.dp), length, "its price; the weights once more, a router"
        )
    )
    return rows


def _shared(traffic: Traffic | None, engines: int) -> Traffic | None:
    """Return the traffic of one engine when one more takes its share."""
    if traffic is None:
        return None
    lanes = tuple(replace(lane, concurrency=math.ceil(lane.concurrency * engines / (engines + 1))) for lane in traffic.lanes)
    return replace(traffic, lanes=lanes)
