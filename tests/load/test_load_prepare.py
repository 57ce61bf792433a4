"""What is learnt from a server before the load: exact lengths by the best way it offers, or a clear refusal."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.errors import EndpointRefused, EndpointUnreachable, KvError, UsageError
from pytest_kvcache.load import contract
from pytest_kvcache.load.asking import Answer, choose_model
from pytest_kvcache.load.prepare import Prepared, prepare
from pytest_kvcache.load.prompts import CALIBRATED, ESTIMATED, IDS, TOKENIZE
from pytest_kvcache.load.target import Target


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


class Ask:
    """A blocking stand-in for the load's own client."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.paths: list[str] = []

    def __call__(self, method: str, path: str, body: bytes | None = None) -> Answer:
        self.paths.append(path)
        request = urllib.request.Request(self.root + path, data=body, method=method, headers={"Content-Type": "application/json"})
        try:
            with _opener.open(request, timeout=10) as answer:
                return Answer(answer.status, answer.read(), {name.lower(): value for name, value in answer.headers.items()})
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read(), {name.lower(): value for name, value in error.headers.items()})
        except (OSError, http.client.HTTPException) as error:
            raise EndpointUnreachable(str(error)) from None


def learn(server: ScriptedServer, **more: Any) -> Prepared:
    api = more.pop("api", "completions")
    return prepare(Ask(server.url), Target(server.url, api=api), sleep=lambda _: None, **more)


def test_token_ids_are_used_where_the_server_takes_them() -> None:
    with ScriptedServer(max_model_len=2048) as server:
        prepared = learn(server)
    assert (prepared.vocabulary.source, prepared.vocabulary.overhead, prepared.max_model_len) == (IDS, 0, 2048)
    assert prepared.target.model == "scripted"
    assert prepared.notes == []
    assert prepared.spent == {"requests": 2, "prompt_tokens": 19 + 47, "output_tokens": 4}


def test_a_chat_template_is_measured_and_counted_in() -> None:
    with ScriptedServer(chat_overhead=11) as server:
        prepared = learn(server, api="chat")
    assert prepared.vocabulary.source == CALIBRATED
    assert prepared.vocabulary.overhead == 11 + 1


def test_words_are_calibrated_by_usage_where_there_is_no_tokenize() -> None:
    with ScriptedServer(faults=["no-tokenize"]) as server:
        prepared = learn(server)
    assert prepared.vocabulary.source == CALIBRATED
    assert prepared.vocabulary.overhead == 1
    assert len(prepared.vocabulary.words) >= 48
    assert prepared.spent["requests"] < 30


class Fake(Ask):
    """A server made of one function per path."""

    def __init__(self, cost: Any, pieces: Any = None, refuses: tuple[str, ...] = (), usage: bool = True) -> None:
        super().__init__("http://fake")
        self.cost, self.pieces, self.refuses, self.usage = cost, pieces, refuses, usage
        self.bodies: list[Mapping[str, Any]] = []

    def __call__(self, method: str, path: str, body: bytes | None = None) -> Answer:
        self.paths.append(path)
        value = json.loads(body or b"{}")
        if path == "/v1/models":
            return self._json({"data": [{"id": "m", "max_model_len": 1000}]})
        if path == "/tokenize":
            return self._json(self.pieces(value)) if self.pieces else Answer(404, b"")
        self.bodies.append(value)
        bad = [name for name in self.refuses if name in value or (name == "ids" and isinstance(value.get("prompt"), list))]
        if bad:
            return Answer(400, json.dumps({"error": {"message": f"extra fields not permitted: {bad}", "code": 400}}).encode())
        prompt = value.get("prompt") or value["messages"][0]["content"]
        counted = {"usage": {"prompt_tokens": self.cost(prompt), "completion_tokens": 2}} if self.usage else {}
        return self._json({"choices": [{"text": "a b", "finish_reason": "length"}], **counted})

    def _json(self, value: Any) -> Answer:
        return Answer(200, json.dumps(value).encode(), {"content-type": "application/json"})


