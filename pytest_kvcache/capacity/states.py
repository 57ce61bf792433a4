"""The fixed memory of recurrent layers, by family: Mamba, Mamba-2, gated delta nets, linear attention, short convolutions, recurrent units.

Shapes: as vLLM 0.32 and transformers 5.19 allocate them for one sequence; the convolution keeps ``kernel - 1`` steps.
"""

from __future__ import annotations

from pytest_kvcache.capacity.fields import Fields
from pytest_kvcache.capacity.layers import State
from pytest_kvcache.errors import UsageError


def state_of(fields: Fields) -> State:
    """Return the recurrent state of one layer. Raises CannotJudge naming the width that is missing."""
    family = fields.family
    reader = _READERS.get(family)
    if reader is not None:
        return reader(fields)
    if fields.has("linear_num_value_heads", "linear_value_head_dim"):
        return _gated_delta(fields)
    if fields.has("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"):
        return _mamba2(fields)
    raise fields.missing("linear_num_value_heads", "mamba_num_heads", why="the size of its recurrent state is not known")


def _mamba1(fields: Fields) -> State:
    inner = fields.whole("intermediate_size", least=1) if fields.family in ("mamba", "falcon_mamba") and fields.has("intermediate_size") else None
    if inner is None:
        inner = int(_expand(fields) * fields.need("hidden_size"))
    state = fields.need("state_size", "mamba_d_state", "ssm_state_size")
    kernel = fields.need("conv_kernel", "mamba_d_conv")
    return State("mamba1", conv_channels=inner, conv_width=kernel - 1, recurrent=inner * state)


def _mamba2(fields: Fields) -> State:
    heads = fields.need("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    groups = fields.need("n_groups", "mamba_n_groups", "mamba_ngroups", least=0)
    state = fields.need("ssm_state_size", "mamba_d_state", "state_size")
    kernel = fields.need("conv_kernel", "mamba_d_conv")
    size = fields.get("mamba_head_dim", "mamba_d_head", "mamba_headdim", *(("head_dim",) if fields.family == "mamba2" else ()))
    if fields.family == "nemotron_h":
        inner = heads * fields.need("mamba_head_dim")
    else:
        inner = fields.whole("mamba_d_ssm", least=1) or int(_expand(fields) * fields.need("hidden_size"))
    if not isinstance(size, int) or isinstance(size, bool):
        size = inner // heads
    wanted = str(fields.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default="auto")) if fields.family == "nemotron_h" else "auto"
    return State(
        "mamba2", inner, kernel - 1, heads * size * state, groups=groups, group_channels=2 * state, heads=heads, recurrent_dtype=wanted, checkpoint=1
    )


def _plamo2(fields: Fields) -> State:
    heads, size = fields.need("mamba_num_heads"), fields.need("hidden_size_per_head")
    state, kernel = fields.need("mamba_d_state"), fields.need("mamba_d_conv")
    return State("mamba2", heads * size, kernel - 1, heads * size * state, heads=heads)


def _gated_delta(fields: Fields) -> State:
    heads = fields.whole("num_attention_heads", least=1) if fields.family == "olmo_hybrid" else None
    key_heads = fields.whole("linear_num_key_heads", least=1) or heads or fields.need("linear_num_key_heads")
    value_heads = fields.whole("linear_num_value_heads", least=1) or heads or fields.need("linear_num_value_heads")
    key_size = fields.whole("linear_key_head_dim", least=1)
    if key_size is None:
        if fields.family != "olmo_hybrid":
            raise fields.missing("linear_key_head_dim")
        key_size = int(0.75 * fields.need("hidden_size") / key_heads)
    value_size = fields.whole("linear_value_head_dim", least=1) or (
        2 * key_size if fields.family == "olmo_hybrid" else fields.need("linear_value_head_dim")
    )
    kernel = fields.need("linear_conv_kernel_dim")
    channels = 2 * key_heads * key_size + value_heads * value_size
    wanted = str(fields.get("mamba_ssm_dtype", default="auto"))
    return State("gdn", channels, kernel - 1, value_heads * value_size * key_size, heads=value_heads, recurrent_dtype=wanted)


def _kda(fields: Fields) -> State:
    inside = fields.inside("linear_attn_config")
    heads = _inner(inside.get("num_heads")) or fields.need("linear_num_heads", "num_attention_heads")
    size = _inner(inside.get("head_dim")) or fields.need("linear_head_dim", "head_dim")
    kernel = _inner(inside.get("short_conv_kernel_size")) or fields.need("linear_conv_kernel_dim", "short_conv_kernel_size")
    return State("kda", 3 * heads * size, kernel - 1, heads * size * size, heads=heads, recurrent_dtype="float32")


def _linear(fields: Fields) -> State:
    heads = fields.need("num_attention_heads")
    size = fields.whole("head_dim", least=1) or fields.need("hidden_size") // heads
    return State("linear", recurrent=heads * size * size, heads=heads)


def _short_conv(fields: Fields) -> State:
    channels = (fields.whole("conv_dim", least=1) if fields.family == "lfm2" else None) or fields.need("hidden_size")
    return State("short_conv", channels, fields.need("conv_L_cache") - 1)


def _recurrent_unit(fields: Fields) -> State:
    width = fields.whole("lru_width", least=1) or fields.need("hidden_size")
    return State("rglru", width, fields.need("conv1d_width") - 1, width, recurrent_dtype="float32")


def _expand(fields: Fields) -> float:
    found = fields.get("expand", "mamba_expand")
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise fields.missing("expand", "mamba_expand")
    if not 0 < found < 10_000:
        raise UsageError(f"an expansion of {found} is none", where=fields.name)
    return float(found)


def _inner(found: object) -> int:
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 < found < 2**40 else 0


_READERS = {
    "mamba": _mamba1, "falcon_mamba": _mamba1, "jamba": _mamba1, "zamba": _mamba1, "mamba2": _mamba2, "bamba": _mamba2, "granitemoehybrid": _mamba2, "falcon_h1": _mamba2,
    "nemotron_h": _mamba2, "zamba2": _mamba2, "plamo2": _plamo2, "qwen3_next": _gated_delta, "qwen3_5_text": _gated_delta, "qwen3_5_moe_text": _gated_delta,
    "olmo_hybrid": _gated_delta, "kimi_linear": _kda, "bailing_moe_v3": _kda, "bailing_hybrid": _linear, "minimax_text_01": _linear, "minimax_m1": _linear, "minimax": _linear,
    "lfm2": _short_conv, "lfm2_moe": _short_conv, "recurrent_gemma": _recurrent_unit,
}  # fmt: skip
