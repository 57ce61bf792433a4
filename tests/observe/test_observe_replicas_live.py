"""Two real llama.cpp servers of unequal pools: pools add, usage is weighted by them, and the fuller one is never hidden in the mean."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.cli import main
from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.observe.scrape import detect_endpoint, take_snapshot
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import TelemetryRow
from pytest_kvcache.runfolder import read_lines, read_runs
from pytest_kvcache.server.address import Endpoint, parse_endpoint
from pytest_kvcache.server.endpoint import complete
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings, resolve

pytestmark = pytest.mark.live
SIZES = (4096, 12288)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Endpoint]]:
    folder = tmp_path_factory.mktemp("replicas")
    command = f"{sys.executable} -m pytest_kvcache.server.embedded.llamacpp --port {{port}} --slots 1 --ctx "
    with (
        launch(f"{command}{SIZES[0]}", Settings(ready_timeout_s=60.0), folder / "0.log") as one,
        launch(f"{command}{SIZES[1]}", Settings(ready_timeout_s=60.0), folder / "1.log") as two,
    ):
        yield [one.endpoint, two.endpoint]


def number(values: dict[str, Reading | Missing], name: str) -> float:
    value = values[name]
    assert isinstance(value, Reading), f"{name}: {value}"
    return value.number()


def test_repeated_endpoints_are_one_service(replicas: list[Endpoint], tmp_path: Path) -> None:
    named = [word for replica in replicas for word in ("--endpoint", replica.root)]
    code = main(["load", "normal", *named, "--users", "4", "--duration-s", "3", "--output-tokens", "200", "--reports", str(tmp_path)])
    assert code in {0, 1, 3, 4}, "measured, whatever the verdict on a crowded machine"
    (session,) = (path for path in tmp_path.iterdir() if path.name != "baselines" and path.is_dir())
    (run,) = read_runs(session)
    values = analyse(run).values
    assert number(values, "pool_tokens") == sum(SIZES)
    rows = [row for row in read_lines(run.folder / "telemetry.jsonl", TelemetryRow) if row.values]
    assert {row.endpoint for row in rows} == {0, 1}
    fullest = max(row.values["usage"] for row in rows)
    assert number(values, "usage.hottest") == pytest.approx(fullest)
    assert 0 < number(values, "usage.peak") <= fullest
    held = [max(row.values["used_tokens"] for row in rows if row.endpoint == number) for number in (0, 1)]
    assert max(held) <= number(values, "used_tokens.peak") <= sum(held), "used tokens of both at one time"
    assert number(values, "usage.peak") <= sum(held) / sum(SIZES) + 1e-9, "a weighted mean, and no mean of two shares"


def test_usage_of_a_fleet_is_weighted_by_its_pools_at_every_look(replicas: list[Endpoint], tmp_path: Path) -> None:
    dialects = [detect_endpoint(replica) for replica in replicas]
    with Sampler(replicas, tmp_path, 20.0, dialects=dialects, gpus=False):
        threads = [threading.Thread(target=complete, args=(replica, [2 + n % 200 for n in range(1500)], 1000)) for replica in replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    rows = list(read_lines(tmp_path / "telemetry.jsonl", TelemetryRow))
    for number_, size in enumerate(SIZES):
        busy = [row for row in rows if row.endpoint == number_ and row.values.get("running")]
        assert busy
        assert all(row.values["usage"] == row.values["used_tokens"] / size for row in busy)
    both = [max(row.values["usage"] for row in rows if row.endpoint == number_) for number_ in (0, 1)]
    assert both[0] > 2 * both[1], "the same request is a third of the small pool and a tenth of the large one"


def test_servers_behind_a_router_add_up_from_their_own_pages(replicas: list[Endpoint]) -> None:
    with ScriptedServer(model=replicas[0].model, owned_by="llamacpp") as front:
        settings = resolve({"endpoint": [front.url], "metrics_url": [replica.root for replica in replicas]}, {}, {})
        endpoint = parse_endpoint(front.url, settings)
        dialect = detect_endpoint(endpoint)
        assert dialect.name == "llamacpp"
        threads = [threading.Thread(target=complete, args=(replica, [2 + n % 200 for n in range(1000)], 2500)) for replica in replicas]
        for thread in threads:
            thread.start()
        seen = 0.0
        while any(thread.is_alive() for thread in threads):
            found = take_snapshot(endpoint, dialect)
            ranks = [values["running"].to_value() for values in found.per_rank.values()]
            assert len(ranks) == 2
            whole = found.value("running")
            assert isinstance(whole, Reading)
            assert whole.number() == sum(value.number() for value in ranks if isinstance(value, Reading))
            seen = max(seen, whole.number())
            time.sleep(0.05)
        assert seen == 2
        assert "GET /metrics" not in front.paths(), "the router's own page is not asked"


def test_their_pages_pasted_together_are_two_servers(replicas: list[Endpoint], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for number_, replica in enumerate(replicas):
        with replica.client(metrics=True) as client:
            paths.append(tmp_path / f"{number_}.prom")
            paths[-1].write_text(client.get(replica.url("/metrics")).text)
    assert main(["inspect", *map(str, paths), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["per_rank"]) == 2
    assert told["quantities"]["prompt_tokens"]["value"] == sum(rank["quantities"]["prompt_tokens"]["value"] for rank in told["per_rank"])
