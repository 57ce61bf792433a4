"""One request after the other on one connection: sent, read to its end, judged, and written down as a row."""

from __future__ import annotations

from time import monotonic
from typing import Any, NamedTuple

import gevent
from gevent import GreenletExit
from geventhttpclient.response import HTTPConnectionClosed

from pytest_kvcache.load import contract
from pytest_kvcache.load.client import FAILURES, connect, headers_of, pump, read_body, unpacker
from pytest_kvcache.load.numbers import tell
from pytest_kvcache.load.plans import Plan
from pytest_kvcache.load.rejections import classify, said_lengths
from pytest_kvcache.load.session import LoadSession
from pytest_kvcache.load.sse import Stream
from pytest_kvcache.records import RequestRow

# Servers close idle connections (uvicorn after 5 s); one that was idle for longer than this is not used again.
IDLE_REUSE_S = 2.0
# What may go better a moment later, as long as nothing of an answer has come.
_RETRIED = frozenset({contract.QUEUE_FULL, contract.RATE_LIMITED, contract.SERVER_ERROR, contract.REFUSED_CONNECTION, contract.RESET})
_LONGEST_BACKOFF_S = 30.0
_MOST_DOUBLINGS = 16
_CLOSED = (HTTPConnectionClosed, ConnectionResetError, BrokenPipeError)


class Ended(NamedTuple):
    """How a request ended, when in monotonic seconds, and whether it was refused or failed."""

    outcome: str
    end_s: float
    refused: bool


