"""Sizes and durations are read as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache import units
from pytest_kvcache.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GiB", 80 * 2**30), ("80 GB", 80 * 10**9), ("1024", 1024), ("1.5GiB", 3 * 2**29), ("16MiB", 2**24), ("2KiB", 2048), ("1,024", 1024)],
)
def test_gib_is_not_gb(text: str, value: int) -> None:
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize(("text", "value"), [("90", 90.0), ("1.5s", 1.5), ("200ms", 0.2), ("2m", 120.0), ("1h", 3600.0)])
def test_durations(text: str, value: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(value)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_with_a_hint(text: str) -> None:
    for parse in (units.parse_bytes, units.parse_seconds):
        try:
            assert parse(text) >= 0
        except UsageError as error:
            assert error.hint


@pytest.mark.parametrize("text", ["1e999GiB", "1e300", "1e12GiB", "9" * 400, "80XB", "GiB", "-1GiB", "nan", "1 GiB GiB"])
def test_a_size_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        units.parse_bytes(text)


def test_values_show_their_unit() -> None:
    assert units.show(0.905, "ratio") == "90.5 %"
    assert units.show(3 * 2**29, "bytes") == "1.50 GiB"
    assert units.show(0.0421, "s") == "42.1 ms"
    assert units.show(1234, "blocks") == "1,234 blocks"
    assert units.show("fp8", "") == "fp8"
    assert units.show(float("nan"), "s") == "nan"


@pytest.mark.parametrize("unit", ["ratio", "bytes", "s", "blocks", "", "tokens/s"])
@pytest.mark.parametrize("value", [1e300, -1e300, 1e22, 1.7e308, 1e15])
def test_a_number_beyond_all_measure_is_short(value: float, unit: str) -> None:
    shown = units.show(value, unit)
    assert len(shown) < 24, shown
    assert "inf" not in shown


def test_a_factor_has_no_name_beside_it() -> None:
    assert (units.show(1.154, "factor"), units.show(2.0, "factor")) == ("1.15", "2")
