"""Files of lengths that users have: every format gives the lengths it states, and what states none is refused by its line."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import MadeRun, refused, request

from pytest_kvcache.analysis import length_counts
from pytest_kvcache.analysis.length_files import read_lengths
from pytest_kvcache.analysis.payload import REFUSED
from pytest_kvcache.analysis.rows import read_rows
from pytest_kvcache.analysis.waste import lengths_of_rows
from pytest_kvcache.errors import CannotJudge, KvError, UsageError
from pytest_kvcache.load.contract import OUTCOMES
from pytest_kvcache.load.traces import read_trace

TRACES = Path(__file__).parents[1] / "data" / "traces"
ARTICLE = {256: 15, 2048: 1}


def of(folder: Path, text: str | bytes, name: str = "lengths.jsonl") -> dict[int, int]:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return dict(read_lengths(path).counts)


def test_a_file_may_be_numbers_traces_requests_or_a_histogram(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('7\n{"input_length": 5, "output_length": 2}\n\n{"prompt_tokens": 4}\n{"kind":"start","wall_s":1}\n')
    assert dict(read_lengths(path).counts) == {4: 1, 7: 2}
    assert list(read_lengths(path).in_order) == [7, 7, 4]
    assert of(tmp_path, json.dumps({"256": 15, "2048": 1})) == ARTICLE
    MadeRun(rows=[request(0, 0.0, prompt=9, output=3), refused(1, 0.1, "over_length")]).write(tmp_path / "run")
    found = read_lengths(tmp_path / "run" / "requests.jsonl")
    assert dict(found.counts) == {12: 1}
    assert found.notes == ("left out: 1 request that held no token, or that the server refused",)


def test_the_rows_of_a_run_are_the_lengths_of_the_run_whatever_became_of_them(tmp_path: Path) -> None:
    """A file of rows and the folder that it lies in tell one table."""
    rows = [msgspec.structs.replace(request(n, n / 10, prompt=100 + n, output=3), outcome=outcome) for n, outcome in enumerate(OUTCOMES)]
    run = MadeRun(rows=rows).write(tmp_path / "run")
    assert dict(read_lengths(tmp_path / "run" / "requests.jsonl").counts) == dict(lengths_of_rows(read_rows(run.load_lines())[0], REFUSED).counts)


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("mooncake.jsonl", '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n' * 2, {7258: 2}),
        (
            "named.csv",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,log\n45,ChatGPT,0,0,0,log\n",
            {490: 1},
        ),
        ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n", {418: 1}),
        ("own.csv", "id;prompt_tokens;completion_tokens\n1;10;2\n2;10;2\n", {12: 2}),
        ("histogram.csv", "256,15\n2048,1\n", ARTICLE),
        ("histogram.csv", "length,count\n256,15\n2048,1\n", ARTICLE),
        ("histogram.tsv", "low\thigh\tweight\n256\t256\t15\n2048\t2048\t1\n", ARTICLE),
        ("histogram.json", '{\n  "256": 15,\n  "2048": 1\n}\n', ARTICLE),
        ("pairs.json", "[[256, 15], [2048, 1]]", ARTICLE),
        ("list.json", "[256, 256, 2048]", {256: 2, 2048: 1}),
        ("nested.json", '{"lengths": {"256": 15, "2048": 1}}', ARTICLE),
        ("bench.json", '{"model_id": "m", "input_lens": [200, 56], "output_lens": [56, 200]}', {256: 2}),
        ("traffic.toml", "[[lane]]\nname = 'a'\nconcurrency = 16\nlengths = { 256 = 15, 2048 = 1 }\n", ARTICLE),
        ("traffic.json", '{"lanes": [{"concurrency": 16, "lengths": {"256": 15, "2048": 1}}]}', ARTICLE),
        ("one.json", '{"prompt_tokens": 10, "completion_tokens": 2}', {12: 1}),
        ("one.txt", "12", {12: 1}),
    ],
)
def test_every_format_gives_the_lengths_that_it_states(name: str, text: str, counts: dict[int, int], tmp_path: Path) -> None:
    assert of(tmp_path, text, name) == counts
    assert of(tmp_path, codecs.BOM_UTF8 + text.encode(), name) == counts, "an editor of Windows marked it"
    assert of(tmp_path, text.replace("\n", "\r\n"), name) == counts


@pytest.mark.parametrize("name", sorted(path.name for path in TRACES.glob("*.*") if path.suffix != ".md"))
def test_traces_that_can_be_replayed_have_the_lengths_of_their_replay(name: str) -> None:
    found, replayed = read_lengths(TRACES / name), read_trace(TRACES / name).requests
    wanted: list[int] = []
    for one in replayed:
        said = 0
        for question, answer in one.turns or ((one.prompt, one.output),):
            said += question + answer
            wanted.append(said)
    # a replay leaves out what has no answer; here its prompt still held its tokens
    assert sorted(set(wanted)) == sorted({length for length in found.counts if length in wanted})
    assert 0 <= found.requests - len(wanted) <= 3


@pytest.mark.parametrize("name", ["conversations", "conversation", "messages"])
def test_each_question_of_a_conversation_holds_all_that_was_said(tmp_path: Path, name: str) -> None:
    talk = {
        "id": "1",
        name: [
            {"from": "human", "value": "a b c"},
            {"from": "gpt", "value": "d e f"},
            {"from": "human", "value": "g h i"},
            {"from": "gpt", "value": "j k l"},
        ],
    }
    for text in (json.dumps([talk]), json.dumps(talk) + "\n"):
        (tmp_path / "talk.json").write_text(text)
        found = read_lengths(tmp_path / "talk.json")
        assert dict(found.counts) == {8: 1, 16: 1}
        assert any("4 tokens for 3 words" in note for note in found.notes)


def test_counts_that_a_line_states_count_before_its_text(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d e f"}]
    assert of(tmp_path, json.dumps({"messages": said, "prompt_tokens": 90, "completion_tokens": 10})) == {100: 1}
    assert of(tmp_path, json.dumps({"messages": said, "total_tokens": 70}) + "\n12\n") == {70: 1, 12: 1}


def test_conversations_that_nobody_answered_are_told(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text('12\n{"messages": [{"role": "user", "content": "a"}]}\n')
    assert "conversations without a question and its answer are left out: 1" in read_lengths(path).notes
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(UsageError, match="no conversation in this file has a question with an answer"):
        read_lengths(path)


def test_shares_are_weights_and_ranges_are_spread(tmp_path: Path) -> None:
    (tmp_path / "shares.json").write_text('{"256": 0.9375, "2048": 0.0625}')
    found = read_lengths(tmp_path / "shares.json")
    assert dict(found.counts) == {256: 937_500, 2048: 62_500}
    assert any("shares" in note for note in found.notes)
    (tmp_path / "ranges.csv").write_text("100,200,11\n")
    found = read_lengths(tmp_path / "ranges.csv")
    assert found.requests == 11
    assert (min(found.counts), found.longest, found.mean) == (100, 200, 150)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '"word"',
        "{}",
        '{"prompt_tokens": "9"}',
        "-3",
        "0",
        "true",
        '{"256": 1.5}',
        '{"0": 4}',
        "1e3",
        "NaN",
        '{"prompt_tokens": -1, "completion_tokens": 4}',
        '{"prompt_tokens": NaN}',
        "[" * 5000,
        '{"prompt_tokens": 99999999999}',
    ],
)
def test_a_line_that_states_no_length_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        of(tmp_path, f'{{"prompt_tokens": 3, "completion_tokens": 4}}\n12\n{line}\n')
    assert "line 3" in caught.value.where


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "prompt_tokens,completion_tokens\n5,5\n5,-5\n", "line 3"),
        ("a.csv", "prompt_tokens,completion_tokens\n5,nan\n", "line 2"),
        ("a.csv", "prompt_tokens,completion_tokens\n5,inf\n", "line 2"),
        ("a.csv", "prompt_tokens,completion_tokens\n5\n", "line 2"),
        ("a.csv", "name,colour\nx,red\n", "names no length"),
        ("a.csv", "256,15\n512,many\n", "line 2"),
        ("a.csv", "256,0\n", "add up to nothing"),
        ("a.csv", 'a,"' + "x" * 200_000 + '"\n', "no CSV"),
        ("a.json", '{"256": -1}', "no count"),
        ("a.json", '{"256": 1e999}', "no JSON"),
        ("a.json", "[1, 2", "no JSON"),
        ("a.json", "[]", "no length"),
        ("a.jsonl", "", "no length"),
        ("a.jsonl", "\n\n", "no length"),
        ("a.jsonl", '{"prompt_tokens": 0, "completion_tokens": 0}\n', "held a token"),
        ("a.toml", "x = ", "no TOML"),
        ("a.bin", b"\x00\x01\x02" * 100, "binary"),
        ("a.jsonl.gz", gzip.compress(b"12\n"), "gzip"),
        ("a.jsonl", codecs.BOM_UTF16_LE + "12\n".encode("utf-16-le"), "UTF-16"),
        ("a.jsonl", b"\xff\xfe\xfd12\n", "UTF-16"),
        ("a.jsonl", b"12\n\xc3\x28\n", "line 2"),
    ],
)
def test_what_is_no_file_of_lengths_is_one_clear_error(name: str, text: str | bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        of(tmp_path, text, name)
    assert said in str(caught.value)
    assert name in caught.value.where


def test_one_endless_line_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_counts, "MOST_LINE", 1000)
    with pytest.raises(UsageError, match="line 2 is longer"):
        of(tmp_path, "12\n" + "9" * 5000)
    with pytest.raises(UsageError, match="line 2 is longer"):
        of(tmp_path, "12,1\n" + "9" * 5000, "a.csv")


def test_a_file_that_is_not_there_is_no_distribution(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge):
        read_lengths(tmp_path / "none")
    with pytest.raises(CannotJudge):
        read_lengths(tmp_path)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_an_error_of_ours(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    for name in ("x.jsonl", "x.csv", "x.json", "x.toml"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(data)
        with contextlib.suppress(KvError):
            assert read_lengths(path).requests > 0


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1, max_size=50).filter(lambda pairs: any(map(sum, pairs))))
def test_lengths_come_out_as_they_went_in(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]]) -> None:
    path = tmp_path_factory.getbasetemp() / "pairs.jsonl"
    path.write_text("".join(json.dumps({"t": 1.5, "prompt_tokens": a, "output_tokens": b}) + "\n" for a, b in pairs))
    wanted = [a + b for a, b in pairs if a + b]
    assert list(read_lengths(path).in_order) == wanted
    path = path.with_suffix(".csv")
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{a},{b}\n" for a, b in pairs))
    assert list(read_lengths(path).in_order) == wanted
