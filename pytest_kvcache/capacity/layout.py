"""What an engine makes of a model's layers: groups of layers that share a block table, and the bytes of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_kvcache.capacity.layers import Kind

Engine = Literal["vllm", "sglang", "llamacpp", "paged"]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How an engine is set up, as far as its cache goes. None stands for the engine's own default.

    ``platform`` is ``cpu`` for vLLM's CPU build (blocks of 128 tokens, one batch in flight, recurrent states in float32, 2,048 batched tokens per rank) and
    ``gpu`` for cards (blocks of 16, asynchronous scheduling: two batches in flight, so that window layers are charged for twice the batched tokens).
    ``max_model_len`` -1 lets vLLM fit the longest length itself; ``encoder_tokens`` are the image or encoder tokens of one request (cross attention);
    ``mtp`` says that the checkpoint's own draft layers are served too. ``slots``, ``unified``, ``micro_batch`` and ``swa_full`` are llama.cpp's
    (-np, -kvu, -ub, --swa-full); ``swa_ratio`` and ``state_slots`` are SGLang's (--swa-full-tokens-ratio, --max-mamba-cache-size).
    ``card_bytes`` is the memory of one card, where known: vLLM's default of batched tokens and seats goes by it.
    ``cpu_space`` is the text of VLLM_CPU_KVCACHE_SPACE, ``threads_bind`` that of VLLM_CPU_OMP_THREADS_BIND and ``numa_nodes`` the host's nodes, where known.
    """

    engine: Engine = "vllm"
    kv_dtype: str = "auto"
    dtype: str = "auto"
    state_dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    prefix_caching: bool = True
    hybrid: bool = True
    num_gpu_blocks_override: int | None = None
    platform: Literal["gpu", "cpu"] = "cpu"
    async_scheduling: bool | None = None
    chunked_local_hybrid: bool = True
    mtp: bool = False
    encoder_tokens: int = 0
    slots: int | None = None
    unified: bool | None = None
    micro_batch: int = 512
    swa_full: bool = False
    swa_ratio: float = 0.8
    state_slots: int | None = None
    cpu_space: str = ""
    threads_bind: str = ""
    numa_nodes: int | None = None
    card_bytes: int | None = None

    @property
    def batches_in_flight(self) -> int:
        """Batches that may be scheduled and not yet settled: one per pipeline stage, and one more with asynchronous scheduling (vLLM 0.32)."""
        overlapping = self.platform == "gpu" if self.async_scheduling is None else self.async_scheduling
        return self.pp + 1 if overlapping else self.pp


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table.

    ``layers`` counts them, ``padding`` the empty places beside them; one block of the group holds ``block_size`` tokens of each of its layers, at
    ``page_bytes`` a layer (of differing layers: the mean). ``states`` are the blocks that a recurrent group takes per request, whatever its length.
    ``stage_bytes`` are the bytes of one block on each pipeline stage.
    """

    kind: Kind
    layers: int
    block_size: int
    page_bytes: int
    window: int | None = None
    states: int = 0
    padding: int = 0
    stage_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """How one engine lays out one model.

    ``bytes_per_block`` are the bytes of one block on the worker that needs most (a *token* of SGLang, a *cell* of llama.cpp: ``unit``); ``block_size``
    is the full-attention group's (the smallest group's without one), as the engine shows it; ``null_blocks`` are blocks that no request can hold.
    ``in_flight_tokens`` is what window groups are charged for on top of their window. ``refusal`` says why the engine would not start, whatever the
    memory ("" it would). ``assumptions`` and ``notes`` are sentences for the reader. ``fixed_bytes`` are recurrent states that lie outside the blocks
    (SGLang: of one request; llama.cpp: of all slots). ``slots`` and ``unified`` are llama.cpp's. ``encoder_tokens`` is
    what vLLM charges cross-attention groups for: the batched tokens, whatever an input has.
    """

    engine: Engine
    shape: EngineShape
    groups: tuple[Group, ...]
    bytes_per_block: int
    block_size: int
    max_model_len: int
    in_flight_tokens: int
    unit: Literal["blocks", "tokens", "cells"] = "blocks"
    null_blocks: int = 0
    fixed_bytes: int = 0
    refusal: str = ""
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    slots: int = 0
    unified: bool = False
    encoder_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """What a given memory becomes.

    ``pool_blocks`` are one engine's, as it prints them; ``usable_blocks`` what requests can hold; ``pool_tokens`` the engine's own figure (vLLM: concurrency
    times length, truncated); ``max_concurrency`` requests of ``max_model_len`` at once, as the engine prints it; ``blocks_per_request`` one of them.
    ``starts`` is False with the ``reason`` where the engine would refuse; ``longest`` is the longest length that would start (0: none).
    ``engines`` counts the pools of a data-parallel server: every figure is one pool's.
    """

    pool_bytes: int
    pool_blocks: int
    usable_blocks: int
    pool_tokens: int
    max_concurrency: float
    blocks_per_request: int
    max_model_len: int
    longest: int
    starts: bool
    reason: str = ""
    engines: int = 1
    notes: tuple[str, ...] = ()


def ceil_div(value: int, by: int) -> int:
    """Return value / by, rounded up."""
    return -(-value // by)
