"""What each profile plans: lengths of one's own, lanes apart, prefixes that are shared and conversations that grow."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer

from pytest_kvcache.errors import LoadFailed, UsageError
from pytest_kvcache.load import contract
from pytest_kvcache.load.contract import read_load, read_rows
from pytest_kvcache.load.draws import Draw, parse_histogram
from pytest_kvcache.load.runner import profiles, run_load
from pytest_kvcache.records import RequestRow
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import Settings


def press(
    server: ScriptedServer, folder: Path, profile: str, *, api: str = "completions", requests: int = 12, **options: Any
) -> tuple[list[RequestRow], list[Any]]:
    seen = len(server.seen)
    endpoint = parse_endpoint(server.url, Settings(api=api))
    options = {"stop_timeout_s": 3, "requests": requests, "nonce": "n", **options}
    result = run_load([endpoint], profile, folder, users=2, output_tokens=0 if "histogram" in str(options) else 4, options=options)
    assert result.complete
    assert result.problems == []
    rows = sorted(read_rows(result.rows_path), key=lambda row: row.id)
    assert {row.outcome for row in rows} == {contract.OK}, Counter((row.outcome, row.error) for row in rows)
    assert all(row.prompt_tokens == row.prompt_tokens_planned and row.completion_tokens == row.output_tokens_planned for row in rows)
    sent = [one.body for one in server.seen[seen:] if one.path in ("/v1/completions", "/v1/chat/completions")]
    return rows, sent[-len(rows) :]


def test_every_profile_of_the_issue_is_shipped_and_fits_in_forty_lines_or_few_more() -> None:
    shipped = profiles()
    assert set(shipped) >= {"normal", "longctx", "nearmax", "mixed", "sharedprefix", "multiturn", "prefillburst", "overlimit"}
    assert all(len(path.read_text().splitlines()) <= 50 for path in shipped.values())


def test_lengths_come_from_a_histogram_of_ones_own(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        rows, _ = press(server, tmp_path / "a", "normal", requests=30, histogram="100-110:3,700:1", output_histogram="2:1,5-6:1")
        (tmp_path / "lengths.csv").write_text("low,high,weight\n50,60,1\n")
        files, _ = press(server, tmp_path / "b", "normal", histogram=str(tmp_path / "lengths.csv"))
    lengths = Counter("long" if row.prompt_tokens == 700 else "short" for row in rows)
    assert all(row.prompt_tokens == 700 or 100 <= (row.prompt_tokens or 0) <= 110 for row in rows)
    assert 2 <= lengths["long"] <= 14
    assert {row.completion_tokens for row in rows} == {2, 5, 6}
    assert all(50 <= (row.prompt_tokens or 0) <= 60 for row in files)


def test_a_histogram_that_is_not_there_fails_the_load_in_one_message(tmp_path: Path) -> None:
    with ScriptedServer() as server, pytest.raises(LoadFailed, match="cannot be read"):
        press(server, tmp_path, "normal", histogram="nowhere.csv")


@pytest.mark.parametrize("text", ["a:b", "100:-1", "0-5:1", "9-5:1", "5:0", "1:2:3:4", "low,high\n", ""])
def test_a_histogram_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_histogram(text)


@given(parts=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500), st.integers(1, 9)), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_draws_of_a_histogram_lie_in_its_bins(parts: list[tuple[int, int, int]], seed: int) -> None:
    histogram = parse_histogram(",".join(f"{low}-{low + span}:{weight}" for low, span, weight in parts))
    for number in range(20):
        drawn = Draw(seed, "x", number).of(histogram)
        assert any(low <= drawn <= low + span for low, span, _ in parts)


def test_mixed_traffic_reports_its_long_share_as_a_lane_of_its_own(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        rows, _ = press(server, tmp_path, "mixed", requests=40, long_share=0.3)
        start = read_load(tmp_path / "requests.jsonl").start
    lanes = Counter(row.lane for row in rows)
    assert 5 <= lanes["longctx"] <= 20
    assert all(2000 <= (row.prompt_tokens or 0) <= 3300 for row in rows if row.lane == "longctx")
    assert start is not None
    assert start.options["lanes"] == ["longctx", "normal"]


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_shared_prefix_is_shared_by_its_users_and_by_nobody_else(tmp_path: Path, api: str) -> None:
    with ScriptedServer() as server:
        rows, sent = press(server, tmp_path, "sharedprefix", api=api, requests=20, prompts=2, prefix_tokens=200, question_tokens=40)
    if api == "chat":
        assert {tuple(message["role"] for message in body["messages"]) for body in sent} == {("system", "user")}
        prefixes = Counter(body["messages"][0]["content"] for body in sent)
        questions = {body["messages"][1]["content"] for body in sent}
    else:
        prefixes = Counter(tuple(body["prompt"][:200]) for body in sent)
        questions = {str(body["prompt"][200:]) for body in sent}
    assert sorted(prefixes.values()) == [10, 10]
    assert Counter((row.prefix_id, row.prefix_tokens) for row in rows) == {("system 0", 200): 10, ("system 1", 200): 10}
    assert len(questions) == 20
    assert len({prefix[:16] for prefix in prefixes}) == 2
    start = read_load(tmp_path / "requests.jsonl").start
    assert start is not None
    assert start.options["shared_prompts"] is True


@pytest.mark.parametrize("options", [{"think_s": 0.02}, {"think_s": 0.02, "rate": 30}])
def test_conversations_grow_by_question_and_answer_and_wait_in_between(tmp_path: Path, options: dict[str, Any]) -> None:
    with ScriptedServer() as server:
        _, sent = press(server, tmp_path, "multiturn", requests=12, turns=3, first_tokens=40, next_tokens=16, **options)
    prompts = sorted((body["prompt"] for body in sent), key=len)
    begun = [prompt for prompt in prompts if not any(prompt[:8] == other[:8] and len(other) < len(prompt) for other in prompts)]
    assert 3 <= len(begun) <= 7
    for first in begun:
        talk = [prompt for prompt in prompts if prompt[:8] == first[:8]]
        assert len(talk) <= 3
        for earlier, later in pairwise(talk):
            assert later[: len(earlier)] == earlier
            assert len(later) >= len(earlier) + 4 + 8


def test_a_conversation_ends_before_it_is_longer_than_the_context(tmp_path: Path) -> None:
    with ScriptedServer(max_model_len=300) as server:
        rows, _ = press(server, tmp_path, "multiturn", requests=20, turns=50, first_tokens=60, next_tokens=40, think_s=0)
    assert max(row.prompt_tokens or 0 for row in rows) <= 300 - 4


def test_bursts_of_long_prompts_start_together(tmp_path: Path) -> None:
    with ScriptedServer(ttft_s=0.1) as server:
        rows, _ = press(server, tmp_path, "prefillburst", requests=8, rate=8, burst_size=4)
    starts = sorted({round(row.intended_s, 3) for row in rows})
    assert len(starts) == 2
    assert starts[1] - starts[0] == pytest.approx(0.5, abs=2e-3)
    assert all(1024 <= (row.prompt_tokens or 0) <= 2048 for row in rows)
