"""Two sides of a change: may they be compared at all, what else differs, and the gates of every profile measured on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from pytest_kvcache import units
from pytest_kvcache.analysis.soundness import Problem
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import INCONCLUSIVE, INVALID, PASS
from pytest_kvcache.judge import pools, quality
from pytest_kvcache.judge.change import Margins, not_worse, probe_not_worse
from pytest_kvcache.judge.declared import check_declared
from pytest_kvcache.judge.gates import worst
from pytest_kvcache.judge.quality import quality_gates, quality_not_worse
from pytest_kvcache.judge.validity import check_comparable, check_pair, check_side, launches
from pytest_kvcache.judge.wording import SAME, evidence
from pytest_kvcache.quantities import QUANTITIES, Missing, Value
from pytest_kvcache.records import ConfigChange, GateRecord, RunRecord
from pytest_kvcache.runfolder import Run
from pytest_kvcache.settings import Settings

SHA = "its SHA-256"
"""Where a Run that was read from a result file of another tool says which file that was."""
RESTARTS_NOT_COVERED = "the spread between restarts is not covered: all windows of a side were measured on one start of the server"


@dataclass(frozen=True)
class Comparison:
    """A judged change. ``problems`` are what made it INVALID as a whole, ``notes`` what limits what it tells.

    ``spoilt`` says for each profile why its two sides cannot be compared; empty where they can.
    """

    gates: list[GateRecord]
    config_diff: list[ConfigChange]
    verdict: str
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    spoilt: Mapping[str, Sequence[Problem]] = field(default_factory=dict)


def compare(before: Sequence[Analysis], after: Sequence[Analysis], settings: Settings | None = None, margins: Margins | None = None) -> Comparison:
    """Judge the side after the change against the side before it, profile by profile, with ``margins``, else those of ``settings``.

    Runs pair by profile. Another engine, model, API or workload makes the gates INVALID; of sides that were measured apart also another
    build or GPU; and of a change that was declared (``settings.expect_change``) any other difference. A profile that was measured only
    before makes one INCONCLUSIVE; what was measured only after is noted. Raises ValueError where a side is empty.
    """
    if not before or not after:
        raise ValueError("both sides of a comparison need at least one Run")
    settings = settings if settings is not None else Settings()
    margins = margins if margins is not None else Margins.of(settings)
    first = before[0].run.record, after[0].run.record
    diff = config_diff(before[0].run, after[0].run)
    problems = [*check_pair(*first), *check_side(before), *check_side(after)]
    notes: list[str] = []
    limits: list[str] = []
    if not settings.before:  # two sides that one session launched differ in what their commands say, and the difference shows it
        apart, limits = check_comparable(*first, settings.declared)
        problems += apart
    if settings.declared:
        undeclared, unknown = check_declared(*first, diff, settings.declared)
        # another engine, build or model is said once, by its own rule
        problems += [problem for problem in undeclared if not problems or problem.rule != "undeclared"]
        limits += unknown
    sides = _by_profile(before), _by_profile(after)
    gates: list[GateRecord] = []
    spoilt: dict[str, list[Problem]] = {}
    for key, old in sides[0].items():
        new = sides[1].get(key)
        if new is None:
            gates.append(_lonely(key, old))
            continue
        found = _gates(key, old, new, margins)
        unequal = _workload(key, old, new)
        lacking = _lacking(old, "before") or _lacking(new, "after")
        spoilt.setdefault(key[0], []).extend([*problems, *unequal])
        gates += [invalid(_not_whole(gate, lacking), [*problems, *unequal]) for gate in found]
    only_after = [_title(key) for key in sides[1] if key not in sides[0]]
    if only_after:
        notes.append(f"measured only after the change, and so not compared: {', '.join(only_after)}")
    if same := _same(before, after):
        notes.append(f"{SAME} ({same}): this is no comparison of two servers, and says nothing about a change")
    if launches(before) < 2 or launches(after) < 2:
        notes.append(RESTARTS_NOT_COVERED)
    notes += quality.notes(before, after)
    verdict = worst(gate.verdict for gate in gates if gate.applicable and gate.level != "warn")
    return Comparison(gates, diff, verdict, [*notes, *pools.notes(*first), *pools.unneeded(before, after), *limits], problems, spoilt)


def _same(before: Sequence[Analysis], after: Sequence[Analysis]) -> str:
    """Return the Runs that stand on both sides, as where a session is compared with itself or with its copy; empty where none does."""

    def known(analyses: Sequence[Analysis]) -> dict[tuple[object, ...], str]:
        records = [analysis.run.record for analysis in analyses]
        return {
            (r.id, r.workload, r.window, r.load_started_wall_s, r.load_ended_wall_s, r.provenance.get(SHA, "")): r.id
            for r in records
            if r.load_started_wall_s or SHA in r.provenance
        }

    left, right = known(before), known(after)
    both = [name for key, name in left.items() if key in right]
    return ", ".join(both[:3]) + (f" and {len(both) - 3} more" if len(both) > 3 else "")


def compare_quality(before: Sequence[Analysis], after: Sequence[Analysis], margin: float) -> GateRecord:
    """Judge the quality items alone, with the same reasons for INVALID. Raises ValueError where a side is empty."""
    if not before or not after:
        raise ValueError("both sides of a comparison need at least one Run")
    problems = [*check_pair(before[0].run.record, after[0].run.record), *check_side(before), *check_side(after)]
    return invalid(quality_not_worse(before, after, margin), problems)


_Key = tuple[str, bool]


def _by_profile(analyses: Sequence[Analysis]) -> dict[_Key, list[Analysis]]:
    """Return the windows by profile; probes of single requests apart from windows of the same profile."""
    found: dict[_Key, list[Analysis]] = {}
    for analysis in analyses:
        record = analysis.run.record
        found.setdefault((record.profile, bool(record.options.get("requests"))), []).append(analysis)
    return found


def _title(key: _Key) -> str:
    return f"{key[0]} (single requests)" if key[1] else key[0]


def _gates(key: _Key, before: Sequence[Analysis], after: Sequence[Analysis], margins: Margins) -> list[GateRecord]:
    asked = [any(not isinstance(analysis.quality, Missing) for analysis in side) for side in (before, after)]
    loaded = any(analysis.facts.loaded for analysis in (*before, *after))
    found: list[GateRecord] = []
    if loaded:
        found += [probe_not_worse(before, after)] if key[1] else not_worse(before, after, margins)
    if any(asked) or not loaded:
        found += quality_gates(before, after, margins.quality)
    return found


def _workload(key: _Key, before: Sequence[Analysis], after: Sequence[Analysis]) -> list[Problem]:
    """Return why the two sides were not asked the same; quality items pair one by one instead."""
    if not any(analysis.facts.loaded for analysis in (*before, *after)):
        return []
    sides = [{analysis.run.record.window: analysis for analysis in side} for side in (before, after)]
    hashes = [{analysis.run.record.window: analysis.run.record.workload for analysis in side} for side in (before, after)]
    shared = set(hashes[0]) & set(hashes[1])
    if not shared or any(hashes[0][window] != hashes[1][window] for window in shared):
        return [
            Problem(
                "workload",
                f"{_title(key)} pressed with another load before than after (users, duration, options or seed differ)",
                "measure both sides with the same options",
            )
        ]
    if key[1]:  # a single request is sized by its own server's limit: that is its point
        return []
    for window in sorted(shared):
        unlike = _unlike_lengths(sides[0][window], sides[1][window])
        if unlike:
            return [
                Problem(
                    "workload",
                    f"{_title(key)} pressed with other lengths before than after: {unlike}",
                    "where max_model_len is meant to change, declare it (--kv-expect-change max_model_len): then both sides are pressed with lengths "
                    "that both serve",
                )
            ]
    return []


def _unlike_lengths(before: Analysis, after: Analysis) -> str:
    """Return how the lengths planned for the same requests differ; empty where they agree as closely as lengths can be planned."""
    left, right = before.facts.lengths, after.facts.lengths
    for key in sorted(set(left) & set(right)):
        for name, old, new in zip(("prompt", "output"), left[key], right[key], strict=True):
            if abs(old - new) > max(4, 0.02 * old):
                return f"request {key[1]} of lane {key[0]} has {name} {old:,} tokens before and {new:,} after"
    return ""


def _lacking(analyses: Sequence[Analysis], side: str) -> str:
    """Return which of the planned windows of a side are not there; empty where all are."""
    planned = max(analysis.run.record.planned_windows for analysis in analyses)
    there = {analysis.run.record.window for analysis in analyses}
    gone = [str(number + 1) for number in islice((n for n in range(planned) if n not in there), 5)]  # a damaged record may plan any number
    return f"{side} the change {'windows' if len(gone) > 1 else 'window'} {', '.join(gone)} of {planned} missing" if gone else ""


def _not_whole(gate: GateRecord, lacking: str) -> GateRecord:
    """Return the gate, INCONCLUSIVE where it passed on fewer repeats than were planned: what is missing may be what went wrong."""
    if not lacking or gate.verdict != PASS or not gate.applicable:
        return gate
    return msgspec.structs.replace(gate, verdict=INCONCLUSIVE, text=f"{lacking}, so it cannot pass: {gate.text}")


def _lonely(key: _Key, before: Sequence[Analysis]) -> GateRecord:
    return GateRecord(
        "measured_on_both_sides",
        "requests.sent",
        INCONCLUSIVE,
        f"{_title(key)} was measured before the change and not after it",
        lane=key[0],
        side="before",
        evidence=evidence(before[0]),
    )


def invalid(gate: GateRecord, problems: Sequence[Problem]) -> GateRecord:
    """Return the gate on two sides, INVALID where there are problems with comparing them."""
    if not problems or not gate.applicable:
        return gate
    text = f"cannot be compared: {problems[0].text}; to mend it: {problems[0].mend}. Not judged: {gate.text}"
    return msgspec.structs.replace(gate, verdict=INVALID, text=text)


def config_diff(before: Run, after: Run) -> list[ConfigChange]:
    """Return how the effective configurations differ: what each server states, its version, the replicas and the launch command."""
    left, right = before.record, after.record
    changes = []
    names = [name for name in QUANTITIES if name in left.config or name in right.config]
    names += sorted({*left.config, *right.config} - set(names))
    for name in names:
        old, new = (_shown(name, record) for record in (left, right))
        if old != new:
            changes.append(ConfigChange(name, old, new))
    facts: list[tuple[str, Any, Any]] = [
        ("engine", left.engine, right.engine),
        ("engine_version", left.engine_version, right.engine_version),
        ("model", left.model, right.model),
        ("replicas", len(left.endpoints), len(right.endpoints)),
        ("launch_command", _words(left), _words(right)),
    ]
    changes += [ConfigChange(name, str(old) or "not told", str(new) or "not told") for name, old, new in facts if old != new]
    return changes


def _shown(name: str, record: RunRecord) -> str:
    held = record.config.get(name)
    value: Value = held.to_value() if held is not None else Missing("not read")
    if isinstance(value, Missing):
        return "not told"
    return units.show(value.value, value.unit)


def _words(record: RunRecord) -> str:
    """Return the launch command without its port, which is another at each start."""
    words: list[str] = []
    skip = False
    for word in record.launch_command:
        if skip:
            skip = False
        elif word == "--port":
            skip = True
        elif not word.startswith("--port="):
            words.append(word)
    return " ".join(words)
