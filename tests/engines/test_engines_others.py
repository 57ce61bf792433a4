"""Traps of the engines beside vLLM and llama.cpp, one by one: what a wrong reading of each would tell a user."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.engines import DIALECTS, RawState, Values, detect, read_values, wanted_by
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import Missing, Reading

DATA = Path(__file__).parent.parent / "data" / "exposition"
WANTED = wanted_by(DIALECTS.values())


def state(text: str | None = None, bodies: dict[str, Any] | None = None) -> RawState:
    return RawState(metrics=None if text is None else parse_samples(text, WANTED), json=bodies or {})


def values_of(text: str | None = None, bodies: dict[str, Any] | None = None) -> Values:
    raw = state(text, bodies)
    return read_values(detect(raw), raw)


def recorded(name: str) -> str:
    return (DATA / name).read_text()


def body(name: str) -> Any:
    return json.loads(recorded(name))


def number(values: Values, name: str, rank: str = "") -> float:
    value = (values.ranks[rank] if rank else values.whole)[name]
    assert isinstance(value, Reading), f"{name}: {value}"
    return value.number()


def reason(values: Values, name: str) -> str:
    value = values.whole[name]
    assert isinstance(value, Missing), f"{name}: {value}"
    return value.reason


@pytest.mark.parametrize("name", DIALECTS)
def test_a_gauge_in_percent_is_refused_and_not_taken_for_a_full_pool(name: str) -> None:
    # One reading per engine whose usage is a gauge; llama.cpp and TGI have none, and what they compute cannot be above one.
    gauges = {
        "vllm": 'vllm:kv_cache_usage_perc{model_name="m"} 87.5',
        "ray_vllm": 'ray_vllm_kv_cache_usage_perc{model_name="m"} 87.5',
        "llm_d_sim": 'vllm:kv_cache_usage_perc{model_name="m"} 87.5',
        "ray_sglang": 'ray_sglang_token_usage{model_name="m"} 87.5',
        "sglang": 'sglang:token_usage{model_name="m"} 87.5',
        "trtllm_serve": "trtllm_kv_cache_utilization 87.5",
        "triton_trtllm": 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m"} 87.5',
        "lmdeploy": 'lmdeploy:gpu_cache_usage_perc{engine="0"} 87.5',
        "dynamo": 'dynamo_component_gpu_cache_usage_percent{model="m"} 87.5',
        "nim": "gpu_cache_usage_perc 87.5",
    }
    if name not in gauges:
        assert name in {"llamacpp", "tgi"}
        return
    dialect = DIALECTS[name]
    value = read_values(dialect, RawState(metrics=parse_samples(gauges[name], dialect.wanted))).whole["usage"]
    assert isinstance(value, Missing)
    assert "not clamped" in value.reason


def test_ranks_that_hold_slices_of_one_pool_are_not_added() -> None:
    values = values_of(recorded("sglang/0.5.20-all-schedulers.prom"))
    assert not values.ranks
    assert (number(values, "pool_tokens"), number(values, "running"), number(values, "preemptions")) == (262144, 8, 3)


def test_of_slices_that_disagree_the_least_room_and_the_most_load_count() -> None:
    text = recorded("sglang/0.5.20-all-schedulers.prom")
    text = re.sub(r'(max_total_num_tokens\{.*tp_rank="1"\}) \S+', r"\1 200000.0", text)
    text = re.sub(r'(kv_available_tokens\{.*tp_rank="1"\}) \S+', r"\1 100000.0", text)
    text = re.sub(r'(num_running_reqs\{.*tp_rank="1"\}) \S+', r"\1 9.0", text)
    values = values_of(text)
    assert (number(values, "pool_tokens"), number(values, "free_tokens"), number(values, "running")) == (200000, 100000 + 65536, 9)


def test_the_row_that_is_the_sum_of_the_others_is_not_added_to_them() -> None:
    rows = "".join(f'sglang:cached_tokens_total{{cache_source="{source}",model_name="m"}} {n}\n' for source, n in (("device", 30), ("host", 10)))
    total = 'sglang:cached_tokens_total{cache_source="total",model_name="m"} 40\n'
    for text in (rows, total, rows + total, total + rows):
        assert number(values_of(text), "prefix_hits") == 40


def test_a_gauge_that_is_reset_every_interval_is_no_count_of_preemptions() -> None:
    assert "num_retracted_requests_total" in reason(values_of('sglang:num_retracted_reqs{model_name="m"} 5\n'), "preemptions")


def test_a_pool_for_windows_that_is_fuller_than_the_main_pool_is_what_usage_tells() -> None:
    values = values_of(recorded("sglang/0.5.20-dp2-swa.prom"))
    assert (number(values, "usage", "0"), number(values, "used_tokens", "0"), number(values, "pool_tokens", "0")) == (0.5, 40000, 200000)
    assert any("second pool" in note and "20000 of 40000, 30000 of 40000" in note for note in values.notes)
    assert any(note.startswith("usage by engine, fullest first: 1: 75.0 %") for note in values.notes)


def test_tokens_that_are_protected_are_neither_used_nor_free() -> None:
    values = values_of(recorded("sglang/0.5.20-mamba.prom"))
    assert number(values, "used_tokens") + number(values, "free_tokens") == 799000
    without = re.sub(r"sglang:kv_available_tokens\{.*\n", "", recorded("sglang/0.5.20-mamba.prom"))
    assert "kv_available_tokens" in reason(values_of(without), "free_tokens")


def test_sglang_without_metrics_is_read_rank_by_rank_from_its_bodies() -> None:
    values = values_of(bodies={"/v1/loads": body("sglang/0.5.20-v1_loads-dp2.json")})
    assert list(values.ranks) == ["0", "1"]
    assert (number(values, "usage", "0"), number(values, "usage", "1"), number(values, "usage")) == (0.25, 0.75, 0.5)
    older = {"/get_server_info": body("sglang/0.5.3-get_server_info.json"), "/get_load": body("sglang/0.5.3-get_load.json")}
    values = values_of(bodies=older)
    assert (number(values, "pool_tokens", "0"), number(values, "pool_tokens", "1"), number(values, "running", "0")) == (100000, 120000, 8)


def test_what_both_the_metrics_and_a_body_tell_counts_once() -> None:
    raw = state(recorded("sglang/0.5.20.prom"))
    raw.json = {"/v1/loads": body("sglang/0.5.20-v1_loads.json"), "/server_info": body("sglang/0.5.20-server_info.json")}
    values = read_values(detect(raw), raw)
    assert not values.ranks
    assert (number(values, "running"), number(values, "pool_tokens"), number(values, "max_num_seqs")) == (8, 262144, 2048)


@pytest.mark.parametrize("odd", [None, [], {}, {"loads": None}, {"loads": [1]}, {"loads": [{"dp_rank": [], "num_running_reqs": "8"}]}, "x"])
def test_a_body_of_another_shape_tells_nothing(odd: Any) -> None:
    bodies = dict.fromkeys(("/v1/loads", "/get_load", "/server_info", "/get_server_info", "/v1/models"), odd)
    values = read_values(DIALECTS["sglang"], RawState(json=bodies)).whole
    assert [name for name, value in values.items() if isinstance(value, Reading)] == []


def test_what_tgi_reserves_is_told_from_what_is_filled() -> None:
    values = values_of(recorded("tgi/3.3.7.prom"))
    usage = values.whole["usage"]
    assert isinstance(usage, Reading)
    assert "reserved, not filled" in usage.source
    assert any("TGI reserves" in note for note in values.notes)


@pytest.mark.parametrize("left", ["tgi_batch_current_size", "tgi_batch_inference_count"])
def test_a_batch_gauge_that_went_away_is_not_a_batch_that_never_was(left: str) -> None:
    text = recorded("tgi/3.3.7-fresh.prom") + f"{left} 3\n"
    assert "not in /metrics" in reason(values_of(text), "used_tokens")


def test_the_last_iteration_counts_and_none_before_the_first_request() -> None:
    values = values_of(bodies={"/metrics": body("trtllm_serve/1.x-metrics.json")})
    assert (number(values, "used_blocks"), number(values, "free_blocks")) == (2055, 6164)
    empty = read_values(DIALECTS["trtllm_serve"], RawState(json={"/metrics": body("trtllm_serve/1.x-metrics-empty.json")}))
    assert "is not there" in reason(empty, "used_blocks")


def test_a_fraction_that_contradicts_its_own_blocks_is_shown_and_not_believed() -> None:
    text = recorded("triton_trtllm/backend.prom").replace(
        '"fraction",model="tensorrt_llm",version="1"} 0.25', '"fraction",model="tensorrt_llm",version="1"} 0.4875'
    )
    values = values_of(text)
    assert number(values, "usage") == 0.25
    assert any("0.4875" in note for note in values.notes)


def test_two_models_of_one_triton_have_a_pool_each() -> None:
    text = recorded("triton_trtllm/backend.prom")
    values = values_of(text + text.replace('model="tensorrt_llm"', 'model="second"').replace("} 1560", "} 3120").replace("} 4680", "} 3120"))
    assert list(values.ranks) == ["second", "tensorrt_llm"] or list(values.ranks) == ["tensorrt_llm", "second"]
    assert (number(values, "pool_blocks"), number(values, "usage")) == (12480, 0.375)


def test_usage_of_engines_without_pools_is_not_averaged_and_the_hottest_is_shown() -> None:
    values = values_of(recorded("lmdeploy/0.16.0-dp2.prom"))
    assert "cannot be weighted without their pools" in reason(values, "usage")
    assert (number(values, "usage", "0"), number(values, "usage", "1")) == (0.875, 0.125)
    assert any("fullest first: 0: 87.5 %; 1: 12.5 %" in note for note in values.notes)


def test_lmdeploys_idle_cache_is_no_leak_and_says_so() -> None:
    assert DIALECTS["lmdeploy"].idle_cached_is_free is False
    assert any("idle cached KV counts as used" in note for note in values_of(recorded("lmdeploy/0.16.0.prom")).notes)


def test_what_dynamo_says_and_what_it_passes_through_is_counted_once() -> None:
    values = values_of(recorded("dynamo/1.x-worker.prom"))
    assert (number(values, "pool_blocks"), number(values, "usage")) == (8192, 0.5)
    without = re.sub(r"dynamo_component_gpu_cache_usage_percent\{.*\n", "", recorded("dynamo/1.x-worker.prom"))
    assert number(values_of(without), "usage") == 0.5  # the series of the engine inside, by rank
    assert number(values_of(without), "usage", "1") == 0.75


def test_the_frontend_tells_no_usage_and_the_first_workers_pool() -> None:
    values = values_of(recorded("dynamo/1.x-frontend.prom"))
    assert "DYN_SYSTEM_PORT" in reason(values, "usage")
    assert "DYN_SYSTEM_PORT" in reason(values, "used_blocks")
    assert any("first worker only" in note for note in values.notes)


def test_frontend_and_worker_together_do_not_double_the_pool() -> None:
    values = values_of(recorded("dynamo/1.x-worker.prom") + recorded("dynamo/1.x-frontend.prom"))
    assert (number(values, "pool_blocks"), number(values, "pool_tokens"), number(values, "running")) == (8192, 131072, 12)
    assert (number(values, "used_blocks"), number(values, "free_blocks"), number(values, "block_size")) == (4096, 4096, 16)


def test_workers_of_one_frontend_add_and_the_fullest_is_shown() -> None:
    one = recorded("dynamo/0.7-worker.prom")
    two = one.replace("7587884888253033398", "11").replace("} 1024", "} 3072").replace("} 0.25", "} 0.75")
    values = values_of(one + two)
    assert (number(values, "pool_blocks"), number(values, "used_blocks"), number(values, "usage")) == (8192, 4096, 0.5)
    assert any("fullest first: 11: 75.0 %" in note for note in values.notes)


def test_behind_ray_a_counter_without_events_is_zero_and_only_beside_living_gauges() -> None:
    values = values_of(recorded("ray_vllm/serve.prom"))
    preemptions = values.whole["preemptions"]
    assert isinstance(preemptions, Reading)
    assert preemptions.value == 0
    assert "only after its first event" in preemptions.source
    alone = values_of('ray_vllm_kv_cache_usage_perc{ReplicaId="a",model_name="m"} 0.5\n')
    assert "not in /metrics" in reason(alone, "preemptions")
    # A plain vLLM shows the counter from its start: there absence is no zero.
    assert reason(values_of('vllm:num_requests_running{model_name="m"} 1\nvllm:num_requests_waiting{model_name="m"} 0\n'), "preemptions")


def test_a_counter_that_ray_shows_twice_counts_once() -> None:
    values = values_of(recorded("ray_vllm/serve.prom"))
    assert number(values, "prompt_tokens") == 70000


def test_a_simulator_has_no_null_block_and_says_what_it_is() -> None:
    values = values_of(recorded("llm_d_sim/0.10.2.prom"))
    assert (number(values, "usable_blocks"), number(values, "free_blocks")) == (1024, 768)
    assert any(note.startswith("simulated") for note in values.notes)


def test_a_simulator_behind_a_scraper_is_still_one() -> None:
    text = recorded("llm_d_sim/0.10.2.prom").replace("{", '{instance="10.0.0.1:8000",job="sim",').replace("vllm:", "vllm_")
    assert detect(state(text)).name == "llm_d_sim"


def test_an_old_vllm_with_few_labels_is_no_simulator() -> None:
    assert detect(state('vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="10"} 1\n')).name == "vllm"


def test_nim_that_serves_vllms_series_is_read_as_vllm() -> None:
    assert detect(state(recorded("nim/1.x.prom"))).name == "nim"
    assert detect(state(recorded("nim/1.x.prom") + recorded("vllm/0.32.0.prom"))).name == "vllm"


def test_v0_block_gauges_alone_give_the_three_numbers() -> None:
    text = "vllm:num_used_gpu_blocks 736\nvllm:num_free_gpu_blocks 64\nvllm:num_requests_running 24\n"
    values = values_of(text)
    assert [number(values, name) for name in ("usage", "used_blocks", "free_blocks", "pool_blocks", "running")] == [0.92, 736, 64, 800, 24]


def test_a_pool_for_state_layers_tells_its_slots_where_the_version_does() -> None:
    old = 'sglang:num_running_reqs{model_name="m"} 3\nsglang:token_usage{model_name="m"} 0.5\nsglang:mamba_usage{model_name="m"} 0.5\n'
    assert any("50.0% used, its size is not told" in note for note in values_of(old).notes)
    new = old + "".join(
        f'sglang:mamba_{name}_tokens{{model_name="m"}} {slots}\n' for name, slots in (("used", 12), ("available", 10), ("evictable", 2))
    )
    assert any("12 of 24 slots are used" in note for note in values_of(new).notes)
    without = old.replace("mamba_usage", "swa_token_usage") + 'sglang:mamba_used_tokens{model_name="m"} 0\n'
    assert not any("state layers" in note for note in values_of(without).notes)


def test_of_several_models_the_one_that_was_asked_for_is_read() -> None:
    one = recorded("vllm/relabelled-underscore.prom")
    other = one.replace("meta-llama/Llama-3.1-8B-Instruct", "second").replace("vllm-0", "vllm-1").replace("10.0.3.17", "10.0.3.18")
    raw = state(one + other.replace("} 0.5", "} 0.25"))
    both = read_values(detect(raw), raw)
    assert (number(both, "pool_blocks"), number(both, "usage")) == (16386, 0.375)
    assert any("2 models in one exposition" in note and "--kv-model" in note for note in both.notes)
    raw.model = "second"
    asked = read_values(detect(raw), raw)
    assert (number(asked, "pool_blocks"), number(asked, "usage"), asked.ranks) == (8193, 0.25, {})
    assert any("only second is read" in note for note in asked.notes)
    raw.model = "of-neither"
    neither = read_values(detect(raw), raw)
    assert number(neither, "pool_blocks") == 16386
    for name in ("usage", "used_blocks", "free_blocks"):
        assert "none is of-neither" in reason(neither, name), "which of two models counts is not guessed"


@pytest.mark.parametrize(
    "form", ["vllm:num_preemptions_total", "vllm_num_preemptions_total", "vllm.num_preemptions.total", "vllm.num_preemptions.count"]
)
def test_a_counter_is_known_in_the_forms_of_collectors(form: str) -> None:
    values = values_of(f'{form}{{model_name="m"}} 3\n')
    assert number(values, "preemptions") == 3


def test_trtllm_names_with_a_colon_are_the_same_names() -> None:
    assert number(values_of("trtllm:kv_cache_utilization 0.5\n"), "usage") == 0.5


def test_old_llama_cpp_gauges_say_that_idle_slots_count_as_used() -> None:
    assert any("idle slots" in note for note in values_of(recorded("llamacpp/b5000.prom")).notes)


def test_a_flag_that_was_set_is_not_asked_for() -> None:
    text = (DATA / "sglang" / "0.5.20-dp2-swa.prom").read_text()
    values = read_values(DIALECTS["sglang"], RawState(metrics=parse_samples(text))).whole
    for name in ("preemptions", "prefix_hits", "generation_tokens"):
        value = values[name]
        assert isinstance(value, Missing)
        assert "--enable-metrics" not in value.reason
        assert "not before its first event" in value.reason
    loads = 'sglang_num_waiting_reqs{dp_rank="0"} 2\nsglang_num_running_reqs{dp_rank="0"} 8\nsglang_token_usage{dp_rank="0"} 0.25\n'
    value = read_values(DIALECTS["sglang"], RawState(metrics=parse_samples(loads))).whole["preemptions"]
    assert isinstance(value, Missing)
    assert "needs --enable-metrics" in value.reason, "/v1/loads shows no counters, whatever the flag"
