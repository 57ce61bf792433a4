"""Answers of proxies and broken servers, byte by byte: each is a row with the right name, and nothing is sent again."""

from __future__ import annotations

import gzip
import json
import re
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_answers import Handler
from scripted_server import ScriptedServer

from pytest_kvcache.load import contract
from pytest_kvcache.load.contract import read_rows
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.records import RequestRow
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import Settings

Step = bytes | float | str


def chunk(text: str | None = None, **more: Any) -> bytes:
    choices = [{"index": 0, "text": text, "finish_reason": more.pop("finish", None)}] if text is not None else []
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


WORDS = [chunk(f" w{at}") for at in range(3)]
USAGE = chunk(" w3", finish="length") + chunk(usage={"prompt_tokens": 64, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"
WHOLE = b"".join(WORDS) + USAGE + DONE
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
NGINX = b"<html>\r\n<head><title>%s</title></head>\r\n<body><center><h1>%s</h1></center><hr><center>nginx/1.25.3</center></body></html>\r\n"


def answer(status: bytes, body: bytes, *headers: bytes) -> list[Step]:
    head = b"".join(line + b"\r\n" for line in (b"Content-Length: %d" % len(body), b"Connection: close", *headers))
    return [b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n" + body]


class RawServer(ScriptedServer):
    """Answers the preparation as the scripted server does, and the requests of the load by ``answers``: bytes, pauses, ``reset``."""

    def __init__(self, answers: Sequence[Sequence[Step]]) -> None:
        super().__init__()
        self.asked = 0
        owner, bound = self, self.http.RequestHandlerClass

        class Raw(bound):  # type: ignore[misc,valid-type]
            def _generate(self, body: Any, *, chat: bool) -> None:
                prompt = body.get("prompt")
                if not isinstance(prompt, list) or len(prompt) in (19, 47):
                    super()._generate(body, chat=chat)
                    return
                owner.asked += 1
                owner.play(self, answers[min(owner.asked, len(answers)) - 1])

        self.http.RequestHandlerClass = Raw

    @staticmethod
    def play(handler: Handler, steps: Sequence[Step]) -> None:
        handler.close_connection = True
        for step in steps:
            if isinstance(step, float):
                time.sleep(step)
            elif isinstance(step, str):
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                handler.connection.close()
                return
            else:
                handler.wfile.write(step)
                handler.wfile.flush()


def press(answers: Sequence[Sequence[Step]], folder: Path, *, timeout_s: float = 20.0, **more: Any) -> tuple[list[RequestRow], int]:
    """One user, one request after the other, each answered by the next of ``answers``."""
    server = RawServer(answers)
    with server:
        options = {"requests": len(answers), "histogram": "64:1", "stop_timeout_s": 2, "backoff_s": 0, **more}
        endpoint = parse_endpoint(server.url, Settings())
        result = run_load([endpoint], "normal", folder, users=1, output_tokens=4, request_timeout_s=timeout_s, options=options)
        asked = server.asked
        assert result.problems == []
    return sorted(read_rows(result.rows_path), key=lambda row: (row.id, row.attempt)), asked


PACKED = gzip.compress(WHOLE)
CASES: dict[str, tuple[list[Step], str, str]] = {
    "whole": ([STREAM + b"\r\n" + WHOLE], contract.OK, ""),
    "gzip": ([STREAM + b"Content-Encoding: gzip\r\n\r\n" + PACKED[:40], 0.05, PACKED[40:]], contract.OK, ""),
    "deflate": ([STREAM + b"Content-Encoding: deflate\r\n\r\n" + zlib.compress(WHOLE)], contract.OK, ""),
    "deflate without header": ([STREAM + b"Content-Encoding: deflate\r\n\r\n" + zlib.compress(WHOLE)[2:-4]], contract.OK, ""),
    "brotli": ([STREAM + b"Content-Encoding: br\r\n\r\n" + b"\x0b\x02"], contract.SERVER_ERROR, "packed (br)"),
    "broken gzip": ([STREAM + b"Content-Encoding: gzip\r\n\r\n" + b"nonsense that is no gzip at all"], contract.RESET, "cannot be read"),
    "gzip error": (answer(b"503 Busy", gzip.compress(b'{"error":{"message":"The request queue is full."}}'), b"Content-Encoding: gzip"), contract.QUEUE_FULL, "queue is full"),
    "200 and nothing": (answer(b"200 OK", b"", b"Content-Type: text/event-stream"), contract.TRUNCATED, "without any token"),
    "200 and silence": ([STREAM + b"\r\n", 4.0], contract.TIMEOUT, "no end within"),
    "stall that does not end": ([STREAM + b"\r\n" + WORDS[0], 4.0], contract.TIMEOUT, "no end within"),
    "reset": ([STREAM + b"\r\n" + WORDS[0], 0.05, "reset"], contract.RESET, "reset"),
    "reset after the end": ([STREAM + b"\r\n" + WHOLE[: -len(DONE)], 0.05, "reset"], contract.OK, ""),
    "cut in the middle": ([STREAM + b"Content-Length: 100000\r\n\r\n" + WORDS[0]], contract.TRUNCATED, "Incomplete response"),
    "no DONE and no usage": ([STREAM + b"\r\n" + b"".join(WORDS)], contract.TRUNCATED, "without finish_reason"),
    "stops early": ([STREAM + b"\r\n" + WORDS[0] + chunk(" w", finish="stop") + chunk(usage={"prompt_tokens": 64, "completion_tokens": 2}) + DONE], contract.STOPPED_EARLY, ""),
    "error frame": ([STREAM + b"\r\n" + WORDS[0] + b'data: {"error":{"message":"the sampler broke"}}\n\n' + DONE], contract.ERROR_IN_STREAM, "sampler"),
    "rate limit": (answer(b"429 Too Many Requests", b'{"error":{"message":"Rate limit reached","type":"rate_limit_error"}}'), contract.RATE_LIMITED, "Rate limit"),
    "redirect": (answer(b"302 Found", b"", b"Location: http://127.0.0.1:1/"), contract.SERVER_ERROR, "302"),
    "pings only": ([STREAM + b"\r\n" + b": ping\n\n" * 20], contract.TRUNCATED, "without any token"),
    "one byte at a time": ([STREAM + b"\r\n", *(bytes([byte]) for byte in WHOLE)], contract.OK, ""),
    "frame": ([STREAM + b"\r\n" + WORDS[0] + b'data: {"error":{"message":"The engine is currently busy","code":503}}\n\n' + DONE], contract.QUEUE_FULL, "busy"),
    "bare frame": ([STREAM + b"\r\n" + b'{"error":{"code":400,"message":"request (6009 tokens) exceeds the available context size (4096 tokens)","type":"exceed_context_size_error"}}'], contract.OVER_LENGTH, "6009"),
    "nginx 502": (answer(b"502 Bad Gateway", NGINX % (b"502 Bad Gateway", b"502 Bad Gateway"), b"Content-Type: text/html"), contract.SERVER_ERROR, "nginx"),
    "nginx 504": (answer(b"504 Gateway Time-out", NGINX % (b"504 Gateway Time-out", b"504 Gateway Time-out")), contract.TIMEOUT, "nginx"),
    "nginx 413": (answer(b"413 Request Entity Too Large", NGINX % (b"413 Request Entity Too Large", b"413")), contract.OVER_LENGTH, "413"),
    "envoy": (answer(b"503 Service Unavailable", b"upstream connect error", b"x-envoy-overloaded: true"), contract.QUEUE_FULL, "upstream"),
    "envoy overflow": (answer(b"503 Service Unavailable", b"upstream connect error or disconnect/reset before headers. reset reason: overflow"), contract.QUEUE_FULL, "overflow"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("slow", [False, True])
def test_every_answer_has_its_name_and_is_asked_for_once(slow: bool, tmp_path: Path) -> None:
    cases = {name: case for name, case in CASES.items() if (4.0 in case[0]) == slow}
    rows, asked = press([case[0] for case in cases.values()], tmp_path, timeout_s=1.0 if slow else 20.0)
    assert asked == len(rows) == len(cases)
    found = {name: (row.outcome, row.error) for name, row in zip(cases, rows, strict=True)}
    assert {name: outcome for name, (outcome, _) in found.items()} == {name: case[1] for name, case in cases.items()}
    for name, (_, _, shown) in cases.items():
        assert shown in found[name][1], found[name]
    for row in rows:
        if row.outcome == contract.OK:
            assert (row.completion_tokens, row.chunks, row.prompt_tokens) == (4, 4, 64)


def test_a_stall_is_the_longest_gap_and_says_when_it_began(tmp_path: Path) -> None:
    (row,), _ = press([[STREAM + b"\r\n" + WORDS[0], 0.05, WORDS[1], 0.6, WORDS[2] + USAGE + DONE]], tmp_path)
    assert row.outcome == contract.OK
    assert row.longest_gap_s == pytest.approx(0.6, abs=0.1)
    assert row.first_token_s is not None
    assert row.longest_gap_at_s is not None
    assert row.longest_gap_at_s - row.first_token_s == pytest.approx(0.05, abs=0.04)


def test_retry_after_is_recorded_and_not_obeyed(tmp_path: Path) -> None:
    (row,), asked = press([answer(b"429 Too Many Requests", b'{"error":"slow down"}', b"Retry-After: 7")], tmp_path)
    assert (row.outcome, row.retry_after_s, asked) == (contract.RATE_LIMITED, 7.0, 1)


REFUSED = answer(b"503 Service Unavailable", b'{"error":{"message":"The request queue is full."}}')
GOOD = [STREAM + b"\r\n" + WHOLE]


def test_a_refused_request_is_sent_again_where_that_was_asked_for(tmp_path: Path) -> None:
    wait = answer(b"429 Too Many Requests", b'{"error":"slow down"}', b"Retry-After: 0.3")
    rows, asked = press([REFUSED, wait, GOOD, GOOD], tmp_path, requests=2, retries=2, backoff_s=0.05)
    first, second, third, other = rows
    assert asked == 4
    assert [(row.id, row.attempt, row.outcome) for row in rows] == [
        (0, 0, contract.QUEUE_FULL), (0, 1, contract.RATE_LIMITED), (0, 2, contract.OK), (1, 0, contract.OK),
    ]  # fmt: skip
    assert first.prompt_tokens_planned == second.prompt_tokens_planned == third.prompt_tokens_planned
    assert second.sent_s - first.end_s >= 0.05
    assert third.sent_s - second.end_s >= 0.3, "what the server asks for counts more than our own pause"
    assert first.first_intended_s is None
    assert second.first_intended_s == third.first_intended_s == first.intended_s, "how long its user waited in all is known"
    assert other.intended_s >= third.end_s
    again = re.search(r"^AGAIN +sent again, answered normal +(\d+) +0\(0\.00%\) \| +(\d+) ", (tmp_path / "locust.log").read_text(), re.MULTILINE)
    assert again is not None, "Locust's summary tells how many were answered after they were sent again, and how long they waited in all"
    assert int(again[1]) == 1
    assert int(again[2]) == pytest.approx((third.end_s - first.intended_s) * 1e3, abs=2)


def test_retries_end(tmp_path: Path) -> None:
    rows, asked = press([REFUSED, REFUSED, REFUSED, GOOD], tmp_path, requests=2, retries=2)
    assert asked == 4
    assert [(row.id, row.attempt, row.outcome) for row in rows][2:] == [(0, 2, contract.QUEUE_FULL), (1, 0, contract.OK)]


def test_what_is_wrong_with_the_request_or_has_begun_is_not_sent_again(tmp_path: Path) -> None:
    too_long = answer(b"400 Bad Request", b'{"error":{"message":"This model\'s maximum context length is 64 tokens."}}')
    later = answer(b"429 Too Many Requests", b"", b"Retry-After: 3600")
    cut: list[Step] = [STREAM + b"\r\n" + WORDS[0], "reset"]
    rows, asked = press([too_long, cut, later], tmp_path, retries=5)
    assert asked == 3
    assert [row.attempt for row in rows] == [0, 0, 0]
    assert [row.outcome for row in rows] == [contract.OVER_LENGTH, contract.RESET, contract.RATE_LIMITED]
