"""vLLM 0.32's blocks: groups of layers, pages made equal, and what each group charges a request.

Source: the behaviour of vLLM 0.32.0 (v1/core/kv_cache_utils.py, v1/kv_cache_interface.py, platforms/), checked against real starts. Layers of one kind share a
block table. Where kinds mix, every block of the pool has the same bytes: a layer whose page is smaller gets more tokens per block (or is padded), kinds are
cut into groups of equally many layers, and incomplete groups waste their empty places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_kvcache.capacity import families
from pytest_kvcache.capacity.formats import VLLM_CACHE_TYPES, parse_format, parse_pair
from pytest_kvcache.capacity.growth import (
    check_parallel,
    heads_per_rank,
    indexer_bytes,
    latent_bytes,
    resolve_dtypes,
    stages,
    state_bytes,
    token_bytes,
)
from pytest_kvcache.capacity.layers import Architecture, Kind, Layer, State
from pytest_kvcache.capacity.layout import EngineShape, Group, Layout, ceil_div

CPU_BLOCK = 128
CPU_LATENT_BLOCK = 16
CPU_KERNEL_BLOCK = 32
GPU_BLOCK = 16
GPU_LATENT_BLOCK = 64
LATENT_HYBRID_BLOCK = 128
UNSTATED_LENGTH = 2048  # what vLLM takes where no key of a configuration says
CPU_BATCHED_TOKENS = 2048
CPU_SEATS = 128
# What a server batches and seats by default: (cards from so many GiB, batched tokens, seats). An A100 of 80 GB counts as a small card (vLLM 0.32).
CARD_DEFAULTS = ((160, 16384, 1024), (70, 8192, 1024), (0, 2048, 256))


@dataclass(frozen=True, slots=True)
class _Cache:
    """One cache of one layer on one rank. A layer with an indexer has two."""

    layer: int
    kind: Kind
    shape: tuple[int, ...]
    block_size: int
    page_bytes: int
    window: int | None = None
    states: int = 0

    @property
    def family(self) -> str:
        return "full" if self.kind in ("full", "mla") else self.kind


def lay_out_vllm(architecture: Architecture, shape: EngineShape) -> Layout:
    """Return vLLM 0.32's layout. Raises UsageError for types or parallelism that the model cannot have."""
    check_parallel(architecture, shape.tp, shape.pp)
    cache_type, model_type, assumed = resolve_dtypes(architecture, shape.kv_dtype, shape.dtype)
    assumptions, notes = list(assumed), list[str]()
    length = _max_model_len(architecture, shape)
    if architecture.context is None and not (shape.max_model_len and shape.max_model_len > 0):
        assumptions.append(f"the longest sequence is taken as {UNSTATED_LENGTH} tokens: the configuration does not say")
    elif architecture.unscaled_context and length == architecture.unscaled_context and not (shape.max_model_len and shape.max_model_len > 0):
        assumptions.append(
            f"max_model_len is taken as {length}, as vLLM takes it before LongRoPE; --max-model-len up to {architecture.context} is served too"
        )
    block_size, block_note = _block_size(architecture, shape, length, cache_type)
    notes += block_note
    layers = architecture.layers + (architecture.mtp_layers if shape.mtp else ())
    caches = _caches(layers, architecture, shape, cache_type, model_type, block_size, length)
    refusal = architecture.refused_by_vllm or _refusal(architecture, shape, caches, cache_type)
    batched = shape.max_num_batched_tokens or _batched_tokens(architecture, shape, length)
    if shape.max_num_batched_tokens is None and any(cache.kind in ("sliding", "chunked") for cache in caches):
        assumptions.append(f"max_num_batched_tokens is taken as {batched}, {_whose_default(shape)}: window layers are charged for it")
    try:
        groups = _groups(caches, stages(len(architecture.layers), shape.pp, len(layers) - len(architecture.layers)), shape)
    except NotImplementedError as error:
        groups, refusal = (), refusal or str(error)
    stage_bytes = [max((group.stage_bytes[stage] for group in groups), default=0) for stage in range(shape.pp)]
    if groups and not all(stage_bytes) and not refusal:
        refusal = f"pipeline stage {stage_bytes.index(0) + 1} of {shape.pp} has no layer that keeps a cache of its own"
    attention = [group.block_size for group in groups if group.kind in ("full", "mla")]
    return Layout(
        engine="vllm",
        shape=shape,
        groups=groups,
        bytes_per_block=max(stage_bytes, default=0),
        block_size=min(attention or [group.block_size for group in groups] or [block_size]),
        max_model_len=length,
        in_flight_tokens=batched * shape.batches_in_flight,
        encoder_tokens=batched,
        null_blocks=1,
        refusal=refusal,
        assumptions=tuple(assumptions),
        notes=tuple(notes),
    )


