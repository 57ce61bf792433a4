"""Balance of replicas, ranks and cards: an average that hides a split, and requests that wait while another server idles."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_run import T0, MadeRun, closed_loop, sample, snapshot

from pytest_kvcache.analysis.balance import GPUS, RANKS, REPLICAS, Idling, balance
from pytest_kvcache.analysis.findings import find
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.assertions import assert_balanced
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, PASS
from pytest_kvcache.errors import GateFailed, UsageError
from pytest_kvcache.judge import gates
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GpuRow, MemoryRow, TelemetryRow

Levels = Callable[[int, int], dict[str, float]]


def number(value: Value) -> float:
    assert isinstance(value, Reading), value
    return value.number()


def replicas(folder: Path, levels: Levels, count: int = 2, **changes: Any) -> Analysis:
    """Return a Run with ``count`` replicas; ``levels(server, sample)`` is what each tells at each of 44 samples."""
    rows = closed_loop(users=20)
    samples = [
        msgspec.structs.replace(sample(rows, T0 - 0.2 + i / 10), endpoint=server, values=levels(server, i))
        for i in range(44)
        for server in range(count)
    ]
    before = [msgspec.structs.replace(snapshot(T0 - 0.5), endpoint=f"http://127.0.0.1:{n + 1}") for n in range(count)]
    return analyse(MadeRun(rows=rows, samples=samples, before=before, after=before, **changes).write(folder))


def told(usage: float, running: float = 1.0, waiting: float = 0.0) -> dict[str, float]:
    return {"usage": usage, "used_blocks": usage * 127, "free_blocks": 127 - usage * 127, "running": running, "waiting": waiting}


def test_a_mean_of_51_percent_is_an_87_15_split(tmp_path: Path) -> None:
    # field case G01
    analysis = replicas(tmp_path, lambda server, _: told((0.87, 0.15)[server], (17, 3)[server]))
    usage = balance(analysis).of("usage", REPLICAS)
    assert usage is not None
    assert number(analysis.values["usage.mean"]) == pytest.approx(0.51)
    assert number(usage.over_mean) == pytest.approx(0.87 / 0.51)
    assert (usage.highest, usage.lowest) == ("server 1", "server 2")
    assert "87.0 % on server 1 and 15.0 % on server 2, highest over mean 1.71" in usage.text
    gate = gates.balanced([analysis])
    assert gate.verdict == FAIL
    assert "highest over mean 1.71" in gate.text
    assert number(analysis.values["balance.running_spread"]) == 14
    with pytest.raises(GateFailed, match="server 2"):
        assert_balanced(analysis)


def test_even_replicas_are_balanced(tmp_path: Path) -> None:
    analysis = replicas(tmp_path, lambda server, i: told(0.5 + 0.02 * ((i + server) % 2), 8))
    assert assert_balanced(analysis).verdict == PASS
    idling = balance(analysis).idling
    assert isinstance(idling, Idling)
    assert idling.share == 0


def test_the_pair_that_differs_most_is_named_among_many(tmp_path: Path) -> None:
    usage = balance(replicas(tmp_path, lambda server, _: told((0.4, 0.9, 0.5, 0.1, 0.45)[server]), count=5)).of("usage")
    assert usage is not None
    assert (usage.highest, usage.lowest) == ("server 2", "server 4")
    assert usage.gap.number() == pytest.approx(0.8)


def test_waiting_on_one_while_another_idles_fails_even_where_usages_are_alike(tmp_path: Path) -> None:
    analysis = replicas(tmp_path, lambda server, _: told(0.05 * (1 - server), 2 * (1 - server), 5 * (1 - server)))
    gate = gates.balanced([analysis], max_spread=0.2)
    assert gate.verdict == FAIL
    assert "requests waited on server 1 while server 2 idled" in gate.text
    assert number(analysis.values["balance.idle_while_waiting"]) > 0.9
    assert gates.balanced([analysis], max_spread=0.2, max_idle_while_waiting=1.0, max_over_mean=2.0).verdict == PASS


def test_a_large_pool_does_not_hide_a_sticky_router(tmp_path: Path) -> None:
    """Usage of 0.4 % and of nothing lie close together, and one server has all the requests."""
    analysis = replicas(tmp_path / "sticky", lambda server, _: told(0.004 * (1 - server), 8 * (1 - server)))
    gate = gates.balanced([analysis])
    assert gate.verdict == FAIL
    assert "live requests: 8 requests on server 1 and 0 requests on server 2, highest over mean 2.00, at most 1.50" in gate.text
    assert number(analysis.values["balance.live_over_mean"]) == 2
    fair = replicas(tmp_path / "fair", lambda server, i: told(0.004, 4 + (i + server) % 2))
    assert assert_balanced(fair).verdict == PASS
    lonely = replicas(tmp_path / "lonely", lambda server, _: told(0.004 * (1 - server), 1 - server))
    assert assert_balanced(lonely).verdict == PASS, "one request at a time can only be on one"


def test_servers_behind_a_router_are_replicas_by_their_address(tmp_path: Path) -> None:
    rows = closed_loop(users=20)
    ranks = {"10.0.0.1:8000": told(0.8, 12, 3), "10.0.0.2:8000": told(0.1, 2)}
    samples = [msgspec.structs.replace(sample(rows, T0 - 0.2 + i / 10), ranks=ranks) for i in range(44)]
    analysis = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path))
    usage = balance(analysis).of("usage", REPLICAS)
    assert usage is not None
    assert (usage.highest, usage.lowest) == ("10.0.0.1:8000", "10.0.0.2:8000")
    assert gates.balanced([analysis]).verdict == FAIL


def test_a_moment_of_it_is_no_imbalance(tmp_path: Path) -> None:
    def levels(server: int, i: int) -> dict[str, float]:
        return told(0.1, 0 if server and i > 38 else 1, 1.0 if i > 38 and not server else 0.0)

    analysis = replicas(tmp_path, levels)
    assert 0 < number(analysis.values["balance.idle_while_waiting"]) < 0.2
    assert assert_balanced(analysis).verdict == PASS


def test_a_replica_that_told_its_usage_for_a_while_only_counts_for_that_while(tmp_path: Path) -> None:
    usage = balance(replicas(tmp_path, lambda server, i: told(0.5) if not server or i < 20 else {"running": 0.0, "waiting": 0.0})).of("usage")
    assert usage is not None
    assert usage.gap.number() == pytest.approx(0.0)


def test_a_replica_that_never_told_makes_the_widest_distance_unknown(tmp_path: Path) -> None:
    analysis = replicas(tmp_path, lambda server, _: told(0.5) if server < 2 else {"running": 1.0, "waiting": 0.0}, count=3)
    spread = analysis.values["usage.spread"]
    assert isinstance(spread, Missing)
    assert "server 3 did not tell" in spread.reason


def test_data_parallel_ranks_are_members_and_mirrors_are_not(tmp_path: Path) -> None:
    # field case C14: averages over idle ranks hide the full one
    rows = closed_loop()

    def ranked(usages: Sequence[float]) -> Analysis:
        samples = [msgspec.structs.replace(sample(rows, T0 - 0.2 + i / 10), ranks={str(n): told(u) for n, u in enumerate(usages)}) for i in range(44)]
        return analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / str(len(usages))))

    usage = balance(ranked((0.92, 0.0, 0.0, 0.0))).of("usage", RANKS)
    assert usage is not None
    assert number(usage.over_mean) == pytest.approx(4.0)
    assert usage.highest == "server 1, rank 0"
    alone = ranked((0.92,)).values["usage.spread"]
    assert isinstance(alone, Missing)
    assert alone.cannot_happen


def test_one_card_at_72_and_the_other_at_41_gib_is_seen(tmp_path: Path) -> None:
    gib = 1 << 30
    cards = [
        GpuRow(n, f"GPU-{n}", "A100", 80 * gib, used * gib, (80 - used) * gib, processes={str(n + 1): used * gib}) for n, used in enumerate((72, 41))
    ]
    memory = MemoryRow(gib, gib, processes={"1": 1, "2": 1})
    rows = closed_loop()
    samples: list[TelemetryRow] = [sample(rows, T0 - 0.2 + i / 10) for i in range(44)]
    samples[9] = msgspec.structs.replace(samples[9], gpus=cards, memory=memory)
    analysis = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path))
    memory_used = balance(analysis).of("gpu.used_bytes", GPUS)
    assert memory_used is not None
    assert memory_used.text == "card memory in use: 72.00 GiB on GPU 0 A100 and 41.00 GiB on GPU 1 A100, highest over mean 1.27"
    assert number(analysis.values["balance.gpu_memory_spread"]) == 31 * gib
    assert number(analysis.values["balance.gpu_over_mean"]) == pytest.approx(72 / 56.5)
    said = "72.00 GiB on GPU 0 A100 and 41.00 GiB on GPU 1 A100, highest over mean 1.27, at most 1.10"
    with pytest.raises(GateFailed, match=said):
        assert_balanced(analysis)
    (finding,) = (one for one in find(analysis).found if one.id == "gpu-imbalance")
    assert "31.00 GiB apart: card memory in use 72.00 GiB of GPU 0 A100 and 41.00 GiB of GPU 1 A100; highest over mean 1.27" in finding.text
    assert "usages" not in gates.balanced([analysis]).text, "one server has no usages to compare"
    even = assert_balanced(analysis, max_card_over_mean=1.3)
    assert (even.verdict, even.quantity) == (PASS, "balance.gpu_over_mean")
    assert "highest over mean 1.27, at most 1.30" in even.text


def test_small_cards_that_lie_less_than_a_gib_apart_are_even_and_that_is_the_reason_told(tmp_path: Path) -> None:
    gib = 1 << 30
    rows = closed_loop()
    samples: list[TelemetryRow] = [sample(rows, T0 - 0.2 + i / 10) for i in range(44)]
    cards = [GpuRow(n, f"GPU-{n}", "T4", 16 * gib, int(used * gib), int((16 - used) * gib)) for n, used in enumerate((2.0, 1.2))]
    samples[9] = msgspec.structs.replace(samples[9], gpus=cards)
    gate = assert_balanced(analyse(MadeRun(rows=rows, samples=samples).write(tmp_path)))
    assert "highest over mean 1.25, less than 1.00 GiB apart" in gate.text
    assert "at most 1.10" not in gate.text, "it is more"
    assert gate.value is not None
    assert gate.value.value == pytest.approx(1.25)


def test_cards_of_hosts_with_long_names_are_not_one_card(tmp_path: Path) -> None:
    gib = 1 << 30
    rows = closed_loop()
    samples: list[TelemetryRow] = [sample(rows, T0 - 0.2 + i / 10) for i in range(44)]
    hosts = [f"{'a-deployment-with-a-long-name-' * 6}{end}" for end in ("x7f2", "k9q4")]
    cards = [GpuRow(n, f"{host}{n}", "H100", 80 * gib, (40 + 20 * n) * gib, (40 - 20 * n) * gib, host=host) for host in hosts for n in range(2)]
    samples[9] = msgspec.structs.replace(samples[9], gpus=cards)
    analysis = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path))
    used = analysis.balance.of("gpu.used_bytes", GPUS)
    assert used is not None
    assert len(used.members) == 4
    assert {line.label for line in analysis.timeline.cards} == set(used.members), "one name for a card in all places"
    assert max(map(len, used.members)) < 90
    assert all("GPU 0" in name or "GPU 1" in name for name in used.members)


def test_the_last_pipeline_stage_is_seen_to_be_the_fullest(tmp_path: Path) -> None:
    # field case G04: 61 layers over three nodes, and the last holds the head as well
    gib = 1 << 30
    cards = [GpuRow(0, f"GPU-{n}", "H800", 80 * gib, used * gib, (80 - used) * gib, host=f"node{n}") for n, used in enumerate((70, 73, 79))]
    rows = closed_loop()
    samples: list[TelemetryRow] = [sample(rows, T0 - 0.2 + i / 10) for i in range(44)]
    samples[9] = msgspec.structs.replace(samples[9], gpus=cards)
    spread = balance(analyse(MadeRun(rows=rows, samples=samples).write(tmp_path))).of("gpu.used_bytes", GPUS)
    assert spread is not None
    assert (spread.highest, spread.lowest) == ("node2 GPU 0 H800", "node0 GPU 0 H800")
    assert number(spread.over_mean) == pytest.approx(79 / 74)
    assert spread.text.endswith("79.00 GiB on node2 GPU 0 H800 and 70.00 GiB on node0 GPU 0 H800, highest over mean 1.07")


def test_one_server_has_nothing_to_balance(tmp_path: Path) -> None:
    analysis = analyse(MadeRun().write(tmp_path))
    assert not gates.balanced([analysis]).applicable
    with pytest.raises(UsageError):
        assert_balanced(analysis, max_idle_while_waiting=20)


def behind_a_balancer(folder: Path, seed: int, share: float | None) -> Analysis:
    """Return eight users of two servers of two slots each, whose requests take 0.4 s on average, exponentially, as 44 samples of 0.1 s.

    ``share`` is the first server's part of the traffic; None takes turns.
    """
    chance, turns, ends = random.Random(seed), 0, list[tuple[float, float, int]]()
    running, waiting, levels = [0, 0], [0, 0], list[dict[str, float]]()

    def begin(now: float, server: int) -> None:
        running[server] += 1
        heapq.heappush(ends, (now + chance.expovariate(1 / 0.4), chance.random(), server))

    def arrive(now: float) -> None:
        nonlocal turns
        server = turns % 2 if share is None else int(chance.random() >= share)
        turns += 1
        if running[server] < 2:
            begin(now, server)
        else:
            waiting[server] += 1

    for _ in range(8):
        arrive(0.0)
    for sample_number in range(44):
        while ends and ends[0][0] <= sample_number / 10:
            now, _, server = heapq.heappop(ends)
            running[server] -= 1
            if waiting[server]:
                waiting[server] -= 1
                begin(now, server)
            arrive(now)
        levels += [told(0.01 * running[server], running[server], waiting[server]) for server in (0, 1)]
    return replicas(folder, lambda server, i: levels[2 * i + server])


def test_turns_that_empty_a_server_by_chance_are_no_imbalance_and_a_split_is(tmp_path: Path) -> None:
    """In four seconds of round robin one server often stands empty for a while beside a queue: no cause for an alarm. 85 to 15 is."""
    fair = [behind_a_balancer(tmp_path / f"fair{seed}", seed, None) for seed in range(30)]
    alarms = [seed for seed, analysis in enumerate(fair) if "replica-imbalance" in [finding.id for finding in find(analysis).found]]
    verdicts = [gates.balanced([analysis]).verdict for analysis in fair]
    beyond = [number(a.values["balance.idle_while_waiting"]) > 0.2 or number(a.values["balance.live_over_mean"]) > 1.5 for a in fair]
    assert sum(beyond) >= 3, "plain means would cry"
    assert len(alarms) <= 2, alarms
    assert verdicts.count(FAIL) <= 1
    assert verdicts.count(PASS) >= 20
    uneven = [behind_a_balancer(tmp_path / f"split{seed}", seed, 0.85) for seed in range(10)]
    assert sum("replica-imbalance" in [finding.id for finding in find(analysis).found] for analysis in uneven) >= 9
    assert [gates.balanced([analysis]).verdict for analysis in uneven].count(FAIL) >= 9
    assert not any(gates.balanced([analysis]).verdict == PASS for analysis in uneven)


def test_what_a_short_load_cannot_tell_is_inconclusive(tmp_path: Path) -> None:
    """One stretch of a third of the load is more than the gate allows, and in so short a load it may be chance."""
    once = replicas(tmp_path, lambda server, i: told(0.1, 0 if server and 10 < i < 24 else 2, 1 if not server and 10 < i < 24 else 0))
    assert number(once.values["balance.idle_while_waiting"]) > 0.25
    gate = gates.balanced([once])
    assert gate.verdict == INCONCLUSIVE
    assert "a longer load tells" in gate.text
    assert "replica-imbalance" not in [finding.id for finding in find(once).found]
