"""Result files of other load tools become Runs, so that the same thresholds judge them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from pytest_kvcache.imports import read_results
from pytest_kvcache.imports.result import Result
from pytest_kvcache.judge.compare import SHA
from pytest_kvcache.machine import machine_facts
from pytest_kvcache.measure import run_folder
from pytest_kvcache.records import SCHEMA_VERSION, RunRecord, ValueRecord
from pytest_kvcache.runfolder import Run, write_run

LONGEST_NAME = 60


def import_results(path: Path, session: Path) -> list[Run]:
    """Write a Run below ``session`` for each load that a result file of another tool tells of, and return them.

    The file itself is not kept: some tools write the key of the server into it. Its hash is.
    Raises UsageError and CannotJudge where the file cannot be read or no known tool wrote it, CannotWrite.
    """
    results = read_results(path)
    names = _names(results)
    with path.open("rb") as file:
        origin = {"result file": path.name, SHA: hashlib.file_digest(file, "sha256").hexdigest()}
    return [_run(origin, session, result, name, window) for result, (name, window) in zip(results, names, strict=True)]


def _names(results: list[Result]) -> list[tuple[str, int]]:
    """Return for each load its profile and window: loads of one name are windows of it."""
    seen: dict[str, int] = {}
    found = []
    for result in results:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", result.name).strip("-.") or "imported"
        if len(name) > LONGEST_NAME:  # two settings of a sweep must not become one by what is cut off
            name = f"{name[: LONGEST_NAME - 8]}-{hashlib.sha256(result.name.encode()).hexdigest()[:7]}"
        found.append((name, seen.setdefault(name, 0)))
        seen[name] += 1
    return found


def _run(origin: dict[str, str], session: Path, result: Result, name: str, window: int) -> Run:
    folder = run_folder(session, name)
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        id=f"{name}-{window}",
        profile=name,
        window=window,
        model=result.model,
        engine=result.engine,
        engine_version=result.engine_version,
        config={key: ValueRecord.of(value) for key, value in result.config.items()},
        started_wall_s=result.began_wall_s,
        ended_wall_s=result.ended_wall_s or result.began_wall_s,
        options=dict(result.options),
        problems=list(result.problems),
        notes=list(result.notes),
        versions={result.tool: result.version} if result.version else {},
        machine=machine_facts(),
        provenance={"imported from": f"a result file of {result.tool}", **origin},
        imported={key: ValueRecord.of(value) for key, value in result.values.items()},
        imported_from=result.tool,
    )
    return write_run(folder, record)