def _max_model_len(architecture: Architecture, shape: EngineShape) -> int:
    if shape.max_model_len is not None and shape.max_model_len > 0:
        return shape.max_model_len
    return architecture.unscaled_context or architecture.context or UNSTATED_LENGTH


def default_seats(shape: EngineShape) -> int:
    """Return the most requests that vLLM 0.32's server runs at once where nobody says (``--max-num-seqs``)."""
    return CPU_SEATS * shape.tp * shape.pp if shape.platform == "cpu" else _card_defaults(shape)[1]


def _card_defaults(shape: EngineShape) -> tuple[int, int]:
    gib = 80 if shape.card_bytes is None else shape.card_bytes / 2**30
    return next((batched, seats) for least, batched, seats in CARD_DEFAULTS if gib >= least)


def _whose_default(shape: EngineShape) -> str:
    if shape.platform == "cpu":
        return "the default"
    if shape.card_bytes is None or 70 <= shape.card_bytes / 2**30 < 160:
        return "the default of cards from 70 to 160 GiB (2048 on an A100 and on smaller ones, 16384 on larger ones)"
    return "the default of a card of this size"


def _batched_tokens(architecture: Architecture, shape: EngineShape, length: int) -> int:
    seats = shape.max_num_seqs or default_seats(shape)
    if shape.platform == "gpu":
        return min(seats * length, _card_defaults(shape)[0])
    if architecture.latent:
        return max(length, CPU_BATCHED_TOKENS)
    return min(seats * length, CPU_BATCHED_TOKENS * shape.tp * shape.pp)


def _block_size(architecture: Architecture, shape: EngineShape, length: int, cache_type: str) -> tuple[int, list[str]]:
    """Return the tokens per block before kinds are made to match, and what to say of it."""
    if not any(layer.kind not in ("state", "none", "shared") for layer in architecture.layers):
        return length, []
    if shape.platform == "cpu" and architecture.latent:
        wanted = shape.block_size
        return CPU_LATENT_BLOCK, [f"vLLM's CPU build keeps latent layers in blocks of 16 and ignores --block-size {wanted}"] if wanted not in (
            None,
            16,
        ) else []
    if shape.block_size is not None:
        odd = shape.platform == "gpu" and not architecture.latent and shape.block_size % GPU_BLOCK
        return shape.block_size, [
            f"FlashAttention and FlashInfer take blocks of a multiple of {GPU_BLOCK}: with {shape.block_size} vLLM takes a slower kernel or refuses"
        ] if odd else []
    if shape.platform == "cpu":
        return CPU_BLOCK, []
    if architecture.latent:
        sparse, wide = any(layer.index_size for layer in architecture.layers), cache_type in ("bfloat16", "float16")
        if wide and not sparse:
            return GPU_BLOCK, [f"blocks of {GPU_BLOCK} tokens, as latent kernels of A100, H100 and H200 take them by default; a B200's takes 32"]
        return GPU_LATENT_BLOCK, [f"blocks of {GPU_LATENT_BLOCK} tokens, as FlashMLA takes them; a B200's kernel for dense latents takes 32"]
    return GPU_BLOCK, []


def _caches(
    layers: Sequence[Layer], architecture: Architecture, shape: EngineShape, cache_type: str, model_type: str, block_size: int, length: int
) -> list[_Cache]:
    attention = [layer for layer in layers if layer.kind not in ("state", "none", "shared")]
    states = [layer for layer in layers if layer.state is not None]
    state_type = _state_type(shape, states)
    hybrid = bool(attention) or architecture.model_type not in families.STATES_ONLY  # vLLM goes by the class, whatever layers a file gives it
    aligned = shape.prefix_caching and hybrid and not (shape.platform == "cpu" and architecture.latent)
    largest = max((state_bytes(layer, model_type, state_type, shape.tp) for layer in states), default=0)
    padded = 0
    if attention and largest:
        per_token = max(token_bytes(replace(layer, index_size=0), cache_type, shape.tp) for layer in attention)
        step = max(CPU_KERNEL_BLOCK if shape.platform == "cpu" else GPU_BLOCK, block_size)
        if architecture.latent:
            step = max(step, LATENT_HYBRID_BLOCK)
        block_size = max(block_size, step * ceil_div(largest, step * per_token))
        padded = block_size * per_token
    made: list[_Cache] = []
    for index, layer in enumerate(layers):
        if layer.state is not None:
            page = padded or state_bytes(layer, model_type, state_type, shape.tp)
            blocks = 2 + layer.state.checkpoint if aligned else 1
            made.append(_Cache(index, "state", _state_shape(layer.state, shape.tp), block_size if aligned else length, page, states=blocks))
        if layer.kind not in ("state", "none", "shared"):
            made += _attention_caches(index, layer, cache_type, shape, block_size)
    if (
        architecture.model_type in families.ALL_KEPT_BY_VLLM
        or not shape.hybrid
        or (not shape.chunked_local_hybrid and any(cache.kind == "chunked" for cache in made))
    ):
        made = _all_full(made)
    return made


