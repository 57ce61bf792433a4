"""A launched server is ready when a token has come back, says why where it has not, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted_server import ScriptedServer, launch_text

from pytest_kvcache.errors import CannotWrite, KvError, LaunchFailed, UsageError
from pytest_kvcache.quantities import Reading
from pytest_kvcache.server import launch as launch_module
from pytest_kvcache.server.endpoint import complete, list_models, tokenize
from pytest_kvcache.server.launch import LaunchedServer, free_port, launch
from pytest_kvcache.server.startlog import read_facts
from pytest_kvcache.settings import Settings

QUICK = Settings(ready_timeout_s=15.0, stop_timeout_s=1.0)
FAILURE = (
    "(EngineCore pid=3207) ERROR 11-29 15:08:35 [core.py:1510] EngineCore failed to start.\n"
    "(EngineCore pid=3207) ERROR 11-29 15:08:35 [core.py:1510] ValueError: No available memory for the cache blocks. "
    "Try increasing `gpu_memory_utilization` when initializing the engine\n"
    "(APIServer pid=3165) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
)


def gone(pids: list[int], within_s: float = 10.0) -> bool:
    """Wait until none of the processes lives any more."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        alive = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    alive.append(pid)
        if not alive:
            return True
        time.sleep(0.05)
    return False


def failed(text: str, tmp_path: Path, **changes: Any) -> LaunchFailed:
    with pytest.raises(LaunchFailed) as caught:
        launch(text, QUICK.replace(**changes), tmp_path / "server.log")
    return caught.value


# --- a server that works


def test_a_launched_server_is_ready_owned_and_gone_after_its_block(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "server.log"
    with launch(launch_text(max_model_len=256), QUICK, log) as server:
        at = server.endpoint
        assert (at.model, at.owned, at.log, at.pid) == ("scripted", True, log, server.pids()[0])
        assert complete(at, "a b", 3).text == " tok tok tok"
        assert server.is_alive()
        server.check()
        assert server.engine == ""
        assert server.command[:2] == shlex.split(launch_text())[:2]
        assert 0 < server.ready_s < 15
        assert f"pid {at.pid}" in log.read_text()
        pids = server.pids()
    assert gone(pids)
    assert not server.is_alive()
    server.stop()


def test_the_command_is_never_given_to_a_shell(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with launch(launch_text() + f" --model '$(touch {marker})' ", QUICK, tmp_path / "server.log") as server:
        assert server.endpoint.model == f"$(touch {marker})"
    assert not marker.exists()


def test_environment_words_reach_the_server_and_the_rest_of_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "kept")
    code = "import os, sys; print(os.environ['GIVEN'], os.environ['KEPT'], os.getcwd()); sys.exit(4)"
    monkeypatch.chdir(tmp_path)
    error = failed(f"GIVEN={{port}} {sys.executable} -c {shlex.quote(code)} {{port}}", tmp_path)
    port = str(error).partition("GIVEN=")[2].split()[0]
    assert f"{port} kept {tmp_path}" in (tmp_path / "server.log").read_text()


def test_the_server_gets_the_settings_of_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "geheim-key-1")
    settings = QUICK.replace(api_key_env="MY_KEY", api="chat", proxy="http://127.0.0.1:1")
    with launch(launch_text("print-secret=geheim-key-1", api_key="geheim-key-1"), settings, tmp_path / "server.log") as server:
        assert complete(server.endpoint, "a", 1).error == ""
        assert "geheim" not in " ".join(server.command)
    text = (tmp_path / "server.log").read_text()
    assert "non-default args: {'api_key': ***, 'port': 8000}" in text
    assert "geheim" not in text


# --- a server that does not


def test_a_program_that_does_not_exist_is_named_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    error = failed("no-such-program-here --port {port}", tmp_path)
    assert time.monotonic() - began < 12
    assert "there is no program no-such-program-here" in error.what
    assert "bash -c" in error.hint
    assert "there is no program ./nowhere/x" in failed("./nowhere/x {port}", tmp_path).what


