"""llama.cpp's cells: a cache sized by the context, split among slots or shared, with a small window cache beside it.

Source: llama.cpp (src/llama-kv-cache-iswa.cpp, src/llama-context.cpp), checked against its start-up lines. A cell holds one token of every layer of its
cache. The context is padded to 256 cells; *split* slots have a cache each (``streams``), *unified* slots share one. Window layers of models that mix both
kinds have a cache of ``window x slots + micro batch`` cells, padded to 256 and never larger than the context; models whose every layer slides keep
every token. Recurrent states are in float32, one per slot.
"""

from __future__ import annotations

from pytest_kvcache import units
from pytest_kvcache.capacity.formats import parse_pair
from pytest_kvcache.capacity.growth import check_parallel, resolve_dtypes, state_bytes, token_bytes
from pytest_kvcache.capacity.layers import Architecture, Layer
from pytest_kvcache.capacity.layout import EngineShape, Group, Layout, Pool, ceil_div
from pytest_kvcache.errors import UsageError

PADDING = 256
AUTO_SLOTS = 4
CACHE_TYPES = frozenset({"float32", "float16", "bfloat16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"})


def lay_out_llamacpp(architecture: Architecture, shape: EngineShape) -> Layout:
    """Return llama.cpp's layout: ``max_model_len`` is the context of one slot; bytes are those of one cell of the full cache."""
    check_parallel(architecture, 1)
    cache_type, _, _ = resolve_dtypes(architecture, cache_type_of(shape), shape.dtype)
    refusal = ""
    for form in parse_pair(cache_type):
        if form.name not in CACHE_TYPES:
            refusal = f"llama.cpp has no cache type {form.name} (it has {', '.join(sorted(CACHE_TYPES))})"
    layers = architecture.layers
    mixes = (
        any(layer.kind in ("sliding", "chunked") for layer in layers)
        and any(layer.kind in ("full", "mla") for layer in layers)
        and not shape.swa_full
    )
    notes: list[str] = []
    full, small = 0, 0
    window = 0
    for layer in layers:
        cost = token_bytes(layer, cache_type) if layer.kind != "cross" else 0
        if mixes and layer.kind in ("sliding", "chunked"):
            small += cost
            window = max(window, layer.window or 0)
        else:
            full += cost
    if not mixes and any(layer.kind in ("sliding", "chunked") for layer in layers):
        notes.append("window layers keep every token (--swa-full, or a model whose every layer slides)")
    slots = shape.slots or shape.max_num_seqs or AUTO_SLOTS
    unified = shape.unified if shape.unified is not None else shape.slots is None and shape.max_num_seqs is None
    length = shape.max_model_len if shape.max_model_len and shape.max_model_len > 0 else architecture.context
    if length is None:
        raise UsageError("neither --max-model-len nor the file says how long a sequence may be", where=architecture.name, hint="--max-model-len 4096")
    groups = [Group("full", sum(_has_cells(layer, mixes) for layer in layers), 1, full, stage_bytes=(full,))]
    if mixes:
        groups.append(Group("sliding", sum(layer.kind in ("sliding", "chunked") for layer in layers), 1, small, window=window, stage_bytes=(small,)))
    states = slots * sum(state_bytes(layer, "float32", "float32") for layer in layers)
    notes.append(f"{slots} slots {'share one cache' if unified else 'have a cache each'}")
    return Layout(
        engine="llamacpp", shape=shape, groups=tuple(groups), bytes_per_block=full, block_size=1, max_model_len=length, in_flight_tokens=shape.micro_batch,
        unit="cells", fixed_bytes=states, refusal=refusal, notes=tuple(notes), slots=slots, unified=unified,
    )  # fmt: skip


def cache_type_of(shape: EngineShape) -> str:
    """Return the cache type that counts: float16 unless one is asked for, whatever the checkpoint says."""
    return "float16" if shape.kv_dtype in ("", "auto") else shape.kv_dtype


def _has_cells(layer: Layer, mixes: bool) -> bool:
    return layer.kind in ("full", "mla") or (not mixes and layer.kind in ("sliding", "chunked"))


def padded(cells: int) -> int:
    """Return a context as llama.cpp rounds it: up to whole 256 cells."""
    return ceil_div(cells, PADDING) * PADDING


def cache_bytes(layout: Layout, cells_per_stream: int) -> int:
    """Return the bytes of all caches for a stream of so many cells: the full cache, the window cache and the states, over all streams."""
    streams = 1 if layout.unified else layout.slots
    total = cells_per_stream * layout.groups[0].page_bytes
    for group in layout.groups[1:]:
        seats = layout.slots if layout.unified else 1
        total += padded(min(cells_per_stream, (group.window or 0) * seats + layout.in_flight_tokens)) * group.page_bytes
    return streams * total + layout.fixed_bytes


def llamacpp_blocks(layout: Layout, tokens: int, *, live: bool = False) -> int:
    """Return the cells of one request: one a token, in the full cache; without one, none."""
    del layout, live
    return tokens


def size_llamacpp(layout: Layout, kv_bytes: int) -> Pool:
    """Return the largest caches that a memory holds; llama.cpp starts where the context that was asked for fits."""
    asked = padded(layout.max_model_len)
    streams = 1 if layout.unified else layout.slots
    cells = _most_cells(layout, kv_bytes)
    total = cells * streams
    reason = layout.refusal
    if not reason and cache_bytes(layout, asked) > kv_bytes:
        reason = (
            f"{streams} cache{'s' if streams > 1 else ''} of {asked:,} cells need{'' if streams > 1 else 's'} {units.show_bytes(cache_bytes(layout, asked))}"
            f" and {units.show_bytes(kv_bytes)} are there{f'; {cells:,} cells a slot would fit' if cells else ''}"
        )
    if layout.unified:
        concurrency = min(total / layout.max_model_len, float(layout.slots))
    else:
        concurrency = float(layout.slots) if cells >= layout.max_model_len else 0.0
    return Pool(
        pool_bytes=cache_bytes(layout, cells) if cells else 0, pool_blocks=total, usable_blocks=total, pool_tokens=total, max_concurrency=concurrency,
        blocks_per_request=layout.max_model_len, max_model_len=layout.max_model_len, longest=min(layout.max_model_len, cells), starts=not reason,
        reason=reason, engines=layout.shape.dp,
    )  # fmt: skip


def _most_cells(layout: Layout, kv_bytes: int) -> int:
    low, high = 0, 2**40 // PADDING
    while low < high:
        middle = (low + high + 1) // 2
        if cache_bytes(layout, middle * PADDING) <= kv_bytes:
            low = middle
        else:
            high = middle - 1
    grows = cache_bytes(layout, 2 * PADDING) > cache_bytes(layout, PADDING)
    return low * PADDING if grows else padded(layout.max_model_len)