def _attention_caches(index: int, layer: Layer, cache_type: str, shape: EngineShape, block_size: int) -> list[_Cache]:
    if layer.kind == "mla":
        latent = latent_bytes(layer, parse_pair(cache_type)[0])
        made = [_Cache(index, "mla", (1, layer.key_size, 0), block_size, block_size * latent)]
        if layer.index_size:
            made.append(_Cache(index, "mla", (1, layer.index_size, -1), block_size, block_size * indexer_bytes(layer)))
        return made
    heads = heads_per_rank(layer, shape.tp)
    page = block_size * token_bytes(layer, cache_type, shape.tp)
    return [
        _Cache(
            index, layer.kind, (heads, layer.key_size, layer.value_size), block_size, page, layer.window and layer.window + layer.vllm_window_extra
        )
    ]


def _state_type(shape: EngineShape, states: Sequence[Layer]) -> str:
    """vLLM's CPU build keeps recurrent states in float32 unless told otherwise for a gated delta net."""
    if shape.platform != "cpu":
        return shape.state_dtype
    families = {layer.state.family for layer in states if layer.state}
    if shape.state_dtype in ("float16", "bfloat16") and families == {"gdn"}:
        return shape.state_dtype
    return "auto" if families <= {"linear", "short_conv"} else "float32"


def _state_shape(state: State, tp: int) -> tuple[int, ...]:
    return (*state.elements(tp), state.checkpoint)


def _all_full(caches: list[_Cache]) -> list[_Cache]:
    """Window layers as full ones, where the hybrid manager is off and the model has full layers beside them."""
    if not any(cache.family == "full" for cache in caches):
        return caches
    return [replace(cache, kind="full", window=None) if cache.kind in ("sliding", "chunked") else cache for cache in caches]


def _groups(caches: list[_Cache], parts: Sequence[range], shape: EngineShape) -> tuple[Group, ...]:
    if not caches:
        return ()
    if len({(cache.family, cache.window, cache.block_size) for cache in caches}) == 1 and (
        caches[0].kind != "state" or len({c.page_bytes for c in caches}) == 1
    ):
        return (_group(caches, len(caches), parts),)
    if not shape.hybrid:
        raise NotImplementedError("Failed to promote local KV cache specs to one unified type: the hybrid manager is off and this model needs it")
    try:
        equal = _equal_pages(caches)
    except NotImplementedError:
        if not any(cache.kind == "sliding" for cache in caches) or any(cache.kind in ("chunked", "state", "cross") for cache in caches):
            raise
        return _groups(_all_full(caches), parts, shape)
    buckets: dict[tuple[object, ...], list[_Cache]] = {}
    for cache in equal:
        buckets.setdefault((cache.kind, cache.window, cache.block_size, cache.shape), []).append(cache)
    fewest, most = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = most if most < 1.5 * fewest else fewest
    groups = []
    for bucket in buckets.values():
        number = ceil_div(len(bucket), size)
        groups += [_group(bucket[i::number], size, parts) for i in range(number)]
    return tuple(groups)


def _group(caches: Sequence[_Cache], size: int, parts: Sequence[range]) -> Group:
    first = caches[0]
    stage_bytes = tuple(sum(cache.page_bytes for cache in caches if cache.layer in part) for part in parts)
    if len(parts) == 1 and size > len(caches):
        stage_bytes = (stage_bytes[0] + (size - len(caches)) * first.page_bytes,)
    return Group(
        kind=first.kind,
        layers=len(caches),
        block_size=first.block_size,
        page_bytes=sum(cache.page_bytes for cache in caches) // len(caches),
        window=first.window,
        states=max(cache.states for cache in caches),
        padding=size - len(caches),
        stage_bytes=stage_bytes,
    )


