"""An experiment without servers: each cell is on disk before the next begins, and a broken one goes on without measuring anything twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_run import MadeRun, closed_loop

from pytest_kvcache import experimenting
from pytest_kvcache.errors import LaunchFailed, UsageError
from pytest_kvcache.experimenting import Bench, Experiment
from pytest_kvcache.judge import experiment
from pytest_kvcache.measure import Planned, Target, run_folder
from pytest_kvcache.runfolder import Run, write_run
from pytest_kvcache.settings import Settings

PLAN = [Planned("normal"), Planned("nearmax", users=1, requests=1)]


class Rig:
    """A bench that writes Runs and remembers what was done; ``breaks_at`` makes the n-th start of a server fail."""

    def __init__(self, folder: Path, breaks_at: int = 0) -> None:
        self.folder = folder
        self.done: list[str] = []
        self.breaks_at = breaks_at
        self.starts = 0
        self.said: list[str] = []
        self.open_now = 0
        self.pinned: list[int | None] = []

    def bench(self) -> Bench:
        return Bench(self.open, self.measure, self.quality, self.pinned.append, self.said.append)

    def open(self, side: str, stack: ExitStack) -> Target:
        self.starts += 1
        if self.starts == self.breaks_at:
            raise LaunchFailed("it died")
        stack.enter_context(self._server())
        return Target((), (), side=side)

    @contextmanager
    def _server(self) -> Iterator[None]:
        self.open_now += 1
        assert self.open_now == 1, "two servers at once measure each other"
        yield
        self.open_now -= 1

    def measure(self, target: Target, planned: Planned, number: int) -> Run:
        self.done.append(f"{target.side} {planned.name} {number}")
        return self._run(target.side, planned.name, window=number)

    def quality(self, target: Target) -> Run:
        self.done.append(f"{target.side} quality")
        return self._run(target.side, "quality")

    def _run(self, side: str, profile: str, **fields: Any) -> Run:
        run = MadeRun().write(run_folder(self.folder, profile))
        return write_run(run.folder, msgspec.structs.replace(run.record, side=side, profile=profile, **fields))


def make(tmp_path: Path, rig: Rig, repeats: int = 3, resume: bool = False, **changes: Any) -> list[str]:
    settings = Settings(before="a {port}", after="b {port}", repeats=repeats, resume=str(tmp_path) if resume else "", **changes)
    found = Experiment(settings, PLAN, quality=True, id="abc").run(tmp_path, rig.bench())
    return [f"{one.side} {one.planned.name if one.planned else 'quality'} {one.run.record.window}" for one in found]


def test_every_repeat_is_a_start_of_its_own_and_single_requests_are_asked_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    found = make(tmp_path, rig)
    assert rig.starts == 6
    assert rig.done == [
        "before normal 0", "before nearmax 0", "before quality", "after normal 0", "after nearmax 0", "after quality",
        "after normal 1", "before normal 1", "before normal 2", "after normal 2",
    ]  # fmt: skip
    assert len(found) == 10


def test_one_repeat_takes_all_windows_on_one_start(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    make(tmp_path, rig, repeats=1, windows=3)
    assert rig.starts == 2
    assert [done for done in rig.done if "before normal" in done] == ["before normal 0", "before normal 1", "before normal 2"]


@pytest.mark.parametrize("breaks_at", [1, 2, 4, 6])
def test_a_broken_experiment_goes_on_from_its_finished_cells(tmp_path: Path, breaks_at: int) -> None:
    whole = Rig(tmp_path / "whole")
    wanted = make(tmp_path / "whole", whole)
    rig = Rig(tmp_path / "broken", breaks_at)
    with pytest.raises(LaunchFailed):
        make(tmp_path / "broken", rig)
    again = Rig(tmp_path / "broken")
    assert make(tmp_path / "broken", again, resume=True) == wanted
    assert rig.done + again.done == whole.done, "nothing twice and nothing left out"
    record = experiment.read(tmp_path / "broken")
    assert record is not None
    assert len(record.resumed_wall_s) == 1
    assert record.id == "abc"


def test_the_runs_of_a_cell_that_was_cut_off_are_set_aside(tmp_path: Path) -> None:
    rig = Rig(tmp_path, breaks_at=3)
    with pytest.raises(LaunchFailed):
        make(tmp_path, rig)
    cut_off = rig._run("after", "normal", window=1)
    make(tmp_path, Rig(tmp_path), resume=True)
    assert not cut_off.folder.exists() or cut_off.folder.name in {p.name for p in (tmp_path / "runs").iterdir()}
    assert (tmp_path / "unfinished" / cut_off.folder.name).is_dir()


def test_more_repeats_are_added_to_what_was_measured(tmp_path: Path) -> None:
    make(tmp_path, Rig(tmp_path), repeats=2)
    more = Rig(tmp_path)
    assert len(make(tmp_path, more, repeats=4, resume=True)) == 12
    assert more.done == ["before normal 2", "after normal 2", "after normal 3", "before normal 3"]


def test_other_options_are_another_experiment(tmp_path: Path) -> None:
    make(tmp_path, Rig(tmp_path), repeats=1, windows=1)
    for changes, said in (({"seed": 2}, "seed was 1 and is 2"), ({"duration_s": 9.0}, "duration_s")):
        with pytest.raises(UsageError, match=said):
            make(tmp_path, Rig(tmp_path), repeats=1, windows=1, resume=True, **changes)


def test_what_was_kept_holds_no_key(tmp_path: Path) -> None:
    settings = Settings(before="srv --api-key sk-very-secret-1 --port {port}", after="srv --port {port}", header=("X-Key: sk-very-secret-2",))
    Experiment(settings, PLAN, quality=False, id="abc").run(tmp_path, Rig(tmp_path).bench())
    assert "very-secret" not in (tmp_path / experiment.FILE).read_text()


def test_a_declared_change_of_the_longest_context_presses_both_sides_with_what_both_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experimenting, "longest_context", lambda target, settings: {"before": 4096, "after": 2048}[target.side])
    rig = Rig(tmp_path)
    make(tmp_path, rig, repeats=1, windows=1, expect_change="max_model_len")
    assert rig.pinned == [2048]
    assert rig.starts == 4, "each side once to read it, and once to measure"
    other = Rig(tmp_path / "other")
    make(tmp_path / "other", other, repeats=1, windows=1)
    assert other.pinned == [None]
    assert other.starts == 2


def test_the_verdict_says_how_it_was_measured_and_how_to_go_on(tmp_path: Path) -> None:
    make(tmp_path, Rig(tmp_path), repeats=2)
    settings = Settings(before="a {port}", after="b {port}", repeats=3, resume=str(tmp_path))
    again = Experiment(settings, PLAN, quality=True, id="x")
    again.run(tmp_path, Rig(tmp_path).bench())
    said = again.judged(tmp_path, "INCONCLUSIVE")
    assert said[:2] == ["3 repeats in ABBA order, each side started anew for each", "broken off and taken up again 1 time"]
    assert f"--kv-resume={tmp_path} and a higher --kv-repeats" in said[-1]
    assert again.judged(tmp_path, "PASS") == said[:2]


def test_an_unsound_repeat_is_measured_again_on_both_sides(tmp_path: Path) -> None:
    class Late(Rig):
        def measure(self, target: Target, planned: Planned, number: int) -> Run:
            run = super().measure(target, planned, number)
            if (target.side, planned.name, number) == ("before", "normal", 1):
                MadeRun(no_end=True).write(run.folder)  # the record of the load is not whole
                run = write_run(run.folder, run.record)
            return run

    make(tmp_path, Late(tmp_path), repeats=3)
    again = Rig(tmp_path)
    assert len(make(tmp_path, again, repeats=3, resume=True)) == 10
    assert again.done == ["after normal 1", "before normal 1"]
    record = experiment.read(tmp_path)
    assert record is not None
    assert record.unsound_repeats == [1]
    assert len(list((tmp_path / "unfinished").iterdir())) == 2


class Spreading(Rig):
    """A bench whose windows last longer after the change by what ``apart`` says, from pair to pair."""

    def __init__(self, folder: Path, apart: Sequence[float], breaks_at: int = 0) -> None:
        super().__init__(folder, breaks_at)
        self.apart = apart

    def measure(self, target: Target, planned: Planned, number: int) -> Run:
        self.done.append(f"{target.side} {planned.name} {number}")
        requests = {"requests": planned.requests} if planned.requests else {}
        stretch = 1 + (self.apart[number % len(self.apart)] if target.side == "after" else 0)
        made = MadeRun(rows=closed_loop(length_s=0.5 * stretch, ttft_s=0.1 * stretch))
        run = made.write(run_folder(self.folder, planned.name))
        return write_run(run.folder, msgspec.structs.replace(run.record, side=target.side, profile=planned.name, window=number, options=requests))


QUIET, LOUD = (0.0, 0.0, 0.0), (0.0, 0.12, -0.12)


def test_the_spread_of_the_first_repeats_chooses_how_many_there_are(tmp_path: Path) -> None:
    quiet = Spreading(tmp_path / "quiet", QUIET)
    make(tmp_path / "quiet", quiet, most_repeats=12)
    assert quiet.starts == 6
    assert quiet.said[-1].startswith("the 3 repeats are enough: ")
    loud = Spreading(tmp_path / "loud", LOUD)
    make(tmp_path / "loud", loud, most_repeats=8)
    assert loud.starts == 16
    assert "cell 6 of 6 or more: after, repeat 3" in loud.said
    assert "cell 7 of 16: after, repeat 4" in loud.said
    assert [done for done in loud.done if "normal" in done][-2:] == ["after normal 7", "before normal 7"], "in ABBA order to the end"
    record = experiment.read(tmp_path / "loud")
    assert record is not None
    assert record.choice is not None
    assert (record.pilot_repeats, record.choice.pilot, record.choice.repeats, record.choice.most) == (3, 3, 8, 8)
    assert record.choice.wanted is None or record.choice.wanted > 8
    assert record.choice.spreads[0].quantity in {"ttft.p50", "throughput"}


@pytest.mark.parametrize("breaks_at", [6, 9])
def test_a_broken_experiment_keeps_the_number_that_was_chosen(tmp_path: Path, breaks_at: int) -> None:
    whole = Spreading(tmp_path / "whole", LOUD)
    wanted = make(tmp_path / "whole", whole, most_repeats=8)
    rig = Spreading(tmp_path / "broken", LOUD, breaks_at)
    with pytest.raises(LaunchFailed):
        make(tmp_path / "broken", rig, most_repeats=8)
    again = Spreading(tmp_path / "broken", LOUD)
    assert make(tmp_path / "broken", again, most_repeats=8, resume=True) == wanted
    assert rig.done + again.done == whole.done
    if breaks_at > 6:
        assert not any("spreads" in said for said in again.said), "chosen once"


def test_the_verdict_says_what_was_chosen_and_why(tmp_path: Path) -> None:
    settings = Settings(before="a {port}", after="b {port}", repeats=3, most_repeats=8)
    made = Experiment(settings, PLAN, quality=False, id="abc")
    assert (made.repeats, made.pilot) == (3, 3)
    made.run(tmp_path, Spreading(tmp_path, LOUD).bench())
    assert (made.repeats, made.pilot) == (8, 3)
    said = made.judged(tmp_path, "PASS")
    assert said[0].startswith("8 repeats in ABBA order")
    assert said[1].startswith("chosen after 3 repeats from their spread alone, not from their difference: 8 repeats, where ")
    with pytest.raises(UsageError, match="has been judged"):
        Experiment(settings.replace(resume=str(tmp_path), most_repeats=0), PLAN, quality=False, id="x")._begin_pilot()


def test_unsound_repeats_choose_nothing_until_they_are_measured_again(tmp_path: Path) -> None:
    class Late(Spreading):
        def measure(self, target: Target, planned: Planned, number: int) -> Run:
            run = super().measure(target, planned, number)
            if (target.side, planned.name, number) == ("before", "normal", 1):
                MadeRun(no_end=True).write(run.folder)
                run = write_run(run.folder, run.record)
            return run

    late = Late(tmp_path, QUIET)
    make(tmp_path, late, most_repeats=8)
    assert late.starts == 6
    assert late.said[-1].startswith("how many repeats are needed is not told by these: ")
    again = Spreading(tmp_path, QUIET)
    make(tmp_path, again, most_repeats=8, resume=True)
    assert again.done == ["after normal 1", "before normal 1"]
    assert again.said[-1].startswith("the 3 repeats are enough: ")
