"""A failed start is told in numbers with what to change: the right answer of field reports, and never the engine's own advice unread."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.server.causes import diagnose

LOGS = Path(__file__).parent.parent / "data" / "startup"
POOL = (
    "(EngineCore pid=3207) ERROR 11-29 15:08:35 [core.py:1510] ValueError: To serve at least one request with the model's max seq len ({}), ({} GiB KV cache "
    "is needed, which is larger than the available KV cache memory ({} GiB). Based on the available memory, the estimated maximum model length is {}. Try "
    "increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\n"
    "(APIServer pid=3165) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}\n"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # B01
        (
            "kv_cache_size=2.89GiB\nValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache (23648). Try",
            ["29,000", "23,648", "5,352 short", "3.54 GiB needed, 2.89 GiB there", "--max-model-len to 23648"],
        ),
        # B02
        (
            "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB). Decrease GPU "
            "memory utilization or reduce GPU memory used by other processes.",
            ["0.07 GiB short", "2.28 GiB are held by others", "0.896"],
        ),
        # B04: one rate at both lengths
        (POOL.format(221000, "10.12", "5.59", 122080), ["4.53 GiB short", "122,080", "48.0 KiB a token", "--max-model-len to 122080"]),
        # B07: two points of a line with a large intercept
        (POOL.format(30000, "6.66", "5.44", 13528), ["1.22 GiB short", "79.5 kB a token", "4.44 GiB for each request", "24,505, would be wrong"]),
        (POOL.format(131072, "16.0", "9.97", 81664), ["6.03 GiB short", "81,664", "128.0 KiB a token"]),
        # A tiny pool prints 0.0 twice
        (POOL.format(4096, "0.0", "0.0", 96), ["does not fit", "--max-model-len to 96"]),
        # B08: opposite remedies
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", ["raise --mem-fraction-static", "the opposite"]),
        (
            "RuntimeError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88. The minimum is 0.9113.",
            ["--mem-fraction-static 0.88", "at least 0.9113"],
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.\nRuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            ["no fraction may do"],
        ),
        (
            "[2026-09-09 11:57:18 TP0] server_args=ServerArgs(mem_fraction_static=0.85)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.",
            ["lower --mem-fraction-static"],
        ),
        # B10
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            ["nothing is left", "activation peak", "profile run"],
        ),
        (
            "total_gpu_memory (10.00GiB) x gpu_memory_utilization (0.50) = 5.00GiB\nmodel weights take 4.00GiB; non_torch_memory takes 0.50GiB; PyTorch activation "
            "peak memory takes 1.50GiB; the rest of the memory reserved for KV Cache is 0.00GiB.\nValueError: No available memory for the cache blocks.",
            ["weights 4 + activation peak 1.5 + other 0.5 = 6.00 GiB of 5 GiB", "above 0.60"],
        ),
        # B11
        (
            "AssertionError: Error in memory profiling. Initial free memory 70.1 GiB, current free memory 71.2 GiB. This happens when other processes",
            ["1.10 GiB back", "one server on a card at a time"],
        ),
        (
            "ValueError: Available memory on node 0 (3.1/8.34 GiB) on kv cache allocation is less than requested memory for kv (4.0 GiB). Decrease",
            ["0.90 GiB short", "VLLM_CPU_KVCACHE_SPACE"],
        ),
        # I04: the sentence says 64 < 64, and no layer slides
        (
            "ValueError: This model uses sliding window but `max_window_layers` = 64 is less than `num_hidden_layers` = 64. Please open an issue",
            ["0 of 64, so none slides", '"use_sliding_window": false'],
        ),
        (
            "ValueError: This model uses sliding window but `max_window_layers` = 28 is less than `num_hidden_layers` = 64. Please open an issue",
            ["36 of 64", "changes answers beyond the window"],
        ),
        ("ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)]).", ["block size 16", "multiple of 32"]),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.51 GiB of which 1.20 GiB is free. Process 77 "
            "has 10.00 GiB memory in use. Process 78 has 12.00 GiB memory in use.",
            ["2.00 GiB were asked for", "1.20 GiB of it free", "77: 10.00 GiB, 78: 12.00 GiB", "--gpu-memory-utilization"],
        ),
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
            ["port 8000 is taken"],
        ),
        ("srv  start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", ["port 8080 is taken"]),
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 1024.00 MiB on device 0: cudaMalloc failed: out of memory\n"
            "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
            ["1024.00 MiB", "-c"],
        ),
        ("RuntimeError: Not enough memory to handle `max_total_tokens=8192`", ["8,192 tokens", "--max-total-tokens"]),
        ("RuntimeError: Not enough memory to handle 4096 prefill tokens. You need to decrease", ["4,096", "--max-batch-prefill-tokens below 4096"]),
        ("`max_total_tokens` must be <= `max_batch_total_tokens`", ["smaller than one request"]),
        ("RuntimeError: No enough gpu memory for kv cache.", ["kv cache", "--cache-max-entry-count"]),
        ("ValueError: HiSparse host pool has 12 blocks but max_model_len needs 40; increase host_pool_gib.", ["12 blocks", "40", "host_pool_gib"]),
        ("ValueError: Cannot auto-fit max_model_len: not enough GPU memory available", ["a single token"]),
        (
            "ValueError: User-specified max_model_len (131072) is greater than the derived max_model_len (max_position_embeddings=32768 or model_max_length=None",
            ["131,072", "32,768"],
        ),
        (
            "ValueError: Available memory on node 0 (3.2/8.3 GiB) on startup is less than desired CPU memory utilization (0.9, 7.47 GiB). On the CPU backend, the"
            " `--gpu-memory-utilization` flag controls the fraction of CPU memory reserved (despite its name).",
            ["4.27 GiB short", "0.385 or lower", "VLLM_CPU_KVCACHE_SPACE"],
        ),
        (
            "ValueError: Available memory on node 1 (3.2/8.3 GiB) on kv cache allocation is less than requested memory for kv (-0.31/2.5 GiB). Reduce CPU memory.",
            ["more than the 2.5 GiB", "raise --gpu-memory-utilization"],
        ),
        (
            "ValueError: Available memory on node 1 (0.8/8.3 GiB) on kv cache allocation is less than requested memory for kv (1.2/2.5 GiB). Reduce CPU memory.",
            ["1.2 GiB are left for the KV cache", "below 0.8 GiB"],
        ),
        (
            "ValueError: Externally held weights on device cuda:0 (62.1/79.3 GiB) exceed the desired GPU memory utilization (0.7, 55.5 GiB). Increase GPU memory",
            ["weights of 62.1 GiB", "above 0.784"],
        ),
        (
            "ValueError: Free memory on device cuda:0 (10.0/79.3 GiB) on startup is less than the engine's budget after excluding external process's weights"
            " (0.9, 14.0 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
            ["4.00 GiB short", "by 0.051"],
        ),
        (
            "```\nValueError: To serve at least one request with the model's max seq len\n(131072), (5.07 GiB KV cache is needed, which is larger than the available\n"
            "KV cache memory (4.34 GiB). Based on the available memory, the estimated\nmaximum model length is 112192. Try increasing\n```\nand then I tried 0.95",
            ["131,072", "0.73 GiB short", "112192"],
        ),
        (
            "I get this:\n\n    ValueError: The model's max seq len (29000) is larger than the maximum number of\n    tokens that can be stored in KV cache (23648).\n",
            ["29,000", "23,648"],
        ),
        (
            "ValueError: Free memory on device (3.21/4.0 GiB) on startup\nis less than desired GPU memory utilization (0.85, 3.4 GiB). Decrease\nGPU memory.",
            ["0.19 GiB short", "0.802"],
        ),
    ],
)
def test_the_numbers_and_what_to_change(text: str, words: list[str]) -> None:
    found = diagnose(text)
    assert found is not None
    assert not found.after_start
    for word in words:
        assert word in found.hint, found.hint


def test_what_follows_a_whole_sentence_is_no_part_of_it() -> None:
    whole = "ValueError: To serve at least one request with the model's max seq len (96), (1.0 GiB KV cache is needed, which is larger than the available KV cache"
    for after in (
        "Process SpawnProcess-1:",
        "Traceback (most recent call last):",
        "(APIServer pid=1) Traceback",
        "INFO 12-11 00:06:53 [core.py:1] bye",
    ):
        found = diagnose(f"{whole} memory (0.5 GiB).\n{after}\n")
        assert found is not None
        assert found.cause == f"{whole} memory (0.5 GiB)."


@pytest.mark.parametrize(
    "log", ["vllm-0.32.0-cpu-startup", "sglang-0.5.20-startup", "tgi-3.3.7-startup", "trtllm-serve-startup", "llamacpp-b11434-startup"]
)
def test_a_good_start_has_no_diagnosis(log: str) -> None:
    assert diagnose((LOGS / f"{log}.log").read_text()) is None


def test_a_failure_after_the_start_is_not_a_failed_start() -> None:
    found = diagnose("INFO:     Application startup complete.\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert found is not None
    assert found.after_start


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "max seq len (",
                "), (",
                " GiB KV cache is needed, which is larger than the available KV cache memory (",
                " GiB). ",
                "To serve at least one request with the model's ",
                "estimated maximum model length is ",
                "0",
                "1",
                "9" * 25,
                ".",
                "Free memory on device (",
                "/",
                " GiB) on startup is less than desired GPU memory utilization (",
                ", ",
                " GiB)",
                "No common block size for ",
                " (",
                "MultipleOf(0)",
                ")",
                "CUDA out of memory.",
                " Tried to allocate ",
                "\n",
                "ValueError: ",
            ]
        ),
        max_size=30,
    ).map("".join)
    | st.text(max_size=200)
)
def test_any_text_has_a_diagnosis_or_none(text: str) -> None:
    found = diagnose(text)
    assert found is None or found.cause
