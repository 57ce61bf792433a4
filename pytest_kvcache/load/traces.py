"""Recorded traffic: when requests came, how long they were, and which of them began alike.

Read are the JSONL of Mooncake and of vLLM's ``timed_trace`` (``timestamp``, ``input_length``, ``output_length``, ``hash_ids``), the
CSV files of BurstGPT and of Azure's inference traces, conversations (ShareGPT, LMSYS, WildChat, the messages of the chat API; they have no
times), and a plain JSONL of ``t``, ``prompt_tokens``, ``output_tokens`` and optionally ``prefix_id``. A trace holds lengths and no text of
anybody.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pytest_kvcache.errors import UsageError
from pytest_kvcache.userfiles import MARK

MOONCAKE = "mooncake"
TIMED = "timed_trace"
BURSTGPT = "burstgpt"
AZURE = "azure"
SHAREGPT = "sharegpt"
PLAIN = "plain"
FORMATS = (MOONCAKE, TIMED, BURSTGPT, AZURE, SHAREGPT, PLAIN)

MOST_REQUESTS = 2_000_000
WHOLE_JSON_LIMIT = 2**31
_TIMES = ("timestamp", "t", "time", "created_time", "arrival_s", "arrival_time")
_PROMPTS = ("input_length", "prompt_tokens", "input_tokens", "contexttokens", "request tokens", "prompt_len")
_OUTPUTS = ("output_length", "output_tokens", "completion_tokens", "generatedtokens", "response tokens", "output_len")
_CONVERSATION = ("conversations", "conversation", "messages")  # ShareGPT; LMSYS and WildChat; the chat API
_BLOCKS = (512, 16, 32, 64, 128, 256, 1024, 2048)
_LINE_LIMIT = 4 * 2**20
_PAST = 10_000
_MOST = 1e15


class Recorded(NamedTuple):
    """One request, or one conversation where ``turns`` holds question and answer lengths.

    ``at_s`` counts from the first request, None where the trace has no times; ``hash_ids`` name its blocks, equal where two
    prompts begin alike; ``prefix`` is (id, tokens) of a beginning that others share; ``images`` came with it, their tokens in ``prompt``.
    """

    at_s: float | None
    prompt: int
    output: int
    hash_ids: tuple[int | str, ...] = ()
    prefix: tuple[str, int] | None = None
    turns: tuple[tuple[int, int], ...] = ()
    images: int = 0


@dataclass
class Trace:
    """The requests of a window in order of time. ``block`` is the number of tokens that one of ``hash_ids`` stands for.

    ``span_s`` is how long the window lasts once its speed is applied; ``unit`` is how the numbers of a JSONL's times were taken (s, ms), which
    the file itself does not say; ``notes`` tell what was left out.
    """

    format: str
    requests: list[Recorded]
    block: int = 0
    span_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    unit: str = ""

    @property
    def timed(self) -> bool:
        """Whether it says when requests came."""
        return bool(self.requests) and self.requests[0].at_s is not None

    @property
    def shares(self) -> bool:
        """Whether requests begin alike."""
        return any(one.hash_ids or one.prefix or one.turns for one in self.requests)


def read_trace(
    path: Path,
    *,
    form: str = "auto",
    speed: float = 1.0,
    from_s: float = 0.0,
    for_s: float = 0.0,
    unit: str = "auto",
    block: int = 0,
    count: Callable[[str], int] | None = None,
) -> Trace:
    """Return the requests of a trace from ``from_s`` on, ``for_s`` seconds of it (0: all), ``speed`` times as fast.

    ``unit`` is that of the times of a JSONL (s or ms; auto takes ms for Mooncake) and ``block`` the tokens of one hash id (0 finds
    out). ``count`` counts the tokens of a text, for conversations. Raises UsageError, with the number of the line.
    """
    if not speed > 0:
        raise UsageError("the speed of a trace must be above 0", hint="2 replays it twice as fast")
    seen = [0]
    try:
        form = _format_of(path) if form == "auto" else form
        rows, notes = _sharegpt(path, count) if form == SHAREGPT else (_rows(path, form), [])
        milli = unit == "ms" or (unit == "auto" and form == MOONCAKE)
        inside = _inside(rows, 0.001 if milli else 1.0, from_s, from_s + for_s if for_s else math.inf, seen)
        requests = list(itertools.islice(inside, MOST_REQUESTS + 1))
    except OSError as error:
        raise UsageError(f"the trace cannot be read: {error.strerror or error}", where=str(path)) from None
    if not seen[0]:
        raise UsageError("the trace holds no request", where=str(path), hint=f"known formats: {', '.join(FORMATS)}")
    if not requests:
        what = f"no request of the trace lies in the window from {from_s:g} s on"
        raise UsageError(what, where=str(path), hint="it counts from its first request")
    if len(requests) > MOST_REQUESTS:
        del requests[MOST_REQUESTS:]
        notes.append(f"more than {MOST_REQUESTS:,} requests: the rest of the trace is left out")
    elif for_s or from_s:
        notes.append(f"{len(requests):,} of the first {seen[0]:,} requests of the trace lie in the window")
    empty = sum(one.output < 1 or one.prompt < 1 for one in requests)
    if empty:
        notes.append(f"{empty:,} of {len(requests):,} requests of the trace have no prompt or no answer (failures) and are left out")
        requests = [one for one in requests if one.output >= 1 and one.prompt >= 1]
    if not requests:
        raise UsageError("the trace holds no request with a prompt and an answer", where=str(path))
    pictured = sum(one.images > 0 for one in requests)
    if pictured:
        notes.append(
            f"{pictured:,} of {len(requests):,} requests of the trace came with images: they are replayed as text of as many tokens,"
            " so that the server encodes no image"
        )
    if form in (MOONCAKE, TIMED, PLAIN):
        block = block or _block_of(requests)
        if any(one.hash_ids for one in requests) and not block:
            what = "how many tokens a hash id stands for cannot be told from the trace"
            raise UsageError(what, where=str(path), hint="give it with --kv-trace-block")
    if requests[0].at_s is None:
        return Trace(form, _with_prefixes(requests), block, 0.0, notes)
    requests = sorted((one._replace(at_s=(one.at_s or 0.0) / speed) for one in requests), key=lambda one: one.at_s or 0.0)
    taken = ("ms" if milli else "s") if form in (MOONCAKE, TIMED, PLAIN) else ""
    return Trace(form, _with_prefixes(requests), block, for_s / speed if for_s else requests[-1].at_s or 0.0, notes, taken)


def _inside(rows: Iterator[Recorded], unit_s: float, since_s: float, until_s: float, seen: list[int]) -> Iterator[Recorded]:
    """Yield the requests of a window with times from its begin; ``seen`` counts all that were looked at. Public traces run for weeks.

    The times count from the earliest of the first thousand requests, and reading stops when thousands in a row are past the window:
    a trace is in order, but for requests that came together.
    """
    head = list(itertools.islice(rows, 1000))
    timed = bool(head) and all(one.at_s is not None for one in head)
    origin = min((one.at_s or 0.0 for one in head), default=0.0)
    past = 0
    for one in itertools.chain(head, rows):
        seen[0] += 1
        if not timed:
            yield one._replace(at_s=None)
            continue
        if one.at_s is None:
            raise UsageError(f"request {seen[0]} of the trace has no time, and those before it have one")
        at_s = max(0.0, (one.at_s - origin) * unit_s)
        if at_s >= until_s:
            past += 1
            if past > _PAST:
                return
        elif at_s >= since_s:
            past = 0
            yield one._replace(at_s=at_s - since_s)


def _with_prefixes(requests: list[Recorded]) -> list[Recorded]:
    """Fill in how much requests of one prefix_id share where the trace does not say: all of the shortest but its last 16 tokens."""
    shortest: dict[str, int] = {}
    for one in requests:
        if one.prefix is not None and not one.prefix[1]:
            shortest[one.prefix[0]] = min(shortest.get(one.prefix[0], one.prompt), one.prompt)
    if not shortest:
        return requests
    return [
        one._replace(prefix=(one.prefix[0], max(0, shortest[one.prefix[0]] - 16))) if one.prefix is not None and not one.prefix[1] else one
        for one in requests
    ]


def _format_of(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(65_536).removeprefix(MARK).lstrip()
    if not head:
        raise UsageError("the trace is empty", where=str(path))
    line = head.split(b"\n", 1)[0].decode("utf-8", "replace").lower()
    if head[:1] == b"[":
        return SHAREGPT
    if head[:1] == b"{":
        if any(f'"{name}"' in line for name in _CONVERSATION):
            return SHAREGPT
        if '"hash_ids"' not in line and '"input_length"' not in line:
            return PLAIN
        rows = list(itertools.islice(_json_lines(path), 200))
        return MOONCAKE if _block_of(rows) == 512 else TIMED
    if "contexttokens" in line:
        return AZURE
    if "request tokens" in line:
        return BURSTGPT
    raise UsageError("the format of the trace is not known", where=str(path), hint=f"name it with --kv-trace-format: {', '.join(FORMATS)}")


def _rows(path: Path, form: str) -> Iterator[Recorded]:
    return _csv(path, form) if form in (AZURE, BURSTGPT) else _json_lines(path)


def _json_lines(path: Path) -> Iterator[Recorded]:
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(_LINE_LIMIT), b""), start=1):
            line = raw.removeprefix(MARK) if number == 1 else raw
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise UsageError(f"line {number} is no JSON object", where=str(path), hint="one request a line")
            yield _of(row, number, path)


def _of(row: dict[str, Any], number: int, path: Path) -> Recorded:
    low = {str(name).lower(): value for name, value in row.items()}

    def of(names: Iterable[str], what: str) -> float:
        for name in names:
            value = low.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _MOST:
                return float(value)
        found = next((f"{name} {low[name]!r}"[:60] for name in names if name in low), "")
        hint = "a number from 0 on" if found else f"one of {', '.join(names)}"
        raise UsageError(f"line {number} has no {what}{f': {found}' if found else ''}", where=str(path), hint=hint)

    ids = low.get("hash_ids")
    prefix = low.get("prefix_id")
    shared = low.get("prefix_tokens", 0)
    return Recorded(
        of(_TIMES, "time") if any(name in low for name in _TIMES) else None,
        int(of(_PROMPTS, "prompt length")),
        int(of(_OUTPUTS, "output length")),
        tuple(one for one in ids if isinstance(one, (int, str))) if isinstance(ids, list) else (),
        (str(prefix)[:200], int(shared) if isinstance(shared, int) else 0) if prefix is not None else None,
    )


def _csv(path: Path, form: str) -> Iterator[Recorded]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = csv.reader(file)
        names = [name.strip().lower() for name in next(lines, [])]
        try:
            time_at = names.index("timestamp")
            prompt_at = next(names.index(name) for name in _PROMPTS if name in names)
            output_at = next(names.index(name) for name in _OUTPUTS if name in names)
            images_at = names.index("numimages") if "numimages" in names else None
        except (ValueError, StopIteration):
            raise UsageError(
                "the first line does not name timestamp, prompt and output tokens", where=str(path), hint=f"this is no {form} trace"
            ) from None
        while True:
            try:
                row = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                raise UsageError(f"line {lines.line_num} is no CSV: {error}", where=str(path)) from None
            if not row:
                continue
            try:
                at_s = float(row[time_at]) if form == BURSTGPT else _unix_s(row[time_at])
                prompt, output = int(float(row[prompt_at])), int(float(row[output_at]))
                images = int(float(row[images_at] or 0)) if images_at is not None else 0
                if not (abs(at_s) < _MOST and 0 <= prompt < _MOST and 0 <= output < _MOST):
                    raise ValueError("out of bounds")
            except (ValueError, IndexError, OverflowError):
                what = f"line {lines.line_num} cannot be read: {','.join(row)[:80]!r}"
                raise UsageError(what, where=str(path), hint="it needs a time and two numbers of tokens from 0 on") from None
            yield Recorded(at_s, prompt, output, images=images)


def _unix_s(text: str) -> float:
    """Return the time of ``2023-11-16 18:15:46.6805900``, with or without a zone, to the microsecond."""
    text = text.strip()
    dot = text.find(".")
    if dot > 0:
        end = dot + 1
        while end < len(text) and text[end].isdigit():
            end += 1
        text = text[:dot] + "." + text[dot + 1 : end][:6].ljust(6, "0") + text[end:]
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _sharegpt(path: Path, count: Callable[[str], int] | None) -> tuple[Iterator[Recorded], list[str]]:
    if path.stat().st_size > WHOLE_JSON_LIMIT:
        raise UsageError("the file is larger than 2 GiB", where=str(path), hint="take a part of it")
    raw = path.read_bytes().removeprefix(MARK)
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            found = [msgspec.json.decode(line) for line in raw.splitlines() if line.strip()]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise UsageError("the file is no JSON", where=str(path), hint="a list of conversations, or one a line") from None
    exact = count is not None and getattr(count, "exact", True)
    notes = [] if exact else ["the server counts no tokens of a text: the lengths of the trace are 4 tokens for 3 words"]

    def rows() -> Iterator[Recorded]:
        unanswered = 0
        for one in found if isinstance(found, list) else [found]:
            if turns := turns_of(one, count or guessed_tokens):
                yield Recorded(None, turns[0][0], turns[0][1], turns=turns)
            else:
                unanswered += 1
        if unanswered:
            notes.append(f"conversations without a question and its answer are left out: {unanswered:,}")

    return rows(), notes


def guessed_tokens(text: str) -> int:
    """Return about how many tokens a text has, where nobody counts them: 4 for 3 words."""
    return max(1, round(len(text.split()) * 4 / 3))


def is_conversation(value: Any) -> bool:
    """Return whether an object is a conversation, by its keys."""
    return isinstance(value, dict) and any(name in value for name in _CONVERSATION)


def turns_of(conversation: Any, count: Callable[[str], int]) -> tuple[tuple[int, int], ...]:
    """Return the tokens of each question and answer of one conversation, none of anything else; of two answers in a row the first counts."""
    said = next((conversation[name] for name in _CONVERSATION if name in conversation), None) if isinstance(conversation, dict) else None
    turns: list[tuple[int, int]] = []
    asked: list[str] = []
    for turn in said if isinstance(said, list) else ():
        if not isinstance(turn, dict):
            continue
        who, text = str(turn.get("from", turn.get("role"))), _text_of(turn.get("value", turn.get("content")))
        if who in {"human", "user"}:
            asked.append(text)
        elif who not in {"system", "tool"}:
            question = "\n".join(asked).strip()
            if question and text:
                turns.append((count(question), count(text)))
            asked = []
    return tuple(turns)


def _text_of(said: Any) -> str:
    """Return what was said, of a list of parts the text of those that have one."""
    if isinstance(said, list):
        return "\n".join(str(part.get("text") or "") for part in said if isinstance(part, dict)).strip()
    return str(said or "")


def _block_of(requests: Iterable[Recorded]) -> int:
    """Return how many tokens one hash id stands for: the block size for which every prompt has just as many ids as it fills."""
    known = [(one.prompt, len(one.hash_ids)) for one in itertools.islice(requests, 2000) if one.hash_ids and one.prompt]
    return next((size for size in _BLOCKS if known and all(-(-prompt // size) == ids for prompt, ids in known)), 0)


def common_blocks(trace: Trace) -> dict[int | str, int]:
    """Return how many leading blocks all requests share that begin with a block, by the id of that block."""
    seen: dict[int | str, tuple[int | str, ...]] = {}
    for one in trace.requests:
        if one.hash_ids:
            known = seen.get(one.hash_ids[0], one.hash_ids)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, one.hash_ids, strict=False)))
            seen[one.hash_ids[0]] = known[:same]
    return {root: len(ids) for root, ids in seen.items()}


def span_of(options: Mapping[str, Any]) -> float:
    """Return how long the window lasts that a load with these options replays, in seconds; 0 where the trace has no times."""
    try:
        speed, from_s, for_s = (float(options.get(f"trace_{name}", default)) for name, default in (("speed", 1.0), ("from_s", 0.0), ("for_s", 0.0)))
        block = int(options.get("trace_block", 0))
    except (TypeError, ValueError):
        raise UsageError("trace_speed, trace_from_s, trace_for_s and trace_block are numbers") from None
    form, unit = str(options.get("trace_format", "auto")), str(options.get("trace_unit", "auto"))
    if form == SHAREGPT:
        return 0.0
    path = Path(str(options["trace"]))
    try:
        if form == "auto" and _format_of(path) == SHAREGPT:
            return 0.0
    except OSError as error:
        raise UsageError(f"the trace cannot be read: {error.strerror or error}", where=str(path)) from None
    return read_trace(path, form=form, unit=unit, block=block, speed=speed, from_s=from_s, for_s=for_s).span_s
