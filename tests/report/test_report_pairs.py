"""Pair by pair: the repeat that differed is seen, and what became better is told with both bounds in every output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from made_sessions import Server as MadeServer
from made_sessions import ratio, verdict_of

from pytest_kvcache.analysis.soundness import Facts
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.judge.compare import compare
from pytest_kvcache.quantities import Reading, Value
from pytest_kvcache.records import GateRecord, RunRecord
from pytest_kvcache.report import junit
from pytest_kvcache.report.html import report
from pytest_kvcache.report.markdown import summary
from pytest_kvcache.report.model import SessionView, why
from pytest_kvcache.report.pairs import pairs
from pytest_kvcache.report.terminal import summary as terminal
from pytest_kvcache.runfolder import Run
from pytest_kvcache.settings import Settings

USAGES = [0.50, 0.52, 0.49, 0.51, 0.50]


def windows(side: str, usages: Sequence[float], ttft: float = 0.2) -> list[Analysis]:
    found = []
    for number, usage in enumerate(usages):
        values: dict[str, Value] = {
            name: Reading(value, unit, "made")
            for name, value, unit in (("usage.hottest", usage, "ratio"), ("usage.peak", usage, "ratio"), ("ttft.p50", ttft, "s"), ("throughput", 900.0, "tokens/s"), ("preemptions", 0.0, "events"), ("rejections", 0.0, "requests"), ("requests.sent", 60.0, "requests"))
        }  # fmt: skip
        started_s = 1e9 + 100 * number + (50 if (side == "after") == (number % 2 == 0) else 0)
        run = RunRecord(1, id=f"{side}{number}", profile="normal", side=side, window=number, workload=f"w{number}", load_started_wall_s=started_s)
        found.append(Analysis(Run(Path(f"runs/{number}-normal"), run), values, facts=Facts()))
    return found


def view(after: Sequence[float], tmp_path: Path) -> SessionView:
    sides = windows("before", USAGES), windows("after", after)
    gates = [gate for gate in compare(*sides, Settings(before="a", after="b")).gates if gate.name in {"usage_not_worse", "ttft_not_worse"}]
    return SessionView(tmp_path, verdict_of("PASS", tmp_path, gates, MadeServer()), *sides)


def test_each_pair_stands_with_its_order_and_the_one_that_differs_is_named(tmp_path: Path) -> None:
    (found,) = pairs(view([0.51, 0.53, 0.80, 0.52, 0.505], tmp_path))
    assert [compared.one.title for compared in found.compared] == ["peak usage", "time to first token", "output rate"]
    table = found.table()
    assert [row[:3] for row in table.rows[:3]] == [
        ["1", "before", "50.0 % → 51.0 %"],
        ["2", "after", "52.0 % → 53.0 %"],
        ["3", "before", "49.0 % → 80.0 %"],
    ]
    three, note = table.notes
    assert three.startswith("before: pool "), "no usage stands alone"
    assert note.startswith("Farthest from the others: peak usage in pair 3 (+31 % of the pool, the middle is +1)")
    drawn = found.draw("p0")
    assert drawn.startswith("<svg")
    assert "peak usage: +1, +1, +31, +1, +0.5 % of the pool" in drawn


def test_no_pair_is_called_far_where_all_are_alike(tmp_path: Path) -> None:
    (found,) = pairs(view([0.51, 0.515, 0.50, 0.52, 0.505], tmp_path))
    assert not any("Farthest" in note for note in found.table().notes)


def test_the_interval_and_the_margin_lie_on_the_scale_of_the_dots(tmp_path: Path) -> None:
    (found,) = pairs(view([0.40, 0.43, 0.39, 0.41, 0.405], tmp_path))
    usage, _, rate = found.compared
    assert usage.gate is not None
    assert usage.gate.low is not None
    assert usage.gate.high is not None
    ends = usage.on_scale(usage.gate.low), usage.on_scale(usage.gate.high)
    assert ends[0] < sum(usage.changes) / 5 < ends[1] < 0
    assert rate.on_scale(0.1) == -10.0, "a rate is worse where it is lower"
    assert rate.gate is None


def test_what_was_not_compared_or_does_not_pair_has_no_pairs(tmp_path: Path) -> None:
    whole = view(USAGES, tmp_path)
    assert pairs(replace(whole, before=[], verdict=msgspec.structs.replace(whole.verdict, gates=[]))) == []
    assert pairs(replace(whole, after=whole.after[:4])) == []
    assert pairs(replace(whole, before=whole.before[:1], after=whole.after[:1])) == []


def test_every_output_tells_an_improvement_with_both_bounds(tmp_path: Path) -> None:
    better = view([0.40, 0.43, 0.39, 0.41, 0.405], tmp_path)
    said = next(gate.better for gate in better.verdict.gates if gate.name == "usage_not_worse")
    assert re.fullmatch(r"9\.\d % of the pool lower, between 9\.\d % and 10\.\d % \(90 % interval\)", said), said
    assert f"Better: usage [normal] {said}" in why(better.verdict)
    assert f"better: {said}" in " ".join(terminal(better, color=False).split())
    assert f"better: {said}".replace("(", r"\(").replace(")", r"\)") in summary(better)
    page = report(better)
    assert page.count(f": {said}, and 2.0 % of the pool higher may be") == 1
    assert "Pair by pair" in page
    gate = next(gate for gate in better.verdict.gates if gate.better)
    assert ("kv.usage_not_worse[normal].better", said) in junit.properties(gate)


def test_what_was_not_judged_is_no_improvement() -> None:
    gate = GateRecord(
        "usage_not_worse", "usage.hottest", "INVALID", "unsound", "ratio", "normal", before=ratio(0.5), after=ratio(0.4), better="10 % lower"
    )
    assert not any(name.endswith(".better") for name, _ in junit.properties(gate))


def test_the_page_of_a_comparison_shows_its_pairs(compared_page: str, single_page: str) -> None:
    assert 'id="pairs"' in compared_page
    assert 'id="pairs"' not in single_page
