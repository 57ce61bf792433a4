"""The pytest plugin: options, fixtures, marks, and the session's verdict at the end. No logic of its own.

Importing this module, and running pytest without using a fixture of ours, imports the standard library only, starts no process
and writes no file.
"""

from __future__ import annotations

import difflib
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache import hookspecs, options
from pytest_kvcache.errors import CannotWrite, KvError, UsageError
from pytest_kvcache.fixtures import (
    kv_compare,
    kv_endpoint,
    kv_load,
    kv_quality,
    kv_session,
    kv_settings,
    kv_snapshot,
    kv_sweep,
    kv_thresholds,
    kv_windows,
    state_of,
)
from pytest_kvcache.marks import PROFILE_KEYWORDS, SETTINGS, limits_of, thresholds_of

__all__ = [
    "kv_compare",
    "kv_endpoint",
    "kv_load",
    "kv_quality",
    "kv_session",
    "kv_settings",
    "kv_snapshot",
    "kv_sweep",
    "kv_thresholds",
    "kv_windows",
]

pytest.register_assert_rewrite("pytest_kvcache.assertions")


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_pytest_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "capacity: a test that measures a server's KV cache (the ready-made suite bears it)")
    config.addinivalue_line(
        "markers",
        "kv_profile(name, users=0, duration_s=0, output_tokens=0, requests=0, options={}, **limits): the load profile that this test measures, and limits on it such as usage_peak=0.9",
    )
    config.stash[SETTINGS] = options.settings_of(config)
    state_of(config).controller = not hasattr(config, "workerinput")


def pytest_report_header(config: pytest.Config) -> str | None:
    settings = config.stash[SETTINGS]
    if not settings.sources:
        return None
    from pytest_kvcache.server.embedded import EMBEDDED_NAMES
    from pytest_kvcache.server.shown import shown_command

    names = [name for name in ("launch", "before", "after", "baseline", "save") if getattr(settings, name)]
    named = [f"{name} {options.one_line(shown_command(getattr(settings, name)))}" for name in names]
    if settings.endpoint:
        named.insert(0, f"{len(settings.endpoint)} endpoint{'s' if len(settings.endpoint) > 1 else ''}")
    if not (settings.endpoint or settings.launch or settings.before):
        named.insert(0, "EMBEDDED engine (llamacpp)")
    elif any(text.split(maxsplit=1)[0] in EMBEDDED_NAMES for text in (settings.launch, settings.before, settings.after) if text):
        named.insert(0, "EMBEDDED")
    return "kvcache: " + ", ".join(named)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keep load profiles and reports out of collection: importing a profile would import Locust, which patches sockets (F3 of the design)."""
    if collection_path.name == "loadprofiles" and any((collection_path / name).exists() for name in ("normal.py", "longctx.py")):
        return True
    if collection_path.is_dir() and collection_path.resolve() == Path(config.stash[SETTINGS].reports).resolve():
        return True
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in item.iter_markers("kv_profile"):
        try:
            if len(mark.args) != 1:
                raise UsageError("it takes one name")
            limits_of(mark)
        except UsageError as error:
            near = difflib.get_close_matches(error.what.split("'")[1] if "'" in error.what else "", PROFILE_KEYWORDS, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            known = f"{', '.join(sorted(PROFILE_KEYWORDS))}, and limits such as usage_peak=0.9 or ttft_p95='1.5s' (docs/verdicts.md)"
            raise pytest.UsageError(f"{item.nodeid}: kv_profile(name, ...): {error.what}{meant} Keywords: {known}") from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``kv_threshold`` runs once for each line of ``--kv-thresholds``."""
    if "kv_threshold" not in metafunc.fixturenames:
        return
    try:
        lines = thresholds_of(metafunc.config)
    except KvError as error:
        raise pytest.UsageError(str(error)) from None
    none = pytest.param(None, marks=pytest.mark.skip(reason="no --kv-thresholds was named"), id="none")
    metafunc.parametrize("kv_threshold", [pytest.param(line, id=options.one_line(line.condition.text)) for line in lines] or [none])


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("capacity"):
            state_of(item.config).deselected.append(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse at once what cannot be meant, where any collected test will measure."""
    try:
        state_of(session.config).collected(session.items)
    except KvError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    state = state_of(item.config)
    if "kv_session" not in getattr(item, "fixturenames", ()):
        return (yield)
    with state.recording(item) as judged:
        result, mistake = None, ""
        try:
            result = yield
            mistake = state.judge_marks(item)
        except KvError as error:
            mistake = f"{type(error).__name__}: {error}"
            _stop_if_nothing_can_be_written(item.session, error)
        if mistake:  # outside of the handler: a user's mistake is one message, without the chain of exceptions
            pytest.fail(mistake, pytrace=False)
    if judged and not any(gate.applicable for gate in judged):
        pytest.skip(f"not applicable: {judged[0].text}")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
    """A user's mistake met while a fixture is set up is one message, not a traceback of ours."""
    try:
        return (yield)
    except KvError as error:
        if not fixturedef.argname.startswith("kv_"):
            raise
        mistake = f"{type(error).__name__}: {error}"
        _stop_if_nothing_can_be_written(request.session, error)
    pytest.fail(mistake, pytrace=False)


def _stop_if_nothing_can_be_written(session: pytest.Session, error: KvError) -> None:
    """End the session after this test on a full disk: whatever else is measured would be lost, and each test would say so again."""
    if isinstance(error, CannotWrite):
        session.shouldfail = f"kvcache: {options.one_line(error.what.splitlines()[0])}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let TERM end a measuring session the way Ctrl-C does, so that servers stop and what was measured is written."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        state_of(session.config).on_open = _term_as_interrupt


def _term_as_interrupt() -> None:
    def interrupt(*_: object) -> None:
        # raised here and not sent on as SIGINT, which a shell ignores for what it runs in the background
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("capacity"):
        state_of(item.config).saw(report)
        state_of(item.config).outcome(item, report, call.excinfo.value if call.excinfo is not None else None)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """On xdist's controller: tell each worker the one folder that this session writes to, where a lease was asked for."""
    node.workerinput["kv_folder"] = state_of(node.config).shared_folder()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """On xdist's controller: take over which gates a worker deselected, and which it collected."""
    state_of(node.config).from_worker(getattr(node, "workeroutput", {}))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """On xdist's controller: keep the gates that a worker's test judged."""
    if hasattr(report, "node"):
        state_of(report.node.config).collect(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report once the servers are stopped, also after Ctrl-C. The session's verdict decides the exit status too."""
    state = state_of(session.config)
    if state.session is not None:
        state.session.close()
    if not state.controller:
        state.to_controller(session.config)
    try:
        verdict = state.conclude()
    except KvError as error:
        state.finish_error = str(error)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return
    if verdict is not None and verdict.verdict not in state.passing_verdicts() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        state.finish_note = f"exit status 1, because the verdict is {verdict.verdict}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the verdict, the gates and where the report is; nothing where nothing was measured."""
    state = state_of(config)
    if state.finish_error:
        terminalreporter.section("KV cache", red=True)
        terminalreporter.write_line(f"the report could not be written: {state.finish_error}")
    if state.view is None:
        return
    from pytest_kvcache.report.terminal import summary

    terminalreporter.section("KV cache")
    for line in summary(state.view, color=terminalreporter.hasmarkup).splitlines():
        terminalreporter.write_line(line)
    if state.finish_note:
        terminalreporter.write_line(state.finish_note)
