"""Properties of a gate are plain text that any JUnit reader takes."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from made_sessions import compare_gates, ratio, single_gates

from pytest_kvcache.records import GateRecord, ValueRecord
from pytest_kvcache.report.junit import properties


def test_a_gate_is_told_with_value_bound_and_verdict() -> None:
    found = dict(properties(single_gates()[1]))
    assert found["kv.peak_usage[longctx].verdict"] == "FAIL"
    assert found["kv.peak_usage[longctx].value"] == "99.9 %"
    assert found["kv.peak_usage[longctx].bound"] == "≤ 95.0 %"
    assert found["kv.peak_usage[longctx].beside"].startswith("pool 446,608 tokens")


def test_the_embedded_engine_is_named() -> None:
    assert dict(properties(single_gates()[0], embedded=True))["kv.peak_usage[normal].engine"] == "EMBEDDED"


def test_several_gates_of_one_test_stay_apart() -> None:
    names = [name for gate in compare_gates() for name, _ in properties(gate)]
    assert len(names) == len(set(names))


def test_a_gate_that_cannot_apply_does_not_say_pass() -> None:
    assert dict(properties(single_gates()[-1]))["kv.no_swapping.verdict"] == "not applicable"


@pytest.mark.parametrize("evil", ["\x00\x1b[31m]]>\ufffe\ud800 & <b>", "]]>" * 10_000, "\x08\x0b\x0c"])
def test_values_are_valid_xml_and_bounded(evil: str) -> None:
    gate = GateRecord(
        evil, evil, "FAIL", evil, "ratio", evil, value=ValueRecord(evil), before=ratio(float("nan")), bound_text=evil, method=evil, evidence=evil
    )
    root = ElementTree.Element("properties")
    for name, value in properties(gate):
        assert isinstance(value, str)
        assert len(value) <= 500
        ElementTree.SubElement(root, "property", name=name, value=value)
    again = ElementTree.fromstring(ElementTree.tostring(root))
    assert len(again) == len(root)
