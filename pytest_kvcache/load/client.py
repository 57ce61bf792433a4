"""The HTTP client of the load: geventhttpclient, one connection a user, no redirects, TLS verified, gzip not asked for.

Only the load process imports this. A streamed body is taken as it comes from the socket, whole reads at a time: the
library's own readline copies each line and knows no limit of its length.
"""

from __future__ import annotations

import ssl
import zlib
from collections.abc import Callable
from functools import lru_cache
from time import monotonic
from typing import Any
from urllib.parse import unquote, urlsplit

import gevent
from gevent.ssl import SSLContext, create_default_context
from geventhttpclient.client import HTTPClient
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError

from pytest_kvcache.errors import EndpointUnreachable, UsageError
from pytest_kvcache.load.arriving import arrivals_are_stamped, receive
from pytest_kvcache.load.asking import Answer
from pytest_kvcache.load.rejections import clean_text
from pytest_kvcache.load.sse import Stream
from pytest_kvcache.load.target import Target
from pytest_kvcache.userfiles import bundle

READ_SIZE = 65_536
ERROR_BODY_LIMIT = 65_536
WHOLE_BODY_LIMIT = 32 * 2**20
STREAM_LIMIT = 2**30
CONNECT_TIMEOUT_S = 10.0
AFTER_DONE_S = 2.0
UNPACKED_LIMIT = 16 * 2**20
PACKINGS = frozenset({"gzip", "x-gzip", "deflate"})

FAILURES = (OSError, HTTPParseError, RuntimeError, ValueError)


@lru_cache(maxsize=8)
def _context(ca: str) -> SSLContext:
    """Return one TLS context for all users: reading a bundle takes 20 ms. Raises UsageError."""
    try:
        return create_default_context(**(bundle(ca) if ca else {}))
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"the CA bundle cannot be read: {error}", where=ca, hint="name a PEM file with --kv-ca") from None


def _factory(ca: str) -> Callable[..., SSLContext]:
    context = _context(ca)

    def factory(**_: Any) -> SSLContext:
        return context

    return factory


def connect(target: Target) -> HTTPClient:
    """Return a client of one connection, which is opened by its first request and kept. Raises UsageError for a bad CA bundle.

    It has no timeout of its own after connecting: each request is bounded as a whole by its caller, which costs one timer a
    request instead of one a read.
    """
    parts = urlsplit(target.root)
    proxy = urlsplit(target.proxy) if target.proxy else None
    secure = parts.scheme == "https"
    return HTTPClient(
        parts.hostname or "",
        port=parts.port,
        ssl=secure,
        ssl_options={} if secure else None,
        ssl_context_factory=_factory(target.ca) if secure else None,
        concurrency=1,
        block_size=READ_SIZE,
        network_timeout=None,  # type: ignore[arg-type]
        connection_timeout=CONNECT_TIMEOUT_S,
        proxy_host=proxy.hostname if proxy else None,
        proxy_port=(proxy.port or 8080) if proxy else None,
        proxy_user=unquote(proxy.username) if proxy and proxy.username else None,
        proxy_password=unquote(proxy.password) if proxy and proxy.password else None,
    )


def headers_of(response: Any) -> dict[str, str]:
    """Return the headers of an answer by lower-case name; of a repeated one the last."""
    return {str(name).lower(): str(value) for name, value in response.items()}


