"""May the change ship by its answers: items paired one by one, quiet and under pressure, and greedy answers against the server's own noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pytest_kvcache import units
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, NOT_APPLICABLE, PASS
from pytest_kvcache.judge import stats
from pytest_kvcache.judge.wording import gate, missing, show
from pytest_kvcache.quality.agreement import Agreement, agree, noise_floor
from pytest_kvcache.quality.harness import PART as TASKS
from pytest_kvcache.quality.pressure import PRESSURES
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GateRecord, PressureRecord, QualityRow, ValueRecord

_SURE = f"{stats.CONFIDENCE * 100:.0f} %"
_METHOD = f"paired items, exact one-sided McNemar test, {_SURE}"
AGREEMENT_MARGIN = 0.02
"""By how much the share of equal greedy tokens may lie below the server's own noise before it is warned of."""

_MOST_LENGTHS = 8
_Pair = tuple[QualityRow, QualityRow]
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PairedItems:
    """Items asked on both sides: how many passed, what was lost and gained, the judgement, the lengths that lost items, and all of it in words."""

    found: stats.PairedLoss
    text: str
    passed: tuple[int, int]
    lengths: tuple[int, ...]


def judge_items(before: Sequence[QualityRow], after: Sequence[QualityRow], margin: float) -> PairedItems | str:
    """Judge rows of two sides, paired by part and item: FAIL by exact McNemar, PASS where the loss is bounded by ``margin``, else INCONCLUSIVE.

    Of several answers to an item the first counts. Returns in words why nothing pairs where an item asks something else on the other side; "" where no item is on both.
    """
    sides = [_asked(before), _asked(after)]
    common = [key for key in sides[0] if key in sides[1]]
    if not common:
        return ""
    changed = [key[1] for key in common if sides[0][key].expected_hash != sides[1][key].expected_hash]
    if changed:
        return f"{len(changed)} items of one id ask or expect something else after the change, such as {changed[0]!r}: they do not pair"
    pairs = [(sides[0][key], sides[1][key]) for key in common]
    lost = [new for old, new in pairs if old.passed and not new.passed]
    gained = sum(new.passed and not old.passed for old, new in pairs)
    found = stats.paired_quality(len(lost), gained, len(pairs), margin)
    passed = (sum(old.passed for old, _ in pairs), sum(new.passed for _, new in pairs))
    rates = [units.show(count / len(pairs), "ratio") for count in passed]
    text = f"{rates[0]} of {len(pairs)} paired items passed before, {rates[1]} after: {len(lost)} lost, {gained} gained"
    if lost and any(row.part for row in lost):
        text += f"; lost under: {_shares(lost, pairs, lambda row: row.part)}"
    if found.verdict == FAIL:
        text += f" (p = {found.p_worse:.2g})"
    else:
        text += f"; at most {units.show(found.loss_upper, 'ratio')} lost ({_SURE}), and {units.show(margin, 'ratio')} may be"
    known = [row for row in lost if row.length_tokens]
    if known:
        text += f"; lost by length: {_shares(known, pairs, lambda row: row.length_tokens)}"
    if found.verdict == INCONCLUSIVE:
        text += f"; about {found.needed:,} items would decide it" if found.needed else "; more items like these would not make it pass"
    errors = sum(bool(row.error) for _, row in pairs)
    text += f"; {errors} got no answer after the change" if errors else ""
    garbage = sum(row.note == "one character repeated" for _, row in pairs)
    text += f"; {garbage} answers are one character over and over" if garbage else ""
    only = [len(side) - len(common) for side in sides]
    text += f"; {only[0]} were asked only before and {only[1]} only after" if any(only) else ""
    return PairedItems(found, text, passed, tuple(sorted({row.length_tokens for row in known})))


def _asked(rows: Sequence[QualityRow]) -> Mapping[_Key, QualityRow]:
    found: dict[_Key, QualityRow] = {}
    for row in rows:
        found.setdefault((row.part, row.item), row)
    return found


def _shares(lost: Sequence[QualityRow], pairs: Sequence[_Pair], by: Callable[[QualityRow], Any]) -> str:
    """Return how many were lost of how many asked, for each length or part that lost any."""
    asked: dict[Any, int] = {}
    gone: dict[Any, int] = {}
    for _, row in pairs:
        asked[by(row)] = asked.get(by(row), 0) + 1
    for row in lost:
        gone[by(row)] = gone.get(by(row), 0) + 1

    def shown(key: Any) -> str:
        return f"at {key:,} tokens" if isinstance(key, int) else f"under {key}"

    listed = [f"{gone[key]} of {asked[key]} {shown(key)}" for key in sorted(gone)]
    return ", ".join(listed[:_MOST_LENGTHS]) + (f" and {len(listed) - _MOST_LENGTHS} more" if len(listed) > _MOST_LENGTHS else "")


