"""Models of the field at their full size through vLLM 0.32's own planner: its layers were built without weights and its functions called.

``field.json`` holds each configuration without what decides nothing here, and rows of (length, block size, batched tokens, hybrid manager, pipeline, prefix
caching, blocks, tokens, concurrency) for 64 GiB; blocks are null where vLLM refuses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.pool import EngineShape, lay_out, size_pool

MODELS: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "capacity" / "field.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_vllms_own_code_makes_the_same_blocks_of_a_model_of_the_field(name: str) -> None:
    model = read_architecture(MODELS[name]["config"])
    dtype = MODELS[name]["dtype"]
    for length, block, batched, hybrid, pp, caching, blocks, tokens, concurrency in MODELS[name]["rows"]:
        shape = EngineShape(
            max_model_len=length, block_size=block, max_num_batched_tokens=batched, hybrid=hybrid, pp=pp, prefix_caching=caching, threads_bind="0|1",
            dtype=dtype, kv_dtype=dtype,
        )  # fmt: skip
        pool = size_pool(lay_out(model, shape), 64 * 2**30)
        if blocks is None:
            assert not pool.starts, shape
        else:
            assert pool.starts, pool.reason
            assert (pool.pool_blocks, pool.pool_tokens, pool.max_concurrency) == (blocks, tokens, concurrency), shape


def test_the_collection_covers_every_kind_of_layer_and_many_families() -> None:
    models = [read_architecture(one["config"]) for one in MODELS.values()]
    assert {layer.kind for model in models for layer in model.layers} >= {"full", "sliding", "chunked", "mla", "state", "cross", "none", "shared"}
    assert len({model.model_type for model in models}) >= 80
