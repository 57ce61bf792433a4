"""The memory lines of start-up logs, worker by worker: figures of the field, and the sum of what an engine prints."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import StartMemory
from pytest_kvcache.server.startlogs.memory import read_memory

GIB = 1 << 30


def gib(worker: StartMemory, part: str) -> float:
    value = worker.parts[part].to_value()
    assert isinstance(value, Reading)
    return round(value.number() / GIB, 2)


def test_v0_states_every_part_of_the_card() -> None:
    # field case A10
    (worker,) = read_memory(
        "INFO 03-30 worker.py:267] the current vLLM instance can use total_gpu_memory (79.32GiB) x gpu_memory_utilization (0.80) = 63.45GiB\n"
        "INFO 03-30 worker.py:267] model weights take 15.53GiB; non_torch_memory takes 0.09GiB; PyTorch activation peak memory takes 1.72GiB; "
        "the rest of the memory reserved for KV Cache is 46.11GiB.\n"
    )
    parts = {name: gib(worker, name) for name in ("total", "budget", "weights", "context", "activation", "pool")}
    assert parts == {"total": 79.32, "budget": 63.45, "weights": 15.53, "context": 0.09, "activation": 1.72, "pool": 46.11}
    assert worker.parts["utilization"].value == 0.8


def test_v1_states_the_graphs_that_the_pool_was_sized_without() -> None:
    # field case B05
    (worker,) = read_memory(
        "INFO 10-30 gpu_worker.py:433] Free memory on device (22.52/23.51 GiB) on startup. Desired GPU memory utilization is (0.8641841836125489, "
        "20.32 GiB). Actual usage is 3.61 GiB for weight, 0.59 GiB for peak activation, 0.02 GiB for non-torch memory, and 2.28 GiB for CUDAGraph "
        "memory. Replace gpu_memory_utilization config with `--kv-cache-memory=14689787392` to fit into requested memory. "
        "Current kv cache memory in use is 17292353024 bytes.\n"
    )
    assert {name: gib(worker, name) for name in ("weights", "activation", "context", "graphs")} == {
        "weights": 3.61, "activation": 0.59, "context": 0.02, "graphs": 2.28,
    }  # fmt: skip
    assert worker.parts["pool"].value == 17292353024.0
    assert gib(worker, "free_at_start") == 22.52


def test_the_newer_sentence_tells_weights_and_context_together() -> None:
    (worker,) = read_memory(
        "(EngineCore_DP0 pid=77) INFO gpu_model_runner.py:5150] Model loading took 14.99 GiB memory and 3.2 seconds\n"
        "(EngineCore_DP0 pid=77) INFO gpu_worker.py:760] Available KV cache memory: 53.1 GiB\n"
        "(EngineCore_DP0 pid=77) INFO gpu_worker.py:1033] Free memory on device (78.6/79.25 GiB) on startup. Desired GPU memory utilization is "
        "(0.9, 71.33 GiB). Actual usage is 15.6 GiB for consumed memory (weights + non-torch), 2.6 GiB for peak activation, and 0.4 GiB for "
        "CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=1` (1.0 GiB) to fit. Current kv cache memory in use is 53.1 GiB.\n"
    )
    assert worker.pid == 77
    assert {name: gib(worker, name) for name in ("weights", "consumed", "context", "activation", "graphs", "pool")} == {
        "weights": 14.99, "consumed": 15.6, "context": 0.61, "activation": 2.6, "graphs": 0.4, "pool": 53.1,
    }  # fmt: skip


def test_the_worker_with_the_least_room_sizes_the_pool_of_all() -> None:
    # field case G02: 8.69 GiB here, 7.46 GiB there, and both hold 7.46
    workers = read_memory(
        "(VllmWorker rank=1 pid=12) INFO worker.py] Available KV cache memory: 7.46 GiB\n"
        "(VllmWorker rank=0 pid=11) INFO worker.py] Available KV cache memory: 8.69 GiB\n"
    )
    assert [(gib(worker, "pool_allowed"), gib(worker, "pool")) for worker in workers] == [(8.69, 7.46), (7.46, 7.46)]
    assert [worker.pid for worker in workers] == [11, 12]


def test_sglang_prints_keys_and_values_apart_for_each_rank() -> None:
    # field case A05: "GB" is GiB there, and K is half of the pool
    workers = read_memory(
        "[2026-09-09 11:57:10 TP0] Load weight begin. avail mem=78.58 GB\n"
        "[2026-09-09 11:57:17 TP0] Load weight end. type=Qwen3MoeForCausalLM, dtype=torch.bfloat16, avail mem=22.10 GB, mem usage=56.48 GB.\n"
        "[2026-09-09 11:57:18 TP0] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB\n"
        "[2026-09-09 11:57:18 TP1] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB\n"
        "[2026-09-09 11:57:30 TP0] Capture cuda graph end. Time elapsed: 11.30 s. mem usage=1.21 GB. avail mem=4.41 GB.\n"
    )
    assert [worker.worker for worker in workers] == ["TP0", "TP1"]
    assert {name: gib(workers[0], name) for name in ("pool", "weights", "graphs", "free_at_start")} == {
        "pool": 16.46, "weights": 56.48, "graphs": 1.21, "free_at_start": 78.58,
    }  # fmt: skip


def test_llamacpp_buffers_add_up_by_device() -> None:
    host, card = read_memory(
        "load_tensors:   CPU_Mapped model buffer size =   102.54 MiB\nload_tensors:        CUDA0 model buffer size =  4096.00 MiB\n"
        "llama_context: constructing llama_context\nllama_context:  CUDA_Host  output buffer size =     0.50 MiB\n"
        "llama_kv_cache:      CUDA0 KV buffer size =   512.00 MiB\nllama_kv_cache:      CUDA0 KV buffer size =   256.00 MiB\n"
        "sched_reserve:      CUDA0 compute buffer size =   300.00 MiB\nsched_reserve:      CUDA0 compute buffer size =   310.00 MiB\n"
        "llama_context: constructing llama_context\nllama_kv_cache:      CUDA0 KV buffer size =   16.00 MiB\n"
    )
    assert (host.worker, card.worker) == ("CPU", "CUDA0")
    assert card.parts["pool"].value == 784 * (1 << 20)
    assert card.parts["workspace"].value == 310 * (1 << 20)
    assert card.parts["weights"].value == 4096 * (1 << 20)
    assert host.parts["workspace"].value == (1 << 19)


def test_tensorrt_states_bytes_of_the_pool() -> None:
    # field case A08
    assert read_memory("[TensorRT-LLM][INFO] Allocate 69524783104 bytes for k/v cache. \n")[0].parts["pool"].value == 69524783104.0


def test_tensorrts_profile_tells_card_peak_and_room() -> None:
    (worker,) = read_memory(
        "[TRT-LLM] [I] Memory used after loading model weights (inside torch) in memory usage profiling: 80.10 GiB\n"
        "[TRT-LLM] [I] Peak memory during memory usage profiling (torch + non-torch): 91.46 GiB, available KV cache memory when calculating max tokens:"
        " 41.11 GiB, fraction is set 0.85, kv size is 35136. device total memory 139.81 GiB\n[MemUsageChange] Allocated 41.11 GiB for max tokens (524288)\n"
    )
    assert {name: gib(worker, name) for name in ("weights", "consumed", "total", "pool_allowed", "pool")} == {
        "weights": 80.1, "consumed": 91.46, "total": 139.81, "pool_allowed": 41.11, "pool": 41.11,
    }  # fmt: skip


def test_a_debug_log_of_vllm_states_its_whole_profile() -> None:
    (worker,) = read_memory(
        "(EngineCore_DP0 pid=25) DEBUG [gpu_worker.py:285] Initial free memory: 23.2 GiB; Requested memory: 0.80 (util), 18.82 GiB\n"
        "(EngineCore_DP0 pid=25) DEBUG [gpu_worker.py:297] Memory profiling takes 14.4 seconds. Total non KV cache memory: 10.22GiB; torch peak memory"
        " increase: 1.40GiB; non-torch forward increase memory: 0.02GiB; weights memory: 8.80GiB.\n"
        "(EngineCore_DP0 pid=25) INFO [gpu_worker.py:298] Available KV cache memory: 8.60 GiB\n"
    )
    assert {name: gib(worker, name) for name in ("free_at_start", "budget", "activation", "context", "weights", "pool")} == {
        "free_at_start": 23.2, "budget": 18.82, "activation": 1.4, "context": 0.02, "weights": 8.8, "pool": 8.6,
    }  # fmt: skip


def test_the_last_start_of_a_log_counts() -> None:
    start = "INFO core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'\nINFO Available KV cache memory: {} GiB\n"
    (worker,) = read_memory(start.format("9.0") + start.format("4.0"))
    assert gib(worker, "pool") == 4.0


def test_a_pool_that_the_user_set_is_told_apart() -> None:
    (worker,) = read_memory("(Worker pid=3228) INFO cpu_worker.py:260] Explicitly set (1.0/8.34) GiB for KV cache on node 0.\n")
    assert gib(worker, "by_hand") == gib(worker, "pool") == 1.0
    (worker,) = read_memory(
        "INFO gpu_worker.py] Initial free memory 78.0 GiB, reserved 5.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes\n"
    )
    assert gib(worker, "by_hand") == 5.0


def test_a_key_in_a_memory_line_is_not_kept() -> None:
    (worker,) = read_memory("INFO --api-key sk-verysecretkey123456 Available KV cache memory: 2.0 GiB\n")
    assert "verysecret" not in worker.parts["pool"].source


@given(st.text(max_size=400))
def test_any_text_is_read_without_an_error(text: str) -> None:
    read_memory(text)
    read_memory("(Worker pid=1) Available KV cache memory: 1.0 GiB " + text)