class Sender:
    """A connection to one server of the load, by its index."""

    def __init__(self, session: LoadSession, index: int) -> None:
        self.session = session
        self.index = index
        self._target = session.targets[index]
        self._headers = self._target.request_headers()
        self._http: Any = None
        self._idle_since_s = 0.0
        self._sent_s = 0.0

    def send(self, number: int, lane: str, plan: Plan, key: str, intended_s: float) -> Ended:
        """Send one planned request, record what became of it, and return how it ended.

        ``key`` names its prompt; ``intended_s`` is when it should have started, in monotonic seconds. With ``--kv-retries`` it goes out again where it was
        refused or failed before its first token. Raises GreenletExit, with its row written, when the load ends meanwhile.
        """
        attempt, due_s = 0, intended_s
        while True:
            ended, wait_s = self._attempt(number, lane, plan, key, due_s, attempt, intended_s)
            if wait_s is None:
                return ended
            attempt, due_s = attempt + 1, ended.end_s + wait_s
            try:
                gevent.sleep(max(0.0, due_s - monotonic()))
            except GreenletExit:
                self.session.dropped()
                raise
            if self.session.reason or not self.session.active:
                self.session.dropped()
                return ended

    def _again_in(self, outcome: str, stream: Stream, retry_after_s: float | None, attempt: int) -> float | None:
        """Return after how many seconds the request is sent again; None where it is not: nothing is, unless it was asked for."""
        knobs = self.session.knobs
        if attempt >= knobs.retries or outcome not in _RETRIED or stream.first_token_s is not None or self.session.reason:
            return None
        wait_s = min(knobs.backoff_s * 2 ** min(attempt, _MOST_DOUBLINGS), _LONGEST_BACKOFF_S) if retry_after_s is None else retry_after_s
        return wait_s if wait_s <= knobs.request_timeout_s else None

    def _attempt(self, number: int, lane: str, plan: Plan, key: str, intended_s: float, attempt: int, first_s: float) -> tuple[Ended, float | None]:
        """Send a request once and record it; return how it ended, and after how many seconds it is sent again (None: not)."""
        session, target = self.session, self._target
        try:
            assert session.source is not None
            prompt = session.source.make(plan.prompt, session.knobs.seed, key, before=plan.before, number=number)
            output_tokens = target.output_tokens(prompt.output_tokens or plan.output)
            body = session.head(self.index, output_tokens) + prompt.json + target.body_tail
        except Exception:
            session.dropped()
            raise
        stream = Stream(session.knobs.keep_text)
        leaving: GreenletExit | None = None
        status = 0
        timer = gevent.Timeout(session.knobs.request_timeout_s)
        timer.start()
        self._sent_s = monotonic()
        try:
            response = self._request(body)
            status = response.get_code()
            verdict = self._read(response, status, stream, output_tokens)
        except gevent.Timeout as fired:
            if fired is not timer:
                session.dropped()
                raise
            verdict = self._broken(stream, status, f"Timeout: no end within {session.knobs.request_timeout_s:g} s", output_tokens)
        except GreenletExit as exit_:
            leaving = exit_
            verdict = contract.CUT_OFF, "the load ended while this request was in flight", None
            self.close()
        except FAILURES as error:
            verdict = self._broken(stream, status, f"{type(error).__name__}: {error}", output_tokens)
        finally:
            timer.close()
        sent_s, end_s = self._sent_s, stream.last_s if stream.done else monotonic()
        outcome, error_text, retry_after_s = verdict
        self._idle_since_s = end_s
        offset_s = session.offset_s
        again_s = self._again_in(outcome, stream, retry_after_s, attempt)
        session.record(
            RequestRow(
                id=number,
                lane=lane,
                intended_s=round(offset_s + intended_s, 6),
                sent_s=round(offset_s + sent_s, 6),
                end_s=round(offset_s + end_s, 6),
                outcome=outcome,
                worker=session.worker,
                endpoint=self.index,
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
                prefix_id="" if plan.shared is None else plan.shared[0],
                prefix_tokens=None if plan.shared is None else plan.shared[1] + session.source.front,
                prompt=prompt.text if session.knobs.keep_text else None,
                answer=stream.answer,
                attempt=attempt,
                first_intended_s=round(offset_s + first_s, 6) if attempt else None,
            ),
            last=again_s is None,
        )
        if leaving is not None:
            raise leaving
        if outcome == contract.OVER_LENGTH:
            self._compare_limit(error_text, output_tokens)
        failed = contract.is_rejection(outcome)
        failure = (f"{outcome} (HTTP {status})" if status else outcome) if failed else ""
        tell(session.environment, lane, f"{target.path} {lane}", failure, sent_s, end_s, stream, first_s if attempt else None)
        return Ended(outcome, end_s, failed), again_s

    def _compare_limit(self, error: str, output_tokens: int) -> None:
        """Note once that the server refuses by another limit than lengths were planned by: then the plan is wrong, not the server."""
        session = self.session
        said, planned = said_lengths(error).limit, session.max_model_len
        if said is None or planned is None or session.limit_told or said in (planned, planned - output_tokens):
            return
        session.limit_told = True
        session.note("limit", f"the server says that its limit is {said} tokens, and lengths were planned for {planned}: see --kv-max-model-len")

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        http, self._http = self._http, None
        if http is not None:
            http.close()

    def _request(self, body: bytes) -> Any:
        """Send the request and return the answer once its headers are there.

        Some servers (llama.cpp) close a kept connection after a stream without saying so. A request that meets that has not
        been read by anybody: it goes out again on a new connection, and from then on every request gets its own.
        """
        http, session, target = self._http, self.session, self._target
        if http is not None and not session.own_connections[self.index] and self._sent_s - self._idle_since_s <= IDLE_REUSE_S:
            try:
                return http.request("POST", target.path, body, self._headers)
            except _CLOSED:
                session.kept_connection_closed(self.index)
                self._sent_s = monotonic()
        self.close()
        self._http = http = connect(target)
        return http.request("POST", target.path, body, self._headers)

    def _read(self, response: Any, status: int, stream: Stream, planned: int) -> tuple[str, str, float | None]:
        kind = str(response.get("content-type") or "")
        try:
            unpack = unpacker(response)
        except ValueError as unknown:
            response.release()
            return contract.SERVER_ERROR, str(unknown), None
        prepared = self.session.prepared
        expects_usage = prepared is not None and prepared.expects_usage
        if status == 200 and "event-stream" in kind:
            pump(response, stream, unpack)
            stream.finish(monotonic())
            return stream.outcome(planned, expects_usage)
        body = read_body(response)
        if unpack is not None:
            body = unpack(body)
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
        self.close()
        if stream.error is not None or (stream.finish_reason and stream.completion_tokens is not None):
            return stream.outcome(planned, expects_usage=True)
        return classify(status, exception=exception, in_stream=status != 0)
