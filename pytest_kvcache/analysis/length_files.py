"""The lengths of requests in a file of the user's: rows of a load, traces, conversations, plain numbers, or a histogram (JSON, TOML, CSV).

Read are JSON Lines (a number, or an object with token counts a line: requests.jsonl of a Run, traces of Mooncake and of vLLM's timed_trace, a
plain trace), CSV with a line of names (BurstGPT, Azure LLM inference, one's own) or without (``length,weight`` or ``low,high,weight``), conversations
(ShareGPT, LMSYS, WildChat, the messages of the chat API), and one JSON or TOML document: a histogram, a list of lengths, or the lanes that
``plan --traffic`` takes. A line is read after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import msgspec

from pytest_kvcache.analysis.length_counts import MOST_LINE, OUTPUT, PROMPT, WHOLE, Found, lines_of, weighed
from pytest_kvcache.analysis.length_tables import is_csv, read_table
from pytest_kvcache.analysis.payload import REFUSED
from pytest_kvcache.analysis.waste import LONGEST, Lengths
from pytest_kvcache.capacity.documents import read_traffic
from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.load.traces import guessed_tokens, is_conversation, turns_of
from pytest_kvcache.userfiles import MARK, not_text

MOST_DOCUMENT = 1 << 30
_HINT = "a number of tokens, or an object with " + ", ".join((*WHOLE[:2], *PROMPT[:4], *OUTPUT[:3]))
_GUESSED = "texts are not counted by a tokenizer here: their lengths are 4 tokens for 3 words"
_TURNS = "each question of a conversation is a request that holds all that was said before it"


def read_lengths(path: Path) -> Lengths:
    """Return the distribution in a file. Raises UsageError with the number of a line that says no length, CannotJudge where it cannot be read."""
    found = Found()
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
                (read_table if is_csv(path, head) else _json_lines)(file, path, found)
    except OSError as error:
        raise CannotJudge(
            f"the lengths cannot be read: {error.strerror or error}", where=str(path), hint="name a file of requests or lengths, or a Run's folder"
        ) from None
    return found.whole(path)


# -- JSON Lines ----------------------------------------------------------------------------------------------------

_ROW: Any = msgspec.defstruct(
    "_ROW",
    [(f"f{at}", int | None, msgspec.field(default=None, name=name)) for at, name in enumerate((*WHOLE, *PROMPT, *OUTPUT))]
    + [("kind", str, ""), ("outcome", str, "")],
)
"""The usual line: only its counts are decoded, so that ten million of them take a minute."""
_PROMPT_FIELDS = [f"f{len(WHOLE) + at}" for at in range(len(PROMPT))]
_OUTPUT_FIELDS = [f"f{len(WHOLE) + len(PROMPT) + at}" for at in range(len(OUTPUT))]


def _json_lines(file: IO[bytes], path: Path, found: Found) -> None:
    usual, decoder = msgspec.json.Decoder(_ROW), msgspec.json.Decoder()
    prompts, outputs = _PROMPT_FIELDS, _OUTPUT_FIELDS
    prompt_at, output_at = prompts[0], outputs[0]  # those of the line before: all lines of a file have the same
    for number, line in lines_of(file, path):
        try:
            row = usual.decode(line)
            plain = (not row.kind or row.kind == "request") and row.outcome not in REFUSED
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


def _line(decoder: Any, line: bytes, where: str, found: Found) -> None:
    """Take one line of any kind."""
    try:
        value = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"this line is no JSON: {str(error)[:200]}", where=where, hint="one JSON value a line") from None
    _value(value, where, found)


def _value(value: Any, where: str, found: Found) -> None:
    """Take one value: a histogram, a conversation, a request, or a length."""
    histogram = _decimal(value)
    if histogram is not None:
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in histogram.values()) or 0 in histogram:
            raise UsageError(f"this is no histogram: {str(value)[:80]}", where=where, hint='lengths and how many of each, as {"256": 15, "2048": 1}')
        found.add_counts(histogram)
    elif is_conversation(value) and not _stated(value):
        said = 0
        turns = turns_of(value, guessed_tokens)
        for question, answer in turns:
            said += question + answer
            found.add(said)
        found.unanswered += not turns
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
        parts = _stated(value)
        if value.get("kind") == "request" and value.get("outcome") in REFUSED:
            return 0
    if not parts or any(isinstance(part, bool) or not 0 <= part <= LONGEST for part in parts):
        why = "states no length" if not parts else f"states a length that no request has (1 to {LONGEST:,} tokens)"
        raise UsageError(f"this line {why}: {str(value)[:80]}", where=where, hint=_HINT)
    return sum(parts)


def _stated(value: dict[str, Any]) -> list[int]:
    """Return the token counts that an object states: one for all, or prompt and output; none where it states none."""
    one, prompt, output = (next((value[name] for name in names if isinstance(value.get(name), int)), None) for names in (WHOLE, PROMPT, OUTPUT))
    return [one] if one is not None else [prompt, output or 0] if prompt is not None else []


# -- one document --------------------------------------------------------------------------------------------------


def _document(file: IO[bytes], head: bytes, path: Path, found: Found) -> bool:
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
        raise UsageError(
            f"this list is no JSON: {str(error)[:200]}", where=str(path), hint="a list of lengths, of requests, or of conversations"
        ) from None
    if isinstance(value, dict) and {"lane", "lanes", "concurrency"} & value.keys():
        _lanes(path, found)
        return True
    if isinstance(value, dict) and isinstance(value.get("lengths", value.get("histogram")), dict | list):
        value = value.get("lengths", value.get("histogram"))
    if isinstance(value, dict) and all(isinstance(value.get(name), list) for name in ("input_lens", "output_lens")):
        value = [{"input_len": a, "output_len": b} for a, b in zip(value["input_lens"], value["output_lens"], strict=False)]
    histogram = _decimal(value)
    if histogram is not None:
        weighed([(length, length, weight) for length, weight in histogram.items()], str(path), found)
    elif isinstance(value, list) and value and all(isinstance(pair, list) and len(pair) in (2, 3) for pair in value):
        weighed([(pair[0], pair[-2], pair[-1]) for pair in value], str(path), found)
    elif isinstance(value, list):
        for number, one in enumerate(value, start=1):
            _value(one, f"{path}, value {number}", found)
    else:
        _value(value, str(path), found)
    return True


def _lanes(path: Path, found: Found) -> None:
    """Take the lanes of a document that ``plan --traffic`` takes: each request of a lane at once, its lengths by their weights."""
    traffic = read_traffic(path)
    pairs = []
    for lane in traffic.lanes:
        total = sum(weight for _, weight in lane.lengths)
        pairs += [(tokens, tokens, weight / total * lane.concurrency) for tokens, weight in lane.lengths]
    weighed(pairs, str(path), found)
