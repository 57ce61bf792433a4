"""TensorRT-LLM's ``trtllm-serve``: /prometheus/metrics first; the JSON of /metrics only where the user allows it.

The JSON is a queue of iteration statistics: who reads it takes it away from every other reader, and it is ``[]`` until a request runs.
Whether reusable blocks count as free is not documented. Source: TensorRT-LLM, ``docs/source/commands/trtllm-serve``; the names of
``/prometheus/metrics`` in 1.x.
"""

from __future__ import annotations

from pytest_kvcache.engines._dialect import (
    TARGET_LABELS,
    Derived,
    Dialect,
    InfoLabel,
    JsonField,
    JsonPath,
    LogFact,
    Rule,
    Series,
    absent,
    cannot_happen,
    first_of,
)  # fmt: skip
from pytest_kvcache.engines._reading import View
from pytest_kvcache.engines._state import clean
from pytest_kvcache.quantities import Missing, Value

_HINT = "needs enable_iter_perf_stats, and a TensorRT-LLM newer than 1.1"
_ONCE = "needs return_perf_metrics"
_JSON = "/metrics"
_CONFIG = "trtllm_kv_cache_config_info"
_KEYS = {"used_blocks": "usedNumBlocks", "free_blocks": "freeNumBlocks"}


def _last(*keys: str) -> JsonField:
    return JsonField(_JSON, (-1, *keys))


def _both(series: str, *keys: str) -> Rule:
    return first_of(Series((series,), hint=_HINT), _last(*keys))


def _free(view: View) -> Value:
    return _difference(view, "free_blocks", "used_blocks")


def _used(view: View) -> Value:
    return _difference(view, "used_blocks", "free_blocks")


def _difference(view: View, name: str, other: str) -> Value:
    """The part of the pool that the other gauge leaves; both are of one pool."""
    rule = _both(f"trtllm_kv_cache_{other}", "kvCacheStats", _KEYS[other])
    return view.rest(name, view.value("pool_blocks"), view.apply(rule, other))


def _usage(view: View) -> Value:
    return view.share(view.value("used_blocks"), view.value("pool_blocks"))


def _times(view: View, name: str, series: tuple[str, ...]) -> Value:
    """Blocks of the reuse counters, in tokens."""
    size, parts = view.value("block_size"), [view.apply(Series((one,), hint=_HINT), name) for one in series]
    for part in parts:
        if isinstance(part, Missing):
            return part
    if isinstance(size, Missing):
        return size
    blocks = sum(part.number() for part in parts if not isinstance(part, Missing))
    return view.reading(name, blocks * size.number(), f"({' + '.join(series)}) x {size.source}")


_REUSED, _MISSED = "trtllm_kv_cache_reused_blocks_total", "trtllm_kv_cache_missed_blocks_total"
_CACHED, _PROMPT = "trtllm_prompt_cached_tokens_total", "trtllm_prompt_tokens_total"
_SUCCESS = "trtllm_request_success_total"


def _hits(view: View) -> Value:
    return _tokens(view, "prefix_hits", _CACHED) if _in_tokens(view) else _times(view, "prefix_hits", (_REUSED,))


def _queries(view: View) -> Value:
    return _tokens(view, "prefix_queries", _PROMPT) if _in_tokens(view) else _times(view, "prefix_queries", (_REUSED, _MISSED))


def _in_tokens(view: View) -> bool:
    """Whether hits and lookups are both told in tokens, and neither in blocks: of two ways to count, one is followed throughout."""
    return view.has(_CACHED) and not view.has(_REUSED, _MISSED)


def _tokens(view: View, name: str, series: str) -> Value:
    return view.apply(Series((series,), hint=_ONCE), name)


def _finished(*reasons: str) -> Series:
    return Series((_SUCCESS,), where={("finished_reason",): reasons} if reasons else {}, over=("finished_reason",), hint=_ONCE)


def _kv_dtype(view: View) -> Value:
    """``cache_dtype``; where it is ``auto`` (the model's own dtype) the log's, if it states one."""
    source, text = view.label(_CONFIG, "cache_dtype")
    stated = view.apply(LogFact(), "kv_dtype")
    if not isinstance(text, Missing) and text.lower() != "auto":
        return view.reading("kv_dtype", clean(text, 60), source)
    if not isinstance(stated, Missing) or isinstance(text, Missing):
        return stated if not isinstance(stated, Missing) else Missing(f"{text.reason if isinstance(text, Missing) else ''}; {stated.reason}")
    return view.reading("kv_dtype", text, f"{source} (the model's own dtype, not resolved)")


def _remarks(view: View) -> list[str]:
    notes = ["TensorRT-LLM lowers max_seq_len without a word where the pool is small: the start-up log's last max_seq_len holds"]
    if view.has(_REUSED):
        notes.append("TensorRT-LLM counts prefix hits in blocks: they are shown as whole blocks of tokens, and a partly matching block is none")
    paused = view.apply(Series(("trtllm_num_paused_requests",)), "swapped")
    if not isinstance(paused, Missing) and paused.number() > 0:
        notes.append(f"{paused.number():.0f} requests are paused for want of blocks (trtllm_num_paused_requests)")
    host = view.apply(Series(("trtllm_kv_cache_host_utilization",)), "usage")
    if not isinstance(host, Missing) and host.number() > 0:
        notes.append(f"the host tier is a pool of its own and stands at {host.number():.1%}; it is not added")
    return notes


