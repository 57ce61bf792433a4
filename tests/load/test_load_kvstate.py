"""The KV cache beside a load by hand: what the page and the console line say; and Locust's percentiles against ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pytest_kvcache.engines import DIALECTS, RawState
from pytest_kvcache.load.kvstate import Point, Replica
from pytest_kvcache.observe.exposition import parse_samples

RECORDED = Path(__file__).parent.parent / "data" / "exposition" / "vllm" / "0.32.0-cpu.prom"
VLLM = DIALECTS["vllm"]


def looked(text: str) -> Replica:
    replica = Replica("http://a")
    replica.take(VLLM, RawState(metrics=parse_samples(text, VLLM.wanted)), 100.0)
    return replica


def test_usage_is_said_with_free_blocks_and_the_requests() -> None:
    text = RECORDED.read_text()
    replica = looked(text)
    point = replica.points[0]
    assert (replica.engine, replica.unit, replica.trouble) == ("vLLM", "blocks", "")
    assert point.usage is not None
    assert point.free is not None
    assert replica.pool is not None
    assert f"{point.free:,.0f} of {replica.pool:,.0f} blocks free" in replica.line()
    assert f"usage {point.usage * 100:.1f} %" in replica.line()
    assert f"{point.running:.0f} running, {point.waiting:.0f} waiting" in replica.line()


def test_what_a_server_does_not_tell_is_left_out_and_never_zero() -> None:
    replica = looked("vllm:num_requests_running 3\nvllm:num_requests_waiting NaN\n")
    assert replica.points[0] == Point(100.0, None, None, 3.0, None)
    assert replica.line() == "KV http://a: 3 running"
    assert looked("other 1\n").trouble == "its telemetry tells nothing about the KV cache"
    json.dumps(replica.series(), allow_nan=False)


def test_a_failed_look_is_a_gap_and_says_why() -> None:
    replica = Replica("http://a")
    assert replica.line() == "KV http://a: not read yet"
    replica.points.append(Point(1.0, 0.5, 10.0, 1.0, 0.0))
    for _ in range(3):
        replica.failed("nobody answers", 2.0)
    assert [point.usage for point in replica.points] == [0.5, None]
    assert replica.line() == "KV http://a: nobody answers"


@pytest.mark.parametrize("count", [10, 600, 601, 7200, 9000])
def test_a_long_load_is_thinned_out_and_keeps_its_peak(count: int) -> None:
    replica = Replica("http://a")
    replica.points.extend(Point(float(at), 0.2, 80.0, 1.0, 0.0) for at in range(count))
    peak = min(count, 7200) // 2
    replica.points[peak] = Point(replica.points[peak].wall_s, 0.97, 3.0, 9.0, 4.0)
    series = replica.series()
    assert len(series["usage"]) == len(series["ago_s"]) <= 600
    at = series["usage"].index(0.97)
    assert (series["free"][at], series["running"][at], series["waiting"][at]) == (3.0, 9.0, 4.0)
    assert series["ago_s"] == sorted(series["ago_s"], reverse=True)


def test_locusts_percentiles_agree_with_those_of_the_rows() -> None:
    code = """
import json, random, sys
from locust.stats import RequestStats, StatsEntry
from pytest_kvcache.load.numbers import be_exact
be_exact()
draw = random.Random(4)
times = [draw.lognormvariate(5.5, 1.0) for _ in range(20_000)]
entry = StatsEntry(RequestStats(), "a", "POST", use_response_times_cache=False)
for time in times:
    entry.log(time, 0)
print(json.dumps([times, [entry.get_response_time_percentile(share) for share in (0.5, 0.95, 0.99)]]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    times, told = json.loads(done.stdout)
    ours = np.quantile(times, [0.5, 0.95, 0.99])
    assert told == pytest.approx(ours, rel=0.002, abs=0.6)
