"""Missing is a type, never a number."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

from pytest_kvcache.quantities import QUANTITIES, Missing, Reading

COMPARISONS = [
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
]


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("other", [0, 0.0, 1.5, None, True])
def test_a_missing_value_cannot_pass_for_a_number(compare: Callable[[Any, Any], Any], other: Any) -> None:
    for pair in ((Missing("not told"), other), (other, Missing("not told"))):
        with pytest.raises(TypeError, match="not told"):
            compare(*pair)


@pytest.mark.parametrize("turn", [float, int, bool, round, abs, sum])
def test_a_missing_value_cannot_be_turned_into_a_number(turn: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        turn([Missing("not told")]) if turn is sum else turn(Missing("not told"))


def test_missing_values_can_be_told_apart_and_kept_in_sets() -> None:
    assert Missing("a") == Missing("a")
    assert Missing("a") != Missing("b")
    assert Missing("a") != Missing("a", cannot_happen=True)
    assert len({Missing("a"), Missing("a")}) == 1


def test_a_text_reading_is_not_counted_with() -> None:
    assert Reading(3, "blocks", "x").number() == 3.0
    with pytest.raises(TypeError, match="fp8"):
        Reading("fp8", "", "cache_config_info").number()


def test_every_quantity_states_unit_and_direction() -> None:
    assert {q.name for q in QUANTITIES.values()} == set(QUANTITIES)
    for quantity in QUANTITIES.values():
        assert quantity.better in ("lower", "higher", "")
        assert quantity.help
        assert quantity.title
    assert QUANTITIES["usage"].unit == "ratio"
    assert QUANTITIES["free_blocks"].better == "higher"
