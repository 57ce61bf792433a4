"""The largest level of a load that holds: which level is probed next, and what the probes say together.

A level is a number of users, or of requests a second. A probe of it holds or breaks, as a stop condition says. Pure: no clock, no
server, and the same probes always give the same next level, so that a search can be followed on paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_kvcache import units
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, INVALID, NOT_APPLICABLE, PASS, Condition, evaluate
from pytest_kvcache.judge import stats
from pytest_kvcache.judge.room import Cost, fits_now
from pytest_kvcache.judge.wording import MISSED
from pytest_kvcache.quantities import Reading

GROWTH = 2.0
WITNESS = 1.5
_CONTRADICTS = 2
"""So many probes of a level are needed on each side before levels are said to contradict each other."""
_THIN = ("too_few",)
_SATURATED = ("capped", "under_load")


@dataclass(frozen=True, slots=True)
class Probe:
    """One window at one level. ``broke`` says whether the stop condition came true; None where that cannot be judged.

    ``text`` is what the condition says with its numbers, or why it cannot be judged. ``unsound`` says that the evidence broke, ``missing`` that
    a quantity of the condition is not told, so that asking again is of no use. ``thin`` names a weakness that a verdict may not rest on.
    """

    level: float
    broke: bool | None
    text: str = ""
    unsound: bool = False
    missing: bool = False
    thin: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """What is searched: from ``start``, between ``least`` and ``most``, whole numbers or not.

    The answer is close enough when the smallest level that breaks is at most ``precision`` (a share) above the largest that holds, or one above
    it. ``repeats`` probes of the answer must hold, ``steps`` is the most probes in all, ``hint`` a level where the answer is expected.
    """

    start: float = 1.0
    least: float = 1.0
    most: float = 10_000.0
    whole: bool = True
    precision: float = 0.1
    repeats: int = 3
    steps: int = 24
    hint: float | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """The probes of one level: how many held and broke, and the interval of the share that breaks (each bound at 95 %)."""

    level: float
    held: int
    broke: int

    @property
    def low(self) -> float:
        """The lower bound of the share of such probes that break."""
        return stats.proportion_lower(self.broke, self.held + self.broke)

    @property
    def high(self) -> float:
        """The upper bound of the share of such probes that break."""
        return stats.proportion_upper(self.broke, self.held + self.broke)

    @property
    def holds(self) -> bool:
        """Whether every probe that could be judged held."""
        return self.held > 0 and not self.broke

    @property
    def breaks(self) -> bool:
        """Whether at least half of its probes broke."""
        return self.broke > 0 and self.broke >= self.held


@dataclass(frozen=True, slots=True)
class Answer:
    """What the probes say. ``holds`` is the largest level that held in every probe, ``breaks`` the smallest that mostly broke, each None where
    there is none. ``verdict`` is PASS (both are known as closely as was asked for, or ``most`` holds), FAIL (not even ``least`` holds),
    INCONCLUSIVE or INVALID; ``text`` says it in words.
    """

    verdict: str
    holds: float | None
    breaks: float | None
    levels: tuple[Level, ...]
    text: str


def levels_of(probes: Sequence[Probe]) -> list[Level]:
    """Return the probed levels in ascending order."""
    found = []
    for level in sorted({probe.level for probe in probes}):
        here = [probe.broke for probe in probes if probe.level == level]
        found.append(Level(level, here.count(False), here.count(True)))
    return found


def judge_probe(level: float, condition: Condition, analysis: Analysis, *, paced: bool) -> Probe:
    """Return what one window says of its level by the stop condition. ``paced`` says that the level is a rate.

    Terms that cannot apply to the engine are left out; what is Missing cannot be judged. A window whose evidence is unsound cannot be judged either,
    save that what was seen to break broke, however much else was missed; and a rate that the server does not keep up with does not hold.
    """
    outcome = evaluate(condition, analysis.value)
    if outcome.verdict in {INCONCLUSIVE, NOT_APPLICABLE}:
        why = "no part of the condition can happen on this engine" if outcome.verdict == NOT_APPLICABLE else "what the condition names is not told"
        return Probe(level, None, f"{why}: {outcome.text}", missing=True)
    broke, said = outcome.verdict == PASS, outcome.text.replace(", asked for ", ", stops at ")
    problems = [problem for problem in analysis.problems if problem.rule not in ((*MISSED, *_SATURATED) if broke else _THIN)]
    if not broke and paced and any(problem.rule == "capped" for problem in problems):
        return Probe(level, True, f"the server does not keep up: {problems[0].text}")
    if problems:
        return Probe(level, None, f"{problems[0].text}; to mend it: {problems[0].mend}", unsound=True)
    thin = next((f"{problem.text}; to mend it: {problem.mend}" for problem in analysis.problems if problem.rule in _THIN), "")
    return Probe(level, broke, said, thin="" if broke else thin)


@dataclass(frozen=True, slots=True)
class _Bracket:
    low: Level | None
    """The largest level below which, and at which, every probe held."""
    edge: Level | None
    """The smallest level of which a probe broke."""
    high: Level | None
    """The smallest level that mostly broke."""
    above: tuple[Level, ...]
    """Levels above ``high``."""


def _bracket(levels: Sequence[Level]) -> _Bracket:
    edge = next((level for level in levels if level.broke), None)
    low = max((level for level in levels if level.holds and (edge is None or level.level < edge.level)), key=lambda one: one.level, default=None)
    high = next((level for level in levels if level.breaks), None)
    return _Bracket(low, edge, high, tuple(level for level in levels if high is not None and level.level > high.level))


def next_level(question: Question, probes: Sequence[Probe]) -> float | None:
    """Return the level to probe next; None where the search is over: answered, out of steps, or stuck on what cannot be judged."""
    if len(probes) >= question.steps or (probes and _stuck(probes)):
        return None
    if not probes:
        return _fit(question, question.start)
    if probes[-1].broke is None:
        return probes[-1].level
    levels = levels_of(probes)
    at = _bracket(levels)
    if at.high is None:
        return _upwards(question, levels)
    if at.low is None:
        return _downwards(question, levels)
    assert at.edge is not None
    if not _close(question, at.low.level, at.edge.level):
        return _middle(question, at.low.level, at.edge.level)
    return _confirm(question, at)


def _stuck(probes: Sequence[Probe]) -> bool:
    """Return whether asking again is of no use: what the condition names is not told, or the same level could not be judged twice running."""
    last = probes[-1]
    return last.broke is None and (last.missing or (len(probes) > 1 and probes[-2].broke is None and probes[-2].level == last.level))


def _fit(question: Question, level: float) -> float:
    """Return a level between the least and the most, whole where levels are."""
    level = min(max(level, question.least), question.most)
    return float(round(level)) if question.whole else float(f"{level:.3g}")


def _upwards(question: Question, levels: Sequence[Level]) -> float | None:
    top = levels[-1]
    if top.level >= question.most:
        return top.level if top.held < question.repeats and top.holds else None
    if len(levels) == 1 and question.hint is not None and question.hint > top.level:
        return _fit(question, question.hint)
    return _fit(question, top.level * GROWTH)


def _downwards(question: Question, levels: Sequence[Level]) -> float | None:
    bottom = levels[0]
    if bottom.level <= question.least:
        return bottom.level if bottom.broke + bottom.held < question.repeats else None
    if len(levels) == 1 and question.hint is not None and question.hint < bottom.level:
        return _fit(question, question.hint)
    return _fit(question, bottom.level / GROWTH)


def _close(question: Question, low: float, high: float) -> bool:
    return high <= low * (1 + question.precision) * (1 + 1e-9) or (question.whole and high - low <= 1)


def _middle(question: Question, low: float, high: float) -> float:
    # where the answer was expected is closer to it than the start was
    expected = question.hint is not None and high == _fit(question, question.hint) and high / GROWTH > low
    middle = high / GROWTH if expected else math.sqrt(low * high)
    if question.whole:
        return float(min(max(round(middle), low + 1), high - 1))
    short = float(f"{middle:.3g}")
    return short if low < short < high else middle


def _confirm(question: Question, at: _Bracket) -> float | None:
    """Return the level whose probes are still too few: the answer, the level that breaks, and one above it that must break as well."""
    assert at.low is not None
    assert at.high is not None
    if at.low.held < question.repeats:
        return at.low.level
    if at.high.broke < _CONTRADICTS and at.high.broke + at.high.held < question.repeats:
        return at.high.level
    beyond = _fit(question, max(at.high.level * WITNESS, at.high.level + 1 if question.whole else 0.0))
    if at.high.level < question.most and question.repeats > 1 and not any(level.level >= beyond for level in at.above):
        return beyond if beyond > at.high.level else None
    return next((level.level for level in at.above if level.holds and level.held < _CONTRADICTS), None)


def conclude(question: Question, probes: Sequence[Probe], noun: str, stopped: str = "") -> Answer:
    """Return what the probes say together. ``noun`` names what is counted (``users``); ``stopped`` says what ended the search early."""
    levels = levels_of(probes)
    at = _bracket(levels)

    def shown(level: float) -> str:
        return f"{level:,.10g} {noun}"

    def answer(verdict: str, text: str) -> Answer:
        return Answer(verdict, at.low.level if at.low else None, at.high.level if at.high else None, tuple(levels), text)

    if not probes:
        return answer(INCONCLUSIVE, f"nothing was probed{f': {stopped}' if stopped else ''}")
    if probes[-1].broke is None and _stuck(probes):
        verdict = INVALID if probes[-1].unsound else INCONCLUSIVE
        return answer(verdict, f"at {shown(probes[-1].level)} it cannot be judged: {probes[-1].text}")
    if (fault := _not_monotone(levels)) is not None:
        low, high = fault
        return answer(
            INCONCLUSIVE,
            f"the answer is not monotone: at {shown(low.level)} {_counted(low, 'broke')}, and at {shown(high.level)} {_counted(high, 'held')}; "
            "longer windows or more probes of each level would tell noise from a server that does better under more load",
        )
    if at.low is None:
        worst = levels[0]
        if worst.level <= question.least and worst.broke + worst.held >= question.repeats:
            return answer(FAIL, f"not even {shown(worst.level)} hold: {_counted(worst, 'broke')} ({_last(probes, worst.level, broke=True)})")
        return answer(INCONCLUSIVE, f"no level held, and the search ended at {shown(worst.level)}{f': {stopped}' if stopped else ''}")
    if thin := next((probe.thin for probe in probes if probe.level == at.low.level and probe.thin), ""):
        return answer(INVALID, f"{shown(at.low.level)} held, and the evidence is thin: {thin}")
    share = f"{_counted(at.low, 'held')}: of such windows fewer than {units.show(at.low.high, 'ratio')} break, {stats.CONFIDENCE * 100:.0f} %"
    if at.high is None:
        if at.low.level >= question.most and at.low.held >= question.repeats:
            return answer(PASS, f"{shown(at.low.level)} hold, the most that was to be tried ({share}); the knee lies above")
        return answer(INCONCLUSIVE, f"at least {shown(at.low.level)} hold ({share}); what breaks was not found{f': {stopped}' if stopped else ''}")
    between = "" if at.edge is at.high or at.edge is None else f"; at {shown(at.edge.level)} {_counted(at.edge, 'broke')}"
    broke = f"at {shown(at.high.level)} {_counted(at.high, 'broke')} ({_last(probes, at.high.level, broke=True)})"
    text = f"{shown(at.low.level)} hold ({share}); {broke}{between}"
    unsure = _unsure(question, at)
    if unsure:
        return answer(
            INCONCLUSIVE,
            f"the knee lies between {shown(at.low.level)} and {shown(at.high.level)}, {unsure}{f': {stopped}' if stopped else ''}: {text}",
        )
    return answer(PASS, text)


def _unsure(question: Question, at: _Bracket) -> str:
    """Return why the bracket is no answer yet, "" where it is one."""
    assert at.low is not None
    assert at.edge is not None
    assert at.high is not None
    if not _close(question, at.low.level, at.edge.level):
        return "not as closely as was asked for"
    if at.low.held < question.repeats:
        return f"and the lower was probed {at.low.held} of {question.repeats} times"
    if at.high.broke < _CONTRADICTS and at.high.broke + at.high.held < question.repeats:
        return "and the upper was probed once"
    return ""


def _not_monotone(levels: Sequence[Level]) -> tuple[Level, Level] | None:
    """Return a level that mostly broke, or broke at times, below one that always held, where both were probed often enough to say so."""
    for index, low in enumerate(levels):
        enough = low.broke + low.held >= _CONTRADICTS
        for high in levels[index + 1 :]:
            if low.broke and enough and high.holds and high.held >= (_CONTRADICTS if low.breaks else 1):
                return low, high
    return None


def _counted(level: Level, word: str) -> str:
    count, of = (level.broke if word == "broke" else level.held), level.broke + level.held
    return f"{count} of {of} probes {word}" if of != 1 else f"the one probe {word}"


def _last(probes: Sequence[Probe], level: float, *, broke: bool) -> str:
    return next((probe.text for probe in reversed(probes) if probe.level == level and probe.broke is broke), "")


def fitting(analyses: Sequence[Analysis], cost: Cost | None = None) -> tuple[Reading | None, Reading | None]:
    """Return how many requests of the longest and of the mean length of these windows fit the server at once, by its own figures: pool and seats.

    None where that cannot be told. ``cost`` gives the blocks of a request by the model's configuration, as ``plan`` computes them.
    """
    return _fit_of(analyses, "length.max", cost), _fit_of(analyses, "length.mean", cost)


def _fit_of(analyses: Sequence[Analysis], name: str, cost: Cost | None) -> Reading | None:
    lengths = [value.number() for analysis in analyses if isinstance(value := analysis.values.get(name), Reading)]
    if not lengths:
        return None
    length = max(1, math.ceil(max(lengths)))
    judged = fits_now(analyses[-1].run.record.before, concurrency=1, length=length, cost=cost)
    value = judged.value.to_value() if judged.value is not None else None
    return value if isinstance(value, Reading) and value.unit == "requests" else None


def against(answer: Answer, analyses: Sequence[Analysis], axis: str, computed: Reading | None, mean: Reading | None) -> str:
    """Return how the largest load that held compares with what fits by arithmetic, "" where nothing held or nothing can be computed."""
    if answer.holds is None or computed is None or not analyses:
        return ""
    lengths = [analyses[-1].values.get(name) for name in ("length.max", "length.mean")]
    longest, usual = (f"{value.number():,.0f} tokens" if isinstance(value, Reading) else "unknown length" for value in lengths)
    text = f"By arithmetic {computed.number():,.0f} requests of {longest}, the longest sent, fit at once ({computed.source})"
    if mean is not None and mean.number() != computed.number():
        text += f", and {mean.number():,.0f} of {usual}, their mean"
    at_once, how = answer.holds, f"{answer.holds:,.10g} users"
    if axis != "users":
        running = [value.number() for analysis in analyses if isinstance(value := analysis.values.get("running.mean"), Reading)]
        if not running:
            return f"{text}."
        at_once = sum(running) / len(running)
        how = f"{answer.holds:,.4g} requests/s kept {at_once:,.1f} requests running on average, which"
    said = f"{how} held, which is" if axis == "users" else f"{how} is"
    if at_once < 0.9 * computed.number():
        bursts = "" if axis == "users" else ", or arrivals came in bursts"
        return f"{text}; {said} less: something else than room for requests broke first{bursts}."
    if at_once > 1.1 * max(computed.number(), mean.number() if mean is not None else 0.0):
        return f"{text}; {said} more: requests are not all at their full length at once, or wait without breaking the condition."
    return f"{text}; {said} as computed."
