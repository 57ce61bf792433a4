"""The stream reader: whatever a server or a network does to the bytes, counts, times and outcome stay true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.load import contract
from pytest_kvcache.load.sse import EVENT_LIMIT, Stream

DATA = Path(__file__).parent.parent / "data"
RECORDED = [DATA / engine / name for engine in ("llamacpp", "vllm") for name in ("stream.txt", "chat-stream.txt")]
ERRORS = [json.loads(line) for line in (Path(__file__).parent / "errors.jsonl").read_text().splitlines()]


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(words: str, reason: str | None = None, **more: Any) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "text": words, "finish_reason": reason}], **more})


def delta(reason: str | None = None, **parts: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": parts, "finish_reason": reason}]})


def usage(completion: int, prompt: int = 10, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **more}


END = event({"choices": [], "usage": usage(3)}) + event(b"[DONE]")


def read(*blocks: bytes, keep: bool = True) -> Stream:
    stream = Stream(keep)
    for number, block in enumerate(blocks):
        stream.feed(block, float(number))
    stream.finish(float(len(blocks)))
    return stream


def facts(stream: Stream) -> tuple[Any, ...]:
    """Everything but times."""
    return (
        stream.chunks, stream.answer, stream.prompt_tokens, stream.completion_tokens, stream.cached_tokens, stream.finish_reason,
        stream.done, stream.error, stream.outcome(3, True)[0],
    )  # fmt: skip


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_a_recorded_stream_of_a_real_engine_is_read_to_its_usage(path: Path) -> None:
    stream = read(path.read_bytes())
    assert stream.done
    assert stream.finish_reason == "length"
    assert stream.completion_tokens is not None
    assert stream.prompt_tokens
    assert stream.outcome(stream.completion_tokens, True) == (contract.OK, "", None)
    assert stream.answer
    assert stream.error is None
    assert not stream.malformed


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: f"{p.parent.name}-{p.stem}")
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_where_the_network_cuts_the_bytes_changes_nothing(path: Path, data: st.DataObject) -> None:
    whole = path.read_bytes()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    blocks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert facts(read(*blocks)) == facts(read(whole))


@given(cuts=st.lists(st.integers(0, 400), max_size=20), newline=st.sampled_from([b"\n", b"\r\n", b"\r"]))
@settings(max_examples=150, deadline=None)
def test_line_ends_comments_pings_and_cut_characters_change_nothing(cuts: list[int], newline: bytes) -> None:
    raw = (
        b"\xef\xbb\xbf: hello\n\n"
        + "".join(f"data: {json.dumps({'choices': [{'text': t}]}, ensure_ascii=False)}\n\n" for t in ("né", "💡", "c")).encode()
    )
    raw += b"event: ping\nid: 7\nretry: 100\ndata:\n\n" + text("", "length") + b": ping\n\n" + END
    raw = raw.replace(b"\n", newline)
    places = sorted(min(cut, len(raw)) for cut in cuts)
    stream = read(*(raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)))
    assert facts(stream) == (3, "né💡c", 10, 3, None, "length", True, None, contract.OK)


@given(
    st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from([b"data: ", b"\n\n", b"{", b'{"choices":[{}]}', b"[DONE]", b"\r", b'"error":'])),
        max_size=30,
    )
)
@settings(max_examples=300, deadline=None)
def test_no_bytes_whatever_break_the_reader(blocks: list[bytes]) -> None:
    assert read(*blocks).outcome(3, True)[0] in contract.OUTCOMES


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(["choices", "usage", "error", "text", "delta", "content", "finish_reason", "completion_tokens", "message", "code", "x"]), inner, max_size=5)))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_no_json_whatever_breaks_the_reader(value: Any) -> None:
    assert read(event(value), END).outcome(3, True)[0] in contract.OUTCOMES


def test_the_first_token_is_content_and_not_headers_roles_or_empty_text() -> None:
    stream = read(delta(role="assistant"), delta(content=""), delta(content="a"), delta("length", content="b"), END)
    assert stream.first_token_s == 2.0
    assert stream.chunks == 2


@pytest.mark.parametrize(
    "part", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"function": {"name": "f"}}]}, {"refusal": "no"}, {"content": "x"}]
)
def test_reasoning_and_tool_calls_are_content(part: dict[str, Any]) -> None:
    stream = read(delta(role="assistant", content=None, tool_calls=[]), delta(**part), END)
    assert (stream.first_token_s, stream.chunks) == (1.0, 1)


def test_a_token_whose_text_is_held_back_still_is_the_first_token() -> None:
    stream = read(text("", usage=usage(0)), text("", usage=usage(1)), text("é", usage=usage(2)), END)
    assert stream.first_token_s == 1.0
    assert stream.chunks == 1


def test_usage_on_every_chunk_gives_the_last_count() -> None:
    stream = read(*(text(word, usage=usage(n)) for n, word in enumerate("abc", start=1)), text("", "length"), event(b"[DONE]"))
    assert (stream.completion_tokens, stream.chunks) == (3, 3)


def test_several_tokens_in_one_chunk_are_counted_by_usage() -> None:
    stream = read(text("a b c", "length"), END)
    assert (stream.completion_tokens, stream.chunks) == (3, 1)


def test_cached_prompt_tokens_are_kept() -> None:
    stream = read(text("a", "length"), event({"choices": [], "usage": usage(3, prompt_tokens_details={"cached_tokens": 4})}), event(b"[DONE]"))
    assert stream.cached_tokens == 4


def test_the_longest_gap_is_between_content_and_says_when_it_began() -> None:
    stream = Stream()
    for at, block in ((1.0, text("a")), (1.2, text("b")), (3.0, event({"choices": []})), (5.2, text("c")), (5.3, text("d", "length")), (20.0, END)):
        stream.feed(block, at)
    assert stream.longest_gap_s == pytest.approx(4.0)
    assert stream.longest_gap_at_s == 1.2
    assert stream.first_token_s == 1.0


def test_an_event_of_several_data_lines_is_one_event_and_events_without_a_blank_line_are_several() -> None:
    assert read(b'data: {"choices":\ndata: [{"text":"a"}]}\n\n', END).chunks == 1
    assert read(b'data: {"choices":[{"text":"a"}]}\ndata: {"choices":[{"text":"b"}]}\ndata: [DONE]\n\n').chunks == 2


def test_an_event_without_an_end_is_bounded() -> None:
    stream = Stream()
    for _ in range(EVENT_LIMIT // 65536):
        stream.feed(b"x" * 65536, 0.0)
    with pytest.raises(ValueError, match="4 MiB"):
        stream.feed(b"x", 0.0)


def test_kept_text_is_bounded() -> None:
    stream = Stream(keep_text=True)
    for _ in range(300):
        stream.feed(text("x" * 10_000), 0.0)
    assert len(stream.answer or "") == 2**20


OUTCOMES = {
    "done, with usage": ([text("a"), text("b"), text("c", "length"), END], contract.OK),
    "no [DONE], usage and finish_reason": ([text("abc", "length"), event({"choices": [], "usage": usage(3)})], contract.OK),
    "no [DONE], no usage": ([text("abc", "length")], contract.TRUNCATED),
    "no [DONE], no finish_reason": ([text("a"), text("b")], contract.TRUNCATED),
    "usage and no finish_reason": ([text("abc"), event({"choices": [], "usage": usage(3)})], contract.TRUNCATED),
    "[DONE] without finish_reason": ([text("abc"), event(b"[DONE]")], contract.OK),
    "[DONE] without finish_reason, too few": ([text("a"), event({"choices": [], "usage": usage(1)}), event(b"[DONE]")], contract.TRUNCATED),
    "200 and nothing": ([], contract.TRUNCATED),
    "[DONE] and nothing": ([event(b"[DONE]")], contract.TRUNCATED),
    "tokens without visible text": ([text("", "length"), END], contract.OK),
    "fewer and length": ([text("a", "length"), event({"choices": [], "usage": usage(1)}), event(b"[DONE]")], contract.CLAMPED),
    "fewer and stop": ([text("a", "stop"), event({"choices": [], "usage": usage(1)}), event(b"[DONE]")], contract.STOPPED_EARLY),
    "fewer and tool_calls": ([delta("tool_calls", content="a"), event({"choices": [], "usage": usage(1)}), event(b"[DONE]")], contract.STOPPED_EARLY),
    "length without usage": ([text("a", "length"), event(b"[DONE]")], contract.OK),
    "stop without usage": ([text("a", "stop"), event(b"[DONE]")], contract.STOPPED_EARLY),
    "aborted by the server": ([text("a", "abort"), END], contract.ERROR_IN_STREAM),
    "error frame at the end": ([text("abc", "length"), event({"error": {"message": "boom", "code": 500}}), END], contract.ERROR_IN_STREAM),
    "error event": ([text("a"), b'event: error\ndata: {"message":"boom"}\n\n', END], contract.ERROR_IN_STREAM),
    "error field of old llama.cpp": ([text("a"), b'error: {"code":500,"message":"boom"}\n\n'], contract.ERROR_IN_STREAM),
    "flat error": ([event({"object": "error", "message": "boom", "code": 500})], contract.ERROR_IN_STREAM),
    "error as text": ([event({"error": "boom"})], contract.ERROR_IN_STREAM),
    "error null is none": ([text("abc", "length", error=None), END], contract.OK),
    "the word error is none": ([text("error", "length"), END], contract.OK),
    "text that looks like a frame": ([text('{"error": "boom"}\n\ndata: [DONE]', "length"), END], contract.OK),
    "garbage beside a whole stream": ([event(b"ping"), text("abc", "length"), END], contract.OK),
    "garbage and no end": ([event(b"Internal Server Error")], contract.TRUNCATED),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTCOMES)
def test_http_200_proves_nothing_and_only_a_whole_stream_is_ok(name: str) -> None:
    blocks, outcome = OUTCOMES[name]
    assert read(*blocks).outcome(3, True)[0] == outcome
    assert read(b"".join(blocks)).outcome(3, True)[0] == outcome


def test_a_server_that_never_sends_usage_may_end_by_finish_reason_alone() -> None:
    assert read(text("abc", "length")).outcome(3, expects_usage=False)[0] == contract.OK


@pytest.mark.parametrize("case", [case for case in ERRORS if "sse" in case], ids=lambda c: c["case"])
def test_error_frames_of_real_engines_are_classed_by_their_meaning(case: dict[str, Any]) -> None:
    outcome, error, _ = read(event(case["sse"])).outcome(3, True)
    assert outcome == (contract.QUEUE_FULL if "queue_full" in case["case"] else contract.OVER_LENGTH)
    assert error.startswith("in the stream: ")


def test_a_bare_error_body_in_an_event_stream_is_seen() -> None:
    body = {
        "error": {
            "code": 400,
            "message": "request (6009 tokens) exceeds the available context size (4096 tokens)",
            "type": "exceed_context_size_error",
        }
    }
    assert read(json.dumps(body).encode()).outcome(3, True)[0] == contract.OVER_LENGTH
    assert read(b"<html><body>502</body></html>").outcome(3, True)[1].startswith("not an event in the stream")


def test_an_answer_that_was_not_streamed_is_taken_whole() -> None:
    stream = Stream(keep_text=True)
    body = {"choices": [{"message": {"content": "a b c"}, "finish_reason": "length"}], "usage": usage(3, prompt=7)}
    assert stream.take_whole(json.dumps(body).encode())
    assert (stream.answer, stream.first_token_s, stream.prompt_tokens) == ("a b c", None, 7)
    assert stream.outcome(3, False)[0] == contract.OK
    assert not Stream().take_whole(b"<html>")
    assert not Stream().take_whole(b'{"choices": []}')


def test_times_of_other_types_than_usual_are_still_read() -> None:
    value = {
        "choices": [{"delta": {"content": [{"type": "text", "text": "a"}]}, "finish_reason": 3}],
        "usage": {"completion_tokens": 2.0, "prompt_tokens": "x"},
    }
    stream = read(event(value), END)
    assert (stream.chunks, stream.completion_tokens) == (1, 3)
