"""A model's layers from the keys of a GGUF file, as llama.cpp reads them (src/llama-hparams.cpp, src/models/)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_kvcache.capacity.fields import MAX_LAYERS, Fields
from pytest_kvcache.capacity.gguf_header import read_header
from pytest_kvcache.capacity.kinds import COUNT
from pytest_kvcache.capacity.layers import Architecture, Layer, State
from pytest_kvcache.errors import CannotJudge, UsageError

# Which layers slide where the file does not say: each n-th keeps all tokens (the last of n; "first": the first of n).
PERIODS: dict[str, tuple[int, bool]] = {
    "gemma2": (2, False), "gemma3": (6, False), "gemma3n": (5, False), "gemma4": (6, False), "gpt-oss": (2, False), "cohere2": (4, False), "exaone4": (4, False),
    "exaone-moe": (4, False), "olmo2": (4, False), "afmoe": (4, False), "plamo3": (8, False), "smallthinker": (4, True), "llama4": (4, False),
}  # fmt: skip
CHUNKED = {"llama4": 8192}
# A window may stand in their files, and llama.cpp keeps every token.
WHOLE = frozenset(
    {"llama", "phi3", "phimoe", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "starcoder2", "mistral3", "granite", "granitemoe", "minimax-m2"}
)
ALL_RECURRENT = frozenset({"mamba", "mamba2"})
BOTH = frozenset({"falcon-h1"})
GATED = frozenset({"qwen3next", "qwen35", "qwen35moe"})
UNMODELLED = frozenset(
    {"rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "deepseek4", "t5encoder", "bert", "modern-bert", "nomic-bert", "clip", "wavtokenizer-dec"}
)


def read_gguf(path: Path, assume: Mapping[str, str]) -> Architecture:
    """Return the layers of a GGUF file. Raises CannotJudge naming the key that is missing, UsageError for a file that cannot be read."""
    return from_keys(read_header(path).keys, str(path), assume)


def from_keys(keys: Mapping[str, Any], name: str, assume: Mapping[str, str]) -> Architecture:
    """Return the layers that the keys of a GGUF header describe, wherever they were read. Raises CannotJudge naming the key that is missing."""
    family = str(keys.get("general.architecture") or "")
    if not family:
        raise CannotJudge("cannot judge this GGUF file: it has no general.architecture", where=name)
    if family in UNMODELLED:
        raise CannotJudge(f"cannot judge architecture {family!r}: what it keeps per token or per sequence is not known here", where=name)
    prefix = f"{family}."
    own = {key.removeprefix(prefix): value for key, value in keys.items() if key.startswith(prefix)}
    fields = Fields(own, assume={_own_name(key): text for key, text in assume.items()}, name=name, family=family)
    count = fields.need("block_count") - (fields.whole("nextn_predict_layers", default=0) or 0)
    if not 0 < count <= MAX_LAYERS:
        raise UsageError(f"{count} layers", where=name)
    layers, notes = _layers(fields, count)
    notes += [f"{key} was stated and decides nothing for this model" for key in fields.unused]
    queries = _per_layer(fields, "attention.head_count", count) or [0]
    return Architecture(
        model_type=family,
        name=name,
        layers=tuple(layers),
        context=fields.whole("context_length", least=1),
        dtype="float16",
        query_heads=max(queries),
        assumptions=tuple(fields.assumptions),
        notes=tuple(notes),
    )


def _own_name(key: str) -> str:
    """Let the user state a count by the name that it has in a config.json too."""
    return {**dict.fromkeys(COUNT, "block_count"), "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length"}.get(key, key)


def _layers(fields: Fields, count: int) -> tuple[list[Layer], list[str]]:
    notes: list[str] = []
    recurrent = _recurrent(fields, count)
    state = _state(fields) if any(recurrent) or fields.family in BOTH else None
    if fields.family in ALL_RECURRENT:
        return [Layer("state", state=state)] * count, notes
    queries = _per_layer(fields, "attention.head_count", count)
    if queries is None:
        raise fields.missing("attention.head_count")
    heads = _per_layer(fields, "attention.head_count_kv", count) or queries
    key = fields.whole("attention.key_length", least=1) or fields.need("embedding_length", why="the size of a head") // max(queries)
    value = fields.whole("attention.value_length", least=1) or key
    window = fields.whole("attention.sliding_window", default=0) or CHUNKED.get(fields.family, 0)
    slides = _slides(fields, count) if window else [False] * count
    if window and not any(slides):
        if fields.family not in WHOLE and not fields.has("attention.sliding_window_pattern"):
            raise fields.missing("attention.sliding_window_pattern", why=f"it has a window of {window} tokens and does not say which layers slide")
        notes.append(f"a window of {window} tokens stands in the file, and llama.cpp keeps every token of this architecture")
    rank = fields.whole("attention.kv_lora_rank", default=0) or 0
    latent = rank > 0 and fields.has("attention.key_length_mla")
    shared_from = count - (fields.whole("attention.shared_kv_layers", default=0) or 0)
    layers = []
    for index in range(count):
        if recurrent[index]:
            layers.append(Layer("state", state=state))
        elif index >= shared_from:
            layers.append(Layer("shared"))
        elif heads[index] == 0:
            layers.append(Layer("none"))
        elif latent:
            layers.append(Layer("mla", 1, key, 0, latent=rank))
        elif slides[index]:
            small = fields.whole("attention.key_length_swa", least=1) or key, fields.whole("attention.value_length_swa", least=1) or value
            layers.append(Layer("chunked" if fields.family in CHUNKED else "sliding", heads[index], *small, window))
        else:
            layers.append(Layer("full", heads[index], key, value, state=state if fields.family in BOTH else None))
    if latent and fields.has("attention.indexer.key_length"):
        notes.append("the indexer's cache is not counted: how llama.cpp keeps it is not known here")
    return layers, notes


def _slides(fields: Fields, count: int) -> list[bool]:
    listed = fields.listed("attention.sliding_window_pattern")
    if listed:
        return [bool(listed[index % len(listed)]) for index in range(count)]
    period, first = PERIODS.get(fields.family, (None, False))
    stated = fields.whole("attention.sliding_window_pattern")
    period = stated if stated is not None else period
    if period is None:
        return [False] * count
    if period == 0:
        return [True] * count
    return [index % period != (0 if first else period - 1) for index in range(count)]


def _recurrent(fields: Fields, count: int) -> list[bool]:
    if fields.family in ALL_RECURRENT:
        return [True] * count
    if fields.family in GATED:
        every = fields.whole("full_attention_interval", default=4, least=1) or 4
        return [(index + 1) % every != 0 for index in range(count)]
    heads = _per_layer(fields, "attention.head_count_kv", count)
    holds_state = fields.has("ssm.state_size", "ssm.inner_size", "shortconv.l_cache", "kda.head_dim")
    if heads is None or not holds_state or fields.family in BOTH:
        return [False] * count
    feed = fields.listed("feed_forward_length")
    mixed = fields.family in ("nemotron_h", "nemotron_h_moe") and feed is not None and len(feed) >= count
    return [heads[index] == 0 and not (mixed and feed is not None and feed[index]) for index in range(count)]


def _state(fields: Fields) -> State:
    cached = fields.whole("shortconv.l_cache", least=1)
    if cached:
        return State("short_conv", fields.need("embedding_length"), cached - 1, recurrent_dtype="float32")
    kernel = fields.need("ssm.conv_kernel")
    size = fields.whole("kda.head_dim", least=1)
    if size:
        heads = max(_per_layer(fields, "attention.head_count", 1) or [0]) or fields.need("attention.head_count")
        return State("kda", 3 * heads * size, kernel - 1, heads * size * size, recurrent_dtype="float32")
    inner, width = fields.need("ssm.inner_size"), fields.need("ssm.state_size")
    groups = fields.whole("ssm.group_count", default=0) or 0
    return State("mamba2" if groups else "mamba1", inner + 2 * groups * width, kernel - 1, width * inner, recurrent_dtype="float32")


def _per_layer(fields: Fields, key: str, count: int) -> list[int] | None:
    listed: list[Any] | None = fields.listed(key)
    if listed is not None:
        if len(listed) < count or any(isinstance(entry, bool) or not isinstance(entry, int) or entry < 0 for entry in listed):
            raise UsageError(f"{key} must hold {count} whole numbers", where=fields.name)
        return [int(entry) for entry in listed[:count]]
    whole = fields.whole(key)
    return [whole] * count if whole is not None else None
