"""The planner's core: a question (model, engine, memory) and its answer, so that levers and explanations can ask it again with one thing changed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pytest_kvcache import units
from pytest_kvcache.capacity.card import Card, Ledger, ledger
from pytest_kvcache.capacity.growth import Growth, growth
from pytest_kvcache.capacity.layers import Architecture
from pytest_kvcache.capacity.layout import EngineShape, Layout, Pool
from pytest_kvcache.capacity.llamacpp_cells import cache_bytes, cache_type_of, padded
from pytest_kvcache.capacity.pool import blocks_for, lay_out, size_pool


@dataclass(frozen=True)
class Question:
    """What is asked: a model, an engine's settings, and the memory: of one worker (``kv_bytes``), or a card that leaves some. Neither: no pool."""

    architecture: Architecture
    shape: EngineShape
    kv_bytes: int | None = None
    card: Card | None = None
    weights_total: int | None = None
    """The weights of the whole model in bytes, which ``shape.tp`` x ``shape.pp`` cards share."""

    def with_shape(self, **changes: Any) -> Question:
        """Return the same question for other engine settings."""
        return replace(self, shape=replace(self.shape, **changes))


@dataclass(frozen=True)
class Answer:
    """What comes of a question: bytes of one sequence per GPU, the engine's layout, and where memory was stated the ledger and the pool."""

    question: Question
    growth: Growth
    layout: Layout
    pool: Pool | None
    ledger: Ledger | None = None
    memory: str = ""
    assumptions: tuple[str, ...] = field(default=())

    @property
    def starts(self) -> bool:
        """Whether the engine would start, as far as it is known."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why the engine would not start ("" it would)."""
        if self.ledger is not None and not self.ledger.starts:
            return self.ledger.reason
        if self.pool is not None:
            return "" if self.pool.starts else self.pool.reason
        return self.layout.refusal

    @property
    def max_model_len(self) -> int:
        """The longest request that the engine takes, in tokens; where it fits that by itself, what it would come to."""
        return self.pool.max_model_len if self.pool is not None else self.layout.max_model_len

    def blocks(self, tokens: int) -> int:
        """Return the blocks that one request of a length takes."""
        return blocks_for(self.layout, tokens)

    def requests(self, tokens: int) -> int:
        """Return how many requests of a length one engine's pool holds at once; those beyond its seats wait and are not counted."""
        if self.pool is None or not self.starts:
            return 0
        if tokens > self.max_model_len:
            return 0
        need = self.blocks(tokens)
        room = self.pool.usable_blocks // need if need else 1 << 30
        return room if self.seats is None else min(room, self.seats)

    @property
    def seats(self) -> int | None:
        """The most requests that run at once, whatever the pool holds: max_num_seqs, llama.cpp's slots, SGLang's slots for states. None: not stated."""
        bounds = [self.question.shape.max_num_seqs]
        if self.layout.engine == "llamacpp":
            bounds.append(self.layout.slots)
        pool = self.pool
        if pool is not None and pool.blocks_per_request and pool.pool_blocks / pool.blocks_per_request > pool.max_concurrency + 1e-9:
            bounds.append(int(pool.max_concurrency))
        return min((bound for bound in bounds if bound is not None), default=None)

    def kv_bytes_for(self, blocks: int) -> int:
        """Return the bytes per worker of a pool of which requests can hold so many blocks."""
        if self.layout.unit == "cells":
            streams = 1 if self.layout.unified else max(self.layout.slots, 1)
            return cache_bytes(self.layout, padded(-(-blocks // streams)))
        return (blocks + self.layout.null_blocks) * self.layout.bytes_per_block + self.layout.fixed_bytes


def answer(question: Question) -> Answer:
    """Return the answer to a question. Raises UsageError for settings that the model cannot have."""
    shape = question.shape
    kv_dtype = cache_type_of(shape) if shape.engine == "llamacpp" else shape.kv_dtype
    cost = growth(
        question.architecture,
        kv_dtype,
        dtype=shape.dtype,
        state_dtype=shape.state_dtype,
        tp=shape.tp,
        pp=shape.pp,
        dcp=shape.dcp,
        mtp=shape.mtp,
    )
    layout = lay_out(question.architecture, shape)
    assumptions: list[str] = []
    kv_bytes, book, memory = question.kv_bytes, None, ""
    if question.card is not None:
        card = question.card
        workers = shape.tp * shape.pp
        if question.weights_total is not None:
            card = replace(card, weights_bytes=-(-question.weights_total // workers))
            if workers > 1:
                assumptions.append(f"the weights ({units.show_bytes(question.weights_total)}) are shared evenly by {workers} GPUs")
        book = ledger(card, shape.engine)
        assumptions += book.assumptions
        kv_bytes, memory = book.kv_bytes, book.equation
    elif kv_bytes is not None:
        memory = f"{units.show_bytes(kv_bytes)} stated for the pool of one worker"
    elif shape.num_gpu_blocks_override is not None:
        kv_bytes, memory = shape.num_gpu_blocks_override * layout.bytes_per_block, "the pool is set by --num-gpu-blocks-override alone"
    elif layout.unit == "cells":
        kv_bytes = cache_bytes(layout, padded(layout.max_model_len))
        memory = f"{units.show_bytes(kv_bytes)} for the context that is asked for"
    pool = size_pool(layout, kv_bytes) if kv_bytes is not None else None
    return Answer(
        question, cost, layout, pool, book, memory, tuple(dict.fromkeys([*question.architecture.assumptions, *layout.assumptions, *assumptions]))
    )
