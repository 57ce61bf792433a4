"""What was measured stays readable: cut files, newer schemas, full disks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.errors import CannotJudge, CannotWrite, UnknownSchema
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import SCHEMA_VERSION, RequestRow, RunRecord, ValueRecord
from pytest_kvcache.runfolder import encode_line, read_lines, read_run, read_runs, write_atomic, write_run


def _row(number: int) -> RequestRow:
    return RequestRow(id=number, lane="normal", intended_s=1.0, sent_s=1.0, end_s=2.0, outcome="ok")


def test_a_line_cut_by_a_kill_costs_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(encode_line(_row(1)) + encode_line(_row(2)) + encode_line(_row(3))[:-20])
    assert [row.id for row in read_lines(path, RequestRow)] == [1, 2]


def test_a_damaged_line_is_named_and_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(encode_line(_row(1)) + b'{"kind":"request","id":"two"}\n' + encode_line(_row(3)))
    with pytest.raises(CannotJudge, match="line 2"):
        list(read_lines(path, RequestRow))


@given(st.binary(max_size=200))
def test_no_bytes_of_a_file_give_a_traceback(data: bytes) -> None:
    path = Path("/dev/shm") / "kv-lines.jsonl" if Path("/dev/shm").exists() else Path("kv-lines.jsonl")
    path.write_bytes(data)
    try:
        list(read_lines(path, RequestRow))
    except CannotJudge as error:
        assert "line" in str(error)
    finally:
        path.unlink()


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "new", None])
def test_a_record_of_another_schema_is_refused_by_name(tmp_path: Path, version: object) -> None:
    run = write_run(tmp_path / "1-normal", RunRecord(schema_version=SCHEMA_VERSION, id="a", profile="normal"))
    path = run.folder / "run.json"
    path.write_text(
        path.read_text().replace(
            f'"schema_version": {SCHEMA_VERSION}',
            f'"schema_version": {str(version).lower() if version is None else repr(version)}'.replace("'", '"').replace("none", "null"),
        )
    )
    with pytest.raises(UnknownSchema, match="cannot judge"):
        read_run(run.folder)


def test_runs_come_back_in_the_order_they_were_measured(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write_run(tmp_path / "runs" / f"{number}-normal", RunRecord(schema_version=SCHEMA_VERSION, id=str(number), profile="normal"))
    assert [run.record.id for run in read_runs(tmp_path)] == ["1", "2", "10"]
    with pytest.raises(CannotJudge, match="no Run"):
        read_runs(tmp_path / "elsewhere")


def test_a_value_survives_its_file() -> None:
    for value in (Reading(0.5, "ratio", "gauge", 3.0), Reading("fp8", "", "label"), Missing("not told", cannot_happen=True)):
        assert ValueRecord.of(value).to_value() == value


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a" / "b.txt", "x")
    assert (tmp_path / "a" / "b.txt").read_text() == "x"
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite) as caught:
        write_atomic(tmp_path / "file" / "b.txt", "x")
    assert "--kv-reports" in caught.value.hint
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.txt"]
