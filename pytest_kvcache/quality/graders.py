"""Does an answer pass, and how many did. Answers come from a server and are cut before anything looks at them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pytest_kvcache.records import QualityRow, QualitySummary

if TYPE_CHECKING:
    from pytest_kvcache.quality.items import Item

MATCHES = ("exact", "contains", "regex", "word")
LONGEST_ANSWER = 20_000

_EDGE = re.compile(r"^[\s\W_]*([^\W_]+)")


def grade(item: Item, answer: str, search: Callable[[str, str], bool | None] | None = None) -> bool | None:
    """Return whether the answer passes the item; None where its pattern took too long.

    exact: equal once blanks at both ends are gone. contains: the expected text is in it. regex: the pattern is found in it.
    word: its first word, without the marks around it, is the expected one. No empty answer passes, whatever is expected.
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
    raise ValueError(f"unknown match {item.match!r}")


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
