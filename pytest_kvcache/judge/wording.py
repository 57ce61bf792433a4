"""What all gates say the same way: which Runs they rest on, the three numbers beside a usage ratio, and the message of a failure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from pytest_kvcache.analysis.three import beside, show
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INVALID, NOT_APPLICABLE
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GateRecord, ValueRecord

__all__ = ["MISSED", "SAME", "beside", "evidence", "failure_text", "gate", "missing", "show"]

MISSED = ("coverage", "gap", "incomplete", "too_few", "under_load", "clock")
"""Rules that say that something was missed, or that the server was pressed less than planned. What was seen all the same (a counter that
moved, a refusal in our own log, a sample above the bound) is no less true for it: a FAIL on it stands, while a PASS cannot."""

SAME = "the same measurement stands on both sides"
"""How the note begins that says that a comparison says nothing."""


def evidence(analysis: Analysis) -> str:
    """Return the path of a Run inside its session folder."""
    folder = analysis.run.folder
    return f"{folder.parent.name}/{folder.name}" if folder.parent.name == "runs" else folder.name


def gate(
    name: str,
    quantity: str,
    verdict: str,
    text: str,
    analyses: Sequence[Analysis],
    *,
    decisive: Analysis | None = None,
    value: Value | None = None,
    spoilt_by: Container[str] | None = None,
    fails_despite: Container[str] = (),
    **fields: Any,
) -> GateRecord:
    """Return the record of a gate judged on ``analyses``. Where one of them is unsound, the verdict is INVALID and the text says why.

    ``decisive`` is the window that the verdict rests on most; the evidence path is its own. ``spoilt_by`` names the rules of
    soundness that matter to this gate; all of them where it is not given. ``fails_despite`` names those that a FAIL stands against:
    what was seen was seen, however much else was missed.
    """
    seen = decisive or analyses[0]
    if verdict != NOT_APPLICABLE:
        ignored = fails_despite if verdict == FAIL else ()
        unsound = [
            (analysis, problem)
            for analysis in analyses
            for problem in analysis.problems
            if (spoilt_by is None or problem.rule in spoilt_by) and problem.rule not in ignored
        ]
        if unsound:
            where, problem = unsound[0]
            more = f" (and {len(unsound) - 1} more)" if len(unsound) > 1 else ""
            verdict = INVALID
            text = f"the evidence is unsound: {problem.text}{more}; to mend it: {problem.mend}. Not judged: {text}"
            seen = where
    profiles = list(dict.fromkeys(analysis.run.record.profile for analysis in analyses))
    if value is not None:
        fields["value"] = ValueRecord.of(value)
        if isinstance(value, Reading):
            fields.setdefault("unit", value.unit)
    fields.setdefault("lane", ", ".join(profiles))
    fields.setdefault("side", seen.run.record.side)
    fields.setdefault("evidence", evidence(seen))
    return GateRecord(name, quantity, verdict, text, applicable=verdict != NOT_APPLICABLE, **fields)


def readings(analyses: Sequence[Analysis], name: str) -> list[tuple[Analysis, Reading]] | Missing:
    """Return the value of every window; Missing where one lacks it (cannot happen only where it can in none)."""
    found: list[tuple[Analysis, Reading]] = []
    lacking: list[Missing] = []
    for analysis in analyses:
        value = analysis.values.get(name, Missing(f"{name} was not measured"))
        if isinstance(value, Reading):
            found.append((analysis, value))
        else:
            lacking.append(value)
    if not lacking:
        return found
    return next((value for value in lacking if not value.cannot_happen), lacking[0] if not found else Missing(lacking[0].reason))


def missing(name: str, quantity: str, value: Missing, analyses: Sequence[Analysis], **fields: Any) -> GateRecord:
    """Return the gate on a value that is not there: not applicable where it cannot happen, else INCONCLUSIVE, never PASS."""
    if value.cannot_happen:
        return gate(name, quantity, NOT_APPLICABLE, f"does not apply: {value.reason}", analyses, value=value, **fields)
    return gate(name, quantity, "INCONCLUSIVE", f"cannot judge {quantity}: {value.reason}", analyses, value=value, **fields)


def failure_text(judged: GateRecord) -> str:
    """Return the message of a gate that did not pass: quantity, value, bound, before and after, and where the evidence lies."""
    where = f" [{judged.lane}]" if judged.lane else ""
    lines = [f"{judged.name}{where} {judged.verdict}: {judged.text}"]
    for label, record in (("value", judged.value), ("before", judged.before), ("after", judged.after)):
        if record is not None:
            value = record.to_value()
            source = f"  ({value.source})" if isinstance(value, Reading) and value.source else ""
            lines.append(f"  {label + ':':<10}{judged.quantity} {show(value)}{source}")
    if judged.bound_text:
        lines.append(f"  {'bound:':<10}{judged.bound_text}")
    for label, text in (("beside:", judged.beside), ("method:", judged.method), ("evidence:", judged.evidence)):
        if text:
            lines.append(f"  {label:<10}{text}")
    return "\n".join(lines)
