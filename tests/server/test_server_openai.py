"""One completion and the tokens of a text, from every kind of server: what is not an answer is never taken for one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer

from pytest_kvcache.errors import EndpointRefused, EndpointUnreachable, UsageError
from pytest_kvcache.server.endpoint import Endpoint, complete, parse_endpoint, tokenize
from pytest_kvcache.server.launch import free_port
from pytest_kvcache.server.openai import read_completion, request_body
from pytest_kvcache.server.transport import Answer
from pytest_kvcache.settings import Settings


def at(server: ScriptedServer, **fields: Any) -> Endpoint:
    return dataclasses.replace(parse_endpoint(server.url, Settings(model="scripted")), **fields)


def answer(body: bytes | str, status: int = 200, kind: str = "application/json") -> Answer:
    return Answer(status, kind, "", body.encode() if isinstance(body, str) else body, False, 0.1)


def test_a_completion_has_its_text_counts_and_reason() -> None:
    with ScriptedServer(answer=lambda prompt: f"you said {prompt}") as server:
        done = complete(at(server), "a b c", 4)
    assert (done.status, done.text, done.error) == (200, "you said a b", "")
    assert (done.prompt_tokens, done.completion_tokens, done.finish_reason) == (3, 4, "length")
    assert 0 < done.latency_s < 5
    assert done.body["object"] == "text_completion"
    assert server.seen[0].body == {"model": "scripted", "prompt": "a b c", "max_tokens": 4, "temperature": 0.0}


def test_token_ids_are_sent_as_they_are() -> None:
    with ScriptedServer() as server:
        assert complete(at(server), [5, 6, 7], 2).prompt_tokens == 3
    assert server.seen[0].body["prompt"] == [5, 6, 7]


def test_chat_sends_a_message_and_reads_one() -> None:
    with ScriptedServer(chat_overhead=5) as server:
        done = complete(at(server, api="chat"), "a b", 2)
    assert (done.text, done.prompt_tokens, done.error) == (" tok tok", 7, "")
    assert server.seen[0].path == "/v1/chat/completions"
    assert server.seen[0].body["messages"] == [{"role": "user", "content": "a b"}]


def test_token_ids_in_a_chat_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="token ids"):
        request_body(Endpoint("http://h", api="chat"), [1], 1)


def test_the_users_extra_body_and_headers_go_along_and_the_call_wins() -> None:
    settings = Settings(model="scripted", extra_body='{"ignore_eos": true, "temperature": 1}', header=("X-Tenant: blue",))
    with ScriptedServer() as server:
        complete(parse_endpoint(server.url, settings), "a", 1, seed=7)
    sent = server.seen[0]
    assert sent.body == {"model": "scripted", "prompt": "a", "max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "seed": 7}
    assert sent.headers["X-Tenant"] == "blue"


@pytest.mark.parametrize("form", ["nested", "flat", "tgi"])
def test_an_http_error_is_a_completion_with_its_message(form: str) -> None:
    with ScriptedServer(max_model_len=8, faults=[f"error-body={form}"]) as server:
        done = complete(at(server), "w " * 9, 1)
    assert done.status == 400
    assert done.error.startswith("This model's maximum context length is 8 tokens.")
    assert (done.text, done.completion_tokens) == ("", None)


@pytest.mark.parametrize(
    ("faults", "status", "error"),
    [
        (["queue-full"], 503, "The engine is currently busy and cannot accept new requests."),
        (["html"], 200, "a web page and no answer (Welcome to the portal)"),
        (["empty"], 200, "an empty answer"),
        (["redirect=http://u:geheim@other/"], 302, "redirects to http://***@other/"),
    ],
)
def test_what_is_no_answer_is_an_error_whatever_its_status(faults: list[str], status: int, error: str) -> None:
    with ScriptedServer(faults=faults) as server:
        done = complete(at(server), "a", 1)
    assert (done.status, done.error) == (status, error)
    assert len(server.seen) == 1


def test_a_server_without_usage_gives_no_counts_and_no_error() -> None:
    with ScriptedServer(faults=["no-usage"]) as server:
        done = complete(at(server), "a", 1)
    assert (done.text, done.prompt_tokens, done.completion_tokens, done.error) == (" tok", None, None, "")


@pytest.mark.parametrize(
    "body", ["", "[]", "3", "{}", '{"choices": []}', '{"choices": [3]}', '{"choices": null}', "\xff", "[" * 9999, '{"error": ""}', '{"a": 1}']
)
def test_a_body_without_a_choice_is_an_error(body: str) -> None:
    assert read_completion(answer(body)).error


def test_odd_fields_are_left_out_and_do_no_harm() -> None:
    body = '{"choices": [{"message": {"content": null}, "finish_reason": 5}], "usage": {"prompt_tokens": "7", "completion_tokens": true}}'
    done = read_completion(answer(body))
    assert (done.text, done.finish_reason, done.prompt_tokens, done.completion_tokens, done.error) == ("", "", None, None, "")
    error = read_completion(answer('{"choices": [{"text": "x"}], "error": {"message": "broke \\u001b[31m half way"}}'))
    assert error.error == "broke half way"
    assert read_completion(answer("{}", 500)).error == "HTTP 500 without a message"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["choices", "usage", "error", "message", "text", "object"]), inner),
)


@given(JSON, st.sampled_from([200, 302, 400, 500]))
def test_any_json_is_read_without_raising(value: Any, status: int) -> None:
    done = read_completion(answer(json.dumps(value), status))
    assert status == 200 or done.error
    assert len(done.error) <= 520


def test_nobody_there_raises_and_a_hanging_server_ends_in_time() -> None:
    with pytest.raises(EndpointUnreachable, match="nobody answers"):
        complete(Endpoint(f"http://127.0.0.1:{free_port()}"), "a", 1)
    with ScriptedServer(faults=["hang"]) as server, pytest.raises(EndpointUnreachable, match=r"within 0\.3 s"):
        complete(at(server), "a", 1, timeout_s=0.3)


def test_a_client_of_the_callers_stays_open() -> None:
    with ScriptedServer() as server, at(server).client() as client:
        assert complete(at(server), "a", 1, client=client).error == ""
        assert tokenize(at(server), "a b", client=client) is not None
        assert not client.is_closed


def test_tokens_of_a_text_in_one_request_that_both_engines_understand() -> None:
    with ScriptedServer() as server:
        tokens = tokenize(at(server), "a b c", add_special=True)
    assert tokens is not None
    assert len(tokens) == 3
    assert server.seen[0].body == {
        "content": "a b c", "add_special": True, "model": "scripted", "prompt": "a b c", "add_special_tokens": True,
    }  # fmt: skip
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("page", "tries"),
    [
        ((404, "text/plain", "no"), 1),
        ((405, "text/plain", "no"), 1),
        ((501, "application/json", '{"error": {"message": "off"}}'), 1),
        ((422, "application/json", '{"detail": "extra fields"}'), 3),
        ((200, "application/json", '{"tokens": ["a", "b"]}'), 3),
        ((200, "text/html", "<html></html>"), 3),
    ],
)
def test_a_server_without_usable_tokenize_gives_none(page: tuple[int, str, str], tries: int) -> None:
    with ScriptedServer(pages={"/tokenize": page}) as server:
        assert tokenize(at(server), "a b") is None
        assert len(server.seen) == tries


def test_tokenize_behind_a_key_that_is_not_accepted_is_refused() -> None:
    with ScriptedServer(api_key="right") as server, pytest.raises(EndpointRefused, match="wants a key"):
        tokenize(at(server), "a b")
