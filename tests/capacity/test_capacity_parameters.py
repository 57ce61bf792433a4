"""Parameters counted from a config.json are those that the published model has, and weights without a log say how they are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.parameters import count_parameters
from pytest_kvcache.capacity.weighing import weigh
from pytest_kvcache.errors import CannotJudge

LLAMA2_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "tie_word_embeddings": False, "torch_dtype": "float16", "max_position_embeddings": 4096,
}  # fmt: skip


def config(model_type: str, vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type, "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "tie_word_embeddings": False, "max_position_embeddings": 4096, **more,
    }  # fmt: skip


# The parameters of the models that transformers 5 builds from these configurations.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": (LLAMA2_7B, 6_738_415_616),
    "Llama-3.1-70B": (config("llama", 128256, 8192, 28672, 80, 64, 8), 70_553_706_496),
    "Mixtral-8x7B": (config("mixtral", 32000, 4096, 14336, 32, 32, 8, num_local_experts=8), 46_702_792_704),
    "Qwen3-30B-A3B": (config("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, head_dim=128, num_experts=128, moe_intermediate_size=768), 30_532_122_624),
    "Gemma-2-9B": (config("gemma2", 256000, 3584, 14336, 42, 16, 8, head_dim=256, tie_word_embeddings=True), 9_241_705_984),
    "gpt-oss-20b": (config("gpt_oss", 201088, 2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32), 20_914_757_184),
    "DeepSeek-V2-Lite": (
        config(
            "deepseek_v2", 102400, 2048, 10944, 27, 16, 16, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, first_k_dense_replace=1,
            kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ),
        15_706_484_224,
    ),
    "Qwen3-Next-80B-A3B": (
        config(
            "qwen3_next", 151936, 2048, 5120, 48, 16, 2, head_dim=256, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512,
            linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        ),
        79_674_391_296,
    ),
    "Llama-4-Scout": (
        config("llama4_text", 202048, 5120, 8192, 48, 40, 8, head_dim=128, intermediate_size_mlp=16384, num_local_experts=16, interleave_moe_layer_step=1),
        107_769_861_120,
    ),
    "Jamba": (
        config(
            "jamba", 65536, 4096, 14336, 32, 32, 8, num_experts=16, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8, attn_layer_offset=4,
            mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=256,
        ),
        51_570_323_328,
    ),
    "Nemotron-H-8B": (
        config(
            "nemotron_h", 131072, 4096, 21504, 52, 32, 8, head_dim=128, mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4,
            expand=2, hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        ),
        8_100_852_736,
    ),
    "phi-2": (config("phi", 51200, 2560, 10240, 32, 32, 32), 2_779_683_840),
    "gpt2": ({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}, 124_439_808),
    "falcon-7b": (
        {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True},
        6_921_720_704,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_model(name: str) -> None:
    raw, right = PUBLISHED[name]
    assert count_parameters(raw, raw, read_architecture(raw)).total == pytest.approx(right, rel=0.002)


def test_the_articles_seven_billions_are_its_fourteen_gigabytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B))
    found = weigh(tmp_path)
    assert found.total_bytes == pytest.approx(13.5e9, rel=0.01)
    assert found.spread_bytes == pytest.approx(0.01 * found.total_bytes, rel=0.01)
    assert found.source == "counted from config.json: 6,738,149,376 parameters x 2 B (float16)"


def test_what_lies_beside_the_configuration_counts_before_what_it_counts_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 13_476_839_424}, "weight_map": {}}))
    for source in (tmp_path, tmp_path / "config.json"):
        found = weigh(source)
        assert (found.total_bytes, found.source) == (13_476_839_424, "total_size of model.safetensors.index.json")


@pytest.mark.parametrize(
    ("quantisation", "gigabytes"),
    [
        ({"quant_method": "gptq", "bits": 4}, 3.96),
        ({"quant_method": "awq", "bits": 4}, 3.96),
        ({"quant_method": "fp8"}, 7.04),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, 7.04),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.17),
    ],
)
def test_a_quantised_checkpoint_weighs_its_bits_and_is_less_sure(tmp_path: Path, quantisation: dict[str, Any], gigabytes: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA2_7B, "quantization_config": quantisation}))
    found = weigh(tmp_path)
    assert found.total_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)
    assert found.spread_bytes == pytest.approx(0.06 * found.total_bytes, rel=0.01)


def test_of_gpt_oss_only_the_experts_are_in_four_bits(tmp_path: Path) -> None:
    raw, _ = PUBLISHED["gpt-oss-20b"]
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "mxfp4"}}))
    assert weigh(tmp_path).total_bytes == pytest.approx(13.76e9, rel=0.03), "its published safetensors have 13.76 GB"


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"quantization_config": {"quant_method": "quip"}}, "quip"),
    ],
)
def test_what_the_file_does_not_tell_is_named_and_not_guessed(tmp_path: Path, changes: dict[str, Any], missing: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA2_7B, **changes}))
    with pytest.raises(CannotJudge, match=missing):
        weigh(tmp_path)


def test_a_family_whose_matrices_are_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA2_7B, "model_type": "helium"}))
    with pytest.raises(CannotJudge, match="helium"):
        weigh(tmp_path)


def test_a_model_of_several_modalities_says_what_is_not_counted(tmp_path: Path) -> None:
    raw = {"model_type": "llava", "text_config": LLAMA2_7B, "vision_config": {"hidden_size": 1024}, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = weigh(tmp_path)
    assert "without the modules for images or sound" in found.source
    assert found.spread_bytes > 0.1 * found.total_bytes


@pytest.mark.parametrize(("name", "copies"), [("Llama-2-7B", 0), ("Gemma-2-9B", 1), ("gpt2", 1)])
def test_stages_hold_the_whole_model_and_a_tied_table_twice(name: str, copies: int) -> None:
    raw, _ = PUBLISHED[name]
    found = count_parameters(raw, raw, read_architecture(raw))
    assert sum(found.shares([range(len(found.layers))])) == pytest.approx(1)
    half = len(found.layers) // 2
    first, last = found.shares([range(half), range(half, len(found.layers))])
    assert (first + last - 1) * found.total == pytest.approx(copies * found.table)
