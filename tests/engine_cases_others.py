"""Recorded servers of the engines beside vLLM and llama.cpp, and what a right reading of each is."""

from __future__ import annotations

from engine_case import Case, fact

_SGLANG_NEVER = frozenset({"swapped"})
_TGI_NEVER = frozenset({"swapped", "preemptions", "num_gpu_blocks_override"})

CASES = [
    Case(
        "sglang",
        "0.5.20",
        "exposition/sglang/0.5.20.prom",
        {"/server_info": "exposition/sglang/0.5.20-server_info.json", "/v1/models": "exposition/sglang/0.5.20-v1_models.json"},
        right={
            "pool_tokens": 262144, "pool_blocks": 262144, "block_size": 1, "used_tokens": 65536, "free_tokens": 196608, "usage": 0.25,
            "running": 8, "waiting": 2, "preemptions": 1, "prefix_queries": 160000, "prefix_hits": 40000, "prompt_tokens": 160000,
            "generation_tokens": 50000, "finished": 190, "finished_abort": 1, "max_model_len": 40960, "pool_bytes": 18 << 30,
            "kv_dtype": "auto", "prefix_caching": True, "gpu_memory_utilization": 0.85, "max_num_seqs": 2048,
        },
        never=_SGLANG_NEVER,
    ),
    Case(
        "sglang",
        "0.5.20 with two data-parallel ranks and a window pool",
        "exposition/sglang/0.5.20-dp2-swa.prom",
        right={"pool_tokens": 400000, "used_tokens": 160000, "free_tokens": 240000, "usage": 0.625, "running": 16, "waiting": 4},
        never=_SGLANG_NEVER,
    ),
    Case(
        "sglang",
        "0.5.20, every tensor-parallel rank telling the same",
        "exposition/sglang/0.5.20-all-schedulers.prom",
        right={
            "pool_tokens": 262144, "used_tokens": 65536, "free_tokens": 196608, "usage": 0.25, "running": 8, "waiting": 2, "preemptions": 3,
            "pool_blocks": 262144,
        },
        never=_SGLANG_NEVER,
    ),
    Case(
        "sglang",
        "0.5.20 with state layers",
        "exposition/sglang/0.5.20-mamba.prom",
        right={"usage": 0.83, "used_tokens": 100000, "free_tokens": 699000, "pool_tokens": 800000, "block_size": 64, "pool_blocks": 12500},
        never=_SGLANG_NEVER,
    ),
    Case(
        "sglang",
        "0.4.6",
        "exposition/sglang/0.4.6.prom",
        right={"usage": 0.28, "used_tokens": 123859, "running": 12, "waiting": 3, "prefix_hits": 160000},
        never=_SGLANG_NEVER,
    ),
    Case(
        "sglang",
        "0.5.20 without --enable-metrics",
        bodies={
            "/v1/loads": "exposition/sglang/0.5.20-v1_loads.json",
            "/server_info": "exposition/sglang/0.5.20-server_info.json",
            "/v1/models": "exposition/sglang/0.5.20-v1_models.json",
        },
        right={
            "pool_tokens": 262144, "used_tokens": 65536, "free_tokens": 196608, "usage": 0.25, "running": 8, "waiting": 2,
            "max_model_len": 40960, "pool_bytes": 18 << 30,
        },
        never=_SGLANG_NEVER,
    ),
    Case(
        "sglang",
        "0.5.20 without --enable-metrics, two data-parallel ranks",
        bodies={"/v1/loads": "exposition/sglang/0.5.20-v1_loads-dp2.json"},
        right={"pool_tokens": 524288, "used_tokens": 262144, "usage": 0.5, "running": 32, "waiting": 8},
        never=_SGLANG_NEVER,
    ),
    Case(
        "sglang",
        "/v1/loads?format=prometheus",
        "exposition/sglang/0.5.20-v1_loads.prom",
        right={"pool_tokens": 262144, "used_tokens": 65536, "free_tokens": 196608, "usage": 0.25, "running": 8, "waiting": 2},
        never=_SGLANG_NEVER,
    ),
    Case(
        "sglang",
        "0.5.3, older bodies, two unequal data-parallel ranks",
        bodies={"/get_server_info": "exposition/sglang/0.5.3-get_server_info.json", "/get_load": "exposition/sglang/0.5.3-get_load.json"},
        right={"pool_tokens": 220000, "running": 12, "waiting": 1, "kv_dtype": "fp8_e5m2", "prefix_caching": False, "pool_bytes": 12 << 30},
        never=_SGLANG_NEVER,
    ),
    Case(
        "tgi",
        "3.3.7",
        "exposition/tgi/3.3.7.prom",
        {"/info": "exposition/tgi/3.3.7-info.json"},
        {"block_size": fact(1), "pool_blocks": fact(133696, "blocks")},
        right={
            "pool_tokens": 133696, "used_tokens": 33424, "free_tokens": 100272, "usage": 0.25, "running": 5, "waiting": 2, "rejections": 4,
            "finished": 50, "max_model_len": 32768, "pool_blocks": 133696, "block_size": 1,
        },
        never=_TGI_NEVER,
    ),
    Case(
        "tgi",
        "3.3.7 before its first batch",
        "exposition/tgi/3.3.7-fresh.prom",
        right={"used_tokens": 0, "free_tokens": 133696, "usage": 0, "running": 0, "waiting": 0},
        never=_TGI_NEVER,
    ),
    Case(
        "tgi",
        "1.4",
        "exposition/tgi/1.4.prom",
        {"/info": "exposition/tgi/1.4-info.json"},
        right={
            "pool_tokens": 65536, "used_tokens": 16384, "usage": 0.25, "max_model_len": 4096, "prompt_tokens": 9000, "generation_tokens": 4500,
        },
        never=_TGI_NEVER,
    ),
    Case(
        "trtllm_serve",
        "1.x, /prometheus/metrics",
        "exposition/trtllm_serve/1.x.prom",
        log={"max_model_len": fact(40960)},
        right={
            "pool_blocks": 8219, "usable_blocks": 8219, "block_size": 32, "pool_tokens": 263008, "used_blocks": 2055, "free_blocks": 6164,
            "usage": 2055 / 8219, "running": 8, "waiting": 1, "max_num_seqs": 64, "prefix_hits": 8000, "prefix_queries": 32000,
            "finished": 50, "finished_stop": 10, "finished_length": 40, "max_model_len": 40960,
        },
        never=frozenset({"swapped"}),
    ),
    Case(
        "trtllm_serve",
        "1.x, the JSON",
        bodies={"/metrics": "exposition/trtllm_serve/1.x-metrics.json"},
        right={"pool_blocks": 8219, "used_blocks": 2055, "free_blocks": 6164, "usage": 2055 / 8219, "running": 8, "waiting": 1},
        never=frozenset({"swapped"}),
    ),
    Case(
        "triton_trtllm",
        "with every row",
        "exposition/triton_trtllm/backend.prom",
        right={
            "pool_blocks": 6240, "usable_blocks": 6240, "block_size": 64, "pool_tokens": 399360, "used_blocks": 1560, "free_blocks": 4680,
            "usage": 0.25, "running": 8, "waiting": 1, "max_num_seqs": 512,
        },
        never=frozenset({"swapped"}),
    ),
    Case(
        "triton_trtllm",
        "0.15, without fraction and waiting",
        "exposition/triton_trtllm/backend-0.15.prom",
        right={"pool_blocks": 6240, "used_blocks": 1560, "usage": 0.25, "running": 8},
        never=frozenset({"swapped"}),
    ),
    Case(
        "lmdeploy",
        "0.16.0",
        "exposition/lmdeploy/0.16.0.prom",
        right={
            "usage": 0.875, "running": 8, "waiting": 3, "prefix_hits": 12500, "prefix_queries": 50000, "finished": 51, "finished_abort": 0,
            "finished_error": 1, "generation_tokens": 12600,
        },
    ),
    Case(
        "lmdeploy",
        "0.16.0 with two engines",
        "exposition/lmdeploy/0.16.0-dp2.prom",
        right={"running": 10, "waiting": 6, "prompt_tokens": 100000},
    ),
    Case(
        "dynamo",
        "1.x, a worker",
        "exposition/dynamo/1.x-worker.prom",
        right={"pool_blocks": 8192, "used_blocks": 4096, "free_blocks": 4096, "usage": 0.5},
    ),
    Case(
        "dynamo",
        "1.x, a worker with vLLM inside",
        "exposition/dynamo/1.x-worker-vllm.prom",
        right={
            "pool_blocks": 4096, "used_blocks": 1024, "usage": 0.25, "running": 8, "waiting": 3, "preemptions": 2, "block_size": 16,
            "pool_tokens": 65536, "kv_dtype": "fp8", "prompt_tokens": 50000,
        },
    ),
    Case(
        "dynamo",
        "1.x, a worker with SGLang inside, whose blocks are tokens",
        "exposition/dynamo/1.x-worker-sglang.prom",
        right={"pool_blocks": 262144, "used_blocks": 131072, "usage": 0.5, "running": 6, "waiting": 1, "block_size": 1, "pool_tokens": 262144},
    ),
    Case(
        "dynamo",
        "0.7, a worker",
        "exposition/dynamo/0.7-worker.prom",
        right={"pool_blocks": 4096, "used_blocks": 1024, "free_blocks": 3072, "usage": 0.25},
    ),
    Case(
        "dynamo",
        "1.x, the frontend",
        "exposition/dynamo/1.x-frontend.prom",
        right={"pool_blocks": 4096, "block_size": 16, "pool_tokens": 65536, "max_model_len": 40960, "max_num_seqs": 256, "running": 12, "waiting": 3},
    ),
    Case(
        "dynamo",
        "1.x, a frontend whose names begin otherwise",
        "exposition/dynamo/1.x-frontend-prefix.prom",
        right={
            "pool_blocks": 2048, "block_size": 32, "pool_tokens": 65536, "max_model_len": 40960, "max_num_seqs": 128, "running": 9, "waiting": 2,
            "rejections": 7,
        },
    ),
    Case(
        "triton_trtllm",
        "23.11, whose families were called statistics, and a model without in-flight batching",
        "exposition/triton_trtllm/backend-23.11.prom",
        right={
            "pool_blocks": 800, "used_blocks": 200, "free_blocks": 600, "usage": 0.25, "block_size": 64, "pool_tokens": 51200, "running": 5,
            "max_num_seqs": 64,
        },
        never=frozenset({"swapped"}),
    ),
    Case(
        "ray_sglang",
        "two unequal replicas of Ray Serve",
        "exposition/ray_sglang/serve.prom",
        right={
            "pool_tokens": 400000, "used_tokens": 250000, "free_tokens": 150000, "usage": 0.625, "running": 8, "waiting": 2, "preemptions": 0,
            "prompt_tokens": 5000,
        },
        never=_SGLANG_NEVER,
    ),
    Case(
        "nim",
        "1.x",
        "exposition/nim/1.x.prom",
        right={
            "usage": 0.375, "running": 6, "waiting": 1, "max_num_seqs": 256, "prompt_tokens": 12000, "finished": 50, "finished_stop": 40,
            "finished_length": 10,
        },
    ),
]  # fmt: skip
