"""A window that is past, out of a real Prometheus server, and a real llama.cpp in passing."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_server import PrometheusServer
from scripted_answers import State
from scripted_server import ScriptedServer, vllm_metrics
from test_diagnosis import vllm_text

from pytest_kvcache.analysis.findings import find
from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.cli import main
from pytest_kvcache.measure import Planned, Target, Window, measure_load
from pytest_kvcache.observe.scrape import detect_endpoint
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.server.endpoint import check_ready, complete
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings

pytestmark = pytest.mark.live


def dcgm_text(used: tuple[int, int]) -> str:
    """What a DCGM exporter of a node with two cards of 80 GB says, in MiB."""
    labels = [f'gpu="{gpu}",UUID="GPU-{gpu}",device="nvidia{gpu}",modelName="NVIDIA H100",Hostname="node-a"' for gpu in range(2)]
    told = [(label, (("USED", size), ("FREE", 81000 - size), ("RESERVED", 559))) for label, size in zip(labels, used, strict=True)]
    return "".join(f"DCGM_FI_DEV_FB_{name}{{{label}}} {value}\n" for label, values in told for name, value in values)


@dataclass
class Past:
    """A Prometheus server and the moments between which its two replicas were unevenly loaded."""

    url: str
    since: float
    until: float


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    with (
        ScriptedServer(model="m", metrics=vllm_text(0.0, 0, 0), owned_by="vllm") as one,
        ScriptedServer(model="m", metrics=vllm_text(0.0, 0, 0), owned_by="vllm") as two,
        ScriptedServer(metrics=dcgm_text((70000, 30000))) as cards,
    ):
        jobs = {"vllm": [f"127.0.0.1:{server.port}" for server in (one, two)], "dcgm": [f"127.0.0.1:{cards.port}"]}
        with PrometheusServer(tmp_path_factory.mktemp("prometheus"), jobs) as server:
            one.script.metrics, two.script.metrics = vllm_text(0.85, 9, 3), vllm_text(0.15, 1, 0)
            # a second before the end no scrape can come in any more
            until = server.wait('count(count_over_time((vllm:num_requests_running{job="vllm"} > 0)[5s:500ms]) >= 10) == 2') - 1.0
            one.script.metrics = two.script.metrics = vllm_text(0.0, 0, 0)
            yield Past(server.url, until - 3.5, until)


def test_a_past_window_shows_which_replica_carried_the_load(past: Past, capsys: pytest.CaptureFixture[str]) -> None:
    window = ["--at", f"{past.until:.3f}", "--window", f"{past.until - past.since:.1f}s"]
    assert main(["diagnose", "--prometheus", past.url, "--selector", 'job="vllm"', *window, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "replica-imbalance" in [finding["id"] for finding in found["findings"]]
    assert found["values"]["usage.peak"]["value"] == pytest.approx(0.5, abs=0.01), "the mean that hides it"
    assert found["values"]["usage.hottest"]["value"] == pytest.approx(0.85)
    assert "no request log" in found["reconciliations"][1]["lacking"]
    assert len(found["endpoints"]) == 2


def test_the_cards_of_a_past_window_are_taken_from_their_exporters(past: Past, capsys: pytest.CaptureFixture[str]) -> None:
    window = ["--at", f"{past.until:.3f}", "--window", "3s", "--cards", 'job="dcgm"']
    assert main(["diagnose", "--prometheus", past.url, "--selector", 'job="vllm"', *window]) == 0
    assert "GPU 0" in capsys.readouterr().out


def test_an_hour_in_which_nothing_was_scraped_cannot_be_judged(past: Past, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--prometheus", past.url, "--at", f"{past.since - 7200:.0f}", "--window", "60s"]) == 3
    assert "no series" in capsys.readouterr().err


def test_a_real_server_in_passing_shows_who_waits_for_its_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    with launch("llamacpp --ctx 16384 --slots 2", Settings(ready_timeout_s=60.0), log) as server:
        asked = threading.Event()

        def ask(seed: int) -> None:
            while not asked.is_set():
                complete(server.endpoint, [3 + (seed + n * 7) % 90 for n in range(300)], 400, timeout_s=60.0, ignore_eos=True)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        try:
            assert main(["diagnose", server.endpoint.root, "--window", "3s", "--sample-hz", "10", "--log", str(log), "--json"]) == 0
        finally:
            asked.set()
            for thread in threads:
                thread.join(60)
    found = json.loads(capsys.readouterr().out)
    assert [finding["id"] for finding in found["findings"]] == ["seat-bound"], found["findings"]
    memory = " ".join(found["reconciliations"][0]["lines"])
    assert "KV pool" in memory
    assert "(stated)" in memory


@pytest.mark.parametrize("kept", [0, 3])
def test_an_engine_that_keeps_the_blocks_of_clients_that_hang_up_leaks_and_another_does_not(kept: int, tmp_path: Path) -> None:
    """Field case D04: a polite client never finds it. Each of the clients hangs up in the middle of its answer."""

    def metrics(server: State) -> str:
        with server.lock:
            asked = sum((seen.body or {}).get("max_tokens") == 200 for seen in server.seen)
            gone = max(asked - len(server.live), 0)
        usage = re.compile(r"^(vllm:kv_cache_usage_perc\{.*\}) (.*)$", re.M)
        return usage.sub(lambda row: f"{row[1]} {float(row[2]) + kept * gone / 1024}", vllm_metrics(server))

    with ScriptedServer(model="m", owned_by="vllm", metrics=metrics, ttft_s=0.05, itl_s=0.05) as server:
        endpoint = check_ready(parse_endpoint(server.url, Settings()), 10.0)
        target = Target((endpoint,), (detect_endpoint(endpoint),))
        planned = Planned("normal", users=3, requests=6, output_tokens=200, options={"histogram": "100-110:1"})
        run = measure_load(
            target, Settings(request_timeout_s=0.7), tmp_path / "r", Window(planned, 0, 1, "r", 20.0), run_id="r", keep=lambda run: run
        )
    found = {finding.id: finding.text for finding in find(analyse(run)).found}
    assert set(found) == ({"leak"} if kept else set()), found
    assert not kept or "18 blocks stayed held" in found["leak"]
