"""Start-up logs of other releases, written after the engines' own lines: older llama.cpp, memory set by hand, two allocations in a row."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvcache.quantities import Reading
from pytest_kvcache.server.startlog import facts

MIB, GIB = 1 << 20, 1 << 30

LLAMA_2024 = """0.00.031.106 I llm_load_tensors:        CPU buffer size =    63.84 MiB
0.00.032.150 I llama_new_context_with_model: n_ctx      = 4096
0.00.032.155 I llama_new_context_with_model: n_batch    = 2048
0.00.035.297 I llama_kv_cache_init:        CPU KV buffer size =   448.00 MiB
0.00.035.311 I llama_new_context_with_model: KV self size  =  448.00 MiB, K (f16):  224.00 MiB, V (f16):  224.00 MiB
INFO [                    init] initializing slots | tid="1399" timestamp=1751531864 n_slots=2
INFO [                    init] new slot | tid="1399" timestamp=1751531864 id_slot=0 n_ctx_slot=2048
INFO [                    init] new slot | tid="1399" timestamp=1751531864 id_slot=1 n_ctx_slot=2048
"""
LLAMA_EARLY_2025 = """llama_init_from_model: n_seq_max     = 4
llama_init_from_model: n_ctx         = 8192
llama_init_from_model: n_ctx_per_seq = 2048
llama_kv_cache_init: kv_size = 8192, offload = 1, type_k = 'q8_0', type_v = 'q8_0', n_layer = 28, can_shift = 1
llama_kv_cache_init:      CUDA0 KV buffer size =   476.00 MiB
llama_init_from_model: KV self size  =  476.00 MiB, K (q8_0):  238.00 MiB, V (q8_0):  238.00 MiB
llama_init_from_model: n_seq_max     = 1
llama_init_from_model: n_ctx         = 1024
llama_init_from_model: KV self size  =   12.00 MiB, K (f16):    6.00 MiB, V (f16):    6.00 MiB
"""
LLAMA_STATE = """llama_new_context_with_model: n_ctx      = 4096
llama_kv_cache_init: kv_size = 1, offload = 1, type_k = 'f32', type_v = 'f32', n_layer = 64, can_shift = 0
llama_new_context_with_model: KV self size  =  197.50 MiB, K (f32):    7.50 MiB, V (f32):  190.00 MiB
"""
VLLM_BY_HAND = """(Worker_TP0 pid=1) INFO 09-22 01:20:17 [gpu_worker.py:544] Initial free memory 93.95 GiB, reserved 4.0 GiB memory for KV Cache as specified \
by kv_cache_memory_bytes config and skipped memory profiling. This does not respect the gpu_memory_utilization config.
(Worker_TP1 pid=2) INFO 09-22 01:20:17 [gpu_worker.py:544] Initial free memory 93.90 GiB, reserved 4.0 GiB memory for KV Cache as specified \
by kv_cache_memory_bytes config and skipped memory profiling. This does not respect the gpu_memory_utilization config.
(EngineCore pid=3) INFO 09-22 01:20:18 [kv_cache_utils.py:2146] GPU KV cache size: 306,490 tokens, Maximum concurrency for 262,144 tokens per \
request: 1.17x
"""
VLLM_PADDED = "INFO 06-01 15:44:39 [kv_cache_utils.py:1912] GPU KV cache size: 174,504 tokens (3 padding layers, ~9.09% waste)\n"
SGLANG_BARE = "[2026-03-11 13:53:23 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 600000\n"
SGLANG_DRAFT = """[2026-03-11 13:53:20 TP0] Mamba Cache is allocated. max_mamba_cache_size: 43, conv_state size: 0.12GB, ssm_state size: 3.09GB
[2026-03-11 13:53:23 TP0] KV Cache is allocated. #tokens: 171008, K size: 5.22 GB, V size: 5.22 GB
[2026-03-11 13:53:24 TP0] KV Cache is allocated. #tokens: 171008, K size: 0.33 GB, V size: 0.33 GB
[2026-03-11 13:53:30 TP0] max_total_num_tokens=171008, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=8, \
context_len=169000, available_gpu_mem=8.27 GB
"""
TRTLLM_TWICE = """[TensorRT-LLM] TensorRT LLM version: 1.2.0rc2
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 288 [window size=8224], tokens per block=32, primary blocks=257, secondary blocks=0, \
max sequence length=9193
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 288 [window size=9193], tokens per block=32, primary blocks=1444, secondary blocks=0, \
max sequence length=9193
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 3.17 GiB for max tokens in paged KV cache (46208).
[TRT-LLM] [I] max_seq_len=9193, max_num_requests=2048, max_num_tokens=8192
"""
TRTLLM_WINDOWS = """[TensorRT-LLM] TensorRT-LLM version: 1.1.0
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 4 [window size=128], tokens per block=32, primary blocks=100, secondary blocks=0
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 64 [window size=2048], tokens per block=32, primary blocks=700, secondary blocks=0
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1.00 GiB for max tokens in paged KV cache (25600).
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 4 [window size=128], tokens per block=32, primary blocks=400, secondary blocks=0
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 64 [window size=2048], tokens per block=32, primary blocks=2800, secondary blocks=0
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 4.00 GiB for max tokens in paged KV cache (102400).
"""


@pytest.mark.parametrize(
    ("text", "right", "missing"),
    [
        (LLAMA_2024, {"pool_tokens": 4096, "pool_bytes": 448 * MIB, "kv_dtype": "f16", "max_num_seqs": 2, "max_model_len": 2048}, set()),
        (LLAMA_EARLY_2025, {"pool_tokens": 8192, "pool_bytes": 476 * MIB, "kv_dtype": "q8_0", "max_num_seqs": 4, "max_model_len": 2048}, set()),
        (LLAMA_STATE, {"pool_bytes": 197.5 * MIB}, {"pool_tokens"}),
        (VLLM_BY_HAND, {"pool_tokens": 306_490, "pool_bytes": 8 * GIB, "max_concurrency": 1.17, "max_model_len": 262_144}, set()),
        (VLLM_PADDED, {"pool_tokens": 174_504}, {"pool_bytes"}),
        (SGLANG_BARE, {"pool_tokens": 600_000, "kv_dtype": "torch.bfloat16"}, {"pool_bytes"}),
        (
            SGLANG_DRAFT,
            {
                "pool_tokens": 171_008,
                "max_num_seqs": 8,
                "max_model_len": 169_000,
                "pool_bytes": sum(round(size * GIB) for size in (0.12, 3.09, 5.22, 5.22, 0.33, 0.33)),
            },
            set(),
        ),
        (TRTLLM_TWICE, {"pool_blocks": 1444, "pool_tokens": 46_208, "max_num_seqs": 2048, "max_model_len": 9193, "block_size": 32}, set()),
        (TRTLLM_WINDOWS, {"pool_blocks": 3200, "pool_tokens": 102_400, "pool_bytes": 4 * GIB}, set()),
    ],
    ids=["llama-2024", "llama-2025", "llama-state", "vllm-by-hand", "vllm-padded", "sglang-bare", "sglang-draft", "trtllm-twice", "trtllm-windows"],
)
def test_a_log_of_another_release(text: str, right: dict[str, Any], missing: set[str]) -> None:
    values = {name: value.value for name, value in facts(text).items() if isinstance(value, Reading)}
    assert {name: values.get(name) for name in right} == right
    assert not missing & values.keys()
