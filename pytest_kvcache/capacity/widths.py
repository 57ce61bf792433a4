"""How wide each attention layer's keys and values are: heads, KV heads and head sizes under all their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_kvcache.capacity import families
from pytest_kvcache.capacity.fields import Fields
from pytest_kvcache.capacity.kinds import window_of
from pytest_kvcache.capacity.layers import Kind, Layer
from pytest_kvcache.errors import UsageError

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_query_heads")
KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads", "kv_n_heads", "num_key_value_heads_per_layer", "num_query_groups")
HEAD_SIZES = ("head_dim", "attention_head_dim", "kv_channels", "d_kv", "hidden_size_per_head", "head_size", "d_head")
HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "model_dim", "dim")


@dataclass(frozen=True, slots=True)
class Widths:
    """Heads and sizes of every layer, one entry per layer."""

    query_heads: int
    kv_heads: list[int]
    key_size: int
    value_size: int


def widths_of(fields: Fields, count: int) -> Widths:
    """Return the widths of the attention layers. Raises CannotJudge naming the field that is missing."""
    queries = _per_layer(fields, HEADS, count)
    if queries is None:
        raise fields.missing("num_attention_heads")
    kv_heads = _kv_heads(fields, queries, count)
    size = _head_size(fields, max(queries))
    value = size if fields.family not in ("mimo_v2_flash",) and families.is_known(fields.family) else fields.whole("v_head_dim", least=1) or size
    return Widths(max(queries), kv_heads, size, value)


def attention_layer(fields: Fields, widths: Widths, kind: Kind, index: int) -> Layer:
    """Return one attention layer with its own widths: window layers and global layers may differ."""
    heads, key, value = widths.kv_heads[index], widths.key_size, widths.value_size
    window = None
    if kind == "sliding":
        window = _window(fields, index)
        heads = _own(fields, "swa_num_key_value_heads", heads)
        key = _own(fields, "swa_head_dim", key)
        value = _own(fields, "swa_v_head_dim", value if fields.has("v_head_dim") or value != widths.key_size else key)
        if fields.family == "step3p5":
            heads, key, value = _other_setting(fields, "sliding_attention", heads, key)
    elif kind == "chunked":
        window = fields.need("attention_chunk_size")
    elif fields.family in ("gemma4_text", "gemma4_unified_text"):
        key = value = fields.whole("global_head_dim", default=512, least=1) or 512
        if fields.flag("attention_k_eq_v"):
            heads = fields.whole("num_global_key_value_heads", least=1) or heads
    elif fields.family == "step3p5":
        heads, key, value = _other_setting(fields, "full_attention", heads, key)
    return Layer(kind, heads, key, value, window, vllm_window_extra=1 if kind == "sliding" and fields.family in ("cohere2", "cohere2_moe") else 0)


def latent_layer(fields: Fields, *, indexed: bool) -> Layer | None:
    """Return a latent layer (MLA), or None where the file has no latent (null rank: the small members of such a family keep K and V)."""
    rank = fields.whole("kv_lora_rank", least=0)
    if not rank:
        return None
    rotary = fields.need("qk_rope_head_dim", why="a latent keeps its rotary part too", least=0)
    index = fields.need("index_head_dim", why="the width of the indexer's cache") if indexed else 0
    return Layer("mla", 1, rank + rotary, 0, latent=rank, index_size=index)


def expanded_layer(fields: Fields) -> Layer:
    """Return a layer that could keep a latent and keeps K and V of every head (MiniCPM3 in vLLM, transformers and llama.cpp)."""
    heads = fields.need("num_attention_heads")
    size = fields.need("qk_nope_head_dim") + fields.need("qk_rope_head_dim")
    return Layer("full", heads, size, size)


def _kv_heads(fields: Fields, queries: list[int], count: int) -> list[int]:
    family = fields.family
    blocks = fields.listed("block_configs")
    if blocks:
        return _from_blocks(fields, blocks, max(queries), count)
    if family == "falcon" and not _new_falcon(fields) and fields.flag("multi_query"):
        return [1] * count
    if family == "gpt_bigcode" or (not families.is_known(family) and fields.flag("multi_query")):
        return [1] * count if fields.flag("multi_query") else queries
    inside = fields.inside("attn_config")
    if inside or family in ("mpt", "dbrx"):
        return _from_group(inside, queries, count, family)
    if fields.has("multi_query_attention", "multi_query_group_num") or family == "chatglm":
        return [fields.need("multi_query_group_num")] * count if fields.flag("multi_query_attention") else queries
    found = _per_layer(fields, (*KV_HEADS, "num_attention_groups"), count)
    if found is not None:
        return found
    groups = fields.listed("num_gqa_groups")
    whole = fields.whole("num_gqa_groups", least=1) if groups is None else None
    if whole:
        return [heads // whole for heads in queries]
    if families.is_known(family) or any(key in fields.raw for key in KV_HEADS):
        fields.assumptions.append("one KV head for each query head: the configuration states none")
        return queries
    raise fields.missing("num_key_value_heads", why="an unknown family may share KV heads or not")


def _new_falcon(fields: Fields) -> bool:
    """The first files of Falcon-40B have no flag for its architecture: their code knew it by its width."""
    return fields.flag("new_decoder_architecture") or (fields.has("n_head_kv") and fields.whole("hidden_size") == 8192)


def _from_group(inside: Mapping[str, Any], queries: list[int], count: int, family: str) -> list[int]:
    stated = inside.get("kv_n_heads")
    if isinstance(stated, int) and not isinstance(stated, bool) and 0 < stated <= 2**20:
        return [stated] * count
    if inside.get("attn_type") == "multiquery_attention" or family == "dbrx":
        return [1] * count
    return queries


def _from_blocks(fields: Fields, blocks: list[Any], heads: int, count: int) -> list[int]:
    """Puzzle models say for each block how many query heads share one KV head; 0 stands for a block without attention."""
    made = []
    for block in blocks[:count]:
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping) or attention.get("no_op") or attention.get("replace_with_linear"):
            made.append(0)
            continue
        share, direct = attention.get("n_heads_in_group"), attention.get("num_key_value_heads")
        if isinstance(share, int) and share > 0:
            made.append(heads // share)
        elif isinstance(direct, int) and direct > 0:
            made.append(direct)
        else:
            raise fields.missing("block_configs[].attention.n_heads_in_group")
    if len(made) < count:
        raise UsageError(f"block_configs has {len(made)} entries for {count} layers", where=fields.name)
    return made


def _head_size(fields: Fields, heads: int) -> int:
    for key in HEAD_SIZES:
        stated = fields.whole(key, least=0)
        if stated:
            return stated
    hidden = fields.need(*HIDDEN, why="the size of a head")
    if fields.family in ("zamba", "zamba2"):
        hidden *= 2
    if hidden % heads:
        raise fields.missing("head_dim", why=f"{hidden} is not divisible by {heads} heads")
    if not families.is_known(fields.family):
        fields.assumptions.append(f"head_dim = {hidden // heads}, hidden size by heads: the configuration states none")
    return hidden // heads


def _per_layer(fields: Fields, keys: tuple[str, ...], count: int) -> list[int] | None:
    for key in keys:
        entries = fields.listed(key)
        if entries is not None:
            if len(entries) < count:
                raise UsageError(f"{key} has {len(entries)} entries for {count} layers", where=fields.name)
            if any(isinstance(entry, bool) or not isinstance(entry, int) or not 0 <= entry <= 2**20 for entry in entries[:count]):
                raise UsageError(f"{key} must hold whole numbers", where=fields.name)
            return [int(entry) for entry in entries[:count]]
    whole = fields.whole(*keys, least=0)
    return [whole] * count if whole else None


def _own(fields: Fields, key: str, otherwise: int) -> int:
    return fields.whole(key, least=1) or otherwise


def _window(fields: Fields, index: int) -> int:
    for key in ("sliding_window", "sliding_windows", "interleaved_sliding_window"):
        listed = fields.listed(key)
        if listed and index < len(listed) and isinstance(listed[index], int) and listed[index] > 0:
            return int(listed[index])
    window = window_of(fields)
    if window is None:
        raise fields.missing("sliding_window", why="it has sliding layers")
    return window


def _other_setting(fields: Fields, kind: str, heads: int, size: int) -> tuple[int, int, int]:
    """Step 3.5 keeps the widths of one kind of layer in a group of their own."""
    other = fields.inside("attention_other_setting")
    if other.get("attention_type") == kind:
        groups, own = other.get("num_attention_groups"), other.get("head_dim")
        heads = groups if isinstance(groups, int) and groups > 0 else heads
        size = own if isinstance(own, int) and own > 0 else size
    return heads, size, size
