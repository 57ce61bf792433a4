"""Asking an OpenAI-compatible server outside the load path: one completion, the tokens of a text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from pytest_kvcache.errors import UsageError
from pytest_kvcache.server.address import Endpoint, hide_user
from pytest_kvcache.server.transport import Answer, ask, error_text, plain, refused

API_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Completion:
    """One answer. ``error`` is "" only where an answer came that is one: a status of 200 alone proves nothing.

    Token counts come from the server's ``usage`` and are None where it sent none. ``latency_s`` is seconds from sending to
    the whole answer. ``body`` is the answer as it came, {} where it was no JSON object.
    """

    status: int
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""
    latency_s: float = 0.0
    body: dict[str, Any] = field(default_factory=dict, repr=False)


@contextlib.contextmanager
def client_for(endpoint: Endpoint, client: httpx.Client | None, timeout_s: float) -> Iterator[httpx.Client]:
    """Yield ``client``, or one of our own that is closed afterwards."""
    if client is not None:
        yield client
    else:
        with endpoint.client(timeout_s) as own:
            yield own


def request_body(endpoint: Endpoint, prompt: str | list[int], max_tokens: int, **body: Any) -> dict[str, Any]:
    """Return the body of a completion request: ours, then the user's ``extra_body``, then ``body``. Raises UsageError for ids in a chat."""
    ours: dict[str, Any] = {"model": endpoint.model, "max_tokens": max_tokens}
    if endpoint.api == "chat":
        if not isinstance(prompt, str):
            raise UsageError("a prompt of token ids cannot be sent as a chat message", where=endpoint.shown, hint="use --kv-api completions")
        ours["messages"] = [{"role": "user", "content": prompt}]
    else:
        ours["prompt"] = prompt
    return {**ours, **endpoint.extra_body, **body}


def complete(
    endpoint: Endpoint,
    prompt: str | list[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    timeout_s: float = 300.0,
    client: httpx.Client | None = None,
    **body: Any,
) -> Completion:
    """Return one whole answer (not streamed), by completions or chat as the endpoint says. ``timeout_s`` bounds it all.

    An HTTP error or a broken body is a Completion with ``error``; EndpointUnreachable is raised where no answer comes at all.
    """
    sent = request_body(endpoint, prompt, max_tokens, **{"temperature": temperature, **body})
    with client_for(endpoint, client, timeout_s) as http:
        answer = ask(endpoint, http, "POST", API_PATHS[endpoint.api], body=sent, timeout_s=timeout_s)
    return read_completion(answer)


def read_completion(answer: Answer) -> Completion:
    """Return what an answer to a completion request says; never raises, whatever the body is."""
    value = answer.value
    found = value if isinstance(value, dict) else {}
    error = _error(answer, found)
    choices = found.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    if choice is None:
        return Completion(answer.status, error=error or "the answer has no choices", latency_s=answer.seconds, body=found)
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    reason = choice.get("finish_reason")
    usage = found.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Completion(
        status=answer.status,
        text=text if isinstance(text, str) else "",
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        finish_reason=reason[:40] if isinstance(reason, str) else "",
        error=error,
        latency_s=answer.seconds,
        body=found,
    )


def _error(answer: Answer, found: dict[str, Any]) -> str:
    said = error_text(answer)
    if answer.status != 200:
        target = plain(hide_user(answer.location), 200)
        return said or (f"redirects to {target}" if 300 <= answer.status < 400 else f"HTTP {answer.status} without a message")
    if answer.cut:
        return "the answer is too large"
    if found.get("error") or found.get("object") == "error":
        return said or "an error without a message"
    if answer.is_html:
        return f"a web page and no answer{f' ({said})' if said else ''}"
    if not found:
        return "an empty answer" if not answer.body.strip() else "an answer that is no JSON object"
    return ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def tokenize(endpoint: Endpoint, text: str, *, add_special: bool = False, client: httpx.Client | None = None) -> list[int] | None:
    """Return the token ids of ``text`` by the server's own /tokenize (llama.cpp's form and vLLM's); None where it has none.

    Raises EndpointUnreachable where nobody answers and EndpointRefused where the key is not accepted.
    """
    llama = {"content": text, "add_special": add_special}
    vllm = {"model": endpoint.model, "prompt": text, "add_special_tokens": add_special}
    with client_for(endpoint, client, 60.0) as http:
        # Both engines ignore fields of the other, so the first try nearly always answers; the others are for stricter servers.
        for body in ({**llama, **vllm}, vllm, llama):
            answer = ask(endpoint, http, "POST", "/tokenize", body=body, timeout_s=60.0)
            if answer.status in (401, 403):
                raise refused(endpoint, "/tokenize", answer, "the tokens of a text")
            if answer.status in (404, 405, 501):
                return None
            tokens = answer.value.get("tokens") if isinstance(answer.value, dict) else None
            if answer.status == 200 and isinstance(tokens, list) and all(type(token) is int for token in tokens):
                return tokens
    return None
