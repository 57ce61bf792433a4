"""Text from outside reaches a terminal, a review page and XML harmless."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.report.escape import block, code, markdown, plain


@given(st.text(max_size=2_000))
def test_no_text_moves_a_cursor_or_breaks_a_line(text: str) -> None:
    shown = plain(text)
    assert len(shown) <= 500
    assert not [c for c in shown if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"}]
    assert not [c for c in shown if unicodedata.bidirectional(c) in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}]
    assert plain(shown) == shown


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;https://evil.example\x1b\\click\x1b]8;;\x1b\\", "click"),
        ("\x9b2Jgone", "gone"),
        ("one\r\ntwo\ttab", "one two tab"),
        ("abc\u202egpj.exe", "abcgpj.exe"),
        ("nul\x00 bell\x07", "nul bell"),
    ],
)
def test_escape_sequences_and_direction_marks_are_gone(raw: str, seen: str) -> None:
    assert plain(raw) == seen


def test_a_huge_text_is_cut_and_says_so() -> None:
    assert plain("x" * 10_000_000) == "x" * 499 + "…"
    assert len(block("line\n" * 1_000_000)) <= 4_000


@given(st.text(alphabet="|`<>[]()*_#@:/w.x1 \\!~-&\n", max_size=80))
def test_nothing_in_a_sentence_is_markup_a_link_or_a_mention(text: str) -> None:
    safe = markdown(text)
    assert "<" not in safe
    assert ">" not in safe
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`\[\]*_]", safe)
    assert not re.search(r"@\w|#\d|://|www\.", safe)


@given(st.text(alphabet="|`a \\", max_size=40))
def test_a_code_span_cannot_be_left(text: str) -> None:
    span = code(text)
    assert span == "" or span.count("`") == 2
    assert not re.search(r"(?<!\\)\|", span)


def test_a_sentence_does_not_begin_a_list_or_a_heading() -> None:
    assert markdown("# big")[0] == "\\"
    assert markdown("- item")[0] == "\\"
    assert not markdown("1. item").startswith("1.")
