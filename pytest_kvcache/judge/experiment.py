"""The cells of an experiment: their order, which are finished, and whether a broken one may be taken up again.

A cell is one side, started once, with one window of every profile. Repeats go in ABBA order: what drifts evenly over time (heat, a
neighbour that comes and goes) then weighs the same on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.experimentrecords import ExperimentRecord
from pytest_kvcache.records import SCHEMA_VERSION
from pytest_kvcache.runfolder import decode_record, write_atomic

FILE = "experiment.json"
SIDES = ("before", "after")


@dataclass(frozen=True, slots=True)
class Cell:
    """One side in one repeat, both from 0: ``Cell(0, "before")`` comes first."""

    repeat: int
    side: str


def cells(repeats: int) -> list[Cell]:
    """Return the cells in the order in which they are measured: before, after, after, before, before, ..."""
    return [Cell(repeat, side) for repeat in range(repeats) for side in (SIDES if repeat % 2 == 0 else SIDES[::-1])]


def left(record: ExperimentRecord, repeats: int) -> list[Cell]:
    """Return the cells that are still to be measured, in order."""
    done = {(cell.repeat, cell.side) for cell in record.finished}
    return [cell for cell in cells(repeats) if (cell.repeat, cell.side) not in done]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return how two designs differ, in words; cells measured by one cannot stand beside those of the other."""
    return [f"{name} was {_short(old.get(name))} and is {_short(new.get(name))}" for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def _short(value: Any) -> str:
    text = str(value) if value not in (None, "") else "nothing"
    return text if len(text) <= 120 else text[:119] + "…"


def begin(id: str, design: Mapping[str, Any]) -> ExperimentRecord:
    """Return the record of an experiment of which nothing is measured yet."""
    return ExperimentRecord(SCHEMA_VERSION, id, dict(design))


def write(folder: Path, record: ExperimentRecord) -> None:
    """Write experiment.json whole into a session's folder. Raises CannotWrite."""
    write_atomic(folder / FILE, msgspec.json.format(msgspec.json.encode(record), indent=1))


def read(folder: Path) -> ExperimentRecord | None:
    """Return the experiment of a session's folder, None where it holds none. Raises CannotJudge, UnknownSchema."""
    path = folder / FILE
    try:
        return decode_record(path.read_bytes(), ExperimentRecord, path, "cannot go on: this experiment")
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise CannotJudge(f"experiment.json cannot be read: {str(error)[:200]}", where=str(path), hint="measure again") from None


def take_up(folder: Path, design: Mapping[str, Any]) -> ExperimentRecord:
    """Return the experiment in ``folder``, fit to go on with ``design``. Raises UsageError where there is none or it is another one."""
    record = read(folder)
    if record is None:
        raise UsageError("there is no experiment to go on with", where=str(folder / FILE), hint="name the session folder of a --kv-before/--kv-after")
    # as it comes back from the file: a tuple is a list there
    unlike = differences(record.design, msgspec.json.decode(msgspec.json.encode(dict(design))))
    if unlike:
        raise UsageError(
            f"this is not the experiment that was broken off: {'; '.join(unlike[:3])}",
            where=str(folder / FILE),
            hint="give the options that it was begun with",
        )
    return record


def looks(record: ExperimentRecord) -> Sequence[str]:
    """Return what the verdict must say of an experiment that was judged before and then got more repeats."""
    seen = sorted(set(record.judged_repeats))
    if len(seen) < 2:
        return []
    shown = ", ".join(map(str, seen))
    return [f"judged {len(seen)} times, with {shown} repeats: each look adds its own chance of a false PASS (at most 5 %)"]
