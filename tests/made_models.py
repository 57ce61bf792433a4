"""The shapes of known models, as far as their caches go: what their public configurations state, and nothing else of them."""

from __future__ import annotations

from typing import Any


def llama(layers: int, heads: int, kv_heads: int, head_dim: int = 128, *, context: int = 131072, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "hidden_size": heads * head_dim, "max_position_embeddings": context, "torch_dtype": "float16", **more,
    }  # fmt: skip


LLAMA_2_7B = llama(32, 32, 32, context=4096)
LLAMA_2_70B = llama(80, 64, 8, context=8192)
LLAMA_31_8B = llama(32, 32, 8)
QWEN3_14B = llama(40, 40, 8, context=40960)
QWEN25_7B = llama(28, 28, 4, context=32768)
QWEN3_30B = llama(48, 32, 4, context=262144)
QWEN3_32B = llama(64, 64, 8, context=40960)
QWEN3_235B = llama(94, 64, 4, context=40960)
GPT_OSS_120B = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880,
    "sliding_window": 128, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
STARCODER2_3B = {
    "model_type": "starcoder2", "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_size": 3072,
    "sliding_window": 4096, "use_sliding_window": True, "max_position_embeddings": 16384, "torch_dtype": "bfloat16",
}  # fmt: skip
