"""Memory of a server's processes: ours, found by pid or by port, and never guessed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.observe.memory import ProcessReader
from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import MemoryRow, TelemetryRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.address import Endpoint

GAUGE = "vllm:kv_cache_usage_perc 0.5\n"


def test_a_known_process_counts_with_its_children() -> None:
    code = "import subprocess, sys; b = bytearray(64 << 20); subprocess.run([sys.executable, '-c', 'b = bytearray(32 << 20); print(1, flush=True); input()'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        row = ProcessReader(Endpoint("http://192.0.2.1:1", pid=child.pid)).read()
        assert isinstance(row, MemoryRow)
        assert len(row.processes) == 2
        assert 96 << 20 < sum(row.processes.values()) < 300 << 20
        assert row.cpu_s > 0
        assert row.total_bytes == psutil.virtual_memory().total
    finally:
        child.communicate(b"\n", timeout=20)
    gone = ProcessReader(Endpoint("http://192.0.2.1:1", pid=child.pid)).read()
    assert isinstance(gone, Missing)


def test_a_loopback_port_names_its_process_and_another_machine_does_not() -> None:
    with ScriptedServer(metrics=GAUGE) as server:
        row = ProcessReader(Endpoint(server.url)).read()
        assert isinstance(row, MemoryRow)
        assert str(os.getpid()) in row.processes
        assert not ProcessReader(Endpoint(f"http://192.0.2.1:{server.port}")).known
    elsewhere = ProcessReader(Endpoint("http://gpu-node.example:8000")).read()
    assert isinstance(elsewhere, Missing)
    assert "not known" in elsewhere.reason


def test_a_container_engine_or_tunnel_is_not_taken_for_the_server(tmp_path: Path) -> None:
    tunnel = tmp_path / "kubectl"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", tunnel)
    child = subprocess.Popen(["sh", "-c", f"{tunnel} 30; true"])
    try:
        deadline = time.monotonic() + 5
        while len(psutil.Process(child.pid).children()) < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        row = ProcessReader(Endpoint("http://127.0.0.1:1", pid=child.pid)).read()
        assert isinstance(row, Missing)
        assert "kubectl stands between" in row.reason
    finally:
        for process in psutil.Process(child.pid).children():
            process.kill()
        child.wait(10)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_sampler_writes_memory_beside_the_values_where_it_is_wanted(tmp_path: Path, wanted: bool) -> None:
    with (
        ScriptedServer(metrics=GAUGE) as server,
        Sampler([Endpoint(server.url)], tmp_path, 50.0, dialects=[DIALECTS["vllm"]], gpus=False, memory=wanted),
    ):
        deadline = time.monotonic() + (10.0 if wanted else 0.5)
        rows: list[TelemetryRow] = []
        while time.monotonic() < deadline and not any(row.memory for row in rows):
            time.sleep(0.05)
            rows = list(read_lines(tmp_path / "telemetry.jsonl", TelemetryRow))
    held = [row.memory for row in rows if row.memory is not None]
    assert bool(held) is wanted
    assert all(str(os.getpid()) in row.processes for row in held)
