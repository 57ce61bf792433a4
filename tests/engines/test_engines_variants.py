"""Servers that nobody recorded: other versions, models and sizes, written after the engines' sources, each with its right answer."""

from __future__ import annotations

from typing import Any

import pytest
from engine_case import state

from pytest_kvcache.engines import detect, read_values
from pytest_kvcache.quantities import Missing, Reading


def _lines(labels: str, **values: float) -> str:
    """Return rows of one label set; ``__`` stands for the colon of a name."""
    return "".join(f"{name.replace('__', ':', 1)}{{{labels}}} {value}\n" for name, value in values.items())


def _config(blocks: object, size: object, engine: str = '"0"', **more: object) -> str:
    labels = {"num_gpu_blocks": blocks, "block_size": size, **more}
    shown = ",".join(f'{name}="{value}"' for name, value in labels.items())
    rank = f",engine={engine}" if engine else ""
    return f"vllm:cache_config_info{{{shown}{rank}}} 1.0\n"


def _v1(engine: int, usage: float, running: int, waiting: int = 0) -> str:
    return _lines(
        f'engine="{engine}",model_name="Qwen/Qwen3-8B"',
        vllm__kv_cache_usage_perc=usage,
        vllm__num_requests_running=running,
        vllm__num_requests_waiting=waiting,
    )


def _sglang(rank: str, pool: int, used: int, running: int) -> str:
    return _lines(
        f'{rank}engine_type="unified",model_name="deepseek-ai/DeepSeek-V3",pp_rank="0",tp_rank="0"',
        sglang__max_total_num_tokens=pool,
        sglang__num_used_tokens=used,
        sglang__token_usage=round(used / pool, 2),
        sglang__num_running_reqs=running,
        sglang__num_queue_reqs=0,
    )


def _loads(*ranks: dict[str, Any]) -> dict[str, Any]:
    return {"/v1/loads": {"timestamp": "2026-05-01T00:00:00", "version": "0.5.9", "num_accelerators": len(ranks), "loads": list(ranks)}}


_RANK = {"num_running_reqs": 3, "num_waiting_reqs": 0, "num_used_tokens": 1000, "max_total_num_tokens": 4000, "token_usage": 0.25}

