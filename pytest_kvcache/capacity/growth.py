"""Bytes of one sequence: what grows with its length, what is fixed, and what saturates. Per GPU, under tensor and pipeline parallelism.

Three numbers that are never folded into one (design 5): ``growth_bytes_per_token`` (full attention and latent layers), ``fixed_bytes`` (recurrent
states), and the window layers' ``sliding_bytes_per_token`` until ``sliding_saturated_bytes``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_kvcache.capacity.formats import Format, parse_format, parse_pair
from pytest_kvcache.capacity.layers import Architecture, Layer
from pytest_kvcache.errors import UsageError

INDEXER_SCALE_BLOCK = 128  # elements that share one 4-byte scale in the indexer's fp8 cache (DeepSeek-V3.2 as vLLM 0.32 keeps it)
_HALF = "bfloat16"


@dataclass(frozen=True, slots=True)
class Growth:
    """What one sequence costs on one GPU, in bytes.

    ``window`` is the window of the sliding (or the chunk of the chunked) layers, the greatest where they differ, None without any; ``windows`` each window
    with its bytes per token. ``cross_bytes_per_encoder_token`` is what one token of an image or of an encoder costs. ``derivation`` is the equation with its
    numbers, ``saturation`` what becomes of the window layers, in words ("none" without any). ``shared_by`` ranks of decode context parallelism hold a
    share of the tokens each: ``held_bytes_per_token`` is what a held one takes, and ``growth_bytes_per_token`` its share, rounded up.
    """

    growth_bytes_per_token: int
    fixed_bytes: int
    sliding_bytes_per_token: int
    sliding_saturated_bytes: int
    window: int | None
    windows: tuple[tuple[int, int], ...]
    cross_bytes_per_encoder_token: int
    kv_dtype: str
    derivation: str
    saturation: str
    held_bytes_per_token: int
    shared_by: int = 1

    @property
    def all_layers_bytes_per_token(self) -> int:
        """Bytes per token where an engine keeps every token in every layer, windows or not."""
        return self.growth_bytes_per_token + self.sliding_bytes_per_token

    def sequence_bytes(self, tokens: int, encoder_tokens: int = 0) -> int:
        """Return the bytes of one sequence of ``tokens``, without any rounding to blocks."""
        window_bytes = sum(min(tokens, window) * per_token for window, per_token in self.windows)
        held = self.held_bytes_per_token * -(-tokens // self.shared_by)
        return held + self.fixed_bytes + window_bytes + self.cross_bytes_per_encoder_token * encoder_tokens


def resolve_dtypes(architecture: Architecture, kv_dtype: str = "auto", dtype: str = "auto") -> tuple[str, str, tuple[str, ...]]:
    """Return (name of the KV type, name of the model's type, assumptions in words).

    ``auto`` is what the checkpoint states for its cache, else the model's own type; a model that states no type, or float32, is served in 16 bits by
    vLLM's ``--dtype auto``, and an explicit ``dtype`` wins. Raises UsageError for an unknown name.
    """
    assumed: list[str] = []
    model = dtype
    if dtype in ("auto", ""):
        stated = architecture.dtype
        if not stated or parse_format(stated, "the model").name == "float32":
            model = _HALF
            assumed.append(
                f"the model's type is taken as bfloat16 ({'the configuration states none' if not stated else 'float32 is served in 16 bits'})"
            )
        else:
            model = stated
    model = parse_format(model, "the model").name
    cache = kv_dtype or "auto"
    if cache == "auto":
        cache = architecture.kv_dtype_stated or model
    key, value = parse_pair(cache)
    if cache.lower() in ("fp8", "float8", "f8") and any(layer.index_size for layer in architecture.layers):
        assumed.append(
            "fp8 of a sparse latent is taken as fp8_ds_mla, FlashMLA's rows on H100 and H200; B200 keeps plain fp8, which --kv-dtype fp8_e4m3 states"
        )
        return "fp8_ds_mla", model, tuple(assumed)
    return (key.name if key == value else f"{key.name}/{value.name}"), model, tuple(assumed)


def heads_per_rank(layer: Layer, tp: int) -> int:
    """Return the KV heads of a layer on one rank: split, and replicated as soon as there are more ranks than heads. A latent is never split."""
    return layer.kv_heads if layer.kind == "mla" else max(1, layer.kv_heads // tp)


def token_bytes(layer: Layer, kv_dtype: str, tp: int = 1) -> int:
    """Return the bytes that one token takes in one layer on one rank (0 for a layer that keeps no tokens). Raises UsageError for a type that does not fit."""
    if layer.kind in ("none", "shared", "state"):
        return 0
    key, value = parse_pair(kv_dtype)
    if layer.kind == "mla":
        return latent_bytes(layer, key) + indexer_bytes(layer)
    heads = heads_per_rank(layer, tp)
    return key.vector_bytes(heads, layer.key_size) + value.vector_bytes(heads, layer.value_size)


def latent_bytes(layer: Layer, key: Format) -> int:
    """Return the bytes of one token's latent vector in one layer.

    Two types have layouts of their own: ``fp8_ds_mla`` an fp8 latent, a scale per 128 and the rotary part in 16 bits; ``nvfp4_ds_mla`` half a byte an
    element, a one-byte scale per 16 and the rotary part in fp8.
    """
    if key.name == "nvfp4_ds_mla":
        return layer.latent // 2 + layer.latent // 16 + layer.key_size - layer.latent
    if key.latent_of_its_own:
        return layer.latent + layer.latent // 128 * 4 + (layer.key_size - layer.latent) * 2
    scales = key.per_head_bytes * 2 if key.per_head_bytes else 0
    return key.vector_bytes(1, layer.key_size) - key.per_head_bytes + scales


def indexer_bytes(layer: Layer) -> int:
    """Return the bytes of one token in the indexer's cache of one layer: fp8, with one 4-byte scale per 128 elements."""
    return layer.index_size + layer.index_size // INDEXER_SCALE_BLOCK * 4 if layer.index_size else 0


def state_bytes(layer: Layer, model_dtype: str, state_dtype: str = "auto", tp: int = 1) -> int:
    """Return the bytes of one recurrent state of one layer on one rank. ``state_dtype`` is the type of the recurrent part ("auto": as the family says)."""
    if layer.state is None:
        return 0
    convolution, recurrent = layer.state.elements(tp)
    asked = state_dtype if state_dtype != "auto" else layer.state.recurrent_dtype
    model = parse_format(model_dtype, "the model")
    kept = model if asked == "auto" else parse_format(asked, "the recurrent state")
    return convolution * model.block_bytes + recurrent * kept.block_bytes


def check_parallel(architecture: Architecture, tp: int, pp: int = 1) -> None:
    """Raise UsageError where the model cannot be divided among so many GPUs."""
    if tp < 1 or pp < 1:
        raise UsageError(f"parallelism is counted from 1, not {min(tp, pp)}")
    heads = architecture.query_heads
    if heads and heads % tp:
        fits = ", ".join(str(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32) if heads % n == 0)
        raise UsageError(f"{heads} query heads cannot be divided by a tensor parallelism of {tp}", where=architecture.name, hint=f"--tp {fits}")
    if pp > max(1, len(architecture.layers)):
        raise UsageError(f"{len(architecture.layers)} layers cannot make {pp} pipeline stages", where=architecture.name, hint="a smaller --pp")


def stages(count: int, pp: int, drafts: int = 0) -> list[range]:
    """Return the layers of each pipeline stage. A remainder goes one each to the stages before the last, from the back (vLLM 0.32).

    ``drafts`` further layers (multi-token prediction) follow on the last stage.
    """
    sizes = [count // pp] * pp
    for back in range(2, count % pp + 2):
        sizes[-back] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    sizes[-1] += drafts
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def growth(
    architecture: Architecture,
    kv_dtype: str = "auto",
    *,
    dtype: str = "auto",
    state_dtype: str = "auto",
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
    mtp: bool = False,
) -> Growth:
    """Return what one sequence costs on one GPU; with a pipeline, on the stage where a long sequence costs most.

    ``dcp`` ranks share the tokens of full and latent layers (decode context parallelism), so that each holds a dcp-th of them. ``mtp`` counts the
    checkpoint's own draft layers too.
    Raises UsageError where the types or the parallelism do not fit the model.
    """
    check_parallel(architecture, tp, pp)
    cache, model, _ = resolve_dtypes(architecture, kv_dtype, dtype)
    drafts = architecture.mtp_layers if mtp else ()
    layers = architecture.layers + drafts
    parts = [_growth([layers[i] for i in stage], cache, model, state_dtype, tp, dcp) for stage in stages(len(architecture.layers), pp, len(drafts))]
    return max(parts, key=lambda part: (part.growth_bytes_per_token, part.sliding_bytes_per_token, part.fixed_bytes))


def _growth(layers: Iterable[Layer], cache: str, model: str, state_dtype: str, tp: int, dcp: int) -> Growth:
    growing = fixed = cross = 0
    windows: dict[int, int] = {}
    chunks: set[int] = set()
    terms: dict[str, int] = {}
    for layer in layers:
        per_token = token_bytes(layer, cache, tp)
        fixed += state_bytes(layer, model, state_dtype, tp)
        if layer.kind in ("full", "mla"):
            growing += per_token
        elif layer.kind == "cross":
            cross += per_token
        elif layer.kind in ("sliding", "chunked") and layer.window:
            windows[layer.window] = windows.get(layer.window, 0) + per_token
            if layer.kind == "chunked":
                chunks.add(layer.window)
        if layer.kind in ("full", "mla", "sliding", "chunked"):
            for term in _terms(layer, cache, tp):
                terms[term] = terms.get(term, 0) + 1
    sliding = sum(windows.values())
    saturated = sum(window * per_token for window, per_token in windows.items())
    left = " + ".join(f"{count}x{term}" for term, count in sorted(terms.items(), key=lambda pair: "[" in pair[0])) or "0"
    share = -(-growing // dcp)
    whole = f"{growing} / {dcp} (dcp) = {share}" if dcp > 1 else f"{growing}"
    right = f"{whole} growth (+{sliding} sliding)" if sliding else whole
    return Growth(
        growth_bytes_per_token=share,
        fixed_bytes=fixed,
        sliding_bytes_per_token=sliding,
        sliding_saturated_bytes=saturated,
        window=max(windows, default=None),
        windows=tuple(sorted(windows.items())),
        cross_bytes_per_encoder_token=cross,
        kv_dtype=cache,
        derivation=f"{left} = {right}",
        saturation=_saturation(windows, chunks, saturated),
        held_bytes_per_token=growing,
        shared_by=dcp,
    )


def _terms(layer: Layer, cache: str, tp: int) -> list[str]:
    key, value = parse_pair(cache)
    if layer.kind == "mla":
        latent = f"{latent_bytes(layer, key)}" if key.latent_of_its_own or key.per_head_bytes else f"{layer.key_size}x{_rate(key)}"
        return [latent] + ([f"{indexer_bytes(layer)}"] if layer.index_size else [])
    heads = heads_per_rank(layer, tp)
    if key == value and not key.per_head_bytes:
        term = f"{heads}x({layer.key_size}+{layer.value_size})x{_rate(key)}"
    else:
        term = f"({key.vector_bytes(heads, layer.key_size)}+{value.vector_bytes(heads, layer.value_size)})"
    if layer.kind in ("sliding", "chunked"):
        term += f"[{'window' if layer.kind == 'sliding' else 'chunk'} {layer.window}]"
    return [term]


def _rate(form: Format) -> str:
    return f"{form.block_bytes}" if form.block == 1 else f"{form.block_bytes}/{form.block}"


def _saturation(windows: dict[int, int], chunks: set[int], saturated: int) -> str:
    if not windows:
        return "none"
    parts = []
    for window, per_token in sorted(windows.items()):
        if window in chunks:
            parts.append(f"{per_token} B/token inside a chunk of {window}; at most {window * per_token} B/sequence")
        else:
            parts.append(f"{per_token} B/token until {window} tokens, then flat at {window * per_token} B/sequence")
    return "; ".join(parts)
