"""What findings look at beside the measurements: what requests waited for, whether gauges move with tokens, whose server it is, how a pool rests.

Each is a named quantity (quantities.KNOWN), drawn from what the other modules measured; what cannot be told is Missing with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.holding import Footprint
from pytest_kvcache.analysis.ledger import GPU, CardLedger
from pytest_kvcache.analysis.levels import Levels, Window, pool_of
from pytest_kvcache.analysis.payload import REFUSED
from pytest_kvcache.analysis.prefixes import Prefixes
from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.analysis.series import Series
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import RunRecord

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

FULL = 0.9
"""From this usage on a pool counts as full: what waits then is taken to wait for blocks."""
_EMPTY = 0.05
"""Below this usage nothing that lives holds a pool."""
_STEADY_S = 0.25
_NAMES = ("bound.seats", "bound.kv", "bound.budget", "bound.free")


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
    found.update(_still(seen))
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
    """Return for how much of the busy time requests waited for a seat, for blocks, or with both free; of several servers the highest.

    ``bound.free`` stands for the first and the last where the seats are not told.
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
        queued = busy & (waiting > 0)
        capacity = one.column("waiting_capacity")[pressed]
        queued &= ~(np.isfinite(capacity) & (capacity <= 0))
        full = _full(seen, number, one, pressed, usage)
        count = float(busy.sum())
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


def _still(seen: Seen) -> dict[str, Value]:
    """Return the longest time in which a server said that requests run, or wait, while no token was counted and none of ours was in flight."""
    import numpy as np

    stale, stuck, held, alone, most = 0.0, 0.0, 0.0, 0.0, 0.0
    told = holds = roomy = False
    begun, ended = np.sort(seen.rows.sent_s), np.sort(seen.rows.end_s)
    dialect = DIALECTS.get(seen.record.engine)
    # what waiting requests hold of each other's blocks is a deadlock, and no request too large; cached blocks that count as used are neither
    roof = FULL if dialect is not None and dialect.idle_cached_is_free is False else _EMPTY
    for number, one in enumerate(seen.series):
        counters = [column for name in ("prompt_tokens", "generation_tokens") if np.isfinite(column := one.column(name)).any()]
        running, waiting = one.column("running"), one.column("waiting")
        live = np.searchsorted(begun, one.wall_s, side="right") - np.searchsorted(ended, one.wall_s, side="right")
        used = one.column(f"used_{seen.levels.counts or 'blocks'}")
        if np.isfinite(used).any() and np.isfinite(running).any():
            holds = True
            idle = (running <= 0) & (np.nan_to_num(waiting) <= 0) & (live <= 0)
            held = max(held, _longest(one.wall_s, np.zeros(len(used)), idle & (np.nan_to_num(used) > 0)))
        if not counters or not np.isfinite(running).any():
            continue
        told = True
        total = np.sum([np.nan_to_num(column) for column in counters], axis=0)
        runs, waits = np.nan_to_num(running) > 0, np.nan_to_num(waiting) > 0
        stale = max(stale, _longest(one.wall_s, total, runs & ~waits & (live <= 0)))
        # a request that is put back and read again without an end is seen to run at one look and to wait at the next
        stuck = max(stuck, _longest(one.wall_s, total, waits | _put_back(one.column("preemptions"))))
        if not np.isfinite(usage := one.column("usage")).any():
            continue
        roomy = True
        # what the engine puts off for another reason (an adapter, a transfer) is not too large for it
        put_off = np.nan_to_num(one.column("waiting_capacity"), nan=1.0) <= 0
        hanging = _hanging(seen.rows, number, one.wall_s)
        queue = np.maximum(np.where(put_off, 0.0, np.nan_to_num(waiting)), hanging)
        lonely = (queue > 0) & (running <= 0) & (usage < roof)
        if (longest := _longest(one.wall_s, total, lonely)) > alone:
            alone, most = longest, float(queue[lonely].max())
    lacking = Missing("the server tells no counters of tokens beside its gauges")
    return {
        "held.seconds": Reading(held, "s", "longest stretch of samples with nothing running or waiting and something held")
        if holds
        else Missing("the server does not tell what is held and what runs together"),
        "stale.seconds": Reading(stale, "s", "longest stretch of samples with running requests and no token counted, none of ours in flight")
        if told
        else lacking,
        "stuck.seconds": Reading(stuck, "s", "longest stretch of samples with requests waiting or put back and no token counted")
        if told
        else lacking,
        **_alone(alone, most, lacking if not told else None if roomy else Missing("the server does not tell its usage")),
    }


def _alone(seconds: float, waiting: float, lacking: Missing | None) -> dict[str, Value]:
    if lacking is not None:
        return {"stuck.alone": lacking, "stuck.waiting": lacking}
    return {
        "stuck.alone": Reading(seconds, "s", "longest stretch of samples with requests waiting, none running, blocks free and no token counted"),
        "stuck.waiting": Reading(waiting, "requests", "most that waited in such samples, by the gauge or by our own log"),
    }


def _hanging(rows: Rows, number: int, wall_s: Floats) -> Floats:
    """Return how many requests of ours that never got a token were open on a server at each moment: not every engine counts them as waiting."""
    import numpy as np

    never = ~np.isfinite(rows.first_s) & (rows.endpoint == number) & ~rows.outcome_in(REFUSED)
    begun, ended = np.sort(rows.sent_s[never]), np.sort(rows.end_s[never])
    return np.asarray(np.searchsorted(begun, wall_s, side="right") - np.searchsorted(ended, wall_s, side="right"), dtype=np.float64)


def _put_back(preemptions: Floats) -> Any:
    """Return at which samples the counter of preemptions has just grown or is about to."""
    import numpy as np

    grew = np.diff(np.nan_to_num(preemptions)) > 0
    return np.concatenate([[False], grew]) | np.concatenate([grew, [False]])


def _longest(wall_s: Floats, total: Floats, mask: Any) -> float:
    import numpy as np

    if len(wall_s) < 2:
        return 0.0
    # from one sample to the next: both in the state, and no token between them
    steps = np.where(mask[1:] & mask[:-1] & (np.diff(total) == 0), np.diff(wall_s), 0.0)
    level = np.cumsum(steps)
    base = np.maximum.accumulate(np.where(steps == 0, level, 0.0))
    return float((level - base).max())


def _counted(seen: Seen) -> dict[str, Value]:
    counters = {name: growth.value for name, growth in seen.levels.counters.items()}
    finished, sent = counters["finished"], seen.values["requests.sent"]
    found: dict[str, Value] = {"requests.finished": finished}
    base = finished if isinstance(finished, Reading) and finished.number() else sent
    found["preemptions.per_request"] = (
        _ratio(seen.values["preemptions"], base, "preemptions over requests that finished or were sent")
        if isinstance(base, Missing) or base.number()
        else Missing("no request finished or was sent")
    )
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
    return {
        "card.other_bytes": Reading(foreign.others.bytes or 0.0, "bytes", foreign.name) if foreign is not None else why,
        "card.free_share": Reading((tight.free.bytes or 0.0) / (tight.total.bytes or 1.0), "ratio", f"free of {tight.name}")
        if tight is not None
        else none,
    }


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
        if isinstance(seen.shape, Missing) or pool is None or longest is None or not np.isfinite(usage).any():
            reason = Missing("usage, pool or the longest length is not told") if reason is None else reason
            continue
        need = float(seen.shape.blocks(np.array([longest]))[0])
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
