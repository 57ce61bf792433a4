"""A fleet out of a real Prometheus server: the same numbers as the servers' own /metrics, now and for a window that is past."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_server import PrometheusServer
from scripted_server import ScriptedServer

from pytest_kvcache.cli import main
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.errors import CannotJudge, EndpointRefused, UsageError
from pytest_kvcache.observe.prometheus import snapshot, window
from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.observe.scrape import detect_endpoint, take_snapshot
from pytest_kvcache.quantities import Missing
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import resolve

pytestmark = pytest.mark.live


def vllm_text(usage: float, running: int, blocks: int, preemptions: int = 0) -> str:
    labels = '{engine="0",model_name="m"}'
    info = f'block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",num_gpu_blocks="{blocks}",num_gpu_blocks_override="None"'
    return (
        f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{info}}} 1.0\n"
        f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{labels} {usage}\n"
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {running}\n"
        f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{labels} 1\n"
        f"# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{labels} {preemptions}\n"
    )


def dcgm_text(node: str, used: tuple[int, int]) -> str:
    """What a DCGM exporter of a node with two cards of 80 GB says, in MiB."""
    lines = []
    for gpu, size in enumerate(used):
        labels = f'gpu="{gpu}",UUID="GPU-{node}-{gpu}",device="nvidia{gpu}",modelName="NVIDIA H100",Hostname="{node}"'
        lines += [f"DCGM_FI_DEV_FB_{name}{{{labels}}} {value}" for name, value in (("USED", size), ("FREE", 81000 - size), ("RESERVED", 559))]
    return "\n".join(lines) + "\n"


LOADED_S = 3
LOADED = f'count(count_over_time((vllm:num_requests_running{{job="vllm"}} > 0)[{LOADED_S}s:500ms]) >= {2 * LOADED_S}) == 2'


@dataclass
class Fleet:
    """Both replicas were loaded from ``loaded_from`` for at least two seconds, and have been idle since ``idle_from``."""

    prometheus: PrometheusServer
    servers: list[ScriptedServer]
    loaded_from: float = 0.0
    idle_from: float = 0.0

    @property
    def window(self) -> list[str]:
        """The words that name the time from before the load to its end."""
        return ["--at", f"{self.idle_from:.3f}", "--window", f"{int(self.idle_from - self.loaded_from) + 2}s"]

    @property
    def url(self) -> str:
        return self.prometheus.url


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two replicas of unequal pools and a server of something else; both were loaded for a while and are idle now."""
    with (
        ScriptedServer(model="m", metrics=vllm_text(0.0, 0, 1001), owned_by="vllm") as one,
        ScriptedServer(model="m", metrics=vllm_text(0.0, 0, 3001), owned_by="vllm") as two,
        ScriptedServer(metrics="jvm_threads 3\nprocess_start_time_seconds 1764428917\n") as other,
        ScriptedServer(metrics=dcgm_text("node-a", (1000, 2000))) as first,
        ScriptedServer(metrics=dcgm_text("node-b", (3000, 4000))) as second,
    ):
        addresses = [f"127.0.0.1:{server.port}" for server in (one, two)]
        exporters = [f"127.0.0.1:{server.port}" for server in (first, second)]
        jobs = {"vllm": addresses, "java": [f"127.0.0.1:{other.port}"], "dcgm": exporters}
        with PrometheusServer(tmp_path_factory.mktemp("prometheus"), jobs) as server:
            found = Fleet(server, [one, two])
            one.script.metrics, two.script.metrics = vllm_text(0.9, 9, 1001, 4), vllm_text(0.1, 3, 3001)
            first.script.metrics = dcgm_text("node-a", (70000, 2000))
            server.wait("max(DCGM_FI_DEV_FB_USED) == 70000")
            found.loaded_from = server.wait(LOADED) - LOADED_S + 0.5
            one.script.metrics, two.script.metrics = vllm_text(0.0, 0, 1001, 4), vllm_text(0.0, 0, 3001)
            first.script.metrics = dcgm_text("node-a", (1000, 2000))
            server.wait("max(DCGM_FI_DEV_FB_USED) == 4000")
            found.idle_from = server.wait('count(vllm:num_requests_running{job="vllm"} == 0) == 2')
            yield found


