"""The master's part of a load with several workers: it sends no requests; it starts the workers together, and gathers their rows.

Rows go to disk as they come, so that a master that is killed leaves all that it had. At the end they are put in order. A worker that
goes missing is told, and an end line written for it makes the file incomplete.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import Any

import gevent
import msgspec

from pytest_kvcache.errors import Broken, CannotWrite, KvError, UsageError
from pytest_kvcache.load import contract, link
from pytest_kvcache.load.flags import Knobs
from pytest_kvcache.load.lags import call_at
from pytest_kvcache.load.ordering import put_in_order
from pytest_kvcache.load.prepare import failure_text
from pytest_kvcache.load.provenance import argv
from pytest_kvcache.load.rejections import clean_text
from pytest_kvcache.load.rowsfile import RowsFile, rows_path
from pytest_kvcache.load.target import Handed
from pytest_kvcache.records import LoadEnd, LoadLine, LoadNote, LoadStart

PREPARE_S = 300.0
WATCH_S = 0.5
HEAD_START_S = 0.2
# A worker that quits says so before its last rows are here.
MISSING_S = 5.0
SIGNAL_STOP_S = 2.0
HALT_S = 30.0
LATE_NUMBERS = 10**12
PIECE_LIMIT = 2**26
_REQUEST = b'{"kind":"request"'
_MUST_AGREE = ("lanes", "model", "api", "max_model_len", "length_source", "ignore_eos", "expects_usage", "profile_options")

_line = msgspec.json.Decoder(LoadLine)


@dataclass
class Seat:
    """One worker of this load, by the name that its rows bear."""

    client: str
    index: int
    pieces: int = 0
    rows: int = 0
    start: LoadStart | None = None
    end: LoadEnd | None = None
    went: bool = False
    wish: str = ""
    missing_since_s: float = 0.0
    lost: str = ""

    @property
    def name(self) -> str:
        """``w0``, ``w1`` and so on, in the order in which Locust counts them."""
        return f"w{self.index}"

    @property
    def over(self) -> bool:
        """Whether nothing more is expected of it."""
        return bool(self.end is not None or self.lost)


class MasterSession:
    """The state of one load on the master. It offers Locust's hooks what LoadSession offers them."""

    def __init__(self, environment: Any, handed: Handed | None, knobs: Knobs, profile: str) -> None:
        self.environment = environment
        self.handed = handed
        self.knobs = knobs
        self.profile = profile
        self.load = secrets.token_hex(8)
        self.rows: RowsFile | None = None
        self.seats: dict[str, Seat] = {}
        self.reason = ""
        self.failed = False
        self.active = False
        self.begun_s = 0.0
        self.length_s = 0.0
        self._opened_s = monotonic()
        self._base_s = time.time() - self._opened_s
        self._halting = self._collected = False
        self.listener: Any = None
        self._early: deque[LoadNote] = deque(maxlen=1000)
        self._greenlets: list[Any] = []

    # before the load

    def start(self) -> None:
        """Open the file and wait for the workers that Locust now tells to begin; on failure say why once and stop."""
        options = self.environment.parsed_options
        options.kv_load = self.load
        options.kv_nonce = self.knobs.nonce or secrets.token_hex(8)  # the workers get it with all other options
        clients = self.environment.runner.clients
        for client in (*clients.ready, *clients.spawning, *clients.running):
            self.seats[client.id] = Seat(client.id, len(self.seats))
        try:
            self.rows = RowsFile(rows_path(self.knobs.rows, self.profile, fixed=self.handed is not None))
        except KvError as error:
            self.fail(error)
            return
        self._greenlets.append(gevent.spawn(self._conduct))

    def _conduct(self) -> None:
        deadline_s = monotonic() + PREPARE_S
        while any(seat.start is None and not seat.over for seat in self.seats.values()):
            if monotonic() > deadline_s:
                names = ", ".join(seat.name for seat in self.seats.values() if seat.start is None)
                self.fail(Broken(f"the workers {names} were not ready within {PREPARE_S:.0f} s", hint="look at their logs"))
                return
            gevent.sleep(0.02)
            self._watch()
        if self.reason or self.failed:
            return
        try:
            start = self._agreed()
        except KvError as error:
            self.fail(error)
            return
        self._begin(start)
        while True:
            gevent.sleep(WATCH_S)
            self._watch()

    def _agreed(self) -> LoadStart:
        """Return the start line of the whole load. Raises UsageError where workers found different things, Broken where none is left."""
        ready = [(seat, seat.start) for seat in self.seats.values() if seat.start is not None and not seat.over]
        if not ready:
            raise Broken("no worker is left before the load began", hint="look at the workers' logs")
        first, start = ready[0]
        for seat, other in ready[1:]:
            differ = [name for name in _MUST_AGREE if other.options.get(name) != start.options.get(name)]
            if differ:
                name = differ[0]
                shown = [clean_text(str(line.options.get(name)), 100) for line in (start, other)]
                raise UsageError(
                    f"the workers disagree on {name.replace('_', ' ')}: {first.name} says {shown[0]}, {seat.name} says {shown[1]}",
                    hint="give every worker the same profile, package version and servers",
                )
        open_loop, users = bool(start.options.get("arrivals")), int(self.environment.runner.target_user_count)
        if users < len(ready) and (open_loop or self.knobs.requests):
            raise UsageError(f"{len(ready)} load workers need {len(ready)} users, and there are {users}", hint="raise -u, or take fewer workers")
        self.length_s = float(start.options.get("duration_s") or 0) or float(getattr(self.environment.parsed_options, "run_time", 0) or 0)
        options = {
            **start.options,
            "users": 0 if open_loop else max(users, int(start.options.get("users", 0))),
            "duration_s": self.length_s,
            "workers": {seat.name: seat.client.rpartition("_")[0] or seat.client for seat in self.seats.values()},
        }
        return msgspec.structs.replace(start, profile=self.profile, wall_s=self.now_s(), worker="", options=options, argv=argv())

    def _begin(self, start: LoadStart) -> None:
        assert self.rows is not None
        self.rows.put(start)
        self.active = True
        self._put_early(self.rows)
        begin_s = self.now_s() + HEAD_START_S
        seats = [seat for seat in self.seats.values() if seat.start is not None and not seat.over]
        for place, seat in enumerate(seats):
            self._go(seat, place, len(seats), begin_s, first=place, step=len(seats))
        limit = start.options.get("max_model_len") or "unknown"
        self.say(
            f"{start.profile}: {len(seats)} workers, model {clean_text(str(start.options.get('model')), 100)}, longest context {limit}, "
            f"lengths by {start.options.get('length_source')}, rows in {self.rows.path}"
        )
        self.begun_s = begin_s - self._base_s
        if self.length_s > 0:
            self._greenlets.append(call_at(self.begun_s + self.length_s, self.stop, contract.BY_DURATION))

    def _put_early(self, rows: RowsFile) -> None:
        """Write what workers noted before the start line."""
        while self._early:
            rows.put(self._early.popleft())

    def _go(self, seat: Seat, place: int, workers: int, begin_s: float, *, first: int, step: int) -> None:
        seat.went = True
        self._tell(seat, link.GO, {"index": place, "workers": workers, "begin_s": begin_s, "first": first, "step": step, "name": seat.name})

    # during the load

    def now_s(self) -> float:
        """Return Unix seconds on this process's monotonic clock, which is the clock of all rows."""
        return self._base_s + monotonic()

    def begun_at(self) -> float:
        """Return when the load began, in monotonic seconds."""
        return self.begun_s

    def took(self, client: str, number: int, data: bytes) -> None:
        """Take the next piece of a worker's lines and say which came last; a piece that came before is only said again."""
        seat = self._seat(client)
        if seat is None or self.rows is None:
            return
        if number == seat.pieces + 1 and len(data) <= PIECE_LIMIT:
            seat.pieces = number
            self._file(seat, data)
        self._tell(seat, link.TAKEN, {"number": seat.pieces})

    def _seat(self, client: str) -> Seat | None:
        seat = self.seats.get(client)
        if seat is None and self.active and not self.reason:
            seat = self.seats[client] = Seat(client, len(self.seats))
            self.note("workers", f"the worker {seat.name} came after the load had begun")
        return seat

    def _file(self, seat: Seat, data: bytes) -> None:
        rows = self.rows
        assert rows is not None
        whole = []
        count = 0
        for line in data.split(b"\n"):
            if line.startswith(_REQUEST):
                count += 1
                whole.append(line)
            elif line:
                self._frame(seat, line)
        seat.rows += count
        if whole:
            rows.take(b"\n".join(whole) + b"\n", count)

    def _frame(self, seat: Seat, line: bytes) -> None:
        try:
            said = _line.decode(line)
        except msgspec.DecodeError as error:
            self.note("workers", f"the worker {seat.name} sent a line that cannot be read: {error}")
            return
        if isinstance(said, LoadEnd):
            seat.end = msgspec.structs.replace(said, worker=seat.name)
        elif isinstance(said, LoadNote):
            if self.active and self.rows is not None:
                self.rows.put(said)
            else:
                self._early.append(said)
        elif isinstance(said, LoadStart):
            seat.start = said
            if self.active and not seat.went:
                first = LATE_NUMBERS * (seat.index + 1)
                self._go(seat, seat.index, seat.index + 1, self.now_s(), first=first, step=1)

    def wished(self, client: str, reason: str) -> None:
        """A worker wants the load to end: at once, or with the last of them where it has sent its share of a counted load."""
        seat = self.seats.get(client)
        if seat is None or self.reason:
            return
        seat.wish = reason
        if reason != contract.BY_REQUESTS or all(other.wish == reason for other in self.seats.values() if not other.over):
            self._greenlets.append(gevent.spawn(self.stop, reason))

    def worker_failed(self, client: str, text: str) -> None:
        """A worker cannot go on: say why once for all of them, and stop."""
        if not self.failed and client in self.seats:
            what, where, hint = (*text.split("\n"), "", "")[:3]
            self.fail(Broken(what, where=where, hint=hint))

    def _watch(self) -> None:
        rows = self.rows
        if rows is not None and rows.failure and not self.failed:
            self.fail(CannotWrite(rows.failure, hint="free space on that disk; the rows so far are kept"))
        if self.handed is not None and self.handed.parent and os.getppid() != self.handed.parent and not self.reason:
            self._greenlets.append(gevent.spawn(self.stop, contract.BY_PARENT))
        now_s = monotonic()
        clients = self.environment.runner.clients
        for seat in self.seats.values():
            node = clients.get(seat.client)
            if seat.over or (node is not None and node.state != "missing"):
                seat.missing_since_s = 0.0
            elif not seat.missing_since_s:
                seat.missing_since_s = now_s
            elif now_s - seat.missing_since_s > MISSING_S:
                self._lose(seat, "it does not answer any more")
        if self.seats and all(seat.lost for seat in self.seats.values()) and not self.reason:
            self._greenlets.append(gevent.spawn(self.stop, contract.BY_WORKER))

    def _lose(self, seat: Seat, why: str) -> None:
        seat.lost = why
        host = seat.client.rpartition("_")[0]
        text = f"the worker {seat.name} on {host} was lost ({why}): {seat.rows} of its requests are kept, and its share of the load is missing"
        self.note(contract.LOST_NOTE, text)
        self.say(text)
        self.environment.process_exit_code = self.environment.process_exit_code or Broken.exit_code

    def note(self, subject: str, text: str, values: dict[str, float] | None = None) -> None:
        """Write a note of the master's own."""
        if self.rows is not None:
            self.rows.put(LoadNote(self.now_s(), subject, clean_text(text, 2000), values or {}))

    def task_failed(self, error: BaseException) -> None:
        """Workers note the exceptions of their tasks; the master has none."""

    # the end

    def stop(self, reason: str) -> None:
        """End the load for a reason of ours: the process in headless mode, the test on the web page."""
        if self.reason:
            return
        self.reason = reason
        if self.handed is not None or getattr(self.environment.parsed_options, "headless", False):
            self.environment.runner.quit()
        else:
            self.environment.runner.stop()

    def fail(self, error: KvError) -> None:
        """Say once what went wrong, write it down, and stop."""
        self.failed = True
        self.say(str(error))
        self.environment.process_exit_code = error.exit_code
        if self.rows is not None:
            self.rows.put(LoadNote(self.now_s(), contract.FAILED_NOTE, failure_text(error)))
        self._greenlets.append(gevent.spawn(self.stop, contract.BY_FAILURE))

    def interrupted(self) -> None:
        """Locust quits while the load runs: a signal. What is in flight gets two seconds."""
        if not self.reason:
            self.reason = contract.BY_SIGNAL
        self.environment.stop_timeout = min(self.environment.stop_timeout or 0.0, SIGNAL_STOP_S)

    def stopping(self) -> None:
        """Tell the workers to stop and wait for their last rows: Locust itself would be gone half a second later."""
        if self._halting:
            while not self._collected:
                self._wait()
            return
        self._halting = True
        reason = self.reason or (contract.BY_DURATION if self._ran_out() else contract.BY_STOP)
        self.reason = reason
        within_s = float(self.environment.stop_timeout or 0.0)
        for seat in self.seats.values():
            if not seat.over:
                self._tell(seat, link.HALT, {"reason": reason, "within_s": within_s})
        deadline_s = monotonic() + within_s + HALT_S
        while any(not seat.over for seat in self.seats.values()) and monotonic() < deadline_s:
            self._wait()
            self._watch()
        for seat in self.seats.values():
            if not seat.over:
                self._lose(seat, "it did not send its end")
        self._collected = True

    def _wait(self) -> None:
        """Let the workers' messages come: where Locust stops the test out of its own listener, nobody else would read them."""
        if gevent.getcurrent() is not self.listener:
            gevent.sleep(0.02)
            return
        runner = self.environment.runner
        come = None
        with gevent.Timeout(0.05, False):
            come = runner.server.recv_from_client()
        if come is not None:
            runner.handle_message(*come)

    def _ran_out(self) -> bool:
        """Say whether Locust's own -t has ended the load."""
        run_time = float(getattr(self.environment.parsed_options, "run_time", 0) or 0)
        return bool(run_time and self.rows is not None and self.active and monotonic() - self._opened_s >= run_time - 0.5)

    def finish(self) -> None:
        """Write the end lines, put the rows in order, and close the file."""
        rows, self.rows = self.rows, None
        self.environment.parsed_options.kv_nonce = self.knobs.nonce
        if rows is None:
            return
        for greenlet in self._greenlets:
            if greenlet is not gevent.getcurrent():
                greenlet.kill(block=False)
        self._put_early(rows)
        for seat in self.seats.values():
            lost = LoadEnd(self.now_s(), seat.rows, contract.BY_WORKER, worker=seat.name)
            end = seat.end if seat.end is not None and not seat.lost else lost
            rows.put(msgspec.structs.replace(end, reason=contract.BY_FAILURE) if self.failed else end)
        if not self.seats:
            rows.put(LoadEnd(self.now_s(), 0, contract.BY_FAILURE))
        if rows.failure and not self.failed:
            self.say(rows.failure)
            self.environment.process_exit_code = CannotWrite.exit_code
        rows.close()
        if not rows.failure:
            put_in_order(rows.path)

    def _tell(self, seat: Seat, kind: str, data: dict[str, Any]) -> None:
        try:
            self.environment.runner.send_message(kind, {"load": self.load, **data}, client_id=seat.client)
        except Exception:  # a worker that is gone; the watch finds out
            return

    def say(self, text: str) -> None:
        """Print a line of ours to stderr."""
        sys.stderr.write(f"pytest-kvcache: {text}\n")
        sys.stderr.flush()
