"""The fixtures, and the state of one pytest session that they share. Heavy modules are imported when a fixture is first used."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from pytest_kvcache.errors import CannotWrite, GateFailed, UsageError
from pytest_kvcache.marks import SETTINGS, limits_of, marked, planned_load
from pytest_kvcache.options import one_line
from pytest_kvcache.settings import Settings

if TYPE_CHECKING:
    from pytest_kvcache.analysis.sweep import Sweep
    from pytest_kvcache.judge.compare import Comparison
    from pytest_kvcache.judge.thresholds import Threshold
    from pytest_kvcache.measure import Planned
    from pytest_kvcache.records import GateRecord, SnapshotRecord, VerdictRecord
    from pytest_kvcache.report.model import SessionView
    from pytest_kvcache.runfolder import Run
    from pytest_kvcache.server.endpoint import Endpoint
    from pytest_kvcache.session import Session

# A gate as JSON text on a worker's test report: plain text survives the way to xdist's controller (F8: other types do not).
GATE_PROPERTY = "kv_gate"


class State:
    """What the plugin keeps for one pytest session: the measuring Session once a fixture asked for it, and what was collected."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.controller = True
        self.session: Session | None = None
        self.on_open: Callable[[], None] = lambda: None
        self.deselected: list[str] = []
        self.finish_error = ""
        self.finish_note = ""
        self.told_failure = False
        self.waiting: list[str] = []
        self.ran: set[str] = set()
        self.gates_of: dict[str, list[GateRecord]] = {}
        self.worker_folder = ""
        self.worker_gates: list[GateRecord] = []
        self.view: SessionView | None = None
        self._items: Sequence[pytest.Item] = ()

    def collected(self, items: Sequence[pytest.Item]) -> None:
        """Remember which tests will measure, and what. Raises UsageError and CannotJudge for what can be known to be wrong already."""
        self.waiting = [item.nodeid for item in items if item.get_closest_marker("capacity")]
        self._items = [item for item in items if "kv_session" in getattr(item, "fixturenames", ())]
        if self._items and self.controller:
            self.make_session().check()

    def make_session(self) -> Session:
        """Return the measuring Session, made once; nothing is started or written yet."""
        if self.session is not None:
            return self.session
        from pytest_kvcache.server.shown import shown_argv
        from pytest_kvcache.session import Session

        config, settings = self.config, self.config.stash[SETTINGS]
        worker: Mapping[str, Any] | None = getattr(config, "workerinput", None)
        folder = worker.get("kv_folder") if worker is not None else None
        dialects = [dialect for found in config.hook.pytest_kvcache_engines(config=config) for dialect in found or ()]
        provenance: dict[str, str] = {}
        for facts in reversed(config.hook.pytest_kvcache_provenance(config=config)):
            provenance.update({str(key): str(value) for key, value in (facts or {}).items()})
        lease = functools.partial(_lease, settings) if worker is not None else contextlib.nullcontext
        say = self._say if settings.before else None  # minutes pass before its first test has ended
        session = Session(settings, folder=Path(folder) if folder else None, extra_dialects=dialects, provenance=provenance, lease=lease, say=say)
        session.deselected = self.deselected
        session.repeat = [shown_argv("pytest", [str(word) for word in config.invocation_params.args])]
        session.on_run.append(lambda run: config.hook.pytest_kvcache_run_finished(config=config, run=run))
        session.on_gate.append(lambda gate: config.hook.pytest_kvcache_verdict(config=config, gate=gate))
        seen: list[Planned] = []
        for item in self._items:
            for mark in item.iter_markers("kv_profile"):
                planned = marked(mark)
                if planned not in seen:
                    seen.append(planned)
        session.plan = seen
        session.plan_quality = any("kv_quality" in getattr(item, "fixturenames", ()) for item in self._items)
        self.session = session
        return session

    def _say(self, text: str) -> None:
        """Print a line of progress beside pytest's own, whatever pytest captures."""
        manager = self.config.pluginmanager
        reporter, capture = manager.get_plugin("terminalreporter"), manager.get_plugin("capturemanager")
        if reporter is None or reporter.verbosity < 0:
            return
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            reporter.ensure_newline()
            reporter.write_line(f"kvcache: {one_line(text)}")

    def judge_marks(self, item: pytest.Item) -> str:
        """Judge the limits of a test's ``kv_profile`` marks on what was measured of those loads; return what failed, empty where all held."""
        session = self.session
        if session is None:
            return ""
        failed = []
        from pytest_kvcache import assertions
        from pytest_kvcache.judge.thresholds import judge_thresholds, of_limits

        for mark in item.iter_markers("kv_profile"):
            if limits := limits_of(mark):
                runs = session.windows(marked(mark))
                before = [analysis for analysis in session.before_analyses() if analysis.run.record.profile == mark.args[0]]
                try:
                    assertions.settle_all(judge_thresholds(of_limits(mark.args[0], limits), assertions.analyses(runs), before))
                except GateFailed as error:
                    failed.append(str(error))
        return "\n".join(failed)

    @contextmanager
    def recording(self, item: pytest.Item) -> Iterator[list[GateRecord]]:
        """Record every gate judged inside the block: for the session's verdict, and on the test's report."""
        from pytest_kvcache import assertions

        judged = self.gates_of.setdefault(item.nodeid, [])
        session = self.session
        if session is None:
            yield judged
            return
        record = functools.partial(self._record, session, item)
        passes = self.config.stash[SETTINGS].on_inconclusive == "pass"
        with assertions.recording(assertions.Recorder(record, session.analysis, inconclusive_passes=passes)):
            yield judged

    def _record(self, session: Session, item: pytest.Item, gate: GateRecord) -> None:
        """Keep one judged gate: for its test, for the session's verdict, and on the test's reports."""
        import msgspec

        from pytest_kvcache.report.junit import properties

        gate = msgspec.structs.replace(gate, test=item.nodeid)
        self.gates_of.setdefault(item.nodeid, []).append(gate)
        session.record(gate)
        item.user_properties.extend(properties(gate, embedded=session.embedded))
        if not self.controller:
            item.user_properties.append((GATE_PROPERTY, msgspec.json.encode(gate).decode()))

    def outcome(self, item: pytest.Item, report: pytest.TestReport, error: BaseException | None) -> None:
        """Let a capacity test that failed without a failed gate count in the verdict: a gate that could not be measured never passes."""
        if not report.failed or any(gate.verdict != "PASS" for gate in self.gates_of.get(report.nodeid, ())):
            return
        session = self.session
        if session is None:
            return
        if session.failure is not None:  # no server: said once, not for every test that wanted one
            if self.told_failure:
                return
            self.told_failure = True
        from pytest_kvcache.records import GateRecord

        text = str(error).strip().splitlines()[0][:500] if error is not None and str(error).strip() else f"failed in {report.when}"
        gate = GateRecord(
            name=report.nodeid.rsplit("::", 1)[-1],
            quantity="",
            verdict="FAIL" if isinstance(error, AssertionError) else "INVALID",
            text=text,
        )
        self._record(session, item, gate)

    def saw(self, report: pytest.TestReport) -> None:
        """Remember that a test ran, or came to its end before it could."""
        if report.when == "call" or not report.passed:
            self.ran.add(report.nodeid)

    def shared_folder(self) -> str:
        """Return the folder that all xdist workers of this session write their Runs to; empty where nothing will be measured."""
        if self.config.stash[SETTINGS].xdist != "lease":
            return ""
        if not self.worker_folder:
            from pytest_kvcache.conclusion import session_folder

            self.worker_folder = str(session_folder(self.config.stash[SETTINGS]).absolute())
        return self.worker_folder

    def to_controller(self, config: pytest.Config) -> None:
        """On an xdist worker: tell the controller which gates were deselected, and which were to run."""
        output: dict[str, Any] = getattr(config, "workeroutput", {})
        output["kv_deselected"], output["kv_waiting"] = list(self.deselected), list(self.waiting)

    def from_worker(self, output: Mapping[str, Any]) -> None:
        """On the controller: take over what a worker told; every worker collects the same tests."""
        for mine, theirs in ((self.deselected, output.get("kv_deselected", ())), (self.waiting, output.get("kv_waiting", ()))):
            mine += [str(name) for name in theirs if name not in mine]

    def collect(self, report: pytest.TestReport) -> None:
        """Keep the gates that a worker's report carries."""
        self.saw(report)
        if report.when != "teardown":
            return
        import msgspec

        from pytest_kvcache.records import GateRecord

        texts = [str(value) for name, value in report.user_properties if name == GATE_PROPERTY]
        self.worker_gates += [msgspec.json.decode(text, type=GateRecord) for text in texts]

    def conclude(self) -> VerdictRecord | None:
        """Write the session's report and return its verdict; None where nothing was measured, and on an xdist worker.

        Raises CannotWrite.
        """
        if not self.controller:
            return None
        session = self.session
        if session is None and self.worker_gates:
            from pytest_kvcache.session import Session

            session = Session(self.config.stash[SETTINGS], folder=Path(self.worker_folder))
            session.gates, session.deselected = self.worker_gates, self.deselected
            session.read_folder()
        if session is None or not session.measured:
            return None
        session.not_run = [name for name in self.waiting if name not in self.ran]
        from pytest_kvcache.report.model import SessionView

        verdict = session.finish()
        self.view = SessionView(session.folder, verdict, session.before_analyses(), session.after_analyses())
        return verdict

    def passing_verdicts(self) -> set[str]:
        """Return the verdicts with which pytest may end well."""
        return {"PASS", "INCONCLUSIVE"} if self.config.stash[SETTINGS].on_inconclusive == "pass" else {"PASS"}


