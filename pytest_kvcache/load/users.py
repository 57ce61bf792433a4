"""The Locust side of the load: a user that streams one completion after the other and writes one row a request.

A profile is a Locust file with one subclass of ``KvUser`` that says how long prompts and outputs are::

    from pytest_kvcache.load.users import Draw, KvUser

    class Short(KvUser):
        lane = "short"

        def plan(self, draw: Draw, limit: int | None) -> tuple[int, int]:
            return draw.uniform(50, 200), self.output_tokens

Importing this module imports locust, which patches sockets and sleep of the whole process: only profiles may do it.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import gevent
from gevent import GreenletExit
from geventhttpclient.response import HTTPConnectionClosed
from locust import FastHttpUser, events, task
from locust.exception import CatchResponseError, StopUser
from locust.runners import MasterRunner

from pytest_kvcache.load import contract, flags
from pytest_kvcache.load.client import FAILURES, connect, headers_of, pump, read_body
from pytest_kvcache.load.contract import ProfileOption
from pytest_kvcache.load.draws import Draw
from pytest_kvcache.load.rejections import classify
from pytest_kvcache.load.session import LoadSession, Shape
from pytest_kvcache.load.sse import Stream
from pytest_kvcache.load.target import Handed, Target, handed_over
from pytest_kvcache.records import RequestRow

__all__ = ["Draw", "KvUser", "ProfileOption"]

# Servers close idle connections (uvicorn after 5 s); one that was idle for longer than this is not used again.
IDLE_REUSE_S = 2.0
_CLOSED = (HTTPConnectionClosed, ConnectionResetError, BrokenPipeError)
_BACK_OFF = frozenset(contract.REJECTIONS) - {contract.OVER_LENGTH, contract.CLAMPED, contract.TRUNCATED}

_profiles: list[type[KvUser]] = []
_session: LoadSession | None = None


class KvUser(FastHttpUser):
    """A user in a closed loop: it sends a request, reads the stream to its end, waits ``--kv-think-s``, and sends the next.

    A subclass sets ``lane`` (its name in every report) and ``plan``; ``users`` and ``default_output_tokens`` are what it takes
    when nothing else is asked for, ``needs_limit`` says that it cannot work without the server's longest context, ``options``
    adds options to the command line.
    """

    abstract = True
    insecure = False
    lane: ClassVar[str] = ""
    users: ClassVar[int] = 8
    default_output_tokens: ClassVar[int] = 64
    needs_limit: ClassVar[bool] = False
    options: ClassVar[tuple[ProfileOption, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.abstract:
            cls.lane = cls.lane or cls.__name__.lower()
            _profiles.append(cls)

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._http: Any = None
        self._headers: dict[str, str] = {}
        self._index = 0
        self._idle_since_s = 0.0
        self._sent_s = 0.0
        self._ready_s = monotonic()
        self._name = ""

    def plan(self, draw: Draw, limit: int | None) -> tuple[int, int]:
        """Return (prompt tokens, output tokens) of a request; ``limit`` is the longest context, None where it is not known."""
        raise NotImplementedError

    @property
    def output_tokens(self) -> int:
        """How many tokens a request asks for: ``--kv-output-tokens``, or the profile's own number."""
        return _session.output_tokens if _session is not None else self.default_output_tokens

    def option(self, name: str) -> Any:
        """Return the value of one of ``options``."""
        assert _session is not None
        return _session.knobs.profile_options[name]

    def on_start(self) -> None:
        """Choose the server that this user keeps to, and wait for this user's part of the ramp."""
        if _session is not None and _session.targets:
            self._index, wait_s = _session.place()
            if wait_s > 0:
                gevent.sleep(wait_s)
            target = _session.targets[self._index]
            self._headers = target.request_headers()
            self._name = f"{target.path} {self.lane}"
        self._ready_s = monotonic()

    def wait_time(self) -> float:
        """Return how long Locust lets this user wait, from when it was ready: think time, longer after a refusal."""
        return max(0.0, self._ready_s - monotonic())

    @task
    def press(self) -> None:
        """Send one request and record what became of it."""
        session = _session
        number = session.take() if session is not None else None
        if session is None or number is None or session.source is None:
            raise StopUser
        try:
            prompt_tokens, output_tokens = self.plan(Draw(session.knobs.seed, self.lane, number), session.max_model_len)
            target = session.targets[self._index]
            output_tokens = target.output_tokens(output_tokens)
            prompt = session.source.make(prompt_tokens, session.knobs.seed, self.lane, number)
            body = session.head(self._index, output_tokens) + prompt.json + target.body_tail
        except Exception:
            session.dropped()
            raise
        stream = Stream(session.knobs.keep_text)
        intended_s = self._ready_s
        leaving: GreenletExit | None = None
        status = 0
        timer = gevent.Timeout(session.knobs.request_timeout_s)
        timer.start()
        self._sent_s = monotonic()
        try:
            response = self._send(session, target, body)
            status = response.get_code()
            verdict = self._read(response, status, stream, output_tokens, session)
        except gevent.Timeout as fired:
            if fired is not timer:
                session.dropped()
                raise
            verdict = self._broken(stream, status, f"Timeout: no end within {session.knobs.request_timeout_s:g} s", output_tokens)
        except GreenletExit as exit_:
            leaving = exit_
            verdict = contract.CUT_OFF, "the load ended while this request was in flight", None
            self._close()
        except FAILURES as error:
            verdict = self._broken(stream, status, f"{type(error).__name__}: {error}", output_tokens)
        finally:
            timer.close()
        sent_s, end_s = self._sent_s, stream.last_s if stream.done else monotonic()
        outcome, error_text, retry_after_s = verdict
        self._idle_since_s = end_s
        wait_s = session.knobs.think_s
        if outcome in _BACK_OFF:
            wait_s = max(wait_s, session.knobs.backoff_s)
        self._ready_s = end_s + wait_s
        offset_s = session.offset_s
        session.record(
            RequestRow(
                id=number,
                lane=self.lane,
                intended_s=round(offset_s + intended_s, 6),
                sent_s=round(offset_s + sent_s, 6),
                end_s=round(offset_s + end_s, 6),
                outcome=outcome,
                worker=session.worker,
                endpoint=self._index,
                first_token_s=None if stream.first_token_s is None else round(offset_s + stream.first_token_s, 6),
                status=status,
                prompt_tokens_planned=prompt.planned_tokens,
                prompt_tokens=stream.prompt_tokens,
                cached_tokens=stream.cached_tokens,
                output_tokens_planned=output_tokens,
                completion_tokens=stream.completion_tokens,
                chunks=stream.chunks,
                longest_gap_s=round(stream.longest_gap_s, 6),
                longest_gap_at_s=None if stream.longest_gap_at_s is None else round(offset_s + stream.longest_gap_at_s, 6),
                finish_reason=stream.finish_reason,
                error=error_text,
                retry_after_s=retry_after_s,
                length_source=prompt.source,
                prompt=prompt.text if session.knobs.keep_text else None,
                answer=stream.answer,
            )
        )
        if leaving is not None:
            raise leaving
        self._tell_locust(outcome, status, sent_s, end_s, stream)

    def _send(self, session: LoadSession, target: Target, body: bytes) -> Any:
        """Send the request and return the answer once its headers are there.

        Some servers (llama.cpp) close a kept connection after a stream without saying so. A request that meets that has not
        been read by anybody: it goes out again on a new connection, and from then on every request gets its own.
        """
        http = self._http
        if http is not None and not session.own_connections[self._index] and self._sent_s - self._idle_since_s <= IDLE_REUSE_S:
            try:
                return http.request("POST", target.path, body, self._headers)
            except _CLOSED:
                session.kept_connection_closed(self._index)
                self._sent_s = monotonic()
        self._close()
        self._http = http = connect(target)
        return http.request("POST", target.path, body, self._headers)

    def _read(self, response: Any, status: int, stream: Stream, planned: int, session: LoadSession) -> tuple[str, str, float | None]:
        kind = str(response.get("content-type") or "")
        packed = str(response.get("content-encoding") or "identity")
        if status == 200 and packed != "identity":
            response.release()
            return contract.SERVER_ERROR, f"the answer is packed ({packed[:20]}) though nobody asked for that: its times mean nothing", None
        expects_usage = session.prepared is not None and session.prepared.expects_usage
        if status == 200 and "event-stream" in kind:
            pump(response, stream)
            stream.finish(monotonic())
            return stream.outcome(planned, expects_usage)
        body = read_body(response)
        if status == 200:
            if stream.take_whole(body):
                outcome, error, wait_s = stream.outcome(planned, expects_usage=False)
                return outcome, error or "answered at once, not streamed", wait_s
            if body.lstrip()[:5] == b"data:":
                now_s = monotonic()
                stream.feed(body, now_s)
                stream.finish(now_s)
                return stream.outcome(planned, expects_usage)
        return classify(status, body, headers_of(response))

    def _broken(self, stream: Stream, status: int, exception: str, planned: int) -> tuple[str, str, float | None]:
        """Return the verdict of a request whose connection broke, unless the stream had said all or its error before."""
        self._close()
        if stream.error is not None or (stream.finish_reason and stream.completion_tokens is not None):
            return stream.outcome(planned, expects_usage=True)
        return classify(status, exception=exception, in_stream=status != 0)

    def _close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            http.close()

    def _tell_locust(self, outcome: str, status: int, sent_s: float, end_s: float, stream: Stream) -> None:
        """Give Locust's page its rows: the request by its whole time, and the time to its first token."""
        failed = contract.is_rejection(outcome)
        self.environment.events.request.fire(
            request_type="POST",
            name=self._name,
            response_time=(end_s - sent_s) * 1e3,
            response_length=stream.size,
            exception=CatchResponseError(f"{outcome} (HTTP {status})" if status else outcome) if failed else None,
            context={},
            response=None,
        )
        if stream.first_token_s is not None:
            # its own row only: in the sum of all rows a request would count twice
            self.environment.stats.get(f"first token {self.lane}", "TTFT").log((stream.first_token_s - sent_s) * 1e3, 0)


