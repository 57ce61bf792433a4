"""From a model and an engine's settings to blocks: what a memory holds, what a request takes, and whether the engine would start."""

from __future__ import annotations

from pytest_kvcache.capacity.layers import Architecture
from pytest_kvcache.capacity.layout import EngineShape, Group, Layout, Pool, ceil_div
from pytest_kvcache.capacity.llamacpp_cells import lay_out_llamacpp, llamacpp_blocks, size_llamacpp
from pytest_kvcache.capacity.sglang_pool import lay_out_paged, lay_out_sglang, sglang_blocks, size_paged, size_sglang
from pytest_kvcache.capacity.vllm_blocks import lay_out_vllm

__all__ = ["EngineShape", "Group", "Layout", "Pool", "blocks_for", "lay_out", "size_pool"]


def lay_out(architecture: Architecture, shape: EngineShape) -> Layout:
    """Return how the engine of ``shape`` lays out the model. Raises UsageError for settings that the model cannot have."""
    makers = {"vllm": lay_out_vllm, "sglang": lay_out_sglang, "llamacpp": lay_out_llamacpp, "paged": lay_out_paged}
    return makers[shape.engine](architecture, shape)


def blocks_for(layout: Layout, tokens: int, *, live: bool = False) -> int:
    """Return the blocks of one sequence of ``tokens``, summed over the groups.

    By default what the engine charges a request of that length when it starts and when it admits (window groups: the window less one, the tokens in flight,
    and one block); with ``live`` what a decoding request really holds once ``tokens`` tokens have their K and V (prompt + received - 1), which for
    window groups is less and saws (measured on vLLM 0.32).
    """
    if tokens <= 0:
        return 0
    if layout.engine == "llamacpp":
        return llamacpp_blocks(layout, tokens)
    if layout.engine in ("sglang", "paged"):
        return sglang_blocks(layout, tokens)
    return sum(_group_blocks(layout, group, tokens, live) for group in layout.groups)


def _group_blocks(layout: Layout, group: Group, tokens: int, live: bool) -> int:
    size = group.block_size
    if group.kind == "state":
        return group.states
    if group.kind == "cross":
        return ceil_div(layout.encoder_tokens, size)
    held = ceil_div(ceil_div(tokens, layout.shape.dcp), size)
    if group.window is None or group.kind not in ("sliding", "chunked"):
        return held
    if live:
        gone = max(0, tokens - group.window) if group.kind == "sliding" else (tokens - 1) // group.window * group.window
        return held - gone // size
    if group.kind == "sliding":
        return ceil_div(min(group.window - 1 + layout.in_flight_tokens, tokens), size) + 1
    return ceil_div(min(group.window + layout.in_flight_tokens, tokens), size)


def size_pool(layout: Layout, kv_bytes_per_worker: int) -> Pool:
    """Return what ``kv_bytes_per_worker`` becomes under a layout, and whether the engine would start with it."""
    others = {"sglang": size_sglang, "llamacpp": size_llamacpp, "paged": size_paged}
    if layout.engine in others:
        return others[layout.engine](layout, kv_bytes_per_worker)
    override = layout.shape.num_gpu_blocks_override
    length = layout.max_model_len
    notes: list[str] = []
    if not layout.groups:
        return _without_cache(layout, kv_bytes_per_worker)
    blocks = kv_bytes_per_worker // layout.bytes_per_block
    if override is not None:
        notes.append(f"the memory would hold {blocks} blocks; num_gpu_blocks_override makes it {override}")
        blocks = override
    usable = max(0, blocks - layout.null_blocks)
    longest = _longest(layout, usable, length)
    reason = layout.refusal
    if layout.shape.max_model_len == -1 and longest:
        length = longest
    need = blocks_for(layout, length)
    if not reason and (usable <= 0 if override is not None else kv_bytes_per_worker <= layout.bytes_per_block):
        reason = "No available memory for the cache blocks"
    elif not reason and need > usable:
        reason = (
            f"one request of {length} tokens needs {need} blocks and {usable} of {blocks} can be held"
            f"{'; the longest that starts is ' + str(longest) + ' tokens' if longest else ''}"
        )
    concurrency = blocks / need if need else 0.0
    return Pool(
        pool_bytes=kv_bytes_per_worker if override is None else blocks * layout.bytes_per_block,
        pool_blocks=blocks,
        usable_blocks=usable,
        pool_tokens=int(concurrency * length),
        max_concurrency=concurrency,
        blocks_per_request=need,
        max_model_len=length,
        longest=longest,
        starts=not reason,
        reason=reason,
        engines=layout.shape.dp,
        notes=tuple(notes),
    )


def _longest(layout: Layout, usable: int, most: int) -> int:
    """Return the longest length, up to ``most``, of which one request fits (0: not even one token)."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(layout, middle) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def _without_cache(layout: Layout, kv_bytes: int) -> Pool:
    return Pool(
        pool_bytes=kv_bytes,
        pool_blocks=1,
        usable_blocks=0,
        pool_tokens=0,
        max_concurrency=0.0,
        blocks_per_request=0,
        max_model_len=layout.max_model_len,
        longest=layout.max_model_len,
        starts=not layout.refusal,
        reason=layout.refusal,
        engines=layout.shape.dp,
        notes=("no layer keeps a cache",),
    )
