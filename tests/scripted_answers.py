"""What the scripted server answers: the script, the requests that were seen, and the HTTP handler. See ``scripted_server``."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol

HTML = b"<!DOCTYPE html><html><head><title>Welcome to the portal</title></head><body>Please log in</body></html>"


class State(Protocol):
    """What the handler needs of the server: its script, and what it keeps of the requests."""

    script: Script
    seen: list[Seen]
    started_s: float
    live: dict[int, int]
    counters: dict[str, int]
    lock: threading.Lock


@dataclass
class Script:
    """What the server does; every field may be changed while it runs."""

    model: str = "scripted"
    models: Sequence[Mapping[str, Any]] | None = None
    owned_by: str = "scripted"
    max_model_len: int = 4096
    chat_overhead: int = 0
    api_key: str = ""
    ttft_s: float = 0.0
    itl_s: float = 0.0
    answer: Callable[[str], str] | None = None
    metrics: str | Callable[[State], str] | None = None
    pages: dict[str, Any] = field(default_factory=dict)
    faults: Sequence[str] = ()
    pool_blocks: int = 1025
    block_size: int = 16

    def fault(self, name: str) -> str | None:
        """Return the value of a fault ("" where it has none), or None where it is off."""
        for text in self.faults:
            word, _, value = text.partition("=")
            if word == name:
                return value
        return None


@dataclass(frozen=True)
class Seen:
    """One request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