def _bpe(value: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer in vLLM's form that knows words of four letters only; others fall into letters."""
    strings: list[str] = []
    for word in value["prompt"].split():
        strings += ["Ġ" + word] if len(word) == 4 else ["Ġ" + word[0], *word[1:]]
    return {"tokens": [hash(text) % 10**6 for text in strings], "token_strs": strings}


def test_words_that_are_one_token_are_found_by_the_pieces_of_the_tokenizer() -> None:
    fake = Fake(lambda prompt: 3 + len(prompt.split()), _bpe, refuses=("ids",))
    vocabulary = prepare(fake, Target("http://fake")).vocabulary
    assert (vocabulary.source, vocabulary.overhead) == (TOKENIZE, 4)
    assert all(len(word) == 4 for word in vocabulary.words)


def test_a_server_that_counts_ids_otherwise_is_not_sent_ids() -> None:
    fake = Fake(lambda prompt: len(prompt) * 2 if isinstance(prompt, list) else 1 + len(prompt.split()), _bpe)
    assert prepare(fake, Target("http://fake")).vocabulary.source == TOKENIZE


def test_a_bos_that_is_added_to_ids_is_counted_in() -> None:
    fake = Fake(lambda prompt: len(prompt) + 1, _bpe)
    vocabulary = prepare(fake, Target("http://fake")).vocabulary
    assert (vocabulary.source, vocabulary.overhead) == (IDS, 1)


def test_where_words_cost_no_whole_tokens_lengths_are_estimates_and_say_so() -> None:
    fake = Fake(lambda prompt: 5 + len(prompt) // 3)
    prepared = prepare(fake, Target("http://fake"))
    assert prepared.vocabulary.source == ESTIMATED
    assert prepared.vocabulary.tokens_per_word > 1
    assert "estimated" in prepared.notes[0]


def test_fields_that_a_server_refuses_are_left_out_and_noted() -> None:
    fake = Fake(len, _bpe, refuses=("ignore_eos",))
    prepared = prepare(fake, Target("http://fake"))
    assert (prepared.ignore_eos, prepared.usage, prepared.vocabulary.source) == (False, True, IDS)
    assert "refuses ignore_eos" in prepared.notes[0]
    fake = Fake(len, _bpe, refuses=("ignore_eos", "stream_options"))
    prepared = prepare(fake, Target("http://fake"))
    assert (prepared.ignore_eos, prepared.usage) == (False, False)


def test_a_server_without_usage_gets_ids_unverified_and_a_note() -> None:
    with ScriptedServer(faults=["no-usage"]) as server:
        prepared = learn(server)
    assert (prepared.vocabulary.source, prepared.expects_usage) == (IDS, False)
    assert "not verified" in prepared.notes[0]


@pytest.mark.parametrize("fault", ["queue-full", "queue-full-stream", "error-in-stream", "truncate", "reset", "token-status=500", "token-status=429"])
def test_a_busy_or_broken_server_does_not_stop_the_load_that_counts_it(fault: str) -> None:
    with ScriptedServer(faults=[fault]) as server:
        prepared = learn(server)
    assert prepared.vocabulary.source == IDS
    assert "not verified" in prepared.notes[0]


@pytest.mark.parametrize(
    ("faults", "words", "hint"),
    [
        (["status=401"], "HTTP 401", "--kv-api-key-env"),
        (["status=403"], "HTTP 403", "--kv-api-key-env"),
        (["token-status=401"], "HTTP 401", "--kv-api-key-env"),
        (["status=404"], "HTTP 404", "check the address"),
        (["token-status=404"], "HTTP 404", "--kv-api"),
        (["token-status=400"], "HTTP 400", "by hand"),
        (["html"], "Welcome to the portal", "check the address"),
        (["empty"], "an empty body", "check the address"),
        (["redirect=http://u:pw@127.0.0.1:1/x"], "redirects to http://***@127.0.0.1:1/x", "name the address"),
        (["no-models"], "there are 0 models", "--kv-model"),
        (["garbage"], "", ""),
    ],
)
def test_a_server_that_says_no_is_quoted_once_with_what_to_try(faults: list[str], words: str, hint: str) -> None:
    with ScriptedServer(faults=faults) as server, pytest.raises(KvError) as caught:
        learn(server)
    assert words in caught.value.what
    assert hint in caught.value.hint
    assert "pw@" not in str(caught.value)


def models(*rows: Mapping[str, Any], props: Any = None, status: int = 200) -> Any:
    def ask(method: str, path: str, body: bytes | None = None) -> Answer:
        if path == "/v1/models":
            return Answer(status, json.dumps({"object": "list", "data": list(rows)}).encode())
        return Answer(200, json.dumps(props).encode()) if path == "/props" and props else Answer(404, b"")

    return ask


def test_the_model_and_its_longest_context_are_read_from_what_is_served() -> None:
    target = Target("http://h")
    assert choose_model(models({"id": "m", "max_model_len": 4096}), target) == ("m", 4096)
    assert choose_model(models({"id": "m", "meta": {"n_ctx": 2048}}), target) == ("m", 2048)
    assert choose_model(models({"id": "m"}, props={"default_generation_settings": {"n_ctx": 1024}}), target) == ("m", 1024)
    assert choose_model(models({"id": "m", "max_model_len": None}), target) == ("m", None)


def test_an_adapter_is_chosen_only_by_name_and_has_the_context_of_its_base() -> None:
    served = models({"id": "base", "max_model_len": 4096, "parent": None}, {"id": "lora", "max_model_len": None, "parent": "base"})
    assert choose_model(served, Target("http://h")) == ("base", 4096)
    assert choose_model(served, Target("http://h", model="lora")) == ("lora", 4096)


def test_several_models_or_a_wrong_name_list_what_is_served() -> None:
    served = models({"id": "a"}, {"id": "b\x1b[31m"})
    for target, words in ((Target("http://h"), "there are 2 models"), (Target("http://h", model="c"), "'c' is not served")):
        with pytest.raises(UsageError) as caught:
            choose_model(served, target)
        assert words in caught.value.what
        assert "served are: a, b" in caught.value.hint
        assert "\x1b" not in caught.value.hint


def test_a_gateway_without_a_model_list_works_for_a_named_model() -> None:
    assert choose_model(models(status=404), Target("http://h", model="m")) == ("m", None)
    with pytest.raises(EndpointRefused):
        choose_model(models(status=404), Target("http://h"))


def test_a_forced_way_that_does_not_work_is_refused() -> None:
    with ScriptedServer(faults=["no-tokenize"]) as server, pytest.raises(UsageError, match="by ids"):
        learn(server, source=IDS)
    with ScriptedServer() as server:
        assert learn(server, source=ESTIMATED).vocabulary.source == ESTIMATED


def test_outcomes_are_all_known() -> None:
    assert len(set(contract.OUTCOMES)) == len(contract.OUTCOMES) == 15
