"""Answers marked by a schema or a user's own function: none may pass by error, and none may stop the session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.errors import UsageError
from pytest_kvcache.quality.ask import ask_items
from pytest_kvcache.quality.items import Item, read_items
from pytest_kvcache.quality.marking import MarkingProcess
from pytest_kvcache.records import QualityRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.endpoint import choose_model, parse_endpoint
from pytest_kvcache.settings import Settings

SCHEMA = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
FUNCTIONS = """
import os, time
print("loaded")

def short(answer, item):
    print("looking at", item["id"])
    return len(answer) < 10

def hangs(answer, item):
    time.sleep(60)

def dies(answer, item):
    os._exit(3)

def raises(answer, item):
    raise RuntimeError("no such table")

def leaves(answer, item):
    raise SystemExit(0)

def unsure(answer, item):
    return "yes"
"""


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MarkingProcess]:
    folder = tmp_path_factory.mktemp("graders")
    (folder / "my_graders.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with MarkingProcess(limit_s=1.0) as process:
            yield process


@pytest.mark.parametrize(
    ("answer", "passes"),
    [('{"name": "Ada", "age": 36}', True), ('```json\n{"name": "Ada"}\n```', True), ('{"age": 36}', False), ('{"name": 1}', False), ("Ada", False), ("[" * 20_000, False)],
)  # fmt: skip
def test_a_schema_marks_json(marks: MarkingProcess, answer: str, passes: bool) -> None:
    assert marks.mark(Item("s", "p", json.dumps(SCHEMA), "schema"), answer) == (passes, "")


def test_a_reference_to_somewhere_else_is_never_fetched(marks: MarkingProcess) -> None:
    with ScriptedServer() as server:
        schema = json.dumps({"$ref": f"{server.url}/schema.json"})
        passed, why = marks.mark(Item("s", "p", schema, "schema"), "{}")
        assert server.paths() == []
    assert not passed
    assert why


def test_a_function_of_the_users_own_marks_and_what_it_prints_is_no_answer(marks: MarkingProcess) -> None:
    item = Item("f", "p", "my_graders:short", "function")
    assert marks.mark(item, "brief") == (True, "")
    assert marks.mark(item, "much too long an answer") == (False, "")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hangs", "more than 1 s"),
        ("dies", "ended"),
        ("raises", "no such table"),
        ("leaves", "SystemExit"),
        ("unsure", "not True or False"),
        ("absent", "AttributeError"),
    ],
)
def test_a_function_that_fails_costs_its_item_and_not_the_next(marks: MarkingProcess, name: str, says: str) -> None:
    passed, why = marks.mark(Item("f", "p", f"my_graders:{name}", "function"), "x")
    assert not passed
    assert says in why
    # a process that ended imports again, which takes longer than a mark
    marks.mark(Item("f", "p", "my_graders:short", "function"), "x")
    assert marks.mark(Item("f", "p", "my_graders:short", "function"), "x") == (True, "")


def test_a_users_file_with_every_grader_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graders_of_mine.py").write_text("def ok(answer, item):\n    return answer.strip() == item['prompt'].upper()\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines = [
        {"id": "number", "prompt": "1,234", "expect": 1230, "match": "number", "tolerance": "1%"},
        {"id": "choice", "prompt": "b", "expect": "B", "match": "choice"},
        {"id": "schema", "prompt": "{}", "expect": {"type": "object"}, "match": "schema"},
        {"id": "function", "prompt": "abc", "expect": "graders_of_mine:ok", "match": "function"},
        {"id": "wrong", "prompt": "7", "expect": 8, "match": "number"},
    ]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, lines)))
    items = read_items(tmp_path / "items.jsonl")
    with ScriptedServer(answer=str.upper) as server:
        summary = ask_items(choose_model(parse_endpoint(server.url, Settings())), items, tmp_path / "q.jsonl")
    passed = {row.item for row in read_lines(tmp_path / "q.jsonl", QualityRow) if row.passed}
    assert passed == {"number", "choice", "schema", "function"}
    assert (summary.items, summary.errors) == (5, 0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"match": "number", "expect": "many"}, "must be a number"),
        ({"match": "number", "expect": 3, "tolerance": -1}, "tolerance"),
        ({"match": "exact", "expect": "a", "tolerance": 1}, "belongs to the match 'number'"),
        ({"match": "choice", "expect": "Z"}, "one of the choices"),
        ({"match": "choice", "expect": "A", "choices": "A"}, "list of texts"),
        ({"match": "schema", "expect": "{}"}, "a JSON Schema"),
        ({"match": "schema", "expect": {"type": "strange"}}, "not a JSON Schema"),
        ({"match": "function", "expect": "os.system('x')"}, "module:NAME"),
    ],
)  # fmt: skip
def test_a_grader_that_cannot_be_meant_is_refused_with_its_line(tmp_path: Path, line: dict[str, object], says: str) -> None:
    (tmp_path / "items.jsonl").write_text(json.dumps({"prompt": "p", **line}))
    with pytest.raises(UsageError, match="line 1") as caught:
        read_items(tmp_path / "items.jsonl")
    assert says in caught.value.what
