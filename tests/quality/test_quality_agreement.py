"""Greedy agreement: where two answers part, how far the likely tokens moved, and what the server's own noise is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer

from pytest_kvcache.quality import agreement
from pytest_kvcache.quality.items import Item
from pytest_kvcache.records import AgreementRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.endpoint import choose_model, parse_endpoint
from pytest_kvcache.settings import Settings

VLLM = {"choices": [{"logprobs": {"tokens": [" a", " b"], "top_logprobs": [{" a": -0.1, " c": -2.5}, {" b": 0.0, " c": -math.inf}]}}]}
LLAMA = {
    "choices": [
        {
            "logprobs": {
                "content": [
                    {"token": " a", "top_logprobs": [{"token": " a", "logprob": -0.1}, {"token": " c", "logprob": -2.5}]},
                    {"token": " b", "top_logprobs": [{"token": " b", "logprob": 0.0}, {"token": " c", "logprob": -3.4e38}]},
                ]
            }
        }
    ]
}


def row(item: str, tokens: list[int], repeat: int = 0, top: list[dict[int, float]] | None = None, **more: Any) -> AgreementRow:
    return AgreementRow(item, repeat, expected_hash="h", tokens=tokens, top=top or [], **more)


def test_both_forms_of_log_probabilities_are_read_alike() -> None:
    tokens, top = agreement.read_tokens(VLLM, 7)
    assert (tokens, top) == agreement.read_tokens(LLAMA, 7)
    assert len(set(tokens)) == 2
    assert sorted(top[0].values()) == [-2.5, -0.1]
    assert list(top[1].values()) == [0.0]


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(["choices", "logprobs", "content", "tokens", "top_logprobs", "token", "logprob"]), inner, max_size=4)))  # fmt: skip
def test_no_answer_of_a_server_breaks_the_reading(body: Any) -> None:
    agreement.read_tokens(body if isinstance(body, dict) else {"choices": [{"logprobs": body}]}, 0)


def test_where_two_answers_part_and_how_much_is_equal() -> None:
    found = agreement.agree([row("a", [1, 2, 3, 4]), row("b", [5, 6])], [row("a", [1, 9, 3, 8]), row("b", [5, 6])])
    assert found is not None
    assert found.shares == {"a": 0.5, "b": 1.0}
    assert (found.probes, found.equal, found.diverged, found.first) == (2, 0.75, 1, 1)
    assert found.drift is None


def test_an_answer_that_ends_early_parts_there() -> None:
    found = agreement.agree([row("a", [1, 2, 3, 4])], [row("a", [1, 2])])
    assert found is not None
    assert (found.equal, found.first) == (0.5, 2)


def test_drift_is_measured_until_the_answers_part_and_only_of_likely_tokens() -> None:
    before = row("a", [1, 2, 3], top=[{1: -0.1, 2: -3.0}, {2: -0.5, 7: -20.0}, {3: -0.1}])
    after = row("a", [1, 9, 3], top=[{1: -0.3, 2: -2.0}, {9: -0.5, 2: -1.0}, {3: -9.0}])
    found = agreement.agree([before], [after])
    assert found is not None
    assert found.drift_max == pytest.approx(9.5)  # token 9 was not likely at all before
    assert found.drift == pytest.approx((0.2 + 1.0 + 0.5 + 9.5) / 4)


def test_probes_that_ask_something_else_or_failed_do_not_pair() -> None:
    assert agreement.agree([row("a", [1])], [AgreementRow("a", tokens=[1], expected_hash="other")]) is None
    assert agreement.agree([row("a", [1])], [row("a", [], error="HTTP 500")]) is None


def test_the_noise_of_a_server_is_its_first_answers_against_its_second() -> None:
    floor = agreement.noise_floor([row("a", [1, 2]), row("a", [1, 3], 1), row("b", [1]), row("b", [1], 1)])
    assert floor is not None
    assert (floor.equal, floor.diverged) == (0.75, 1)


def test_probes_are_spread_over_lengths_and_the_same_each_time() -> None:
    items = [Item(str(i), "p", "e", length_tokens=i) for i in range(300)]
    chosen = agreement.choose_probes(items, 24)
    assert chosen == agreement.choose_probes(items[::-1], 24)
    assert len(chosen) == 24
    assert chosen[0].length_tokens < 10
    assert chosen[-1].length_tokens > 290
    assert agreement.choose_probes(items, 0) == []


def test_a_server_without_log_probabilities_is_compared_by_words_and_no_text_is_kept(tmp_path: Path) -> None:
    with ScriptedServer(answer=lambda _: "alpha beta gamma") as server:
        endpoint = choose_model(parse_endpoint(server.url, Settings()))
        probes = [Item("a", "tell me", "x"), Item("b", "tell me more", "x")]
        rows = agreement.ask_agreement(endpoint, probes, tmp_path / "a.jsonl", tokens=8)
    assert rows == list(read_lines(tmp_path / "a.jsonl", AgreementRow))
    assert [(r.item, r.repeat) for r in rows] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert all(len(r.tokens) == 3 and not r.top for r in rows)
    assert "beta" not in (tmp_path / "a.jsonl").read_text()
