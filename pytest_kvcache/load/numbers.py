"""Locust's own numbers: the rows of its page and summary, and percentiles that agree with ours."""

from __future__ import annotations

from typing import Any

import locust.stats
from locust.exception import CatchResponseError

from pytest_kvcache.load.sse import Stream

# Tokens that came in one read have no rate.
SHORTEST_S = 0.005


def exact_bucket(response_time: float) -> int:
    """Return the bucket of a time in milliseconds in Locust's histograms: whole milliseconds up to 10 s, and then four digits.

    Locust of itself keeps two digits, so that 147 ms become 150 and a percentile is off by up to 5 %.
    """
    if response_time < 10_000:
        return round(response_time)
    return int(round(response_time, -1)) if response_time < 100_000 else int(round(response_time, -2))


def be_exact() -> None:
    """Give Locust our buckets, in this process: each worker fills the histograms that the master adds up."""
    locust.stats.bucket_response_time = exact_bucket


def tell(environment: Any, lane: str, name: str, failure: str, sent_s: float, end_s: float, stream: Stream, first_s: float | None = None) -> None:
    """Give Locust its rows: the request by its whole time, the time to its first token, and the rate of its tokens after that one.

    The last two have rows of their own only: in the sum of all rows a request would count twice. In the row of rates what Locust calls
    milliseconds are tokens a second. A request that was sent again has a third row, by the time since its first attempt should have started, ``first_s``.
    """
    environment.events.request.fire(
        request_type="POST",
        name=name,
        response_time=(end_s - sent_s) * 1e3,
        response_length=stream.size,
        exception=CatchResponseError(failure) if failure else None,
        context={},
        response=None,
    )
    if stream.first_token_s is None:
        return
    environment.stats.get(f"first token {lane}", "TTFT").log((stream.first_token_s - sent_s) * 1e3, 0)
    if first_s is not None and not failure:
        environment.stats.get(f"sent again, answered {lane}", "AGAIN").log((end_s - first_s) * 1e3, 0)
    streamed_s = end_s - stream.first_token_s
    if not failure and stream.completion_tokens is not None and stream.completion_tokens > 1 and streamed_s > SHORTEST_S:
        environment.stats.get(f"tokens/s of a stream {lane}", "RATE").log((stream.completion_tokens - 1) / streamed_s, 0)
