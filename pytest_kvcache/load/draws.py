"""Lengths drawn for a request from the seed and the request's number, so that both sides of a comparison draw the same.

A draw depends on nothing else: not on which user or worker sends the request, nor on how fast earlier ones were answered.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import NormalDist

from pytest_kvcache.errors import UsageError

_MOST_BINS = 100_000
_HINT = "write lengths and their weights as 100-200:60,4000:5, or a file of low,high,weight"
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Histogram:
    """Lengths of one's own: ``bins`` of lowest length, highest length and how much of all falls from there on down (0 to 1)."""

    bins: tuple[tuple[int, int, float], ...]


def parse_histogram(text: str) -> Histogram:
    """Return the histogram of ``100-200:60,200-2000:35,4000:5`` (length or range, then weight), or of lines in a file.

    A line of a file is ``length,weight`` or ``lowest,highest,weight``; a first line of names is left out. Raises UsageError.
    """
    weighed: list[tuple[int, int, float]] = []
    listed = ":" in text
    parts = text.split(",") if listed else text.splitlines()
    for at, part in enumerate(parts[: _MOST_BINS + 1]):
        words = part.strip().replace("-", ":").split(":") if listed else [word.strip() for word in part.replace(";", ",").split(",")]
        if words == [""]:
            continue
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            if at == 0 and not listed:
                continue
            numbers = []
        if len(numbers) not in (2, 3) or not all(0 <= number < 1e9 for number in numbers) or numbers[0] < 1 or numbers[-2] < numbers[0]:
            raise UsageError(f"{part.strip()[:60]!r} is no part of a histogram", hint=_HINT)
        weighed.append((int(numbers[0]), int(numbers[-2]), numbers[-1]))
    total = sum(weight for _, _, weight in weighed)
    if not total > 0 or len(parts) > _MOST_BINS:
        what = "the weights of the histogram add up to nothing" if not total > 0 else f"a histogram has {_MOST_BINS:,} parts at most"
        raise UsageError(what, where=text[:60], hint=_HINT)
    passed, bins = 0.0, []
    for low, high, weight in weighed:
        passed += weight
        bins.append((low, high, passed / total))
    return Histogram(tuple(bins))


class Draw:
    """The random numbers of one request: the same seed, lane and number give the same values in the same order.

    ``number`` counts requests, or conversations where there are such.
    """

    __slots__ = ("_at", "_key", "_numbers", "number")

    def __init__(self, seed: int, lane: str, number: int) -> None:
        self.number = number
        self._key = f"{seed}/{lane}/{number}".encode()
        self._numbers: tuple[int, ...] = ()
        self._at = 0

    def unit(self) -> float:
        """Return the next number, above 0 and below 1, evenly distributed."""
        place, offset = divmod(self._at, 8)
        if offset == 0:
            digest = hashlib.blake2b(self._key, salt=place.to_bytes(8, "little")).digest()
            self._numbers = tuple(int.from_bytes(digest[at : at + 8], "little") >> 11 for at in range(0, 64, 8))
        self._at += 1
        return (self._numbers[offset] + 0.5) / 2**53

    def uniform(self, low: int, high: int) -> int:
        """Return a whole number from ``low`` to ``high``, both included, evenly distributed; ``low`` where ``high`` is below it."""
        if high <= low:
            return low
        return low + min(int(self.unit() * (high - low + 1)), high - low)

    def lognormal(self, median: float, sigma: float, low: int, high: int) -> int:
        """Return a whole number from a lognormal distribution with that median, cut to ``low`` to ``high``.

        ``sigma`` is the standard deviation of the logarithm: 0.8 puts nine of ten values between 0.27 and 3.7 medians.
        """
        value = math.exp(math.log(max(median, 1.0)) + sigma * _NORMAL.inv_cdf(self.unit())) if median > 0 else 0.0
        return round(min(max(value, low), max(high, low)))

    def exponential(self, mean: float) -> float:
        """Return a number from 0 on with that mean, exponentially distributed: times between events that know nothing of each other."""
        return -mean * math.log(self.unit())

    def of(self, histogram: Histogram) -> int:
        """Return a length from a histogram: a bin by its weight, then evenly inside it."""
        bins = histogram.bins
        at = min(bisect_left(bins, self.unit(), key=lambda one: one[2]), len(bins) - 1)
        return self.uniform(bins[at][0], bins[at][1])
