"""What findings look at beside the measurements: what requests waited for, whether gauges move with tokens, whose server it is, how a pool rests.

Each is a named quantity (quantities.KNOWN), drawn from what the other modules measured; what cannot be told is Missing with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.holding import Footprint, planned_blocks
from pytest_kvcache.analysis.ledger import GPU, CardLedger
from pytest_kvcache.analysis.levels import Levels, Window, pool_of
from pytest_kvcache.analysis.prefixes import Prefixes
from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.analysis.series import Series
from pytest_kvcache.analysis.standing import FULL, standing
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import RunRecord

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

FEWEST_LOOKS = 10
"""A share of fewer looks at a busy server is not told: of ten its standard error is 16 points at most (half a share over the root of ten)."""
_STEADY_S = 0.25
_STORM = 50  # so many are set against who ran at once, where nobody tells how many requests there were
_NAMES = ("bound.seats", "bound.kv", "bound.budget", "bound.free", "bound.deferred")


@dataclass(frozen=True)
class Seen:
    """What the signals are drawn from: everything that ``analyse`` has already read and measured of one Run."""

    record: RunRecord
    values: Mapping[str, Value]
    series: Sequence[Series]
    rows: Rows
    window: Window
    levels: Levels
    shape: Footprint | Missing
    ledgers: Sequence[CardLedger]
    prefixes: Prefixes


def signals(seen: Seen) -> dict[str, Value]:
    """Return the derived quantities by their names in ``quantities.KNOWN``."""
    found: dict[str, Value] = {}
    found["seats.used"] = _ratio(seen.values["running.peak"], seen.values.get("max_num_seqs"), "most running over the seats")
    found["length.mean_over_max"] = _ratio(seen.values["length.mean"], seen.values["length.max"], "mean length over the longest")
    found.update(_bound(seen))
    found["looks.busy"] = _busy_looks(seen)
    found.update(standing(seen))
    found.update(_counted(seen))
    found.update(_prefix(seen))
    found.update(_cards(seen.ledgers))
    found.update(_room(seen))
    found.update(_climb(seen, found["requests.finished"]))
    return found


def _ratio(value: Value, over: Value | None, source: str) -> Value:
    if isinstance(value, Missing):
        return value
    if not isinstance(over, Reading) or isinstance(over.value, str):
        return over if isinstance(over, Missing) else Missing(f"{source}: not told")
    return Reading(value.number() / over.number(), "ratio", source) if over.number() > 0 else Missing(f"{source}: it is 0")


def _of_server(seen: Seen, number: int, name: str) -> float | None:
    """Return what one server states of itself."""
    if number >= len(seen.record.before):
        return None
    value = seen.record.before[number].value(name)
    return value.number() if isinstance(value, Reading) and not isinstance(value.value, str) else None


def _bound(seen: Seen) -> dict[str, Value]:
    """Return for how much of the busy time requests waited for a seat, for blocks, with both free, or for something else; of several servers the highest.

    ``bound.free`` stands for seats and budget where the seats are not told. Fewer than ``FEWEST_LOOKS`` at a busy server tell no share.
    """
    import numpy as np

    shares: dict[str, list[float]] = {name: [] for name in _NAMES}
    lacking: dict[str, Missing] = {}
    for number, one in enumerate(seen.series):
        pressed = (one.wall_s >= seen.window.since_s) & (one.wall_s <= seen.window.until_s)
        running, waiting, usage = one.column("running")[pressed], one.column("waiting")[pressed], one.column("usage")[pressed]
        known = np.isfinite(running) & np.isfinite(waiting)
        busy = known & ((running > 0) | (waiting > 0))
        if not known.any():
            lacking.update(dict.fromkeys(_NAMES, Missing("the server does not tell running and waiting requests together")))
            continue
        if not busy.any():
            for name in _NAMES:
                shares[name].append(0.0)
            continue
        count = float(busy.sum())
        if (looks := _looks(seen, busy, one.wall_s[pressed])) < FEWEST_LOOKS:
            few = Missing(f"{looks} looks at a busy server are too few to tell a share: {FEWEST_LOOKS} are needed")
            lacking.update(dict.fromkeys(_NAMES, few))
            continue
        queued = busy & (waiting > 0)
        capacity = one.column("waiting_capacity")[pressed]
        if np.isfinite(capacity[busy]).any():
            shares["bound.deferred"].append(float(_lasting(queued & (capacity < waiting), one.wall_s[pressed]).sum()) / count)
        else:
            lacking["bound.deferred"] = Missing("the server does not tell why requests wait")
        queued &= ~(np.isfinite(capacity) & (capacity <= 0))
        full = _full(seen, number, one, pressed, usage)
        if np.isfinite(usage[queued]).any() or not queued.any():
            shares["bound.kv"].append(float((queued & full).sum()) / count)
        else:
            lacking["bound.kv"] = Missing("the server does not tell its usage")
        seats = _of_server(seen, number, "max_num_seqs")
        if seats is None:
            reason = "the server does not tell how many requests it runs at once (max_num_seqs): its start-up log does"
            lacking["bound.seats"] = lacking["bound.budget"] = Missing(reason)
            beside = _lasting(queued & (running > 0) & ~full, one.wall_s[pressed])
            shares["bound.free"].append(float(beside.sum()) / count)
            continue
        lacking.setdefault("bound.free", Missing("the seats are told: bound.seats and bound.budget say more", cannot_happen=True))
        seated = running >= seats
        shares["bound.seats"].append(float((queued & seated & ~full).sum()) / count)
        # a request that comes while a step runs waits for its end: only waiting that outlasts a step is a bound
        lasting = _lasting(queued & (running > 0) & ~seated & ~full, one.wall_s[pressed])
        shares["bound.budget"].append(float(lasting.sum()) / count)
    none = Missing("no server was read inside the window")
    return {
        name: Reading(max(shares[name]), "ratio", "share of the samples in which the server was busy, polled")
        if shares[name]
        else lacking.get(name, none)
        for name in _NAMES
    }


def _busy_looks(seen: Seen) -> Value:
    """Return on how many looks the averages over the level rest."""
    import numpy as np

    pressed = (seen.levels.wall_s >= seen.window.since_s) & (seen.levels.wall_s <= seen.window.until_s)
    columns = [seen.levels.columns[name][pressed] for name in (f"used_{seen.levels.counts or 'blocks'}", "usage")]
    column = next((one for one in columns if np.isfinite(one).any()), None)
    if column is None:
        return Missing("the server does not tell its level")
    count = _looks(seen, np.nan_to_num(column) > 0, seen.levels.wall_s[pressed])
    if count < FEWEST_LOOKS:
        return Missing(f"{count} looks at a level are too few for an average: {FEWEST_LOOKS} are needed")
    return Reading(float(count), "looks", "telemetry.jsonl: samples inside the load with something held")


def _looks(seen: Seen, mask: Any, wall_s: Floats) -> int:
    """Return how many looks a mask holds; of an engine whose gauges are set seldom two that saw one setting are one."""
    import numpy as np

    dialect = DIALECTS.get(seen.record.engine)
    count = int(mask.sum())
    if dialect is None or not dialect.gauges_every_s or len(wall_s) < 2:
        return count
    return min(count, int(count * float(np.median(np.diff(wall_s))) / dialect.gauges_every_s))


def _full(seen: Seen, number: int, one: Series, pressed: Any, usage: Floats) -> Any:
    """Return at which samples the pool has no room for the longest prompt that was sent, or stands at ``FULL``."""
    import numpy as np

    full = np.nan_to_num(usage) >= FULL
    longest = seen.values.get("prompt_length.max")
    free = one.column("free_blocks" if seen.levels.counts == "blocks" else "free_tokens")[pressed]
    if isinstance(longest, Reading) and isinstance(seen.shape, Footprint):
        need = float(seen.shape.blocks(np.array([longest.number()]))[0])
        full |= np.isfinite(free) & (free < need)
    return full


def _lasting(mask: Any, wall_s: Floats) -> Any:
    """Return the mask without stretches shorter than ``_STEADY_S``."""
    import numpy as np

    kept = mask.copy()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        if wall_s[stop - 1] - wall_s[start] < _STEADY_S:
            kept[start:stop] = False
    return kept


def _counted(seen: Seen) -> dict[str, Value]:
    counters = {name: growth.value for name, growth in seen.levels.counters.items()}
    finished, sent = counters["finished"], seen.values["requests.sent"]
    found: dict[str, Value] = {"requests.finished": finished}
    base = finished if isinstance(finished, Reading) and finished.number() else sent
    back = seen.values["preemptions"]
    if isinstance(base, Reading) and base.number():
        found["preemptions.per_request"] = _ratio(back, base, "preemptions over requests that finished or were sent")
    elif isinstance(back, Reading) and back.number() >= _STORM:
        found["preemptions.per_request"] = _ratio(
            back, seen.values["running.peak"], "preemptions over the most that ran at once: who finished is not told"
        )
    else:
        found["preemptions.per_request"] = base if isinstance(base, Missing) else Missing("no request finished or was sent")
    ours, generated = seen.values["output_tokens"], counters["generation_tokens"]
    if not len(seen.rows) or not isinstance(ours, Reading) or not ours.number():
        found["endpoint.seen"] = Missing("no answer of ours has counted tokens")
    else:
        found["endpoint.seen"] = _ratio(generated, ours, "tokens that the server counted over those that we received")
    took = seen.window.until_s - seen.window.since_s
    found["served.throughput"] = (
        Reading(generated.number() / took, "tokens/s", "the server's own counter over the window")
        if isinstance(generated, Reading) and took > 0
        else generated
        if isinstance(generated, Missing)
        else Missing("the window has no length")
    )
    return found


def _prefix(seen: Seen) -> dict[str, Value]:
    caching, texts = seen.prefixes.caching, seen.prefixes.texts
    would, saved = seen.values["prefix.would_save"], seen.values["prefix.saved"]
    off = caching is False
    if off and isinstance(saved, Missing):
        saved = Reading(0.0, "tokens", "prefix caching is off")
    return {
        "prefix.on": Missing("the server does not tell whether prefix caching is on")
        if caching is None
        else Reading(float(caching), "ratio", "prefix_caching"),
        "prefix.longest": Reading(float(max(text.tokens for text in texts)), "tokens", "our request log: prefix_tokens")
        if texts
        else (would if isinstance(would, Missing) else Reading(0.0, "tokens", "our request log: no prompt repeats another")),
        "prefix.used": _ratio(saved, would, "tokens that the cache gave over those that our prompts repeat")
        if isinstance(would, Missing) or would.number()
        else Missing("our prompts repeat nothing"),
    }


def _cards(ledgers: Sequence[CardLedger]) -> dict[str, Value]:
    """Return what lies on the worst card of this server beside it; a machine's own memory has other users and no share of ours."""
    cards = [one for one in ledgers if one.kind == GPU and one.server.bytes != 0]
    none = Missing("no card of this server was seen")
    others = [one for one in cards if one.others.bytes is not None]
    free = [one for one in cards if one.free.bytes is not None and one.total.bytes]
    foreign = max(others, key=lambda one: one.others.bytes or 0.0, default=None)
    tight = min(free, key=lambda one: (one.free.bytes or 0.0) / (one.total.bytes or 1.0), default=None)
    why = next((one.others.value for one in cards if isinstance(one.others.value, Missing)), none)
    left: Value = none
    if tight is not None:
        left = Reading((tight.free.bytes or 0.0) / (tight.total.bytes or 1.0), "ratio", f"free of {tight.name}")
    elif stated := [share for one in ledgers if (share := _left_by_share(one)) is not None]:
        left = Reading(min(stated), "ratio", "what the share leaves of the card, less what the log states on top of it: an upper bound")
    return {
        "card.other_bytes": Reading(foreign.others.bytes or 0.0, "bytes", foreign.name) if foreign is not None else why,
        "card.free_share": left,
    }


