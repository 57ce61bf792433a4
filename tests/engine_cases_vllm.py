"""Recorded servers of vLLM, what builds on it, and llama.cpp, and what a right reading of each is."""

from __future__ import annotations

from engine_case import Case, fact

_VLLM_NEVER = frozenset({"swapped"})
_LLAMA_NEVER = frozenset(
    {
        "pool_blocks", "usable_blocks", "block_size", "used_blocks", "free_blocks", "num_gpu_blocks_override", "gpu_memory_utilization",
        "swapped", "preemptions", "rejections",
    }
)  # fmt: skip

CASES = [
    Case(
        "vllm",
        "0.32.0 on a CPU, recorded",
        "exposition/vllm/0.32.0-cpu.prom",
        {"/v1/models": "exposition/vllm/0.32.0-v1_models.json"},
        right={
            "pool_blocks": 16384, "usable_blocks": 16383, "block_size": 128, "pool_tokens": 2097152, "pool_bytes": 1 << 30, "max_concurrency": 512,
            "max_model_len": 8192, "kv_dtype": "auto", "prefix_caching": True, "gpu_memory_utilization": 0.92, "used_blocks": 0,
            "free_blocks": 16383, "usage": 0, "running": 0, "waiting": 0, "waiting_capacity": 0, "preemptions": 0, "rejections": 0,
            "prefix_queries": 4, "prefix_hits": 0, "prompt_tokens": 4, "generation_tokens": 20, "finished": 1, "finished_stop": 0,
            "finished_length": 1, "finished_abort": 0, "finished_error": 0, "start_time": 1795964917.66,
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.32.0 on a CPU, overridden and preempted, recorded",
        "exposition/vllm/0.32.0-cpu-override-preempted.prom",
        right={
            "pool_blocks": 600, "usable_blocks": 599, "num_gpu_blocks_override": 600, "pool_tokens": 19200, "max_concurrency": 4.6875,
            "preemptions": 1, "prompt_tokens": 9005, "generation_tokens": 12001, "finished": 7, "finished_length": 7, "used_blocks": 0,
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.32.0 on a GPU",
        "exposition/vllm/0.32.0.prom",
        log={"pool_tokens": fact(131088), "max_model_len": fact(8192), "pool_bytes": fact(16 << 30, "bytes")},
        right={
            "pool_blocks": 8193, "usable_blocks": 8192, "pool_tokens": 131088, "used_blocks": 4096, "free_blocks": 4096, "usage": 0.5,
            "running": 8, "waiting": 3, "preemptions": 2, "pool_bytes": 16 << 30, "max_model_len": 8192,
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.32.0 with two data-parallel ranks",
        "exposition/vllm/0.32.0-dp2.prom",
        right={
            "pool_blocks": 8194, "usable_blocks": 8192, "block_size": 16, "pool_tokens": 131104, "max_concurrency": 16.00390625,
            "used_blocks": 4096, "free_blocks": 4096, "usage": 0.5, "running": 16, "waiting": 7, "waiting_capacity": 6, "preemptions": 3,
            "rejections": 0, "finished": 100, "finished_length": 80,
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.32.0 on a CPU with two data-parallel ranks under load, recorded",
        "exposition/vllm/0.32.0-cpu-dp2.prom",
        right={
            "pool_blocks": 800, "usable_blocks": 798, "block_size": 32, "pool_tokens": 25600, "max_concurrency": 6.25, "used_blocks": 139,
            "free_blocks": 659, "usage": 139 / 798, "running": 3, "waiting": 0, "preemptions": 0, "rejections": 0, "prompt_tokens": 3005,
            "num_gpu_blocks_override": 400,
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.32.0, sliding-window hybrid",
        "exposition/vllm/0.32.0-hybrid-swa.prom",
        right={"pool_blocks": 29135, "used_blocks": 8820, "free_blocks": 20314, "pool_tokens": 327680, "max_concurrency": 2.5},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.9.2 with both names",
        "exposition/vllm/0.9.2-both-names.prom",
        right={"usage": 0.625, "used_blocks": 2560, "free_blocks": 1536, "prefix_queries": 16000, "prefix_hits": 4000, "pool_tokens": 65552},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.6.6, engine V0",
        "exposition/vllm/0.6.6-v0.prom",
        right={
            "pool_blocks": 24188, "usable_blocks": 24188, "used_blocks": 18141, "free_blocks": 6047, "usage": 0.75, "swapped": 2, "running": 30,
            "waiting": 4, "preemptions": 7, "finished": 600, "finished_length": 120,
        },
    ),
    Case(
        "vllm",
        "relabelled with underscores",
        "exposition/vllm/relabelled-underscore.prom",
        right={"usage": 0.5, "used_blocks": 4096, "free_blocks": 4096, "running": 8, "preemptions": 2, "pool_tokens": 131088},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "through an OpenTelemetry collector that calls a gauge of unit 1 a ratio",
        "exposition/vllm/otel-ratio.prom",
        right={"usage": 0.5, "usable_blocks": 1000, "used_blocks": 500, "running": 8, "waiting": 3, "preemptions": 2, "kv_dtype": "fp8"},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "a build of mid-2026 with one info series of everything",
        "exposition/vllm/config-info-build.prom",
        right={
            "pool_blocks": 321, "usable_blocks": 320, "block_size": 8576, "used_blocks": 80, "usage": 0.25, "prefix_caching": True,
            "gpu_memory_utilization": 0.9, "kv_dtype": "auto",
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "ray_vllm",
        "two replicas of Ray Serve",
        "exposition/ray_vllm/serve.prom",
        right={
            "pool_blocks": 16386, "usage": 0.375, "used_blocks": 6144, "free_blocks": 10240, "running": 12, "prompt_tokens": 70000,
            "preemptions": 0,
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "llm_d_sim",
        "0.10.2",
        "exposition/llm_d_sim/0.10.2.prom",
        right={
            "pool_blocks": 1024, "usable_blocks": 1024, "used_blocks": 256, "free_blocks": 768, "usage": 0.25, "pool_tokens": 16384,
            "finished_stop": 20, "prefix_hits": 640,
        },
        never=frozenset({"swapped", "preemptions", "pool_bytes", "weights_bytes", "sliding_window", "kv_dtype", "gpu_memory_utilization"}),
    ),
    Case(
        "llamacpp",
        "unified, busy, recorded",
        "llamacpp/metrics-busy-unified.txt",
        {"/slots": "llamacpp/slots-busy-unified.json", "/props": "llamacpp/props-unified.json", "/v1/models": "llamacpp/models-unified.json"},
        {"pool_tokens": fact(16384), "pool_bytes": fact(16 << 20, "bytes"), "kv_dtype": fact("f16", "")},
        right={
            "pool_tokens": 16384, "used_tokens": 4464, "free_tokens": 11920, "usage": 4464 / 16384, "running": 4, "waiting": 2,
            "max_model_len": 16384, "max_num_seqs": 4, "kv_dtype": "f16", "pool_bytes": 16 << 20,
        },
        never=_LLAMA_NEVER,
    ),
    Case(
        "llamacpp",
        "split, busy, recorded, without a log",
        "llamacpp/metrics-busy-split.txt",
        {"/slots": "llamacpp/slots-busy-split.json", "/props": "llamacpp/props.json", "/v1/models": "llamacpp/models.json"},
        right={"running": 4, "waiting": 2, "max_model_len": 4096, "max_num_seqs": 4},
        never=_LLAMA_NEVER,
    ),
    Case(
        "llamacpp",
        "b11434, unified",
        "exposition/llamacpp/b11434.prom",
        {"/slots": "exposition/llamacpp/b11434-slots-unified.json", "/v1/models": "exposition/llamacpp/b11434-v1_models.json"},
        {"pool_tokens": fact(8192)},
        right={"pool_tokens": 8192, "used_tokens": 3206, "free_tokens": 4986, "running": 2, "waiting": 1, "prompt_tokens": 1234570,
               "prefix_hits": 43210, "prefix_queries": 1277780, "generation_tokens": 98765},
        never=_LLAMA_NEVER,
    ),
    Case(
        "llamacpp",
        "b11434, split, without --metrics",
        bodies={"/slots": "exposition/llamacpp/b11434-slots-split.json"},
        log={"pool_tokens": fact(8192)},
        right={"pool_tokens": 8192, "used_tokens": 1147, "free_tokens": 7045, "running": 1, "max_model_len": 2048, "max_num_seqs": 4},
        never=_LLAMA_NEVER,
    ),
    Case(
        "vllm",
        "0.8.4, engine V1, whose pool only the log tells",
        "exposition/vllm/0.8.4-v1.prom",
        log={"pool_tokens": fact(65552)},
        right={"pool_blocks": 4097, "used_blocks": 2560, "free_blocks": 1536, "usage": 0.625, "prefix_queries": 1000, "prefix_hits": 250},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.11.0 with eight API processes, seven of them stale",
        "exposition/vllm/0.11.0-multiapi-pid.prom",
        right={"usage": 0.6530455880475035, "used_blocks": 5350, "running": 30, "pool_blocks": 8193},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "V0 with block gauges and no info series",
        "exposition/vllm/v0-block-gauges.prom",
        right={"used_blocks": 736, "free_blocks": 64, "pool_blocks": 800, "usable_blocks": 800, "usage": 0.92, "running": 24, "waiting": 7},
    ),
    Case(
        "vllm",
        "scraped where the target's labels clash",
        "exposition/vllm/relabelled-exported.prom",
        right={"usage": 0.5, "used_blocks": 4096, "running": 8, "preemptions": 2, "pool_tokens": 131088},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "relabelled with dots",
        "exposition/vllm/relabelled-dots.prom",
        right={"usage": 0.5, "used_blocks": 4096, "running": 8, "preemptions": 2, "pool_tokens": 131088},
        never=_VLLM_NEVER,
    ),
    Case(
        "ray_vllm",
        "names of older versions, with their colon",
        "exposition/ray_vllm/colon-old.prom",
        right={"usage": 0.5, "running": 5, "waiting": 2, "swapped": 0, "preemptions": 4, "prompt_tokens": 9000},
    ),
    Case(
        "llamacpp",
        "b5000, with the gauges of its time",
        "exposition/llamacpp/b5000.prom",
        right={"usage": 0.25, "used_tokens": 2048, "running": 2, "waiting": 0, "prompt_tokens": 5000, "generation_tokens": 1200},
        never=_LLAMA_NEVER,
    ),
]  # fmt: skip