def test_a_fleet_now_is_what_its_servers_say(fleet: Fleet) -> None:
    found = snapshot(fleet.url, 'job="vllm"', at_wall_s=fleet.prometheus.wait('count(up{job="vllm"} == 1) == 2'))
    assert found.whole.engine == "vllm"
    assert len(found.targets) == 2
    assert {name.rpartition(":")[2] for name in found.targets} == {str(server.port) for server in fleet.servers}
    assert found.whole.quantities["usable_blocks"].value == 4000
    assert found.whole.quantities["running"].value == 0
    for server in fleet.servers:
        own = take_snapshot(parse_endpoint(server.url, resolve({}, {}, {})), DIALECTS["vllm"])
        there = found.targets[next(name for name in found.targets if name.endswith(str(server.port)))]
        for name in ("pool_blocks", "usable_blocks", "block_size", "usage", "used_blocks", "free_blocks", "running", "waiting", "preemptions"):
            assert there.quantities[name].value == own.quantities[name].value, name


def test_a_moment_that_is_past_is_read_as_it_was(fleet: Fleet) -> None:
    found = snapshot(fleet.url, '{job="vllm"}', at_wall_s=fleet.loaded_from + 1.0)
    assert found.whole.quantities["running"].value == 12
    # 900 of 1,000 and 300 of 3,000 blocks: the mean is weighted by the pools, and no plain 0.5.
    assert found.whole.quantities["usage"].value == pytest.approx(1200 / 4000)
    assert found.whole.quantities["used_blocks"].value == 1200


def test_a_window_gives_the_rows_of_each_target(fleet: Fleet) -> None:
    start = fleet.loaded_from - 1
    targets = window(fleet.url, 'job="vllm"', start, fleet.idle_from, 0.5)
    assert len(targets) == 2
    for target in targets:
        assert target.dialect is not None
        assert target.dialect.name == "vllm"
        assert [row.wall_s for row in target.rows] == sorted(row.wall_s for row in target.rows)
        assert target.rows[0].wall_s == pytest.approx(start, abs=0.001)
        assert target.rows[-1].wall_s == pytest.approx(fleet.idle_from, abs=0.001)
        assert len(target.rows) - int((fleet.idle_from - start) / 0.5) in {1, 2}, "one a step, and the end"
    peaks = {target.labels["instance"].rpartition(":")[2]: max(row.values.get("usage", 0.0) for row in target.rows) for target in targets}
    assert peaks == {str(fleet.servers[0].port): 0.9, str(fleet.servers[1].port): 0.1}
    free = min(row.values["free_blocks"] for target in targets for row in target.rows if "free_blocks" in row.values)
    assert free == 100


def test_a_window_before_the_first_scrape_says_that_nothing_is_there(fleet: Fleet) -> None:
    with pytest.raises(CannotJudge, match="no series matches"):
        window(fleet.url, 'job="vllm"', fleet.loaded_from - 90_000, fleet.loaded_from - 86_400, 60)


def test_rows_before_the_first_scrape_are_gaps_and_not_zeros(fleet: Fleet) -> None:
    targets = window(fleet.url, 'job="vllm"', fleet.loaded_from - 600, fleet.idle_from, 60)
    for target in targets:
        assert target.rows[0].error
        assert target.rows[0].values == {}


def test_what_a_selector_misses_is_said(fleet: Fleet) -> None:
    with pytest.raises(CannotJudge, match="no series matches"):
        snapshot(fleet.url, 'job="nobody"')
    with pytest.raises(CannotJudge, match="no dialect reads any of them"):
        snapshot(fleet.url, 'job="java"')
    assert len(snapshot(fleet.url).targets) == 2, "servers of something else are passed over"
    with pytest.raises(EndpointRefused, match="does not take the query"):
        snapshot(fleet.url, 'job=~"("')
    with pytest.raises(EndpointRefused, match="no Prometheus API"):
        snapshot(fleet.url + "/deeper", "")


def test_a_window_of_too_many_points_is_refused_before_it_is_asked_for(fleet: Fleet) -> None:
    with pytest.raises(UsageError, match="11,000"):
        window(fleet.url, 'job="vllm"', 0, 1e6, 1)


