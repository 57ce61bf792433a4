"""Memory over time: what the driver, an exporter and the kernel said, on the load's clock, with the pauses marked and nothing drawn across them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from finding_cases import GIB, card, worker
from made_run import T0, MadeRun, closed_loop, sample, snapshot
from scripted_server import ScriptedServer

from pytest_kvcache.analysis.memory_seen import MemoryLine, course
from pytest_kvcache.analysis.reconciliations import reconciliations
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.observe.passing import past_run
from pytest_kvcache.observe.prometheus import Prometheus
from pytest_kvcache.records import MemoryRow, VerdictRecord
from pytest_kvcache.report import html, memory_time
from pytest_kvcache.report.model import SessionView

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Two cards and a machine, looked at twice a second for 30 s and not at all between 12 and 17 s; a neighbour comes at 5 s and goes at 9 s."""
    rows = closed_loop(users=2, seconds=30.0, length_s=1.0)
    samples = []
    for i in range(310):
        at = i / 10
        if 12 < at < 17:
            continue
        one = sample(rows, T0 - 0.3 + at)
        if i % 5 == 0:
            ours = 52 + min(at, 20.0) * 0.3
            other = 8.0 if 5 < at < 9 else 2.0
            cards = [card(0, used=ours + other + 1, ours=ours, others=other), card(1, used=51, ours=50)]
            memory = MemoryRow(512 * GIB, 400 * GIB, processes={"1": int((4 + at * 0.05) * GIB), "2": 2 * GIB})
            one = msgspec.structs.replace(one, gpus=cards, memory=memory)
        samples.append(one)
    start = [worker(0, pool=30, weights=14), worker(1, pool=30, weights=14)]
    run = MadeRun(rows=rows, samples=samples, before=[snapshot(T0 - 0.5, gpu_memory_utilization=0.9)], record={"start_memory": start})
    return analyse(run.write(tmp_path_factory.mktemp("made") / "runs" / "1-normal"))


def gib(line: MemoryLine, name: str, at: str) -> float:
    found = course(line, name)
    assert found is not None
    return round(float(getattr(found, at)) / GIB, 2)


def test_each_card_and_the_servers_processes_have_a_line_on_the_loads_clock(watched: Analysis) -> None:
    first, second = watched.timeline.cards
    (host,) = watched.timeline.hosts
    assert [line.label for line in (first, second, host)] == ["GPU 0 A100-SXM4-80GB", "GPU 1 A100-SXM4-80GB", "memory of the machine"]
    assert first.t_s[0] == watched.timeline.t_s[0]
    assert (gib(first, "server", "first"), gib(first, "server", "last"), gib(first, "others", "most")) == (52, 58, 8)
    assert 5 < course(first, "others").most_at_s + 0.3 < 9  # type: ignore[union-attr]
    assert (gib(second, "server", "least"), gib(second, "server", "most")) == (50, 50)
    assert (gib(host, "server", "first"), gib(host, "total", "first")) == (6, 512)


def test_a_pause_is_a_gap_in_every_line_and_never_a_straight_one(watched: Analysis) -> None:
    for line in (*watched.timeline.cards, *watched.timeline.hosts):
        gaps = [at for at, used in zip(line.t_s, line.used, strict=True) if math.isnan(used)]
        assert len(gaps) == 1
        assert 12 < gaps[0] + 0.3 < 17


def view(analysis: Analysis) -> SessionView:
    return SessionView(analysis.run.folder.parent.parent, VerdictRecord(1, "PASS", "made"), (), [analysis])


def test_the_page_draws_the_cards_with_their_figures_as_text_beside_them(watched: Analysis) -> None:
    shown = memory_time.over_time(view(watched))
    (chart,) = shown.charts
    svg = chart.draw()
    for words in ("this server's processes", "other processes", "not looked at", "the engine's share", "GPU 1 A100-SXM4-80GB, GiB"):
        assert words in svg
    assert "GPU 0 A100-SXM4-80GB: this server 52.00 GiB to 58.00 GiB, other processes 2.00 GiB to 8.00 GiB" in svg, "what a screen reader says"
    assert [row[0] for row in shown.table.rows] == ["GPU 0 A100-SXM4-80GB", "GPU 1 A100-SXM4-80GB", "memory of the machine"]
    assert shown.table.rows[0][1] == "52.00 GiB → 58.00 GiB (most 58.00 GiB at 20 s)"
    assert shown.table.rows[0][4].endswith("(least 16.45 GiB at 8 s)"), "of what is free the least counts"
    assert shown.table.rows[1][1] == "50.00 GiB"
    page = html.report(view(watched))
    assert "This chart could not be drawn" not in page
    assert page.index('id="memory"') < page.index("<h3>Over time</h3>") < page.index("of what is free the least")


