"""A file of thresholds (``kvgate.toml``), and the gates that its lines make of measured windows.

::

    on_inconclusive = "fail"                       # or "pass"
    fail = ["usage.peak < 0.9", "rejections{lane=nearmax} == 0", "throughput >= baseline * 0.97"]
    warn = ["ttft.p95 <= 1.5s"]

    [profile.quality]
    fail = ["quality.pass_rate >= 0.98"]

Each line is a condition of conditions.py. A line outside of a profile is judged on every load that has what it names; a line that
nothing measured answers is INCONCLUSIVE. A threshold of level ``warn`` is judged and shown, and decides nothing.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvcache import units
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import INCONCLUSIVE, PASS, Condition, Limit, from_limits, joined_by_and, limits_in, parse
from pytest_kvcache.errors import UsageError
from pytest_kvcache.judge import gates, stats
from pytest_kvcache.judge.quality import quality_not_worse
from pytest_kvcache.judge.wording import beside, gate, missing
from pytest_kvcache.quantities import KNOWN, Missing, Reading
from pytest_kvcache.records import GateRecord, ValueRecord
from pytest_kvcache.userfiles import read_user_text

FILE_NAME = "kvgate.toml"
LEVELS = ("fail", "warn")
_KEYS = ("on_inconclusive", "profile", *LEVELS)
_LARGEST_BYTES = 1 << 20
_MOST_LINES = 1000


@dataclass(frozen=True, slots=True)
class Threshold:
    """One condition, its level (``fail`` or ``warn``), the profile that it is meant for (empty: every load that has what it names)."""

    condition: Condition
    level: str = "fail"
    profile: str = ""
    where: str = ""

    @property
    def limits(self) -> list[Limit]:
        """The single comparisons of the condition."""
        return list(limits_in(self.condition))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a file of thresholds says. ``on_inconclusive`` is ``fail``, ``pass`` or empty where the file does not say."""

    lines: tuple[Threshold, ...]
    on_inconclusive: str = ""
    path: str = ""

    @property
    def need_baseline(self) -> bool:
        """Whether a line compares with the baseline."""
        return any(limit.relative for line in self.lines for limit in line.limits)


