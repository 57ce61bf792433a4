"""LMDeploy 0.10 to 0.16: /metrics, refreshed every 10 s. It tells how full its pool is and not how large.

TurboMind counts idle cached blocks as used, so usage stays high when nothing runs; LMDeploy's PyTorch engine does not. Counts of
finished requests are gauges that only grow. Source: InternLM/lmdeploy 0.16.0, ``lmdeploy/metrics/loggers.py``.
"""

from __future__ import annotations

from pytest_kvcache.engines._dialect import TARGET_LABELS, Dialect, JsonPath, LogFact, Series, absent, first_of
from pytest_kvcache.engines._reading import View

_ON = "on from 0.12 unless --disable-metrics; before: --enable-metrics"
_SUCCESS = "lmdeploy:request_success_total"
_NO_POOL = "LMDeploy's metrics do not tell the pool's size (backend_config_info has no labels)"


def _remarks(view: View) -> list[str]:
    return ["LMDeploy's gauges are refreshed every 10 s: a shorter peak is not in them"] if view.has("lmdeploy:num_requests_running") else []


DIALECT = Dialect(
    name="lmdeploy",
    title="LMDeploy",
    series_prefix="lmdeploy",
    owned_by="lmdeploy",
    counts="blocks",
    idle_cached_is_free=False,
    gauges_every_s=10.0,
    meaning="with the TurboMind engine idle cached KV counts as used: usage stays up when nothing runs, and is no sign of a leak",
    rank_label="engine",
    server_labels=TARGET_LABELS,
    model_label="model_name",
    json_paths=(JsonPath("/v1/models"),),
    version=absent("LMDeploy does not tell its version"),
    remarks=_remarks,
    since={"": "0.10", "prefix_hits": "0.16", "finished": "0.13 (before: num_requests_finished)"},
    reads={
        "pool_blocks": first_of(LogFact(), absent(_NO_POOL)),
        "usable_blocks": first_of(LogFact("pool_blocks"), absent(_NO_POOL)),
        "block_size": first_of(LogFact(), absent("cache_block_seq_len (default 64) stands in its configuration")),
        "pool_tokens": first_of(LogFact(), absent(_NO_POOL)),
        "pool_bytes": first_of(LogFact(), absent(_NO_POOL)),
        "weights_bytes": absent("LMDeploy does not state the memory of its weights"),
        "sliding_window": absent("LMDeploy does not tell a window"),
        "max_concurrency": absent("LMDeploy gives no such figure"),
        "max_model_len": first_of(LogFact(), absent("LMDeploy's /v1/models states no length; session_len stands in its configuration")),
        "max_num_seqs": first_of(LogFact(), absent("max_batch_size stands in its configuration")),
        "kv_dtype": first_of(LogFact(), absent("quant_policy stands in its configuration")),
        "prefix_caching": first_of(LogFact(), absent("enable_prefix_caching stands in its configuration")),
        "gpu_memory_utilization": absent("cache_max_entry_count, a share of the free memory, stands in its configuration"),
        "num_gpu_blocks_override": absent("num_gpu_blocks stands in its configuration"),
        "used_blocks": absent(_NO_POOL),
        "free_blocks": absent(_NO_POOL),
        "used_tokens": absent(_NO_POOL),
        "free_tokens": absent(_NO_POOL),
        "usage": Series(("lmdeploy:gpu_cache_usage_perc",), hint=_ON),
        "running": Series(("lmdeploy:num_requests_running",), hint=_ON),
        # num_api_requests_waiting wait for a handle in front of the engine; these wait for the engine.
        "waiting": Series(("lmdeploy:num_requests_waiting",), hint=_ON),
        "waiting_capacity": absent("LMDeploy does not tell why a request waits"),
        "swapped": absent("LMDeploy does not tell of requests that it puts aside"),
        "preemptions": absent("LMDeploy does not count requests that it puts aside"),
        "rejections": absent("LMDeploy does not count refused requests"),
        "prefix_queries": Series(("lmdeploy:prompt_tokens_total",), hint=_ON),
        "prefix_hits": Series(("lmdeploy:cached_tokens_total",), hint=_ON),
        "prompt_tokens": Series(("lmdeploy:prompt_tokens_total",), hint=_ON),
        "generation_tokens": Series(("lmdeploy:generation_tokens_total",), hint=_ON),
        "finished": Series((_SUCCESS, "lmdeploy:num_requests_finished"), over=("finished_reason",), hint=_ON),
        "finished_stop": absent("ResponseType.FINISH is the end by a stop word as well as by length"),
        "finished_length": absent("ResponseType.FINISH is the end by a stop word as well as by length"),
        "finished_abort": Series((_SUCCESS,), where={("finished_reason",): ("ResponseType.CANCEL",)}, hint=_ON),
        "finished_error": Series(("lmdeploy:num_requests_failed",), hint="needs 0.13 or newer"),
        "start_time": Series(("process_start_time_seconds",)),
    },
)
