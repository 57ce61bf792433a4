"""Replicas, ranks and cards stand on one clock, and a pause in any of them is a gap."""

from __future__ import annotations

import math
from pathlib import Path

from made_run import T0, MadeRun, closed_loop, sample, snapshot

from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.records import GpuRow, TelemetryRow

GIB = 1 << 30


def card(index: int, used: int) -> GpuRow:
    return GpuRow(index, f"GPU-{index}", "A100", 80 * GIB, used * GIB, (80 - used) * GIB)


def test_ranks_and_cards_come_with_the_load_on_one_clock(tmp_path: Path) -> None:
    rows = closed_loop(users=2, seconds=6.0)
    samples = []
    for i in range(60):
        if 20 <= i < 40:
            continue
        look = sample(rows, T0 + i / 10)
        ranks = {str(rank): {"usage": 0.1 * (rank + 1), "used_blocks": 10.0, "running": 1.0} for rank in (0, 1)}
        samples.append(TelemetryRow(wall_s=look.wall_s, values=look.values, ranks=ranks, gpus=[card(0, 72), card(1, 41)] if i % 5 == 0 else []))
    line = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / "1-normal")).timeline
    assert [rank.label for rank in line.ranks] == ["rank 0", "rank 1"]
    for rank in line.ranks:
        assert rank.t_s == line.t_s
        assert any(math.isnan(value) for value in rank.usage), "the pause is a gap in every line"
    assert [card.label for card in line.cards] == ["GPU 0 A100", "GPU 1 A100"]
    assert line.cards[0].used[0] == 72 * GIB
    assert line.cards[0].t_s[0] == line.t_s[0]
    assert len(line.cards[1].t_s) == 8


def test_each_replica_keeps_its_own_line(tmp_path: Path) -> None:
    rows = closed_loop(users=2, seconds=3.0)
    samples = [
        TelemetryRow(wall_s=T0 + i / 10 + 0.02 * server, endpoint=server, values=sample(rows, T0 + i / 10).values)
        for i in range(35)
        for server in (0, 1)
    ]
    line = analyse(MadeRun(rows=rows, samples=samples, before=[snapshot(T0 - 1), snapshot(T0 - 1)], after=[]).write(tmp_path / "1-normal")).timeline
    assert [one.label for one in line.endpoints] == ["server 1", "server 2"]
    assert line.endpoints[0].t_s != line.endpoints[1].t_s
    assert set(line.endpoints[1].t_s) <= set(line.t_s)
