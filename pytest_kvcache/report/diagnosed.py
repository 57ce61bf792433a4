"""The findings at the head of report.html, with the three reconciliations: what ``diagnose`` says of the same Runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pytest_kvcache.analysis.findings import Finding, Findings, find_in, shipped_rules
from pytest_kvcache.analysis.reconciliations import Reconciliation, reconciliations
from pytest_kvcache.records import FindingRecord
from pytest_kvcache.report.escape import plain
from pytest_kvcache.report.model import SessionView, at_peak, is_probe
from pytest_kvcache.report.terminal import three_numbers

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

_KINDS = {"critical": "bad", "warning": "unsure", "notice": "unsound"}
_MOST_EVIDENCE = 12
MOST_KEPT = 100
"""Findings in verdict.json."""


@dataclass(frozen=True)
class Item:
    """One finding as the page shows it; ``href`` leads to its Run's folder, beside the page."""

    severity: str
    kind: str
    title: str
    text: str
    do: list[str]
    avoid: str
    reason: str
    evidence: list[str]
    beside: str = ""
    where: str = ""
    href: str = ""


@dataclass(frozen=True)
class Section:
    """The section. ``shows`` is False where no load was measured; ``of`` names the Run whose reconciliations these are."""

    shows: bool = False
    numbers: str = ""
    findings: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reconciliations: list[Reconciliation] = field(default_factory=list)
    of: str = ""


def found_in(view: SessionView) -> tuple[list[Analysis], Findings]:
    """Return the windows of the judged side (of a comparison the one after the change, with the one before as the baseline), and what the rules say."""
    judged = view.after if view.compared or not view.before else (*view.before, *view.after)
    loads = [analysis for analysis in judged if analysis.facts.loaded and not analysis.run.record.imported_from]
    windows = [analysis for analysis in loads if not is_probe(analysis)] or loads
    before = [analysis for analysis in view.before if analysis.facts.loaded and not is_probe(analysis)] if view.compared else []
    return windows, find_in(windows, view.rules, before) if windows else Findings()


def finding_records(view: SessionView) -> list[FindingRecord]:
    """Return the findings as verdict.json keeps them, the gravest first."""
    theirs = {rule.id: Path(rule.where.rpartition(", rule ")[0]).name for rule in view.rules or () if rule not in shipped_rules()}
    return [
        FindingRecord(
            one.id,
            one.severity,
            plain(one.title, 200),
            plain(one.text, 1200),
            plain(one.beside, 600),
            [plain(action, 600) for action in one.do],
            plain(one.avoid, 600),
            plain(one.reason, 600),
            plain(one.why, 600),
            plain(one.run, 120) if one.run.startswith("runs/") else "",
            plain(theirs.get(one.id, ""), 120),
        )
        for one in found_in(view)[1].found[:MOST_KEPT]
    ]


def section(view: SessionView) -> Section:
    """Return the findings of the judged side with the reconciliations of its fullest window."""
    windows, found = found_in(view)
    peak = at_peak(windows)
    if peak is None:
        return Section()
    notes = []
    if further := found.found[len(found.shown) :]:
        notes.append("Further: " + ", ".join(plain(one.title, 100) for one in further) + ".")
    if found.unseen:
        notes.append("Could not be looked at: " + ", ".join(plain(one.title, 100) for one in found.unseen) + ".")
    many = len(windows) > 1
    if many:
        notes.append("Each rule speaks of the first window that shows it." + (" Figures are those after the change." if view.compared else ""))
    return Section(
        True,
        plain(three_numbers(peak), 600) + (f" ({_name(peak)}, the fullest of {len(windows)})" if many else ""),
        [_item(one) for one in found.shown],
        notes,
        [Reconciliation(one.name, tuple(plain(line, 900) for line in one.lines), plain(one.lacking, 400)) for one in reconciliations(peak)],
        _name(peak) if many else "",
    )


def _name(analysis: Analysis) -> str:
    return plain(analysis.run.folder.name, 80)


def _item(one: Finding) -> Item:
    evidence = [plain(f"{part.title} ({part.name}): {part.shown}, {part.source}", 400) for part in one.evidence[:_MOST_EVIDENCE]]
    where = plain(one.run, 120) if one.run.startswith("runs/") else ""
    return Item(
        one.severity,
        _KINDS[one.severity],
        plain(one.title, 200),
        plain(one.text, 1200),
        [plain(action, 600) for action in one.do],
        plain(one.avoid, 600),
        plain(one.reason, 600),
        evidence,
        plain(one.beside, 600),
        where,
        quote(one.run) + "/" if where else "",
    )
