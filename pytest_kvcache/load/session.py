"""One load inside the Locust process: prepared once, counted, watched, and written down from its start line to its end line."""

from __future__ import annotations

import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import gevent
from locust.runners import STATE_CLEANUP, STATE_STOPPED

from pytest_kvcache.errors import Broken, CannotWrite, KvError
from pytest_kvcache.load import contract
from pytest_kvcache.load.arrivals import Stage, is_listed, total_s
from pytest_kvcache.load.flags import Knobs
from pytest_kvcache.load.lags import Lags, call_at
from pytest_kvcache.load.link import MASTER_GONE_S, Link
from pytest_kvcache.load.opening import learn, make_loop, open_rows, stages_of, write_start
from pytest_kvcache.load.pieces import RowsSender
from pytest_kvcache.load.prepare import Prepared, failure_text
from pytest_kvcache.load.prompts import PromptSource
from pytest_kvcache.load.rejections import clean_text
from pytest_kvcache.load.rowsfile import FLUSH_S, RowsFile
from pytest_kvcache.load.target import Handed, Target
from pytest_kvcache.records import LoadEnd, LoadNote, RequestRow

if TYPE_CHECKING:
    from pytest_kvcache.load.openloop import OpenLoop
    from pytest_kvcache.load.users import KvUser

BEAT_S = 0.05
GONE_AFTER_S = 15.0
GONE_AFTER_REFUSALS = 10
SIGNAL_STOP_S = 2.0
NOTES_LIMIT = 200
ERRORS_LIMIT = 50


@dataclass(frozen=True)
class Shape:
    """What the profile's user classes need: lanes, the longest context, default output tokens; whether prompts repeat one another."""

    profile: str
    lanes: tuple[str, ...]
    needs_limit: bool
    output_tokens: int
    shares: bool = False
    classes: tuple[type[KvUser], ...] = ()


