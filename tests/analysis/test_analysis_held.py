"""What our requests hold, against a plain count request by request: never more than the bounds, and always all of them."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import T0, refused, request

from pytest_kvcache.analysis import live
from pytest_kvcache.analysis.holding import Footprint, Group, plain
from pytest_kvcache.analysis.live import OFF, SURE, UNSURE, Held, Moments, hold
from pytest_kvcache.analysis.rows import read_rows
from pytest_kvcache.records import RequestRow

BLOCK = 16

rows_of = st.lists(
    st.builds(
        lambda start, wait, steps, prompt, output, pause, text: request(
            0,
            start,
            prompt=prompt,
            output=output,
            ttft_s=wait,
            length_s=wait + steps * max(output - 1, 0) + (pause if output > 2 else 0.0) + 1e-3,
            longest_gap_s=pause if output > 2 else 0.0,
            longest_gap_at_s=T0 + start + wait + steps * (output // 2),
            prefix_id=text,
            prefix_tokens=min(prompt, 64) if text else None,
        ),
        st.floats(0, 5),
        st.floats(0.001, 2),
        st.floats(0.01, 0.05),
        st.integers(1, 300),
        st.integers(1, 60),
        st.sampled_from([0.0, 0.5, 2.0]),
        st.sampled_from(["", "a", "b"]),
    ),
    max_size=10,
)
moments_of = st.lists(st.floats(-1, 12), min_size=1, max_size=25)


def held(rows: list[RequestRow], at: list[float], shape: Footprint, sharing: str = OFF, waiting: float = math.nan, lost: bool = False) -> Held:
    columns, _ = read_rows(rows)
    times = np.array(sorted(at)) + T0
    every = np.ones(len(rows), dtype=bool)
    return hold(columns, every, every & lost, shape, Moments(times, times, np.full(len(times), waiting)), sharing)


def count(rows: list[RequestRow], t: float, slack: int) -> float:
    """Blocks that a paged engine holds at a moment, one token more or fewer for each request; 0 while the prompt may be unwritten."""
    total = 0
    for row in rows:
        first = row.first_token_s or math.inf
        output = row.completion_tokens or row.chunks
        if not first <= t < row.end_s:
            continue
        even = (row.end_s - first - row.longest_gap_s) / max(output - 1, 1)
        stalled = row.longest_gap_s > 3 * (row.end_s - first) / max(output - 1, 1)
        active = t - first
        pace_end = row.end_s - first
        if stalled and row.longest_gap_at_s is not None:
            active -= min(max(t - row.longest_gap_at_s, 0.0), row.longest_gap_s)
            pace_end -= row.longest_gap_s
        k = 1 + math.floor(min(active / max(pace_end, 1e-9), 1.0) * (output - 1) + 1e-9)
        assert even > -1
        total += math.ceil(max((row.prompt_tokens or 0) + min(max(k + slack, 1), output) - 1, 1) / BLOCK)
    return total


@settings(deadline=None, max_examples=150)
@given(rows_of, moments_of)
def test_the_count_of_each_request_lies_between_the_bounds(rows: list[RequestRow], at: list[float]) -> None:
    found = held(rows, at, plain(BLOCK))
    for i, t in enumerate(sorted(at)):
        exact = count(rows, T0 + t, 0)
        assert found.low[i] <= exact + 1e-9
        assert exact <= found.high[i] + 1e-9
        assert found.low[i] <= found.likely[i] + 1e-9 <= found.high[i] + 2e-9
        most = sum(math.ceil(((row.prompt_tokens or 0) + (row.completion_tokens or 0)) / BLOCK) for row in rows if row.sent_s <= T0 + t)
        assert found.high[i] <= most


@settings(deadline=None, max_examples=100)
@given(rows_of, moments_of, st.sampled_from([OFF, UNSURE, SURE]))
def test_tokens_shared_prefixes_and_rounding_make_up_the_blocks(rows: list[RequestRow], at: list[float], sharing: str) -> None:
    found = held(rows, at, plain(BLOCK), sharing)
    np.testing.assert_allclose(found.prompt - found.shared + found.generated + found.rounding, found.likely * BLOCK, atol=1e-6)
    for column in (found.low, found.likely, found.prompt, found.generated, found.rounding, found.shared, found.common, found.answering):
        assert (column >= -1e-9).all()
    assert (found.common <= found.prompt - found.shared + 1e-6).all(), "what several hold once is part of what is held"
    np.testing.assert_allclose(found.total, found.prompt + found.generated, atol=1e-6)
    if sharing == OFF:
        assert not found.shared.any()


@settings(deadline=None, max_examples=100)
@given(rows_of, moments_of)
def test_the_order_of_the_rows_and_the_size_of_a_piece_change_nothing(rows: list[RequestRow], at: list[float]) -> None:
    whole = held(rows, at, plain(BLOCK), SURE)
    before, live._PAIRS_AT_ONCE = live._PAIRS_AT_ONCE, 3
    try:
        pieces = held(list(reversed(rows)), at, plain(BLOCK), SURE)
    finally:
        live._PAIRS_AT_ONCE = before
    for name in ("low", "likely", "high", "prompt", "shared", "prefilling", "answering", "longest"):
        np.testing.assert_allclose(getattr(whole, name), getattr(pieces, name), atol=1e-6, err_msg=name)


def test_a_prompt_without_a_token_holds_nothing_to_all_of_it() -> None:
    found = held([request(0, 0.0, prompt=160, output=10, ttft_s=2.0, length_s=3.0)], [1.0], plain(BLOCK))
    assert (found.low[0], found.high[0], found.prefilling[0], found.sent[0], found.answering[0]) == (0, 10, 160, 1, 0)


def test_what_waits_in_the_queue_holds_nothing() -> None:
    rows = [request(i, 0.01 * i, prompt=160 * (i + 1), output=10, ttft_s=2.0, length_s=3.0) for i in range(4)]
    found = held(rows, [1.0], plain(BLOCK), waiting=2.0)
    assert found.high[0] == 10 + 20, "the two that came last are the ones that wait"
    assert found.prefilling[0] == 160 + 320


def test_a_request_that_was_put_back_holds_nothing_in_its_pause() -> None:
    row = request(0, 0.0, prompt=160, output=50, ttft_s=0.5, length_s=6.0, longest_gap_s=4.0, longest_gap_at_s=T0 + 1.0)
    assert held([row], [3.0], plain(BLOCK), lost=True).likely[0] == 0
    assert held([row], [3.0], plain(BLOCK), lost=True, waiting=1.0).high[0] == 0
    assert held([row], [3.0], plain(BLOCK), lost=True, waiting=0.0).high[0] >= 10, "it may have been taken up again"
    assert held([row], [3.0], plain(BLOCK)).likely[0] >= 10, "a slow server is no preemption"


def test_refused_requests_hold_nothing_and_broken_streams_what_came() -> None:
    assert held([refused(0, 0.0, "queue_full")], [0.02], plain(BLOCK)).high[0] == 0
    row = request(0, 0.0, prompt=100, output=60, ttft_s=0.5, length_s=2.0, outcome="cut_off", completion_tokens=None, chunks=30)
    assert held([row], [1.99], plain(BLOCK)).generated[0] in (27, 28)


def test_cached_tokens_that_the_server_told_prove_what_is_shared() -> None:
    texts = {"prefix_id": "p", "prefix_tokens": 64}
    rows = [request(i, 0.1 * i, prompt=100, output=30, ttft_s=0.1, length_s=5.0, cached_tokens=64 * (i > 0), **texts) for i in range(3)]
    found = held(rows, [2.0], plain(BLOCK), UNSURE)
    assert found.shared[0] == 2 * 64
    assert found.common[0] == 64
    cold = [request(i, 0.1 * i, prompt=100, output=30, ttft_s=0.1, length_s=5.0, cached_tokens=0, **texts) for i in range(3)]
    assert held(cold, [2.0], plain(BLOCK), UNSURE).shared[0] == 0, "they say that they found nothing"
    alone = [request(0, 0.0, prompt=100, output=30, ttft_s=0.1, length_s=5.0, cached_tokens=64)]
    both = held(alone, [2.0], plain(BLOCK), UNSURE)
    assert both.high[0] - both.low[0] >= 4, "whom it shares with is not known"


def test_state_groups_hold_a_fixed_number_of_blocks() -> None:
    shape = Footprint(BLOCK, (Group(BLOCK), Group(BLOCK, count=3, fixed=2)))
    found = held([request(0, 0.0, prompt=30, output=10, ttft_s=0.1, length_s=5.0)], [2.0], shape)
    assert found.likely[0] == math.ceil(33 / BLOCK) + 6
