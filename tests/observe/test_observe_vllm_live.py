"""On real vLLM: the blocks that we say are in use are those that the engine itself says are, and those that a known request must hold."""

from __future__ import annotations

import re
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.observe.scrape import detect_endpoint, take_snapshot
from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import TelemetryRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.server.endpoint import complete

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
BLOCK, POOL = 32, 600
_LOG_LINE = re.compile(r"INFO (\d\d-\d\d \d\d:\d\d:\d\d) .*Running: (\d+) reqs, .*KV cache usage: ([\d.]+)%")


@pytest.fixture
def endpoint(roomy_vllm: Endpoint) -> Endpoint:
    return roomy_vllm


def wait_until_idle(endpoint: Endpoint) -> None:
    """Wait until the server says that nothing runs and nothing is held: it says so a step after the last answer, or later on a busy machine."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        told = take_snapshot(endpoint).quantities
        if (told["running"].value, told["used_blocks"].value) == (0, 0):
            return
        time.sleep(0.1)
    pytest.fail("something is still held half a minute after the last answer")


def load(endpoint: Endpoint, users: int, prompt: int, answer: int) -> None:
    """Send ``users`` requests at once, no two alike in their first block, and wait for all of them."""
    failed: list[str] = []

    def ask(user: int) -> None:
        ids = [2 + (n * 7 + user * 13) % 200 for n in range(prompt)]
        done = complete(endpoint, ids, answer, timeout_s=120.0, ignore_eos=True)
        if (done.status, done.prompt_tokens, done.completion_tokens) != (200, prompt, answer):
            failed.append(f"{done.status} {done.error}")

    threads = [threading.Thread(target=ask, args=(user,)) for user in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert not failed


def sampled(endpoint: Endpoint, folder: Path, users: int, prompt: int, answer: int) -> list[TelemetryRow]:
    folder.mkdir(exist_ok=True)
    with Sampler([endpoint], folder, 20.0, dialects=[detect_endpoint(endpoint)], gpus=False) as sampler:
        load(endpoint, users, prompt, answer)
        wait_until_idle(endpoint)
        time.sleep(0.5)
        assert not sampler.stop().errors
    return list(read_lines(folder / "telemetry.jsonl", TelemetryRow))


def test_the_snapshot_holds_what_the_engine_was_started_with(endpoint: Endpoint) -> None:
    snapshot = take_snapshot(endpoint)
    right = {"pool_blocks": POOL, "usable_blocks": POOL - 1, "block_size": BLOCK, "max_model_len": 4090, "num_gpu_blocks_override": POOL}
    for name, number in right.items():
        value = snapshot.value(name)
        assert isinstance(value, Reading), f"{name}: {value}"
        assert value.value == number
    pool = snapshot.value("pool_bytes")
    assert isinstance(pool, Reading), pool
    assert pool.value == POOL * BLOCK * 1024, "its blocks, and not the GiB that was asked for: two layers of one head of 128 in bfloat16"
    assert snapshot.engine == "vllm"
    assert snapshot.version


def test_one_request_holds_the_blocks_that_its_tokens_need(endpoint: Endpoint, tmp_path: Path) -> None:
    rows = sampled(endpoint, tmp_path, 1, 1500, 1000)
    busy = [row.values["used_blocks"] for row in rows if row.values["running"]]
    assert busy == sorted(busy)
    assert busy
    assert all(-(-1500 // BLOCK) <= used <= -(-2500 // BLOCK) for used in busy if used)
    assert rows[-1].values["used_blocks"] == 0, "cached blocks that nobody uses are free"
    assert rows[-1].values["free_blocks"] == POOL - 1


def test_used_blocks_are_those_of_the_engines_own_log(endpoint: Endpoint, tmp_path: Path) -> None:
    assert endpoint.log is not None
    compared = 0
    for attempt in range(3):  # a crowded machine may keep our sampler from looking while the engine goes on
        rows = sampled(endpoint, tmp_path / str(attempt), 4, 1000, 3000)
        # While all four run, what they hold only grows: a figure of the log lies between what we saw before and after it.
        together = [row for row in rows if row.values["running"] == 4]
        for stamp, running, percent in _LOG_LINE.findall(endpoint.log.read_text()):
            at = datetime.strptime(f"{datetime.now().year}-{stamp}", "%Y-%m-%d %H:%M:%S").timestamp()
            before = [row.values["usage"] * 100 for row in together if row.wall_s + row.read_s <= at]
            after = [row.values["usage"] * 100 for row in together if row.wall_s >= at + 1.0]
            if running == "4" and before and after:
                compared += 1
                assert max(before) - 0.06 <= float(percent) <= min(after) + 0.06, (
                    f"{stamp}: the log says {percent} %, we saw {max(before)} and {min(after)}"
                )
        if compared:
            return
    pytest.fail("no line of the log lies between two of our looks")
