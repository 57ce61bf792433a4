"""The lines of requests.jsonl: one a request, and the frame around them."""

from __future__ import annotations

from typing import Any

import msgspec


class RequestRow(msgspec.Struct, frozen=True, omit_defaults=True, tag="request", tag_field="kind"):
    """One request of the load. Times are Unix seconds on the worker's monotonic clock (see TelemetryRow.wall_s).

    ``outcome`` is ``ok``, ``stopped_early`` or a rejection class (load/rejections.py). ``completion_tokens`` comes from the server's ``usage`` and is
    None where the server sent none; ``chunks`` counts content events and is never a token count. ``prefix_id`` names a text that several prompts begin
    with: its first ``prefix_tokens`` tokens, as the server counts, so two requests of one ``prefix_id`` share as many as the smaller of their figures.
    ``attempt`` counts from 0; a later one (``--kv-retries``) has its own times, and when the first should have started is ``first_intended_s``.
    """

    id: int
    lane: str
    intended_s: float
    sent_s: float
    end_s: float
    outcome: str
    worker: str = ""
    endpoint: int = 0
    first_token_s: float | None = None
    status: int = 0
    prompt_tokens_planned: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens_planned: int | None = None
    completion_tokens: int | None = None
    chunks: int = 0
    longest_gap_s: float = 0.0
    longest_gap_at_s: float | None = None
    finish_reason: str = ""
    error: str = ""
    retry_after_s: float | None = None
    length_source: str = ""
    prefix_id: str = ""
    prefix_tokens: int | None = None
    prompt: str | None = None
    answer: str | None = None
    attempt: int = 0
    first_intended_s: float | None = None


class LoadStart(msgspec.Struct, frozen=True, omit_defaults=True, tag="start", tag_field="kind"):
    """First line of requests.jsonl: what was asked for, by which worker."""

    wall_s: float
    profile: str
    worker: str = ""
    seed: int = 0
    options: dict[str, Any] = {}
    versions: dict[str, str] = {}
    argv: list[str] = []


class LoadNote(msgspec.Struct, frozen=True, omit_defaults=True, tag="note", tag_field="kind"):
    """Something that the load process saw: an exception in a task, a lag sample, a cap that bit."""

    wall_s: float
    subject: str
    text: str = ""
    values: dict[str, float] = {}


class LoadEnd(msgspec.Struct, frozen=True, omit_defaults=True, tag="end", tag_field="kind"):
    """Last line of requests.jsonl. Without it the file is incomplete, whatever the exit code of Locust was.

    ``lag_p99_s`` is the event loop's own lag, ``cpu_s`` the CPU seconds of the worker in the ``ran_s`` seconds of its load, ``reason`` why the
    load ended. ``clock_offset_s`` was added to the times of a worker of several to put them on the master's clock, and ``clock_error_s`` is
    by how much that may be wrong; both are None where there is one process.
    """

    wall_s: float
    rows: int
    reason: str
    worker: str = ""
    cpu_s: float = 0.0
    lag_p99_s: float = 0.0
    lag_max_s: float = 0.0
    in_flight: int = 0
    ran_s: float = 0.0
    clock_offset_s: float | None = None
    clock_error_s: float | None = None


LoadLine = RequestRow | LoadStart | LoadNote | LoadEnd
