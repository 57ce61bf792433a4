"""What the master hears from its workers, over Locust's own messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from time import monotonic
from typing import Any

import gevent

from pytest_kvcache.load import link
from pytest_kvcache.load.master import MasterSession


def listen(runner: Any, session: Callable[[], object]) -> None:
    """Register what workers send to the master; ``session`` returns the load that runs, of whichever kind."""
    base_s = time.time() - monotonic()

    def current(msg: Any) -> MasterSession | None:
        found = session()
        return found if isinstance(found, MasterSession) and msg.data["load"] == found.load else None

    def asked(msg: Any, **_: Any) -> None:
        found = session()
        now_s = found.now_s() if isinstance(found, MasterSession) else base_s + monotonic()
        runner.send_message(link.CLOCK, {"asked_s": msg.data["asked_s"], "master_s": now_s}, client_id=msg.node_id)

    def rows(msg: Any, **_: Any) -> None:
        if (found := current(msg)) is not None:
            found.listener = gevent.getcurrent()
            found.took(msg.node_id, int(msg.data["number"]), msg.data["data"])

    def wish(msg: Any, **_: Any) -> None:
        if (found := current(msg)) is not None:
            found.wished(msg.node_id, str(msg.data["reason"]))

    def failed(msg: Any, **_: Any) -> None:
        if (found := current(msg)) is not None:
            found.worker_failed(msg.node_id, str(msg.data["text"]))

    for name, listener in ((link.CLOCK, asked), (link.ROWS, rows), (link.WISH, wish), (link.FAILED, failed)):
        runner.register_message(name, listener)
