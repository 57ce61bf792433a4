"""What a Run's answers were worth, as values that conditions name: pass rates by how they were asked, and greedy agreement with itself."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvcache.quality.agreement import noise_floor
from pytest_kvcache.quality.pressure import PRESSURES
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import QualityRow, QualitySummary
from pytest_kvcache.runfolder import Run


def answer_values(run: Run, rows: Sequence[QualityRow], quiet: QualitySummary | Missing) -> dict[str, Value]:
    """Return the values ``quality.*`` and ``agreement.equal`` of a Run; Missing with the reason where nothing of the kind was asked.

    Items under a pressure that was not brought about do not count as asked under pressure. Agreement is that of the Run's own probes
    with each other, the noise that a comparison is held against.
    """
    found: dict[str, Value] = {}
    if isinstance(quiet, Missing):
        found["quality.pass_rate"] = found["quality.items"] = quiet
    else:
        source = f"quality.jsonl: {quiet.passed} of {quiet.items}" + (f", {quiet.errors} without an answer" if quiet.errors else "")
        found["quality.pass_rate"] = Reading(quiet.passed / quiet.items, "ratio", source)
        found["quality.items"] = Reading(quiet.items, "items", "quality.jsonl")
    felt = {record.part for record in run.record.pressure if record.pressed}
    found["quality.pressed"] = _rate([row for row in rows if row.part in felt], "no item was asked under pressure")
    tasks = [row for row in rows if row.part and row.part not in PRESSURES]
    found["quality.tasks"] = _rate(tasks, "no task of lm-evaluation-harness was asked")
    floor = noise_floor(run.agreement())
    found["agreement.equal"] = (
        Missing("no greedy answer was asked for twice")
        if floor is None
        else Reading(floor.equal, "ratio", f"agreement.jsonl: {floor.probes} probes, each against itself")
    )
    return found


def _rate(rows: Sequence[QualityRow], why: str) -> Value:
    if not rows:
        return Missing(why)
    passed = sum(row.passed for row in rows)
    return Reading(passed / len(rows), "ratio", f"quality.jsonl: {passed} of {len(rows)}")