def quality_not_worse(before: Sequence[Analysis], after: Sequence[Analysis], margin: float) -> GateRecord:
    """Judge the items asked of a quiet server, paired by their id; see ``judge_items``."""
    return _paired("quality_not_worse", "quality.pass_rate", before, after, margin, lambda row: not row.part)


def quality_gates(before: Sequence[Analysis], after: Sequence[Analysis], margin: float) -> list[GateRecord]:
    """Return every gate on answers that the two sides allow: quiet, under pressure, tasks of lm-evaluation-harness, and greedy agreement (a warning)."""
    rows = [_rows(side) for side in (before, after)]
    found = []
    quiet = any(not row.part for side in rows for row in side)
    others = any(row.part for side in rows for row in side)
    if quiet or not others:
        found.append(quality_not_worse(before, after, margin))
    if any(row.part in PRESSURES for side in rows for row in side):
        found.append(pressed_not_worse(before, after, margin))
    if any(row.part == TASKS for side in rows for row in side):
        found.append(_paired("tasks_not_worse", "quality.tasks", before, after, margin, lambda row: row.part == TASKS))
    return [*found, *(judged for judged in (agreement_gate(before, after), determinism_gate(before, after)) if judged is not None)]


def pressed_not_worse(before: Sequence[Analysis], after: Sequence[Analysis], margin: float) -> GateRecord:
    """Judge the items asked under pressure, of those pressures that were brought about on both sides; what was not is said."""
    felt = [_felt(side) for side in (before, after)]
    both = [part for part in PRESSURES if all(side.get(part) is not None and side[part].pressed for side in felt)]
    judged = _paired("quality_pressed_not_worse", "quality.pressed", before, after, margin, lambda row: row.part in both)
    notes = []
    for part in PRESSURES:
        whys = [
            f"{side} the change {record.why}"
            for side, found in zip(("before", "after"), felt, strict=True)
            if (record := found.get(part)) and record.why
        ]
        notes += [f"{part} was no pressure: {'; '.join(whys)}"] if whys else []
    if not both and notes:
        judged = msgspec.structs.replace(judged, verdict=INCONCLUSIVE, text="; ".join(notes))
    elif notes:
        judged = msgspec.structs.replace(judged, text=f"{judged.text}; {'; '.join(notes)}")
    return msgspec.structs.replace(judged, beside="; ".join(shown_pressure(felt[1][part]) for part in both))


def _felt(analyses: Sequence[Analysis]) -> dict[str, PressureRecord]:
    return {record.part: record for analysis in reversed(analyses) for record in analysis.run.record.pressure}


def shown_pressure(record: PressureRecord) -> str:
    """Return what a server went through under a pressure, in words."""
    said = []
    if record.usage_peak is not None:
        pool = record.pool_tokens
        of = f" of {pool:,.0f} tokens ({pool * (1 - record.usage_peak):,.0f} free)" if pool is not None else " of a pool that is not told"
        said = [f"usage up to {units.show(record.usage_peak, 'ratio')}{of}"]
    said += [f"{record.running_peak:,.0f} running (their mean length is not measured here)"] if record.running_peak else []
    said += [f"{value:,.0f} {word}" for value, word in ((record.waiting_peak, "waiting"), (record.preemptions, "preemptions")) if value]
    said += [f"{record.prefix_hits:,.0f} tokens from the prefix cache"] if record.prefix_hits and record.part == "prefix" else []
    said += [f"{record.cancelled:,} requests broken off"] if record.cancelled else []
    return f"{record.part}: {', '.join(said) or 'nothing told'}"


def _rows(analyses: Sequence[Analysis]) -> list[QualityRow]:
    return [row for analysis in analyses for row in analysis.run.quality()]


