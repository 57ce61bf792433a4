"""A reverse proxy on loopback that streams, with the policies of real balancers: sticky by client, and round robin."""

from __future__ import annotations

import http.client
import itertools
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from loopback_http import LoopbackHttp

STICKY, ROUND_ROBIN = "sticky", "round-robin"
_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "host"}


class ForwardingProxy(LoopbackHttp):
    """Forwards each request to one of ``roots``: all of one client address to the same (sticky), or to each in turn. A context manager."""

    def __init__(self, roots: Sequence[str], policy: str) -> None:
        self.sent = [0] * len(roots)
        turns = itertools.count()
        lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    index = sum(map(int, self.client_address[0].split("."))) % len(roots) if policy == STICKY else next(turns) % len(roots)
                    owner.sent[index] += 1
                target = urlsplit(roots[index])
                assert target.hostname is not None
                upstream = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
                try:
                    headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
                    upstream.request(self.command, self.path, body=body or None, headers=headers)
                    answer = upstream.getresponse()
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in _HOP:
                            self.send_header(name, value)
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    while piece := answer.read1(65536):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.write(b"0\r\n\r\n")
                except (OSError, http.client.HTTPException):
                    self.close_connection = True
                finally:
                    upstream.close()

            do_GET = do_POST = forward  # noqa: N815 -- the names that http.server calls

        super().__init__(Handler)
