"""``plan`` on the arithmetic that every engineer can check by hand, and on what cannot be meant."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_models import LLAMA_2_7B, LLAMA_2_70B, LLAMA_31_8B, llama

from pytest_kvcache.capacity import plan
from pytest_kvcache.capacity.documents import Input
from pytest_kvcache.capacity.levers import Lever, Sharing
from pytest_kvcache.capacity.traffic import Lane, Traffic, demand
from pytest_kvcache.errors import CannotJudge, UsageError

GIB = 1 << 30
CONFIGS = Path(__file__).parents[1] / "data" / "capacity" / "configs"


def test_a_7b_model_in_half_precision_takes_512_kib_a_token() -> None:
    made = plan(LLAMA_2_7B, dtype="float16")
    assert made.answer.growth.growth_bytes_per_token == 512 * 1024
    layer = plan({**LLAMA_2_7B, "num_hidden_layers": 1}, dtype="float16")
    assert layer.answer.growth.growth_bytes_per_token == 16 * 1024


def test_4096_tokens_take_2_gib_and_32_requests_of_2048_take_32() -> None:
    assert plan(LLAMA_2_7B, length=4096).bytes_per_sequence == 2 * GIB
    made = plan(LLAMA_2_7B, length=2048, concurrency=32, weights="14GB", block_size=16)
    assert made.load is not None
    assert 32 * made.bytes_per_sequence == 32 * GIB
    block = made.answer.layout.bytes_per_block
    assert made.load.kv_bytes == 32 * GIB + block  # and the null block
    assert made.load.kv_bytes > 2 * 14 * 10**9


def test_one_8k_request_of_a_70b_takes_2_5_gib_and_a_hundred_need_three_to_four_cards() -> None:
    made = plan(LLAMA_2_70B, length=8192, concurrency=100, weights="140GB", utilization=None, block_size=16)
    assert made.bytes_per_sequence == 2.5 * GIB
    assert made.load is not None
    assert made.load.demand.peak_blocks * 16 * 327680 == 250 * GIB
    # 250 GiB of KV alone are more than three 80 GB cards and less than four
    assert 3 < 250 * GIB / (80 * 10**9) < 4
    cards = {need.cards: need.fits for need in made.load.needs}
    assert cards[1] == ""  # with the weights no single card does
    assert cards[8].startswith("80 GB")


def test_padding_to_the_longest_leaves_18_percent_payload() -> None:
    lengths = [2048] + [256] * 15
    real, reserved = sum(lengths), 16 * max(lengths)
    assert (real, reserved) == (5888, 32768)
    assert round(100 * real / reserved) == 18
    padded = Traffic((Lane("batch", 16, ((2048, 1.0),)),))
    paged = Traffic((Lane("long", 1, ((2048, 1.0),)), Lane("short", 15, ((256, 1.0),))))
    assert demand(paged, lambda tokens: tokens).peak_blocks == 5888
    assert demand(padded, lambda tokens: tokens).peak_blocks == 32768


def test_given_the_card_what_fits_and_given_the_traffic_what_card() -> None:
    common: dict[str, Any] = {"utilization": 0.9, "weights": "16GiB", "max_model_len": 8192, "length": 8192}
    made = plan(LLAMA_31_8B, gpu_memory="80GiB", concurrency=55, **common)
    assert made.verdict == "PASS"
    assert made.answer.pool is not None
    assert made.answer.pool.pool_blocks == 56 * GIB // (2 * 1024 * 1024)
    one_more = plan(LLAMA_31_8B, gpu_memory="80GiB", concurrency=56, **common)
    assert one_more.verdict == "FAIL"  # 56 GiB are 56 requests, and one block of it is the null block
    assert one_more.load is not None
    need = one_more.load.needs[0].card_bytes
    assert need > 80 * GIB
    assert plan(LLAMA_31_8B, gpu_memory=need, concurrency=56, **common).verdict == "PASS"
    assert plan(LLAMA_31_8B, gpu_memory=need - 4 * 2**20, concurrency=56, **common).verdict == "FAIL"


def test_a_resting_half_is_no_peak_of_long_requests() -> None:
    inputs = [Input("campaign", 30_000, 2_000, 8), Input("chat", 500, 500, 40), Input("novel", 200_000, 1_000, 1)]
    made = plan(LLAMA_31_8B, kv_memory="16GiB", max_model_len=40_000, block_size=16, checklist=inputs)
    assert [one.verdict for one in made.checklist] == ["FAIL", "PASS", "FAIL"]
    assert made.checklist[0].share == pytest.approx(8 * 2000 / 8191)
    assert made.checklist[0].fits == 4
    assert "refused or cut" in made.checklist[2].reason
    assert made.verdict == "FAIL"
    assert "campaign" in made.reason
    assert "novel" in made.reason


def test_a_histogram_passes_only_at_a_risk_that_its_trials_show() -> None:
    traffic = Traffic((Lane("all", 40, ((1000, 95.0), (30_000, 5.0))),))
    tight = plan(LLAMA_31_8B, kv_memory="8GiB", max_model_len=32_000, block_size=16, traffic=traffic)
    wide = plan(LLAMA_31_8B, kv_memory="60GiB", max_model_len=32_000, block_size=16, traffic=traffic)
    assert tight.verdict == "FAIL"
    assert wide.verdict == "PASS"
    assert "probability" in wide.reason
    assert wide.load is not None
    assert wide.load.chance is not None
    few = plan(LLAMA_31_8B, kv_memory="60GiB", max_model_len=32_000, block_size=16, traffic=traffic, risk=1e-6)
    assert few.verdict == "INCONCLUSIVE"


def test_data_parallel_engines_have_a_pool_each() -> None:
    one = plan(LLAMA_31_8B, kv_memory="8GiB", max_model_len=8192, block_size=16, concurrency=14, length=8192)
    two = plan(LLAMA_31_8B, kv_memory="8GiB", max_model_len=8192, block_size=16, concurrency=14, length=8192, dp=2)
    assert (one.verdict, two.verdict) == ("FAIL", "PASS")
    odd = plan(LLAMA_31_8B, kv_memory="8GiB", max_model_len=8192, block_size=16, concurrency=15, length=8192, dp=2)
    assert odd.verdict == "FAIL"  # eight on one of them, and the null block leaves room for seven


def test_seats_bound_what_runs_at_once() -> None:
    made = plan(LLAMA_31_8B, kv_memory="8GiB", max_model_len=8192, block_size=16, concurrency=6, length=100, max_num_seqs=4)
    assert made.verdict == "FAIL"
    assert "4 seats" in made.reason


def test_what_the_card_leaves_is_not_guessed_without_weights() -> None:
    with pytest.raises(CannotJudge, match="weights"):
        plan(LLAMA_31_8B, gpu_memory="80GiB")
    by_count = plan(LLAMA_31_8B, gpu_memory="80GiB", utilization=0.9, parameters="8B")
    assert by_count.answer.ledger is not None
    assert by_count.answer.ledger.kv_bytes == math.ceil(80 * GIB * 0.9) - 16 * 10**9


def test_several_gpus_share_weights_and_heads() -> None:
    made = plan(LLAMA_2_70B, gpu_memory="80GiB", utilization=0.9, weights="140GB", tp=4, max_model_len=8192, length=8192, concurrency=10)
    assert made.answer.growth.growth_bytes_per_token == 327680 // 4
    assert made.answer.ledger is not None
    assert made.answer.ledger.kv_bytes == math.ceil(80 * GIB * 0.9) - 35 * 10**9
    assert any("evenly" in line for line in made.assumptions)


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_memory": "80GiB", "kv_memory": "1GiB"},
        {"kv_memory": "1GiB", "utilization": 0.9},
        {"kv_memory": "1GiB", "activation": "1GiB"},
        {"gpu_memory": "80GiB", "weights": "14GiB", "parameters": "7B"},
        {"gpu_memory": "80GiB", "weights": "14GiB", "utilization": 90},
        {"gpu_memory": "80 apples", "weights": "14GiB"},
        {"gpu_memory": "0", "weights": "14GiB"},
        {"activation": "5GiB"},
        {"slots": -3, "engine": "llamacpp"},
        {"async_scheduling": "maybe"},
        {"swa_ratio": 5, "engine": "sglang"},
        {"encoder_tokens": -1},
        {"state_slots": 1.5},
        {"risk": 2, "kv_memory": "1GiB"},
        {"num_gpu_blocks_override": 3, "engine": "sglang"},
        {"kv_memory": "1GiB", "max_model_len": 0},
        {"kv_memory": "1GiB", "max_model_len": -5},
        {"kv_memory": "1GX"},
        {"kv_memory": -5},
        {"kv_memory": float("nan")},
        {"engine": "tgi"},
        {"platform": "tpu"},
        {"block_size": 0},
        {"concurrency": 4},
        {"concurrency": -1, "length": 5},
        {"concurrency": True, "length": 5},
        {"traffic": "none.toml"},
        {"checklist": "none.toml"},
        {"kv_dtype": "fp7"},
        {"tp": 3},
        {"tp": 0},
        {"blocksize": 16},
        {"parameters": "many", "gpu_memory": "80GiB"},
        {"with_levers": True, "hit_share": 80},
        {"risk": 0, "concurrency": 1, "length": 5, "kv_memory": "100GiB"},
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        plan(LLAMA_31_8B, **options)


def by_name(rows: tuple[Lever, ...], name: str) -> list[Lever]:
    return [row for row in rows if row.name == name]


def test_each_lever_says_what_it_does_and_what_it_costs() -> None:
    made = plan(
        LLAMA_31_8B, gpu_memory="80GiB", utilization=0.9, weights="16GiB", max_model_len=16384, concurrency=20, length=8192, with_levers=True,
        shared_prefix=5000, hit_share=1.0,
    )  # fmt: skip
    rows = made.levers
    assert {row.name for row in rows} == {
        "as asked", "KV dtype", "max length cap", "max-num-seqs", "block size", "prefix caching", "sliding window", "GQA sibling", "utilization", "another GPU",
    }  # fmt: skip
    assert all(row.cost for row in rows[1:])
    base = rows[0]
    (fp8,) = by_name(rows, "KV dtype")
    assert fp8.sequence_bytes == (base.sequence_bytes or 0) // 2
    assert (fp8.requests or 0) in (2 * (base.requests or 0), 2 * (base.requests or 0) + 1)
    assert "quality" in fp8.cost
    (cached,) = by_name(rows, "prefix caching")
    # 5,000 tokens are 312 whole blocks: held once, each request holds 200 of its own
    assert cached.requests == (made.answer.pool.usable_blocks - 312) // 200  # type: ignore[union-attr]
    assert cached.demand_blocks == 20 * 200 + 312
    (sibling,) = by_name(rows, "GQA sibling")
    assert sibling.sequence_bytes == (base.sequence_bytes or 0) // 4
    up, down = by_name(rows, "utilization")
    assert (up.requests or 0) > (base.requests or 0) > (down.requests or 0)
    assert "out of memory" in up.cost
    assert len(by_name(rows, "another GPU")) == 2


def test_a_lever_that_the_model_cannot_have_is_told_and_not_left_out() -> None:
    made = plan(llama(4, 9, 9), kv_memory="1GiB", weights="1GiB", max_model_len=1024, with_levers=True)
    assert any("not possible" in row.cost for row in by_name(made.levers, "another GPU"))
    with pytest.raises(UsageError):
        Sharing(-1)


def test_planning_reads_nothing_heavy() -> None:
    code = (
        "import sys, json; from pytest_kvcache.capacity import plan; plan(json.loads(sys.argv[1]), kv_memory='1GiB', concurrency=2, length=64, with_levers=True);"
        "print(*sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, json.dumps(LLAMA_31_8B)], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    for heavy in ("numpy", "pandas", "scipy", "msgspec", "httpx", "transformers", "torch", "pytest"):
        assert heavy not in out


def test_a_folder_tells_its_own_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16 * 10**9}}))
    made = plan(tmp_path, gpu_memory="80GiB", utilization=0.9)
    assert made.answer.ledger is not None
    assert made.answer.ledger.lines[0] == ("weights", 16 * 10**9, "total_size of model.safetensors.index.json")


def test_what_is_assumed_of_the_machine_is_said_whichever_it_is() -> None:
    card = plan(LLAMA_31_8B, gpu_memory="80GiB", weights="15GiB")
    assert card.answer.layout.block_size == 16
    assert any(text.startswith("a card is meant (--gpu-memory states one)") for text in card.assumptions)
    assert any("vLLM's CPU build is meant" in text for text in plan(LLAMA_31_8B, kv_memory="20GiB").assumptions)
    for stated in (plan(LLAMA_31_8B, kv_memory="20GiB", platform="gpu"), plan(LLAMA_31_8B, kv_memory="20GiB", engine="sglang")):
        assert not any("is meant" in text for text in stated.assumptions)


def test_a_configuration_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA_31_8B).encode())
    assert plan(path).growth_bytes_per_token == 131072


@pytest.mark.parametrize(
    ("tp", "dcp", "words"),
    [
        (2, 3, "must be divisible by dcp_size=3"),
        (8, 2, "more tensor-parallel ranks (8) than the model has KV heads (8)"),
        (16, 4, "more than the 2 copies of each KV head"),
        (16, 2, ""),
    ],
)
def test_what_decode_context_parallelism_needs_is_told_before_a_start(tp: int, dcp: int, words: str) -> None:
    made = plan(LLAMA_31_8B, kv_memory="20GiB", platform="gpu", tp=tp, dcp=dcp)
    assert made.starts == (not words)
    assert words in made.reason


def test_a_share_of_no_card_is_said_to_decide_nothing() -> None:
    assert any("utilization 0.9 decides nothing" in note for note in plan(LLAMA_31_8B, utilization=0.9).notes)
    assert not any("decides nothing" in note for note in plan(LLAMA_31_8B, utilization=0.9, gpu_memory="80GiB", weights="15GiB").notes)


def test_ranks_that_share_the_tokens_hold_a_share_each() -> None:
    config = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    made = plan(config, platform="gpu", tp=8, dcp=8, kv_memory="30GiB", max_model_len=65536, length=60001)
    assert made.growth_bytes_per_token == 70272 // 8
    assert made.bytes_per_sequence == 7501 * 70272
    assert "70272 / 8 (dcp) = 8784" in made.answer.growth.derivation


@pytest.mark.parametrize(("card", "batched"), [(None, 8192), ("44GiB", 2048), ("80GiB", 8192), ("178GiB", 16384)])
def test_window_layers_are_charged_for_what_a_card_of_this_size_batches(card: str | None, batched: int) -> None:
    config = json.loads((CONFIGS / "gpt-oss-20b.json").read_text())
    memory: dict[str, Any] = {"gpu_memory": card, "weights": "12GiB"} if card else {"kv_memory": "10GiB", "platform": "gpu"}
    made = plan(config, **memory)
    assert made.answer.layout.in_flight_tokens == 2 * batched
    assert any(f"taken as {batched}" in line for line in made.assumptions)


def test_more_requests_than_vllm_seats_by_default_are_told_to_wait() -> None:
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    small: dict[str, Any] = {"gpu_memory": "44GiB", "weights": "15GiB", "length": 64}
    assert any("vLLM's default for this machine is 256: of 300 requests" in note for note in plan(config, concurrency=300, **small).notes)
    assert not any("vLLM's default" in note for note in plan(config, concurrency=300, max_num_seqs=300, **small).notes)
    assert not any("vLLM's default" in note for note in plan(config, concurrency=256, **small).notes)


@pytest.mark.parametrize(
    ("engine", "more"), [("llamacpp", {"tp": 2}), ("llamacpp", {"pp": 2}), ("llamacpp", {"dp": 2}), ("sglang", {"dcp": 2}), ("paged", {"dcp": 2})]
)
def test_parallelism_that_an_engine_does_not_have_is_refused(engine: str, more: dict[str, Any]) -> None:
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    with pytest.raises(UsageError, match="planned"):
        plan(config, engine=engine, **more)
