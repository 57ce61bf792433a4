"""What is written is whole, the verdict first of all, and can be made again from the folder alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from pytest_kvcache.errors import CannotJudge, CannotWrite, UnknownSchema
from pytest_kvcache.records import VerdictRecord
from pytest_kvcache.report import html
from pytest_kvcache.report.model import SessionView
from pytest_kvcache.report.write import build_view, write_session, write_view


@pytest.fixture
def stored(compared: SessionView, tmp_path: Path) -> Path:
    """A session folder on another machine: copied, with nothing but its files."""
    folder = tmp_path / "moved"
    shutil.copytree(compared.folder, folder)
    write_session(folder, compared.verdict, compared.before, compared.after)
    return folder


def test_three_files_are_written_and_the_verdict_is_what_was_judged(stored: Path, compared: SessionView) -> None:
    written = msgspec.json.decode((stored / "verdict.json").read_bytes(), type=VerdictRecord)
    assert msgspec.structs.replace(written, findings=[]) == compared.verdict
    assert written.findings, "what the rules say of the Runs stands in it as well"
    assert (stored / "summary.md").read_text(encoding="utf-8").startswith("## ❌ FAIL")
    assert (stored / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert not list(stored.glob(".*.part"))


def test_a_stored_session_gives_the_same_report_again(stored: Path) -> None:
    first = (stored / "report.html").read_text(encoding="utf-8")
    for name in ("report.html", "summary.md"):
        (stored / name).unlink()
    assert write_view(build_view(stored)) == stored / "report.html"
    assert (stored / "report.html").read_text(encoding="utf-8") == first


def test_sides_come_from_the_runs(stored: Path) -> None:
    view = build_view(stored)
    assert [a.run.record.side for a in view.before] == ["before"] * 3
    assert [a.run.record.side for a in view.after] == ["after"] * 3
    assert view.compared


def test_one_broken_run_is_named_and_the_others_are_reported(stored: Path) -> None:
    lines = (stored / "runs/1-before-longctx/requests.jsonl").read_bytes().splitlines(keepends=True)
    (stored / "runs/1-before-longctx/requests.jsonl").write_bytes(b"".join([*lines[:3], b"{broken\n", *lines[3:]]))
    view = build_view(stored)
    assert len(view.before) == 2
    assert view.unread == ["1-before-longctx: line 4 cannot be read: JSON is malformed: object keys must be strings (byte 1)"]
    assert "1-before-longctx: line 4 cannot be read" in write_view(view).read_text(encoding="utf-8")


def test_a_session_whose_runs_are_gone_still_shows_its_verdict(stored: Path) -> None:
    shutil.rmtree(stored / "runs")
    text = write_view(build_view(stored)).read_text(encoding="utf-8")
    assert "no Run is here" in text
    assert "1 of 6 gates failed" in text


def test_a_report_that_cannot_be_made_leaves_the_verdict_on_disk(compared: SessionView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: SessionView) -> str:
        raise RuntimeError("no template")

    monkeypatch.setattr(html, "report", broken)
    with pytest.raises(RuntimeError, match="no template"):
        write_session(tmp_path, compared.verdict, compared.before, compared.after)
    assert (tmp_path / "verdict.json").exists()
    assert (tmp_path / "summary.md").exists()


def test_a_folder_that_cannot_be_written_is_said_plainly(compared: SessionView, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite) as caught:
        write_session(tmp_path / "file" / "session", compared.verdict)
    assert "--kv-reports" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (None, CannotJudge, "no verdict is here"),
        (b"{", CannotJudge, "cannot be read"),
        (b"[]", UnknownSchema, "schema version None"),
        (b'{"schema_version": 2}', UnknownSchema, "schema version 2"),
        (b'{"schema_version": 1}', CannotJudge, "cannot be read"),
        (b"\xff\xfe", CannotJudge, "cannot be read"),
    ],
)
def test_a_folder_without_a_readable_verdict_is_refused_by_name(tmp_path: Path, content: bytes | None, kind: type[Exception], words: str) -> None:
    if content is not None:
        (tmp_path / "verdict.json").write_bytes(content)
    with pytest.raises(kind, match=words) as caught:
        build_view(tmp_path)
    assert "verdict.json" in str(caught.value)
