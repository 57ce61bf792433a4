"""requests.jsonl as columns of numbers: a million requests without a million objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_kvcache.load.contract import PLANNED_ENDS
from pytest_kvcache.records import LoadEnd, LoadLine, LoadNote, LoadStart, RequestRow

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]

_NAN = float("nan")
_KEPT_NOTES = 200
_COLUMNS = (
    "number", "intended_s", "sent_s", "first_s", "end_s", "prompt", "prompt_planned", "prompt_real", "cached", "output", "output_planned", "chunks", "gap_s",
    "gap_at_s", "prefix_tokens",
)  # fmt: skip


@dataclass
class Frame:
    """What the load processes said beside the requests; ``errors`` holds one error text for each outcome that had any.

    ``pool_full`` counts requests whose error says that the pool was full.
    """

    starts: list[LoadStart] = field(default_factory=list)
    ends: list[LoadEnd] = field(default_factory=list)
    notes: list[LoadNote] = field(default_factory=list)
    note_count: int = 0
    rows: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    pool_full: int = 0

    def gaps(self) -> list[str]:
        """Return why the record is incomplete: no start or end line, an end that was not planned, rows that are missing."""
        found = []
        if not self.starts:
            found.append("it has no start line")
        if not self.ends:
            found.append("it has no end line")
            return found
        unplanned = [end for end in self.ends if end.reason not in PLANNED_ENDS]
        found += [f"the load ended by {end.reason[:80]}" for end in unplanned[:1]]
        said = sum(end.rows for end in self.ends)
        if said != self.rows:
            found.append(f"{said} requests were written and the file holds {self.rows}")
        return found


@dataclass(frozen=True)
class Rows:
    """The requests of one Run, a column each. Times are Unix seconds; NaN where a request has no such value.

    ``number`` is the request's number in the plan, ``prompt`` what the server counted, else what was planned; ``output`` is from the
    server's usage. ``lane`` and ``outcome`` are indices into ``lanes`` and ``outcomes``; ``endpoint`` is the index of the server;
    ``prefix`` is the index of the text that the prompt begins with, with others, and -1 where the row names none.
    """

    number: Floats
    intended_s: Floats
    sent_s: Floats
    first_s: Floats
    end_s: Floats
    prompt: Floats
    prompt_planned: Floats
    prompt_real: Floats
    cached: Floats
    output: Floats
    output_planned: Floats
    chunks: Floats
    gap_s: Floats
    gap_at_s: Floats
    prefix_tokens: Floats
    lane: np.ndarray[Any, Any]
    outcome: np.ndarray[Any, Any]
    endpoint: np.ndarray[Any, Any]
    prefix: np.ndarray[Any, Any]
    lanes: list[str]
    outcomes: list[str]

    def __len__(self) -> int:
        return len(self.sent_s)

    def outcome_in(self, names: Iterable[str]) -> Mask:
        """Return which requests came out as one of ``names``."""
        import numpy as np

        return np.isin(self.outcome, [self.outcomes.index(name) for name in names if name in self.outcomes])

    def lane_is(self, name: str) -> Mask:
        """Return which requests belong to the lane."""
        mask: Mask = self.lane == (self.lanes.index(name) if name in self.lanes else -1)
        return mask


def read_rows(lines: Iterable[LoadLine], full_errors: Sequence[str] = ()) -> tuple[Rows, Frame]:
    """Return the columns and the frame of the lines of one requests.jsonl. Raises what reading the lines raises.

    ``full_errors`` are words of the engine's errors that prove a full pool.
    """
    import numpy as np

    columns = {name: array("d") for name in _COLUMNS}
    put = [column.append for column in columns.values()]
    lane_of, outcome_of, endpoint_of, prefix_of = array("q"), array("q"), array("q"), array("q")
    prefixes: dict[str, int] = {}
    lanes: dict[str, int] = {}
    outcomes: dict[str, int] = {}
    frame = Frame()
    for line in lines:
        if isinstance(line, RequestRow):
            prompt, planned = line.prompt_tokens, line.prompt_tokens_planned
            values = (
                line.id,
                line.intended_s,
                line.sent_s,
                _NAN if line.first_token_s is None else line.first_token_s,
                line.end_s,
                _number(planned if prompt is None else prompt),
                _number(planned),
                _number(prompt),
                _number(line.cached_tokens),
                _number(line.completion_tokens),
                _number(line.output_tokens_planned),
                line.chunks,
                line.longest_gap_s,
                _NAN if line.longest_gap_at_s is None else line.longest_gap_at_s,
                _number(line.prefix_tokens),
            )
            for add, value in zip(put, values, strict=True):
                add(value)
            lane_of.append(lanes.setdefault(line.lane, len(lanes)))
            outcome_of.append(outcomes.setdefault(line.outcome, len(outcomes)))
            endpoint_of.append(line.endpoint)
            prefix_of.append(prefixes.setdefault(line.prefix_id, len(prefixes)) if line.prefix_id else -1)
            frame.rows += 1
            if line.error:
                frame.errors.setdefault(line.outcome, line.error[:300])
                frame.pool_full += any(words in line.error for words in full_errors)
        elif isinstance(line, LoadStart):
            frame.starts.append(line)
        elif isinstance(line, LoadEnd):
            frame.ends.append(line)
        else:
            frame.note_count += 1
            if len(frame.notes) < _KEPT_NOTES:
                frame.notes.append(line)
    floats = {name: np.frombuffer(column, dtype=np.float64) if column else np.empty(0) for name, column in columns.items()}
    codes = {"lane": lane_of, "outcome": outcome_of, "endpoint": endpoint_of, "prefix": prefix_of}
    integers: dict[str, Any] = {name: np.array(column, dtype=np.int64) for name, column in codes.items()}
    return Rows(**floats, **integers, lanes=list(lanes), outcomes=list(outcomes)), frame


def _number(value: int | None) -> float:
    return _NAN if value is None else value