_STATE = pytest.StashKey[State]()


def state_of(config: pytest.Config) -> State:
    """Return the plugin's state of this pytest session."""
    if _STATE not in config.stash:
        config.stash[_STATE] = State(config)
    return config.stash[_STATE]


@contextmanager
def _lease(settings: Settings) -> Iterator[None]:
    """Hold one lock per endpoint in the machine's temporary folder while this xdist worker opens a server or measures.

    It is never held for longer: a worker that waited for another's whole session would keep xdist from ending either.
    """
    import fcntl
    import hashlib
    import tempfile

    name = "|".join(settings.endpoint) or settings.launch or settings.before or "embedded"
    path = Path(tempfile.gettempdir()) / f"pytest-kvcache-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
    file: IO[str]
    try:
        file = path.open("a")
    except OSError as error:
        raise CannotWrite(f"no lease can be taken: {error.strerror or error}", where=str(path), hint="check the temporary folder (TMPDIR)") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def kv_settings(pytestconfig: pytest.Config) -> Settings:
    """The options of this session, each with where its value came from (``kv_settings.sources``)."""
    return pytestconfig.stash[SETTINGS]


@pytest.fixture(scope="session")
def kv_session(pytestconfig: pytest.Config) -> Generator[Session, None, None]:
    """The measuring session: servers, Runs, gates and the session's folder. The other fixtures stand on it."""
    state = state_of(pytestconfig)
    if not state.controller and pytestconfig.stash[SETTINGS].xdist == "refuse":
        raise UsageError(
            "two workers that measure one server spoil both results, so nothing is measured under pytest-xdist",
            hint="run with -n 0, or --kv-xdist=lease to let one worker at a time measure an endpoint",
        )
    if not state.controller and pytestconfig.stash[SETTINGS].before:
        raise UsageError("an experiment of two launches cannot be split over workers of pytest-xdist", hint="run with -n 0")
    state.on_open()
    session = state.make_session()
    yield session
    session.close()


