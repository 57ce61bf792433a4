"""The supervisor alone: it starts, reports, writes the log without keys, and ends the whole tree for each of its reasons."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_kvcache.errors import LaunchFailed
from pytest_kvcache.server.process import OwnedProcess
from pytest_kvcache.server.supervisor import LogWriter

FORKS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", sleep])
    os._exit(0)
os.wait()
print("all are up", flush=True)
time.sleep(60)
"""


class Session:
    """One supervisor under test, spoken to as pytest does."""

    def __init__(self, log: Path, argv: list[str], **order: Any) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest_kvcache.server.supervisor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.say(json.dumps({"argv": argv, "log": str(log), "stop_timeout_s": 0.5, **order}))

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else {}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 10
        while text not in self.log.read_text() and time.monotonic() < end:
            time.sleep(0.02)
        assert text in self.log.read_text()


@contextlib.contextmanager
def supervised(log: Path, argv: list[str], **order: Any) -> Iterator[Session]:
    session = Session(log, argv, **order)
    try:
        yield session
    finally:
        with contextlib.suppress(OSError):
            session.close()
        session.process.wait(20)
        assert session.process.stdout is not None
        session.process.stdout.close()


def code(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_it_reports_the_start_the_exit_and_the_end(tmp_path: Path) -> None:
    with supervised(tmp_path / "log", code("print('hello'); raise SystemExit(7)")) as session:
        started = session.hear()
        assert started["event"] == "started"
        assert session.hear() == {"event": "exited", "status": 7}
        # The log is whole by the time the exit is reported.
        assert session.log.read_text() == "hello\n"
        assert session.hear() == {"event": "stopped", "left": []}
        assert session.process.wait(5) == 0


def test_a_command_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    with supervised(tmp_path / "log", ["/no/such/program"]) as session:
        assert session.hear() == {"event": "failed", "errno": 2, "error": "No such file or directory"}
    with pytest.raises(LaunchFailed, match="cannot be started"):
        OwnedProcess(["/no/such/program"], env={}, log=tmp_path / "log", stop_timeout_s=1.0)


@pytest.mark.parametrize("reason", ["stop", "pipe", "TERM", "HUP"])
def test_every_reason_to_end_takes_the_whole_tree_along(reason: str, tmp_path: Path) -> None:
    with supervised(tmp_path / "log", code(FORKS)) as session:
        root = session.hear()["pid"]
        session.wait_for("all are up")
        supervisor = psutil.Process(session.process.pid)
        tree = supervisor.children(recursive=True)
        assert len(tree) == 3
        # The grandchild that was forked off twice has come to the supervisor.
        assert sum(process.ppid() == supervisor.pid for process in tree) == 2
        if reason == "stop":
            session.say("stop")
        elif reason == "pipe":
            session.close()
        else:
            session.process.send_signal(signal.SIGTERM if reason == "TERM" else signal.SIGHUP)
        assert session.hear() == {"event": "stopped", "left": []}
        assert not any(process.is_running() for process in tree)
        assert not psutil.pid_exists(root)


def test_an_interrupt_does_not_end_it(tmp_path: Path) -> None:
    with supervised(tmp_path / "log", code("import time; print('up', flush=True); time.sleep(60)")) as session:
        session.hear()
        session.wait_for("up")
        session.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert session.process.poll() is None


def test_a_server_that_ends_in_time_after_term_writes_its_last_words(tmp_path: Path) -> None:
    # More than a pipe holds: it can only end because its output is read on.
    talk = "import signal, sys, time\ndef bye(*_):\n    print('b' * 300_000); print('bye'); sys.exit(0)\nsignal.signal(signal.SIGTERM, bye)\nprint('up', flush=True)\n"
    with supervised(tmp_path / "log", code(talk + "time.sleep(60)"), stop_timeout_s=10.0) as session:
        session.hear()
        session.wait_for("up")
        began = time.monotonic()
        session.say("stop")
        assert session.hear()["event"] == "stopped"
        assert time.monotonic() - began < 9.5
        assert session.log.read_text().endswith("bye\n")


def test_what_outlives_the_command_is_ended_as_well(tmp_path: Path) -> None:
    spawn = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)"
    with supervised(tmp_path / "log", code(spawn)) as session:
        session.hear()
        assert session.hear() == {"event": "exited", "status": 0}
        assert session.hear() == {"event": "stopped", "left": []}
        assert not psutil.pid_exists(int(session.log.read_text()))


def test_environment_folder_and_secrets_of_the_order_hold(tmp_path: Path) -> None:
    show = "import os; print(os.getcwd(), os.environ['GIVEN'], 'PATH' in os.environ); print('key is geheim-1'); print('--api-key other')"
    with supervised(tmp_path / "log", code(show), env={"GIVEN": "given"}, cwd=str(tmp_path), secrets=["geheim-1"]) as session:
        session.hear()
        session.hear()
        assert session.log.read_text() == f"{tmp_path} given True\nkey is ***\n--api-key ***\n"


def test_without_an_order_it_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_kvcache.server.supervisor"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")


def test_it_imports_nothing_heavy() -> None:
    listing = (
        "import sys, pytest_kvcache.server.supervisor; print(*sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(code(listing), capture_output=True, text=True, timeout=20, check=True)
    loaded = {name for name in done.stdout.split() if not name.startswith(("_", "sitecustomize", "distutils"))}
    assert loaded <= {"psutil", "pytest_kvcache"}


def written(*pieces: bytes, flush: bool = True, secrets: list[str] | None = None) -> str:
    file = io.BytesIO()
    writer = LogWriter(file, secrets or [])
    for piece in pieces:
        writer.feed(piece)
    if flush:
        writer.flush()
    return file.getvalue().decode()


def test_lines_are_written_whole_so_that_no_key_is_split() -> None:
    assert written(b"--api-key ge", b"heim\nne", b"xt\n") == "--api-key ***\nnext\n"
    assert written(b"a geh", b"eim-1 b", secrets=["geheim-1"]) == "a *** b"
    assert written(b"one\ntw", flush=False) == "one\n"
    assert written(b"  1%\r 50%\r", flush=False) == "  1%\r 50%\r"
    assert written(b"caf\xc3", b"\xa9\n\xff\n") == "café\n\ufffd\n"


def test_a_line_without_an_end_is_written_in_pieces() -> None:
    assert len(written(b"x" * 40_000, b"x" * 40_000, flush=False)) == 80_000


def test_a_full_disk_does_not_stop_the_server() -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    writer = LogWriter(Full(), [])
    writer.feed(b"line\n")
    writer.flush()


def test_a_log_is_bounded_and_says_that_it_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_kvcache.server.supervisor._MAX_LOG_BYTES", 10)
    assert written(b"0123456789\n", b"more\n", b"more\n").startswith("0123456789\n\n[the log is cut here")
    assert "more" not in written(b"0123456789\n", b"more\n")


def test_a_fork_of_the_owner_does_not_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = OwnedProcess(code("import time; time.sleep(60)"), env={}, log=tmp_path / "log", stop_timeout_s=1.0)
    try:
        monkeypatch.setattr("os.getpid", lambda: 1)
        process.stop()
        assert process.poll()
        monkeypatch.undo()
    finally:
        process.stop()
    assert not process.poll()
    assert process.pids() == []