DIALECT = Dialect(
    name="trtllm_serve",
    title="trtllm-serve",
    series_prefix="trtllm",
    owned_by="tensorrt_llm",
    counts="blocks",
    idle_cached_is_free=None,
    server_labels=TARGET_LABELS,
    model_label="model_name",
    metrics_paths=("/prometheus/metrics",),
    json_paths=(
        JsonPath(_JSON, per_sample=True, sign=("kvCacheStats", "numActiveRequests"), without_metrics=True, destructive=True),
        JsonPath("/v1/models"),
        JsonPath("/version"),
    ),
    version=JsonField("/version", ("version",), "text"),
    extra_series=("trtllm_num_paused_requests", "trtllm_kv_cache_host_utilization"),
    remarks=_remarks,
    since={"": "newer than 1.1 (/prometheus/metrics); the JSON is older"},
    reads={
        "pool_blocks": first_of(_both("trtllm_kv_cache_max_blocks", "kvCacheStats", "maxNumBlocks"), LogFact()),
        "usable_blocks": first_of(_both("trtllm_kv_cache_max_blocks", "kvCacheStats", "maxNumBlocks"), LogFact("pool_blocks")),
        "block_size": first_of(
            _both("trtllm_kv_cache_tokens_per_block", "kvCacheStats", "tokensPerBlock"),
            InfoLabel(_CONFIG, "page_size"),
            LogFact(),
        ),
        "pool_tokens": first_of(Derived("pool_blocks x block_size", View.pool_in_tokens), LogFact()),
        "pool_bytes": first_of(LogFact(), absent("TensorRT-LLM states the pool's bytes in its start-up log only")),
        "weights_bytes": absent("TensorRT-LLM does not state the memory of its weights there"),
        "sliding_window": absent("trtllm-serve does not tell a window"),
        "max_concurrency": absent("TensorRT-LLM gives no such figure"),
        "max_model_len": first_of(LogFact(), absent("no endpoint of trtllm-serve states max_seq_len: its start-up log does")),
        "max_num_seqs": first_of(_both("trtllm_max_num_active_requests", "maxNumActiveRequests"), LogFact()),
        "kv_dtype": Derived(f"{_CONFIG}{{cache_dtype}}; where it is auto: start-up log", _kv_dtype, (_CONFIG,)),
        "prefix_caching": first_of(InfoLabel(_CONFIG, "enable_block_reuse", "flag"), LogFact()),
        "gpu_memory_utilization": first_of(
            LogFact(), absent(f"free_gpu_memory_fraction ({_CONFIG}) is a share of the memory that was free, and not of the card")
        ),
        "num_gpu_blocks_override": absent("trtllm-serve does not tell max_tokens of its kv_cache_config"),
        "used_blocks": first_of(_both("trtllm_kv_cache_used_blocks", "kvCacheStats", "usedNumBlocks"), Derived("pool_blocks - free_blocks", _used)),
        "free_blocks": first_of(_both("trtllm_kv_cache_free_blocks", "kvCacheStats", "freeNumBlocks"), Derived("pool_blocks - used_blocks", _free)),
        "used_tokens": absent("TensorRT-LLM counts blocks: see used_blocks"),
        "free_tokens": absent("TensorRT-LLM counts blocks: see free_blocks"),
        "usage": first_of(Series(("trtllm_kv_cache_utilization",), hint=_HINT), Derived("used_blocks / pool_blocks", _usage)),
        "running": first_of(Series(("trtllm_num_requests_running", "trtllm_num_active_requests"), hint=_HINT), _last("numActiveRequests")),
        "waiting": first_of(Series(("trtllm_num_requests_waiting", "trtllm_server_queue_length"), hint=_HINT), _last("numQueuedRequests")),
        "waiting_capacity": absent("TensorRT-LLM does not tell why a request waits"),
        "swapped": cannot_happen("TensorRT-LLM pauses requests and never swaps them"),
        "preemptions": absent("TensorRT-LLM shows how many requests are paused now (trtllm_num_paused_requests) and counts none"),
        "rejections": absent("TensorRT-LLM does not count refused requests"),
        "prefix_queries": Derived(f"({_REUSED} + {_MISSED}) x block_size; without them {_PROMPT}", _queries, (_REUSED, _MISSED, _PROMPT)),
        "prefix_hits": Derived(f"{_REUSED} x block_size; without it {_CACHED}", _hits, (_REUSED, _MISSED, _CACHED)),
        "prompt_tokens": Series(("trtllm_prompt_tokens_total",), hint=_ONCE),
        "generation_tokens": Series(("trtllm_generation_tokens_total",), hint=_ONCE),
        "finished": _finished(),
        "finished_stop": _finished("stop"),
        "finished_length": _finished("length"),
        "finished_abort": _finished("abort", "cancelled"),
        "finished_error": _finished("error"),
        "start_time": Series((f"{_SUCCESS.removesuffix('_total')}_created", "process_start_time_seconds")),
    },
)
