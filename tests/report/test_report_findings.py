"""The findings stand at the head of report.html, with their actions, and nothing in them can break out of the page."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from article_case import article_case
from finding_cases import made, tiny

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.records import SCHEMA_VERSION, VerdictRecord
from pytest_kvcache.report import html, troubleshooting
from pytest_kvcache.report.diagnosed import section
from pytest_kvcache.report.model import SessionView
from pytest_kvcache.runfolder import write_run


def view(folder: Path, *after: Analysis, before: tuple[Analysis, ...] = (), comparison: str = "") -> SessionView:
    return SessionView(folder, VerdictRecord(SCHEMA_VERSION, "PASS", folder.name, comparison=comparison), before, after)


def test_the_articles_causes_head_the_page_with_actions_and_the_reconciliations(tmp_path: Path) -> None:
    page = html.report(view(tmp_path, article_case(tmp_path / "runs" / "1-normal")))
    head = page[: page.index('<section id="compared"')]
    for text in ("The pool is squeezed by other memory", "Room is padded or reserved ahead", "One long prompt is kept many times"):
        assert text in head
    assert "22.00 GiB of the card are free" in head
    assert "Free the memory first" in head
    assert "Do not buy a card" in head
    assert 'href="runs/1-normal/"' in head
    assert head.index("squeezed by 40.00 GiB because of") < head.index("generated") < head.index("the largest request needs")
    assert '<a href="#findings">Findings</a>' in page


def test_a_sound_run_says_that_nothing_was_found_and_what_was_not_looked_at(tmp_path: Path) -> None:
    found = section(view(tmp_path, made(tmp_path / "runs" / "1-normal")))
    assert found.findings == []
    assert any("squeezed" in note for note in found.notes)


def test_quality_items_alone_have_no_findings(tmp_path: Path) -> None:
    from made_run import quality_run

    page = html.report(view(tmp_path, analyse(quality_run(300).write(tmp_path / "runs" / "1-quality"))))
    assert 'id="findings"' not in page


def test_names_in_a_run_cannot_leave_their_place_on_the_page(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\x1b[31m"
    analysis = made(tmp_path / "runs" / "1-x", tiny())
    run = write_run(analysis.run.folder, msgspec.structs.replace(analysis.run.record, engine="nobody", model=hostile, profile=hostile))
    page = html.report(view(tmp_path, analyse(run)))
    assert "<script>alert" not in page
    assert "\x1b" not in page


def test_the_troubleshooting_page_is_current() -> None:
    path = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    assert path.read_text(encoding="utf-8") == troubleshooting.page(), "nox -s docs writes it again"


@pytest.mark.parametrize("column", ["symptom", "what to measure", "likely cause", "action", "what not to do"])
def test_the_troubleshooting_table_has_what_a_reader_needs(column: str) -> None:
    lines = troubleshooting.page().splitlines()
    head = next(line for line in lines if line.startswith("| symptom"))
    assert column in head
    rows = [line for line in lines[lines.index(head) + 2 :] if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == head.count("|") for line in rows)
