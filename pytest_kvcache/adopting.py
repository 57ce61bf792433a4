"""Stored Runs taken into a session, and what must be measured to stand beside them."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from pytest_kvcache.errors import CannotWrite
from pytest_kvcache.measure import Planned, run_folder
from pytest_kvcache.runfolder import Run, write_run


def copy_runs(runs: Sequence[Run], session: Path, side: str) -> list[Run]:
    """Copy Runs into a session's folder as one side of it, so that the folder stands alone. Raises CannotWrite."""
    adopted = []
    for run in runs:
        folder = run_folder(session, f"{side}-{run.record.profile}")
        try:
            shutil.copytree(run.folder, folder, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise CannotWrite(f"cannot copy a stored Run: {str(error)[:200]}", where=str(folder), hint="free space, or --kv-reports") from None
        adopted.append(write_run(folder, msgspec.structs.replace(run.record, side=side)))
    return adopted


def planned_of(runs: Sequence[Run], named: Collection[str]) -> list[Planned]:
    """Return the loads of stored Runs whose profiles are not ``named``, with the numbers that they had."""
    found: dict[str, Planned] = {}
    for run in runs:
        numbers = dict(run.record.options)
        numbers.pop("nonce", None)
        if run.record.profile not in {*named, "quality"}:
            fields = {name: numbers.pop(name, 0) for name in ("users", "duration_s", "output_tokens", "requests")}
            found.setdefault(run.record.profile, Planned(run.record.profile, **fields, options=numbers))
    return list(found.values())
