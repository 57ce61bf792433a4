"""What lies in a result file before anybody knows whose it is: JSON, a JSON value a line, YAML, CSV, or Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_kvcache.errors import CannotJudge, UsageError

LARGEST_BYTES = 512 << 20
MOST_CELLS = 20_000_000
_PARQUET = b"PAR1"
_HINT = "name the JSON file that the load tool wrote"


@dataclass(frozen=True)
class Table:
    """A file of rows: their cells as text, and the comment lines (``# name: value``) above them."""

    rows: list[list[str]]
    comments: dict[str, str]

    @property
    def head(self) -> list[str]:
        """The first row."""
        return self.rows[0] if self.rows else []

    def records(self) -> list[dict[str, Any]]:
        """Return the rows below the head as dictionaries; a cell is what JSON makes of it, else its text, and an empty one is left out."""
        return [{name: read_cell(cell) for name, cell in zip(self.head, row, strict=False) if name and cell != ""} for row in self.rows[1:]]


@dataclass(frozen=True)
class Columns:
    """A file of columns: a Parquet table and the metadata that its writer put beside it."""

    table: Any
    metadata: dict[str, str]


def read_cell(text: str) -> Any:
    """Return what JSON makes of a cell, else its text; a list that is none of JSON's is left out as None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None if text[:1] in {"[", "{"} else text


def read_file(path: Path) -> Iterator[Any]:
    """Yield what a file holds: JSON values (dictionaries and lists), a ``Table`` or ``Columns``.

    Raises UsageError where it cannot be read or a library for its format is not installed, CannotJudge where it is of no such format.
    """
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UsageError("a result file of more than 512 MiB is not read", where=str(path), hint="write it without the text of answers")
        with path.open("rb") as file:
            columns = file.read(4) == _PARQUET
        if columns:
            yield _read_columns(path)
            return
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"no result file: {error.strerror or error}", where=str(path)) from None
    except UnicodeDecodeError:
        raise CannotJudge("cannot judge: this is no text", where=str(path), hint=_HINT) from None
    try:
        yield json.loads(text)
        return
    except RecursionError:
        raise CannotJudge("cannot judge: this is nested too deep", where=str(path)) from None
    except ValueError as error:
        whole = error
    if path.suffix.lower() in {".yaml", ".yml"}:
        yield _read_yaml(path, text)
        return
    if (lines := _read_lines(text)) is not None:
        yield from lines
        return
    table = _read_table(path, text)
    if table is None:
        raise CannotJudge(f"cannot judge: this is no JSON, CSV, YAML or Parquet: {str(whole)[:120]}", where=str(path), hint=_HINT)
    yield table


def _read_lines(text: str) -> list[Any] | None:
    """Return the values of a file with a JSON value a line; None where it is none of several."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        values = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return None
    return values if len(values) > 1 else None


def _read_table(path: Path, text: str) -> Table | None:
    comments: dict[str, str] = {}
    rows: list[list[str]] = []
    usual = csv.field_size_limit(LARGEST_BYTES)  # of the whole process
    try:
        for number, row in enumerate(csv.reader(io.StringIO(text, newline=""))):
            if row[:1] and row[0].startswith("#"):
                name, _, value = ",".join(row)[1:].partition(":")
                comments[name.strip()[:120]] = value.strip()[:500]
            else:
                rows.append(row)
            if number * max(len(row), 1) > MOST_CELLS:
                raise UsageError("a table of more than 20,000,000 cells is not read", where=str(path))
    except csv.Error:
        return None
    finally:
        csv.field_size_limit(usual)
    while rows and not any(rows[0]):
        rows.pop(0)
    return Table(rows, comments) if len(rows) > 1 and len(rows[0]) > 1 else None


def _read_yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "YAML is read with PyYAML, which is not installed", where=str(path), hint='pip install "pytest-kvcache[imports]", or name the JSON file'
        ) from None
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  both are the safe ones
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise CannotJudge(f"cannot judge: this is no YAML: {str(error).splitlines()[0][:120]}", where=str(path), hint=_HINT) from None


def _read_columns(path: Path) -> Columns:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UsageError(
            "Parquet is read with pyarrow, which is not installed",
            where=str(path),
            hint='pip install "pytest-kvcache[imports]", or name the JSON file',
        ) from None
    try:
        file = parquet.ParquetFile(path)
        told = {key.decode(errors="replace"): value.decode(errors="replace")[:500] for key, value in (file.schema_arrow.metadata or {}).items()}
        if file.metadata.num_rows * file.metadata.num_columns > MOST_CELLS:
            raise UsageError("a table of more than 20,000,000 cells is not read", where=str(path), hint="name the JSON file of the same measurement")
        return Columns(file.read(), told)
    except (ArrowException, OSError, ValueError) as error:
        raise CannotJudge(f"cannot judge: this is no Parquet: {str(error)[:120]}", where=str(path), hint=_HINT) from None
