"""What a person reads at the end of a run: short, whole, at most as wide as the terminal, and with no escape sequence but ours."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest
from made_sessions import ratio

from pytest_kvcache.judge.wording import SAME
from pytest_kvcache.records import GateRecord
from pytest_kvcache.report import markdown
from pytest_kvcache.report.model import SessionView
from pytest_kvcache.report.terminal import summary, three_numbers


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_the_terminal(single: SessionView, compared: SessionView, width: int) -> None:
    for view in (single, compared):
        text = summary(view, color=False, width=width)
        assert all(len(line) <= width for line in text.splitlines() if not line.startswith("report: "))


def test_what_decides_stands_first_and_the_report_last(single: SessionView) -> None:
    lines = summary(single, color=False).splitlines()
    words = [line.split()[0] for line in lines if line.split() and line.split()[0] in {"PASS", "FAIL", "INCONCLUSIVE", "INVALID"}]
    assert words == ["FAIL", "FAIL", "INCONCLUSIVE", *["PASS"] * 5, "FAIL"]
    assert "2 of 8 gates failed" in "\n".join(lines)
    assert lines[-1] == f"report: {single.folder / 'report.html'}"
    assert any(line.startswith("not applicable: no swapping") for line in lines)
    assert any(line.startswith("deselected, not judged: suite/test_capacity.py") for line in lines)


def test_a_usage_ratio_is_followed_by_pool_free_space_and_running(single: SessionView) -> None:
    bare = [msgspec.structs.replace(gate, beside="") for gate in single.verdict.gates]
    for view in (single, replace(single, verdict=msgspec.structs.replace(single.verdict, gates=bare))):
        lines = summary(view, color=False).splitlines()
        for i, line in enumerate(lines):
            if "peak usage [" in line:
                beside = " ".join(" ".join(lines[i + 1 : i + 3]).split())
                assert re.search(
                    r"pool [\d,]+ (?:tokens|blocks of 16 tokens); [\d,]+ blocks free.*; \d+ requests running.*, mean length [\d,]+ tokens", beside
                )


def test_before_after_change_and_what_was_changed_are_shown(compared: SessionView) -> None:
    text = summary(compared, color=False)
    assert re.search(r"quality not worse +100\.0 % +80\.0 % +≤ 24\.0 % +≤ 2\.0 %", text)
    assert re.search(r"usage not worse \[longctx\] +98\.6 % +49\.9 % +≤ -46\.0 % +≤ 2\.0 %", text)
    assert "changed: kv_dtype bfloat16 -> fp8; pool_blocks" in text


def test_the_embedded_engine_is_named_in_the_verdict_line(embedded: SessionView, single: SessionView) -> None:
    assert "PASS  EMBEDDED engine, not a server of yours" in summary(embedded, color=False)
    assert "EMBEDDED" not in summary(single, color=False)


def test_colour_is_only_ours_and_only_where_asked(single: SessionView) -> None:
    gate = GateRecord(
        "n\x1b[2Jame", "usage.peak", "FAIL", "t\x1b]0;x\x07ext\x9b", "ratio", value=ratio(0.5), bound_text="\x1b[31m1", beside="\x1b[0mpool"
    )
    view = replace(single, verdict=msgspec.structs.replace(single.verdict, gates=[gate], deselected=["\x1b[8mhidden\r\n"], verdict="FAIL"))
    assert "\x1b" not in summary(view, color=False)
    assert "\r" not in summary(view, color=True)
    assert set(re.findall(r"\x1b\[[0-9;]*[A-Za-z]", summary(view, color=True))) <= {"\x1b[1m", "\x1b[2m", "\x1b[0m", "\x1b[31m"}
    assert len(re.findall("\x1b", summary(view, color=True))) == len(re.findall(r"\x1b\[\d+m", summary(view, color=True)))


def test_hundreds_of_gates_that_passed_are_counted_and_not_printed(single: SessionView) -> None:
    gates = [GateRecord(f"gate_{i}", "running.peak", "PASS", "fine", bound_text="= 0") for i in range(500)]
    gates.append(GateRecord("last", "running.peak", "FAIL", "it was more", bound_text="= 0"))
    text = summary(replace(single, verdict=msgspec.structs.replace(single.verdict, gates=gates)), color=False)
    assert "and 460 more gates that passed" in text
    assert text.index("last") < text.index("gate_0".replace("_", " "))


def test_notes_of_the_verdict_stand_in_the_terminal_and_the_summary_once(single: SessionView) -> None:
    long = "the spread between restarts is not covered: all windows of a side were measured on one start of the server"
    notes = [long, f"{SAME} (r1)", "\x1b[31mred", *(f"note {number}" for number in range(20))]
    view = replace(single, verdict=msgspec.structs.replace(single.verdict, notes=notes))
    text, page = summary(view, color=False, width=60), markdown.summary(view)
    assert f"note: {long}" in re.sub(r"\s+", " ", text)
    assert f"- Note: {long}" in page
    assert re.sub(r"\s+", " ", text).count(SAME) == page.count(SAME) == 1, "it stands beside the verdict's word already"
    assert "\x1b" not in text
    assert "and 10 more notes in verdict.json" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("report: ")) <= 60


def test_nothing_judged_is_said(single: SessionView) -> None:
    verdict = msgspec.structs.replace(single.verdict, gates=[], deselected=[], verdict="INCONCLUSIVE")
    assert "No gate was judged." in summary(replace(single, verdict=verdict), color=False)


def test_the_three_numbers_come_in_one_line(single: SessionView) -> None:
    line = three_numbers(single.after[2])
    assert re.fullmatch(
        r"usage [\d.]+ % at the peak of pool 27,912 blocks of 16 tokens; [\d,]+ blocks free at the tightest;"
        r" 6 requests running at the peak, mean length 32,\d+ tokens; polled, so the true peak is at least this",
        line,
    )
