"""NVIDIA Dynamo 0.7 to 1.x: a worker's /metrics (``DYN_SYSTEM_PORT``) and the frontend's.

A worker shows its own figures (``dynamo_component_*``) and passes the series of the engine inside through: of the two one is taken, and
never both. ``gpu_cache_usage_percent`` is a ratio in spite of its name. The frontend tells the pool of the first worker only and no
usage; what it says of each worker's blocks is its router's own prediction. Its prefix may be another one (``DYN_METRICS_PREFIX``): it is
then known by the ends of its names. With SGLang inside, blocks are tokens. Source: ai-dynamo/dynamo, ``docs/observability/metrics.md``
and ``lib/runtime/src/metrics/prometheus_names.rs``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_kvcache.engines._dialect import TARGET_LABELS, Derived, Dialect, InfoLabel, JsonPath, Series, absent, first_of, has_prefix
from pytest_kvcache.engines._reading import View
from pytest_kvcache.engines._state import RawState, Sample, clean
from pytest_kvcache.quantities import Missing, Reading, Value

_TOTAL = ("dynamo_component_total_blocks", "dynamo_component_kvstats_total_blocks")
_ACTIVE = "dynamo_component_kvstats_active_blocks"
_FRONTEND = "dynamo_frontend"
_FRONT = "dynamo_frontend_model_total_kv_blocks"
# Only Dynamo's frontend has names that end so; any of them gives its prefix away.
_SURE = ("_model_total_kv_blocks", "_model_kv_cache_block_size", "_model_max_num_batched_tokens")
# A frontend that has no model yet has none of those; all three of these are its own.
_TOGETHER = ("_inflight_requests", "_queued_requests", "_disconnected_clients")
_ENDINGS = (*_SURE[:2], "_model_context_length", "_model_max_num_seqs", "_inflight_requests", "_queued_requests", "_model_rejection_total")
_PREDICTED = "_worker_active_decode_blocks"
_INFLIGHT, _QUEUED = "dynamo_frontend_inflight_requests", "dynamo_frontend_queued_requests"
_INSIDE = "needs the series of the engine inside, on the worker's port (DYN_SYSTEM_PORT)"
_WORKER = "a worker tells it (DYN_SYSTEM_PORT), the frontend does not"
_SUCCESS = ("vllm:request_success_total", "trtllm_request_success_total")
_STREAMED = ("is_streaming",)  # SGLang's counters from 2026 on

_POOL = Series((*_TOTAL, _FRONT), hint=_WORKER)
_USAGE = Series(
    (
        "dynamo_component_gpu_cache_usage_percent", "dynamo_component_kvstats_gpu_cache_usage_percent", "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc", "sglang:token_usage", "trtllm_kv_cache_utilization",
    ),
    hint=_WORKER,
)  # fmt: skip
_SGLANG = ("sglang:num_running_reqs", "sglang:token_usage", "sglang:max_total_num_tokens")


def _prefix(raw: RawState) -> str:
    """Return what the frontend's names begin with; "" where there is no frontend."""
    names = raw.metrics.names if raw.metrics is not None else frozenset()
    found = sorted({name[: -len(ending)] for name in names for ending in _SURE if name.endswith(ending)})
    if not found:
        stems = (name.removesuffix(_TOGETHER[0]) for name in names if name.endswith(_TOGETHER[0]))
        found = sorted(stem for stem in stems if stem and all(stem + ending in names for ending in _TOGETHER))
    return _FRONTEND if _FRONTEND in found else next(iter(found), "")


def _claims(raw: RawState) -> bool:
    return raw.metrics is not None and (any(has_prefix(name, "dynamo") for name in raw.metrics.names) or bool(_prefix(raw)))


def _rows(raw: RawState) -> Mapping[str, Sequence[Sample]]:
    """Return the frontend's series under their usual names, where its prefix is another one."""
    prefix = _prefix(raw)
    if raw.metrics is None or prefix in {"", _FRONTEND}:
        return {}
    return {_FRONTEND + ending: raw.metrics.rows[prefix + ending] for ending in _ENDINGS if prefix + ending in raw.metrics.rows}


