"""``plan --check``: our figures beside those that an engine printed or exposes, and every difference explained.

A difference is explained by asking the same question again with one thing changed (or two): the engine keeps another data type, charges windows
otherwise, knows no sharding. What reproduces all told figures at once is named; what nothing reproduces is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from pytest_kvcache import units
from pytest_kvcache.capacity.layers import Architecture
from pytest_kvcache.capacity.sizing import Answer, Question, answer
from pytest_kvcache.capacity.swap import swap_fact
from pytest_kvcache.capacity.told import GIB, Span, Told
from pytest_kvcache.errors import KvError

EQUAL, EXPLAINED, DIFFERENT, UNTOLD = "equal", "explained", "different", "untold"
_MOST_PAIRS = 2000
Change = tuple[str, Callable[[Question], Question]]


@dataclass(frozen=True)
class Compared:
    """One figure: ours (a span where the engine's memory is rounded) and the engine's, whether they agree, and why not."""

    name: str
    unit: str
    ours: tuple[float, float]
    theirs: float
    verdict: str
    why: str
    source: str


@dataclass(frozen=True)
class Agreement:
    """All figures that could be compared. ``explanations`` name each difference; ``verdict`` is ``different`` where one has no name,
    ``untold`` where there was nothing to compare.

    ``reproduced`` is the question whose answer is the engine's own; None where nothing is.
    """

    rows: tuple[Compared, ...]
    explanations: tuple[str, ...]
    verdict: str
    reproduced: Question | None = None


def settings_of(said: Told, stated: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what the engine states and the user does not, as arguments of ``plan``, and notes where the two contradict."""
    given: dict[str, Any] = {}
    notes = []
    offered = {**said.settings, **({"max_model_len": said.max_model_len} if said.max_model_len else {})}
    for name, value in offered.items():
        if stated.get(name) is None:
            given[name] = value
        elif stated[name] != value:
            notes.append(f"{name} is {value} on the engine, and {stated[name]} was asked: the engine's own counts")
            given[name] = value
    if stated.get("engine") is None and said.engine:
        given["engine"] = said.engine
    if said.engine == "vllm" and stated.get("platform", "auto") == "auto":
        given["platform"] = "cpu" if said.cpu else "gpu"
    return given, notes


def check(question: Question, said: Told) -> Agreement:
    """Return ours beside theirs. Where the user stated no memory, the engine's own is taken, and its blocks follow from that."""
    base = _compare(question, said)
    explanations = list(_facts(question, said))
    if not base:
        if said.tokens is not None and said.concurrency is not None:
            explanations.append(
                f"the engine's {said.tokens.middle:,.0f} tokens are its concurrency x max length, and no memory or block count is told beside them:"
                " they say nothing that could be held to a plan; give the line with the memory, or a scrape"
            )
        return Agreement((), tuple(explanations) or ("the engine tells nothing that a plan could be held to",), UNTOLD)
    wrong = [row for row in base if row.verdict == DIFFERENT]
    reproduced: Question | None = question
    if wrong:
        reason, reproduced = next(_reasons(question, said), ("", None))
        if reason:
            explanations.insert(0, reason)
            base = [replace(row, verdict=EXPLAINED, why=row.why or reason) if row.verdict == DIFFERENT else row for row in base]
        else:
            explanations += [*_rate(question, said), *_ratios(question, wrong)]
    explanations += [row.why for row in base if row.why]
    worst = next((verdict for verdict in (DIFFERENT, EXPLAINED) if any(row.verdict == verdict for row in base)), EQUAL)
    return Agreement(tuple(base), tuple(dict.fromkeys(explanations)), worst, reproduced)


def adopted(question: Question, said: Told) -> dict[str, Any]:
    """Return what follows from the engine's figures and nobody stated, as arguments of ``plan``: the block size that leads to the engine's, and the
    memory of its pool."""
    found: dict[str, Any] = {}
    if question.shape.block_size is None and said.block_size is not None and question.shape.engine in ("vllm", "paged"):
        question = _sized(question, said.block_size)
        found["block_size"] = question.shape.block_size
    if question.kv_bytes is None and question.card is None and question.shape.num_gpu_blocks_override is None:
        memory = _memory(question, said)
        if memory is not None:
            found["kv_memory"] = (memory[0] + memory[1]) // 2
    return found


def _sized(question: Question, shown: int) -> Question:
    """Return the question with the block size that leads to the one that the engine shows: that is the size after kinds were made to match."""
    for size in (None, shown, shown // 2, 16, 32, 64, 128):
        try:
            if size != 0 and answer(question.with_shape(block_size=size)).layout.block_size == shown:
                return question.with_shape(block_size=size)
        except KvError:
            continue
    return question.with_shape(block_size=shown)


def _memory(question: Question, said: Told) -> tuple[int, int] | None:
    """Return the bytes of one worker's pool, from least to most; None where nobody tells."""
    if question.kv_bytes is not None:
        return question.kv_bytes, question.kv_bytes
    if said.kv_bytes is not None:
        return math.ceil(said.kv_bytes.low), math.floor(said.kv_bytes.high)
    if question.card is not None:
        ledger = answer(question).ledger
        return (ledger.kv_bytes, ledger.kv_bytes) if ledger is not None else None
    layout = answer(replace(question, card=None, kv_bytes=None)).layout
    if said.blocks is not None:
        return (int(said.blocks.middle) * layout.bytes_per_block,) * 2
    if said.tokens is not None and said.concurrency is not None and layout.unit == "blocks" and not _is_product(said, layout.max_model_len):
        # an older label, which gives each group its share of the blocks
        groups, size = max(len(layout.groups), 1), min((group.block_size for group in layout.groups), default=1)
        least = int(said.tokens.middle) // size * groups
        return least * layout.bytes_per_block, (least + groups - 1) * layout.bytes_per_block
    return None


def _is_product(said: Told, length: int) -> bool:
    """Whether the token figure is concurrency x max length, and tells nothing of its own."""
    assert said.tokens is not None
    assert said.concurrency is not None
    return said.concurrency.low * length - 1 <= said.tokens.middle <= said.concurrency.high * length + 1


def _asked(question: Question, kv_bytes: int) -> Answer:
    return answer(replace(question, card=None, kv_bytes=kv_bytes))


def _compare(question: Question, said: Told) -> list[Compared]:
    """Return the rows for one question."""
    memory = _memory(question, said)
    override = question.shape.num_gpu_blocks_override
    rows: list[Compared] = []
    bare = answer(replace(question, card=None, kv_bytes=None))
    page = bare.layout.bytes_per_block
    if memory is None and override is None:
        return rows
    low, high = (_asked(question, memory[0]), _asked(question, memory[1])) if memory else (bare, bare)
    assert low.pool is not None
    assert high.pool is not None
    taken = memory is not None and said.kv_bytes is None and question.kv_bytes is None and question.card is None
    if said.blocks is not None and not taken:
        rows.append(_row("pool blocks", "blocks", (low.pool.pool_blocks, high.pool.pool_blocks), said.blocks))
    if said.blocks is not None and said.concurrency is not None and said.concurrency.low > 0:
        need = said.blocks.middle / said.concurrency.middle
        wide = said.blocks.middle / said.concurrency.low - said.blocks.middle / said.concurrency.high
        span = Span(need - wide, need + wide, f"{said.blocks.source} / {said.concurrency.source}")
        rows.append(_row("blocks per request", "blocks", (low.pool.blocks_per_request,) * 2, span))
    if said.concurrency is not None:
        rows.append(_concurrency(low, high, said.concurrency))
    if said.tokens is not None and said.needed is None:
        rows.append(_tokens(low, high, said.tokens))
    if said.needed is not None:
        needed = bare.blocks(said.max_model_len or bare.max_model_len) * page
        rows.append(_row("memory for one request of max length", "bytes", (needed, needed), said.needed))
    if said.estimate is not None:
        # vLLM tries lengths in steps of a block, and older builds kept no block back
        reach = (low.pool.longest, high.pool.longest + 2 * bare.layout.block_size)
        rows.append(_row("longest length that starts", "tokens", reach, said.estimate))
    return rows


def _row(name: str, unit: str, ours: tuple[float, float], theirs: Span, why: str = "") -> Compared:
    equal = theirs.holds(min(ours), max(ours))
    return Compared(name, unit, ours, theirs.middle, EQUAL if equal else DIFFERENT, "" if equal else why, theirs.source)


def _tokens(low: Answer, high: Answer, theirs: Span) -> Compared:
    """Compare the token figure by each definition that engines have had: concurrency x length, blocks x size, blocks per group x size."""
    assert low.pool is not None
    assert high.pool is not None
    groups, size = max(len(low.layout.groups), 1), min((group.block_size for group in low.layout.groups), default=1)
    now = _row("pool tokens", "tokens", (low.pool.pool_tokens, high.pool.pool_tokens), theirs)
    if now.verdict == EQUAL or low.layout.unit != "blocks":
        return now
    length = low.pool.max_model_len
    first = "older label: blocks // groups x block size" if groups > 1 else "older label: blocks x block size"
    for spans, why in (
        ((low.pool.pool_blocks // groups * size, high.pool.pool_blocks // groups * size), first),
        ((low.pool.usable_blocks * size, high.pool.usable_blocks * size), "blocks without the null block x block size"),
        ((low.pool.pool_blocks * size, high.pool.pool_blocks * size), "physical slots: blocks x block size"),
    ):
        if theirs.holds(*spans) and theirs.middle % size == 0:
            text = f"the engine's {theirs.middle:,.0f} tokens are the {why}, while concurrency x max length is {now.ours[0]:,.0f}"
            if length % size and groups == 1:
                text += f": max length {length:,} is no multiple of the block of {size}, and its last block is rounded up"
            return replace(now, ours=spans, verdict=EXPLAINED, why=text + "; blocks and memory are equal")
    return now


def _concurrency(low: Answer, high: Answer, theirs: Span) -> Compared:
    """Compare the engine's concurrency; older builds divide tokens by length, without rounding a request up to blocks."""
    assert low.pool is not None
    assert high.pool is not None
    now = _row("max concurrency", "requests", (low.pool.max_concurrency, high.pool.max_concurrency), theirs)
    if now.verdict == EQUAL or len(low.layout.groups) != 1 or low.layout.groups[0].window or low.layout.unit != "blocks":
        return now
    slots = tuple(pool.pool_blocks * low.layout.block_size / low.pool.max_model_len for pool in (low.pool, high.pool))
    if theirs.holds(*slots):
        why = f"the engine divides its tokens by the max length, {low.pool.max_model_len:,}, without rounding a request up to whole blocks"
        return replace(now, ours=(slots[0], slots[1]), verdict=EXPLAINED, why=why)
    return now


def _facts(question: Question, said: Told) -> Iterator[str]:
    """Yield what is known to move an engine's figures, wherever it is the case, whether or not they differ."""
    found = answer(replace(question, card=None, kv_bytes=None))
    override = said.settings.get("num_gpu_blocks_override")
    if override:
        yield f"num_gpu_blocks_override: the pool of {override:,} blocks is artificial, and the memory stated beside it is not its size"
    if question.shape.engine == "vllm" and said.blocks is not None and not said.old:
        yield f"null block: {said.blocks.middle:,.0f} blocks are counted, and requests can hold {said.blocks.middle - 1:,.0f}"
    if said.swap_blocks and found.layout.bytes_per_block:
        yield swap_fact(said.swap_blocks, found.layout.bytes_per_block)
    length, size = found.max_model_len, found.layout.block_size
    if found.layout.unit == "blocks" and size and length % size and len(found.layout.groups) == 1:
        yield f"rounding: {length:,} tokens are no multiple of the block of {size}: a request takes {found.blocks(length):,} blocks"
    if any(group.kind in ("sliding", "chunked") for group in found.layout.groups):
        yield f"window charge: window layers are charged for {found.layout.in_flight_tokens:,} tokens in flight on top of their window"
    yield from _card(question, said)
    most = max(
        (question.card.total_bytes if question.card else 0, math.ceil(said.parts.get("card", 0.0) * GIB)),
    )
    if said.blocks is not None and most and said.blocks.low * found.layout.bytes_per_block > most:
        yield (
            f"impossible: {said.blocks.middle:,.0f} blocks of {units.show_bytes(found.layout.bytes_per_block)} are"
            f" {units.show_bytes(said.blocks.middle * found.layout.bytes_per_block)}, and the card has {units.show_bytes(most)}:"
            " the figure is of another card, model or parallelism"
        )


def _card(question: Question, said: Told) -> Iterator[str]:
    """Yield what became of the card: the profile run's parts, and what the stated card leaves against what the engine has."""
    if question.card is None:
        return
    ledger = answer(question).ledger
    theirs = said.kv_bytes or (Span(said.parts["pool"] * GIB, said.parts["pool"] * GIB, "log") if "pool" in said.parts else None)
    if ledger is None or theirs is None:
        return
    gap = ledger.kv_bytes - theirs.middle
    if abs(gap) <= max(theirs.high - theirs.low, 0.02 * GIB):
        yield f"card: {ledger.equation}, and the engine has {units.show_bytes(theirs.middle)}: it adds up"
        return
    named = {"activation": question.card.activation_bytes, "graphs": question.card.graphs_bytes, "other": question.card.other_bytes}
    parts = {name: said.parts[name] for name, stated in named.items() if stated is None and said.parts.get(name)}
    weights = said.parts.get("weights", ledger.lines[0][1] / GIB) - ledger.lines[0][1] / GIB
    rest = gap - (sum(parts.values()) + weights) * GIB
    graphs = parts.get("graphs", 0.0)
    if graphs and abs(rest + graphs * GIB) <= 0.05 * GIB:
        # older builds size the pool from the profile run and capture the graphs afterwards
        yield (
            f"graphs: the pool was sized before the graphs took {graphs:g} GiB, so the card is {graphs:g} GiB over its share and out of memory is near:"
            " lower the pool by that much"
        )
        del parts["graphs"]
        rest += graphs * GIB
    shown = ", ".join([f"{name} {value:g} GiB" for name, value in parts.items()] + ([f"weights {weights:+.2f} GiB"] if abs(weights) > 0.005 else []))
    profile = (
        f"of it the profile run names {shown}"
        if shown
        else "the profile run's activation peak, graphs and context are not stated (--activation, --graphs, --other)"
    )
    word = "less" if gap > 0 else "more"
    tail = (
        ""
        if abs(rest) <= 0.05 * GIB
        else f"; {units.show_bytes(abs(rest))} {'more ' if rest < 0 else ''}have no name: another process, or a graph pool"
    )
    yield f"profile run: the pool is {units.show_bytes(abs(gap))} {word} than card and weights leave ({ledger.equation}); {profile}{tail if shown else ''}"


def _reasons(question: Question, said: Told) -> Iterator[tuple[str, Question | None]]:
    """Yield the names of single changes, then of pairs, that reproduce all that is told, each with the changed question."""
    changes = list(_changes(question, said))
    for name, change in changes:
        if _reproduces(change, question, said):
            yield name, change(question)
    tried = 0
    for (first, one), (second, two) in combinations(changes, 2):
        if first.partition(":")[0] == second.partition(":")[0]:
            continue
        tried += 1
        if tried > _MOST_PAIRS:
            return
        if _reproduces(lambda asked, one=one, two=two: two(one(asked)), question, said):  # type: ignore[misc]
            yield f"{first}; and {second}", two(one(question))


def _reproduces(change: Callable[[Question], Question], question: Question, said: Told) -> bool:
    try:
        rows = _compare(change(question), said)
    except KvError:
        return False
    return bool(rows) and all(row.verdict != DIFFERENT for row in rows)


def _changes(question: Question, said: Told) -> Iterator[Change]:
    shape, architecture = question.shape, question.architecture

    def with_shape(**changes: Any) -> Callable[[Question], Question]:
        return lambda asked: asked.with_shape(**changes)

    def with_model(made: Architecture) -> Callable[[Question], Question]:
        return lambda asked: replace(asked, architecture=made)

    now = answer(replace(question, card=None, kv_bytes=None)).growth.kv_dtype
    # float32 would explain any head count that is wrong by two, so it counts only where the model states it
    kinds = ["fp8", "bfloat16", "fp8_ds_mla", "fp8_e4m3"] + (["float32"] if architecture.dtype in ("float32", "torch.float32") else [])
    for kind in kinds if "kv_dtype" not in said.settings and shape.engine != "llamacpp" else ():
        if kind != now and (kind != "bfloat16" or now != "float16"):
            yield f"data type: the engine keeps its cache as {kind} and not as {now}", with_shape(kv_dtype=kind)
    windows = architecture.of_kind("sliding", "chunked")
    if windows:
        whole = tuple(replace(layer, kind="full", window=None) if layer in windows else layer for layer in architecture.layers)
        if shape.hybrid:
            yield "hybrid manager: it is off, window layers are charged as full ones", with_shape(hybrid=False)
        yield "window layers: the engine charges them as full ones", with_model(replace(architecture, layers=whole))
        for tokens in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
            yield (
                f"window charge: {tokens:,} tokens in flight",
                with_shape(max_num_batched_tokens=tokens, async_scheduling=False, platform=shape.platform),
            )
    if shape.engine == "vllm" and shape.platform == "gpu":
        yield "platform: vLLM's CPU build", with_shape(platform="cpu", async_scheduling=None)
    cross = architecture.of_kind("cross")
    if cross:
        whole = tuple(replace(layer, kind="full") if layer in cross else layer for layer in architecture.layers)
        yield f"cross attention: this build charges its {len(cross)} layers like self-attention", with_model(replace(architecture, layers=whole))
    if architecture.mtp_layers and not shape.mtp:
        yield f"draft layers: the checkpoint's {len(architecture.mtp_layers)} are served too", with_shape(mtp=True)
    if architecture.of_kind("state"):
        yield f"prefix caching: it is {'off' if shape.prefix_caching else 'on'}", with_shape(prefix_caching=not shape.prefix_caching)
        for kind in ("float32", "bfloat16"):
            yield f"states: kept as {kind}", with_shape(state_dtype=kind)
    for size in (16, 32, 64, 128, 256, 1):
        if size != shape.block_size and shape.engine in ("vllm", "paged"):
            yield f"block size: {size}", with_shape(block_size=size)
    for count in (1, 2, 4, 8):
        if count < shape.tp:
            name = "the heads are not sharded" if count == 1 else f"the heads are sharded over {count} and not {shape.tp}"
            yield f"tensor parallelism: {name}", with_shape(tp=count)
        elif count > shape.tp:
            yield f"tensor parallelism: {count} GPUs share the heads (--tp {count})", with_shape(tp=count)


def _rate(question: Question, said: Told) -> Iterator[str]:
    """Yield the bytes that the engine keeps for a token, where memory and tokens tell: another model shows there at once."""
    found = answer(replace(question, card=None, kv_bytes=None))
    plain = len(found.layout.groups) == 1 and not found.growth.fixed_bytes and not found.growth.sliding_bytes_per_token
    if said.kv_bytes is not None and said.tokens is not None and said.tokens.middle > 0 and plain:
        theirs, ours = said.kv_bytes.middle / said.tokens.middle, found.growth.growth_bytes_per_token
        if abs(theirs / ours - 1) > 0.01:
            yield (
                f"bytes a token: the engine keeps about {theirs:,.0f} on one GPU and this model takes {ours:,}:"
                " another model, another KV type or another parallelism (--tp)"
            )
            if question.shape.tp * question.shape.pp > 1 and theirs > ours:
                yield f"or the memory is one rank's, another had {units.show_bytes(round(said.tokens.middle * ours))}: the least decides for all (see all ranks)"
    if said.model:
        yield f"the log is of the model {said.model}"


def _ratios(question: Question, wrong: list[Compared]) -> list[str]:
    """Return what a bare ratio hints at, where no change reproduces the figures."""
    notes = []
    for row in wrong:
        if not row.ours[0] or not row.theirs:
            continue
        ratio = row.theirs / row.ours[0]
        hint = ""
        tp = question.shape.tp
        if tp > 1 and min(abs(ratio * tp - 1), abs(ratio / tp - 1)) < 0.01:
            hint = ": exactly the tensor parallelism, so a sharding bug and not memory"
        notes.append(f"{row.name}: the engine's is {ratio:.3g} times ours{hint}")
    return notes
