"""The page shows what fills the pool and whether the peak fits it, and says why where it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import oracle_traces as oracle
import pytest
from html_page import Page, check_harmless
from made_run import T0, MadeRun, closed_loop, request, snapshot
from made_sessions import Server, verdict_of

from pytest_kvcache.analysis.accounting import Accounting
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.report import html, stacked, taken
from pytest_kvcache.report.model import SessionView


def view(folder: Path, *analyses: Analysis) -> SessionView:
    return SessionView(folder, verdict_of("PASS", folder, [], Server(), name="traces"), (), list(analyses))


def section(page: str, name: str) -> str:
    return page[page.index(f'<section id="{name}">') :].split("</section>", maxsplit=1)[0]


def test_the_level_of_a_real_engine_is_drawn_with_its_parts(tmp_path: Path) -> None:
    page = html.report(view(tmp_path, analyse(oracle.run("prefix_on", tmp_path / "runs" / "1-normal"))))
    check_harmless(Page(page))
    shown = section(page, "payload")
    for words in ("shared prefix, held once", "generated", "rest of last blocks", "held, as the engine says", "pool 64 blocks of 32 tokens"):
        assert words in shown, words
    assert ">not ours<" not in shown, "a band that never was is not in the legend"
    assert "could not be drawn" not in shown
    assert "64 blocks" in section(page, "demand")
    assert len(page) < 400_000


def test_what_gave_way_is_said(tmp_path: Path) -> None:
    page = Page(html.report(view(tmp_path, analyse(oracle.run("overload", tmp_path / "runs" / "1-normal"))))).text
    assert "2 times a running request was put back into the queue" in page
    assert "80 blocks" in page


def test_a_model_with_unknown_groups_says_so_and_draws_nothing_wrong(tmp_path: Path) -> None:
    run = MadeRun(before=[snapshot(T0 - 0.5, max_concurrency=128 / 300)]).write(tmp_path / "runs" / "1-normal")
    page = Page(html.report(view(tmp_path, analyse(run)))).text
    assert "window or state layers" in page
    assert "what fills the pool, tokens" not in page


def test_hostile_lane_names_stay_text(tmp_path: Path) -> None:
    lane = "<script>alert(1)</script>"
    run = MadeRun(rows=[request(i, 0.1 * i, lane=lane) for i in range(10)]).write(tmp_path / "runs" / "1-normal")
    page = html.report(view(tmp_path, analyse(run)))
    check_harmless(Page(page))
    assert lane not in page
    assert "alert(1)" in section(page, "demand")


def test_a_long_run_is_drawn_with_its_peak_and_its_gap(tmp_path: Path) -> None:
    run = oracle.run("prefix_on", tmp_path / "runs" / "1-normal")
    accounting = analyse(run).accounting
    assert isinstance(accounting, Accounting)
    whole = accounting.whole
    kept = stacked.chosen(whole)
    assert len(kept) <= stacked.POINTS
    assert whole.slots[kept].max() == whole.slots.max()
    text = stacked.level_chart(whole, (), None, key="k", label="l")
    assert len(text) < 120_000
    with pytest.raises(ValueError, match="nothing that was held"):
        stacked.level_chart(replace(whole, used=whole.used * 0), (), None, key="k", label="l")


def test_sides_stand_beside_each_other(tmp_path: Path) -> None:
    sides = []
    for number, side in enumerate(("before", "after")):
        run = MadeRun(rows=closed_loop(users=2 + number), record={"side": side}).write(tmp_path / "runs" / f"{number + 1}-normal")
        sides.append(analyse(run))
    verdict = verdict_of("PASS", tmp_path, [], Server(), name="both")
    both = SessionView(tmp_path, msgspec.structs.replace(verdict), [sides[0]], [sides[1]])
    table = taken.payload_table(both)
    assert table.columns == ["", "normal, before", "normal, after"]
    assert [level.side for level in taken.levels(both)] == ["before", "after"]
    assert taken.demand_table(both).columns[1] == "side"
