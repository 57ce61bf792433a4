"""The event loop's own lag: how much later than due it comes back to a greenlet that slept, and how to be called no sooner than due."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from time import monotonic
from typing import Any

import gevent

_KEPT = 500_000


class Lags:
    """Lags in seconds; of very many every second one is kept."""

    def __init__(self) -> None:
        self._lags = array("d")
        self.most = 0.0

    def add(self, lag_s: float) -> None:
        """Take one lag; a negative one counts as none."""
        self._lags.append(max(0.0, lag_s))
        self.most = max(self.most, lag_s)
        if len(self._lags) > _KEPT:
            self._lags = self._lags[::2]

    @property
    def p99(self) -> float:
        """The 99th percentile in seconds; 0 without any."""
        lags = sorted(self._lags)
        return lags[min(len(lags) - 1, int(len(lags) * 0.99))] if lags else 0.0


def call_at(at_s: float, function: Callable[..., None], *arguments: object) -> Any:
    """Return a greenlet that calls a function at that monotonic time.

    The event loop counts timers from when it last looked at the clock: after a second of computing they fire a second early.
    """

    def wait() -> None:
        while (wait_s := at_s - monotonic()) > 0:
            gevent.sleep(wait_s)
        function(*arguments)

    return gevent.spawn(wait)
