"""llama.cpp's server: /slots, /props, /v1/models, and /metrics where it was started with ``--metrics``.

Its KV cache is a pool of cells, one token each; it has no blocks. Unified slots share one pool of ``n_ctx`` cells and each reports
the whole ``n_ctx``; split slots have a pool of their own each. No endpoint tells which it is: the start-up log does.
Source: llama.cpp b11434, ``tools/server/server-task.cpp`` and ``server-context.cpp``; fields seen on builds of November 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_kvcache.engines._dialect import Derived, Dialect, JsonField, JsonPath, LogFact, Series, absent, cannot_happen, first_of
from pytest_kvcache.engines._reading import View
from pytest_kvcache.quantities import Missing, Reading, Value

_NO_BLOCKS = cannot_happen("llama.cpp counts tokens (cells), not blocks")
_NOT_COUNTED = absent("llama.cpp does not count finished requests")
_METRICS = "needs the server's --metrics flag"
_PROMPT = "llamacpp:prompt_tokens_total"
_CACHED = "llamacpp:prompt_tokens_cached_total"
_SIX_DIGITS = 1e6
_HELD = "sum over processing /slots of n_prompt_tokens, at most what its own task stored (n_prompt_tokens_cache + _processed + n_decoded - 1)"


def _slots(view: View) -> list[dict[str, Any]] | Missing:
    body = view.json("/slots")
    if isinstance(body, Missing):
        return body
    slots = [slot for slot in body if isinstance(slot, dict)] if isinstance(body, list) else []
    return slots or Missing("/slots lists no slot")


def _whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _slot_contexts(view: View) -> list[int] | Missing:
    slots = _slots(view)
    if isinstance(slots, Missing):
        return slots
    contexts = [n for slot in slots if (n := _whole_number(slot.get("n_ctx")))]
    return contexts if len(contexts) == len(slots) else Missing("/slots states no n_ctx")


def _split(view: View) -> bool | None:
    """Say whether each slot has a pool of its own: the log's cells are then the sum of the slots. None where that is not told."""
    stated, contexts = view.raw.log_facts.get("pool_tokens"), _slot_contexts(view)
    if not isinstance(stated, Reading) or isinstance(contexts, Missing) or len(contexts) < 2:
        return None
    return stated.number() >= sum(contexts)


def _pool_tokens(view: View) -> Value:
    stated = view.apply(LogFact(), "pool_tokens")
    if isinstance(stated, Reading):
        return stated
    contexts = _slot_contexts(view)
    if isinstance(contexts, Missing):
        return Missing(f"{stated.reason}; {contexts.reason}")
    if len(contexts) == 1:
        return view.reading("pool_tokens", contexts[0], "/slots n_ctx of the only slot")
    return Missing(
        f"{len(contexts)} slots of {max(contexts)} tokens share one pool of {max(contexts)} (unified) or have {sum(contexts)} together (split);"
        " only the start-up log tells: launch the server with --kv-launch, or start it with one slot (-np 1)"
    )


def _is_busy(slot: Mapping[str, Any]) -> bool | None:
    """Say whether a slot serves a request: by ``is_processing``, by the ``state`` of builds before it, and None where neither is told."""
    flag, state = slot.get("is_processing"), _whole_number(slot.get("state"))
    if isinstance(flag, bool):
        return flag
    return None if state is None else state > 0


def _held(slot: Mapping[str, Any]) -> int | None:
    """Tokens that a slot holds for the request it serves now; 0 for an idle slot, None where this build does not tell.

    A slot that has just been given a request still counts the tokens of its last one, until the prompt's first batch is its turn: those
    are as free as those of an idle slot. What its own task stored bounds them: reused prefix, prompt, and output without the token drawn
    last, which n_prompt_tokens may count and the cache does not hold (seen: 2,049 tokens by n_prompt_tokens in a full pool of 2,048).
    """
    busy = _is_busy(slot)
    if not busy:
        return None if busy is None else 0
    tokens = _whole_number(slot.get("n_prompt_tokens"))
    following = slot.get("next_token")
    following = following[0] if isinstance(following, list) and following else following
    drawn = _whole_number(following.get("n_decoded")) if isinstance(following, dict) else None
    reused, prompt = (_whole_number(slot.get(f"n_prompt_tokens_{part}")) for part in ("cache", "processed"))
    if tokens is None or reused is None or prompt is None or drawn is None:
        return tokens
    return min(tokens, reused + prompt + max(drawn - 1, 0))


