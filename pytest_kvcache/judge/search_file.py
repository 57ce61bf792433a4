"""search.json: a search for the largest load that holds, as it lies in the folder of its session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.judge.experiment import differences
from pytest_kvcache.records import SCHEMA_VERSION, Verdict
from pytest_kvcache.runfolder import decode_record, write_atomic

FILE_NAME = "search.json"
_LARGEST_BYTES = 4 << 20


class SearchProbe(msgspec.Struct, frozen=True, omit_defaults=True):
    """One window: its level, whether the stop condition came true (None: cannot be judged), what it says, and its Run's folder below ``runs/``."""

    level: float
    broke: bool | None
    text: str = ""
    folder: str = ""


class SearchRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A search. ``axis`` is what was varied (``users`` or ``rate``), ``until`` the stop condition.

    ``holds`` is the largest level that held in every probe and ``breaks`` the smallest that mostly broke. ``computed`` and ``computed_mean`` are how
    many requests of the longest and of the mean length fit the pool at once by arithmetic (None where it cannot be told), and ``against`` says how
    the measured figure compares with them. ``design`` is what another half of it must agree on, ``resumed_wall_s`` when it went on after it was
    broken off.
    """

    schema_version: int
    profile: str
    axis: str
    until: str
    verdict: Verdict
    text: str
    probes: list[SearchProbe] = []
    holds: float | None = None
    breaks: float | None = None
    computed: float | None = None
    computed_mean: float | None = None
    against: str = ""
    design: dict[str, Any] = {}
    resumed_wall_s: list[float] = []


def write_search(folder: Path, record: SearchRecord) -> Path:
    """Write search.json into a session folder and return its path. Raises CannotWrite."""
    path = folder / FILE_NAME
    write_atomic(path, msgspec.json.format(msgspec.json.encode(record), indent=1))
    return path


def read_search(folder: Path) -> SearchRecord | None:
    """Return the search of a session folder; None where there is none, or none that this build can read."""
    path = folder / FILE_NAME
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            return None
        found = msgspec.json.decode(path.read_bytes(), type=SearchRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if found.schema_version == SCHEMA_VERSION else None


def take_up(folder: Path, design: Mapping[str, Any]) -> SearchRecord:
    """Return the search in ``folder``, fit to go on with ``design``. Raises UsageError where there is none or it is another one, CannotJudge where
    it cannot be read, UnknownSchema.
    """
    path = folder / FILE_NAME
    try:
        record = decode_record(path.read_bytes(), SearchRecord, path, "cannot go on: this search")
    except FileNotFoundError:
        raise UsageError("there is no search to go on with", where=str(path), hint="name the session folder of a search") from None
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise CannotJudge(f"search.json cannot be read: {str(error)[:200]}", where=str(path), hint="search anew") from None
    # as it comes back from the file: a tuple is a list there
    unlike = differences(record.design, msgspec.json.decode(msgspec.json.encode(dict(design))))
    if unlike:
        raise UsageError(
            f"this is not the search that was broken off: {'; '.join(unlike[:3])}", where=str(path), hint="give the arguments that it was begun with"
        )
    return record
