"""Bytes that a server states itself: the pool that is in use and not one that was found, and the weights where an API tells them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_kvcache.engines import DIALECTS, RawState, read
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import SnapshotRecord
from pytest_kvcache.server.startlog import facts

DATA = Path(__file__).parents[1] / "data"
GIB = float(1 << 30)
LOG = (
    "(Worker pid=2) INFO [cpu_worker.py:260] Explicitly set (1.0/8.34) GiB for KV cache on node 0.\n"
    "(EngineCore pid=1) INFO [kv_cache_utils.py:2619] Overriding num_gpu_blocks=65536 with num_gpu_blocks_override=9\n"
    "(EngineCore pid=1) INFO [kv_cache_utils.py:2327] CPU KV cache size: 288 tokens, Maximum concurrency for 128 tokens per request: 2.25x\n"
)


def vllm(more: str = "", log: str = "", **labels: str) -> SnapshotRecord:
    told = {"block_size": "32", "num_gpu_blocks": "9", "num_gpu_blocks_override": "9", "kv_cache_memory_bytes": "1073741824", "engine": "0", **labels}
    text = "vllm:cache_config_info{" + ",".join(f'{name}="{value}"' for name, value in told.items()) + "} 1.0\n" + more
    return read(DIALECTS["vllm"], RawState(parse_samples(text), log_facts=facts(log)), 1.0)


def number(value: Value) -> float:
    assert isinstance(value, Reading), value
    return value.number()


def test_the_memory_that_was_asked_for_is_not_the_pool_that_was_set_in_blocks() -> None:
    """The trap: nine blocks, and the label still says a GiB."""
    missing = vllm().value("pool_bytes")
    assert isinstance(missing, Missing)
    assert "kv_cache_memory_bytes does not describe the pool that is in use" in missing.reason
    told = vllm(log=LOG).value("pool_bytes")
    assert number(told) == 9 * 16_384
    assert isinstance(told, Reading)
    assert "9 blocks of 16,384 bytes" in told.source


def test_without_an_override_the_label_is_the_pool() -> None:
    assert number(vllm(num_gpu_blocks="65536", num_gpu_blocks_override="None").value("pool_bytes")) == GIB


def test_an_engine_that_sleeps_has_no_pool() -> None:
    asleep = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\nvllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0\n'
    value = vllm(asleep, num_gpu_blocks="65536", num_gpu_blocks_override="None").value("pool_bytes")
    assert isinstance(value, Missing)
    assert "sleeps" in value.reason


def test_the_window_of_all_layers_is_read_and_none_is_none() -> None:
    assert number(vllm(sliding_window="4096").value("sliding_window")) == 4096
    assert isinstance(vllm(sliding_window="None").value("sliding_window"), Missing)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/loads",
            {"loads": [{"dp_rank": 0, "num_running_reqs": 1, "memory": {"weight_gb": 7.7, "kv_cache_gb": 18.0, "token_capacity": 262144}}]},
        ),
        ("/server_info", {"tp_size": 2, "max_total_num_tokens": 262144, "internal_states": [{"memory_usage": {"weight": 7.7, "kvcache": 18.0}}]}),
        (
            "/server_info",
            {"dp_size": 2, "internal_states": [{"memory_usage": {"weight": 7.7, "kvcache": 9.0}}, {"memory_usage": {"weight": 7.6, "kvcache": 9.0}}]},
        ),
    ],
)
def test_sglang_states_the_weights_of_a_rank(path: str, body: object) -> None:
    snapshot = read(DIALECTS["sglang"], RawState(None, json={path: body}), 1.0)
    assert number(snapshot.value("weights_bytes")) == pytest.approx(7.7 * GIB), "of ranks that differ the most, never their sum"
    assert number(snapshot.value("pool_bytes")) == pytest.approx(18 * GIB)


def test_llamacpp_states_the_size_of_its_model() -> None:
    models = json.loads((DATA / "llamacpp" / "models-unified.json").read_text())
    value = read(DIALECTS["llamacpp"], RawState(None, json={"/v1/models": models}), 1.0).value("weights_bytes")
    assert number(value) == models["data"][0]["meta"]["size"]
