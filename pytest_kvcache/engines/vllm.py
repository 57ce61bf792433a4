"""vLLM 0.6 to 0.32: engines V0 and V1, relabelled names, data-parallel ranks. Ray Serve and llm-d-inference-sim build on it.

Source: vLLM 0.32.0, ``vllm/v1/metrics/loggers.py``, ``vllm/v1/core/block_pool.py``, ``vllm/config/cache.py`` and
``vllm/v1/engine/core_client.py``; older names from its releases 0.6 to 0.31.
"""

from __future__ import annotations

from pytest_kvcache.engines._dialect import TARGET_LABELS, Derived, Dialect, InfoLabel, JsonField, JsonPath, LogFact, Series, absent, first_of
from pytest_kvcache.engines._reading import View
from pytest_kvcache.engines._state import clean
from pytest_kvcache.quantities import Missing, Reading, Value

INFO = "vllm:cache_config_info"
# Block gauges that articles and dashboards of V0's time name.
_USED, _FREE = "vllm:num_used_gpu_blocks", "vllm:num_free_gpu_blocks"
# V0 shows these; V1 never did. Any of them is enough.
_V0_SIGNS = (
    _USED,
    _FREE,
    "vllm:num_requests_swapped",
    "vllm:cpu_cache_usage_perc",
    "vllm:cpu_prefix_cache_hit_rate",
    "vllm:gpu_prefix_cache_hit_rate",
    "vllm:avg_generation_throughput_toks_per_s",
)
_SLEEP = "vllm:engine_sleep_state"
# vLLM's router (production-stack) speaks of the engines behind it under their names, and of swapped requests as V0 did.
_ROUTER = "vllm:healthy_pods_total"
_SUCCESS = ("vllm:request_success_total", "vllm:request_success")
_REASON = ("finished_reason", "finish_reason")


def _is_v0(view: View) -> bool:
    """Of several servers in one exposition each shows by its own series which engine it is."""
    if view.has(_ROUTER) and not view.has(_USED, _FREE, "vllm:cpu_cache_usage_perc"):
        return False
    return view.has(*_V0_SIGNS) if len(view.parts) < 2 else any(view.rows(name, shared=True)[1] for name in _V0_SIGNS)


def _null_blocks(view: View) -> int:
    """Blocks that no request can hold: V1 keeps one (id 0), V0 none."""
    return 0 if _is_v0(view) else 1


def _is_asleep(view: View) -> bool:
    _, rows = view.rows(_SLEEP)
    awake = [row.value for row in rows if row.labels.get("sleep_state") == "awake"]
    return bool(awake) and not any(awake)


