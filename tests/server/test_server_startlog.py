"""A start-up log gives the pool and its limits, from recorded and from written lines, and never a figure that it does not state."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.quantities import QUANTITIES, Reading
from pytest_kvcache.server.startlog import facts, known_facts, last_lines, read_facts, read_log_tail

LOGS = Path(__file__).parent.parent / "data" / "startup"
GIB = 1 << 30


def values(text: str) -> dict[str, float | str | bool]:
    found = facts(text)
    assert all(isinstance(value, Reading) for value in found.values())
    return {name: value.value for name, value in found.items() if isinstance(value, Reading)}


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "vllm-0.32.0-startup",
            {"max_model_len": 8192, "pool_tokens": 131_088, "max_concurrency": 16.0, "pool_bytes": 16.0 * GIB},
        ),
        ("vllm-0.6.6-v0-startup", {"pool_blocks": 24188, "max_model_len": 2048, "max_concurrency": 188.97}),
        (
            # The size line comes before the failure: it is a fact of the log, and no proof of a server.
            "vllm-0.32.0-cpu-fail-block-size",
            {
                "max_model_len": 4096,
                "pool_tokens": 1_048_576,
                "max_concurrency": 256.0,
                "pool_bytes": 1.0 * GIB,
                "kv_dtype": "auto",
                "prefix_caching": True,
            },
        ),
        (
            "vllm-0.32.0-cpu-fail-kv-too-small",
            {
                "max_model_len": 4096,
                "num_gpu_blocks_override": 4,
                "pool_blocks": 4,
                "pool_bytes": 4 * 131_072.0,
                "kv_dtype": "auto",
                "prefix_caching": True,
            },
        ),
        (
            "llamacpp-unified-q8_0",
            {"max_num_seqs": 4, "max_model_len": 16384, "pool_tokens": 16384, "pool_bytes": 8.5 * (1 << 20), "kv_dtype": "q8_0"},
        ),
        (
            "llamacpp-split-f16",
            {"max_num_seqs": 4, "max_model_len": 4096, "pool_tokens": 16384, "pool_bytes": 16.0 * (1 << 20), "kv_dtype": "f16"},
        ),
        ("vllm-0.32.0-fail-no-memory", {}),
    ],
)
def test_recorded_logs_give_their_facts(log: str, expected: dict[str, float | str | bool]) -> None:
    found = values((LOGS / f"{log}.log").read_text())
    if log == "vllm-0.32.0-startup":
        found.pop("kv_dtype", None)
    assert found == expected


def test_a_fact_carries_its_unit_and_its_line() -> None:
    found = read_facts(LOGS / "llamacpp-unified-q8_0.log")
    pool = found["pool_tokens"]
    assert isinstance(pool, Reading)
    assert pool.unit == "tokens"
    assert pool.source.startswith("start-up log: ")
    assert "llama_kv_cache: size = 8.50 MiB ( 16384 cells" in pool.source
    assert set(known_facts()) <= set(QUANTITIES)
    assert found.keys() <= set(known_facts())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GPU KV cache size: 17,328 tokens", {"pool_tokens": 17328}),
        ("XPU KV cache size: 17328 tokens", {"pool_tokens": 17328}),
        ("GPU + host KV cache size: 1,048 tokens", {"pool_tokens": 1048}),
        ("Maximum concurrency for 5,120 tokens per request: 3.38x", {"max_concurrency": 3.38, "max_model_len": 5120}),
        ("\x1b[36m(EngineCore pid=7)\x1b[0;0m GPU KV cache \x1b[1msize: 37,392 tokens", {"pool_tokens": 37392}),
        ("Available KV cache memory: 16.0 GiB", {"pool_bytes": 16.0 * GIB}),
        ("Available KV cache memory: 9.97 GiB", {"pool_bytes": float(round(9.97 * GIB))}),
        ("Auto set (2.5/8.34) GiB for KV cache on node 0.", {"pool_bytes": 2.5 * GIB}),
        ("the rest of the memory reserved for KV Cache is 46.11GiB.", {"pool_bytes": float(round(46.11 * GIB))}),
        ("# cuda blocks: 53965, # CPU blocks: 4681", {"pool_blocks": 53965}),
        ("# CUDA blocks: 6,001, # CPU blocks: 1638", {"pool_blocks": 6001}),
        ("total_gpu_memory (79.32GiB) x gpu_memory_utilization (0.80) = 63.45GiB", {"gpu_memory_utilization": 0.8}),
        ("Auto-fit max_model_len: reduced from 131072 to 40960 to fit in available KV cache memory", {"max_model_len": 40960}),
        ("Using max model len 4096", {"max_model_len": 4096}),
        ("Using fp8_e5m2 data type to store kv cache. It reduces the memory", {"kv_dtype": "fp8_e5m2"}),
        ("srv          init: initializing slots, n_slots = 2", {"max_num_seqs": 2}),
        ("slot init: id  0 | task -1 | new slot n_ctx_slot = 4096", {"max_model_len": 4096}),
        # What only looks like it
        ("Running: 8 reqs, Waiting: 3 reqs, GPU KV cache usage: 50.0%, Prefix cache hit rate: 40.0%", {}),
        ("GPU KV cache usage: 15.6%, CPU KV cache usage: 0.0%.", {}),
        ("Free memory on device (22.52/23.51 GiB) on startup.", {}),
        ("GPU KV cache size: many tokens", {}),
        ("KV cache size: 123456789012345678901234567890 tokens", {}),
        ("KV cache size: ٣٤ tokens", {}),
    ],
)
def test_one_line_gives_what_it_states(line: str, expected: dict[str, float | str]) -> None:
    assert values(line) == expected
    assert values(f"(EngineCore pid=3207) INFO 11-29 15:08:35 [x.py:1] {line}\r\nother") == expected


def test_engines_of_a_data_parallel_server_are_added_and_ranks_are_not() -> None:
    text = "\n".join(
        [f"(EngineCore_DP{rank} pid=1) GPU KV cache size: 1,000 tokens, Maximum concurrency for 100 tokens per request: 10.00x" for rank in (0, 1)]
        + [f"(Worker_DP0_TP{rank} pid=2{rank}) INFO x Available KV cache memory: {memory} GiB" for rank, memory in enumerate(("16.0", "15.5"))]
    )
    found = facts(text)
    assert {name: value.value for name, value in found.items() if isinstance(value, Reading)} == {
        "max_model_len": 100,
        "pool_tokens": 2000,
        "max_concurrency": 20.0,
        "pool_bytes": 31.0 * GIB,
    }
    tokens = found["pool_tokens"]
    assert isinstance(tokens, Reading)
    assert "the sum over 2 engines" in tokens.source


def test_a_later_line_replaces_an_earlier_one() -> None:
    text = "Using max model len 131072\nAuto-fit max_model_len: reduced from 131072 to 40960 to fit\n"
    assert values(text)["max_model_len"] == 40960


def test_a_window_cache_adds_to_the_memory_and_not_to_the_tokens() -> None:
    text = (
        "llama_kv_cache: size =  256.00 MiB (  8192 cells,   8 layers,  4/1 seqs), K (f16):  128.00 MiB, V (f16):  128.00 MiB\n"
        "llama_kv_cache: size =   48.00 MiB (  1536 cells,   8 layers,  4/1 seqs), K (f16):   24.00 MiB, V (f16):   24.00 MiB\n"
        "llama_memory_recurrent: size =    2.00 MiB (     4 cells,  16 layers,  4 seqs), R (f32):    1.00 MiB, S (f32):    1.00 MiB\n"
    )
    assert values(text) == {"pool_tokens": 8192, "pool_bytes": 306.0 * (1 << 20), "kv_dtype": "f16"}


def test_keys_and_values_of_two_types_are_both_named() -> None:
    text = "llama_kv_cache: size =   96.00 MiB (  8192 cells,  24 layers,  4/4 seqs), K (q8_0):   48.00 MiB, V (q4_0):   48.00 MiB"
    assert values(text) == {"pool_tokens": 32768, "pool_bytes": 96.0 * (1 << 20), "kv_dtype": "K q8_0, V q4_0"}


def test_the_pool_of_a_draft_model_is_not_taken_for_the_pool() -> None:
    text = (
        "llama_context: n_seq_max     = 4\nllama_context: n_ctx_seq     = 8192\n"
        "llama_kv_cache: size =   96.00 MiB (  8192 cells,  24 layers,  4/1 seqs), K (f16):   48.00 MiB, V (f16):   48.00 MiB\n"
        "llama_context: n_seq_max     = 1\nllama_context: n_ctx_seq     = 512\n"
        "llama_kv_cache: size =    4.00 MiB (   512 cells,   8 layers,  1/1 seqs), K (q4_0):    2.00 MiB, V (q4_0):    2.00 MiB\n"
        "srv    load_model: initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = 'true'\n"
    )
    assert values(text) == {"max_num_seqs": 4, "max_model_len": 8192, "pool_tokens": 8192, "pool_bytes": 96.0 * (1 << 20), "kv_dtype": "f16"}


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("utf-8", "replace")))
def test_any_text_gives_facts_without_raising(text: str) -> None:
    assert facts(text).keys() <= set(known_facts())


PIECES = ["KV cache size: ", "1,2", "9" * 30, " tokens", "Maximum concurrency for ", " tokens per request: ", "x", "# GPU blocks: ", ", # CPU blocks: ",
          "llama_kv_cache: size = ", " MiB ( ", " cells, ", " layers, ", "4/4 seqs)", "n_ctx_seq = ", "\n", "\x1b[", "Available KV cache memory: ", " GiB", "."]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_broken_lines_of_engines_do_not_raise(text: str) -> None:
    for value in facts(text).values():
        assert isinstance(value, Reading)
        assert not isinstance(value.value, float) or value.value >= 0


def test_the_tail_of_a_log_starts_at_a_line_and_a_missing_log_is_empty(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    assert read_log_tail(log) == ""
    assert read_facts(log) == {}
    assert read_log_tail(tmp_path) == ""
    log.write_bytes(b"first line\nsecond \xff line\nthird\n")
    assert read_log_tail(log) == "first line\nsecond \ufffd line\nthird\n"
    assert read_log_tail(log, 16) == "third\n"
    assert read_log_tail(log, 3) == "rd\n"


def test_the_last_lines_are_few_short_and_harmless() -> None:
    text = "".join(f"line {number}\n\n" for number in range(100)) + "\x1b[31m\x07red\x1b[0m --api-key geheim\n" + "x" * 5000 + "\n"
    lines = last_lines(text, 3)
    assert lines[0] == "line 99"
    assert lines[1] == "red --api-key ***"
    assert lines[2] == "x" * 239 + "…"
    assert last_lines("") == []
