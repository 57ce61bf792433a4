"""Ledger and balance on real servers: the parts of the machine's memory are where they are said to be, and both kinds of proxy are told apart."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from forwarding_proxy import ROUND_ROBIN, STICKY, ForwardingProxy

from pytest_kvcache.analysis.balance import balance
from pytest_kvcache.analysis.cards import card_ledgers
from pytest_kvcache.analysis.findings import find
from pytest_kvcache.analysis.ledger import HOST, CardLedger
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conditions import FAIL, PASS
from pytest_kvcache.judge import gates
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.measure import Planned, Target, Window, measure_load
from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.observe.scrape import detect_endpoint, take_snapshot
from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import SCHEMA_VERSION, RunRecord
from pytest_kvcache.runfolder import Run, write_run
from pytest_kvcache.server.endpoint import Endpoint, check_ready, parse_endpoint
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings

MIB = 1 << 20
USERS = 24
"""So many for four slots that turns at two servers cannot, in the thirty or so requests of a window, empty one of them by chance."""


def measured(command: str, folder: Path, **changes: object) -> CardLedger:
    """Launch a server, press it for two seconds and return the ledger of the Run."""
    settings = Settings(ready_timeout_s=300.0)
    with launch(command, settings, folder / "server.log") as server:
        endpoint = dataclasses.replace(server.endpoint, **changes)  # type: ignore[arg-type]
        target = Target((endpoint,), (detect_endpoint(endpoint),), embedded=True, fresh=True)
        window = Window(Planned("normal", users=2, duration_s=2.0), 0, 1, folder.name, 10.0)
        run = measure_load(target, settings, folder, window, run_id="r", keep=lambda run: run)
    analysis = analyse(run)
    cpu = analysis.values["server.cpu_s"]
    assert isinstance(cpu, Reading)
    assert 0 < cpu.number() < 60
    (ledger,) = card_ledgers(analysis)
    assert ledger.kind == HOST
    assert sum(part.bytes or 0 for part in ledger.parts) == pytest.approx(ledger.total.bytes, abs=2)
    return ledger


def size(ledger: CardLedger, part: str) -> float:
    value = getattr(ledger, part).bytes
    assert value is not None, part
    return float(value)


@pytest.mark.live
def test_the_process_of_llamacpp_grows_by_the_pool_that_its_log_states(tmp_path: Path) -> None:
    small = measured("llamacpp --ctx 16384 --slots 16", tmp_path / "small")
    large = measured("llamacpp --ctx 524288 --slots 16", tmp_path / "large")
    grown = size(large, "pool") - size(small, "pool")
    assert grown > 400 * MIB
    assert size(large, "weights") == size(small, "weights")
    workspace = {ledger: next(part.bytes or 0 for part in ledger.details if part.name == "workspace") for ledger in (small, large)}
    assert size(large, "server") - size(small, "server") == pytest.approx(grown + workspace[large] - workspace[small], rel=0.15)
    assert size(large, "rest") < size(large, "pool")


@pytest.mark.live
def test_a_server_that_we_only_attached_to_is_found_by_its_port(tmp_path: Path) -> None:
    ledger = measured("llamacpp --ctx 8192 --slots 2", tmp_path, pid=None, owned=False, log=None)
    assert size(ledger, "server") > 20 * MIB
    assert ledger.pool.bytes is None, "without its log the pool's bytes are not told"
    assert ledger.weights.how == "stated", "and the weights are: /v1/models has their size"
    assert ledger.rest.title == "graphs, workspace, context and KV pool"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Endpoint]]:
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        servers = [stack.enter_context(launch("llamacpp --ctx 16384 --slots 2", Settings(), folder / f"{n}.log")) for n in range(2)]
        yield [server.endpoint for server in servers]


def through(pair: Sequence[Endpoint], policy: str, folder: Path) -> Analysis:
    """Press two servers through a proxy, look at both, and return the Analysis."""
    dialects = [detect_endpoint(endpoint) for endpoint in pair]
    with ForwardingProxy([endpoint.root for endpoint in pair], policy) as proxy:
        router = check_ready(parse_endpoint(proxy.url, Settings()), 20.0)
        before = [take_snapshot(endpoint, dialect) for endpoint, dialect in zip(pair, dialects, strict=True)]
        with Sampler(pair, folder, 20.0, dialects=dialects, gpus=False) as sampler:
            began = time.time()
            load = run_load([router], "normal", folder, users=USERS, duration_s=3.0, output_tokens=200)
            ended = time.time()
            assert not sampler.stop().errors
    assert load.complete
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        id=policy,
        profile="normal",
        engine=before[0].engine,
        endpoints=[endpoint.shown for endpoint in pair],
        before=before,
        after=[take_snapshot(endpoint, dialect) for endpoint, dialect in zip(pair, dialects, strict=True)],
        load_started_wall_s=began,
        load_ended_wall_s=ended,
        sample_hz=20.0,
    )
    return analyse(Run(folder, write_run(folder, record).record))


def sound(pair: Sequence[Endpoint], policy: str, folder: Path) -> Analysis:
    """Press until the evidence is sound, three times at most: a crowded machine spoils telemetry, and the gate then rightly does not judge."""
    for number in range(3):
        analysis = through(pair, policy, folder / f"{policy}-{number}")
        if not analysis.problems:
            break
    return analysis


@pytest.mark.live
def test_a_sticky_proxy_is_unbalanced_and_a_round_robin_one_is_fair(pair: Sequence[Endpoint], tmp_path: Path) -> None:
    sticky = sound(pair, STICKY, tmp_path)
    gate = gates.balanced([sticky])
    assert gate.verdict == FAIL, gate.text
    assert "requests waited on server" in gate.text
    running = balance(sticky).of("running")
    assert running is not None
    assert running.members[running.lowest] == 0
    assert "replica-imbalance" in [finding.id for finding in find(sticky).found]
    even = sound(pair, ROUND_ROBIN, tmp_path)
    fair = gates.balanced([even])
    assert fair.verdict == PASS, fair.text
    assert "replica-imbalance" not in [finding.id for finding in find(even).found]