class LoadSession:
    """The state of one load. ``offset_s`` turns this process's monotonic clock into Unix seconds.

    A worker has a ``link`` to its master: its rows go there, it begins when the master says so, and only the master ends the load.
    Requests are numbered ``first``, ``first + step`` and so on, so that no two workers have one number.
    """

    def __init__(self, environment: Any, handed: Handed | None, knobs: Knobs, shape: Shape, link: Link | None = None) -> None:
        self.environment = environment
        self.handed = handed
        self.knobs = knobs
        self.shape = shape
        self.link = link
        self.offset_s = link.base_s if link is not None else time.time() - monotonic()
        self.begun_s = monotonic()
        self.output_tokens = knobs.output_tokens or shape.output_tokens
        self.load = str(getattr(environment.parsed_options, "kv_load", ""))
        self.nonce = knobs.nonce or secrets.token_hex(8)
        self.workers, self.worker_index, self.worker = 1, 0, ""
        self.first, self.step = 0, 1
        self.targets: list[Target] = []
        self.prepared: Prepared | None = None
        self.source: PromptSource | None = None
        self.max_model_len: int | None = None
        self.shares = shape.shares
        self.stages: tuple[Stage, ...] = ()
        self.loop: OpenLoop | None = None
        self.t0_s: float | None = None
        self.rows: RowsFile | RowsSender | None = None
        self.reason = ""
        self.failed = False
        self.active = False
        self.taken = 0
        self.finished = 0
        self.in_flight = 0
        self.cut_off = 0
        self.own_connections: list[bool] = []
        self.resent = 0
        self.limit_told = False
        self._users = 0
        self._talks = 0
        self._notes = 0
        self._errors = 0
        self._refused = 0
        self._refused_since_s = 0.0
        self._lags = Lags()
        self._cpu_start_s = 0.0
        self._began_s = 0.0
        self._heads: dict[tuple[int, int], bytes] = {}
        self._greenlets: list[Any] = []

    # before the load

    def start(self) -> None:
        """Learn what is needed from the server, open the file and write its start line; on failure say why once and stop."""
        try:
            open_rows(self)
            self.stages = stages_of(self)
            learn(self)
            self.loop = make_loop(self)
            write_start(self)
        except KvError as error:
            self.fail(error)
            return
        except Exception as error:
            self.fail(Broken(f"the preparation broke: {type(error).__name__}: {error}", hint="please report this with the traceback in the log"))
            traceback.print_exc()
            return
        if self.link is None:
            self._begin()

    def went(self) -> None:
        """The master says that the load begins, and which part of it is this worker's."""
        link = self.link
        assert link is not None
        self.workers, self.worker_index, self.worker, self.first, self.step = link.workers, link.index, link.name, link.first, link.step
        self.offset_s = link.base_s + link.offset_s
        if self.loop is not None:
            self.loop.cap = max(1, self.loop.cap // self.workers)
        self._begin()

    def _begin(self) -> None:
        """Begin to count, to watch and to measure the time."""
        self.begun_s = self.link.begin_s if self.link is not None else monotonic()
        self.active = True
        self.t0_s = self.begun_s
        self._cpu_start_s = time.process_time()
        self._began_s = monotonic()
        gevent.get_hub().loop.update_now()  # its clock stood still while the preparation computed: timers would fire early
        self._spawn(self._beat)
        if self.length_s() > 0:
            self._greenlets.append(call_at(self.begun_s + self.length_s(), self.stop, contract.BY_DURATION))
        self._end_by_count()

    def length_s(self) -> float:
        """Return how long the load may last: its own length, or Locust's -t, also where the page was asked to start without one."""
        listed_s = total_s(self.stages) if is_listed(self.knobs.stages) else 0.0
        return self.knobs.duration_s or listed_s or self.run_time_s

    @property
    def run_time_s(self) -> float:
        """Locust's own -t in seconds; 0 without one."""
        return float(getattr(self.environment.parsed_options, "run_time", 0) or 0)

    @property
    def planned_users(self) -> int:
        """How many users the load is to reach in its closed loop; 0 where its loop is open."""
        if self.knobs.rate or self.loop is not None:
            return 0
        users = int(getattr(self.environment.runner, "target_user_count", 0) or 0)
        highest = max((max(stage.first, stage.last) for stage in self.stages), default=0.0)
        return max(users, round(highest))

    # during the load

    def now_s(self) -> float:
        """Return Unix seconds on the monotonic clock."""
        return self.offset_s + monotonic()

    def take(self) -> int | None:
        """Return the number of the next request; None where no more are wanted."""
        number = self.first + self.taken * self.step
        if not self.active or self.reason or (self.knobs.requests and number >= self.knobs.requests):
            return None
        self.taken += 1
        self.in_flight += 1
        return number

    def begin_talk(self) -> int:
        """Return the number of the next conversation; lengths and texts are drawn by it."""
        number = self.first + self._talks * self.step
        self._talks += 1
        return number

    def begun_at(self) -> float:
        """Return when the load began, in monotonic seconds: arrivals of all workers count from there."""
        return self.t0_s or self.begun_s

    def sent_all(self) -> None:
        """Every arrival of the schedule was sent and has ended: the load is over, with those of the other workers."""
        if not self.reason:
            self._spawn(self.stop, contract.BY_REQUESTS)

    def place(self) -> tuple[int, float]:
        """Return (index of its server, seconds until its start) for the next user: servers in turn, starts evenly over the ramp.

        A user of a worker waits here until all workers begin together.
        """
        if self.link is not None:
            self.link.went.wait()
        number = self._users
        self._users += 1
        users = max(1, int(getattr(self.environment.runner, "target_user_count", 1)))
        share = (number % users + self.worker_index / self.workers) / users
        ramp_s = 0.0 if self.stages else self.knobs.ramp_over_s(self.length_s())
        wait_s = max(0.0, self.begun_s - monotonic()) if self.link is not None else 0.0
        return (number * self.workers + self.worker_index) % max(1, len(self.targets)), wait_s + ramp_s * share

    def head(self, index: int, output_tokens: int) -> bytes:
        """Return the JSON of a request up to its prompt; made once for each server and number of tokens."""
        head = self._heads.get((index, output_tokens))
        if head is None:
            assert self.prepared is not None
            if len(self._heads) > 4096:
                self._heads.clear()
            head = self.targets[index].body_head(output_tokens, ignore_eos=self.prepared.ignore_eos, usage=self.prepared.usage)
            self._heads[index, output_tokens] = head
        return head

    def record(self, row: RequestRow, *, last: bool = True) -> None:
        """Take the row of a request that has ended, or with ``last`` False of an attempt after which it is sent again."""
        self.in_flight -= last
        self.finished += last
        if self.rows is not None:
            self.rows.add(row)
        if row.outcome == contract.REFUSED_CONNECTION:
            self._refused_since_s = self._refused_since_s if self._refused else monotonic()
            self._refused += 1
        else:
            self._refused = 0
            self.cut_off += row.outcome == contract.CUT_OFF
        self._end_by_count()

    def _end_by_count(self) -> None:
        if self.knobs.requests and self.finished >= len(range(self.first, self.knobs.requests, self.step)) and not self.reason:
            self._spawn(self.stop, contract.BY_REQUESTS)

    def kept_connection_closed(self, index: int) -> None:
        """Count a request that met a closed kept connection; requests to that server get their own connections from now on."""
        self.resent += 1
        if not self.own_connections[index]:
            self.own_connections[index] = True
            self.note("connections", f"the server {index} closes kept connections unsaid: each request gets its own from now on")

    def dropped(self) -> None:
        """Count a request that broke in our own code before it had a row, or that is not sent again any more."""
        self.in_flight -= 1
        self.finished += 1
        self._end_by_count()

    def note(self, subject: str, text: str, values: Mapping[str, float] | None = None) -> None:
        """Write a note; after 200 of them no more, so that no fault of ours fills a disk."""
        self._notes += 1
        if self.rows is not None and self._notes <= NOTES_LIMIT:
            self.rows.put(LoadNote(self.now_s(), subject, clean_text(text, 2000), dict(values or {})))

    def task_failed(self, error: BaseException) -> None:
        """Note an exception in a task; where they do not end, or where it is the user's own mistake, stop."""
        if isinstance(error, KvError):
            if not self.failed:
                self.fail(error)
            return
        self._errors += 1
        places = traceback.extract_tb(error.__traceback__)
        where = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
        self.note("task exception", f"{type(error).__name__}: {error}{where}")
        if self._errors >= ERRORS_LIMIT and self._errors > self.finished // 2 and not self.reason:
            self.fail(Broken(f"the profile's task keeps failing: {type(error).__name__}: {error}{where}", hint="look at its traceback in the log"))

    def _beat(self) -> None:
        """Measure the event loop's own lag, write rows to disk, and see whether there is still somebody to press for."""
        flushed_s = monotonic()
        due_s = flushed_s + BEAT_S
        while True:
            gevent.sleep(max(0.0, due_s - monotonic()))
            woke_s = monotonic()
            self._lags.add(woke_s - due_s)
            if woke_s - flushed_s >= FLUSH_S:
                flushed_s = woke_s
                self._watch(woke_s)
            due_s = woke_s + BEAT_S

    def _watch(self, now_s: float) -> None:
        rows = self.rows
        if rows is not None:
            rows.flush()
            if rows.failure and not self.reason:
                self.fail(CannotWrite(rows.failure, hint="free space on that disk; the rows so far are kept"))
        if self.link is not None:
            if isinstance(rows, RowsSender) and rows.silent_s > MASTER_GONE_S and not self.reason:
                self.reason = contract.BY_PARENT
                self._spawn(self.environment.runner.quit)
        elif self.handed is not None and self.handed.parent and os.getppid() != self.handed.parent and not self.reason:
            self._spawn(self.stop, contract.BY_PARENT)
        if self._refused >= GONE_AFTER_REFUSALS and now_s - self._refused_since_s > GONE_AFTER_S and not self.reason:
            self.say("nobody accepts connections any more: the load stops")
            self._spawn(self.stop, contract.BY_SERVER)

    # the end

    def stop(self, reason: str) -> None:
        """End the load for a reason of ours: the process in headless mode, the test on the web page."""
        runner = self.environment.runner
        if self.reason or runner.state in {STATE_CLEANUP, STATE_STOPPED}:
            return
        self.reason = reason
        if self.link is not None:
            if reason != contract.BY_DURATION:  # the master has a clock of its own
                self.link.wish(reason)
        elif self.handed is not None or getattr(self.environment.parsed_options, "headless", False):
            runner.quit()
        else:
            runner.stop()

    def fail(self, error: KvError) -> None:
        """Say once what went wrong, write it down, and stop. A worker leaves the saying to its master."""
        self.failed = True
        if self.link is not None:
            self.environment.host = self.environment.host or "http://127.0.0.1"
            self.link.failed(failure_text(error))
            self.halted(contract.BY_FAILURE)
            return
        self.say(str(error))
        self.environment.process_exit_code = error.exit_code
        self.environment.host = self.environment.host or "http://127.0.0.1"
        if self.rows is not None:
            self.rows.put(LoadNote(self.now_s(), contract.FAILED_NOTE, failure_text(error)))
        runner = self.environment.runner
        if runner is not None and hasattr(runner, "log_exception"):
            runner.log_exception("local", str(error), "")
        gevent.spawn(self.stop, contract.BY_FAILURE)

    def halted(self, reason: str) -> None:
        """Take the master's word that the load ends; users that still wait for its beginning go home."""
        self.reason = self.reason or reason
        if self.link is not None:
            self.link.went.set()

    def stopping(self) -> None:
        """Locust begins to stop the users: nothing is to be done."""

    def interrupted(self) -> None:
        """Locust quits while the load runs: a signal. What is in flight gets two seconds."""
        if self.rows is not None and not self.reason:
            self.halted(contract.BY_SIGNAL)
        self.environment.stop_timeout = min(self.environment.stop_timeout or 0.0, SIGNAL_STOP_S)

    def finish(self) -> None:
        """Write the end line and close the file."""
        rows = self.rows
        if rows is None:
            return
        ran_out = self.run_time_s > 0 and monotonic() - self.begun_s >= self.run_time_s - 0.5
        reason = self.reason or (contract.BY_DURATION if ran_out else contract.BY_STOP)
        if self.resent:
            text = "requests that went out again because their kept connection was closed before anybody read them"
            rows.put(LoadNote(self.now_s(), "connections", text, {"resent": self.resent}))
        clock = self.link.clock if self.link is not None else None
        rows.put(
            LoadEnd(
                wall_s=self.now_s(),
                rows=rows.rows,
                reason=contract.BY_FAILURE if self.failed else reason,
                worker=self.worker,
                cpu_s=time.process_time() - self._cpu_start_s if self.active else 0.0,
                ran_s=monotonic() - self._began_s if self.active else 0.0,
                lag_p99_s=self._lags.p99,
                lag_max_s=self._lags.most,
                in_flight=self.cut_off,
                clock_offset_s=self.link.offset_s if self.link is not None else None,
                clock_error_s=clock.error_s if clock is not None else None,
            )
        )
        if rows.failure and not self.failed:
            self.say(rows.failure)
            self.environment.process_exit_code = CannotWrite.exit_code
        if self.link is not None:
            self.link.drain()
        rows.close()
        self.rows = None
        self.active = False
        for greenlet in self._greenlets:
            if greenlet is not gevent.getcurrent():
                greenlet.kill(block=False)

    def say(self, text: str) -> None:
        """Print a line of ours to stderr; of several workers only the master speaks."""
        if self.link is None:
            print(f"pytest-kvcache: {text}", file=sys.stderr, flush=True)  # noqa: T201

    def _spawn(self, function: Callable[..., None], *arguments: object) -> None:
        self._greenlets.append(gevent.spawn(function, *arguments))