def _classes(environment: Any = None) -> list[type[KvUser]]:
    chosen = [cls for cls in getattr(environment, "user_classes", ()) if issubclass(cls, KvUser)]
    return chosen or _profiles


def _handed() -> Handed | None:
    text = os.environ.get(contract.ENVIRONMENT)
    return handed_over(text) if text else None


def _declare(parser: Any, **_: Any) -> None:
    classes = _profiles
    if contract.ENVIRONMENT in os.environ:
        # a run started by pytest-kvcache takes nothing from locust.conf or pyproject.toml
        parser._default_config_files = []
    options = [option for cls in classes for option in cls.options]
    flags.declare(parser, options, {"users": sum(cls.users for cls in classes) or 1})


def _start(environment: Any, **_: Any) -> None:
    global _session
    classes = _classes(environment)
    if isinstance(environment.runner, MasterRunner) or not classes:
        return
    knobs = flags.knobs(environment.parsed_options, [option for cls in classes for option in cls.options])
    files = environment.parsed_locustfiles or [environment.locustfile or classes[0].__module__]
    shape = Shape(
        profile=Path(str(files[0])).stem,
        lanes=tuple(sorted({cls.lane for cls in classes})),
        needs_limit=any(cls.needs_limit for cls in classes),
        output_tokens=classes[0].default_output_tokens,
    )
    _session = LoadSession(environment, _handed(), knobs, shape)
    _session.start()


def _stop(**_: Any) -> None:
    """Write the end: when a test stops, and again when the process quits before its test had begun."""
    if _session is not None:
        _session.finish()


def _quitting(environment: Any, **_: Any) -> None:
    if _session is not None:
        _session.interrupted()


def _user_error(exception: BaseException, **_: Any) -> None:
    if _session is not None:
        _session.task_failed(exception)


def _cpu_warning(cpu_usage: float, **_: Any) -> None:
    if _session is not None:
        _session.note("cpu warning", "the load process used most of one CPU", {"percent": float(cpu_usage)})


_events: Any = events
_events.init_command_line_parser.add_listener(_declare)
_events.test_start.add_listener(_start)
_events.test_stop.add_listener(_stop)
_events.quit.add_listener(_stop)
_events.quitting.add_listener(_quitting)
_events.user_error.add_listener(_user_error)
_events.cpu_warning.add_listener(_cpu_warning)
