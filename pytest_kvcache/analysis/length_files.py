"""The lengths of requests in a file of the user's: rows of a load, traces, conversations, plain numbers, or a histogram (JSON, TOML, CSV).

Read are JSON Lines (a number, or an object with token counts a line: requests.jsonl of a Run, traces of Mooncake and of vLLM's timed_trace, a
plain trace), CSV with a line of names (BurstGPT, Azure LLM inference, one's own) or without (``length,weight`` or ``low,high,weight``), ShareGPT's
JSON, and one JSON or TOML document: a histogram, a list of lengths, or the lanes that ``plan --traffic`` takes. A line is read after the other.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from pytest_kvcache.analysis.waste import LONGEST, Lengths, lengths
from pytest_kvcache.capacity.documents import read_traffic
from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.load.traces import guessed_tokens, turns_of
from pytest_kvcache.userfiles import MARK, not_text

MOST_LINE = 4 << 20
MOST_DOCUMENT = 1 << 30
_MOST_HISTOGRAM = 200_000
_SHARES_OF = 1_000_000
_WIDEST = 512
_WHOLE = ("length", "tokens", "total_tokens")
_PROMPT = ("prompt_tokens", "input_tokens", "input_length", "input_len", "prompt_len", "num_prompt_tokens", "ContextTokens", "Request tokens", "prompt_tokens_planned")
_OUTPUT = ("completion_tokens", "output_tokens", "output_length", "output_len", "generated_tokens", "num_output_tokens", "GeneratedTokens", "Response tokens")
_WEIGHT = ("count", "requests", "weight", "share", "frequency", "n")
_LOW, _HIGH = ("low", "lowest", "from", "min"), ("high", "highest", "to", "max")
_HELD = frozenset({"ok", "stopped_early", "cut_off", "clamped", "truncated", "timeout"})
_HINT = "a number of tokens, or an object with " + ", ".join((*_WHOLE[:2], *_PROMPT[:4], *_OUTPUT[:3]))
_GUESSED = "texts are not counted by a tokenizer here: their lengths are 4 tokens for 3 words"
_TURNS = "each question of a conversation is a request that holds all that was said before it"


class _Found:
    """What a file states, as it is read: lengths one by one, or how often each occurs."""

    def __init__(self) -> None:
        self.in_order = array("q")
        self.counts: dict[int, int] = {}
        self.empty = 0
        self.notes: dict[str, None] = {}

    def add(self, length: int) -> None:
        """Take one request; one of no token held nothing, and is only counted."""
        if length:
            self.in_order.append(length)
        else:
            self.empty += 1

    def add_counts(self, counts: Mapping[int, int]) -> None:
        for length, count in counts.items():
            self.counts[length] = self.counts.get(length, 0) + count

    def whole(self, path: Path) -> Lengths:
        """Return the distribution. Raises UsageError where there is none, or a length that is none."""
        import numpy as np

        found, times = np.unique(np.frombuffer(self.in_order, dtype=np.int64), return_counts=True) if self.in_order else ((), ())
        self.add_counts(dict(zip((int(one) for one in found), (int(one) for one in times), strict=True)))
        if not any(self.counts.values()):
            what = "no request in this file held a token" if self.empty else "no length is in this file"
            raise UsageError(what, where=str(path), hint="one number or one object with token counts a line; docs/memory.md lists the formats")
        notes = [f"{self.empty:,} requests of no token, or that were refused, are left out"] if self.empty else []
        try:
            counts = lengths(self.counts).counts
        except UsageError as error:
            raise UsageError(error.what, where=str(path), hint=error.hint) from None
        ordered = len(self.in_order) == sum(counts.values())
        return Lengths(counts, path.name, self.in_order if ordered else (), (*self.notes, *notes))


def read_lengths(path: Path) -> Lengths:
    """Return the distribution in a file. Raises UsageError with the number of a line that says no length, CannotJudge where it cannot be read."""
    found = _Found()
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16).removeprefix(MARK).lstrip()
            if why := not_text(head):
                raise UsageError(f"no lengths can be read from this file: {why}", where=str(path))
            file.seek(0)
            if path.suffix.lower() == ".toml":
                _lanes(path, found)
            elif not _document(file, head, path, found):
                file.seek(0)
                (_csv if _is_csv(path, head) else _json_lines)(file, path, found)
    except OSError as error:
        raise CannotJudge(
            f"the lengths cannot be read: {error.strerror or error}", where=str(path), hint="name a file of requests or lengths, or a Run's folder"
        ) from None
    return found.whole(path)


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers. Raises UsageError for a line beyond all bounds."""
    for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), start=1):
        if len(line) > MOST_LINE:
            raise UsageError(f"line {number} is longer than {MOST_LINE >> 20} MiB", where=str(path), hint="one request a line")
        line = line.removeprefix(MARK) if number == 1 else line
        if line.strip():
            yield number, line


