"""Grading: an answer that is wrong must not pass, and none may stop the session."""

from __future__ import annotations

import time

import pytest

from pytest_kvcache.quality.graders import grade, is_garbage, summarise
from pytest_kvcache.quality.items import Item
from pytest_kvcache.quality.patterns import PatternProcess
from pytest_kvcache.records import QualityRow


@pytest.mark.parametrize(
    ("match", "expect", "answer", "passes"),
    [
        ("exact", "bodu", " bodu\n", True),
        ("exact", "bodu", "bodu kela", False),
        ("exact", "bodu", "Bodu", False),
        ("exact", "bodu", "", False),
        ("contains", "4", "The answer is 4.", True),
        ("contains", "5", "The answer is 4.", False),
        ("regex", r"^\s*(yes|no)\b", " yes, it is", True),
        ("regex", r"^\s*(yes|no)\b", "perhaps", False),
        ("regex", r".*", "  \n", False),
        ("word", "48213", " 48213. The river", True),
        ("word", "48213", " **48213**", True),
        ("word", "48213", " 482131", False),
        ("word", "48213", " 4821", False),
        ("word", "48213", " The 48213", False),
    ],
)
def test_an_answer_passes_or_not(match: str, expect: str, answer: str, passes: bool) -> None:
    assert grade(Item("i", "p", expect, match), answer) is passes


def test_an_unknown_match_is_an_error() -> None:
    with pytest.raises(ValueError, match="fuzzy"):
        grade(Item("i", "p", "e", "fuzzy"), "answer")


def test_a_pattern_that_never_ends_costs_its_item_and_not_the_session() -> None:
    began = time.monotonic()
    with PatternProcess(limit_s=0.3) as patterns:
        assert patterns.search("b+", "abbb") is True
        assert patterns.search("(a+)+$", "a" * 64 + "b") is None
        assert patterns.search("^c", "abbb") is False
    assert time.monotonic() - began < 30


def test_garbage_is_one_character_over_and_over() -> None:
    assert is_garbage(" ??????????")
    assert not is_garbage("???")
    assert not is_garbage("abababab")


def test_items_without_an_answer_count_as_asked() -> None:
    rows = [
        QualityRow("a", True, length_tokens=64),
        QualityRow("b", False, length_tokens=64),
        QualityRow("c", False, length_tokens=256, error="HTTP 500"),
    ]
    summary = summarise(rows)
    assert (summary.items, summary.passed, summary.errors) == (3, 1, 1)
    assert summary.by_length == {64: (1, 2), 256: (0, 1)}


@pytest.mark.parametrize(
    ("answer", "passes"),
    [("So 12 + 30 = 42", True), ("42.", True), ("1,042", False), ("The sum is 42.004", True), ("The sum is 42.2", False), ("-42", False), ("A42", False), ("none", False),
     ("It was 42, no: 41", False)],
)  # fmt: skip
def test_the_last_number_is_graded_within_its_tolerance(answer: str, passes: bool) -> None:
    assert grade(Item("n", "p", "42.0", "number", tolerance=0.01), answer) is passes


@pytest.mark.parametrize(
    ("answer", "choice"),
    [("B", "B"), ("(C) because", "C"), ("**D**", "D"), ("The answer is B.", "B"), ("Answer: (A)", "A"), ("A good try, but the answer is (C)", "C"), ("B. Paris", "B"),
     ("I would say C", "C"), ("A or B", None), ("A good one", None), ("nothing", None), ("Because", None), ("The answer is A. No: the correct answer is D", "D")],
)  # fmt: skip
def test_the_choice_that_an_answer_settles_on_is_graded(answer: str, choice: str | None) -> None:
    for letter in "ABCD":
        assert grade(Item("c", "p", letter, "choice", choices=("A", "B", "C", "D")), answer) is (letter == choice)
