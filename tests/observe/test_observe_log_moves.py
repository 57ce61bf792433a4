"""Logs of two starts given together: the last one counts, and what an upgrade moved is said with what it means (field cases F)."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvcache.observe.inspecting import Inspection, inspect
from pytest_kvcache.observe.pasted import sort_text
from pytest_kvcache.quantities import Reading


def told(*texts: str) -> Inspection:
    return inspect([sort_text(f"{'abcdefgh'[number]}.log", text.encode()) for number, text in enumerate(texts)])


def value(found: Inspection, name: str) -> Any:
    quantity = found.quantities[name]
    return quantity.value if isinstance(quantity, Reading) else None


def v1(tokens: str, gib: str = "", length: str = "32,768", version: str = "", engine: str = "") -> str:
    lines = [f"INFO 11-20 10:11:00 [api_server.py:1] vLLM API server version {version}"] if version else []
    lines += [f"INFO 11-20 10:11:12 [gpu_worker.py:298] Available KV cache memory: {gib} GiB"] if gib else []
    count = float(tokens.replace(",", "")) / float(length.replace(",", ""))
    lines += [
        f"{engine}INFO 11-20 10:11:12 [kv_cache_utils.py:1087] GPU KV cache size: {tokens} tokens",
        f"{engine}INFO 11-20 10:11:13 [kv_cache_utils.py:1091] Maximum concurrency for {length} tokens per request: {count:.2f}x",
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("before", "after", "room", "words"),
    [
        (v1("55,104", "50.1", version="0.20.0"), v1("525,312", "49.8", version="0.21.0"), 525_312, ["(0.20.0 -> 0.21.0)", "(x 9.53)", "the memory of the pool is the same"]),
        (v1("78,384", "5.38", "131,072"), v1("147,393", "5.38", "131,072"), 147_393, ["(x 1.88)", "what the engine calls a token"]),
        (v1("60,768", length="128"), v1("43,420", length="128"), 43_420, ["(x 0.715)", "neither log states the memory"]),
        (v1("208,384", "21.9"), v1("834,048", "21.9"), 834_048, ["(x 4)", "a factor of 4 is seldom memory"]),
        (v1("230,528", "10.55", "100,000"), v1("122,080", "5.59", "221,000"), 122_080, ["moved by the same factor", "the max length moved too"]),
        (v1("100,000", "10"), v1("200,000", "12"), 200_000, ["moved by different factors"]),
    ],
    ids=["F01", "F07", "F04", "F05", "B04", "another price"],
)  # fmt: skip
def test_two_starts_are_not_one_and_what_moved_is_told(before: str, after: str, room: int, words: list[str]) -> None:
    found = told(before, after)
    assert value(found, "pool_tokens") == room, "the least of two starts is the pool of neither"
    notes = "\n".join(found.notes)
    assert "the figures are those of b.log, the last one" in notes
    for word in words:
        assert word in notes


def test_v0_blocks_of_two_releases_f02() -> None:
    before, after = (f"INFO 12-10 10:00:00 llm_engine.py:222] # GPU blocks: {blocks}, # CPU blocks: 3276\n" for blocks in (31615, 20865))
    found = told(before, after)
    assert value(found, "pool_blocks") == 20865
    assert any("pool_blocks 31,615 blocks -> 20,865 blocks (x 0.66)" in note for note in found.notes)


def test_the_version_is_that_of_the_start_that_counts() -> None:
    assert told(v1("55,104", version="0.20.0"), v1("525,312", version="0.21.0")).version == "0.21.0"
    assert told(v1("55,104", version="0.20.0") + v1("525,312", version="0.21.0")).version == "0.21.0", "in one log as well"


def test_two_starts_with_the_same_pool_are_told_apart_by_what_one_server_states_once() -> None:
    for before, after, moved in (
        (v1("100,000", version="0.20.0"), v1("100,000", version="0.21.0"), "(0.20.0 -> 0.21.0): nothing that is stated moved"),
        (v1("100,000", length="32,768"), v1("100,000", length="65,536"), "max_model_len 32,768 tokens -> 65,536 tokens"),
    ):
        notes = "\n".join(told(before, after).notes)
        assert "2 start-up logs that are not of one start: the figures are those of b.log" in notes
        assert moved in notes


def test_a_start_that_failed_counts_where_it_is_the_last() -> None:
    failed = "INFO 11-20 10:11:00 [api_server.py:1] vLLM API server version 0.21.0\nValueError: No available memory for the cache blocks.\n"
    found = told(v1("100,000", version="0.20.0"), failed)
    assert value(found, "pool_tokens") is None, "what an earlier start had is not what this one has"
    assert any("the figures are those of b.log, the last one" in note for note in found.notes)


def test_parts_of_one_server_are_read_together() -> None:
    ranks = told(v1("100,000", engine="(EngineCore_DP0 pid=1) "), v1("90,000", engine="(EngineCore_DP1 pid=2) "))
    assert value(ranks, "pool_tokens") == 190_000
    workers = told(v1("107,824"), v1("107,312"), v1("107,344"))
    assert value(workers, "pool_tokens") == 107_312, "ranks of one engine hold what the least of them holds"
    halves = told(v1("100,000"), "INFO 11-20 10:11:12 [gpu_worker.py:298] Available KV cache memory: 12.0 GiB\n")
    assert (value(halves, "pool_tokens"), value(halves, "pool_bytes")) == (100_000, 12 << 30)
    for found in (ranks, workers, halves):
        assert not any("the last one" in note for note in found.notes)
