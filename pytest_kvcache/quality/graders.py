"""Does an answer pass, and how many did. Answers come from a server and are cut before anything looks at them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_kvcache.records import QualityRow, QualitySummary

if TYPE_CHECKING:
    from pytest_kvcache.quality.items import Item

MATCHES = ("exact", "contains", "regex", "word", "number", "choice", "schema", "function")
MARKED = ("schema", "function")
"""Matches that need a process of their own (marking.py)."""
CHOICES = ("A", "B", "C", "D", "E")
LONGEST_ANSWER = 20_000

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?![\w])|(?<![\w.])[-+]?\.\d+")
_SAYS = re.compile(r"(?:answer|choice|option)\b[^\n]{0,20}?(?:\bis\b|:)\s*", re.IGNORECASE)
_EDGE = re.compile(r"^[\s\W_]*([^\W_]+)")


def grade(item: Item, answer: str, search: Callable[[str, str], bool | None] | None = None) -> bool | None:
    """Return whether the answer passes the item; None where its pattern took too long.

    exact: equal once blanks at both ends are gone. contains: the expected text is in it. regex: the pattern is found in it.
    word: its first word, without the marks around it, is the expected one. number: the last number in it is within the tolerance of the expected
    one (a sum is stated last). choice: the choice that it settles on is the expected one. No empty answer passes, whatever is expected. The
    matches of ``MARKED`` are not judged here: ValueError.
    ``search`` looks for a pattern in a text within a bounded time (patterns.PatternProcess); without it the pattern runs unguarded.
    """
    answer = answer[:LONGEST_ANSWER]
    if not answer.strip():
        return False
    if item.match == "exact":
        return answer.strip() == item.expect.strip()
    if item.match == "contains":
        return item.expect in answer
    if item.match == "word":
        found = _EDGE.match(answer)
        return found is not None and str(found.group(1)) == item.expect
    if item.match == "regex":
        return search(item.expect, answer) if search is not None else re.search(item.expect, answer) is not None
    if item.match == "number":
        said, wanted = last_number(answer), read_number(item.expect)
        return said is not None and wanted is not None and abs(said - wanted) <= item.tolerance + 1e-12 * abs(wanted)
    if item.match == "choice":
        return choice_in(answer, item.choices or CHOICES) == item.expect
    raise ValueError(f"unknown match {item.match!r}")


def read_number(text: str) -> float | None:
    """Return a text that is one number, with or without commas between thousands; None where it is none."""
    found = _NUMBER.fullmatch(text.strip())
    return float(text.replace(",", "")) if found else None


def last_number(answer: str) -> float | None:
    """Return the last number that stands in an answer; None where there is none."""
    found = None
    for found in _NUMBER.finditer(answer):  # noqa: B007  the last one is wanted
        pass
    return float(found.group(0).replace(",", "")) if found else None


def choice_in(answer: str, choices: Sequence[str]) -> str | None:
    """Return the choice that an answer settles on: alone at its start, else after "answer is", else the only one that it names.

    None where it names none, or several without saying which: an article "A" inside a sentence is no choice.
    """
    one = "|".join(re.escape(choice) for choice in sorted(choices, key=len, reverse=True))
    alone = re.match(rf"\s*[(\[*]*({one})(?=[)\].:,*\n]|\s*$)", answer)
    if alone:
        return alone.group(1)
    said = re.compile(rf"[(\[*\"']*({one})(?!\w)")
    settled = [found.group(1) for mark in _SAYS.finditer(answer) if (found := said.match(answer, mark.end()))]
    if settled:
        return settled[-1]
    named = {found.group(1) for found in re.finditer(rf"(?<!\w)({one})(?!\w)(?!\s+(?!or\b|and\b)[a-z])", answer)}
    return named.pop() if len(named) == 1 else None


def is_garbage(answer: str) -> bool:
    """Return whether an answer is one character over and over, as a broken KV cache writes (field case E04)."""
    marks = answer.strip()
    return len(marks) >= 8 and len(set(marks)) == 1


def summarise(rows: Iterable[QualityRow]) -> QualitySummary:
    """Return the pass counts of the rows, over all and by prompt length. An item without an answer counts as asked and not passed."""
    items = passed = errors = 0
    by_length: dict[int, tuple[int, int]] = {}
    for row in rows:
        items += 1
        passed += row.passed
        errors += bool(row.error)
        good, asked = by_length.get(row.length_tokens, (0, 0))
        by_length[row.length_tokens] = (good + row.passed, asked + 1)
    return QualitySummary(items, passed, errors, dict(sorted(by_length.items())))
