"""Experiments of two launches on real llama.cpp: resumed after a kill, against itself, and with a change that nobody declared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.live

F16 = "llamacpp --kv-type f16 --slots 2"
COMPARE = [sys.executable, "-m", "pytest_kvcache.cli", "compare", "--users", "2", "--duration-s", "1.5", "--profile", "normal", "--no-quality"]


def _sides(before: str, after: str) -> list[str]:
    return ["--before", before, "--after", after]


def _session(folder: Path) -> Path:
    (session,) = (folder / "reports").iterdir()
    return session


def _verdict(folder: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((_session(folder) / "verdict.json").read_text())
    return verdict


def _finished(folder: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((_session(folder) / "experiment.json").read_text()).get("finished", [])
    return cells


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMPARE, *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def _kill_in_the_second_repeat(folder: Path, words: list[str]) -> None:
    """Start an experiment and kill it while the third of its four windows runs."""
    folder.mkdir()
    process = subprocess.Popen([*COMPARE, *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = list(folder.glob("reports/*/experiment.json"))
            if found and len(json.loads(found[0].read_text()).get("finished", [])) == 2 and len(list(folder.glob("reports/*/runs/*"))) > 2:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait(30)


def test_an_experiment_that_was_killed_goes_on_from_its_finished_cells(tmp_path: Path) -> None:
    words = [*_sides(F16, F16), "--repeats", "2"]
    for attempt in range(3):  # a repeat that a crowded machine made unsound is measured again, and says so: that is another promise
        folder = tmp_path / str(attempt)
        _kill_in_the_second_repeat(folder, words)
        kept = _finished(folder)
        assert [(cell["repeat"], cell["side"]) for cell in kept] == [(0, "before"), (0, "after")]
        result = _run(folder, *words, "--resume", str(_session(folder)))
        if not json.loads((_session(folder) / "experiment.json").read_text()).get("unsound_repeats"):
            break
    tmp_path = folder
    cells = _finished(tmp_path)
    assert cells[:2] == kept, "what was finished is not measured again"
    assert "different servers" not in result.stdout, "figures of stored and of new windows are the same figures"
    assert [(cell["repeat"], cell["side"]) for cell in cells] == [(0, "before"), (0, "after"), (1, "after"), (1, "before")], result.stdout
    assert len(list((_session(tmp_path) / "unfinished").iterdir())) == 1, "the window that the kill cut off is no evidence"
    runs = [json.loads(path.read_text()) for path in _session(tmp_path).glob("runs/*/run.json")]
    assert len(runs) == 4
    assert len({run["launch_id"] for run in runs}) == 4, "each repeat is a start of its own"
    assert {(run["side"], run.get("window", 0), run["workload"]) for run in runs if run["side"] == "before"} == {
        ("before", run.get("window", 0), run["workload"]) for run in runs if run["side"] == "after"
    }, "the same load on both sides of a pair"
    assert not any("restarts is not covered" in note for note in _verdict(tmp_path).get("notes", []))
    other = _run(tmp_path, *words, "--seed", "9", "--resume", str(_session(tmp_path)))
    assert other.returncode == 2
    assert "seed was 1 and is 9" in other.stderr


def test_a_change_that_nobody_declared_is_invalid(tmp_path: Path) -> None:
    words = _sides("llamacpp --kv-type f16 --slots 2", "llamacpp --kv-type q8_0 --slots 4")
    result = _run(tmp_path, *words, "--repeats", "1", "--windows", "1", "--expect-change", "kv_dtype")
    verdict = _verdict(tmp_path)
    assert result.returncode == 4, result.stdout
    assert verdict["verdict"] == "INVALID"
    (problem,) = (text for text in verdict["problems"] if "something changed that was not declared" in text)
    assert "max_num_seqs" in problem
    assert "kv_dtype" not in problem
