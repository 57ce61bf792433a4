"""Which layer keeps what: lists, patterns, intervals, offsets and flags of a configuration, as one kind per layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pytest_kvcache.capacity import families
from pytest_kvcache.capacity.fields import MAX_LAYERS, Fields
from pytest_kvcache.errors import CannotJudge, UsageError

COUNT = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
LISTS = ("layer_types", "layers_block_type", "block_types", "layer_block_types", "mixer_types")
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "interleaved_sliding_window")

# What a word of a list means: full, sliding, chunked, state, both (a state and attention in one layer), none, indexed (attention with an indexer's cache).
WORDS = {
    **dict.fromkeys(("full_attention", "attention", "global", "global_attention", "full", "softmax", "gqa", "mla", "*", "G", "A", "compressed_attention"), "full"),
    **dict.fromkeys(("sliding_attention", "sliding", "local", "local_attention", "sliding_window", "sliding_window_attention", "swa", "L", "S"), "sliding"),
    **dict.fromkeys(("chunked_attention", "chunked"), "chunked"),
    **dict.fromkeys(("linear_attention", "linear", "mamba", "mamba2", "recurrent", "conv", "ssm", "kda", "gated_deltanet", "gdn", "short_conv", "M"), "state"),
    **dict.fromkeys(("hybrid",), "both"),
    **dict.fromkeys(("mlp", "moe", "none", "no_op", "identity", "dense", "-", "E"), "none"),
    **dict.fromkeys(("indexed_attention",), "indexed"),
}  # fmt: skip


# What says, in the file of a family that is not known, that layers differ (unless a list says how), or that some keep another size.
DIFFER = ("layer_group_size", "attn_layer_period", "attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids", "local_layer_ids", "attention_chunk_size", "linear_attn_config",
    "conv_L_cache", "local_attention_window", "global_attn_every_n_layers", "no_rope_layer_interval", "swa_head_dim", "swa_num_key_value_heads")  # fmt: skip
STATES = re.compile(
    r"(?:mamba|ssm|gla|kda|gdn|rwkv|rglru|lru|deltanet)_|linear_(?:num|key|value|conv|attn|attention)(?:_|\Z)|time_step_|(?:\w*_)?state_size\Z"
)
OF_NO_FAMILY = ("compress_ratios", "loop_num", "num_loops", "total_ut_steps", "mean_recurrence", "rswa_window")  # what no known family has
SIZES = ("global_head_dim", "num_global_key_value_heads", "compress_ratios", "index_head_dim", "kv_compression_ratio", "is_encoder_decoder", "loop_num", "num_loops", "total_ut_steps",
    "mean_recurrence", "H_cycles", "L_cycles", "param_sink_number", "rswa_window", "block_pool_size")  # fmt: skip


def layer_count(fields: Fields) -> int:
    """Return how many layers the configuration describes. Raises CannotJudge where it does not say."""
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return _bounded(len(pattern), fields)
    if not fields.has(*COUNT):
        for key in ("layers_block_type", "layer_types", "block_configs"):
            listed = fields.listed(key)
            if listed:
                return _bounded(len(listed), fields)
    if fields.family in families.TWO_CACHES_A_LAYER:
        # num_layers counts decoder layers of two attention parts each, num_hidden_layers (where a library wrote it) the parts
        whole = fields.whole("num_layers", least=1)
        return _bounded(2 * whole if whole else fields.need("num_hidden_layers"), fields)
    return _bounded(fields.need(*COUNT), fields)


def window_of(fields: Fields) -> int | None:
    """Return the window that the configuration speaks of, None where it speaks of none (0 and null are none). A list of windows: its greatest."""
    found = fields.get(*WINDOWS)
    if isinstance(found, list):
        numbers = [entry for entry in found if isinstance(entry, int) and entry > 0]
        return max(numbers, default=None)
    whole = fields.whole(*WINDOWS)
    return whole or None


def layer_kinds(fields: Fields, count: int) -> list[str]:
    """Return one kind per layer. Raises CannotJudge where the file speaks of a window or of states and does not say which layers have them."""
    family = fields.family
    _unread(fields, OF_NO_FAMILY)
    special = _SPECIAL.get(family)
    if special is not None:
        return special(fields, count)
    listed = _listed(fields, count)
    if not families.is_known(family):
        _unread(fields, _telling(fields, listed is not None or fields.has("hybrid_layer_pattern", "attn_type_list", "full_attention_interval")))
    if listed is not None:
        return _without_windows(listed, fields)
    if fields.has("hybrid_layer_pattern"):
        return [
            "sliding" if entry else "full" for entry in _exactly(fields.listed("hybrid_layer_pattern") or [], count, "hybrid_layer_pattern", fields)
        ]
    if fields.has("attn_type_list"):
        return ["full" if entry else "state" for entry in _exactly(fields.listed("attn_type_list") or [], count, "attn_type_list", fields)]
    if fields.has("full_attention_interval") or family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        every = fields.need("full_attention_interval") if fields.has("full_attention_interval") else 4
        return ["full" if (index + 1) % every == 0 else "state" for index in range(count)]
    return _windowed(fields, count)


def _telling(fields: Fields, listed: bool) -> list[str]:
    """Return the keys that decide what layers keep, where no rule of a known family says how."""
    latent = fields.has("kv_lora_rank")  # a latent with an indexer is read whatever the family
    keys = [key for key in SIZES if not (latent and key == "index_head_dim")]
    return keys if listed else [*keys, *DIFFER, *(key for key in fields.raw if STATES.match(key))]


def _unread(fields: Fields, keys: Sequence[str]) -> None:
    """Raise CannotJudge where the file states one of the keys."""
    found = next((key for key in keys if key in fields.raw and fields.get(key) not in (None, False, 0, [], {})), None)
    if found is not None:
        raise CannotJudge(
            f"cannot judge model_type {fields.family!r}: {found[:60]} decides what its layers keep, and how is not known of this family",
            where=fields.name,
            hint=f"--assume model_type=NAME of a known family of the same design, or --assume {found[:60]}=null where it decides nothing",
        )


def _windowed(fields: Fields, count: int) -> list[str]:
    family = fields.family
    window = window_of(fields)
    full = ["full"] * count
    if window is None:
        return full
    repeated = fields.listed("sliding_window", "interleaved_sliding_window")
    if repeated and any(entry is None for entry in repeated):  # Mistral's own files: a window or none, over and over
        return ["sliding" if repeated[index % len(repeated)] else "full" for index in range(count)]
    if family in families.FLAGGED or fields.has("use_sliding_window"):
        if not fields.flag("use_sliding_window", default=family == "dots1"):
            return full
        if family == "smollm3":
            return ["full" if roped else "sliding" for roped in _no_rope(fields, count)]
        first = fields.whole("max_window_layers", default=0) or 0
        return ["sliding" if index >= first else "full" for index in range(count)]
    pattern = fields.get("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return [_word(pattern[index % len(pattern)], fields) for index in range(count)]
    if isinstance(pattern, list) and pattern:
        return ["sliding" if pattern[index % len(pattern)] else "full" for index in range(count)]
    key, every = families.EVERY_NTH_FULL.get(family, ("sliding_window_pattern", 0))
    stated = fields.whole(key or "sliding_window_pattern", default=every or None)
    if stated:
        return ["full" if (index + 1) % stated == 0 else "sliding" for index in range(count)]
    if family in families.FIRST_OF_FOUR_FULL:
        return ["full" if index % 4 == 0 else "sliding" for index in range(count)]
    if family in families.FULL_WITHOUT_LIST:
        return full
    if family in families.ALL_SLIDE or families.is_known(family):
        return ["sliding"] * count
    raise fields.missing("layer_types", why=f"it has a window of {window} tokens and does not say which layers slide")


def _listed(fields: Fields, count: int) -> list[str] | None:
    for key in LISTS:
        entries = fields.listed(key)
        if entries:
            if key in ("block_types", "layer_block_types") and len(entries) < count:
                entries = [entries[index % len(entries)] for index in range(count)]
            return [_word(entry, fields) for entry in _exactly(entries, count, key, fields)]
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return [_word(letter, fields) for letter in pattern]
    return None


def _without_windows(kinds: list[str], fields: Fields) -> list[str]:
    """A flag that switches the window off wins over a list that names sliding layers."""
    if "sliding" in kinds and fields.has("use_sliding_window") and not fields.flag("use_sliding_window"):
        return ["full" if kind == "sliding" else kind for kind in kinds]
    return kinds


def _word(entry: Any, fields: Fields) -> str:
    found = WORDS.get(str(entry)) or WORDS.get(str(entry).lower())
    if found is None:
        raise fields.missing("layer_types", why=f"{str(entry)[:40]!r} is no kind of layer that is known")
    return found


def _exactly(entries: Sequence[Any], count: int, key: str, fields: Fields) -> list[Any]:
    """A list may be longer than the model (draft layers stand at its end), never shorter."""
    if len(entries) < count:
        raise UsageError(f"{key} has {len(entries)} entries for {count} layers", where=fields.name)
    return list(entries[:count])


def _bounded(count: int, fields: Fields) -> int:
    if count > MAX_LAYERS:
        raise UsageError(f"{count} layers are more than any model has", where=fields.name)
    return count


def _no_rope(fields: Fields, count: int) -> list[bool]:
    """Return for each layer whether it has rotary positions."""
    stated = fields.listed("no_rope_layers")
    if stated:
        return [bool(entry) for entry in _exactly(stated, count, "no_rope_layers", fields)]
    every = fields.whole("no_rope_layer_interval", default=4, least=1) or 4
    return [(index + 1) % every != 0 for index in range(count)]


def _llama4(fields: Fields, count: int) -> list[str]:
    listed = _listed(fields, count)
    if not fields.whole("attention_chunk_size"):
        return ["full"] * count
    return listed if listed is not None else ["chunked" if roped else "full" for roped in _no_rope(fields, count)]


def _gpt_oss(fields: Fields, count: int) -> list[str]:
    """Even layers slide, whatever a list says: that is how vLLM's code reads it."""
    return ["full" if index % 2 or window_of(fields) is None else "sliding" for index in range(count)]


