"""The standard set on the real embedded engine: what holds the cache exactly passes, and what rounds it away is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conditions import FAIL, PASS
from pytest_kvcache.judge.quality import quality_not_worse
from pytest_kvcache.quality.ask import ask_items
from pytest_kvcache.quality.items import standard_items
from pytest_kvcache.records import SCHEMA_VERSION, RunRecord
from pytest_kvcache.runfolder import write_run
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings


def quality_of(kv_type: str, api: str, folder: Path) -> Analysis:
    folder.mkdir()
    settings = Settings(api=api)
    with launch(f"llamacpp --ctx 4096 --slots 2 --kv-type {kv_type}", settings, folder / "server.log") as server:
        items = standard_items(server.endpoint, 540)
        assert {item.id.split("-")[0] for item in items} == {"recall"}
        chosen = [item for item in items if item.length_tokens <= 128] + [item for item in items if item.length_tokens > 128][::8]
        ask_items(server.endpoint, chosen, folder / "quality.jsonl", concurrency=2)
    return analyse(write_run(folder, RunRecord(SCHEMA_VERSION, kv_type, "quality", model="recall")))


@pytest.mark.slow
def test_a_quantised_cache_that_lost_its_memory_fails_and_the_exact_one_passes(tmp_path: Path) -> None:
    exact = quality_of("f16", "completions", tmp_path / "f16")
    lossy = quality_of("q4_0", "completions", tmp_path / "q4_0")
    rows = exact.run.quality()
    assert len(rows) > 100
    assert all(row.passed for row in rows)
    assert {row.prompt_tokens - row.length_tokens for row in rows if row.prompt_tokens} == {0}  # exact, with <s> counted
    gate = quality_not_worse([exact], [lossy], 0.02)
    assert gate.verdict == FAIL
    assert "at 32 tokens" in gate.text
    assert {63, 64, 65} <= set(gate.lengths)
    assert quality_not_worse([exact], [exact], 0.03).verdict == PASS


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_the_chat_api_asks_the_same(kv_type: str, tmp_path: Path) -> None:
    chat = quality_of(kv_type, "chat", tmp_path / kv_type)
    assert all(row.passed for row in chat.run.quality())