def _pool_blocks(view: View) -> Value:
    """``num_gpu_blocks``. With data parallelism behind one front end the label is the sum over engines, the same on every row."""
    source, text = view.label(INFO, "num_gpu_blocks")
    if isinstance(text, Missing):
        return text
    try:
        blocks = int(text)
    except ValueError:
        return Missing(f"{source} is {clean(text, 40)!r}, which is no number of blocks")
    engines = len(view.peers)
    if _is_sum(view):
        if blocks % engines:
            return Missing(f"{source} is {blocks} over {engines} engines: their pools differ and only the sum is told")
        return view.checked("pool_blocks", blocks // engines, f"{source} / {engines} engines (the label is their sum)")
    return view.checked("pool_blocks", blocks, source)


def _pool_from_log(view: View) -> Value:
    """0.8 with V1 says num_gpu_blocks="None"; its log's token figure is blocks x block_size there."""
    told, tokens, size = view.label(INFO, "num_gpu_blocks")[1], view.apply(LogFact("pool_tokens"), "pool_tokens"), view.value("block_size")
    if isinstance(tokens, Missing):
        return tokens
    if isinstance(size, Missing):
        return size
    if not isinstance(told, Missing) or not told.reason.endswith('="None"') or tokens.number() % size.number():
        return Missing("the log's token figure cannot be turned into blocks")
    return view.reading("pool_blocks", tokens.number() / size.number(), f"{tokens.source} / {size.source}")


def _pool_from_gauges(view: View) -> Value:
    """V0's used and free blocks are all that there are."""
    told = view.label(INFO, "num_gpu_blocks")[1]
    if isinstance(told, Missing) and not view.has(_USED, _FREE):
        return told
    used, free = view.apply(Series((_USED,)), "used_blocks"), view.apply(Series((_FREE,)), "free_blocks")
    if isinstance(used, Missing):
        return used
    return free if isinstance(free, Missing) else view.reading("pool_blocks", used.number() + free.number(), f"{used.source} + {free.source}")


def _is_sum(view: View) -> bool:
    """Say whether the label is the sum over ranks, repeated; ranks that print different pools print their own."""
    texts = {text for peer in view.peers if isinstance(text := peer.label(INFO, "num_gpu_blocks")[1], str)}
    return len(view.peers) > 1 and len(texts) == 1


def _usable_blocks(view: View) -> Value:
    pool = view.value("pool_blocks")
    if isinstance(pool, Missing):
        return pool
    kept = _null_blocks(view)
    usable = max(int(pool.number()) - kept, 0)
    return view.reading("usable_blocks", usable, f"{pool.source} - {kept} (null block)" if kept else f"{pool.source} (no null block)")


def _held(view: View) -> tuple[int, int, str] | Missing:
    """Return used blocks, usable blocks and the formula. Inverse of usage = 1 - free / usable in ``block_pool.py``."""
    if _is_asleep(view):
        return Missing("the engine sleeps (vllm:engine_sleep_state): its pool is not there")
    # The gauge alone: a usage that was computed from the blocks would be turned back into them.
    usage, usable = view.apply(_USAGE, "usage"), view.value("usable_blocks")
    if isinstance(usage, Missing):
        return usage
    if isinstance(usable, Missing):
        return usable
    pool = int(usable.number())
    return min(round(usage.number() * pool), pool), pool, f"round({usage.source} x {pool} usable blocks)"


def _used_blocks(view: View) -> Value:
    stated = view.apply(Series((_USED,)), "used_blocks")
    if isinstance(stated, Reading):
        return stated
    held = _held(view)
    if isinstance(held, Missing):
        return _rest_of(view, _FREE, "used_blocks") or held
    return view.reading("used_blocks", held[0], held[2])


def _free_blocks(view: View) -> Value:
    stated = view.apply(Series((_FREE,)), "free_blocks")
    if isinstance(stated, Reading):
        return stated
    held = _held(view)
    if isinstance(held, Missing):
        return _rest_of(view, _USED, "free_blocks") or held
    return view.reading("free_blocks", held[1] - held[0], f"{held[1]} usable blocks - {held[2]}")


def _rest_of(view: View, series: str, name: str) -> Value | None:
    """Return what V0's other block gauge leaves of the pool; None where it does not tell."""
    part, usable = view.apply(Series((series,)), name), view.value("usable_blocks")
    if isinstance(part, Missing) or isinstance(usable, Missing):
        return None
    return view.checked(name, usable.number() - part.number(), f"{usable.source} - {part.source}")


def _usage(view: View) -> Value:
    gauge = view.apply(_USAGE, "usage")
    if isinstance(gauge, Reading) or not view.has(_USED, _FREE):
        return gauge
    used, free = view.value("used_blocks"), view.value("free_blocks")
    if isinstance(used, Missing):
        return used
    if isinstance(free, Missing):
        return free
    total = used.number() + free.number()
    return view.checked("usage", used.number() / total, f"{used.source} / (used + free)") if total else Missing("the pool has no block")


def _pool_product(view: View) -> Value:
    """``num_gpu_blocks x block_size``: right for one group of full-attention layers only, so it comes last."""
    product = view.pool_in_tokens()
    return (
        product
        if isinstance(product, Missing)
        else view.reading("pool_tokens", product.value, f"{product.source} (holds for one full-attention group)")
    )


def _pool_bytes(view: View) -> Value:
    """``kv_cache_memory_bytes`` of one worker, times the workers whose total the log states.

    Once the blocks are overridden it is stale: the log alone tells.
    """
    stated = view.apply(LogFact(), "pool_bytes")
    if _is_asleep(view):
        return Missing("the engine sleeps (vllm:engine_sleep_state): its pool is not there")
    if isinstance(view.value("num_gpu_blocks_override"), Reading):
        if isinstance(stated, Reading):
            return stated
        return Missing(
            "num_gpu_blocks_override is set: kv_cache_memory_bytes does not describe the pool that is in use; the start-up log tells how many"
            " blocks the memory would have held, and the model's config.json how many bytes a block has"
        )
    source, text = view.label(INFO, "kv_cache_memory_bytes")
    if isinstance(text, Missing):
        return stated if isinstance(stated, Reading) else Missing(f"{text.reason}; {stated.reason}")
    if not text.isdecimal() or not int(text):
        return Missing(f"{source} is {clean(text, 40)!r}")
    workers = max(1, round(stated.number() / int(text))) if isinstance(stated, Reading) else 1
    return view.checked(
        "pool_bytes", float(int(text) * workers), f"{source} x {workers} workers (start-up log)" if workers > 1 else f"{source} (one worker)"
    )


def _kv_dtype(view: View) -> Value:
    """``cache_dtype``; where it is ``auto`` (the model's own dtype) the log's resolved type, if it states one."""
    source, text = view.label(INFO, "cache_dtype")
    if not isinstance(text, Missing) and text != "auto":
        return view.reading("kv_dtype", clean(text, 60), source)
    stated = view.apply(LogFact(), "kv_dtype")
    if isinstance(stated, Reading) and (stated.value != "auto" or isinstance(text, Missing)):
        return stated
    return text if isinstance(text, Missing) else view.reading("kv_dtype", text, f"{source} (the model's own dtype, not resolved)")


def _swapped(view: View) -> Value:
    if _is_v0(view):
        return view.apply(Series(("vllm:num_requests_swapped",)), "swapped")
    if view.raw.metrics is None:
        return Missing(view.raw.metrics_reason)
    return Missing("V1 never swaps: it preempts and computes again", cannot_happen=True)


# 0.9.2 to 0.11 show both names with one value: one is taken, they are never added.
_USAGE = Series(("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"))


QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total", "vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits")


def _prefix_queries(view: View) -> Value:
    return _in_tokens(view, "prefix_queries", Series(QUERIES))


def _prefix_hits(view: View) -> Value:
    return _in_tokens(view, "prefix_hits", Series(HITS))


def _in_tokens(view: View, name: str, series: Series) -> Value:
    """A prefix counter in tokens: releases whose HELP text speaks of blocks count those (0.8)."""
    told, size = view.apply(series, name), view.value("block_size")
    if isinstance(told, Missing) or view.samples is None or told.source.removesuffix("_total") not in view.samples.in_blocks:
        return told
    return size if isinstance(size, Missing) else view.reading(name, told.number() * size.number(), f"{told.source} (in blocks) x {size.source}")


def _finished(*reasons: str) -> Series:
    return Series(_SUCCESS, where={_REASON: reasons} if reasons else {}, over=_REASON)


def _remarks(view: View) -> list[str]:
    notes: list[str] = []
    if view.has(_ROUTER):
        notes.append(
            "this is vLLM's router: it counts the requests that it has sent on, and the pools are told by the engines' own pages (--kv-metrics-url)"
        )
    if any(_is_v0(part) for part in view.parts):
        notes.append("vLLM V0: no null block; a preempted request may be swapped to host memory")
    if any(_is_asleep(part) for part in view.parts):
        notes.append("an engine sleeps (vllm:engine_sleep_state): its KV pool is not there")
    ranks = next((len(part.peers) for part in view.parts if _is_sum(part)), 0)
    if ranks:
        notes.append(f"{ranks} engine ranks behind one front end: num_gpu_blocks is the sum over them, and kv_cache_size_tokens is per engine")
    models = next((part.models for part in view.parts if part.models), [])
    if models:
        notes.append(f"{len(models)} models on one engine: {', '.join(models)[:200]}; {INFO} names none of them")
    part = view.parts[0]
    notes += _pool_remarks(part)
    if any("pid" in row.labels for row in part.rows("vllm:kv_cache_usage_perc")[1]):
        notes.append("several API server processes: the highest of their usage gauges counts, the others are stale")
    return notes


def _pool_remarks(part: View) -> list[str]:
    notes: list[str] = []
    override = part.value("num_gpu_blocks_override")
    if isinstance(override, Reading):
        notes.append(f"num_gpu_blocks_override={override.value}: the pool is artificial")
    blocks, size = part.value("pool_blocks"), part.value("block_size")
    _, text = part.label(INFO, "kv_cache_size_tokens")
    if isinstance(blocks, Reading) and isinstance(size, Reading) and isinstance(text, str) and text.isdigit():
        product = int(blocks.number() * size.number())
        if product != int(text):
            notes.append(
                f"num_gpu_blocks x block_size = {product:,} tokens, kv_cache_size_tokens = {int(text):,}: several KV groups (window or state"
                " layers) or a max length that is no multiple of the block; the token figure holds for requests at max length only"
            )
    return notes


DIALECT = Dialect(
    name="vllm",
    title="vLLM",
    series_prefix="vllm",
    owned_by="vllm",
    counts="blocks",
    idle_cached_is_free=True,
    generates_by_step=True,
    rank_label="engine",
    server_labels=(*TARGET_LABELS, "server"),
    model_label="model_name",
    # What gateways and relabelling add: the rank of a data-parallel engine, and ranks of one engine that each tell the same (trap 7).
    # Triton's vLLM backend says model where vLLM says model_name.
    label_aliases={"engine": ("dp_rank",), "model_name": ("model",)},
    mirror_labels=frozenset({"tp_rank", "pp_rank"}),
    json_paths=(JsonPath("/v1/models"), JsonPath("/version")),
    # NVIDIA's NIM containers serve vLLM's series at the second.
    metrics_paths=("/metrics", "/v1/metrics"),
    version=JsonField("/version", ("version",), "text"),
    # A build of mid-2026 had them there (vLLM issue 44691).
    info_aliases={INFO: (("vllm:vllm_config_info", "cache_config_"),)},
    extra_series=(_SLEEP, *_V0_SIGNS),
    remarks=_remarks,
    since={
        "": "0.6",
        "pool_tokens": "0.22 (label; before: start-up log or blocks x block size)",
        "max_concurrency": "0.22 (label; before: start-up log)",
        "block_size": "0.6 (effective_attention_block_size: 0.22)",
        "usage": "0.6 (kv_cache_usage_perc: 0.9.2)",
        "prefix_queries": "0.8 (without gpu_: 0.9.2)",
        "prefix_hits": "0.8 (without gpu_: 0.9.2)",
        "swapped": "0.6, V0 only",
        "waiting_capacity": "0.30",
        "rejections": "0.31",
    },
    reads={
        "pool_blocks": first_of(
            Derived("vllm:cache_config_info{num_gpu_blocks}, over data-parallel ranks divided by their number", _pool_blocks, (INFO,)),
            LogFact(),
            Derived("start-up log's pool_tokens / block_size (0.8, where the label is None)", _pool_from_log),
            Derived(f"{_USED} + {_FREE} (V0)", _pool_from_gauges),
        ),
        "usable_blocks": Derived("pool_blocks - 1 null block (V0 keeps none)", _usable_blocks, (INFO, *_V0_SIGNS)),
        # Before 0.22 the label block_size is filled before hybrid models align it; the log's "Setting attention block size" then wins.
        "block_size": first_of(InfoLabel(INFO, "effective_attention_block_size"), LogFact(), InfoLabel(INFO, "block_size")),
        "pool_tokens": first_of(
            InfoLabel(INFO, "kv_cache_size_tokens"), LogFact(), Derived("pool_blocks x block_size (one full-attention group)", _pool_product)
        ),
        "pool_bytes": Derived(
            "vllm:cache_config_info{kv_cache_memory_bytes}, unless num_gpu_blocks_override is set; else start-up log", _pool_bytes, (INFO,)
        ),
        "weights_bytes": absent("vLLM states its weights in the start-up log of each worker only"),
        "sliding_window": InfoLabel(INFO, "sliding_window"),
        "max_concurrency": first_of(InfoLabel(INFO, "kv_cache_max_concurrency"), LogFact()),
        "max_model_len": first_of(Derived("/v1/models data[].max_model_len of the base model", View.listed_length), LogFact()),
        "max_num_seqs": first_of(LogFact(), absent("vLLM exports no max_num_seqs; only the start-up log may state it")),
        "kv_dtype": Derived("vllm:cache_config_info{cache_dtype}; where it is auto: start-up log", _kv_dtype, (INFO,)),
        "prefix_caching": first_of(InfoLabel(INFO, "enable_prefix_caching", "flag"), LogFact()),
        "gpu_memory_utilization": first_of(InfoLabel(INFO, "gpu_memory_utilization"), LogFact()),
        "num_gpu_blocks_override": InfoLabel(INFO, "num_gpu_blocks_override"),
        "used_blocks": Derived(f"{_USED} (V0); else round(usage x usable_blocks)", _used_blocks, (_SLEEP,)),
        "free_blocks": Derived(f"{_FREE} (V0); else usable_blocks - used_blocks", _free_blocks, (_SLEEP,)),
        "used_tokens": absent("vLLM counts blocks: see used_blocks"),
        "free_tokens": absent("vLLM counts blocks: see free_blocks"),
        "usage": Derived(f"{_USAGE.describe()}; else used_blocks / (used + free) (V0)", _usage, _USAGE.names),
        "running": Series(("vllm:num_requests_running",)),
        "waiting": Series(("vllm:num_requests_waiting",)),
        "waiting_capacity": Series(("vllm:num_requests_waiting_by_reason",), where={("reason",): ("capacity",)}, hint="needs vLLM 0.30 or newer"),
        "swapped": Derived("vllm:num_requests_swapped; V1 cannot swap", _swapped, _V0_SIGNS),
        "preemptions": Series(("vllm:num_preemptions_total", "vllm:num_preemptions"), hint="every vLLM shows it from its start on"),
        "rejections": Series(
            ("vllm:admission_rejections_total", "vllm:admission_rejections"), over=("reason",), hint="needs vLLM 0.31 or newer and a queue limit"
        ),
        "prefix_queries": Derived(f"{Series(QUERIES).describe()} (0.8 counts blocks: x block_size)", _prefix_queries, QUERIES),
        "prefix_hits": Derived(f"{Series(HITS).describe()} (0.8 counts blocks: x block_size)", _prefix_hits, HITS),
        "prompt_tokens": Series(("vllm:prompt_tokens_total", "vllm:prompt_tokens")),
        "generation_tokens": Series(("vllm:generation_tokens_total", "vllm:generation_tokens")),
        "finished": _finished(),
        "finished_stop": _finished("stop"),
        "finished_length": _finished("length"),
        "finished_abort": _finished("abort"),
        "finished_error": _finished("error"),
        # Counters are created when the engine starts. V0 and several API server processes show no _created.
        "start_time": Series(
            ("vllm:num_preemptions_created", "vllm:generation_tokens_created", "vllm:prompt_tokens_created", "process_start_time_seconds")
        ),
    },
)
