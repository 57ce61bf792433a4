"""What the load says and how it is read: outcomes, the options of a profile, and the frame of requests.jsonl.

requests.jsonl starts with a ``start`` line, holds one ``request`` line per request and ``note`` lines, and finishes with an
``end`` line. Where retries were asked for, each attempt of a request is a row of its own, with one ``id``. Exit codes of Locust cannot
be trusted (a killed run exits 0), so only the ``end`` line makes a file complete.

Outcomes of a request:

=================== ==================================================================================================
ok                  the stream ended properly, no error frame came, and as many tokens came as were asked for
stopped_early       it ended properly with fewer tokens and a finish_reason of the model's own (stop); no rejection
cut_off             the load ended while it was in flight; neither success nor rejection
over_length         refused because prompt or output do not fit the context
queue_full          refused because the server's queue is full or it is overloaded (also as a frame inside HTTP 200)
rate_limited        refused by a rate limit or quota
server_error        an HTTP 5xx of another kind, or an answer that is no answer (a redirect, HTML with status 200)
error_in_stream     an error frame inside an HTTP 200 stream, of no kind above
truncated           the stream ended without its end: no [DONE], or no finish_reason and usage, or not one token
clamped             fewer tokens than asked for, with finish_reason length
timeout             the request took longer than its limit, or a gateway says that the server did (408, 504, 524)
refused_connection  nobody accepted the connection (also: the name does not resolve, TLS failed)
reset               the connection broke
refused_auth        401, 403 or 407
bad_request         any other 4xx
=================== ==================================================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvcache.errors import CannotJudge
from pytest_kvcache.records import LoadEnd, LoadLine, LoadNote, LoadStart, RequestRow
from pytest_kvcache.runfolder import read_lines

OK = "ok"
STOPPED_EARLY = "stopped_early"
CUT_OFF = "cut_off"
OVER_LENGTH = "over_length"
QUEUE_FULL = "queue_full"
RATE_LIMITED = "rate_limited"
SERVER_ERROR = "server_error"
ERROR_IN_STREAM = "error_in_stream"
TRUNCATED = "truncated"
CLAMPED = "clamped"
TIMEOUT = "timeout"
REFUSED_CONNECTION = "refused_connection"
RESET = "reset"
REFUSED_AUTH = "refused_auth"
BAD_REQUEST = "bad_request"

REJECTIONS = (
    OVER_LENGTH, QUEUE_FULL, RATE_LIMITED, SERVER_ERROR, ERROR_IN_STREAM, TRUNCATED, CLAMPED, TIMEOUT,
    REFUSED_CONNECTION, RESET, REFUSED_AUTH, BAD_REQUEST,
)  # fmt: skip
OUTCOMES = (OK, STOPPED_EARLY, CUT_OFF, *REJECTIONS)

# Why a load ended. Only the first three are the end that was planned.
BY_DURATION = "duration"
BY_REQUESTS = "requests"
BY_STOP = "stopped"
BY_SIGNAL = "signal"
BY_PARENT = "parent gone"
BY_SERVER = "server gone"
BY_FAILURE = "failed"
BY_WORKER = "worker lost"
PLANNED_ENDS = frozenset({BY_DURATION, BY_REQUESTS, BY_STOP})

FAILED_NOTE = "failed"
LOST_NOTE = "worker lost"
OTHER_NOTE = "not as recorded"
ENVIRONMENT = "PYTEST_KVCACHE_LOAD_JSON"

_WORKLOAD_OPTIONS = (
    "lanes", "users", "duration_s", "requests", "output_tokens", "api", "ramp_s", "think_s", "ignore_eos",
    "extra_body", "profile_options", "endpoints",
)  # fmt: skip
# These count where they are set, so that loads without them keep the hash that they had.
_WORKLOAD_MORE = ("rate", "arrivals", "burstiness", "burst_size", "max_in_flight", "stages", "content", "retries")


@dataclass(frozen=True)
class ProfileOption:
    """An option that a profile adds: ``--kv-<name>`` of the type of its default, with help that names the unit.

    ``file`` says that it names a file: the start line then holds the file's name and a hash of what is in it.
    """

    name: str
    default: int | float | str
    help: str
    file: bool = False

    @property
    def flag(self) -> str:
        """The flag as it is typed: ``min_share`` is ``--kv-min-share``."""
        return "--kv-" + self.name.replace("_", "-")


def is_rejection(outcome: str) -> bool:
    """Return whether an outcome is a refusal or failure; ``ok``, ``stopped_early`` and ``cut_off`` are not."""
    return outcome not in (OK, STOPPED_EARLY, CUT_OFF)


@dataclass
class LoadFile:
    """What a requests.jsonl holds, without its rows, of which ``repeated`` are attempts after the first of a request. ``broken`` says why it cannot
    be read to its end.
    """

    path: Path
    start: LoadStart | None = None
    ends: list[LoadEnd] = field(default_factory=list)
    notes: list[LoadNote] = field(default_factory=list)
    rows: int = 0
    repeated: int = 0
    broken: str = ""

    @property
    def reason(self) -> str:
        """Why the load ended: the first unplanned reason of any worker, else the last; empty where no end was written."""
        reasons = [end.reason for end in self.ends]
        return next((reason for reason in reasons if reason not in PLANNED_ENDS), reasons[-1] if reasons else "")

    @property
    def complete(self) -> bool:
        """Whether the load began, every worker wrote its planned end, and every row that it counted is there."""
        return (
            not self.broken
            and self.start is not None
            and bool(self.ends)
            and self.reason in PLANNED_ENDS
            and sum(end.rows for end in self.ends) == self.rows
        )


def read_load(path: Path) -> LoadFile:
    """Return the frame of a requests.jsonl: start, ends, notes and the number of rows. A file that is not there is empty."""
    load = LoadFile(path)
    try:
        for line in read_lines(path, LoadLine):
            if isinstance(line, RequestRow):
                load.rows += 1
                load.repeated += line.attempt > 0
            elif isinstance(line, LoadStart):
                load.start = load.start or line
            elif isinstance(line, LoadEnd):
                load.ends.append(line)
            elif len(load.notes) < 10_000:
                load.notes.append(line)
    except CannotJudge as error:
        load.broken = error.what
    return load


def read_rows(path: Path) -> Iterator[RequestRow]:
    """Yield the request rows of a requests.jsonl. Raises CannotJudge on a broken line that is not the last."""
    return (line for line in read_lines(path, LoadLine) if isinstance(line, RequestRow))


def is_complete(path: Path) -> bool:
    """Return whether the load ran to its planned end and the file holds all of it."""
    return read_load(path).complete


def workload_hash(start: LoadStart) -> str:
    """Return a hash over what was asked of the server: profile, seed, options, users, arrivals, duration; not over the nonce or addresses.

    Two Runs with the same hash drew their lengths from the same numbers; where a profile sizes its prompts by the server's longest
    context the lengths themselves may differ, and the rows tell them. ``endpoints`` counts how many there were.
    """
    asked: dict[str, Any] = {name: start.options.get(name) for name in _WORKLOAD_OPTIONS}
    asked |= {name: value for name in _WORKLOAD_MORE if (value := start.options.get(name))}
    asked["endpoints"] = len(asked["endpoints"] or ())
    text = msgspec.json.encode([start.profile, start.seed, asked], order="deterministic")
    return hashlib.sha256(text).hexdigest()[:16]
