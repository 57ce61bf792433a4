"""Baselines: what was kept is found again, whole, and by another process; what is not there is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_run import MadeRun, quality_run

from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.errors import CannotJudge, CannotWrite, UnknownSchema, UsageError
from pytest_kvcache.judge.baseline import baselines, load_baseline, save_baseline
from pytest_kvcache.quantities import Reading


def session(tmp_path: Path, name: str = "session", users: int = 2, side: str = "") -> Path:
    folder = tmp_path / name
    for number in (1, 2):
        run = MadeRun(record={"window": number, "side": side}).write(folder / "runs" / f"{number}-normal")
        (run.folder / "server.log").write_text("a long log")
        (run.folder / "metrics-before.prom").write_text("# raw")
    quality_run(300, side=side).write(folder / "runs" / "3-quality")
    return folder


def test_a_saved_baseline_is_found_by_its_name(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    saved = save_baseline(session(tmp_path), reports, "before-1.2")
    runs = load_baseline("before-1.2", reports)
    assert [run.record.profile for run in runs] == ["normal", "normal", "quality"]
    assert {path.name for path in runs[0].folder.iterdir()} == {"run.json", "requests.jsonl", "telemetry.jsonl", "metrics-before.prom"}
    sent = analyse(runs[0]).values["requests.sent"]
    assert isinstance(sent, Reading)
    assert sent.number() == 16
    assert baselines(reports) == ["before-1.2"]
    assert saved == reports / "baselines" / "before-1.2"


def test_a_baseline_is_found_by_path_as_session_as_baseline_and_as_run(tmp_path: Path) -> None:
    folder, reports = session(tmp_path), tmp_path / "reports"
    saved = save_baseline(folder, reports, "b")
    assert len(load_baseline(str(folder), reports)) == 3
    assert len(load_baseline(str(saved), tmp_path / "elsewhere")) == 3
    assert len(load_baseline(str(folder / "runs" / "1-normal"), reports)) == 1
    assert len(load_baseline(str(folder / "runs" / "1-normal" / "run.json"), reports)) == 1


def test_saving_again_replaces_the_whole_of_it(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    save_baseline(session(tmp_path, "first"), reports, "b")
    MadeRun(record={"profile": "longctx"}).write(tmp_path / "second" / "runs" / "1-longctx")
    save_baseline(tmp_path / "second", reports, "b")
    assert [run.record.profile for run in load_baseline("b", reports)] == ["longctx"]
    assert [path.name for path in (reports / "baselines").iterdir()] == ["b"]


def test_of_a_comparison_the_side_after_is_kept(tmp_path: Path) -> None:
    folder, reports = session(tmp_path, side="after"), tmp_path / "reports"
    MadeRun(record={"side": "before", "profile": "old"}).write(folder / "runs" / "9-old")
    save_baseline(folder, reports, "b")
    assert "old" not in {run.record.profile for run in load_baseline("b", reports)}
    assert "old" not in {run.record.profile for run in load_baseline(str(folder), reports)}


def test_a_name_that_is_not_saved_lists_what_is(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    save_baseline(session(tmp_path), reports, "friday")
    with pytest.raises(UsageError) as caught:
        load_baseline("monday", reports)
    assert "monday" in caught.value.what
    assert "friday" in caught.value.hint
    with pytest.raises(UsageError, match="no baseline"):
        load_baseline("monday", tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "-x", "x" * 200, "a\n"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = session(tmp_path)
    with pytest.raises(UsageError):
        save_baseline(folder, tmp_path / "reports", name)
    assert not (tmp_path / "reports").exists()


def test_a_session_without_runs_is_no_baseline(tmp_path: Path) -> None:
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    with pytest.raises(CannotJudge):
        save_baseline(tmp_path / "empty", tmp_path / "reports", "b")
    with pytest.raises(CannotJudge):
        load_baseline(str(tmp_path / "empty"), tmp_path / "reports")


def test_a_baseline_of_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    saved = save_baseline(session(tmp_path), reports, "b")
    path = saved / "runs" / "1-normal" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    with pytest.raises(UnknownSchema, match="version 99"):
        load_baseline("b", reports)


def test_links_are_not_followed_out_of_the_session(tmp_path: Path) -> None:
    folder = session(tmp_path)
    (tmp_path / "secret.jsonl").write_text("secret")
    (folder / "runs" / "1-normal" / "extra.jsonl").symlink_to(tmp_path / "secret.jsonl")
    save_baseline(folder, tmp_path / "reports", "b")
    assert not list((tmp_path / "reports").rglob("extra.jsonl"))


def test_a_folder_that_cannot_be_written_is_said_and_leaves_the_old_baseline(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    save_baseline(session(tmp_path), reports, "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite):
        save_baseline(tmp_path / "session", tmp_path / "file", "b")
    assert len(load_baseline("b", reports)) == 3
