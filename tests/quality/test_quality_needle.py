"""The standard set: the same items before and after, lengths that fit the model, and a form that no broken cache can change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer

from pytest_kvcache.quality import grid, needle
from pytest_kvcache.quality.items import standard_items
from pytest_kvcache.server.embedded.recall import WORDS
from pytest_kvcache.server.endpoint import choose_model, parse_endpoint
from pytest_kvcache.settings import Settings


def test_the_recall_form_is_exact_and_has_one_right_answer() -> None:
    items = needle.recall_items(4096, [16], extra=3)
    assert len(items) == 300
    for item in items:
        assert isinstance(item.prompt, str)
        words = item.prompt.split()
        assert len(words) + 3 == item.length_tokens
        assert set(words) <= set(WORDS)
        said, expected = [words[-1]], item.expect.split()
        for _ in expected:
            # each word of the chain stands once, so what follows it is the only right answer
            (follower,) = [right for left, right in pairwise(words) if left == said[-1]]
            said.append(follower)
        assert said[1:] == expected
        assert item.max_tokens == needle.CHAIN == len(expected)


def test_pairs_stand_in_every_part_of_the_prompt() -> None:
    items = needle.recall_items(4096, [16])
    for low, high in ((0, 300), (1000, 2100)):
        depths = [item.depth for item in items if low <= item.length_tokens < high]
        for band in range(5):
            assert sum(band / 5 <= depth <= (band + 1) / 5 for depth in depths) >= len(depths) // 5 - 2
        assert len(set(depths)) > len(depths) // 2


def test_the_same_items_are_made_each_time_whatever_else_is_asked() -> None:
    assert needle.recall_items(4096) == needle.recall_items(4096)
    assert needle.needle_items(4096) == needle.needle_items(4096)
    other = {item.id: item for item in needle.recall_items(1 << 20, [784])}
    shared = [item for item in needle.recall_items(4096, [16]) if item.id in other]
    assert len({item.length_tokens for item in shared}) > 15
    assert all(other[item.id] == item for item in shared)


def test_ids_are_unique() -> None:
    for items in (needle.recall_items(4096), needle.needle_items(None), needle.needle_items(600, chat=True)):
        assert len({item.id for item in items}) == len(items)


@given(st.one_of(st.none(), st.integers(1, 2_000_000)), st.lists(st.integers(1, 20_000), max_size=2))
def test_the_set_has_300_items_that_fit_the_model(max_model_len: int | None, blocks: list[int]) -> None:
    plan = grid.plan(max_model_len, blocks)
    if max_model_len is not None and max_model_len < 28:
        assert plan == []
        return
    assert sum(count for _, count in plan) >= grid.TOTAL
    assert all(count > 0 for _, count in plan)
    assert all(12 <= length <= (max_model_len - grid.MARGIN if max_model_len else 2049) for length, _ in plan)
    assert max(length for length, _ in plan) <= grid.LONGEST


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256, 784])
def test_the_grid_lies_on_and_beside_block_boundaries_and_powers_of_two_and_close_to_the_end(block: int) -> None:
    lengths = {length for length, _ in grid.plan(8192, [block])}
    for k in (1, 2, 3, 5, 7):
        wanted = {k * block + off for off in (-1, 0, 1)}
        assert {length for length in wanted if 12 <= length <= 8176} <= lengths
    for power in (64, 128, 256, 512, 1024, 2048, 4096):
        assert {power - 1, power, power + 1} <= lengths
    last = 8176 // block * block
    assert {last - 1, last, 8176} <= lengths


def test_sides_with_other_block_sizes_share_the_powers_of_two_and_both_boundaries_can_be_asked() -> None:
    before, after, both = (dict(grid.plan(4096, blocks)) for blocks in ([16], [784], [16, 784]))
    assert sum(1 for length in before if length in after) > 15
    assert set(both) >= set(before) | set(after)


@pytest.mark.parametrize("tokens_per_word", [1.0, 1.3, 4.2])
def test_the_needle_form_gives_the_number_once_and_asks_for_it(tokens_per_word: float) -> None:
    for chat in (False, True):
        for item in needle.needle_items(4096, tokens_per_word=tokens_per_word, chat=chat):
            assert isinstance(item.prompt, str)
            assert item.prompt.count(item.expect) == 1
            assert sum(character.isdigit() for character in item.prompt) == 5
            if item.length_tokens >= 256:
                assert len(item.prompt.split()) * tokens_per_word <= item.length_tokens
            assert item.match == ("contains" if chat else "word")


def test_the_form_depends_on_how_tokens_count() -> None:
    def cost(per_word: int, constant: int) -> Callable[[str], int]:
        return lambda text: constant + per_word * len(text.split())

    assert needle.choose_form(cost(1, 30)) == needle.RECALL
    assert needle.choose_form(cost(2, 0)) == needle.NEEDLE
    assert needle.choose_form(lambda _: None) == needle.NEEDLE
    assert needle.words_cost(cost(2, 7)) == pytest.approx(2.0)
    assert needle.words_cost(lambda _: None) == 1.5


@pytest.mark.parametrize("faults", [[], ["no-tokenize"]], ids=["the server tokenises", "only usage tells"])
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_broken_cache_does_not_change_the_questions(faults: list[str], api: str) -> None:
    asked = []
    for answer in ("right", "??????????"):
        with ScriptedServer(faults=faults, max_model_len=700, chat_overhead=9, answer=lambda _, said=answer: said) as server:
            endpoint = dataclasses.replace(choose_model(parse_endpoint(server.url, Settings())), api=api)
            asked.append(standard_items(endpoint))
    assert asked[0] == asked[1]
    assert {63, 64, 65, 511, 512, 513, 684} <= {item.length_tokens for item in asked[0]}
    assert asked[0][0].id.startswith("recall-")


@pytest.mark.parametrize("per_word", [1, 2])
def test_a_needle_prompt_has_its_length_to_the_token(per_word: int) -> None:
    def count(text: str) -> int:
        return 3 + sum(1 if word == "very" else per_word for word in text.split())

    items = needle.needle_items(1024, [32], tokens_per_word=float(per_word), extra=4, count=count)
    off = [item.length_tokens - 4 - count(str(item.prompt)) for item in items]
    assert sum(difference == 0 for difference in off) > 0.9 * len(off)
    assert all(0 <= difference <= 8 for difference in off if difference), sorted(set(off))
