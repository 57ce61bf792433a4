"""The gates of one configuration: each takes the windows of one profile and returns one judged record.

A gate over several windows holds for the worst of them. A value that is missing never passes; one that cannot happen on the
engine makes the gate not applicable, which is listed and counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pytest_kvcache import units
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, INVALID, NOT_APPLICABLE, PASS, Group, Limit, Lookup, evaluate
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.judge.evenness import balanced
from pytest_kvcache.judge.logged import logged_usage
from pytest_kvcache.judge.probes import near_max_served, over_limit_refused
from pytest_kvcache.judge.room import fits, fits_now
from pytest_kvcache.judge.stats import CONFIDENCE, proportion_lower, proportion_upper
from pytest_kvcache.judge.wording import MISSED, beside, failure_text, gate, missing, readings, show
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GateRecord

__all__ = [
    "FAIL", "INCONCLUSIVE", "INVALID", "NOT_APPLICABLE", "PASS", "balanced", "failure_text", "fits", "fits_now", "free_space", "near_max_served",
    "no_preemptions", "no_rejections", "over_limit_refused", "peak_usage", "quality", "returns_to_idle", "session_verdict", "threshold", "worst",
]  # fmt: skip

_ORDER = (FAIL, INVALID, INCONCLUSIVE, PASS)
_SURE = f"{CONFIDENCE * 100:.0f} %"


def worst(verdicts: Iterable[str]) -> str:
    """Return the verdict that decides: FAIL on sound evidence, else INVALID, else INCONCLUSIVE, else PASS; INCONCLUSIVE of none."""
    seen = set(verdicts)
    return next((verdict for verdict in _ORDER if verdict in seen), INCONCLUSIVE)


def session_verdict(gates: Sequence[GateRecord], deselected: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return a session's verdict and notes on it. Gates that do not apply, and warnings, do not count; with gates deselected it cannot be PASS."""
    counted = [judged for judged in gates if judged.applicable and judged.level != "warn"]
    verdict = worst(judged.verdict for judged in counted)
    notes = [] if counted else ["no gate was judged"]
    if deselected:
        notes.append(f"{len(deselected)} gate{'s were' if len(deselected) != 1 else ' was'} deselected, so not everything was judged")
        verdict = worst([verdict, INCONCLUSIVE])
    return verdict, notes


def total(analyses: Sequence[Analysis], name: str) -> Value:
    """Return the sum of a count over all windows; Missing where one lacks it."""
    found = readings(analyses, name)
    if isinstance(found, Missing):
        return found
    return Reading(sum(reading.number() for _, reading in found), found[0][1].unit, found[0][1].source)


def _proof_of_full(analyses: Sequence[Analysis]) -> str:
    """Return what proves that a pool was full, whatever was polled: preemptions, or errors that only a full pool gives; else empty."""
    value = total(analyses, "preemptions")
    if isinstance(value, Reading) and value.number():
        return f"{value.number():.0f} preemptions prove"
    failed = sum(analysis.facts.pool_full for analysis in analyses)
    return f"{failed} request{'s' if failed != 1 else ''} that failed for want of free space prove{'' if failed != 1 else 's'}" if failed else ""


def peak_usage(analyses: Sequence[Analysis], max: float) -> GateRecord:
    """Judge the peak KV usage of the fullest server or rank against ``max`` (a ratio).

    A polled peak is a lower bound. A preemption or an error of a full pool proves that it was full whatever was polled; where our own request log puts
    more tokens into the pool than was polled, and more than ``max``, the gate is INCONCLUSIVE.
    """
    name, quantity = "peak_usage", "usage.peak"
    found = readings(analyses, "usage.hottest")
    limit = f"at most {units.show(max, 'ratio')}"
    if isinstance(found, Missing):
        return missing(name, quantity, found, analyses, bound=max, bound_text=limit, beside=beside(analyses[0]))
    decisive, peak = sorted(found, key=lambda pair: pair[1].number())[-1]
    three = beside(decisive)
    text = f"peak usage {show(peak)}, {limit} ({three})"
    verdict = PASS if peak.number() <= max else FAIL
    proof = _proof_of_full(analyses)
    if verdict == PASS and proof and max < 1:
        verdict = FAIL
        text = f"polled peak usage {show(peak)}, {limit}; but {proof} that the pool was full ({three})"
    elif verdict == PASS and (most := _most_logged(analyses)) is not None and most[0] > max:
        verdict, (share, decisive) = INCONCLUSIVE, most
        peak, three = _of(decisive, found), beside(decisive)
        log = units.show(share, "ratio")
        text = f"polled peak usage {show(peak)}, {limit}; but our request log puts {log} of the pool in use: sample faster ({three})"
    return gate(
        name, quantity, verdict, text, analyses, decisive=decisive, value=peak, bound=max, bound_text=limit, beside=three, fails_despite=MISSED
    )


