"""Configurations as they are found: other names, nested models, lists per layer, decoys, absent keys, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.families import class_defaults
from pytest_kvcache.capacity.growth import growth, resolve_dtypes
from pytest_kvcache.errors import CannotJudge, KvError, UsageError

PLAIN: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def _config(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **PLAIN, **more}


def _kinds(**config: Any) -> str:
    """Return the layers as letters: f full, s sliding, c chunked, m latent, r recurrent, x cross, - none, = shared."""
    letters = {"full": "f", "sliding": "s", "chunked": "c", "mla": "m", "state": "r", "cross": "x", "none": "-", "shared": "="}
    return "".join(letters[layer.kind] for layer in read_architecture(config).layers)


# The field cases of published reports: (what the file says, growth, sliding, window).
FIELD_CASES = {
    "A04 starcoder2-3b: all slide": ({"model_type": "starcoder2", "num_hidden_layers": 30, "num_key_value_heads": 2, "num_attention_heads": 24, "hidden_size": 3072, "sliding_window": 4096}, 0, 30720, 4096),
    "I01 mistral-small-24b": ({"model_type": "mistral", "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 5120, "head_dim": 128, "sliding_window": None}, 163840, 0, None),
    "I04 max_window_layers = layers": (_config("qwen2", use_sliding_window=True, sliding_window=1024, max_window_layers=4, num_key_value_heads=2), 4 * 2 * 2 * 64 * 2, 0, None),
    "I05 falcon-40b": ({"model_type": "falcon", "num_hidden_layers": 60, "num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True}, 122880, 0, None),
    "I05 the first files of falcon-40b": ({"model_type": "RefinedWeb", "n_layer": 60, "n_head": 128, "hidden_size": 8192, "n_head_kv": 8, "multi_query": True}, 122880, 0, None),
    "I05 the first files of falcon-7b": ({"model_type": "RefinedWebModel", "n_layer": 32, "n_head": 71, "hidden_size": 4544, "multi_query": True}, 8192, 0, None),
    "I08 gemma-4-12b": ({"model_type": "gemma4_text", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "head_dim": 256, "sliding_window": 1024}, 16384, 40 * 8 * 2 * 256 * 2, 1024),
    "I11 qwen3-30b-a3b": ({"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_size": 2048, "head_dim": 128}, 98304, 0, None),
    "I14 openelm-270m": ({"model_type": "openelm", "num_transformer_layers": 16, "num_query_heads": [12] * 16, "num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4, "head_dim": 64, "model_dim": 1280}, 16128, 0, None),
    "I16 mimo-v2-flash": ({"model_type": "mimo_v2_flash", "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size": 128, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0] + [1, 1, 1, 1, 1, 0] * 7}, 23040, 199680, 128),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELD_CASES)
def test_a_reported_configuration_gets_the_right_answer(case: str) -> None:
    config, growing, sliding, window = FIELD_CASES[case]
    cost = growth(read_architecture(config))
    assert (cost.growth_bytes_per_token, cost.sliding_bytes_per_token, cost.window) == (growing, sliding, window)


def test_partly_sliding_qwen2_is_read_and_refused_by_vllm() -> None:
    made = read_architecture(_config("qwen2", use_sliding_window=True, sliding_window=1024, max_window_layers=2))
    assert [layer.kind for layer in made.layers] == ["full", "full", "sliding", "sliding"]
    assert "max_window_layers = 2" in made.refused_by_vllm


@pytest.mark.parametrize(
    ("model_type", "more", "kinds"),
    [
        ("gemma2", {"sliding_window": 8}, "sfsf"),
        ("gemma3_text", {"num_hidden_layers": 7}, "sssssfs"),
        ("gemma3_text", {"sliding_window_pattern": 2}, "sfsf"),
        ("gemma3n_text", {"num_hidden_layers": 10, "num_kv_shared_layers": 4}, "ssssfs===="),
        ("gemma4_text", {"num_hidden_layers": 7}, "sssssff"),
        ("cohere2", {}, "sssf"),
        ("cohere2", {"layer_types": ["full_attention"] * 4}, "ffff"),
        ("olmo3", {}, "sssf"),
        ("exaone4", {"sliding_window": None}, "ffff"),
        ("exaone4", {"sliding_window": 16, "sliding_window_pattern": "LLG"}, "ssfs"),
        ("gpt_oss", {}, "sfsf"),
        ("cwm", {"sliding_window": 16}, "fsss"),
        ("mistral", {}, "ssss"),
        ("mistral", {"sliding_window": None}, "ffff"),
        ("mistral", {"sliding_window": 0}, "ffff"),
        ("laguna", {"sliding_window": 16}, "ffff"),
        ("llama4_text", {}, "cccf"),
        ("llama4_text", {"attention_chunk_size": None}, "ffff"),
        ("llama4_text", {"no_rope_layers": [1, 0, 1, 0]}, "cfcf"),
        ("mllama_text_model", {"cross_attention_layers": [1]}, "fxff"),
        ("jamba", {"num_hidden_layers": 8}, "rrrrfrrr"),
        ("bamba", {"attn_layer_indices": [2]}, "rrfr"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention", "mamba", "mamba"]}, "rfrr"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"]}, "rfrr"),
        ("lfm2", {"full_attn_idxs": [2]}, "rrfr"),
        ("qwen3_next", {"full_attention_interval": 2}, "rfrf"),
        ("qwen3_5_text", {}, "rrrf"),
        ("olmo_hybrid", {"num_hidden_layers": 3}, "rrf"),
        ("minimax", {"layer_types": ["linear_attention", "full_attention"] * 2}, "rfrf"),
        ("minimax_text_01", {"attn_type_list": [0, 0, 0, 1]}, "rrrf"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*E"}, "r-rf-"),
        ("recurrent_gemma", {}, "rrsr"),
        ("mamba2", {}, "rrrr"),
        ("falcon_h1", {}, "ffff"),
        ("kimi_linear", {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 4}}, "rrrm"),
        ("deepseek_v3", {}, "mmmm"),
        ("deepseek_v2", {"kv_lora_rank": None}, "ffff"),
        ("longcat_flash", {"num_layers": 2, "num_hidden_layers": None}, "mmmm"),
        ("longcat_flash", {"num_layers": 2}, "mmmm"),
        ("hunyuan", {"use_cla": True, "cla_share_factor": 2, "num_key_value_heads": 2}, "f=f="),
        ("gpt_neo", {"attention_types": [[["global", "local"], 2]], "num_heads": 8}, "fsfs"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 16}, "fffs"),
        ("nemotron-nas", {"block_configs": [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}}, {"attention": {"replace_with_linear": True}}, {"attention": {"n_heads_in_group": 8}}]}, "f--f"),
        ("plamo2", {"mamba_step": 2, "mamba_num_heads": 4, "hidden_size_per_head": 64, "mamba_d_state": 16, "mamba_d_conv": 4, "num_key_value_heads": 2}, "rfrf"),
        ("t5", {"num_layers": 2, "num_hidden_layers": None}, "fxfx"),
    ],
)  # fmt: skip
def test_each_layer_is_of_the_kind_that_the_family_gives_it(model_type: str, more: dict[str, Any], kinds: str) -> None:
    assert _kinds(**_config(model_type, **more)) == kinds


def test_heads_are_found_under_their_other_names() -> None:
    assert (
        growth(
            read_architecture({"model_type": "gpt_bigcode", "n_layer": 2, "n_head": 8, "n_embd": 512, "multi_query": False})
        ).growth_bytes_per_token
        == 2 * 8 * 2 * 64 * 2
    )
    group = {"n_layers": 2, "n_heads": 8, "d_model": 512, "max_seq_len": 128}
    assert growth(read_architecture({"model_type": "mpt", **group, "attn_config": {"kv_n_heads": 2}})).growth_bytes_per_token == 2 * 2 * 2 * 64 * 2
    assert (
        growth(read_architecture({"model_type": "mpt", **group, "attn_config": {"attn_type": "multiquery_attention"}})).growth_bytes_per_token
        == 2 * 2 * 64 * 2
    )
    assert growth(read_architecture({"model_type": "dbrx", **group, "attn_config": {"kv_n_heads": 4}})).growth_bytes_per_token == 2 * 4 * 2 * 64 * 2
    step = _config("step3_text", num_attention_groups=1, head_dim=256)
    assert growth(read_architecture(step)).growth_bytes_per_token == 4 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("wrapper", "nest"),
    [
        ("llava", ("text_config",)),
        ("internvl_chat", ("llm_config",)),
        ("deepseek_vl_v2", ("language_config",)),
        ("qwen2_5_omni", ("thinker_config", "text_config")),
        ("qwen3_omni_moe", ("thinker_config", "text_config")),
    ],
)
def test_the_text_model_is_found_where_a_file_of_several_modalities_keeps_it(wrapper: str, nest: tuple[str, ...]) -> None:
    config: dict[str, Any] = _config("qwen2", num_key_value_heads=2)
    for key in reversed(nest):
        config = {key: config}
    made = read_architecture({"model_type": wrapper, "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152}, **config})
    assert growth(made).growth_bytes_per_token == 4 * 2 * 2 * 64 * 2


def test_a_null_is_what_the_file_says_and_no_default() -> None:
    assert growth(read_architecture(_config("mistral", num_key_value_heads=None, sliding_window=None))).growth_bytes_per_token == 4 * 8 * 2 * 64 * 2
    absent = read_architecture(_config("mistral", sliding_window=None))
    assert "num_key_value_heads = 8, the class default of mistral" in absent.assumptions


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "acme", "num_hidden_layers": 4}, "num_attention_heads"),
        ({"model_type": "acme", "num_attention_heads": 4}, "num_hidden_layers"),
        ({"model_type": "acme", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}, "num_key_value_heads"),
        (_config("acme", num_key_value_heads=2, hidden_size=None), "hidden_size"),
        (_config("acme", num_key_value_heads=2, hidden_size=500), "head_dim"),
        (_config("acme", num_key_value_heads=2, sliding_window=128), "layer_types"),
        (_config("acme", num_key_value_heads=2, layer_types=["full_attention", "spiral", "spiral", "spiral"]), "layer_types"),
        (_config("acme", num_key_value_heads=2, layer_types=["full_attention"] + ["linear_attention"] * 3), "linear_num_value_heads"),
        (_config("acme", kv_lora_rank=512), "qk_rope_head_dim"),
        (_config("deepseek_v32", index_head_dim=None), "index_head_dim"),
        (_config("minimax_text_01"), "attn_type_list"),
        ({}, "num_hidden_layers"),
    ],
)
def test_what_a_file_does_not_determine_is_refused_by_its_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(CannotJudge, match=field) as found:
        read_architecture(config)
    assert "--assume" in found.value.hint


@pytest.mark.parametrize("model_type", ["deepseek_v4", "rwkv", "zaya", "xlstm"])
def test_a_family_that_keeps_something_else_is_refused(model_type: str) -> None:
    with pytest.raises(CannotJudge, match=model_type):
        read_architecture(_config(model_type, num_key_value_heads=1))


def test_the_user_may_state_what_is_missing_and_it_is_carried() -> None:
    made = read_architecture(_config("acme"), assume={"num_key_value_heads": "2", "head_dim": "128"})
    assert growth(made).growth_bytes_per_token == 4 * 2 * 2 * 128 * 2
    assert "num_key_value_heads = 2, stated by the user" in made.assumptions
    idle = read_architecture(_config("llama"), assume={"num_key_valu_heads": "2"})
    assert idle.notes == ("num_key_valu_heads was stated and decides nothing for this model",)


@pytest.mark.parametrize(
    "config",
    [
        _config("llama", num_hidden_layers=-1),
        _config("llama", num_hidden_layers="many"),
        _config("llama", num_attention_heads=True),
        _config("llama", num_hidden_layers=10**9),
        _config("gemma3_text", layer_types=["full_attention"]),
        _config("openelm", num_kv_heads=[1, "2", 3, 4]),
        {"model_type": "mamba", "num_hidden_layers": 2, "expand": -1, "state_size": 16},
    ],
)
def test_nonsense_in_a_file_is_said_and_never_computed_with(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        growth(read_architecture(config))


@pytest.mark.parametrize(
    ("quantisation", "kv_dtype"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "bfloat16"),
    ],
)
def test_a_checkpoint_may_ask_for_its_own_cache_type_and_an_explicit_one_wins(quantisation: dict[str, Any], kv_dtype: str) -> None:
    made = read_architecture(_config("llama", quantization_config=quantisation))
    assert resolve_dtypes(made)[0] == kv_dtype
    assert resolve_dtypes(made, "bfloat16")[0] == "bfloat16"


def test_modelopts_own_file_beside_the_configuration_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_config("llama")))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}))
    assert resolve_dtypes(read_architecture(tmp_path))[0] == "fp8"


@pytest.mark.parametrize(
    ("more", "context"),
    [
        ({}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"model_max_length": 1024}, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),
    ],
)
def test_the_longest_length_is_read_as_vllm_reads_it(more: dict[str, Any], context: int) -> None:
    assert read_architecture(_config("llama", **more)).context == context


def test_recurrent_states_have_the_size_of_published_models() -> None:
    qwen = read_architecture({"model_type": "qwen3_next", "num_hidden_layers": 48, "torch_dtype": "bfloat16"})
    assert growth(qwen).fixed_bytes == 36 * 1_097_728
    assert growth(qwen, state_dtype="float32").fixed_bytes == 36 * 2_146_304
    lfm = read_architecture({"model_type": "lfm2", "num_hidden_layers": 2, "full_attn_idxs": [1], "hidden_size": 2048, "conv_L_cache": 3})
    assert growth(lfm).fixed_bytes == 2048 * 2 * 2
    mamba = read_architecture(
        {"model_type": "falcon_mamba", "num_hidden_layers": 64, "hidden_size": 4096, "intermediate_size": 8192, "state_size": 16, "conv_kernel": 4}
    )
    assert growth(mamba).fixed_bytes == 64 * (8192 * 3 + 8192 * 16) * 2


def test_every_family_with_class_defaults_is_read_or_refused_in_words() -> None:
    from pytest_kvcache.capacity import families

    for model_type in families._class_defaults():
        try:
            made = read_architecture(
                {"model_type": model_type, "num_hidden_layers": 4, "hybrid_override_pattern": "M*-M" if model_type == "nemotron_h" else None}
            )
        except KvError as error:
            assert "head_dim" in str(error) or "layers_block_type" in str(error) or "no_op" in str(error), model_type
        else:
            assert made.layers, model_type
    assert class_defaults("llama")["hidden_size"] == 4096
    assert class_defaults("acme") == {}


@pytest.mark.parametrize(
    "more",
    [
        {"layer_group_size": 5},
        {"mamba_d_state": 16},
        {"linear_num_value_heads": 32},
        {"attention_chunk_size": 8192},
        {"linear_attn_config": {"kda_layers": [1]}},
        {"attn_layer_period": 4},
        {"swa_head_dim": 64},
        {"is_encoder_decoder": True},
        {"compress_ratios": [4] * 20},
        {"index_head_dim": 128, "index_topk": 2048},
    ],
)
def test_a_family_that_is_not_known_is_not_taken_for_a_plain_one(more: dict[str, Any]) -> None:
    plain = {
        "model_type": "quite_new", "num_hidden_layers": 20, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    assert growth(read_architecture(plain)).growth_bytes_per_token == 81920
    key = next(iter(more))
    with pytest.raises(CannotJudge, match=key) as caught:
        read_architecture({**plain, **more})
    assert f"--assume {key}=null" in caught.value.hint
    made = read_architecture({**plain, **more}, assume={key: "null"})
    assert growth(made).growth_bytes_per_token == 81920
    assert any(key in text for text in made.assumptions)
    assert growth(read_architecture({**plain, key: None})).growth_bytes_per_token == 81920


def test_a_family_that_is_not_known_is_read_where_its_fields_say_all() -> None:
    states = {
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    new = _config("quite_new", num_key_value_heads=2, head_dim=256, full_attention_interval=4, **states)
    known = _config("qwen3_next", num_key_value_heads=2, head_dim=256, full_attention_interval=4, **states)
    ours, theirs = growth(read_architecture(new)), growth(read_architecture(known))
    assert (ours.growth_bytes_per_token, ours.fixed_bytes) == (theirs.growth_bytes_per_token, theirs.fixed_bytes)
    windows = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 32}
    made = growth(read_architecture(_config("quite_new", num_key_value_heads=2, head_dim=64, **windows)))
    assert (made.growth_bytes_per_token, made.sliding_bytes_per_token) == (2 * 2 * 128 * 2, 2 * 8 * 64 * 2)


def test_a_file_without_model_type_is_known_by_its_class() -> None:
    config = {
        "architectures": ["LongcatFlashForCausalLM"], "num_layers": 28, "num_attention_heads": 64, "hidden_size": 6144, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert growth(read_architecture(config)).growth_bytes_per_token == 2 * 28 * 576 * 2


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "modernbert"])
def test_an_encoder_has_nothing_to_plan(model_type: str) -> None:
    with pytest.raises(CannotJudge, match="is an encoder: it reads its whole input at once"):
        read_architecture(_config(model_type))


@pytest.mark.parametrize("key", ["loop_num", "total_ut_steps", "H_cycles", "param_sink_number", "rswa_window"])
def test_a_key_that_multiplies_the_cache_of_an_unknown_family_is_refused(key: str) -> None:
    with pytest.raises(CannotJudge, match=key):
        read_architecture(_config("someloops", num_key_value_heads=2, **{key: 2}))


@pytest.mark.parametrize(("kv_dtype", "row"), [("auto", 1152), ("fp8", 656), ("fp8_ds_mla", 656), ("fp8_e4m3", 576), ("nvfp4_ds_mla", 352)])
def test_fp8_of_a_sparse_latent_is_a_row_of_its_own(kv_dtype: str, row: int) -> None:
    config = json.loads((Path(__file__).parents[1] / "data" / "capacity" / "configs" / "deepseek-v3.2.json").read_text())
    assert growth(read_architecture(config), kv_dtype).growth_bytes_per_token == 61 * (row + 132)
    dense = read_architecture({**config, "model_type": "deepseek_v3", "index_head_dim": None, "index_topk": None})
    assert growth(dense, "fp8").growth_bytes_per_token == 61 * 576


def test_a_packed_cache_type_is_refused_and_not_guessed() -> None:
    with pytest.raises(CannotJudge, match="turboquant_k8v4"):
        growth(read_architecture(_config("llama")), "turboquant_k8v4")


def test_a_class_that_vllm_hands_to_its_transformers_backend_is_not_refused() -> None:
    made = read_architecture({**_config("persimmon"), "architectures": ["PersimmonForCausalLM"]})
    assert not made.refused_by_vllm
    assert any("Transformers backend" in note for note in made.notes)
    assert read_architecture(
        {
            **_config(
                "bamba", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=16, mamba_d_conv=4, mamba_expand=1
            ),
            "architectures": ["BambaForCausalLM"],
        }
    ).refused_by_vllm


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (
            _config(
                "step3p5",
                sliding_window=8,
                layer_types=["full_attention", "sliding_attention"] * 2 + ["sliding_attention", "full_attention"],
                num_nextn_predict_layers=2,
            ),
            "sf",
        ),
        (_config("mimo_v2_flash", sliding_window=8, hybrid_layer_pattern=[0, 1, 1, 0], num_nextn_predict_layers=1), "s"),
        (_config("qwen3_next", mtp_num_hidden_layers=1, num_key_value_heads=2), "f"),
        (_config("llama"), ""),
    ],
)
def test_draft_layers_are_of_the_kind_that_the_file_gives_them(config: dict[str, Any], kinds: str) -> None:
    assert "".join(layer.kind[0] for layer in read_architecture(config).mtp_layers) == kinds


def test_the_draft_of_a_sparse_latent_has_an_indexer_where_its_last_layer_has_none() -> None:
    config = _config(
        "glm_moe_dsa", kv_lora_rank=64, qk_rope_head_dim=16, index_head_dim=128, index_topk=64, indexer_types=["full", "full", "shared", "shared"], num_nextn_predict_layers=1,
    )  # fmt: skip
    made = read_architecture(config)
    assert [layer.index_size for layer in made.layers] == [128, 128, 0, 0]
    assert [layer.index_size for layer in made.mtp_layers] == [128]
