"""A user's own quality items: whatever is wrong in the file is named with its line, and never asked as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.errors import UsageError
from pytest_kvcache.quality.items import Item, read_items


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8")
    return path


def test_items_are_read_with_their_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "items.jsonl",
        {"prompt": "2 + 2 =", "expect": "4"},
        "",
        {"id": "greeting", "prompt": [{"role": "user", "content": "Hi"}], "expect": "hello", "match": "contains", "max_tokens": 5},
        {"id": 7, "prompt": "a", "expect": "^b+$", "match": "regex", "note": "kept by you"},
    )
    first, second, third = read_items(path)
    assert first == Item("line-1", "2 + 2 =", "4", "exact", max_tokens=64)
    assert second.id == "greeting"
    assert second.prompt == ({"role": "user", "content": "Hi"},)
    assert second.max_tokens == 5
    assert third.id == "7"


GOOD = {"prompt": "a", "expect": "b"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a", "expect": ', "Expecting value"),
        ("[1, 2]", "not a JSON object"),
        ({"expect": "b"}, "prompt must be"),
        ({"prompt": "", "expect": "b"}, "prompt must be"),
        ({"prompt": [{"text": "x"}], "expect": "b"}, "role and content"),
        ({"prompt": "a"}, "expect must be"),
        ({"prompt": "a", "expect": 4}, "expect must be"),
        ({"prompt": "a", "expect": " "}, "expect must be"),
        ({**GOOD, "match": "fuzzy"}, "unknown match 'fuzzy'"),
        ({**GOOD, "match": "word"}, "unknown match"),
        ({**GOOD, "match": ["exact"]}, "unknown match"),
        ({**GOOD, "match": "regex", "expect": "(a"}, "does not compile"),
        ({**GOOD, "mathc": "exact"}, "unknown field 'mathc'"),
        ({**GOOD, "max_tokens": 0}, "max_tokens"),
        ({**GOOD, "max_tokens": True}, "max_tokens"),
        ({**GOOD, "depth": 2}, "depth"),
        ({**GOOD, "id": ""}, "id must be"),
        ({**GOOD, "id": "twice"}, "used in line 1"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, says: str) -> None:
    path = write(tmp_path / "items.jsonl", {**GOOD, "id": "twice"}, line)
    with pytest.raises(UsageError) as caught:
        read_items(path)
    assert says in caught.value.what
    assert "line 2" in caught.value.what
    assert str(path) in caught.value.where


def test_a_file_that_holds_no_item_is_refused(tmp_path: Path) -> None:
    for name, data in (("empty", b""), ("blank", b"\n\n"), ("binary", b"\xff\xfe\x00")):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(UsageError):
            read_items(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_items(tmp_path / "nowhere.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        read_items(tmp_path)


@given(st.lists(st.one_of(st.text(max_size=40), st.dictionaries(st.text(max_size=8), st.text(max_size=8)).map(json.dumps)), max_size=5))
def test_any_file_gives_items_or_one_clear_error(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    try:
        assert all(item.expect.strip() for item in read_items(path))
    except UsageError as error:
        assert error.where == str(path)
