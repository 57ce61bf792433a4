"""Start-up logs of every engine and of field reports: pool, length, memory and type as they stand there, ranks never added where they repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.server.startlog import facts, known_facts, read_log, starts_of
from pytest_kvcache.server.startlogs.ledger import memory_notes
from pytest_kvcache.server.startlogs.live import live_values

LOGS = Path(__file__).parent.parent / "data" / "startup"
GIB = 1 << 30


def values(text: str) -> dict[str, Any]:
    return {name: value.value for name, value in facts(text).items() if isinstance(value, Reading)}


@pytest.mark.parametrize(
    ("log", "engine", "expected"),
    [
        ("vllm-0.32.0-cpu-startup", "vllm", {"pool_tokens": 2_097_152, "max_model_len": 4096, "max_concurrency": 512.0, "pool_bytes": 1.0 * GIB}),
        (
            "sglang-0.5.20-startup",
            "sglang",
            {"pool_tokens": 262_144, "max_model_len": 40960, "max_num_seqs": 2048, "pool_bytes": 18.0 * GIB, "kv_dtype": "torch.bfloat16"},
        ),
        (
            "sglang-mla-startup",
            "sglang",
            {"pool_tokens": 499_184, "max_model_len": 163_840, "max_num_seqs": 2048, "pool_bytes": float(round(32.67 * GIB))},
        ),
        ("tgi-3.3.7-startup", "tgi", {"pool_blocks": 133_696, "block_size": 1, "pool_tokens": 133_696}),
        (
            "trtllm-serve-startup",
            "trtllm_serve",
            {
                "block_size": 32,
                "pool_blocks": 8219,
                "pool_tokens": 263_008,
                "pool_bytes": float(round(36.12 * GIB)),
                "max_model_len": 40960,
                "max_num_seqs": 64,
            },
        ),
        (
            "llamacpp-b11434-startup",
            "llamacpp",
            {"pool_tokens": 8192, "max_model_len": 8192, "max_num_seqs": 4, "pool_bytes": 96.0 * (1 << 20), "kv_dtype": "f16"},
        ),
        ("lmdeploy-0.16.0-stats", "lmdeploy", {}),
    ],
)
def test_a_log_of_each_engine(log: str, engine: str, expected: dict[str, Any]) -> None:
    text = (LOGS / f"{log}.log").read_text()
    assert read_log(text).engine == engine
    assert values(text) == expected
    coloured = "".join(f"\x1b[36m{line}\x1b[0m\r\n" for line in text.splitlines())
    assert values(coloured) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A01, A10, A11: V0 on three cards
        (
            "# GPU blocks: 1952, # CPU blocks: 2048\nMaximum concurrency for 20000 tokens per request: 1.56x\nkv_cache_size=3.81GiB",
            {"pool_blocks": 1952, "max_concurrency": 1.56, "max_model_len": 20000, "pool_bytes": float(round(3.81 * GIB))},
        ),
        (
            "total_gpu_memory (79.32GiB) x gpu_memory_utilization (0.80) = 63.45GiB\n"
            "the rest of the memory reserved for KV Cache is 46.11GiB.\n# cuda blocks: 53965, # CPU blocks: 4681",
            {"gpu_memory_utilization": 0.8, "pool_bytes": float(round(46.11 * GIB)), "pool_blocks": 53965},
        ),
        ("# CUDA blocks: 6001, # CPU blocks: 1638", {"pool_blocks": 6001}),
        # A02: the swap pool alone is no pool
        ("# CPU blocks: 7281", {}),
        ("# cpu blocks: 512, # CPU blocks: 0", {"pool_blocks": 512}),
        # The forms of the first account of this trouble
        ("GPU KV cache size: 12.00 GB", {"pool_bytes": 12.0 * GIB}),
        ("# GPU blocks: 800", {"pool_blocks": 800}),
        # A05: SGLang prints keys and values apart, and GB is GiB
        ("KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB", {"pool_tokens": 367_404, "pool_bytes": 2.0 * round(8.23 * GIB)}),
        # A08, A22: TensorRT-LLM's older words, exact to the byte
        (
            "[TensorRT-LLM][INFO] Allocate 69524783104 bytes for k/v cache.\n[TensorRT-LLM][INFO] Using 132608 tokens in paged KV cache.",
            {"pool_bytes": 69_524_783_104.0, "pool_tokens": 132_608},
        ),
        ("[TensorRT-LLM][INFO] Using 10718 tokens in paged KV cache.", {"pool_tokens": 10718}),
        # A13, A16, A17: what the line says, and no product of our own
        (
            "Available KV cache memory: 6.51 GiB\nGPU KV cache size: 42,656 tokens\nMaximum concurrency for 32,768 tokens per request: 1.30x",
            {"pool_bytes": float(round(6.51 * GIB)), "pool_tokens": 42_656, "max_concurrency": 1.30, "max_model_len": 32768},
        ),
        (
            "GPU KV cache size: 37,392 tokens\nMaximum concurrency for 262,144 tokens per request: 1.53x",
            {"pool_tokens": 37_392, "max_concurrency": 1.53, "max_model_len": 262_144},
        ),
        # B05: bytes in use
        (
            "Free memory on device (22.52/23.51 GiB) on startup. Desired GPU memory utilization is (0.8641841836125489, 20.32 GiB). "
            "Current kv cache memory in use is 17292353024 bytes.",
            {"gpu_memory_utilization": 0.8641841836125489, "pool_bytes": 17_292_353_024.0},
        ),
        # C04: the aligned size
        ("Setting attention block size to 544 tokens to ensure that attention page size is >= mamba page size.", {"block_size": 544}),
        # G05: five ranks print five sizes, and all of them hold the least
        (
            "\n".join(f"GPU KV cache size: {n} tokens" for n in ("107,824", "107,456", "107,312", "107,344", "107,392")),
            {"pool_tokens": 107_312},
        ),
        (
            "INFO args: {'model': 'm', 'max_num_seqs': 24, 'gpu_memory_utilization': 0.88} non-default args: {'max_num_seqs': 24}",
            {"max_num_seqs": 24, "gpu_memory_utilization": 0.88},
        ),
        # TensorRT-LLM: one window, two windows, and a length that it shrank
        (
            "[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 65 [window size=2051], tokens per block=32, primary blocks=116617, secondary blocks=0",
            {"pool_blocks": 116_617, "block_size": 32, "pool_tokens": 116_617 * 32},
        ),
        (
            "[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 9 [window size=512], tokens per block=32, primary blocks=100, secondary blocks=0\n"
            "[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 65 [window size=2051], tokens per block=32, primary blocks=300, secondary blocks=0",
            {"pool_blocks": 400, "block_size": 32},
        ),
        ("[TRT-LLM] [W] Adjusted max_seq_len to 8224", {"max_model_len": 8224}),
        # LMDeploy: TurboMind and the PyTorch engine
        (
            "[TM][INFO] [BlockManager] block_size = 0.844 MB\n[TM][INFO] [BlockManager] max_block_count = 1740\n[TM][WARNING] [SegMgr] prefix caching is enabled\n"
            "[TM][WARNING] No enough blocks for `session_len` (131072), `session_len` truncated to 111360.",
            {"pool_blocks": 1740, "pool_bytes": 1740.0 * round(0.844 * (1 << 20)), "prefix_caching": True, "max_model_len": 111_360},
        ),
        (
            "lmdeploy - INFO - build CacheConfig(max_batches=128, block_size=64, num_cpu_blocks=0, num_gpu_blocks=4567, enable_prefix_caching=False)",
            {"max_num_seqs": 128, "block_size": 64, "pool_blocks": 4567, "pool_tokens": 4567 * 64, "prefix_caching": False},
        ),
    ],
)
def test_lines_of_field_reports(text: str, expected: dict[str, Any]) -> None:
    assert values(text) == expected


def test_data_parallel_ranks_of_sglang_are_added_and_tensor_parallel_ranks_are_not() -> None:
    text = "\n".join(
        [
            f"[2026-09-09 11:57:18 DP{dp} TP{tp}] KV Cache is allocated. #tokens: {tokens}, K size: 4.00 GB, V size: 4.00 GB"
            for dp, tokens in ((0, 1000), (1, 1200))
            for tp in (0, 1)
        ]
        + [
            f"[2026-09-09 11:57:31 DP{dp} TP0] max_total_num_tokens={tokens}, chunked_prefill_size=8192, max_prefill_tokens=1, max_running_requests=10, context_len=512"
            for dp, tokens in ((0, 1000), (1, 1200))
        ]
    )
    assert values(text) == {"pool_tokens": 2200, "pool_bytes": 16.0 * GIB, "max_num_seqs": 20, "max_model_len": 512}
    assert any("not added" in note for note in read_log(text).notes)


def test_a_second_start_in_one_log_replaces_the_first() -> None:
    first = "vLLM API server version 0.11.0\nGPU KV cache size: 1,000 tokens\nAvailable KV cache memory: 1.0 GiB\n"
    second = "vLLM API server version 0.11.0\nGPU KV cache size: 9,000 tokens\nAvailable KV cache memory: 9.0 GiB\n"
    assert values(first + second) == {"pool_tokens": 9000, "pool_bytes": 9.0 * GIB}
    padding = "(APIServer pid=1) INFO 11-29 15:08:48 [x.py:1] a request came\n" * 50_000
    long = first + padding + padding + second + padding
    assert len(starts_of(long)) < len(long)
    assert values(long)["pool_tokens"] == 9000


def test_a_line_that_quotes_another_engine_is_no_fact() -> None:
    text = (LOGS / "sglang-0.5.20-startup.log").read_text() + "[2026-09-09 11:58:00 TP0] prompt: 'GPU KV cache size: 5 tokens'\n"
    assert values(text)["pool_tokens"] == 262_144


def test_memory_lines_are_added_up() -> None:
    a10 = (
        "total_gpu_memory (79.32GiB) x gpu_memory_utilization (0.80) = 63.45GiB\nmodel weights take 15.53GiB; non_torch_memory takes 0.09GiB; PyTorch "
        "activation peak memory takes 1.72GiB; the rest of the memory reserved for KV Cache is 46.11GiB."
    )
    assert any("= 63.45 GiB" in note and "adds up" in note for note in memory_notes(a10))
    b05 = (
        "Free memory on device (22.52/23.51 GiB) on startup. Desired GPU memory utilization is (0.8641841836125489, 20.32 GiB). Actual usage is 3.61 GiB for "
        "weight, 0.59 GiB for peak activation, 0.02 GiB for non-torch memory, and 2.28 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with "
        "`--kv-cache-memory=14689787392` ... Current kv cache memory in use is 17292353024 bytes."
    )
    notes = " ".join(memory_notes(b05))
    assert "2.28 GiB over it" in notes
    assert "13.68 GiB" in notes
    assert "do not copy" not in notes
    assert "do not copy" in " ".join(memory_notes(b05.replace("=14689787392", "=-77"))), "F08: a suggestion below zero"
    twice = 14_689_787_392 - round(2.28 * GIB)
    assert "may be counted twice" in " ".join(memory_notes(b05.replace("14689787392", str(twice)))), "F08: the graphs taken off twice"
    small = b05.replace("17292353024", "5368709120")
    assert "do not copy" not in " ".join(memory_notes(small)), "a pool of one's own below the share"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Running: 8 reqs, Waiting: 3 reqs, Preemptions: 2, GPU KV cache usage: 50.0%", {"running": 8, "waiting": 3, "usage": 0.5}),
        ("Running: 0 reqs, Waiting: 0 reqs, CPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%", {"running": 0, "waiting": 0, "usage": 0.0}),
        (
            "Running: 30 reqs, Swapped: 2 reqs, Pending: 4 reqs, GPU KV cache usage: 75.0%, CPU KV cache usage: 5.0%.",
            {"running": 30, "swapped": 2, "waiting": 4, "usage": 0.75},
        ),
        (
            "[2026-09-09 11:58:00 TP0] Decode batch, #running-req: 8, #token: 65536, token usage: 0.25, cuda graph: True, #queue-req: 2",
            {"running": 8, "waiting": 2, "used_tokens": 65536, "usage": 0.25},
        ),
        ("[2026-08-20 10:00:10 DP0] Engine (running/waiting): 8 / 3, KV cache: 87.5%, Prefix", {"running": 8, "waiting": 3, "usage": 0.875}),
        (
            "[2026-01-18 10:00:01 DP1 TP0] Decode batch, #running-req: 8, #full token: 65536, full token usage: 0.25, #swa token: 20000, "
            "swa token usage: 0.50, cuda graph: True, gen throughput (token/s): 412.50, #queue-req: 2",
            {"running": 8, "waiting": 2, "used_tokens": 65536, "usage": 0.5},
        ),
        (
            "[2026-01-18 10:00:01] Decode batch, #running-req: 4, #token: 900, token usage: 0.25, mamba num: 40, mamba usage: 0.80, "
            "gen throughput (token/s): 41.50, #queue-req: 0",
            {"running": 4, "waiting": 0, "used_tokens": 900, "usage": 0.8},
        ),
        (
            "WARNING 05-01 10:00:00 scheduler.py:1057] Sequence group 1 is preempted by PreemptionMode.RECOMPUTE mode because there is not "
            "enough KV cache space. total_num_cumulative_preemption=51",
            {"preemptions": 51},
        ),
        ("nothing of the kind", {}),
    ],
)
def test_the_last_periodic_line(line: str, expected: dict[str, Any]) -> None:
    found, _ = live_values("Running: 1 reqs, Waiting: 1 reqs, GPU KV cache usage: 1.0%\n" + line if expected and "Running:" in line else line)
    assert {name: value.value for name, value in found.items() if isinstance(value, Reading)} == expected


def test_several_engines_in_a_log_have_no_mean_usage() -> None:
    text = "".join(f"Engine 00{n}: Running: {n} reqs, Waiting: 0 reqs, GPU KV cache usage: {n * 40}.0%\n" for n in (0, 1, 2))
    found, notes = live_values(text)
    assert isinstance(found["usage"], Missing)
    running = found["running"]
    assert isinstance(running, Reading)
    assert running.value == 3
    assert any("002: 80.0 %" in note for note in notes)


PIECES = [
    "KV Cache is allocated. #tokens: ", "1,2", "9" * 30, ", K size: ", " GB, V size: ", " GB", "max_total_num_tokens=", ", max_running_requests=", ", context_len=",
    "KV-cache blocks: ", ", size: ", "Number of blocks in KV cache primary pool: ", "Max KV cache blocks per sequence: 1 [window size=", "], tokens per block=",
    ", primary blocks=", "[BlockManager] max_block_count = ", "[BlockManager] block_size = ", " MB", "CacheConfig(", "num_gpu_blocks=", "block_size=", "0", "\n", ".",
    "Running: ", " reqs, Waiting: ", " reqs, ", "GPU KV cache usage: ", "%", "token usage: ", "#running-req: ", ", #queue-req: ", "total_gpu_memory (", "GiB) x gpu_memory_utilization (",
    "Desired GPU memory utilization is (", "# GPU blocks: ", "Maximum concurrency for ", " tokens per request: ", "x", "GiB", "Current kv cache memory in use is ", " bytes",
    "server_args=ServerArgs(", "page_size=", "[2026-09-09 11:57:18 DP0 TP0] ", "[TensorRT-LLM][INFO] ", "[TM][INFO] ",
]  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=200))
def test_broken_lines_do_not_raise(text: str) -> None:
    log = read_log(text)
    assert log.facts.keys() <= set(known_facts())
    for value in log.facts.values():
        assert isinstance(value, Reading)
        assert not isinstance(value.value, float) or value.value >= 0
    memory_notes(text)
    live_values(text)


def test_requests_that_were_put_back_are_counted_where_the_log_tells() -> None:
    full = "[2026-09-09 11:58:40 TP0] KV cache pool is full. Retract requests. #retracted_reqs: {}, #new_token_ratio: 0.4998 -> 1.0000"
    notes = " ".join(read_log("\n".join([full.format(1), full.format(3)])).notes)
    assert "the pool was full 2 times" in notes
    assert "(retracted): 4" in notes
    started = "[2026-09-09 12:58:40] server_args=ServerArgs(model_path='m')"
    assert not any("retracted" in note for note in read_log("\n".join([full.format(1), started])).notes), "of an earlier start"
    line = "INFO 11-29 15:08:48 [loggers.py:335] Engine 000: Avg prompt throughput: 8.4 tokens/s, Avg generation throughput: 3.9 tokens/s, Running: 8 reqs, "
    lines = [
        f"{line}Waiting: 3 reqs, {part}GPU KV cache usage: 50.0%, Prefix cache hit rate: 40.0%"
        for part in ("Preemptions: 2, ", "", "Preemptions: 5, ")
    ]
    _, told = live_values("\n".join(lines))
    assert any("periodic lines: 7;" in note for note in told)
    _, told = live_values(lines[1])
    assert not any("preemptions" in note for note in told)
