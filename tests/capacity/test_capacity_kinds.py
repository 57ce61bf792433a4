"""Sixty small models through vLLM 0.32's own planner: its layers were built and its functions called, at several lengths, block sizes and pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.pool import EngineShape, lay_out, size_pool

KINDS: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "capacity" / "kinds.json").read_text())


@pytest.mark.parametrize("name", KINDS)
def test_vllms_own_code_makes_the_same_blocks_of_this_kind_of_model(name: str) -> None:
    model = read_architecture(KINDS[name]["config"])
    for length, block, batched, hybrid, pp, caching, blocks, tokens, concurrency in KINDS[name]["rows"]:
        shape = EngineShape(
            max_model_len=length, block_size=block, max_num_batched_tokens=batched, hybrid=hybrid, pp=pp, prefix_caching=caching, threads_bind="0|1|2"
        )
        pool = size_pool(lay_out(model, shape), 2**30)
        if blocks is None:
            assert not pool.starts, shape
        else:
            assert (pool.pool_blocks, pool.pool_tokens, pool.max_concurrency) == (blocks, tokens, concurrency), shape


def test_the_collection_covers_every_kind_of_group() -> None:
    seen = {group.kind for kind in KINDS.values() for group in lay_out(read_architecture(kind["config"]), EngineShape(max_model_len=448)).groups}
    assert seen == {"full", "sliding", "mla", "state", "cross"}
    assert len(KINDS) >= 55