def _left_by_share(one: CardLedger) -> float | None:
    """Return the share of a card that its server leaves free by what the log states, where nobody measured it: the card is its budget over its share."""
    if (
        isinstance(one.budget, Missing)
        or isinstance(one.over_budget, Missing)
        or isinstance(one.utilization, Missing)
        or not one.utilization.number()
    ):
        return None
    total = one.budget.number() / one.utilization.number()
    return max(total - one.budget.number() - one.over_budget.number(), 0.0) / total if total > 0 else None


def _room(seen: Seen) -> dict[str, Value]:
    """Return how many requests of the longest length fit into what usual traffic leaves, and what one running request holds."""
    import numpy as np

    rooms: list[float] = []
    fits: list[float] = []
    reason: Missing | None = seen.shape if isinstance(seen.shape, Missing) else None
    for number, one in enumerate(seen.series):
        pressed = (one.wall_s >= seen.window.since_s) & (one.wall_s <= seen.window.until_s)
        usage = one.column("usage")[pressed]
        pool = pool_of(seen.record.before[number]) if number < len(seen.record.before) else None
        longest = _of_server(seen, number, "max_model_len")
        planned = float(planned_blocks(seen.record.before[number])) if number < len(seen.record.before) else 0.0
        if not (isinstance(seen.shape, Footprint) or planned > 0) or pool is None or longest is None or not np.isfinite(usage).any():
            reason = Missing("usage, pool or the longest length is not told") if reason is None else reason
            continue
        # of a model whose layers are not known the engine's own plan for its longest request is known all the same
        need = float(seen.shape.blocks(np.array([longest]))[0]) if isinstance(seen.shape, Footprint) else planned
        if need > 0:
            fits.append(pool / need)
            rooms.append(pool * (1.0 - min(_usual(seen, usage), 1.0)) / need)
    none = Missing("no server was read inside the window") if reason is None else reason
    found: dict[str, Value] = {"nearmax.room": none, "nearmax.fits": none}
    if rooms:
        found["nearmax.fits"] = Reading(min(fits), "requests", "pool over one request of max_model_len")
        found["nearmax.room"] = Reading(min(rooms), "requests", "pool less its mean level, over one request of max_model_len")
    used, running = seen.levels.columns[f"used_{seen.levels.counts or 'blocks'}"], seen.levels.columns["running"]
    block = seen.shape.block if isinstance(seen.shape, Footprint) else None
    size = seen.values.get("block_size")
    block = block or (int(size.number()) if isinstance(size, Reading) else None if seen.levels.counts == "blocks" else 1)
    top = int(np.nanargmax(used)) if np.isfinite(used).any() else -1
    known = top >= 0 and block and np.isfinite(running[top]) and running[top] >= 0.5  # less than half a request is no request
    found["slots.per_request"] = (
        Reading(float(used[top] / running[top]) * (block or 1), "tokens", "slots held over requests running, at the highest level")
        if known
        else Missing("what is held, the block size or the running requests are not told")
    )
    return found