def _most_logged(analyses: Sequence[Analysis]) -> tuple[float, Analysis] | None:
    """Return the highest share of the pool that our own log proves, and the window of it; None where it proves nothing in any."""
    known = [(share, analysis) for analysis in analyses if (share := logged_usage(analysis)) is not None]
    return max(known, key=lambda pair: pair[0], default=None)


def _least_logged(analyses: Sequence[Analysis], unit: str) -> tuple[Reading, Analysis] | None:
    """Return the most free space that our own log leaves in the fullest window, and that window; None where it proves nothing."""
    most = _most_logged(analyses)
    pool = most[1].values.get("usable_blocks" if unit == "blocks" else "pool_tokens") if most is not None else None
    if most is None or not isinstance(pool, Reading):
        return None
    return Reading(max(math.ceil(pool.number() * (1 - most[0])), 0), unit, "pool less the payload of our own request log"), most[1]


def _of(window: Analysis, found: Sequence[tuple[Analysis, Reading]]) -> Reading:
    """Return the reading of one window."""
    return next(reading for analysis, reading in found if analysis is window)


def free_space(analyses: Sequence[Analysis], min: float) -> GateRecord:
    """Judge the fewest free blocks (tokens, where the engine counts tokens) of any server against ``min``.

    The fewest polled is an upper bound. A preemption or an error of a full pool proves that none was free; where our own request log
    leaves less than was polled, and less than ``min``, the gate is INCONCLUSIVE.
    """
    name = "free_space"
    by_unit = {unit: readings(analyses, f"free_{unit}.tightest") for unit in ("blocks", "tokens")}
    unit = next((unit for unit, found in by_unit.items() if not isinstance(found, Missing)), "")
    # told in neither unit: the reason that counts is that of the unit which the engine has
    unit = unit or next((unit for unit, found in by_unit.items() if isinstance(found, Missing) and not found.cannot_happen), "blocks")
    found, quantity = by_unit[unit], f"free_{unit}.min"
    limit = f"at least {min:,.0f}"
    if isinstance(found, Missing):
        return missing(name, quantity, found, analyses, bound=min, bound_text=limit)
    decisive, low = sorted(found, key=lambda pair: pair[1].number())[0]
    verdict = PASS if low.number() >= min else FAIL
    text = f"fewest free {show(low)}, {limit} ({beside(decisive)})"
    proof = _proof_of_full(analyses)
    if verdict == PASS and proof and min > 0:
        verdict, text = FAIL, f"polled fewest free {show(low)}, {limit}; but {proof} that none was free ({beside(decisive)})"
    elif verdict == PASS and (least := _least_logged(analyses, unit)) is not None and least[0].number() < min:
        verdict, (left, decisive) = INCONCLUSIVE, least
        low = _of(decisive, found)
        text = f"polled fewest free {show(low)}, {limit}; but our request log leaves {show(left)}: sample faster ({beside(decisive)})"
    fields: dict[str, Any] = {"bound": min, "bound_text": f"{limit} {unit}", "beside": beside(decisive), "fails_despite": MISSED}
    return gate(name, quantity, verdict, text, analyses, decisive=decisive, value=low, **fields)


def no_rejections(analyses: Sequence[Analysis], max: int = 0) -> GateRecord:
    """Judge the requests that were refused or failed, by the client's log and by the engine's own counter, against ``max``."""
    name, quantity = "no_rejections", "rejections"
    value, sent = total(analyses, "rejections"), total(analyses, "requests.sent")
    limit = f"at most {max}"
    if isinstance(value, Missing) or isinstance(sent, Missing):
        lacking = value if isinstance(value, Missing) else sent
        assert isinstance(lacking, Missing)
        return missing(name, quantity, lacking, analyses, bound=float(max), bound_text=limit)
    count, of = int(value.number()), int(sent.number())
    engine = total(analyses, "rejections_engine")
    refused = int(engine.number()) if isinstance(engine, Reading) else 0
    if not of:
        return missing(name, quantity, Missing("no request was sent"), analyses, bound=float(max), bound_text=limit)
    text = f"{count} of {of} requests rejected, {limit}"
    if count:
        text += f": {_classes(analyses)}"
    else:
        text += f"; the true share is below {units.show(proportion_upper(0, of), 'ratio')} ({_SURE})"
    if refused > count:
        text += f"; the engine itself counts {refused} refused"
    verdict = PASS if count <= max and refused <= max else FAIL
    decisive = sorted(analyses, key=lambda a: sum(n for lanes in a.rejections.values() for n in lanes.values()))[-1]
    method = "Clopper-Pearson upper bound" if not count else ""
    fields: dict[str, Any] = {"bound": float(max), "bound_text": limit, "method": method, "fails_despite": MISSED}
    return gate(name, quantity, verdict, text, analyses, decisive=decisive, value=value, **fields)


