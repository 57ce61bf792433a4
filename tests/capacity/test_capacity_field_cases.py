"""Field cases of published figures that no other test holds: counts of host blocks, a real CPU build, and what half the width gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_models import LLAMA_2_7B, LLAMA_31_8B, QWEN3_30B

from pytest_kvcache import cli

DATA = Path(__file__).parents[1] / "data"
CONFIGS = DATA / "capacity" / "configs"
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": None,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2560, "head_dim": 128,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def planned(folder: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any] | str, *words: str, code: int = 0) -> dict[str, Any]:
    path = CONFIGS / config if isinstance(config, str) else folder / "config.json"
    if not isinstance(config, str):
        path.write_text(json.dumps(config))
    got = cli.main(["plan", str(path), "--json", *words])
    out = capsys.readouterr()
    assert got == code, out.out[-500:] + out.err
    found: dict[str, Any] = json.loads(out.out)
    return found


@pytest.mark.parametrize(
    ("config", "count", "token"),
    [
        ("opt-125m.json", 7281, 36864),
        (LLAMA_31_8B, 2048, 131072),
        (MISTRAL_7B, 2048, 131072),
        (LLAMA_2_7B, 512, 524288),
        ("phi-2.json", 819, 327680),
    ],
    ids=["opt-125m", "llama-3-8b", "mistral-7b", "llama-2-7b", "phi-2"],
)
def test_a02_a_count_of_host_blocks_is_the_fingerprint_of_a_model(
    config: dict[str, Any] | str, count: int, token: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    size = ("--block-size", "16", "--max-model-len", "2048")
    texts = []
    for blocks in (count, 2 * count + 1, count - 1):
        log.write_text(f"INFO 05-01 01:01:01 gpu_executor.py:122] # GPU blocks: 1952, # CPU blocks: {blocks}\n")
        found = planned(tmp_path, capsys, config, "--check", str(log), *size, code=3)
        assert found["growth_bytes_per_token"] == token
        texts += [text for text in found["agreement"]["explanations"] if text.startswith("host blocks")]
    assert len(texts) == 3
    assert f"{count:,} are 4 GiB of swap space" in texts[0]
    assert "a block takes what this plan says" in texts[0]
    assert all("what this plan says" not in text and f"{count:,}" in text for text in texts[1:])


def test_a02_a_larger_swap_space_is_told_and_none_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    for blocks, words in ((4096, "4,096 are 8 GiB of swap space"), (0, "")):
        log.write_text(f"INFO 05-01 01:01:01 gpu_executor.py:122] # GPU blocks: 1952, # CPU blocks: {blocks}\n")
        found = planned(tmp_path, capsys, LLAMA_31_8B, "--check", str(log), "--block-size", "16", "--max-model-len", "2048", code=3)
        said = [text for text in found["agreement"]["explanations"] if text.startswith("host blocks")]
        assert bool(said) is bool(words)
        assert all(words in text for text in said)


@pytest.mark.parametrize("name", ["startup/vllm-0.32.0-cpu-startup.log", "exposition/vllm/0.32.0-cpu.prom"])
def test_a14_a_real_cpu_build_agrees_by_its_log_and_by_its_gauge(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, capsys, TINY, "--check", str(DATA / name))
    assert found["agreement"]["verdict"] == "equal"
    assert found["growth_bytes_per_token"] == 512
    assert (found["pool_blocks"], found["block_size"], found["pool_tokens"], found["max_concurrency"]) == (16384, 128, 2_097_152, 512)


def test_e11_half_the_width_holds_twice_the_tokens_in_one_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = {
        kind: planned(tmp_path, capsys, QWEN3_4B, "--kv-memory", "10GiB", "--kv-dtype", kind, "--block-size", "16", "--max-model-len", "32768")
        for kind in ("bfloat16", "fp8")
    }
    assert [sides[kind]["growth_bytes_per_token"] for kind in ("bfloat16", "fp8")] == [147_456, 73_728]
    assert sides["fp8"]["pool_blocks"] / sides["bfloat16"]["pool_blocks"] == pytest.approx(2, rel=0.001)


def test_i07_class_defaults_that_a_file_omits_are_used_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, capsys, "gemma-3-4b.json")
    assert (found["growth_bytes_per_token"], found["sliding_bytes_per_token"]) == (20_480, 118_784)
    said = " ".join(found["assumptions"])
    for words in ("num_attention_heads = 8", "num_key_value_heads = 4", "head_dim = 256", "class default"):
        assert words in said


@pytest.mark.parametrize("decoy", [{}, {"head_dim": 64}, {"head_dim": 64, "num_key_value_heads": 128, "qk_head_dim": 192}])
def test_i10_a_latent_is_counted_whatever_head_size_a_loader_wrote(decoy: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    assert planned(tmp_path, capsys, {**config, **decoy})["growth_bytes_per_token"] == 70_272


@pytest.mark.parametrize(("tp", "token"), [("1", 98_304), ("2", 49_152), ("4", 24_576), ("8", 24_576)])
def test_i11_more_gpus_than_heads_keep_one_head_each(tp: str, token: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, capsys, QWEN3_30B, "--tp", tp, "--dtype", "bfloat16", "--block-size", "16")
    assert found["growth_bytes_per_token"] == token


@pytest.mark.parametrize(
    ("quantisation", "words", "token"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, (), 65_536),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, ("--kv-dtype", "bfloat16"), 131_072),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, (), 65_536),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (), 131_072),
    ],
)
def test_i17_the_cache_type_of_a_checkpoint_counts_unless_another_is_asked_for(
    quantisation: dict[str, Any], words: tuple[str, ...], token: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    found = planned(tmp_path, capsys, {**config, "quantization_config": quantisation}, *words)
    assert found["growth_bytes_per_token"] == token


def test_i22_a_second_cache_keeps_its_width_beside_a_narrow_latent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = ("--platform", "gpu", "--block-size", "64")
    wide, narrow = (planned(tmp_path, capsys, "deepseek-v3.2.json", *card, *words) for words in ((), ("--kv-dtype", "fp8_ds_mla")))
    assert (wide["growth_bytes_per_token"], narrow["growth_bytes_per_token"]) == (78_324, 48_068)
