"""The small process that owns a launched server: ``python -m pytest_kvcache.server.supervisor``.

It is told what to start in one line of JSON on its standard input, and then keeps reading there: the line ``stop``, or the
end of the pipe, ends the server. The pipe ends with the process that holds it, however that dies, so no server outlives a
pytest that was killed. TERM and HUP end the server as well; INT does not, and the supervisor runs in a session of its own,
so that Ctrl-C in a terminal reaches pytest alone and pytest decides.

The instructions: ``{"argv": [...], "env": {additions}, "cwd": path, "log": path, "stop_timeout_s": seconds, "secrets": [...]}``.
It answers with lines of JSON on its standard output: ``{"event": "started", "pid": n}``, ``{"event": "failed", "errno": n, "error":
text}``, ``{"event": "exited", "status": n}`` (negative: the signal that ended it) and ``{"event": "stopped", "left": [pids]}``.

On Linux it is the reaper of all descendants (PR_SET_CHILD_SUBREAPER), so a grandchild that was forked off twice stays in
the tree; elsewhere the server's process group stands in. Output of the server goes into the log line by line, with keys taken
out before they are written. Standard library and psutil only: it must be up in well under a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import psutil

from pytest_kvcache.server.redaction import redact

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_WAIT_S = 10.0
_MAX_LINE = 1 << 16
_MAX_LOG_BYTES = 1 << 30


def _libc() -> Any:
    """Return the C library where prctl(2) is, else None."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


def _prctl(libc: Any, option: int, value: int) -> bool:
    """Call prctl(2); say whether it worked."""
    return libc is not None and hasattr(libc, "prctl") and int(libc.prctl(option, value, 0, 0, 0)) == 0


class LogWriter:
    """Writes a server's output line by line with its secrets taken out; what does not fit any more is counted and left out."""

    def __init__(self, file: BinaryIO, secrets: list[str]) -> None:
        self._file = file
        self._secrets = secrets
        self._rest = b""
        self._written = 0

    def feed(self, data: bytes) -> None:
        """Write the whole lines in ``data`` and what was held back before; a carriage return ends a line too (progress bars)."""
        data = self._rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end == 0 and len(data) > _MAX_LINE:
            end = len(data)
        self._rest = data[end:]
        if end:
            self._write(data[:end])

    def flush(self) -> None:
        """Write what is held back, although its line has not ended."""
        rest, self._rest = self._rest, b""
        if rest:
            self._write(rest)

    def _write(self, data: bytes) -> None:
        if self._written > _MAX_LOG_BYTES:
            return
        safe = redact(data.decode("utf-8", "replace"), self._secrets).encode("utf-8", "replace")
        self._written += len(safe)
        # A full disk must not stop the server: its output is read on and lost.
        with contextlib.suppress(OSError):
            self._file.write(safe)
            self._file.flush()
            if self._written > _MAX_LOG_BYTES:
                self._file.write(b"\n[the log is cut here: it had grown beyond 1 GiB]\n")
                self._file.flush()