# name, engine, /metrics, bodies, what is right (None: missing, whatever the reason)
VARIANTS: list[tuple[str, str, str | None, dict[str, Any], dict[str, Any]]] = [
    (
        "three ranks of unequal pools are weighted by their blocks",
        "vllm",
        "".join(_config(blocks, 16, f'"{n}"') for n, blocks in enumerate((1001, 2001, 3001))) + _v1(0, 0.9, 9, 4) + _v1(1, 0.3, 2) + _v1(2, 0.1, 1),
        {},
        {"usable_blocks": 6000, "pool_tokens": 16 * 6003, "running": 12, "waiting": 4, "usage": (0.9 * 1000 + 0.3 * 2000 + 0.1 * 3000) / 6000},
    ),
    (
        "a rank without a pool leaves the whole without one",
        "vllm",
        _config(1001, 16, '"0"') + _v1(0, 0.5, 1) + _v1(1, 0.5, 1),
        {},
        {"pool_tokens": None, "running": 2},
    ),
    (
        "a pool that is not told yet",
        "vllm",
        _config("None", 16) + _v1(0, 0.0, 0),
        {},
        {"usable_blocks": None, "pool_tokens": None, "block_size": 16, "usage": 0.0},
    ),
    (
        "V0 of 0.5 with its three queues and no engine label",
        "vllm",
        'vllm:cache_config_info{block_size="16",cache_dtype="fp8_e5m2",enable_prefix_caching="False",gpu_memory_utilization="0.9",'
        'num_cpu_blocks="2048",num_gpu_blocks="7550",sliding_window="None",swap_space_bytes="4294967296"} 1.0\n'
        + _lines(
            'model_name="meta-llama/Llama-2-13b-chat-hf"',
            vllm__num_requests_running=11,
            vllm__num_requests_swapped=2,
            vllm__num_requests_waiting=7,
            vllm__gpu_cache_usage_perc=0.998,
            vllm__cpu_cache_usage_perc=0.25,
            vllm__num_preemptions_total=41,
        ),
        {},
        {"pool_tokens": 120800, "swapped": 2, "waiting": 7, "usage": 0.998, "preemptions": 41, "kv_dtype": "fp8_e5m2", "prefix_caching": False},
    ),
    (
        "a block of 128 on another backend",
        "vllm",
        _config(513, 128, cache_dtype="auto") + _v1(0, 0.75, 5),
        {},
        {"block_size": 128, "usable_blocks": 512, "pool_tokens": 128 * 513, "used_blocks": 384},
    ),
    (
        "an adapter is no model of its own",
        "vllm",
        _config(1001, 16)
        + _v1(0, 0.4, 3)
        + 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql,chat",waiting_lora_adapters=""} 1.7e9\n',
        {"/v1/models": {"data": [{"id": "Qwen/Qwen3-8B", "max_model_len": 32768}, {"id": "sql", "parent": "Qwen/Qwen3-8B", "max_model_len": None}]}},
        {"max_model_len": 32768, "running": 3, "usable_blocks": 1000},
    ),
    (
        "an override beside what was asked for",
        "vllm",
        _config(64, 16, num_gpu_blocks_override=64) + _v1(0, 1.0, 2, 3),
        {},
        {"num_gpu_blocks_override": 64, "usable_blocks": 63, "used_blocks": 63, "free_blocks": 0, "usage": 1.0},
    ),
    (
        "waiting by reason",
        "vllm",
        _config(1001, 16)
        + _v1(0, 0.97, 30, 12)
        + _lines('engine="0",model_name="Qwen/Qwen3-8B",reason="capacity"', **{"vllm__num_requests_waiting_by_reason": 9})
        + _lines('engine="0",model_name="Qwen/Qwen3-8B",reason="deferred"', **{"vllm__num_requests_waiting_by_reason": 3}),
        {},
        {"waiting": 12, "waiting_capacity": 9},
    ),
    (
        "kubernetes labels about each row",
        "vllm",
        (_config(1001, 16) + _v1(0, 0.5, 4)).replace("{", '{namespace="llm",pod="vllm-0",container="vllm",instance="10.0.0.7:8000",job="vllm",'),
        {},
        {"usable_blocks": 1000, "running": 4, "used_blocks": 500},
    ),
    (
        "two pods in one page",
        "vllm",
        "".join(
            (_config(blocks, 16) + _v1(0, usage, 4)).replace("{", f'{{instance="10.0.0.{n}:8000",job="vllm",')
            for n, (blocks, usage) in enumerate(((1001, 0.2), (3001, 0.8)), 1)
        ),
        {},
        {"usable_blocks": 4000, "running": 8, "usage": (200 + 2400) / 4000},
    ),
    (
        "numbers in other notations",
        "vllm",
        _config(1001, 16) + _v1(0, 0, 4).replace("perc{", "perc{").replace("} 0\n", "} 5e-01\n", 1),
        {},
        {"usage": 0.5, "used_blocks": 500, "running": 4},
    ),
    (
        "a gauge that is not a number",
        "vllm",
        _config(1001, 16) + _v1(0, 0, 4).replace("} 0\n", "} NaN\n", 1),
        {},
        {"usage": None, "used_blocks": None, "running": 4},
    ),
    (
        "a usage above the whole",
        "vllm",
        _config(1001, 16) + _v1(0, 1.5, 4),
        {},
        {"usage": None, "used_blocks": None},
    ),
    (
        "eight schedulers of SGLang with data-parallel attention",
        "sglang",
        "".join(_sglang(f'dp_rank="{n}",', 100_000, 10_000 * n, n) for n in range(8)),
        {},
        {"pool_tokens": 800_000, "used_tokens": 280_000, "running": 28, "usage": 0.35},
    ),
    (
        "ranks of one tensor-parallel engine say the same",
        "sglang",
        "".join(_sglang("", 100_000, 25_000, 4).replace('tp_rank="0"', f'tp_rank="{n}"') for n in range(4)),
        {},
        {"pool_tokens": 100_000, "used_tokens": 25_000, "running": 4, "usage": 0.25},
    ),
    (
        "a gateway shows vLLM's tensor-parallel ranks, which say the same",
        "vllm",
        "".join(
            f'vllm:num_requests_running{{engine="0",model_name="m",tp_rank="{n}"}} 3.0\nvllm:kv_cache_usage_perc{{engine="0",model_name="m",tp_rank="{n}"}} 0.5\n'
            for n in range(4)
        ),
        {},
        {"running": 3, "usage": 0.5},
    ),
    ("SGLang's loads of two ranks", "sglang", None, _loads({"dp_rank": 0, **_RANK}, {"dp_rank": 1, **_RANK}), {"pool_tokens": 8000, "usage": 0.25}),
    (
        "a rank whose load says less leaves the whole without it",
        "sglang",
        None,
        _loads({"dp_rank": 0, **_RANK}, {"dp_rank": 1, **{name: value for name, value in _RANK.items() if name != "num_used_tokens"}}),
        {"pool_tokens": 8000, "used_tokens": None, "free_tokens": None, "running": 6},
    ),
    (
        "a load list without ranks",
        "sglang",
        None,
        {"/get_load": [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 900}]},
        {"running": 3, "waiting": 2, "used_tokens": None},
    ),
    (
        "a server of llama.cpp with two slots that split the context",
        "llamacpp",
        _lines("", **{"llamacpp__requests_processing": 1, "llamacpp__requests_deferred": 2, "llamacpp__kv_cache_usage_ratio": 0.5}).replace("{}", "")
        + "llamacpp:kv_cache_tokens 2048\n",
        {
            "/props": {"total_slots": 2, "default_generation_settings": {"n_ctx": 2048}},
            "/slots": [{"id": 0, "n_ctx": 2048, "state": 1}, {"id": 1, "n_ctx": 2048, "state": 0}],
        },
        {"running": 1, "waiting": 2, "usage": 0.5, "max_num_seqs": 2, "max_model_len": 2048},
    ),
    (
        "TGI with a full batch",
        "tgi",
        "tgi_batch_max_total_tokens 16000\ntgi_batch_current_max_tokens 15900\ntgi_batch_current_size 12\ntgi_queue_size 40\n"
        "tgi_request_count 100\ntgi_request_success 88\n" + 'tgi_request_failure{err="overloaded"} 7\n',
        {"/info": {"model_id": "m", "max_concurrent_requests": 128, "max_total_tokens": 4096, "version": "2.4.0"}},
        {"pool_tokens": 16000, "usage": 15900 / 16000, "running": 12, "waiting": 40, "finished": 88, "rejections": 7, "max_model_len": 4096},
    ),
    (
        "TGI by way of OpenTelemetry",
        "tgi",
        "tgi_batch_max_total_tokens 16000\ntgi_batch_current_max_tokens 4000\ntgi_batch_current_size 2\ntgi_queue_size 0\n"
        'tgi_request_success_total 88\ntgi_request_failure_total{err="overloaded"} 7\n',
        {},
        {"usage": 0.25, "finished": 88, "rejections": 7},
    ),
    (
        "trtllm-serve after 1.1 with gauges of few names",
        "trtllm_serve",
        _lines(
            'engine_type="trtllm",model_name="m"',
            trtllm_kv_cache_utilization=0.4,
            trtllm_num_active_requests=6,
            trtllm_server_queue_length=2,
            trtllm_prompt_tokens_total=9000,
            trtllm_prompt_cached_tokens_total=3000,
        ),
        {},
        {"usage": 0.4, "running": 6, "waiting": 2, "prefix_queries": 9000, "prefix_hits": 3000, "pool_tokens": None},
    ),
    (
        "trtllm-serve that states its configuration",
        "trtllm_serve",
        'trtllm_kv_cache_config_info{cache_dtype="fp8",enable_block_reuse="True",free_gpu_memory_fraction="0.9",model_name="m",page_size="64"} 1.0\n'
        + _lines('model_name="m"', trtllm_kv_cache_max_blocks=500, trtllm_kv_cache_used_blocks=100),
        {},
        {"kv_dtype": "fp8", "prefix_caching": True, "pool_tokens": 32000, "gpu_memory_utilization": None},
    ),
    (
        "trtllm-serve with blocks of 64",
        "trtllm_serve",
        _lines(
            'model_name="m"',
            trtllm_kv_cache_max_blocks=500,
            trtllm_kv_cache_free_blocks=125,
            trtllm_kv_cache_tokens_per_block=64,
            trtllm_kv_cache_reused_blocks_total=10,
            trtllm_kv_cache_missed_blocks_total=30,
            trtllm_prompt_cached_tokens_total=777,
        ),
        {},
        {"pool_tokens": 32000, "used_blocks": 375, "usage": 0.75, "prefix_hits": 640, "prefix_queries": 2560},
    ),
    (
        "Triton with two models, each with a pool",
        "triton_trtllm",
        "".join(
            f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{kind}",model="{model}",version="1"}} {value}\n'
            for model, rows in (
                ("ensemble_a", {"used": 10, "free": 90, "max": 100, "tokens_per": 64}),
                ("ensemble_b", {"used": 150, "free": 150, "max": 300, "tokens_per": 64}),
            )
            for kind, value in rows.items()
        ),
        {},
        {"pool_blocks": 400, "used_blocks": 160, "pool_tokens": 25600, "usage": 0.4},
    ),
    (
        "LMDeploy, which counts idle cache as used",
        "lmdeploy",
        _lines('engine="0",model_name="internlm3"', lmdeploy__gpu_cache_usage_perc=0.98, lmdeploy__num_requests_running=1),
        {},
        {"usage": 0.98, "running": 1, "pool_tokens": None},
    ),
    (
        "slots that do not tell whether they are busy",
        "llamacpp",
        "llamacpp:requests_processing 3\nllamacpp:requests_deferred 0\n",
        {"/slots": [{"id": 0, "n_ctx": 2048}, {"id": 1, "n_ctx": 2048}]},
        {"running": 3, "used_tokens": None, "usage": None},
    ),
    (
        "slots of 2024 alone",
        "llamacpp",
        None,
        {"/slots": [{"id": 0, "n_ctx": 4096, "state": 1, "prompt": "x"}, {"id": 1, "n_ctx": 4096, "state": 0}]},
        {"running": 1, "max_num_seqs": 2, "max_model_len": 4096, "used_tokens": None},
    ),
    (
        "vLLM's router in front of two engines, which is no V0",
        "vllm",
        "".join(
            f'vllm:{name}{{server="http://10.0.0.{n}:8000"}} {value}\n'
            for name, values in (
                ("num_requests_running", (2, 3)),
                ("num_requests_swapped", (0, 0)),
                ("healthy_pods_total", (1, 1)),
                ("current_qps", (1, 2)),
            )
            for n, value in enumerate(values, start=1)
        ),
        {},
        {"running": 5, "usage": None, "pool_blocks": None, "waiting": None},
    ),
    (
        "Triton's vLLM backend with two models",
        "vllm",
        "".join(
            f'vllm:{name}{{model="{model}",version="1"}} {value}\n'
            for name, values in (("num_requests_running", (2, 3)), ("num_preemptions_total", (1, 4)))
            for model, value in zip("ab", values, strict=True)
        ),
        {},
        {"running": 5, "preemptions": 5},
    ),
    (
        "SGLang with priorities, and with streamed requests counted apart",
        "sglang",
        "".join(
            f'sglang:{name}{{engine_type="unified",model_name="m",tp_rank="0",priority="{priority}"}} {value}\n'
            for name, values in (
                ("num_running_reqs", {"": 9, "0": 6, "5": 3}),
                ("num_queue_reqs", {"": 4, "0": 4, "5": 0}),
                ("token_usage", {"": 0.25}),
                ("max_total_num_tokens", {"": 100_000}),
            )
            for priority, value in values.items()
        )
        + "".join(
            f'sglang:{name}_total{{engine_type="unified",model_name="m",is_streaming="{streamed}"}} {value}\n'
            for name, values in (("prompt_tokens", (100, 500)), ("generation_tokens", (10, 50)), ("num_requests", (1, 5)))
            for streamed, value in zip(("false", "true"), values, strict=True)
        ),
        {},
        {"running": 9, "waiting": 4, "usage": 0.25, "prompt_tokens": 600, "prefix_queries": 600, "generation_tokens": 60, "finished": 6},
    ),
    (
        "the same out of Prometheus, which keeps no empty label",
        "sglang",
        'sglang:num_running_reqs{model_name="m"} 9\nsglang:num_running_reqs{model_name="m",priority="0"} 9\n'
        'sglang:num_queue_reqs{model_name="m",priority="0"} 2\nsglang:num_queue_reqs{model_name="m",priority="5"} 1\n',
        {},
        {"running": 9, "waiting": None},
    ),
    (
        "Dynamo's frontend under a name of its own, before it has a model",
        "dynamo",
        "nv_llm_inflight_requests 0\nnv_llm_queued_requests 0\nnv_llm_disconnected_clients 0\n",
        {},
        {"running": 0, "waiting": 0, "pool_blocks": None, "usage": None},
    ),
    (
        "a load list with nothing but limits beside a scrape",
        "sglang",
        _lines('model_name="m"', sglang__num_running_reqs=3, sglang__num_queue_reqs=1, sglang__token_usage=0.25),
        {"/v1/loads": {"loads": [{"dp_rank": 0, "max_running_requests": 12}, {"dp_rank": 1, "max_running_requests": 12}]}},
        {"running": 3, "usage": 0.25, "max_num_seqs": 24, "pool_tokens": None},
    ),
    (
        "server_info whose pool stands in its ranks only",
        "sglang",
        None,
        {
            "/server_info": {
                "page_size": 64,
                "mem_fraction_static": 0.9,
                "disable_radix_cache": True,
                "dp_size": 2,
                "internal_states": [{"memory_usage": {"kvcache": 0.25, "token_capacity": n}} for n in (20480, 10240)],
            }
        },
        {"pool_tokens": 30720, "pool_bytes": 0.5 * (1 << 30), "prefix_caching": False, "gpu_memory_utilization": 0.9, "block_size": 64},
    ),
    (
        "server_info of 0.4.3",
        "sglang",
        None,
        {"/get_server_info": {"mem_fraction_static": 0.88, "disable_radix_cache": True, "max_total_num_tokens": 181203, "version": "0.4.3"}},
        {"pool_tokens": 181203, "prefix_caching": False},
    ),
    (
        "iterations that do not tell the free blocks",
        "trtllm_serve",
        None,
        {"/metrics": [{"numActiveRequests": 1, "kvCacheStats": {"usedNumBlocks": 4, "maxNumBlocks": 10, "cacheHitRate": 0.2}}]},
        {"pool_blocks": 10, "used_blocks": 4, "free_blocks": 6, "usage": 0.4, "pool_tokens": None, "running": 1},
    ),
    (
        "a worker of Dynamo with SGLang inside",
        "dynamo",
        _lines('dp_rank="0",model="m",worker_id="1"', dynamo_component_total_blocks=50_000, dynamo_component_gpu_cache_usage_percent=0.5)
        + _lines('model_name="m"', sglang__max_total_num_tokens=50_000, sglang__num_running_reqs=4, sglang__token_usage=0.5),
        {},
        {"pool_blocks": 50_000, "block_size": 1, "pool_tokens": 50_000, "used_blocks": 25_000, "running": 4},
    ),
    (
        "vLLM behind Ray, its names with underscores",
        "ray_vllm",
        'ray_vllm_cache_config_info{num_gpu_blocks="1001",block_size="16",engine="0",WorkerId="w1"} 1.0\n'
        + _lines(
            'engine="0",model_name="m",WorkerId="w1",ReplicaId="r1"',
            ray_vllm_kv_cache_usage_perc=0.5,
            ray_vllm_num_requests_running=3,
            ray_vllm_num_requests_waiting=1,
        ),
        {},
        {"usable_blocks": 1000, "usage": 0.5, "running": 3, "waiting": 1},
    ),
]


@pytest.mark.parametrize(("name", "engine", "text", "bodies", "right"), VARIANTS, ids=[row[0] for row in VARIANTS])
def test_a_server_that_nobody_recorded(name: str, engine: str, text: str | None, bodies: dict[str, Any], right: dict[str, Any]) -> None:
    raw = state(text, bodies, {})
    dialect = detect(raw)
    assert dialect.name == engine
    whole = read_values(dialect, raw).whole
    for quantity, expected in right.items():
        value = whole[quantity]
        if expected is None:
            assert isinstance(value, Missing), (quantity, value)
        else:
            assert isinstance(value, Reading), (quantity, value)
            assert value.value == (pytest.approx(expected, abs=1e-9) if isinstance(expected, float) else expected), (quantity, value)