def _classes(analyses: Sequence[Analysis]) -> str:
    counts: dict[str, int] = {}
    errors: dict[str, str] = {}
    for analysis in analyses:
        for kind, lanes in analysis.rejections.items():
            counts[kind] = counts.get(kind, 0) + sum(lanes.values())
            errors.setdefault(kind, analysis.errors.get(kind, ""))
    kinds = sorted(counts, key=lambda kind: -counts[kind])
    first = next((errors[kind] for kind in kinds if errors[kind]), "")
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds) + (f" (for one: {first[:200]})" if first else "")


def no_preemptions(analyses: Sequence[Analysis], max: int = 0) -> GateRecord:
    """Judge the growth of the engine's preemption counter against ``max``. Not applicable to an engine that never preempts."""
    name, quantity = "no_preemptions", "preemptions"
    value = total(analyses, "preemptions")
    limit = f"at most {max}"
    if isinstance(value, Missing):
        return missing(name, quantity, value, analyses, bound=float(max), bound_text=limit)
    sent = total(analyses, "requests.sent")
    over = f" over {sent.number():.0f} requests" if isinstance(sent, Reading) else ""
    verdict = PASS if value.number() <= max else FAIL
    text = f"{value.number():.0f} preemptions{over}, {limit}"
    return gate(name, quantity, verdict, text, analyses, value=value, bound=float(max), bound_text=limit, fails_despite=MISSED)


def returns_to_idle(analyses: Sequence[Analysis]) -> GateRecord:
    """Judge that after the load nothing ran or waited and no more KV was held than before it."""
    name, quantity = "returns_to_idle", "idle.usage"
    bound = "nothing runs or waits, and no more is held than before the load"
    for analysis in analyses:
        left: list[str] = []
        held = next((f"used_{unit}" for unit in ("blocks", "tokens") if isinstance(analysis.values.get(f"idle.used_{unit}"), Reading)), "usage")
        shown = analysis.values.get(f"idle.{held}", Missing("the server was not read after the load"))
        for part in ("running", "waiting", *(() if _keeps_its_cache(analysis) else (held,))):
            value = analysis.values.get(f"idle.{part}", Missing("the server was not read after the load"))
            if isinstance(value, Missing):
                if value.cannot_happen:
                    continue
                return missing(name, f"idle.{part}", value, analyses, decisive=analysis, bound_text=bound)
            idle = _held_before(analysis, part) if part == held else 0.0
            if value.number() > idle:
                left.append(f"{part.replace('_', ' ')} {show(value)}" + (f" (before the load {idle:g})" if part == held else ""))
        if left:
            text = f"after the load there are still {', '.join(left)}"
            return gate(name, f"idle.{held}", FAIL, text, analyses, decisive=analysis, value=shown, bound_text=bound)
    last = analyses[-1]
    at_end = next((v for n in ("idle.used_blocks", "idle.used_tokens", "idle.usage") if isinstance(v := last.values.get(n), Reading)), None)
    text = f"nothing ran or waited after the load; {show(at_end) if at_end is not None else 'nothing'} held"
    if any(_keeps_its_cache(analysis) for analysis in analyses):
        text += " (this engine counts idle cached KV as used, so what is held is no sign of a leak and was not judged)"
    return gate(name, quantity, PASS, text, analyses, decisive=last, value=at_end, bound_text=bound)


def _keeps_its_cache(analysis: Analysis) -> bool:
    """Say whether the engine counts cached KV that nobody references as used: its usage then stays up when all is well."""
    dialect = DIALECTS.get(analysis.run.record.engine)
    return dialect is not None and dialect.idle_cached_is_free is False


