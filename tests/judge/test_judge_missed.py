"""What was seen is evidence however much was missed: a FAIL on counters, refusals and samples stands, and a PASS does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from made_run import T0, MadeRun, closed_loop, refused, sample, snapshot

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conditions import parse
from pytest_kvcache.judge import gates, windows
from pytest_kvcache.judge.change import not_worse
from pytest_kvcache.judge.compare import compare
from pytest_kvcache.judge.gates import FAIL, INVALID
from pytest_kvcache.judge.logged import logged_usage
from pytest_kvcache.quantities import Missing

THIN = {"a few samples": MadeRun(samples=[sample(closed_loop(), T0 + 0.4, preemptions=0.0)]), "rows cut off": MadeRun(no_end=True)}


@pytest.mark.parametrize("name", THIN)
def test_what_was_seen_fails_however_much_was_missed(tmp_path: Path, name: str) -> None:
    made = dataclasses.replace(THIN[name], rows=[*closed_loop(), refused(99, 1.0, "queue_full")], after=[snapshot(T0 + 5, preemptions=3)])
    seen = [analyse(made.write(tmp_path / "1-normal"))]
    assert seen[0].problems
    assert gates.no_rejections(seen).verdict == FAIL
    assert gates.no_preemptions(seen).verdict == FAIL
    assert gates.peak_usage(seen, 0.01).verdict == FAIL
    assert gates.free_space(seen, 126).verdict == FAIL


@pytest.mark.parametrize("name", THIN)
@pytest.mark.parametrize(
    ("condition", "verdict"),
    [
        ("usage.peak < 0.01", FAIL), ("free_blocks.min >= 126", FAIL), ("rejections == 0", FAIL), ("preemptions <= 2", FAIL),
        ("usage.peak < 0.99", INVALID), ("usage.peak > 0.99", INVALID), ("ttft.p95 < 1ms", INVALID),
    ],
)  # fmt: skip
def test_a_threshold_of_ones_own_fails_on_what_was_seen_as_well(tmp_path: Path, name: str, condition: str, verdict: str) -> None:
    made = dataclasses.replace(THIN[name], rows=[*closed_loop(), refused(99, 1.0, "queue_full")], after=[snapshot(T0 + 5, preemptions=3)])
    assert gates.threshold([analyse(made.write(tmp_path / "1-normal"))], parse(condition)).verdict == verdict


@pytest.mark.parametrize("name", THIN)
def test_what_was_not_seen_passes_nothing_where_much_was_missed(tmp_path: Path, name: str) -> None:
    seen = [analyse(THIN[name].write(tmp_path / "1-normal"))]
    for judged in (gates.no_rejections(seen), gates.no_preemptions(seen), gates.peak_usage(seen, 0.99), gates.free_space(seen, 1)):
        assert judged.verdict == INVALID
        assert "to mend it" in judged.text


def test_a_refusal_that_others_may_have_caused_is_no_evidence(tmp_path: Path) -> None:
    made = MadeRun(
        rows=[*closed_loop(), refused(99, 1.0, "queue_full")], before=[snapshot(T0 - 1, finished=0)], after=[snapshot(T0 + 5, finished=90)]
    )
    assert gates.no_rejections([analyse(made.write(tmp_path / "1-normal"))]).verdict == INVALID


def test_a_pool_that_was_seen_full_fails_a_change_though_samples_are_missing_after_it(tmp_path: Path) -> None:
    rows = closed_loop(users=2)
    full = [sample(rows, T0 + 0.1 + i / 10, usage=1.0, free_blocks=0.0) for i in range(6)]

    def side(name: str, **fields: Any) -> list[Analysis]:
        made = [MadeRun(rows=rows, record={"window": n, "workload": f"w{n}"}, **fields) for n in range(3)]
        return [analyse(run.write(tmp_path / "runs" / f"{name}{n}-normal")) for n, run in enumerate(made)]

    def verdicts(before: list[Analysis], after: list[Analysis]) -> dict[str, str]:
        return {gate.name: gate.verdict for gate in compare(before, after).gates}

    whole, thin = side("a"), side("b", samples=full)
    assert thin[0].problems
    found = verdicts(whole, thin)
    assert (found["usage_not_worse"], found["free_not_worse"], found["ttft_not_worse"]) == (FAIL, FAIL, INVALID)
    assert verdicts(thin, whole)["usage_not_worse"] == INVALID, "what was missed before may have been as full"
    assert verdicts(side("c", samples=full[:1]), thin)["usage_not_worse"] == INVALID


def test_a_peak_between_two_polls_is_no_difference_where_the_request_log_shows_it_on_both_sides(tmp_path: Path) -> None:
    rows = closed_loop(users=2)
    whole = [sample(rows, T0 + 0.1 + i / 10) for i in range(30)]
    blind = [sample(rows, T0 + 0.1 + i / 10, usage=0.01, free_blocks=126.0, used_blocks=1.0) for i in range(30)]

    def side(name: str, samples: list[Any]) -> list[Analysis]:
        made = [MadeRun(rows=rows, samples=samples, record={"window": n, "workload": f"w{n}"}) for n in range(3)]
        return [analyse(run.write(tmp_path / "runs" / f"{name}{n}-normal")) for n, run in enumerate(made)]

    before, after = side("before", blind), side("after", whole)
    for name, quantity in (("usage_not_worse", "usage.hottest"), ("free_not_worse", "free_blocks.tightest")):
        (one,) = (asked for asked in windows.asked(before, after, windows.Margins()) if asked.name == name)
        polled = [windows.numbers(part, quantity) for part in (before, after)]
        values = one.values(before, after)
        assert not isinstance(values, Missing)
        assert polled[0] != polled[1]
        logged = logged_usage(before[0])
        assert logged is not None
        assert values[0][0] == pytest.approx(logged if quantity == "usage.hottest" else (1 - logged) * before[0].values["usable_blocks"].number())  # type: ignore[union-attr]
        assert one.missed(before, after) >= 3
        text = next(gate for gate in not_worse(before, after, windows.Margins()) if gate.name == name).text
        assert "our own request log shows more than was polled, and counts" in text


def test_what_the_request_log_proves_on_one_side_alone_makes_no_difference(tmp_path: Path) -> None:
    rows = closed_loop(users=2)
    blind = [sample(rows, T0 + 0.1 + i / 10, usage=0.01, free_blocks=126.0, used_blocks=1.0) for i in range(30)]

    def side(name: str) -> list[Analysis]:
        made = [MadeRun(rows=rows, samples=blind, record={"window": n, "workload": f"w{n}"}) for n in range(3)]
        return [analyse(run.write(tmp_path / "runs" / f"{name}{n}-normal")) for n, run in enumerate(made)]

    before = side("before")
    after = [dataclasses.replace(one, facts=dataclasses.replace(one.facts, sharing_meant=True)) for one in side("after")]
    assert logged_usage(before[0]) is not None
    assert logged_usage(after[0]) is None
    one = windows.asked(before, after, windows.Margins())[0]
    assert one.values(before, after) == (windows.numbers(before, "usage.hottest"), windows.numbers(after, "usage.hottest"))
    assert one.missed(before, after) == 0
