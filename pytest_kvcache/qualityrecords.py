"""The records of quality: items that were asked, greedy answers, and the pressure that a server was under meanwhile."""

from __future__ import annotations

import msgspec


class QualityRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One quality item asked once. ``item`` names it the same way before and after, so that items pair.

    ``error`` says why there was no answer, ``note`` what is striking about one (a single character over and over). ``part`` is "" for the items
    asked of a quiet server, else the pressure that they were asked under (fill, prefix, cancel), or lm-eval.
    """

    item: str
    passed: bool
    wall_s: float = 0.0
    length_tokens: int = 0
    depth: float = 0.0
    match: str = "exact"
    error: str = ""
    note: str = ""
    expected_hash: str = ""
    answer_hash: str = ""
    prompt_tokens: int | None = None
    latency_s: float = 0.0
    endpoint: int = 0
    prompt: str | None = None
    answer: str | None = None
    part: str = ""


class AgreementRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One greedy answer to a probe, asked ``repeat`` times before: its tokens as hashes, in order, so that two answers can be laid side by side.

    ``top`` holds for each token the likeliest ones as ``{hash: log-probability}``, empty where the server gave none; without them ``tokens`` are
    words. No text is kept.
    """

    item: str
    repeat: int = 0
    endpoint: int = 0
    wall_s: float = 0.0
    length_tokens: int = 0
    expected_hash: str = ""
    tokens: list[int] = []
    top: list[dict[int, float]] = []
    error: str = ""


class PressureRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a server went through while items were asked under pressure, and whether that was any: ``why`` says what was lacking.

    Counts are of that time alone; None where the server does not tell.
    """

    part: str
    pressed: bool
    why: str = ""
    items: int = 0
    seconds: float = 0.0
    users: int = 0
    pool_tokens: float | None = None
    usage_peak: float | None = None
    running_peak: float | None = None
    waiting_peak: float | None = None
    preemptions: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    cancelled: int = 0


class QualitySummary(msgspec.Struct, frozen=True):
    """Pass counts of a quality set: over all items, and by prompt length as ``{length_tokens: (passed, asked)}``.

    ``errors`` counts items that got no answer; they count as asked and not as passed.
    """

    items: int
    passed: int
    errors: int
    by_length: dict[int, tuple[int, int]]
