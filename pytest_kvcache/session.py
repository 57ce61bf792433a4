"""One session: the servers it attaches to or launches, the Runs it measures, the gates judged on them, and its folder.

A session folder is made when the first Run is measured. A comparison of two launches is an experiment (experimenting.py): all that
``plan`` names is measured on both sides, cell after cell, before anything is judged; the side after the change is started once more
only where a test asks for what no plan named.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pytest_kvcache.adopting import copy_runs, items_beside, planned_of, pressed_as
from pytest_kvcache.analysis.own_rules import rule_set
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conclusion import conclude, session_folder
from pytest_kvcache.diskroom import give_back, hold_back, used_up
from pytest_kvcache.engines import Dialect, imported
from pytest_kvcache.errors import CannotWrite, KvError, LoadFailed, UsageError
from pytest_kvcache.experimenting import Bench, Experiment, go_on
from pytest_kvcache.foreseeing import foresee
from pytest_kvcache.judge.compare import Comparison, compare
from pytest_kvcache.load.runner import profile_path
from pytest_kvcache.measure import Planned, Target, measure_load, measure_quality
from pytest_kvcache.opening import Servers
from pytest_kvcache.planned import window_of
from pytest_kvcache.quality.items import Item
from pytest_kvcache.quality.pressure import read_pressures
from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import GateRecord, VerdictRecord
from pytest_kvcache.runfolder import Run, read_runs
from pytest_kvcache.settings import Settings

EMBEDDED_DEFAULT = "llamacpp"


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
        self.rules = rule_set(settings.rules)  # a file that cannot be meant is refused before anything else is done
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
        dialects = (*((imported(settings.engine_from),) if settings.engine_from else ()), *extra_dialects)
        self._servers = Servers(settings, dialects, provenance or {}, self._say)
        self._folder = Path(settings.resume) if settings.resume else folder
        self._held = False
        self._id = secrets.token_hex(3)
        self._open = ExitStack()
        self._target: Target | None = None
        self._experiment: Experiment | None = None
        self._prepared = False
        self._longest: int | None = None
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
        if self._held:
            return self._folder
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(
                f"cannot make the session's folder: {error.strerror or error}",
                where=str(self._folder),
                hint="check permissions and free space, or name another folder with --kv-reports",
            ) from None
        hold_back(self._folder)
        self._held = True
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
        self.prepare()
        if self._target is None:
            with self._trying():
                self._target = self._open_judged()
        return self._target

    def prepare(self) -> None:
        """Bring in the side before the change, at the first use: load the baseline, or measure the whole experiment of two launches.

        Raises what measuring raises; at each later use the same kind of error in short, without another try.
        """
        if self.failure is not None:
            raise type(self.failure)(f"not measured, because there is no server: {self.failure.what.splitlines()[0]}")
        if not self._prepared:
            with self._trying():
                self.check()
                self.folder  # noqa: B018  an unwritable folder is found before a server is started
                if self.settings.baseline:
                    self.adopt(self._baseline, "before")
                    self._longest = self._longest_before()
                if self._experiment is not None:
                    self._run(self._experiment)
            self._prepared = True

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Remember an error of the user's kind, so that later uses say it in short."""
        try:
            with self._lease():
                yield
        except KvError as error:
            self.failure = error
            raise

    def _open_judged(self) -> Target:
        settings = self.settings
        side = "after" if settings.baseline else ""
        if settings.endpoint:
            return self._servers.attach(settings.endpoint, side)
        if settings.before:
            return self._side("after", self._open)
        return self._servers.open(settings.launch or EMBEDDED_DEFAULT, side, self._open, self.folder / f"server{'-' + side if side else ''}.log")

    def _side(self, side: str, stack: ExitStack) -> Target:
        """Start one side of a comparison of two launches; ``stack`` stops it."""
        return self._servers.open(self.settings.before if side == "before" else self.settings.after, side, stack, self.folder / f"server-{side}.log")

    def _run(self, experiment: Experiment) -> None:
        """Measure what is left of an experiment and take up all of its Runs."""
        self._id = experiment.id

        def pin(longest: int | None) -> None:
            self._longest = longest

        bench = Bench(self._side, lambda target, planned, n: self._measure(target, planned, n, keep=False), self._ask, pin, self._say)
        try:
            found = experiment.run(self.folder, bench)
        except BaseException:
            self.notes.append(f"the experiment was broken off: the same command with {go_on(self.folder)} (--resume in the CLI) goes on")
            self._say(self.notes[-1])
            raise
        self._before, self._runs = [one.run for one in found if one.side == "before"], {}
        for one in found:
            if one.side == "after":
                self._runs[self._key(one.planned, one.window) if one.planned is not None else ("quality", ())] = one.run

    def _longest_before(self) -> int | None:
        """Return the longest context of the baseline's server, in tokens: prompts that are sized by it are comparable with the baseline's."""
        values = [run.record.config["max_model_len"].to_value() for run in self._before or () if "max_model_len" in run.record.config]
        known = [int(value.number()) for value in values if isinstance(value, Reading)]
        return min(known) if known else None

    def check(self) -> None:
        """Raise UsageError for whatever cannot be meant and can be known before a server is asked or started, CannotJudge for the baseline."""
        if self._checked:
            return
        self._items, self._baseline = foresee(self.settings, self.plan)
        if self.settings.before:
            if not self.plan:  # the comparison alone was asked for
                self.plan, self.plan_quality = [Planned("normal"), Planned("longctx")], True
            self._experiment = Experiment(self.settings, self.plan, quality=self.plan_quality, id=self._id)
        self._checked = True

    # -- measuring -------------------------------------------------------------------------------------------------

    def load(self, planned: Planned, *, number: int = 0, variant: str = "") -> Run:
        """Return the Run of one window of ``planned``; the same window is measured once a session. ``variant`` is what a search calls it."""
        profile_path(planned.profile)  # a profile that there is not is found before a server is started
        self.prepare()
        if (key := self._key(planned, number)) not in self._runs:
            target = dataclasses.replace(self.target, variant=variant)
            with self._lease():
                return self._measure(target, planned, number)
        return self._runs[key]

    def windows(self, planned: Planned) -> list[Run]:
        """Return the windows of ``planned``, as many as ``window_count`` says."""
        self.prepare()
        return [self.load(planned, number=number) for number in range(self.window_count(planned))]

    def window_count(self, planned: Planned) -> int:
        """Return how many windows of a profile there are: one a repeat of an experiment, else ``settings.windows`` beside another side, else one."""
        if self._experiment is not None and self.settings.repeats > 1 and not planned.requests:
            return self._experiment.repeats
        return 1 if planned.requests or not (self.settings.save or self.settings.baseline or self.settings.before) else self.settings.windows

    def quality(self, items: Sequence[Item] | None = None) -> Run:
        """Return the quality Run of the judged side; asked once a session unless other items are given."""
        self.prepare()
        key = ("quality", tuple(item.id for item in items) if items is not None else ())
        if key not in self._runs:
            target = self.target
            with self._lease():
                self._ask(target, items, key)
        return self._runs[key]

    def runs(self) -> list[Run]:
        """Return the Runs measured on the judged side so far, in order."""
        return list(self._runs.values())

    def compare(self) -> Comparison:
        """Judge the change on everything measured on both sides. Raises UsageError where nothing was named to compare with."""
        if not (self.settings.before or self.settings.baseline):
            raise UsageError("nothing to compare with", hint="--kv-baseline=NAME, or --kv-before=... --kv-after=...")
        self.prepare()
        for planned in [*self.plan, *planned_of(self._before or (), {planned.name for planned in self.plan})]:
            if planned.name in {run.record.profile for run in self._before or ()}:
                self.windows(planned)
        if any(run.record.profile == "quality" for run in self._before or ()):
            self.quality()
        comparison = compare(self.before_analyses(), self.after_analyses(), self.settings)
        apart = ["the sides were measured at different times: drift of the machine between them is not covered"] if self.settings.baseline else []
        if self._experiment is not None:
            apart = self._experiment.judged(self.folder, comparison.verdict)
        self.notes += [note for note in (*comparison.notes, *apart, *self._servers.notes) if note not in self.notes]
        self.problems += [problem.text for problem in comparison.problems if problem.text not in self.problems]
        return comparison

    def analysis(self, run: Run) -> Analysis:
        """Return the Analysis of a Run; made once."""
        if run.folder not in self._analyses:
            self._analyses[run.folder] = analyse(run)
        return self._analyses[run.folder]

    @staticmethod
    def _key(planned: Planned, number: int) -> tuple[Any, ...]:
        numbers = planned.users, planned.duration_s, planned.output_tokens, planned.requests
        return planned.profile, *numbers, tuple(sorted(planned.options.items())), number

    def _measure(self, target: Target, planned: Planned, number: int, *, keep: bool = True) -> Run:
        self._servers.check(target)
        pilot = self._experiment.pilot if self._experiment is not None else 0
        of = self.window_count(planned)
        window = window_of(target, planned, number, self.settings, session=self._id, of=of, longest=self._longest, pilot=pilot)
        self._say(f"{target.side + ': ' if target.side else ''}{planned.name}, {target.variant or f'window {number + 1} of {window.of}'}")
        key = (*self._key(planned, number), *filter(None, [target.variant])) if keep else None
        with self._roomy():
            return measure_load(target, self.settings, self.folder, window, run_id=self._next_id(), keep=lambda run: self._keep(run, key))

    @contextmanager
    def _roomy(self) -> Iterator[None]:
        """Raise CannotWrite, once, where the disk is full after a measurement, whatever that measurement made of it."""
        try:
            yield
        except (LoadFailed, CannotWrite):
            if not used_up(self.folder):
                raise
        if used_up(self.folder):
            kept = len(self._runs) + len(self._before or ())
            raise CannotWrite(
                f"no space is left where the session is written: nothing more is measured, and {kept} Run{'s are' if kept != 1 else ' is'} kept",
                where=str(self.folder),
                hint="free space and measure again, or name another folder with --kv-reports",
            )

    def sweep(self, command: str, variant: str, planned: Planned, windows: int) -> list[Run]:
        """Launch the command of one variant of a sweep, measure its windows and stop it; a server of this session is stopped before."""
        self._open.close()
        self._target = None
        with self._lease(), ExitStack() as stack:
            target = self._servers.open(command, "", stack, self.folder / f"server-{variant}.log".replace("/", "-"))
            return [self._measure(dataclasses.replace(target, variant=variant), planned, number) for number in range(windows)]

    def _ask(self, target: Target, items: Sequence[Item] | None = None, key: tuple[Any, ...] | None = None) -> Run:
        self._servers.check(target)
        items = self.standard_items(target) if items is None else items
        settings = pressed_as(self._before or (), self.settings)
        pressing = ", ".join(read_pressures(settings.quality_pressure))
        told = f"{target.side + ': ' if target.side else ''}quality, {len(items)} items"
        self._say(f"{told}{f', and again under pressure ({pressing})' if pressing else ''}")
        with self._roomy():
            return measure_quality(target, settings, self.folder, items, run_id=self._next_id(), keep=lambda run: self._keep(run, key))

    def standard_items(self, target: Target) -> list[Item]:
        """Return the items of ``--kv-quality-items``, else the standard set for the served model."""
        if self._items:
            return self._items
        return items_beside(target, self._before or (), self.settings)

    def _keep(self, run: Run, key: tuple[Any, ...] | None) -> Run:
        if key is not None:
            self._runs[key] = run
        elif run.record.side == "before":  # of an experiment that runs: a report tells it also where it is broken off
            self._before = [*(self._before or []), run]
        else:
            self._runs[(run.folder,)] = run
        for listener in self.on_run:
            listener(run)
        return run

    def _next_id(self) -> str:
        return f"{self._id}-{secrets.token_hex(2)}"

    def adopt(self, runs: Sequence[Run], side: str) -> list[Run]:
        """Copy stored Runs into this session as one side of it, so that the session's folder stands alone. Raises CannotWrite."""
        adopted = copy_runs(runs, self.folder, side)
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
        if self._folder is not None:
            give_back(self._folder)
        return conclude(self, self.before_analyses(), self.after_analyses())

    def close(self) -> None:
        """Stop every server that this session started. Attached servers are left as they are."""
        self._open.close()
        self._servers.close()
        self._target = None
        if self._folder is not None:
            give_back(self._folder)
        self.failure = self.failure or UsageError("the session is closed")
