"""Whole loads as a process of their own: what is left is whole, or says why not; nothing of the surroundings changes them."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from loopback_tls import Tls
from scripted_server import ScriptedServer

from pytest_kvcache.errors import LoadFailed, UsageError
from pytest_kvcache.load import contract
from pytest_kvcache.load.contract import is_complete, read_load, read_rows
from pytest_kvcache.load.runner import LoadResult, command, environment, profile_path, run_load
from pytest_kvcache.load.target import Handed, from_endpoint
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import Settings

SHORT: dict[str, Any] = {"users": 2, "duration_s": 0.7, "output_tokens": 8}


def press(server: ScriptedServer, folder: Path, profile: str = "normal", settings: Settings | None = None, **more: Any) -> LoadResult:
    options = {"stop_timeout_s": 2, **more.pop("options", {})}
    return run_load([parse_endpoint(server.url, settings or Settings())], profile, folder, options=options, **{**SHORT, **more})


def outcomes(result: LoadResult) -> Counter[str]:
    return Counter(row.outcome for row in read_rows(result.rows_path))


def prompts(server: ScriptedServer) -> list[list[int]]:
    """The prompts of the load itself: those of the preparation have 19 and 47 tokens."""
    return [seen.body["prompt"] for seen in server.seen if seen.path == "/v1/completions" and len(seen.body["prompt"]) not in (19, 47)]


def wait_for(ready: Callable[[], bool], within_s: float = 45.0) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.02)


def test_every_request_is_a_row_with_planned_and_real_tokens_and_its_times(tmp_path: Path) -> None:
    with ScriptedServer(ttft_s=0.02, itl_s=0.002) as server:
        result = press(server, tmp_path)
        sent = len(prompts(server))
    rows = list(read_rows(result.rows_path))
    assert result.complete
    assert result.problems == []
    assert (result.planned_users, result.planned_duration_s, result.exit_code) == (2, 0.7, 0)
    assert result.rows == len(rows) == sent > 0
    assert outcomes(result) == {contract.OK: len(rows)}
    for row in rows:
        assert row.prompt_tokens == row.prompt_tokens_planned
        assert row.completion_tokens == row.output_tokens_planned == 8
        assert row.first_token_s is not None
        assert row.intended_s <= row.sent_s < row.first_token_s <= row.end_s
        assert row.first_token_s - row.sent_s > 0.015
        assert (row.status, row.lane, row.length_source, row.prompt, row.answer) == (200, "normal", "ids", None, None)
    assert abs(rows[0].sent_s - time.time()) < 30
    load = read_load(result.rows_path)
    assert load.start is not None
    assert load.start.argv[-len(result.argv) + 3 :] == result.argv[3:]
    assert load.start.options["max_model_len"] == 4096
    assert load.ends[0].cpu_s > 0
    assert load.ends[0].lag_max_s >= load.ends[0].lag_p99_s >= 0


def test_the_surroundings_do_not_change_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCUST_USERS", "5")
    monkeypatch.setenv("LOCUST_RUN_TIME", "1h")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".locust.conf").write_text("users = 7\nkv-output-tokens = 3\n")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[tool.locust]\nusers = 9\nkv-seed = 4\n")
    with ScriptedServer() as server:
        result = press(server, folder)
    start = read_load(result.rows_path).start
    assert start is not None
    assert (start.options["users"], start.options["output_tokens"], start.seed) == (2, 8, 1)


@pytest.mark.slow
def test_a_seed_repeats_lengths_and_a_nonce_repeats_prompts(tmp_path: Path) -> None:
    seen = {}
    for name, options in (("a", {"nonce": "x"}), ("b", {"nonce": "x"}), ("c", {})):
        with ScriptedServer() as server:
            results = press(server, tmp_path / name, users=1, options={"requests": 6, **options})
            seen[name] = prompts(server)
        assert results.complete
    assert seen["a"] == seen["b"]
    assert list(map(len, seen["c"])) == list(map(len, seen["a"]))
    assert not {tuple(prompt[:8]) for prompt in seen["a"]} & {tuple(prompt[:8]) for prompt in seen["c"]}
    assert len({tuple(prompt[:8]) for prompt in seen["a"]}) == 6


def test_a_counted_load_sends_exactly_that_many(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        result = press(server, tmp_path, users=3, options={"requests": 7})
        assert len(prompts(server)) == 7
    assert (result.rows, result.complete) == (7, True)
    assert read_load(result.rows_path).reason == contract.BY_REQUESTS


def test_near_max_prompts_fill_the_live_servers_context_to_the_token(tmp_path: Path) -> None:
    with ScriptedServer(max_model_len=777) as server:
        result = press(server, tmp_path, "nearmax", users=1, options={"requests": 2, "margin": 1})
    for row in read_rows(result.rows_path):
        assert (row.outcome, row.prompt_tokens, row.prompt_tokens_planned) == (contract.OK, 777 - 8 - 1, 777 - 8 - 1)


def test_over_limit_prompts_are_refused_by_that_name(tmp_path: Path) -> None:
    with ScriptedServer(max_model_len=500) as server:
        result = press(server, tmp_path, "overlimit", users=1, options={"requests": 2})
    assert outcomes(result) == {contract.OVER_LENGTH: 2}
    assert "516" in next(read_rows(result.rows_path)).error


def test_chat_and_kept_text_and_replicas(tmp_path: Path) -> None:
    with ScriptedServer(chat_overhead=5) as one, ScriptedServer(chat_overhead=5) as two:
        endpoints = [parse_endpoint(server.url, Settings(api="chat")) for server in (one, two)]
        result = run_load(endpoints, "normal", tmp_path, keep_text=True, options={"requests": 8, "stop_timeout_s": 2}, **SHORT)
    rows = list(read_rows(result.rows_path))
    assert {row.endpoint for row in rows} == {0, 1}
    assert {row.outcome for row in rows} == {contract.OK}
    assert all(row.prompt_tokens == row.prompt_tokens_planned for row in rows)
    assert rows[0].answer == " tok" * 8
    assert (rows[0].prompt or "").startswith("List: ")


def test_tls_is_verified_and_the_key_comes_from_the_environment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: Tls) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "sk-verysecretkey123")
    with ScriptedServer(api_key="sk-verysecretkey123", tls=lambda sock: tls.context.wrap_socket(sock, server_side=True)) as server:
        with pytest.raises(LoadFailed, match=r"(?i)certificate"):
            press(server, tmp_path / "a", settings=Settings(api_key_env="KEY_OF_TEST"))
        with pytest.raises(LoadFailed, match="HTTP 401") as caught:
            press(server, tmp_path / "b", settings=Settings(ca=str(tls.ca)))
        assert "--kv-api-key-env" in caught.value.hint
        result = press(server, tmp_path / "c", settings=Settings(ca=str(tls.ca), api_key_env="KEY_OF_TEST"), options={"requests": 2})
    assert outcomes(result) == {contract.OK: 2}
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"verysecret" not in path.read_bytes(), path
    assert not [word for word in result.argv if "verysecret" in word]


def test_a_secret_that_the_server_repeats_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "zebra-on-the-moon")
    body = '{"hf_token": "giraffe-at-sea", "user": "me"}'
    with ScriptedServer(faults=["error-in-stream=zebra-on-the-moon and hyena-in-town"]) as server:
        by_user = server.url.replace("://", "://ann:hyena-in-town@")
        for folder, address, name in (("key", server.url, "KEY_OF_TEST"), ("user", by_user, "")):
            run_load(
                [parse_endpoint(address, Settings(extra_body=body, api_key_env=name))], "normal", tmp_path / folder, **SHORT, options={"requests": 2}
            )
    for folder, secrets in (("key", ["zebra", "giraffe"]), ("user", ["hyena", "giraffe"])):
        for path in (tmp_path / folder).iterdir():
            assert not [word for word in secrets if word in path.read_text()], path
        assert "in the stream: ***" in (tmp_path / "key" / "requests.jsonl").read_text()


def test_nobody_there_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="Connection refused") as caught:
        run_load([parse_endpoint("http://127.0.0.1:1", Settings())], "normal", tmp_path, **SHORT)
    assert "127.0.0.1:1" in caught.value.where
    assert (tmp_path / "locust.log").read_text().count("Connection refused") < 4


@pytest.mark.parametrize(
    ("options", "shown"),
    [({"nosuch": 3}, "unrecognized arguments: --kv-nosuch=3"), ({"median": "x"}, "takes a number"), ({"histogram": "9:0"}, "add up to nothing")],
)
def test_an_option_of_the_users_that_is_wrong_exits_as_a_usage_error(options: dict[str, Any], shown: str, tmp_path: Path) -> None:
    with ScriptedServer() as server, pytest.raises(LoadFailed, match=shown) as caught:
        press(server, tmp_path, options=options)
    assert caught.value.exit_code == 2


def test_a_profile_that_does_not_load_fails_with_the_last_lines(tmp_path: Path) -> None:
    profile = tmp_path / "broken.py"
    profile.write_text("import no_such_module_of_ours\n")
    with ScriptedServer() as server:
        with pytest.raises(LoadFailed, match="no_such_module_of_ours"):
            press(server, tmp_path / "a", str(profile))
        with pytest.raises(LoadFailed, match="--kv-marginn"):
            press(server, tmp_path / "b", "nearmax", options={"marginn": 3})
        with pytest.raises(UsageError):
            run_load([], "normal", tmp_path)


TASK_FAILS = """
from pytest_kvcache.load.users import Draw, KvUser

