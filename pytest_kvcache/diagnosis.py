"""``pytest-kvcache diagnose``: is the percentage real? The three reconciliations, the three numbers and the findings of a Run, a server or a past window."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_kvcache.analysis.findings import Finding, Findings
    from pytest_kvcache.analysis.timeline import Analysis
    from pytest_kvcache.runfolder import Run
    from pytest_kvcache.settings import Settings

OPTIONS = (
    "engine", "engine_from", "model", "header", "api_key_env", "metrics_api_key_env", "ca", "proxy", "scrape_timeout_s", "sample_hz", "metrics_url",
    "dcgm_url", "allow_destructive_reads", "reports", "rules", "reserves", "model_config",
)  # fmt: skip
STEP = "time between two points of the past window; its end is always one [default: a 60th of the window, 1s to 15s; longer beyond 11,000 points]"
WATCH_HZ = 2.0
"""Looks a second at a server in passing, where the user names no rate: a guest reads seldom."""


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at: the Analysis whose reconciliations are shown, how many there were, and what the rules say of all."""

    subject: str
    analysis: Analysis
    runs: int
    findings: Findings
    notes: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "sources",
        nargs="*",
        metavar="RUN|URL",
        help="a Run's or session's folder, the name of a saved baseline, or the address of a server; several URLs are replicas",
    )
    add("--window", default="", metavar="DURATION", help="how long a server is watched, or the length of the past window [default: 60s; past: 10m]")
    add("--log", default="", metavar="FILE", help="start-up log of the server that is watched: it tells weights and pool")
    add("--prometheus", default="", metavar="URL", help="look at a window that is past in this Prometheus server")
    add("--selector", default="", metavar="MATCHERS", help='label matchers of its targets, as in job="vllm"')
    add("--cards", default="", metavar="MATCHERS", help="label matchers of its DCGM exporters [default: those of the targets' pods or nodes]")
    add("--prometheus-api-key-env", default="", metavar="NAME", help="environment variable that holds its key")
    add("--at", default="", metavar="TIME", help="end of the past window: Unix seconds, or 2026-11-29T08:30:00Z [default: now]")
    add("--step", default="", metavar="DURATION", help=STEP)
    add("--baseline", default="", metavar="NAME|PATH", help="the Runs that rules of change compare with")
    add("--json", action="store_true", help="print JSON, with what could not be looked at and why")


def run_diagnose(arguments: argparse.Namespace) -> int:
    """Print the diagnosis and return 0. Raises KvError: UsageError (2), CannotJudge (3) where there is nothing to judge by."""
    import json
    import shutil

    from pytest_kvcache import options

    servers = tuple(name for name in arguments.sources if _is_url(name))
    settings = options.settings_from(arguments, **({"endpoint": servers} if servers else {}))
    found = diagnose(arguments, settings)
    if arguments.json:
        print(json.dumps(as_json(found), indent=1, ensure_ascii=True))
    else:
        width = min(shutil.get_terminal_size((100, 40)).columns, 160)
        print("\n".join(as_lines(found, width)))
    return 0


