"""Blocks, pools and refusals beyond the recorded starts: other engines, parallelism, field reports, and what must hold for every model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.growth import growth, stages
from pytest_kvcache.capacity.layers import Architecture, Layer, State
from pytest_kvcache.capacity.pool import EngineShape, blocks_for, lay_out, size_pool
from pytest_kvcache.errors import UsageError

GIB = 2**30


def _full(count: int, heads: int = 8, size: int = 128, **more: Any) -> Architecture:
    return Architecture("llama", "made", (Layer("full", heads, size, size),) * count, context=more.pop("context", 32768), dtype="bfloat16", **more)


LLAMA_7B = _full(32, heads=32)
LLAMA_8B = _full(32)
GPT_OSS = Architecture("gpt_oss", "gpt-oss-120b", (Layer("full", 8, 64, 64), Layer("sliding", 8, 64, 64, window=128)) * 18, 131_072)
GEMMA = Architecture(
    "gemma3_text", "made", ((Layer("sliding", 4, 256, 256, 1024),) * 5 + (Layer("full", 4, 256, 256),)) * 4, context=131072, dtype="bfloat16"
)


def test_a04_a_model_whose_every_layer_slides_is_charged_window_batch_and_a_block() -> None:
    starcoder = Architecture("starcoder2", "made", (Layer("sliding", 2, 128, 128, 4096),) * 30, context=16384, dtype="bfloat16")
    shape = EngineShape(
        block_size=16, max_model_len=16384, max_num_batched_tokens=8192, platform="gpu", async_scheduling=False, num_gpu_blocks_override=137_407
    )
    pool = size_pool(lay_out(starcoder, shape), 0)
    assert pool.blocks_per_request == 769
    assert f"{pool.max_concurrency:.2f}" == "178.68"


def test_a07_two_groups_share_the_pool_and_one_long_request_fits() -> None:
    oss = Architecture("gpt_oss", "made", (Layer("sliding", 8, 64, 64, 128), Layer("full", 8, 64, 64)) * 18, context=131072, dtype="bfloat16")
    layout = lay_out(oss, EngineShape(block_size=16, max_model_len=131072, max_num_batched_tokens=8192, platform="gpu", async_scheduling=False))
    pool = size_pool(layout, 9798 * 589_824)
    assert (layout.bytes_per_block, pool.pool_blocks, pool.blocks_per_request) == (589_824, 9798, 8713)
    assert f"{pool.max_concurrency:.2f}" == "1.12"


def test_b04_fp8_halves_the_rate_and_the_refusal_names_the_length_that_fits() -> None:
    model = _full(48, heads=4, context=262144)
    layout = lay_out(model, EngineShape(kv_dtype="fp8", block_size=16, max_model_len=221000, platform="gpu"))
    assert growth(model, "fp8").growth_bytes_per_token == 49152
    assert blocks_for(layout, 221000) * layout.bytes_per_block == -(-221000 // 16) * 16 * 49152
    pool = size_pool(layout, 122080 * 49152 + layout.bytes_per_block)
    assert (pool.starts, pool.longest) == (False, 122080)
    assert "122080" in pool.reason


def test_asynchronous_scheduling_charges_window_layers_for_two_batches() -> None:
    shape = EngineShape(block_size=16, max_model_len=32768, max_num_batched_tokens=2048, platform="gpu")
    both, one = lay_out(GEMMA, shape), lay_out(GEMMA, replace(shape, async_scheduling=False))
    assert (both.in_flight_tokens, one.in_flight_tokens) == (4096, 2048)
    assert blocks_for(both, 32768) - blocks_for(one, 32768) == 5 * 2048 // 16
    assert lay_out(GEMMA, replace(shape, pp=2)).in_flight_tokens == 3 * 2048


@pytest.mark.parametrize(("state", "block"), [("auto", 544), ("float32", 1056)])
def test_i13_a_hybrids_block_grows_until_it_holds_a_state(state: str, block: int) -> None:
    qwen = read_architecture({"model_type": "qwen3_next", "num_hidden_layers": 48, "torch_dtype": "bfloat16", "max_position_embeddings": 262144})
    layout = lay_out(qwen, EngineShape(platform="gpu", state_dtype=state))
    assert layout.block_size == block
    assert [group.kind for group in layout.groups] == ["state"] * 3 + ["full"]
    assert blocks_for(layout, 1) == 3 * 2 + 1
    assert blocks_for(lay_out(qwen, EngineShape(platform="gpu", prefix_caching=False)), 1) == 3 + 1


def test_a_hybrid_does_not_start_without_its_manager() -> None:
    qwen = read_architecture({"model_type": "qwen3_next", "num_hidden_layers": 8})
    assert "hybrid manager is off" in lay_out(qwen, EngineShape(hybrid=False)).refusal


def test_a_live_window_request_holds_what_was_measured() -> None:
    """Figures of polls of a real vLLM: 1 full and 5 sliding groups, window 512, blocks of 32."""
    measured = Architecture(
        "gemma3_text", "made", (Layer("sliding", 2, 64, 64, 512),) * 5 + (Layer("full", 2, 64, 64),), context=8192, dtype="bfloat16"
    )
    layout = lay_out(measured, EngineShape(block_size=32, max_model_len=2048))
    for prompt, received, blocks in (
        (1100, 2, 120),
        (1100, 21, 115),
        (1100, 22, 121),
        (1100, 53, 116),
        (1100, 54, 122),
        (490, 1, 96),
        (490, 24, 102),
        (490, 55, 97),
        (490, 56, 103),
    ):
        assert blocks_for(layout, prompt + received - 1, live=True) == blocks, (prompt, received)
    assert blocks_for(layout, 1100) > 122


def test_pipeline_stages_take_the_remainder_before_the_last() -> None:
    assert [len(stage) for stage in stages(32, 3)] == [11, 11, 10]
    assert [len(stage) for stage in stages(34, 4)] == [8, 9, 9, 8]
    whole, half = lay_out(LLAMA_8B, EngineShape(block_size=16)), lay_out(LLAMA_8B, EngineShape(block_size=16, pp=2))
    assert half.bytes_per_block * 2 == whole.bytes_per_block
    assert growth(LLAMA_8B, pp=2).growth_bytes_per_token * 2 == growth(LLAMA_8B).growth_bytes_per_token


def test_a_latent_is_replicated_and_context_parallelism_divides_its_tokens() -> None:
    latent = Architecture("deepseek_v3", "made", (Layer("mla", 1, 576, 0, latent=512),) * 61, context=163840, dtype="bfloat16", query_heads=128)
    assert growth(latent, tp=8).growth_bytes_per_token == growth(latent).growth_bytes_per_token == 70272
    shape = EngineShape(block_size=64, max_model_len=65536, platform="gpu", tp=8)
    assert blocks_for(lay_out(latent, replace(shape, dcp=8)), 65536) * 8 == blocks_for(lay_out(latent, shape), 65536)
    assert growth(latent, "fp8").growth_bytes_per_token * 2 == 70272


def test_an_indexer_keeps_its_width_when_the_latent_is_quantised() -> None:
    sparse = Architecture("deepseek_v32", "made", (Layer("mla", 1, 576, 0, latent=512, index_size=128),) * 61, dtype="bfloat16")
    assert growth(sparse).growth_bytes_per_token == 78_324
    assert growth(sparse, "fp8_ds_mla").growth_bytes_per_token == 61 * (656 + 132)
    layout = lay_out(replace(sparse, context=4096), EngineShape(platform="gpu", block_size=64))
    assert layout.bytes_per_block == 64 * 78_324


@pytest.mark.parametrize(
    ("kv", "per_token"),
    [
        ("bfloat16", 131072), ("fp32", 262144), ("fp8", 65536), ("int8", 65536), ("q8_0", 69632), ("q4_0", 36864), ("nvfp4", 36864), ("q8_0/f16", 100352),
        ("fp8_per_token_head", 65536 + 32 * 8 * 2 * 4), ("int4_per_token_head", 32768 + 32 * 8 * 2 * 4),
    ],
)  # fmt: skip
def test_every_cache_type_counts_its_scales(kv: str, per_token: int) -> None:
    assert growth(LLAMA_8B, kv).growth_bytes_per_token == per_token


def test_types_that_no_engine_has_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown data type"):
        growth(LLAMA_8B, "fp9")
    pool = size_pool(lay_out(LLAMA_8B, EngineShape(kv_dtype="q8_0", max_model_len=4096)), GIB)
    assert not pool.starts
    assert "q8_0" in pool.reason


@pytest.mark.parametrize(
    ("model", "shape", "words"),
    [
        (_full(4, heads=6, query_heads=12), {"tp": 4}, "neither divides the other"),
        (replace(_full(4), layers=(Layer("state", state=State("gdn", 64, 3, 64, heads=6)), Layer("full", 4, 64, 64))), {"tp": 4}, "recurrent state"),
        (_full(4, context=4096), {"max_model_len": 8192}, "greater than the derived max_model_len"),
        (GEMMA, {"dcp": 2, "platform": "gpu"}, "window layers"),
        (replace(_full(2), layers=(Layer("full", 4, 64, 64), Layer("shared"))), {"pp": 2}, "pipeline stage 2 of 2"),
        (_full(4), {"block_size": 16}, "No common block size"),
        (_full(4), {"tp": 2, "numa_nodes": 1}, "NUMA"),
        (_full(4), {"cpu_space": "0.5"}, "whole number of GiB"),
        (replace(_full(4), refused_by_vllm="gone since 0.23"), {}, "gone since"),
    ],
)
def test_what_vllm_would_refuse_is_refused_with_its_reason(model: Architecture, shape: dict[str, Any], words: str) -> None:
    pool = size_pool(lay_out(model, EngineShape(**{"max_model_len": 4096, **shape})), 64 * GIB)
    assert not pool.starts
    assert words in pool.reason


def test_a_default_length_that_the_file_does_not_state_is_no_limit() -> None:
    made = read_architecture({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256})
    assert (made.context, made.context_stated) == (2048, False)
    assert size_pool(lay_out(made, EngineShape(max_model_len=8192)), GIB).starts


def test_a05_sglangs_pool_is_memory_by_bytes_of_a_token() -> None:
    qwen = replace(_full(94, heads=4, context=40960), query_heads=64)
    layout = lay_out(qwen, EngineShape(engine="sglang", tp=4))
    assert layout.bytes_per_block == 48128
    pool = size_pool(layout, 367_404 * 48128 + 1000)
    assert (pool.pool_tokens, pool.starts) == (367_404, True)
    paged = size_pool(lay_out(qwen, EngineShape(engine="sglang", tp=4, block_size=64)), 367_404 * 48128)
    assert (paged.pool_tokens, paged.pool_blocks) == (367_404 // 64 * 64, 367_404 // 64)


def test_sglang_starts_with_a_pool_shorter_than_the_context_and_not_with_none() -> None:
    layout = lay_out(LLAMA_8B, EngineShape(engine="sglang"))
    short = size_pool(layout, 1000 * 131072)
    assert (short.starts, short.longest) == (True, 1000)
    assert "refuses requests beyond 1000 tokens" in short.notes[-1]
    assert not size_pool(layout, 1000).starts


def test_sglang_splits_the_memory_between_full_and_window_layers() -> None:
    layout = lay_out(GEMMA, EngineShape(engine="sglang", max_model_len=32768))
    per_token = 4 * 512 * 2
    assert layout.bytes_per_block == int(4 * per_token + 0.8 * 20 * per_token)
    assert blocks_for(layout, 32768) == 32768
    assert blocks_for(layout, 900) > 900  # the window pool binds: it has fewer tokens than the full one
    tiny = size_pool(lay_out(GEMMA, EngineShape(engine="sglang", max_model_len=1024)), layout.bytes_per_block * 1000)
    assert "cannot hold a window" in tiny.reason


def test_a_window_pool_that_is_too_small_is_told_before_it_blocks() -> None:
    # field case D11 (SGLang PRs 37610 and 22597)
    small = lay_out(GPT_OSS, EngineShape(engine="sglang", block_size=256, swa_ratio=0.1, max_model_len=4096))
    pool = size_pool(small, small.bytes_per_block * 16)
    assert pool.pool_tokens == 4096
    assert not pool.starts
    assert pool.reason == "the window pool (256 tokens) cannot hold a window of 128 and a page"
    large = lay_out(GPT_OSS, EngineShape(engine="sglang", swa_ratio=0.2, max_model_len=131_072))
    pool = size_pool(large, large.bytes_per_block * 100_000)
    assert pool.starts
    assert any("refused prompts beyond the window pool: 19994 tokens" in note for note in pool.notes)
    whole = size_pool(lay_out(LLAMA_8B, EngineShape(engine="sglang")), 20 * 2**30)
    assert not any("window pool" in note for note in whole.notes)


def test_sglang_gives_recurrent_states_slots_of_their_own() -> None:
    state = State("gdn", 8192, 3, 32 * 128 * 128)
    hybrid = Architecture(
        "qwen3_next", "made", (Layer("state", state=state),) * 36 + (Layer("full", 2, 256, 256),) * 12, context=262144, dtype="bfloat16"
    )
    layout = lay_out(hybrid, EngineShape(engine="sglang", max_model_len=32768, state_slots=48))
    assert layout.fixed_bytes == 36 * 2_146_304
    pool = size_pool(layout, 40 * GIB)
    assert pool.pool_tokens == (40 * GIB - 48 * layout.fixed_bytes) // 24576
    assert pool.max_concurrency <= 48


def test_a_plain_paged_cache_keeps_every_token_of_every_layer() -> None:
    layout = lay_out(GEMMA, EngineShape(engine="paged", max_model_len=8192))
    assert layout.bytes_per_block == 16 * 24 * 4 * 512 * 2
    pool = size_pool(layout, 512 * layout.bytes_per_block)
    assert (pool.starts, pool.max_concurrency, pool.usable_blocks) == (True, 1.0, 512)
    assert not size_pool(layout, 511 * layout.bytes_per_block).starts


def test_a_model_without_a_cache_needs_no_block() -> None:
    pool = size_pool(lay_out(Architecture("none", "made", (Layer("none"),) * 3, context=128), EngineShape()), GIB)
    assert (pool.pool_blocks, pool.blocks_per_request, pool.starts) == (1, 0, True)


LAYER = st.one_of(
    st.builds(lambda heads: Layer("full", heads, 64, 64), st.sampled_from([1, 2, 4])),
    st.builds(lambda window: Layer("sliding", 2, 64, 64, window), st.sampled_from([16, 512])),
    st.builds(lambda chunk: Layer("chunked", 2, 64, 64, chunk), st.just(1024)),
    st.just(Layer("state", state=State("mamba2", 1024, 3, 65536, checkpoint=1))),
    st.just(Layer("none")),
)


@settings(max_examples=150, deadline=None)
@given(
    layers=st.lists(LAYER, min_size=1, max_size=9),
    engine=st.sampled_from(["vllm", "sglang", "llamacpp", "paged"]),
    block=st.sampled_from([32, 128, None]),
    lengths=st.tuples(st.integers(1, 9000), st.integers(1, 9000)),
    memory=st.integers(0, 2**34),
)
def test_more_tokens_never_need_less_and_more_memory_never_holds_less(
    layers: list[Layer], engine: Any, block: int | None, lengths: tuple[int, int], memory: int
) -> None:
    model = Architecture("made", "made", tuple(layers), context=9000, dtype="bfloat16")
    layout = lay_out(model, EngineShape(engine=engine, block_size=block, max_num_batched_tokens=2048))
    short, long = sorted(lengths)
    assert blocks_for(layout, short) <= blocks_for(layout, long)
    assert growth(model).sequence_bytes(short) <= growth(model).sequence_bytes(long)
    small, large = size_pool(layout, memory), size_pool(layout, memory * 2)
    assert small.pool_blocks <= large.pool_blocks
    assert not small.starts or large.starts
    assert small.longest <= large.longest
    if engine == "vllm" and layout.groups and small.starts:
        assert small.usable_blocks >= small.blocks_per_request
        assert size_pool(replace(layout, max_model_len=small.longest or 1), memory).usable_blocks >= blocks_for(layout, small.longest)


@settings(max_examples=100, deadline=None)
@given(heads=st.sampled_from([1, 2, 4, 8]), count=st.integers(1, 40), tp=st.sampled_from([1, 2, 4, 8]), blocks=st.integers(1, 5000))
def test_a_full_pool_holds_exactly_the_growth_of_its_tokens(heads: int, count: int, tp: int, blocks: int) -> None:
    model = _full(count, heads=heads, query_heads=8)
    layout = lay_out(model, EngineShape(block_size=32, tp=tp, threads_bind="0|1"))
    per_token = growth(model, tp=tp).growth_bytes_per_token
    assert layout.bytes_per_block == 32 * per_token
    assert per_token * tp >= growth(model).growth_bytes_per_token
    assert per_token * max(1, min(tp, heads)) == growth(model).growth_bytes_per_token
    pool = size_pool(layout, blocks * 32 * per_token)
    assert pool.pool_blocks == blocks
    assert blocks_for(layout, blocks * 32) == blocks
