"""Failures by their name: from status, body, headers and exception to one class, a short text, and Retry-After in seconds.

Classes are those of contract.py. A refusal is classed by what it means, not by the status it came with: vLLM says "busy" with
503, or with 200 and a frame when it streams; TGI and the simulator with 429; a proxy with a header.
"""

from __future__ import annotations

import html
import math
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import msgspec

from pytest_kvcache.load import contract
from pytest_kvcache.server.redaction import redact

ERROR_TEXT_LIMIT = 500
BODY_LIMIT = 65_536

# Seen in vLLM 0.8 to 0.32, SGLang 0.5, llama.cpp, TGI 3.3, TensorRT-LLM 1.x, LMDeploy 0.16, llm-d-inference-sim 0.10, Dynamo, Ray Serve, Triton.
_OVER_LENGTH = re.compile(
    r"maximum context length|model'?s? context length|available context size|exceed_context_size_error"
    r"|exceeds the maximum allowed length|should not exceed max_num_tokens|longer than the maximum model length"
    r"|cannot be greater than max_model_len|max_(?:completion_)?tokens must be at least 1, got 0|(?:max_tokens|max_completion_tokens)' .{0,40}is too large"
    r"|max_new_tokens` must be <=|`inputs` must have less than|context_length_exceeded|prompt is too long|input is too long"
    r"|upper bound for \d+ input tokens",
    re.IGNORECASE,
)
_QUEUE_FULL = re.compile(
    r"queue (?:is )?full|engine is currently busy|backlog limit|overload|no (?:available |free )?capacity|server is busy|at capacity"
    r"|reset reason: overflow|workers are busy|backpressure|maximum queue (?:size|length)|aborted by a higher priority|system saturated"
    r"|too many (?:concurrent|pending|queued|waiting)|max(?:imum)? (?:number of )?(?:queued|concurrent|pending)",
    re.IGNORECASE,
)
_RATE = re.compile(r"rate.?limit|quota|too many requests|tokens per (?:minute|day)|requests per (?:minute|second|day)", re.IGNORECASE)
_HTML = re.compile(rb"\s*<(?:!doctype|html|head|\?xml)", re.IGNORECASE)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>|<h1[^>]*>(.*?)</h1>", re.IGNORECASE | re.DOTALL)
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]+")

# The numbers that refusals of the same engines state. Newer vLLM prints its limit less the tokens asked for in some of them.
_LIMIT = re.compile(
    r"(?:maximum context length is|max_model_len=|context length \(|allowed length \(|context size \(|must be <=|max_num_tokens \()\s*(\d+)"
)
_PROMPT = re.compile(
    r"(?:\(|contains at least |contains |request has |input \(|Input length \(|request \(|Given: |prompt length \()"
    r"(\d+)(?:\.0)?(?=\)| in the messages| in the prompt| input tokens| tokens\)| `inputs`)"
)
_OUTPUT = re.compile(r"(\d+)(?= in the completion)|(?:too large: |max_tokens=|max_new_tokens=)(\d+)|(\d+)(?= `max_new_tokens`)")

_TIMEOUT_STATUS = frozenset({408, 504, 522, 524})
_AUTH_STATUS = frozenset({401, 403, 407})


class Said(NamedTuple):
    """What a refusal says of lengths, in tokens: the longest, the prompt's, and what was asked for; None where it does not say."""

    limit: int | None
    prompt: int | None
    output: int | None


def said_lengths(text: str) -> Said:
    """Return the lengths that the text of an ``over_length`` refusal states."""

    def first(pattern: re.Pattern[str]) -> int | None:
        found = pattern.search(text)
        return int(next(group for group in found.groups() if group)) if found else None

    return Said(first(_LIMIT), first(_PROMPT), first(_OUTPUT))


def clean_text(text: str, limit: int = ERROR_TEXT_LIMIT) -> str:
    """Return one printable line of at most ``limit`` characters: no control characters, escape sequences, direction marks or keys."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text[: 4 * limit])
    return redact(" ".join(_UNPRINTABLE.sub(" ", text).split()))[:limit]


def retry_after_s(value: str | None, now: float | None = None) -> float | None:
    """Return a Retry-After header as seconds from now: a number or an HTTP date. None where there is none that can be meant."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - (time.time() if now is None else now)
        except (ValueError, TypeError, OverflowError, IndexError):
            return None
    if not math.isfinite(seconds):
        return None
    return min(max(seconds, 0.0), 1e7)


def error_of(body: Any) -> tuple[str, int | None] | None:
    """Return (message, code) of a decoded JSON error body or frame, nested or flat; None where it is no error."""
    if not isinstance(body, dict):
        return None
    error: Any = body.get("error")
    if error is None:
        flat = body.get("object") == "error" or ("message" in body and ("code" in body or "type" in body)) or "detail" in body
        error = body if flat and "choices" not in body else None
    if error is None:
        return None
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or error.get("msg") or error
        code = error.get("code", body.get("code"))
        kind = error.get("type")
        text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
        # llama.cpp names its refusal in the type, other engines repeat an exception's name there
        if isinstance(kind, str) and "exceed_context" in kind:
            text = f"{text} ({kind})"
    else:
        text = error if isinstance(error, str) else str(error)
        code = body.get("code")
    if isinstance(code, str) and re.fullmatch("[1-5][0-9]{2}", code):
        code = int(code)  # as gateways write it
    return text, code if isinstance(code, int) and not isinstance(code, bool) else None


