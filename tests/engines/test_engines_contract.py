"""The contract of every dialect, run with the product's own reader on recorded text: ``tests/engine_cases_*.py``."""

from __future__ import annotations

from pathlib import Path

import engine_cases_others
import engine_cases_vllm
import pytest
from engine_case import Case, state

from pytest_kvcache import engines
from pytest_kvcache.engines import DIALECTS, Dialect, RawState, Values, detect, read, read_values, signs
from pytest_kvcache.engines._dialect import Series
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value

CASES = [*engine_cases_vllm.CASES, *engine_cases_others.CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.engine}: {case.name}")


def _same(name: str, before: Value, after: Value) -> bool:
    """Say whether a reading is the same number. Counters of one process are created within milliseconds of one another."""
    assert isinstance(before, Reading)
    assert isinstance(after, Reading)
    if name == "start_time":
        return abs(before.number() - after.number()) < 1
    return before.value == after.value


def _assert_no_invention(before: Values, after: Values, taken: str) -> None:
    """Assert that taking something away gave Missing, or the number that was there, for the whole and for each rank."""
    pairs = [("", before.whole, after.whole), *((part, before.ranks[part], after.ranks[part]) for part in after.ranks if part in before.ranks)]
    for part, old, new in pairs:
        for name in QUANTITIES:
            was, now = old[name], new[name]
            if isinstance(now, Reading):
                assert isinstance(was, Reading), f"{taken} taken away: {part} {name} appeared as {now.value}"
                assert _same(name, was, now), f"{taken} taken away: {part} {name} went from {was.value} to {now.value} ({now.source})"
            else:
                assert now.reason, f"{taken} taken away: {name} is missing without a reason"
                if isinstance(was, Reading):
                    assert not now.cannot_happen, f"{taken} taken away: {name} turned into what cannot happen"


@every_case
def test_the_server_is_known_for_what_it_is(case: Case) -> None:
    mine = DIALECTS[case.engine]
    assert detect(case.raw()) is mine
    # Without it, a special form or a wrapper shows the engine that it covers; nobody else takes it for his own.
    others = [dialect for dialect in DIALECTS.values() if dialect is not mine]
    sure, weak = signs(case.raw(), others)
    assert {dialect.name for dialect in (*sure, *weak)} <= set(mine.covers)


@every_case
def test_every_number_is_the_right_one(case: Case) -> None:
    snapshot = read(DIALECTS[case.engine], case.raw(), 1.0)
    for name, right in case.right.items():
        value = snapshot.value(name)
        assert isinstance(value, Reading), f"{name}: {value}"
        shown = value.value if isinstance(right, (str, bool)) else pytest.approx(value.value, rel=1e-9, abs=0.01 if name == "start_time" else 0)
        assert right == shown, name
        assert value.unit == QUANTITIES[name].unit or value.source.startswith("start-up log")
        assert value.source


@every_case
def test_what_cannot_happen_is_told_from_what_is_not_told(case: Case) -> None:
    values = read_values(DIALECTS[case.engine], case.raw()).whole
    assert {name for name, value in values.items() if isinstance(value, Missing) and value.cannot_happen} == case.never
    assert all(value.reason for value in values.values() if isinstance(value, Missing))


