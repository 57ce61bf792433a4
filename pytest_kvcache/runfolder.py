"""A Run as it lies on disk: its folder, how its files are written whole, and how they are read with what was cut off left out."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pytest_kvcache.errors import CannotJudge, CannotWrite, UnknownSchema
from pytest_kvcache.records import SCHEMA_VERSION, AgreementRow, LoadLine, QualityRow, RequestRow, RunRecord, TelemetryRow
from pytest_kvcache.userfiles import MARK


@dataclass(frozen=True, slots=True)
class Run:
    """A Run as it lies on disk: its folder and its run.json. The series are read when asked for."""

    folder: Path
    record: RunRecord

    def telemetry(self) -> list[TelemetryRow]:
        """Return the samples in order of time; empty where none was taken. Raises CannotJudge on a broken line."""
        return list(read_lines(self.folder / "telemetry.jsonl", TelemetryRow))

    def load_lines(self) -> Iterator[LoadLine]:
        """Yield the lines of requests.jsonl. Raises CannotJudge on a broken line that is not the last."""
        return read_lines(self.folder / "requests.jsonl", LoadLine)

    def requests(self) -> list[RequestRow]:
        """Return the request rows in the order of the file."""
        return [line for line in self.load_lines() if isinstance(line, RequestRow)]

    def quality(self) -> list[QualityRow]:
        """Return the quality rows in the order of the file; empty where none was asked."""
        return list(read_lines(self.folder / "quality.jsonl", QualityRow))

    def agreement(self) -> list[AgreementRow]:
        """Return the greedy answers in the order of the file; empty where none was asked for."""
        return list(read_lines(self.folder / "agreement.jsonl", AgreementRow))


UNFINISHED = "unfinished"
_Record = TypeVar("_Record", bound=msgspec.Struct)
_encoder = msgspec.json.Encoder()


def encode_line(record: msgspec.Struct) -> bytes:
    """Return the record as one line of JSON with its newline."""
    return _encoder.encode(record) + b"\n"


def read_lines(path: Path, kind: Any) -> Iterator[Any]:
    """Yield the records of a JSON Lines file; nothing where the file does not exist.

    A last line that was cut off (a killed writer) is left out: what was measured before it is kept. Any other broken line
    raises CannotJudge with its number.
    """
    decoder = msgspec.json.Decoder(kind)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(MARK) if number == 1 else raw
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if not line.endswith(b"\n"):
                    return
                raise CannotJudge(
                    f"line {number} cannot be read: {str(error)[:200]}",
                    where=str(path),
                    hint="the file was changed or damaged after it was written; measure again, or remove that line",
                ) from None


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file beside its place and rename it, so that no reader sees half of it. Raises CannotWrite."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data.encode() if isinstance(data, str) else data)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise CannotWrite(
            f"cannot write: {error.strerror or error}",
            where=str(path),
            hint="free space, check permissions, or name another folder with --kv-reports",
        ) from None


def write_run(folder: Path, record: RunRecord) -> Run:
    """Write run.json into ``folder`` and return the Run. Raises CannotWrite."""
    write_atomic(folder / "run.json", msgspec.json.format(msgspec.json.encode(record), indent=1))
    return Run(folder, record)


def read_run(folder: Path) -> Run:
    """Return the Run in ``folder``. Raises CannotJudge where there is none, UnknownSchema where it is newer than this build."""
    path = folder / "run.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CannotJudge(f"no Run is here: {error.strerror or error}", where=str(path), hint="name a folder that holds run.json") from None
    try:
        return Run(folder, decode_record(data, RunRecord, path, "cannot judge: this record"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CannotJudge(f"run.json cannot be read: {str(error)[:200]}", where=str(path), hint="measure again") from None


def decode_record(data: bytes, kind: type[_Record], path: Path, what: str) -> _Record:
    """Return the record of a file with a schema version. Raises UnknownSchema, which begins with ``what``, and msgspec's DecodeError."""
    raw = msgspec.json.decode(data)
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise UnknownSchema(
            f"{what} has schema version {repr(version)[:40]}, and this build reads version {SCHEMA_VERSION}",
            where=str(path),
            hint="install the pytest-kvcache that wrote it, or measure again",
        )
    return msgspec.convert(raw, kind)


def read_runs(session: Path) -> list[Run]:
    """Return the Runs of a session or baseline folder in order of their number; a Run's own folder gives that one Run.

    Raises CannotJudge where there is none.
    """
    if (session / "run.json").exists():
        return [read_run(session)]
    folders = [path.parent for path in (session / "runs").glob("*/run.json")]
    if not folders:
        raise CannotJudge("no Run is here", where=str(session), hint="name a session folder (it holds runs/), a Run's folder, or a saved baseline")

    def order(folder: Path) -> tuple[int, str]:
        number = folder.name.split("-", 1)[0]
        return (int(number) if number.isdigit() else 1 << 30, folder.name)

    return [read_run(folder) for folder in sorted(folders, key=order)]


def set_aside(session: Path, kept: Collection[str]) -> None:
    """Move whatever below ``runs/`` is not in ``kept`` to ``unfinished/``: what was cut off, and what is measured again. Raises CannotWrite."""
    runs = session / "runs"
    try:
        for path in sorted(runs.iterdir()) if runs.is_dir() else ():
            if path.name not in kept:
                (session / UNFINISHED).mkdir(exist_ok=True)
                shutil.rmtree(session / UNFINISHED / path.name, ignore_errors=True)
                path.rename(session / UNFINISHED / path.name)
    except OSError as error:
        raise CannotWrite(
            f"an unfinished measurement cannot be set aside: {error.strerror or error}", where=str(session), hint="check permissions"
        ) from None
