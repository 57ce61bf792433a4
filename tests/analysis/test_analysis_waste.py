"""Waste what-ifs: the article's figures, the field's, and best buckets against trying every choice."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import MadeRun, refused, request

from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.analysis.waste import WasteRow, lengths, lengths_of, waste
from pytest_kvcache.errors import UsageError
from pytest_kvcache.quantities import Missing, Reading

ARTICLE = {2048: 1, 256: 15}


def _share(row: WasteRow) -> float:
    assert isinstance(row.share, Reading)
    return row.share.number()


def _of(rows: list[WasteRow], scheme: str, word: str = "") -> WasteRow:
    return next(row for row in rows if row.scheme == scheme and word in row.detail)


def test_sixteen_sequences_padded_to_the_longest_are_18_percent_payload() -> None:
    rows = waste(ARTICLE)
    padded = _of(rows, "padded")
    assert (padded.payload, padded.reserved) == (5_888, 32_768)
    assert f"{_share(padded):.0%}" == "18%"
    assert padded.text == "padded to the longest, 2,048: 5,888 of 32,768 tokens are payload, 18 %"
    assert _share(_of(rows, "best 2 buckets")) == 1.0
    assert _of(rows, "best 2 buckets").buckets == (256, 2048)


def test_bucketing_takes_twenty_percent_to_over_seventy() -> None:
    mixed = {200: 40, 450: 25, 900: 20, 1800: 10, 4000: 5}
    rows = waste(mixed)
    assert _share(_of(rows, "padded")) < 0.2
    assert _share(_of(rows, "buckets")) > 0.7


def test_a_one_token_request_holds_a_whole_block() -> None:
    assert _share(_of(waste([1], block_sizes=(16,)), "paged", "16")) == 1 / 16


def test_seventeen_tokens_hold_two_blocks_and_half_of_them_is_payload() -> None:
    # field case C05: 17 tokens need two blocks of 16; 129 tokens in blocks of 128 as well, 1,032 of 2,048 slots for eight
    assert _share(_of(waste([17], block_sizes=(16,)), "paged")) == 17 / 32
    eight = _of(waste({129: 8}, block_sizes=(128,)), "paged")
    assert (eight.payload, eight.reserved) == (1_032, 2_048)


def test_smaller_blocks_never_waste_more_where_one_divides_the_other() -> None:
    shares = [_share(row) for row in waste([5, 100, 333, 2000], block_sizes=(8, 16, 32, 64, 128)) if row.scheme == "paged"]
    assert shares == sorted(shares, reverse=True)


def test_batches_are_padded_to_their_own_longest() -> None:
    rows = waste([256] * 15 + [2048] + [100] * 16, batch=16)
    batched = next(row for row in rows if "each 16" in row.detail)
    assert batched.reserved == 16 * 2048 + 16 * 100


def test_a_request_longer_than_what_is_reserved_is_not_counted_as_fitting() -> None:
    rows = waste(ARTICLE, reserve=(1024, 4096), buckets=(256, 512))
    short = _of(rows, "reserved", "1,024")
    assert isinstance(short.share, Missing)
    assert "1 request is longer" in short.text
    assert isinstance(_of(rows, "buckets").share, Missing)
    assert _share(_of(rows, "reserved", "4,096")) == 5_888 / 65_536


def test_lengths_beyond_the_usual_buckets_get_further_ones() -> None:
    assert _of(waste([100_000, 300]), "buckets").buckets[-1] == 131_072
    assert _of(waste([300]), "buckets").buckets == (256, 512)


@given(st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4))
def test_best_buckets_reserve_no_more_than_any_other_choice(counts: dict[int, int], k: int) -> None:
    def cost(limits: tuple[int, ...]) -> int:
        return sum(min(limit for limit in limits if limit >= length) * count for length, count in counts.items())

    wanted = min(k, len(counts))
    row = next(row for row in waste(counts, best=range(1, 5), block_sizes=()) if row.scheme == f"best {wanted} buckets")
    others = (tuple(sorted(choice)) for choice in itertools.combinations(counts, wanted) if max(counts) in choice)
    assert row.reserved == min(map(cost, others)) == cost(row.buckets)


def test_best_buckets_of_many_lengths_take_seconds_and_not_hours() -> None:
    rows = waste({length: 1 + length % 7 for length in range(1, 40_001)}, block_sizes=(16,))
    shares = [_share(row) for row in rows if row.scheme.startswith("best")]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(5 / 6, abs=0.01)  # of even lengths, 5 buckets waste a sixth


def test_a_run_gives_the_lengths_that_its_requests_reached(tmp_path: Path) -> None:
    rows = [request(0, 0.0, prompt=100, output=50), request(1, 0.5, prompt=40, output=10), refused(2, 1.0, "over_length")]
    analysis = analyse(MadeRun(rows=rows).write(tmp_path))
    assert dict(lengths_of(analysis).counts) == {50: 1, 150: 1}
    assert list(lengths_of(analysis).in_order) == [150, 50]
    padded, paged = analysis.values["waste.padded_share"], analysis.values["waste.paged_share"]
    assert isinstance(padded, Reading)
    assert isinstance(paged, Reading)
    assert padded.number() == 200 / 300
    assert paged.number() == 200 / (64 + 160)


def test_no_requests_have_no_waste() -> None:
    assert waste([]) == []
    with pytest.raises(UsageError):
        waste([16], block_sizes=(0,))
    with pytest.raises(UsageError):
        lengths([True])
