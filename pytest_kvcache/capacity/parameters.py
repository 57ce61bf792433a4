"""How many parameters a model has, counted from its config.json: embeddings, attention, recurrent mixers, MLPs and experts, layer by layer.

The matrices of each family as its published code has them (transformers 5.19 and vLLM 0.32); checked against the parameter counts that these build.
Norms, biases and routers' corrections are left out: they are below a part in two hundred. A family whose matrices are not known is refused, not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_kvcache.capacity import families
from pytest_kvcache.capacity.fields import Fields
from pytest_kvcache.capacity.layers import Architecture, Layer
from pytest_kvcache.errors import CannotJudge

# An MLP of two matrices (up, down), and one of three (gate, up, down).
PLAIN = families.names("gpt2 gpt_bigcode opt gpt_neox gptj falcon phi bloom mpt starcoder2 persimmon nemotron gpt_neo nemotron_h apertus arcee")
GATED = families.names("""llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi3 phimoe olmo olmo2 olmo3 olmoe granite granitemoe cohere cohere2
    stablelm deepseek_v2 deepseek_v3 deepseek_v32 glm4 glm glm4_moe internlm2 internlm3 gpt_oss llama4_text minicpm baichuan smollm3 ministral ministral3 seed_oss exaone4
    ernie4_5 dots1 qwen3_next jamba granitemoehybrid bamba falcon_h1 minimax_m2 mimo qwen2_vl_text qwen2_5_vl_text qwen3_vl_text qwen3_vl_moe_text hunyuan_v1_dense chatglm""")
TIED_UNLESS_STATED = families.names(
    "gemma gemma2 gemma3_text gpt2 opt bloom mpt gpt_bigcode falcon cohere cohere2 starcoder2 gpt_neo mamba mamba2 falcon_mamba"
)
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "ffn_size")
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model: ``linear`` matrices of its layers, ``experts`` among them, and ``embeddings`` with the output head and positions."""

    linear: int
    experts: int
    embeddings: int
    beside: bool = False
    """Whether the file speaks of further modules (vision, audio) that are not counted."""
    layers: tuple[int, ...] = ()
    """The matrices of each layer."""
    table: int = 0
    """The embedding table; the output head is as large."""
    tied: bool = False
    """Whether the head is the table itself."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.linear + self.embeddings

    def shares(self, stages: Sequence[range]) -> tuple[float, ...]:
        """Return the share of all of them that each pipeline stage holds.

        The first has the embedding, the last the output head (a copy, where they are tied).
        """
        held = [sum(self.layers[index] for index in stage if index < len(self.layers)) for stage in stages]
        held[0] += self.embeddings - (0 if self.tied else self.table)
        held[-1] += self.table if len(stages) > 1 or not self.tied else 0
        return tuple(size / self.total for size in held)


def count_parameters(raw: Mapping[str, Any], text: Mapping[str, Any], architecture: Architecture) -> Parameters:
    """Return the parameters of the model whose configuration is ``raw`` and whose text model's part of it is ``text``.

    Raises CannotJudge, naming what is missing, for a family or a file that does not tell.
    """
    family = families.family_of(architecture.model_type)
    if family not in PLAIN | GATED | families.STATES_ONLY:
        raise CannotJudge(
            f"the matrices of model_type {architecture.model_type[:60]!r} are not known", where=architecture.name, hint="--weights SIZE"
        )
    fields = Fields(text, defaults=families.class_defaults(family), name=architecture.name, family=family)
    hidden = fields.need(*_HIDDEN)
    layers = [layer for layer in architecture.layers if not (layer.kind == "cross" and family == "mllama_text_model")]
    sizes: list[int] = []
    experts = 0
    for index, layer in enumerate(layers):
        dense, routed = _mlp(fields, layer, index, hidden)
        sizes.append(_attention(fields, architecture, layer, hidden) + _mixer(fields, layer, hidden) + dense + routed)
        experts += routed
    vocabulary = fields.need("vocab_size", "padded_vocab_size")
    tied = bool(fields.get("tie_word_embeddings", default=raw.get("tie_word_embeddings", family in TIED_UNLESS_STATED)))
    embeddings = vocabulary * hidden * (1 if tied else 2) + _positions(fields, hidden)
    beside = any(isinstance(raw.get(key), Mapping) for key in ("vision_config", "audio_config", "vision_tower_config", "encoder_config"))
    return Parameters(sum(sizes), experts, embeddings, beside, tuple(sizes), vocabulary * hidden, tied)


def _positions(fields: Fields, hidden: int) -> int:
    if fields.family in ("gpt2", "gpt_bigcode"):
        return (fields.whole("n_positions", "n_ctx") or 0) * hidden
    if fields.family in ("opt", "gpt_neo"):
        return (fields.whole("max_position_embeddings") or 0) * hidden
    return 0


def _attention(fields: Fields, architecture: Architecture, layer: Layer, hidden: int) -> int:
    if layer.kind in ("none", "state"):
        return 0
    queries = architecture.query_heads
    if layer.kind == "mla":
        return _latent(fields, queries, hidden)
    if not queries:
        raise fields.missing("num_attention_heads")
    heads = layer.kv_heads
    gate = 2 if fields.family == "qwen3_next" else 1  # its queries carry a gate of their own
    own = 0 if layer.kind == "shared" else hidden * heads * (layer.key_size + layer.value_size)
    size = layer.key_size or fields.need("head_dim")
    return hidden * queries * size * gate + own + queries * (layer.value_size or size) * hidden


def _latent(fields: Fields, queries: int, hidden: int) -> int:
    queries = queries or fields.need("num_attention_heads")
    nope, rope, value = fields.need("qk_nope_head_dim"), fields.need("qk_rope_head_dim"), fields.need("v_head_dim")
    latent, narrow = fields.need("kv_lora_rank"), fields.whole("q_lora_rank")
    query = hidden * narrow + narrow * queries * (nope + rope) if narrow else hidden * queries * (nope + rope)
    index = 0
    if fields.has("index_n_heads") and narrow:
        heads, size = fields.need("index_n_heads"), fields.need("index_head_dim")
        index = narrow * heads * size + hidden * size + hidden * heads
    return query + hidden * (latent + rope) + latent * queries * (nope + value) + queries * value * hidden + index


def _mixer(fields: Fields, layer: Layer, hidden: int) -> int:
    """Return the matrices of a recurrent mixer."""
    state = layer.state
    if state is None:
        return 0
    if state.family == "mamba1":
        inner, size = state.conv_channels, state.recurrent // state.conv_channels
        rank = fields.whole("mamba_dt_rank", "time_step_rank") if not isinstance(fields.get("mamba_dt_rank", "time_step_rank"), str) else None
        rank = rank or -(-hidden // 16)
        return 2 * hidden * inner + inner * (rank + 2 * size) + rank * inner + inner * (size + state.conv_width + 1) + inner * hidden
    if state.family == "mamba2":
        inner, shared = state.conv_channels, state.groups * state.group_channels
        return hidden * (2 * inner + shared + state.heads) + (inner + shared) * (state.conv_width + 1) + inner * hidden
    if state.family == "gdn" and fields.family == "qwen3_next":
        value = fields.need("linear_num_value_heads") * fields.need("linear_value_head_dim")
        heads = fields.need("linear_num_value_heads")
        return hidden * (state.conv_channels + value) + hidden * 2 * heads + state.conv_channels * (state.conv_width + 1) + value * hidden
    raise CannotJudge(f"the matrices of its recurrent layers ({state.family}) are not known", where=fields.name, hint="--weights SIZE")


def _mlp(fields: Fields, layer: Layer, index: int, hidden: int) -> tuple[int, int]:
    """Return the matrices of one layer's MLP: those that every token takes, and the routed experts."""
    family = fields.family
    if family in families.STATES_ONLY:
        return 0, 0
    if family == "nemotron_h":
        if layer.kind != "none":
            return 0, 0
        if fields.has("n_routed_experts"):
            raise CannotJudge("the experts of a nemotron_h are not modelled", where=fields.name, hint="--weights SIZE")
        return 2 * hidden * fields.need("intermediate_size"), 0
    if family == "granitemoehybrid":
        shared = 3 * hidden * (fields.whole("shared_intermediate_size") or 0)
        count = fields.whole("num_local_experts", default=0) or 0
        return shared, count * 3 * hidden * fields.need("intermediate_size") + count * hidden if count else 0
    matrices = 2 if family in PLAIN else 3
    count = fields.whole(*_EXPERTS, default=0) or 0
    if not count or not _is_routed(fields, index):
        return matrices * hidden * _inner(fields, hidden), 0
    inner = fields.whole("moe_intermediate_size", least=1) or fields.need("intermediate_size")
    shared = fields.whole("shared_expert_intermediate_size", default=0) or 0
    shared = shared or (fields.whole("n_shared_experts", default=0) or 0) * inner
    if family == "llama4_text":
        inner = shared = fields.need("intermediate_size")
    return matrices * hidden * shared + count * hidden, count * matrices * hidden * inner


