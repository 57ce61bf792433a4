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
from pytest_kvcache.server.endpoint import complete
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings

pytestmark = pytest.mark.vllm
COMMAND = "vllm-cpu --max-model-len 4096 --block-size 32 --num-gpu-blocks-override 400"
PROMPT, ANSWER = 2000, 2000


def test_a_window_that_is_past_tells_the_level_that_the_server_told(tmp_path: Path) -> None:
    with launch(COMMAND, Settings(ready_timeout_s=300.0), tmp_path / "server.log") as server:
        endpoint = server.endpoint
        dialect = detect_endpoint(endpoint)
        address = endpoint.root.removeprefix("http://")
        with PrometheusServer(tmp_path, {"vllm": [address]}) as prometheus:
            began = time.time()
            with Sampler([endpoint], tmp_path, 10.0, dialects=[dialect], gpus=False) as sampler:
                ids = [[2 + (n * 7 + user * 13) % 200 for n in range(PROMPT)] for user in range(2)]
                threads = [threading.Thread(target=complete, args=(endpoint, prompt, ANSWER), kwargs={"ignore_eos": True}) for prompt in ids]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(150)
                time.sleep(2.5)
                assert not sampler.stop().errors
            ended = time.time()
            own = [row for row in read_lines(tmp_path / "telemetry.jsonl", TelemetryRow) if isinstance(row, TelemetryRow)]
            (target,) = window(prometheus.url, 'job="vllm"', began, ended, 0.5)
            seen = [row.values["used_blocks"] for row in target.rows if "used_blocks" in row.values]
            polled = {row.values["used_blocks"] for row in own}
            # Prometheus looks once a second, we ten times: each level that it saw lies between levels that we saw, and none above.
            assert seen
            assert max(seen) > 100
            assert max(seen) <= max(polled)
            assert min(seen) >= min(polled)
            direct = take_snapshot(endpoint, dialect)
            there = snapshot(prometheus.url, 'job="vllm"')
            for name in ("pool_blocks", "usable_blocks", "block_size", "used_blocks", "free_blocks", "running", "preemptions", "generation_tokens"):
                assert there.whole.quantities[name].value == direct.quantities[name].value, name
