"""llm-d-inference-sim: a simulator that speaks vLLM's names. What it says is marked as simulated.

Its info series has two labels, its pool has no null block, and it says ``finish_reason`` where vLLM says ``finished_reason``. Its metrics
may be set by hand (``--fake-metrics``), so they need not agree with what it does. Source: llm-d-inference-sim 0.10.2,
``pkg/llm-d-inference-sim/metrics.go``.
"""

from __future__ import annotations

import dataclasses

from pytest_kvcache.engines._dialect import ADDED_LABELS, Derived, InfoLabel, Series, absent, cannot_happen, spellings
from pytest_kvcache.engines._reading import View
from pytest_kvcache.engines._state import RawState
from pytest_kvcache.engines.vllm import DIALECT as VLLM
from pytest_kvcache.quantities import Missing, Value

_INFO = "vllm:cache_config_info"
_SUCCESS = ("vllm:request_success_total", "vllm:request_success")
_USAGE = Series(("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"))
_NOT_TOLD = "the simulator does not tell it"


def _claims(raw: RawState) -> bool:
    if raw.metrics is None:
        return False
    rows = [row for name in spellings(_INFO) for row in raw.metrics.rows.get(name, ())]
    if rows and all(set(row.labels) - ADDED_LABELS == {"block_size", "num_gpu_blocks"} for row in rows):
        return True
    return any("finish_reason" in row.labels for name in _SUCCESS for spelled in spellings(name) for row in raw.metrics.rows.get(spelled, ()))


def _usable(view: View) -> Value:
    pool = view.value("pool_blocks")
    return pool if isinstance(pool, Missing) else view.reading("usable_blocks", pool.number(), f"{pool.source} (no null block)")


def _used(view: View) -> Value:
    usage, pool = view.value("usage"), view.value("pool_blocks")
    if isinstance(usage, Missing):
        return usage
    if isinstance(pool, Missing):
        return pool
    return view.reading("used_blocks", round(usage.number() * pool.number()), f"round({usage.source} x {pool.number():.0f} blocks)")


def _free(view: View) -> Value:
    return view.rest("free_blocks", view.value("pool_blocks"), view.value("used_blocks"))


def _finished(*reasons: str) -> Series:
    labels = ("finish_reason", "finished_reason")
    return Series(_SUCCESS, where={labels: reasons} if reasons else {}, over=labels)


DIALECT = dataclasses.replace(
    VLLM,
    name="llm_d_sim",
    title="llm-d-inference-sim (simulated)",
    owned_by="",
    claims=_claims,
    covers=("vllm",),
    rank_label="",
    extra_series=(),
    version=absent(_NOT_TOLD),
    remarks=None,
    meaning="simulated: this is llm-d-inference-sim, whose metrics need not agree with what it does",
    since={"": "0.10", "usage": "0.10 (kv_cache_usage_perc: January 2026)"},
    reads={
        **VLLM.reads,
        "pool_blocks": InfoLabel(_INFO, "num_gpu_blocks"),
        "usable_blocks": Derived("pool_blocks (no null block)", _usable),
        "block_size": InfoLabel(_INFO, "block_size"),
        "pool_tokens": Derived("pool_blocks x block_size", View.pool_in_tokens),
        "pool_bytes": cannot_happen("a simulator holds no KV cache"),
        "weights_bytes": cannot_happen("a simulator loads no model"),
        "sliding_window": cannot_happen("a simulator has no layers"),
        "max_concurrency": absent(_NOT_TOLD),
        "max_num_seqs": absent(_NOT_TOLD),
        "kv_dtype": cannot_happen("a simulator holds no KV cache"),
        "prefix_caching": absent(_NOT_TOLD),
        "gpu_memory_utilization": cannot_happen("a simulator uses no card"),
        "num_gpu_blocks_override": absent(_NOT_TOLD),
        "used_blocks": Derived("round(usage x pool_blocks)", _used),
        "free_blocks": Derived("pool_blocks - used_blocks", _free),
        "usage": _USAGE,
        "waiting_capacity": absent(_NOT_TOLD),
        "swapped": cannot_happen("the simulator never swaps"),
        "preemptions": cannot_happen("the simulator never preempts: a request that finds no room is refused with HTTP 500"),
        "rejections": absent("the simulator refuses with 429 and counts none of them"),
        "finished": _finished(),
        "finished_stop": _finished("stop"),
        "finished_length": _finished("length"),
        "finished_abort": _finished("abort"),
        "finished_error": _finished("error"),
        "start_time": Series(("process_start_time_seconds",)),
    },
)
