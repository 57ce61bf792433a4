"""The rows file: what makes it whole, how parts are joined, and what a full disk leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.errors import CannotWrite
from pytest_kvcache.load import contract
from pytest_kvcache.load.contract import is_complete, read_load, read_rows, workload_hash
from pytest_kvcache.load.ordering import put_in_order
from pytest_kvcache.load.rowsfile import RowsFile
from pytest_kvcache.records import LoadEnd, LoadNote, LoadStart, RequestRow
from pytest_kvcache.runfolder import encode_line


def row(number: int, end_s: float = 0.0, outcome: str = contract.OK) -> RequestRow:
    return RequestRow(id=number, lane="normal", intended_s=end_s - 1, sent_s=end_s - 1, end_s=end_s, outcome=outcome)


def write(path: Path, *lines: Any) -> Path:
    path.write_bytes(b"".join(encode_line(line) for line in lines))
    return path


START = LoadStart(0.0, "normal", seed=1, options={"users": 2})


def test_only_a_planned_end_with_all_rows_makes_a_file_complete(tmp_path: Path) -> None:
    rows = [row(0), row(1)]
    path = tmp_path / "requests.jsonl"
    assert not is_complete(path)
    for reason in (contract.BY_DURATION, contract.BY_REQUESTS, contract.BY_STOP):
        assert is_complete(write(path, START, *rows, LoadEnd(1.0, 2, reason)))
    for reason in (contract.BY_SIGNAL, contract.BY_FAILURE, contract.BY_SERVER, contract.BY_PARENT):
        assert not is_complete(write(path, START, *rows, LoadEnd(1.0, 2, reason)))
    assert not is_complete(write(path, START, *rows))
    assert not is_complete(write(path, START, *rows, LoadEnd(1.0, 3, contract.BY_DURATION)))
    assert not is_complete(write(path, START, rows[0], LoadEnd(1.0, 2, contract.BY_DURATION)))
    assert not is_complete(write(path, LoadEnd(1.0, 0, contract.BY_STOP)))  # it never began


def test_rows_before_a_cut_last_line_stay_readable(tmp_path: Path) -> None:
    path = write(tmp_path / "requests.jsonl", START, row(0), row(1))
    path.write_bytes(path.read_bytes()[:-20])
    assert [found.id for found in read_rows(path)] == [0]
    load = read_load(path)
    assert (load.rows, load.complete, load.broken) == (1, False, "")


def test_a_damaged_line_is_named_and_the_file_is_not_complete(tmp_path: Path) -> None:
    path = write(tmp_path / "requests.jsonl", START, row(0))
    path.write_bytes(path.read_bytes() + b"{broken}\n" + encode_line(LoadEnd(1.0, 1, contract.BY_DURATION)))
    load = read_load(path)
    assert "line 3" in load.broken
    assert not load.complete


def test_rows_of_several_workers_are_put_in_order_and_none_is_lost(tmp_path: Path) -> None:
    numbers = [5, 1, 4, 0, 3, 2]
    ends = [LoadEnd(9.0, 4, contract.BY_DURATION, worker="w0"), LoadEnd(9.0, 2, contract.BY_DURATION, worker="w1")]
    path = write(tmp_path / "requests.jsonl", START, *(row(number, 10.0 + number) for number in numbers), LoadNote(1.0, "x", "y"), *ends)
    before = sorted(path.read_bytes().splitlines())
    assert put_in_order(path)
    assert [found.id for found in read_rows(path)] == sorted(numbers)
    assert sorted(path.read_bytes().splitlines()) == before
    load = read_load(path)
    assert load.complete
    assert [end.worker for end in load.ends] == ["w0", "w1"]
    assert [note.text for note in load.notes] == ["y"]
    assert [file.name for file in tmp_path.iterdir()] == ["requests.jsonl"]


def test_rows_that_cannot_be_put_in_order_stay_as_they_came(tmp_path: Path) -> None:
    path = write(tmp_path / "requests.jsonl", START, row(1, 2.0), row(0, 1.0))
    (tmp_path / "requests.jsonl.part").mkdir()
    before = path.read_bytes()
    assert not put_in_order(path)
    assert path.read_bytes() == before
    assert not put_in_order(tmp_path / "missing")


def test_a_worker_that_died_makes_the_whole_incomplete(tmp_path: Path) -> None:
    ends = [LoadEnd(5.0, 1, contract.BY_DURATION, worker="w0"), LoadEnd(5.0, 1, contract.BY_WORKER, worker="w1")]
    path = write(tmp_path / "requests.jsonl", START, row(0, 2.0), row(1, 3.0), *ends)
    assert (read_load(path).reason, is_complete(path)) == (contract.BY_WORKER, False)


def test_the_workload_is_the_same_for_the_same_load_on_another_server() -> None:
    def start(**changes: Any) -> LoadStart:
        options = {"users": 2, "api": "chat", "nonce": "a", "endpoints": ["http://a"], "profile_options": {"b": 1, "a": 2}} | changes
        return LoadStart(0.0, "normal", seed=1, options=options)

    assert workload_hash(start()) == workload_hash(start(nonce="b", endpoints=["http://b"], profile_options={"a": 2, "b": 1}))
    others: list[dict[str, Any]] = [{"users": 3}, {"profile_options": {"a": 3, "b": 1}}, {"endpoints": ["x", "y"]}, {"api": "completions"}]
    assert len({workload_hash(start(**changes)) for changes in others} | {workload_hash(start())}) == 5


def test_rejections_are_neither_success_nor_early_stops_nor_cuts() -> None:
    assert not any(map(contract.is_rejection, (contract.OK, contract.STOPPED_EARLY, contract.CUT_OFF)))
    assert all(map(contract.is_rejection, contract.REJECTIONS))


def test_lines_reach_the_disk_whole_and_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "requests.jsonl"
    rows = RowsFile(path)
    rows.put(START)
    assert json.loads(path.read_text())["kind"] == "start"
    rows.add(row(0))
    assert path.read_text().count("\n") == 1
    rows.flush()
    assert path.read_text().count("\n") == 2
    for number in range(3000):
        rows.add(row(number))
    assert path.stat().st_size > 200_000
    rows.put(LoadEnd(1.0, rows.rows, contract.BY_DURATION))
    rows.close()
    rows.add(row(1))
    rows.close()
    assert is_complete(path)
    with pytest.raises(CannotWrite) as caught:
        RowsFile(path)
    assert "--kv-rows" in caught.value.hint


def test_a_full_disk_is_told_and_never_raised() -> None:
    rows = RowsFile(Path("/dev/full"))
    rows.put(START)
    assert "No space left" in rows.failure
    rows.add(row(0))
    rows.close()


def test_a_disk_that_fills_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "requests.jsonl"
    rows = RowsFile(path)
    real, left = os.write, [600]

    def short(fd: int, data: Any) -> int:
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        written = real(fd, bytes(data)[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", short)
    rows.put(START)
    for number in range(20):
        rows.add(row(number, 100.0))
    rows.flush()
    rows.flush()
    monkeypatch.undo()
    rows.close()
    assert rows.failure
    assert 0 < len(list(read_rows(path))) < 20
    assert not is_complete(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite) as caught:
        RowsFile(tmp_path / "file" / "requests.jsonl")
    assert "file" in caught.value.where