@pytest.fixture(scope="session")
def kv_endpoint(kv_session: Session) -> Endpoint:
    """The first endpoint of the judged side, ready: attached to, launched, or the embedded engine."""
    return kv_session.target.endpoints[0]


@pytest.fixture(scope="session")
def kv_snapshot(kv_session: Session) -> Callable[[], SnapshotRecord]:
    """A callable that reads the server's KV state once: ``kv_snapshot().value("free_blocks")`` is a Reading or Missing."""
    from pytest_kvcache.observe.scrape import take_snapshot

    def snapshot() -> SnapshotRecord:
        target = kv_session.target
        return take_snapshot(target.endpoints[0], target.dialects[0], target.endpoints[0].log)

    return snapshot


@pytest.fixture(scope="session")
def kv_load(kv_session: Session) -> Callable[..., Run]:
    """A callable that measures one window of a load profile: ``kv_load("longctx", users=8, duration_s=30)`` returns its Run.

    Keywords: users, duration_s, output_tokens, requests (stop after so many), rate, arrivals, stages, max_in_flight, content, trace,
    options (the profile's own). The same call in one session returns the same Run.
    """

    def load(profile: str, **numbers: Any) -> Run:
        return kv_session.load(planned_load(profile, numbers))

    return load


@pytest.fixture(scope="session")
def kv_windows(kv_session: Session) -> Callable[..., list[Run]]:
    """Like ``kv_load``, and returns the Runs of all windows: ``--kv-windows`` of them where a change is judged or saved, else one."""

    def windows(profile: str, **numbers: Any) -> list[Run]:
        return kv_session.windows(planned_load(profile, numbers))

    return windows


