"""The one sentence that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_sessions import Server, verdict_of

from pytest_kvcache.records import GateRecord, ValueRecord, VerdictRecord
from pytest_kvcache.report.model import gate_text, gate_title, in_order, is_usage, show_interval, show_number, why


def verdict(word: str, *gates: str, **more: object) -> VerdictRecord:
    made = [GateRecord(f"g{i}", "running.peak", gate.split(":")[0], gate) for i, gate in enumerate(gates)]
    return verdict_of(word, Path("s"), made, Server(), **more)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (verdict("PASS", "PASS:a", "PASS:b"), "All 2 gates passed."),
        (verdict("PASS", "PASS:a"), "The one gate passed."),
        (verdict("PASS", "PASS:a", "INCONCLUSIVE:b"), "1 of 2 gates passed, and the session's policy lets the others pass: INCONCLUSIVE:b."),
        (verdict("FAIL", "PASS:a", "FAIL:too much."), "1 of 2 gates failed: FAIL:too much."),
        (verdict("FAIL", *["FAIL:x"] * 5), "5 of 5 gates failed: FAIL:x; FAIL:x; FAIL:x; and 2 more."),
        (verdict("INCONCLUSIVE", "INCONCLUSIVE:noisy", "PASS:a"), "1 of 2 gates could not tell: INCONCLUSIVE:noisy."),
        (verdict("INCONCLUSIVE", "PASS:a", deselected=["t"]), "1 gate was deselected, so the session was not judged in full."),
        (
            verdict("INCONCLUSIVE", "PASS:a", deselected=["t (not run)", "u (not run)"]),
            "The session was broken off before 2 of its tests were over, so the session was not judged in full.",
        ),
        (verdict("INCONCLUSIVE"), "No gate was judged."),
        (
            VerdictRecord(1, "INCONCLUSIVE", "s", gates=[GateRecord("g", "q", "PASS", "t", level="warn")]),
            "Every gate only warns, so nothing was judged that could fail.",
        ),
        (verdict("FAIL", "FAIL:x", "INVALID:late"), "1 of 2 gates failed: FAIL:x; 1 more rests on unsound evidence: INVALID:late."),
        (
            verdict("FAIL", "FAIL:x", *["INVALID:late; to mend it: y. Not judged: z"] * 2, "INVALID:gone"),
            "1 of 4 gates failed: FAIL:x; 3 more rest on unsound evidence: INVALID:late; and 1 more.",
        ),
        (verdict("INVALID", "INVALID:late", "FAIL:x"), "The evidence is unsound: INVALID:late."),
        (
            VerdictRecord(
                1,
                "INVALID",
                "s",
                gates=[GateRecord(f"g{i}", "q", "INVALID", f"the evidence is unsound: late; to mend it: x. Not judged: {i}") for i in range(3)],
            ),
            "The evidence is unsound: late. To mend it: x.",
        ),
        (verdict("INVALID", problems=["clock stepped"]), "The evidence is unsound: clock stepped."),
    ],
)
def test_the_reason_names_what_decided(record: VerdictRecord, sentence: str) -> None:
    assert why(record) == sentence


def test_what_decides_comes_first_and_the_order_stays_otherwise() -> None:
    gates = verdict("FAIL", "PASS:1", "FAIL:2", "INVALID:3", "PASS:4", "FAIL:5", "INCONCLUSIVE:6").gates
    assert [gate.text for gate in in_order(gates)] == ["FAIL:2", "FAIL:5", "INVALID:3", "INCONCLUSIVE:6", "PASS:1", "PASS:4"]


def test_figures_read_well() -> None:
    assert show_number(19_914.2345, "tokens") == "19,914 tokens"
    assert show_number(3.5, "requests") == "3.50 requests"
    assert show_number(0.5, "ratio") == "50.0 %"
    assert show_number(float("nan"), "tokens") == "nan"
    assert show_interval(GateRecord("g", "q", "PASS", "", "ratio", low=0.1)) == "≥ 10.0 %"
    assert show_interval(GateRecord("g", "q", "PASS", "", "s", high=0.25)) == "≤ 250 ms"
    assert show_interval(GateRecord("g", "q", "PASS", "")) == ""
    assert show_interval(GateRecord("g", "q", "PASS", "", "tokens", low=-12.5, high=33.2)) == "-13 to 34 tokens", "no end is told better than it is"


def test_a_lane_is_named_once_and_idle_usage_is_a_usage() -> None:
    assert gate_title(GateRecord("peak_usage", "usage.peak", "PASS", "", lane="normal")) == "peak usage [normal]"
    assert gate_title(GateRecord("normal_usage", "usage.peak", "PASS", "", lane="normal")) == "normal usage"
    assert is_usage(GateRecord("g", "idle.usage", "PASS", "", "ratio"))
    assert not is_usage(GateRecord("g", "quality.pass_rate", "PASS", "", "ratio"))


def test_a_comparison_that_cannot_tell_says_what_is_missing() -> None:
    value = ValueRecord(0.5, "s", "x")
    text = "cannot tell: 500 ms before, 500 ms after: 1 window before and 1 after; about 2 windows a side would decide it"
    gate = GateRecord("ttft_not_worse", "ttft.p50", "INCONCLUSIVE", text, "s", "normal", before=value, after=value)
    assert gate_text(gate) == f"ttft not worse [normal]: {text.removeprefix('cannot tell: ')}"
    told = GateRecord("ttft_not_worse", "ttft.p50", "FAIL", text, "s", "normal", before=value, after=value)
    assert gate_text(told) == "ttft not worse [normal]: 500 ms before, 500 ms after"
