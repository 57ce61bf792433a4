"""The helpers: a bound that cannot be meant is no gate, and each takes a Run, an Analysis or several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_run import MadeRun

from pytest_kvcache import assertions
from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.errors import GateFailed, UsageError
from pytest_kvcache.records import GateRecord
from pytest_kvcache.runfolder import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return MadeRun().write(tmp_path / "runs" / "1-normal")


@pytest.mark.parametrize(
    "call",
    [
        lambda run: assertions.assert_peak_usage(run, max=90),
        lambda run: assertions.assert_peak_usage(run, max=float("nan")),
        lambda run: assertions.assert_free_blocks(run, min=-5),
        lambda run: assertions.assert_quality(run, min=98),
        lambda run: assertions.assert_balanced(run, max_spread=-0.1),
        lambda run: assertions.assert_fits(run, concurrency=-1, length=10),
    ],
)
def test_a_bound_that_no_value_could_miss_is_refused(run: Run, call: Callable[[Run], Any]) -> None:
    with pytest.raises(UsageError):
        call(run)


def test_every_form_of_evidence_is_taken_and_nothing_else(run: Run) -> None:
    for evidence in (run, analyse(run), [run, run], [analyse(run)]):
        assert assertions.assert_peak_usage(evidence, max=1.0).verdict == "PASS"
    for wrong in (None, [], ["runs/1-normal"], 3):
        with pytest.raises(TypeError):
            assertions.assert_peak_usage(wrong, max=1.0)  # type: ignore[arg-type]


def test_a_gate_that_fails_says_everything_in_one_message_and_is_recorded(run: Run) -> None:
    judged: list[GateRecord] = []
    with assertions.recording(assertions.Recorder(judged.append)), pytest.raises(GateFailed) as caught:
        assertions.assert_peak_usage(run, max=0.01)
    assert [gate.verdict for gate in judged] == ["FAIL"]
    text = str(caught.value)
    for words in ("peak_usage", "1.0 %", "pool 127 blocks", "free", "running", "runs/1-normal"):
        assert words in text


def test_inconclusive_passes_only_where_the_user_asked_for_it(tmp_path: Path) -> None:
    run = MadeRun().write(tmp_path / "runs" / "1-normal")  # sound, and without a quality item
    with pytest.raises(GateFailed, match="INCONCLUSIVE"):
        assertions.assert_quality(run)
    with assertions.recording(assertions.Recorder(lambda _: None, inconclusive_passes=True)):
        assert assertions.assert_quality(run).verdict == "INCONCLUSIVE"
