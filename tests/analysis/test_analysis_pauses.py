"""The list of longest pauses: what a preempted request looks like from outside, longest first, with its place in time."""

from __future__ import annotations

from pathlib import Path

import msgspec
from made_run import T0, MadeRun, closed_loop

from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.report.terminal import load_numbers


def test_the_longest_pauses_are_listed_longest_first_with_their_request_and_time(tmp_path: Path) -> None:
    rows = closed_loop()
    rows[3] = msgspec.structs.replace(rows[3], longest_gap_s=0.35, longest_gap_at_s=rows[3].sent_s + 0.12)
    rows[5] = msgspec.structs.replace(rows[5], longest_gap_s=0.2, longest_gap_at_s=rows[5].sent_s + 0.2)
    rows[7] = msgspec.structs.replace(rows[7], longest_gap_s=0.0, longest_gap_at_s=None)
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))
    first, second = analysis.pauses[:2]
    assert (first.number, first.lane, first.length_s, first.put_back) == (3, "normal", 0.35, False)
    assert abs(first.at_s - (rows[3].sent_s + 0.12)) < 1e-6
    assert second.number == 5
    assert 7 not in [pause.number for pause in analysis.pauses]
    shown = load_numbers(analysis).splitlines()[-1]
    assert shown.startswith("longest pauses inside an answer: #3 350 ms at ")
    assert "#5 200 ms" in shown
    assert first.at_s > T0


def test_even_answers_have_no_line_of_pauses(tmp_path: Path) -> None:
    assert "longest pauses" not in load_numbers(analyse(MadeRun(rows=closed_loop()).write(tmp_path / "1-normal")))
