"""What the figures of an inspection mean together: how many such requests fit, whether the longest one does, what 0 % does not say."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pytest_kvcache.quantities import Reading, Value

_FULL = 0.9


def size_notes(values: Mapping[str, Value], engine: str = "", idle_counts_as_used: bool = False) -> list[str]:
    """Return notes on the quantities of one engine, or of several with their pools added. Never raises.

    ``idle_counts_as_used`` says that the engine's usage holds cached KV that nobody uses: what a request holds cannot be told from it.
    """
    told = [_longest(values), _seats(values), _idle(values)]
    if not idle_counts_as_used:
        told.insert(0, _fit(values))
    if engine in {"vllm", "ray_vllm"}:
        told.append(_recomputed(values))
    return [note for note in told if note]


def _number(values: Mapping[str, Value], name: str) -> float | None:
    value = values.get(name)
    return value.number() if isinstance(value, Reading) and not isinstance(value.value, str) else None


def _fit(values: Mapping[str, Value]) -> str:
    """A pool is spent by requests and not by tokens: what each holds now, windows, states and padding included, is its price."""
    running, usage = _number(values, "running"), _number(values, "usage")
    if not running or not usage:
        return ""
    for used_name, pool_name, unit in (("used_blocks", "usable_blocks", "blocks"), ("used_tokens", "pool_tokens", "tokens")):
        used, pool = _number(values, used_name), _number(values, pool_name)
        if used and pool:
            mean = used / running
            fit = math.floor(pool / mean + 1e-9)
            return f"{_each(running)} {mean:,.0f} {unit}{_average(running)}: {fit:,} such would fill the pool"
    fit = math.floor(running / usage + 1e-9)
    return f"{_each(running)} {usage / running:.1%} of the pool{_average(running)}: no more than {fit:,} such fit"


def _each(running: float) -> str:
    return "the one running request holds" if running == 1 else f"each of the {running:,.0f} running requests holds"


def _average(running: float) -> str:
    return "" if running == 1 else " on average"


def _longest(values: Mapping[str, Value]) -> str:
    """The longest request that is accepted may need more than the pool serves: it then waits for ever (or is refused at once)."""
    length, tokens, concurrency = (_number(values, name) for name in ("max_model_len", "pool_tokens", "max_concurrency"))
    blocks, usable, size = (_number(values, name) for name in ("pool_blocks", "usable_blocks", "block_size"))
    if length is None:
        return ""
    if blocks and usable is not None and size and tokens == blocks * size and math.ceil(length / size) > usable and (concurrency or 0) < 2:
        return (
            f"one request of the max length {length:,.0f} needs {math.ceil(length / size):,} blocks and {usable:,.0f} can be had: it would be accepted"
            " and never finish"
        )
    if tokens is not None and blocks is None and concurrency is None and length > tokens:
        return f"the pool has {tokens:,.0f} tokens and the max length is {length:,.0f}: a request can be no longer than the pool"
    return ""


def _seats(values: Mapping[str, Value]) -> str:
    """Requests may wait for a seat while the pool has room: more memory for the pool then changes nothing."""
    running, seats, waiting, usage = (_number(values, name) for name in ("running", "max_num_seqs", "waiting", "usage"))
    if not seats or running is None or running < seats or not waiting or usage is None or usage >= _FULL:
        return ""
    return f"all {seats:,.0f} seats are taken and {waiting:,.0f} wait while the pool is {usage:.1%} used: the seats bind, and not the KV cache"


def _idle(values: Mapping[str, Value]) -> str:
    usage, hits = _number(values, "usage"), _number(values, "prefix_hits")
    if usage == 0 and hits:
        return "usage 0 % says nothing against the prefix cache: what it keeps and nobody uses counts as free"
    return ""


def _recomputed(values: Mapping[str, Value]) -> str:
    preemptions, hits = _number(values, "preemptions"), _number(values, "prefix_hits")
    if preemptions and hits and _number(values, "waiting_capacity") is None:
        return f"{preemptions:,.0f} preemptions: in older versions requests that read their own blocks again count as prefix hits"
    return ""