def _paired(
    name: str, quantity: str, before: Sequence[Analysis], after: Sequence[Analysis], margin: float, wanted: Callable[[QualityRow], bool]
) -> GateRecord:
    both = [*before, *after]
    limit = f"at most {units.show(margin, 'ratio')} of the items lost"
    fields: dict[str, Any] = {"bound": margin, "bound_text": limit, "side": "after", "method": _METHOD}
    sides = [[row for row in _rows(side) if wanted(row)] for side in (before, after)]
    judged = judge_items(sides[0], sides[1], margin)
    if judged == "":
        return missing(name, quantity, Missing("no quality item was asked on both sides"), both, **fields)
    if isinstance(judged, str):
        return gate(name, quantity, "INVALID", judged, both, **fields)
    items = judged.found.items
    rates: list[Value] = [Reading(count / items, "ratio", f"of {items} paired items") for count in judged.passed]
    made = gate(
        name,
        quantity,
        judged.found.verdict,
        judged.text,
        both,
        decisive=after[0],
        unit="ratio",
        before=ValueRecord.of(rates[0]),
        after=ValueRecord.of(rates[1]),
        high=judged.found.loss_upper,
        **fields,
    )
    return msgspec.structs.replace(made, lengths=list(judged.lengths))


def agreement_gate(before: Sequence[Analysis], after: Sequence[Analysis]) -> GateRecord | None:
    """Judge how many greedy tokens a change moves beyond the server's own noise, as a warning: other tokens are no loss by themselves.

    None where a side was asked no probe.
    """
    rows = [[row for analysis in side for row in analysis.run.agreement()] for side in (before, after)]
    across = agree([row for row in rows[0] if not row.repeat], [row for row in rows[1] if not row.repeat])
    floor = noise_floor(rows[0])
    if not all(rows):
        return None
    name, quantity = "agreement", "agreement.equal"
    fields: dict[str, Any] = {
        "bound": AGREEMENT_MARGIN,
        "bound_text": f"at most {units.show(AGREEMENT_MARGIN, 'ratio')} below the noise of the side before",
        "side": "after",
        "unit": "ratio",
        "method": f"paired shares of equal tokens, non-inferiority by t, one-sided {_SURE}",
    }
    if across is None:
        error = next((row.error for side in rows for row in side if row.error), "the probes differ")
        nothing = gate(name, quantity, INCONCLUSIVE, f"no probe was answered on both sides: {error}", [*before, *after], **fields)
        return msgspec.structs.replace(nothing, level="warn")
    text = describe(across, floor, noise_floor(rows[1]))
    shared = [item for item in across.shares if floor is not None and item in floor.shares]
    if floor is None or len(shared) < stats.FEWEST_WINDOWS:
        made = gate(name, quantity, INCONCLUSIVE, f"{text}; the noise of the side before is not known", [*before, *after], **fields)
    else:
        moved = stats.not_worse(
            [floor.shares[item] for item in shared],
            [across.shares[item] for item in shared],
            AGREEMENT_MARGIN,
            lower_is_better=False,
            relative=False,
            paired=True,
        )
        made = gate(
            name,
            quantity,
            moved.verdict,
            text,
            [*before, *after],
            before=ValueRecord.of(Reading(floor.equal, "ratio", "agreement.jsonl, before against before")),
            after=ValueRecord.of(Reading(across.equal, "ratio", "agreement.jsonl, before against after")),
            low=moved.low,
            high=moved.high,
            **fields,
        )
    return msgspec.structs.replace(made, level="warn")


def determinism_gate(before: Sequence[Analysis], after: Sequence[Analysis]) -> GateRecord | None:
    """Judge whether a change made greedy answers differ between two askings of one prompt, as a warning; None where a side was asked no probe.

    A cache that gives another answer the second time is broken, or its batches differ: a side that was already so before is no worse for it.
    """
    floors = [noise_floor([row for analysis in side for row in analysis.run.agreement()]) for side in (before, after)]
    if floors[0] is None or floors[1] is None:
        return None
    shared = [item for item in floors[0].shares if item in floors[1].shares]
    moved = [[item for item in shared if floor.shares[item] < 1] for floor in floors if floor is not None]
    lost, gained = len(set(moved[1]) - set(moved[0])), len(set(moved[0]) - set(moved[1]))
    found = stats.paired_quality(lost, gained, len(shared), 1.0)
    verdict = FAIL if found.verdict == FAIL else PASS if len(moved[1]) <= len(moved[0]) else INCONCLUSIVE
    counted = [f"{len(side)} of {len(shared)}" for side in moved]
    text = f"asked twice, {counted[0]} greedy probes were answered otherwise the second time before the change, and {counted[1]} after it"
    text += f" (p = {found.p_worse:.2g})" if verdict != PASS else ""
    both = [*before, *after]
    made = gate(
        "determinism_not_worse",
        "agreement.equal",
        verdict,
        text,
        both,
        decisive=after[0],
        unit="ratio",
        before=ValueRecord.of(Reading(floors[0].equal, "ratio", "agreement.jsonl, before against before")),
        after=ValueRecord.of(Reading(floors[1].equal, "ratio", "agreement.jsonl, after against after")),
        bound_text="no more probes that differ from themselves than before",
        side="after",
        method=f"paired probes, exact one-sided McNemar test, {_SURE}",
    )
    return msgspec.structs.replace(made, level="warn")


