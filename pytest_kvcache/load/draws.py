"""Lengths drawn for a request from the seed and the request's number, so that both sides of a comparison draw the same.

A draw depends on nothing else: not on which user or worker sends the request, nor on how fast earlier ones were answered.
"""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

_NORMAL = NormalDist()


class Draw:
    """The random numbers of one request: the same seed, lane and number give the same values in the same order."""

    __slots__ = ("_at", "_key", "_numbers")

    def __init__(self, seed: int, lane: str, number: int) -> None:
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
