"""The command line: the same functions as the plugin's fixtures, without pytest.

Exit codes: 0 PASS (or done), 1 FAIL, 2 usage, 3 INCONCLUSIVE, 4 INVALID evidence, 5 the tool or the server broke, 130 interrupted.
Only the standard library is imported until a command runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvcache import __version__, diagnosis, gating, options, planning, qualifying, searching, wasting
from pytest_kvcache.errors import KvError, UsageError

if TYPE_CHECKING:
    from pytest_kvcache.session import Session
    from pytest_kvcache.settings import Settings

EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "INVALID": 4}

SERVER = (
    "endpoint", "launch", "model", "engine", "engine_from", "api", "header", "extra_body", "api_key_env", "metrics_api_key_env", "ca", "proxy",
    "ready_timeout_s", "stop_timeout_s", "request_timeout_s", "scrape_timeout_s", "sample_hz", "allow_destructive_reads", "metrics_url", "dcgm_url",
    "prometheus", "prometheus_selector", "prometheus_api_key_env", "gpus", "gpu_others", "gpu_wait_s", "gpu_release_s",
)  # fmt: skip
PROBE = ("seed", "reset_cache", "keep_text")
LOAD = (
    "users", "load_processes", "duration_s", "output_tokens", "seed", "rate", "arrivals", "stages", "max_in_flight", "content", "trace", "load_option", "reset_cache",
    "keep_text", "model_config",
)  # fmt: skip
OUTPUT = ("reports", "name")
FINDINGS = ("rules", "reserves")
BOUNDS = ("max_usage", "min_free")
JUDGE = (
    "usage_margin", "ttft_margin", "throughput_margin", "rare_margin", "quality_min", "quality_margin", "quality_items", "quality_pressure",
    "quality_probes", "quality_tasks", "quality_tasks_dir", "quality_tasks_limit", "quality_tokenizer", "windows", "repeats",
    "most_repeats", "resume", "expect_change",
)  # fmt: skip

Command = Callable[[argparse.Namespace], int]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="pytest-kvcache",
        description="Measured evidence and a verdict on the KV-cache configuration of an LLM server.",
        epilog="The gates themselves run in pytest: pytest -m capacity --kv-endpoint=http://host:8000",
    )
    parser.add_argument("--version", action="version", version=f"pytest-kvcache {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Command, help: str, *groups: Sequence[str]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.set_defaults(run=run)
        for group in groups:
            options.add_cli_options(command.add_argument, group)
        return command

    add("demo", _demo, "the whole story on the embedded engine: f16 against q4_0 KV under the same load, in about a minute", ("reports",))
    add("probe", _probe, "send one request close to the longest that the server takes, and show the three numbers", SERVER, PROBE, OUTPUT)
    load = add(
        "load",
        _load,
        "run a load profile into a Run and judge it, or print where a shipped profile lies (--path)",
        SERVER,
        LOAD,
        BOUNDS,
        OUTPUT,
        FINDINGS,
    )
    options.add_cli_options(load.add_argument, ("sweep", "windows"))
    load.add_argument("profile", nargs="?", help="name of a shipped profile, or path of a Locust file")
    load.add_argument("--path", metavar="NAME", help="print the path of a shipped profile, for locust -f, and stop")
    load.add_argument("--show-options", action="store_true", help="list all options of the load and of its profile, for --load-option, and stop")
    load.add_argument("--requests", type=int, default=0, metavar="N", help="stop after N requests [default: 0, by time]")
    watch = add("watch", _watch, "show usage, free space and running requests live; no load is sent", SERVER)
    watch.add_argument("--count", type=int, default=0, metavar="N", help="stop after N readings [default: until Ctrl-C]")
    watch.add_argument("--interval-s", type=float, default=1.0, metavar="S", help="seconds between readings [default: 1]")
    compare = add(
        "compare",
        _compare,
        "launch two configurations in turn under the same load, or judge two stored sessions, also of another machine",
        SERVER,
        LOAD,
        JUDGE,
        OUTPUT,
        FINDINGS,
    )
    options.add_cli_options(compare.add_argument, ("before", "after"))
    compare.add_argument("folders", nargs="*", metavar="FOLDER", help="two session folders or saved baselines: before, after")
    compare.add_argument("--profile", action="append", metavar="NAME", help="profile to measure; repeatable [default: normal and longctx]")
    compare.add_argument("--no-quality", action="store_true", help="leave the quality items out")
    gate = add(
        "gate",
        _gate,
        "judge stored Runs by a file of thresholds (kvgate.toml), against a baseline where one is named",
        (*JUDGE, "thresholds", "baseline", "expect_change", "on_inconclusive", "rules"),
        OUTPUT,
    )
    gating.add_gate_arguments(gate)
    qualifying.add_arguments(add("quality", qualifying.run_quality, "judge the answers of two sides item by item, also of lm-evaluation-harness"))
    found = add(
        "search",
        _search,
        "find the largest number of users, or rate (--rate), at which a condition does not come true",
        SERVER,
        LOAD,
        OUTPUT,
        FINDINGS,
    )
    searching.add_arguments(found)
    gating.add_schema_arguments(add("schema", gating.run_schema, "print the JSON Schema of verdict.json or of another record"))
    inspect = add(
        "inspect",
        _inspect,
        "say what an engine's scrape, JSON bodies or log tell, offline, or what a running server or a Prometheus server tells",
        (
            "engine",
            "engine_from",
            "model",
            "header",
            "api_key_env",
            "metrics_api_key_env",
            "ca",
            "proxy",
            "scrape_timeout_s",
            "allow_destructive_reads",
        ),
    )
    inspect.add_argument("sources", nargs="*", metavar="FILE|URL|-", help="files of any kind, the address of a server, or - for standard input")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.add_argument("--prometheus", default="", metavar="URL", help="read a fleet out of this Prometheus server")
    inspect.add_argument("--selector", default="", metavar="MATCHERS", help='label matchers of its targets, as in job="vllm"')
    inspect.add_argument(
        "--cards", default="", metavar="MATCHERS", help="label matchers of its DCGM exporters [default: those of the targets' pods or nodes]"
    )
    inspect.add_argument("--prometheus-api-key-env", default="", metavar="NAME", help="environment variable that holds its key")
    inspect.add_argument("--at", default="", metavar="TIME", help="a time that is past: Unix seconds, or 2026-11-29T08:30:00Z [default: now]")
    inspect.add_argument("--window", default="", metavar="DURATION", help="the time before --at, as in 60s or 2h: peaks and lows of each target")
    inspect.add_argument("--step", default="", metavar="DURATION", help=diagnosis.STEP)
    plan = add(
        "plan",
        _plan,
        "say what fits: blocks, requests and the card that a traffic needs, from a model's config.json, before any restart",
        ("model", "header", "api_key_env", "metrics_api_key_env", "ca", "proxy", "scrape_timeout_s"),
    )
    planning.add_arguments(plan)
    help = "say whether a percentage is real: three reconciliations and findings of a Run, of a server in passing, or of a past window"
    diagnosis.add_arguments(add("diagnose", diagnosis.run_diagnose, help, diagnosis.OPTIONS))
    help = "say what padding, buckets and pages would waste on the requests of a file (rows, traces, histograms) or of a Run"
    wasting.add_arguments(add("waste", wasting.run_waste, help, ("reports",)))
    report = add("report", _report, "make report.html, summary.md and the findings of a session folder again", ("rules",))
    report.add_argument("folder", metavar="FOLDER")
    report.add_argument("--export", nargs=2, metavar=("llm-d", "OUT"), help="write its Runs as benchmark reports of llm-d (format 0.2) as well")
    engine = add("engine", _engine, "install, list or remove the engines that this package can run itself")
    engine.add_argument("action", choices=("list", "install", "remove"))
    engine.add_argument("engine_name", nargs="?", metavar="NAME")
    engine.add_argument(
        "--pip-arg", action="append", default=[], metavar="ARG", help="argument handed to pip, as --pip-arg=--index-url=...; repeatable"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(options.as_here(sys.argv[1:] if argv is None else argv))
    if unknown:
        hint = "; what a load or its profile takes is --load-option NAME=VALUE (pytest-kvcache load NAME --show-options lists it)"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint if hasattr(arguments, 'kv_load_option') else ''}")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(arguments.run(arguments))
    except KvError as error:
        print(f"pytest-kvcache: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("pytest-kvcache: interrupted; what was measured is in the session folder", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell tells of it: the reader left before the verdict could be told, and 0 would say PASS
    except OSError as error:
        print(f"pytest-kvcache: {error.strerror or error}", file=sys.stderr)
        return 5


def _interrupt(*_: object) -> None:
    """End on TERM as on Ctrl-C: servers stop, and what was measured is written. A shell ignores INT for what it runs in the background."""
    raise KeyboardInterrupt


def _say(text: str) -> None:
    import textwrap

    print("\n".join(textwrap.wrap(options.one_line(text, 600), 98, initial_indent="  ", subsequent_indent="      ")) or "", flush=True)


def _session(settings: Settings, **more: Any) -> Session:
    from pytest_kvcache.server.shown import shown_argv
    from pytest_kvcache.session import Session

    session = Session(settings, say=_say, **more)
    session.repeat = [shown_argv("pytest-kvcache", sys.argv[1:])]
    return session


def _finish(session: Session) -> int:
    """Write the session's report, print its summary and return the exit code of its verdict."""
    from pytest_kvcache.report.model import SessionView
    from pytest_kvcache.report.terminal import summary

    verdict = session.finish()
    view = SessionView(session.folder, verdict, session.before_analyses(), session.after_analyses())
    print(summary(view, color=sys.stdout.isatty()))
    passes = verdict.verdict == "INCONCLUSIVE" and session.settings.on_inconclusive == "pass"
    return 0 if passes else EXIT_CODES[verdict.verdict]


