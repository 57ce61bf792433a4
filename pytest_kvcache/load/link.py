"""The worker's end of the line to the master: its clock, when the load begins, its rows, and how it is told to stop.

Everything goes over Locust's own messages. The names of ours begin with ``kv_``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from time import monotonic
from typing import Any

import gevent
from gevent.event import Event

from pytest_kvcache.load import contract
from pytest_kvcache.load.clocks import Clock
from pytest_kvcache.load.pieces import RowsSender

CLOCK, ROWS, TAKEN, GO, HALT, WISH, FAILED = "kv_clock", "kv_rows", "kv_taken", "kv_go", "kv_halt", "kv_wish", "kv_failed"
ASK_EVERY_S = 0.5
ASK_AT_FIRST_S = 0.1
DRAIN_S = 15.0
DEAF_S = 2.0
# A master that has taken nothing for so long is gone: a worker does not press a server on for nobody.
MASTER_GONE_S = 20.0


class Link:
    """One for each worker process, made when it has met its master. ``base_s`` turns its monotonic clock into Unix seconds.

    Once ``went`` is set, ``first`` and ``step`` number its requests, ``workers`` and ``index`` are its place among all,
    ``name`` is what its rows bear, and ``begin_s`` is when the load begins, on this process's monotonic clock.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.base_s = time.time() - monotonic()
        self.clock = Clock()
        self.offset_s = 0.0
        self.rows: RowsSender | None = None
        self.load = ""
        self.went = Event()
        self.first, self.step, self.workers, self.index = 0, 1, 1, 0
        self.name = ""
        self.begin_s = 0.0
        self.on_go: Callable[[], None] | None = None
        self.on_halt: Callable[[str], None] | None = None
        runner.register_message(CLOCK, self._answered)
        runner.register_message(TAKEN, self._taken)
        runner.register_message(GO, self._go)
        runner.register_message(HALT, self._halt, concurrent=True)
        gevent.spawn(self._ask)

    def opens(self, load: str, on_go: Callable[[], None], on_halt: Callable[[str], None]) -> RowsSender:
        """Begin a load of that name and return where its lines go; its start line tells the master that this worker is ready."""
        self.load = load
        self.went.clear()
        self.on_go, self.on_halt = on_go, on_halt
        self.rows = RowsSender(self._send_piece)
        return self.rows

    def wish(self, reason: str) -> None:
        """Tell the master why this worker wants the load to end."""
        self._send(WISH, {"load": self.load, "reason": reason})

    def failed(self, text: str) -> None:
        """Tell the master why this worker cannot go on (failure_text of an error)."""
        self._send(FAILED, {"load": self.load, "text": text})

    def drain(self) -> None:
        """Wait until the master has every line, or takes none for a quarter of a minute; two seconds where its word cannot come any more."""
        rows = self.rows
        if rows is None:
            return
        rows.flush()
        begun_s = monotonic()
        while rows.under_way and not rows.failure and monotonic() - begun_s < (DRAIN_S if self._listens() else DEAF_S):
            gevent.sleep(0.02)
            rows.flush()

    def _listens(self) -> bool:
        """Say whether somebody reads what the master says: Locust's reader is gone after "quit", and it waits here itself where it stops the test."""
        readers = self.runner.greenlet
        return len(readers) > 0 and gevent.getcurrent() not in readers

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        try:
            self.runner.send_message(kind, data)
        except Exception:  # a broken line: Locust mends or ends it, and rows are sent again
            return

    def _send_piece(self, number: int, data: bytes) -> None:
        self.runner.send_message(ROWS, {"load": self.load, "number": number, "data": data})

    def _ask(self) -> None:
        asked = 0
        while True:
            self._send(CLOCK, {"asked_s": monotonic()})
            asked += 1
            gevent.sleep(ASK_AT_FIRST_S if asked < 10 or not self.went.is_set() else ASK_EVERY_S)

    def _answered(self, msg: Any, **_: Any) -> None:
        base_s = self.base_s
        self.clock.add(base_s + float(msg.data["asked_s"]), float(msg.data["master_s"]), base_s + monotonic())

    def _taken(self, msg: Any, **_: Any) -> None:
        if self.rows is not None and msg.data["load"] == self.load:
            self.rows.taken(int(msg.data["number"]))

    def _go(self, msg: Any, **_: Any) -> None:
        said = msg.data
        if said["load"] != self.load or self.went.is_set():
            return
        self.first, self.step, self.workers, self.index = (int(said[name]) for name in ("first", "step", "workers", "index"))
        self.name = str(said["name"])
        self.offset_s = self.clock.adopt()
        self.begin_s = float(said["begin_s"]) - self.offset_s - self.base_s
        if self.on_go is not None:
            self.on_go()
        self.went.set()

    def _halt(self, msg: Any, **_: Any) -> None:
        said = msg.data
        if said["load"] != self.load:
            return
        environment = self.runner.environment
        environment.stop_timeout = float(said["within_s"])
        if self.on_halt is not None:
            self.on_halt(str(said["reason"]) or contract.BY_STOP)
        self.runner.stop()
