"""Thresholds in a whole session on real llama.cpp: lines of a file as tests, limits of a mark, and what a wrong one costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

TESTS = """
import pytest

@pytest.mark.capacity
@pytest.mark.kv_profile("normal", users=2, duration_s=2, usage_peak=0.95, rejections=0)
def test_of_a_mark(kv_session):
    pass

@pytest.mark.capacity
@pytest.mark.kv_profile("normal", users=2, duration_s=2, usage_peak=0.0001)
def test_of_a_mark_that_cannot_hold(kv_session):
    pass

@pytest.mark.capacity
@pytest.mark.kv_profile("normal", users=2, duration_s=2)
def test_of_the_file(kv_thresholds, kv_threshold):
    from pytest_kvcache import assertions
    assertions.settle_all(kv_thresholds(kv_threshold))
"""


def test_each_line_of_a_file_is_a_test_and_the_limits_of_a_mark_are_judged(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(TESTS)
    (tmp_path / "kvgate.toml").write_text('fail = ["usage.peak < 0.95", "throughput > 1e9"]\nwarn = ["requests.sent > 1e9"]')
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--kv-thresholds=kvgate.toml", "test_x.py", "-v"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "test_of_the_file[throughput > 1000000000] FAILED" in result.stdout
    assert "test_of_the_file[requests.sent > 1000000000] PASSED" in result.stdout, "a warning fails no test"
    assert "test_of_a_mark_that_cannot_hold FAILED" in result.stdout
    (path,) = (tmp_path / "reports").glob("*/verdict.json")
    gates = json.loads(path.read_text())["gates"]
    assert {(g["quantity"], g.get("level", "")) for g in gates} >= {
        ("usage.peak", ""),
        ("rejections", ""),
        ("throughput", ""),
        ("requests.sent", "warn"),
    }
    assert json.loads(path.read_text())["verdict"] in {"FAIL", "INVALID"}
    (tmp_path / "kvgate.toml").unlink()
    stored = subprocess.run(
        [sys.executable, "-m", "pytest_kvcache.cli", "gate", str(path.parent), "--require", "rejections == 0"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert stored.returncode in {0, 4}, stored.stdout + stored.stderr