def _demo(arguments: argparse.Namespace) -> int:
    from pytest_kvcache.demo import run_demo

    return run_demo(arguments)


def _probe(arguments: argparse.Namespace) -> int:
    from pytest_kvcache.judge import gates
    from pytest_kvcache.measure import Planned
    from pytest_kvcache.report.terminal import three_numbers

    with _session(options.settings_from(arguments)) as session:
        run = session.load(Planned("nearmax", users=1, requests=1))
        analysis = session.analysis(run)
        print(three_numbers(analysis))
        for gate in (gates.near_max_served([analysis]), gates.returns_to_idle([analysis])):
            session.record(gate)
        return _finish(session)


def _load(arguments: argparse.Namespace) -> int:
    if arguments.path:
        from pytest_kvcache.load.runner import profile_path

        print(profile_path(arguments.path))
        return 0
    if arguments.profile and arguments.show_options:
        import subprocess

        from pytest_kvcache.load.runner import profile_path

        return subprocess.call([sys.executable, "-m", "locust", "-f", str(profile_path(arguments.profile)), "--kv-help"])
    if not arguments.profile:
        from pytest_kvcache.load.runner import profiles

        raise UsageError("which profile?", hint=f"one of {', '.join(profiles())}, or the path of a Locust file")
    from pytest_kvcache.judge import gates
    from pytest_kvcache.measure import Planned
    from pytest_kvcache.report.terminal import load_numbers

    settings = options.settings_from(arguments)
    with _session(settings) as session:
        if settings.sweep:
            from pytest_kvcache import sweeping

            found = sweeping.run_sweep(session, Planned(arguments.profile, requests=arguments.requests), say=_say)
            print(sweeping.show_sweep(found))
            for gate in sweeping.sweep_gates(session, found):
                session.record(gate)
            return _finish(session)
        analysis = session.analysis(session.load(Planned(arguments.profile, requests=arguments.requests)))
        print(load_numbers(analysis))
        judged = [gates.peak_usage([analysis], settings.max_usage), gates.free_space([analysis], settings.min_free)]
        for gate in (*judged, gates.no_rejections([analysis]), gates.no_preemptions([analysis]), gates.returns_to_idle([analysis])):
            session.record(gate)
        return _finish(session)