def vllm_metrics(server: State) -> str:
    """Return a small vLLM 0.32 text of what the server does now: blocks of live requests over ``pool_blocks - 1``."""
    script = server.script
    with server.lock:
        tokens, counters = list(server.live.values()), dict(server.counters)
    used = sum(-(-count // script.block_size) for count in tokens)
    usable = script.pool_blocks - 1
    labels = f'{{engine="0",model_name="{script.model}"}}'
    info = f'block_size="{script.block_size}",cache_dtype="auto",enable_prefix_caching="True",engine="0",num_gpu_blocks="{script.pool_blocks}"'
    rows = {
        "num_requests_running": ("gauge", len(tokens)),
        "num_requests_waiting": ("gauge", 0),
        "kv_cache_usage_perc": ("gauge", min(1.0, used / usable)),
        "num_preemptions_total": ("counter", 0),
        "prompt_tokens_total": ("counter", counters["prompt_tokens"]),
        "generation_tokens_total": ("counter", counters["generation_tokens"]),
    }
    lines = ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{info}}} 1.0"]
    for name, (kind, value) in rows.items():
        lines += [f"# TYPE vllm:{name.removesuffix('_total')} {kind}", f"vllm:{name}{labels} {float(value)}"]
    reason = f'{{engine="0",finished_reason="length",model_name="{script.model}"}}'
    lines += ["# TYPE vllm:request_success counter", f"vllm:request_success_total{reason} {float(counters['finished'])}"]
    return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    server_of_test: State
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            body = raw
        self._serve(body)

    @property
    def script(self) -> Script:
        return self.server_of_test.script

    def _serve(self, body: Any) -> None:
        path = self.path.split("?", 1)[0]
        server = self.server_of_test
        with server.lock:
            server.seen.append(Seen(self.command, path, dict(self.headers.items()), body))
        with contextlib.suppress(ConnectionError):
            if path == "/metrics":
                self._metrics()
            elif path in self.script.pages:
                self._page(self.script.pages[path])
            elif not self._faulty(path):
                self._api(path, body)

    def _send(self, status: int, kind: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _error(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        form = self.script.fault("error-body") or "nested"
        inner = {"message": message, "type": kind, "param": param, "code": status}
        bodies: dict[str, Any] = {"nested": {"error": inner}, "flat": {"object": "error", **inner}, "tgi": {"error": message, "error_type": kind}}
        self._json(bodies[form], status)

    def _page(self, page: Any) -> None:
        if isinstance(page, tuple):
            status, kind, text = page
            self._send(status, kind, text if isinstance(text, bytes) else text.encode())
        else:
            self._json(page)

    def _metrics(self) -> None:
        script = self.script
        status, metrics = script.fault("metrics-status"), script.metrics
        if status is not None:
            self._error(int(status), f"metrics say {status}")
        elif script.fault("metrics-html") is not None:
            self._send(200, "text/html", HTML)
        elif script.fault("metrics-empty") is not None:
            self._send(200, "text/plain", b"")
        elif metrics is None:
            self._error(404, "Not Found")
        else:
            text = metrics if isinstance(metrics, str) else metrics(self.server_of_test)
            text = vllm_metrics(self.server_of_test) if text == "vllm" else text
            self._send(200, "text/plain; version=0.0.4; charset=utf-8", text.encode())

    def _faulty(self, path: str) -> bool:
        """Play the fault that holds for every path, if there is one; say whether the request is answered by it."""
        script = self.script
        late = script.fault("slow")
        if late is not None:
            time.sleep(float(late))
        wait = script.fault("ready-after")
        loading = wait is not None and time.monotonic() - self.server_of_test.started_s < float(wait)
        status, target = script.fault("status"), script.fault("redirect")
        if script.fault("hang") is not None:
            time.sleep(30)
            self.close_connection = True
        elif script.fault("garbage") is not None:
            self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            self.close_connection = True
        elif script.fault("html") is not None:
            self._send(200, "text/html; charset=utf-8", HTML)
        elif script.fault("empty") is not None:
            self._send(200, "application/json", b"")
        elif script.fault("huge") is not None:
            self._huge()
        elif target is not None:
            self._send(302, "text/plain", b"", {"Location": target})
        elif script.fault("never-ready") is not None or loading:
            self._error(503, "Loading model", "unavailable_error")
        elif status is not None:
            self._error(int(status), f"the script says {status}")
        elif script.api_key and self.headers.get("Authorization") != f"Bearer {script.api_key}" and path != "/health":
            self._error(401, "Unauthorized")
        else:
            return False
        return True

    def _huge(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(1 << 40))
        self.end_headers()
        block = b" " * (1 << 20)
        for _ in range(512):
            self.wfile.write(block)
        self.close_connection = True

    def _api(self, path: str, body: Any) -> None:
        if path == "/health":
            self._send(200, "text/plain", b"")
        elif path == "/v1/models":
            self._json({"object": "list", "data": self._rows()})
        elif path == "/tokenize" and self.command == "POST" and self.script.fault("no-tokenize") is None:
            text = body.get("content", body.get("prompt", ""))
            ids = [zlib.crc32(word.encode()) % 50000 for word in text.split()]
            self._json({"tokens": ids, "count": len(ids), "max_model_len": self.script.max_model_len})
        elif path in ("/v1/completions", "/v1/chat/completions") and self.command == "POST":
            self._generate(body, chat="chat" in path)
        else:
            self._error(404, f"no {path} here", "NotFoundError")

    def _rows(self) -> list[Any]:
        script = self.script
        if script.fault("no-models") is not None:
            return []
        if script.models is not None:
            return list(script.models)
        name = "something-else" if script.fault("wrong-model") is not None else script.model
        return [{"id": name, "object": "model", "created": 1, "owned_by": script.owned_by, "root": name, "max_model_len": script.max_model_len}]

    def _generate(self, body: Any, *, chat: bool) -> None:
        script, server = self.script, self.server_of_test
        status = script.fault("token-status")
        if status is not None:
            return self._error(int(status), script.fault("token-error") or "the engine said no")
        if script.models is None and body.get("model") != self._rows()[0]["id"]:
            return self._error(404, f"The model `{body.get('model')}` does not exist.", "NotFoundError")
        if script.fault("queue-full") is not None:
            return self._error(503, "The engine is currently busy and cannot accept new requests.", "Service Unavailable")
        prompt, count = _prompt(body, chat)
        count += script.chat_overhead if chat else 0
        wanted = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        if count >= script.max_model_len:
            limit = script.max_model_len
            return self._error(400, f"This model's maximum context length is {limit} tokens. However, your prompt contains {count} input tokens.")
        wanted = min(wanted, script.max_model_len - count)
        text = script.answer(prompt) if script.answer else " tok" * wanted
        words = [f"{' ' if i or not script.answer else ''}{word}" for i, word in enumerate(text.split())][:wanted]
        reason = "length" if len(words) >= wanted else "stop"
        if script.fault("stop-early") is not None:
            words, reason = words[: max(1, len(words) // 2)], "stop"
        key = threading.get_ident()
        with server.lock:
            server.live[key] = count
            server.counters["prompt_tokens"] += count
        try:
            time.sleep(script.ttft_s)
            if body.get("stream"):
                self._stream(body, chat, count, words, reason, key)
            else:
                time.sleep(script.itl_s * len(words))
                self._whole(chat, count, words, reason)
        finally:
            with server.lock:
                server.live.pop(key, None)
                server.counters["finished"] += 1
                server.counters["generation_tokens"] += len(words)
        return None

    def _usage(self, prompt_tokens: int, words: list[str]) -> dict[str, int]:
        return {"prompt_tokens": prompt_tokens, "completion_tokens": len(words), "total_tokens": prompt_tokens + len(words)}

    def _whole(self, chat: bool, count: int, words: list[str], reason: str) -> None:
        text = "".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice.update({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
        answer = {"id": "c", "object": "chat.completion" if chat else "text_completion", "model": self.script.model, "choices": [choice]}
        self._json(answer if self.script.fault("no-usage") is not None else {**answer, "usage": self._usage(count, words)})

    def _stream(self, body: Any, chat: bool, count: int, words: list[str], reason: str, key: int) -> None:
        script = self.script
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        half = len(words) // 2
        broken = next((name for name in ("error-in-stream", "truncate", "reset") if script.fault(name) is not None), "")
        if script.fault("queue-full-stream") is not None:
            self._frame(
                {"error": {"message": "The engine is currently busy and cannot accept new requests.", "type": "Service Unavailable", "code": 503}}
            )
            return self._end_stream(done=False)
        for index, word in enumerate(words):
            if broken and index >= half:
                break
            last = reason if index == len(words) - 1 else None
            part = {"delta": {"role": "assistant", "content": word}} if chat else {"text": word}
            self._frame({"id": "c", "model": script.model, "choices": [{"index": 0, **part, "finish_reason": last}]})
            with self.server_of_test.lock:
                self.server_of_test.live[key] = count + index + 1
            time.sleep(script.itl_s)
        if broken == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return None
        if broken == "error-in-stream":
            self._frame({"error": {"message": script.fault(broken) or "Context size has been exceeded.", "type": "server_error", "code": 500}})
        elif not broken and (body.get("stream_options") or {}).get("include_usage") and script.fault("no-usage") is None:
            self._frame({"id": "c", "model": script.model, "choices": [], "usage": self._usage(count, words)})
        return self._end_stream(done=not broken)

    def _frame(self, value: Any) -> None:
        data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _end_stream(self, *, done: bool) -> None:
        if done:
            self._frame(b"[DONE]")
        self.wfile.write(b"0\r\n\r\n")


def _prompt(body: Any, chat: bool) -> tuple[str, int]:
    if chat:
        text = " ".join(str(message.get("content", "")) for message in body.get("messages", []))
        return text, len(text.split())
    prompt = body.get("prompt", "")
    if isinstance(prompt, list):
        return " ".join(str(token) for token in prompt), len(prompt)
    return str(prompt), len(str(prompt).split())