def _gemma4(fields: Fields, count: int) -> list[str]:
    kinds = _listed(fields, count) or ["full" if (index + 1) % 6 == 0 else "sliding" for index in range(count)]
    return [*kinds[:-1], "full"]


def _jamba(fields: Fields, count: int) -> list[str]:
    period, offset = fields.need("attn_layer_period"), fields.need("attn_layer_offset", least=0)
    return ["full" if index % period == offset else "state" for index in range(count)]


def _bamba(fields: Fields, count: int) -> list[str]:
    attention = fields.listed("attn_layer_indices") or []
    return ["full" if index in attention else "state" for index in range(count)]


def _zamba(fields: Fields, count: int) -> list[str]:
    listed = _listed(fields, count)
    if listed is not None:
        return listed
    if fields.family == "zamba2":
        default = ["state"] + (["state"] * 5 + ["both"]) * 7 + ["state"] * 4 + ["both"] + ["state"] * 3 + ["both"] + ["state"] * 2
        return [str(kind) for kind in _exactly(default, count, "layers_block_type", fields)]
    period, offset = fields.need("attn_layer_period"), fields.need("attn_layer_offset", least=0)
    return (["state", "state", "both"] + ["both" if index % period == offset else "state" for index in range(count - 3)])[:count]


def _lfm2(fields: Fields, count: int) -> list[str]:
    listed = _listed(fields, count)
    if listed is not None:
        return listed
    attention = fields.listed("full_attn_idxs")
    return ["full" if attention is None or index in attention else "state" for index in range(count)]


