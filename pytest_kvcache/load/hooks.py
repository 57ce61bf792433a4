"""What the load does at the moments that Locust tells: options before parsing, the session's start, stop and quitting.

``state`` holds the profile's user classes, as they were declared, and the session of the load that runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import gevent
from locust import LoadTestShape, events
from locust.runners import MasterRunner, WorkerRunner

from pytest_kvcache.errors import KvError
from pytest_kvcache.load import contract, flags
from pytest_kvcache.load.arrivals import level_at, parse_stages
from pytest_kvcache.load.link import Link
from pytest_kvcache.load.listening import listen
from pytest_kvcache.load.master import PREPARE_S, MasterSession
from pytest_kvcache.load.numbers import be_exact
from pytest_kvcache.load.session import LoadSession, Shape
from pytest_kvcache.load.target import Handed, handed_over

if TYPE_CHECKING:
    from pytest_kvcache.load.panel import Panel
    from pytest_kvcache.load.users import KvUser


RUNNER_S = 10.0


class State:
    """The user classes of the profile in order, and the load's session, which is None until a test starts.

    Of several processes the master has ``master`` in its place, and each worker a ``link`` to it.
    """

    def __init__(self) -> None:
        self.profiles: list[type[KvUser]] = []
        self.session: LoadSession | None = None
        self.master: MasterSession | None = None
        self.link: Link | None = None
        self.panel: Panel | None = None


state = State()


def _classes(environment: Any = None) -> list[type[KvUser]]:
    chosen = [cls for cls in getattr(environment, "user_classes", ()) if cls in state.profiles]
    return chosen or state.profiles


def _handed() -> Handed | None:
    text = os.environ.get(contract.ENVIRONMENT)
    return handed_over(text) if text else None


def _declare(parser: Any, **_: Any) -> None:
    classes = state.profiles
    if contract.ENVIRONMENT in os.environ:
        # a run started by pytest-kvcache takes nothing from locust.conf or pyproject.toml
        parser._default_config_files = []
    options = [option for cls in classes for option in cls.options]
    own = {name: value for cls in classes for name, value in cls.defaults.items()}
    flags.declare(parser, options, {"users": sum(cls.users for cls in classes) or 1}, own)


def _start(environment: Any, **_: Any) -> None:
    classes = _classes(environment)
    if not classes:
        return
    knobs = flags.knobs(environment.parsed_options, [option for cls in classes for option in cls.options])
    if state.panel is not None:
        state.panel.follow(knobs)
    files = environment.parsed_locustfiles or [environment.locustfile or classes[0].__module__]
    shape = Shape(
        profile=Path(str(files[0])).stem,
        lanes=tuple(sorted({lane for cls in classes for lane in cls.lanes or (cls.lane,)})),
        needs_limit=any(cls.needs_limit for cls in classes),
        output_tokens=classes[0].default_output_tokens,
        shares=any(cls.shares for cls in classes),
        classes=tuple(classes),
    )
    runner = _runner(environment)
    if isinstance(runner, MasterRunner):
        state.master = MasterSession(environment, _handed(), knobs, shape.profile)
        state.master.start()
        return
    state.session = LoadSession(environment, _handed(), knobs, shape, state.link)
    state.session.start()


def _runner(environment: Any) -> Any:
    """Return Locust's runner. A worker that joins a running test is told to start while its runner is still being made."""
    deadline_s = monotonic() + RUNNER_S
    while environment.runner is None and monotonic() < deadline_s:
        gevent.sleep(0.01)
    if isinstance(environment.runner, WorkerRunner):
        _lay_line(environment.runner)
    return environment.runner


def _lay_line(runner: WorkerRunner) -> None:
    if state.link is None:
        state.link = Link(runner)


def _met(environment: Any, runner: Any, web_ui: Any = None, **_: Any) -> None:
    """Lay the line between a master and its workers, and show the KV cache of a load by hand, before any test starts."""
    be_exact()
    if contract.ENVIRONMENT not in os.environ and not isinstance(runner, WorkerRunner):
        from pytest_kvcache.load.panel import Panel

        state.panel = Panel(environment, web_ui)
        if environment.parsed_options.headless:
            flags.own_clock(environment.parsed_options, PREPARE_S)
    if isinstance(runner, WorkerRunner):
        _lay_line(runner)
    elif isinstance(runner, MasterRunner):
        listen(runner, lambda: state.master)
        # once more: Locust calls the last ones first, and its own would quit before ours knows why
        environment.events.quitting.add_listener(_quitting)


def _running() -> LoadSession | MasterSession | None:
    return state.master or state.session


def _stopping(**_: Any) -> None:
    session = _running()
    if session is not None:
        session.stopping()


def _stop(**_: Any) -> None:
    """Write the end: when a test stops, and again when the process quits before its test had begun."""
    session = _running()
    if session is not None:
        session.finish()


def _quitting(environment: Any, **_: Any) -> None:
    session = _running()
    if session is not None:
        session.interrupted()


def _user_error(exception: BaseException, **_: Any) -> None:
    if state.session is not None:
        state.session.task_failed(exception)


def _cpu_warning(cpu_usage: float, **_: Any) -> None:
    session = _running()
    if session is not None:
        session.note("cpu warning", "the load process used most of one CPU", {"percent": float(cpu_usage)})


class StagesShape(LoadTestShape):
    """The users over time as --kv-stages say, from when the load of this process began (on a master: from the first tick)."""

    def __init__(self, environment: Any, text: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ticked_s: float | None = None
        options = environment.parsed_options
        base = float(options.num_users or 1)
        length_s = float(getattr(options, "kv_duration_s", 0.0) or options.run_time or 0)
        self.stages = parse_stages(text, base, length_s)

    def tick(self) -> tuple[int, float]:
        """Return (users, users started a second) as they should be now; the end of the load is not decided here."""
        session = _running()
        first = self._ticked_s is None
        self._ticked_s = self._ticked_s or monotonic()
        at_s = monotonic() - (session.begun_at() if session is not None and session.active else self._ticked_s)
        users = round(level_at(self.stages, at_s))
        # Locust must start something for its test to begin
        return (max(users, 1) if first else users), float(min(max(users, 1), 100))


def _init(environment: Any, **_: Any) -> None:
    """Let Locust follow our stages where the loop is closed. A text that is no stages is refused when the load starts."""
    options = environment.parsed_options
    text = str(getattr(options, "kv_stages", "") or "")
    if not text or options.kv_rate or environment.shape_class is not None or isinstance(environment.runner, WorkerRunner):
        return
    try:
        shape = StagesShape(environment, text)
    except KvError:
        return
    shape.runner = environment.runner
    environment.shape_class = shape


_events: Any = events
_events.init.add_listener(_init)
_events.init_command_line_parser.add_listener(_declare)
_events.init.add_listener(_met)
_events.test_start.add_listener(_start)
_events.test_stopping.add_listener(_stopping)
_events.test_stop.add_listener(_stop)
_events.quit.add_listener(_stop)
_events.quitting.add_listener(_quitting)
_events.user_error.add_listener(_user_error)
_events.cpu_warning.add_listener(_cpu_warning)
