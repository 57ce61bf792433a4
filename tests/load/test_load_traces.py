"""Recorded traffic: every public format is read to its times, lengths and shared beginnings, and replayed to the token."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_server import ScriptedServer

from pytest_kvcache.errors import LoadFailed, UsageError
from pytest_kvcache.load import contract, traces
from pytest_kvcache.load.contract import read_load, read_rows
from pytest_kvcache.load.runner import LoadResult, run_load
from pytest_kvcache.load.traces import read_trace, span_of
from pytest_kvcache.records import RequestRow
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import Settings

DATA = Path(__file__).parent.parent / "data" / "traces"


@pytest.mark.parametrize(
    ("name", "form", "count", "block", "span_s"),
    [
        ("mooncake.jsonl", traces.MOONCAKE, 12, 512, 0.45),
        ("timed_trace.jsonl", traces.TIMED, 12, 16, 1.2),
        ("burstgpt.csv", traces.BURSTGPT, 9, 0, 9.0),
        ("burstgpt-sessions.csv", traces.BURSTGPT, 6, 0, 2.5),
        ("azure-2023.csv", traces.AZURE, 10, 0, 1.64),
        ("azure-2024.csv", traces.AZURE, 3, 0, 1.5),
        ("plain.jsonl", traces.PLAIN, 5, 0, 0.4),
    ],
)
def test_every_public_format_is_known_by_its_content(name: str, form: str, count: int, block: int, span_s: float) -> None:
    trace = read_trace(DATA / name)
    assert (trace.format, len(trace.requests), trace.block) == (form, count, block)
    assert trace.requests[0].at_s == 0.0
    assert trace.span_s == pytest.approx(span_s, abs=1e-5)
    times = [one.at_s or 0.0 for one in trace.requests]
    assert times == sorted(times)
    assert trace.shares == (form in {traces.MOONCAKE, traces.TIMED, traces.PLAIN})


def test_lengths_and_times_are_those_of_the_file() -> None:
    first = json.loads((DATA / "mooncake.jsonl").read_text().splitlines()[0])
    one = read_trace(DATA / "mooncake.jsonl").requests[0]
    assert (one.prompt, one.output, list(one.hash_ids)) == (first["input_length"], first["output_length"], first["hash_ids"])
    azure = read_trace(DATA / "azure-2024.csv").requests
    assert [(round(one.at_s or 0.0, 6), one.prompt, one.output) for one in azure] == [(0.0, 96, 8), (0.00993, 210, 12), (1.5, 333, 20)]
    prefixes = [one.prefix for one in read_trace(DATA / "plain.jsonl").requests]
    assert prefixes == [("a", 74), ("a", 74), None, ("b", 150), ("b", 150)]


def test_requests_without_an_answer_are_left_out_and_told() -> None:
    assert read_trace(DATA / "burstgpt.csv").notes == ["1 of 10 requests of the trace have no prompt or no answer (failures) and are left out"]


def test_a_window_and_a_speed_choose_and_squeeze() -> None:
    whole = read_trace(DATA / "plain.jsonl")
    fast = read_trace(DATA / "plain.jsonl", speed=2.0)
    assert [one.at_s for one in fast.requests] == pytest.approx([(one.at_s or 0.0) / 2 for one in whole.requests])
    part = read_trace(DATA / "plain.jsonl", from_s=0.1, for_s=0.25)
    assert [one.at_s for one in part.requests] == pytest.approx([0.0, 0.05, 0.2])
    assert part.span_s == 0.25
    assert part.notes == ["3 of the first 5 requests of the trace lie in the window"]
    assert span_of({"trace": DATA / "plain.jsonl", "trace_speed": "4"}) == pytest.approx(0.1)
    assert span_of({"trace": DATA / "sharegpt.json"}) == 0.0
    with pytest.raises(UsageError, match="no request of the trace lies in the window"):
        read_trace(DATA / "plain.jsonl", from_s=99)


def test_a_window_late_in_a_long_trace_is_found_without_reading_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_REQUESTS", 100)
    lines = (f"{number / 10},m,50,5,55,log" for number in range(60_000))
    path = tmp_path / "long.csv"
    path.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "\n".join(lines))
    trace = read_trace(path, from_s=2000, for_s=5)
    assert [one.at_s for one in trace.requests] == pytest.approx([number / 10 for number in range(50)])
    assert trace.notes[0].startswith("50 of the first 30,0")
    cut = read_trace(path)
    assert len(cut.requests) == 100
    assert "more than 100 requests" in cut.notes[0]


def test_conversations_keep_their_turns_and_their_lengths_by_a_counter() -> None:
    trace = read_trace(DATA / "sharegpt.json", count=len)
    assert [one.turns for one in trace.requests] == [((31, 31), (16, 37)), ((41, 41),), ((54, 25),)]
    assert not trace.timed
    assert trace.notes == ["conversations without a question and its answer are left out: 1"]
    assert "4 tokens for 3 words" in read_trace(DATA / "sharegpt.json").notes[0]


def test_a_file_of_one_conversation_is_a_trace_as_well(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "123"}, {"role": "assistant", "content": "12"}]}\n')
    assert [one.turns for one in read_trace(path, count=len).requests] == [((3, 2),)]


def test_requests_that_came_with_images_are_told_to_be_text_now(tmp_path: Path) -> None:
    path = tmp_path / "multimodal.csv"
    path.write_text(
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00.0,2,1700,40\n2024-10-15 00:00:01.0,0,300,9\n2024-10-15 00:00:02.0,,3,9\n"
    )
    trace = read_trace(path)
    assert trace.format == traces.AZURE
    assert [(one.prompt, one.images) for one in trace.requests] == [(1700, 2), (300, 0), (3, 0)]
    assert trace.notes == [
        "1 of 3 requests of the trace came with images: they are replayed as text of as many tokens, so that the server encodes no image"
    ]
    assert read_trace(DATA / "azure-2024.csv").notes == []


@pytest.mark.parametrize("name", ["conversations", "conversation", "messages"])
def test_conversations_of_other_data_sets_and_of_the_chat_api_are_read_by_who_speaks(tmp_path: Path, name: str) -> None:
    said = [
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": "hello, before anything was asked"},
        {"role": "user", "content": "12345"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "7890"}]},
        {"role": "assistant", "content": "123"},
        {"role": "assistant", "content": "another of two answers"},
        {"role": "tool", "content": "none of both"},
        {"role": "user", "content": "12"},
        {"role": "assistant", "content": "1234567"},
        {"role": "user", "content": "without an answer"},
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"conversation_id": at, name: said}) + "\n" for at in range(2)))
    trace = read_trace(path, count=len)
    assert trace.format == "sharegpt"
    assert [one.turns for one in trace.requests] == [((10, 3), (2, 7))] * 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hello,there\n1,2\n", "format of the trace is not known"),
        ("", "the trace is empty"),
        ("\n\n", "the trace is empty"),
        ('{"t": -5, "prompt_tokens": 5, "output_tokens": 5}\n', "line 1 has no time: t -5"),
        ('{"t": "soon", "prompt_tokens": 5, "output_tokens": 5}\n', "line 1 has no time: t 'soon'"),
        ("Timestamp,Request tokens,Response tokens\nnan,1,2\n", "line 2 cannot be read"),
        ("Timestamp,Request tokens,Response tokens\n1,1,2\ninf,1,2\n", "line 3 cannot be read"),
        ("Timestamp,Request tokens,Response tokens\n1,-1,2\n", "line 2 cannot be read"),
        ("Timestamp,Request tokens,Response tokens\n1,1,1e99\n", "line 2 cannot be read"),
        ('[{"conversations": [{"from": "human", "value": null}, {"from": "gpt", "value": "yes"}]}]', "holds no request"),
        ('{"t": 1}\n', "line 1 has no prompt length"),
        ('{"t": 0, "prompt_tokens": 5, "output_tokens": 5}\nnonsense\n', "line 2 is no JSON object"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2 cannot be read"),
        ("Timestamp,Request tokens\n1,2\n", "does not name timestamp"),
        ('{"timestamp": 1, "input_length": 99, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n', "cannot be told from the trace"),
        ("[]", "holds no request"),
        ("[{", "is no JSON"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, text: str, shown: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(UsageError, match=shown) as caught:
        read_trace(path)
    assert "\n" not in caught.value.what


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=300) | st.text(max_size=300).map(str.encode),
    start=st.sampled_from([b"", b"{", b"[", b"Timestamp,Request tokens,Response tokens\n"]),
)
def test_no_file_breaks_the_reader(tmp_path: Path, data: bytes, start: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(start + data)
    with contextlib.suppress(UsageError):
        assert read_trace(path).requests


def replay(server: ScriptedServer, folder: Path, name: str, **options: Any) -> tuple[LoadResult, list[RequestRow], list[list[int]]]:
    seen = len(server.seen)
    options = {"trace": str(DATA / name), "stop_timeout_s": 3, **options}
    result = run_load([parse_endpoint(server.url, Settings())], "trace", folder, users=2, options=options)
    rows = sorted(read_rows(result.rows_path), key=lambda row: row.id)
    assert result.complete
    assert {row.outcome for row in rows} == {contract.OK}
    assert all(row.prompt_tokens == row.prompt_tokens_planned and row.completion_tokens == row.output_tokens_planned for row in rows)
    sent = [one.body["prompt"] for one in server.seen[seen:] if one.path == "/v1/completions"]
    return result, rows, sent[-len(rows) :]


def test_a_trace_is_replayed_at_its_times_and_lengths_and_ends_with_its_last_answer(tmp_path: Path) -> None:
    with ScriptedServer(max_model_len=8192) as server:
        result, rows, sent = replay(server, tmp_path, "timed_trace.jsonl")
    trace = read_trace(DATA / "timed_trace.jsonl")
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(one.prompt, one.output) for one in trace.requests]
    assert [row.intended_s - rows[0].intended_s for row in rows] == pytest.approx([one.at_s for one in trace.requests], abs=1e-4)
    assert len({tuple(prompt[:64]) for prompt in sent}) == 1
    assert {(row.prefix_id, row.prefix_tokens) for row in rows} == {("block 1", 64)}
    assert len({tuple(prompt[64:80]) for prompt in sent}) == len(sent)
    load = read_load(result.rows_path)
    assert load.reason == contract.BY_REQUESTS
    assert load.start is not None
    assert load.start.options["scheduled"] == 12
    span = f"over {trace.span_s:,.1f} s"
    assert f"trace: 12 requests (timed_trace, times in s, 16 tokens a hash id, {span})" in [note.text for note in load.notes]
    assert str(load.start.options["profile_options"]["trace"]).startswith("timed_trace.jsonl sha256:")
    assert load.start.options["shared_prompts"] is True


def test_what_is_longer_than_the_cap_is_cut_and_counted(tmp_path: Path) -> None:
    with ScriptedServer(max_model_len=8192) as server:
        result, rows, _ = replay(server, tmp_path, "mooncake.jsonl", trace_cap=1200, trace_speed=4)
    long = [one for one in read_trace(DATA / "mooncake.jsonl").requests if one.prompt + one.output > 1200]
    assert max((row.prompt_tokens or 0) + (row.completion_tokens or 0) for row in rows) == 1200
    cut = f"{len(long)} of 12 requests of the trace are cut to 1,200 tokens for prompt and answer together"
    assert cut in [note.text for note in read_load(result.rows_path).notes]
    assert result.notes == [cut], "it is handed on, to stand beside the verdict"


def test_conversations_without_times_are_replayed_in_a_closed_loop_or_at_a_rate(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        _, closed, _ = replay(server, tmp_path / "a", "sharegpt.json", requests=8)
        _, opened, _ = replay(server, tmp_path / "b", "sharegpt.json", requests=8, rate=40)
    lengths = {(row.prompt_tokens, row.completion_tokens) for row in closed}
    # one token a word in this server, and the second question of the first talk brings all that was said
    assert {(6, 7), (16, 9), (8, 7)} <= lengths
    assert {(row.prompt_tokens, row.completion_tokens) for row in opened} <= lengths


def test_a_trace_that_is_not_there_fails_before_anything_is_sent(tmp_path: Path) -> None:
    with ScriptedServer() as server, pytest.raises(UsageError, match="cannot be read"):
        replay(server, tmp_path, "nowhere.csv")
    with ScriptedServer() as server, pytest.raises(LoadFailed, match="which trace"):
        run_load([parse_endpoint(server.url, Settings())], "trace", tmp_path, duration_s=1)


def test_what_of_a_trace_lies_behind_the_end_of_the_load_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    trace.write_text("".join(f'{{"t": {at}, "prompt_tokens": 20, "output_tokens": 2}}\n' for at in (0, 0.1, 1000)))
    with ScriptedServer() as server:
        result = run_load([parse_endpoint(server.url, Settings())], "trace", tmp_path, duration_s=0.6, options={"trace": str(trace)})
    load = read_load(result.rows_path)
    assert (load.rows, load.reason) == (2, contract.BY_DURATION)
    assert any("only 2 of 3 scheduled requests start before that" in note.text for note in load.notes)
