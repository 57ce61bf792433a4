"""One session: the servers it attaches to or launches, the Runs it measures, the gates judged on them, and its folder.

A session folder is made when the first Run is measured. In a comparison of two launches the side before the change is measured
whole (what ``plan`` names), stopped, and then the side after the change is launched and stays up for whatever else is asked.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conclusion import conclude, session_folder
from pytest_kvcache.engines import Dialect, imported
from pytest_kvcache.errors import CannotWrite, KvError, UsageError
from pytest_kvcache.judge.baseline import check_name, load_baseline
from pytest_kvcache.judge.compare import Comparison, compare
from pytest_kvcache.load.runner import profile_path
from pytest_kvcache.measure import Planned, Target, Window, measure_load, measure_quality, run_folder
from pytest_kvcache.observe.scrape import detect_endpoint
from pytest_kvcache.quality.items import Item, read_items, standard_items
from pytest_kvcache.records import GateRecord, VerdictRecord
from pytest_kvcache.runfolder import Run, read_runs, write_run
from pytest_kvcache.server.endpoint import Endpoint, check_ready, parse_endpoint
from pytest_kvcache.server.launch import LaunchedServer, launch, parse_command
from pytest_kvcache.server.shown import shown_command
from pytest_kvcache.settings import Settings

EMBEDDED_DEFAULT = "llamacpp"
EMBEDDED_WINDOW_S = 6.0
WINDOW_S = 30.0


def _is_address(text: str) -> bool:
    """Return whether a side is named by its address and not by a command."""
    return re.match(r"https?://", text) is not None


class Session:
    """Servers, Runs, gates and the folder of one session. Use as a context manager, or call ``close``."""

    def __init__(
        self,
        settings: Settings,
        *,
        folder: Path | None = None,
        extra_dialects: Sequence[Dialect] = (),
        provenance: Mapping[str, str] | None = None,
        say: Callable[[str], None] | None = None,
        lease: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.settings = settings
        self.started_wall_s = time.time()
        self.plan: list[Planned] = []
        self.plan_quality = False
        self.gates: list[GateRecord] = []
        self.deselected: list[str] = []
        self.not_run: list[str] = []
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.repeat: list[str] = []
        self.on_run: list[Callable[[Run], None]] = []
        self.on_gate: list[Callable[[GateRecord], None]] = []
        self._say = say or (lambda _: None)
        self._lease = lease
        self._extra_dialects = (*((imported(settings.engine_from),) if settings.engine_from else ()), *extra_dialects)
        self._provenance = dict(provenance or {})
        self._folder = folder
        self._id = secrets.token_hex(3)
        self._open = ExitStack()
        self._target: Target | None = None
        self._servers: dict[int, LaunchedServer] = {}
        self.failure: KvError | None = None
        self._items: list[Item] = []
        self._baseline: list[Run] = []
        self._checked = False
        self._before: list[Run] | None = None
        self._runs: dict[tuple[Any, ...], Run] = {}
        self._analyses: dict[Path, Analysis] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the folder ------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The session's folder, made at the first use. Raises CannotWrite."""
        if self._folder is None:
            self._folder = session_folder(self.settings, self._id)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(
                f"cannot make the session's folder: {error.strerror or error}",
                where=str(self._folder),
                hint="check permissions and free space, or name another folder with --kv-reports",
            ) from None
        return self._folder

    @property
    def measured(self) -> bool:
        """Whether this session holds anything worth a report."""
        return bool(self._runs or self.gates or self._before)

    @property
    def embedded(self) -> bool:
        """Whether anything measured so far ran on an engine of ours."""
        return any(run.record.embedded for run in (*self._runs.values(), *(self._before or ())))

    # -- the servers -----------------------------------------------------------------------------------------------

    @property
    def target(self) -> Target:
        """The side that is judged, ready. Attaches, or launches, or starts the embedded engine, at the first use.

        Raises what endpoint, launch and detection raise; at each later use the same kind of error in short, without another try.
        """
        if self.failure is not None:
            raise type(self.failure)(f"not measured, because there is no server: {self.failure.what.splitlines()[0]}")
        if self._target is None:
            try:
                with self._lease():
                    self._target = self._open_all()
            except KvError as error:
                self.failure = error
                raise
        return self._target

    def _open_all(self) -> Target:
        settings = self.settings
        self.check()
        self.folder  # noqa: B018  an unwritable folder is found before a server is started
        if settings.baseline:
            self.adopt(self._baseline, "before")
        if settings.before:
            if not self.plan:  # the comparison alone was asked for
                self.plan, self.plan_quality = [Planned("normal"), Planned("longctx")], True
            with ExitStack() as before:
                target = self._side(settings.before, "before", before)
                self._measure_plan(target)
            return self._side(settings.after, "after", self._open)
        side = "after" if settings.baseline else ""
        if settings.endpoint:
            return self._attach(settings.endpoint, side)
        return self._side(settings.launch or EMBEDDED_DEFAULT, side, self._open)

    def check(self) -> None:
        """Raise UsageError for whatever cannot be meant and can be known before a server is asked or started, CannotJudge for the baseline."""
        settings = self.settings
        if self._checked:
            return
        for planned in self.plan:
            profile_path(planned.profile)
        for url in settings.endpoint:
            parse_endpoint(url, settings)
        for text in (settings.launch, settings.before, settings.after):
            if _is_address(text):
                parse_endpoint(text, settings)
            elif text:
                parse_command(text)
                parse_endpoint("http://127.0.0.1:1", settings)  # its headers, keys and bodies
        if settings.save:
            check_name(settings.save)
        if settings.quality_items:
            self._items = read_items(Path(settings.quality_items))
        if settings.baseline:
            self._baseline = load_baseline(settings.baseline, Path(settings.reports))
        self._checked = True

    def _attach(self, urls: Sequence[str], side: str) -> Target:
        endpoints = []
        for url in urls:
            endpoint = parse_endpoint(url, self.settings)
            endpoints.append(check_ready(endpoint, min(self.settings.ready_timeout_s, 60.0)))
        if len({endpoint.root for endpoint in endpoints}) != len(endpoints):
            raise UsageError("the same endpoint was given twice", where=", ".join(e.shown for e in endpoints), hint="name each replica once")
        return self._with_dialects(endpoints, side)

    def _side(self, text: str, side: str, stack: ExitStack) -> Target:
        """Launch ``text`` (or attach, where it is a URL) and return it as a Target that ``stack`` stops."""
        if _is_address(text):
            return self._attach([text], side)
        self._say(
            f"starting {side or 'the server'}: {shown_command(text)}" if self.settings.launch or side else "starting the embedded engine (llama.cpp)"
        )
        server = stack.enter_context(launch(text, self.settings, self.folder / f"server{'-' + side if side else ''}.log"))
        target = self._with_dialects([server.endpoint], side)
        self._servers[id(target.endpoints)] = server
        return dataclasses.replace(target, command=tuple(server.command), fresh=True, embedded=bool(server.engine))

    def _with_dialects(self, endpoints: Sequence[Endpoint], side: str) -> Target:
        dialects = [detect_endpoint(endpoint, self.settings.engine, self._extra_dialects) for endpoint in endpoints]
        return Target(tuple(endpoints), tuple(dialects), side=side, provenance=self._provenance)

    def _alive(self, target: Target) -> None:
        """Raise LaunchFailed, with the cause out of its log, where a server that we started has died."""
        server = self._servers.get(id(target.endpoints))
        if server is not None:
            server.check()

    # -- measuring -------------------------------------------------------------------------------------------------

    def load(self, planned: Planned, *, number: int = 0) -> Run:
        """Return the Run of one window of ``planned``; the same window is measured once a session."""
        profile_path(planned.profile)  # a profile that there is not is found before a server is started
        target = self.target
        with self._lease():
            return self._measure(target, planned, number)

    def windows(self, planned: Planned) -> list[Run]:
        """Return the windows of ``planned``: ``settings.windows`` of them where something is compared or saved, else one."""
        return [self.load(planned, number=number) for number in range(self.window_count(planned))]

    def window_count(self, planned: Planned) -> int:
        """Return how many windows of a profile this session takes; single requests are not repeated."""
        compares = bool(self.settings.save or self.settings.baseline or self.settings.before)
        return self.settings.windows if compares and not planned.requests else 1

    def quality(self, items: Sequence[Item] | None = None) -> Run:
        """Return the quality Run of the judged side; asked once a session unless other items are given."""
        target = self.target
        with self._lease():
            return self._quality(target, items)

    def runs(self) -> list[Run]:
        """Return the Runs measured on the judged side so far, in order."""
        return list(self._runs.values())

    def compare(self) -> Comparison:
        """Judge the change on everything measured on both sides. Raises UsageError where nothing was named to compare with."""
        if not (self.settings.before or self.settings.baseline):
            raise UsageError("nothing to compare with", hint="--kv-baseline=NAME, or --kv-before=... --kv-after=...")
        self.target  # noqa: B018  measures or loads the side before
        for planned in [*self.plan, *self._planned_before()]:
            if planned.name in {run.record.profile for run in self._before or ()}:
                self.windows(planned)
        if any(run.record.profile == "quality" for run in self._before or ()):
            self.quality()
        comparison = compare(self.before_analyses(), self.after_analyses(), self.settings)
        apart = ["the sides were measured at different times: drift of the machine between them is not covered"] if self.settings.baseline else []
        self.notes += [note for note in (*comparison.notes, *apart) if note not in self.notes]
        self.problems += [problem.text for problem in comparison.problems if problem.text not in self.problems]
        return comparison

    def _planned_before(self) -> list[Planned]:
        """Return what the side before measured and the plan does not name, with the numbers that it had."""
        named = {planned.name for planned in self.plan}
        found: dict[str, Planned] = {}
        for run in self._before or ():
            numbers = dict(run.record.options)
            numbers.pop("nonce", None)
            if run.record.profile not in named | {"quality"}:
                fields = {name: numbers.pop(name, 0) for name in ("users", "duration_s", "output_tokens", "requests")}
                found.setdefault(run.record.profile, Planned(run.record.profile, **fields, options=numbers))
        return list(found.values())

    def analysis(self, run: Run) -> Analysis:
        """Return the Analysis of a Run; made once."""
        if run.folder not in self._analyses:
            self._analyses[run.folder] = analyse(run)
        return self._analyses[run.folder]

    def _measure_plan(self, target: Target) -> None:
        """Measure the side before the change: all that the plan names."""
        for planned in self.plan:
            for number in range(self.window_count(planned)):
                self._measure(target, planned, number, keep=False)
        if self.plan_quality:
            self._quality(target, None, keep=False)

    def _measure(self, target: Target, planned: Planned, number: int, *, keep: bool = True) -> Run:
        key = (
            planned.profile,
            planned.users,
            planned.duration_s,
            planned.output_tokens,
            planned.requests,
            tuple(sorted(planned.options.items())),
            number,
        )
        if keep and key in self._runs:
            return self._runs[key]
        self._alive(target)
        settings = self.settings
        owned_window_s = EMBEDDED_WINDOW_S if target.embedded else WINDOW_S
        replicas = len(target.endpoints) if planned.requests else 1  # a probe goes to every replica
        filled = dataclasses.replace(
            planned,
            users=(planned.users or settings.users) * replicas,
            requests=planned.requests * replicas,
            # a counted load ends by its count, and the load itself bounds its time: a window's length would cut a slow probe short
            duration_s=planned.duration_s or (0.0 if planned.requests else settings.duration_s or owned_window_s),
            output_tokens=planned.output_tokens or settings.output_tokens,
            # a counted load is a probe: it keeps to its own arrivals and lengths
            options=planned.options if planned.requests else {**settings.load_options(planned.name), **planned.options},
        )
        window = Window(
            filled,
            number,
            seed=settings.seed + number,
            nonce=f"{self._id}-{planned.name}-{number}",
            # a single request is over soon: its level is looked at more often
            sample_hz=max(settings.sample_hz, 25.0) if planned.requests else settings.sample_hz,
        )
        self._say(f"{target.side + ': ' if target.side else ''}{planned.name}, window {number + 1} of {self.window_count(planned)}")
        return measure_load(
            target, settings, self.folder, window, run_id=self._next_id(), keep=lambda run: self._keep(run, target.side, key if keep else None)
        )

    def _quality(self, target: Target, items: Sequence[Item] | None, *, keep: bool = True) -> Run:
        key = ("quality", tuple(item.id for item in items) if items is not None else ())
        if keep and key in self._runs:
            return self._runs[key]
        self._alive(target)
        if items is None:
            items = self.standard_items(target)
        self._say(f"{target.side + ': ' if target.side else ''}quality, {len(items)} items")
        return measure_quality(
            target, self.settings, self.folder, items, run_id=self._next_id(), keep=lambda run: self._keep(run, target.side, key if keep else None)
        )

    def standard_items(self, target: Target) -> list[Item]:
        """Return the items of ``--kv-quality-items``, else the standard set for the served model."""
        if self._items:
            return self._items
        return standard_items(target.endpoints[0])

    def _keep(self, run: Run, side: str, key: tuple[Any, ...] | None) -> Run:
        if key is not None:
            self._runs[key] = run
        elif side == "before":
            self._before = [*(self._before or []), run]
        for listener in self.on_run:
            listener(run)
        return run

    def _next_id(self) -> str:
        return f"{self._id}-{secrets.token_hex(2)}"

    def adopt(self, runs: Sequence[Run], side: str) -> list[Run]:
        """Copy stored Runs into this session as one side of it, so that the session's folder stands alone. Raises CannotWrite."""
        adopted = []
        for run in runs:
            folder = run_folder(self.folder, f"{side}-{run.record.profile}")
            try:
                shutil.copytree(run.folder, folder, dirs_exist_ok=True)
            except (OSError, shutil.Error) as error:
                raise CannotWrite(f"cannot copy a stored Run: {str(error)[:200]}", where=str(folder), hint="free space, or --kv-reports") from None
            adopted.append(write_run(folder, msgspec.structs.replace(run.record, side=side)))
        if side == "before":
            self._before = adopted
        else:
            self._runs.update({(run.folder,): run for run in adopted})
        return adopted

    # -- judging and the end ---------------------------------------------------------------------------------------

    def record(self, gate: GateRecord) -> None:
        """Keep a judged gate for the session's verdict."""
        self.gates.append(gate)
        for listener in self.on_gate:
            listener(gate)

    def read_folder(self) -> None:
        """Take up the Runs that lie in the session's folder: those of xdist workers, or of an earlier process."""
        runs = read_runs(self.folder) if (self.folder / "runs").exists() else []
        self._before = [run for run in runs if run.record.side == "before"]
        self._runs = {(run.folder,): run for run in runs if run.record.side != "before"}

    def before_analyses(self) -> list[Analysis]:
        """Return the Analyses of the side before the change, as far as it was measured."""
        return [self.analysis(run) for run in self._before or []]

    def after_analyses(self) -> list[Analysis]:
        """Return the Analyses of the judged side."""
        return [self.analysis(run) for run in self.runs()]

    def finish(self) -> VerdictRecord:
        """Write verdict.json, summary.md and report.html, save the baseline where asked, and return the verdict. Raises CannotWrite."""
        return conclude(self, self.before_analyses(), self.after_analyses())

    def close(self) -> None:
        """Stop every server that this session started. Attached servers are left as they are."""
        self._open.close()
        self._target = None
        self.failure = self.failure or UsageError("the session is closed")
