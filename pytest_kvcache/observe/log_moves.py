"""Two start-up logs beside each other: of two starts, or of two parts of one server, and what moved between the starts.

The figures that an engine prints moved between releases without the memory: what they mean together is said with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pytest_kvcache import units
from pytest_kvcache.quantities import QUANTITIES, Reading
from pytest_kvcache.server.startlog import StartLog

_POOL = ("pool_blocks", "pool_tokens")
_SHOWN = (
    "pool_blocks",
    "block_size",
    "pool_tokens",
    "pool_bytes",
    "max_concurrency",
    "max_model_len",
    "max_num_seqs",
    "kv_dtype",
    "gpu_memory_utilization",
)
# What all that state a pool of one server state alike; a part that has no pool yet may state what was asked for.
_ALIKE = ("max_model_len", "gpu_memory_utilization")
# Ranks of one engine see slightly different memory; two starts that differ by less are told apart by nothing.
_SAME = 0.02
_FACTORS = (2, 4, 8, 16)


def number_of(log: StartLog, name: str) -> float | None:
    """Return a quantity that a log states as a number; None where it states none."""
    value = log.facts.get(name)
    return value.number() if isinstance(value, Reading) and not isinstance(value.value, (str, bool)) else None


def are_two_starts(logs: Sequence[StartLog], joined: StartLog) -> bool:
    """Say whether logs, read apart and ``joined`` as one text, are of starts that cannot have been one server.

    Parts of one server state different things, or pools of its data-parallel ranks, which the joined text adds.
    """
    own = [log for log in logs if log.engine == joined.engine]
    if len({log.version for log in own if log.version}) > 1:
        return True
    pooled = [log for log in own if _has_pool(log)]
    if any(len({number for log in pooled if (number := number_of(log, name)) is not None}) > 1 for name in _ALIKE):
        return True
    for name in _POOL:
        stated = [number for log in pooled if (number := number_of(log, name)) is not None]
        if len(stated) > 1 and max(stated) > (1 + _SAME) * min(stated):
            return (number_of(joined, name) or 0.0) <= max(stated)
    return False


def started(logs: Sequence[StartLog]) -> list[int]:
    """Return the numbers of the logs that are starts: those that state a pool; where fewer than two do (one failed), those that state anything."""
    pools = [number for number, log in enumerate(logs) if _has_pool(log)]
    return pools if len(pools) > 1 else [number for number, log in enumerate(logs) if log.version or log.facts]


def moves(names: Sequence[str], logs: Sequence[StartLog]) -> list[str]:
    """Return what is told of two starts: that the last one counts, what moved from one to the next, and what that means."""
    told = started(logs)
    notes = [f"{len(told)} start-up logs that are not of one start: the figures are those of {names[told[-1]]}, the last one"]
    for first, second in pairwise(told):
        before, after = logs[first], logs[second]
        changed = [text for name in _SHOWN if (text := _change(name, before, after))]
        versions = f" ({before.version} -> {after.version})" if before.version and after.version and before.version != after.version else ""
        notes.append(f"from {names[first]} to {names[second]}{versions}: {'; '.join(changed) or 'nothing that is stated moved'}")
        notes += _meaning(before, after)
    return notes


def _has_pool(log: StartLog) -> bool:
    return any(number_of(log, name) is not None for name in _POOL)


def _change(name: str, before: StartLog, after: StartLog) -> str:
    was, now = before.facts.get(name), after.facts.get(name)
    if not isinstance(was, Reading) or not isinstance(now, Reading) or was.value == now.value:
        return ""
    unit = QUANTITIES[name].unit
    factor = _factor(name, before, after)
    return f"{name} {units.show(was.value, unit)} -> {units.show(now.value, unit)}" + (f" (x {factor:.3g})" if factor else "")


def _factor(name: str, before: StartLog, after: StartLog) -> float | None:
    was, now = number_of(before, name), number_of(after, name)
    return now / was if was and now else None


def _meaning(before: StartLog, after: StartLog) -> list[str]:
    notes: list[str] = []
    memory = _factor("pool_bytes", before, after)
    room = _factor("pool_blocks", before, after) or _factor("pool_tokens", before, after)
    longest = _factor("max_model_len", before, after)
    if room is None or abs(room - 1) <= _SAME:
        return notes
    whole = next((n for n in _FACTORS if abs(max(room, 1 / room) / n - 1) < 0.005), None)
    if whole is not None and (memory is None or abs(memory - 1) <= _SAME):
        notes.append(
            f"a factor of {whole} is seldom memory: look at the KV type, at heads that tensor parallelism shards or does not, and at the block size"
        )
    if memory is not None and abs(memory - 1) <= _SAME:
        notes.append(
            "the memory of the pool is the same: what a token costs moved, or what the engine calls a token (for window and state layers vLLM counts"
            " in requests of the max length from 0.21 on). Compare block counts or bytes, or press both with the same load"
        )
    elif memory is not None and abs(memory / room - 1) <= _SAME:
        notes.append(
            "tokens and memory moved by the same factor: a token costs what it did, and the pool got another share of the card (profile of activations"
            " and graphs, other processes, another share asked for)"
        )
    elif memory is not None:
        notes.append("tokens and memory moved by different factors: a token does not cost what it did (KV type, layers, window, block size)")
    else:
        notes.append(
            "neither log states the memory of the pool: its line (Available KV cache memory) tells whether memory or the price of a token moved"
        )
    if longest is not None and abs(longest - 1) > _SAME:
        notes.append("the max length moved too, and with it the token figure of models with window or state layers: the same memory reads otherwise")
    return notes
