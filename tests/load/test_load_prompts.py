"""Prompts and lengths: exact, different from the first tokens on, and the same again for the same seed and nonce."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.errors import UsageError
from pytest_kvcache.load.draws import Draw
from pytest_kvcache.load.plans import ASSISTANT, SYSTEM, USER, Part
from pytest_kvcache.load.prompts import ESTIMATED, IDS, LEAD, TOKENIZE, WORDS, PromptSource, Vocabulary, made_up_words

WORDS_64 = tuple(WORDS[:64])
BY_IDS = Vocabulary(IDS, WORDS_64, tuple(range(100, 164)))
BY_TEXT = Vocabulary(TOKENIZE, WORDS_64, (), overhead=7)


@given(tokens=st.integers(1, 5000), number=st.integers(0, 10**9))
def test_a_prompt_of_ids_holds_exactly_the_tokens_planned(tokens: int, number: int) -> None:
    prompt = PromptSource(BY_IDS, "n").make(tokens, 1, "lane", number)
    ids = json.loads(prompt.json)
    assert len(ids) == prompt.planned_tokens == tokens
    assert set(ids) <= set(BY_IDS.ids)
    assert prompt.text.split() == [WORDS_64[number - 100] for number in ids]


@given(tokens=st.integers(8, 5000), number=st.integers(0, 10**9))
def test_a_prompt_of_text_counts_what_the_server_adds(tokens: int, number: int) -> None:
    prompt = PromptSource(BY_TEXT, "n").make(tokens, number)
    text = json.loads(prompt.json)
    assert prompt.planned_tokens == tokens == 7 + len(text.split()) - 1
    assert text == prompt.text
    assert text.startswith(LEAD + " ")


def test_a_prompt_too_short_for_what_the_server_adds_says_its_real_length() -> None:
    assert PromptSource(BY_TEXT, "n").make(3, 1).planned_tokens == 8


def test_a_length_that_no_server_takes_is_refused_before_memory_is_full() -> None:
    for before in ((), (Part(10**9, "shared"),)):
        with pytest.raises(UsageError, match="1,000,000,000 words is longer than any server takes"):
            PromptSource(BY_IDS, "n").make(10**9 if not before else 0, 1, before=before)


def test_estimated_lengths_follow_the_rate_and_say_that_they_are_estimates() -> None:
    vocabulary = Vocabulary(ESTIMATED, WORDS_64, (), overhead=2, tokens_per_word=2.5)
    prompt = PromptSource(vocabulary, "n").make(252, 1)
    assert len(json.loads(prompt.json).split()) - 1 == 100
    assert (prompt.planned_tokens, prompt.source, vocabulary.exact) == (252, ESTIMATED, False)


def test_prompts_differ_within_their_first_eight_tokens_by_number_seed_and_nonce() -> None:
    heads = set()
    for nonce in ("a", "b"):
        source = PromptSource(BY_IDS, nonce)
        for seed in (1, 2):
            heads |= {source.make(8, seed, "lane", number).messages[0][1][0] for number in range(2000)}
    assert len({tuple(WORDS_64[index % 64] for index in head) for head in heads}) == 8000


def test_the_same_seed_and_nonce_send_the_same_prompts() -> None:
    assert PromptSource(BY_IDS, "a").make(500, 1, "x", 7).json == PromptSource(BY_IDS, "a").make(500, 1, "x", 7).json
    assert PromptSource(BY_IDS, "a").make(500, 1, "x", 7).json != PromptSource(BY_IDS, "b").make(500, 1, "x", 7).json


@given(
    tokens=st.integers(200, 3000), shared=st.integers(1, 90), turns=st.integers(0, 2), api=st.sampled_from(["ids", "text", "chat", "chat-no-system"])
)
def test_prompts_that_share_pieces_still_hold_exactly_the_tokens_planned(tokens: int, shared: int, turns: int, api: str) -> None:
    system = None if api == "chat-no-system" else 9
    vocabulary = BY_IDS if api == "ids" else dataclasses.replace(BY_TEXT, system=system, pair=11)
    source = PromptSource(vocabulary, "n", chat=api.startswith("chat"))
    before = (Part(shared, "s", SYSTEM), *(Part(4 + at % 2, f"t{at}", (USER, ASSISTANT)[at % 2]) for at in range(2 * turns)))
    one, two = source.make(tokens, 1, before=before), source.make(tokens, 2, before=before)
    value = json.loads(one.json)
    if api == "ids":
        counted = len(value)
        assert value[: shared + 9 * turns] == json.loads(two.json)[: shared + 9 * turns]
    elif api == "text":
        counted = 7 + len(value.split()) - 1
    else:
        roles = [message["role"] for message in value]
        assert roles == ([SYSTEM] if system else []) + [USER, ASSISTANT] * turns + [USER]
        words = sum(len(message["content"].split()) - 1 for message in value)
        counted = 7 + words + (system or 0) + 11 * turns
        assert value[:-1] == json.loads(two.json)[:-1]
    assert counted == one.planned_tokens == tokens
    assert one.json != two.json


def test_words_are_plain_and_many() -> None:
    assert len(set(WORDS)) == len(WORDS) >= 256
    invented = made_up_words(1200)
    assert len(set(invented)) == 1200
    assert all(word.isascii() and word.isalpha() and word.islower() for word in (*WORDS, *invented))


def test_a_draw_depends_on_nothing_but_seed_lane_and_number() -> None:
    again = [Draw(1, "normal", 5).uniform(0, 10**9) for _ in range(3)]
    assert len(set(again)) == 1
    others = {Draw(seed, lane, number).uniform(0, 10**9) for seed in (1, 2) for lane in ("a", "b") for number in range(50)}
    assert len(others) == 200
    draw = Draw(1, "a", 1)
    assert len({draw.unit() for _ in range(40)}) == 40


@given(seed=st.integers(0, 2**63), low=st.integers(0, 1000), span=st.integers(-5, 1000))
def test_a_uniform_draw_stays_in_its_bounds(seed: int, low: int, span: int) -> None:
    assert low <= Draw(seed, "x", 0).uniform(low, low + span) <= max(low, low + span)


@given(seed=st.integers(0, 2**63), median=st.floats(-1, 1e6), sigma=st.floats(0, 5), low=st.integers(1, 100), high=st.integers(1, 10**6))
def test_a_lognormal_draw_stays_in_its_bounds(seed: int, median: float, sigma: float, low: int, high: int) -> None:
    assert low <= Draw(seed, "x", 0).lognormal(median, sigma, low, high) <= max(low, high)


def test_a_lognormal_draw_has_its_median_and_spread() -> None:
    drawn = [Draw(3, "x", number).lognormal(500, 0.8, 1, 10**9) for number in range(4000)]
    assert statistics.median(drawn) == pytest.approx(500, rel=0.06)
    deciles = statistics.quantiles(drawn, n=20)
    assert deciles[0] == pytest.approx(500 * 0.27, rel=0.12)
    assert deciles[-1] == pytest.approx(500 * 3.73, rel=0.12)
