"""A real Prometheus that scrapes a real vLLM: a window of its past tells what the server's own /metrics told at the time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from prometheus_server import PrometheusServer

from pytest_kvcache.observe.prometheus import snapshot, window
from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.observe.scrape import detect_endpoint, take_snapshot
from pytest_kvcache.records import TelemetryRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.server.endpoint import complete

pytestmark = pytest.mark.vllm
PROMPT, ANSWER, BLOCK = 2000, 2000, 32
OLDEST_S = 2.5
"""A value that Prometheus shows was scraped at most a second ago, and the scrape took at most another."""


def test_a_window_that_is_past_tells_the_level_that_the_server_told(roomy_vllm: Endpoint, tmp_path: Path) -> None:
    endpoint = roomy_vllm
    dialect = detect_endpoint(endpoint)
    with PrometheusServer(tmp_path, {"vllm": [endpoint.root.removeprefix("http://")]}) as prometheus:
        began = time.time()
        with Sampler([endpoint], tmp_path, 10.0, dialects=[dialect], gpus=False) as sampler:
            ids = [[2 + (n * 7 + user * 13) % 190 for n in range(PROMPT)] for user in range(2)]
            threads = [threading.Thread(target=complete, args=(endpoint, prompt, ANSWER), kwargs={"ignore_eos": True}) for prompt in ids]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(150)
            assert not sampler.stop().errors
        tokens = take_snapshot(endpoint, dialect).quantities["generation_tokens"].value
        idle = f'sum(vllm:generation_tokens_total{{job="vllm"}}) == {tokens} and sum(vllm:num_requests_running{{job="vllm"}}) == 0'
        ended = prometheus.wait(idle)
        own = [row for row in read_lines(tmp_path / "telemetry.jsonl", TelemetryRow) if row.values.get("running") == 2]
        (target,) = window(prometheus.url, 'job="vllm"', began, ended, 0.5)
        compared = 0
        for row in target.rows:
            # while both run, what they hold only grows: a level of Prometheus lies between those that we saw before and after its scrape
            before = [one.values["used_blocks"] for one in own if one.wall_s + one.read_s <= row.wall_s - OLDEST_S]
            after = [one.values["used_blocks"] for one in own if one.wall_s >= row.wall_s]
            if row.values.get("running") == 2 and before and after:
                compared += 1
                assert max(before) <= row.values["used_blocks"] <= min(after)
        assert compared >= 2
        highest = max(row.values.get("used_blocks", 0) for row in target.rows)
        assert 2 * PROMPT / BLOCK < highest <= 2 * -(-(PROMPT + ANSWER) // BLOCK)
        direct = take_snapshot(endpoint, dialect)
        there = snapshot(prometheus.url, 'job="vllm"', at_wall_s=ended)
        for name in ("pool_blocks", "usable_blocks", "block_size", "used_blocks", "free_blocks", "running", "preemptions", "generation_tokens"):
            assert there.whole.quantities[name].value == direct.quantities[name].value, name
