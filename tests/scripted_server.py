"""An OpenAI-like server that does what a test tells it to, faults and all. Standard library only, loopback only.

In a test, as a thread::

    with ScriptedServer(model="m", faults=["status=401"]) as server:
        server.url          # http://127.0.0.1:<port>
        server.seen         # the requests that came, oldest first
        server.script       # may be changed while it runs

As a process, for launch tests::

    python tests/scripted_server.py --port 8001 --fault exit-after=2 --print some.log
    launch_text("die-at-once=3")    # the same as a text for --kv-launch, with {port} in it

It serves /v1/models, /v1/completions, /v1/chat/completions (both with streaming and ``stream_options.include_usage``),
/tokenize (the forms of llama.cpp and of vLLM), /health and /metrics. A token is a word split at white space. A prompt
longer than ``max_model_len`` is refused as vLLM does; prompt + max_tokens above it is clamped. An answer is ``" tok"`` per
token unless ``answer`` is given. ``metrics`` is a text, a function of the server that gives one, "vllm" (made from the live
requests and ``pool_blocks`` x ``block_size``) or None (404). ``pages`` maps further paths to JSON values or to
``(status, content type, text)``.

Faults, each a word or ``word=value``; HTTP faults hold for every path of the API, those after ``metrics-`` for /metrics:

    status=401          answer with that status and an OpenAI error body (401, 403, 404, 429, 500, 503 ...)
    token-status=500    the same, for completions only; token-error=TEXT is its message
    error-body=flat     error bodies as {"object": "error", "message"} (flat), {"error": "text"} (tgi) or nested (default)
    html  empty  garbage  huge  hang  slow=S        a web page; 200 with nothing; not HTTP; endless; no answer; S seconds late
    redirect=URL        302 to there
    wrong-model         lists another model than ``model`` and refuses ``model``
    no-models           lists none
    ready-after=S  never-ready                      503 "Loading model" for S seconds, or for ever
    queue-full  queue-full-stream                   503; 200 and an error frame in the stream
    error-in-stream  truncate  reset                half of the answer, then an error frame (=TEXT), a clean end, a dropped connection
    stop-early  no-usage                            half of the tokens with finish_reason stop; no usage anywhere
    no-tokenize                                     404 on /tokenize
    metrics-status=N  metrics-html  metrics-empty   what /metrics does instead

Faults of the process only:

    die-at-once[=CODE]  exit-after=S  never-listen  ignore-term  fork=N  double-fork  print-secret=TEXT
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from scripted_answers import Handler, Script, Seen, vllm_metrics

__all__ = ["Script", "ScriptedServer", "Seen", "launch_text", "vllm_metrics"]


class ScriptedServer:
    """The server as a thread; a context manager. ``url`` is its address, ``script`` what it does, ``seen`` what came."""

    def __init__(
        self, script: Script | None = None, *, port: int = 0, tls: Callable[[socket.socket], socket.socket] | None = None, **fields: Any
    ) -> None:
        self.script = script or Script(**fields)
        self.seen: list[Seen] = []
        self.started_s = time.monotonic()
        self.live: dict[int, int] = {}
        self.counters = {"finished": 0, "prompt_tokens": 0, "generation_tokens": 0}
        self.lock = threading.Lock()
        owner = self

        class Bound(Handler):
            server_of_test = owner

        self.http = _Http(("127.0.0.1", port), Bound)
        self.scheme = "http"
        if tls is not None:
            self.http.socket = tls(self.http.socket)
            self.scheme = "https"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def port(self) -> int:
        return int(self.http.server_address[1])

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        """Return ``METHOD /path`` of each request that came, oldest first."""
        with self.lock:
            return [f"{seen.method} {seen.path}" for seen in self.seen]

    def start(self) -> ScriptedServer:
        self.thread.start()
        return self

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(5)

    def __enter__(self) -> ScriptedServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is an everyday thing here."""


def launch_text(*faults: str, **options: Any) -> str:
    """Return the text of ``--kv-launch`` that starts this file as a process; options are flags (``max_model_len=256``)."""
    words = [sys.executable, str(Path(__file__).resolve()), "--port", "{port}"]
    for fault in faults:
        words += ["--fault", fault]
    for name, value in options.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    return shlex.join(words)


def _process_faults(script: Script, printed: str) -> None:
    if printed:
        sys.stdout.write(Path(printed).read_text(encoding="utf-8"))
        sys.stdout.flush()
    secret = script.fault("print-secret")
    if secret is not None:
        sys.stderr.write(f"non-default args: {{'api_key': ['{secret}'], 'port': 8000}}\n")
    if script.fault("ignore-term") is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
    for _ in range(int(script.fault("fork") or 0)):
        subprocess.Popen([sys.executable, "-c", sleeper])
    if script.fault("double-fork") is not None and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", sleeper])
        os._exit(0)
    code = script.fault("die-at-once")
    if code is not None:
        sys.exit(int(code or 1))
    wait = script.fault("exit-after")
    if wait is not None:
        timer = threading.Timer(float(wait), lambda: os._exit(1))
        timer.daemon = True
        timer.start()
    if script.fault("never-listen") is not None:
        time.sleep(120)


def _read_metrics(name: str | None) -> str | None:
    return name if name in (None, "vllm") else Path(str(name)).read_text(encoding="utf-8")


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """End this process after ``seconds`` whatever happens, so that a broken test leaves nothing behind for long."""
    timer = threading.Timer(seconds, lambda: os._exit(9))
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def main() -> None:
    """Serve until TERM; at most ten minutes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--print", dest="printed", default="", help="a file whose text is printed first")
    parser.add_argument("--metrics", help="a file with the text of /metrics, or the word vllm")
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--ttft", type=float, default=0.0)
    parser.add_argument("--itl", type=float, default=0.0)
    given = parser.parse_args()
    script = Script(
        model=given.model,
        api_key=given.api_key,
        max_model_len=given.max_model_len,
        ttft_s=given.ttft,
        itl_s=given.itl,
        metrics=_read_metrics(given.metrics),
        faults=given.fault,
    )
    with _limit(600):
        _process_faults(script, given.printed)
        sys.stderr.write(f"scripted server, pid {os.getpid()}, port {given.port}\n")
        sys.stderr.flush()
        server = ScriptedServer(script, port=given.port)
        server.http.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
