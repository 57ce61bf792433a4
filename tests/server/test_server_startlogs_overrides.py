"""A pool that was set by hand in blocks: its bytes are blocks x bytes per block, and never the memory that was found for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import StartMemory
from pytest_kvcache.server.startlog import facts
from pytest_kvcache.server.startlogs.memory import read_memory
from pytest_kvcache.server.startlogs.overrides import Room, pair, settle

GIB = 1 << 30
LOGS = Path(__file__).parent.parent / "data" / "startup"


def part(worker: StartMemory, name: str) -> float:
    value = worker.parts[name].to_value()
    assert isinstance(value, Reading), value
    return value.number()


def overridden(found: int, blocks: int) -> str:
    return f"(EngineCore pid=3207) INFO [kv_cache_utils.py:2619] Overriding num_gpu_blocks={found} with num_gpu_blocks_override={blocks}\n"


def available(name: str, gib: float) -> str:
    return f"({name} pid=1{name[-1]}) INFO [gpu_worker.py:760] Available KV cache memory: {gib} GiB\n"


def test_a_recorded_start_on_cpus_has_four_blocks_and_not_a_gibibyte() -> None:
    text = (LOGS / "vllm-0.32.0-cpu-fail-kv-too-small.log").read_text()
    (worker,) = read_memory(text)
    assert part(worker, "pool") == 4 * 131_072
    assert part(worker, "pool_allowed") == GIB
    assert (part(worker, "blocks"), part(worker, "blocks_allowed")) == (4, 8192)
    told = facts(text)["pool_bytes"]
    assert isinstance(told, Reading)
    assert told.value == 4 * 131_072
    assert "4 blocks of 131,072 bytes" in told.source


def test_a_pool_above_the_memory_that_was_found_is_as_large_as_its_blocks() -> None:
    # 8,192 blocks of 2 MiB fit into 16 GiB, and 10,000 were asked for
    (worker,) = read_memory(available("Worker0", 16.0) + overridden(8192, 10_000))
    assert part(worker, "pool") == 10_000 * (2 << 20)


def test_each_of_two_workers_holds_the_blocks_that_were_set() -> None:
    text = available("Worker_TP0", 8.69) + available("Worker_TP1", 7.46) + overridden(8898, 512) + overridden(7639, 512)
    first, second = read_memory(text)
    assert part(first, "pool") == part(second, "pool") == 512 * (1 << 20)
    told = facts(text)["pool_bytes"]
    assert isinstance(told, Reading)
    assert told.value == 2 * 512 * (1 << 20), "the memory of the pool over all cards"


def test_the_figure_in_use_is_what_a_worker_found_and_not_what_it_takes() -> None:
    text = "".join(
        f"(Worker_TP{rank} pid={rank}) INFO Free memory on device (22.52/23.51 GiB) on startup. Desired GPU memory utilization is (0.9, 21.16 GiB). "
        f"Current kv cache memory in use is {size} bytes.\n"
        for rank, size in enumerate((9_330_000_000, 8_010_000_000))
    )
    assert [part(worker, "pool") for worker in read_memory(text)] == [8_010_000_000] * 2, "all hold as many blocks as the one with the least"
    (alone,) = read_memory(text.splitlines(keepends=True)[0] + overridden(8897, 9))
    assert part(alone, "pool") == pytest.approx(9 * 9_330_000_000 / 8897, rel=0.01)


def test_engines_of_a_data_parallel_server_do_not_bound_each_other() -> None:
    text = "".join(
        f"(EngineCore_DP{n} pid={n}) INFO [gpu_worker.py:760] Available KV cache memory: {gib} GiB\n" for n, gib in enumerate((16.0, 12.0))
    )
    assert [part(worker, "pool") for worker in read_memory(text)] == [16 * GIB, 12 * GIB]


def test_memory_that_was_asked_for_in_bytes_makes_the_block_exact() -> None:
    args = "(APIServer pid=1) INFO [api_utils.py:286] non-default args: {'model': 'm', 'kv_cache_memory_bytes': 300000000, 'num_gpu_blocks_override': 9}\n"
    log = args + "(Worker pid=2) INFO [cpu_worker.py:260] Explicitly set (0.28/8.34) GiB for KV cache on node 0.\n" + overridden(18310, 9)
    (worker,) = read_memory(log)
    assert part(worker, "pool") == 9 * 16_384
    source = worker.parts["pool"].source
    assert "9 blocks of 16,384 bytes, of which" in source, "nothing is left to rounding"


def test_v0_prints_one_line_for_all_workers() -> None:
    log = (
        "model weights take 15.53GiB; non_torch_memory takes 0.09GiB; PyTorch activation peak memory takes 1.72GiB; "
        "the rest of the memory reserved for KV Cache is 4.00GiB.\n"
        "INFO 05-13 23:28:53 [llm_engine.py:438] Overriding num_gpu_blocks=2048 with num_gpu_blocks_override=512\n# GPU blocks: 512, # CPU blocks: 0\n"
    )
    (worker,) = read_memory(log)
    assert part(worker, "pool") == GIB


def test_a_second_start_without_an_override_forgets_it() -> None:
    start = "(EngineCore pid=9) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', tensor_parallel_size=2\n"
    (worker,) = read_memory(start + available("Worker0", 16.0) + overridden(8192, 9) + start + available("Worker0", 16.0))
    assert part(worker, "pool") == 16 * GIB
    assert "blocks" not in worker.parts
    assert part(worker, "tensor_parallel") == 2


def test_graphs_that_were_planned_are_taken_out_of_the_peak_that_holds_them() -> None:
    # since 0.21 the activation peak that is printed holds the room that was kept for graphs
    text = (
        "(Worker pid=1) INFO [gpu_worker.py:972] CUDA graph pool memory: 2.3 GiB (actual), 0.6 GiB (estimated), difference: 1.7 GiB (73.9%).\n"
        "(Worker pid=1) INFO [gpu_worker.py:1034] Free memory on device (79.0/79.2 GiB) on startup. Desired GPU memory utilization is (0.9, 71.28 GiB). "
        "Actual usage is 15.1 GiB for consumed memory (weights + non-torch), 2.0 GiB for peak activation, and 2.3 GiB for CUDAGraph memory. "
        "Current kv cache memory in use is 54.18 GiB.\n"
    )
    (worker,) = read_memory(text)
    assert part(worker, "activation") == pytest.approx(1.4 * GIB)
    assert part(worker, "graphs_planned") == pytest.approx(0.6 * GIB)
    (without,) = read_memory("WARNING CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0).\n" + text)
    assert part(without, "activation") == pytest.approx(2.0 * GIB), "nothing was kept for them, so the peak does not hold them"
    assert "graphs_planned" not in without.parts


@given(st.integers(1, 1 << 22), st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_the_bytes_of_a_block_lie_where_the_log_says(block_kib: int, found: int, blocks: int) -> None:
    block = block_kib * 1024
    memory = found * block
    for room in (Room(float(memory), exact=True), Room(round(memory / GIB, 2) * GIB)):
        pool = settle(room, found, blocks)
        if pool is None:
            assert room.span[1] <= 0
            continue
        assert pool.low <= block <= pool.high * (1 + 1e-9)
        assert pool.low <= pool.block_bytes <= pool.high * (1 + 1e-9)
        assert pool.size == blocks * pool.block_bytes


def test_lines_that_do_not_fit_the_workers_give_the_tightest() -> None:
    rooms = [Room(2.0 * GIB), Room(1.0 * GIB)]
    assert [pool.size for pool in pair(rooms, [(1024, 8)]) if pool is not None] == [8 << 20, 8 << 20]
    assert pair(rooms, []) == [None, None]
    assert settle(Room(0.0, exact=True), 5, 5) is None
