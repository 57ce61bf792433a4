"""What a file of lengths states, as it is read: lengths one by one, or how often each occurs; and the names that people give to such figures."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pytest_kvcache import units
from pytest_kvcache.analysis.waste import LONGEST, Lengths, lengths
from pytest_kvcache.errors import UsageError
from pytest_kvcache.userfiles import MARK

MOST_LINE = 4 << 20
MOST_HISTOGRAM = 200_000
_SHARES_OF = 1_000_000
_WIDEST = 512
WHOLE = ("length", "tokens", "total_tokens")
PROMPT = (
    "prompt_tokens",
    "input_tokens",
    "input_length",
    "input_len",
    "prompt_len",
    "num_prompt_tokens",
    "ContextTokens",
    "Request tokens",
    "prompt_tokens_planned",
)
OUTPUT = (
    "completion_tokens",
    "output_tokens",
    "output_length",
    "output_len",
    "generated_tokens",
    "num_output_tokens",
    "GeneratedTokens",
    "Response tokens",
)


class Found:
    """What a file states, as it is read: lengths one by one, or how often each occurs."""

    def __init__(self) -> None:
        self.in_order = array("q")
        self.counts: dict[int, int] = {}
        self.empty = 0
        self.unanswered = 0
        self.notes: dict[str, None] = {}

    def add(self, length: int) -> None:
        """Take one request; one of no token held nothing, and is only counted."""
        if length:
            self.in_order.append(length)
        else:
            self.empty += 1

    def add_counts(self, counts: Mapping[int, int]) -> None:
        """Take so many requests of each length."""
        for length, count in counts.items():
            self.counts[length] = self.counts.get(length, 0) + count

    def whole(self, path: Path) -> Lengths:
        """Return the distribution. Raises UsageError where there is none, or a length that is none."""
        import numpy as np

        found, times = np.unique(np.frombuffer(self.in_order, dtype=np.int64), return_counts=True) if self.in_order else ((), ())
        self.add_counts(dict(zip((int(one) for one in found), (int(one) for one in times), strict=True)))
        if not any(self.counts.values()):
            what = "no request in this file held a token" if self.empty else "no length is in this file"
            what = "no conversation in this file has a question with an answer" if self.unanswered else what
            raise UsageError(what, where=str(path), hint="one number or one object with token counts a line; docs/memory.md lists the formats")
        notes = [f"left out: {units.show(self.empty, 'requests')} that held no token, or that the server refused"] if self.empty else []
        if self.unanswered:
            notes.append(f"conversations without a question and its answer are left out: {self.unanswered:,}")
        try:
            counts = lengths(self.counts).counts
        except UsageError as error:
            raise UsageError(error.what, where=str(path), hint=error.hint) from None
        ordered = len(self.in_order) == sum(counts.values())
        return Lengths(counts, path.name, self.in_order if ordered else (), (*self.notes, *notes))


def lines_of(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers. Raises UsageError for a line beyond all bounds."""
    for number, raw in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), start=1):
        if len(raw) > MOST_LINE:
            raise UsageError(f"line {number} is longer than {MOST_LINE >> 20} MiB", where=str(path), hint="one request a line")
        line = raw.removeprefix(MARK) if number == 1 else raw
        if line.strip():
            yield number, line


def weighed(pairs: Sequence[tuple[Any, Any, Any]], where: str, found: Found) -> None:
    """Take lengths (or ranges, lowest to highest) with their weights: whole weights as counts, others as shares of a million requests."""
    if len(pairs) > MOST_HISTOGRAM:
        raise UsageError(f"{len(pairs):,} parts of a histogram", where=where, hint=f"at most {MOST_HISTOGRAM:,}")
    for number, (low, high, weight) in enumerate(pairs, start=1):
        for length in (low, high):
            if isinstance(length, bool) or not isinstance(length, int) or not 0 < length <= LONGEST:
                raise UsageError(
                    f"part {number} of the histogram: {str(length)[:40]!r} is no length in tokens", where=where, hint="whole numbers from 1 on"
                )
        if high < low:
            raise UsageError(f"part {number} of the histogram ends at {high:,}, before it begins at {low:,}", where=where)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e15:
            raise UsageError(f"part {number} of the histogram: {str(weight)[:40]!r} is no count and no share", where=where, hint="a number from 0 on")
    total = math.fsum(weight for _, _, weight in pairs)
    if not total > 0:
        raise UsageError("the weights of the histogram add up to nothing", where=where)
    shares = any(weight != round(weight) for _, _, weight in pairs)
    if shares:
        found.notes[f"the weights are shares: they are shown as of {_SHARES_OF:,} requests"] = None
    for low, high, weight in pairs:
        count = max(round(weight / total * _SHARES_OF), 1 if weight else 0) if shares else int(weight)
        if high > low and count:
            found.notes["a range of lengths is taken as spread evenly over it"] = None
        points = max(min(high - low + 1, count, _WIDEST), 1)
        for at in range(points):
            length = low + round((high - low) * at / max(points - 1, 1)) if points > 1 else (low + high) // 2
            found.add_counts({length: count // points + (at < count % points)})
