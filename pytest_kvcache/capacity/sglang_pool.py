"""SGLang's token pool: bytes of one token over all layers, a window pool beside the full one, and slots for recurrent states.

Source: SGLang 0.5 (python/sglang/srt/model_executor/pool_configurator.py): pool tokens = memory // bytes per token, rounded down to whole pages; where full and
window layers mix, the window pool has ``swa_full_tokens_ratio`` times the tokens of the full one; recurrent models first give 0.9/1.9 of the memory to
their states (``mamba_full_memory_ratio``) unless the slots are stated. SGLang starts with a pool shorter than the context and then caps each request.
"""

from __future__ import annotations

from dataclasses import replace

from pytest_kvcache.capacity.formats import parse_pair
from pytest_kvcache.capacity.growth import check_parallel, resolve_dtypes, stages, state_bytes, token_bytes
from pytest_kvcache.capacity.layers import Architecture, Layer
from pytest_kvcache.capacity.layout import EngineShape, Group, Layout, Pool, ceil_div
from pytest_kvcache.errors import UsageError

# --kv-cache-dtype of SGLang 0.5 (srt/server_args.py); fp8 is taken as its fp8_e4m3
CACHE_TYPES = frozenset({"bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4"})
STATE_SHARE = 0.9 / 1.9
STATE_TYPE = "float32"
RESERVE = 6  # tokens that SGLang keeps back of the longest prompt (managers/tp_worker.py)


def lay_out_sglang(architecture: Architecture, shape: EngineShape) -> Layout:
    """Return SGLang's layout: one block is a page of ``block_size`` tokens (1 unless stated)."""
    check_parallel(architecture, shape.tp, shape.pp)
    cache_type, model_type, assumed = resolve_dtypes(architecture, shape.kv_dtype, shape.dtype)
    page = shape.block_size or 1
    alien = [form.name for form in parse_pair(cache_type) if form.name not in CACHE_TYPES] if shape.engine == "sglang" else []
    layers = architecture.layers + (architecture.mtp_layers if shape.mtp else ())
    windowed = (
        shape.hybrid and any(layer.kind in ("sliding", "chunked") for layer in layers) and any(layer.kind in ("full", "mla") for layer in layers)
    )
    notes: list[str] = []
    if windowed:
        notes.append(f"window layers have a pool of their own with {shape.swa_ratio:g} of the tokens (--swa-full-tokens-ratio)")
    elif any(layer.kind in ("sliding", "chunked") for layer in layers):
        notes.append("every token is kept in the window layers too: SGLang's window pool is for models that mix both kinds")
    parts = stages(len(architecture.layers), shape.pp, len(layers) - len(architecture.layers))
    costs = [_cost([layers[i] for i in part], cache_type, shape, windowed) for part in parts]
    states = max(sum(state_bytes(layers[i], model_type, _state_type(shape), shape.tp) for i in part) for part in parts)
    if states:
        notes.append("recurrent states have slots of their own; the rest of the memory is the token pool")
    groups = [Group("full", sum(layer.kind in ("full", "mla") for layer in layers), page, 0)]
    if windowed:
        window = max(layer.window or 0 for layer in layers)
        groups.append(Group("sliding", sum(layer.kind in ("sliding", "chunked") for layer in layers), page, 0, window=window))
    length = shape.max_model_len if shape.max_model_len and shape.max_model_len > 0 else architecture.context
    if length is None:
        raise UsageError(
            "neither --max-model-len nor the configuration says how long a sequence may be", where=architecture.name, hint="--max-model-len 4096"
        )
    return Layout(
        engine="sglang", shape=shape, groups=tuple(groups), bytes_per_block=int(max(costs) * page), block_size=page, max_model_len=length,
        in_flight_tokens=0, unit="blocks" if page > 1 else "tokens", fixed_bytes=states, assumptions=assumed, notes=tuple(notes),
        refusal=f"SGLang has no KV cache type {alien[0]} (it has auto, bf16, fp8_e4m3, fp8_e5m2, fp4_e2m1)" if alien else "",
    )  # fmt: skip


def _state_type(shape: EngineShape) -> str:
    return STATE_TYPE if shape.state_dtype == "auto" else shape.state_dtype


def _cost(layers: list[Layer], cache_type: str, shape: EngineShape, windowed: bool) -> float:
    """Return the bytes of one token of the pool on one stage, window layers at their share."""
    total = 0.0
    for layer in layers:
        share = shape.swa_ratio if windowed and layer.kind in ("sliding", "chunked") else 1.0
        if layer.kind != "cross":
            total += share * token_bytes(layer, cache_type, shape.tp)
    return total


