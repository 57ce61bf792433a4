"""After a load a server is watched until it is idle, and longer where it then still holds something."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from pytest_kvcache import measure
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.records import TelemetryRow
from pytest_kvcache.server.address import Endpoint

TARGET = measure.Target((Endpoint("http://127.0.0.1:1"),), (DIALECTS["vllm"],))


class Watched:
    """A sampler that says what a function of the time says."""

    hz = 100.0

    def __init__(self, tell: Callable[[float], dict[str, float]]) -> None:
        self.began = time.monotonic()
        self.tell = tell

    def latest_of(self, _: int) -> TelemetryRow:
        return TelemetryRow(0.0, values=self.tell(time.monotonic() - self.began))


def waited(monkeypatch: pytest.MonkeyPatch, tell: Callable[[float], dict[str, float]]) -> float:
    monkeypatch.setattr(measure, "LEAK_WATCH_S", 0.6)
    sampler: Any = Watched(tell)
    return measure._drain(TARGET, sampler)


def test_an_idle_server_that_holds_nothing_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(monkeypatch, lambda _: {"running": 0.0, "waiting": 0.0, "used_blocks": 0.0}) < 0.5


def test_blocks_that_stay_are_watched_and_those_given_back_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(monkeypatch, lambda _: {"running": 0.0, "waiting": 0.0, "used_blocks": 12.0}) >= 0.6
    late = waited(monkeypatch, lambda t: {"running": float(t < 0.1), "waiting": 0.0, "used_blocks": 12.0 * (t < 0.3)})
    assert 0.25 < late < 0.6
