"""A failed start of any engine, in the words of its versions, gives its cause with the numbers and what to change; a good one gives none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.observe.inspecting import inspect
from pytest_kvcache.observe.pasted import sort_text
from pytest_kvcache.server.causes import diagnose
from pytest_kvcache.server.startlog import read_log

FAILED = Path(__file__).parent.parent / "data" / "failed"
RIGHT = {
    "vllm-warmup": ("vllm", ["256 sequences", "412.75 MiB of 14.57 GiB", "--max-num-seqs below 256"]),
    "vllm-old-oom": ("vllm", ["20.00 MiB were asked for", "14.76 GiB, 11.75 MiB"]),
    "vllm-capacty": ("vllm", ["224.00 MiB", "14.75 GiB, 71.06 MiB"]),
    "vllm-heads": ("vllm", ["32 attention heads", "1, 2, 4, 8, 16, 32"]),
    "vllm-bf16": ("vllm", ["8.0", "7.5", "--dtype half"]),
    "vllm-blocksize-arg": ("vllm", ["block size 24", "1, 8, 16, 32, 64, 128"]),
    "vllm-batched": ("vllm", ["2,048", "32,768", "--max-num-batched-tokens to 32768"]),
    "vllm-nccl": ("vllm", ["/dev/shm", "9.2 MiB", "--ipc=host"]),
    "vllm-killed": ("vllm", ["signal 9", "VLLM_CPU_KVCACHE_SPACE"]),
    "vllm-port": ("vllm", ["the port is taken"]),
    "vllm-masterport": ("", ["port 29500", "MASTER_PORT"]),
    "vllm-profbytes": ("vllm", ["7.11 GiB back"]),
    "vllm-gated": ("", ["HF_TOKEN"]),
    "vllm-noparen": ("vllm", ["131,072 needs 3.79 GiB", "3.12 GiB: 0.67 GiB short", "--max-model-len to 7740"]),
    "sgl-fraction": ("sglang", ["0.12", "15.27 GiB", "above 0.200 = 15.27 / (61.02 + 15.27)"]),
    "sgl-ninja": ("sglang", ["no lack of memory", "nvcc"]),
    "llama-vulkan": ("llamacpp", ["1556.56 MiB", "-c"]),
    "llama-cpu": ("llamacpp", ["36000.00 MiB", "-ctk q8_0"]),
    "vllm-negative": ("vllm", ["weights 5.43 + activation peak 1.42 + other -0.51", "no share of this card is enough"]),
    "vllm-v1-models": ("vllm", ["4.73 GiB short", "about 92,323"]),
    "sgl-unbal": ("sglang", ["16.28 GiB", "46.81 GiB", "30.53 GiB"]),
    "sgl-weights": ("sglang", ["0.88", "125.65 GiB", "at least 0.9113"]),
    "sgl-graph": ("sglang", ["2.00 GiB were asked for", "lower --mem-fraction-static"]),
    "sgl-ctx": ("sglang", ["131,072", "--context-length to 32768"]),
    "sgl-killed": ("sglang", ["signal 9", "dmesg"]),
    "trt-exec": ("trtllm_serve", ["no room for: Model", "12.78 of 15.44 GiB", "reduce max_num_tokens"]),
    "trt-tokens": ("trtllm_serve", ["640 tokens", "1,024 (1 x 64 x 16)"]),
    "trt-oom": ("trtllm_serve", ["free_gpu_memory_fraction"]),
    "tgi-signal": ("tgi", ["signal 9"]),
    "tgi-args": ("tgi", ["4096", "8191 or more"]),
    "llama-weights": ("llamacpp", ["9605.34 MiB", "CUDA0", "766 MiB short", "-ngl"]),
    "llama-pp": ("llamacpp", ["260.02 MiB", "-ub"]),
    "llama-arch": ("llamacpp", ["newer build"]),
    "lmd": ("lmdeploy", ["--cache-max-entry-count"]),
    "driver": ("", ["driver is older"]),
    "nogpu": ("", ["no card is visible"]),
}


def test_every_recorded_failure_has_its_right_answer() -> None:
    assert {path.stem for path in FAILED.glob("*.log")} == set(RIGHT)


@pytest.mark.parametrize("name", RIGHT)
def test_the_cause_the_numbers_and_what_to_change(name: str) -> None:
    text = (FAILED / f"{name}.log").read_text()
    engine, words = RIGHT[name]
    found = diagnose(text)
    assert found is not None
    assert not found.after_start
    assert found.means
    assert found.change
    assert read_log(text).engine == engine
    for word in words:
        assert word in found.hint, found.hint


@pytest.mark.parametrize("name", RIGHT)
def test_inspect_tells_it_even_where_the_engine_is_not_known(name: str) -> None:
    told = inspect([sort_text("server.log", (FAILED / f"{name}.log").read_bytes())])
    said = " ".join([*told.notes, told.why])
    assert told.judged is bool(RIGHT[name][0])
    assert "what to change: " in said
    assert ("the start failed: " in said) is told.judged


def test_the_cause_of_the_worker_wins_over_those_who_ended_it() -> None:
    text = (FAILED / "vllm-heads.log").read_text() + (FAILED / "vllm-killed.log").read_text() + (FAILED / "sgl-killed.log").read_text()
    found = diagnose(text)
    assert found is not None
    assert "attention heads" in found.cause


@pytest.mark.parametrize(
    "line",
    [
        "[2026-09-09 11:57:18 TP0] Warning: User-specified context_length (131072) is greater than the derived context_length (32768).",
        "WARNING 11-29 15:08:35 [model.py:1] User-specified max_model_len (131072) is greater than the derived max_model_len (max_position_embeddings=32768).",
        "[2026-09-09 11:57:18 TP0] WARNING: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
        "INFO 11-29 15:08:35 [x.py:1] NCCL error handling is asynchronous",
    ],
)
def test_what_an_engine_only_warns_of_is_no_failure(line: str) -> None:
    assert diagnose(line + "\n") is None


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "maxTokensInPagedKvCache (",
                ") must be large enough",
                "beam_width (",
                "tokensPerBlock (",
                "exit code: -9",
                "NCCL error",
                "/dev/shm/nccl-a (size ",
                "9" * 25,
                "1",
                ")",
                "\n",
                "out of memory",
                "CUDA error ",
                "The memory capacity is unbalanced",
                " pre_model_load_memory=",
                ", local_gpu_memory=",
                "The following component could not be created: ",
                "(",
                "[",
                "projected to use ",
                " MiB of device memory vs. ",
                " MiB of free device memory",
                "unable to allocate X buffer",
                "total capacty of ",
                " GiB of which ",
                " MiB is free",
                "warming up sampler with ",
                " dummy requests",
                "ValueError: ",
            ]
        ),
        max_size=40,
    ).map("".join)
)
def test_any_broken_sentence_has_a_diagnosis_or_none(text: str) -> None:
    found = diagnose(text)
    assert found is None or found.cause