def notes(before: Sequence[Analysis], after: Sequence[Analysis]) -> list[str]:
    """Return what limits a judgement by answers: that it was asked of quiet servers alone, and that a server is not deterministic."""
    asked = [[row for row in _rows(side) if not row.part] for side in (before, after)]
    if not all(asked):
        return []
    found = []
    if not all(any(record.pressed for record in _felt(side).values()) for side in (before, after)):
        found.append(
            "quality was asked of a quiet server alone: caches break when they are full, shared or cut off, and --kv-quality-pressure=all asks then"
        )
    floors = [noise_floor([row for analysis in side for row in analysis.run.agreement()]) for side in (before, after)]
    unsteady = [
        f"{floor.diverged} of {floor.probes} {word} the change"
        for word, floor in zip(("before", "after"), floors, strict=True)
        if floor and floor.diverged
    ]
    if unsteady:
        found.append(
            f"greedy decoding is not deterministic here: asked twice, {' and '.join(unsteady)} were answered otherwise; an item that is lost or gained may be "
            "that noise, which the exact test of both weighs"
        )
    elif any(floors):
        known = sum(floor.probes for floor in floors if floor)
        found.append(f"greedy decoding was tested and not assumed: {known} probes asked twice gave the same tokens both times")
    return found


def describe(across: Agreement, floor: Agreement | None, own: Agreement | None) -> str:
    """Return greedy agreement in words: two sides against each other, beside each side against itself."""
    text = f"{show(Reading(across.equal, 'ratio', ''))} of greedy tokens are equal before and after the change, {across.diverged} of {across.probes} probes diverge"
    text += f" (at token {across.first:.0f} in the median)" if across.first is not None else ""
    if floor is not None:
        text += f"; before against itself {show(Reading(floor.equal, 'ratio', ''))}, {floor.diverged} diverge"
    if own is not None:
        text += f"; after against itself {show(Reading(own.equal, 'ratio', ''))}"
    if across.drift is not None:
        text += f"; log-probabilities moved by {across.drift:.3g} in the mean and {across.drift_max:.3g} at most"
        text += f" (before against itself {floor.drift:.3g})" if floor is not None and floor.drift is not None else ""
    return text


def pressed(analyses: Sequence[Analysis], min: float) -> GateRecord:
    """Judge the pass rate of the items asked under pressure against ``min``; not applicable where none was asked for."""
    name, quantity = "quality_pressed", "quality.pressed"
    limit = f"at least {units.show(min, 'ratio')}"
    felt = _felt(analyses)
    if not felt:
        return gate(name, quantity, NOT_APPLICABLE, "no pressure was asked for (--kv-quality-pressure)", analyses, bound=min, bound_text=limit)
    working = [part for part, record in felt.items() if record.pressed]
    lacking = [f"{part} was no pressure: {record.why}" for part, record in felt.items() if not record.pressed]
    rows = [row for row in _rows(analyses) if row.part in working]
    if not rows:
        return missing(name, quantity, Missing("; ".join(lacking) or "no item was asked"), analyses, bound=min, bound_text=limit)
    passed = sum(row.passed for row in rows)
    wrong = [row for row in rows if not row.passed]
    text = f"{passed} of {len(rows)} items passed under pressure, {units.show(passed / len(rows), 'ratio')}, {limit}"
    pairs = [(row, row) for row in rows]
    text += f"; wrong {_shares(wrong, pairs, lambda row: row.part)}; {_shares(wrong, pairs, lambda row: row.length_tokens)}" if wrong else ""
    text += f"; {'; '.join(lacking)}" if lacking else ""
    value = Reading(passed / len(rows), "ratio", f"quality.jsonl: {passed} of {len(rows)}")
    low = stats.proportion_lower(passed, len(rows))
    made = gate(
        name, quantity, PASS if passed / len(rows) >= min else FAIL, text, analyses, value=value, bound=min, bound_text=limit, low=low,
        method="Clopper-Pearson lower bound beside it",
    )  # fmt: skip
    return msgspec.structs.replace(
        made, lengths=sorted({row.length_tokens for row in wrong}), beside="; ".join(shown_pressure(felt[part]) for part in working)
    )
