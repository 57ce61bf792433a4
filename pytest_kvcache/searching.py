"""``pytest-kvcache search``: the largest number of users, or of requests a second, at which a stop condition does not come true."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvcache.errors import UsageError

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis
    from pytest_kvcache.judge.search import Answer, Probe, Question
    from pytest_kvcache.quantities import Reading
    from pytest_kvcache.records import GateRecord
    from pytest_kvcache.session import Session

MOST_STEPS = 200
Say = Callable[[str], object]


@dataclass(frozen=True)
class Searched:
    """What a search found: the answer, its probes in order, how many requests fit by arithmetic, and how that compares."""

    answer: Answer
    probes: tuple[Probe, ...]
    computed: Reading | None
    computed_mean: Reading | None
    against: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``search`` takes beside the options of a server and of a load."""
    parser.add_argument("--profile", default="longctx", metavar="NAME", help="load profile, or path of a Locust file [default: longctx]")
    parser.add_argument(
        "--until", required=True, metavar="CONDITION", help='what must not come true, as in "preemptions > 0 or ttft.p95 > 2s"; docs/search.md'
    )
    parser.add_argument("--least", type=float, default=0.0, metavar="N", help="smallest level [default: 1 user, or a hundredth of --rate]")
    parser.add_argument("--most", type=float, default=0.0, metavar="N", help="largest level [default: 4,096 users, or a thousand times --rate]")
    parser.add_argument("--precision", type=float, default=0.1, metavar="SHARE", help="how close the answer must be [default: 0.1, or one user]")
    parser.add_argument("--probes", type=int, default=3, metavar="N", help="probes of the answer, all of which must hold [default: 3]")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="most probes in all [default: 24]")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="no probe starts after so long [default: 60]")


def question_of(arguments: argparse.Namespace, session: Session) -> tuple[Question, str]:
    """Return what is searched and its axis: ``rate`` where a rate was given, else ``users``. Raises UsageError for what cannot be meant."""
    from pytest_kvcache.judge.search import Question
    from pytest_kvcache.settings import MOST_USERS

    settings = session.settings
    if settings.stages or settings.trace:
        raise UsageError("a search sets the level itself", hint="leave --stages and --trace out; --users or --rate is where it starts")
    axis = "rate" if settings.rate else "users"
    start = settings.rate or float(settings.users or 1)
    least = arguments.least or (start / 100 if axis == "rate" else 1.0)
    most = arguments.most or (start * 1000 if axis == "rate" else 4096.0)
    if axis == "users":
        most = min(most, float(MOST_USERS))
    if not 0 < least <= start <= most < float("inf") or (axis == "users" and (least != int(least) or most != int(most))):
        raise UsageError(
            f"a search from {start:g} between {least:g} and {most:g} {axis} cannot be meant",
            hint="--least N, --users N or --rate R, --most N: in this order",
        )
    if not 0 < arguments.precision < 1 or not 1 <= arguments.probes <= 50 or not 1 <= arguments.steps <= MOST_STEPS or not arguments.minutes > 0:
        raise UsageError(
            "--precision, --probes, --steps or --minutes cannot be meant",
            hint=f"a share between 0 and 1; 1 to 50 probes of a level; 1 to {MOST_STEPS} in all; more than no minutes",
        )
    return Question(start, least, most, axis == "users", arguments.precision, arguments.probes, arguments.steps), axis


def level_text(level: float, axis: str) -> str:
    """Return a level as people read it: ``8 users``, ``2.5 requests/s``."""
    return f"{level:,.10g} {'user' if level == 1 else 'users'}" if axis == "users" else f"{level:,.4g} requests/s"


def search(
    session: Session, profile: str, until: str, question: Question, axis: str, *, minutes: float = 60.0, say: Say = lambda _: None
) -> Searched:
    """Probe until the largest level that holds is known, and return what was found. Each probe is a Run of the session.

    The level at which requests of the mean length fill the pool by arithmetic is probed early: it is where the answer is expected.
    Raises what measuring raises; what was measured is in the session's folder, and search.json tells it up to there.
    """
    from pytest_kvcache.conditions import parse
    from pytest_kvcache.judge.search import judge_probe, next_level
    from pytest_kvcache.planned import Planned

    condition = parse(until)
    probes: list[Probe] = []
    folders: list[str] = []
    analyses: list[Analysis] = []
    began = time.monotonic()
    stopped = ""
    while (level := next_level(question, probes)) is not None:
        if time.monotonic() - began > minutes * 60:
            stopped = f"its {minutes:g} minutes were over"
            break
        planned = Planned(profile, users=int(level)) if axis == "users" else Planned(profile, options={"rate": level})
        run = session.load(planned, number=len(probes), variant=level_text(level, axis))
        analysis = session.analysis(run)
        probe = judge_probe(level, condition, analysis, paced=axis == "rate")
        probes.append(probe)
        folders.append(run.folder.name)
        analyses.append(analysis)
        say(f"{level_text(level, axis)}: {'cannot be judged' if probe.broke is None else 'broke' if probe.broke else 'held'} ({probe.text[:200]})")
        if len(probes) == 1 and axis == "users":
            expected = _fitting(session, [analysis])[1]
            question = replace(question, hint=expected.number() if expected is not None else None)
        _keep(session, profile, until, axis, question, probes, folders, analyses, "it is not at its end")
    if not stopped and len(probes) >= question.steps:
        stopped = f"its {question.steps} probes were used up"
    return _keep(session, profile, until, axis, question, probes, folders, analyses, stopped)


