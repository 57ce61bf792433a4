"""Cards, through NVIDIA's real bindings: they load a small stub of libnvidia-ml.so.1 that is compiled here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.observe.gpu import read_gpus
from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import TelemetryRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.address import Endpoint

ROOT = Path(__file__).parent.parent.parent
CODE = """
import json
from pytest_kvcache.observe.gpu import read_gpus
from pytest_kvcache.quantities import Missing
import msgspec
rows = read_gpus({indices})
print(json.dumps({{"missing": rows.reason}} if isinstance(rows, Missing) else [msgspec.to_builtins(row) for row in rows]))
"""


@pytest.fixture
def library(nvml_library: Path) -> Path:
    return nvml_library


def read(library: Path | None, indices: str = "None", **scene: str) -> Any:
    environment = {**os.environ, **{f"STUB_{name}": value for name, value in scene.items()}}
    environment["LD_LIBRARY_PATH"] = str(library) if library else "/nonexistent"
    command = [sys.executable, "-c", CODE.format(indices=indices)]
    return json.loads(subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60).stdout)


def test_two_cards_with_their_processes(library: Path) -> None:
    rows = read(library)
    assert [(row["index"], row["uuid"], row["name"]) for row in rows] == [(0, "GPU-stub-0", "Stub Card 0"), (1, "GPU-stub-1", "Stub Card 1")]
    for row in rows:
        assert row["total_bytes"] == row["used_bytes"] + row["free_bytes"] + row["reserved_bytes"], "what the driver reserves is not called used"
    assert rows[0]["used_bytes"] == 60 << 30
    assert rows[0]["reserved_bytes"] == 600 << 20
    # 101 has a compute and a graphics context, told by both lists with one figure; 103 is not told.
    assert rows[0]["processes"] == {"101": 50 << 30, "102": 1 << 30}
    assert rows[1].get("processes", {}) == {}


def test_cards_can_be_chosen(library: Path) -> None:
    assert [row["index"] for row in read(library, "[1]")] == [1]


def test_a_card_that_is_not_there_is_missing_with_the_reason(library: Path) -> None:
    assert "NVML cannot read the cards" in read(library, "[5]")["missing"]


def test_an_older_driver_without_reserved_memory_is_read_all_the_same(library: Path) -> None:
    row = read(library, OLD="1")[0]
    assert row["total_bytes"] == 80 << 30
    assert row.get("reserved_bytes", 0) == 0


def test_a_card_in_mig_mode_gives_its_memory_without_processes(library: Path) -> None:
    row = read(library, MIG="1")[0]
    assert row["used_bytes"] == 60 << 30
    assert row.get("processes", {}) == {}


def test_a_driver_that_does_not_start_is_missing_with_the_reason(library: Path) -> None:
    assert read(library, BROKEN="1")["missing"] == "NVML does not start: Driver Not Loaded"


def test_a_driver_without_a_card_is_missing(library: Path) -> None:
    assert read(library, COUNT="0")["missing"] == "NVML finds no card in this machine"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a card: pytest -m gpu reads it")
def test_a_machine_without_the_driver_says_so() -> None:
    assert read(None)["missing"] == "no NVIDIA driver on this machine: libnvidia-ml.so.1 is not found"


@pytest.mark.gpu
def test_the_cards_of_this_machine_are_what_the_drivers_own_tool_says() -> None:
    rows = read_gpus()
    assert not isinstance(rows, Missing), rows
    asked = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    listed = [line.split(", ") for line in subprocess.run(asked, stdout=subprocess.PIPE, check=True, timeout=60, text=True).stdout.splitlines()]
    assert [(row.index, row.uuid, row.name, row.total_bytes >> 20) for row in rows] == [
        (int(index), uuid, name, int(total)) for index, uuid, name, total in listed
    ]
    for row in rows:
        assert abs(row.total_bytes - row.used_bytes - row.free_bytes - row.reserved_bytes) <= 1 << 20
        assert sum(row.processes.values()) <= row.used_bytes


@pytest.mark.gpu
def test_the_sampler_writes_the_cards_of_this_machine_beside_the_server(tmp_path: Path) -> None:
    with (
        ScriptedServer(metrics='vllm:num_requests_running{engine="0"} 1\n') as server,
        Sampler([Endpoint(server.url)], tmp_path, 10.0, dialects=[DIALECTS["vllm"]]),
    ):
        time.sleep(1.5)
    rows = list(read_lines(tmp_path / "telemetry.jsonl", TelemetryRow))
    told = [row.gpus for row in rows if row.gpus]
    known = read_gpus()
    assert not isinstance(known, Missing), known
    assert told
    assert [card.uuid for card in told[0]] == [card.uuid for card in known]
