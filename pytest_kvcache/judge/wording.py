"""What all gates say the same way: which Runs they rest on, the three numbers beside a usage ratio, and the message of a failure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from pytest_kvcache import units
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INVALID, NOT_APPLICABLE
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GateRecord, ValueRecord

MISSED = ("coverage", "gap", "incomplete", "too_few", "under_load", "clock")
"""Rules that say that something was missed, or that the server was pressed less than planned. What was seen all the same (a counter that
moved, a refusal in our own log, a sample above the bound) is no less true for it: a FAIL on it stands, while a PASS cannot."""


def show(value: Value) -> str:
    """Return a value with its unit, or why it is missing."""
    return units.show(value.value, value.unit) if isinstance(value, Reading) else f"not known ({value.reason})"


def evidence(analysis: Analysis) -> str:
    """Return the path of a Run inside its session folder."""
    folder = analysis.run.folder
    return f"{folder.parent.name}/{folder.name}" if folder.parent.name == "runs" else folder.name


def beside(analysis: Analysis) -> str:
    """Return what a usage ratio is never shown without: the pool, what was free, and the running requests with their mean length."""
    values = analysis.values
    if analysis.run.record.imported_from:
        return f"{analysis.run.record.imported_from} tells nothing of the pool"

    def first(*names: str) -> Value:
        found = [values.get(name, Missing("not measured")) for name in names]
        return next((value for value in found if isinstance(value, Reading)), found[0])

    pool = first("usable_blocks", "pool_blocks", "pool_tokens")
    block = values.get("block_size")
    of = f" of {show(block)}" if isinstance(pool, Reading) and pool.unit == "blocks" and isinstance(block, Reading) else ""
    free = first("free_blocks.min", "free_tokens.min")
    tightest = first("free_blocks.tightest", "free_tokens.tightest")
    # of replicas the sums hide the full one, whose usage is the one that is judged
    alone = f" ({show(tightest)} of the fullest server)" if isinstance(tightest, Reading) and tightest.value != getattr(free, "value", None) else ""
    running = first("running.at_peak", "running.peak")
    length = first("mean_length.at_peak")
    polled = "; polled, so the true peak is at least this" if analysis.run.record.sample_hz > 0 else ""
    return f"pool {show(pool)}{of}; {_low(free)} free at the tightest{alone}; {show(running)} running at the peak, mean length {show(length)}{polled}"


def _low(free: Value) -> str:
    return show(free) if isinstance(free, Reading) else "an unknown number"


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
