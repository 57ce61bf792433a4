"""Loads of several processes: their rows come together exactly at the master, and a part that is missing is told."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.errors import LoadFailed
from pytest_kvcache.load import contract
from pytest_kvcache.load.contract import LoadFile, is_complete, read_load, read_rows
from pytest_kvcache.load.runner import LoadResult, profile_path, run_load
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import Settings

ROOT = str(Path(__file__).parent.parent.parent)


def press(server: ScriptedServer, folder: Path, **more: Any) -> LoadResult:
    options = {"stop_timeout_s": 3, **more.pop("options", {})}
    given = {"users": 4, "duration_s": 60.0, "output_tokens": 4, "processes": 2, "request_timeout_s": 20.0, **more}
    return run_load([parse_endpoint(server.url, Settings())], "normal", folder, options=options, **given)


def wait_for(ready: Callable[[], bool], within_s: float = 45.0) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.05)


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """Run ``work`` in a thread; its result or its exception comes into the list."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(work())
        except Exception as error:
            came.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, came


def master_of_this_test() -> psutil.Process:
    found = [child for child in psutil.Process().children() if "locust" in " ".join(child.cmdline())]
    assert len(found) == 1
    return found[0]


def asked_for(server: ScriptedServer, tokens: int) -> list[str]:
    """The prompts of the requests for so many tokens: the preparation asks for two."""
    return [str(seen.body["prompt"]) for seen in server.seen if seen.body and seen.body.get("max_tokens") == tokens]


def rows_in(path: Path) -> int:
    return path.read_bytes().count(b'"kind":"request"') if path.exists() else 0


def by_worker(path: Path) -> Counter[str]:
    return Counter(row.worker for row in read_rows(path))


@pytest.mark.slow
def test_rows_of_two_processes_come_together_in_one_file_and_none_twice(tmp_path: Path) -> None:
    with ScriptedServer(itl_s=0.002) as server:
        result = press(server, tmp_path, options={"requests": 41})
        sent = len(asked_for(server, 4))
    assert (result.complete, result.problems, result.rows) == (True, [], 41)
    rows = list(read_rows(result.rows_path))
    assert sorted(row.id for row in rows) == list(range(41))
    assert sent == 41
    assert [row.end_s for row in rows] == sorted(row.end_s for row in rows)
    assert by_worker(result.rows_path) == {"w0": 21, "w1": 20}
    load = read_load(result.rows_path)
    assert load.start is not None
    assert result.rows_path.read_bytes().startswith(b'{"kind":"start"')
    assert (load.start.options["users"], sorted(load.start.options["workers"])) == (4, ["w0", "w1"])
    assert [(end.worker, end.rows, end.reason) for end in load.ends] == [("w0", 21, contract.BY_REQUESTS), ("w1", 20, contract.BY_REQUESTS)]
    assert all(end.cpu_s > 0 and end.clock_error_s is not None and abs(end.clock_offset_s or 0.0) < 0.05 for end in load.ends)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["locust.log", "requests.jsonl"]


@pytest.mark.slow
def test_the_same_prompts_are_sent_by_one_process_and_by_two(tmp_path: Path) -> None:
    sent = []
    for processes in (1, 2):
        with ScriptedServer() as server:
            press(server, tmp_path / str(processes), processes=processes, options={"requests": 12, "nonce": "a"})
            sent.append(sorted(asked_for(server, 4)))
    assert sent[0] == sent[1]
    assert len(set(sent[0])) == 12


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_and_what_it_sent_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with ScriptedServer(itl_s=0.02) as server:
        thread, came = in_background(lambda: press(server, tmp_path, duration_s=10.0))
        wait_for(lambda: rows_in(path) > 10)
        master_of_this_test().children()[0].kill()
        thread.join(60)
    (result,) = came
    assert isinstance(result, LoadResult), result
    assert not result.complete
    assert result.exit_code == 5
    assert any("was lost (it does not answer any more)" in problem for problem in result.problems)
    load = read_load(path)
    assert sorted((end.reason, end.rows) for end in load.ends) == sorted(
        (contract.BY_WORKER if end.reason == contract.BY_WORKER else contract.BY_DURATION, by_worker(path)[end.worker]) for end in load.ends
    )
    assert {end.reason for end in load.ends} == {contract.BY_WORKER, contract.BY_DURATION}
    assert min(by_worker(path).values()) > 0


