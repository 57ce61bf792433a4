"""What a user states in a small TOML or JSON file: traffic in lanes, and the checklist of extreme inputs. Bounded, and never evaluated."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_kvcache.capacity.traffic import MOST_CONCURRENCY, MOST_LENGTHS, MOST_TOKENS, Lane, Traffic
from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.userfiles import read_user_text

_MOST_BYTES = 4 << 20
_MOST_INPUTS = 1000
_LANE_KEYS = {"name", "concurrency", "length", "lengths", "prompt", "output", "histogram"}


@dataclass(frozen=True)
class Input:
    """One extreme input of a checklist: its prompt and output in tokens, and how many of them come at once."""

    name: str
    prompt: int
    output: int
    concurrency: int

    @property
    def tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt + self.output


def read_document(path: Path) -> Any:
    """Return what a TOML (by its suffix) or JSON file holds. Raises UsageError."""
    text = read_user_text(path, "it", most_bytes=_MOST_BYTES)
    try:
        return tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:  # json's and TOML's errors
        kind = "TOML" if path.suffix.lower() == ".toml" else "JSON"
        raise UsageError(f"it is no {kind}: {str(error)[:200]}", where=str(path)[:200]) from None


def read_checklist(path: Path) -> list[Input]:
    """Return the inputs of a checklist: a list (JSON), or tables ``[[input]]`` with name, prompt, output and concurrency. Raises UsageError."""
    body = read_document(path)
    rows = body.get("input", body.get("inputs")) if isinstance(body, dict) else body
    if not isinstance(rows, list) or not rows or len(rows) > _MOST_INPUTS:
        raise UsageError(
            f"a checklist holds 1 to {_MOST_INPUTS} inputs", where=str(path)[:200], hint="[[input]] with name, prompt, output and concurrency"
        )
    found = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}, input {number}"[:200]
        if not isinstance(row, dict):
            raise UsageError("an input is a table of name, prompt, output and concurrency", where=where)
        _only(row, {"name", "prompt", "output", "concurrency"}, where)
        name = row.get("name", f"input {number}")
        if not isinstance(name, str) or not name.strip():
            raise UsageError("name is no text", where=where)
        found.append(
            Input(
                "".join(c for c in name if c.isprintable())[:80],
                _whole(row, "prompt", where, 1, MOST_TOKENS),
                _whole(row, "output", where, 0, MOST_TOKENS),
                _whole(row, "concurrency", where, 1, MOST_CONCURRENCY, 1),
            )
        )
    return found


def read_traffic(path: Path) -> Traffic:
    """Return the traffic that a file or a Run states. Raises UsageError, and CannotJudge for a Run that holds no answered request.

    A folder is a Run (or a session: its Runs together), ``*.jsonl`` the rows of one; anything else is TOML or JSON with tables ``[[lane]]``:
    name, concurrency, and length, or prompt and output, or lengths as ``{"2048" = 3, "8192" = 1}`` (tokens and the weight of each).
    """
    if path.is_dir() or path.suffix.lower() == ".jsonl":
        return _traffic_of_runs(path)
    body = read_document(path)
    rows = body.get("lane", body.get("lanes", [body])) if isinstance(body, dict) else body
    if not isinstance(rows, list):
        raise UsageError("traffic is a list of lanes", where=str(path)[:200], hint="[[lane]] with name, concurrency and length or lengths")
    return Traffic(tuple(_lane(row, number, f"{path}, lane {number}"[:200]) for number, row in enumerate(rows, start=1)), f"file {path.name}"[:120])


def _lane(row: Any, number: int, where: str) -> Lane:
    if not isinstance(row, dict):
        raise UsageError("a lane is a table of name, concurrency and length", where=where)
    _only(row, _LANE_KEYS, where)
    given = [key for key in ("length", "lengths", "histogram", "prompt") if key in row]
    if len(given) != 1:
        raise UsageError(
            "a lane states its lengths once", where=where, hint="length = 2048, or prompt and output, or lengths = { 2048 = 3, 8192 = 1 }"
        )
    if given[0] in ("lengths", "histogram"):
        lengths = _lengths(row[given[0]], where)
    elif given[0] == "prompt":
        lengths = ((_whole(row, "prompt", where, 1, MOST_TOKENS) + _whole(row, "output", where, 0, MOST_TOKENS, 0), 1.0),)
    else:
        lengths = ((_whole(row, "length", where, 1, MOST_TOKENS), 1.0),)
    name = "".join(c for c in str(row.get("name", f"lane {number}")) if c.isprintable())[:60]
    return Lane(name, _whole(row, "concurrency", where, 1, MOST_CONCURRENCY), lengths)


def _lengths(value: Any, where: str) -> tuple[tuple[int, float], ...]:
    """Return a histogram: {tokens: weight}, [[tokens, weight], ...] or a plain list of lengths."""
    if isinstance(value, Mapping):
        pairs: list[Any] = list(value.items())
    elif isinstance(value, list):
        pairs = [pair if isinstance(pair, list) else [pair, 1] for pair in value]
    else:
        raise UsageError("lengths are tokens with weights", where=where, hint="{ 2048 = 3, 8192 = 1 }")
    if len(pairs) > MOST_LENGTHS:
        raise UsageError(f"{len(pairs)} lengths", where=where, hint=f"at most {MOST_LENGTHS:,}")
    found = []
    for pair in pairs:
        try:
            tokens, weight = pair
            if isinstance(tokens, bool) or isinstance(weight, bool) or (isinstance(tokens, float) and not tokens.is_integer()):
                raise ValueError
            found.append((int(tokens), float(weight)))
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"{str(pair)[:60]} is no length with its weight", where=where, hint="{ 2048 = 3, 8192 = 1 }") from None
    return tuple(found)


def _only(row: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(str(key)[:40] for key in row if key not in known)
    if unknown:
        raise UsageError(f"unknown keys: {', '.join(unknown[:5])}", where=where, hint=f"known are {', '.join(sorted(known))}")


def _whole(row: Mapping[str, Any], key: str, where: str, low: int, high: int, default: int | None = None) -> int:
    value = row.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(
            f"{key} is missing" if value is None else f"{key} = {str(value)[:40]} is no whole number from {low} to {high:,}", where=where
        )
    return value


def _traffic_of_runs(path: Path) -> Traffic:
    from pytest_kvcache.records import LoadLine, RequestRow
    from pytest_kvcache.runfolder import read_lines, read_runs

    files = [run.folder / "requests.jsonl" for run in read_runs(path)] if path.is_dir() else [path]
    if not path.is_dir() and not path.is_file():
        raise UsageError("no such file", where=str(path)[:200])
    lanes: dict[str, list[tuple[float, float, int]]] = {}
    peaks: dict[str, int] = {}
    longest_replay: list[tuple[float, float, int]] = []
    for file in files:
        spans: dict[str, list[tuple[float, float, int]]] = {}
        for row in read_lines(file, LoadLine):
            if isinstance(row, RequestRow) and row.prompt_tokens and row.end_s > row.sent_s:
                spans.setdefault(row.lane, []).append((row.sent_s, row.end_s, row.prompt_tokens + (row.completion_tokens or 0)))
        for lane, held in spans.items():
            lanes.setdefault(lane, []).extend(held)
            peaks[lane] = max(peaks.get(lane, 0), _at_once(held))
        every = [span for held in spans.values() for span in held]
        if every and _at_once(every) > (_at_once(longest_replay) if longest_replay else 0):
            longest_replay = every
    if not lanes:
        raise CannotJudge(
            "no request with a known length is in it", where=str(path)[:200], hint="a Run whose server reports usage, or state lanes in a file"
        )
    made = []
    for lane, held in sorted(lanes.items()):
        # A request is in flight as long as it takes: at any moment the chance to meet it goes with its duration.
        weights: dict[int, float] = {}
        for start, end, tokens in held:
            weights[tokens] = weights.get(tokens, 0.0) + (end - start)
        made.append(Lane(lane or "all", peaks[lane], tuple(sorted(weights.items()))))
    count = sum(len(held) for held in lanes.values())
    return Traffic(tuple(made), f"{count:,} requests of {path.name}"[:120], tuple(longest_replay))


def _at_once(spans: list[tuple[float, float, int]]) -> int:
    """Return the most spans that overlap; one that ends when another starts does not."""
    events = sorted([(start, 1) for start, _, _ in spans] + [(end, -1) for _, end, _ in spans])
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    return most
