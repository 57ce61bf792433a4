"""Text Generation Inference 1.x to 3.3.7: /metrics and /info.

TGI reserves: a request takes the room of its prompt and of all the tokens that it may generate when it enters the batch. What its gauge
calls current is that reservation, not what is filled, and no other engine's usage can be compared with it. Counters have no ``_total``;
the gauges of the batch are there from the first batch on. Source: huggingface/text-generation-inference 3.3.7, ``router/src`` and
``backends/v3/src``.
"""

from __future__ import annotations

from pytest_kvcache.engines._dialect import TARGET_LABELS, Derived, Dialect, JsonField, JsonPath, LogFact, Series, absent, cannot_happen, first_of
from pytest_kvcache.engines._reading import View
from pytest_kvcache.quantities import Missing, Value

_POOL, _RESERVED, _BATCH = "tgi_batch_max_total_tokens", "tgi_batch_current_max_tokens", "tgi_batch_current_size"
_BATCHES = "tgi_batch_inference_count"
# OpenTelemetry gives a counter's name an end.
_FAILURE = ("tgi_request_failure", "tgi_request_failure_total")
_MEANING = "TGI reserves prompt + max_new_tokens of each request: used tokens and usage are what is reserved, not what is filled"
_NOT_COUNTED = absent("TGI counts successes and failures, not why a request ended")


def _reserved(view: View) -> Value:
    return _of_the_batch(view, "used_tokens", _RESERVED)


def _running(view: View) -> Value:
    return _of_the_batch(view, "running", _BATCH)


def _of_the_batch(view: View, name: str, series: str) -> Value:
    """A gauge of the batch; 0 where nothing of a batch was ever told, since all of it appears with the first one."""
    value = view.apply(Series((series,)), name)
    if isinstance(value, Missing) and view.has(_POOL) and view.has("tgi_queue_size") and not view.has(_RESERVED, _BATCH, _BATCHES):
        return view.reading(name, 0, f"{series}, {_BATCHES}: none is there before the first batch, and there was none")
    return value


def _free(view: View) -> Value:
    return view.rest("free_tokens", view.value("pool_tokens"), view.value("used_tokens"))


def _usage(view: View) -> Value:
    told = view.share(view.value("used_tokens"), view.value("pool_tokens"))
    return told if isinstance(told, Missing) else view.reading("usage", told.value, f"{told.source} (reserved, not filled)")


DIALECT = Dialect(
    name="tgi",
    title="TGI",
    series_prefix="tgi",
    counts="tokens",
    idle_cached_is_free=None,
    meaning=_MEANING,
    reserves="output",  # and with models that it must pad, also the longest prompt: nothing tells which those are
    server_labels=TARGET_LABELS,
    json_paths=(JsonPath("/info", sign=("model_id", "max_concurrent_requests", "max_total_tokens")),),
    version=JsonField("/info", ("version",), "text"),
    extra_series=(_BATCHES,),
    since={"": "1.0", "pool_tokens": "1.0 (/info of 1.x, series and log of later ones)", "max_model_len": "1.0"},
    reads={
        "pool_blocks": first_of(LogFact(), absent("TGI states its blocks in its start-up log only")),
        "usable_blocks": first_of(LogFact("pool_blocks"), absent("TGI states its blocks in its start-up log only")),
        "block_size": first_of(LogFact(), absent("TGI states its block size in its start-up log only")),
        "used_blocks": absent("TGI counts tokens: see used_tokens"),
        "free_blocks": absent("TGI counts tokens: see free_tokens"),
        "num_gpu_blocks_override": cannot_happen("TGI sizes its pool in tokens"),
        "pool_tokens": first_of(Series((_POOL,)), LogFact(), JsonField("/info", ("max_batch_total_tokens",))),
        "pool_bytes": first_of(LogFact(), absent("TGI does not state the memory of its pool")),
        "weights_bytes": absent("TGI does not state the memory of its weights"),
        "sliding_window": absent("TGI does not tell a window"),
        "max_concurrency": absent("TGI gives no such figure"),
        "max_model_len": first_of(JsonField("/info", ("max_total_tokens",)), LogFact()),
        "max_num_seqs": absent("TGI bounds its batch by tokens; max_concurrent_requests is the limit of its queue"),
        "kv_dtype": first_of(LogFact(), absent("TGI does not state the type of its cache")),
        "prefix_caching": first_of(LogFact(), absent("TGI does not tell whether it shares prefixes")),
        "gpu_memory_utilization": absent("TGI does not tell its --cuda-memory-fraction"),
        "used_tokens": Derived(f"{_RESERVED} (reserved, not filled)", _reserved, (_RESERVED, _POOL, _BATCH, "tgi_queue_size")),
        "free_tokens": Derived("pool_tokens - reserved tokens", _free),
        "usage": Derived("reserved tokens / pool_tokens", _usage),
        "running": Derived(_BATCH, _running, (_BATCH,)),
        "waiting": Series(("tgi_queue_size",)),
        "waiting_capacity": absent("TGI does not tell why a request waits"),
        "swapped": cannot_happen("TGI never swaps"),
        "preemptions": cannot_happen("TGI never preempts: a request has all its room before it starts"),
        "rejections": Series(
            _FAILURE, where={("err",): ("overloaded",)}, hint="the row appears with the first refusal (HTTP 429)"
        ),
        "prefix_queries": absent("TGI counts no prefix lookups"),
        "prefix_hits": absent("TGI counts no prefix hits"),
        # Histograms over finished requests: their sums are the tokens of those.
        "prompt_tokens": Series(("tgi_request_input_length_sum",)),
        "generation_tokens": Series(("tgi_request_generated_tokens_sum",)),
        "finished": Series(("tgi_request_success", "tgi_request_success_total")),
        "finished_stop": _NOT_COUNTED,
        "finished_length": _NOT_COUNTED,
        "finished_abort": _NOT_COUNTED,
        "finished_error": Series(
            _FAILURE,
            where={("err",): ("generation", "incomplete", "incomplete_generation")}, over=("err",),
            hint="the row appears with the first failure",
        ),
        "start_time": absent("TGI's exposition holds no time of its start"),
    },
)  # fmt: skip
