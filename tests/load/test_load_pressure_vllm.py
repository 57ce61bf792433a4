"""A real vLLM under more than it can take: queueing that latency from the intended start shows, and preemptions that pauses show."""

from __future__ import annotations

import json
import re
import statistics
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
from pytest_kvcache.server.openai import tokenize

pytestmark = pytest.mark.vllm
SEATS = 8
STALL_S = 0.05


@pytest.fixture
def vllm(tight_vllm: Endpoint) -> Endpoint:
    """64 usable blocks of 32 tokens and eight seats: eight requests of 380 tokens do not fit."""
    return tight_vllm


@pytest.fixture
def told(tight_vllm: Endpoint) -> Path:
    """The file in which vLLM's scheduler writes the prompt of each request that it preempts."""
    assert tight_vllm.log is not None
    return tight_vllm.log.parent / "preempted.jsonl"


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
    press(vllm, tmp_path / "warm", users=4, duration_s=2, output_tokens=16, options={"median": 64})
    closed = press(vllm, tmp_path / "closed", users=4, duration_s=4, output_tokens=16, options={"median": 64})
    done = [row for row in closed if row.outcome == contract.OK]
    # four users are what four requests in flight can do: three times as many arrivals are past that
    rate = 3 * len(done) / (max(row.end_s for row in done) - min(row.sent_s for row in done))
    options = {"median": 64, "rate": round(rate, 2), "arrivals": "constant", "max_in_flight": 4}
    rows = press(vllm, tmp_path / "open", duration_s=10, output_tokens=16, options=options)
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


def put_back(told: Path) -> list[tuple[tuple[int, ...], int]]:
    """Return the preemptions so far: the prompt in token ids, and how many tokens of its answer there were."""
    return [(tuple(ids), count) for ids, count in map(json.loads, told.read_text().splitlines())] if told.exists() else []


def test_the_longest_pauses_are_those_of_the_requests_that_vllm_preempted(vllm: Endpoint, told: Path, tmp_path: Path) -> None:
    before, earlier = preempted(vllm), len(put_back(told))
    # all eight begin with 7 blocks and end with 12: some are put back 36 to 100 steps on, until others have all their 160 tokens
    options = {"median": 220, "sigma": 0.02, "requests": SEATS, "lengths": "tokenize"}
    rows = press(vllm, tmp_path, users=SEATS, duration_s=60, output_tokens=160, options=options, keep_text=True)
    times, who = (after - was for after, was in zip(preempted(vllm), before, strict=True))
    events = put_back(told)[earlier:]
    ids = {tuple(tokenize(vllm, row.prompt or "", add_special=True) or ()): row.id for row in rows}
    assert len(ids) == len(rows), "no two prompts are the same"
    assert len(events) == times > 0
    assert len({ids[prompt] for prompt, _ in events}) == round(who), "vLLM's scheduler and its histogram speak of the same requests"
    # who is put back before the first token has a late first token, and no pause
    victims = {ids[prompt] for prompt, count in events if count}
    pauses = longest_pauses(columns(read_lines(tmp_path / "requests.jsonl", LoadLine))[0], most=len(rows))
    # a busy machine stalls the whole engine now and then: that is a pause of all answers at the same moment, and no preemption
    stalled = {one.number for one in pauses if sum(abs(other.at_s - one.at_s) < STALL_S for other in pauses) >= SEATS / 2} - victims
    longest = [one for one in pauses if one.number not in stalled][: len(victims)]
    found = victims & {one.number for one in longest}
    seen = (
        f"{times:.0f} preemptions of {round(who)} requests, after their first token {sorted(victims)}, stalled with the engine {sorted(stalled)};"
        f" pauses in s: {[(pause.number, round(pause.length_s, 3)) for pause in pauses]}"
    )
    (tmp_path / "seen.txt").write_text(seen)
    assert victims, seen
    # one that goes on at once may have paused no longer than the others wait for the step in which it is computed again
    assert len(found) >= len(victims) - 1, seen
    assert all(one.length_s > 3 * one.pace_s for one in pauses if one.number in found), seen
    assert all(row.completion_tokens == 160 for row in rows)