class Supervisor:
    """One server, from its start until nothing of it is left."""

    def __init__(self, order: dict[str, Any], more: bytes = b"") -> None:
        self.order = order
        self.words = more
        self.stopping = b"stop\n" in more
        self.status: int | None = None
        self.pid = 0
        self.output = -1
        self.parent = os.getppid()
        self.selector = selectors.DefaultSelector()
        self.libc = _libc()
        self.is_reaper = False
        self.log: LogWriter

    def run(self) -> int:
        """Start, watch and end the server. Returns the exit status of this process."""
        wake, woken = os.pipe()
        for end in (wake, woken):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        # A handler, and not SIG_IGN: what is ignored here would be ignored by the server as well.
        for number, action in ((signal.SIGINT, False), (signal.SIGCHLD, False), (signal.SIGTERM, True), (signal.SIGHUP, True)):
            signal.signal(number, self._on_signal(stop=action))
        self.is_reaper = _prctl(self.libc, _PR_SET_CHILD_SUBREAPER, 1)
        with open(self.order["log"], "ab") as file:  # noqa: PTH123 -- pathlib costs start-up time for nothing
            self.log = LogWriter(file, list(self.order.get("secrets", ())))
            if not self._start():
                return 1
            self.selector.register(wake, selectors.EVENT_READ, "wake")
            self.selector.register(0, selectors.EVENT_READ, "order")
            self._watch()
            left = self._end_tree(float(self.order["stop_timeout_s"]))
            self._drain(0.2)
            self.log.flush()
        _say(event="stopped", left=left)
        return 0

    def _on_signal(self, *, stop: bool) -> Callable[[int, object], None]:
        def handle(_number: int, _frame: object) -> None:
            self.stopping = self.stopping or stop

        return handle

    def _start(self) -> bool:
        environment = {**os.environ, **self.order.get("env", {})}
        try:
            child = subprocess.Popen(
                self.order["argv"],
                env=environment,
                cwd=self.order.get("cwd"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Should this process itself be killed, the server is told to end. No thread runs here that a fork could hurt.
                preexec_fn=lambda: _prctl(self.libc, _PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _say(event="failed", errno=getattr(error, "errno", None), error=getattr(error, "strerror", None) or str(error))
            return False
        assert child.stdout is not None
        self.child = child
        self.pid = child.pid
        self.output = child.stdout.fileno()
        os.set_blocking(self.output, False)
        self.selector.register(self.output, selectors.EVENT_READ, "output")
        _say(event="started", pid=self.pid)
        return True

    def _watch(self) -> None:
        """Return once the server has exited or shall end."""
        while True:
            idle = not self._pump(0.5)
            if idle:
                self.log.flush()
            self._reap()
            if self.status is not None:
                self._drain(0.5)
                self.log.flush()
                _say(event="exited", status=self.status)
                return
            # A fork of the parent may hold the pipe open after the parent has died; then we have another parent.
            if self.stopping or os.getppid() != self.parent:
                return

    def _pump(self, timeout_s: float) -> bool:
        """Handle what has come, waiting at most ``timeout_s``; say whether the server wrote something."""
        wrote = False
        for key, _ in self.selector.select(timeout_s):
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if key.data == "output":
                self.log.feed(data)
                wrote = wrote or bool(data)
            elif key.data == "order":
                self.words = self.words[-5:] + data
                self.stopping = self.stopping or not data or b"stop\n" in self.words
            if not data:
                self.selector.unregister(key.fd)
        return wrote

    def _drain(self, timeout_s: float) -> None:
        """Read the server's last output: until its pipe ends, or for ``timeout_s`` where something still holds it open."""
        end = time.monotonic() + timeout_s
        while any(key.data == "output" for key in self.selector.get_map().values()) and time.monotonic() < end:
            self._pump(0.05)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)
                self.child.returncode = self.status

    def _tree(self) -> list[psutil.Process]:
        """Return every live descendant."""
        self._reap()
        with contextlib.suppress(psutil.Error):
            return [process for process in psutil.Process().children(recursive=True) if is_live(process)]
        return []

    def _signal_all(self, number: signal.Signals, told: set[int]) -> bool:
        """Send a signal to each of the tree that is not in ``told``; say whether any is left."""
        tree = self._tree()
        for process in tree:
            if process.pid not in told:
                told.add(process.pid)
                with contextlib.suppress(psutil.Error, OSError):
                    process.send_signal(number)
        return bool(tree)

    def _end_tree(self, timeout_s: float) -> list[int]:
        """TERM to all, KILL to what is left after ``timeout_s``. Returns the pids that even KILL did not end."""
        for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, _KILL_WAIT_S)):
            end = time.monotonic() + wait_s
            told: set[int] = set()
            if not self.is_reaper:
                # Where orphans do not come to us, whoever is in the server's group is no descendant any more.
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, number)
            while self._signal_all(number, told) and time.monotonic() < end:
                # Output is read on meanwhile: a server that writes into a full pipe cannot end.
                self._pump(0.05)
        return [process.pid for process in self._tree()]


def is_live(process: psutil.Process) -> bool:
    """Return whether a process runs: a dead one whose parent has not taken note of it does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _say(**event: Any) -> None:
    """Write one line for the parent; it may be dead."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(event).encode() + b"\n")


def main() -> int:
    """Read the instructions and serve them. Returns the exit status."""
    data = b""
    while b"\n" not in data:
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return 2
        data += chunk
    line, _, rest = data.partition(b"\n")
    return Supervisor(json.loads(line), rest).run()


if __name__ == "__main__":
    sys.exit(main())
