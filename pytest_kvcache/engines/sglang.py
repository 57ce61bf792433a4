"""SGLang 0.4 to 0.5: /metrics (with ``--enable-metrics``), /v1/loads and /server_info (always), one part per data-parallel rank.

Its pool is counted in tokens. Cached tokens that nobody references ("evictable") are free. A hybrid model has a second pool for
sliding-window layers, or one for state: the usage gauge is then that of the fullest of them. Gauges move with prefill batches and every
40 decode steps, and keep their last value when the scheduler is idle. Source: sgl-project/sglang,
``python/sglang/srt/observability/metrics_collector.py``, ``docs/references/production_metrics.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_kvcache.engines._dialect import (
    TARGET_LABELS,
    Derived,
    Dialect,
    InfoLabel,
    JsonField,
    JsonPath,
    LogFact,
    Series,
    absent,
    cannot_happen,
    first_of,
    spellings,
)  # fmt: skip
from pytest_kvcache.engines._reading import View
from pytest_kvcache.engines._state import RawState, Sample, clean
from pytest_kvcache.quantities import Missing, Reading, Value

_ON = "needs --enable-metrics, or /v1/loads (0.5.9 or newer)"
_FLAG = "needs --enable-metrics"
# Only /metrics has it: what /v1/loads?format=prometheus shows needs no flag and says waiting where this says queue.
_ALIVE = ("sglang:num_queue_reqs",)
_POOL, _AVAILABLE, _EVICTABLE = "sglang:max_total_num_tokens", "sglang:kv_available_tokens", "sglang:kv_evictable_tokens"
_SWA_POOL = "sglang:max_total_num_tokens_swa"
_KINDS = ("sglang:full_token_usage", "sglang:swa_token_usage", "sglang:mamba_usage")
_STATE = ("sglang:mamba_used_tokens", "sglang:mamba_available_tokens", "sglang:mamba_evictable_tokens")
_GIB = float(1 << 30)
_MOST_RANKS = 256
_INFO_PATHS = ("/server_info", "/get_server_info")
# Before 0.4.5 there were no internal_states, and some builds state max_total_num_tokens in them only.
_INFO_SIGN = ("max_total_num_tokens|internal_states", "mem_fraction_static|internal_states", "page_size|disable_radix_cache|max_total_num_tokens")
_LOAD_FIELDS = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage", "max_running_requests")


def _rows(raw: RawState) -> dict[str, list[Sample]]:
    """Make series of the JSON bodies that list ranks: ``/v1/loads <field>`` and the like, labelled as the exposition labels its ranks."""
    made: dict[str, list[Sample]] = {}

    def add(path: str, rank: object, count: int, values: Mapping[str, Any]) -> None:
        labels = {**model, **({"dp_rank": str(rank)} if count > 1 or by_rank else {})}
        for field, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                made.setdefault(f"{path} {field}", []).append(Sample(labels, float(value)))

    model, by_rank = _labels(raw)
    for rank, load, count in _listed(_part(raw.json.get("/v1/loads"), "loads")):
        add("/v1/loads", load.get("dp_rank", rank), count, {field: load.get(field) for field in _LOAD_FIELDS})
        memory = load.get("memory")
        told = memory if isinstance(memory, dict) else {}
        add("/v1/loads", load.get("dp_rank", rank), count, {name: told.get(name) for name in ("kv_cache_gb", "weight_gb")})
    for rank, load, count in _listed(raw.json.get("/get_load")):
        waiting, both = load.get("num_waiting_reqs"), load.get("num_reqs")
        running = both - waiting if isinstance(both, int) and isinstance(waiting, int) else None
        add("/get_load", load.get("dp_rank", rank), count, {"num_waiting_reqs": waiting, "num_reqs - num_waiting_reqs": running})
    for path in _INFO_PATHS:
        body = raw.json.get(path)
        states = _listed(_part(body, "internal_states"))
        for rank, state, count in states:
            memory = state.get("memory_usage")
            told = memory if isinstance(memory, dict) else {}
            values = {name: told.get(name) for name in ("token_capacity", "kvcache", "weight")}
            add(path, rank, count, {**values, "max_running": state.get("effective_max_running_requests_per_dp")})
        if f"{path} token_capacity" not in made and _part(body, "dp_size") in {None, 1}:
            add(path, 0, 1, {"max_total_num_tokens": _part(body, "max_total_num_tokens")})
    return made


def _part(body: object, key: str) -> Any:
    return body.get(key) if isinstance(body, dict) else None


def _listed(body: object) -> list[tuple[int, dict[str, Any], int]]:
    """Return place, element and number of elements of a list of objects; nothing where it is no such list."""
    rows = body[:_MOST_RANKS] if isinstance(body, list) else []
    return [(n, row, len(rows)) for n, row in enumerate(rows)] if all(isinstance(row, dict) for row in rows) else []


def _labels(raw: RawState) -> tuple[dict[str, str], bool]:
    """Return the one model that the exposition names, as a label, and whether it names ranks."""
    if raw.metrics is None:
        return {}, False
    rows = [row for name in spellings("sglang:num_running_reqs") for row in raw.metrics.rows.get(name, ())]
    models = {row.labels["model_name"] for row in rows if "model_name" in row.labels}
    return ({"model_name": models.pop()} if len(models) == 1 else {}), any("dp_rank" in row.labels for row in rows)


def _free_tokens(view: View) -> Value:
    """Available + evictable tokens. The rest of the pool is used or protected, so pool - used comes only where neither is told."""
    if view.has(_AVAILABLE) or view.has(_EVICTABLE):
        parts = [view.apply(Series((name,)), "free_tokens") for name in (_AVAILABLE, _EVICTABLE)]
        for part in parts:
            if isinstance(part, Missing):
                return part
        total = sum(part.number() for part in parts if isinstance(part, Reading))
        return view.reading("free_tokens", total, f"{_AVAILABLE} + {_EVICTABLE}")
    if view.has("sglang:kv_used_tokens"):
        return Missing(f"neither {_AVAILABLE} nor {_EVICTABLE} is in /metrics, and part of the pool may be protected")
    return view.rest("free_tokens", view.value("pool_tokens"), view.value("used_tokens"))


def _fullest(view: View) -> Value:
    """What the usage gauge is made of: the fullest of the pools for full attention, sliding windows and state."""
    if view.samples is None:
        return Missing(view.raw.metrics_reason)
    told = [value for name in _KINDS if isinstance(value := view.apply(Series((name,)), "usage"), Reading)]
    if not view.has(_KINDS[0]) or (view.has(_SWA_POOL) and not view.has(_KINDS[1])):
        return Missing("sglang:token_usage is not told, and not every pool tells its own")
    if not told:
        return Missing(f"{_KINDS[0]} is not in /metrics")
    most = max(told, key=lambda reading: reading.number())
    return view.reading("usage", most.number(), f"greatest of {', '.join(reading.source for reading in told)}")


def _kv_dtype(view: View) -> Value:
    stated = view.apply(LogFact(), "kv_dtype")
    told: Value = Missing("/server_info was not read")
    for path in _INFO_PATHS:
        if not isinstance(view.json(path), Missing):
            told = view.apply(JsonField(path, ("kv_cache_dtype",), "text"), "kv_dtype")
        if isinstance(told, Reading):
            break
    if isinstance(told, Reading) and told.value != "auto":
        return told
    if isinstance(stated, Reading):
        return stated
    if isinstance(told, Reading):
        return view.reading("kv_dtype", told.value, f"{told.source} (the model's own dtype, not resolved)")
    return Missing(f"{told.reason}; {stated.reason}")


def _prefix_caching(view: View) -> Value:
    for path in _INFO_PATHS:
        body = view.json(path)
        if isinstance(body, dict) and isinstance(off := body.get("disable_radix_cache"), bool):
            return view.reading("prefix_caching", not off, f"{path} disable_radix_cache, inverted")
    told = [body for path in _INFO_PATHS if not isinstance(body := view.json(path), Missing)]
    return Missing("/server_info states no disable_radix_cache" if told else "/server_info was not read")


def _state_slots(part: View) -> str:
    """Return how much of the pool for state layers is used; "" where there is none. Versions before 2026 do not tell its size."""
    usage = part.apply(Series((_KINDS[2],)), "usage")
    slots = [part.apply(Series((name,)), "used_tokens") for name in _STATE]
    told = [slot.number() for slot in slots if isinstance(slot, Reading)]
    size = sum(told)
    if len(told) == len(_STATE) and size > 0:
        return f"{told[0]:.0f} of {size:.0f} slots are used"
    return f"{usage.number():.1%} used, its size is not told" if isinstance(usage, Reading) and usage.number() > 0 else ""


def _remarks(view: View) -> list[str]:
    notes: list[str] = []
    windows: list[str] = []
    for part in view.parts:
        pool, used = part.apply(Series((_SWA_POOL,)), "pool_tokens"), part.apply(Series(("sglang:swa_used_tokens",)), "used_tokens")
        if isinstance(pool, Reading):
            windows.append(f"{used.number():.0f} of {pool.number():.0f}" if isinstance(used, Reading) else f"{pool.number():.0f}")
    if windows:
        notes.append(
            f"a second pool for sliding-window layers, tokens used by engine: {', '.join(windows[:8])}; usage is that of the fullest pool,"
            " tokens are those of the full-attention pool; until April 2026 (PR 22597) a prompt longer than the second pool was refused"
        )
    states = [text for part in view.parts if (text := _state_slots(part))]
    if states:
        notes.append(f"a pool for state layers (sglang:mamba_usage): {', '.join(states[:8])}; usage is that of the fullest pool")
    cap = next((n for path in _INFO_PATHS if isinstance(n := _part(view.json(path), "max_req_input_len"), int)), None)
    if cap is not None:
        notes.append(f"one prompt may have {cap} tokens at most (max_req_input_len), which the pool may set below the model's length")
    capped = next((n for path in _INFO_PATHS if isinstance(n := _part(view.json(path), "max_total_tokens"), int)), None)
    if capped is not None:
        notes.append(f"--max-total-tokens={capped}: the pool is not as large as memory allows")
    if view.has("sglang:token_usage"):
        notes.append(
            "SGLang's gauges move with prefill batches and every 40 decode steps, keep their last value when idle, and usage may have two decimals"
        )
        modes = {clean(row.labels.get("engine_type", ""), 30) for part in view.parts for row in part.rows("sglang:token_usage")[1]} - {"", "unified"}
        if modes:
            notes.append(f"disaggregated serving: this is the {', '.join(sorted(modes))} side only")
    return notes


def _counted(name: str) -> Series:
    """Return the rule of a counter that moves when requests end; from 2026 on streamed and other requests are counted apart."""
    return Series((f"sglang:{name}_total", f"sglang:{name}"), over=("is_streaming",), hint=_FLAG, followed=_ALIVE)


DIALECT = Dialect(
    name="sglang",
    title="SGLang",
    series_prefix="sglang",
    owned_by="sglang",
    counts="tokens",
    idle_cached_is_free=True,
    rank_label="dp_rank",
    server_labels=TARGET_LABELS,
    model_label="model_name",
    label_aliases={"model_name": ("name",)},  # 0.3
    mirror_labels=frozenset({"tp_rank", "pp_rank", "moe_ep_rank"}),
    # With priority scheduling running and waiting requests are told by priority as well, and priority="" is all of them.
    share_labels=frozenset({"priority"}),
    json_paths=(
        JsonPath("/server_info", sign=_INFO_SIGN),
        JsonPath("/get_server_info", sign=_INFO_SIGN),
        JsonPath("/v1/loads", per_sample=True, sign=("loads.dp_rank|loads.num_running_reqs|loads.max_running_requests",), without_metrics=True),
        JsonPath("/get_load", per_sample=True, sign=("dp_rank", "num_reqs", "num_waiting_reqs"), without_metrics=True),
        JsonPath("/v1/models"),
    ),
    version=first_of(*(JsonField(path, ("version",), "text") for path in (*_INFO_PATHS, "/v1/loads"))),
    extra_series=(_SWA_POOL, "sglang:swa_used_tokens", *_KINDS, *_STATE),
    rows=_rows,
    remarks=_remarks,
    since={
        "": "0.4",
        "pool_blocks": "0.5.11 (before: label of cache_config_info)",
        "block_size": "0.5.11 (before: label of cache_config_info)",
    },
    reads={
        "pool_blocks": first_of(Series(("sglang:num_pages",)), InfoLabel("sglang:cache_config_info", "num_pages")),
        "usable_blocks": first_of(Series(("sglang:num_pages",)), InfoLabel("sglang:cache_config_info", "num_pages")),
        "block_size": first_of(
            Series(("sglang:page_size",)),
            InfoLabel("sglang:cache_config_info", "page_size"),
            *(JsonField(path, ("page_size",)) for path in _INFO_PATHS),
        ),
        "pool_tokens": first_of(
            Series(
                (
                    _POOL, "/v1/loads max_total_num_tokens", "/server_info token_capacity", "/server_info max_total_num_tokens",
                    "/get_server_info token_capacity", "/get_server_info max_total_num_tokens",
                ),
                hint=_ON, followed=_ALIVE,
            ),
            LogFact(),
        ),
        # The series says GB and means GiB; every tensor-parallel rank holds as much.
        "pool_bytes": first_of(
            Series(
                ("sglang:kv_cache_memory_usage_gb", "/v1/loads kv_cache_gb", "/server_info kvcache", "/get_server_info kvcache"),
                scale=_GIB, hint="of one tensor-parallel rank",
            ),
            LogFact(),
        ),
        "weights_bytes": Series(
            ("/v1/loads weight_gb", "/server_info weight", "/get_server_info weight"), scale=_GIB, hint="of one tensor-parallel rank"
        ),
        "sliding_window": absent("SGLang tells no window: it has a pool of its own for such layers"),
        "max_concurrency": absent("SGLang gives no such figure"),
        "max_model_len": first_of(
            Derived("/v1/models data[].max_model_len of the base model", View.listed_length),
            Series(("sglang:context_len",)),
            LogFact(),
        ),
        "max_num_seqs": first_of(
            Series(("/v1/loads max_running_requests", "/server_info max_running", "/get_server_info max_running")), LogFact()
        ),
        "kv_dtype": Derived("/server_info kv_cache_dtype; where it is auto: start-up log", _kv_dtype),
        "prefix_caching": Derived("/server_info disable_radix_cache, inverted", _prefix_caching),
        "gpu_memory_utilization": first_of(*(JsonField(path, ("mem_fraction_static",)) for path in _INFO_PATHS), LogFact()),
        "num_gpu_blocks_override": absent("SGLang's --max-total-tokens is a bound in tokens: see the notes"),
        "used_blocks": absent("SGLang counts tokens: see used_tokens"),
        "free_blocks": absent("SGLang counts tokens: see free_tokens"),
        "used_tokens": Series(("sglang:kv_used_tokens", "sglang:num_used_tokens", "/v1/loads num_used_tokens"), hint=_ON, followed=_ALIVE),
        "free_tokens": Derived(
            f"{_AVAILABLE} + {_EVICTABLE}; where neither is told: pool_tokens - used_tokens", _free_tokens, (_AVAILABLE, _EVICTABLE)
        ),
        "usage": first_of(
            Series(("sglang:token_usage", "/v1/loads token_usage"), hint=_ON, followed=_ALIVE),
            Derived("greatest of full_token_usage, swa_token_usage and mamba_usage", _fullest, _KINDS),
        ),
        "running": Series(("sglang:num_running_reqs", "/v1/loads num_running_reqs", "/get_load num_reqs - num_waiting_reqs"), hint=_ON, followed=_ALIVE),
        # /v1/loads?format=prometheus says waiting where /metrics says queue.
        "waiting": Series(
            ("sglang:num_queue_reqs", "sglang:num_waiting_reqs", "/v1/loads num_waiting_reqs", "/get_load num_waiting_reqs"), hint=_ON, followed=_ALIVE
        ),
        "waiting_capacity": absent("SGLang does not tell why a request waits"),
        "swapped": cannot_happen("SGLang never swaps a request out: it retracts and computes again"),
        # num_retracted_reqs is a gauge that each log interval resets, and no count.
        "preemptions": Series(("sglang:num_retracted_requests_total", "sglang:num_retracted_requests"), hint=_FLAG, followed=_ALIVE),
        "rejections": absent("SGLang does not count what --max-queued-requests refuses"),
        "prefix_queries": _counted("prompt_tokens"),
        # The row of cache_source="total" is the sum of the others; older versions have no such label.
        "prefix_hits": first_of(
            Series(
                ("sglang:cached_tokens_total", "sglang:cached_tokens"),
                where={("cache_source",): ("total",)}, hint=_FLAG, followed=_ALIVE,
            ),
            Series(("sglang:cached_tokens_total", "sglang:cached_tokens"), over=("cache_source",), hint=_FLAG, followed=_ALIVE),
        ),
        "prompt_tokens": _counted("prompt_tokens"),
        "generation_tokens": _counted("generation_tokens"),
        "finished": _counted("num_requests"),
        "finished_stop": absent("SGLang does not count finished requests by reason"),
        "finished_length": absent("SGLang does not count finished requests by reason"),
        "finished_abort": Series(("sglang:num_aborted_requests_total", "sglang:num_aborted_requests"), hint=_FLAG, followed=_ALIVE),
        "finished_error": absent("SGLang does not count finished requests by reason"),
        "start_time": Series(
            ("sglang:prompt_tokens_created", "sglang:generation_tokens_created", "process_start_time_seconds"), hint=_FLAG, followed=_ALIVE
        ),
    },
)  # fmt: skip
