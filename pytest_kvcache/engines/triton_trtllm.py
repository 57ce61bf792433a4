"""Triton's TensorRT-LLM backend, on Triton's metrics port (8002): what is meant stands in a label's value, and all are gauges.

Source: triton-inference-server/tensorrtllm_backend, README, "Triton metrics".
"""

from __future__ import annotations

from pytest_kvcache.engines._dialect import TARGET_LABELS, Derived, Dialect, LogFact, Series, absent, cannot_happen, first_of
from pytest_kvcache.engines._reading import View
from pytest_kvcache.quantities import Missing, Value

_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
# Releases before 23.12 called the families statistics. A model of type V1 (no in-flight batching) has the same blocks and requests.
_BLOCK_NAMES = (_BLOCKS, "nv_trt_llm_kv_cache_block_statistics")
_REQUESTS = ("nv_trt_llm_request_metrics", "nv_trt_llm_request_statistics")
_BATCHER = ("nv_trt_llm_inflight_batcher_metrics", "nv_trt_llm_inflight_batcher_statistics")
_V1 = ("nv_trt_llm_v1_metrics", "nv_trt_llm_v1_statistics")
_NO_COUNTER = absent("the backend shows gauges only and counts nothing")


def _block(kind: str) -> Series:
    return Series(_BLOCK_NAMES, where={("kv_cache_block_type",): (kind,)})


def _request(kind: str, hint: str = "") -> Series:
    return Series(_REQUESTS, where={("request_type",): (kind,)}, hint=hint)


def _free(view: View) -> Value:
    return _difference(view, "free_blocks", "used")


def _used(view: View) -> Value:
    return _difference(view, "used_blocks", "free")


def _difference(view: View, name: str, other: str) -> Value:
    return view.rest(name, view.value("pool_blocks"), view.apply(_block(other), name), f"{_BLOCKS} max - {other}")


def _usage(view: View) -> Value:
    """Used / max: ``fraction`` is absent in some versions, and was wrong in others."""
    return view.share(view.value("used_blocks"), view.value("pool_blocks"), f"{_BLOCKS} used / max")


def _pool_tokens(view: View) -> Value:
    pool, size = view.value("pool_blocks"), view.value("block_size")
    if isinstance(pool, Missing):
        return pool
    return size if isinstance(size, Missing) else view.reading("pool_tokens", pool.number() * size.number(), f"{_BLOCKS} max x tokens_per")


def _remarks(view: View) -> list[str]:
    notes = ["a model of type V1: no in-flight batching, a batch runs to its end"] if view.has(*_V1) else []
    for part in view.parts:
        told, computed = part.apply(_block("fraction"), "usage"), part.value("usage")
        if not isinstance(told, Missing) and not isinstance(computed, Missing) and abs(told.number() - computed.number()) > 0.01:
            notes.append(f"the backend's own fraction reads {told.number():g}, used / max is {computed.number():.4g}: the blocks are taken")
        paused = part.apply(Series(_BATCHER, where={("inflight_batcher_specific_metric",): ("paused_requests",)}), "waiting")
        if not isinstance(paused, Missing) and paused.number() > 0:
            notes.append(f"{paused.number():.0f} requests are paused for want of blocks")
    return notes


DIALECT = Dialect(
    name="triton_trtllm",
    title="Triton, TensorRT-LLM backend",
    series_prefix="nv_trt_llm",
    counts="blocks",
    idle_cached_is_free=None,
    server_labels=(*TARGET_LABELS, "version"),
    model_label="model",
    version=absent("Triton's metrics do not name its version"),
    extra_series=_BATCHER,
    remarks=_remarks,
    since={"": "23.11 (families called statistics; metrics: 23.12)", "waiting": "0.18 (not in 0.12 to 0.17)"},
    reads={
        "pool_blocks": _block("max"),
        "usable_blocks": _block("max"),
        "block_size": first_of(_block("tokens_per"), LogFact()),
        "pool_tokens": Derived("max blocks x tokens_per", _pool_tokens, _BLOCK_NAMES),
        "pool_bytes": first_of(LogFact(), absent("the backend's memory figures are of its runtime, not of its pool")),
        "weights_bytes": absent("the backend's memory figures are of its runtime, not of its weights"),
        "sliding_window": absent("the backend does not tell a window"),
        "max_concurrency": absent("the backend gives no such figure"),
        "max_model_len": first_of(LogFact(), absent("it stands in the model's configuration (max_tokens_in_paged_kv_cache, max_seq_len)")),
        "max_num_seqs": _request("max"),
        "kv_dtype": first_of(LogFact(), absent("the backend does not state the type of its cache")),
        "prefix_caching": absent("it stands in the model's configuration (enable_kv_cache_reuse)"),
        "gpu_memory_utilization": absent("it stands in the model's configuration (kv_cache_free_gpu_mem_fraction)"),
        "num_gpu_blocks_override": absent("it stands in the model's configuration (max_tokens_in_paged_kv_cache)"),
        "used_blocks": first_of(_block("used"), Derived("max - free", _used)),
        "free_blocks": first_of(_block("free"), Derived("max - used", _free)),
        "used_tokens": absent("TensorRT-LLM counts blocks: see used_blocks"),
        "free_tokens": absent("TensorRT-LLM counts blocks: see free_blocks"),
        "usage": first_of(Derived("used / max", _usage, _BLOCK_NAMES), _block("fraction")),
        "running": _request("scheduled"),
        "waiting": _request("waiting", hint="the row is not there in 0.12 to 0.17"),
        "waiting_capacity": absent("the backend does not tell why a request waits"),
        "swapped": cannot_happen("TensorRT-LLM pauses requests and never swaps them"),
        "preemptions": absent("the backend shows how many requests are paused now and counts none"),
        "rejections": _NO_COUNTER,
        "prefix_queries": _NO_COUNTER,
        "prefix_hits": _NO_COUNTER,
        "prompt_tokens": _NO_COUNTER,
        "generation_tokens": _NO_COUNTER,
        "finished": _NO_COUNTER,
        "finished_stop": _NO_COUNTER,
        "finished_length": _NO_COUNTER,
        "finished_abort": _NO_COUNTER,
        "finished_error": _NO_COUNTER,
        "start_time": absent("Triton's exposition holds no time of its start"),
    },
)
