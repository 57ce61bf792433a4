"""What our requests hold at given moments: the sum over everything that is live then, with a lower and an upper bound.

The client sees the first token, the last, how many came, and the longest pause between two. In between, tokens are taken to come
evenly outside that pause: in steps of the engine where it counts its tokens, else in seconds. The bounds allow for what one scheduling
step can change: a token more or less (two where the steps are sampled), and at both ends of a request one step sooner or later. How far
the prompt of a request is written before its first token is not known: nothing to all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.holding import RESERVES_LONGEST, RESERVES_OUTPUT, Footprint
from pytest_kvcache.analysis.pace import Clock, seconds
from pytest_kvcache.analysis.payload import REFUSED
from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.load.contract import CLAMPED, OK, STOPPED_EARLY

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]

_PAIRS_AT_ONCE = 400_000
MOST_PAIRS = 40_000_000
_LEAST_STEP_S = 0.005

OFF, SURE, UNSURE = "off", "sure", "unsure"
"""Whether live requests share the blocks of a common prefix: they cannot; the hit counter accounts for it; it is on and unproven."""


@dataclass(frozen=True)
class Moments:
    """When a gauge was read, Unix seconds: each value is of some moment between ``low_s`` and ``high_s``, both rising.

    ``clock`` tells how far answers are: in decode steps of the engine where it counts them, else in seconds.
    """

    low_s: Floats
    high_s: Floats
    waiting: Floats
    clock: Clock = seconds

    def __len__(self) -> int:
        return len(self.low_s)


@dataclass(frozen=True)
class Held:
    """What our requests hold, a value a moment. ``low``, ``likely`` and ``high`` are in blocks; everything else in token slots.

    ``prompt`` and ``generated`` are in the cache for certain, ``prefilling`` is the most that prompts without a first token may fill,
    ``common`` is what several requests hold together, counted once, and ``shared`` what ``prompt`` counts too often because of it;
    ``rounding`` is the empty rest of last blocks, ``reserved`` what is taken ahead. ``answering`` and ``sent`` count requests; ``longest`` and ``total`` are lengths of the answering ones.
    """

    low: Floats
    likely: Floats
    high: Floats
    prompt: Floats
    generated: Floats
    prefilling: Floats
    common: Floats
    shared: Floats
    rounding: Floats
    reserved: Floats
    answering: Floats
    sent: Floats
    longest: Floats
    total: Floats

    @classmethod
    def nothing(cls, moments: int) -> Held:
        """Return what no request holds."""
        import numpy as np

        return cls(*(np.zeros(moments) for _ in fields(cls)))

    def put(self, start: int, part: Held) -> None:
        """Write the values of some moments in a row into their place."""
        for field in fields(self):
            getattr(self, field.name)[start : start + len(part.low)] = getattr(part, field.name)


@dataclass(frozen=True)
class _Ours:
    """The requests that may hold something, in order of sending; times in seconds since ``origin_s``."""

    sent: Floats
    first: Floats
    end: Floats
    gap: Floats
    gap_end: Floats
    lost: Mask
    prompt: Floats
    output: Floats
    planned: Floats
    cached: Floats
    prefix: Any
    prefix_tokens: Floats
    step: Floats
    after: Floats
    clock_first: Floats
    clock_end: Floats
    clock_gap: Floats
    clock_gap_end: Floats
    counted: bool


def _ours(rows: Rows, chosen: Mask, lost: Mask, origin_s: float, clock: Clock) -> _Ours:
    import numpy as np

    held = np.flatnonzero(chosen & ~rows.outcome_in(REFUSED) & (rows.end_s > rows.sent_s))
    held = held[np.argsort(rows.sent_s[held], kind="stable")]
    output = np.where(np.isfinite(rows.output), rows.output, rows.chunks)[held]
    first = np.where(np.isfinite(rows.first_s), rows.first_s, np.inf)[held] - origin_s
    end = rows.end_s[held] - origin_s
    gap = np.where(np.isfinite(rows.gap_at_s), rows.gap_at_s, np.inf)[held] - origin_s
    length = np.where(np.isfinite(first), end - first, 0.0)
    pause = np.minimum(np.nan_to_num(rows.gap_s[held]), np.maximum(length, 0.0))
    even = length / np.maximum(output - 1.0, 1.0)
    # a pause well beyond the usual pace is time in which nothing came; an ordinary one is part of the pace
    stalled = np.isfinite(gap) & ((pause > 3.0 * even) | lost[held]) & (pause > 0)
    step = np.maximum((length - np.where(stalled, pause, 0.0)) / np.maximum(output - 1.0, 1.0), _LEAST_STEP_S)
    # a stream that we closed is freed by the step that follows the one in which the engine hears of it
    after = step * np.where(rows.outcome_in((OK, STOPPED_EARLY, CLAMPED))[held], 1.0, 2.0)
    planned = np.where(np.isfinite(rows.output_planned), rows.output_planned, rows.output)[held]

    def ticks(moments: Floats) -> Floats:
        shift_s = 0.0 if clock is seconds else origin_s
        return np.where(np.isfinite(moments), clock(np.where(np.isfinite(moments), moments, 0.0) + shift_s), np.inf)

    return _Ours(
        sent=rows.sent_s[held] - origin_s,
        first=first,
        end=end,
        gap=np.where(stalled, gap, np.inf),
        gap_end=np.where(stalled, gap + pause, np.inf),
        lost=lost[held] & stalled,
        prompt=np.nan_to_num(rows.prompt[held]),
        output=output,
        planned=np.where(np.isfinite(planned), planned, output),
        cached=rows.cached[held],
        prefix=rows.prefix[held],
        prefix_tokens=np.minimum(np.nan_to_num(rows.prefix_tokens[held], nan=0.0), np.nan_to_num(rows.prompt[held])),
        step=step,
        after=after,
        clock_first=ticks(first),
        clock_end=ticks(end),
        clock_gap=ticks(np.where(stalled, gap, np.inf)),
        clock_gap_end=ticks(np.where(stalled, gap + pause, np.inf)),
        counted=clock is not seconds,
    )


def hold(rows: Rows, chosen: Mask, lost: Mask, shape: Footprint, moments: Moments, sharing: str) -> Held:
    """Return what the chosen requests hold at each moment. ``lost`` marks those whose longest pause is a preemption.

    ``moments.waiting`` (NaN where it is not known) says how many of the requests without a token hold nothing: the latest ones.
    """
    import numpy as np

    found = Held.nothing(len(moments))
    if not len(moments) or not chosen.any():
        return found
    origin_s = float(moments.low_s[0])
    ours = _ours(rows, chosen, lost, origin_s, moments.clock)
    low, high = moments.low_s - origin_s, moments.high_s - origin_s
    clock = moments.clock
    shifted: Clock = seconds if clock is seconds else lambda t: clock(t + origin_s)
    begin = np.searchsorted(high, ours.sent, side="left")
    end = np.searchsorted(low, ours.end + ours.after, side="right")
    for start, stop in _chunks(begin, end, len(low)):
        inside = np.flatnonzero((begin < stop) & (end > start))
        if len(inside):
            a, b = np.maximum(begin[inside], start), np.minimum(end[inside], stop)
            counts = np.maximum(b - a, 0)
            row = np.repeat(inside, counts)
            at = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(a, counts)
            part = Moments(low[start:stop], high[start:stop], moments.waiting[start:stop], shifted)
            found.put(start, _sum(ours, row, at - start, part, shape, sharing))
    return found


def pairs(rows: Rows, chosen: Mask, wall_s: Floats) -> int:
    """Return over how many pairs of a live request and a moment ``hold`` has to sum."""
    import numpy as np

    sent, ended = np.sort(rows.sent_s[chosen]), np.sort(rows.end_s[chosen])
    live = np.searchsorted(sent, wall_s, side="right") - np.searchsorted(ended, wall_s, side="right")
    return int(np.maximum(live, 0).sum())


def _chunks(begin: Any, end: Any, count: int) -> Iterator[tuple[int, int]]:
    """Yield stretches of moments with at most about ``_PAIRS_AT_ONCE`` pairs each."""
    import numpy as np

    live = np.cumsum(np.bincount(begin, minlength=count + 1)[: count + 1] - np.bincount(end, minlength=count + 1)[: count + 1])[:count]
    total = np.cumsum(live)
    start = 0
    while start < count:
        done = total[start - 1] if start else 0
        stop = max(int(np.searchsorted(total, done + _PAIRS_AT_ONCE, side="right")), start + 1)
        yield start, min(stop, count)
        start = stop


def _received(ours: _Ours, row: Any, t: Floats, ticks: Floats) -> tuple[Floats, Floats, Floats]:
    """Return how many tokens of its answer each request has received at ``t``: the fewest, the likely number and the most.

    1 at the first, all at the end, none in its pause. ``ticks`` are the same moments on the clock by which tokens come evenly. Where that
    counts steps, nobody gets more than one token a step: neither before ``t`` nor after it.
    """
    import numpy as np

    first, end, gap, gap_end = ours.clock_first[row], ours.clock_end[row], ours.clock_gap[row], ours.clock_gap_end[row]
    output = np.maximum(ours.output[row], 1.0)
    with np.errstate(invalid="ignore"):
        paused = np.where(np.isfinite(gap), np.clip(ticks, gap, gap_end) - gap, 0.0)
        whole = np.where(np.isfinite(gap), gap_end - gap, 0.0)
        behind = np.maximum(ticks - first - paused, 0.0)
        ahead = np.maximum(end - ticks - (whole - paused), 0.0)
        likely = 1.0 + np.clip(behind / np.maximum(end - first - whole, 1e-9), 0.0, 1.0) * (output - 1.0)
        fewest = most = likely
        if ours.counted:
            fewest = np.minimum(likely, np.maximum(output - ahead, 1.0))
            most = np.maximum(likely, np.minimum(1.0 + behind, output))
        begun = t >= ours.first[row]
        return np.where(begun, fewest, 0.0), np.where(begun, likely, 0.0), np.where(begun, most, 0.0)


def _sum(ours: _Ours, row: Any, at: Any, moments: Moments, shape: Footprint, sharing: str) -> Held:
    """Return the sums over pairs of a request (``row``) and a moment (``at``)."""
    import numpy as np

    count = len(moments)

    def add(weights: Any) -> Floats:
        return np.bincount(at, weights=weights, minlength=count).astype(np.float64)

    low_s, high_s = moments.low_s[at], moments.high_s[at]
    middle = (low_s + high_s) / 2
    low_t, high_t, middle_t = (moments.clock(t)[at] for t in (moments.low_s, moments.high_s, (moments.low_s + moments.high_s) / 2))
    prompt, output, step = ours.prompt[row], ours.output[row], ours.step[row]
    first, end = ours.first[row], ours.end[row]
    gone = ours.lost[row] & (high_s >= ours.gap[row]) & (low_s < ours.gap_end[row])
    answering = (middle >= first) & (middle < end)
    steady = answering & ~gone
    before = (high_s < first) & (low_s < end)

    # what waits in the queue holds nothing: the engine serves what it put back first, then in order of arrival
    unsure = before | gone
    kept = _admitted(row, at, unsure, gone, moments.waiting)

    received = np.floor(_received(ours, row, middle, middle_t)[1])
    tokens = np.where(steady, prompt + received - 1.0, 0.0)
    certain = steady & (low_s >= first + step) & (high_s <= end - step)
    # a counted clock is read once a sample, so that the step in which an answer began is known to one more
    off = 1.0 if moments.clock is seconds else 2.0
    early = _received(ours, row, low_s, low_t)[0]
    fewest = prompt + np.maximum(np.floor(early) - off, 1.0) - 1.0
    most = prompt + np.minimum(np.ceil(_received(ours, row, high_s, high_t)[2]) + off, np.maximum(output, 1.0)) - 1.0
    most = np.where(before, prompt, most)
    possible = np.where(unsure, kept, high_s >= ours.sent[row])
    taken = tokens
    if shape.reserves in RESERVES_OUTPUT:
        ahead = prompt + np.maximum(ours.planned[row], output)
        taken, fewest, most = np.where(steady, ahead, 0.0), ahead, ahead
    sliding = steady & (received >= 2)
    likely = np.where(sliding, shape.blocks(taken), shape.blocks(taken, sliding=False))
    low = np.where(certain, shape.blocks(fewest), 0.0)
    # a window gives back with the first decode step: until the second token is there everything may be held
    whole_prompt = (early < 3) | before | gone
    high = np.where(possible, np.where(whole_prompt, shape.blocks(most, sliding=False), shape.blocks(most)), 0.0)
    if shape.slides:  # between two steps a window may give a block back or not yet: what is held goes up and down on the way
        between = int(np.clip(np.max(most - fewest, initial=0.0, where=certain), 0, 2 * shape.block))
        way = [shape.blocks(np.minimum(fewest + more, most)) for more in range(between + 1)]
        low = np.where(certain, np.min(way, axis=0), 0.0)
        high = np.where(possible, np.maximum(high, np.max(way, axis=0)), 0.0)

    slots = shape.filled(tokens)
    of_prompt = np.where(tokens > 0, slots * np.minimum(prompt / np.maximum(tokens, 1.0), 1.0), 0.0)
    longest = np.zeros(count)
    np.maximum.at(longest, at, tokens)
    answers = add(steady)
    total = add(tokens)
    saved = _shared(ours, row, at, steady, count, shape, sharing)
    taken_slots, kept_slots = add(likely) * shape.block, add(slots)
    reserved = add(shape.filled(taken) - slots)
    low, likely, high = add(low), add(likely), add(high)
    if shape.reserves in RESERVES_LONGEST:
        padding = np.maximum(answers * longest - total, 0.0)
        if shape.reserves in RESERVES_OUTPUT:  # the output is reserved as it was planned, so that only prompts are padded
            widest = np.zeros(count)
            np.maximum.at(widest, at, np.where(steady, prompt, 0.0))
            padding = np.maximum(answers * widest - add(np.where(steady, prompt, 0.0)), 0.0)
        reserved += padding
        likely, high = likely + padding / shape.block, high + padding / shape.block
        taken_slots += padding
    return Held(
        low=np.maximum(low - saved["most"], 0.0),
        likely=likely - saved["likely"],
        high=high - saved["least"],
        prompt=add(of_prompt),
        generated=add(slots - of_prompt),
        prefilling=add(np.where(unsure & kept, shape.filled(np.where(before, prompt, most)), 0.0)),
        common=saved["common"] * shape.block,
        shared=saved["likely"] * shape.block,
        rounding=np.maximum(taken_slots - kept_slots - reserved, 0.0),
        reserved=reserved,
        answering=answers,
        sent=add((middle >= ours.sent[row]) & (middle < end)),
        longest=longest,
        total=total,
    )


def _admitted(row: Any, at: Any, unsure: Mask, gone: Mask, waiting: Floats) -> Mask:
    """Return which of the requests without a token, or put back, may hold something: all but the ``waiting`` latest of them."""
    import numpy as np

    kept = unsure.copy()
    queue = np.nan_to_num(waiting)
    chosen = np.flatnonzero(unsure & (queue[at] > 0))
    if not len(chosen):
        return kept
    # rows are in order of sending; what was put back goes before all of them
    place = np.where(gone[chosen], 0, 1 + row[chosen])
    order = np.lexsort((place, at[chosen]))
    moment = at[chosen][order]
    starts = np.searchsorted(moment, moment, side="left")
    rank = np.arange(len(moment)) - starts
    here = np.bincount(moment, minlength=len(waiting))
    kept[chosen[order]] = rank < (here - queue)[moment]
    return kept


def _shared(ours: _Ours, row: Any, at: Any, steady: Mask, count: int, shape: Footprint, sharing: str) -> dict[str, Floats]:
    """Return the blocks that live requests hold together and that each of them counts: the least, the likely and the most."""
    import numpy as np

    saved = {name: np.zeros(count) for name in ("least", "likely", "most", "common")}
    if sharing == OFF or not shape.full:
        return saved
    told = np.isfinite(ours.cached[row])
    # a hit of a request whose partner we cannot name: it may be one that lives, or blocks that nobody held any more
    alone = steady & (ours.prefix[row] < 0) & (np.nan_to_num(ours.cached[row]) > 0)
    if alone.any():
        hit = np.floor(ours.cached[row][alone] / shape.block) * shape.full
        saved["most"] += np.bincount(at[alone], weights=hit, minlength=count)
    named = np.flatnonzero(steady & (ours.prefix[row] >= 0))
    if not len(named):
        return saved
    who, when, told = row[named], at[named], told[named]
    block = shape.block
    length = np.minimum(np.floor(ours.prefix_tokens[who] / block), np.floor(ours.prompt[who] / block))
    # the last token of a prompt is always computed, so the block that it lies in is never a hit
    reusable = np.minimum(length, np.floor(np.maximum(ours.prompt[who] - 1.0, 0.0) / block))
    hit = np.where(told, np.minimum(np.floor(np.nan_to_num(ours.cached[who]) / block), reusable), reusable)
    _, group = np.unique(when * (int(ours.prefix.max()) + 1) + ours.prefix[who], return_inverse=True)
    groups = int(group.max()) + 1
    longest, where = np.zeros(groups), np.zeros(groups, dtype=np.int64)
    np.maximum.at(longest, group, length)
    where[group] = when
    total = np.bincount(group, weights=length, minlength=groups)
    hits = np.bincount(group, weights=hit, minlength=groups)
    found, widest = np.bincount(group, weights=reusable, minlength=groups), np.zeros(groups)
    np.maximum.at(widest, group, reusable)
    # one of them computed the text for all; which one decides whether the block with a prompt's last token is shared as well
    most = np.minimum(hits, np.maximum(total - longest, 0.0)) * shape.full
    likely = np.minimum(hits, np.maximum(found - widest, 0.0)) * shape.full
    proven = (np.bincount(group, weights=~told, minlength=groups) == 0) | (sharing == SURE)
    saved["most"] += np.bincount(where, weights=most, minlength=count)
    saved["likely"] += np.bincount(where, weights=likely, minlength=count)
    saved["common"] += np.bincount(where, weights=np.where(likely > 0, widest * shape.full, 0.0), minlength=count)
    # a request that starts in the step of another may compute the same blocks once more
    saved["least"] += np.bincount(where, weights=np.where(proven, likely, 0.0), minlength=count)
    return saved
