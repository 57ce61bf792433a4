"""NVIDIA NIM for LLMs: /v1/metrics, names without any prefix. It tells how full its pool is and not how large.

Containers that serve vLLM's own series as well are read as vLLM, which tells more. Source: NVIDIA NIM for LLMs, observability page.
"""

from __future__ import annotations

from pytest_kvcache.engines._dialect import TARGET_LABELS, Dialect, JsonField, JsonPath, Series, absent, first_of, has_prefix
from pytest_kvcache.engines._state import RawState

_NO_POOL = "NIM's metrics do not tell the pool's size"
_ENGINE = "it depends on the engine inside, which NIM does not tell"
_SUCCESS = "request_success_total"
_OWN = frozenset({"gpu_cache_usage_perc", "num_request_max"})


def _claims(raw: RawState) -> bool:
    return raw.metrics is not None and bool(raw.metrics.names & _OWN) and not any(has_prefix(name, "vllm") for name in raw.metrics.names)


DIALECT = Dialect(
    name="nim",
    title="NVIDIA NIM",
    series_prefix="",
    claims=_claims,
    counts="blocks",
    idle_cached_is_free=None,
    server_labels=TARGET_LABELS,
    model_label="model_name",
    metrics_paths=("/v1/metrics", "/metrics"),
    json_paths=(JsonPath("/v1/models"), JsonPath("/v1/version")),
    version=first_of(JsonField("/v1/version", ("release",), "text"), JsonField("/v1/version", ("api",), "text")),
    since={"": "1.x"},
    reads={
        "pool_blocks": absent(_NO_POOL),
        "usable_blocks": absent(_NO_POOL),
        "block_size": absent(_NO_POOL),
        "pool_tokens": absent(_NO_POOL),
        "pool_bytes": absent(_NO_POOL),
        "weights_bytes": absent("NIM does not state the memory of weights"),
        "sliding_window": absent("NIM does not tell a window"),
        "max_concurrency": absent("NIM gives no such figure"),
        "max_model_len": first_of(JsonField("/v1/models", ("data", 0, "max_model_len")), absent("/v1/models states no max_model_len")),
        "max_num_seqs": Series(("num_request_max",)),
        "kv_dtype": absent("NIM does not state the type of its cache"),
        "prefix_caching": absent("NIM_ENABLE_KV_CACHE_REUSE is not told"),
        "gpu_memory_utilization": absent("NIM_KVCACHE_PERCENT is not told"),
        "num_gpu_blocks_override": absent(_NO_POOL),
        "used_blocks": absent(_NO_POOL),
        "free_blocks": absent(_NO_POOL),
        "used_tokens": absent(_NO_POOL),
        "free_tokens": absent(_NO_POOL),
        "usage": Series(("gpu_cache_usage_perc",)),
        "running": Series(("num_requests_running",)),
        "waiting": Series(("num_requests_waiting",)),
        "waiting_capacity": absent("NIM does not tell why a request waits"),
        "swapped": absent(_ENGINE),
        "preemptions": absent("NIM does not count preemptions"),
        "rejections": absent("NIM does not count refused requests"),
        "prefix_queries": absent("NIM counts no prefix lookups"),
        "prefix_hits": absent("NIM counts no prefix hits"),
        "prompt_tokens": Series(("prompt_tokens_total",)),
        "generation_tokens": Series(("generation_tokens_total",)),
        # request_success_total counts the reasons stop and length; other reasons are in request_failure_total.
        "finished": Series(("request_finish_total", _SUCCESS), over=("finished_reason",)),
        "finished_stop": Series(("request_finish_total", _SUCCESS), where={("finished_reason",): ("stop",)}),
        "finished_length": Series(("request_finish_total", _SUCCESS), where={("finished_reason",): ("length",)}),
        "finished_abort": Series(("request_finish_total",), where={("finished_reason",): ("abort",)}),
        "finished_error": Series(("request_failure_total",)),
        "start_time": Series(("process_start_time_seconds",)),
    },
)
