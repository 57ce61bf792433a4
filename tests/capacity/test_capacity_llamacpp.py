"""llama.cpp's cells against the sizes that it printed, and the window cache beside the full one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_kvcache.capacity.architecture import Architecture, read_architecture
from pytest_kvcache.capacity.layers import Layer
from pytest_kvcache.capacity.llamacpp_cells import cache_bytes
from pytest_kvcache.capacity.pool import EngineShape, lay_out, size_pool
from pytest_kvcache.errors import UsageError

LOGS = Path(__file__).parent.parent / "data" / "llamacpp"
RECALL = Architecture("llama", "recall", (Layer("full", 1, 128, 128),) * 2, context=32768)
MIXED = Architecture("gemma3", "mixed", (Layer("sliding", 4, 256, 256, 1024),) * 5 + (Layer("full", 4, 256, 256),), context=32768)


@pytest.mark.parametrize("kv", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("shared", ["split", "unified"])
def test_the_cache_has_the_size_that_a_real_start_printed(kv: str, shared: str) -> None:
    log = (LOGS / f"startup-{kv}-{shared}.log").read_text()
    found = re.search(r"llama_kv_cache: size = +([0-9.]+) MiB \( *(\d+) cells, +(\d+) layers, +(\d+)/(\d+) seqs\)", log)
    assert found is not None
    mib, cells, layers, slots = float(found[1]), int(found[2]), int(found[3]), int(found[4])
    layout = lay_out(RECALL, EngineShape(engine="llamacpp", kv_dtype=kv, slots=slots, unified=shared == "unified", max_model_len=cells))
    assert layout.groups[0].layers == layers
    assert cache_bytes(layout, cells) == mib * 2**20
    pool = size_pool(layout, int(mib * 2**20))
    assert (pool.starts, pool.pool_tokens) == (True, 16384)
    assert not size_pool(layout, int(mib * 2**20) - 1).starts


def test_the_window_cache_holds_the_windows_of_all_slots_and_a_batch() -> None:
    for unified, seats in ((True, 4), (False, 1)):
        layout = lay_out(MIXED, EngineShape(engine="llamacpp", slots=4, unified=unified, max_model_len=8192))
        small = -(-(1024 * seats + 512) // 256) * 256
        per_token = 4 * (256 + 256) * 2
        assert cache_bytes(layout, 8192) == (1 if unified else 4) * (8192 * per_token + small * 5 * per_token)
        assert cache_bytes(layout, 256) == (1 if unified else 4) * 256 * 6 * per_token
    full = lay_out(MIXED, EngineShape(engine="llamacpp", slots=1, swa_full=True, max_model_len=8192))
    assert cache_bytes(full, 8192) == 8192 * 6 * per_token


def test_quantised_rows_must_be_whole_blocks_and_vllms_types_are_refused() -> None:
    odd = Architecture("llama", "odd", (Layer("full", 1, 80, 80),), context=4096)
    with pytest.raises(UsageError, match="whole blocks of 32"):
        lay_out(odd, EngineShape(engine="llamacpp", kv_dtype="q8_0"))
    assert "fp8" in lay_out(RECALL, EngineShape(engine="llamacpp", kv_dtype="fp8")).refusal


def test_a_split_slot_is_shorter_than_the_whole_cache() -> None:
    layout = lay_out(RECALL, EngineShape(engine="llamacpp", slots=4, unified=False, max_model_len=8192))
    pool = size_pool(layout, 16 * 2**20)
    assert (pool.starts, pool.longest, pool.max_concurrency) == (False, 4096, 0.0)
    assert "4,096 cells a slot would fit" in pool.reason


def test_the_embedded_model_is_read_as_its_engine_reads_it() -> None:
    from pytest_kvcache.server.embedded.recall import model_paths

    made = read_architecture(model_paths().folder / "recall.gguf")
    assert made.layers == RECALL.layers
    assert made.context == 32768
