"""One of two cards: what NVIDIA's own bindings or a DCGM exporter say of the cards of one server comes out as the pair that differs, and its ratio."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer
from test_diagnosis import vllm_text

from pytest_kvcache.cli import main

ROOT = Path(__file__).parents[1]


def gpu_findings(found: dict[str, Any]) -> list[str]:
    return [finding["text"] for finding in found["findings"] if finding["id"] == "gpu-imbalance"]


@pytest.mark.parametrize(("second_mib", "uneven"), [(41_000, True), (71_500, False)])
def test_ranks_on_two_cards_of_the_driver(second_mib: int, uneven: bool, nvml_library: Path, tmp_path: Path) -> None:
    """The article's one of two: 72 and 41 GB under TP=2. The server is found on the cards by the process behind its port."""
    state = tmp_path / "state"
    state.write_text(f"0 72000 {os.getpid()}:72000\n1 {second_mib} {os.getpid()}:{second_mib}\n")
    env = {**os.environ, "LD_LIBRARY_PATH": str(nvml_library), "STUB_STATE": str(state), "PYTHONPATH": str(ROOT)}
    with ScriptedServer(model="m", metrics=vllm_text(0.5, 4, 0), owned_by="vllm") as server:
        words = ["diagnose", server.url, "--engine", "vllm", "--window", "1s", "--sample-hz", "10", "--json"]
        command = [sys.executable, "-m", "pytest_kvcache.cli", *words]
        result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    if not uneven:
        assert gpu_findings(found) == []
        assert found["values"]["balance.gpu_over_mean"]["value"] < 1.01
        return
    (text,) = gpu_findings(found)
    assert "70.31 GiB of GPU 0 Stub Card 0 and 40.04 GiB of GPU 1 Stub Card 1; highest over mean 1.27" in text


def test_ranks_on_two_cards_of_a_dcgm_exporter(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        f'DCGM_FI_DEV_FB_{name}{{gpu="{gpu}",UUID="GPU-{gpu}",device="nvidia{gpu}",modelName="NVIDIA H100",Hostname="node-a"}}'
        for gpu in (0, 1)
        for name in ("USED", "FREE", "RESERVED")
    ]
    page = "".join(f"{row} {value}\n" for row, value in zip(rows, (72000, 9000, 559, 41000, 40000, 559), strict=True))
    with (
        ScriptedServer(model="m", metrics=vllm_text(0.5, 4, 0), owned_by="vllm") as server,
        ScriptedServer(metrics=page) as exporter,
    ):
        words = ["diagnose", server.url, "--engine", "vllm", "--window", "1s", "--sample-hz", "10", "--dcgm-url", f"{exporter.url}/metrics", "--json"]
        assert main(words) == 0
    (text,) = gpu_findings(json.loads(capsys.readouterr().out))
    assert "70.31 GiB of" in text
    assert "40.04 GiB of" in text
    assert "highest over mean 1.27" in text