def _is_url(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def diagnose(arguments: argparse.Namespace, settings: Settings) -> Diagnosis:
    """Return the Diagnosis that the arguments ask for. Raises KvError."""
    import tempfile

    from pytest_kvcache.analysis.findings import rules_with
    from pytest_kvcache.errors import UsageError

    rules = rules_with(*settings.rules)
    urls = [name for name in arguments.sources if _is_url(name)]
    if arguments.prometheus and arguments.sources:
        raise UsageError("--prometheus and a Run or URL exclude each other", hint="one source at a time")
    if not arguments.prometheus and (arguments.at or arguments.step or arguments.selector or arguments.cards):
        raise UsageError("--at, --step, --selector and --cards belong to --prometheus", hint="name the server with --prometheus URL")
    if urls and len(urls) != len(arguments.sources):
        raise UsageError("Runs and running servers are looked at apart", hint="name the one or the other")
    if not arguments.sources and not arguments.prometheus:
        raise UsageError("what is to be looked at?", hint="a Run's folder, http://host:8000, or --prometheus URL")
    if not urls and arguments.log:
        raise UsageError("--log belongs to a running server", hint="a Run holds its own start-up log")
    if not urls and not arguments.prometheus:
        if arguments.window:
            raise UsageError("--window belongs to a running server or to --prometheus", hint="a Run has its own")
        return _stored(arguments, settings, rules)
    with tempfile.TemporaryDirectory(prefix="kv-diagnose-") as scratch:
        return _watched(arguments, settings, rules, urls, Path(scratch))


def _stored(arguments: argparse.Namespace, settings: Settings, rules: Sequence[Any]) -> Diagnosis:
    import msgspec

    from pytest_kvcache.analysis.own_rules import readable_rules, rule_set
    from pytest_kvcache.analysis.timeline import analyse
    from pytest_kvcache.judge.baseline import load_baseline
    from pytest_kvcache.report.model import at_peak
    from pytest_kvcache.runfolder import read_runs

    reports = Path(settings.reports)
    runs = [run for name in arguments.sources for run in load_baseline(name, reports, "Run, session or saved baseline")]
    if settings.reserves != "auto":  # what the user says of the engine now wins over what the Run was measured with
        stated = {"reserves": {"value": settings.reserves, "source": settings.sources.get("reserves", "call")}}
        runs = [replace(run, record=msgspec.structs.replace(run.record, settings={**run.record.settings, **stated})) for run in runs]
    places = [Path(name).expanduser() for name in arguments.sources]
    sessions = dict.fromkeys(place.parent.parent if place.parent.name == "runs" else place for place in places)
    kept = [readable_rules(session) for session in sessions]
    if own := [path for paths, _ in kept for path in paths]:
        rules = rule_set([*own, *settings.rules]).rules
    if arguments.baseline:
        before = load_baseline(arguments.baseline, reports)
    else:  # a session that compared two sides holds its own
        folders = [Path(name) for name in arguments.sources if (Path(name) / "runs").is_dir()]
        before = [run for folder in folders for run in read_runs(folder) if run.record.side == "before"]
    baselines = [analysis for run in before if (analysis := analyse(run)).facts.loaded]
    analyses = [analysis for run in runs if (analysis := analyse(_with_model(run, settings))).facts.loaded]
    _judgeable(analyses, ", ".join(arguments.sources))
    from pytest_kvcache.analysis.findings import find_in

    shown = at_peak(analyses)
    notes = [f"{a.run.folder.name} is unsound evidence: {problem.text}" for a in analyses for problem in a.problems[:2]][:6]
    notes += [f"left out: {one}" for _, wrong in kept for one in wrong]
    return Diagnosis(", ".join(arguments.sources), shown or analyses[0], len(analyses), find_in(analyses, rules, baselines), tuple(notes))


def _watched(arguments: argparse.Namespace, settings: Settings, rules: Sequence[Any], urls: Sequence[str], scratch: Path) -> Diagnosis:
    from pytest_kvcache import units
    from pytest_kvcache.analysis.findings import find_in
    from pytest_kvcache.analysis.timeline import analyse
    from pytest_kvcache.engines import imported
    from pytest_kvcache.inspection import prometheus_of, step_of, time_of
    from pytest_kvcache.observe.passing import past_run, watch_run
    from pytest_kvcache.server.endpoint import parse_endpoint

    if arguments.prometheus:
        at = time_of(arguments.at)
        end = time.time() if at is None else at
        length, step = units.parse_seconds(arguments.window or "10m"), step_of(arguments.step)
        with prometheus_of(arguments, settings) as server:
            run = past_run(server, scratch, end - length, end, step, arguments.cards)
        subject = f"{len(run.record.endpoints)} targets in Prometheus, {length:g} s until {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(end))}"
    else:
        endpoints = [parse_endpoint(url, settings) for url in urls]
        own = [imported(settings.engine_from)] if settings.engine_from else []
        seconds = units.parse_seconds(arguments.window or "60s")
        hz = settings.sample_hz if "sample_hz" in settings.sources else WATCH_HZ
        if not arguments.json:
            print(
                f"  watching {len(endpoints)} server{'s' if len(endpoints) > 1 else ''} for {seconds:g} s; nothing is sent but reads", file=sys.stderr
            )
        log = Path(arguments.log).expanduser() if arguments.log else None
        run = watch_run(endpoints, scratch, seconds, hz=hz, engine=settings.engine, own=own, log=log, timeout_s=settings.scrape_timeout_s)
        subject = ", ".join(run.record.endpoints)
    analysis = analyse(_with_model(run, settings))
    _judgeable([analysis], subject)
    baselines = []
    if arguments.baseline:
        from pytest_kvcache.judge.baseline import load_baseline

        baselines = [analyse(one) for one in load_baseline(arguments.baseline, Path(settings.reports))]
    return Diagnosis(subject, analysis, 1, find_in([analysis], rules, baselines), tuple(run.record.notes))


def _with_model(run: Run, settings: Settings) -> Run:
    """Return the Run with what the named model files tell of it; as it is where none were named."""
    from pytest_kvcache.analysis.modelfile import with_model

    if not settings.model_config or not run.record.before:
        return run
    return replace(run, record=with_model(run.record, Path(settings.model_config).expanduser()))


def _judgeable(analyses: Sequence[Analysis], where: str) -> None:
    """Raise CannotJudge where no Run tells usage, running requests or requests of ours: nothing could be said of it."""
    from pytest_kvcache.errors import CannotJudge
    from pytest_kvcache.quantities import Missing, Reading

    if not analyses:
        raise CannotJudge("no load was measured here", where=where, hint="name the Run of a load, not one of quality items alone")
    reasons = []
    for analysis in analyses:
        values = [analysis.values.get(name, Missing("not measured")) for name in ("usage.peak", "running.peak")]
        sent = analysis.values.get("requests.sent")
        if any(isinstance(value, Reading) for value in values) or (isinstance(sent, Reading) and sent.number() > 0):
            return
        reasons += [value.reason for value in values if isinstance(value, Missing)]
    raise CannotJudge(
        f"neither usage nor running requests are told: {reasons[0]}", where=where, hint="pytest-kvcache inspect says what the server tells"
    )


def as_lines(found: Diagnosis, width: int = 100) -> list[str]:
    """Return the diagnosis as lines of text."""
    from pytest_kvcache.analysis.reconciliations import reconciliations
    from pytest_kvcache.report.terminal import three_numbers

    record = found.analysis.run.record
    engine = f"{record.engine} {record.engine_version}".strip()
    of = f"; of {found.runs} Runs the figures are those of {found.analysis.run.folder.name}, the fullest" if found.runs > 1 else ""
    lines = [
        *_wrapped(
            f"{found.subject}: {engine}{f', {record.model}' if record.model else ''}{', EMBEDDED engine' if record.embedded else ''}{of}", width
        )
    ]
    lines += ["", "Three numbers", *_wrapped(three_numbers(found.analysis), width, "  ")]
    for number, one in enumerate(reconciliations(found.analysis), start=1):
        lines += ["", f"{number}. {one.name[0].upper()}{one.name[1:]}"]
        for text in one.lines:
            lines += _wrapped(text, width, "  ")
        if one.lacking:
            lines += _wrapped(f"not known: {one.lacking}", width, "  ")
    lines += ["", "Findings"]
    if not found.findings.found:
        lines.append("  none of the rules that could be looked at has anything to say")
    for number, finding in enumerate(found.findings.shown, start=1):
        lines += _finding(number, finding, width)
    further = found.findings.found[len(found.findings.shown) :]
    if further:
        lines += _wrapped("further: " + ", ".join(one.id for one in further), width, "  ")
    if found.findings.unseen:
        lines += _wrapped("could not be looked at (--json says why): " + ", ".join(one.id for one in found.findings.unseen), width, "  ")
    for note in found.notes:
        lines += _wrapped(note, width, "- ", "  ")
    return lines


def _finding(number: int, finding: Finding, width: int) -> list[str]:
    where = f", {finding.run}" if finding.run.startswith("runs/") else ""
    lines = _wrapped(f"{finding.severity}: {finding.title} [{finding.id}{where}]", width, f"  {number}. ", "     ")
    lines += _wrapped(finding.text, width, "     ")
    if finding.beside:
        lines += _wrapped(f"({finding.beside})", width, "     ")
    for action in finding.do:
        lines += _wrapped(action, width, "     do:  ", "          ")
    if finding.avoid:
        lines += _wrapped(finding.avoid, width, "     not: ", "          ")
    if finding.reason:
        lines += _wrapped(finding.reason, width, "     why: ", "          ")
    return lines


def _wrapped(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """Return one text as lines without control characters: what a server or a rule says cannot reach a terminal raw."""
    import textwrap

    from pytest_kvcache.engines import clean

    indent = first if rest is None else rest
    return textwrap.wrap(
        clean(text, 4000), max(width, 40), initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def as_json(found: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis for programs: numbers in their units, every finding, and the rules that could not be looked at with the reason."""
    from pytest_kvcache.analysis.findings import MOST_SHOWN
    from pytest_kvcache.analysis.memory_seen import course
    from pytest_kvcache.analysis.reconciliations import reconciliations
    from pytest_kvcache.quantities import Reading
    from pytest_kvcache.report.terminal import three_numbers

    record = found.analysis.run.record
    values = {
        name: {"value": value.value, "unit": value.unit, "source": value.source} if isinstance(value, Reading) else {"missing": value.reason}
        for name, value in found.analysis.values.items()
    }
    return {
        "subject": found.subject,
        "engine": record.engine,
        "engine_version": record.engine_version,
        "model": record.model,
        "embedded": record.embedded,
        "endpoints": list(record.endpoints),
        "run": found.analysis.run.folder.name,
        "runs": found.runs,
        "window": {"since": record.load_started_wall_s, "until": record.load_ended_wall_s},
        "three_numbers": three_numbers(found.analysis),
        "reconciliations": [asdict(one) for one in reconciliations(found.analysis)],
        "findings": [asdict(one) for one in found.findings.found[:MOST_SHOWN]],
        "further": [asdict(one) for one in found.findings.found[MOST_SHOWN:]],
        "could_not_be_looked_at": [asdict(one) for one in found.findings.unseen],
        "values": values,
        "memory": [
            {
                "of": line.label,
                "kind": line.kind,
                **{name: asdict(one) for name in ("server", "others", "used", "free") if (one := course(line, name)) is not None},
            }
            for line in (*found.analysis.timeline.cards, *found.analysis.timeline.hosts)
        ],
        "notes": list(found.notes),
    }