def test_a_file_that_is_no_program_is_named_at_once(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("just text\n")
    assert "cannot be run" in failed(f"{script} {{port}}", tmp_path).what
    script.chmod(0o755)
    assert "cannot be started: Exec format error" in failed(f"{script} {{port}}", tmp_path).what
    script.write_text("#!/no/such/interpreter\n")
    assert "cannot be started: No such file" in failed(f"{script} {{port}}", tmp_path).what


def test_a_server_that_exits_at_once_says_why_out_of_its_log(tmp_path: Path) -> None:
    printed = tmp_path / "failure.txt"
    printed.write_text(FAILURE)
    began = time.monotonic()
    error = failed(launch_text("die-at-once=3", print=printed), tmp_path)
    assert time.monotonic() - began < 12
    assert error.what.startswith(
        "the launched server exited with status 3 before it was ready: ValueError: No available memory for the cache blocks."
    )
    text = str(error)
    assert f"log: {tmp_path / 'server.log'}" in text
    assert "  | (APIServer pid=3165) RuntimeError: Engine core initialization failed." in text
    assert error.exit_code == 5


def test_a_server_that_exits_cleanly_is_told_to_stay_in_the_foreground(tmp_path: Path) -> None:
    error = failed(f"{sys.executable} -c pass {{port}}", tmp_path)
    assert "exited with status 0" in error.what
    assert "foreground" in error.hint


def test_a_server_that_was_killed_is_told_about_memory(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    error = failed(f"{sys.executable} -c {shlex.quote(code)} {{port}}", tmp_path)
    assert "was ended by SIGKILL" in error.what
    assert "memory" in error.hint


def test_a_server_that_dies_while_it_starts_is_noticed_soon(tmp_path: Path) -> None:
    began = time.monotonic()
    error = failed(launch_text("never-ready", "exit-after=0.7"), tmp_path)
    assert "exited with status 1 before it was ready" in error.what
    assert time.monotonic() - began < 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "allowed_s", "words"),
    [
        ("never-listen", 1.0, "was not ready within 1 s: nobody answers"),
        ("never-ready", 3.0, "was not ready within 3 s: the server answers, but it is not ready (HTTP 503), saying: Loading model"),
        ("hang", 3.0, "was not ready within 3 s: no complete answer"),
    ],
)
def test_a_server_that_never_gets_ready_is_ended_at_the_deadline(fault: str, allowed_s: float, words: str, tmp_path: Path) -> None:
    began = time.monotonic()
    error = failed(launch_text(fault), tmp_path, ready_timeout_s=allowed_s)
    assert words in error.what
    assert "--kv-ready-timeout-s" in error.hint
    assert time.monotonic() - began < allowed_s + 12
    _nothing_left(tmp_path)


def test_a_launched_server_that_wants_a_key_says_so_at_once(tmp_path: Path) -> None:
    error = failed(launch_text(api_key="geheim-key"), tmp_path)
    assert "wants a key (HTTP 401)" in error.what
    assert "--kv-api-key-env" in error.hint
    assert "geheim" not in str(error)