def _inner(fields: Fields, hidden: int) -> int:
    if fields.family == "mpt":
        return int(float(fields.get("expansion_ratio", default=4)) * hidden)
    if fields.family == "llama4_text" and fields.has("intermediate_size_mlp"):
        return fields.need("intermediate_size_mlp")
    if fields.family == "chatglm":
        return fields.need("ffn_hidden_size")
    found = fields.whole(*_INNER, least=1)
    if found is None and fields.family in ("gpt2", "gpt_bigcode", "gptj", "bloom", "falcon", "gpt_neo"):
        return 4 * hidden
    return found or fields.need("intermediate_size")


def _is_routed(fields: Fields, index: int) -> bool:
    """Say whether the MLP of a layer is one of experts."""
    family = fields.family
    if family == "jamba":
        return index % (fields.whole("expert_layer_period", default=2, least=1) or 2) == (fields.whole("expert_layer_offset", default=1) or 0)
    if family == "llama4_text":
        listed = fields.listed("moe_layers")
        step = fields.whole("interleave_moe_layer_step", default=1, least=1) or 1
        return index in listed if listed is not None else (index + 1) % step == 0
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text"):
        step = fields.whole("decoder_sparse_step", default=1, least=1) or 1
        return index not in (fields.listed("mlp_only_layers") or []) and (index + 1) % step == 0
    if index < (fields.whole("first_k_dense_replace", default=0) or 0):
        return False
    step = fields.get("moe_layer_freq", default=1)
    return index % step == 0 if isinstance(step, int) and not isinstance(step, bool) and step > 0 else True
