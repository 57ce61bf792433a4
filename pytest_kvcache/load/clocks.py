"""How far the clock of a load worker is from the master's, from questions and answers over the network.

The master answers each question with its own time. Half of a round trip is the most by which the middle of it can be wrong, so the
shortest round trips tell most (the measure of NTP). What two clocks drift apart during a load is found by asking until its end.
"""

from __future__ import annotations

from collections import deque

_KEPT = 32


class Clock:
    """The answers so far. Times in seconds; an offset is what is added to this process's time to get the master's."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._adopted: tuple[float, float] | None = None

    def add(self, asked_s: float, master_s: float, answered_s: float) -> None:
        """Take one answer: when it was asked and came, on this clock, and what the master's clock said in between."""
        error_s = (answered_s - asked_s) / 2
        if error_s >= 0:
            self._recent.append((error_s, master_s - (asked_s + answered_s) / 2))

    @property
    def known(self) -> int:
        """How many of the last answers are kept."""
        return len(self._recent)

    def adopt(self) -> float:
        """Return the best offset known now, which the load then keeps to; 0 where nothing is known."""
        if not self._recent:
            return 0.0
        self._adopted = min(self._recent)
        self._recent.clear()
        return self._adopted[1]

    @property
    def error_s(self) -> float | None:
        """By how much the adopted offset may be wrong at the worst: half of its round trip, and what the clocks drifted since.

        None where no answer came at all.
        """
        if self._adopted is None:
            return None
        error_s, offset_s = self._adopted
        if not self._recent:
            return error_s
        since_error_s, since_offset_s = min(self._recent)
        return max(error_s, abs(since_offset_s - offset_s) + since_error_s)