# -- JSON Lines ----------------------------------------------------------------------------------------------------

_ROW: Any = msgspec.defstruct(
    "_ROW",
    [(f"f{at}", int | None, msgspec.field(default=None, name=name)) for at, name in enumerate((*_WHOLE, *_PROMPT, *_OUTPUT))]
    + [("kind", str, ""), ("outcome", str, "")],
)
"""The usual line: only its counts are decoded, so that ten million of them take a minute."""
_PROMPT_FIELDS = [f"f{len(_WHOLE) + at}" for at in range(len(_PROMPT))]
_OUTPUT_FIELDS = [f"f{len(_WHOLE) + len(_PROMPT) + at}" for at in range(len(_OUTPUT))]


def _json_lines(file: IO[bytes], path: Path, found: _Found) -> None:
    usual, decoder = msgspec.json.Decoder(_ROW), msgspec.json.Decoder()
    prompts, outputs = _PROMPT_FIELDS, _OUTPUT_FIELDS
    prompt_at, output_at = prompts[0], outputs[0]  # those of the line before: all lines of a file have the same
    for number, line in _lines(file, path):
        try:
            row = usual.decode(line)
            plain = (not row.kind or row.kind == "request") and (not row.outcome or row.outcome in _HELD)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            plain = False
        if plain and row.f0 is None and row.f1 is None and row.f2 is None:
            if getattr(row, prompt_at) is None or getattr(row, output_at) is None:
                prompt_at = next((name for name in prompts if getattr(row, name) is not None), prompt_at)
                output_at = next((name for name in outputs if getattr(row, name) is not None), output_at)
            prompt, output = getattr(row, prompt_at), getattr(row, output_at)
            if prompt is not None and output is not None and 0 <= prompt <= LONGEST and 0 <= output <= LONGEST:
                found.add(prompt + output)
                continue
        _line(decoder, line, f"{path}, line {number}", found)


def _line(decoder: Any, line: bytes, where: str, found: _Found) -> None:
    """Take one line of any kind."""
    try:
        value = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"this line is no JSON: {str(error)[:200]}", where=where, hint="one JSON value a line") from None
    _value(value, where, found)


def _value(value: Any, where: str, found: _Found) -> None:
    """Take one value: a histogram, a conversation, a request, or a length."""
    histogram = _decimal(value)
    if histogram is not None:
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in histogram.values()) or 0 in histogram:
            raise UsageError(f"this is no histogram: {str(value)[:80]}", where=where, hint='lengths and how many of each, as {"256": 15, "2048": 1}')
        found.add_counts(histogram)
    elif isinstance(value, dict) and "conversations" in value:
        said = 0
        for question, answer in turns_of(value, guessed_tokens):
            said += question + answer
            found.add(said)
        found.notes.update(dict.fromkeys((_GUESSED, _TURNS)))
    elif not (isinstance(value, dict) and value.get("kind") in {"start", "note", "end"}):
        found.add(_length(value, where))


def _decimal(value: Any) -> dict[int, Any] | None:
    """Return an object whose names are all lengths as a histogram; None for any other value."""
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) and key.isdecimal() and len(key) < 11 for key in value):
        return None
    return {int(key): count for key, count in value.items()}


def _length(value: Any, where: str) -> int:
    """Return the length that one value states; 0 for a request that was refused before it held anything, or that has no token."""
    parts: list[int] = []
    if isinstance(value, int) and not isinstance(value, bool):
        parts = [value or -1]
    elif isinstance(value, dict):
        one = next((value[name] for name in _WHOLE if isinstance(value.get(name), int)), None)
        prompt = next((value[name] for name in _PROMPT if isinstance(value.get(name), int)), None)
        output = next((value[name] for name in _OUTPUT if isinstance(value.get(name), int)), 0)
        parts = [one] if one is not None else [prompt, output] if prompt is not None else []
        if value.get("kind") == "request" and value.get("outcome") not in _HELD:
            return 0
    if not parts or any(isinstance(part, bool) or not 0 <= part <= LONGEST for part in parts):
        raise UsageError(f"this line states no length: {str(value)[:80]}", where=where, hint=_HINT)
    return sum(parts)


# -- one document --------------------------------------------------------------------------------------------------


