"""A fast OpenAI-compatible streaming server that computes nothing: what is left is the cost of the client.

usage: python benchmarks/mock_sse.py PORT TOKENS TTFT_S ITL_S

Every answer streams up to TOKENS chunks, the first after TTFT_S seconds and then one each ITL_S. ``prompt_tokens`` of its usage
is a quarter of the body's bytes, so lengths are not exact against it. GET /stats tells the median of the time to first token
that it really kept, from reading a request to writing its first chunk, since the last time it was asked. Standard library only; uvloop where it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from typing import Any


def sse(value: Any) -> bytes:
    """Return an event as one chunk of a chunked body."""
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    return b"%x\r\n" % len(data) + data + b"\r\n"


def token(chat: bool, last: bool) -> bytes:
    """Return the chunk of one token."""
    part: dict[str, Any] = {"delta": {"role": "assistant", "content": " tok"}} if chat else {"text": " tok"}
    kind = "chat.completion.chunk" if chat else "text_completion"
    choice = {"index": 0, **part, "finish_reason": "length" if last else None}
    return sse({"id": "c", "object": kind, "created": 1, "model": "mock", "choices": [choice]})


def plain(status: bytes, kind: bytes, body: bytes) -> bytes:
    """Return a whole answer."""
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (status, kind, len(body)) + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_TAIL = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
TOKEN = {(chat, last): token(chat, last) for chat in (False, True) for last in (False, True)}
MODEL = {"id": "mock", "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 32768}


class Mock:
    """The server's settings and the handler of one connection."""

    def __init__(self, tokens: int, ttft_s: float, itl_s: float) -> None:
        self.tokens, self.ttft_s, self.itl_s = tokens, ttft_s, itl_s
        self.kept: list[float] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it closes."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path = head.split(b" ", 2)[:2]
                at = head.lower().find(b"content-length:")
                size = int(head[at + 15 : head.index(b"\r\n", at)]) if at >= 0 else 0
                body = await reader.readexactly(size) if size else b""
                if method == b"POST" and b"completions" in path:
                    await self.complete(writer, body, chat=b"chat" in path)
                elif path == b"/v1/models":
                    writer.write(plain(b"200 OK", b"application/json", json.dumps({"object": "list", "data": [MODEL]}).encode()))
                elif path == b"/stats":
                    median = statistics.median(self.kept) if self.kept else 0.0
                    self.kept.clear()
                    writer.write(plain(b"200 OK", b"application/json", json.dumps({"ttft_s": median}).encode()))
                else:
                    writer.write(plain(b"404 Not Found", b"application/json", b'{"error":{"message":"not here","code":404}}'))
                await writer.drain()
        writer.close()

    async def complete(self, writer: asyncio.StreamWriter, body: bytes, *, chat: bool) -> None:
        """Stream one answer."""
        came_s = time.monotonic()
        asked = json.loads(body)
        count = min(int(asked.get("max_tokens") or self.tokens), self.tokens)
        prompt = max(1, len(body) // 4)
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        middle, last = TOKEN[chat, False], TOKEN[chat, True]
        writer.write(STREAM_HEAD)
        if self.ttft_s:
            await asyncio.sleep(self.ttft_s)
        self.kept.append(time.monotonic() - came_s)
        for index in range(count):
            writer.write(last if index == count - 1 else middle)
            if self.itl_s:
                await asyncio.sleep(self.itl_s)
            elif index % 16 == 15:
                await writer.drain()
        writer.write(sse({"id": "c", "object": "x", "created": 1, "model": "mock", "choices": [], "usage": usage}) + STREAM_TAIL)


async def serve(port: int, mock: Mock) -> None:
    """Serve on loopback until the process is stopped."""
    server = await asyncio.start_server(mock.handle, "127.0.0.1", port, limit=2**24, backlog=4096)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Read the command line and serve."""
    with contextlib.suppress(ImportError):
        import uvloop  # type: ignore[import-not-found]

        uvloop.install()
    port, tokens, ttft_s, itl_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(port, Mock(tokens, ttft_s, itl_s)))


if __name__ == "__main__":
    main()