class Own(KvUser):
    lane = "own"

    def plan(self, draw: Draw, limit: int | None) -> tuple[int, int]:
        if draw.uniform(0, {often}):
            raise RuntimeError("a fault of the profile")
        return 50, 4
"""


@pytest.mark.slow
def test_an_exception_in_a_task_is_noted_and_one_that_does_not_end_stops_the_load(tmp_path: Path) -> None:
    profile = tmp_path / "own.py"
    profile.write_text(TASK_FAILS.format(often=1))
    with ScriptedServer(ttft_s=0.02) as server:
        result = press(server, tmp_path / "a", str(profile), duration_s=1, users=1, options={"requests": 10})
        assert result.complete
        assert f"{result.rows} of 10 requests were sent" == result.problems[0]
        assert f"{10 - result.rows} exceptions in the profile's task, first: RuntimeError: a fault of the profile" in result.problems[1]
        profile.write_text(TASK_FAILS.format(often=10**9))
        began_s = time.monotonic()
        with pytest.raises(LoadFailed, match="keeps failing"):
            press(server, tmp_path / "b", str(profile), duration_s=60)
        assert time.monotonic() - began_s < 45


@pytest.mark.slow
def test_what_is_in_flight_at_the_end_is_a_row_and_no_success(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        server.script.itl_s = 0.4
        result = press(server, tmp_path, users=3, duration_s=0.5, output_tokens=64, options={"stop_timeout_s": 1})
        sent = len(prompts(server))
    assert outcomes(result) == {contract.CUT_OFF: sent}
    rows = list(read_rows(result.rows_path))
    assert all(row.completion_tokens is None and row.error for row in rows)
    assert read_load(result.rows_path).ends[0].in_flight == 3
    assert result.complete


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_a_timeout(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        server.script.itl_s = 0.2
        result = press(server, tmp_path, duration_s=1, output_tokens=64, request_timeout_s=1)
    found = outcomes(result)
    assert found[contract.TIMEOUT] == sum(found.values()) >= 2
    assert max(row.end_s - row.sent_s for row in read_rows(result.rows_path)) < 5


def test_a_load_that_is_stopped_keeps_its_rows_and_is_not_complete(tmp_path: Path) -> None:
    stop = threading.Event()
    with ScriptedServer(itl_s=0.005) as server:

        def stop_soon() -> None:
            wait_for(lambda: len(prompts(server)) > 5, 60)
            stop.set()

        threading.Thread(target=stop_soon).start()
        result = press(server, tmp_path, duration_s=600, stop=stop)
    assert not result.complete
    assert result.rows == len(list(read_rows(result.rows_path))) > 0
    assert read_load(result.rows_path).reason == contract.BY_SIGNAL
    assert result.problems[0] == "the load was stopped before its end"


def _own_process(server: ScriptedServer, folder: Path, duration_s: float = 60) -> subprocess.Popen[bytes]:
    target = from_endpoint(parse_endpoint(server.url, Settings()))
    words = command(profile_path("normal"), folder / "requests.jsonl", target.root, users=2, duration_s=duration_s, output_tokens=8)
    with (folder / "locust.log").open("wb") as log:
        return subprocess.Popen(words, cwd=folder, env=environment(Handed([target], os.getpid())), stdin=subprocess.DEVNULL, stdout=log, stderr=log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "Ctrl-C"])
def test_a_signal_leaves_a_readable_file_that_says_so(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with ScriptedServer(itl_s=0.005) as server, _own_process(server, tmp_path) as process:
        wait_for(lambda: len(prompts(server)) > 5)
        process.send_signal(number)
        process.wait(45)
    load = read_load(path)
    assert (load.reason, load.complete) == (contract.BY_SIGNAL, False)
    assert load.rows == load.ends[0].rows > 0


def test_a_killed_load_is_told_and_its_rows_stay(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def work(server: ScriptedServer) -> None:
        try:
            press(server, tmp_path, duration_s=60)
        except LoadFailed as error:
            caught.append(error)

    path = tmp_path / "requests.jsonl"
    with ScriptedServer(itl_s=0.002) as server:
        thread = threading.Thread(target=work, args=(server,))
        thread.start()
        wait_for(lambda: path.exists() and path.read_bytes().count(b'"kind":"request"') > 3)
        children = [child for child in psutil.Process().children() if "locust" in " ".join(child.cmdline())]
        assert len(children) == 1
        children[0].kill()
        thread.join(45)
    assert "without its end record" in str(caught[0])
    assert len(list(read_rows(path))) > 3
    assert not is_complete(path)


def test_a_load_ends_when_the_process_that_started_it_is_gone(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, os; from pathlib import Path; from pytest_kvcache.load.runner import *; from pytest_kvcache.load.target import *;"
        "t = Target(sys.argv[1]); f = Path(sys.argv[2]);"
        "p = subprocess.Popen(command(profile_path('normal'), f / 'requests.jsonl', t.root, users=1, duration_s=60), cwd=f,"
        " env=environment(Handed([t], os.getpid())), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True);"
        "print(p.pid, flush=True); sys.stdin.read()"
    )
    path = tmp_path / "requests.jsonl"
    with ScriptedServer(itl_s=0.002) as server:
        words = [sys.executable, "-c", code, server.url, str(tmp_path)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            wait_for(lambda: len(prompts(server)) > 2)
            parent.kill()
            parent.wait()
        wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert read_load(path).reason == contract.BY_PARENT


def test_a_full_disk_fails_the_load_and_keeps_the_rows_so_far(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with ScriptedServer() as server, pytest.raises(LoadFailed, match="cannot write"):
            press(server, tmp_path, duration_s=30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert len(list(read_rows(tmp_path / "requests.jsonl"))) > 5
    assert not is_complete(tmp_path / "requests.jsonl")


@pytest.mark.slow
def test_a_server_that_goes_away_ends_the_load_instead_of_filling_the_file(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, str(Path(__file__).parent.parent / "scripted_server.py"), "--port", str(port)]
    path = tmp_path / "requests.jsonl"
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        endpoint = parse_endpoint(f"http://127.0.0.1:{port}", Settings())

        def listens() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        def go_away() -> None:
            wait_for(lambda: path.exists() and path.read_bytes().count(b'"kind":"request"') > 10)
            server.kill()

        wait_for(listens)
        leaving = threading.Thread(target=go_away)
        leaving.start()
        result = run_load([endpoint], "normal", tmp_path, **{**SHORT, "duration_s": 120})
        leaving.join(30)
    load = read_load(result.rows_path)
    assert (load.reason, result.complete) == (contract.BY_SERVER, False)
    assert outcomes(result)[contract.OK] > 0
    assert 10 <= outcomes(result)[contract.REFUSED_CONNECTION] < 300


def test_more_users_than_files_that_may_be_open_are_refused_before_the_load(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource, sys, os; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    with ScriptedServer() as server:
        words = ["-m", "locust", "-f", str(profile_path("normal")), "--headless", "-H", server.url, "-u", "300", "-r", "300", "-t", "5"]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
        )
    assert (soft, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert done.returncode == 2
    assert "300 users need as many connections, and this process may open 200 files" in done.stderr
