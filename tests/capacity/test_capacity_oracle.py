"""What a real vLLM answered, row by row."""

from __future__ import annotations

from pathlib import Path

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.growth import growth
from pytest_kvcache.capacity.pool import EngineShape, blocks_for, lay_out, size_pool

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_plain_model_gets_the_engines_own_figures() -> None:
    layout = lay_out(read_architecture(LLAMA), EngineShape(max_model_len=4096))
    pool = size_pool(layout, 2**30)
    assert (pool.pool_blocks, pool.pool_tokens, pool.max_concurrency, pool.starts) == (4096, 524288, 128.0, True)
    assert blocks_for(layout, 129) == 2
    assert growth(read_architecture(LLAMA)).growth_bytes_per_token == 4 * 2 * 2 * 64 * 2


def test_a_model_folder_is_read_like_its_file(tmp_path: Path) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_architecture(tmp_path).layers == read_architecture(LLAMA).layers
