"""Servers of a test pressed through a proxy, and looked at each by itself: what a balancer does to them, as a Run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forwarding_proxy import ForwardingProxy

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.observe.scrape import detect_endpoint, take_snapshot
from pytest_kvcache.records import SCHEMA_VERSION, RunRecord
from pytest_kvcache.runfolder import Run, write_run
from pytest_kvcache.server.address import Endpoint, parse_endpoint
from pytest_kvcache.server.endpoint import check_ready
from pytest_kvcache.settings import Settings


def through(servers: Sequence[Endpoint], policy: str, folder: Path, **load: Any) -> Analysis:
    """Press the servers through a proxy of this policy, look at all of them, and return the Analysis."""
    dialects = [detect_endpoint(endpoint) for endpoint in servers]
    with ForwardingProxy([endpoint.root for endpoint in servers], policy) as proxy:
        router = check_ready(parse_endpoint(proxy.url, Settings()), 20.0)
        before = [take_snapshot(endpoint, dialect) for endpoint, dialect in zip(servers, dialects, strict=True)]
        with Sampler(servers, folder, 20.0, dialects=dialects, gpus=False) as sampler:
            began = time.time()
            done = run_load([router], "normal", folder, **load)
            ended = time.time()
            assert not sampler.stop().errors
    assert done.complete
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        id=policy,
        profile="normal",
        engine=before[0].engine,
        endpoints=[endpoint.shown for endpoint in servers],
        before=before,
        after=[take_snapshot(endpoint, dialect) for endpoint, dialect in zip(servers, dialects, strict=True)],
        load_started_wall_s=began,
        load_ended_wall_s=ended,
        sample_hz=20.0,
    )
    return analyse(Run(folder, write_run(folder, record).record))


def sound(servers: Sequence[Endpoint], policy: str, folder: Path, **load: Any) -> Analysis:
    """Press until the evidence is sound, three times at most: a crowded machine spoils telemetry, and the gate then rightly does not judge."""
    for number in range(3):
        analysis = through(servers, policy, folder / f"{policy}-{number}", **load)
        if not analysis.problems:
            break
    return analysis
