"""Reads a server once: /metrics, the JSON bodies that its dialect needs, and what its start-up log states."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from pytest_kvcache.engines import DIALECTS, Dialect, JsonPath, RawState, Samples, detect, named, owned_by, read, signs, wanted_by
from pytest_kvcache.errors import EndpointUnreachable
from pytest_kvcache.observe.answers import MOST_METRICS_BYTES, refusal, samples_of
from pytest_kvcache.observe.elsewhere import Elsewhere
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.observe.joining import telling_servers_apart
from pytest_kvcache.quantities import Missing, Value
from pytest_kvcache.records import SnapshotRecord
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.server.redaction import hide_known
from pytest_kvcache.server.startlog import read_facts
from pytest_kvcache.server.transport import Answer, ask

__all__ = ["Reader", "detect_endpoint", "fetch", "parse_samples", "take_snapshot", "take_snapshot_raw"]

MOST_JSON_BYTES = 4 << 20
# A start-up is told in the first lines; what follows is one line a request.
LOG_HEAD_BYTES = 1 << 20
# A server closes an idle connection just when the next request goes out: that failure is instant, and is tried once more.
_AT_ONCE_S = 0.05
_MOST_UNANSWERED = 2
_ACCEPT = "text/plain;version=0.0.4, text/plain;q=0.9, */*;q=0.1"


class Reader:
    """Reads one endpoint again and again over kept connections; a context manager.

    ``dialect`` None reads what the ``candidates`` (default: all of ours) would ask for, but nothing that reading destroys before it is
    known that the server is another one. ``log`` is the start-up log of a server of
    ours (default: the endpoint's). Raises UsageError for a CA bundle or a key that cannot be read.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dialect: Dialect | None = None,
        *,
        log: Path | None = None,
        timeout_s: float = 5.0,
        candidates: Iterable[Dialect] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.candidates = list(DIALECTS.values() if candidates is None else candidates) if dialect is None else [dialect]
        self.timeout_s = timeout_s
        path = log if log is not None else endpoint.log
        self.log_facts: Mapping[str, Value] = read_facts(path, LOG_HEAD_BYTES) if path is not None else {}
        self._log_given = path is not None and path.is_file()
        self._wanted = wanted_by(self.candidates)
        self._metrics = endpoint.client(timeout_s=timeout_s, metrics=True)
        self._metrics.headers["Accept"] = _ACCEPT
        self._api = endpoint.client(timeout_s=timeout_s)
        self._elsewhere = Elsewhere.of(endpoint, self._wanted, timeout_s)
        self._once: dict[str, Any | Missing] = {}
        self._metrics_path = ""
        self._answered = False
        self._unanswered = 0
        self._failure: EndpointUnreachable | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. A read that is under way in another thread then fails."""
        self._metrics.close()
        self._api.close()
        if self._elsewhere is not None:
            self._elsewhere.close()

    @property
    def silence(self) -> EndpointUnreachable | None:
        """The error of the last look, where nobody answered at all; None where anything came back."""
        return None if self._answered else self._failure

    def look(self, *, once: bool = True, keep_text: bool = False) -> RawState:
        """Return what the server says now; whatever cannot be read is there as Missing with the reason, and nothing is raised.

        ``once`` False reads only the JSON bodies that move, and takes those that do not from the look before (or reads again one
        that was missing there). ``keep_text`` keeps the exposition as it came.
        """
        self._answered, self._failure, self._unanswered = False, None, 0
        raw = RawState(log_facts=self.log_facts, log_given=self._log_given, model=self.endpoint.model)
        answer, samples = self._read_metrics() if self._elsewhere is None else self._read_elsewhere(self._elsewhere, once)
        if isinstance(samples, Missing):
            raw.metrics_reason = samples.reason
        else:
            raw.metrics = samples
            raw.text = answer.body.decode("utf-8", "replace") if keep_text and isinstance(answer, Answer) else ""
            if keep_text and self._elsewhere is not None:
                raw.text = self._elsewhere.text
        told = signs(raw, self.candidates)[0]
        bodies = {path.path: path for dialect in told or self.candidates for path in dialect.json_paths if not (told and path.without_metrics)}
        raw.json = {name: self._read_body(path, once) for name, path in bodies.items() if not path.destructive}
        for path in (path for path in bodies.values() if path.destructive):
            if isinstance(answer, Answer) and self._metrics_path == path.path:
                body = _json(path.path, answer)  # read already, as text
            elif not self._is_destructive(path.path):
                continue  # another engine's /metrics
            elif self.endpoint.allow_destructive_reads:
                body = self._read_body(path, once)
            else:
                body = Missing(
                    f"{path.path} was not read: its JSON is gone for every other reader once it is read; --kv-allow-destructive-reads allows it"
                )
            raw.json = {**raw.json, path.path: body}
        return raw

    def _read_elsewhere(self, elsewhere: Elsewhere, once: bool) -> tuple[Answer | Missing, Samples | Missing]:
        samples = elsewhere.look(repeat=once)
        self._answered = not isinstance(samples, Missing)
        return Missing("it was read elsewhere"), samples

    def _read_metrics(self) -> tuple[Answer | Missing, Samples | Missing]:
        """Return the first answer of the candidates' metrics paths that is an exposition; else that of /metrics, or of the first path."""
        paths = list(dict.fromkeys(path for dialect in self.candidates for path in dialect.metrics_paths))
        if len(self.candidates) > 1:
            # /metrics is asked after the path of the engine whose /metrics is emptied by reading.
            paths.sort(key=lambda path: (path == "/v1/metrics", path == "/metrics"))
        if self._metrics_path in paths:
            paths.sort(key=lambda path: path != self._metrics_path)
        first: tuple[Answer | Missing, Samples | Missing] | None = None
        for path in paths:
            if self._is_destructive(path):
                continue
            answer = self._get(self._metrics, path, MOST_METRICS_BYTES)
            samples = answer if isinstance(answer, Missing) else samples_of(answer, self._wanted, path)
            if not isinstance(samples, Missing) or (path == "/metrics" and isinstance(answer, Answer) and answer.body.lstrip()[:1] == b"["):
                self._metrics_path = path
                return answer, samples
            if first is None or path == "/metrics":
                first = answer, samples
            if isinstance(answer, Missing):
                break  # nobody answers: another path of the same server would only cost the timeout again
        return first or (Missing("/metrics was not read"), Missing("/metrics was not read"))

    def _is_destructive(self, path: str) -> bool:
        """Say whether reading the path takes something away, as far as the server's model list tells which engine it is."""
        owners = {dialect.owned_by for dialect in self.candidates if any(body.destructive and body.path == path for body in dialect.json_paths)}
        if not owners:
            return False
        return len(self.candidates) == 1 or bool(owners & owned_by(self._read_json("/v1/models", now=False)))

    def _read_body(self, path: JsonPath, once: bool) -> Any | Missing:
        return self._read_json(path.path, once or path.per_sample)

    def _read_json(self, path: str, now: bool) -> Any | Missing:
        known = self._once.get(path)
        if now or known is None or isinstance(known, Missing):
            answer = self._get(self._api, path, MOST_JSON_BYTES)
            known = self._once[path] = answer if isinstance(answer, Missing) else _json(path, answer)
        return known

    def _get(self, client: httpx.Client, path: str, limit: int) -> Answer | Missing:
        if self._unanswered >= _MOST_UNANSWERED and not self._answered and self._failure is not None:
            return Missing(f"{path}: {self._failure.what}")  # each further page of a server that hangs would cost a timeout
        for _ in range(2):
            began = time.monotonic()
            try:
                answer = ask(self.endpoint, client, "GET", path, timeout_s=self.timeout_s, limit_bytes=limit)
            except EndpointUnreachable as failure:
                error = failure
            except RuntimeError:
                return Missing(f"{path} was not read: the reader is closed")  # httpx refuses to send over a closed client
            else:
                self._answered = True
                return answer
            if time.monotonic() - began > _AT_ONCE_S:
                break
        self._failure = self._failure or error
        self._unanswered += 1
        return Missing(f"{path}: {error.what}")


def _json(path: str, answer: Answer) -> Any | Missing:
    reason = refusal(path, answer, "--kv-api-key-env")
    if reason:
        return Missing(reason)
    if answer.value is None:
        return Missing(f"{path} answers with a web page" if answer.is_html else f"{path} answers with text that is not JSON")
    return answer.value


def fetch(
    endpoint: Endpoint,
    dialect: Dialect | None = None,
    *,
    log: Path | None = None,
    timeout_s: float = 5.0,
    candidates: Iterable[Dialect] | None = None,
) -> RawState:
    """Return everything that one look at a server gives, with the text of /metrics. Raises EndpointUnreachable where nobody answers."""
    with Reader(endpoint, dialect, log=log, timeout_s=timeout_s, candidates=candidates) as reader:
        raw = reader.look(keep_text=True)
        if reader.silence is not None:
            raise reader.silence
        return raw


def detect_endpoint(endpoint: Endpoint, engine: str = "auto", extra: Sequence[Dialect] = (), *, timeout_s: float = 5.0) -> Dialect:
    """Return the dialect called ``engine``; with ``auto`` the one that the server itself shows. ``extra`` are a user's own dialects.

    Raises UsageError for an unknown name, UnknownEngine (with what was seen) and EndpointUnreachable.
    """
    if engine != "auto":
        return _apart(endpoint, named(engine, extra))
    candidates = [*extra, *(dialect for name, dialect in DIALECTS.items() if name not in {other.name for other in extra})]
    raw = fetch(endpoint, timeout_s=timeout_s, candidates=candidates)
    if len(signs(raw, extra)[0]) == 1:
        return _apart(endpoint, detect(raw, extra))  # a user's own dialect is asked before ours, which may know the same series
    return _apart(endpoint, detect(raw, candidates))


def _apart(endpoint: Endpoint, dialect: Dialect) -> Dialect:
    """Return the dialect, able to tell the servers apart where several are read for one endpoint."""
    return telling_servers_apart(dialect) if len(endpoint.metrics) > 1 or endpoint.prometheus is not None else dialect


def take_snapshot_raw(
    endpoint: Endpoint, dialect: Dialect | None = None, log: Path | None = None, *, timeout_s: float = 5.0
) -> tuple[SnapshotRecord, str]:
    """Return one snapshot of a server, and the text of its /metrics without our secrets ("" where there was none).

    Quantities that could not be read are Missing with the reason. Raises EndpointUnreachable where nobody answers, UnknownEngine where
    no dialect is given and none reads what is there.
    """
    wall_s = time.time()
    raw = fetch(endpoint, dialect, log=log, timeout_s=timeout_s)
    return read(dialect if dialect is not None else _apart(endpoint, detect(raw)), raw, wall_s, endpoint.shown), hide_known(raw.text)


def take_snapshot(endpoint: Endpoint, dialect: Dialect | None = None, log: Path | None = None, *, timeout_s: float = 5.0) -> SnapshotRecord:
    """Return one snapshot of a server, like ``take_snapshot_raw`` without the text."""
    return take_snapshot_raw(endpoint, dialect, log, timeout_s=timeout_s)[0]
