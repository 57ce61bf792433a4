"""``locust -f loadprofiles/...`` by hand, from any folder, with nothing prepared: headless and with Locust's web page."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.load import contract
from pytest_kvcache.load.contract import read_load, read_rows
from pytest_kvcache.load.runner import profile_path


def words(profile: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "locust", "-f", str(profile_path(profile)), *more]


def clean() -> dict[str, str]:
    """The environment of a user: the package can be imported, and nothing else is set."""
    root = str(Path(__file__).parent.parent.parent)
    return {name: value for name, value in os.environ.items() if not name.startswith(("LOCUST_", "PYTEST_KVCACHE_"))} | {"PYTHONPATH": root}


def run(folder: Path, profile: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(profile, *more), cwd=folder, env=clean(), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False
    )


def wait_for(ready: Callable[[], bool], within_s: float = 45.0) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.05)


def test_headless_by_hand_needs_an_address_and_nothing_else(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        done = run(tmp_path, "longctx", "-H", server.url + "/v1/", "--headless", "-t", "1", "--kv-output-tokens", "4")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("reports/*-locust-longctx/requests.jsonl")
    load = read_load(path)
    assert load.complete
    assert load.reason == contract.BY_DURATION
    assert load.ends[0].ran_s >= 1.0  # -t is the length of the load, without its preparation
    rows = list(read_rows(path))
    assert {row.outcome for row in rows} == {contract.OK}
    assert all(row.prompt_tokens == row.prompt_tokens_planned and 2048 <= (row.prompt_tokens or 0) <= 3277 for row in rows)
    assert "lengths by ids" in done.stderr
    assert "first token longctx" in done.stdout + done.stderr


def test_the_help_lists_our_options_and_the_profiles_own(tmp_path: Path) -> None:
    shown = run(tmp_path, "nearmax", "--kv-help").stdout
    for flag in ("--kv-margin", "--kv-output-tokens", "--kv-endpoints", "--kv-api-key-env", "--kv-rows", "--kv-requests"):
        assert flag in shown


def test_no_address_and_nobody_there_are_one_message_each(tmp_path: Path) -> None:
    done = run(tmp_path, "normal", "--headless", "-t", "5")
    assert done.returncode == 2
    assert done.stderr.count("no server is named") == 1
    assert "-H http://127.0.0.1:8000" in done.stderr
    done = run(tmp_path, "normal", "--headless", "-t", "5", "-H", "http://127.0.0.1:1")
    assert done.returncode == 5
    assert "nobody answers: ConnectionRefusedError" in done.stderr
    assert done.stderr.count("nobody answers") == 1
    assert "Traceback" not in done.stderr


def test_an_option_that_cannot_be_meant_is_one_message_and_no_traceback(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        done = run(tmp_path, "normal", "--headless", "-t", "9", "-H", server.url, "--kv-histogram", "100:0,200:0", "--kv-rows", "r.jsonl")
    assert done.returncode == 2
    assert done.stderr.count("the weights of the histogram add up to nothing") == 1
    assert "Traceback" not in done.stderr
    load = read_load(tmp_path / "r.jsonl")
    assert (load.complete, load.reason) == (False, contract.BY_FAILURE)


def test_a_signal_while_the_server_is_asked_leaves_no_load_that_came_to_its_end(tmp_path: Path) -> None:
    rows = tmp_path / "r.jsonl"
    with ScriptedServer(faults=["slow=20"]) as server:
        command = words("normal", "--headless", "-t", "30", "-H", server.url, "--kv-rows", str(rows))
        with subprocess.Popen(command, cwd=tmp_path, env=clean(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            wait_for(lambda: rows.exists() and len(server.seen) > 0)
            process.terminate()
            process.wait(30)
    load = read_load(rows)
    assert (load.reason, load.complete) == (contract.BY_SIGNAL, False)


def test_a_full_disk_ends_the_load_with_a_message(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        done = run(tmp_path, "normal", "--headless", "-t", "20", "-H", server.url, "--kv-rows", "/dev/full")
    assert done.returncode == 5
    assert "No space left on device" in done.stderr


def test_an_earlier_load_is_never_overwritten(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        for _ in range(2):
            done = run(tmp_path, "normal", "--headless", "-t", "20", "--kv-requests", "2", "--kv-endpoints", server.url, "--kv-rows", "rows.jsonl")
            assert done.returncode == 0, done.stderr
    assert [read_load(tmp_path / name).rows for name in ("rows.jsonl", "rows-2.jsonl")] == [2, 2]


def test_secrets_on_the_command_line_are_not_written_down(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        address = server.url.replace("http://", "http://ann:geheim@")
        done = run(
            tmp_path,
            "normal",
            "--headless",
            "-t",
            "20",
            "--kv-requests",
            "1",
            "-H",
            address,
            "--kv-header",
            "X-Key: verysecret",
            "--kv-rows",
            "r.jsonl",
        )
        sent = [seen.headers for seen in server.seen if seen.path == "/v1/completions"]
    assert done.returncode == 0, done.stderr
    assert sent[0]["X-Key"] == "verysecret"
    assert sent[0]["Authorization"].startswith("Basic ")
    written = (tmp_path / "r.jsonl").read_text()
    assert "geheim" not in written
    assert "verysecret" not in written


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ask(url: str, **form: Any) -> Any:
    data = urllib.parse.urlencode(form).encode() if form else None
    with urllib.request.urlopen(url, data=data, timeout=10) as answer:
        return answer.read().decode()


def _check_the_kv_page(page: str, server: str) -> None:
    with urllib.request.urlopen(page + "/kv", timeout=10) as answer:
        policy, text = answer.headers["Content-Security-Policy"], answer.read().decode()
    assert "default-src 'none'" in policy
    assert text.count(policy.partition("script-src 'nonce-")[2].partition("'")[0]) == 2
    assert "{nonce}" not in text
    assert not re.search(r"(src|href)=|innerHTML|@import|url\(", text)

    def replica() -> Any:
        return json.loads(_ask(page + "/kv/data"))["replicas"][0]

    wait_for(lambda: len(replica()["usage"]) > 2)
    told = replica()
    assert (told["name"], told["engine"], told["unit"], told["trouble"]) == (server, "vLLM", "blocks", "")
    assert all(len(told[name]) == len(told["ago_s"]) for name in ("usage", "free", "running", "waiting"))
    assert all(free + round(usage * told["pool"]) == told["pool"] for free, usage in zip(told["free"], told["usage"], strict=True))
    foreign = urllib.request.Request(page + "/kv/data", headers={"Origin": "http://elsewhere.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(foreign, timeout=10)


@pytest.mark.slow
def test_the_console_says_how_full_the_cache_is_while_a_load_runs(tmp_path: Path) -> None:
    with ScriptedServer(metrics="vllm", itl_s=0.02) as server:
        done = run(tmp_path, "normal", "-H", server.url, "--headless", "-t", "3", "--kv-output-tokens", "16")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if " KV " in line]
    told = r"pytest-kvcache: [\d:]{8} KV " + server.url + r": usage [\d.]+ %, [\d,]+ of 1,024 blocks free, \d running, \d waiting"
    assert any(re.fullmatch(told, line) for line in lines), done.stderr
    assert "HTTP Request" not in done.stderr


@pytest.mark.slow
def test_a_server_without_telemetry_is_told_and_does_not_stop_the_load(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        done = run(tmp_path, "normal", "-H", server.url, "--headless", "-t", "3", "--kv-output-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert f"KV {server.url}: cannot judge" in done.stderr


@pytest.mark.slow
def test_the_web_page_listens_on_loopback_starts_loads_and_shows_first_tokens(tmp_path: Path) -> None:
    port = _free_port()
    page = f"http://127.0.0.1:{port}"
    with ScriptedServer(metrics="vllm", itl_s=0.01) as server:
        command = words("normal", "-H", server.url, "--web-port", str(port))
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=clean(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:

            def listening() -> list[Any]:
                return [connection.laddr for connection in psutil.Process(process.pid).net_connections() if connection.status == "LISTEN"]

            wait_for(lambda: bool(listening()))
            assert {address.ip for address in listening()} == {"127.0.0.1"}
            assert "kv_output_tokens" in _ask(page)
            for number in (1, 2):
                answer = json.loads(_ask(page + "/swarm", user_count=2, spawn_rate=2, host=server.url, kv_output_tokens=5, kv_seed=number))
                assert answer["success"]
                wait_for(lambda: "running" in json.loads(_ask(page + "/stats/requests"))["state"])
                wait_for(lambda: "first token normal" in _ask(page + "/stats/requests"))
                if number == 1:
                    _ask(page + "/stop", nothing=1)
                    wait_for(lambda: "stopped" in json.loads(_ask(page + "/stats/requests"))["state"])
            _check_the_kv_page(page, server.url)
            rows = json.loads(_ask(page + "/stats/requests"))["stats"]
            assert [row["name"] for row in rows] == ["/v1/completions normal", "first token normal", "tokens/s of a stream normal", "Aggregated"]
            assert rows[3]["num_requests"] <= rows[0]["num_requests"] + 1
            assert rows[0]["num_failures"] == 0
        finally:
            process.terminate()
            process.wait(45)
    loads = [read_load(path) for path in sorted(tmp_path.glob("reports/*/requests*.jsonl"))]
    assert sorted(load.reason for load in loads) == [contract.BY_SIGNAL, contract.BY_STOP]
    assert {load.start.seed for load in loads if load.start} == {1, 2}
    assert all(load.start.options["output_tokens"] == 5 for load in loads if load.start)
