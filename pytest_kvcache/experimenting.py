"""Runs an experiment of two launched sides: cell after cell in ABBA order, each finished cell on disk before the next begins.

What a cell is made of (opening a side, measuring a window, asking the quality items) is the session's; here is the order, the record
that a broken experiment goes on from, and the lengths that both sides are pressed with.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.conditions import INCONCLUSIVE, INVALID
from pytest_kvcache.errors import UsageError
from pytest_kvcache.experimentrecords import CellRecord, CellRun
from pytest_kvcache.judge import experiment, pilot
from pytest_kvcache.judge.compare import compare
from pytest_kvcache.judge.experiment import Cell
from pytest_kvcache.judge.windows import Margins
from pytest_kvcache.measure import Planned, Target, longest_context
from pytest_kvcache.opening import is_address
from pytest_kvcache.runfolder import Run, read_run, set_aside
from pytest_kvcache.server.shown import shown_command, shown_settings
from pytest_kvcache.settings import Settings

QUALITY = -1
# What may differ between the halves of a broken experiment: where things are written, how they are judged, and how many repeats are wanted.
_MEASURING = (
    "model", "engine", "engine_from", "api", "header", "extra_body", "gpus", "users", "duration_s", "seed", "output_tokens", "reset_cache", "sample_hz",
    "request_timeout_s", "quality_items", "quality_pressure", "quality_probes", "quality_tasks", "quality_tasks_limit", "quality_tokenizer", "metrics_url", "load_processes", "rate", "arrivals", "stages", "max_in_flight", "content", "trace", "load_option",
)  # fmt: skip


def go_on(folder: Path) -> str:
    """Return the option with which the same command goes on with an experiment, as a shell takes it."""
    return f"--kv-resume={shlex.quote(str(folder))}"


@dataclass(frozen=True)
class Bench:
    """What an experiment needs of its session. ``open`` starts a side; what it opened ends with the stack."""

    open: Callable[[str, ExitStack], Target]
    measure: Callable[[Target, Planned, int], Run]
    quality: Callable[[Target], Run]
    pin: Callable[[int | None], None]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """One Run of an experiment: its side, the entry of the plan (None: the quality items) and its window."""

    side: str
    planned: Planned | None
    window: int
    run: Run


class Experiment:
    """An experiment in a session's folder, new or taken up again. ``id`` is the one that its prompts are made from."""

    def __init__(self, settings: Settings, plan: Sequence[Planned], *, quality: bool, id: str) -> None:
        self.settings = settings
        self.plan = list(plan)
        self.quality = quality
        self.record = experiment.take_up(Path(settings.resume), self.design()) if settings.resume else experiment.begin(id, self.design())
        # a server that keeps running has seen the prompts of a cell that was broken off: the rest gets new ones
        self.id = id if is_address(settings.before) or is_address(settings.after) else self.record.id
        if settings.most_repeats > settings.repeats and not self.record.pilot_repeats:
            self._begin_pilot()

    @property
    def repeats(self) -> int:
        """How many repeats the experiment is to have, as far as that is known: those of the options, or what was chosen after the first ones."""
        asked = self.settings.repeats if self.record.choice is not None or not self.record.pilot_repeats else self.record.pilot_repeats
        return max(asked, self.record.choice.repeats if self.record.choice is not None else 0)

    @property
    def pilot(self) -> int:
        """Of how many first repeats the spread chooses how many there are; 0 where their number is given."""
        return self.record.pilot_repeats

    def design(self) -> dict[str, Any]:
        """Return what both halves of a broken experiment must agree on; keys and passwords are not in it."""
        settings = self.settings
        shown = shown_settings(settings)
        return {
            "before": shown_command(settings.before),
            "after": shown_command(settings.after),
            "windows on one start": settings.windows if settings.repeats == 1 else 0,
            "plan": [[planned.profile, *(getattr(planned, f.name) for f in dataclasses.fields(planned)[1:])] for planned in self.plan],
            "quality": self.quality,
            **{name: shown[name]["value"] for name in _MEASURING},
        }

    def run(self, folder: Path, bench: Bench) -> list[Measured]:
        """Measure what is left and return every Run, those of earlier halves first. Raises what launching and measuring raise.

        Each cell that was finished until then stays on record; ``--kv-resume`` goes on from there.
        """
        if self.settings.resume:
            self._take_up(folder)
        experiment.write(folder, self.record)
        found = self._read(folder)
        if experiment.left(self.record, self.repeats):
            self._choose_lengths(bench, folder)
        self._measure(found, folder, bench)
        if self.pilot and self.record.choice is None:
            self._choose_repeats(found, folder, bench)
            self._measure(found, folder, bench)
        return found

    def _measure(self, found: list[Measured], folder: Path, bench: Bench) -> None:
        """Measure the cells that are left of the repeats that are known by now, and add their Runs to ``found``."""
        cells = experiment.left(self.record, self.repeats)
        whole = len(experiment.cells(self.repeats))
        for number, cell in enumerate(cells, start=whole - len(cells) + 1):
            more = " or more" if self.pilot and self.record.choice is None else ""
            bench.say(f"cell {number} of {whole}{more}: {cell.side}, repeat {cell.repeat + 1}")
            found += self._cell(cell, folder, bench)

    def judged(self, folder: Path, verdict: str) -> list[str]:
        """Note in the record that a verdict is given now, and return what it must say of the repeats and of earlier verdicts."""
        repeats = len({cell.repeat for cell in self.record.finished})
        if verdict != INVALID:  # which tells nothing of the change, and so is no look at it
            self.record = msgspec.structs.replace(self.record, judged_repeats=[*self.record.judged_repeats, repeats])
        experiment.write(folder, self.record)
        starts = f"{repeats} repeats in ABBA order, each side started anew for each" if self.settings.repeats > 1 else "each side started once"
        times = len(self.record.resumed_wall_s)
        broken = [f"broken off and taken up again {times} time{'s' if times > 1 else ''}"] if times else []
        again = sorted(set(self.record.unsound_repeats))
        broken += [f"unsound and measured again, on both sides: repeat {', '.join(str(number + 1) for number in again)}"] if again else []
        more = f"more repeats go on from these: the same command with {go_on(folder)} and a higher --kv-repeats"
        if verdict == INVALID:
            more = f"the same command with {go_on(folder)} measures unsound repeats again"
        chosen = self.record.choice
        broken += [f"chosen after {chosen.pilot} repeats from their spread alone, not from their difference: {pilot.said(chosen)}"] if chosen else []
        return [starts, *broken, *experiment.looks(self.record), *([more] if verdict in {INCONCLUSIVE, INVALID} else [])]

    def _begin_pilot(self) -> None:
        """Note that the first repeats choose how many there are. Raises UsageError where they cannot, or their difference has been seen already."""
        settings = self.settings
        if self.record.judged_repeats:
            raise UsageError(
                "--kv-most-repeats chooses before a verdict is given, and this experiment has been judged",
                where=settings.resume,
                hint="more repeats of one that was judged: a higher --kv-repeats",
            )
        first = max([settings.repeats, *(cell.repeat + 1 for cell in self.record.finished)])
        self.record = msgspec.structs.replace(self.record, pilot_repeats=first)

    def _choose_repeats(self, found: Sequence[Measured], folder: Path, bench: Bench) -> None:
        """Choose how many repeats there are from the spread of the first ones, unless they are unsound or their sides cannot be compared."""
        most = self.settings.most_repeats
        before, after = ([analyse(one.run) for one in found if one.side == side] for side in experiment.SIDES)
        unsound = next((problem.text for analysis in (*before, *after) for problem in analysis.problems), "")
        unsound = unsound or next((problem.text for problem in compare(before, after, self.settings).problems), "")
        if unsound or not most:
            bench.say(f"how many repeats are needed is not told by these: {unsound or '--kv-most-repeats is not given'}")
            return
        choice = pilot.choose(before, after, Margins.of(self.settings), self.pilot, max(most, self.pilot))
        self.record = msgspec.structs.replace(self.record, choice=choice)
        experiment.write(folder, self.record)
        bench.say(pilot.said(choice))

    def _cell(self, cell: Cell, folder: Path, bench: Bench) -> list[Measured]:
        began_wall_s = time.time()
        found: list[Measured] = []
        with ExitStack() as stack:
            target = bench.open(cell.side, stack)
            for planned in self.plan:
                found += [Measured(cell.side, planned, n, bench.measure(target, planned, n)) for n in self._windows(planned, cell)]
            if self.quality and cell.repeat == 0:
                found.append(Measured(cell.side, None, 0, bench.quality(target)))
        runs = [CellRun(QUALITY if m.planned is None else self.plan.index(m.planned), m.window, m.run.folder.name) for m in found]
        done = CellRecord(cell.repeat, cell.side, runs, began_wall_s, time.time())
        self.record = msgspec.structs.replace(self.record, finished=[*self.record.finished, done])
        experiment.write(folder, self.record)
        return found

    def _windows(self, planned: Planned, cell: Cell) -> list[int]:
        """Return the windows of a profile that belong to a cell: single requests and quality items are asked in the first repeat only."""
        if planned.requests:
            return [0] if cell.repeat == 0 else []
        return list(range(self.settings.windows)) if self.settings.repeats == 1 else [cell.repeat]

    def _choose_lengths(self, bench: Bench, folder: Path) -> None:
        """Choose the longest context that both sides are pressed with, where it is declared to change: the shorter of the two."""
        if self.record.longest is None and "max_model_len" in self.settings.declared:
            found = []
            for side in experiment.SIDES:
                bench.say(f"reading the longest context of {side}")
                with ExitStack() as stack:
                    found.append(longest_context(bench.open(side, stack), self.settings))
            known = [length for length in found if length is not None]
            self.record = msgspec.structs.replace(self.record, longest=min(known) if known else None)
            experiment.write(folder, self.record)
        bench.pin(self.record.longest)

    def _take_up(self, folder: Path) -> None:
        """Set aside the Runs of cells that were not finished, or whose repeat is unsound, and note that the experiment goes on. Raises CannotWrite.

        An unsound repeat is measured again on both sides, whichever of them was the unsound one: a pair belongs together in time.
        """
        unsound = sorted({cell.repeat for cell in self.record.finished if any(self._is_unsound(folder, run) for run in cell.runs)})
        sound = [cell for cell in self.record.finished if cell.repeat not in unsound]
        self.record = msgspec.structs.replace(self.record, finished=sound, unsound_repeats=[*self.record.unsound_repeats, *unsound])
        kept = {run.folder for cell in self.record.finished for run in cell.runs}
        set_aside(folder, kept)
        self.record = msgspec.structs.replace(self.record, resumed_wall_s=[*self.record.resumed_wall_s, time.time()])

    def _is_unsound(self, folder: Path, run: CellRun) -> bool:
        return bool(analyse(read_run(folder / "runs" / run.folder)).problems)

    def _read(self, folder: Path) -> list[Measured]:
        """Return the Runs of the finished cells. Raises CannotJudge where one is gone or broken."""
        entries: list[Planned | None] = [*self.plan, None]
        return [
            Measured(cell.side, entries[run.entry], run.window, read_run(folder / "runs" / run.folder))
            for cell in self.record.finished
            for run in cell.runs
        ]