def body_text(body: bytes | str) -> tuple[str, int | None]:
    """Return (readable text, code) of an error body: JSON of any engine, HTML of a proxy by its title, or plain text."""
    raw = (body.encode("utf-8", "replace") if isinstance(body, str) else bytes(body))[:BODY_LIMIT]
    if not raw.strip():
        return "", None
    if _HTML.match(raw):
        page = raw.decode("utf-8", "replace")
        title = _TITLE.search(page)
        shown = html.unescape(next((group for group in title.groups() if group), "")) if title else "no title"
        return f"{clean_text(shown, 200)} (an HTML page{', nginx' if 'nginx' in page else ''})", None
    try:
        found = error_of(msgspec.json.decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    if found is not None:
        return found
    return raw.decode("utf-8", "replace"), None


def _by_exception(exception: str, in_stream: bool) -> str:
    name = exception.split(":", 1)[0].rsplit(".", 1)[-1]
    if "Timeout" in name or name == "timeout":
        return contract.TIMEOUT
    if name == "ConnectionRefusedError" or name in {"gaierror", "herror"} or "SSL" in name or "Cert" in name:
        return contract.RESET if in_stream else contract.REFUSED_CONNECTION
    if name in {"ConnectionResetError", "BrokenPipeError", "ConnectionAbortedError", "HTTPConnectionClosed"}:
        return contract.RESET
    if name in {"HTTPParseError", "HTTPProtocolViolationError", "IncompleteRead"}:
        return contract.TRUNCATED if in_stream else contract.RESET
    unreachable = "No route" in exception or "unreachable" in exception.lower() or name == "RuntimeError"
    if unreachable and not in_stream:
        return contract.REFUSED_CONNECTION
    return contract.RESET


def _by_text(text: str) -> str | None:
    # The queue is looked at first: "queue is full" names its cause even where the type says RateLimitError.
    if _OVER_LENGTH.search(text):
        return contract.OVER_LENGTH
    if _QUEUE_FULL.search(text):
        return contract.QUEUE_FULL
    return None


def _by_status(status: int, text: str, headers: Mapping[str, str]) -> str:
    meaning = _by_text(text)
    # "Context size has been exceeded" with 500 is llama.cpp's shared pool running dry for everybody: the server's fault, not the prompt's
    if 400 <= status < 500 and meaning is not None:
        return meaning
    if status == 413:
        return contract.OVER_LENGTH
    if status == 429:
        return contract.RATE_LIMITED
    if status in _AUTH_STATUS:
        return contract.REFUSED_AUTH
    if status in _TIMEOUT_STATUS:
        return contract.TIMEOUT
    if status == 529 or (status >= 500 and (meaning == contract.QUEUE_FULL or headers.get("x-envoy-overloaded"))):
        return contract.QUEUE_FULL
    if status >= 500 and _RATE.search(text):
        return contract.RATE_LIMITED
    if 400 <= status < 500:
        return contract.BAD_REQUEST
    return contract.SERVER_ERROR


def classify(
    status: int,
    body: bytes | str = b"",
    headers: Mapping[str, str] | None = None,
    *,
    in_stream: bool = False,
    exception: str | None = None,
) -> tuple[str, str, float | None]:
    """Return (class, error text of at most 500 characters, Retry-After in seconds or None) of a request that failed.

    ``body`` is the error body, or with ``in_stream`` the payload of the error frame; ``exception`` is ``"TypeName: message"``
    where the connection failed, and then ``in_stream`` says that the answer had begun. ``headers`` are by lower-case name.
    """
    headers = headers or {}
    wait_s = retry_after_s(headers.get("retry-after"))
    if exception is not None:
        return _by_exception(exception, in_stream), clean_text(exception), wait_s
    text, code = body_text(body)
    shown = clean_text(text)
    if in_stream:
        by_meaning = _by_text(text)
        if by_meaning is None and (code == 429 or _RATE.search(text)):
            by_meaning = contract.RATE_LIMITED
        return by_meaning or contract.ERROR_IN_STREAM, clean_text(f"in the stream: {shown or 'an error frame without text'}"), wait_s
    if status < 400:
        # an error that hides behind a 200: its own code says what it is, else its words
        found = _by_status(code, text, headers) if code is not None and 400 <= code < 600 else _by_text(text) or contract.SERVER_ERROR
    else:
        found = _by_status(status, text, headers)
    if found == contract.SERVER_ERROR and status < 400:
        shown = f"HTTP {status} that is no event stream: {shown or 'an empty body'}"
    return found, clean_text(shown or f"HTTP {status} with an empty body"), wait_s