def _kimi_linear(fields: Fields, count: int) -> list[str]:
    """The file counts its layers from 1."""
    inside = fields.inside("linear_attn_config")
    states, attention = inside.get("kda_layers"), inside.get("full_attn_layers")
    if isinstance(states, list) and isinstance(attention, list):
        return ["state" if index + 1 in states else "full" for index in range(count)]
    return _listed(fields, count) or ["full" if index and index % 4 == 0 else "state" for index in range(count)]


def _linear_groups(fields: Fields, count: int) -> list[str]:
    """The last layer of each group of layers is attention, and so are the layers that fill no group (Ling 2.5 and 3)."""
    size = fields.need("layer_group_size", why="which layers are linear")
    whole = count // size * size
    late = fields.family == "bailing_moe_v3"
    return ["full" if (index + 1) % size == 0 or (late and index >= whole) else "state" for index in range(count)]


def _plamo2(fields: Fields, count: int) -> list[str]:
    step = fields.need("mamba_step")
    if count <= step // 2:
        return ["state"] * (count - 1) + ["full"]
    return ["full" if index % step == step // 2 else "state" for index in range(count)]


def _minimax_text(fields: Fields, count: int) -> list[str]:
    listed = _listed(fields, count)
    if listed is not None:
        return listed
    entries = fields.listed("attn_type_list")
    if entries is None:
        raise fields.missing("attn_type_list", "layer_types", why="which layers are linear")
    return ["full" if entry else "state" for entry in _exactly(entries, count, "attn_type_list", fields)]


def _minimax(fields: Fields, count: int) -> list[str]:
    if fields.has("attn_type_list"):
        return _minimax_text(fields, count)
    return _listed(fields, count) or ["state" if index % 2 else "full" for index in range(count)]


def _olmo_hybrid(fields: Fields, count: int) -> list[str]:
    listed = _listed(fields, count)
    if listed is not None:
        return listed
    kinds = ["full" if index % 4 == 3 else "state" for index in range(count)]
    return kinds if "full" in kinds else [*kinds[:-1], "full"]


def _cohere2_moe(fields: Fields, count: int) -> list[str]:
    listed = _listed(fields, count)
    if listed is not None:
        return listed
    first = fields.whole("first_k_dense_replace", default=0) or 0
    before, after = fields.need("prefix_dense_sliding_window_pattern"), fields.need("sliding_window_pattern")
    dense = ["full" if (index + 1) % before == 0 else "sliding" for index in range(first)]
    return dense + ["full" if (index + 1) % after == 0 else "sliding" for index in range(count - first)]


def _mimo(fields: Fields, count: int) -> list[str]:
    if fields.has("hybrid_layer_pattern"):
        return [
            "sliding" if entry else "full" for entry in _exactly(fields.listed("hybrid_layer_pattern") or [], count, "hybrid_layer_pattern", fields)
        ]
    return _listed(fields, count) or ["full" if index == 0 or (index + 1) % 6 == 0 else "sliding" for index in range(count)]


def _gpt_neo(fields: Fields, count: int) -> list[str]:
    stated = fields.get("attention_layers")
    if not isinstance(stated, list):
        stated = []
        for entry in fields.listed("attention_types") or [[["global", "local"], max(1, count // 2)]]:
            if (
                isinstance(entry, list)
                and len(entry) == 2
                and isinstance(entry[0], list)
                and isinstance(entry[1], int)
                and 0 <= entry[1] <= MAX_LAYERS
            ):
                stated += entry[0] * entry[1]
    return [_word(entry, fields) for entry in _exactly(stated, count, "attention_types", fields)]


def _recurrent_gemma(fields: Fields, count: int) -> list[str]:
    return ["sliding" if kind == "full" else kind for kind in _listed(fields, count) or []]


def _all_state(_: Fields, count: int) -> list[str]:
    return ["state"] * count


def _all_both(_: Fields, count: int) -> list[str]:
    return ["both"] * count


def _granite_hybrid(fields: Fields, count: int) -> list[str]:
    return _listed(fields, count) or ["state"] * count


def _indexed(fields: Fields, count: int) -> list[str]:
    """Every layer is a latent with an indexer, except that a file may let layers read another one's choice (their cache has no index of its own)."""
    words = fields.listed("indexer_types")
    if words:
        return ["full" if str(word).startswith("s") else "indexed" for word in _exactly(words, count, "indexer_types", fields)]
    pattern = fields.get("index_topk_pattern")
    if isinstance(pattern, (str, list)) and pattern:
        return ["indexed" if index >= len(pattern) or str(pattern[index]) != "S" else "full" for index in range(count)]
    every = fields.whole("index_topk_freq", default=1, least=1) or 1
    offset = fields.whole("index_skip_topk_offset", default=2) or 0
    return ["indexed" if max(index - offset + 1, 0) % every == 0 else "full" for index in range(count)]


_SPECIAL = {
    "llama4_text": _llama4, "gpt_oss": _gpt_oss, "gemma4_text": _gemma4, "gemma4_unified_text": _gemma4, "jamba": _jamba, "bamba": _bamba, "zamba": _zamba, "zamba2": _zamba,
    "lfm2": _lfm2, "kimi_linear": _kimi_linear, "bailing_hybrid": _linear_groups, "bailing_moe_v3": _linear_groups, "plamo2": _plamo2, "minimax_text_01": _minimax_text,
    "minimax_m1": _minimax_text, "minimax": _minimax, "olmo_hybrid": _olmo_hybrid, "cohere2_moe": _cohere2_moe, "mimo_v2_flash": _mimo, "gpt_neo": _gpt_neo,
    "recurrent_gemma": _recurrent_gemma, "mamba": _all_state, "mamba2": _all_state, "falcon_mamba": _all_state, "falcon_h1": _all_both,
    "granitemoehybrid": _granite_hybrid, "deepseek_v32": _indexed, "glm_moe_dsa": _indexed,
}  # fmt: skip
