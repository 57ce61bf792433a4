"""An attached server is asked what it serves and for one token; every way in which it says no gives one clear message."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import httpx
import pytest
from loopback_tls import Tls
from scripted_server import ScriptedServer

from pytest_kvcache.errors import EndpointRefused, EndpointUnreachable, KvError, UsageError
from pytest_kvcache.server import endpoint as module
from pytest_kvcache.server.endpoint import Endpoint, check_ready, choose_model, list_models, parse_endpoint
from pytest_kvcache.server.launch import free_port
from pytest_kvcache.server.transport import Answer, ask, error_text, plain, unreachable
from pytest_kvcache.settings import Settings

LORA: list[dict[str, Any]] = [
    {"id": "my-lora", "owned_by": "vllm", "parent": "base", "max_model_len": None},
    {"id": "base", "owned_by": "vllm", "parent": None, "max_model_len": 8192},
]


def at(server: ScriptedServer, **fields: Any) -> Endpoint:
    return dataclasses.replace(parse_endpoint(server.url, Settings()), **fields)


def test_the_only_model_is_found_without_being_named() -> None:
    with ScriptedServer(model="m", max_model_len=512, owned_by="vllm") as server:
        (model,) = list_models(at(server))
        assert (model.id, model.max_model_len, model.owned_by) == ("m", 512, "vllm")
        assert model.raw["root"] == "m"
        assert choose_model(at(server)).model == "m"
        ready = check_ready(at(server), 5)
    assert ready.model == "m"
    assert server.paths()[-2:] == ["GET /v1/models", "POST /v1/completions"]
    assert server.seen[-1].body == {"model": "m", "prompt": "Hello", "max_tokens": 1, "temperature": 0.0}


def test_the_context_of_one_llama_cpp_slot_is_its_longest_request() -> None:
    rows = [{"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx": 8192, "n_ctx_train": 32768}}]
    with ScriptedServer(models=rows) as server:
        assert list_models(at(server))[0].max_model_len == 8192


def test_a_lora_adapter_is_no_candidate_but_may_be_named() -> None:
    with ScriptedServer(models=LORA) as server:
        assert choose_model(at(server)).model == "base"
        assert choose_model(at(server, model="my-lora")).model == "my-lora"
        assert list_models(at(server))[0].max_model_len is None
        assert list_models(at(server))[0].is_adapter


def test_a_model_that_is_not_served_is_a_usage_error_that_lists_what_is() -> None:
    with ScriptedServer(models=LORA) as server, pytest.raises(UsageError) as caught:
        check_ready(at(server, model="other"), 5)
    assert "the model other is not served there" in str(caught.value)
    assert "my-lora, base" in str(caught.value)
    assert server.url in str(caught.value)


def test_several_models_and_none_named_is_a_usage_error_with_a_bounded_list() -> None:
    rows = [{"id": f"model-{number}\x1b[31m"} for number in range(500)]
    with ScriptedServer(models=rows) as server, pytest.raises(UsageError) as caught:
        choose_model(at(server))
    text = str(caught.value)
    assert "500 models are served there, and none is named" in text
    assert "model-9 and 490 more" in text
    assert "\x1b" not in text
    assert len(text) < 600


def test_a_server_without_a_model_says_so() -> None:
    with ScriptedServer(faults=["no-models"]) as server, pytest.raises(EndpointRefused, match="it serves no model"):
        choose_model(at(server))


@pytest.mark.parametrize(
    ("fault", "words", "hint"),
    [
        ("status=401", "wants a key (HTTP 401), saying: the script says 401", "--kv-api-key-env"),
        ("status=403", "forbids this (HTTP 403)", "gateway"),
        ("status=404", "has no /v1/models (HTTP 404)", "path prefix"),
        ("status=405", "does not serve /v1/models", "OpenAI-compatible"),
        ("status=418", "refuses (HTTP 418)", "log"),
        ("status=500", "broke (HTTP 500), saying: the script says 500", "log"),
        ("html", "a web page (Welcome to the portal)", "login page"),
        ("empty", "HTTP 200 with nothing in it", "path prefix"),
        ("huge", "longer than 4,096 KiB", "check the address"),
        (
            "redirect=http://ann:geheim@evil.example/v1?key=geheim",
            "redirects to http://***@evil.example/v1, and redirects are not followed",
            "name its address",
        ),
    ],
)
def test_each_refusal_is_one_clear_message_at_once(fault: str, words: str, hint: str) -> None:
    with ScriptedServer(faults=[fault]) as server:
        began = time.monotonic()
        with pytest.raises(EndpointRefused) as caught:
            check_ready(at(server), 30)
        assert time.monotonic() - began < 10
        assert len(server.seen) == 1
    text = str(caught.value)
    assert words in text
    assert hint in caught.value.hint
    assert caught.value.where == f"{server.url}/v1/models"
    assert "geheim" not in text
    assert len(text) < 1000


@pytest.mark.parametrize("form", ["nested", "flat", "tgi"])
def test_the_message_is_found_in_every_form_of_error_body(form: str) -> None:
    with ScriptedServer(faults=["status=500", f"error-body={form}"]) as server, pytest.raises(EndpointRefused, match="the script says 500"):
        list_models(at(server))


@pytest.mark.parametrize(
    "page",
    [
        "[]",
        "3",
        '"text"',
        "{}",
        '{"data": {}}',
        '{"data": 5}',
        '{"data": [1, null, {"id": 7}, {"id": ""}]}',
        "{",
        "\x00\x1b[31m",
        '{"error": "broken"}',
    ],
)
def test_an_answer_that_is_no_list_of_models_is_refused(page: str) -> None:
    with ScriptedServer(pages={"/v1/models": (200, "application/json", page)}) as server, pytest.raises(EndpointRefused) as caught:
        list_models(at(server))
    assert "\x1b" not in str(caught.value)


def test_rows_that_are_none_are_left_out_and_odd_lengths_are_none() -> None:
    rows = [None, 5, {"id": "a", "max_model_len": "8192"}, {"id": "b", "max_model_len": True}, {"id": "c", "max_model_len": -1, "meta": {"n_ctx": 0}}]
    with ScriptedServer(pages={"/v1/models": {"data": [*rows, {"id": "d", "owned_by": 5, "meta": []}]}}) as server:
        models = list_models(at(server))
    assert [(model.id, model.max_model_len, model.owned_by) for model in models] == [
        ("a", None, ""),
        ("b", None, ""),
        ("c", None, ""),
        ("d", None, ""),
    ]


def test_a_wrong_key_names_the_variable_and_not_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "geheim-key")
    with ScriptedServer(api_key="right") as server:
        endpoint = parse_endpoint(server.url, Settings(api_key_env="MY_KEY"))
        with pytest.raises(EndpointRefused, match="does not accept the key in MY_KEY") as caught:
            check_ready(endpoint, 5)
        assert "geheim" not in str(caught.value)
        monkeypatch.setenv("MY_KEY", "right")
        assert check_ready(endpoint, 5).model == "scripted"


def test_a_server_that_is_loading_is_waited_for() -> None:
    with ScriptedServer(faults=["ready-after=0.5"]) as server:
        assert check_ready(at(server), 10).model == "scripted"


def test_a_server_that_never_gets_ready_ends_the_wait_at_the_deadline() -> None:
    with ScriptedServer(faults=["never-ready"]) as server:
        began = time.monotonic()
        with pytest.raises(EndpointRefused, match=r"not ready \(HTTP 503\), saying: Loading model"):
            check_ready(at(server), 1.0)
        assert time.monotonic() - began < 12


def test_a_server_that_hangs_ends_the_wait_at_the_deadline() -> None:
    with ScriptedServer(faults=["hang"]) as server, pytest.raises(EndpointUnreachable, match="no complete answer within"):
        check_ready(at(server), 0.5)


@pytest.mark.parametrize(
    ("faults", "words", "hint"),
    [
        (["token-status=500", "token-error=CUDA error"], "gives no token (HTTP 500): CUDA error", "log"),
        (["token-status=404", "token-error=no completions here"], "gives no token (HTTP 404): no completions here", "--kv-api chat"),
        (["token-status=401"], "gives no token (HTTP 401)", "--kv-api-key-env"),
    ],
)
def test_a_model_that_is_listed_and_gives_no_token_is_not_ready(faults: list[str], words: str, hint: str) -> None:
    with ScriptedServer(faults=faults) as server, pytest.raises(EndpointRefused) as caught:
        check_ready(at(server), 5)
    assert words in str(caught.value)
    assert hint in caught.value.hint


def test_an_answer_of_200_without_a_token_is_not_ready() -> None:
    empty = {"choices": [{"index": 0, "text": ""}]}
    with ScriptedServer(pages={"/v1/completions": empty}) as server, pytest.raises(EndpointRefused, match="no token came back"):
        check_ready(at(server), 5)
    with (
        ScriptedServer(pages={"/v1/completions": {"error": {"message": "engine dead"}}}) as server,
        pytest.raises(EndpointRefused, match="engine dead"),
    ):
        check_ready(at(server), 5)


def test_a_chat_only_server_is_ready_through_chat() -> None:
    with ScriptedServer(pages={"/v1/completions": (404, "text/plain", "no")}) as server:
        assert check_ready(at(server, api="chat"), 5).model == "scripted"


def test_nobody_there_says_so_at_once() -> None:
    endpoint = parse_endpoint(f"http://127.0.0.1:{free_port()}/v1", Settings())
    began = time.monotonic()
    with pytest.raises(EndpointUnreachable, match="nobody answers") as caught:
        check_ready(endpoint, 30)
    assert time.monotonic() - began < 5
    assert "start the server" in caught.value.hint
    assert caught.value.exit_code == 5


def test_an_unknown_host_name_is_named_as_the_trouble() -> None:
    for words in (
        "[Errno -2] Name or service not known",
        "[Errno -3] Temporary failure in name resolution",
        "[Errno 8] nodename nor servname provided",
    ):
        found = unreachable(Endpoint("http://no-such-host.invalid:8000"), "/v1/models", httpx.ConnectError(words), 3.0)
        assert found.hint == "check the host name"
        assert "no-such-host.invalid" in found.where


def test_something_that_does_not_speak_http_is_named_as_such() -> None:
    with ScriptedServer(faults=["garbage"]) as server, pytest.raises(EndpointUnreachable, match="does not speak HTTP"):
        list_models(at(server))


def _tls_server(tls: Tls) -> ScriptedServer:
    return ScriptedServer(tls=lambda sock: tls.context.wrap_socket(sock, server_side=True))


def test_a_certificate_that_nobody_vouches_for_is_refused_and_accepted_with_its_ca(tls: Tls) -> None:
    with _tls_server(tls) as server:
        with pytest.raises(EndpointUnreachable, match="certificate of the server is not trusted") as caught:
            list_models(parse_endpoint(server.url, Settings()))
        assert "--kv-ca" in caught.value.hint
        trusted = parse_endpoint(server.url, Settings(ca=str(tls.ca)))
        assert check_ready(trusted, 10).model == "scripted"


def test_https_to_a_server_without_tls_is_named_as_such() -> None:
    with ScriptedServer() as server, pytest.raises(EndpointUnreachable) as caught:
        list_models(parse_endpoint(server.url.replace("http", "https"), Settings()))
    assert f"write {server.url}" in caught.value.hint


def test_http_to_a_server_with_tls_is_named_as_such(tls: Tls) -> None:
    with _tls_server(tls) as server, pytest.raises(EndpointUnreachable):
        list_models(parse_endpoint(server.url.replace("https", "http"), Settings()), timeout_s=2)


def test_a_dead_proxy_is_named_and_the_server_is_not_asked() -> None:
    with ScriptedServer() as server:
        endpoint = parse_endpoint(server.url, Settings(proxy=f"http://ann:geheim@127.0.0.1:{free_port()}"))
        with pytest.raises(EndpointUnreachable) as caught:
            list_models(endpoint)
        assert "geheim" not in str(caught.value)
        assert server.seen == []


def test_every_transport_failure_has_words_of_its_own() -> None:
    endpoint = Endpoint("https://h:1")
    failures = {
        httpx.ConnectTimeout("x"): "no connection within 3 s",
        httpx.ReadTimeout("x"): "no complete answer within 3 s",
        httpx.PoolTimeout("x"): "no complete answer within 3 s",
        httpx.ReadError("reset"): "the connection broke: reset",
        httpx.WriteError(""): "the connection broke",
        httpx.ProxyError("407"): "the proxy did not let the request through: 407",
        httpx.RemoteProtocolError("bad\x1b[31m line"): "does not speak HTTP as it should: bad line",
        httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number"): "no TLS connection came about",
        httpx.ConnectError("[Errno -2] Name or service not known"): "nobody answers",
        OSError("no route"): "nobody answers: no route",
    }
    for error, words in failures.items():
        found = unreachable(endpoint, "/v1/models", error, 3.0)
        assert words in found.what, error
        assert found.hint
        assert found.where == "https://h:1/v1/models"


def test_an_answer_that_trickles_is_cut_off_in_time() -> None:
    class Trickle(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            for _ in range(100):
                time.sleep(0.05)
                yield b" "

    client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=Trickle())))
    with client, pytest.raises(EndpointUnreachable, match=r"no complete answer within 0\.2 s"):
        ask(Endpoint("http://h:1"), client, "GET", "/x", timeout_s=0.2)


def test_foreign_text_is_made_harmless_before_it_is_shown() -> None:
    assert plain("a\x1b[31mred\x1b[0m\x1b]0;title\x07\r\nb\x00c  d") == "ared b c d"
    assert plain("Authorization: Bearer geheimgeheim") == "Authorization: ***"
    assert len(plain("x" * 10_000)) == 500
    for body in (b'{"detail": [{"msg": "bad"}]}', b'{"detail": "bad"}', b"plain bad", b'{"message": "bad"}'):
        assert "bad" in error_text(Answer(400, "", "", body, False, 0.0))
    assert error_text(Answer(200, "", "", b"", False, 0.0)) == ""


def test_the_public_names_are_all_here() -> None:
    assert set(module.__all__) == {
        "Completion", "Endpoint", "ServedModel", "check_ready", "choose_model", "complete", "list_models", "parse_endpoint", "tokenize",
    }  # fmt: skip
    assert issubclass(EndpointUnreachable, KvError)