def test_inspect_shows_the_fleet_and_a_window(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--prometheus", fleet.url, "--selector", 'job="vllm"', "--json", "--at", str(fleet.loaded_from + 1.0)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["engine"] == "vllm"
    assert told["quantities"]["used_blocks"]["value"] == 1200
    assert len(told["per_rank"]) == 2
    assert main(["inspect", "--prometheus", fleet.url, "--selector", 'job="vllm"', *fleet.window]) == 0
    shown = capsys.readouterr().out
    assert "90.0 %" in shown
    assert "100 blocks" in shown, "a peak is never shown without what was free"


def test_the_cards_of_all_nodes_are_there_by_name(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    """Two exporters of two cards each, found by the nodes of the engines' targets; the peak of a window is not that of its end."""
    asked = ["inspect", "--prometheus", fleet.url, "--selector", 'job="vllm"']
    assert main([*asked, "--json"]) == 0
    cards = json.loads(capsys.readouterr().out)["gpus"]
    assert [(card["host"], card["index"], card["used_bytes"] >> 20) for card in cards] == [
        ("node-a", 0, 1000),
        ("node-a", 1, 2000),
        ("node-b", 0, 3000),
        ("node-b", 1, 4000),
    ]
    assert all(card["total_bytes"] == (81000 + 559) << 20 for card in cards)
    assert main([*asked, *fleet.window, "--step", "0.5s", "--json"]) == 0
    windows = json.loads(capsys.readouterr().out)["cards"]
    assert {(one["card"]["host"], one["card"]["index"]): one["card"]["used_bytes"] >> 20 for one in windows}["node-a", 0] == 70000
    assert min(one["least_free_bytes"] for one in windows) == 11000 << 20
    assert main([*asked, *fleet.window, "--cards", 'job="dcgm",Hostname="node-b"']) == 0
    shown = capsys.readouterr().out
    assert "node-b" in shown
    assert "node-a" not in shown
    assert main([*asked, "--cards", 'job="nobody"']) == 0
    assert "no card matches" in capsys.readouterr().out


def test_an_endpoint_whose_telemetry_is_in_prometheus(fleet: Fleet, tmp_path: Path) -> None:
    server = fleet.servers[0]
    settings = resolve({"endpoint": [server.url], "prometheus": fleet.url, "prometheus_selector": 'job="vllm"'}, {}, {})
    endpoint = parse_endpoint(server.url, settings)
    dialect = detect_endpoint(endpoint)
    found = take_snapshot(endpoint, dialect)
    assert found.quantities["usable_blocks"].value == 4000
    assert len(found.per_rank) == 2
    assert "GET /metrics" not in [path for path in server.paths()[-3:] if "query" in path]
    began = time.monotonic()
    with Sampler([endpoint], tmp_path, 5, dialects=[dialect], gpus=False) as sampler:
        # one scrape a second of each server: five looks a second find most of the time nothing newer, and say so
        while sampled(tmp_path) < 3 or time.monotonic() - began < 2:
            assert time.monotonic() - began < 30, "no newer scrape was found"
            time.sleep(0.1)
        stats = sampler.stop()
    assert 3 <= stats.samples <= time.monotonic() - began + 2, stats
    assert any("no newer scrape" in reason for reason in stats.reasons)


def sampled(folder: Path) -> int:
    """Return how many looks have found something so far."""
    path = folder / "telemetry.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    rows = [json.loads(line) for line in whole.splitlines()]
    return sum(bool(row.get("values")) for row in rows)


def test_a_key_goes_to_prometheus_only_where_it_is_named(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_API", "secret-of-the-api")
    monkeypatch.setenv("KV_PROM", "secret-of-prometheus")
    names = {"status": "success", "data": ["vllm:num_requests_running"]}
    row = {"metric": {"__name__": "vllm:num_requests_running", "instance": "a:1"}, "value": [1, "3"]}
    data = {"status": "success", "data": {"resultType": "vector", "result": [row]}}
    pages = {"/api/v1/label/__name__/values": names, "/api/v1/query": data}
    with ScriptedServer(pages=pages) as fake:
        snapshot(fake.url, "")
        assert all("authorization" not in {name.lower() for name in seen.headers} for seen in fake.seen)
        found = snapshot(fake.url, "", api_key_env="KV_PROM")
        assert fake.seen[-1].headers["Authorization"] == "Bearer secret-of-prometheus"
    assert found.whole.quantities["running"].value == 3
    assert not isinstance(found.whole.value("running"), Missing)