def _used_tokens(view: View) -> Value:
    """Tokens in the slots that serve a request now. A slot keeps its tokens after the end; the next request takes them over."""
    slots = _slots(view)
    if isinstance(slots, Missing):
        return slots
    held = [_held(slot) for slot in slots]
    if None in held:
        return Missing("/slots of this build states no n_prompt_tokens, or no is_processing: what a slot holds is not told")
    return view.reading("used_tokens", sum(tokens for tokens in held if tokens is not None), _HELD)


def _pool_and_used(view: View) -> tuple[int, int] | Missing:
    pool, used = view.value("pool_tokens"), view.value("used_tokens")
    if isinstance(pool, Missing):
        return pool
    if isinstance(used, Missing):
        return used
    return int(pool.number()), int(used.number())


def _free_tokens(view: View) -> Value:
    both = _pool_and_used(view)
    if isinstance(both, Missing):
        return both
    pool, used = both
    return view.checked("free_tokens", pool - used, "pool_tokens - used_tokens")


def _usage(view: View) -> Value:
    both = _pool_and_used(view)
    if isinstance(both, Missing):
        return both
    pool, used = both
    return view.checked("usage", used / pool, "used_tokens / pool_tokens") if pool else Missing("the pool has no cell")


def _busy_slots(view: View) -> Value:
    slots = _slots(view)
    if isinstance(slots, Missing):
        return slots
    busy = [_is_busy(slot) for slot in slots]
    if None in busy:
        return Missing("/slots does not tell of every slot whether it is busy")
    return view.reading("running", busy.count(True), "busy slots of /slots")


def _slot_count(view: View) -> Value:
    slots = _slots(view)
    return slots if isinstance(slots, Missing) else view.reading("max_num_seqs", len(slots), "number of /slots")


def _least_context(view: View) -> Value:
    contexts = _slot_contexts(view)
    return contexts if isinstance(contexts, Missing) else view.reading("max_model_len", min(contexts), "least n_ctx of /slots")


def _looked_up(view: View) -> Value:
    parts = [view.apply(Series((name,), hint=_METRICS), "prefix_queries") for name in (_PROMPT, _CACHED)]
    for part in parts:
        if isinstance(part, Missing):
            return part
    total = sum(part.number() for part in parts if isinstance(part, Reading))
    return view.reading("prefix_queries", total, f"{_PROMPT} + {_CACHED}")


def _remarks(view: View) -> list[str]:
    notes: list[str] = []
    slots, contexts = _slots(view), _slot_contexts(view)
    if not isinstance(slots, Missing) and not isinstance(contexts, Missing) and len(contexts) > 1 and _split(view):
        held = [(_held(slot) or 0, n) for slot, n in zip(slots, contexts, strict=True)]
        used, size = max(held, key=lambda pair: pair[0] / pair[1])
        notes.append(
            f"split slots: each of the {len(contexts)} has a pool of its own, and a request is bound by its slot;"
            f" the fullest holds {used} of {size} tokens ({size - used} free)"
        )
    if view.has("llamacpp:kv_cache_usage_ratio", "llamacpp:kv_cache_tokens"):
        notes.append("a build of before June 2025: its KV gauges count the tokens that idle slots keep as used")
    if view.raw.metrics is not None:
        rows = [(name, row.value) for name in view.dialect.families for row in view.rows(name)[1]]
        if any(value >= _SIX_DIGITS for _, value in rows):
            notes.append("llama.cpp prints six significant digits: counters above 999,999 are rounded, and so are their differences")
        notes.append("reading /metrics resets llama.cpp's own rate gauges (prompt_tokens_seconds, predicted_tokens_seconds) for every other reader")
    return notes