def read_thresholds(path: Path) -> Thresholds:
    """Return the thresholds of a TOML file. Raises UsageError: where it is not there or no TOML, and which line or key cannot be meant."""
    try:
        raw = tomllib.loads(read_user_text(path, "the thresholds", most_bytes=_LARGEST_BYTES, hint=f"name a TOML file such as {FILE_NAME}"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"this is no TOML: {str(error)[:200]}", where=str(path), hint='a line is as in fail = ["usage.peak < 0.9"]') from None
    return _thresholds(raw, str(path))


def _thresholds(raw: Mapping[str, Any], path: str) -> Thresholds:
    _known_keys(raw, _KEYS, path)
    policy = raw.get("on_inconclusive", "")
    if policy not in {"", "fail", "pass"}:
        raise UsageError(f"on_inconclusive = {str(policy)[:60]!r} is not one of fail, pass", where=path)
    profiles = raw.get("profile", {})
    if not isinstance(profiles, dict):
        raise UsageError("profile is a table for each profile", where=path, hint='as in [profile.nearmax] and below it fail = ["rejections == 0"]')
    lines = list(_lines(raw, "", path))
    for name, table in profiles.items():
        if not isinstance(table, dict):
            raise UsageError(f"profile.{name} is no table", where=path, hint=f'as in [profile.{name}] and below it fail = ["rejections == 0"]')
        _known_keys(table, LEVELS, f"{path}: profile.{name}")
        lines += _lines(table, str(name), path)
    if not lines:
        raise UsageError("there is no threshold in it, so nothing could fail", where=path, hint='fail = ["usage.peak < 0.9"]')
    if len(lines) > _MOST_LINES:
        raise UsageError(f"{len(lines)} thresholds are too many", where=path, hint=f"at most {_MOST_LINES}")
    return Thresholds(tuple(lines), policy, path)


def _known_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise UsageError(f"unknown key {str(key)[:60]!r}", where=where, hint=f"known: {', '.join(known)}")


def _lines(table: Mapping[str, Any], profile: str, path: str) -> Iterator[Threshold]:
    for level in LEVELS:
        texts = table.get(level, [])
        if not isinstance(texts, list):
            raise UsageError(f"{level} is a list of conditions", where=path, hint=f'{level} = ["usage.peak < 0.9"]')
        for number, text in enumerate(texts, start=1):
            where = f"{path}: {f'profile.{profile}.' if profile else ''}{level}, line {number}"
            if not isinstance(text, str):
                raise UsageError(f"{str(text)[:60]!r} is no condition", where=where, hint="each is a text, as in usage.peak < 0.9")
            yield from _split(text, level, profile, where)


def _split(text: str, level: str, profile: str, where: str) -> Iterator[Threshold]:
    """Yield what a line says: what "and" joins must all hold, and as lines of their own each meets the load that has it."""
    try:
        condition = parse(text)
    except UsageError as error:
        raise UsageError(error.what, where=where, hint=error.hint) from None
    for part in joined_by_and(condition):
        yield Threshold(part, level, profile, where)


def of_texts(texts: Sequence[str], where: str) -> tuple[Threshold, ...]:
    """Return the thresholds of conditions that were given by hand, all of level ``fail``. Raises UsageError."""
    return tuple(threshold for text in texts for threshold in _split(text, "fail", "", where))


def of_limits(profile: str, limits: Mapping[str, object]) -> tuple[Threshold, ...]:
    """Return the thresholds of a mark, ``kv_profile("longctx", usage_peak=0.9)``. Raises UsageError."""
    return tuple(Threshold(limit, "fail", profile, f"kv_profile({profile!r})") for limit in from_limits(limits))


def judge_thresholds(thresholds: Sequence[Threshold], after: Sequence[Analysis], before: Sequence[Analysis] = ()) -> list[GateRecord]:
    """Return a gate for each threshold and load that it is meant for; INCONCLUSIVE where nothing that was measured answers it."""
    found: list[GateRecord] = []
    for threshold in thresholds:
        loads = [windows for windows in _by_load(after) if _meant(threshold, windows)]
        if len(loads) > 1:  # probes of single requests are no load: they answer where nothing else does
            loads = [windows for windows in loads if not _probe(windows[0])] or loads
        for windows in loads:
            found.append(_marked(_judge(threshold.condition, windows, _same_load(before, windows[0])), threshold))
        if not loads:
            found.append(_marked(_unanswered(threshold, after), threshold))
    return found


def _by_load(analyses: Sequence[Analysis]) -> list[list[Analysis]]:
    loads: dict[tuple[str, bool], list[Analysis]] = {}
    for analysis in analyses:
        loads.setdefault((analysis.run.record.profile, _probe(analysis)), []).append(analysis)
    return list(loads.values())


def _probe(analysis: Analysis) -> bool:
    return bool(analysis.run.record.options.get("requests"))


def _same_load(analyses: Sequence[Analysis], like: Analysis) -> list[Analysis]:
    key = like.run.record.profile, _probe(like)
    return [a for a in analyses if (a.run.record.profile, _probe(a)) == key]


def _meant(threshold: Threshold, windows: Sequence[Analysis]) -> bool:
    """Return whether a load has what the condition names: its lanes, quality items where it asks for them, a load where it asks for one."""
    if threshold.profile:
        return windows[0].run.record.profile == threshold.profile
    for limit in threshold.limits:
        if limit.name.startswith(("quality.", "agreement.")):
            if not any(isinstance(a.value(limit), Reading) for a in windows):
                return False
        elif limit.lane:
            if not any(limit.lane in a.lanes for a in windows):
                return False
        elif not any(a.facts.loaded for a in windows):
            return False
    return True


def _unanswered(threshold: Threshold, analyses: Sequence[Analysis]) -> GateRecord:
    there = ", ".join(dict.fromkeys(a.run.record.profile for a in analyses)) or "nothing"
    lanes = sorted({limit.lane for limit in threshold.limits if limit.lane})
    wanted = f"profile {threshold.profile}" if threshold.profile else f"lane {', '.join(lanes)}" if lanes else "what it names"
    reason = f"no Run answers it ({wanted}): measured were {there}"
    quantity = threshold.limits[0].key if isinstance(threshold.condition, Limit) else threshold.condition.text
    return GateRecord("threshold", quantity, INCONCLUSIVE, f"cannot judge: {reason}", bound_text=threshold.condition.text, lane=threshold.profile)


def _marked(judged: GateRecord, threshold: Threshold) -> GateRecord:
    return msgspec.structs.replace(judged, level="warn" if threshold.level == "warn" else "", rule=threshold.where)


def _judge(condition: Condition, windows: Sequence[Analysis], before: Sequence[Analysis]) -> GateRecord:
    if isinstance(condition, Limit) and condition.relative and before:
        if condition.name == "quality.pass_rate" and condition.relative == "+" and condition.op in {">", ">="} and condition.bound <= 0:
            judged = quality_not_worse(before, windows, -condition.bound)
            return msgspec.structs.replace(judged, name="threshold", bound_text=condition.text)
        if condition.op in {"<", "<=", ">", ">="}:
            return _against_baseline(condition, windows, before)
    judged = gates.threshold(windows, condition, before)
    return _second_look(judged, condition, windows)


_SECOND: dict[str, Callable[[Sequence[Analysis], float], GateRecord]] = {
    "usage.peak": gates.peak_usage,
    "free_blocks.min": gates.free_space,
    "free_tokens.min": gates.free_space,
}


def _second_look(judged: GateRecord, condition: Condition, windows: Sequence[Analysis]) -> GateRecord:
    """Return the gate, or what counters and our own log say against a level that was only polled: a peak between two polls is not seen."""
    if judged.verdict != PASS or not isinstance(condition, Limit) or condition.relative or condition.name not in _SECOND:
        return judged
    if condition.op not in ({"<", "<="} if condition.name == "usage.peak" else {">", ">="}):
        return judged
    found = _SECOND[condition.name](windows, condition.bound)
    if found.verdict == PASS or not found.applicable:
        return judged
    return msgspec.structs.replace(judged, verdict=found.verdict, text=found.text, beside=found.beside)


def _against_baseline(limit: Limit, after: Sequence[Analysis], before: Sequence[Analysis]) -> GateRecord:
    """Judge a value against the baseline with its noise: PASS where the interval of the difference lies within the bound, FAIL where beyond.

    Windows pair where both sides have the same numbers and workloads. Two windows a side are the fewest that show a spread.
    """
    unit = KNOWN[limit.name].unit
    sides: list[list[float]] = []
    for word, side in (("before", before), ("after", after)):
        values = [analysis.value(limit) for analysis in _in_order(side)]
        lacking = next((value for value in values if isinstance(value, Missing)), None)
        if lacking is not None:
            reason = lacking if lacking.cannot_happen else Missing(f"{word}: {lacking.reason}")
            return missing("threshold", limit.key, reason, [*before, *after], bound_text=limit.text)
        sides.append([value.number() for value in values if isinstance(value, Reading)])
    higher_is_worse = limit.op in {"<", "<="}
    sign = 1.0 if higher_is_worse else -1.0
    relative = limit.relative == "*"
    margin = sign * (limit.bound - 1) if relative else sign * limit.bound
    if relative and min(*sides[0], *sides[1]) <= 0:
        return gates.threshold(after, limit, before)  # a share of nothing is nothing: plain comparison of means
    paired = _paired(before, after)
    found = stats.not_worse(sides[0], sides[1], margin, lower_is_better=higher_is_worse, relative=relative, paired=paired)
    means = [math.fsum(side) / len(side) for side in sides]
    text = f"{limit.key} was {units.show(means[0], unit)} and is {units.show(means[1], unit)} (means of {len(sides[0])} and {len(sides[1])} windows)"
    amount = "ratio" if relative else unit
    direction = "higher" if higher_is_worse else "lower"
    if found.low is None or found.high is None:
        text = f"cannot tell: {text}: {found.why}"
    else:
        text += f": {_between(found.low, found.high, amount)} {direction} ({stats.CONFIDENCE * 100:.0f} % each way), asked for {limit.op} "
        text += limit.text.partition(f" {limit.op} ")[2]
    if found.verdict == INCONCLUSIVE:
        text += f"; about {found.needed} windows a side would decide it" if found.needed else "; more windows of this spread would hardly decide it"
    three = f"before: {beside(before[0])}; after: {beside(after[0])}" if "usage" in limit.name else ""
    return gate(
        "threshold",
        limit.key,
        found.verdict,
        text,
        [*before, *after],
        decisive=after[0],
        unit=amount,
        before=ValueRecord(means[0], unit),
        after=ValueRecord(means[1], unit),
        bound=margin,
        bound_text=limit.text,
        low=found.low,
        high=found.high,
        method="t interval of paired windows" if paired else "Welch's t interval over windows",
        beside=three,
        side="after",
    )


def _between(low: float, high: float, unit: str) -> str:
    return f"{units.show(low, unit)} to {units.show(high, unit)}"


def _in_order(side: Sequence[Analysis]) -> list[Analysis]:
    return sorted(side, key=lambda analysis: analysis.run.record.window)


def _paired(before: Sequence[Analysis], after: Sequence[Analysis]) -> bool:
    left, right = ([(a.run.record.window, a.run.record.workload) for a in _in_order(side)] for side in (before, after))
    return left == right and len({window for window, _ in left}) == len(left)
