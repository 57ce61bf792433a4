"""Failures by their name, for every engine and proxy that we have a body of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.load import contract
from pytest_kvcache.load.rejections import body_text, classify, clean_text, retry_after_s, said_lengths

ERRORS = [json.loads(line) for line in (Path(__file__).parent / "errors.jsonl").read_text().splitlines()]
EXPECTED = {
    "vllm": {"queue_full": contract.QUEUE_FULL, "prefill_backlog_full": contract.QUEUE_FULL},
    "sglang": {"queue_full (--max-queued-requests)": contract.QUEUE_FULL},
    "llamacpp": {
        "unified_pool_exhausted_mid_decode (all slots fail)": contract.SERVER_ERROR,
        "metrics_disabled": contract.SERVER_ERROR,
    },
    "tgi": {"overloaded": contract.QUEUE_FULL},
    "llm-d-inference-sim": {"queue_full": contract.QUEUE_FULL},
}
NGINX_502 = b"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body><center><h1>502 Bad Gateway</h1></center><hr><center>nginx</center></body></html>"
NGINX_504 = NGINX_502.replace(b"502 Bad Gateway", b"504 Gateway Time-out")
NGINX_413 = NGINX_502.replace(b"502 Bad Gateway", b"413 Request Entity Too Large")


@pytest.mark.parametrize("case", [case for case in ERRORS if "body" in case], ids=lambda c: f"{c['engine']}-{c['version']}-{c['case']}")
def test_every_recorded_refusal_has_its_class(case: dict[str, Any]) -> None:
    outcome, error, wait_s = classify(case["status"], json.dumps(case["body"]))
    assert outcome == EXPECTED.get(case["engine"], {}).get(case["case"], contract.OVER_LENGTH)
    assert error
    assert "{" not in error
    assert wait_s is None


@pytest.mark.parametrize(
    ("status", "body", "headers", "outcome", "shown"),
    [
        (502, NGINX_502, {}, contract.SERVER_ERROR, "502 Bad Gateway (an HTML page, nginx)"),
        (504, NGINX_504, {}, contract.TIMEOUT, "504 Gateway Time-out (an HTML page, nginx)"),
        (413, NGINX_413, {}, contract.OVER_LENGTH, "413 Request Entity Too Large (an HTML page, nginx)"),
        (503, b"upstream connect error", {"x-envoy-overloaded": "true"}, contract.QUEUE_FULL, "upstream connect error"),
        (503, b"upstream connect error or disconnect/reset before headers. reset reason: overflow", {}, contract.QUEUE_FULL, "upstream"),
        (503, b'{"message":"Service temporarily unavailable: All workers are busy, please retry later","type":"service_unavailable","code":503}', {}, contract.QUEUE_FULL, "workers are busy"),
        (503, b"Request dropped due to backpressure (num_queued_requests=2, max_queued_requests=2).", {}, contract.QUEUE_FULL, "backpressure"),
        (503, b'{"error":"Exceeds maximum queue size"}', {}, contract.QUEUE_FULL, "maximum queue size"),
        (503, b'{"object":"error","message":"The request is aborted by a higher priority request.","code":503}', {}, contract.QUEUE_FULL, "higher"),
        (429, b"inference gateway: InferencePoolResourceExhausted - system saturated, non-critical request dropped", {}, contract.QUEUE_FULL, "saturated"),
        (200, b'{"error":{"message":"slow down","type":"None","code":"429"}}', {}, contract.RATE_LIMITED, "slow down"),
        (503, b"no healthy upstream", {}, contract.SERVER_ERROR, "no healthy upstream"),
        (503, b'{"error":{"message":"Loading model","code":503}}', {}, contract.SERVER_ERROR, "Loading model"),
        (429, b'{"error":{"message":"Rate limit reached for requests","type":"requests","code":"rate_limit_exceeded"}}', {}, contract.RATE_LIMITED, "Rate"),
        (429, b"", {}, contract.RATE_LIMITED, "HTTP 429 with an empty body"),
        (503, b'{"detail":"You exceeded your quota"}', {}, contract.RATE_LIMITED, "quota"),
        (529, b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}', {}, contract.QUEUE_FULL, "Overloaded"),
        (401, b'{"error":"Unauthorized"}', {}, contract.REFUSED_AUTH, "Unauthorized"),
        (403, b"", {}, contract.REFUSED_AUTH, "HTTP 403"),
        (404, b'{"detail":"Not Found"}', {}, contract.BAD_REQUEST, "Not Found"),
        (422, b'{"detail":[{"loc":["body","prompt"],"msg":"field required"}]}', {}, contract.BAD_REQUEST, "field required"),
        (400, b'{"error":{"message":"temperature must be non-negative","code":400}}', {}, contract.BAD_REQUEST, "temperature"),
        (408, b"", {}, contract.TIMEOUT, "HTTP 408"),
        (524, b"", {}, contract.TIMEOUT, "HTTP 524"),
        (500, b"Internal Server Error", {}, contract.SERVER_ERROR, "Internal Server Error"),
        (500, b'{"error":{"message":"the context length is fine, the GPU is not","code":500}}', {}, contract.SERVER_ERROR, "GPU"),
        (302, b"", {"location": "https://elsewhere/"}, contract.SERVER_ERROR, "HTTP 302 that is no event stream"),
        (200, b"<!DOCTYPE html><title>Log in</title>", {}, contract.SERVER_ERROR, "Log in (an HTML page)"),
        (200, b'{"error":{"message":"The request queue is full.","code":503}}', {}, contract.QUEUE_FULL, "queue is full"),
        (200, b'{"error":"no such model"}', {}, contract.SERVER_ERROR, "no such model"),
    ],
)  # fmt: skip
def test_proxies_gateways_and_plain_statuses_have_their_class(status: int, body: bytes, headers: dict[str, str], outcome: str, shown: str) -> None:
    found, error, _ = classify(status, body, headers)
    assert found == outcome
    assert shown in error


@pytest.mark.parametrize(
    ("exception", "in_stream", "outcome"),
    [
        ("ConnectionRefusedError: [Errno 111] Connection refused", False, contract.REFUSED_CONNECTION),
        ("gaierror: [Errno -2] Name or service not known", False, contract.REFUSED_CONNECTION),
        ("OSError: [Errno 113] No route to host", False, contract.REFUSED_CONNECTION),
        ("SSLCertVerificationError: certificate verify failed", False, contract.REFUSED_CONNECTION),
        ("RuntimeError: Proxy CONNECT failed: HTTP/1.1 407", False, contract.REFUSED_CONNECTION),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True, contract.RESET),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False, contract.RESET),
        ("HTTPConnectionClosed: connection closed.", False, contract.RESET),
        ("BrokenPipeError: [Errno 32] Broken pipe", False, contract.RESET),
        ("HTTPParseError: Incomplete response.", True, contract.TRUNCATED),
        ("HTTPParseError: Expected HTTP/", False, contract.RESET),
        ("Timeout: no end within 300 s", True, contract.TIMEOUT),
        ("TimeoutError: timed out", False, contract.TIMEOUT),
    ],
)
def test_broken_connections_have_their_class(exception: str, in_stream: bool, outcome: str) -> None:
    assert classify(0, exception=exception, in_stream=in_stream) == (outcome, exception, None)


@pytest.mark.parametrize(
    ("frame", "outcome"),
    [
        ({"error": {"message": "Rate limit reached", "code": 429}}, contract.RATE_LIMITED),
        ({"error": {"message": "no", "code": 429}}, contract.RATE_LIMITED),
        ({"error": {"message": "Context size has been exceeded.", "type": "server_error", "code": 500}}, contract.ERROR_IN_STREAM),
        ({"error": {}}, contract.ERROR_IN_STREAM),
    ],
)
def test_frames_in_a_stream_are_classed_by_meaning_before_place(frame: dict[str, Any], outcome: str) -> None:
    assert classify(200, json.dumps(frame), in_stream=True)[0] == outcome


def test_retry_after_is_read_as_seconds_and_as_a_date() -> None:
    assert classify(429, b"", {"retry-after": "2.5"})[2] == 2.5
    assert retry_after_s("Fri, 31 Dec 1999 23:59:59 GMT", now=946684799.0 - 30) == pytest.approx(30)
    assert retry_after_s("Fri, 31 Dec 1999 23:59:59 GMT") == 0.0
    for nonsense in ("soon", "", "nan", "inf", "-inf", None):
        assert retry_after_s(nonsense) is None
    assert retry_after_s("-5") == 0.0


def test_error_text_is_short_printable_and_holds_no_key() -> None:
    text = classify(500, "\x1b[31mred\x07\n\n\u202e back Bearer sk-abcdefghijklmnop1234 " + "x" * 5000)[1]
    assert len(text) <= 500
    assert text.isprintable()
    assert "sk-abc" not in text
    assert clean_text("a\x00b\u2028c") == "a b c"


@given(st.integers(0, 999), st.binary(max_size=300), st.booleans(), st.one_of(st.none(), st.text(max_size=40)))
def test_nothing_that_a_server_says_breaks_the_classes(status: int, body: bytes, in_stream: bool, exception: str | None) -> None:
    outcome, text, wait_s = classify(status, body, {"retry-after": body.decode("latin-1")}, in_stream=in_stream, exception=exception)
    assert outcome in contract.REJECTIONS
    assert len(text) <= 500
    assert wait_s is None or wait_s >= 0


SAID = {
    ("vllm", "prompt_over_max_model_len"): (4096, 5001, None), ("vllm", "max_tokens_over_max_model_len"): (4096, None, 5000),
    ("vllm", "max_tokens_too_large"): (32768, 1200, 32000), ("vllm", "prompt_plus_max_tokens_over"): (2048, 1699, 1024),
    ("sglang", "prompt_over_context"): (8192, 12345, None), ("sglang", "prompt_over_kv_pool (max_req_input_len)"): (536826, 700001, None),
    ("llamacpp", "prompt_over_slot_ctx"): (8192, 9000, None), ("tgi", "input_plus_new_over"): (4096, 4000, 200),
    ("trtllm-serve", "prompt_over_max_num_tokens"): (32768, 38049, None), ("lmdeploy", "prompt_over_session_len"): (32768, 40000, None),
    ("llm-d-inference-sim", "over_len"): (1024, 1000, 200),
}  # fmt: skip


def test_the_lengths_that_refusals_state_are_read() -> None:
    found = {(case["engine"], case["case"]): said_lengths(body_text(json.dumps(case["body"]))[0]) for case in ERRORS if "body" in case}
    assert {name: tuple(found[name]) for name in SAID} == SAID
    assert tuple(found["tgi", "overloaded"]) == (None, None, None)