def _held_before(analysis: Analysis, part: str) -> float:
    values = [snapshot.value(part) for snapshot in analysis.run.record.before]
    numbers = [value.number() for value in values if isinstance(value, Reading)]
    return (max(numbers) if part == "usage" else sum(numbers)) if numbers else 0.0


def quality(analyses: Sequence[Analysis], min: float) -> GateRecord:
    """Judge the pass rate of the quality items that were asked against ``min``; items without an answer did not pass."""
    name, quantity = "quality", "quality.pass_rate"
    limit = f"at least {units.show(min, 'ratio')}"
    asked = [analysis for analysis in analyses if not isinstance(analysis.quality, Missing)]
    summaries = [analysis.quality for analysis in asked if not isinstance(analysis.quality, Missing)]
    items, passed = sum(s.items for s in summaries), sum(s.passed for s in summaries)
    if not items:
        return missing(name, quantity, Missing("no quality item was asked"), analyses, bound=min, bound_text=limit)
    errors = sum(s.errors for s in summaries)
    by_length: dict[int, list[int]] = {}
    for summary in summaries:
        for length, (good, of) in summary.by_length.items():
            pair = by_length.setdefault(length, [0, 0])
            pair[0] += good
            pair[1] += of
    broke = [f"{good} of {of} at {length:,} tokens" for length, (good, of) in sorted(by_length.items()) if good < of]
    text = f"{passed} of {items} items passed, {units.show(passed / items, 'ratio')}, {limit} (of more such items at least "
    text += f"{units.show(proportion_lower(passed, items), 'ratio')}, {_SURE})"
    text += f"; by length: {', '.join(broke[:6])}" if broke else ""
    text += f"; {errors} got no answer ({_first_error(asked)})" if errors else ""
    value = Reading(passed / items, "ratio", f"quality.jsonl: {passed} of {items}")
    verdict = PASS if passed / items >= min else FAIL
    low = proportion_lower(passed, items)
    return gate(
        name, quantity, verdict, text, asked, value=value, bound=min, bound_text=limit, low=low, method="Clopper-Pearson lower bound beside it"
    )


def _first_error(analyses: Sequence[Analysis]) -> str:
    return next((row.error[:200] for analysis in analyses for row in analysis.run.quality() if row.error), "")


def threshold(analyses: Sequence[Analysis], condition: Limit | Group, before: Sequence[Analysis] = ()) -> GateRecord:
    """Judge a condition of the grammar on every window, against the mean of the windows before where it names the baseline."""
    baseline: Lookup | None = (lambda limit: _mean(before, limit)) if before else None
    outcomes = [(analysis, evaluate(condition, analysis.value, baseline)) for analysis in analyses]
    counted = [pair for pair in outcomes if pair[1].verdict != NOT_APPLICABLE]
    if not counted:
        return gate("threshold", condition.text, NOT_APPLICABLE, f"does not apply: {outcomes[0][1].text}", analyses, bound_text=condition.text)
    verdict = worst(outcome.verdict for _, outcome in counted)
    decisive, outcome = next(pair for pair in counted if pair[1].verdict == verdict)
    quantity = condition.key if isinstance(condition, Limit) else condition.text
    three = beside(decisive) if "usage" in condition.text else ""
    text = f"{outcome.text} ({three})" if three else outcome.text
    value = decisive.value(condition) if isinstance(condition, Limit) else None
    fields: dict[str, Any] = {
        "bound": outcome.bound,
        "bound_text": condition.text,
        "beside": three,
        "fails_despite": MISSED if _seen(condition) else (),
    }
    return gate("threshold", quantity, verdict, text, analyses, decisive=decisive, value=value, **fields)


def _seen(condition: Limit | Group) -> bool:
    """Return whether more evidence could only make a FAIL of the condition worse: peaks and counts that may not be higher, least values not lower."""
    if not isinstance(condition, Limit) or condition.relative:
        return False
    if condition.op in {"<", "<="} or (condition.op == "==" and condition.bound == 0):
        return condition.name.endswith(".peak") or condition.name in {"rejections", "preemptions"}
    return condition.op in {">", ">="} and condition.name.endswith(".min")


def _mean(analyses: Sequence[Analysis], limit: Limit) -> Value:
    values = [analysis.value(limit) for analysis in analyses]
    lacking = [value for value in values if isinstance(value, Missing)]
    if lacking:
        return lacking[0]
    numbers = [value.number() for value in values if isinstance(value, Reading)]
    first = values[0]
    assert isinstance(first, Reading)
    return Reading(sum(numbers) / len(numbers), first.unit, f"mean of {len(numbers)} windows")
