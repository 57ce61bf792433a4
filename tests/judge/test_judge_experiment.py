"""The order of an experiment's cells and its record: drift must weigh alike on both sides, and a broken experiment must not mix with another."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.errors import CannotJudge, UnknownSchema, UsageError
from pytest_kvcache.experimentrecords import CellRecord
from pytest_kvcache.judge import experiment
from pytest_kvcache.judge.experiment import Cell

DESIGN = {"before": "a", "after": "b", "seed": 1, "plan": [["normal", 0, 2.0, {}]]}


def test_cells_come_in_abba_order() -> None:
    assert [cell.side[0] for cell in experiment.cells(4)] == list("baabbaab")
    assert [cell.repeat for cell in experiment.cells(3)] == [0, 0, 1, 1, 2, 2]


@given(st.integers(1, 40), st.floats(-1, 1))
def test_an_even_drift_weighs_the_same_on_both_sides_of_two_repeats(repeats: int, slope: float) -> None:
    order = experiment.cells(2 * repeats)
    total = {side: sum(slope * place for place, cell in enumerate(order) if cell.side == side) for side in experiment.SIDES}
    assert total["before"] == pytest.approx(total["after"])


def test_an_experiment_goes_on_from_its_finished_cells_and_may_get_more_repeats(tmp_path: Path) -> None:
    record = experiment.begin("abc", DESIGN)
    done = [CellRecord(0, "before"), CellRecord(0, "after"), CellRecord(1, "after")]
    experiment.write(tmp_path, msgspec.structs.replace(record, finished=done))
    again = experiment.take_up(tmp_path, DESIGN)
    assert again.id == "abc"
    assert experiment.left(again, 2) == [Cell(1, "before")]
    assert experiment.left(again, 3) == [Cell(1, "before"), Cell(2, "before"), Cell(2, "after")]
    assert experiment.left(again, 1) == []


def test_another_experiment_is_not_gone_on_with(tmp_path: Path) -> None:
    experiment.write(tmp_path, experiment.begin("abc", DESIGN))
    with pytest.raises(UsageError, match="seed was 1 and is 2"):
        experiment.take_up(tmp_path, {**DESIGN, "seed": 2})
    with pytest.raises(UsageError, match="plan was"):
        experiment.take_up(tmp_path, {**DESIGN, "plan": [["normal", 0, 3.0, {}]]})
    with pytest.raises(UsageError, match="no experiment to go on with"):
        experiment.take_up(tmp_path / "elsewhere", DESIGN)


def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / experiment.FILE).write_text("{")
    with pytest.raises(CannotJudge):
        experiment.read(tmp_path)
    (tmp_path / experiment.FILE).write_text('{"schema_version": 99}')
    with pytest.raises(UnknownSchema, match="99"):
        experiment.read(tmp_path)
    assert experiment.read(tmp_path / "nowhere") is None


def test_a_second_look_is_told() -> None:
    record = experiment.begin("abc", DESIGN)
    assert list(experiment.looks(msgspec.structs.replace(record, judged_repeats=[5, 5]))) == []
    (told,) = experiment.looks(msgspec.structs.replace(record, judged_repeats=[5, 8]))
    assert "judged 2 times, with 5, 8 repeats" in told
