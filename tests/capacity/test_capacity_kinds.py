"""Sixty small models through vLLM 0.32's own planner: its layers were built and its functions called, at several lengths, block sizes and pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.pool import EngineShape, lay_out, size_pool
from pytest_kvcache.errors import CannotJudge

KINDS: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "capacity" / "kinds.json").read_text())


@pytest.mark.parametrize("name", KINDS)
def test_vllms_own_code_makes_the_same_blocks_of_this_kind_of_model(name: str) -> None:
    model = read_architecture(KINDS[name]["config"])
    for length, block, batched, hybrid, pp, caching, blocks, tokens, concurrency in KINDS[name]["rows"]:
        shape = EngineShape(
            max_model_len=length, block_size=block, max_num_batched_tokens=batched, hybrid=hybrid, pp=pp, prefix_caching=caching, threads_bind="0|1|2"
        )
        pool = size_pool(lay_out(model, shape), 2**30)
        if blocks is None:
            assert not pool.starts, shape
        else:
            assert (pool.pool_blocks, pool.pool_tokens, pool.max_concurrency) == (blocks, tokens, concurrency), shape


def test_the_collection_covers_every_kind_of_group() -> None:
    seen = {group.kind for kind in KINDS.values() for group in lay_out(read_architecture(kind["config"]), EngineShape(max_model_len=448)).groups}
    assert seen == {"full", "sliding", "mla", "state", "cross"}
    assert len(KINDS) >= 55


def test_mistrals_own_file_is_read_with_its_windows_one_after_another(tmp_path: Path) -> None:
    own = {"dim": 4096, "n_layers": 8, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8, "sliding_window": [None, 512, 512, 512]}
    (tmp_path / "params.json").write_text(json.dumps(own))
    layers = read_architecture(tmp_path).layers
    assert "".join(layer.kind[0] for layer in layers) == "fsssfsss"
    assert {(layer.kv_heads, layer.key_size, layer.window) for layer in layers} == {(8, 128, None), (8, 128, 512)}
    (tmp_path / "params.json").write_text(json.dumps({**own, "sliding_window": None}))
    assert {layer.kind for layer in read_architecture(tmp_path).layers} == {"full"}


@pytest.mark.parametrize("model_type", ["voxtral_realtime", "moshi", "diffusion_gemma", "blt"])
def test_a_model_whose_other_half_keeps_a_cache_is_refused_though_its_text_model_is_known(model_type: str) -> None:
    text = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "num_key_value_heads": 2}
    with pytest.raises(CannotJudge, match=model_type):
        read_architecture({"model_type": model_type, "text_config": text})
    assert read_architecture({"model_type": model_type, "text_config": text}, assume={"model_type": "llama"}).layers


@pytest.mark.parametrize(("name", "kv_dtype", "block"), [("deepseek-v3", "auto", 16), ("deepseek-v3", "fp8", 64), ("deepseek-v3.2", "auto", 64)])
def test_a_card_keeps_latents_in_the_blocks_of_its_kernel(name: str, kv_dtype: str, block: int) -> None:
    model = read_architecture(Path(__file__).parent.parent / "data" / "capacity" / "configs" / f"{name}.json")
    layout = lay_out(model, EngineShape(platform="gpu", kv_dtype=kv_dtype, max_model_len=8192))
    assert layout.block_size == block
    assert any("a B200's" in note for note in layout.notes)


def test_the_cache_type_beside_a_configuration_counts_for_the_file_as_for_its_folder(tmp_path: Path) -> None:
    model = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "other.json").write_text(json.dumps(model))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}))
    stated = [read_architecture(path).kv_dtype_stated for path in (tmp_path, tmp_path / "config.json", tmp_path / "other.json")]
    assert stated == ["fp8", "fp8", ""]
    sparse = json.loads((Path(__file__).parent.parent / "data" / "capacity" / "configs" / "deepseek-v3.2.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**sparse, "quantization_config": None}))
    assert read_architecture(tmp_path).kv_dtype_stated == "fp8_e4m3"


def test_a_length_that_nobody_states_is_the_one_before_longrope_on_vllm() -> None:
    model = {"model_type": "phi3", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "max_position_embeddings": 131072,
        "sliding_window": None, "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}  # fmt: skip
    made = read_architecture(model)
    layout = lay_out(made, EngineShape())
    assert layout.max_model_len == 4096
    assert any("before LongRoPE" in line for line in layout.assumptions)
    assert lay_out(made, EngineShape(max_model_len=100_000)).refusal == ""
    assert "greater than the derived" in lay_out(made, EngineShape(max_model_len=200_000)).refusal
    assert lay_out(made, EngineShape(engine="sglang")).max_model_len == 131072
    assert lay_out(read_architecture({**model, "original_max_position_embeddings": 8192}), EngineShape()).max_model_len == 8192
    assert lay_out(read_architecture({**model, "rope_scaling": None}), EngineShape()).max_model_len == 131072


def test_a_latent_in_the_file_of_a_family_without_one_is_refused_and_kimis_flat_file_keeps_one() -> None:
    latent = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "hidden_size": 512,
        "num_key_value_heads": 8,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
    }
    assert {layer.kind for layer in read_architecture({"model_type": "kimi_k25", **latent}).layers} == {"mla"}
    with pytest.raises(CannotJudge, match="kv_lora_rank says that a latent is kept"):
        read_architecture({"model_type": "qwen2", **latent})
    for free in ({"kv_lora_rank": None}, {"use_mla": False}):
        assert {layer.kind for layer in read_architecture({"model_type": "hunyuan_v1_dense", **latent, **free}).layers} == {"full"}


def test_window_layers_beside_a_latent_are_refused() -> None:
    latent = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "sliding_window": 128}
    for model_type, match in (("dots3_note", "another width"), ("mistral4", "beside a latent"), ("deepseek_v3", "beside a latent")):
        with pytest.raises(CannotJudge, match=match):
            read_architecture({"model_type": model_type, **latent, "layer_types": ["full_attention", "sliding_attention"] * 2})


@pytest.mark.parametrize("key", ["compress_ratios", "total_ut_steps"])
def test_a_key_that_no_known_family_has_is_refused_in_a_known_one_too(key: str) -> None:
    model = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, key: [4, 4]}
    with pytest.raises(CannotJudge, match=key):
        read_architecture(model)
    assert read_architecture(model, assume={key: "null"}).layers


@pytest.mark.parametrize(("model_type", "served"), [("whisper", True), ("bart", False), ("t5", False)])
def test_of_the_models_with_an_encoder_vllm_serves_whisper(model_type: str, served: bool) -> None:
    made = read_architecture(
        {"model_type": model_type, "d_model": 512, "decoder_layers": 2, "num_layers": 2, "decoder_attention_heads": 8, "num_heads": 8}
    )
    assert {layer.kind for layer in made.layers} == {"full", "cross"}
    assert bool(made.refused_by_vllm) is not served
