"""The side of the supervisor that pytest holds: one process tree that we started, and its end.

The tree ends with ``stop``, at the exit of this interpreter, and when this process dies in whatever way, because the pipe to the
supervisor then closes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import pytest_kvcache
from pytest_kvcache.errors import CannotWrite, LaunchFailed
from pytest_kvcache.server.supervisor import is_live

_START_S = 30.0
_EXTRA_S = 15.0
# The package may be importable here by a path that only this process has; it is put last, so that it shadows nothing.
_SUPERVISOR = "import sys; sys.path.append(sys.argv.pop(1)); from pytest_kvcache.server.supervisor import main; sys.exit(main())"

_running: set[OwnedProcess] = set()


class OwnedProcess:
    """A command and all that it starts, owned by a supervisor. ``pid`` is the command's own, ``status`` how it ended."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, stop_timeout_s: float, secrets: Sequence[str] = ()) -> None:
        """Start it; its output goes to ``log``, which is emptied first.

        Raises CannotWrite for the log, and LaunchFailed where the command cannot be started at all.
        """
        self.log = log
        self.pid = 0
        self.status: int | None = None
        self.lost = False
        self._stop_timeout_s = stop_timeout_s
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._stopped = False
        self._unread = b""
        self._events: list[dict[str, Any]] = []
        self._born = 0.0
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_bytes(b"")
            with log.open("ab") as errors:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-P", "-c", _SUPERVISOR, str(Path(pytest_kvcache.__file__).parent.parent)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
        except OSError as error:
            raise CannotWrite(
                f"the log of the server cannot be written: {error.strerror or error}", where=str(log), hint="free space, or check permissions"
            ) from None
        _running.add(self)
        order = {
            "argv": list(argv),
            "env": dict(env),
            "cwd": str(Path.cwd()),
            "log": str(log),
            "stop_timeout_s": stop_timeout_s,
            "secrets": list(secrets),
        }
        self._tell(json.dumps(order).encode() + b"\n")
        try:
            self._await_start()
        except BaseException:
            self.stop()
            raise

    def _await_start(self) -> None:
        end = time.monotonic() + _START_S
        while not self._events and not self.lost and time.monotonic() < end:
            self._read(0.5)
        event = self._events[0] if self._events else {"event": "failed", "error": "the process that watches over it did not answer"}
        if event["event"] == "failed":
            raise LaunchFailed(f"the command cannot be started: {event.get('error')}")
        self.pid = int(event["pid"])
        with contextlib.suppress(psutil.Error):
            self._born = psutil.Process(self.pid).create_time()

    def _tell(self, line: bytes) -> None:
        pipe = self._supervisor.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):
            pipe.write(line)
            pipe.flush()

    def _read(self, timeout_s: float) -> None:
        """Take in what the supervisor has said, waiting at most ``timeout_s`` seconds for the first of it."""
        pipe = self._supervisor.stdout
        assert pipe is not None
        if self.lost or pipe.closed:
            return
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while poll.poll(timeout_s * 1000):
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                self.lost = True
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                self._events.append(event)
                if event["event"] == "exited":
                    self.status = int(event["status"])
            timeout_s = 0.0

    def poll(self) -> bool:
        """Return whether the command still runs; ``status`` is set where it has exited, and ``lost`` where its supervisor has."""
        with self._lock:
            self._read(0.0)
            return self.status is None and not self.lost

    def pids(self) -> list[int]:
        """Return the pids of the tree that are alive now, the command's own first."""
        try:
            tree = psutil.Process(self._supervisor.pid).children(recursive=True)
        except psutil.Error:
            tree = self._orphans()
        alive = [process.pid for process in tree if is_live(process)]
        return sorted(alive, key=lambda pid: pid != self.pid)

    def stop(self) -> None:
        """End the whole tree: TERM, then KILL after the stop time. Returns when nothing is left; a second call does nothing."""
        if os.getpid() != self._owner:
            return  # a fork of the process that owns it
        with self._lock:
            if self._stopped:
                return
            stdin, stdout = self._supervisor.stdin, self._supervisor.stdout
            assert stdin is not None
            assert stdout is not None
            if not stdin.closed:
                self._tell(b"stop\n")
                with contextlib.suppress(OSError):
                    stdin.close()
            try:
                self._supervisor.wait(self._stop_timeout_s + _EXTRA_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
            self._read(0.0)
            for process in self._orphans():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            stdout.close()
            self._stopped = True
            _running.discard(self)

    def _orphans(self) -> list[psutil.Process]:
        """Return what is left of the tree where the supervisor is gone: the command's session, and the descendants of the command."""
        if not self.pid or not self._born:
            return []
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.pid)
            if root.create_time() != self._born:
                return []  # the number has been given to another process, which is no business of ours
            found = {process.pid: process for process in (root, *root.children(recursive=True))}
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(pid) == self.pid:
                    found[pid] = psutil.Process(pid)
        return list(found.values())


@atexit.register
def _stop_all() -> None:
    """End what still runs when this interpreter exits."""
    for process in list(_running):
        process.stop()