def _equal_pages(caches: list[_Cache]) -> list[_Cache]:
    """Give every layer the largest page: more tokens per block where that divides, an unused tail where it does not. A latent layer cannot be padded."""
    largest = max(cache.page_bytes for cache in caches)
    made = []
    for cache in caches:
        if cache.page_bytes == largest:
            made.append(cache)
        elif cache.kind != "state" and largest % cache.page_bytes == 0:
            made.append(replace(cache, block_size=cache.block_size * (largest // cache.page_bytes), page_bytes=largest))
        elif cache.kind == "mla":
            raise NotImplementedError(f"vLLM 0.32 cannot pad a latent layer's page of {cache.page_bytes} bytes to {largest}")
        else:
            made.append(replace(cache, page_bytes=largest))
    return made


def _refusal(architecture: Architecture, shape: EngineShape, caches: Sequence[_Cache], cache_type: str) -> str:
    """Return why vLLM would not start, whatever the memory."""
    asked = shape.kv_dtype or "auto"
    name = asked if asked == "auto" else parse_format(asked).name if "/" not in asked else asked
    if name not in VLLM_CACHE_TYPES:
        return f"vLLM 0.32 has no KV cache type {name} (it has {', '.join(sorted(VLLM_CACHE_TYPES))})"
    if shape.platform == "cpu":
        if any(layer.index_size for layer in architecture.layers):
            return "Sparse Attention is not supported on CPU"
        if architecture.latent and shape.prefix_caching and any(layer.state for layer in architecture.layers):
            return (
                "latent and recurrent layers together: the CPU build switches prefix caching off and then refuses (--no-enable-prefix-caching starts)"
            )
        given = shape.block_size
        if given and not architecture.latent and any(cache.kind != "state" for cache in caches) and given % CPU_KERNEL_BLOCK:
            return f"No common block size for {given} (CPU_ATTN: [MultipleOf({CPU_KERNEL_BLOCK})])"
        if shape.tp * shape.pp > 1 and shape.numa_nodes == 1 and "|" not in shape.threads_bind:
            return f"Not enough allowed NUMA nodes to bind threads of {shape.tp * shape.pp} local CPUWorkers"
        if shape.cpu_space and not shape.cpu_space.strip().isdigit():
            return f"VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB, and is {shape.cpu_space[:20]!r}"
    for heads in {layer.kv_heads for layer in architecture.layers if layer.kind not in ("mla", "state", "none", "shared")}:
        if heads % shape.tp if heads >= shape.tp else shape.tp % heads:
            return f"{heads} KV heads and a tensor parallelism of {shape.tp}: neither divides the other"
    for state_heads in {layer.state.heads for layer in architecture.layers if layer.state is not None}:
        if state_heads % shape.tp:
            return f"{state_heads} heads of a recurrent state cannot be divided by a tensor parallelism of {shape.tp}"
    if architecture.context and architecture.context_stated and (shape.max_model_len or 0) > architecture.context:
        return f"User-specified max_model_len ({shape.max_model_len}) is greater than the derived max_model_len ({architecture.context})"
    if shape.dcp > 1 and any(cache.kind in ("sliding", "chunked") for cache in caches):
        return "decode context parallelism does not support window layers"
    return _dcp_refusal(architecture, shape) if shape.dcp > 1 else ""


def _dcp_refusal(architecture: Architecture, shape: EngineShape) -> str:
    """Ranks of one tensor-parallel group share the tokens: they must hold copies of the same heads (``vllm/config/parallel.py``, ``model.py``)."""
    if shape.tp % shape.dcp:
        return f"tp_size={shape.tp} must be divisible by dcp_size={shape.dcp}"
    heads = max((layer.kv_heads for layer in architecture.layers if layer.kind == "full"), default=0)
    if architecture.latent or not heads:
        return ""
    if shape.tp <= heads:
        return f"decode context parallelism needs more tensor-parallel ranks ({shape.tp}) than the model has KV heads ({heads})"
    if shape.dcp > shape.tp // heads:
        return f"a decode context parallelism of {shape.dcp} is more than the {shape.tp // heads} copies of each KV head that {shape.tp} ranks hold"
    queries = architecture.query_heads // heads
    return f"{queries} query heads per KV head cannot be divided by a decode context parallelism of {shape.dcp}" if queries % shape.dcp else ""
