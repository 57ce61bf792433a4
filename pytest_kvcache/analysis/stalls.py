"""Which of our requests were put back into the queue: a long pause in the answer while the engine's counter of preemptions grew.

A preempted request loses its blocks until it goes on, and its client sees nothing but a pause. A row holds its longest pause only, so a
request that was put back twice is seen once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.analysis.series import Series

if TYPE_CHECKING:
    import numpy as np

    Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Pause:
    """The longest pause inside one answer: of which request, for how long from when on (Unix seconds), and its usual time for a token.

    ``put_back`` says that the engine's counter of preemptions grew with it.
    """

    number: int
    lane: str
    length_s: float
    at_s: float
    pace_s: float
    put_back: bool


_LONG = 3.0
_SLACK_S = 0.25


def put_back(rows: Rows, series: Sequence[Series]) -> Mask:
    """Return which requests' longest pause was a preemption: no more of them than the counters say, those with the longest pauses."""
    import numpy as np

    lost = np.zeros(len(rows), dtype=bool)
    with np.errstate(invalid="ignore", divide="ignore"):
        pace = (rows.end_s - rows.first_s) / np.maximum(np.where(np.isfinite(rows.output), rows.output, rows.chunks) - 1.0, 1.0)
        paused = np.isfinite(rows.gap_at_s) & (rows.gap_s > _LONG * pace)
    for number, one in enumerate(series):
        column = one.column("preemptions")
        there = np.isfinite(column)
        wall, count = one.wall_s[there], column[there]
        if len(count) < 2:
            continue
        grown = np.concatenate([[0.0], np.cumsum(np.maximum(np.diff(count), 0.0))])
        if not grown[-1]:
            continue
        mine = np.flatnonzero(paused & (rows.endpoint == number))
        # vLLM counts a preemption when the request goes on, other engines when it is put back: both lie in the pause or just after it
        begin = np.searchsorted(wall, rows.gap_at_s[mine] - _SLACK_S, side="right") - 1
        end = np.searchsorted(wall, rows.gap_at_s[mine] + rows.gap_s[mine] + pace[mine] + _SLACK_S, side="left")
        rose = grown[np.minimum(end, len(grown) - 1)] > grown[np.maximum(begin, 0)]
        mine = mine[rose]
        longest = np.argsort(-rows.gap_s[mine], kind="stable")[: int(grown[-1])]
        lost[mine[longest]] = True
    return lost


def longest_pauses(rows: Rows, lost: Mask | None = None, most: int = 20) -> list[Pause]:
    """Return the longest pause of each answer, longest first, at most ``most``: a preempted request shows nothing else to its client.

    ``lost`` says which requests were put back, as ``put_back`` found. Answers of fewer than two reads with content have no pause.
    """
    import numpy as np

    known = np.flatnonzero(np.isfinite(rows.gap_at_s) & (rows.gap_s > 0))
    order = known[np.argsort(-rows.gap_s[known], kind="stable")][:most]
    tokens = np.maximum(np.where(np.isfinite(rows.output), rows.output, rows.chunks) - 1.0, 1.0)
    return [
        Pause(
            int(rows.number[at]),
            rows.lanes[int(rows.lane[at])],
            float(rows.gap_s[at]),
            float(rows.gap_at_s[at]),
            float((rows.end_s[at] - rows.first_s[at]) / tokens[at]),
            bool(lost[at]) if lost is not None else False,
        )
        for at in order.tolist()
    ]
