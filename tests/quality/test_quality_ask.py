"""Asking: every item leaves a row, whatever the server does, and what was asked before it died is kept."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.errors import CannotWrite, EndpointUnreachable, UsageError
from pytest_kvcache.quality.ask import ask_items, digest
from pytest_kvcache.quality.items import Item
from pytest_kvcache.quality.needle import CHAIN, recall_items
from pytest_kvcache.records import QualityRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.endpoint import Completion, Endpoint, choose_model, parse_endpoint
from pytest_kvcache.settings import Settings


def endpoint_of(server: ScriptedServer, api: str = "completions") -> Endpoint:
    return dataclasses.replace(choose_model(parse_endpoint(server.url, Settings())), api=api)


def recalls(prompt: str) -> str:
    words = prompt.split()
    said = [words[-1]]
    for _ in range(CHAIN):
        said.append(next((right for left, right in pairwise(words) if left == said[-1]), "?"))
    return " " + " ".join(said[1:])


def rows_of(path: Path) -> dict[str, QualityRow]:
    return {row.item: row for row in read_lines(path, QualityRow)}


def test_a_model_that_recalls_passes_everything(tmp_path: Path) -> None:
    items = [item for item in recall_items(1200) if item.length_tokens <= 256][::10]
    with ScriptedServer(answer=recalls) as server:
        summary = ask_items(endpoint_of(server), items, tmp_path / "q.jsonl")
    assert summary.passed == summary.items == len(items)
    assert summary.errors == 0
    rows = rows_of(tmp_path / "q.jsonl")
    assert set(rows) == {item.id for item in items}
    row = rows[items[0].id]
    assert row.prompt is None
    assert row.answer is None
    assert row.expected_hash == digest(items[0])
    assert row.prompt_tokens == items[0].length_tokens - 1  # the script adds no token of its own


def test_prompts_and_answers_are_kept_only_when_asked_for(tmp_path: Path) -> None:
    secret = [Item("s", "tell me", "tok")]
    with ScriptedServer() as server:
        ask_items(endpoint_of(server), secret, tmp_path / "without.jsonl")
        ask_items(endpoint_of(server), secret, tmp_path / "with.jsonl", keep_text=True)
    assert b"tell me" not in (tmp_path / "without.jsonl").read_bytes()
    assert rows_of(tmp_path / "with.jsonl")["s"].prompt == "tell me"


def test_errors_count_as_asked_and_not_passed(tmp_path: Path) -> None:
    items = [Item(f"i{n}", f"question {n}", "tok") for n in range(20)]
    with ScriptedServer() as server:
        endpoint = endpoint_of(server)
        server.script.faults = ["token-status=500", "token-error=KV cache broke"]
        summary = ask_items(endpoint, items, tmp_path / "q.jsonl")
    assert (summary.items, summary.passed, summary.errors) == (20, 0, 20)
    assert "KV cache broke" in rows_of(tmp_path / "q.jsonl")["i0"].error


def test_garbage_is_noted(tmp_path: Path) -> None:
    with ScriptedServer(answer=lambda _: "?" * 40) as server:
        ask_items(endpoint_of(server), [Item("i", "q", "a")], tmp_path / "q.jsonl")
    assert rows_of(tmp_path / "q.jsonl")["i"].note == "one character repeated"


def test_a_server_that_died_ends_the_asking_and_the_rows_are_kept(tmp_path: Path) -> None:
    items = [Item(f"i{n}", "question", "tok") for n in range(200)]
    with ScriptedServer() as server:
        endpoint = endpoint_of(server)
        ask_items(endpoint, items[:3], tmp_path / "q.jsonl")
    with pytest.raises(EndpointUnreachable):
        ask_items(endpoint, items, tmp_path / "q.jsonl", timeout_s=5.0)
    rows = rows_of(tmp_path / "q.jsonl")
    assert 1 <= len(rows) < 20
    assert all(row.error for row in rows.values())


def test_the_whole_set_is_bounded_in_time(tmp_path: Path) -> None:
    items = [Item(f"i{n}", "question", "tok") for n in range(40)]
    began = time.monotonic()
    with ScriptedServer() as server:
        endpoint = endpoint_of(server)
        server.script.faults = ["slow=0.2"]
        summary = ask_items(endpoint, items, tmp_path / "q.jsonl", deadline_s=0.5)
    assert time.monotonic() - began < 20
    assert summary.items == 40
    late = [row for row in rows_of(tmp_path / "q.jsonl").values() if row.error.startswith("not asked")]
    assert 20 < len(late) < 40


def test_a_pattern_is_searched_in_the_answer(tmp_path: Path) -> None:
    items = [Item("good", "q", r"^\s*\d+", "regex"), Item("bad", "q", r"^x", "regex")]
    with ScriptedServer(answer=lambda _: " 42 apples") as server:
        ask_items(endpoint_of(server), items, tmp_path / "q.jsonl")
    rows = rows_of(tmp_path / "q.jsonl")
    assert rows["good"].passed
    assert not rows["bad"].passed
    assert rows["good"].length_tokens == 1


def test_chat_messages_are_asked_through_the_chat_api_and_not_otherwise(tmp_path: Path) -> None:
    items = [Item("c", ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hello there"}), "tok", "contains")]
    with ScriptedServer() as server:
        assert ask_items(endpoint_of(server, "chat"), items, tmp_path / "q.jsonl").passed == 1
        sent = [seen.body for seen in server.seen if seen.path.endswith("/chat/completions")]
        assert sent[-1]["messages"] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello there"}]
        with pytest.raises(UsageError, match="chat"):
            ask_items(endpoint_of(server), items, tmp_path / "q.jsonl")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with ScriptedServer() as server, pytest.raises(CannotWrite):
        ask_items(endpoint_of(server), [Item("i", "q", "a")], tmp_path / "file" / "q.jsonl")


def test_each_row_is_on_disk_as_soon_as_it_came(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    seen: list[int] = []

    def answer(_: str) -> str:
        seen.append(len(path.read_bytes().splitlines()))
        return "tok"

    with ScriptedServer(answer=answer) as server:
        ask_items(endpoint_of(server), [Item(f"i{n}", "q", "tok") for n in range(5)], path, concurrency=1)
    assert seen == [0, 1, 2, 3, 4]
    assert all(json.loads(line)["passed"] for line in path.read_bytes().splitlines())


def test_items_that_fit_one_by_one_do_not_fill_the_pool_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()
    under_way: list[int] = []
    sums: list[int] = []

    def complete(endpoint: Endpoint, prompt: str, max_tokens: int, **_: object) -> Completion:
        with lock:
            under_way.append(int(prompt))
            sums.append(sum(under_way))
        time.sleep(0.01)
        with lock:
            under_way.remove(int(prompt))
        return Completion(200, " tok", 1, 1, "length", "", 0.01, {})

    monkeypatch.setattr("pytest_kvcache.quality.ask.complete", complete)
    items = [Item(f"i{n}", str(tokens), "tok", length_tokens=tokens) for n, tokens in enumerate((400, 400, 300, 100, 100, 50, 50, 50))]
    with ScriptedServer(model="m") as server:
        assert ask_items(endpoint_of(server), items, tmp_path / "q.jsonl").passed == len(items)
    assert max(sums) <= 400
    assert len(set(sums)) > 3, "short ones still go together"


def test_replicas_share_the_items_and_their_rows_say_which_answered(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    items = [Item(f"i{n}", "q", "tok") for n in range(4)]
    with ScriptedServer(model="m") as server:
        ask_items(endpoint_of(server), items[0::2], path)
        ask_items(endpoint_of(server), items[1::2], path, replica=1, append=True)
    rows = list(read_lines(path, QualityRow))
    assert {row.item: row.endpoint for row in rows} == {"i0": 0, "i2": 0, "i1": 1, "i3": 1}