def test_a_model_that_the_launched_server_does_not_serve_is_a_usage_error_and_the_server_is_ended(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the model other is not served there"):
        launch(launch_text(), QUICK.replace(model="other"), tmp_path / "server.log")
    _nothing_left(tmp_path)


def test_a_port_in_use_is_named_before_anything_is_started(tmp_path: Path) -> None:
    with ScriptedServer() as other:
        error = failed(f"{sys.executable} -m http.server --port {other.port}", tmp_path)
        assert f"port {other.port} is already in use by" in error.what
        assert "{port}" in error.hint
        assert other.seen == []
    assert not (tmp_path / "server.log").exists()


def test_a_port_that_another_process_answers_is_not_taken_for_ours(tmp_path: Path) -> None:
    # The command lives and does not listen; what answers on its port was there before and serves a model.
    with ScriptedServer() as other, monkeypatched_check_port():
        code = shlex.quote("import time; time.sleep(60)")
        error = failed(f"{sys.executable} -c {code} --port {other.port}", tmp_path)
        assert f"port {other.port} is answered by" in error.what
        assert "which was running before, and not by the launched server" in error.what


@contextlib.contextmanager
def monkeypatched_check_port() -> Iterator[None]:
    """Let a port in use pass the first look, as if it had been taken a moment later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_module, "_check_port", lambda _: None)
        yield


def test_a_port_that_is_lost_to_another_process_gives_the_servers_own_error(tmp_path: Path) -> None:
    with ScriptedServer() as other:
        error = failed(launch_text().replace("{port}", str(other.port)) + " --model {port}", tmp_path)
    assert "Address already in use" in error.what


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite) as caught:
        launch(launch_text(), QUICK, tmp_path / "file" / "server.log")
    assert "log of the server" in caught.value.what


def test_a_server_that_dies_in_use_is_noticed_with_its_cause(tmp_path: Path) -> None:
    with launch(launch_text(), QUICK, tmp_path / "server.log") as server:
        psutil.Process(server.endpoint.pid).kill()
        end = time.monotonic() + 5
        while server.is_alive() and time.monotonic() < end:
            time.sleep(0.02)
        with pytest.raises(LaunchFailed, match="was ended by SIGKILL while it was in use"):
            server.check()


# --- nothing is left behind


def _nothing_left(tmp_path: Path) -> None:
    """Check by the log which process the server was, and that it is gone."""
    words = (tmp_path / "server.log").read_text().split("pid ")
    if len(words) > 1:
        assert gone([int(words[1].split(",")[0])])


def test_a_server_that_ignores_term_and_has_children_is_gone_after_stop(tmp_path: Path) -> None:
    with launch(launch_text("ignore-term", "fork=2", "double-fork"), QUICK, tmp_path / "server.log") as server:
        pids = server.pids()
        assert len(pids) == 4
        assert len({psutil.Process(pid).ppid() for pid in pids}) >= 2
        began = time.monotonic()
    assert time.monotonic() - began < 12
    assert gone(pids, 0.5)


PARENT = """
import sys, time
from pathlib import Path
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings
server = launch(sys.argv[1], Settings(ready_timeout_s=15.0, stop_timeout_s=1.0), Path(sys.argv[2]))
print(*server.pids(), flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def parent_of_a_server(tmp_path: Path, *faults: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    argv = [sys.executable, "-c", PARENT, launch_text(*faults), str(tmp_path / "server.log")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert pids, process.stderr.read()
        yield process, pids
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_no_orphan_is_left_however_pytest_dies(number: signal.Signals, tmp_path: Path) -> None:
    with parent_of_a_server(tmp_path, "ignore-term", "fork=1", "double-fork") as (process, pids):
        assert len(pids) == 3
        supervisor = psutil.Process(pids[0]).ppid()
        process.send_signal(number)
        process.wait(15)
        assert gone([*pids, supervisor])


def test_a_server_whose_supervisor_is_killed_ends_too(tmp_path: Path) -> None:
    with parent_of_a_server(tmp_path) as (_, pids):
        psutil.Process(psutil.Process(pids[0]).ppid()).kill()
        assert gone(pids)


@pytest.mark.parametrize("fault", ["ignore-term", "no-fault"])
def test_what_a_killed_supervisor_leaves_is_ended_by_stop(tmp_path: Path, fault: str) -> None:
    with launch(launch_text(fault, "fork=1"), QUICK, tmp_path / "server.log") as server:
        pids = server.pids()
        psutil.Process(psutil.Process(pids[0]).ppid()).kill()
        end = time.monotonic() + 5
        while server.is_alive() and time.monotonic() < end:
            time.sleep(0.02)
        with pytest.raises(LaunchFailed, match="was lost"):
            server.check()
    assert gone(pids)


def test_the_server_is_out_of_reach_of_ctrl_c_in_the_terminal(tmp_path: Path) -> None:
    with launch(launch_text(), QUICK, tmp_path / "server.log") as server:
        own = psutil.Process()
        root = psutil.Process(server.pids()[0])
        assert os.getsid(root.pid) != os.getsid(own.pid)
        assert os.getsid(root.ppid()) != os.getsid(own.pid)
        root_parent = psutil.Process(root.ppid())
        root_parent.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert server.is_alive()
        assert signal.SIGINT not in _ignored(root.pid)


def _ignored(pid: int) -> set[signal.Signals]:
    """Return the signals that a process ignores, out of /proc."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    mask = int(line.split()[1], 16)
    return {number for number in signal.Signals if mask >> (number - 1) & 1}


def test_interrupting_a_launch_ends_what_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def interrupted(at: Any, *_: object, **__: object) -> None:
        seen.append(at.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_module, "check_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(launch_text(), QUICK, tmp_path / "server.log")
    assert gone(seen)


def test_ports_are_free_and_two_servers_run_side_by_side(tmp_path: Path) -> None:
    assert 1024 <= free_port() < 65536
    with launch(launch_text(model="a"), QUICK, tmp_path / "a.log") as a, launch(launch_text(model="b"), QUICK, tmp_path / "b.log") as b:
        assert (a.endpoint.model, b.endpoint.model) == ("a", "b")
        a.stop()
        assert b.is_alive()
    assert isinstance(a, LaunchedServer)
    assert issubclass(LaunchFailed, KvError)


def test_the_embedded_engine_is_launched_by_its_name_and_states_its_pool(tmp_path: Path) -> None:
    with launch("llamacpp --ctx 2048 --slots 2 --kv-type q8_0", QUICK, tmp_path / "server.log") as server:
        at = server.endpoint
        assert (server.engine, at.model, at.owned) == ("llamacpp", "recall", True)
        assert server.command == ["llamacpp", "--ctx", "2048", "--slots", "2", "--kv-type", "q8_0"]
        assert complete(at, "Hello", 2).completion_tokens == 2
        ids = tokenize(at, "Hello there")
        assert ids
        assert complete(at, ids, 1).prompt_tokens == len(ids)
        assert list_models(at)[0].max_model_len == 1024
        pids = server.pids()
    assert gone(pids)
    found = {name: value.value for name, value in read_facts(tmp_path / "server.log").items() if isinstance(value, Reading)}
    assert (found["pool_tokens"], found["max_num_seqs"], found["max_model_len"], found["kv_dtype"]) == (2048, 2, 1024, "q8_0")


def test_an_option_that_the_embedded_engine_does_not_have_is_a_usage_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="llamacpp"):
        launch("llamacpp --nonsense", QUICK, tmp_path / "server.log")
    assert not (tmp_path / "server.log").exists()


def test_an_engine_of_ours_leaves_the_cpu_to_the_load(tmp_path: Path) -> None:
    with launch("llamacpp --slots 1", Settings(), tmp_path / "server.log") as server:
        root = server.pids()[0]
        assert psutil.Process(root).nice() == min(os.nice(0) + 10, 19)
        group = Path(f"/proc/{root}/autogroup")
        if group.exists():  # kernels without autogroups schedule by the niceness of the process
            assert group.read_text().split() in ([], [group.read_text().split()[0], "nice", "10"])
