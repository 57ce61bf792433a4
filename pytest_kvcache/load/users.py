"""The Locust side of the load: a user that streams one completion after the other and writes one row a request.

A profile is a Locust file with one subclass of ``KvUser`` that says how long prompts and outputs are::

    from pytest_kvcache.load.users import Draw, KvUser, Plan

    class Short(KvUser):
        lane = "short"

        def plan(self, draw: Draw, limit: int | None) -> Plan:
            return Plan(draw.uniform(50, 200), self.output_tokens)

Importing this module imports locust, which patches sockets and sleep of the whole process: only profiles may do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any, ClassVar

import gevent
from locust import FastHttpUser, task
from locust.exception import StopUser
from locust.user.task import LOCUST_STATE_STOPPING

from pytest_kvcache.errors import KvError
from pytest_kvcache.load import contract, files
from pytest_kvcache.load.contract import ProfileOption
from pytest_kvcache.load.draws import Draw, Histogram
from pytest_kvcache.load.exchange import Sender
from pytest_kvcache.load.hooks import state
from pytest_kvcache.load.plans import Part, Plan
from pytest_kvcache.load.session import LoadSession

__all__ = ["Draw", "KvUser", "Part", "Plan", "ProfileOption"]

_BACK_OFF = frozenset(contract.REJECTIONS) - {contract.OVER_LENGTH, contract.CLAMPED, contract.TRUNCATED}


class KvUser(FastHttpUser):
    """A user in a closed loop: it sends a request, reads the stream to its end, waits ``--kv-think-s``, and sends the next.

    With ``--kv-rate``, and where ``schedule`` gives times, the loop is open: requests start at those times, and the number of
    users means nothing.

    A subclass sets ``lane`` (its name in every report; ``lanes`` where its plans name several) and ``plan``; ``users`` and ``default_output_tokens`` are what it takes
    when nothing else is asked for, ``needs_limit`` says that it cannot work without the server's longest context, ``options``
    adds options to the command line, ``defaults`` gives options of the load another default, and ``shares`` says that prompts
    repeat one another on purpose.
    """

    abstract = True
    insecure = False
    lane: ClassVar[str] = ""
    lanes: ClassVar[tuple[str, ...]] = ()
    users: ClassVar[int] = 8
    default_output_tokens: ClassVar[int] = 64
    needs_limit: ClassVar[bool] = False
    shares: ClassVar[bool] = False
    options: ClassVar[tuple[ProfileOption, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.abstract:
            cls.lane = cls.lane or cls.__name__.lower()
            state.profiles.append(cls)

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._sender: Sender | None = None
        self._ready_s = monotonic()
        self._talk: Iterator[Plan | tuple[int, int]] | None = None
        self._talk_key = ""
        self._turn = 0

    def plan(self, draw: Draw, limit: int | None) -> Plan | tuple[int, int]:
        """Return a request: its prompt and output tokens; ``limit`` is the longest context, None where it is not known."""
        raise NotImplementedError

    def conversation(self, draw: Draw, limit: int | None) -> Iterator[Plan | tuple[int, int]]:
        """Yield the requests that one user sends one after the other before it begins anew; of itself one, by ``plan``."""
        yield self.plan(draw, limit)

    @classmethod
    def schedule(cls, session: LoadSession) -> Callable[[], Iterator[float]] | None:
        """Return what yields when requests start, in seconds from the begin of the load, where the profile itself says so (a trace)."""
        return None

    @property
    def output_tokens(self) -> int:
        """How many tokens a request asks for: ``--kv-output-tokens``, or the profile's own number."""
        return state.session.output_tokens if state.session is not None else self.default_output_tokens

    @property
    def think_s(self) -> float:
        """``--kv-think-s``, or the profile's own default of it, in seconds."""
        return state.session.knobs.think_s if state.session is not None else float(self.defaults.get("think_s", 0.0))

    def option(self, name: str) -> Any:
        """Return the value of one of ``options``."""
        assert state.session is not None
        return state.session.knobs.profile_options[name]

    def histogram(self, name: str) -> Histogram | None:
        """Return the histogram that one of ``options`` lists or names a file of; None where it is empty. Raises UsageError."""
        assert state.session is not None
        text = str(self.option(name))
        return files.histogram(state.session.handed, text) if text else None

    def whole(self, parts: tuple[Part, ...]) -> int:
        """Return how many tokens the server counts for a prompt of these parts, with all that it adds."""
        assert state.session is not None
        assert state.session.source is not None
        return state.session.source.whole(parts)

    def on_start(self) -> None:
        """Choose the server that this user keeps to, and wait for this user's part of the ramp."""
        session = state.session
        if session is not None and session.targets:
            index, wait_s = session.place()
            if wait_s > 0:
                gevent.sleep(wait_s)
            self._sender = Sender(session, index)
        self._ready_s = monotonic()

    def wait_time(self) -> float:
        """Return how long Locust lets this user wait, from when it was ready: think time, longer after a refusal."""
        return max(0.0, self._ready_s - monotonic())

    @task
    def press(self) -> None:
        """Send one request and record what became of it."""
        session = state.session
        if session is not None and session.loop is not None and session.active:
            self._dispatch(session)
        number = session.take() if session is not None else None
        if session is None or number is None or self._sender is None:
            raise StopUser
        try:
            plan = self._planned(session)
            ended = self._sender.send(number, plan.lane or self.lane, plan, f"{self._talk_key}/{self._turn}", self._ready_s)
        except KvError as error:
            session.task_failed(error)  # the user's mistake: said once, and without Locust's traceback
            raise StopUser from None
        wait_s = session.knobs.think_s if plan.think_s is None else plan.think_s
        if ended.outcome in _BACK_OFF:
            wait_s = max(wait_s, session.knobs.backoff_s)
        if ended.refused:
            self._talk = None  # nobody goes on with a conversation that was refused
        self._ready_s = ended.end_s + wait_s

    def _dispatch(self, session: LoadSession) -> None:
        """Be the one that starts the requests of an open loop; the other users of Locust have nothing to do in it."""
        loop = session.loop
        if loop is not None and not loop.taken:
            loop.run(lambda: bool(session.reason) or not session.active or self._state == LOCUST_STATE_STOPPING)
        raise StopUser

    def _planned(self, session: LoadSession) -> Plan:
        try:
            return self._next(session)
        except Exception:
            session.dropped()
            raise

    def _next(self, session: LoadSession) -> Plan:
        """Return the next request of the conversation, or the first of a new one."""
        plan = next(self._talk, None) if self._talk is not None else None
        self._turn += 1
        if plan is None:
            number = session.begin_talk()
            self._talk = self.conversation(Draw(session.knobs.seed, self.lane, number), session.max_model_len)
            self._talk_key, self._turn = f"{self.lane}/{number}", 0
            plan = next(self._talk)
        return plan if isinstance(plan, Plan) else Plan(*plan)
