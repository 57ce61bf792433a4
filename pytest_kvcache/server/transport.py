"""One bounded HTTP exchange outside the load path, and what went wrong with it in words.

Everything that a server says is untrusted: an answer is cut at a size, a slow one at a time, and its text is made harmless
before it is shown.
"""

from __future__ import annotations

import functools
import html
import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from pytest_kvcache.errors import EndpointRefused, EndpointUnreachable
from pytest_kvcache.server.address import Endpoint, hide_user
from pytest_kvcache.server.redaction import redact

MAX_ERROR_CHARS = 500
MAX_ANSWER_BYTES = 32 << 20
_LONGEST_INT = 300


def bounded_int(text: str) -> int | float:
    """Return a whole number of foreign JSON; infinite where it is beyond all that a float holds, which nobody means."""
    return int(text) if len(text) <= _LONGEST_INT else math.inf


@dataclass(frozen=True)
class Answer:
    """What came back: ``body`` holds at most the bytes that were allowed, ``cut`` says that there were more."""

    status: int
    content_type: str
    location: str
    body: bytes
    cut: bool
    seconds: float

    @functools.cached_property
    def value(self) -> Any:
        """The body read as JSON; None where it is not JSON."""
        try:
            return json.loads(self.body, parse_int=bounded_int)
        except (ValueError, RecursionError):
            return None

    @property
    def is_html(self) -> bool:
        """Whether the body is a web page, whatever its content type says."""
        start = self.body[:200].lstrip().lower()
        return "html" in self.content_type or start.startswith((b"<!doctype", b"<html"))


