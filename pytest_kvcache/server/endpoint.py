"""A server that answers: which models it serves, which one we ask for, and whether a token comes back.

The names that other rooms use of an endpoint are all here; ``address`` holds the value, ``openai`` the requests.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from pytest_kvcache.errors import EndpointRefused, EndpointUnreachable, UsageError
from pytest_kvcache.server.address import Endpoint, parse_endpoint
from pytest_kvcache.server.openai import API_PATHS, Completion, client_for, complete, tokenize
from pytest_kvcache.server.transport import Answer, ask, plain, refused

__all__ = [
    "Completion",
    "Endpoint",
    "ServedModel",
    "check_ready",
    "choose_model",
    "complete",
    "list_models",
    "parse_endpoint",
    "tokenize",
]

_MODELS = "/v1/models"
_MODELS_BYTES = 4 << 20
_MAX_ROWS = 1000
_LOADING = frozenset({429, 502, 503, 504})


@dataclass(frozen=True)
class ServedModel:
    """One row of /v1/models. ``max_model_len`` is in tokens: vLLM's field of that name, or llama.cpp's ``meta.n_ctx`` (one slot)."""

    id: str
    max_model_len: int | None
    owned_by: str
    raw: dict[str, Any] = field(repr=False)

    @property
    def is_adapter(self) -> bool:
        """Whether the row is a LoRA adapter of another model."""
        return bool(self.raw.get("parent"))


def _length(row: dict[str, Any]) -> int | None:
    meta = row.get("meta")
    for value in (row.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _read_models(endpoint: Endpoint, answer: Answer) -> list[ServedModel]:
    rows = answer.value.get("data") if isinstance(answer.value, dict) else None
    if answer.status != 200 or answer.cut or not isinstance(rows, list):
        raise refused(endpoint, _MODELS, answer, "the list of models")
    found = []
    for row in rows[:_MAX_ROWS]:
        if isinstance(row, dict) and isinstance(row.get("id"), str) and row["id"]:
            owner = row.get("owned_by")
            found.append(ServedModel(row["id"], _length(row), owner if isinstance(owner, str) else "", row))
    if rows and not found:
        raise refused(endpoint, _MODELS, answer, "the list of models")
    return found


def list_models(endpoint: Endpoint, *, client: httpx.Client | None = None, timeout_s: float = 30.0) -> list[ServedModel]:
    """Return the models that the server lists, in its order, at most 1,000.

    Raises EndpointUnreachable where nobody answers in ``timeout_s`` seconds, and EndpointRefused for every answer that is not
    a list of models: 401, 403, 404, a redirect, a web page, an empty 200.
    """
    with client_for(endpoint, client, timeout_s) as http:
        return _read_models(endpoint, ask(endpoint, http, "GET", _MODELS, timeout_s=timeout_s, limit_bytes=_MODELS_BYTES))


def _names(models: list[ServedModel]) -> str:
    shown = [plain(model.id, 100) for model in models[:10]]
    more = len(models) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _choose(endpoint: Endpoint, models: list[ServedModel]) -> Endpoint:
    where = endpoint.url(_MODELS)
    if not models:
        raise EndpointRefused("the server answers, but it serves no model", where=where, hint="load a model, or look at the server's log")
    if endpoint.model:
        if endpoint.model not in {model.id for model in models}:
            raise UsageError(
                f"the model {plain(endpoint.model, 100)} is not served there", where=where, hint=f"--kv-model takes one of: {_names(models)}"
            )
        return endpoint
    candidates = [model for model in models if not model.is_adapter]
    if len(candidates) != 1:
        listed = candidates or models
        raise UsageError(f"{len(listed)} models are served there, and none is named", where=where, hint=f"name one with --kv-model: {_names(listed)}")
    return dataclasses.replace(endpoint, model=candidates[0].id)


def choose_model(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with its model filled in: the one that is named, or the only one (LoRA adapters are no candidates).

    Raises UsageError where the named model is not served, or several are and none is named; and what ``list_models`` raises.
    """
    return _choose(endpoint, list_models(endpoint))


def _one_token(endpoint: Endpoint, client: httpx.Client, timeout_s: float) -> None:
    """Ask for one token. Raises EndpointRefused where none comes, EndpointUnreachable where nobody answers."""
    path = API_PATHS[endpoint.api]
    done = complete(endpoint, "Hello", 1, timeout_s=timeout_s, client=client)
    where = endpoint.shown + path
    if done.status == 200 and not done.error:
        if done.completion_tokens or done.text or done.finish_reason:
            return
        raise EndpointRefused("the server answers, but no token came back", where=where, hint="look at the server's log")
    hint = "look at the server's log"
    if done.status in (401, 403):
        hint = f"check the value of {endpoint.api_key_env}" if endpoint.api_key_env else "name the variable that holds the key with --kv-api-key-env"
    elif done.status in (400, 404, 405, 422, 501):
        hint = f"try --kv-api {'completions' if endpoint.api == 'chat' else 'chat'}"
    # The status travels with the error: the one who waits for a start must tell "not yet" from "no".
    raise _NoToken(done.status, f"the server lists {plain(endpoint.model, 100)}, but gives no token (HTTP {done.status}): {done.error}", where, hint)


class _NoToken(EndpointRefused):
    def __init__(self, status: int, what: str, where: str, hint: str) -> None:
        self.status = status
        super().__init__(what, where=where, hint=hint)


def check_ready(
    endpoint: Endpoint,
    deadline_s: float,
    *,
    starting: bool = False,
    watch: Callable[[], None] | None = None,
) -> Endpoint:
    """Return the endpoint with its model, once HTTP answers, the model is listed and one token has come back.

    A server that says it is loading or busy (502, 503, 504, 429) is waited for until ``deadline_s`` seconds have passed; any other
    failure is raised at once, as EndpointUnreachable, EndpointRefused or UsageError. With ``starting`` (a server that we have
    just launched) a closed port is waited for as well, and a wrong answer for ten seconds, as routes may come late. ``watch`` is
    called between tries and may raise.
    """
    deadline = time.monotonic() + deadline_s
    wrong_since: float | None = None
    pause = 0.1
    with endpoint.client(min(30.0, deadline_s)) as client:
        while True:
            left = max(1.0, deadline - time.monotonic())
            try:
                answer = ask(endpoint, client, "GET", _MODELS, timeout_s=min(left, 10.0), limit_bytes=_MODELS_BYTES)
                status = answer.status
                chosen = _choose(endpoint, _read_models(endpoint, answer))
                _one_token(chosen, client, min(max(1.0, deadline - time.monotonic()), 300.0))
                return chosen
            except EndpointUnreachable as error:
                failure: EndpointUnreachable | EndpointRefused = error
                again = starting
            except EndpointRefused as error:
                failure = error
                status = error.status if isinstance(error, _NoToken) else status
                if status in _LOADING:
                    again = True
                else:
                    wrong_since = wrong_since or time.monotonic()
                    again = starting and status not in (401, 403) and time.monotonic() - wrong_since < 10.0
            if watch is not None:
                watch()
            if not again or time.monotonic() + pause > deadline:
                raise failure
            time.sleep(pause)
            pause = min(0.5, pause * 1.3)