DIALECT = Dialect(
    name="llamacpp",
    title="llama.cpp",
    series_prefix="llamacpp",
    owned_by="llamacpp",
    counts="tokens",
    # A slot keeps the tokens of its last request, and the next request takes them over: they hold nobody up.
    idle_cached_is_free=True,
    shares_prefixes=False,  # a slot reuses what it held itself; cells of other slots are never counted once
    full_errors=("Context size has been exceeded",),
    json_paths=(
        JsonPath("/slots", per_sample=True, sign=("id", "n_ctx", "is_processing|state")),
        JsonPath("/props", sign=("default_generation_settings", "total_slots")),
        JsonPath("/v1/models"),
    ),
    version=JsonField("/props", ("build_info",), "text"),
    remarks=_remarks,
    since={"": "b5400 (n_prompt_tokens of /slots: 2025)"},
    reads={
        "pool_blocks": _NO_BLOCKS,
        "usable_blocks": _NO_BLOCKS,
        "block_size": _NO_BLOCKS,
        "used_blocks": _NO_BLOCKS,
        "free_blocks": _NO_BLOCKS,
        "num_gpu_blocks_override": _NO_BLOCKS,
        "pool_tokens": Derived("start-up log: cells of all streams; else n_ctx of /slots, where there is one slot", _pool_tokens),
        "pool_bytes": first_of(LogFact(), absent("llama.cpp states the pool's bytes in its start-up log only")),
        "weights_bytes": JsonField("/v1/models", ("data", 0, "meta", "size")),
        "sliding_window": absent("llama.cpp tells no window: its log prints a cache for such layers"),
        "max_concurrency": absent("llama.cpp gives no such figure: its seats are its slots"),
        "max_model_len": first_of(
            JsonField("/props", ("default_generation_settings", "n_ctx")),
            Derived("least n_ctx of /slots", _least_context),
            JsonField("/v1/models", ("data", 0, "meta", "n_ctx")),
            LogFact(),
        ),
        "max_num_seqs": first_of(JsonField("/props", ("total_slots",)), Derived("number of /slots", _slot_count), LogFact()),
        "kv_dtype": first_of(LogFact(), absent("llama.cpp states the KV type in its start-up log only")),
        "prefix_caching": absent("each request asks for it (cache_prompt); the server's default is not told"),
        "gpu_memory_utilization": cannot_happen("llama.cpp sizes its pool by tokens, not by a share of the card"),
        # Builds until May 2025 (PR 13660) had gauges, in which the tokens of idle slots counted as used.
        "used_tokens": first_of(Derived(_HELD, _used_tokens), Series(("llamacpp:kv_cache_tokens",))),
        "free_tokens": Derived("pool_tokens - used_tokens", _free_tokens),
        "usage": first_of(Derived("used_tokens / pool_tokens", _usage), Series(("llamacpp:kv_cache_usage_ratio",))),
        # /slots first: running and used_tokens are then of one moment.
        "running": first_of(Derived("busy slots of /slots", _busy_slots), Series(("llamacpp:requests_processing",), hint=_METRICS)),
        "waiting": Series(("llamacpp:requests_deferred",), hint=_METRICS),
        "waiting_capacity": Series(("llamacpp:requests_deferred",), hint=_METRICS),
        "swapped": cannot_happen("llama.cpp never swaps a request out"),
        "preemptions": cannot_happen("llama.cpp never preempts: when a shared pool is full in mid-decode, running requests end with HTTP 500"),
        "rejections": cannot_happen("llama.cpp's queue has no limit: it defers and never refuses for load"),
        "prefix_queries": Derived(f"{_PROMPT} + {_CACHED}", _looked_up, (_PROMPT, _CACHED)),
        "prefix_hits": Series((_CACHED,), hint=_METRICS),
        "prompt_tokens": Series((_PROMPT,), hint=_METRICS),
        "generation_tokens": Series(("llamacpp:tokens_predicted_total",), hint=_METRICS),
        "finished": _NOT_COUNTED,
        "finished_stop": _NOT_COUNTED,
        "finished_length": _NOT_COUNTED,
        "finished_abort": _NOT_COUNTED,
        "finished_error": _NOT_COUNTED,
        # Seen on a running server: the header Process-Start-Time-Unix holds microseconds of the machine's monotonic clock.
        "start_time": absent("llama.cpp's Process-Start-Time-Unix header holds microseconds since the machine started, not Unix time"),
    },
)
