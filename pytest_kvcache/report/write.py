"""Write a session's outputs, and make them again from its folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_kvcache.records import VerdictRecord
from pytest_kvcache.report import html, markdown
from pytest_kvcache.report.actions import append_job_summary
from pytest_kvcache.report.model import SessionView, build_view
from pytest_kvcache.runfolder import write_atomic

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

__all__ = ["build_view", "write_session", "write_view"]


def write_session(folder: Path, verdict: VerdictRecord, before: Sequence[Analysis] = (), after: Sequence[Analysis] = ()) -> Path:
    """Write verdict.json, then summary.md and report.html, each whole or not at all; return the path of report.html.

    The verdict is on disk before anything is drawn. In GitHub Actions the summary goes to the job's page too. Raises CannotWrite.
    """
    write_atomic(folder / "verdict.json", msgspec.json.format(msgspec.json.encode(verdict), indent=1))
    view = SessionView(folder, verdict, tuple(before), tuple(after))
    path = write_view(view)
    if trouble := append_job_summary(markdown.summary(view)):
        sys.stderr.write(f"pytest-kvcache: {trouble}\n")
    return path


def write_view(view: SessionView) -> Path:
    """Write summary.md and report.html of a view into its folder; return the path of report.html. Raises CannotWrite."""
    write_atomic(view.folder / "summary.md", markdown.summary(view))
    write_atomic(view.report, html.report(view))
    return view.report