def test_a_server_without_a_card_is_drawn_by_its_processes(tmp_path: Path) -> None:
    rows = closed_loop(users=2, seconds=4.0)
    samples = [
        msgspec.structs.replace(sample(rows, T0 - 0.3 + i / 10), memory=MemoryRow(16 * GIB, 8 * GIB, processes={"1": int((2 + i / 24) * GIB)}))
        for i in range(48)
    ]
    analysis = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / "runs" / "1-normal"))
    (chart,) = memory_time.over_time(view(analysis)).charts
    assert "memory of the machine, GiB" in chart.draw()
    assert "this server's processes went from 2.00 GiB to 3.96 GiB" in " ".join(reconciliations(analysis)[0].lines)


def test_what_was_looked_at_once_has_no_course(tmp_path: Path) -> None:
    rows = closed_loop(users=2, seconds=4.0)
    samples = [sample(rows, T0 - 0.3 + i / 10) for i in range(48)]
    samples[10] = msgspec.structs.replace(samples[10], gpus=[card(used=58, ours=58)], memory=MemoryRow(GIB, GIB, processes={"1": 1}))
    analysis = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / "runs" / "1-normal"))
    assert not memory_time.over_time(view(analysis)).table.rows


STUB = """
import json, os, sys, threading, time
from pathlib import Path
from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.observe.passing import watch_run
from pytest_kvcache.server.address import Endpoint

def until_seen(seconds):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = Path(sys.argv[2], "telemetry.jsonl").read_text() if Path(sys.argv[2], "telemetry.jsonl").exists() else ""
        if text.count('"gpus"') >= 3:
            return
        time.sleep(0.05)

run = watch_run([Endpoint(sys.argv[1])], Path(sys.argv[2]), 60.0, hz=20.0, engine="vllm", wait=until_seen)
analysis = analyse(run)
print(json.dumps([[line.label, len(line.t_s), line.used[0], line.total[0]] for line in analysis.timeline.cards]))
"""


def test_cards_read_through_nvidias_own_bindings_are_on_the_timeline(nvml_library: Path, tmp_path: Path) -> None:
    metrics = 'vllm:num_requests_running{engine="0"} 1\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    with ScriptedServer(model="m", metrics=metrics, owned_by="vllm") as server:
        command = [sys.executable, "-c", STUB, server.url, str(tmp_path)]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(nvml_library)}
        told = json.loads(subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60).stdout)
    assert [line[0] for line in told] == ["GPU 0 Stub Card 0", "GPU 1 Stub Card 1"]
    assert all(count >= 3 for _, count, _, _ in told)
    assert told[0][2:] == [60 << 30, 80 << 30]


def test_the_cards_of_a_past_window_are_there_at_every_point(tmp_path: Path) -> None:
    """DCGM exporters' series: MiB of two cards that fill over three points."""

    def one(name: str, values: list[float], **labels: str) -> dict[str, Any]:
        return {"metric": {"__name__": name, **labels}, "values": [[1000 + 15 * i, str(value)] for i, value in enumerate(values)]}

    target = {"instance": "node-a:8000", "job": "vllm", "model_name": "m"}
    engine = [
        one("vllm:kv_cache_usage_perc", [0.1, 0.5, 0.9], engine="0", **target),
        one("vllm:num_requests_running", [1, 5, 9], engine="0", **target),
    ]
    cards = [
        one(
            f"DCGM_FI_DEV_FB_{name}",
            [value if name == "USED" else 81920 - value for value in used],
            gpu=str(gpu),
            UUID=f"GPU-{gpu}",
            Hostname="node-a",
        )
        for gpu, used in enumerate(([20480.0, 40960.0, 61440.0], [20480.0] * 3))
        for name in ("USED", "FREE")
    ]
    body = {"status": "success", "data": {"resultType": "matrix", "result": [*engine, *cards]}}
    names = {"status": "success", "data": sorted({str(one["metric"]["__name__"]) for one in [*engine, *cards]})}
    nothing = {"status": "success", "data": {"resultType": "vector", "result": []}}
    pages = {"/api/v1/query_range": body, "/api/v1/query": nothing, "/api/v1/label/__name__/values": names}
    with ScriptedServer(pages=pages) as fake, Prometheus(fake.url) as server:
        run = past_run(server, tmp_path, 1000.0, 1030.0, 15.0)
    lines = analyse(run).timeline.cards
    assert [[used / GIB for used in line.used] for line in lines] == [[20, 40, 60], [20, 20, 20]]
    assert [line.t_s for line in lines] == [[0, 15, 30]] * 2