def plain(text: str, limit: int = MAX_ERROR_CHARS) -> str:
    """Return foreign text as one harmless line: no control characters or escape sequences, no keys, at most ``limit`` characters."""
    text = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?", "", text[: limit * 8])
    text = redact(" ".join("".join(char if char.isprintable() else " " for char in text).split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def error_text(answer: Answer) -> str:
    """Return the message of an error body; "" where there is none.

    Read are ``{"error": {"message"}}`` (OpenAI, vLLM since 0.10.1, llama.cpp), ``{"object": "error", "message"}`` (vLLM before,
    SGLang, LMDeploy), ``{"error": "text"}`` (TGI), ``{"detail"}`` (FastAPI), and plain text.
    """
    value = answer.value
    if isinstance(value, dict):
        error = value.get("error")
        found = error.get("message") if isinstance(error, dict) else error
        if not isinstance(found, str):
            found = value.get("message")
        if not isinstance(found, str):
            detail = value.get("detail")
            found = detail if isinstance(detail, str) else json.dumps(detail) if detail else ""
        return plain(found)
    if value is not None or not answer.body:
        return ""
    text = answer.body[:20000].decode("utf-8", "replace")
    if answer.is_html:
        title = re.search(r"<title[^>]*>([^<]{1,300})", text, re.IGNORECASE)
        return plain(html.unescape(title.group(1))) if title else ""
    return plain(text)


def ask(
    endpoint: Endpoint,
    client: httpx.Client,
    method: str,
    path: str,
    *,
    body: Any = None,
    form: Mapping[str, str | list[str]] | None = None,
    timeout_s: float = 30.0,
    limit_bytes: int = MAX_ANSWER_BYTES,
) -> Answer:
    """Return the answer of one request, whatever its status; ``body`` is sent as JSON, ``form`` as form fields.

    Raises EndpointUnreachable where none comes in ``timeout_s`` seconds.
    """
    began = time.perf_counter()
    chunks: list[bytes] = []
    size = 0
    try:
        with client.stream(method, endpoint.url(path), json=body, data=form, timeout=timeout_s) as response:
            for chunk in response.iter_bytes():
                chunks.append(chunk)
                size += len(chunk)
                if size > limit_bytes:
                    break
                if time.perf_counter() - began > timeout_s:
                    raise httpx.ReadTimeout("the answer was still coming")
            headers = response.headers
            return Answer(
                status=response.status_code,
                content_type=headers.get("content-type", "").lower()[:200],
                location=headers.get("location", "")[:2000],
                body=b"".join(chunks)[:limit_bytes],
                cut=size > limit_bytes,
                seconds=time.perf_counter() - began,
            )
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
        raise unreachable(endpoint, path, error, timeout_s) from None


def unreachable(endpoint: Endpoint, path: str, error: Exception, timeout_s: float) -> EndpointUnreachable:
    """Return the error that says why no answer came, where, and what to try."""
    text = str(error)
    where = endpoint.shown + path
    if isinstance(error, httpx.ProxyError):
        return EndpointUnreachable(f"the proxy did not let the request through: {plain(text, 200)}", where=where, hint="check --kv-proxy")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        reason = plain(text.partition("CERTIFICATE_VERIFY_FAILED")[2].strip("] ").removeprefix("certificate verify failed").strip(": "), 200)
        hint = "name the CA bundle that signed it with --kv-ca, and use the host name that the certificate holds"
        return EndpointUnreachable(f"the TLS certificate of the server is not trusted: {reason}", where=where, hint=hint)
    if "SSL" in text or "TLS" in text:
        hint = (
            f"if the server does not speak TLS, write http{endpoint.root.removeprefix('https')}"
            if endpoint.root.startswith("https")
            else "check --kv-ca"
        )
        return EndpointUnreachable(f"no TLS connection came about: {plain(text, 200)}", where=where, hint=hint)
    if isinstance(error, httpx.ConnectTimeout):
        what, hint = f"no connection within {timeout_s:g} s", "check the address, and that no firewall is in the way"
    elif isinstance(error, httpx.TimeoutException):
        what = f"no complete answer within {timeout_s:g} s"
        hint = "the server hangs or is overloaded: look at its log and at its running requests"
    elif isinstance(error, (httpx.RemoteProtocolError, httpx.DecodingError)):
        what = f"what answers there does not speak HTTP as it should: {plain(text, 200)}"
        hint = "check the port; a server with TLS wants https://"
    elif isinstance(error, (httpx.ReadError, httpx.WriteError, httpx.CloseError)):
        what, hint = f"the connection broke: {plain(text, 200) or 'reset by the server'}", "the server may have died: look at its log"
    else:
        reason = plain(text, 200)
        what = f"nobody answers: {reason}" if reason else "nobody answers"
        names = ("name or service", "nodename", "name resolution", "getaddrinfo", "no address")
        hint = "check the host name" if any(word in text.lower() for word in names) else "start the server, or check host and port"
    return EndpointUnreachable(what, where=where, hint=hint)


def refused(endpoint: Endpoint, path: str, answer: Answer, wanted: str) -> EndpointRefused:
    """Return the error that says why an answer is not ``wanted`` ("the list of models"), where, and what to try."""
    status = answer.status
    said = error_text(answer)
    saying = f", saying: {said}" if said else ""
    prefix = "give the address without /v1, with the path prefix where there is one"
    if 300 <= status < 400:
        target = plain(hide_user(answer.location), 200) or "another place"
        what = f"it redirects to {target}, and redirects are not followed (HTTP {status})"
        hint = "if that is the server, name its address"
    elif status == 401:
        name = endpoint.api_key_env
        what = f"it wants a key (HTTP 401){saying}" if not name else f"it does not accept the key in {name} (HTTP 401){saying}"
        hint = f"check the value of {name}" if name else "put the key into an environment variable and name that with --kv-api-key-env"
    elif status == 403:
        what, hint = f"it forbids this (HTTP 403){saying}", "check what the key may do, and that no gateway stands in the way"
    elif status == 404:
        what, hint = f"it has no {path} (HTTP 404){saying}", prefix
    elif status in (405, 501):
        what, hint = f"it does not serve {path} (HTTP {status}){saying}", "an OpenAI-compatible server is needed"
    elif status == 429:
        what, hint = f"it turns requests away (HTTP 429){saying}", "wait, or ask for a higher limit"
    elif status in (502, 503, 504):
        what, hint = f"it is not ready (HTTP {status}){saying}", "wait until it has loaded its model, or look at its log"
    elif status >= 500:
        what, hint = f"it broke (HTTP {status}){saying}", "look at the server's log"
    elif status != 200:
        what, hint = f"it refuses (HTTP {status}){saying}", "look at the server's log"
    elif answer.cut:
        what, hint = f"its answer is longer than {len(answer.body) >> 10:,} KiB; {wanted} is not that large", "check the address"
    elif not answer.body.strip():
        what, hint = f"it answers HTTP 200 with nothing in it, and not with {wanted}", f"{prefix}; something in between may swallow the answer"
    elif answer.is_html:
        title = f" ({said})" if said else ""
        what, hint = f"it answers with a web page{title} and not with {wanted}", f"{prefix}; a login page or gateway may stand in the way"
    elif answer.value is None:
        what, hint = f"it answers with text that is not JSON{saying}", "check the address: an OpenAI-compatible server is needed"
    else:
        what, hint = f"its answer is not {wanted}{saying}", "an OpenAI-compatible server is needed"
    return EndpointRefused(f"the server answers, but {what}", where=endpoint.shown + path, hint=hint)
