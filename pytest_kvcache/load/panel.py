"""The KV cache beside a load that was started by hand: a page of its own in Locust's web server, and a line on the console.

Only the process that people look at reads the servers' telemetry: the one process of a load, or the master of several. A load that
pytest-kvcache started has a sampler outside, and no panel.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gevent

from pytest_kvcache.errors import KvError
from pytest_kvcache.load.flags import Knobs
from pytest_kvcache.load.kvstate import Replica
from pytest_kvcache.load.rejections import clean_text
from pytest_kvcache.load.target import endpoints_by_hand
from pytest_kvcache.observe.scrape import Reader, detect_endpoint
from pytest_kvcache.server.address import Endpoint

LOOK_S = 1.0
AGAIN_S = 5.0
LINE_S = 5.0
FIRST_LINE_S = 2.5
TIMEOUT_S = 3.0
MOST_LINES = 8
_PAGE = Path(__file__).with_name("page.html")


class Panel:
    """Follows the servers of the newest load until the process ends. ``web_ui`` is None in headless mode."""

    def __init__(self, environment: Any, web_ui: Any) -> None:
        self.environment = environment
        self.replicas: list[Replica] = []
        self._greenlets: list[Any] = []
        options = environment.parsed_options
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each look would bury Locust's own
        if web_ui is not None:
            self._serve(web_ui, str(getattr(options, "web_base_path", "") or ""))
        elif not getattr(options, "only_summary", False):
            gevent.spawn(self._print)

    def follow(self, knobs: Knobs) -> None:
        """Follow the servers of a load that begins. One that cannot be followed shows why, and does not stop the load."""
        host = self.environment.host
        try:
            endpoints = endpoints_by_hand(list(knobs.endpoints) or ([host] if host else []), knobs.of_server() | knobs.of_telemetry())
        except KvError:
            return  # the load itself says so
        if [endpoint.shown for endpoint in endpoints] == [replica.name for replica in self.replicas]:
            return
        gevent.killall(self._greenlets, block=False)
        self.replicas = [Replica(endpoint.shown) for endpoint in endpoints]
        self._greenlets = [gevent.spawn(self._watch, *pair) for pair in zip(self.replicas, endpoints, strict=True)]

    def _watch(self, replica: Replica, endpoint: Endpoint) -> None:
        reader, dialect = None, None
        while True:
            began_s = time.time()
            try:
                if reader is None or dialect is None:
                    dialect = detect_endpoint(endpoint, timeout_s=TIMEOUT_S)
                    reader = Reader(endpoint, dialect, timeout_s=TIMEOUT_S)
                raw = reader.look(once=False)
                if reader.silence is not None:
                    replica.failed(reader.silence.what, began_s)
                else:
                    replica.take(dialect, raw, began_s)
            except KvError as error:
                replica.failed(clean_text(error.what, 300), began_s)
            except Exception as error:  # what a server says must not end the watch
                replica.failed(clean_text(f"{type(error).__name__}: {error}", 300), began_s)
            gevent.sleep(AGAIN_S if replica.trouble else max(0.05, LOOK_S - (time.time() - began_s)))

    def data(self) -> dict[str, Any]:
        """Return what the page shows: the state of the load, and each server's points."""
        runner = self.environment.runner
        return {"load": str(runner.state), "users": int(runner.user_count), "replicas": [replica.series() for replica in self.replicas]}

    def _serve(self, web_ui: Any, base: str) -> None:
        from flask import Response, request

        def page() -> Response:
            nonce = secrets.token_urlsafe(16)
            text = _PAGE.read_text(encoding="utf-8").replace("{nonce}", nonce)
            policy = f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; base-uri 'none'"
            return Response(text, mimetype="text/html", headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})

        def data() -> Response:
            origin = request.headers.get("Origin")
            if origin is not None and origin.partition("://")[2] != request.host:
                return Response("not for other pages", status=403, mimetype="text/plain")
            return Response(json.dumps(self.data(), allow_nan=False), mimetype="application/json", headers={"Cache-Control": "no-store"})

        web_ui.app.add_url_rule(f"{base}/kv", "kv_page", web_ui.auth_required_if_enabled(page))
        web_ui.app.add_url_rule(f"{base}/kv/data", "kv_data", web_ui.auth_required_if_enabled(data))
        sys.stderr.write(f"pytest-kvcache: the KV cache while a load runs: {base}/kv of Locust's web page\n")

    def _print(self) -> None:
        gevent.sleep(FIRST_LINE_S)
        while True:
            write_lines(self.replicas)
            gevent.sleep(LINE_S)


def write_lines(replicas: Sequence[Replica]) -> None:
    """Print the state of the servers to stderr, a line each, at most eight of them."""
    lines = [f"pytest-kvcache: {time.strftime('%H:%M:%S')} {replica.line()}\n" for replica in replicas[:MOST_LINES]]
    if len(replicas) > MOST_LINES:
        lines.append(f"pytest-kvcache: and {len(replicas) - MOST_LINES} servers more\n")
    sys.stderr.write("".join(lines))
    sys.stderr.flush()
