"""The standard set: the same items before and after, lengths that fit the model, and a form that no broken cache can change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer

from pytest_kvcache.quality import needle
from pytest_kvcache.quality.items import standard_items
from pytest_kvcache.server.embedded.recall import WORDS
from pytest_kvcache.server.endpoint import choose_model, parse_endpoint
from pytest_kvcache.settings import Settings


def test_the_recall_form_is_exact_and_has_one_right_answer() -> None:
    items = needle.recall_items(4096)
    assert len(items) == 300
    assert {item.length_tokens for item in items} == {64, 256, 512, 1024, 4080}
    for item in items:
        assert isinstance(item.prompt, str)
        words = item.prompt.split()
        assert len(words) == item.length_tokens
        assert set(words) <= set(WORDS)
        followers = [right for left, right in pairwise(words) if left == words[-1]]
        assert followers == [item.expect]
        assert item.max_tokens == 1


def test_pairs_stand_in_every_part_of_the_prompt() -> None:
    depths = [item.depth for item in needle.recall_items(4096) if item.length_tokens == 256]
    for band in range(5):
        assert sum(band / 5 <= depth < (band + 1) / 5 + 0.01 for depth in depths) >= 15
    assert len(set(depths)) > 60


def test_the_same_items_are_made_each_time() -> None:
    assert needle.recall_items(4096) == needle.recall_items(4096)
    assert needle.needle_items(4096) == needle.needle_items(4096)
    again = {item.id: item for item in needle.recall_items(1 << 20)}
    assert all(again[item.id] == item for item in needle.recall_items(4096) if item.length_tokens <= 256)


def test_ids_are_unique() -> None:
    for items in (needle.recall_items(4096), needle.needle_items(None), needle.needle_items(600, chat=True)):
        assert len({item.id for item in items}) == len(items)


@given(st.one_of(st.none(), st.integers(1, 2_000_000)))
def test_the_set_has_300_items_that_fit_the_model(max_model_len: int | None) -> None:
    plan = needle.plan(max_model_len)
    if max_model_len is not None and max_model_len < 40:
        assert plan == []
        return
    assert sum(count for _, count in plan) == 300
    assert all(count >= 5 and count % 5 == 0 for _, count in plan)
    assert all(length <= (max_model_len or 1024) - 16 for length, _ in plan) or max_model_len is None
    assert max(length for length, _ in plan) <= needle.LONGEST


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
    assert {item.length_tokens for item in asked[0]} == {64, 256, 512, 684}
    assert asked[0][0].id.startswith("recall-")
