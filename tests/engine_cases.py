"""Recorded servers, and what a right reading of each is. A new engine adds a Case and gets the whole contract."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_kvcache.engines import DIALECTS, Dialect, RawState
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import Reading, Value

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Case:
    """One recorded server: its texts, and what a right reading of them is. ``log`` is what its start-up log states."""

    engine: str
    name: str
    metrics: str = ""
    bodies: dict[str, str] = field(default_factory=dict)
    log: dict[str, Value] = field(default_factory=dict)
    right: dict[str, float | str | bool] = field(default_factory=dict)
    never: frozenset[str] = frozenset()

    def text(self) -> str:
        return (DATA / self.metrics).read_text() if self.metrics else ""

    def json(self) -> dict[str, Any]:
        return {path: json.loads((DATA / file).read_text()) for path, file in self.bodies.items()}

    def raw(self, dialect: Dialect | None = None) -> RawState:
        return state(self.text() if self.metrics else None, self.json(), self.log, dialect)


def state(text: str | None, bodies: dict[str, Any], log: dict[str, Value], dialect: Dialect | None = None) -> RawState:
    wanted = dialect.wanted if dialect is not None else frozenset().union(*(d.wanted for d in DIALECTS.values()))
    metrics = None if text is None else parse_samples(text, wanted)
    return RawState(metrics=metrics, metrics_reason="/metrics was taken away", json=bodies, log_facts=log)


def fact(value: float | str | bool, unit: str = "tokens") -> Reading:
    return Reading(value, unit, "start-up log: a line")


_VLLM_NEVER = frozenset({"swapped"})
_LLAMA_NEVER = frozenset(
    {
        "pool_blocks", "usable_blocks", "block_size", "used_blocks", "free_blocks", "num_gpu_blocks_override", "gpu_memory_utilization",
        "swapped", "preemptions", "rejections",
    }
)  # fmt: skip
_SGLANG_NEVER = frozenset({"swapped"})
_TGI_NEVER = frozenset({"swapped", "preemptions", "num_gpu_blocks_override"})

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
        never=frozenset({"swapped", "preemptions", "pool_bytes", "kv_dtype", "gpu_memory_utilization"}),
    ),
    Case(
        "llamacpp",
        "unified, busy, recorded",
        "llamacpp/metrics-busy-unified.txt",
        {"/slots": "llamacpp/slots-busy-unified.json", "/props": "llamacpp/props-unified.json", "/v1/models": "llamacpp/models-unified.json"},
        {"pool_tokens": fact(16384), "pool_bytes": fact(16 << 20, "bytes"), "kv_dtype": fact("f16", "")},
        right={
            "pool_tokens": 16384, "used_tokens": 4468, "free_tokens": 11916, "usage": 4468 / 16384, "running": 4, "waiting": 2,
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
        right={"pool_tokens": 8192, "used_tokens": 3208, "free_tokens": 4984, "running": 2, "waiting": 1, "prompt_tokens": 1234570,
               "prefix_hits": 43210, "prefix_queries": 1277780, "generation_tokens": 98765},
        never=_LLAMA_NEVER,
    ),
    Case(
        "llamacpp",
        "b11434, split, without --metrics",
        bodies={"/slots": "exposition/llamacpp/b11434-slots-split.json"},
        log={"pool_tokens": fact(8192)},
        right={"pool_tokens": 8192, "used_tokens": 1148, "free_tokens": 7044, "running": 1, "max_model_len": 2048, "max_num_seqs": 4},
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
        "nim",
        "1.x",
        "exposition/nim/1.x.prom",
        right={
            "usage": 0.375, "running": 6, "waiting": 1, "max_num_seqs": 256, "prompt_tokens": 12000, "finished": 50, "finished_stop": 40,
            "finished_length": 10,
        },
    ),
]  # fmt: skip
