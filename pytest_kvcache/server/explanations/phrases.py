"""The parts that explanations share: number patterns, and what an explanation is."""

from __future__ import annotations

import re
from collections.abc import Callable

# What a sentence means, and what to change, of its match and the log around it.
Explain = Callable[[re.Match[str], str], tuple[str, str]]
Known = tuple[re.Pattern[str], Explain]

GIB = 1 << 30
N = r"([0-9][0-9,]{0,17})"
F = r"([0-9]{1,12}(?:\.[0-9]{1,18})?)"
SIGNED = r"(-?[0-9]{1,12}(?:\.[0-9]{1,18})?)"
_NEAR = 1 << 20


def known(pattern: str, tell: Explain) -> Known:
    """Return a sentence's pattern with its explanation."""
    return re.compile(pattern, re.IGNORECASE), tell


def fixed(means: str, change: str) -> Explain:
    """Return an explanation that is the same whatever the numbers are."""
    return lambda _, __: (means, change)


def whole(text: str) -> int:
    """Return an integer that may hold thousands commas."""
    return int(text.replace(",", ""))


def near(text: str) -> str:
    """Return the end of a log, where what belongs to its failure stands."""
    return text[-_NEAR:]
