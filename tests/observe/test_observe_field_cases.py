"""Field reports of misread metrics, of usage that climbs, and of start-up lines: what inspect answers to what people pasted.

The numbers are those of facts/field_cases.md; B cases stand in tests/server/test_server_causes.py, C05 and G cases in tests/analysis.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.observe.inspecting import Inspection, inspect
from pytest_kvcache.observe.pasted import sort_text
from pytest_kvcache.quantities import Missing, Reading

EXPOSITION = Path(__file__).parent.parent / "data" / "exposition"


def told(*texts: str) -> Inspection:
    return inspect([sort_text(f"text {number}", text.encode()) for number, text in enumerate(texts)])


def value(found: Inspection, name: str) -> Any:
    known = found.quantities[name]
    assert isinstance(known, Reading), f"{name}: {known}"
    return known.value


def reason(found: Inspection, name: str) -> str:
    known = found.quantities[name]
    assert isinstance(known, Missing), f"{name}: {known}"
    return known.reason


def notes(found: Inspection) -> str:
    return " | ".join([*found.notes, found.why])


INFO = 'vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="{}"}} 1.0\n'
GAUGE = 'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {}\nvllm:num_requests_running{{engine="0",model_name="m"}} {}\n'


@pytest.mark.parametrize(
    ("case", "size", "concurrency", "length", "words"),
    [
        ("A04 before the fix", "2,198,512", "134.19", "16,384", ""),
        ("A04: sliding windows", "2,198,512", "178.68", "16,384", "134.19, and the engine states 178.68"),
        ("A07: two groups of layers", "78,384", "1.12", "131,072", "0.60, and the engine states 1.12"),
        ("A13: one request and a remainder", "42,656", "1.30", "32,768", ""),
        ("A16: a pool below the max length is no failure", "37,392", "1.53", "262,144", "0.14, and the engine states 1.53"),
        ("A19: a concurrency in token clothing", "505,563", "7.71", "65,536", ""),
        ("A20: the same pool at 50K", "398,000", "7.96", "50,000", ""),
        ("A20: and at 500K", "2,450,000", "4.90", "500,000", ""),
    ],
)
def test_the_engines_own_figure_is_the_capacity_and_no_quotient_of_ours(case: str, size: str, concurrency: str, length: str, words: str) -> None:
    found = told(f"INFO GPU KV cache size: {size} tokens\nINFO Maximum concurrency for {length} tokens per request: {concurrency}x\n")
    assert value(found, "pool_tokens") == int(size.replace(",", ""))
    assert value(found, "max_concurrency") == float(concurrency)
    assert words in notes(found)
    assert bool(words) is ("window or state layers" in notes(found)), case
    assert "failed" not in notes(found)


def test_c01_one_of_eight_processes_lives() -> None:
    rows = "".join(
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m",pid="{pid}"}} {0.6530455880475035 if pid == 273 else 0.0}\n' for pid in range(270, 278)
    )
    assert value(told(INFO.format(1001) + rows), "usage") == 0.6530455880475035


def test_c02_none_is_unknown_and_the_log_tells() -> None:
    scrape = INFO.format("None") + GAUGE.format(0.5, 4)
    assert "None" in reason(told(scrape), "pool_blocks")
    assert value(told(scrape, "INFO GPU KV cache size: 148,336 tokens\n"), "pool_blocks") == 9271
    assert value(told(INFO.format(9271).replace('engine="0"', 'engine="0",num_cpu_blocks="None"') + GAUGE.format(0.5, 4)), "usable_blocks") == 9270


def test_c04_the_aligned_block_size_wins_over_the_label() -> None:
    log = "INFO Setting attention block size to 544 tokens to ensure that attention page size is >= mamba page size.\n"
    assert value(told(INFO.format(321) + GAUGE.format(0.5, 4), log), "block_size") == 544


def test_c07_gauges_that_llamacpp_took_away_are_not_exported_and_not_zero() -> None:
    found = told("llamacpp:requests_processing 2\nllamacpp:requests_deferred 0\nllamacpp:n_tokens_max 900\n")
    assert found.engine == "llamacpp"
    for name in ("usage", "used_tokens"):
        assert "is not in /metrics" in reason(found, name)
        assert "/slots was not read" in reason(found, name), "where it can be had"


def test_c08_an_empty_exposition_cannot_tell() -> None:
    found = told("HTTP/1.1 200 OK\ncontent-type: text/plain; version=0.0.4\n\n")
    assert not found.judged
    assert "nothing is told, which is not zero" in found.why


def test_c10_usage_zero_with_a_warm_prefix_cache() -> None:
    hits = 'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000\nvllm:prefix_cache_hits_total{engine="0",model_name="m"} 800\n'
    found = told(INFO.format(16384) + GAUGE.format(0.0, 0) + hits)
    assert value(found, "free_blocks") == 16383
    assert "says nothing against the prefix cache" in notes(found)
    busy = told(INFO.format(16384) + GAUGE.format(16 / 16383, 8) + hits)
    assert value(busy, "used_blocks") == 16, "the null block is in neither figure"


def test_c11_gauges_that_stay_up_are_said_to() -> None:
    assert "keep their last value when idle" in notes(told((EXPOSITION / "sglang/0.5.20.prom").read_text()))


@pytest.mark.parametrize("form", ["sglang:cache_hit_rate{} 87.58777633289988\n", "sglang_cache_hit_rate{} 87.58777633289988\n"])
def test_c13_a_percentage_under_a_ratios_name_is_never_a_ratio(form: str) -> None:
    base = 'sglang:num_running_reqs{model_name="m"} 3\nsglang:token_usage{model_name="m"} 87.5\n'
    found = told(base + form.format('{name="google/gemma-2-9b-it"}'))
    assert "above a full pool of 1" in reason(found, "usage")
    assert not any(
        isinstance(known, Reading) and known.number() == pytest.approx(87.58777633289988)
        for name, known in found.quantities.items()
        if name != "kv_dtype"
    )


def test_c14_ranks_stay_apart_and_models_are_not_folded_into_one() -> None:
    pods = "".join(
        f'vllm:cache_config_info{{block_size="16",engine="0",instance="{pod}",num_gpu_blocks="{blocks}"}} 1.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0",instance="{pod}",model_name="{model}"}} {usage}\n'
        for pod, blocks, model, usage in (("a:8000", 1001, "mixtral", 0.0045), ("b:8000", 3001, "llama", 0.0332))
    )
    found = told(pods)
    usages = {rank: values["usage"] for rank, values in found.ranks.items()}
    assert {rank: usage.number() for rank, usage in usages.items() if isinstance(usage, Reading)} == {"a:8000": 0.0045, "b:8000": 0.0332}
    assert "name one (--kv-model)" in notes(found)
    one = inspect([sort_text("x", pods.encode())], model="llama")
    assert value(one, "usage") == 0.0332
    assert value(one, "usable_blocks") == 3000


def test_c16_the_traps_of_the_exposition() -> None:
    text = (EXPOSITION / "vllm/0.32.0-cpu-dp2.prom").read_text()
    found = told(text)
    assert value(found, "rejections") == 0, "its rows name no engine"
    assert value(found, "preemptions") == 0, "and no birth time is a count"
    refused = text.replace('reason="max_num_queued_reqs"} 0.0', 'reason="max_num_queued_reqs"} 7.0')
    assert value(told(refused), "rejections") == 7


def test_c17_recompute_may_look_like_prefix_hits() -> None:
    counters = "".join(
        f'vllm:{name}_total{{engine="0",model_name="m"}} {count}\n'
        for name, count in (("prefix_cache_queries", 100_000), ("prefix_cache_hits", 32_200), ("num_preemptions", 400))
    )
    assert "400 preemptions: in older versions" in notes(told(INFO.format(1001) + GAUGE.format(0.823, 259) + counters))
    line = (
        "INFO 09-28 10:00:00 [loggers.py:248] Engine 000: Avg prompt throughput: 900.0 tokens/s, Avg generation throughput: 5118.0 tokens/s,"
        " Running: 259 reqs, Waiting: {} reqs, GPU KV cache usage: {}%, Prefix cache hit rate: {}%\n"
    )
    assert "a prefix hit rate of 32.2 %" in notes(told(line.format(535, 82.3, 32.2)))
    for waiting, usage, rate in ((0, 82.3, 32.2), (535, 20.0, 32.2), (535, 82.3, 0.0)):
        assert "prefix hit rate" not in notes(told(line.format(waiting, usage, rate))), "room, or nothing that looks like sharing"


def line(at: str, running: int, waiting: int, usage: float, rate: float, prompt: float = 0.0) -> str:
    return (
        f"INFO 12-01 {at} [loggers.py:127] Engine 000: Avg prompt throughput: {prompt} tokens/s, Avg generation throughput: {rate} tokens/s, "
        f"Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: {usage}%, Prefix cache hit rate: 0.0%\n"
    )


def test_d01_usage_that_climbs_from_one_request_is_one_long_answer() -> None:
    text = "".join(line(f"10:00:{10 * n:02}", 1, 0, round(6.0 + 0.1 * n, 1), 118.0) for n in range(5))
    said = notes(told(text))
    assert "from 6.0% to 6.4%" in said
    assert "about 1,180,000 tokens" in said
    assert "no leak: set max_tokens" in said


def test_d02_ninety_nine_percent_with_tokens_flowing_is_saturation() -> None:
    text = line("10:00:00", 34, 18, 99.2, 756.7) + line("10:10:00", 26, 63, 98.6, 700.0)
    said = notes(told(text))
    assert "98.6% used with 26 running and 700 tokens/s" in said
    assert "this is no leak" in said


def test_d04_blocks_that_stay_with_nothing_running_are_a_leak() -> None:
    text = line("10:00:00", 3, 0, 40.0, 50.0) + "".join(line(f"10:0{n}:00", 0, 0, 23.5, 0.0) for n in range(1, 5))
    said = notes(told(text))
    assert "nothing has run or waited for 3 min and 23.5% of the pool is still held" in said
    short = notes(told(line("10:00:00", 3, 0, 40.0, 50.0) + line("10:00:10", 0, 0, 1.0, 0.0)))
    assert "leak" not in short, "a gauge may be one step old"


def test_d05_waiting_with_an_empty_pool_is_stuck_and_not_full() -> None:
    text = "".join(line(f"10:0{n}:00", 0, 5, 0.0, 0.0) for n in range(10))
    said = notes(told(text))
    assert "5 requests have waited for 9 min while nothing ran and no token came, at 0.0% usage: stuck, and not full" in said
    assert "stuck" not in notes(told("".join(line(f"10:0{n}:00", 0, 5, 0.0, 0.0, prompt=900.0) for n in range(10)))), "a long prefill is progress"


def test_d07_what_a_request_holds_is_its_price_and_not_its_tokens() -> None:
    log = "INFO GPU KV cache size: 356,667 tokens\nINFO Maximum concurrency for 262,144 tokens per request: 1.36x\n" + line(
        "10:00:00", 1, 0, 25.5, 30.0
    )
    assert "holds 25.5% of the pool: no more than 3 such fit" in notes(told(log))
    other = "INFO GPU KV cache size: 457,880 tokens\n" + line("10:00:00", 1, 0, 32.9, 30.0)
    assert "no more than 3 such fit" in notes(told(other)), "12 tokens, and three requests of any size"


def test_d10_a_request_that_is_accepted_and_can_never_finish() -> None:
    models = '{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","parent":null,"max_model_len":1024}]}'
    info = 'vllm:cache_config_info{block_size="16",engine="0",kv_cache_max_concurrency="1.0",kv_cache_size_tokens="1024",num_gpu_blocks="64"} 1.0\n'
    found = told(info + GAUGE.format(0.0, 0), models)
    assert "max length 1,024 needs 64 blocks and 63 can be had: it would be accepted and never finish" in notes(found)
    enough = told(info.replace('"64"', '"65"').replace('"1024"', '"1040"') + GAUGE.format(0.0, 0), models)
    assert "never finish" not in notes(enough)


def test_d11_the_small_pool_sets_the_limit() -> None:
    body = '{"model_path":"gpt-oss","max_total_num_tokens":100000,"max_req_input_len":19994,"internal_states":[{"memory_usage":{"token_capacity":100000}}]}'
    assert "one prompt may have 19994 tokens at most" in notes(told(body))


def test_d13_a_queue_behind_one_answer_is_no_hang() -> None:
    text = "".join(line(f"10:00:{10 * n:02}", 1, 14, round(76.5 + 0.1 * n, 1), 5.4) for n in range(4))
    said = notes(told(text))
    assert "one long answer" in said
    assert "14 wait behind it with 23.2% free" in said


def test_lines_of_sglang_and_of_several_engines_are_told_apart() -> None:
    sglang = "".join(
        f"[2026-09-09 11:5{n}:00 DP{rank} TP0] Decode batch, #running-req: {running}, #token: 65536, token usage: {usage}, cuda graph: True, "
        f"gen throughput (token/s): {rate}, #queue-req: {waiting}\n"
        for n in range(4)
        for rank, running, waiting, usage, rate in ((0, 8, 2, 0.25, 400.0), (1, 30, 12, 0.99, 350.0))
    )
    said = notes(told(sglang))
    assert "engine DP1: 99.0% used with 30 running" in said
    assert "engine DP0" not in said
