"""The servers that the load goes to, as the load process sees them, and the request bodies that they are sent.

pytest's side hands endpoints over in one environment variable, so that neither keys nor headers with secrets are in argv.
By hand they come from ``-H`` and ``--kv-*`` options, read by the same code as everywhere (server/address.py). A key is read
from the environment variable that is named, nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from pytest_kvcache.errors import UsageError
from pytest_kvcache.server.redaction import header_secrets, remember

if TYPE_CHECKING:
    from pytest_kvcache.server.address import Endpoint

API_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_OURS = frozenset({"prompt", "messages", "stream", "stream_options", "model"})


class Target(msgspec.Struct, frozen=True):
    """One server. ``root`` is scheme, host, port and path prefix without ``/v1``; ``headers`` may hold secrets and are never shown."""

    root: str
    model: str = ""
    api: str = "completions"
    headers: dict[str, str] = {}
    extra_body: dict[str, Any] = {}
    ca: str = ""
    proxy: str = ""
    api_key_env: str = ""

    @property
    def prefix(self) -> str:
        """The path before ``/v1``, without a trailing slash."""
        return urlsplit(self.root).path.rstrip("/")

    @property
    def path(self) -> str:
        """The path that requests of the load go to."""
        return self.prefix + API_PATHS[self.api]

    def request_headers(self) -> dict[str, str]:
        """Return the headers of a request with the key, which is read from the environment now. Raises UsageError."""
        headers = {"Accept": "text/event-stream, application/json", "Content-Type": "application/json"} | self.headers
        if self.api_key_env:
            from pytest_kvcache.server.address import read_key

            headers["Authorization"] = "Bearer " + read_key(self.api_key_env, "--kv-api-key-env")
        return headers

    def output_tokens(self, asked: int) -> int:
        """Return how many tokens a request asks for: what ``extra_body`` says wins."""
        said = self.extra_body.get("max_tokens", self.extra_body.get("max_completion_tokens"))
        return said if isinstance(said, int) and said > 0 else asked

    def body_head(self, max_tokens: int, *, ignore_eos: bool = True, usage: bool = True) -> bytes:
        """Return the JSON of a request up to the value of its prompt; ``body_tail`` closes it."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": max_tokens, "temperature": 0}
        if usage:
            body["stream_options"] = {"include_usage": True}
        if ignore_eos:
            body["ignore_eos"] = True
        body |= self.extra_body
        opening = b'"prompt":' if self.api == "completions" else b'"messages":'
        return msgspec.json.encode(body)[:-1] + b"," + opening

    @property
    def body_tail(self) -> bytes:
        """What closes the JSON after the prompt's value."""
        return b"}"


class Handed(msgspec.Struct, frozen=True):
    """What pytest's side hands to the load process: the servers, its own pid, so that the load ends when it does, and its folder."""

    targets: list[Target]
    parent: int = 0
    folder: str = ""


def from_endpoint(endpoint: Endpoint) -> Target:
    """Return the Target of an Endpoint. Raises UsageError where its ``extra_body`` sets what the load sets itself."""
    taken = sorted(_OURS & endpoint.extra_body.keys())
    if taken:
        raise UsageError(f"the load sets {', '.join(taken)} itself", where="--kv-extra-body", hint="leave it out")
    headers = dict(endpoint.headers)
    if endpoint.basic_auth and not endpoint.api_key_env:
        headers["Authorization"] = "Basic " + endpoint.basic_auth
    return Target(
        root=endpoint.root,
        model=endpoint.model,
        api=endpoint.api,
        headers=headers,
        extra_body=dict(endpoint.extra_body),
        ca=endpoint.ca,
        proxy=endpoint.proxy,
        api_key_env=endpoint.api_key_env,
    )


def named_by_hand(addresses: list[str], given: Mapping[str, Any]) -> list[Target]:
    """Return the targets of addresses typed by hand; ``given`` holds settings by name (header, extra_body, model, api ...).

    An address without a scheme gets ``http://``. Raises UsageError.
    """
    return [from_endpoint(endpoint) for endpoint in endpoints_by_hand(addresses, given)]


def endpoints_by_hand(addresses: list[str], given: Mapping[str, Any]) -> list[Endpoint]:
    """Return the endpoints of addresses typed by hand, like ``named_by_hand``. Raises UsageError."""
    from pytest_kvcache.server.address import parse_endpoint
    from pytest_kvcache.settings import resolve

    if not addresses:
        raise UsageError("no server is named", hint="name it: locust -f ... -H http://127.0.0.1:8000")
    settings = resolve({name: value for name, value in given.items() if value}, {}, {})
    return [parse_endpoint(text if "://" in text else f"http://{text}", settings) for text in addresses]


def handed_over(text: str) -> Handed:
    """Return what pytest's side handed over, with its secrets remembered for redaction. Raises UsageError where it is no JSON of ours."""
    try:
        handed = msgspec.json.decode(text.encode(), type=Handed)
    except msgspec.DecodeError as error:
        raise UsageError(f"the environment variable of the load cannot be read: {error}") from None
    for target in handed.targets:
        remember(header_secrets(target.headers))
    return handed