def _keep(
    session: Session,
    profile: str,
    until: str,
    axis: str,
    question: Question,
    probes: list[Probe],
    folders: list[str],
    analyses: list[Analysis],
    stopped: str,
) -> Searched:
    """Write search.json as far as the search has come, and return what it says."""
    from pytest_kvcache.judge.search import against, conclude
    from pytest_kvcache.judge.search_file import SearchProbe, SearchRecord, write_search
    from pytest_kvcache.records import SCHEMA_VERSION

    answer = conclude(question, probes, "users" if axis == "users" else "requests/s", stopped)
    at_answer = [analysis for probe, analysis in zip(probes, analyses, strict=True) if probe.level == answer.holds] or analyses
    computed, mean = _fitting(session, at_answer)
    compared = against(answer, at_answer, axis, computed, mean)
    write_search(
        session.folder,
        SearchRecord(
            schema_version=SCHEMA_VERSION,
            profile=Path(profile).stem,
            axis=axis,
            until=until,
            verdict=answer.verdict,
            text=answer.text,
            probes=[SearchProbe(p.level, p.broke, p.text, folder) for p, folder in zip(probes, folders, strict=True)],
            holds=answer.holds,
            breaks=answer.breaks,
            computed=computed.number() if computed is not None else None,
            computed_mean=mean.number() if mean is not None else None,
            against=compared,
        ),
    )
    return Searched(answer, tuple(probes), computed, mean, compared)


def _fitting(session: Session, analyses: list[Analysis]) -> tuple[Reading | None, Reading | None]:
    """Return how many requests of the longest and of the mean length seen fit the pool at once; None where that cannot be told.

    With ``--model-config`` a request costs what ``plan`` computes, else what the server's own figures say.
    """
    from pytest_kvcache.judge.search import fitting

    config = session.settings.model_config
    cost = None
    if config:
        from functools import partial

        from pytest_kvcache.capacity.serving import cost_on

        cost = partial(cost_on, config=Path(config))
    return fitting(analyses, cost)


def gate_of(found: Searched, until: str, axis: str, session: Session) -> GateRecord:
    """Return the gate of a search: PASS where the largest load that holds is known, FAIL where not even the least holds."""
    from pytest_kvcache.records import GateRecord, ValueRecord

    answer = found.answer
    unit = "users" if axis == "users" else "requests/s"
    runs = [run for run, probe in zip(session.runs(), found.probes, strict=False) if probe.level == (answer.holds or answer.breaks)]
    return GateRecord(
        "search",
        axis,
        answer.verdict,
        f"{answer.text}. {found.against}".rstrip(". ") + ".",
        unit=unit,
        lane=session.runs()[-1].record.profile if session.runs() else "",
        value=ValueRecord(answer.holds, unit, f"search.json: {len(found.probes)} probes") if answer.holds is not None else None,
        bound_text=f"until {until}",
        low=answer.holds,
        high=answer.breaks,
        method="bracketing and bisection, the answer probed again; the interval is from the largest level that held to the smallest that broke",
        evidence=f"runs/{runs[-1].folder.name}" if runs else "",
    )


def run_search(arguments: argparse.Namespace, session: Session, say: Say) -> None:
    """Search, and record the gate in ``session``. Raises KvError."""
    from pytest_kvcache.conditions import parse
    from pytest_kvcache.load.runner import profile_path
    from pytest_kvcache.report.knee import shown

    parse(arguments.until)
    if "baseline" in arguments.until:
        raise UsageError("a search has no baseline", hint="name a number: ttft.p95 > 2s")
    question, axis = question_of(arguments, session)
    profile_path(arguments.profile)
    found = search(session, arguments.profile, arguments.until, question, axis, minutes=arguments.minutes, say=say)
    session.record(gate_of(found, arguments.until, axis, session))
    print(shown(session.folder, session.after_analyses()))