def _predicted(raw: RawState) -> str:
    """Return what the frontend's router believes that each worker's requests hold."""
    rows = raw.metrics.rows.get((_prefix(raw) or _FRONTEND) + _PREDICTED, ()) if raw.metrics is not None else ()
    shown = [
        f"{clean(row.labels.get('worker_id', '-'), 30)} {clean(row.labels.get('worker_type', ''), 20)}".strip() + f": {row.value:.0f}"
        for row in sorted(rows, key=lambda row: -row.value)[:8]
    ]
    return ", ".join(shown)


def _block_size(view: View) -> Value:
    if view.has(*_SGLANG):
        return view.reading("block_size", 1, "SGLang is inside: Dynamo's blocks are its tokens")
    rules = (
        Series(("dynamo_frontend_model_kv_cache_block_size", "trtllm_kv_cache_tokens_per_block"), shared=True),
        InfoLabel("vllm:cache_config_info", "effective_attention_block_size"),
        InfoLabel("vllm:cache_config_info", "block_size"),
    )
    told = [view.apply(rule, "block_size") for rule in rules]
    return next((value for value in told if isinstance(value, Reading)), Missing(f"neither the frontend nor the engine inside tells it: {_INSIDE}"))


def _used(view: View) -> Value:
    """Dynamo's own count (0.x), else usage x pool of a worker; the frontend's pool is not that of the usage beside it."""
    usage, pool = view.value("usage"), view.apply(Series(_TOTAL, hint=_WORKER), "pool_blocks")
    if isinstance(usage, Missing):
        return usage
    if isinstance(pool, Missing):
        return pool
    return view.reading("used_blocks", round(usage.number() * pool.number()), f"round({usage.source} x {pool.number():.0f} blocks)")


def _free(view: View) -> Value:
    used, pool = view.value("used_blocks"), view.apply(Series(_TOTAL, hint=_WORKER), "pool_blocks")
    return used if isinstance(used, Missing) else view.rest("free_blocks", pool, used)


def _remarks(view: View) -> list[str]:
    notes: list[str] = []
    inside = [title for prefix, title in (("vllm", "vLLM"), ("sglang", "SGLang"), ("trtllm", "TensorRT-LLM")) if _holds(view, prefix)]
    if inside:
        notes.append(f"{', '.join(inside)} inside: its series repeat what Dynamo says, and each figure is taken from one of them")
    if view.has(_INFLIGHT):
        notes.append(f"frontend: {_INFLIGHT} are all that have no full answer yet; {_QUEUED} of them wait or are in prefill")
    if view.has(_FRONT) and not view.has(*_TOTAL):
        notes.append("frontend: the pool is that of the first worker only")
    prefix, predicted = _prefix(view.raw), _predicted(view.raw)
    if prefix not in {"", _FRONTEND}:
        notes.append(f"frontend: its names begin with {clean(prefix, 60)} (DYN_METRICS_PREFIX)")
    if predicted:
        notes.append(
            f"frontend: decode blocks by worker as its router predicts them, fullest first: {predicted}; a worker's own port tells what is used"
        )
    return notes


def _holds(view: View, prefix: str) -> bool:
    return view.samples is not None and any(name.startswith((f"{prefix}:", f"{prefix}_")) for name in view.samples.names)


def _finished(*reasons: str) -> Series:
    return Series(_SUCCESS, where={("finished_reason",): reasons} if reasons else {}, over=("finished_reason",), hint=_INSIDE)


