"""The parts that readers of start-up logs share: number patterns, conversions, and what a reader is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

Fact = float | str | bool
Found = dict[str, Fact]
Sourced = dict[str, tuple[Fact, str]]
Convert = Callable[[str], Fact]
Rule = tuple[str, re.Pattern[str], Convert]

INT = r"([0-9][0-9,]{0,17})"
FLOAT = r"([0-9]{1,15}(?:\.[0-9]{1,18})?)"
# Engines divide by 2^30 and 2^20 and print "GB" and "MB" all the same.
_BYTES = {"MIB": 1 << 20, "GIB": 1 << 30, "MB": 1 << 20, "GB": 1 << 30}

# Whose log it is shows in its first lines; later ones repeat.
_MOST_SIGNED = 3000


def to_int(text: str) -> int:
    """Return an integer that may hold thousands commas."""
    return int(text.replace(",", ""))


def to_flag(text: str) -> bool:
    """Return whether a word of a log means yes."""
    return text.lower() in {"true", "1", "yes"}


def to_bytes(number: str, unit: str) -> float:
    """Return bytes of a printed size; the engine rounded it, so a fraction of a byte would only pretend to be exact."""
    return float(round(float(number) * _BYTES[unit.upper()]))


class LogReader:
    """Reads the lines of one engine. ``read`` takes them in order, ``totals`` gives what only all of them together tell.

    ``ENGINE`` is the engine's name, ``HINT`` a quick look that a line must pass before ``ONE`` is tried, ``SIGN`` what only this
    engine's log says and ``VERSION`` where it states its version. ``START`` begins a new start in the same log: what an earlier
    start stated is then forgotten. ``score`` counts the lines that were known.
    """

    ENGINE: ClassVar[str]
    TITLE: ClassVar[str]
    HINT: ClassVar[re.Pattern[str]]
    SIGN: ClassVar[re.Pattern[str]]
    VERSION: ClassVar[re.Pattern[str] | None] = None
    START: ClassVar[str] = ""
    ONE: ClassVar[tuple[Rule, ...]] = ()

    def __init__(self) -> None:
        self.score = 0
        self.lines = 0
        self.version = ""
        self.found: Sourced = {}

    def take(self, line: str) -> None:
        """Read one line and keep what it states."""
        self.lines += 1
        anew = bool(self.START) and self.START in line
        if anew:
            self.found.clear()
            self.restart()
        if self.lines <= _MOST_SIGNED and self.SIGN.search(line):
            self.score += 1
        if self.VERSION is not None and (anew or (not self.version and self.lines <= _MOST_SIGNED)):
            match = self.VERSION.search(line)
            self.version = match.group(1) if match else self.version
        if self.HINT.search(line):
            stated = self.read(line)
            self.score += 2 * len(stated)
            for name, value in stated.items():
                self.found[name] = (value, line)

    def read(self, line: str) -> Found:
        """Return what one line states by itself."""
        found: Found = {}
        for name, pattern, convert in self.ONE:
            match = pattern.search(line)
            if match is not None:
                found[name] = convert(match.group(1))
        return found

    def restart(self) -> None:
        """Forget what an earlier start in the same log had stated."""

    def totals(self) -> Sourced:
        """Return what only several lines together tell, each with its source."""
        return {}

    def notes(self) -> list[str]:
        """Return what a reader of these facts should know."""
        return []

    def facts(self) -> Sourced:
        """Return everything that was stated, each fact with its line."""
        return {**self.found, **self.totals()}
