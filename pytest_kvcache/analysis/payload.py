"""How many tokens our live requests have in the cache at each moment, from our own request log.

What the client sees bounds it on both sides. Lower: the prompt counts from the first token on, since prefill may have begun at any
moment before. Upper: it counts from the moment of sending. Generated tokens grow evenly between the first token and the end. A request
that was put back into the queue may hold nothing in its longest pause, and is taken to grow outside it only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.load.contract import BAD_REQUEST, OVER_LENGTH, QUEUE_FULL, RATE_LIMITED, REFUSED_AUTH, REFUSED_CONNECTION
from pytest_kvcache.quantities import Missing, Reading, Value

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]

_MOMENT_S = 1e-6

REFUSED = (OVER_LENGTH, QUEUE_FULL, RATE_LIMITED, REFUSED_CONNECTION, REFUSED_AUTH, BAD_REQUEST)
"""Outcomes of requests that the server turned away before they could hold any cache."""


@dataclass(frozen=True)
class Level:
    """A sum of straight pieces over time: after ``at_s[i]`` it is ``level[i] + slope[i] * (t - origin_s)``."""

    origin_s: float
    at_s: Floats
    level: Floats
    slope: Floats

    def __call__(self, wall_s: Floats) -> Floats:
        """Return the level at each of the moments (Unix seconds)."""
        import numpy as np

        t = np.asarray(wall_s, dtype=np.float64) - self.origin_s
        if not len(self.at_s):
            return np.zeros(len(t))
        index = np.searchsorted(self.at_s, t, side="right") - 1
        values = self.level[index] + self.slope[index] * t
        return np.where(index < 0, 0.0, np.maximum(values, 0.0))

    def peak(self) -> tuple[float, float]:
        """Return the highest level and its moment (Unix seconds); (0, 0) where there was none."""
        import numpy as np

        if len(self.at_s) < 2:
            return 0.0, 0.0
        ends = self.level[:-1] + self.slope[:-1] * self.at_s[1:]
        starts = self.level[:-1] + self.slope[:-1] * self.at_s[:-1]
        # events of one moment come one after the other in the sums: what stands between them never was
        high = np.where(np.diff(self.at_s) > 0, np.maximum(starts, ends), 0.0)
        index = int(np.argmax(high))
        at = self.at_s[index + 1] if ends[index] >= starts[index] else self.at_s[index]
        return float(max(high[index], 0.0)), float(at) + self.origin_s


@dataclass(frozen=True)
class Payload:
    """``lower`` and ``upper`` bound of the tokens in the cache, ``decoding`` requests (first token seen) and ``live`` ones (sent)."""

    lower: Level
    upper: Level
    decoding: Level
    live: Level


def payload(rows: Rows, endpoint: int | None = None, lost: Mask | None = None) -> Payload:
    """Return the payload over time of all requests, or of those of one endpoint; ``lost`` marks those that were put back in between."""
    import numpy as np

    ours = np.ones(len(rows), dtype=bool) if endpoint is None else rows.endpoint == endpoint
    origin = float(rows.sent_s.min()) if len(rows) else 0.0
    held = ours & ~rows.outcome_in(REFUSED) & (rows.end_s > rows.sent_s)
    answering = held & np.isfinite(rows.first_s)
    prompt = np.nan_to_num(rows.prompt)
    # a stream that broke off told no usage: its content events are the fewest tokens that it can have brought
    output = np.where(np.isfinite(rows.output), rows.output, rows.chunks)
    sent, end = rows.sent_s - origin, rows.end_s - origin
    # An answer that came in one piece was held at its full length all the same, if only for a moment.
    first = np.minimum(rows.first_s - origin, end - _MOMENT_S)
    back = answering & lost & np.isfinite(rows.gap_at_s) if lost is not None else np.zeros(len(rows), dtype=bool)
    gap = np.where(back, np.clip(np.nan_to_num(rows.gap_at_s - origin), first, end), end)
    gap_end = np.where(back, np.clip(gap + rows.gap_s, gap, end), end)
    length = np.maximum(end - first - (gap_end - gap), _MOMENT_S)
    rate = np.where(answering, output / np.where(answering, length, 1.0), 0.0)
    waiting_end = np.where(answering, first, end)
    decode = (first[answering], gap[answering], prompt[answering], rate[answering])
    later = prompt + rate * (gap - first)
    resumed = (gap_end[back], end[back], later[back], rate[back])
    paused = (gap[back], gap_end[back], later[back], np.zeros(int(back.sum())))
    prefill = (sent[held], waiting_end[held], prompt[held], np.zeros(int(held.sum())))
    ones = np.ones(int(answering.sum()))
    return Payload(
        lower=_sum(origin, [decode, resumed]),
        upper=_sum(origin, [decode, resumed, paused, prefill]),
        decoding=_sum(origin, [(first[answering], end[answering], ones, 0 * ones)]),
        live=_sum(origin, [(sent[held], end[held], np.ones(int(held.sum())), np.zeros(int(held.sum())))]),
    )


def bounded_by_pool(peak: Value, values: Mapping[str, Value], counts: str, sharing: str) -> Value:
    """Return the payload's lower bound, which is never above the pool where no request shares what it holds, and say where that bit.

    Our log cannot see all of a preempted request's absences, and takes tokens to come evenly: its sum can lie above what there is room for.
    """
    if isinstance(peak, Missing) or sharing != "off":
        return peak
    blocks, size, tokens = (values.get(name) for name in ("usable_blocks", "block_size", "pool_tokens"))
    if counts == "blocks" and isinstance(blocks, Reading) and isinstance(size, Reading):
        pool = blocks.number() * size.number()
    elif counts == "tokens" and isinstance(tokens, Reading):
        pool = tokens.number()
    else:
        return peak
    if peak.number() <= pool:
        return peak
    return Reading(pool, peak.unit, f"the pool: {peak.source} gave {peak.number():,.0f}, more than there is room for", peak.wall_s)


def _sum(origin: float, parts: Iterable[tuple[Floats, Floats, Floats, Floats]]) -> Level:
    """Return the sum over pieces (begin, end, level at begin, slope)."""
    import numpy as np

    moments, levels, slopes = [], [], []
    for begin, end, level, slope in parts:
        at_zero = level - slope * begin
        moments += [begin, end]
        levels += [at_zero, -at_zero]
        slopes += [slope, -slope]
    at = np.concatenate(moments) if moments else np.empty(0)
    order = np.argsort(at, kind="stable")
    return Level(origin, at[order], np.cumsum(np.concatenate(levels)[order]), np.cumsum(np.concatenate(slopes)[order]))