DIALECT = Dialect(
    name="dynamo",
    title="NVIDIA Dynamo",
    series_prefix="dynamo",
    claims=_claims,
    endings=(*_ENDINGS, _PREDICTED),
    rows=_rows,
    counts="blocks",
    idle_cached_is_free=None,
    covers=("vllm", "sglang", "trtllm_serve", "llm_d_sim"),
    rank_label="dp_rank",
    server_labels=(*TARGET_LABELS, "worker_id"),
    model_label="model",
    # The frontend writes model names in lower case, workers as they are.
    model_in_any_case=True,
    label_aliases={"model": ("model_name",), "dp_rank": ("engine",)},
    mirror_labels=frozenset({"tp_rank", "pp_rank", "moe_ep_rank"}),
    share_labels=frozenset({"priority"}),
    json_paths=(JsonPath("/v1/models"),),
    version=absent("Dynamo's metrics do not name its version"),
    extra_series=_SGLANG,
    remarks=_remarks,
    since={
        "": "0.7",
        "pool_blocks": "0.7 (kvstats_total_blocks; total_blocks: 1.0)",
        "used_blocks": "0.7 (kvstats_active_blocks; 1.0: from usage)",
    },
    reads={
        "pool_blocks": _POOL,
        "usable_blocks": _POOL,
        "block_size": Derived(
            "dynamo_frontend_model_kv_cache_block_size; else that of the engine inside (SGLang: 1)",
            _block_size,
            ("dynamo_frontend_model_kv_cache_block_size", "trtllm_kv_cache_tokens_per_block", "vllm:cache_config_info"),
        ),
        "pool_tokens": Derived("pool_blocks x block_size", View.pool_in_tokens),
        "pool_bytes": absent("Dynamo does not state the memory of a pool"),
        "weights_bytes": absent("Dynamo does not state the memory of weights"),
        "sliding_window": InfoLabel("vllm:cache_config_info", "sliding_window"),
        "max_concurrency": absent("Dynamo gives no such figure"),
        "max_model_len": Series(("dynamo_frontend_model_context_length", "sglang:context_len"), shared=True, hint="the frontend tells it"),
        "max_num_seqs": Series(("dynamo_frontend_model_max_num_seqs",), shared=True, hint="the frontend tells it, of the first worker"),
        "kv_dtype": InfoLabel("vllm:cache_config_info", "cache_dtype", "text"),
        "prefix_caching": InfoLabel("vllm:cache_config_info", "enable_prefix_caching", "flag"),
        "gpu_memory_utilization": InfoLabel("vllm:cache_config_info", "gpu_memory_utilization"),
        "num_gpu_blocks_override": InfoLabel("vllm:cache_config_info", "num_gpu_blocks_override"),
        "used_blocks": first_of(Series((_ACTIVE, "dynamo_component_active_blocks")), Derived("round(usage x pool_blocks) of a worker", _used)),
        "free_blocks": Derived("pool_blocks - used_blocks of a worker", _free),
        "used_tokens": absent("Dynamo counts blocks: see used_blocks"),
        "free_tokens": absent("Dynamo counts blocks: see free_blocks"),
        "usage": _USAGE,
        "running": Series(("vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running", _INFLIGHT), hint=_INSIDE),
        "waiting": Series(("vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting", _QUEUED), hint=_INSIDE),
        "waiting_capacity": Series(("vllm:num_requests_waiting_by_reason",), where={("reason",): ("capacity",)}, hint=_INSIDE),
        "swapped": absent("it depends on the engine inside"),
        "preemptions": Series(("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"), hint=_INSIDE),
        # HTTP 503, 529 from 1.x on: no worker is below its busy threshold.
        "rejections": Series(
            ("dynamo_frontend_model_rejection_total",), over=("endpoint",), hint="the frontend tells it, from 1.0 on and after its first refusal"
        ),
        "prefix_queries": Series(("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total"), over=_STREAMED, hint=_INSIDE),
        "prefix_hits": first_of(
            Series(("vllm:prefix_cache_hits_total",), hint=_INSIDE),
            Series(("sglang:cached_tokens_total",), where={("cache_source",): ("total",)}),
            Series(("sglang:cached_tokens_total",), over=("cache_source",)),
        ),
        "prompt_tokens": Series(
            ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "trtllm_prompt_tokens_total"), over=_STREAMED, hint=_INSIDE
        ),
        "generation_tokens": Series(
            ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "trtllm_generation_tokens_total"), over=_STREAMED, hint=_INSIDE
        ),
        "finished": _finished(),
        "finished_stop": _finished("stop"),
        "finished_length": _finished("length"),
        "finished_abort": _finished("abort"),
        "finished_error": _finished("error"),
        "start_time": Series(("vllm:num_preemptions_created", "vllm:generation_tokens_created", "process_start_time_seconds")),
    },
)
