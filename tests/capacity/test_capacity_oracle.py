"""What a real vLLM 0.32 answered to real starts, row by row: blocks, tokens, concurrency, and whether it started."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.pool import EngineShape, lay_out, size_pool

ORACLE = Path(__file__).parent.parent / "data" / "capacity" / "oracle"
ROWS = list(csv.DictReader((ORACLE / "rows.csv").read_text().splitlines()))
# The memory of these starts was measured by the engine and follows from no setting.
MEASURED = {"v31_gqa_auto_mem", "x01_gqa_automem030"}
FLAGS = {
    "--block-size": "block_size", "--num-gpu-blocks-override": "num_gpu_blocks_override", "--max-num-batched-tokens": "max_num_batched_tokens",
    "--kv-cache-dtype": "kv_dtype", "--dtype": "dtype", "--tensor-parallel-size": "tp",
}  # fmt: skip


def _shape(row: dict[str, str]) -> tuple[EngineShape, int]:
    given: dict[str, Any] = {"numa_nodes": 1}
    length = row["max_model_len"]
    given["max_model_len"] = None if length == "(unset)" else int(length)
    memory = int(float(row["kv_space_gib"]) * 2**30)
    words = iter(shlex.split(row["flags"]))
    explicit = False
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name == "VLLM_CPU_OMP_THREADS_BIND":
            given["threads_bind"] = value
        elif equals:
            given["chunked_local_hybrid"] = value == "1"
        elif word == "--kv-cache-memory-bytes":
            memory, explicit = int(next(words)), True
        elif word == "--no-enable-prefix-caching":
            given["prefix_caching"] = False
        elif word == "--disable-hybrid-kv-cache-manager":
            given["hybrid"] = False
        else:
            text = next(words)
            given[FLAGS[word]] = int(text) if text.isdigit() else text
    if not explicit:
        given["cpu_space"] = row["kv_space_gib"]
    return EngineShape(**given), memory


@pytest.mark.parametrize("row", [row for row in ROWS if row["name"] not in MEASURED], ids=lambda row: str(row["name"]))
def test_the_plan_says_what_the_real_engine_said(row: dict[str, str]) -> None:
    shape, memory = _shape(row)
    layout = lay_out(read_architecture(ORACLE / row["config"]), shape)
    pool = size_pool(layout, memory)
    if row["log_line"].startswith("REFUSED"):
        assert not pool.starts
        assert pool.reason
        return
    assert pool.reason == ""
    assert pool.pool_blocks == int(row["num_gpu_blocks"])
    assert pool.pool_tokens == int(row["kv_cache_size_tokens"])
    assert pool.max_concurrency == float(row["kv_cache_max_concurrency"])
    assert f"{pool.max_concurrency:.2f}x" in row["log_line"]
    assert f"for {pool.max_model_len:,} tokens" in row["log_line"]
    if row["effective_attention_block_size"] not in ("None", ""):
        assert layout.block_size == int(row["effective_attention_block_size"])


def test_every_row_is_tried_but_those_whose_memory_was_measured() -> None:
    assert {row["name"] for row in ROWS} >= MEASURED
    assert len(ROWS) == 58


def test_the_refusals_carry_the_engines_own_figures() -> None:
    names = {"v20_gemma3_ovr": 2080, "v23_gqa_toolong": 32640, "v25_gqa_exactfit": 2016}
    for row in ROWS:
        if row["name"] in names:
            shape, memory = _shape(row)
            pool = size_pool(lay_out(read_architecture(json.loads((ORACLE / row["config"]).read_text())), shape), memory)
            assert pool.longest == names[row["name"]]
            assert str(names[row["name"]]) in pool.reason
