"""Quality items: what is asked, and what the answer must be. The standard set, and a user's own JSON Lines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvcache.errors import UsageError
from pytest_kvcache.quality.graders import CHOICES, MATCHES, read_number
from pytest_kvcache.userfiles import read_user_text

if TYPE_CHECKING:
    from pytest_kvcache.server.endpoint import Endpoint

USER_MATCHES = tuple(match for match in MATCHES if match != "word")
_FIELDS = ("id", "prompt", "expect", "match", "max_tokens", "length_tokens", "depth", "note", "tolerance", "choices")
_LARGEST_FILE = 256 << 20
_MOST_ITEMS = 100_000
_DEFAULT_MAX_TOKENS = 64

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """One question. ``id`` is the same before and after a change, so that items pair.

    ``prompt`` is a text, or chat messages. ``match`` is one of graders.MATCHES. ``length_tokens`` is the planned prompt length (0: not
    known), ``depth`` where the answer stands in it, from 0 (start) to 1. ``expect`` is what the match needs: a text, a pattern, a number (with its
    ``tolerance``), one of ``choices``, a JSON Schema as text, or the name of a function (module:NAME).
    """

    id: str
    prompt: str | tuple[Message, ...]
    expect: str
    match: str = "exact"
    length_tokens: int = 0
    depth: float = 0.0
    max_tokens: int = _DEFAULT_MAX_TOKENS
    tolerance: float = 0.0
    choices: tuple[str, ...] = ()


def standard_items(endpoint: Endpoint, max_model_len: int | None = None, block_sizes: Sequence[int] = ()) -> list[Item]:
    """Return the standard set for the served model: 300 recall items at the lengths of ``grid.plan``, up to near its max length.

    ``max_model_len`` in tokens is read from the server where it is not given; ``block_sizes`` are those whose boundaries are asked. Asks the server how it counts tokens; raises
    EndpointUnreachable and EndpointRefused.
    """
    from pytest_kvcache.quality.needle import standard_set

    return standard_set(endpoint, max_model_len, block_sizes)


def read_items(path: Path) -> list[Item]:
    """Return the items of a user's JSON Lines: ``prompt`` (text or chat messages), ``expect``, ``match``, and ``id``, ``max_tokens``,
    ``tolerance``, ``choices``.

    Raises UsageError that names the line: not JSON, a field missing, unknown or of a wrong type, an unknown match, a pattern that
    does not compile, an id used twice; or a file that is empty, too large or not there.
    """
    text = read_user_text(path, "the quality items", most_bytes=_LARGEST_FILE, hint="--kv-quality-items names a JSONL file")
    lines = text.split("\n")
    items: list[Item] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(items) >= _MOST_ITEMS:
            raise UsageError(f"more than {_MOST_ITEMS:,} items", where=f"{path}, line {number}", hint="ask fewer")
        try:
            item = _item(json.loads(line), number)
        except (ValueError, RecursionError) as error:
            what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise UsageError(f"line {number}: {what}", where=str(path), hint=_EXAMPLE) from None
        if item.id in line_of:
            raise UsageError(f"line {number}: the id {item.id!r} was used in line {line_of[item.id]}", where=str(path), hint="items pair by their id")
        line_of[item.id] = number
        items.append(item)
    if not items:
        raise UsageError("the file holds no quality item", where=str(path), hint=_EXAMPLE)
    return items


_EXAMPLE = 'each line is an object such as {"prompt": "2 + 2 =", "expect": "4", "match": "contains"}; match is one of ' + ", ".join(USER_MATCHES)


def _item(raw: Any, number: int) -> Item:
    """Return one item of a user's line. Raises ValueError with what is wrong."""
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    unknown = [name for name in raw if name not in _FIELDS]
    if unknown:
        raise ValueError(f"unknown field {unknown[0][:80]!r}; known: {', '.join(_FIELDS)}")
    match = raw.get("match", "exact")
    if match not in USER_MATCHES:
        raise ValueError(f"unknown match {str(match)[:80]!r}; known: {', '.join(USER_MATCHES)}")
    expect, tolerance, choices = _expected(raw, match)
    name = raw.get("id", f"line-{number}")
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not name.strip() or len(name) > 200:
        raise ValueError("id must be a text of 1 to 200 characters")
    return Item(
        id=name,
        prompt=_prompt(raw.get("prompt")),
        expect=expect,
        match=match,
        length_tokens=_count(raw, "length_tokens", 0, 0),
        depth=_share(raw),
        max_tokens=_count(raw, "max_tokens", _DEFAULT_MAX_TOKENS, 1),
        tolerance=tolerance,
        choices=choices,
    )


def _expected(raw: Mapping[str, Any], match: str) -> tuple[str, float, tuple[str, ...]]:
    """Return what an answer is graded by, as (expect, tolerance, choices). Raises ValueError with what is wrong."""
    expect = raw.get("expect")
    for field, owner in (("tolerance", "number"), ("choices", "choice")):
        if field in raw and match != owner:
            raise ValueError(f"{field} belongs to the match {owner!r}")
    if match == "schema":
        if not isinstance(expect, dict):
            raise ValueError("expect must be a JSON Schema, an object")
        from pytest_kvcache.quality.marking import check_schema

        check_schema(expect)
        return json.dumps(expect, sort_keys=True), 0.0, ()
    if match == "number":
        number = read_number(expect) if isinstance(expect, str) else expect
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not math.isfinite(number):
            raise ValueError("expect must be a number")
        return repr(float(number)), _tolerance(raw.get("tolerance", 0.0), float(number)), ()
    if not isinstance(expect, str) or not expect.strip():
        raise ValueError("expect must be a text that is not empty")
    if match == "choice":
        choices = raw.get("choices", list(CHOICES))
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c.strip() for c in choices):
            raise ValueError("choices must be a list of texts")
        if expect not in choices:
            raise ValueError(f"expect must be one of the choices {', '.join(choices)[:200]}")
        return expect, 0.0, tuple(choices)
    if match == "function" and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", expect):
        raise ValueError("expect must be the name of a function as module:NAME")
    if match == "regex":
        try:
            re.compile(expect)
        except (re.error, OverflowError) as error:
            raise ValueError(f"the pattern does not compile: {error}") from None
    return expect, 0.0, ()


def _tolerance(raw: Any, number: float) -> float:
    """Return the tolerance in the number's own unit: a number, or a share of it as "1%"."""
    if isinstance(raw, str) and raw.strip().endswith("%"):
        share = read_number(raw.strip()[:-1])
        value = None if share is None else abs(number) * share / 100
    else:
        value = raw if isinstance(raw, (int, float)) and not isinstance(raw, bool) else None
    if value is None or not 0 <= value < math.inf:
        raise ValueError('tolerance must be a number of 0 or more, or a share such as "1%"')
    return float(value)


def _prompt(prompt: Any) -> str | tuple[Message, ...]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in prompt):
        return tuple(prompt)
    raise ValueError("prompt must be a text, or a list of chat messages with role and content")


def _count(raw: Mapping[str, Any], name: str, default: int, least: int) -> int:
    value = raw.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 10_000_000:
        raise ValueError(f"{name} must be a whole number of at least {least}")
    return value


def _share(raw: Mapping[str, Any]) -> float:
    value = raw.get("depth", 0.0)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError("depth must be a number from 0 to 1")
    return float(value)