def _usual(seen: Seen, usage: Floats) -> float:
    """Return the level at which a server rests under its load: the mean where something is held."""
    import numpy as np

    there = usage[np.isfinite(usage)]
    busy = there[there > 0]
    return float(busy.mean()) if len(busy) else 0.0


def _climb(seen: Seen, finished: Value) -> dict[str, Value]:
    """Return by how many tokens the level rose over the window, and how much of it generated tokens explain."""
    import numpy as np

    counts = seen.levels.counts
    column = seen.levels.columns[f"used_{counts or 'blocks'}"]
    inside = np.isfinite(column) & (seen.levels.wall_s >= seen.window.since_s) & (seen.levels.wall_s <= seen.window.until_s)
    size = seen.values.get("block_size")
    block = 1.0 if counts == "tokens" else size.number() if isinstance(size, Reading) else None
    generated = seen.levels.counters["generation_tokens"].value
    if inside.sum() < 4 or block is None or isinstance(finished, Missing):
        reason = finished if isinstance(finished, Missing) else Missing("too few samples, or the block size is not told")
        return {"climb.tokens": reason, "climb.generated": reason}
    there = column[inside]
    part = max(len(there) // 10, 1)
    # medians of the first and the last tenth lie that much closer together than the ends of the window
    rise = float(np.median(there[-part:]) - np.median(there[:part])) * block * len(there) / (len(there) - part)
    found: dict[str, Value] = {"climb.tokens": Reading(rise, "tokens", "level at the end of the window less that at its start")}
    if isinstance(generated, Missing):
        found["climb.generated"] = generated
    elif rise <= 0:
        found["climb.generated"] = Missing("the level did not rise")
    else:
        found["climb.generated"] = Reading(generated.number() / rise, "ratio", "tokens generated over the rise of the level")
    return found
