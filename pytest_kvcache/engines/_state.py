"""What was read from a server, before anybody knows what it means: samples of /metrics, JSON bodies, facts of the start-up log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pytest_kvcache.quantities import Missing, Value

TEXT_LIMIT = 500


class Sample(NamedTuple):
    """One line of an exposition: its labels and its value."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Samples:
    """A parsed exposition. ``rows`` holds the wanted series by name as spelled there, ``names`` every name that was seen.

    ``bad_lines`` are lines of wanted series that could not be read (bounded, cleaned). ``in_blocks`` are names whose HELP text says that
    they count blocks where later versions count tokens.
    """

    rows: Mapping[str, Sequence[Sample]]
    names: frozenset[str]
    bad_lines: tuple[str, ...] = ()
    in_blocks: frozenset[str] = frozenset()


@dataclass
class RawState:
    """Everything that one look at a server gave.

    ``metrics`` is None where there was no usable exposition, and ``metrics_reason`` then says why. ``json`` maps a path to the
    parsed body, or to Missing with the reason. ``log_facts`` are what the server's start-up log states, by quantity name.
    ``log_given`` says that there was a log at all, which may state nothing. ``model`` is the model that was asked for; "" where any will do. ``text`` is the exposition as it came.
    """

    metrics: Samples | None = None
    metrics_reason: str = "/metrics was not read"
    json: Mapping[str, Any | Missing] = field(default_factory=dict)
    log_facts: Mapping[str, Value] = field(default_factory=dict)
    log_given: bool = False
    model: str = ""
    text: str = ""


def clean(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return foreign text on one line without control characters or escape sequences, at most ``limit`` characters."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
