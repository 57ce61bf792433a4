"""Field cases: what people pasted of their engines, and the right answer about it. Sources are the public threads that each test names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_models import (
    GPT_OSS_120B,
    LLAMA_2_7B,
    LLAMA_2_70B,
    LLAMA_31_8B,
    QWEN3_14B,
    QWEN3_30B,
    QWEN3_32B,
    QWEN3_235B,
    QWEN25_7B,
    STARCODER2_3B,
    llama,
)

from pytest_kvcache import cli

GIB = 1 << 30
CONFIGS = Path(__file__).parents[1] / "data" / "capacity" / "configs"
Check = Callable[..., dict[str, Any]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    def run(config: dict[str, Any] | str, log: str, *words: str, code: int = 0) -> dict[str, Any]:
        path = CONFIGS / str(config) if isinstance(config, str) else tmp_path / "config.json"
        if not isinstance(config, str):
            path.write_text(json.dumps(config))
        (tmp_path / "server.log").write_text(log)
        got = cli.main(["plan", str(path), "--check", str(tmp_path / "server.log"), "--json", *words])
        out = capsys.readouterr()
        body = json.loads(out.out) if out.out else {}
        assert got == code, json.dumps({name: body.get(name) for name in ("verdict", "verdict_text", "pool_blocks", "agreement")}) + out.err
        found: dict[str, Any] = json.loads(out.out)
        return found

    return run


def v1(memory: str, tokens: str, length: str = "", concurrency: str = "", worker: str = "") -> str:
    """Return the capacity lines of vLLM V1, as its logs have them."""
    lines = [f"INFO 08-06 01:01:01 [gpu_worker.py:276] Available KV cache memory: {memory} GiB"] if memory else []
    lines.append(f"INFO 08-06 01:01:01 [kv_cache_utils.py:1086] GPU KV cache size: {tokens} tokens")
    if length:
        lines.append(f"INFO 08-06 01:01:01 [kv_cache_utils.py:1090] Maximum concurrency for {length} tokens per request: {concurrency}x")
    return "\n".join([worker + line for line in lines]) + "\n"


def said(found: dict[str, Any]) -> str:
    return " | ".join(found["agreement"]["explanations"])


def test_a_pool_that_shrank_with_a_longer_max_length_is_the_profile_run(check: Check) -> None:
    # vllm issue 10517
    log = (
        "INFO 11-21 01:01:01 config.py:1 Initializing an LLM engine (v0.6.3) with config: model='llama', max_seq_len=20000, enable_prefix_caching=False\n"
        "INFO 11-21 01:01:01 gpu_executor.py:122] # GPU blocks: 1952, # CPU blocks: 2048\n"
        "INFO 11-21 01:01:01 gpu_executor.py:126] Maximum concurrency for 20000 tokens per request: 1.56x\n"
    )
    found = check(LLAMA_31_8B, log, "--block-size", "16")
    assert found["agreement"]["verdict"] == "equal"
    assert found["pool_bytes"] in (1952 * 2**21, None)
    assert found["max_concurrency"] == pytest.approx(1.5616)


def test_a_start_whose_length_is_larger_than_the_pool_is_refused_here_too(check: Check) -> None:
    # vllm issues 10517, 13061: 1478 blocks hold 23,648 tokens
    log = (
        "ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache (23648)."
        " Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\n"
    )
    found = check(LLAMA_31_8B, log, "--block-size", "16", "--kv-memory", str(1478 * 2**21), code=1)
    assert not found["starts"]
    assert found["pool_blocks"] * 16 == 23648
    assert found["bytes_per_sequence"] / GIB == pytest.approx(3.54, abs=0.005)
    assert "blocks x block size" in said(found)


def test_a_sliding_request_is_charged_for_tokens_in_flight_and_a_block_more(check: Check) -> None:
    # vllm pull 19029, before and after
    after = check(STARCODER2_3B, v1("62.90", "2,198,512", "16,384", "178.68"), "--max-num-batched-tokens", "8192", "--set", "async_scheduling=false")
    assert after["growth_bytes_per_token"] == 0
    assert after["blocks_per_request"] == 769
    assert after["agreement"]["verdict"] in ("equal", "explained")
    before = check(STARCODER2_3B, v1("62.90", "2,198,512", "16,384", "134.19"), "--max-num-batched-tokens", "8192")
    assert before["agreement"]["verdict"] == "explained"
    assert "charges them as full ones" in said(before)


def test_two_engines_with_equal_looking_gigabytes_are_told_apart_by_their_rate(check: Check) -> None:
    # vllm issue 21348: SGLang prints K and V apart, and calls GiB "GB"
    log = (
        "[2025-07-22 01:01:01 TP0] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB\n"
        "[2025-07-22 01:01:01 TP0] max_total_num_tokens=367404, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048,"
        " context_len=40960\n"
    )
    found = check(QWEN3_235B, log, "--tp", "4", "--dtype", "bfloat16")
    assert found["engine"] == "sglang"
    assert found["growth_bytes_per_token"] == 48128
    assert found["agreement"]["verdict"] == "equal"
    # vLLM's 8.11 GiB would be 180,935 tokens: the line is probably another rank's
    vllm = check(QWEN3_235B, v1("8.11", "178,880"), "--tp", "4", "--dtype", "bfloat16", "--block-size", "16", "--max-model-len", "40960", code=1)
    assert vllm["agreement"]["verdict"] == "different"
    (row,) = vllm["agreement"]["rows"]
    assert row["ours"][0] <= 180_935 <= row["ours"][1] + 16
    assert "another had 8.02 GiB" in said(vllm)


def test_g02_one_ranks_memory_beside_the_tokens_of_the_least(check: Check) -> None:
    # vllm issue 13061: 8.69 GiB on this card is 94,917 tokens, and the engine allows 81,536
    refused = (
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (81536). "
        "Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\n"
    )
    words = ("--tp", "2", "--block-size", "16", "--max-model-len", "131072")
    found = check(llama(48, 40, 8), "INFO Available KV cache memory: 8.69 GiB\n" + refused, *words, code=1)
    assert found["growth_bytes_per_token"] == 98_304
    assert "another had 7.46 GiB: the least decides for all (see all ranks)" in said(found)
    (row,) = found["agreement"]["rows"]
    assert row["ours"][0] <= 94_917 <= row["ours"][1] + 16
    alone = check(llama(48, 40, 4), "INFO Available KV cache memory: 8.69 GiB\n" + refused, *words[2:], code=1)
    assert "another had" not in said(alone), "one GPU has no other rank"


def test_a_label_is_no_growth_rate(check: Check) -> None:
    # hf-mem issue 60, vllm pull 40694: both labels of one memory
    common = ("--max-num-batched-tokens", "8192", "--set", "async_scheduling=false")
    found = check(GPT_OSS_120B, v1("5.38", "78,384", "131,072", "1.12"), *common)
    assert found["growth_bytes_per_token"] == 36864
    assert found["blocks_per_request"] == 8713
    assert "older label" in said(found)
    newer = check(GPT_OSS_120B, v1("5.38", "147,393", "131,072", "1.12"), *common)
    assert newer["agreement"]["verdict"] == "equal"
    # without being told the tokens in flight, they are found
    alone = check(GPT_OSS_120B, v1("5.38", "78,384", "131,072", "1.12"))
    assert "8,192 tokens in flight" in said(alone)


def test_exact_bytes_are_held_exactly(check: Check) -> None:
    # TensorRT-LLM issue 1400
    log = (
        "[TensorRT-LLM][INFO] TRTGptModel maxSequenceLen: 4096\n"
        "[TensorRT-LLM][INFO] Allocate 69524783104 bytes for k/v cache.\n[TensorRT-LLM][INFO] Using 132608 tokens in paged KV cache.\n"
    )
    found = check(LLAMA_2_7B, log)
    assert found["engine"] == "paged"
    assert found["agreement"]["verdict"] == "equal"
    wrong = check({**LLAMA_2_7B, "num_key_value_heads": 16}, log, code=1)
    assert wrong["agreement"]["verdict"] == "different"


def test_a_whole_card_is_added_up_from_its_log(check: Check) -> None:
    # vllm issue 15783
    log = (
        "INFO 03-30 01:01:01 config.py:1 Initializing an LLM engine (v0.8.2) with config: model='qwen', max_seq_len=10240, enable_prefix_caching=False\n"
        "INFO 03-30 01:01:01 worker.py:267] the current vLLM instance can use total_gpu_memory (79.32GiB) x gpu_memory_utilization (0.80) = 63.45GiB\n"
        "INFO 03-30 01:01:01 worker.py:267] model weights take 15.53GiB; non_torch_memory takes 0.09GiB; PyTorch activation peak memory takes 1.72GiB;"
        " the rest of the memory reserved for KV Cache is 46.11GiB.\n"
        "INFO 03-30 01:01:01 executor_base.py:111] # cuda blocks: 53965, # CPU blocks: 4681\n"
        "INFO 03-30 01:01:01 executor_base.py:116] Maximum concurrency for 10240 tokens per request: 84.32x\n"
    )
    card = ("--gpu-memory", "79.32GiB", "--utilization", "0.8", "--weights", "15.53GiB", "--block-size", "16")
    found = check(QWEN25_7B, log, *card, "--activation", "1.72GiB", "--other", "0.09GiB", "--graphs", "0")
    assert found["growth_bytes_per_token"] == 57344
    assert "it adds up" in said(found)
    assert found["pool_blocks"] == pytest.approx(53965, abs=8)
    bare = check(QWEN25_7B, log, *card)
    assert "the profile run names activation 1.72 GiB, other 0.09 GiB" in said(bare)
    assert "no name" not in said(bare)


def test_a_pool_that_was_sized_before_the_graphs_is_over_its_budget(check: Check) -> None:
    # unsloth issue 3542: 16.10 GiB in use, 2.28 GiB of graphs on top
    log = (
        "INFO 10-31 01:01:01 [gpu_worker.py:1] Free memory on device (22.52/23.51 GiB) on startup. Desired GPU memory utilization is (0.8641841836125489,"
        " 20.32 GiB). Actual usage is 3.61 GiB for weight, 0.59 GiB for peak activation, 0.02 GiB for non-torch memory, and 2.28 GiB for CUDAGraph memory."
        " Replace gpu_memory_utilization config with `--kv-cache-memory=14689787392` to fit into requested memory, or `--kv-cache-memory=17052182528` to"
        " fully utilize gpu memory. Current kv cache memory in use is 17292353024 bytes.\n"
    )
    card = ("--gpu-memory", "23.51GiB", "--utilization", "0.8641841836125489", "--weights", "3.61GiB", "--block-size", "16")
    found = check(LLAMA_31_8B, log, *card, "--max-model-len", "8192", code=3)
    assert "sized before the graphs took 2.28 GiB" in said(found)
    assert "the profile run names activation 0.59 GiB, other 0.02 GiB" in said(found)
    assert "no name" not in said(found)
    with_graphs = check(
        LLAMA_31_8B, log, *card, "--max-model-len", "8192", "--activation", "0.59GiB", "--other", "0.02GiB", "--graphs", "2.28GiB", code=3
    )
    assert with_graphs["ledger"]["kv_bytes"] / GIB == pytest.approx(13.82, abs=0.01)


def test_a_build_that_charges_cross_attention_like_self_attention_is_named(check: Check) -> None:
    # vllm pull 12126
    log = (
        "INFO 01-16 01:01:01 config.py:1 Initializing an LLM engine (v0.6.6) with config: model='mllama', max_seq_len=4096, enable_prefix_caching=False\n"
        "INFO 01-16 01:01:01 worker.py:267] model weights take 19.90GiB; non_torch_memory takes 0.10GiB; PyTorch activation peak memory takes 1.00GiB;"
        " the rest of the memory reserved for KV Cache is 14.65GiB.\n"
        "INFO 01-16 01:01:01 gpu_executor.py:76] # CUDA blocks: 6001, # CPU blocks: 1638\n"
    )
    # vLLM 0.32 serves the model no more, so a plan for 0.32 fails
    found = check("llama-3.2-11b-vision.json", log, "--block-size", "16", code=1)
    assert "0.10.2" in found["reason"]
    assert found["growth_bytes_per_token"] == 131072
    assert found["agreement"]["verdict"] == "explained"
    assert "charges its 8 layers like self-attention" in said(found)


def test_one_request_and_a_remainder_is_not_about_two(check: Check) -> None:
    # LMCache issue 1739
    found = check(QWEN3_14B, v1("6.51", "42,656", "32,768", "1.30"), "--block-size", "16", "--length", "32600", "--concurrency", "2", code=1)
    assert found["agreement"]["verdict"] == "equal"
    assert found["verdict"] == "FAIL"
    assert found["requests"] == 1


def test_a_token_figure_below_the_max_length_does_not_block_a_working_config(check: Check) -> None:
    # vllm issue 39734: 37,392 tokens and yet 1.53 requests of 262,144
    found = check("gemma-4-31b.json", v1("", "37,392", "262,144", "1.53"), "--block-size", "16")
    assert found["starts"]
    assert found["verdict"] == "PASS"
    assert found["pool_blocks"] == pytest.approx(14022, abs=6)  # 2,337 x 6 groups
    # 8,192 + 5 x 193 blocks a request: 14,022 / 9,157 = 1.53
    assert "2,048 tokens in flight" in said(found)
    assert "older label" in said(found)


def test_a_block_count_that_the_card_cannot_hold_is_flagged(check: Check) -> None:
    # TensorRT-LLM issue 224: 8348 blocks of 8 MiB on an A10
    log = "INFO 11-01 01:01:01 llm_engine.py:205] # GPU blocks: 8348, # CPU blocks: 512\n"
    found = check(LLAMA_2_7B, log, "--gpu-memory", "22.05GiB", "--utilization", "0.9", "--weights", "13GiB", "--block-size", "16", code=1)
    assert "impossible" in said(found)
    assert "65." in said(found)


def test_fp8_is_counted_and_the_lost_memory_is_named(check: Check) -> None:
    # vllm issue 25350
    first = check({**QWEN3_30B, "torch_dtype": "bfloat16"}, v1("10.55", "230,528", "100,000", "2.31"), "--kv-dtype", "fp8", "--block-size", "16")
    assert first["growth_bytes_per_token"] == 49152
    assert first["agreement"]["verdict"] in ("equal", "explained")
    log = (
        "ValueError: To serve at least one request with the models's max seq len (221000), (10.12 GiB KV cache is needed, which is larger than the available"
        " KV cache memory (5.59 GiB). Based on the available memory, the estimated maximum model length is 122080. Try increasing"
        " `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\n"
    )
    second = check(QWEN3_30B, log, "--kv-dtype", "fp8", "--block-size", "16", code=1)
    assert not second["starts"]
    assert second["agreement"]["verdict"] == "equal"
    assert {row["name"] for row in second["agreement"]["rows"]} == {"memory for one request of max length", "longest length that starts"}


def test_a_checkpoint_that_asks_for_fp8_is_found_out(check: Check) -> None:
    # half of the rate that a bfloat16 plan has, with nothing in the configuration that says so
    found = check({**LLAMA_31_8B, "torch_dtype": "bfloat16"}, v1("16.00", "262,144", "8,192", "32.00"), "--block-size", "16")
    assert found["agreement"]["verdict"] == "explained"
    assert "keeps its cache as fp8" in said(found)


def test_a_profiling_fix_that_shrinks_a_pool_is_memory_and_not_the_rate(check: Check) -> None:
    # vllm pull 2031: Llama-2-70B on four cards, 31,615 and then 20,865 blocks
    for blocks, memory in ((31615, 38.6), (20865, 25.5)):
        log = f"INFO 12-10 01:01:01 llm_engine.py:223] # GPU blocks: {blocks}, # CPU blocks: 3276\n"
        found = check(LLAMA_2_70B, log, "--tp", "4", "--block-size", "16", "--kv-memory", f"{blocks * 1.25}MiB")
        assert found["bytes_per_block"] == 1.25 * 2**20
        assert found["pool_bytes"] / GIB == pytest.approx(memory, abs=0.05)
        assert found["agreement"]["verdict"] == "equal"


def test_a_ratio_of_exactly_the_parallelism_is_sharding_and_not_memory(check: Check) -> None:
    # transformers pull 48566: Qwen3-32B on four cards, sized with unsharded heads
    memory = 814 * 256 * 262144
    log = v1(f"{memory / GIB:.2f}", "208,384", "32,768", "6.36")
    found = check(QWEN3_32B, log, "--tp", "4", "--block-size", "256", "--max-model-len", "32768")
    assert found["agreement"]["verdict"] == "explained"
    assert "the heads are not sharded" in said(found)


def test_an_override_is_an_artificial_pool_and_its_memory_is_not_its_size(check: Check) -> None:
    # seen on vLLM 0.32: the label of the memory stays as it was
    scrape = (
        'vllm:cache_config_info{block_size="32",cache_dtype="auto",effective_attention_block_size="32",enable_prefix_caching="True",'
        'kv_cache_max_concurrency="1.015625",kv_cache_memory_bytes="1073741824",kv_cache_size_tokens="2080",num_gpu_blocks="65",'
        'num_gpu_blocks_override="65",engine="0"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 0.0\n'
    )
    found = check(LLAMA_31_8B, scrape, "--max-model-len", "2048")
    assert found["agreement"]["verdict"] == "equal"
    assert "artificial" in said(found)
    assert found["pool_blocks"] == 65


def test_engines_behind_one_front_end_are_counted_one_by_one(check: Check) -> None:
    scrape = (Path(__file__).parents[1] / "data" / "exposition" / "vllm" / "0.32.0-dp2.prom").read_text()
    found = check(LLAMA_31_8B, scrape, "--max-model-len", "8192", "--concurrency", "16", "--length", "8192")
    assert found["dp"] == 2
    assert found["agreement"]["verdict"] == "equal"
    assert (found["pool_blocks"], found["max_concurrency"]) == (4097, 4097 / 512)
    assert found["requests"] == 16


def test_what_nothing_explains_is_a_finding(check: Check) -> None:
    found = check(LLAMA_31_8B, v1("16.00", "99,984", "8,192", "12.20"), "--block-size", "16", code=1)
    assert found["agreement"]["verdict"] == "different"
    assert "times ours" in said(found)


@pytest.mark.parametrize("form", ["", "--markdown"])
def test_a_finding_is_said_beside_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    (tmp_path / "server.log").write_text(v1("16.00", "99,984", "8,192", "12.20"))
    assert cli.main(["plan", str(tmp_path), "--check", str(tmp_path / "server.log"), "--block-size", "16", *([form] if form else [])]) == 1
    assert "a difference has no name" in capsys.readouterr().out


def test_a_text_that_tells_nothing_cannot_be_held_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    (tmp_path / "x.log").write_text("hello\n")
    assert cli.main(["plan", str(tmp_path), "--check", str(tmp_path / "x.log")]) == 3
    assert "cannot judge" in capsys.readouterr().err


def test_a_concurrency_in_the_clothes_of_tokens_says_nothing_of_its_own(check: Check) -> None:
    # home-ops pull 13322, vllm issue 54662: 505,563 tokens are 7.71 x 65,536, whatever the memory was
    for tokens, length, concurrency in (("505,563", "65,536", "7.71"), ("369,384", "131,072", "2.82"), ("1,553,140", "1,000,000", "1.55")):
        found = check("qwen3-next-80b-a3b.json", v1("", tokens, length, concurrency), code=1 if length == "1,000,000" else 3)
        assert found["agreement"]["verdict"] == "untold"
        assert "say nothing that could be held to a plan" in said(found)


def test_hybrid_and_plain_growth_are_kept_apart(check: Check) -> None:
    # vllm issue 43308: equal memory, and up to eleven times the tokens
    found = check("gemma-4-31b.json", v1("46.57", "525,000", "262,144", "2.00"), code=1)
    assert found["growth_bytes_per_token"] == 81920
    assert (found["growth_bytes_per_token"] + found["sliding_bytes_per_token"]) / found["growth_bytes_per_token"] == 11


def test_a_ring_of_a_window_is_no_longer_than_the_longest_request(check: Check) -> None:
    # tt-xla issue 5860: a window of 1,024 with max length 128 must not charge 1,024
    found = check("gemma-3-27b.json", v1("51.00", "60,768", "128", "474.75"), "--block-size", "16", "--max-num-batched-tokens", "8192", code=1)
    assert found["bytes_per_sequence"] == 128 * (81920 + 425984)
    assert found["blocks_per_request"] <= 7 * (128 // 16 + 1)


def test_a_name_with_escape_sequences_reaches_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_31_8B, "model_type": "llama\x1b[31m\x07evil"}))
    for words in ((), ("--markdown",)):
        cli.main(["plan", str(tmp_path), *words])
        out = capsys.readouterr()
        assert "\x1b" not in out.out + out.err
        assert "\x07" not in out.out + out.err


DUMPS = Path(__file__).parents[1] / "data"


def test_a_scrape_tells_the_max_length_by_its_two_figures(check: Check) -> None:
    # kv_cache_size_tokens is int(kv_cache_max_concurrency x max_model_len)
    for name, length in (("vllm/0.32.0.prom", 8192), ("vllm/0.32.0-dp2.prom", 8192)):
        found = check(LLAMA_31_8B, (DUMPS / "exposition" / name).read_text())
        assert found["agreement"]["verdict"] == "equal"
        assert found["max_model_len"] == length


@pytest.mark.parametrize(("unified", "cells", "pool"), [("true", 8192, 8192), ("false", 2048, 8192)])
def test_slots_of_llamacpp_share_one_cache_or_have_one_each_as_its_log_says(unified: str, cells: int, pool: int, check: Check) -> None:
    text = (DUMPS / "startup" / "llamacpp-b11434-startup.log").read_text()
    if unified == "false":
        text = text.replace("8192 cells,  24 layers,  4/1 seqs", "2048 cells,  24 layers,  4/4 seqs").replace(
            "n_ctx_slot = 8192", "n_ctx_slot = 2048"
        )
        assert "4/4 seqs" in text
    model = {**QWEN25_7B, "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64}
    found = check(model, text)
    assert (found["agreement"]["verdict"], found["verdict"]) == ("equal", "PASS")
    assert found["pool_tokens"] == pytest.approx(pool, abs=256)
    assert found["max_model_len"] == cells


def test_the_log_of_another_model_is_known_by_its_bytes_a_token(check: Check) -> None:
    log = (DUMPS / "startup" / "vllm-0.32.0-startup.log").read_text()
    words = said(check(QWEN3_14B, log, code=1))
    assert "bytes a token: the engine keeps about 131,056 on one GPU and this model takes 163,840" in words
    assert "the log is of the model meta-llama/Llama-3.1-8B-Instruct" in words
    assert "bytes a token" not in said(check(LLAMA_31_8B, log))
