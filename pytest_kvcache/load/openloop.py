"""The open loop: each request starts at its own time, whatever became of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from time import monotonic
from typing import TYPE_CHECKING, Any

import gevent
from gevent import GreenletExit
from gevent.event import Event
from gevent.pool import Group

from pytest_kvcache.load.draws import Draw
from pytest_kvcache.load.exchange import Sender
from pytest_kvcache.load.plans import Plan

if TYPE_CHECKING:
    from pytest_kvcache.load.session import LoadSession
    from pytest_kvcache.load.users import KvUser

LOOK_S = 0.1
COUNTED = 2_000_000


class OpenLoop:
    """Sends this worker's share of the arrivals: every n-th time that ``plan()`` yields, in seconds from ``session.t0_s``.

    At most ``cap`` requests are in flight; an arrival that finds them all taken waits, keeps its intended time, and is counted in
    ``held``. Conversations go on after their first request as in the closed loop, by their own think time.
    """

    def __init__(self, session: LoadSession, classes: list[type[KvUser]], plan: Callable[[], Iterator[float]], cap: int) -> None:
        self.session = session
        self.cap = cap
        self.held = 0
        self.longest_wait_s = 0.0
        self.started = 0
        self.taken = False
        self._plan = plan
        self._classes = classes
        self._users: list[Any] = []
        self._shares = _cumulative([float(cls.weight) for cls in classes])
        self._idle: list[list[Sender]] = [[] for _ in session.targets]
        self._group = Group()
        self._freed = Event()

    def _share(self) -> Iterator[tuple[int, float]]:
        """Yield number and time of this worker's arrivals."""
        session = self.session
        shared = islice(enumerate(self._plan()), session.worker_index, None, session.workers)
        most = session.knobs.requests
        return takewhile(lambda arrival: arrival[0] < most, shared) if most else shared

    def scheduled(self, length_s: float) -> int:
        """Return how many arrivals this worker has in a load of that length; at most COUNTED are counted."""
        most = self.session.knobs.requests or COUNTED
        within = takewhile(lambda arrival: not length_s or arrival[1] < length_s, islice(self._share(), min(most, COUNTED)))
        return sum(1 for _ in within)

    def run(self, leaving: Callable[[], bool]) -> None:
        """Start every request at its time until ``leaving``; then wait for those in flight. Killed, it lets each write its row."""
        self.taken = True
        # only now: Locust gives its users their host when it starts them
        self._users = [cls(self.session.environment) for cls in self._classes]
        try:
            self._dispatch(leaving)
            self._group.join()
        except GreenletExit:
            self._group.kill()
            raise
        finally:
            if self.held:
                text = f"arrivals had to wait, for {self.cap} requests were in flight: the load was not open then"
                self.session.note("in-flight cap", text, {"cap": self.cap, "held": self.held, "longest_wait_s": self.longest_wait_s})
        if not leaving():
            self.session.sent_all()

    def _dispatch(self, leaving: Callable[[], bool]) -> None:
        session = self.session
        for number, at_s in self._share():
            intended_s = session.begun_at() + at_s
            while (wait_s := intended_s - monotonic()) > 0 and not leaving():
                gevent.sleep(min(wait_s, LOOK_S))
            if leaving() or not self._has_room(leaving, intended_s):
                return
            self.started += 1
            self._group.add(gevent.spawn(self._talk, number, intended_s))

    def _has_room(self, leaving: Callable[[], bool], intended_s: float) -> bool:
        """Wait until fewer than the cap are in flight; return whether the load goes on."""
        if len(self._group) < self.cap:
            return True
        if not self.held:
            self.session.say(f"{self.cap} requests are in flight: arrivals wait (--kv-max-in-flight), and the load is no longer open")
        self.held += 1
        while len(self._group) >= self.cap:
            if leaving():
                return False
            self._freed.clear()
            self._freed.wait(LOOK_S)
        self.longest_wait_s = max(self.longest_wait_s, monotonic() - intended_s)
        return True

    def _talk(self, number: int, intended_s: float) -> None:
        """Send the request of one arrival, and those that follow it in its conversation."""
        session = self.session
        index = number % len(session.targets)
        idle = self._idle[index]
        sender = idle.pop() if idle else Sender(session, index)
        user = self._user(number)
        try:
            plans = user.conversation(Draw(session.knobs.seed, user.lane, number), session.max_model_len)
            for turn, plan in enumerate(self._plans(plans)):
                if turn and (wait_s := intended_s - monotonic()) > 0:
                    gevent.sleep(wait_s)
                taken = session.take()
                if taken is None:
                    return
                ended = sender.send(taken, plan.lane or user.lane, plan, f"{user.lane}/{number}/{turn}", intended_s)
                if ended.refused:
                    return
                intended_s = ended.end_s + (session.knobs.think_s if plan.think_s is None else plan.think_s)
        except Exception as error:
            session.task_failed(error)
        finally:
            idle.append(sender)
            self._freed.set()

    def _plans(self, plans: Iterator[Plan | tuple[int, int]]) -> Iterator[Plan]:
        for plan in plans:
            yield plan if isinstance(plan, Plan) else Plan(*plan)

    def _user(self, number: int) -> Any:
        if len(self._users) == 1:
            return self._users[0]
        at = Draw(self.session.knobs.seed, "class", number).unit()
        return next(user for user, share in zip(self._users, self._shares, strict=True) if at < share)


def _cumulative(weights: list[float]) -> list[float]:
    total, found = sum(weights), 0.0
    shares = []
    for weight in weights:
        found += weight
        shares.append(found / total)
    shares[-1] = 1.0
    return shares
