"""Traffic as a planner needs it: lanes of concurrent requests, each with one length or a histogram of lengths, and what they hold at their peak.

Everything here is over two things that a pool gives: its usable blocks, and ``blocks_for(tokens)``, the blocks that one request of
that length (prompt and output) holds. Requests are counted at their full length: peak, not average.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pytest_kvcache.errors import UsageError

BlocksFor = Callable[[int], int]

MOST_LANES = 200
MOST_LENGTHS = 100_000
MOST_CONCURRENCY = 1_000_000
MOST_TOKENS = 1 << 30
_MOST_DRAWS = 2_000_000
_TRIALS = 10_000
_FEWEST_TRIALS = 200
_Z = 1.959964  # two-sided 95 %


@dataclass(frozen=True)
class Lane:
    """Requests that run at once: how many, and the lengths (prompt and output, in tokens) with the weight of each."""

    name: str
    concurrency: int
    lengths: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        where = f"lane {self.name!r}"
        if not 0 < self.concurrency <= MOST_CONCURRENCY:
            raise UsageError(f"concurrency {self.concurrency} is no count of requests", where=where, hint=f"1 to {MOST_CONCURRENCY:,}")
        if not self.lengths or len(self.lengths) > MOST_LENGTHS:
            raise UsageError(f"{len(self.lengths)} lengths", where=where, hint=f"1 to {MOST_LENGTHS:,} of them")
        for tokens, weight in self.lengths:
            if not 0 < tokens <= MOST_TOKENS:
                raise UsageError(f"a length of {tokens} tokens", where=where, hint=f"1 to {MOST_TOKENS:,}")
            if not (math.isfinite(weight) and weight >= 0):
                raise UsageError(f"{weight} is no weight of a length", where=where, hint="a count or a share, zero or more")
        if not sum(weight for _, weight in self.lengths) > 0:
            raise UsageError("every length has weight zero", where=where)

    @property
    def longest(self) -> int:
        """The longest request, in tokens."""
        return max(tokens for tokens, weight in self.lengths if weight > 0)

    @property
    def mean(self) -> float:
        """The weighted mean length, in tokens."""
        return sum(tokens * weight for tokens, weight in self.lengths) / sum(weight for _, weight in self.lengths)

    @property
    def is_one_shape(self) -> bool:
        """Whether all its requests have the same length."""
        return len({tokens for tokens, weight in self.lengths if weight > 0}) == 1


@dataclass(frozen=True)
class Traffic:
    """What runs at once, in lanes; ``source`` says where that is known from. ``replay`` holds (start, end, tokens) of a real Run, in seconds."""

    lanes: tuple[Lane, ...]
    source: str = "stated"
    replay: tuple[tuple[float, float, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.lanes or len(self.lanes) > MOST_LANES:
            raise UsageError(f"{len(self.lanes)} lanes of traffic", hint=f"1 to {MOST_LANES} of them, each [[lane]] with concurrency and length")

    @property
    def concurrency(self) -> int:
        """Requests at once, over all lanes."""
        return sum(lane.concurrency for lane in self.lanes)

    @property
    def longest(self) -> int:
        """The longest request of any lane, in tokens."""
        return max(lane.longest for lane in self.lanes)

    @property
    def mean(self) -> float:
        """The mean length of what runs, in tokens."""
        return sum(lane.mean * lane.concurrency for lane in self.lanes) / self.concurrency

    @property
    def is_one_shape(self) -> bool:
        """Whether no length is drawn from a histogram."""
        return all(lane.is_one_shape for lane in self.lanes)


def one_shape(concurrency: int, length: int) -> Traffic:
    """Return the traffic of ``concurrency`` requests of ``length`` tokens each. Raises UsageError."""
    return Traffic((Lane("all", concurrency, ((length, 1.0),)),))


@dataclass(frozen=True)
class Demand:
    """The blocks that traffic holds at its peak: every request at the longest length of its lane; ``by_lane`` the same for each."""

    peak_blocks: int
    mean_blocks: float
    by_lane: tuple[tuple[str, int, int, int], ...]
    replayed_blocks: int | None = None


def demand(traffic: Traffic, blocks_for: BlocksFor) -> Demand:
    """Return what the traffic holds. ``by_lane`` rows are (name, concurrency, longest tokens, blocks at the peak).

    ``replayed_blocks`` is the most that the requests of a real Run held at one moment, each counted at its full length from its start.
    """
    cost = _memo(blocks_for)
    rows = tuple((lane.name, lane.concurrency, lane.longest, lane.concurrency * cost(lane.longest)) for lane in traffic.lanes)
    mean = 0.0
    for lane in traffic.lanes:
        total = sum(weight for _, weight in lane.lengths)
        mean += lane.concurrency * sum(cost(tokens) * weight for tokens, weight in lane.lengths) / total
    return Demand(sum(row[3] for row in rows), mean, rows, _replay(traffic.replay, cost))


def _replay(spans: Sequence[tuple[float, float, int]], cost: BlocksFor) -> int | None:
    if not spans:
        return None
    # what ends at a moment gives its blocks back before what starts then takes them
    events = sorted([(start, 1, cost(tokens)) for start, _, tokens in spans] + [(end, 0, -cost(tokens)) for _, end, tokens in spans])
    return max(accumulate(change for _, _, change in events))


@dataclass(frozen=True)
class Chance:
    """A probability by Monte Carlo: ``hits`` of ``trials``, with its 95 % interval (Wilson's score) and the seed that repeats it."""

    probability: float
    low: float
    high: float
    hits: int
    trials: int
    seed: int

    @property
    def error(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


def _chance(hits: int, trials: int, seed: int) -> Chance:
    share = hits / trials
    square = _Z * _Z / trials
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    return Chance(share, max(0.0, middle - half) if hits else 0.0, min(1.0, middle + half) if hits < trials else 1.0, hits, trials, seed)


def overflow(traffic: Traffic, blocks_for: BlocksFor, usable_blocks: int, *, seed: int = 1, trials: int = 0) -> Chance:
    """Return the chance that what runs at once holds more than the pool, each request of a length drawn from its lane.

    Traffic without histograms needs no draw: its chance is 0 or 1, of one trial. ``trials`` 0 means 10,000, fewer for so many requests that
    drawing them would take long.
    """
    cost = _memo(blocks_for)
    fixed = sum(lane.concurrency * cost(lane.longest) for lane in traffic.lanes if lane.is_one_shape)
    drawn = [lane for lane in traffic.lanes if not lane.is_one_shape]
    if not drawn:
        hit = int(fixed > usable_blocks)
        return Chance(float(hit), float(hit), float(hit), hit, 1, seed)
    count = sum(lane.concurrency for lane in drawn)
    trials = trials or max(_FEWEST_TRIALS, min(_TRIALS, _MOST_DRAWS // count))
    draws = random.Random(seed)  # noqa: S311 - a simulation that a seed repeats
    tables = [(*_table(lane.lengths, cost), lane.concurrency) for lane in drawn]
    hits = 0
    for _ in range(trials):
        held = fixed
        for costs, weights, number in tables:
            held += sum(draws.choices(costs, cum_weights=weights, k=number))
        hits += held > usable_blocks
    return _chance(hits, trials, seed)


def _table(lengths: Sequence[tuple[int, float]], cost: BlocksFor) -> tuple[list[int], list[float]]:
    """Return the blocks of each length and the weights added up; lengths of equal cost are one entry."""
    by_cost: dict[int, float] = {}
    for tokens, weight in lengths:
        if weight > 0:
            by_cost[cost(tokens)] = by_cost.get(cost(tokens), 0.0) + weight
    costs = sorted(by_cost)
    return costs, list(accumulate(by_cost[one] for one in costs))


@dataclass(frozen=True)
class SafeConcurrency:
    """The most requests at once. ``always``: whatever is drawn, it fits. ``at_risk``: the pool overflows with at most ``risk`` (upper end of the 95 % interval)."""

    always: int
    at_risk: int
    risk: float
    trials: int
    seed: int


def safe_concurrency(traffic: Traffic, blocks_for: BlocksFor, usable_blocks: int, *, risk: float = 0.001, seed: int = 1) -> SafeConcurrency:
    """Return the largest safe number of requests of this mix. Raises UsageError for a risk that is no probability.

    For the risk each trial draws requests of the mix one by one until the pool is full: the share of trials that are full before the
    n-th request is the chance that n overflow. Where the trials are too few to show a risk that small, ``at_risk`` is ``always``.
    """
    if not 0 < risk < 1:
        raise UsageError(f"a risk of {risk} is no probability", hint="0.001 means once in a thousand")
    cost = _memo(blocks_for)
    always = usable_blocks // max(cost(traffic.longest), 1)
    if len({tokens for lane in traffic.lanes for tokens, weight in lane.lengths if weight}) == 1:
        return SafeConcurrency(always, always, risk, 1, seed)
    mix: list[tuple[int, float]] = []
    for lane in traffic.lanes:
        total = sum(weight for _, weight in lane.lengths)
        mix += [(tokens, weight / total * lane.concurrency) for tokens, weight in lane.lengths]
    costs, weights = _table(mix, cost)
    cheapest = max(min(costs), 1)
    most = min(usable_blocks // cheapest, MOST_CONCURRENCY)
    if not most:
        return SafeConcurrency(0, 0, risk, 1, seed)
    share = sum(one * weight for one, weight in zip(costs, [weights[0], *(b - a for a, b in pairwise(weights))], strict=True))
    likely = max(1, math.ceil(usable_blocks / (share / weights[-1])))
    trials = max(_FEWEST_TRIALS, min(_TRIALS, _MOST_DRAWS // min(most, likely)))
    draws = random.Random(seed)  # noqa: S311 - a simulation that a seed repeats
    held_at_full: list[int] = []
    step = min(most, max(8, likely))
    for _ in range(trials):
        number, held = 0, 0
        while held <= usable_blocks and number < most + 1:
            sums = list(accumulate(draws.choices(costs, cum_weights=weights, k=step), initial=held))
            if sums[-1] > usable_blocks:
                number += bisect_left(sums, usable_blocks + 1) - 1
                break
            number, held = number + step, sums[-1]
        held_at_full.append(min(number, most))
    held_at_full.sort()
    best = always
    # the chance that n requests overflow is the share of trials that held fewer than n
    for number in sorted(set(held_at_full)):
        if _chance(bisect_left(held_at_full, number), trials, seed).high <= risk:
            best = max(best, number)
    return SafeConcurrency(always, best, risk, trials, seed)


def longest_request(blocks_for: BlocksFor, usable_blocks: int, *, concurrency: int = 1, limit: int = MOST_TOKENS) -> int:
    """Return the longest length, in tokens, of which ``concurrency`` requests fit at once; 0 where none does, at most ``limit``."""
    share = usable_blocks // max(concurrency, 1)
    if blocks_for(limit) <= share:
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if blocks_for(middle) <= share:
            low = middle
        else:
            high = middle
    return low


def _memo(blocks_for: BlocksFor) -> BlocksFor:
    known: dict[int, int] = {}

    def cost(tokens: int) -> int:
        if tokens not in known:
            known[tokens] = blocks_for(tokens)
        return known[tokens]

    return cost