@pytest.fixture(scope="session")
def kv_thresholds(kv_session: Session) -> Callable[..., list[GateRecord]]:
    """A callable that judges one line of ``--kv-thresholds`` on every load of this session that it is meant for, measured where it was not yet."""
    from pytest_kvcache.measure import Planned

    def judge(threshold: Threshold) -> list[GateRecord]:
        from pytest_kvcache.judge.thresholds import judge_thresholds

        names = {limit.name.partition(".")[0] for limit in threshold.limits}
        plan = [planned for planned in kv_session.plan if planned.profile == threshold.profile or not threshold.profile]
        if "quality" in names or threshold.profile == "quality":
            kv_session.quality()
        elif not plan:
            plan = [Planned(threshold.profile or "normal")]
        for planned in plan:
            kv_session.windows(planned)
        return judge_thresholds([threshold], kv_session.after_analyses(), kv_session.before_analyses())

    return judge


@pytest.fixture(scope="session")
def kv_quality(kv_session: Session) -> Callable[..., Run]:
    """A callable that asks the quality items (``--kv-quality-items``, else the standard set) and returns their Run."""
    return kv_session.quality


@pytest.fixture(scope="session")
def kv_compare(kv_session: Session) -> Callable[[], Comparison]:
    """A callable that judges the change against ``--kv-baseline`` or ``--kv-before``; it skips the test where neither was named."""

    def compare() -> Comparison:
        if not (kv_session.settings.baseline or kv_session.settings.before):
            pytest.skip("nothing to compare with: no --kv-baseline and no --kv-before")
        return kv_session.compare()

    return compare


@pytest.fixture(scope="session")
def kv_sweep(kv_session: Session) -> Callable[..., Sweep]:
    """A callable that measures a profile with each value of ``--kv-sweep`` and returns the comparison; it skips the test where none was named.

    ``kv_sweep("normal", users=8, duration_s=30)``: the keywords of ``kv_load``. A server that this session launched is stopped first.
    """

    def sweep(profile: str = "normal", **numbers: Any) -> Sweep:
        from pytest_kvcache import sweeping

        if not kv_session.settings.sweep:
            pytest.skip("nothing to sweep: no --kv-sweep")
        return sweeping.run_sweep(kv_session, planned_load(profile, numbers))

    return sweep