def _watch(arguments: argparse.Namespace) -> int:
    from pytest_kvcache.watching import watch

    with _session(options.settings_from(arguments)) as session:
        return watch(session.target, count=arguments.count, interval_s=arguments.interval_s)


def _inspect(arguments: argparse.Namespace) -> int:
    from pytest_kvcache.inspection import run_inspect

    return run_inspect(arguments, options.settings_from(arguments))


def _plan(arguments: argparse.Namespace) -> int:
    return planning.run_plan(arguments)


def _compare(arguments: argparse.Namespace) -> int:
    from pytest_kvcache.measure import Planned

    settings = options.settings_from(arguments)
    if arguments.folders:
        return _compare_stored(arguments, settings)
    if not settings.before:
        raise UsageError("what is to be compared?", hint="--before CMD --after CMD, or two session folders")
    with _session(settings) as session:
        session.plan = [Planned(name) for name in arguments.profile or ("normal", "longctx")]
        session.plan_quality = not arguments.no_quality
        for gate in session.compare().gates:
            session.record(gate)
        return _finish(session)


def _compare_stored(arguments: argparse.Namespace, settings: Settings) -> int:
    from pytest_kvcache.judge.baseline import load_baseline
    from pytest_kvcache.judge.compare import compare

    if len(arguments.folders) != 2 or settings.before:
        raise UsageError("two stored sessions are compared, before and after", hint="pytest-kvcache compare FOLDER_BEFORE FOLDER_AFTER")
    before, after = (load_baseline(folder, Path(settings.reports)) for folder in arguments.folders)
    with _session(settings) as session:
        session.adopt(before, "before")
        session.adopt(after, "after")
        comparison = compare(session.before_analyses(), session.after_analyses(), settings)
        session.notes, session.problems = list(comparison.notes), [problem.text for problem in comparison.problems]
        for gate in comparison.gates:
            session.record(gate)
        return _finish(session)


