"""``pytest-kvcache search``: the largest number of users, or of requests a second, at which a stop condition does not come true."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvcache.errors import UsageError

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis
    from pytest_kvcache.conditions import Condition
    from pytest_kvcache.judge.search import Answer, Probe, Question
    from pytest_kvcache.judge.search_file import SearchRecord
    from pytest_kvcache.quantities import Reading
    from pytest_kvcache.records import GateRecord
    from pytest_kvcache.runfolder import Run
    from pytest_kvcache.session import Session

MOST_STEPS = 200
UNFINISHED = "it is not at its end"
# What shapes the windows of a search: those of both halves of a broken one must be alike.
_MEASURING = (
    "endpoint", "launch", "model", "engine", "engine_from", "api", "header", "extra_body", "gpus", "metrics_url", "prometheus", "prometheus_selector", "users",
    "load_processes", "duration_s", "output_tokens", "seed", "rate", "arrivals", "max_in_flight", "content", "load_option", "reset_cache", "sample_hz",
    "request_timeout_s", "model_config",
)  # fmt: skip
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
    parser.add_argument("--resume", metavar="FOLDER", help="session folder of a search that was broken off: go on from its finished probes")


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


@dataclass
class _Course:
    """A search on its way: what is searched, and the windows measured so far, those of an earlier half first."""

    session: Session
    profile: str
    until: str
    condition: Condition
    question: Question
    axis: str
    design: Mapping[str, Any]
    resumed_wall_s: list[float] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    analyses: list[Analysis] = field(default_factory=list)

    def add(self, level: float, run: Run, analysis: Analysis) -> Probe:
        """Judge a window, and return what it says of its level."""
        from pytest_kvcache.judge.search import Probe, judge_probe
        from pytest_kvcache.judge.validity import check_side

        probe = judge_probe(level, self.condition, analysis, paced=self.axis == "rate")
        if self.analyses and (mixed := check_side([self.analyses[0], analysis])):
            probe = Probe(level, None, f"{mixed[0].text}; to mend it: {mixed[0].mend}", unsound=True)
        self.probes.append(probe)
        self.folders.append(run.folder.name)
        self.analyses.append(analysis)
        if len(self.probes) == 1 and self.axis == "users":
            expected = _fitting(self.session, [analysis])[1]
            self.question = replace(self.question, hint=expected.number() if expected is not None else None)
        return probe

    def take_up(self, record: SearchRecord) -> None:
        """Take up the finished windows of an earlier half; what is no longer wanted of its folder is set aside. Raises CannotJudge, CannotWrite.

        Windows at its end that were unsound are measured again: what broke them may be mended.
        """
        from pytest_kvcache.analysis.timeline import analyse
        from pytest_kvcache.runfolder import read_run, set_aside

        folder = self.session.folder
        for probe in record.probes:
            run = read_run(folder / "runs" / Path(probe.folder).name)
            self.add(probe.level, run, analyse(run))  # not kept by the session: what is set aside leaves its name to another window
        while self.probes and self.probes[-1].unsound:
            for held in (self.probes, self.folders, self.analyses):
                held.pop()
        set_aside(folder, self.folders)
        self.resumed_wall_s = [*record.resumed_wall_s, time.time()]
        if self.folders:
            self.session.read_folder()

    def keep(self, stopped: str) -> Searched:
        """Write search.json as far as the search has come, and return what it says."""
        from pytest_kvcache.judge.search import against, conclude
        from pytest_kvcache.judge.search_file import SearchProbe, SearchRecord, write_search
        from pytest_kvcache.records import SCHEMA_VERSION

        probes, analyses = self.probes, self.analyses
        answer = conclude(self.question, probes, "users" if self.axis == "users" else "requests/s", stopped)
        at_answer = [analysis for probe, analysis in zip(probes, analyses, strict=True) if probe.level == answer.holds] or analyses
        computed, mean = _fitting(self.session, at_answer)
        compared = against(answer, at_answer, self.axis, computed, mean)
        write_search(
            self.session.folder,
            SearchRecord(
                schema_version=SCHEMA_VERSION,
                profile=Path(self.profile).stem,
                axis=self.axis,
                until=self.until,
                verdict=answer.verdict,
                text=answer.text,
                probes=[SearchProbe(p.level, p.broke, p.text, folder) for p, folder in zip(probes, self.folders, strict=True)],
                holds=answer.holds,
                breaks=answer.breaks,
                computed=computed.number() if computed is not None else None,
                computed_mean=mean.number() if mean is not None else None,
                against=compared,
                design=dict(self.design),
                resumed_wall_s=self.resumed_wall_s,
            ),
        )
        return Searched(answer, tuple(probes), computed, mean, compared)


def search(
    session: Session,
    profile: str,
    until: str,
    question: Question,
    axis: str,
    *,
    minutes: float = 60.0,
    say: Say = lambda _: None,
    resume: Path | None = None,
) -> Searched:
    """Probe until the largest level that holds is known, and return what was found. Each probe is a Run of the session.

    The level at which requests of the mean length fill the pool by arithmetic is probed early: it is where the answer is expected. ``resume`` is
    the folder of a search that was broken off, which must be the session's own: its finished probes count. Raises UsageError where that is another
    search, and what measuring raises; what was measured is in the session's folder, and search.json tells it up to there.
    """
    from pytest_kvcache.conditions import parse
    from pytest_kvcache.judge.search_file import take_up

    design = design_of(session, profile, until, question, axis)
    earlier = take_up(resume, design) if resume is not None else None
    course = _Course(session, profile, until, parse(until), question, axis, design)
    if earlier is not None:
        course.take_up(earlier)
        times = len(course.resumed_wall_s)
        session.notes.append(f"the search was broken off and taken up again {times} time{'s' if times > 1 else ''}")
        say(f"going on after {len(course.probes)} finished windows")
    course.keep(UNFINISHED)
    try:
        stopped = _probe(course, minutes, say)
    except BaseException:
        say(f"the search was broken off: the same command with --resume {shlex.quote(str(session.folder))} goes on")
        raise
    return course.keep(stopped)


def _probe(course: _Course, minutes: float, say: Say) -> str:
    """Measure level after level until the search is over, and return what ended it early; "" where nothing did."""
    from pytest_kvcache.judge.search import next_level
    from pytest_kvcache.planned import Planned

    began, axis = time.monotonic(), course.axis
    while (level := next_level(course.question, course.probes)) is not None:
        if time.monotonic() - began > minutes * 60:
            return f"its {minutes:g} minutes were over"
        planned = Planned(course.profile, users=int(level)) if axis == "users" else Planned(course.profile, options={"rate": level})
        run = course.session.load(planned, number=len(course.probes), variant=level_text(level, axis))
        probe = course.add(level, run, course.session.analysis(run))
        say(f"{level_text(level, axis)}: {'cannot be judged' if probe.broke is None else 'broke' if probe.broke else 'held'} ({probe.text[:200]})")
        course.keep(UNFINISHED)
    return f"its {course.question.steps} probes were used up" if len(course.probes) >= course.question.steps else ""


def design_of(session: Session, profile: str, until: str, question: Question, axis: str) -> dict[str, Any]:
    """Return what both halves of a broken search must agree on; keys and passwords are not in it.

    How many probes and minutes it may take is no part of it: a search that ran out of them goes on with more.
    """
    from pytest_kvcache.server.shown import shown_settings

    shown = shown_settings(session.settings)
    asked = {
        "--profile": profile,
        "--until": until,
        "--least": question.least,
        "--most": question.most,
        "--precision": question.precision,
        "--probes": question.repeats,
    }
    return {**asked, **{"--" + name.replace("_", "-"): shown[name]["value"] for name in _MEASURING}}


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
    if arguments.resume is not None and not arguments.resume.strip():
        raise UsageError("--resume was given and is empty", hint="name the session folder of a search, or leave it out")
    resume = Path(arguments.resume) if arguments.resume else None
    found = search(session, arguments.profile, arguments.until, question, axis, minutes=arguments.minutes, say=say, resume=resume)
    session.record(gate_of(found, arguments.until, axis, session))
    print(shown(session.folder, session.after_analyses()))
