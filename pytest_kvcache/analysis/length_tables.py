"""CSV files of lengths: with a line of names a request (or a part of a histogram) a line, without one a histogram."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from pytest_kvcache.analysis.length_counts import MOST_HISTOGRAM, OUTPUT, PROMPT, WHOLE, Found, lines_of, weighed
from pytest_kvcache.analysis.waste import LONGEST
from pytest_kvcache.errors import UsageError

_WEIGHT = ("count", "requests", "weight", "share", "frequency", "n")
_LOW, _HIGH = ("low", "lowest", "from", "min"), ("high", "highest", "to", "max")
_Take = Callable[[list[str]], tuple[int, int, float]]
"""How a row is read: as a length or a range, and its weight."""


def is_csv(path: Path, head: bytes) -> bool:
    """Return whether a file is taken for a CSV: by its name, or by a separator in its first line where that is no JSON."""
    line = head.split(b"\n", 1)[0]
    return path.suffix.lower() in {".csv", ".tsv"} or (head[:1] not in (b"[", b"{") and any(mark in line for mark in (b",", b";", b"\t")))


def read_table(file: IO[bytes], path: Path, found: Found) -> None:
    """Take a CSV: with a line of names a request (or a part of a histogram) a line, without one a histogram."""
    numbered = lines_of(file, path)
    at = [0]

    def texts(first: bytes) -> Iterator[str]:
        yield first.decode("utf-8", "replace")
        for number, line in numbered:
            at[0] = number
            yield line.decode("utf-8", "replace")

    start = next(numbered, None)
    if start is None:
        return
    at[0], first = start
    mark = next((mark for mark in ("\t", ";", ",") if mark.encode() in first), ",")
    rows = csv.reader(texts(first), delimiter=mark)

    def next_row() -> list[str] | None:
        try:
            return next(rows, None)
        except csv.Error as error:
            raise UsageError(f"line {at[0]} is no CSV: {str(error)[:120]}", where=str(path)) from None

    head = next_row() or []
    named = not _is_number(head[0]) if head else False
    take, histogram = _columns([name.strip().lower() for name in head], path) if named else (_parts, True)
    row = next_row() if named else head
    pairs: list[tuple[Any, Any, Any]] = []
    while row is not None:
        try:
            low, high, weight = take(row)
        except (ValueError, IndexError, OverflowError):
            what = f"line {at[0]} cannot be read: {','.join(row)[:80]!r}"
            raise UsageError(what, where=str(path), hint="lengths are whole numbers of tokens from 0 on, weights numbers from 0 on") from None
        if not histogram:
            found.add(int(low))
        else:
            pairs.append((low, high, weight))
            if len(pairs) > MOST_HISTOGRAM:
                raise UsageError(
                    f"more than {MOST_HISTOGRAM:,} parts of a histogram", where=str(path), hint="write one request a line, or wider ranges"
                )
        row = next_row()
    if pairs:
        weighed(pairs, str(path), found)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _tokens(text: str) -> int:
    """Return a whole number of tokens from 0 on. Raises ValueError."""
    number = float(text)
    if not number.is_integer() or not 0 <= number <= LONGEST:
        raise ValueError(text)
    return int(number)


def _weight(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1e15:
        raise ValueError(text)
    return int(number) if number.is_integer() else number


def _parts(row: list[str]) -> tuple[int, int, float]:
    """Return a part of a histogram without names: a length, a length and its weight, or a range and its weight."""
    if len(row) > 3:
        raise ValueError("too many columns")
    low = _tokens(row[0])
    return low, _tokens(row[-2]) if len(row) == 3 else low, _weight(row[-1]) if len(row) > 1 else 1


def _columns(names: list[str], path: Path) -> tuple[_Take, bool]:
    """Return how a row is read, and whether rows are parts of a histogram. Raises UsageError where the names tell no length."""

    def at(known: Iterable[str]) -> int | None:
        return next((names.index(name.lower()) for name in known if name.lower() in names), None)

    whole, prompt, output, weight, low, high = (at(known) for known in (WHOLE, PROMPT, OUTPUT, _WEIGHT, _LOW, _HIGH))
    if low is not None and high is not None and weight is not None:
        return lambda row: (_tokens(row[low]), _tokens(row[high]), _weight(row[weight])), True
    if prompt is not None and output is not None:
        # the sum of both: other columns of a trace may be called total tokens or length too
        return lambda row: (_tokens(row[prompt]) + _tokens(row[output]), 0, 1), False
    if whole is not None and weight is not None:
        return lambda row: (_tokens(row[whole]), _tokens(row[whole]), _weight(row[weight])), True
    if whole is not None:
        return lambda row: (_tokens(row[whole]), 0, 1), False
    raise UsageError(
        "the first line names no length",
        where=f"{path}, line 1",
        hint=f"a column of {', '.join(WHOLE[:2])}; or of {', '.join(PROMPT[:3])} and one of {', '.join(OUTPUT[:3])}; or length,count",
    )
