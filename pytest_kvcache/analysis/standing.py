"""What stands still: gauges that say that requests run or wait while no token moves, and what stays held while nothing runs."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.payload import REFUSED
from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.analysis.traffic import GRACE_S
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.quantities import Missing, Reading, Value

if TYPE_CHECKING:
    import numpy as np

    from pytest_kvcache.analysis.signals import Seen

    Floats = np.ndarray[Any, np.dtype[np.float64]]

FULL = 0.9
"""From this usage on a pool counts as full: what waits then is taken to wait for blocks."""
_EMPTY = 0.05
"""Below this usage there is room for whatever an empty pool holds. A gauge that counts what is kept for reuse never falls so low: there it is FULL."""


def standing(seen: Seen) -> dict[str, Value]:
    """Return the longest time in which a server said that requests run, or wait, while no token was counted and none of ours was in flight.

    A prompt that is read takes blocks before its tokens are counted, and some engines count a request's tokens when it ends: what is held
    counts as movement, unless it only comes and goes with a request that is put back. The time between two updates of an engine's gauges
    says nothing and is taken off.
    """
    import numpy as np

    stale, stuck, held, alone, most, steps = 0.0, 0.0, 0.0, 0.0, 0.0, 0
    dialect = DIALECTS.get(seen.record.engine)
    by_step, refresh_s = dialect is not None and dialect.generates_by_step, dialect.gauges_every_s if dialect is not None else 0.0
    told = holds = roomy = False
    not_held = Missing("the server does not tell what is held and what runs together")
    lacking = Missing("the server tells no counters of tokens beside its gauges")
    begun, ended = np.sort(seen.rows.sent_s), np.sort(seen.rows.end_s)
    # what waiting requests hold of each other's blocks is a deadlock, and no request too large
    counts_kept = dialect is not None and dialect.idle_cached_is_free is False
    roof = FULL if counts_kept else _EMPTY
    for number, one in enumerate(seen.series):
        counters = [column for name in ("prompt_tokens", "generation_tokens") if np.isfinite(column := one.column(name)).any()]
        running, waiting = one.column("running"), one.column("waiting")
        live = np.searchsorted(begun, one.wall_s, side="right") - np.searchsorted(ended, one.wall_s, side="right")
        used = one.column(f"used_{seen.levels.counts or 'blocks'}")
        if dialect is None or dialect.idle_cached_is_free is not True:
            not_held = Missing("this engine may count as used what it keeps for reuse, so what is held when idle is no leak")
        elif np.isfinite(used).any() and np.isfinite(running).any():
            holds = True
            idle = (running <= 0) & (np.nan_to_num(waiting) <= 0) & (live <= 0)
            held = max(held, _longest(one.wall_s, np.zeros(len(used)), idle & (np.nan_to_num(used) > 0)))
            steps = max(steps, _steps(one.wall_s, used, idle & np.isfinite(used), GRACE_S + refresh_s))
        if not counters or not np.isfinite(running).any():
            continue
        back = _put_back(one.column("preemptions"))
        moved = np.concatenate([[0.0], np.abs(np.diff(np.nan_to_num(used)))])
        if not by_step and not np.isfinite(used).any():
            lacking = Missing("the server counts tokens when requests end and does not tell what is held: that they stand still says nothing")
            continue
        told = True
        total = np.sum([np.nan_to_num(column) for column in counters], axis=0) + np.cumsum(np.where(back, 0.0, moved))
        runs, waits = np.nan_to_num(running) > 0, np.nan_to_num(waiting) > 0
        stale = max(stale, _longest(one.wall_s, total, runs & ~waits & (live <= 0)))
        # a request that is put back and read again without an end is seen to run at one look and to wait at the next
        stuck = max(stuck, _longest(one.wall_s, total, waits | back))
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
    stale, stuck, alone = (max(seconds - refresh_s, 0.0) for seconds in (stale, stuck, alone))
    return {
        "held.seconds": Reading(held, "s", "longest stretch of samples with nothing running or waiting and something held") if holds else not_held,
        "held.steps": Reading(float(steps), "events", "waves in a row after which more stayed held than after the one before") if holds else not_held,
        "stale.seconds": Reading(stale, "s", "longest stretch of samples with running requests and no token counted, none of ours in flight")
        if told
        else lacking,
        "stuck.seconds": Reading(stuck, "s", "longest stretch of samples with requests waiting or put back and no token counted")
        if told
        else lacking,
        **_alone(alone, most, counts_kept, lacking if not told else None if roomy else Missing("the server does not tell its usage")),
    }


def _steps(wall_s: Floats, used: Floats, idle: Any, grace_s: float) -> int:
    """Return how often in a row more was held in a quiet stretch than in the one before; a stretch is quiet after its first ``grace_s`` seconds."""
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate([[False], idle, [False]]).astype(np.int8)))
    floors = []
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        settled = used[start:stop][wall_s[start:stop] - wall_s[start] >= grace_s]
        if len(settled):
            floors.append(float(settled.min()))
    most = risen = 0
    for before, after in pairwise(floors):
        risen = risen + 1 if after > before else risen if after == before else 0
        most = max(most, risen)
    return most


def _alone(seconds: float, waiting: float, counts_kept: bool, lacking: Missing | None) -> dict[str, Value]:
    if lacking is not None:
        return {"stuck.alone": lacking, "stuck.waiting": lacking}
    held = f"less than {FULL * 100:g} % of the pool was held or kept for reuse" if counts_kept else "less than a twentieth of the pool was held"
    return {
        "stuck.alone": Reading(seconds, "s", f"nothing ran, no token was counted, and {held}"),
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
