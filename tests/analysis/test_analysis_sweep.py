"""A sweep's recommendation: lower usage that costs nothing is taken, noise is not, and what it rests on is said."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_run import T0, MadeRun, closed_loop, sample, snapshot

from pytest_kvcache.analysis.sweep import Sweep, sweep, variants_of
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conditions import INVALID, PASS
from pytest_kvcache.records import MemoryRow
from pytest_kvcache.runfolder import Run
from pytest_kvcache.settings import Settings
from pytest_kvcache.sweeping import show_sweep, sweep_gates

GIB = 1 << 30


def window(folder: Path, variant: str, usage: float, *, cpu_s: float = 1.0, length_s: float = 0.5, ttft_s: float = 0.1, **changes: Any) -> Analysis:
    """Return a window at a steady usage, in which the server used ``cpu_s`` CPU seconds each second."""
    rows = closed_loop(length_s=length_s, ttft_s=ttft_s)
    samples = []
    for i in range(48):
        at = T0 - 0.3 + i / 10
        memory = MemoryRow(4 * GIB, GIB, processes={"1": GIB}, cpu_s=50 + cpu_s * i / 10)
        samples.append(msgspec.structs.replace(sample(rows, at, usage=usage), memory=memory))
    return analyse(MadeRun(rows=rows, samples=samples, record={"variant": variant}, **changes).write(folder))


def swept(folder: Path, plan: Mapping[str, Sequence[float]], **by_variant: dict[str, Any]) -> Sweep:
    analyses = [
        window(folder / f"{variant}-{n}", variant, usage, **by_variant.get(re.sub(r"\W", "_", variant), {}))
        for variant, usages in plan.items()
        for n, usage in enumerate(usages)
    ]
    found = sweep(variants_of(analyses), usage_margin=0.02, throughput_margin=0.1, ttft_margin=0.25)
    assert found is not None
    return found


def test_a_value_that_lowers_usage_and_costs_nothing_is_recommended(tmp_path: Path) -> None:
    found = swept(tmp_path, {"block-size=128": (0.4, 0.41), "block-size=32": (0.2, 0.21), "block-size=64": (0.3, 0.3)})
    assert found.recommended == "block-size=32"
    assert "against 40.5 % (40.0 % to 41.0 %) with block-size=128, throughput 100 %" in found.text
    assert "2 windows of profile normal" in found.rests_on
    assert "restarts is not covered" in found.rests_on
    shown = show_sweep(found)
    assert shown.count(": pool ") == 3, "no usage stands alone"
    assert all(len(line) <= 100 for line in shown.partition("\n\n")[2].splitlines())


def test_what_lies_within_the_spread_of_the_windows_is_no_difference(tmp_path: Path) -> None:
    found = swept(tmp_path, {"block-size=128": (0.2, 0.4), "block-size=32": (0.22, 0.24)})
    assert found.recommended == "block-size=128"
    assert "does not lower peak usage" in found.text


def test_a_value_that_costs_cpu_or_speed_is_not_recommended(tmp_path: Path) -> None:
    plan = {"block-size=128": (0.4,), "block-size=32": (0.2,)}
    found = swept(tmp_path / "cpu", plan, block_size_32={"cpu_s": 1.5})
    assert found.recommended == "block-size=128"
    assert "costs CPU time" in found.text
    found = swept(tmp_path / "slow", plan, block_size_32={"length_s": 1.0})
    assert "costs throughput" in found.text
    assert "one window shows no spread" in found.rests_on


def test_fewer_preemptions_are_not_simply_better(tmp_path: Path) -> None:
    # field case D08: a watermark cut preemptions by 82 % and raised the median TTFT by 71 %
    found = swept(tmp_path, {"watermark=0": (0.99,), "watermark=0.05": (0.94,)}, watermark_0_05={"ttft_s": 0.171, "length_s": 0.571})
    assert found.recommended == "watermark=0"
    assert "time to first token (171 ms against 100 ms)" in found.text


def test_unsound_evidence_recommends_nothing(tmp_path: Path) -> None:
    found = swept(tmp_path, {"block-size=128": (0.4,), "block-size=32": (0.2,)}, block_size_128={"no_end": True})
    assert not found.recommended
    assert "unsound" in found.text


def test_pools_of_other_sizes_are_said(tmp_path: Path) -> None:
    other = {"before": [snapshot(T0 - 0.5, pool_bytes=99)]}
    assert "the pools differ" in swept(tmp_path, {"a=1": (0.4,), "a=2": (0.2,)}, a_2=other).rests_on


def test_one_variant_is_no_sweep(tmp_path: Path) -> None:
    groups = variants_of([window(tmp_path, "a=1", 0.5)])
    assert sweep(groups, usage_margin=0.02, throughput_margin=0.1, ttft_margin=0.25) is None


@pytest.mark.parametrize("cpu_s", [0.5, 2.0])
def test_cpu_time_is_that_of_the_load_alone(tmp_path: Path, cpu_s: float) -> None:
    analysis = window(tmp_path, "a=1", 0.5, cpu_s=cpu_s)
    value = analysis.values["server.cpu_s"]
    assert value.value == pytest.approx(cpu_s * 4.01, rel=0.01)  # type: ignore[union-attr]


class Measured:
    """What a sweep's gates ask a session for."""

    def __init__(self, analyses: list[Analysis]) -> None:
        self.settings = Settings()
        self._analyses = {analysis.run.folder: analysis for analysis in analyses}

    def runs(self) -> list[Run]:
        return [analysis.run for analysis in self._analyses.values()]

    def analysis(self, run: Run) -> Analysis:
        return self._analyses[run.folder]


@pytest.mark.parametrize(("broken", "verdict", "judged"), [({}, PASS, 6), ({"no_end": True}, INVALID, 1)])
def test_only_the_recommended_value_is_judged(tmp_path: Path, broken: dict[str, Any], verdict: str, judged: int) -> None:
    refusing = window(tmp_path / "a", "block-size=128", 0.99, **broken)
    session = Measured([refusing, window(tmp_path / "b", "block-size=32", 0.3)])
    found = sweep(variants_of(list(map(session.analysis, session.runs()))), usage_margin=0.02, throughput_margin=0.1, ttft_margin=0.25)
    assert found is not None
    gates = sweep_gates(session, found)  # type: ignore[arg-type]
    assert (gates[0].name, gates[0].verdict) == ("sweep", verdict)
    assert len(gates) == judged
    assert all(gate.verdict == PASS and "(block-size=32)" in gate.lane for gate in gates[1:]), "the value that would fail is not the one to ship"
