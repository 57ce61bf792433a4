"""Mistakes that other load tools made in the field, each with the answer that would have been right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_run import T0, MadeRun, closed_loop, refused, request
from scripted_server import ScriptedServer

from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.load import contract
from pytest_kvcache.load.contract import read_load, read_rows
from pytest_kvcache.load.rejections import classify, said_lengths
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.load.sse import Stream
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import LoadNote
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import Settings

OLD_VLLM = (
    "This model's maximum context length is {} tokens. However, you requested {} tokens ({} in the messages, {} in the completion). "
    "Please reduce the length of the messages or completion."
)


def stream_of(*events: dict[str, Any] | str, keep: bool = True) -> Stream:
    stream = Stream(keep)
    for second, value in enumerate(events):
        payload = value if isinstance(value, str) else json.dumps(value)
        stream.feed(f"data: {payload}\n\n".encode(), float(second))
    stream.finish(float(len(events)))
    return stream


def piece(text: str | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def spent(completion: int, prompt: int = 10) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def value(analysis: Any, name: str) -> float:
    found = analysis.values[name]
    assert isinstance(found, Reading), found
    return found.number()


def test_a_prompt_of_another_length_than_planned_is_seen_in_both_directions(tmp_path: Path) -> None:
    text = OLD_VLLM.format(4096, 4122, 4106, 16)
    assert classify(400, text)[0] == contract.OVER_LENGTH
    assert tuple(said_lengths(text)) == (4096, 4106, 16)
    for real in (8179, 8185, 8399, 8900):
        rows = [request(number, number * 0.2, prompt=8192, prompt_tokens=real) for number in range(10)]
        analysis = analyse(MadeRun(rows=rows).write(tmp_path / f"{real}-normal"))
        assert value(analysis, "prompt_length.off") == 10, "every one is counted, however few tokens it is off"
        wrong = analysis.facts.lengths_off
        assert wrong == (10 if abs(real - 8192) > 0.02 * 8192 else 0)
    exact = [request(number, number * 0.2, prompt=8192, prompt_tokens=8192) for number in range(10)]
    assert value(analyse(MadeRun(rows=exact).write(tmp_path / "exact-normal")), "prompt_length.off") == 0


def test_a_refusal_by_another_limit_than_planned_is_the_plans_fault_and_noted(tmp_path: Path) -> None:
    assert tuple(said_lengths(OLD_VLLM.format(8192, 8204, 12, 8192))) == (8192, 12, 8192)
    with ScriptedServer(max_model_len=4096) as server:
        options = {"requests": 2, "stop_timeout_s": 2}
        result = run_load(
            [parse_endpoint(server.url, Settings())], "nearmax", tmp_path, users=1, max_model_len=9000, output_tokens=8, options=options
        )
    assert {row.outcome for row in read_rows(result.rows_path)} == {contract.OVER_LENGTH}
    notes = [note.text for note in read_load(result.rows_path).notes if note.subject == "limit"]
    assert notes == ["the server says that its limit is 4096 tokens, and lengths were planned for 9000: see --kv-max-model-len"]


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
        "max_tokens=257 cannot be greater than max_model_len=256. Please request fewer output tokens.",
        "This model's maximum context length is 256 tokens. However, your prompt contains at least 257 input tokens, which exceeds this limit even without any output tokens.",
        "This model's maximum context length is 256 tokens. However, your prompt contains 2418 characters (more than 2304 characters, which is the upper bound for 256 input tokens).",
    ],
)
def test_four_texts_of_one_engine_are_one_class(text: str) -> None:
    assert classify(400, json.dumps({"error": {"message": text, "code": 400}}))[0] == contract.OVER_LENGTH


def test_http_200_with_fewer_tokens_than_asked_for_is_clamped_and_no_success() -> None:
    stream = stream_of(piece("abcdef", "length"), {"choices": [], "usage": spent(6, 250)}, "[DONE]")
    assert stream.outcome(100, True)[:2] == (contract.CLAMPED, "6 of 100 tokens came, with finish_reason length")


def test_tokens_are_those_of_usage_and_not_the_chunks() -> None:
    # several accepted tokens in a chunk (speculative decoding), and text that tokenizes to fewer tokens when it is joined
    stream = stream_of(piece("Hel"), piece("lo"), piece(" world", "length"), {"choices": [], "usage": spent(12)}, "[DONE]")
    assert (stream.chunks, stream.completion_tokens, stream.answer) == (3, 12, "Hello world")
    # 81 were asked for and came; the text alone would have 80
    assert stream_of(piece("x " * 80, "length"), {"choices": [], "usage": spent(81)}, "[DONE]").outcome(81, True)[0] == contract.OK


def test_tokens_that_a_parser_holds_back_are_counted_and_make_no_gap_of_zero() -> None:
    stream = stream_of(piece("a", usage=spent(1)), piece(None, usage=spent(17)), piece(None, "tool_calls", usage=spent(17)), "[DONE]")
    assert (stream.chunks, stream.completion_tokens) == (1, 17)
    assert (stream.longest_gap_s, stream.longest_gap_at_s) == (0.0, None)
    assert stream.outcome(17, True)[0] == contract.OK


def test_neither_headers_nor_roles_nor_empty_chunks_alone_are_the_first_token() -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    silent = {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None}], "usage": spent(1)}
    said = {"choices": [{"index": 0, "delta": {"content": "\u00e9"}, "finish_reason": "length"}], "usage": spent(3)}
    stream = stream_of(role, silent, said, "[DONE]")
    assert stream.first_token_s == 1.0
    assert stream_of(role, said, "[DONE]").first_token_s == 1.0
    assert stream_of(role).first_token_s is None


def test_an_answer_without_usage_has_no_token_count_and_no_rate(tmp_path: Path) -> None:
    stream = stream_of(piece("a"), piece("b", "length"), "[DONE]")
    assert (stream.completion_tokens, stream.prompt_tokens, stream.cached_tokens) == (None, None, None)
    rows = closed_loop(completion_tokens=None, prompt_tokens=None)
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))
    assert isinstance(analysis.values["throughput"], Missing)
    assert isinstance(analysis.values["output_tokens"], Missing)


def test_a_client_that_sends_late_makes_the_run_invalid(tmp_path: Path) -> None:
    rows = [
        request(number, number * 0.1, sent_s=T0 + number * 0.4, first_token_s=T0 + number * 0.4 + 0.1, end_s=T0 + number * 0.4 + 0.2)
        for number in range(12)
    ]
    assert "client_bound" in {problem.rule for problem in analyse(MadeRun(rows=rows).write(tmp_path / "1-normal")).problems}
    warned = MadeRun(notes=[LoadNote(T0, "cpu warning", values={"percent": 93.0})])
    assert "client_bound" in {problem.rule for problem in analyse(warned.write(tmp_path / "2-normal")).problems}


def test_a_server_that_refuses_half_is_not_the_faster_one(tmp_path: Path) -> None:
    whole = closed_loop()
    refusing = [row if row.id % 2 else refused(row.id, row.sent_s - T0, "queue_full") for row in whole]
    analysis = analyse(MadeRun(rows=refusing).write(tmp_path / "1-normal"))
    assert value(analysis, "rejections") == len(whole) / 2
    assert value(analysis, "requests.sent") == len(whole)
    assert value(analysis, "throughput") < value(analyse(MadeRun(rows=whole).write(tmp_path / "2-normal")), "throughput")


def test_what_was_cut_off_at_the_end_is_neither_served_nor_refused(tmp_path: Path) -> None:
    rows = closed_loop()
    rows[-1] = request(rows[-1].id, 3.9, outcome="cut_off", completion_tokens=None, finish_reason="")
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))
    assert [value(analysis, name) for name in ("requests.cut_off", "rejections", "requests.ok")] == [1, 0, len(rows) - 1]
