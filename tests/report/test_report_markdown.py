"""summary.md is whole, holds its tables together, and lets nothing from outside become markup."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
from made_run import MadeRun, closed_loop
from made_sessions import ratio

from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.records import GateRecord, VerdictRecord
from pytest_kvcache.report.markdown import summary
from pytest_kvcache.report.model import SessionView


def tables(text: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def columns(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line)) - 1


def test_a_change_request_reads_the_verdict_the_gates_and_what_broke(compared: SessionView) -> None:
    text = summary(compared)
    assert text.startswith("## ❌ FAIL: fp8-kv\n\n1 of 6 gates failed: quality not worse: 100.0 % before, 80.0 % after.")
    assert "| `kv_dtype` " in text
    assert "- worse at 2,048 tokens: 3 of 12, was 12 of 12" in text
    assert "- FAIL quality not worse: 100.0 % of 72 paired items passed before" in text
    assert "-51.0 to -46.0 %" in text


def test_every_table_holds_together(single: SessionView, compared: SessionView, embedded: SessionView) -> None:
    for view in (single, compared, embedded):
        for table in tables(summary(view)):
            assert len({columns(line) for line in table}) == 1, table


def test_a_usage_ratio_has_its_pool_beside_it(single: SessionView) -> None:
    rows = [line for line in summary(single).splitlines() if line.startswith("|") and "peak usage" in line]
    assert len(rows) == 2
    assert all(re.search(r"pool [\d,]+ tokens; .* running, mean length", row) for row in rows)


def test_embedded_deselected_and_not_applicable_are_said(single: SessionView, embedded: SessionView) -> None:
    assert "**EMBEDDED** engine, not a server of yours" in summary(embedded).splitlines()[0]
    assert "- deselected, not judged: `suite/test_capacity.py::test_nothing`" in summary(single)
    assert "- not applicable: no swapping (vLLM V1 does not swap)" in summary(single)


def test_outside_text_is_never_markup(single: SessionView) -> None:
    evil = "a|b `c` <img src=x onerror=alert(1)> [click](https://evil.example) @maintainer #1 **bold** https://evil.example\n# heading\n| x |"
    gate = GateRecord(evil, "usage.peak", "FAIL", evil, "ratio", evil, value=ratio(0.5), bound_text=evil, beside=evil)
    verdict = msgspec.structs.replace(
        single.verdict,
        gates=[gate],
        name=evil,
        model=evil,
        engine=evil,
        comparison=evil,
        deselected=[evil],
        repeat=[evil],
        problems=[evil],
        notes=[evil],
    )
    text = summary(replace(single, verdict=verdict))
    outside_code = re.sub(r"(?<!\\)`[^`\n]*`", "", text)
    assert "<img" not in outside_code
    assert not re.search(r"@\w|#1|https?://", outside_code)
    assert not re.search(r"(?<!\\)\[click|(?<!\\)\*\*bold", outside_code)
    for table in tables(text):
        assert len({columns(line) for line in table}) == 1, table
    assert next(line for line in text.splitlines() if re.match(r"#+ ", line)).startswith("## ❌ FAIL")
    assert "\n# heading" not in text


def test_the_summary_says_whether_the_percentage_is_real(tmp_path: Path) -> None:
    rows = closed_loop(users=6, prompt=20, output=4)
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "runs" / "1-normal"))
    view = SessionView(tmp_path, VerdictRecord(1, "PASS", "s"), (), (analysis,))
    text = summary(view)
    assert "### Is the percentage real?" in text
    assert text.count("\n- ") >= 4, "findings, or that there is none, and the three reconciliations"
    assert "pool 127 blocks" in text
