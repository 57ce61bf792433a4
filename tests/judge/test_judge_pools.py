"""Pools that changed in the field (facts of kinds e and f): what the figures mean, and what they must not be taken for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from finding_cases import made

from pytest_kvcache.judge.compare import compare
from pytest_kvcache.judge.pools import notes, unneeded
from pytest_kvcache.quantities import QUANTITIES, Reading
from pytest_kvcache.records import SCHEMA_VERSION, RunRecord, ValueRecord


def stated(version: str = "1", **config: Any) -> RunRecord:
    records = {name: ValueRecord.of(Reading(value, QUANTITIES[name].unit, "told")) for name, value in config.items()}
    return RunRecord(SCHEMA_VERSION, id="r", profile="normal", engine="vllm", engine_version=version, config=records)


def test_a_relabelled_pool_is_not_taken_for_more_memory() -> None:
    # gpt-oss-120b: 9798 blocks printed as 78,384 tokens, then as 147,393
    (note,) = notes(stated(pool_blocks=9798, pool_tokens=78_384), stated("2", pool_blocks=9798, pool_tokens=147_393))
    assert "1.88 times the tokens in the same number of blocks" in note
    assert "the memory is the same" in note


def test_ten_times_the_tokens_in_the_same_memory_wait_for_the_peak() -> None:
    # Gemma-4-31B: 55k tokens, then 525k, about 50 GB both times
    (note,) = notes(stated(pool_tokens=55_000, pool_bytes=50e9), stated("2", pool_tokens=525_000, pool_bytes=50e9))
    assert "9.55 times the tokens in the same memory" in note
    assert "only their peak tells" in note


def test_a_smaller_pool_of_another_build_may_be_the_right_one() -> None:
    # Llama-2-70B TP4: 31,615 blocks, then 20,865 once the peak was profiled
    (note,) = notes(stated(pool_blocks=31_615), stated("2", pool_blocks=20_865))
    assert "lost 34.0 % of its blocks" in note
    assert "the old pool went over its budget" in note
    (own,) = notes(stated(pool_blocks=60_768), stated(pool_blocks=43_420))
    assert own == "the pool lost 28.5 % of its blocks"


def test_a_whole_multiple_points_at_sharding() -> None:
    # Qwen3-32B TP4: 814 blocks, then 3,258
    found = notes(stated(pool_blocks=814, pool_tokens=814 * 256), stated("2", pool_blocks=3258, pool_tokens=3258 * 256))
    assert any("by 4 times" in note and "shared among ranks" in note for note in found)


def test_half_the_width_doubles_the_pool_and_less_says_that_layers_stayed_wide() -> None:
    wide = stated(kv_dtype="auto", pool_tokens=100_000, pool_blocks=6250, pool_bytes=1e9)
    assert notes(wide, stated(kv_dtype="fp8", pool_tokens=200_000, pool_blocks=12_500, pool_bytes=1e9)) == []
    assert notes(wide, stated(kv_dtype="fp8_e4m3", pool_tokens=191_000, pool_blocks=11_937, pool_bytes=1e9)) == []
    (note,) = notes(wide, stated(kv_dtype="fp8", pool_tokens=150_000, pool_blocks=9375, pool_bytes=1e9))
    assert "about 2 were to be expected" in note


def test_blocks_of_another_size_are_no_relabelling_and_equal_pools_say_nothing() -> None:
    assert notes(stated(pool_tokens=100_000, pool_blocks=6250, block_size=16), stated(pool_tokens=101_000, pool_blocks=6300, block_size=16)) == []
    found = notes(stated(pool_tokens=100_000, pool_blocks=6250, block_size=16), stated(pool_tokens=200_000, pool_blocks=6250, block_size=32))
    assert not any("counted another way" in note or "ranks" in note for note in found)
    assert notes(stated(), stated(pool_tokens=5)) == []
    assert notes(stated(pool_tokens=4096, pool_bytes=4 << 20), stated("2", pool_tokens=8192, pool_bytes=8 << 20)) == [], "twice the memory"
    assert notes(stated(pool_tokens=4096), stated(pool_tokens=8192)) == [], "a pool that was set to twice its size"


@pytest.mark.parametrize(("peak", "useless"), [(0.095, True), (0.24, False)])
def test_e08_a_larger_pool_is_worth_nothing_to_a_load_that_never_used_a_tenth(peak: float, useless: bool, tmp_path: Path) -> None:
    """Field case E08: fp8 KV met its memory goal at a usage of 2.4 to 9.5 %, and switched prefix caching off."""
    sides = []
    for name, usable, dtype, top in (("before", 1000, "auto", peak), ("after", 2000, "fp8", peak / 2)):
        held = {"usage": top, "used_blocks": round(top * usable), "free_blocks": usable - round(top * usable), "running": 2.0}
        told = stated(kv_dtype=dtype, pool_blocks=usable + 1, pool_tokens=(usable + 1) * 16).config
        sides.append(made(tmp_path / name, None, held, usable=usable, config=told))
    found = unneeded(sides[:1], sides[1:])
    assert bool(found) is useless
    assert unneeded(sides[1:], sides[:1]) == [], "a smaller pool saves nothing"
    assert unneeded([], sides) == []
    if useless:
        (note,) = found
        assert "the pool grew 2.00 times" in note
        assert "never used more than 9.5 % of the smaller one (pool 1,000 blocks" in note, "a percentage never stands alone"
        assert "prefix hits" in note
        assert note in compare(sides[:1], sides[1:]).notes


def test_two_max_lengths_tell_the_fixed_part_and_the_rate_of_a_request() -> None:
    # A20: DeepSeek-V4-Flash, 24.5 GiB: 398K tokens at 50K, 2.45M at 500K
    memory = 24.5 * 2**30
    short = stated(pool_bytes=memory, pool_tokens=398_000, max_model_len=50_000, max_concurrency=7.96)
    long = stated(pool_bytes=memory, pool_tokens=2_450_000, max_model_len=500_000, max_concurrency=4.9)
    for pair in ((short, long), (long, short)):
        (note,) = [note for note in notes(*pair) if "B a token" in note]
        assert "about 2.86 GiB for each request and 4,586 B a token" in note
    # A19: 7.71 at 65,536 and 2.82 at 131,072 of one memory: no fixed part explains it
    first, second = (stated(pool_bytes=memory, max_model_len=length, max_concurrency=share) for length, share in ((65_536, 7.71), (131_072, 2.82)))
    assert any("no fixed part and rate explain both" in note for note in notes(first, second))


def test_a_plain_model_has_no_fixed_part_however_its_figures_are_rounded() -> None:
    for length in (8192, 20_000, 40_000, 41_000, 131_072):
        for other in (1000, 8192, 21_000, 39_999, 65_536):
            sides = []
            for each in (length, other):
                blocks = 14.63 * 2**30 / 2**21 // 1
                sides.append(stated(pool_bytes=14.63 * 2**30, max_model_len=each, max_concurrency=round(blocks / -(-each // 16), 2), block_size=16))
            assert notes(*sides) == []
    changed = stated(pool_bytes=24.5 * 2**30, max_model_len=50_000, max_concurrency=7.96, kv_dtype="fp8")
    assert not any("a token" in note for note in notes(changed, stated(pool_bytes=24.5 * 2**30, max_model_len=500_000, max_concurrency=4.9)))
