"""Write a session's outputs, and make them again from its folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_kvcache.analysis.own_rules import RuleSet, keep_rules
from pytest_kvcache.records import VerdictRecord
from pytest_kvcache.report import diagnosed, html, markdown
from pytest_kvcache.report.actions import append_job_summary
from pytest_kvcache.report.model import SessionView, build_view
from pytest_kvcache.runfolder import write_atomic

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

__all__ = ["build_view", "with_findings", "write_session", "write_verdict", "write_view"]


def write_session(
    folder: Path, verdict: VerdictRecord, before: Sequence[Analysis] = (), after: Sequence[Analysis] = (), rules: RuleSet | None = None
) -> VerdictRecord:
    """Write verdict.json, then summary.md and report.html, each whole or not at all; return the verdict with its findings.

    The verdict is on disk before anything is drawn, and with it the users' files that ``rules`` came from. In GitHub Actions the summary goes to the
    job's page too. Raises CannotWrite.
    """
    write_verdict(folder, verdict)
    if rules is not None:
        keep_rules(folder, rules)
    view = with_findings(SessionView(folder, verdict, tuple(before), tuple(after), rules=rules.rules if rules is not None else None))
    write_view(view)
    if trouble := append_job_summary(markdown.summary(view)):
        sys.stderr.write(f"pytest-kvcache: {trouble}\n")
    return view.verdict


def write_verdict(folder: Path, verdict: VerdictRecord) -> None:
    """Write verdict.json into a session's folder. Raises CannotWrite."""
    write_atomic(folder / "verdict.json", msgspec.json.format(msgspec.json.encode(verdict), indent=1))


def with_findings(view: SessionView) -> SessionView:
    """Return the view with the findings of its Runs in its verdict, and write that verdict. Raises CannotWrite."""
    found = diagnosed.finding_records(view)
    if found == view.verdict.findings:
        return view
    view = replace(view, verdict=msgspec.structs.replace(view.verdict, findings=found))
    write_verdict(view.folder, view.verdict)
    return view


def write_view(view: SessionView) -> Path:
    """Write summary.md and report.html of a view into its folder; return the path of report.html. Raises CannotWrite."""
    write_atomic(view.folder / "summary.md", markdown.summary(view))
    write_atomic(view.report, html.report(view))
    return view.report
