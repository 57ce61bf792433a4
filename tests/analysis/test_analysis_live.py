"""Ledger and balance on real servers: the parts of the machine's memory are where they are said to be, and both kinds of proxy are told apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from forwarding_proxy import ROUND_ROBIN, STICKY
from proxied_load import sound

from pytest_kvcache.analysis.balance import balance
from pytest_kvcache.analysis.cards import card_ledgers
from pytest_kvcache.analysis.findings import find
from pytest_kvcache.analysis.ledger import HOST, CardLedger
from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.conditions import FAIL
from pytest_kvcache.judge import gates
from pytest_kvcache.measure import Planned, Target, Window, measure_load
from pytest_kvcache.observe.scrape import detect_endpoint
from pytest_kvcache.quantities import Reading
from pytest_kvcache.server.endpoint import Endpoint
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


@pytest.mark.live
def test_a_sticky_proxy_is_unbalanced_and_a_round_robin_one_is_fair(pair: Sequence[Endpoint], tmp_path: Path) -> None:
    load = {"users": USERS, "duration_s": 3.0, "output_tokens": 200}
    sticky = sound(pair, STICKY, tmp_path, **load)
    gate = gates.balanced([sticky])
    assert gate.verdict == FAIL, gate.text
    assert "requests waited on server" in gate.text
    running = balance(sticky).of("running")
    assert running is not None
    assert running.members[running.lowest] == 0
    assert "replica-imbalance" in [finding.id for finding in find(sticky).found]
    even = sound(pair, ROUND_ROBIN, tmp_path, **load)
    fair = gates.balanced([even])
    assert fair.verdict != FAIL, fair.text  # a crowded machine may leave it to chance, and that is said: INCONCLUSIVE
    assert "replica-imbalance" not in [finding.id for finding in find(even).found]
