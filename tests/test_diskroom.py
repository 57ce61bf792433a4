"""A full disk: said once, nothing more is measured, and what was measured is kept."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache import diskroom, measure
from pytest_kvcache.errors import CannotWrite
from pytest_kvcache.planned import Planned
from pytest_kvcache.runfolder import write_run
from pytest_kvcache.session import Session
from pytest_kvcache.settings import resolve

Usage = namedtuple("Usage", "total used free")

TWO_TESTS = """
import pytest
from pytest_kvcache import session
from pytest_kvcache.errors import CannotWrite

def full(*_, **__):
    raise CannotWrite("no space is left where the session is written", where="reports", hint="free space")

session.Session.load = full

@pytest.mark.capacity
def test_first(kv_load):
    kv_load("normal")

@pytest.mark.capacity
def test_second(kv_load):
    kv_load("longctx")
"""


def test_a_little_room_is_held_back_and_given_back_once(tmp_path: Path) -> None:
    diskroom.hold_back(tmp_path)
    (held,) = tmp_path.iterdir()
    assert held.stat().st_size == diskroom.HELD_BACK_BYTES
    assert held.stat().st_blocks * 512 >= diskroom.HELD_BACK_BYTES, "a hole would hold nothing"
    diskroom.hold_back(tmp_path)  # of several workers each may
    assert not diskroom.used_up(tmp_path)
    assert diskroom.give_back(tmp_path)
    assert not diskroom.give_back(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_is_used_up_before_its_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diskroom.hold_back(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, diskroom.LEAST_BYTES - 1))
    assert diskroom.used_up(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, diskroom.LEAST_BYTES + 1))
    assert not diskroom.used_up(tmp_path)
    diskroom.give_back(tmp_path)
    assert diskroom.used_up(tmp_path), "what was held back has become free and is no room for more"


def test_a_folder_without_room_for_a_session_is_said_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    session = Session(resolve({"endpoint": ["http://127.0.0.1:1"], "reports": str(tmp_path)}, {}))
    with pytest.raises(CannotWrite, match="no room for a session: No space left on device"):
        session.prepare()
    assert not list(tmp_path.rglob(".held-back"))


def test_a_run_is_kept_with_the_room_that_was_held_back_and_nothing_more_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the record of a finished load is written: it is written all the same, and the next load is refused."""
    written: list[Path] = []

    def first_full(folder: Path, record: object) -> object:
        if not written:
            written.append(folder)
            raise CannotWrite("cannot write: No space left on device", where=str(folder))
        return write_run(folder, record)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "write_run", first_full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, diskroom.HELD_BACK_BYTES // 2 if written else 1 << 40))
    with ScriptedServer(model="m", metrics="vllm") as server:
        settings = resolve({"endpoint": [server.url], "model": "m", "reports": str(tmp_path)}, {})
        with Session(settings) as session:
            with pytest.raises(CannotWrite, match="1 Run is kept"):
                session.load(Planned("normal", users=1, requests=2))
            (run,) = session.runs()
            assert json.loads((run.folder / "run.json").read_text())["profile"] == "normal"
            session.finish()
    assert (run.folder.parent.parent / "report.html").exists()


def test_pytest_ends_after_the_first_test_that_meets_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TWO_TESTS)
    result = pytester.runpytest_subprocess("--kv-endpoint=http://127.0.0.1:1", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*!! kvcache: no space is left where the session is written !!*"])
    result.stdout.fnmatch_lines(["not run, not judged: *test_second"])
