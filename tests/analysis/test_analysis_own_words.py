"""What to do is said in the words of the engine that was measured: an action that names another engine's option cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest
from finding_cases import CASES, Case
from made_run import MadeRun

from pytest_kvcache.analysis.findings import find, shipped_rules
from pytest_kvcache.analysis.own_words import in_own_words
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.report.troubleshooting import page


@pytest.mark.parametrize(
    ("engine", "option"),
    [
        ("vllm", "Raise max-num-seqs towards"),
        ("llamacpp", "Raise the number of slots (--parallel) towards"),
        ("sglang", "Raise --max-running-requests towards"),
        ("trtllm_serve", "Raise --max_batch_size towards"),
        ("tgi", "Raise the number of seats towards"),
        ("one of somebody's own", "Raise the number of seats towards"),
    ],
)
def test_the_action_names_the_option_of_the_engine_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, option: str
) -> None:
    monkeypatch.setattr(MadeRun, "write", _written_by(engine, MadeRun.write))
    case: Case = CASES["seat-bound"][0]
    (finding,) = [one for one in find(case(tmp_path / "r")).found if one.id == "seat-bound"]
    assert option in finding.do[0]


def _written_by(engine: str, write):  # type: ignore[no-untyped-def]
    def written(self, folder):  # type: ignore[no-untyped-def]
        self.record = {**self.record, "engine": engine}
        return write(self, folder)

    return written


@pytest.mark.parametrize("engine", [*DIALECTS, "", None])
def test_no_rule_leaves_a_place_open(engine: str | None) -> None:
    for rule in shipped_rules():
        for text in (*rule.do, rule.avoid, rule.cause):
            assert "{" not in in_own_words(text, engine)
        assert "max-num-seqs" not in in_own_words(" ".join(rule.do), "llamacpp")


def test_the_table_for_all_engines_names_several() -> None:
    assert "--parallel" in page()
    assert "{" not in page().partition("## The rules")[0]