class Unpacker:
    """Unpacks a body that a proxy packed unasked (gzip, deflate), block by block as it comes."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=47)
        self._first = True

    def __call__(self, block: bytes) -> bytes:
        """Return what a block adds, at most 16 MiB. Raises ValueError where it cannot be unpacked or grows beyond that."""
        try:
            plain = self._zlib.decompress(block, UNPACKED_LIMIT)
        except zlib.error as error:
            if not self._first:
                raise ValueError(f"the packed answer cannot be read: {error}") from None
            # deflate without its header, as some servers send it
            self._zlib = zlib.decompressobj(wbits=-15)
            try:
                plain = self._zlib.decompress(block, UNPACKED_LIMIT)
            except zlib.error:
                raise ValueError(f"the packed answer cannot be read: {error}") from None
        self._first = False
        if self._zlib.unconsumed_tail:
            raise ValueError("the packed answer grows beyond all bounds")
        return plain


def unpacker(response: Any) -> Unpacker | None:
    """Return what unpacks the body of an answer, None where it is not packed. Raises ValueError for a packing that we do not know."""
    packing = str(response.get("content-encoding") or "identity").strip().lower()
    if packing == "identity":
        return None
    if packing in PACKINGS:
        return Unpacker()
    raise ValueError(f"the answer is packed ({packing[:20]}) though nobody asked for that")


def pump(response: Any, stream: Stream, unpack: Unpacker | None = None) -> None:
    """Feed a stream from the response until its body ends; after [DONE] at most two seconds more.

    The time of the first token is the one at which its packet reached this machine, where the kernel tells it: a busy client reads it
    later. Raises OSError or HTTPParseError where the connection breaks, ValueError where an event or the stream grows beyond all bounds.
    """
    buffer = response._body_buffer
    feed, take = response.feed, stream.feed
    stamped = arrivals_are_stamped(response._sock)
    came_s = 0.0
    while True:
        if buffer:
            block = bytes(buffer)
            buffer.clear()
            take(block if unpack is None else unpack(block), came_s or monotonic())
            if stream.done and not response.message_complete:
                _end_politely(response)
                return
            if stream.size > STREAM_LIMIT:
                raise ValueError("the stream is longer than 1 GiB")
            continue
        if response.message_complete:
            return
        sock = response._sock
        if sock is None:
            raise HTTPConnectionClosed("connection closed.")
        if stamped and stream.first_token_s is None:
            data, came_s = receive(sock)
        else:
            data, came_s = sock.recv(READ_SIZE), 0.0
        feed(data)
        if not data and not response.message_complete:
            raise HTTPParseError("connection closed before end of the body")


def _end_politely(response: Any) -> None:
    """Read what follows [DONE], normally the last chunk of the body, so that the connection can be used again."""
    with gevent.Timeout(AFTER_DONE_S, False):
        try:
            while not response.message_complete and response._sock is not None and len(response._body_buffer) < READ_SIZE:
                data = response._sock.recv(READ_SIZE)
                response.feed(data)
                if not data:
                    break
        except (OSError, HTTPParseError):
            pass
    if not response.message_complete:
        response.release()


def read_body(response: Any, limit: int = ERROR_BODY_LIMIT) -> bytes:
    """Return at most ``limit`` bytes of a body; a longer one is cut and its connection closed."""
    parts = bytearray()
    buffer = response._body_buffer
    while True:
        if buffer:
            parts += buffer
            buffer.clear()
            if len(parts) > limit:
                response.release()
                return bytes(parts[:limit])
            continue
        if response.message_complete or response._sock is None:
            return bytes(parts)
        data = response._sock.recv(READ_SIZE)
        response.feed(data)
        if not data:
            return bytes(parts)


class Asker:
    """Sends the requests before the load, one connection each: few of them, and none may hang."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s

    def __call__(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """Return the answer. Raises EndpointUnreachable where nobody answers in time."""
        target = self.target
        client = connect(target)
        where = target.root + path
        timer = gevent.Timeout(self.timeout_s)
        timer.start()
        try:
            response = client.request(method, target.prefix + path, body or b"", target.request_headers())
            return Answer(response.get_code(), read_body(response, WHOLE_BODY_LIMIT), headers_of(response))
        except gevent.Timeout as fired:
            if fired is not timer:
                raise
            raise EndpointUnreachable(
                f"no answer within {self.timeout_s:g} s", where=where, hint="check that the server is up, or raise --kv-request-timeout-s"
            ) from None
        except FAILURES as error:
            what = clean_text(f"{type(error).__name__}: {error}", 300)
            raise EndpointUnreachable(f"nobody answers: {what}", where=where, hint="check the address and that the server is up") from None
        finally:
            timer.close()
            client.close()
