"""``pytest-kvcache gate``: stored Runs against a file of thresholds. ``pytest-kvcache schema``: the JSON Schema of the records."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvcache.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvcache.analysis.timeline import Analysis
    from pytest_kvcache.judge.thresholds import Thresholds
    from pytest_kvcache.runfolder import Run
    from pytest_kvcache.session import Session

SCHEMAS = {
    "verdict": "records.VerdictRecord",
    "run": "records.RunRecord",
    "telemetry": "records.TelemetryRow",
    "requests": "records.LoadLine",
    "quality": "records.QualityRow",
    "snapshot": "records.SnapshotRecord",
    "experiment": "experimentrecords.ExperimentRecord",
    "search": "judge.search_file.SearchRecord",
}
"""What ``schema`` prints: the name of a file or value, and where its record is declared."""


def add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``gate`` takes beside the options of a session."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a Run's folder, a session folder, the name of a saved baseline, or a result file (or output folder) of AIPerf, GuideLLM, vllm bench or SGLang's benchmarks; several are judged together",
    )
    parser.add_argument(
        "--require", action="append", default=[], metavar="CONDITION", help='one more threshold, as in "usage.peak < 0.9"; repeatable'
    )


def judge_stored(arguments: argparse.Namespace, session: Session) -> None:
    """Judge stored Runs by thresholds into ``session``. Raises KvError."""
    from tempfile import TemporaryDirectory

    from pytest_kvcache.importing import import_results
    from pytest_kvcache.imports import result_file
    from pytest_kvcache.judge.baseline import load_baseline
    from pytest_kvcache.judge.compare import compare, invalid
    from pytest_kvcache.judge.thresholds import judge_thresholds

    settings = session.settings
    thresholds = thresholds_of(settings.thresholds, arguments.require)
    reports = Path(settings.reports)
    with TemporaryDirectory(prefix="pytest-kvcache-") as scratch:

        def stored(name: str, side: str) -> list[Run]:
            # a file, or a folder with one, is what another load tool wrote
            file = result_file(Path(name))
            return import_results(file, Path(scratch, side)) if file is not None else load_baseline(name, reports)

        after = [run for name in arguments.runs for run in stored(name, "after")]
        before = stored(settings.baseline, "before") if settings.baseline else []
        _adopt(session, thresholds, before, after)
    spoilt = {}
    if before:
        comparison = compare(session.before_analyses(), session.after_analyses(), settings)
        session.notes, session.problems = list(comparison.notes), [problem.text for problem in comparison.problems]
        spoilt = dict(comparison.spoilt)
    session.notes += imported_notes(session.after_analyses())
    for gate in judge_thresholds(thresholds.lines, session.after_analyses(), session.before_analyses()):
        session.record(invalid(gate, spoilt.get(gate.lane, ())) if gate.before is not None else gate)
    if thresholds.on_inconclusive and "on_inconclusive" not in settings.sources:
        session.settings = settings.replace(on_inconclusive=thresholds.on_inconclusive)


def _adopt(session: Session, thresholds: Thresholds, before: list[Run], after: list[Run]) -> None:
    if thresholds.need_baseline and not before:
        raise UsageError(
            "a threshold compares with the baseline, and none was named", where=thresholds.path, hint="--baseline NAME or the path of a session"
        )
    if before:
        session.adopt(before, "before")
    session.adopt(after, "after" if before else "")


def imported_notes(analyses: Sequence[Analysis]) -> list[str]:
    """Return what must be known to read the figures of another load tool; nothing where none was imported."""
    notes = [
        f"{analysis.run.record.profile}: imported from {analysis.run.record.imported_from}; {'; '.join(analysis.run.record.notes)}"
        for analysis in analyses
        if analysis.run.record.imported_from
    ]
    return [*dict.fromkeys(notes)][:20]


def thresholds_of(file: str, conditions: list[str]) -> Thresholds:
    """Return the thresholds of a file (``kvgate.toml`` of this folder, where none is named) and of conditions given by hand. Raises UsageError."""
    from dataclasses import replace

    from pytest_kvcache.judge.thresholds import FILE_NAME, Thresholds, of_texts, read_thresholds

    path = Path(file or FILE_NAME)
    if not file and not path.exists():
        if not conditions:
            raise UsageError(
                f"by which thresholds? There is no {FILE_NAME} in this folder",
                hint='--thresholds FILE, or --require "usage.peak < 0.9"; docs/verdicts.md',
            )
        read = Thresholds(())
    else:
        read = read_thresholds(path)
    return replace(read, lines=(*read.lines, *of_texts(conditions, "--require")))


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``schema`` takes."""
    parser.add_argument("record", nargs="?", default="verdict", choices=tuple(SCHEMAS), help="which record [default: verdict]")


def schema_text(name: str) -> str:
    """Return the JSON Schema (draft 2020-12) of a record of ``SCHEMAS`` as indented JSON. Raises KeyError."""
    from importlib import import_module

    import msgspec

    from pytest_kvcache import records

    module, _, record = SCHEMAS[name].rpartition(".")
    schema = msgspec.json.schema(getattr(import_module(f"pytest_kvcache.{module}"), record))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"pytest-kvcache {name}, schema version {records.SCHEMA_VERSION}"}
    return json.dumps({**head, **schema}, indent=1, sort_keys=False) + "\n"


def run_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of a record."""
    print(schema_text(arguments.record), end="")
    return 0
