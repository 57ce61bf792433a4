"""Baselines: a session's Runs kept under a name, and found again by that name or by a path."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from pytest_kvcache.errors import CannotJudge, CannotWrite, UsageError
from pytest_kvcache.runfolder import Run, read_run, read_runs

FOLDER = "baselines"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KEPT = re.compile(r"(run\.json|.*\.jsonl|.*\.prom)\Z")
"""What a baseline needs of a Run: its record, its series and the raw scrapes; no server log, which may be large."""


def check_name(name: str) -> str:
    """Return the name of a baseline. Raises UsageError where it could not be a folder's name."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:120]!r} cannot be a baseline's name", hint="letters, digits, dots, dashes and underscores, beginning with a letter or digit"
        )
    return name


def baselines(reports: Path) -> list[str]:
    """Return the names of the saved baselines, in order."""
    folder = reports / FOLDER
    return sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / "runs").is_dir()) if folder.is_dir() else []


def save_baseline(session: Path, reports: Path, name: str) -> Path:
    """Keep the Runs of a session as ``reports/baselines/<name>`` and return that folder; one of that name is replaced as a whole.

    Of a comparison the side after the change is kept. Raises UsageError for a name that cannot be one, CannotJudge where the
    session holds no Run of that side, and CannotWrite.
    """
    check_name(name)
    runs = [run for run in read_runs(session) if run.record.side != "before"]
    if not runs:
        raise CannotJudge("there is no Run to keep as a baseline", where=str(session), hint="measure something with --kv-save")
    final = reports / FOLDER / name
    part, old = (final.with_name(f".{name}.{os.getpid()}.{word}") for word in ("part", "old"))
    try:
        shutil.rmtree(part, ignore_errors=True)
        for number, run in enumerate(runs, start=1):
            _copy(run, part / "runs" / f"{number}-{_profile(run)}")
        # two renames: a reader sees the old baseline or the new one and never half of either
        if final.exists():
            final.rename(old)
        part.rename(final)
    except OSError as error:
        if old.exists() and not final.exists():
            old.rename(final)
        raise CannotWrite(
            f"the baseline cannot be written: {error.strerror or error}", where=str(final), hint="free space, check permissions, or --kv-reports"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return final


def _profile(run: Run) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", run.record.profile)[:60] or "run"


def _copy(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in run.folder.iterdir():
        # a link could lead out of the session, and what it leads to is none of our measurements
        if _KEPT.match(path.name) and path.is_file() and not path.is_symlink():
            shutil.copyfile(path, folder / path.name)


def load_baseline(name_or_path: str, reports: Path, what: str = "baseline") -> list[Run]:
    """Return the Runs of a baseline (``what`` it is called in errors): a saved name, or the path of a session, a baseline or a single Run.

    A saved name wins over a path of the same spelling. Of a session that compared two sides, the side after the change is the
    baseline. Raises UsageError that lists what is saved where there is neither, CannotJudge and UnknownSchema where a Run cannot be read.
    """
    if _NAME.fullmatch(name_or_path) and (reports / FOLDER / name_or_path).is_dir():
        return read_runs(reports / FOLDER / name_or_path)
    path = Path(name_or_path).expanduser()
    if path.name == "run.json":
        path = path.parent
    if not path.is_dir():
        saved = baselines(reports)
        listed = f"saved in {reports / FOLDER}: {', '.join(saved[:20])}" if saved else f"nothing is saved in {reports / FOLDER}"
        shown = repr(name_or_path[:200])
        if path.is_file():
            raise UsageError(
                f"{shown} is a file and no {what}",
                where=str(path),
                hint="inspect reads scrapes and logs, waste lengths and traces, gate results of other tools",
            )
        if what != "baseline":
            raise UsageError(f"there is no {what} {shown}", hint=f"the folder of a session or of a Run, or a saved name ({listed})")
        raise UsageError(f"there is no baseline {shown}, neither as a name nor as a path", hint=f"{listed}; --kv-save=NAME keeps one")
    if (path / "run.json").exists():
        return [read_run(path)]
    runs = read_runs(path)
    kept = [run for run in runs if run.record.side != "before"]
    return kept or runs