def _gate(arguments: argparse.Namespace) -> int:
    with _session(options.settings_from(arguments)) as session:
        gating.judge_stored(arguments, session)
        return _finish(session)


def _search(arguments: argparse.Namespace) -> int:
    with _session(options.settings_from(arguments), folder=Path(arguments.resume) if arguments.resume else None) as session:
        searching.run_search(arguments, session, _say)
        return _finish(session)


def _report(arguments: argparse.Namespace) -> int:
    from pytest_kvcache.analysis.own_rules import keep_rules, rule_set
    from pytest_kvcache.report.terminal import summary
    from pytest_kvcache.report.write import build_view, with_findings, write_view

    rules = options.settings_from(arguments).rules
    if arguments.export and arguments.export[0] != "llm-d":
        raise UsageError(f"no export is called {arguments.export[0][:40]!r}", hint="--export llm-d OUT.json")
    view = build_view(Path(arguments.folder), rules)
    keep_rules(view.folder, rule_set(rules))
    view = with_findings(view)
    path = write_view(view)
    print(summary(view, color=sys.stdout.isatty()))
    print(path)
    if arguments.export:
        from pytest_kvcache.report.llmd import export

        print(*export(view, Path(arguments.export[1])), sep="\n")
    return 0


def _engine(arguments: argparse.Namespace) -> int:
    from pytest_kvcache.server import embedded

    if arguments.action == "list":
        from tabulate import tabulate

        rows = [(e.name, "installed" if e.installed else "not installed", e.version, e.where, e.note) for e in embedded.engine_list()]
        print(tabulate(rows, headers=("engine", "state", "version", "where", "note")))
        return 0
    if not arguments.engine_name:
        raise UsageError(f"which engine to {arguments.action}?", hint=f"one of {', '.join(e.name for e in embedded.engine_list())}")
    if arguments.action == "install":
        embedded.engine_install(arguments.engine_name, arguments.pip_arg, print)
    else:
        print(embedded.engine_remove(arguments.engine_name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