def _document(file: IO[bytes], head: bytes, path: Path, found: _Found) -> bool:
    """Take a file that is one JSON value; return False where it is none, as for JSON Lines. Raises UsageError."""
    if head[:1] not in (b"[", b"{"):
        return False
    size = file.seek(0, 2)
    file.seek(0)
    if head[:1] == b"{":
        if size > MOST_LINE:  # a larger object is no histogram
            return False
    elif size > MOST_DOCUMENT:
        raise UsageError(f"a list of more than {MOST_DOCUMENT >> 30} GiB", where=str(path), hint="write one value a line (JSON Lines)")
    try:
        value = msgspec.json.decode(file.read(MOST_DOCUMENT).removeprefix(MARK))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if head[:1] == b"{":
            return False
        raise UsageError(f"this list is no JSON: {str(error)[:200]}", where=str(path), hint="a list of lengths, of requests, or of conversations") from None
    if isinstance(value, dict) and {"lane", "lanes", "concurrency"} & value.keys():
        _lanes(path, found)
        return True
    if isinstance(value, dict) and isinstance(value.get("lengths", value.get("histogram")), dict | list):
        value = value.get("lengths", value.get("histogram"))
    if isinstance(value, dict) and all(isinstance(value.get(name), list) for name in ("input_lens", "output_lens")):
        value = [{"input_len": a, "output_len": b} for a, b in zip(value["input_lens"], value["output_lens"], strict=False)]
    histogram = _decimal(value)
    if histogram is not None:
        _weighed([(length, length, weight) for length, weight in histogram.items()], str(path), found)
    elif isinstance(value, list) and value and all(isinstance(pair, list) and len(pair) in (2, 3) for pair in value):
        _weighed([(pair[0], pair[-2], pair[-1]) for pair in value], str(path), found)
    elif isinstance(value, list):
        for number, one in enumerate(value, start=1):
            _value(one, f"{path}, value {number}", found)
    else:
        _value(value, str(path), found)
    return True


def _lanes(path: Path, found: _Found) -> None:
    """Take the lanes of a document that ``plan --traffic`` takes: each request of a lane at once, its lengths by their weights."""
    traffic = read_traffic(path)
    pairs = []
    for lane in traffic.lanes:
        total = sum(weight for _, weight in lane.lengths)
        pairs += [(tokens, tokens, weight / total * lane.concurrency) for tokens, weight in lane.lengths]
    _weighed(pairs, str(path), found)


def _weighed(pairs: Sequence[tuple[Any, Any, Any]], where: str, found: _Found) -> None:
    """Take lengths (or ranges, lowest to highest) with their weights: whole weights as counts, others as shares of a million requests."""
    if len(pairs) > _MOST_HISTOGRAM:
        raise UsageError(f"{len(pairs):,} parts of a histogram", where=where, hint=f"at most {_MOST_HISTOGRAM:,}")
    for number, (low, high, weight) in enumerate(pairs, start=1):
        for length in (low, high):
            if isinstance(length, bool) or not isinstance(length, int) or not 0 < length <= LONGEST:
                raise UsageError(f"part {number} of the histogram: {str(length)[:40]!r} is no length in tokens", where=where, hint="whole numbers from 1 on")
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


# -- CSV -----------------------------------------------------------------------------------------------------------


def _is_csv(path: Path, head: bytes) -> bool:
    line = head.split(b"\n", 1)[0]
    return path.suffix.lower() in {".csv", ".tsv"} or (head[:1] not in (b"[", b"{") and any(mark in line for mark in (b",", b";", b"\t")))


def _csv(file: IO[bytes], path: Path, found: _Found) -> None:
    """Take a CSV: with a line of names a request (or a part of a histogram) a line, without one a histogram."""
    numbered = _lines(file, path)
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
            if len(pairs) > _MOST_HISTOGRAM:
                raise UsageError(f"more than {_MOST_HISTOGRAM:,} parts of a histogram", where=str(path), hint="write one request a line, or wider ranges")
        row = next_row()
    if pairs:
        _weighed(pairs, str(path), found)


Take = Callable[[list[str]], tuple[int, int, float]]


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


def _columns(names: list[str], path: Path) -> tuple[Take, bool]:
    """Return how a row is read, and whether rows are parts of a histogram. Raises UsageError where the names tell no length."""

    def at(known: Iterable[str]) -> int | None:
        return next((names.index(name.lower()) for name in known if name.lower() in names), None)

    whole, prompt, output, weight, low, high = (at(known) for known in (_WHOLE, _PROMPT, _OUTPUT, _WEIGHT, _LOW, _HIGH))
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
        hint=f"a column of {', '.join(_WHOLE[:2])}; or of {', '.join(_PROMPT[:3])} and one of {', '.join(_OUTPUT[:3])}; or length,count",
    )
