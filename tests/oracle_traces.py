"""Recorded traces of a real vLLM 0.32 (tests/data/live_blocks) as Run folders: its polls are telemetry, its requests are rows.

The pool has 64 usable blocks of 32 tokens; a step took 60 ms, a poll came every 20 ms. ``received`` is what the client had by then.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from made_run import T0, MadeRun, snapshot

from pytest_kvcache.records import RequestRow, TelemetryRow
from pytest_kvcache.runfolder import Run

DATA = Path(__file__).parent / "data" / "live_blocks"
BLOCK, USABLE = 32, 64
NAMES = ("prefix_on", "prefix_off_chunked", "overload")
CACHING = {"prefix_on": True, "prefix_off_chunked": False, "overload": True}


@dataclass(frozen=True)
class Poll:
    """One look at /metrics, and how many tokens the client had of each request."""

    t_s: float
    scrape_s: float
    used: int
    running: int
    waiting: int
    preemptions: int
    prefix_hits: int
    generated: int
    received: dict[int, int]


def polls(name: str) -> list[Poll]:
    """Return the polls of a trace in order."""
    with (DATA / f"{name}_polls.csv").open(newline="") as file:
        return [
            Poll(
                float(row["t_s"]),
                float(row["scrape_s"]),
                int(row["used"]),
                int(row["running"]),
                int(row["waiting"]),
                int(row["preemptions"]),
                int(row["prefix_hits"]),
                int(row["generated"]),
                {int(pair.split(":")[0]): int(pair.split(":")[1]) for pair in row["received"].split()},
            )
            for row in csv.DictReader(file)
        ]


def _receipts(number: int, seen: list[Poll]) -> Iterator[tuple[float, int]]:
    last = 0
    for poll in seen:
        if poll.received.get(number, 0) > last:
            last = poll.received[number]
            yield poll.t_s, last


def requests(name: str) -> list[RequestRow]:
    """Return the requests of a trace as a client logs them; its first token and longest pause are known to within a poll."""
    seen = polls(name)
    rows = []
    with (DATA / f"{name}_requests.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            number, sent, end = int(line["id"]), float(line["sent_s"]), float(line["end_s"])
            receipts = list(_receipts(number, seen))
            pauses = [(right - left, left) for (left, _), (right, _) in pairwise(receipts)]
            pause, at = max(pauses, default=(0.0, 0.0))
            text = line["scenario"]
            shared = 256 if text.startswith(("prefix", "same")) else None
            rows.append(
                RequestRow(
                    id=number,
                    lane="normal",
                    intended_s=T0 + sent,
                    sent_s=T0 + sent,
                    end_s=T0 + end,
                    outcome="bad_request" if line["status"] != "200" else "ok" if line["finish"] == "length" else "cut_off",
                    first_token_s=T0 + receipts[0][0] if receipts else None,
                    status=int(line["status"]),
                    prompt_tokens_planned=int(line["prompt"]),
                    prompt_tokens=int(line["prompt"]),
                    output_tokens_planned=int(line["max_tokens"]),
                    completion_tokens=int(line["chunks"]) if line["finish"] == "length" else None,
                    chunks=int(line["chunks"]),
                    longest_gap_s=pause,
                    longest_gap_at_s=T0 + at,
                    finish_reason=line["finish"],
                    prefix_id=text if shared is not None else "",
                    prefix_tokens=shared,
                )
            )
    return rows


def run(name: str, folder: Path) -> Run:
    """Write the trace as a Run."""
    samples = [
        TelemetryRow(
            wall_s=T0 + poll.t_s,
            read_s=poll.scrape_s,
            values={
                "used_blocks": poll.used,
                "free_blocks": USABLE - poll.used,
                "usage": poll.used / USABLE,
                "running": poll.running,
                "waiting": poll.waiting,
                "preemptions": poll.preemptions,
                "prefix_hits": poll.prefix_hits,
                "generation_tokens": poll.generated,
                "start_time": T0 - 100,
            },
        )
        for poll in polls(name)
    ]
    told: dict[str, Any] = {"usable": USABLE, "block_size": BLOCK, "max_model_len": 2048, "max_concurrency": 65 / 64, "pool_tokens": 2080}
    hits = samples[-1].values["prefix_hits"]
    after_s = samples[-1].wall_s - T0 + 0.1
    around = [
        snapshot(T0 - 0.5, prefix_caching=CACHING[name], **told),
        snapshot(T0 + after_s, prefix_caching=CACHING[name], prefix_hits=hits, **told),
    ]
    made = MadeRun(rows=requests(name), samples=samples, before=around[:1], after=around[1:], hz=50.0, record={"sample_hz": 50.0})
    return made.write(folder)
