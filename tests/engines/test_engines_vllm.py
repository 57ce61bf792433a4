"""vLLM's traps, one by one: what a wrong reading of each would tell a user."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.engines import DIALECTS, RawState, Values, read, read_values
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import Missing, Reading, Value

VLLM = DIALECTS["vllm"]
DATA = Path(__file__).parent.parent / "data" / "exposition" / "vllm"
INFO = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="101",num_gpu_blocks_override="None"} 1.0\n'
USAGE = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'


def values_of(text: str, *, json: dict[str, Any] | None = None, log: dict[str, Value] | None = None) -> Values:
    return read_values(VLLM, RawState(metrics=parse_samples(text, VLLM.wanted), json=json or {}, log_facts=log or {}))


def number(values: Values, name: str, rank: str = "") -> float:
    value = (values.ranks[rank] if rank else values.whole)[name]
    assert isinstance(value, Reading), f"{name}: {value}"
    return value.number()


def reason(values: Values, name: str, rank: str = "") -> str:
    value = (values.ranks[rank] if rank else values.whole)[name]
    assert isinstance(value, Missing), f"{name}: {value}"
    return value.reason


def recorded(name: str) -> str:
    return (DATA / name).read_text()


def test_used_blocks_are_counted_without_the_null_block() -> None:
    values = values_of(INFO + USAGE)
    assert (number(values, "pool_blocks"), number(values, "usable_blocks")) == (101, 100)
    assert (number(values, "used_blocks"), number(values, "free_blocks")) == (25, 75)


def test_one_used_block_of_many_is_not_rounded_away() -> None:
    # 16 of 16,383 usable blocks, as vLLM prints it.
    text = INFO.replace('"101"', '"16384"') + USAGE.replace("0.25", repr(1.0 - (16383 - 16) / 16383))
    assert number(values_of(text), "used_blocks") == 16


@pytest.mark.parametrize("gauge", ["25.0", "1.01", "NaN", "+Inf", "-0.5"])
def test_a_gauge_that_cannot_be_a_share_is_refused_and_not_clamped(gauge: str) -> None:
    values = values_of(INFO + USAGE.replace("0.25", gauge))
    assert "vllm:kv_cache_usage_perc reads" in reason(values, "usage")
    assert "vllm:kv_cache_usage_perc reads" in reason(values, "free_blocks")


def test_a_full_pool_with_rounding_noise_has_no_negative_free_blocks() -> None:
    values = values_of(INFO + USAGE.replace("0.25", "1.00000001"))
    assert (number(values, "used_blocks"), number(values, "free_blocks")) == (100, 0)


def test_of_eight_api_processes_the_one_that_lives_counts() -> None:
    rows = [f'vllm:kv_cache_usage_perc{{engine="0",model_name="m",pid="{pid}"}} {0.653 if pid == 273 else 0.0}\n' for pid in range(270, 278)]
    values = values_of(INFO + "".join(rows))
    assert number(values, "usage") == 0.653
    assert not values.ranks
    assert any("several API server processes" in note for note in values.notes)


def test_counters_told_by_several_processes_add() -> None:
    rows = [f'vllm:num_preemptions_total{{engine="0",model_name="m",pid="{pid}"}} {pid}\n' for pid in (1, 2)]
    assert number(values_of("".join(rows)), "preemptions") == 3


def test_the_word_none_is_unknown_and_never_zero() -> None:
    text = recorded("0.9.2-both-names.prom").replace('num_gpu_blocks="4097"', 'num_gpu_blocks="None"')
    values = values_of(text)
    for name in ("pool_blocks", "usable_blocks", "used_blocks", "free_blocks", "pool_tokens"):
        assert 'num_gpu_blocks="None"' in reason(values, name)
    assert number(values, "usage") == 0.625


def test_where_the_label_is_none_the_log_tells_the_pool() -> None:
    text = recorded("0.9.2-both-names.prom").replace('num_gpu_blocks="4097"', 'num_gpu_blocks="None"')
    values = values_of(text, log={"pool_tokens": Reading(65552, "tokens", "start-up log: GPU KV cache size: 65,552 tokens")})
    assert (number(values, "pool_blocks"), number(values, "used_blocks"), number(values, "pool_tokens")) == (4097, 2560, 65552)
    stated = values_of(text, log={"pool_blocks": Reading(4097, "blocks", "start-up log: # GPU blocks: 4097")})
    assert number(stated, "free_blocks") == 1536


def test_a_token_figure_of_the_log_is_not_turned_into_blocks_where_the_label_is_only_absent() -> None:
    values = values_of(USAGE, log={"pool_tokens": Reading(1600, "tokens", "log"), "block_size": Reading(16, "tokens", "log")})
    assert "cannot be turned into blocks" in reason(values, "pool_blocks")


def test_the_labels_that_contain_block_size_are_not_taken_for_it() -> None:
    info = 'vllm:cache_config_info{engine="0",hash_block_size="4",mamba_block_size="8",num_gpu_blocks="101",user_specified_block_size="False"} 1.0\n'
    assert "has no label" in reason(values_of(info), "block_size")


def test_the_size_of_an_attention_block_wins_over_the_least_of_all_groups() -> None:
    info = INFO.replace('block_size="16"', 'block_size="4",effective_attention_block_size="256"')
    assert number(values_of(info), "block_size") == 256
    # 0.21, hybrid: the label is filled before the blocks are aligned, and the log knows better.
    logged = values_of(INFO, log={"block_size": Reading(528, "tokens", "start-up log: Setting attention block size to 528 tokens")})
    assert number(logged, "block_size") == 528


def test_a_hybrid_pool_is_not_blocks_times_block_size() -> None:
    values = values_of(recorded("0.32.0-hybrid-swa.prom"))
    assert number(values, "pool_tokens") == 327680
    assert any("466,160" in note and "327,680" in note for note in values.notes)


def test_an_overridden_pool_says_so_and_its_stated_bytes_are_not_believed() -> None:
    text = recorded("0.32.0-cpu.prom").replace('num_gpu_blocks_override="None"', 'num_gpu_blocks_override="9"').replace('"16384"', '"9"')
    values = values_of(text)
    assert (number(values, "num_gpu_blocks_override"), number(values, "usable_blocks")) == (9, 8)
    assert "override" in reason(values, "pool_bytes")
    assert any("artificial" in note for note in values.notes)


def test_the_bytes_of_the_log_are_taken_where_the_label_is_unset() -> None:
    values = values_of(recorded("0.32.0.prom"), log={"pool_bytes": Reading(16 << 30, "bytes", "start-up log: Available KV cache memory: 16.0 GiB")})
    assert number(values, "pool_bytes") == 16 << 30


def test_the_bytes_of_one_worker_are_those_of_all_workers_that_the_log_counts() -> None:
    log: dict[str, Value] = {"pool_bytes": Reading((1 << 30) * 4 + 7_000_000, "bytes", "start-up log: 4 workers")}
    assert number(values_of(recorded("0.32.0-cpu.prom"), log=log), "pool_bytes") == 4 << 30


def test_what_the_log_adds_up_is_not_added_up_again_for_each_rank() -> None:
    text = re.sub(r'kv_cache_size_tokens="\d+"', 'kv_cache_size_tokens="None"', recorded("0.32.0-dp2.prom"))
    log: dict[str, Value] = {"pool_tokens": Reading(131104, "tokens", "start-up log: the sum over 2 engines")}
    values = values_of(text, log=log)
    assert number(values, "pool_tokens") == 131104
    # The label's blocks are per rank all the same, so a rank has its own product.
    assert number(values, "pool_tokens", "0") == 65552


def test_a_sleeping_engine_has_no_free_blocks_to_offer() -> None:
    text = recorded("0.32.0-cpu.prom").replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
    values = values_of(text.replace('sleep_state="discard_all"} 0.0', 'sleep_state="discard_all"} 1.0'))
    assert "sleeps" in reason(values, "free_blocks")
    assert any("sleeps" in note for note in values.notes)


def test_the_log_resolves_a_dtype_that_is_auto_and_never_overrules_one_that_is_stated() -> None:
    log: dict[str, Value] = {"kv_dtype": Reading("bfloat16", "", "start-up log: dtype")}
    assert values_of(INFO, log=log).whole["kv_dtype"] == log["kv_dtype"]
    unresolved = values_of(INFO, log={"kv_dtype": Reading("auto", "", "start-up log: kv_cache_dtype=auto")}).whole["kv_dtype"]
    assert isinstance(unresolved, Reading)
    assert unresolved.source.startswith("vllm:cache_config_info{cache_dtype} (the model's own dtype")
    stated = values_of(INFO.replace('"auto"', '"fp8_e4m3"'), log=log).whole["kv_dtype"]
    assert isinstance(stated, Reading)
    assert stated.value == "fp8_e4m3"


def test_ranks_are_kept_apart_and_the_printed_sum_is_not_taken_for_each() -> None:
    values = values_of(recorded("0.32.0-dp2.prom"))
    assert list(values.ranks) == ["0", "1"]
    assert [number(values, "usable_blocks", rank) for rank in "01"] == [4096, 4096]
    assert [number(values, "free_blocks", rank) for rank in "01"] == [3072, 1024]
    assert [number(values, "preemptions", rank) for rank in "01"] == [0, 3]
    assert "admission_rejections_total" in reason(values, "rejections", "1"), "rejections name no engine: they are the server's"
    assert any("1: 75.0 % (1024 of 4096 blocks free)" in note for note in values.notes)


def test_usage_of_unequal_ranks_is_weighted_by_their_pools() -> None:
    text = recorded("0.32.0-dp2.prom")
    first = re.search(r'vllm:cache_config_info\{[^}]*engine="0"[^}]*\}', text)
    assert first
    text = text.replace(first[0], first[0].replace('num_gpu_blocks="8194"', 'num_gpu_blocks="1025"'))
    values = values_of(text.replace('num_gpu_blocks="8194"', 'num_gpu_blocks="3073"'))
    assert (number(values, "pool_blocks"), number(values, "usable_blocks")) == (4098, 4096)
    assert number(values, "usage") == pytest.approx((0.25 * 1024 + 0.75 * 3072) / 4096)
    assert number(values, "used_blocks") == 256 + 2304


def test_a_sum_that_does_not_divide_is_not_split_among_the_ranks() -> None:
    values = values_of(recorded("0.32.0-dp2.prom").replace('num_gpu_blocks="8194"', 'num_gpu_blocks="8195"'))
    assert "only the sum is told" in reason(values, "usable_blocks")
    assert "cannot be weighted" in reason(values, "usage")
    assert number(values, "usage", "1") == 0.75


def test_a_pool_row_that_names_no_rank_belongs_to_all_ranks_of_the_server() -> None:
    rows = "".join(f'vllm:kv_cache_usage_perc{{engine="{n}",model_name="m"}} 0.5\n' for n in range(4))
    values = values_of(INFO.replace('engine="0",', "").replace('"101"', '"404"') + rows)
    assert number(values, "usable_blocks") == 400
    assert number(values, "usable_blocks", "3") == 100


def test_two_models_on_one_server_are_not_folded_into_one_usage() -> None:
    text = INFO + USAGE + USAGE.replace('model_name="m"', 'model_name="n"').replace("0.25", "0.75")
    values = values_of(text)
    assert list(values.ranks) == ["m", "n"]
    assert (number(values, "usage", "m"), number(values, "usage", "n")) == (0.25, 0.75)
    assert "names no model" in reason(values, "usage")
    assert number(values, "pool_blocks") == 101
    assert any("2 models on one engine: m, n" in note for note in values.notes)


def test_pods_in_one_exposition_are_servers_of_their_own() -> None:
    one = recorded("relabelled-underscore.prom")
    values = values_of(one + one.replace("vllm-0", "vllm-1").replace("10.0.3.17", "10.0.3.18").replace("} 0.5", "} 0.25"))
    assert len(values.ranks) == 2
    assert number(values, "pool_blocks") == 16386
    assert number(values, "usage") == 0.375


def test_rows_that_differ_in_an_unknown_label_are_not_added() -> None:
    rows = "".join(f'vllm:num_requests_running{{engine="0",model_name="m",shard="{n}"}} 4\n' for n in range(2))
    assert "differ in shard" in reason(values_of(rows), "running")


def test_one_series_with_two_values_is_no_measurement() -> None:
    assert "different values" in reason(values_of(USAGE + USAGE.replace("0.25", "0.5")), "usage")
    assert number(values_of(USAGE + USAGE), "usage") == 0.25


def test_the_same_series_under_two_spellings_counts_once() -> None:
    text = 'vllm:num_requests_running{engine="0"} 3\nvllm_num_requests_running{engine="0"} 3\nray_vllm_num_requests_running{engine="0"} 3\n'
    assert number(values_of(text), "running") == 3


def test_rejections_of_both_limits_add_and_older_versions_say_what_it_takes() -> None:
    rows = "".join(
        f'vllm:admission_rejections_total{{model_name="m",reason="{why}"}} {n}\n'
        for why, n in (("max_num_queued_reqs", 16), ("max_num_queued_tokens", 4))
    )
    assert number(values_of(rows + USAGE), "rejections") == 20
    assert "0.31 or newer and a queue limit" in reason(values_of(USAGE), "rejections")


def test_a_histogram_that_is_called_total_is_read_by_nobody() -> None:
    assert not [name for name in VLLM.wanted if "iteration_tokens" in name]


def test_the_birth_of_a_counter_is_a_start_time_and_never_a_count() -> None:
    values = values_of(recorded("0.32.0.prom"))
    assert number(values, "start_time") > 1.7e9
    assert all(number(values, name) < 1e9 for name in ("preemptions", "finished", "rejections", "prompt_tokens", "prefix_hits"))


def test_the_longest_request_is_that_of_the_base_model() -> None:
    models = {
        "data": [
            {"id": "lora", "parent": "base", "max_model_len": None},
            {"id": "other-lora", "parent": "base", "max_model_len": 99},
            {"id": "base", "parent": None, "max_model_len": 8192},
        ]
    }
    assert number(values_of(USAGE, json={"/v1/models": models}), "max_model_len") == 8192
    shapes: list[Any] = [[], {"data": None}, {"data": [1, None]}, {"data": [{"id": "x", "max_model_len": True}]}, "text"]
    for odd in shapes:
        assert reason(values_of(USAGE, json={"/v1/models": odd}), "max_model_len")


def test_the_asked_model_decides_where_models_differ() -> None:
    models = {"data": [{"id": "a", "max_model_len": 100}, {"id": "b", "max_model_len": 200}]}
    raw = RawState(metrics=parse_samples(USAGE, VLLM.wanted), json={"/v1/models": models})
    assert read(VLLM, raw, 1.0).value("max_model_len") == Reading(100, "tokens", "/v1/models max_model_len", 1.0)
    raw.model = "b"
    assert read(VLLM, raw, 1.0).value("max_model_len") == Reading(200, "tokens", "/v1/models max_model_len", 1.0)


def test_the_version_is_what_the_server_says() -> None:
    raw = RawState(metrics=parse_samples(USAGE, VLLM.wanted), json={"/version": {"version": "0.32.0\x1b[31m"}})
    assert read(VLLM, raw, 1.0).version == "0.32.0 [31m"
    assert read(VLLM, RawState(), 1.0).version == ""


def test_a_simulator_is_marked_and_v0_has_no_null_block() -> None:
    text = (DATA.parent / "llm_d_sim" / "0.10.2.prom").read_text()
    simulated = read_values(DIALECTS["llm_d_sim"], RawState(metrics=parse_samples(text, DIALECTS["llm_d_sim"].wanted)))
    assert any("simulated" in note for note in simulated.notes)
    assert any("V0" in note for note in values_of(recorded("0.6.6-v0.prom")).notes)
    assert not any("simulated" in note or "V0" in note for note in values_of(recorded("0.32.0.prom")).notes)


def test_foreign_text_cannot_reach_a_terminal_through_a_label() -> None:
    values = values_of(INFO.replace('"auto"', '"\x1b]0;owned\x07fp8"'))
    value = values.whole["kv_dtype"]
    assert isinstance(value, Reading)
    assert str(value.value).isprintable()


def test_a_snapshot_survives_being_written_and_read() -> None:
    import msgspec

    from pytest_kvcache.records import SnapshotRecord

    raw = RawState(metrics=parse_samples(recorded("0.32.0-dp2.prom"), VLLM.wanted))
    record = read(VLLM, raw, 12.5, "http://127.0.0.1:8000")
    again = msgspec.json.decode(msgspec.json.encode(record), type=SnapshotRecord)
    assert again == record
    assert again.value("usable_blocks") == Reading(8192, "blocks", record.quantities["usable_blocks"].source, 12.5)
    assert again.value("rejections") == record.value("rejections")


def test_ranks_that_tell_the_same_are_one_and_data_parallel_ranks_are_not() -> None:
    # field case C14: eight series per gauge, one per dp_rank and tp_rank (aibrix issue 1614)
    text = "".join(
        f'vllm:kv_cache_usage_perc{{dp_rank="{dp}",tp_rank="{tp}",model_name="m"}} {usage if tp != 2 else usage - 0.05}\n'
        f'vllm:cache_config_info{{dp_rank="{dp}",tp_rank="{tp}",block_size="16",num_gpu_blocks="2002"}} 1.0\n'
        for dp, usage in ((0, 0.9), (1, 0.1))
        for tp in range(4)
    )
    values = values_of(text)
    assert number(values, "usage", "0") == 0.9, "of copies the worst counts"
    assert number(values, "usage", "1") == 0.1
    assert number(values, "usage") == pytest.approx(0.5)
    assert number(values, "used_blocks") == 1000


def test_each_of_two_servers_keeps_a_null_block_or_none_by_its_own_engine() -> None:
    # an upgrade in progress: V0 and V1 behind one Prometheus
    text = (
        'vllm:cache_config_info{instance="new",block_size="16",engine="0",num_gpu_blocks="1001"} 1.0\n'
        'vllm:kv_cache_usage_perc{instance="new",engine="0",model_name="m"} 0.5\n'
        'vllm:cache_config_info{instance="old",block_size="16",num_gpu_blocks="1000"} 1.0\n'
        'vllm:gpu_cache_usage_perc{instance="old",model_name="m"} 0.25\nvllm:num_requests_swapped{instance="old",model_name="m"} 2.0\n'
    )
    values = values_of(text)
    assert (number(values, "usable_blocks", "new"), number(values, "usable_blocks", "old")) == (1000, 1000)
    assert (number(values, "used_blocks"), number(values, "usage")) == (750, 0.375)
    swapped = values.ranks["new"]["swapped"]
    assert isinstance(swapped, Missing)
    assert swapped.cannot_happen
    assert number(values, "swapped", "old") == 2
