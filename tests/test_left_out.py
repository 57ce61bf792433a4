"""A gate that was left out is listed, and the session cannot pass: under xdist as well, and where the session was broken off."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.experimenting import go_on

GATES = """
import os, signal
import pytest
from pytest_kvcache import assertions

pytestmark = pytest.mark.capacity

def test_first(kv_load):
    assertions.assert_no_rejections(kv_load("normal", users=1, requests=5))

def test_second(kv_load):
    if os.environ.get("BREAK_OFF"):
        signal.raise_signal(signal.SIGINT)
    assertions.assert_no_rejections(kv_load("normal", users=1, requests=5))
"""


def verdict(pytester: pytest.Pytester) -> Any:
    (path,) = (pytester.path / "reports").glob("*/verdict.json")
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["-n", "1", "--kv-xdist=lease"]])
def test_a_deselected_gate_is_listed_and_the_session_is_inconclusive(pytester: pytest.Pytester, more: list[str]) -> None:
    pytester.makepyfile(test_gates=GATES)
    with ScriptedServer(metrics="vllm") as server:
        result = pytester.runpytest_subprocess(f"--kv-endpoint={server.url}", "-k", "first", *more)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    found = verdict(pytester)
    assert (found["verdict"], found["deselected"]) == ("INCONCLUSIVE", ["test_gates.py::test_second"])


@pytest.mark.slow
def test_a_session_that_was_broken_off_lists_what_it_did_not_judge(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(test_gates=GATES)
    monkeypatch.setenv("BREAK_OFF", "1")
    with ScriptedServer(metrics="vllm") as server:
        result = pytester.runpytest_subprocess(f"--kv-endpoint={server.url}")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    found = verdict(pytester)
    assert (found["verdict"], found["deselected"]) == ("INCONCLUSIVE", ["test_gates.py::test_second (not run)"])
    result.stdout.fnmatch_lines(["not run, not judged: test_gates.py::test_second", "*The session was broken off before 1 of its tests was over*"])
    result.stdout.no_fnmatch_line("*deselected, not judged*")


@pytest.mark.slow
def test_how_to_go_on_with_an_experiment_is_said_at_the_end(pytester: pytest.Pytester) -> None:
    folder = Path("ré ports/s")
    more = f"""
    def test_noted(kv_session, kv_load):
        assertions.assert_no_rejections(kv_load("normal", users=1, requests=5))
        kv_session.notes.append({f"the experiment was broken off: {go_on(folder)}"!r})
    """
    pytester.makepyfile(test_gates=GATES + textwrap.dedent(more))
    with ScriptedServer(metrics="vllm") as server:
        result = pytester.runpytest_subprocess(f"--kv-endpoint={server.url}", "-k", "noted")
    result.stdout.fnmatch_lines(["  note: the experiment was broken off: --kv-resume='ré ports/s'"])
