"""The report's part on memory, waste, balance and sweeps: what it draws is what was reconciled, and what it does not know it says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from html_page import Page
from made_run import T0, MadeRun, closed_loop, request, sample, snapshot

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import GpuRow, MemoryRow, StartMemory, ValueRecord, VerdictRecord
from pytest_kvcache.report import html, memory
from pytest_kvcache.report.model import SessionView

GIB = 1 << 30
HOSTILE = '"><script>alert(1)</script>\u202e'


def worker(**parts: float) -> StartMemory:
    return StartMemory(
        "Worker", 7, 0, {name: ValueRecord.of(Reading(size * GIB, "bytes", f"start-up log: {HOSTILE}")) for name, size in parts.items()}
    )


def view(folder: Path, *analyses: Analysis) -> SessionView:
    return SessionView(folder, VerdictRecord(1, "PASS", "made"), (), analyses)


@pytest.fixture(scope="module")
def article(tmp_path_factory: pytest.TempPathFactory) -> SessionView:
    """An A100 with 18 GiB of pool and 22 GiB free, two replicas of which one waits while the other idles, uneven lengths."""
    folder = tmp_path_factory.mktemp("article")
    rows = [request(i, 0.05 * i, prompt=2048 if i % 16 == 0 else 256, output=1) for i in range(64)]
    card = GpuRow(0, "GPU-0", "A100 " + HOSTILE, 80 * GIB, 58 * GIB, 22 * GIB, processes={"7": 48 * GIB, "9": 10 * GIB})
    samples = []
    for i in range(40):
        for server in range(2):
            values = {"usage": (0.87, 0.0)[server], "running": (2.0, 0.0)[server], "waiting": (3.0, 0.0)[server]}
            seen = {"gpus": [card], "memory": MemoryRow(GIB, GIB, processes={"7": 1})} if i == 20 and not server else {}
            samples.append(msgspec.structs.replace(sample(rows, T0 - 0.2 + i / 10), endpoint=server, values=values, **seen))
    before = [msgspec.structs.replace(snapshot(T0 - 0.5, gpu_memory_utilization=0.9), endpoint=f"http://127.0.0.1:{n + 1}") for n in range(2)]
    start = [worker(pool=18, weights=14, activation=9, graphs=3)]
    run = MadeRun(rows=rows, samples=samples, before=before, after=before, record={"start_memory": start}).write(folder / "runs" / "1-normal")
    return view(folder, analyse(run))


def test_the_bar_is_the_card_and_the_sentence_says_why_the_pool_is_squeezed(article: SessionView) -> None:
    (ledger,) = memory.ledgers(article)
    assert [bar.title for bar in ledger.bars] == [
        "KV pool 18.00 GiB (22.5 %)", "weights 14.00 GiB (17.5 %)", "graphs, workspace, context 16.00 GiB (20.0 %)",
        "other processes 10.00 GiB (12.5 %)", "free 22.00 GiB (27.5 %)",
    ]  # fmt: skip
    assert sum(bar.width for bar in ledger.bars) == pytest.approx(memory.WIDTH)
    assert ledger.fence == 900
    assert "squeezed by 40.00 GiB because of" in ledger.text
    assert "22.00 GiB free inside its share" in ledger.notes
    assert ("", "of which: graphs", "3.00 GiB", "", "stated") in [row[:5] for row in ledger.rows]


def test_the_page_nests_runs_nothing_and_shows_every_part(article: SessionView) -> None:
    text = html.report(article)
    page = Page(text)
    assert not page.faults
    assert "<script" not in text
    assert "\u202e" not in text
    for section in ("memory", "waste", "balance"):
        assert ("section", {"id": section}) in page.elements
    bars = [attributes for tag, attributes in page.elements if tag == "rect" and attributes.get("height") == "32"]
    assert len(bars) == 5
    assert "requests waited on server 1 while server 2 idled" in text


def test_the_waste_table_shows_what_padding_would_cost(article: SessionView) -> None:
    table = memory.waste_table(article)
    cells = {row[0]: row[1] for row in table.rows}
    assert cells["the longest length"] == "18 % (2,049)"
    assert cells["the server's max length"].startswith("—")
    assert cells["its bucket's limit, the best 2 buckets"] == "100 % (257, 2,049)"
    assert cells["pages of 16"] == "96 %"
    assert any("64 requests, 369 tokens on average, the longest 2,049" in note for note in table.notes)


def test_the_balance_table_names_the_pair(article: SessionView) -> None:
    table = memory.balance_table(article)
    assert table.rows[0] == ["normal", "KV usage, 2 replicas", "87.0 % (server 1)", "0.0 % (server 2)", "2.00"]


def test_what_is_not_known_is_a_row_with_its_reason(tmp_path: Path) -> None:
    rows = closed_loop()
    samples = [sample(rows, T0 - 0.3 + i / 10) for i in range(48)]
    samples[10] = msgspec.structs.replace(samples[10], memory=MemoryRow(8 * GIB, 4 * GIB, processes={"7": GIB}))
    start_up = {"engine": "llamacpp"}
    before = [snapshot(T0 - 0.5, missing=["pool_bytes"])]
    (ledger,) = memory.ledgers(view(tmp_path, analyse(MadeRun(rows=rows, samples=samples, before=before, record=start_up).write(tmp_path / "r"))))
    unknown = [row for row in ledger.rows if row[4] == "unknown"]
    assert [row[1] for row in unknown] == ["KV pool", "weights"]
    assert all(row[2] == "—" and row[5] for row in unknown)
    assert ledger.text.startswith("Whether the pool is squeezed is not known")


def test_a_sweep_is_a_table_with_its_recommendation(tmp_path: Path) -> None:
    analyses = []
    for variant, usage in (("block-size=128", 0.4), ("block-size=32", 0.2)):
        rows = closed_loop()
        samples = [sample(rows, T0 - 0.3 + i / 10, usage=usage) for i in range(48)]
        analyses.append(analyse(MadeRun(rows=rows, samples=samples, record={"variant": variant}).write(tmp_path / "runs" / variant)))
    shown = view(tmp_path, *analyses)
    table = memory.sweep_table(shown)
    assert [row[0] for row in table.rows] == ["block-size=128", "block-size=32, recommended"]
    assert all(
        note.startswith(f"{name}: pool ") and "running at the peak" in note
        for note, name in zip(table.notes, ("block-size=128", "block-size=32"), strict=False)
    )
    page = html.report(shown)
    assert re.search(r"<h3>normal \(block-size=32\)</h3>", page)
    assert "the spread between restarts is not covered" in page


def test_a_session_without_any_of_it_has_no_empty_sections(tmp_path: Path) -> None:
    page = html.report(view(tmp_path))
    for section in ("memory", "waste", "balance", "sweep"):
        assert f'id="{section}"' not in page
