"""What prompts say: a file's text cut to the token and still different from the first tokens on, or prompts of one's own as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer

from pytest_kvcache.errors import LoadFailed
from pytest_kvcache.load import contract
from pytest_kvcache.load.content import Text, TextSource
from pytest_kvcache.load.contract import read_load, read_rows, workload_hash
from pytest_kvcache.load.plans import SYSTEM, Part
from pytest_kvcache.load.prompts import LEAD, TOKENIZE, WORDS, Vocabulary
from pytest_kvcache.load.runner import LoadResult, run_load
from pytest_kvcache.records import RequestRow
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import Settings

STORY = " ".join(f"sentence{number} of a story, long and winding;" for number in range(400))
VOCABULARY = Vocabulary(TOKENIZE, WORDS[:64], overhead=5, system=3, pair=4)


@given(costs=st.lists(st.integers(1, 9), min_size=1, max_size=40), tokens=st.integers(1, 3000), number=st.integers(0, 99), shared=st.integers(0, 200))
def test_prompts_of_a_text_hold_exactly_the_tokens_planned(costs: list[int], tokens: int, number: int, shared: int) -> None:
    pieces = [f" w{at}".encode() for at in range(len(costs))]
    source = TextSource(VOCABULARY, "n", Text(pieces, [f" w{at}" for at in range(len(costs))], costs), chat=True)
    before = (Part(shared, "s", SYSTEM),) if shared else ()
    prompt = source.make(tokens, 1, number, before=before)
    price = {f"w{at}": cost for at, cost in enumerate(costs)}
    messages = json.loads(prompt.json)
    counted = 5 + (3 if shared else 0) + sum(price.get(word, 1) for message in messages for word in message["content"].split()[1:])
    assert counted == prompt.planned_tokens
    assert counted == tokens or tokens < 6 + shared + 3
    assert "\n".join(message["content"] for message in messages) == prompt.text
    assert prompt.json == source.make(tokens, 1, number, before=before).json


@given(costs=st.lists(st.integers(1, 9), min_size=1, max_size=12), tokens=st.integers(1, 200), start=st.integers(0, 30))
def test_a_cut_goes_round_the_text_and_takes_all_that_fits(costs: list[int], tokens: int, start: int) -> None:
    text = Text([b"%d" % at for at in range(len(costs))], list(map(str, range(len(costs)))), costs)
    cut = text.cut(tokens, start)
    expected, spent, at = [], 0, start % len(costs)
    while spent + costs[at] <= tokens:
        spent += costs[at]
        expected.append(str(at))
        at = (at + 1) % len(costs)
    assert (cut.texts, cut.tokens) == (tuple(expected), spent)
    assert b"".join(cut.pieces).decode() == "".join(expected)


def test_two_prompts_of_one_text_differ_from_their_first_words_on() -> None:
    source = TextSource(VOCABULARY, "n", Text([b" a", b" b"], [" a", " b"], [1, 2]))
    heads = {source.make(100, 1, number).text.removeprefix(LEAD).split()[0:8].__str__() for number in range(500)}
    assert len(heads) == 500


def press(
    server: ScriptedServer, folder: Path, content: Path, *, api: str = "completions", **options: Any
) -> tuple[LoadResult, list[RequestRow], list[Any]]:
    endpoint = parse_endpoint(server.url, Settings(api=api))
    options = {"requests": 6, "stop_timeout_s": 3, "median": 80, "content": str(content), **options}
    result = run_load([endpoint], "normal", folder, users=2, output_tokens=4, keep_text=True, options=options)
    rows = sorted(read_rows(result.rows_path), key=lambda row: row.id)
    assert {row.outcome for row in rows} == {contract.OK}
    assert all(row.prompt_tokens_planned in (row.prompt_tokens, None if api == "chat" and content.suffix == ".jsonl" else -1) for row in rows)
    sent = [one.body for one in server.seen if one.path in ("/v1/completions", "/v1/chat/completions")][-len(rows) :]
    return result, rows, sent


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_text_file_fills_the_prompts(tmp_path: Path, api: str) -> None:
    (tmp_path / "story.txt").write_text(STORY)
    with ScriptedServer() as server:
        result, rows, sent = press(server, tmp_path / "run", tmp_path / "story.txt", api=api)
    if api == "chat":
        words = sent[0]["messages"][0]["content"].split()
        assert sum(word.startswith("sentence") for word in words) > len(words) / 12
        assert rows[0].prompt == sent[0]["messages"][0]["content"] or len({row.prompt for row in rows}) == len(rows)
    notes = [note.text for note in read_load(result.rows_path).notes]
    assert any("prompts are cut from story.txt" in note for note in notes)
    start = read_load(result.rows_path).start
    assert start is not None
    assert str(start.options["content"]).startswith("story.txt sha256:")
    assert start.options["shared_prompts"] is False


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_prompts_of_ones_own_are_sent_as_they_are_in_turn(tmp_path: Path, api: str) -> None:
    lines: list[dict[str, Any]] = [{"prompt": "one two three", "output_tokens": 2}, {"prompt": "four five", "max_tokens": 3}, {"prompt": "six"}]
    if api == "chat":
        lines[2] = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "six"}]}
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with ScriptedServer() as server:
        result, rows, sent = press(server, tmp_path / "run", tmp_path / "mine.jsonl", api=api, requests=5)
    values = [one["messages"][-1]["content"] if api == "chat" else one["prompt"] for one in sent]
    assert sorted(values) == sorted(["one two three", "four five", "six", "one two three", "four five"])
    assert [row.completion_tokens for row in rows] == [2, 3, 4, 2, 3]
    assert rows[0].length_source == "given"
    start = read_load(result.rows_path).start
    assert start is not None
    assert start.options["shared_prompts"] is True


def test_other_content_is_another_workload(tmp_path: Path) -> None:
    hashes = set()
    for name, text in (("a", STORY), ("b", STORY + " end"), ("c", STORY)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "story.txt").write_text(text)
        with ScriptedServer() as server:
            result, _, _ = press(server, tmp_path / name / "run", tmp_path / name / "story.txt")
        start = read_load(result.rows_path).start
        assert start is not None
        assert workload_hash(start) == result.workload
        hashes.add(result.workload)
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("x.txt", " \n", "holds no words"),
        ("x.jsonl", '{"text": 1}\n', "line 1 is no prompt"),
        ("x.jsonl", "\n", "no prompt"),
        ("nowhere.txt", None, "cannot be read"),
    ],
)
def test_content_that_is_none_fails_the_load_in_one_message(tmp_path: Path, name: str, text: str | None, shown: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with ScriptedServer() as server, pytest.raises(LoadFailed, match=shown):
        press(server, tmp_path / "run", tmp_path / name)


def test_a_server_that_counts_no_text_gets_drawn_words_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text(STORY)
    with ScriptedServer(faults=["no-tokenize"]) as server:
        result, _, _ = press(server, tmp_path / "run", tmp_path / "story.txt")
    assert any("not --kv-content" in note.text for note in read_load(result.rows_path).notes)
