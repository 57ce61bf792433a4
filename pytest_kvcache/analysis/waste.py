"""Waste what-ifs on a distribution of request lengths: what share of the reserved tokens would be payload under each way of reserving.

Padded to the longest (or to a fixed length), reserved to the limit of a bucket (given buckets, or the best k for this distribution), and
in pages of each block size. The lengths are those that requests reach at their end, prompt and output; shared prefixes are not counted.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_kvcache.errors import UsageError
from pytest_kvcache.quantities import Missing, Reading, Value

if TYPE_CHECKING:
    from pytest_kvcache.analysis.rows import Rows
    from pytest_kvcache.analysis.timeline import Analysis

BUCKETS = (256, 512, 1024, 2048, 4096)
BEST = (2, 3, 4, 5)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
LONGEST = 1 << 31


@dataclass(frozen=True)
class Lengths:
    """How often each length in tokens occurs, shortest first; ``in_order`` are the lengths as they came, where that is known,
    ``notes`` what must be known to read them."""

    counts: Mapping[int, int] = field(default_factory=dict)
    source: str = ""
    in_order: Sequence[int] = ()
    notes: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return sum(self.counts.values())

    @property
    def payload(self) -> int:
        """The tokens of all of them."""
        return sum(length * count for length, count in self.counts.items())

    @property
    def longest(self) -> int:
        """The longest; 0 of none."""
        return max(self.counts, default=0)

    @property
    def mean(self) -> float:
        """The mean length; 0 of none."""
        return self.payload / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class WasteRow:
    """One way of reserving: ``payload`` and ``reserved`` tokens, and the ``share`` that is payload; Missing where some request would not fit."""

    scheme: str
    detail: str
    payload: int
    reserved: int
    share: Value
    buckets: tuple[int, ...] = ()
    block_size: int = 0

    @property
    def text(self) -> str:
        """The row in one phrase."""
        if isinstance(self.share, Missing):
            return f"{self.scheme} {self.detail}: {self.share.reason}".replace("  ", " ")
        return f"{self.scheme} {self.detail}: {self.payload:,} of {self.reserved:,} tokens are payload, {self.share.number() * 100:.0f} %".replace(
            " :", ":"
        )


def lengths(source: Iterable[int] | Mapping[int, int], name: str = "") -> Lengths:
    """Return the distribution of lengths given one by one, or as ``{length: how many}``. Raises UsageError for what is no length or count."""
    in_order: Sequence[int] = ()
    if isinstance(source, Mapping):
        pairs: Iterable[tuple[int, int]] = source.items()
    else:
        in_order = list(source)
        pairs = ((length, 1) for length in in_order)
    counts: dict[int, int] = {}
    for length, count in pairs:
        if isinstance(length, bool) or not isinstance(length, int) or not 0 < length <= LONGEST:
            raise UsageError(f"{length!r} is no length in tokens", hint="whole numbers from 1 on")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 1 << 48:
            raise UsageError(f"{count!r} is no number of requests (of length {length})", hint="whole numbers from 0 on")
        if count:
            counts[length] = counts.get(length, 0) + count
    return Lengths(dict(sorted(counts.items())), name, in_order)


def lengths_of_rows(rows: Rows, refused: Sequence[str]) -> Lengths:
    """Return the lengths that the requests of a Run reached, in the order in which they were sent; refused ones held nothing."""
    import numpy as np

    output = np.where(np.isfinite(rows.output), rows.output, rows.chunks)
    total = np.nan_to_num(rows.prompt) + np.nan_to_num(output)
    held = ~rows.outcome_in(refused) & (total > 0)
    order = np.argsort(rows.sent_s[held], kind="stable")
    reached = np.minimum(total[held][order], LONGEST).astype(np.int64)
    found, counts = np.unique(reached, return_counts=True)
    return Lengths(dict(zip(found.tolist(), counts.tolist(), strict=True)), "requests.jsonl: prompt and output of each request", reached)


def together(parts: Sequence[Lengths], source: str = "") -> Lengths:
    """Return several distributions as one; in which order its requests came is known where it is of one alone."""
    counts: dict[int, int] = {}
    for part in parts:
        for length, count in part.counts.items():
            counts[length] = counts.get(length, 0) + count
    return Lengths(dict(sorted(counts.items())), source, parts[0].in_order if len(parts) == 1 else ())


def lengths_of(analysis: Analysis) -> Lengths:
    """Return the distribution of an Analysis, as it holds it."""
    return analysis.lengths


def waste(
    distribution: Lengths | Iterable[int] | Mapping[int, int],
    *,
    reserve: Sequence[int] = (),
    buckets: Sequence[int] | None = None,
    best: Sequence[int] = BEST,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    batch: int = 0,
) -> list[WasteRow]:
    """Return the payload share of each way of reserving, in the order: padded, reserved, buckets, best buckets, paged.

    ``reserve`` are fixed lengths that each request would be given (a server's max length), ``buckets`` the limits to reserve to (the usual powers of
    two up to the longest where None), ``best`` how many buckets the best ones may be, ``batch`` pads batches of so many requests, in the order in
    which they came, to the longest of each. Raises UsageError for numbers that cannot be meant.
    """
    known = distribution if isinstance(distribution, Lengths) else lengths(distribution)
    for name, sizes in (("reserve", reserve), ("buckets", buckets or ()), ("best", best), ("block_sizes", block_sizes)):
        if any(isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= LONGEST for size in sizes):
            raise UsageError(f"{name}={list(sizes)!r}: whole numbers from 1 on are meant", hint=f"for example {name}=(16, 32)")
    if not known.requests:
        return []
    payload, longest = known.payload, known.longest
    rows = [_row("padded", f"to the longest, {longest:,}", payload, longest * known.requests)]
    if batch > 1 and len(known.in_order):
        rows.append(_row("padded", f"to the longest of each {batch} in turn", payload, _in_batches(known.in_order, batch)))
    for size in dict.fromkeys(reserve):
        over = sum(count for length, count in known.counts.items() if length > size)
        rows.append(_row("reserved", f"{size:,} for each", payload, size * known.requests, over=over))
    limits = tuple(sorted(set(buckets))) if buckets is not None else _usual(longest)
    rows.append(_bucketed("buckets", limits, known))
    most = min(max(best, default=0), len(known.counts))
    for count, chosen in _best_buckets(known.counts, most).items():
        if count in best:
            rows.append(_bucketed(f"best {count} buckets", chosen, known))
    for size in dict.fromkeys(block_sizes):
        reserved = sum(-(-length // size) * size * count for length, count in known.counts.items())
        rows.append(_row("paged", f"in blocks of {size}", payload, reserved, block_size=size))
    return rows


def _row(scheme: str, detail: str, payload: int, reserved: int, *, over: int = 0, buckets: tuple[int, ...] = (), block_size: int = 0) -> WasteRow:
    share: Value = Reading(payload / reserved, "ratio", f"{payload:,} of {reserved:,} tokens") if reserved else Missing("nothing is reserved")
    if over:
        share = Missing(f"{over:,} request{'s are' if over != 1 else ' is'} longer and would not fit")
    return WasteRow(scheme, detail, payload, reserved, share, buckets, block_size)


def _usual(longest: int) -> tuple[int, ...]:
    """Return the usual buckets that the lengths reach, and beyond the last of them the next powers of two."""
    limits = [size for size in BUCKETS if size < longest]
    following = next((size for size in BUCKETS if size >= longest), 0) or 1 << math.ceil(math.log2(longest))
    beyond = [size for size in (BUCKETS[-1] << step for step in range(1, 20)) if size < longest]
    return tuple(sorted({*limits, *beyond, following}))


def _bucketed(scheme: str, limits: tuple[int, ...], known: Lengths) -> WasteRow:
    reserved = over = 0
    for length, count in known.counts.items():
        index = bisect_left(limits, length)
        if index < len(limits):
            reserved += limits[index] * count
        else:
            over += count
    shown = ", ".join(f"{limit:,}" for limit in limits[:12]) + (f" and {len(limits) - 12} more" if len(limits) > 12 else "")
    return _row(scheme, shown, known.payload, reserved, over=over, buckets=limits)


def _in_batches(in_order: Sequence[int], batch: int) -> int:
    total = 0
    for start in range(0, len(in_order), batch):
        part = in_order[start : start + batch]
        total += int(max(part)) * len(part)
    return total


def _best_buckets(counts: Mapping[int, int], most: int) -> dict[int, tuple[int, ...]]:
    """Return, for each number of buckets up to ``most``, the limits that reserve the fewest tokens for these lengths: exact.

    Dynamic programming over the distinct lengths: the last bucket of the first j lengths holds those after i, and costs the j-th length for
    each of them. For a growing j that minimum is the lower hull of lines (slope -C_i, C the requests so far), so a layer takes one pass.
    """
    sizes = sorted(counts)
    held = [0]
    for size in sizes:
        held.append(held[-1] + counts[size])
    cost = [0] + [size * held[j + 1] for j, size in enumerate(sizes)]
    picks: list[array[int]] = [array("q", [0]) * (len(sizes) + 1)]
    found: dict[int, tuple[int, ...]] = {1: (sizes[-1],)} if sizes and most else {}
    for count in range(2, most + 1):
        cost, pick = _layer(cost, held, sizes, count)
        picks.append(pick)
        limits, j = [], len(sizes)
        for layer in range(count - 1, -1, -1):
            limits.append(sizes[j - 1])
            j = picks[layer][j]
        found[count] = tuple(reversed(limits))
    return found


def _layer(before: Sequence[int], held: Sequence[int], sizes: Sequence[int], count: int) -> tuple[list[int], array[int]]:
    """Return the cost of the first j lengths in ``count`` buckets, and where the last of them begins; ``before`` is that of one bucket less."""
    infinite = 1 << 120
    cost, pick = [infinite] * (len(sizes) + 1), array("q", [0]) * (len(sizes) + 1)
    hull: deque[tuple[int, int, int]] = deque()  # slope, offset, i
    for j in range(count, len(sizes) + 1):
        line = (-held[j - 1], before[j - 1], j - 1)
        while len(hull) > 1 and (line[1] - hull[-2][1]) * (hull[-2][0] - hull[-1][0]) <= (hull[-1][1] - hull[-2][1]) * (hull[-2][0] - line[0]):
            hull.pop()
        hull.append(line)
        size = sizes[j - 1]
        while len(hull) > 1 and hull[1][0] * size + hull[1][1] <= hull[0][0] * size + hull[0][1]:
            hull.popleft()
        cost[j], pick[j] = hull[0][0] * size + hull[0][1] + size * held[j], hull[0][2]
    return cost, pick


def waste_values(known: Lengths, block_size: Value) -> dict[str, Value]:
    """Return the named quantities that conditions may use."""
    none = Missing("no request of ours held cache")
    if not known.requests:
        return {"waste.padded_share": none, "waste.paged_share": none, "length.mean": none, "length.max": none}
    paged: Value = block_size
    if isinstance(block_size, Reading) and block_size.number() >= 1:
        paged = waste(known, best=(), block_sizes=(int(block_size.number()),))[-1].share
    source = known.source or "lengths"
    return {
        "waste.padded_share": waste(known, best=(), block_sizes=())[0].share,
        "waste.paged_share": paged,
        "length.mean": Reading(known.mean, "tokens", source),
        "length.max": Reading(float(known.longest), "tokens", source),
    }