def sglang_blocks(layout: Layout, tokens: int, *, live: bool = False) -> int:
    """Return the pages of one request. Where the window pool binds, its need is counted in pages of the full pool, so that one sum tells what fits."""
    del live
    page = layout.block_size
    need = ceil_div(tokens, page)
    for group in layout.groups:
        if group.window:
            held = ceil_div(min(tokens, group.window + page), page)
            need = max(need, int(-(-held // layout.shape.swa_ratio)))
    return need


def size_sglang(layout: Layout, kv_bytes: int) -> Pool:
    """Return SGLang's pool of a memory."""
    page, shape = layout.block_size, layout.shape
    notes: list[str] = []
    slots = shape.state_slots
    if layout.fixed_bytes:
        if slots is None:
            slots = int(kv_bytes * STATE_SHARE) // layout.fixed_bytes
        kv_bytes -= slots * layout.fixed_bytes
        notes.append(f"{slots} slots for recurrent states")
    blocks = max(0, kv_bytes) // layout.bytes_per_block if layout.bytes_per_block else 0
    tokens = blocks * page
    need = sglang_blocks(layout, layout.max_model_len)
    reason = layout.refusal
    if not reason and blocks <= 0:
        reason = "Not enough memory. Please try to increase --mem-fraction-static."
    for group in layout.groups:
        if not reason and group.window and int(tokens * shape.swa_ratio) // page * page <= group.window + page:
            reason = f"the window pool ({int(tokens * shape.swa_ratio) // page * page} tokens) cannot hold a window of {group.window} and a page"
        small = int(tokens * shape.swa_ratio) // page * page
        if not reason and group.window and small - RESERVE < min(tokens, layout.max_model_len):
            notes.append(f"until April 2026 (PR 22597) SGLang refused prompts beyond the window pool: {small - RESERVE} tokens here")
    if tokens < layout.max_model_len:
        notes.append(f"SGLang starts and refuses requests beyond {tokens} tokens: the pool is shorter than the context of {layout.max_model_len}")
    concurrency = blocks / need if need else 0.0
    if slots is not None and layout.fixed_bytes:
        concurrency = min(concurrency, float(slots))
    return Pool(
        pool_bytes=blocks * layout.bytes_per_block, pool_blocks=blocks, usable_blocks=blocks, pool_tokens=tokens, max_concurrency=concurrency,
        blocks_per_request=need, max_model_len=layout.max_model_len, longest=min(tokens, layout.max_model_len), starts=not reason, reason=reason,
        engines=shape.dp, notes=tuple(notes),
    )  # fmt: skip


def lay_out_paged(architecture: Architecture, shape: EngineShape) -> Layout:
    """Return the layout of a plain paged engine: one table of blocks for every layer, nothing freed behind a window, no null block."""
    made = lay_out_sglang(architecture, replace(shape, hybrid=False, block_size=shape.block_size or 16, state_dtype=shape.state_dtype))
    notes = (
        ["every layer keeps every token: a plain paged cache frees nothing behind a window"]
        if any(layer.kind in ("sliding", "chunked") for layer in architecture.layers)
        else []
    )
    return replace(made, engine="paged", shape=shape, unit="blocks", notes=tuple(notes))


def size_paged(layout: Layout, kv_bytes: int) -> Pool:
    """Return a plain paged engine's pool: it starts where one request of the longest length fits."""
    blocks = kv_bytes // layout.bytes_per_block if layout.bytes_per_block else 0
    if layout.shape.num_gpu_blocks_override is not None:
        blocks = layout.shape.num_gpu_blocks_override
    need = ceil_div(layout.max_model_len, layout.block_size)
    longest = min(layout.max_model_len, blocks * layout.block_size)
    reason = layout.refusal or ("" if need <= blocks else f"one request of {layout.max_model_len} tokens needs {need} blocks and there are {blocks}")
    return Pool(
        pool_bytes=blocks * layout.bytes_per_block, pool_blocks=blocks, usable_blocks=blocks, pool_tokens=blocks * layout.block_size,
        max_concurrency=blocks / need if need else 0.0, blocks_per_request=need, max_model_len=layout.max_model_len, longest=longest, starts=not reason,
        reason=reason, engines=layout.shape.dp,
    )  # fmt: skip