@every_case
def test_a_series_that_goes_never_becomes_a_number(case: Case) -> None:
    dialect = DIALECTS[case.engine]
    before = read_values(dialect, case.raw())
    lines = case.text().splitlines()
    there = {line.partition("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    names = {name for name in there if name in dialect.wanted}  # no intersection: a prefix may be of the user's choice
    assert names or not case.metrics
    for name in names:
        left = "\n".join(line for line in lines if line.partition("{")[0].split(" ")[0] != name)
        after = read_values(dialect, state(left, case.json(), case.log))
        _assert_no_invention(before, _without_unborn(dialect, after), name)


def _without_unborn(dialect: Dialect, values: Values) -> Values:
    """Leave out the counters of which the dialect itself says that they are not shown while they are zero."""
    for name, rule in dialect.reads.items():
        if isinstance(rule, Series) and rule.unborn:
            for part in (values.whole, *values.ranks.values()):
                value = part[name]
                if isinstance(value, Reading) and value.value == 0:
                    assert rule.unborn in value.source
                    part[name] = Missing(value.source)
    return values


@every_case
def test_a_row_that_goes_never_makes_a_partial_sum(case: Case) -> None:
    dialect = DIALECTS[case.engine]
    before = read_values(dialect, case.raw())
    lines = case.text().splitlines()
    for number, line in enumerate(lines):
        name = line.partition("{")[0]
        # A row per reason or endpoint is created with its first event in some versions: the sum over the rows that are there is then the sum. Of
        # several processes one lives, and nothing but its row tells which.
        if name in dialect.wanted and not any(word in line for word in ("reason=", "endpoint=", "sleep_state=", "pid=")):
            left = "\n".join([*lines[:number], *lines[number + 1 :]])
            after = _without_unborn(dialect, read_values(dialect, state(left, case.json(), case.log)))
            _assert_no_invention(before, after, f"line {number + 1} ({name})")


@every_case
def test_a_body_that_goes_never_becomes_a_number(case: Case) -> None:
    dialect = DIALECTS[case.engine]
    before = read_values(dialect, case.raw())
    for path in case.bodies:
        left = {**case.json(), path: Missing(f"{path} was taken away")}
        _assert_no_invention(before, read_values(dialect, state(case.text() if case.metrics else None, left, case.log)), path)
    _assert_no_invention(before, read_values(dialect, state(None, case.json(), case.log)), "/metrics")
    _assert_no_invention(before, read_values(dialect, state(case.text() if case.metrics else None, case.json(), {})), "the log")


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_nothing_said_is_nothing_read(dialect: Dialect) -> None:
    for raw in (RawState(), RawState(metrics=parse_samples("", dialect.wanted)), RawState(json={path.path: {} for path in dialect.json_paths})):
        values = read_values(dialect, raw).whole
        assert [name for name, value in values.items() if isinstance(value, Reading)] == []


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_every_dialect_speaks_of_every_quantity(dialect: Dialect) -> None:
    assert set(dialect.reads) == set(QUANTITIES)
    assert all(rule.describe() for rule in dialect.reads.values())
    assert dialect.counts in {"blocks", "tokens"}
    assert dialect.wanted
    assert dialect.gauge_scale > 0


def test_a_dialect_that_is_silent_about_a_quantity_cannot_be_made() -> None:
    vllm = DIALECTS["vllm"]
    with pytest.raises(ValueError, match=r"says nothing of.*usage"):
        Dialect("x", "X", "x", "blocks", True, {name: rule for name, rule in vllm.reads.items() if name != "usage"}, vllm.version)
    with pytest.raises(ValueError, match=r"unknown.*made_up"):
        Dialect("x", "X", "x", "blocks", True, {**vllm.reads, "made_up": vllm.reads["usage"]}, vllm.version)


def test_an_engine_is_one_file_that_nothing_else_lists() -> None:
    modules = {path.stem for path in Path(engines.__file__).parent.glob("*.py") if not path.name.startswith("_")}
    assert set(DIALECTS) == modules
    assert not [module for module in modules if f"engines.{module}" in Path(engines.__file__).read_text()]


def test_every_engine_has_a_recorded_case() -> None:
    assert {case.engine for case in CASES} == set(DIALECTS)


@every_case
def test_no_two_dialects_read_one_series(case: Case) -> None:
    mine = DIALECTS[case.engine]
    for other in DIALECTS.values():
        if other is not mine and other.name not in mine.covers and mine.name not in other.covers and not (set(other.covers) & set(mine.covers)):
            assert not {name for name in mine.wanted & other.wanted if ":" in name}
