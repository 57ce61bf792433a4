"""What is no part of the pool, though its name says cache: host and offload tiers, other counters, limits that no error text teaches."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_case import state

from pytest_kvcache.engines import DIALECTS, read_values
from pytest_kvcache.observe.pasted import sort_text
from pytest_kvcache.observe.size_notes import size_notes
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value
from pytest_kvcache.server.transport import Answer

DATA = Path(__file__).parent.parent / "data" / "exposition"


def values(engine: str, text: str) -> dict[str, Value]:
    return read_values(DIALECTS[engine], state(text, {}, {})).whole


@pytest.mark.parametrize(
    ("engine", "recorded", "more"),
    [
        (
            "vllm",
            "vllm/0.32.0.prom",
            'vllm:kv_offload_cpu_usage_perc{engine="0",model_name="m"} 0.9\nvllm:simple_kv_offload_blocks{engine="0"} 41000\n'
            'vllm:hisparse_host_cache_usage_perc{engine="0",model_name="m"} 0.8\nvllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 99\n'
            'vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 7\nvllm:iteration_tokens_total_count{engine="0",model_name="m"} 3\n',
        ),
        ("vllm", "vllm/0.6.6-v0.prom", ""),
        (
            "sglang",
            "sglang/0.5.20.prom",
            'sglang:hicache_host_total_tokens{model_name="m"} 900000\nsglang:hicache_host_used_tokens{model_name="m"} 800000\n',
        ),
        ("trtllm_serve", "trtllm_serve/1.x.prom", "trtllm_kv_cache_host_utilization 0.95\n"),
        ("llamacpp", "llamacpp/b11434.prom", "llamacpp:n_tokens_max 123456\n"),
    ],
)
def test_a_second_tier_is_never_added_to_the_pool(engine: str, recorded: str, more: str) -> None:
    text = (DATA / recorded).read_text()
    before, after = values(engine, text), values(engine, text + more)
    for name in QUANTITIES:
        was, now = before[name], after[name]
        assert type(was) is type(now), name
        assert not isinstance(was, Reading) or was.value == now.value, name  # type: ignore[union-attr]


def test_the_swap_pool_of_v0_is_not_the_pool() -> None:
    text = (DATA / "vllm/0.6.6-v0.prom").read_text()
    full = text.replace("vllm:cpu_cache_usage_perc", "vllm:cpu_cache_usage_perc").replace("} 0.05", "} 1.0")
    assert values("vllm", full)["usage"] == values("vllm", text)["usage"]


def test_every_dialect_says_what_its_usage_is_a_share_of() -> None:
    """Ratios of engines that count idle cached KV, reservations or stale slots differently cannot be compared."""
    free = {name for name, dialect in DIALECTS.items() if dialect.idle_cached_is_free is True}
    used = {name for name, dialect in DIALECTS.items() if dialect.idle_cached_is_free is False}
    assert free == {"vllm", "ray_vllm", "llm_d_sim", "sglang", "ray_sglang", "llamacpp"}
    assert used == {"lmdeploy"}
    assert "reserve" in DIALECTS["tgi"].meaning
    assert all(dialect.meaning for name, dialect in DIALECTS.items() if dialect.idle_cached_is_free is False)


def reading(value: float, unit: str = "requests") -> Reading:
    return Reading(value, unit, "x")


def test_seats_that_are_taken_are_told_from_a_pool_that_is_full() -> None:
    base: dict[str, Value] = {"running": reading(64), "max_num_seqs": reading(64), "waiting": reading(9), "usage": reading(0.4, "ratio")}
    assert any("the seats bind" in note for note in size_notes(base))
    for change in ({"usage": reading(0.97, "ratio")}, {"running": reading(40)}, {"waiting": reading(0)}, {"max_num_seqs": Missing("no")}):
        assert not any("the seats bind" in note for note in size_notes({**base, **change}))


def test_an_engine_whose_usage_holds_idle_cache_tells_no_price_of_a_request() -> None:
    base: dict[str, Value] = {"running": reading(8), "usage": reading(0.875, "ratio")}
    assert any("no more than 9 such fit" in note for note in size_notes(base))
    assert size_notes(base, idle_counts_as_used=True) == []
    assert size_notes({}) == []
    one = size_notes(
        {"running": reading(1), "used_blocks": reading(30, "blocks"), "usable_blocks": reading(99, "blocks"), "usage": reading(0.3, "ratio")}
    )
    assert one == ["the one running request holds 30 blocks: 3 such would fill the pool"]


@pytest.mark.parametrize("number", ["1e300", "1" + "0" * 300, "1e15"])
def test_a_number_that_no_server_can_have_is_missing_and_never_three_hundred_digits(number: str) -> None:
    text = (DATA / "vllm/0.32.0.prom").read_text()
    page = "\n".join(line.rpartition(" ")[0] + f" {number}" if line and not line.startswith("#") else line for line in text.splitlines())
    found = values("vllm", page.replace('num_gpu_blocks="', f'num_gpu_blocks="{number}" was="'))
    for name in ("running", "waiting", "preemptions", "prompt_tokens", "pool_blocks", "usage"):
        known = found[name]
        assert isinstance(known, Missing), name
        assert len(known.reason) < 300


@pytest.mark.parametrize("digits", ["1" + "0" * 400, "9" * 4000, "1e400"])
def test_a_whole_number_without_end_in_a_json_body_is_missing(digits: str) -> None:
    text = (
        f'{{"max_total_num_tokens": {digits}, "max_running_requests": 8, "internal_states": [{{}}], "mem_fraction_static": 0.9, "page_size": 1, '
        '"disable_radix_cache": false}'
    )
    for body in (sort_text("body", text.encode()).json[0], Answer(200, "application/json", "", text.encode(), False, 0.1).value):
        found = read_values(DIALECTS["sglang"], state("", {"/server_info": body}, {})).whole
        assert isinstance(found["pool_tokens"], Missing)
        assert isinstance(found["block_size"], Reading)