@pytest.mark.slow
def test_a_master_that_is_killed_leaves_the_rows_that_it_had(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with ScriptedServer(itl_s=0.01) as server:
        thread, came = in_background(lambda: press(server, tmp_path))
        wait_for(lambda: rows_in(path) > 10)
        master = master_of_this_test()
        workers = master.children()
        master.kill()
        thread.join(60)
    assert isinstance(came[0], LoadFailed)
    assert "without its end record" in str(came[0])
    assert not is_complete(path)
    assert len(list(read_rows(path))) > 10
    wait_for(lambda: not any(worker.is_running() for worker in workers))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "Ctrl-C"])
def test_a_signal_to_all_processes_leaves_every_row_and_says_so(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with ScriptedServer(itl_s=0.01) as server:
        thread, came = in_background(lambda: press(server, tmp_path))
        wait_for(lambda: rows_in(path) > 10)
        master = master_of_this_test()
        for process in (master, *master.children()):
            process.send_signal(number)
        thread.join(60)
    (result,) = came
    assert isinstance(result, LoadResult), result
    load = read_load(path)
    assert (load.reason, load.complete) == (contract.BY_SIGNAL, False)
    assert [(end.worker, end.reason) for end in load.ends] == [("w0", contract.BY_SIGNAL), ("w1", contract.BY_SIGNAL)]
    assert sum(end.rows for end in load.ends) == load.rows == result.rows > 10


@pytest.mark.slow
def test_a_full_disk_at_the_master_stops_all_workers(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with ScriptedServer() as server, pytest.raises(LoadFailed, match="cannot write"):
            press(server, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert len(list(read_rows(tmp_path / "requests.jsonl"))) > 10
    assert not is_complete(tmp_path / "requests.jsonl")


@pytest.mark.slow
def test_what_no_worker_can_do_is_one_message(tmp_path: Path) -> None:
    with ScriptedServer(faults=["status=401"]) as server, pytest.raises(LoadFailed, match="HTTP 401") as caught:
        press(server, tmp_path)
    assert "--kv-api-key-env" in caught.value.hint
    log = (tmp_path / "locust.log").read_text()
    assert log.count("HTTP 401") == 1
    assert "Traceback" not in log


SHIFTED = """
import time

real = time.time
time.time = lambda: real() + {shift_s}

from pytest_kvcache.load.users import Draw, KvUser


class Normal(KvUser):
    lane = "normal"

    def plan(self, draw: Draw, limit: int | None) -> tuple[int, int]:
        return draw.uniform(20, 60), 4
"""


def _start(folder: Path, profile: str, *more: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LOCUST_", "PYTEST_KVCACHE_"))} | {"PYTHONPATH": ROOT}
    with (folder / "log").open("wb") as log:
        words = [sys.executable, "-m", "locust", "-f", profile, *more]
        return subprocess.Popen(words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


@contextmanager
def by_hand(folder: Path, server: ScriptedServer, profiles: list[str], *more: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a master and a worker for each profile, each in a folder of its own as on hosts of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = ["--headless", "--master", "--master-bind-port", port, "--expect-workers", str(len(profiles)), "-H", server.url, "--kv-rows", "all.jsonl"]
    running = [_start(folder / "master", profiles[0], *words, *more)]
    try:
        for number, profile in enumerate(profiles):
            running.append(_start(folder / f"worker{number}", profile, "--worker", "--master-host", "127.0.0.1", "--master-port", port))
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait(20)


def _whole(folder: Path) -> LoadFile:
    load = read_load(folder / "master" / "all.jsonl")
    assert load.complete, (load, (folder / "master" / "log").read_text())
    return load


@pytest.mark.slow
def test_workers_in_folders_of_their_own_send_their_rows_home_on_the_masters_clock(tmp_path: Path) -> None:
    profiles = []
    for name, shift_s in (("right", 0.0), ("fast", 5.0)):
        profiles.append(str(tmp_path / f"{name}.py"))
        Path(profiles[-1]).write_text(SHIFTED.format(shift_s=shift_s))
    words = ["-u", "6", "-r", "6", "-t", "60", "--kv-requests", "60"]
    with ScriptedServer(itl_s=0.005) as server, by_hand(tmp_path, server, profiles, *words) as running:
        assert running[0].wait(60) == 0, (tmp_path / "master" / "log").read_text()
        assert [process.wait(30) for process in running[1:]] == [0, 0]
    load = _whole(tmp_path)
    rows = list(read_rows(load.path))
    assert sorted(row.id for row in rows) == list(range(60))
    assert load.start is not None
    assert all(load.start.wall_s <= row.sent_s <= row.end_s <= load.start.wall_s + 30 for row in rows)
    assert sorted(round(end.clock_offset_s or 0.0, 1) for end in load.ends) == [-5.0, 0.0]
    assert all(0 < (end.clock_error_s or 0.0) < 0.1 for end in load.ends)
    assert [path.name for number in (0, 1) for path in (tmp_path / f"worker{number}").iterdir()] == ["log", "log"]


@pytest.mark.slow
def test_workers_that_do_not_agree_do_not_press(tmp_path: Path) -> None:
    Path(tmp_path / "other.py").write_text(SHIFTED.format(shift_s=0.0).replace('"normal"', '"other"'))
    with ScriptedServer() as server:
        with by_hand(tmp_path, server, [str(profile_path("normal")), str(tmp_path / "other.py")], "-u", "4", "-r", "4", "-t", "60") as running:
            assert running[0].wait(60) == 2
        said = (tmp_path / "master" / "log").read_text()
        assert "the workers disagree on" in said, said
        assert not asked_for(server, 64)


@pytest.mark.slow
def test_an_open_loop_over_two_processes_sends_every_arrival_once(tmp_path: Path) -> None:
    with ScriptedServer(itl_s=0.01) as server:
        result = press(server, tmp_path, users=0, duration_s=3.0, options={"rate": 20, "arrivals": "constant"})
    assert result.complete
    rows = sorted(read_rows(result.rows_path), key=lambda row: row.intended_s)
    assert set(by_worker(result.rows_path)) == {"w0", "w1"}
    assert sorted(row.id for row in rows) == list(range(len(rows)))
    assert 55 <= len(rows) <= 61
    gaps = [after.intended_s - before.intended_s for before, after in pairwise(rows)]
    # arrivals are 50 ms apart; those of two processes are on one clock, to within what its comparison could tell
    error = 0.005 + sum(end.clock_error_s or 0.0 for end in read_load(result.rows_path).ends)
    assert error < 0.05, "the clocks of two processes of one machine are compared better than that"
    assert min(gaps) > 0.05 - error, gaps
    assert max(gaps) < 0.05 + error, gaps


@pytest.mark.slow
def test_a_worker_that_comes_late_presses_with_numbers_of_its_own(tmp_path: Path) -> None:
    profile = str(profile_path("normal"))
    words = ["-u", "4", "-r", "4", "-t", "60", "--kv-duration-s", "9", "--kv-output-tokens", "4", "-s", "3"]
    path = tmp_path / "master" / "all.jsonl"
    with ScriptedServer(itl_s=0.02) as server, by_hand(tmp_path, server, [profile], *words) as running:
        wait_for(lambda: rows_in(path) > 3)
        given = cast(list[str], running[0].args)
        port = given[given.index("--master-bind-port") + 1]
        running.append(_start(tmp_path / "late", profile, "--worker", "--master-host", "127.0.0.1", "--master-port", port))
        assert running[0].wait(60) == 0, (tmp_path / "master" / "log").read_text()
    load = _whole(tmp_path)
    assert [end.worker for end in load.ends] == ["w0", "w1"]
    numbers = {worker: [row.id for row in read_rows(path) if row.worker == worker] for worker in ("w0", "w1")}
    assert len(numbers["w1"]) > 0
    assert max(numbers["w0"]) < min(numbers["w1"])
    assert any("came after the load had begun" in note.text for note in load.notes)
