"""Pool against card without a start-up log: weights and pool follow from the model's files, GPU by GPU, and say that they are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from finding_cases import GIB, card
from made_run import T0, MadeRun, closed_loop, sample, snapshot

from pytest_kvcache.analysis.cards import card_ledgers
from pytest_kvcache.analysis.ledger import COMPUTED, STATED, CardLedger
from pytest_kvcache.analysis.modelfile import read_model, split_of, with_model
from pytest_kvcache.analysis.reconciliations import reconciliations
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.errors import UsageError
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GpuRow, MemoryRow, SnapshotRecord, StartMemory, ValueRecord
from pytest_kvcache.runfolder import Run

LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False, "torch_dtype": "float16",
    "max_position_embeddings": 4096,
}  # fmt: skip
BLOCK = 8 << 20
"""Sixteen tokens of 512 KiB each: the article's ledger."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B))
    return tmp_path / "config.json"


def gib(value: Value) -> float:
    assert isinstance(value, Reading), value
    return round(value.number() / GIB, 2)


def server(blocks: int, **more: Any) -> SnapshotRecord:
    """Return what a vLLM 0.32 on cards tells over HTTP: blocks and a share, and no byte."""
    told = {"max_model_len": 4096, "gpu_memory_utilization": 0.9, "pool_tokens": blocks * 16, "max_concurrency": blocks / 256, **more}
    return snapshot(T0 - 0.5, usable=blocks - 1, missing=("pool_bytes",), **told)


def run_on(folder: Path, cards: list[GpuRow], before: SnapshotRecord, pids: int = 1, **record: Any) -> Run:
    rows = closed_loop()
    samples = [sample(rows, T0 - 0.3 + i / 10) for i in range(48)]
    memory = MemoryRow(128 * GIB, 100 * GIB, processes={str(number + 1): GIB for number in range(pids)}) if pids else None
    samples[10] = msgspec.structs.replace(samples[10], gpus=cards, memory=memory)
    return MadeRun(rows=rows, samples=samples, before=[before], record=record).write(folder / "runs" / "1-normal")


def told(run: Run, config: Path) -> Analysis:
    return analyse(Run(run.folder, with_model(run.record, config)))


def only(analysis: Analysis) -> CardLedger:
    (one,) = card_ledgers(analysis)
    return one


def test_the_articles_card_is_reconciled_without_a_log(tmp_path: Path, config: Path) -> None:
    # an A100-80G, a 7B model, 18 GiB of pool: what /metrics and the driver tell, and the model's config.json
    run = run_on(tmp_path, [card(used=58, ours=48, others=10)], server(18 * GIB // BLOCK))
    ledger = only(told(run, config))
    assert (ledger.weights.how, ledger.pool.how) == (COMPUTED, COMPUTED)
    assert gib(ledger.weights.value) == 12.55
    assert gib(ledger.pool.value) == 18
    assert gib(ledger.expected_pool) == 59.45
    assert gib(ledger.squeezed) == 41.45
    assert "(weights ± 128.52 MiB and KV pool computed): squeezed by 41.45 GiB because of" in ledger.text
    assert isinstance(ledger.pool.value, Reading)
    assert ledger.pool.value.source == "computed: 2,304 blocks x 8,388,608 bytes (the GPU that it has a process on)"
    assert sum(part.bytes or 0.0 for part in ledger.parts) == pytest.approx(80 * GIB)


def test_without_the_files_it_says_what_to_name(tmp_path: Path) -> None:
    analysis = analyse(run_on(tmp_path, [card(used=58, ours=48, others=10)], server(2304)))
    assert isinstance(only(analysis).squeezed, Missing)
    assert "--model-config" in reconciliations(analysis)[0].lacking


def test_a_log_counts_before_what_is_computed(tmp_path: Path, config: Path) -> None:
    stated = {"weights": 14.0 * GIB, "pool": 20.0 * GIB}
    start = [StartMemory("Worker", 1, 0, {name: ValueRecord.of(Reading(size, "bytes", "start-up log")) for name, size in stated.items()})]
    ledger = only(told(run_on(tmp_path, [card(used=58, ours=58)], server(2304), start_memory=start), config))
    assert (ledger.weights.how, ledger.pool.how) == (STATED, STATED)


def test_two_tensor_parallel_cards_hold_half_the_weights_and_half_of_each_block(tmp_path: Path, config: Path) -> None:
    # 9,000 blocks of 8 MiB over two cards: 35.16 GiB on each
    run = run_on(tmp_path, [card(0, used=52, ours=51), card(1, used=52, ours=51)], server(9000), pids=2)
    ledgers = card_ledgers(told(run, config))
    assert [gib(one.weights.value) for one in ledgers] == [6.28, 6.28]
    assert [gib(one.pool.value) for one in ledgers] == [35.16, 35.16]
    assert [gib(one.expected_pool) for one in ledgers] == [65.72, 65.72]
    assert isinstance(ledgers[0].weights.value, Reading)
    assert "shared evenly by 2 GPUs (the 2 GPUs that it has processes on, taken as tensor-parallel)" in ledgers[0].weights.value.source


def test_pipeline_stages_hold_their_own_layers(tmp_path: Path, config: Path) -> None:
    command = ["vllm", "serve", "m", "--pipeline-parallel-size", "2"]
    run = run_on(tmp_path, [card(0, used=52, ours=51), card(1, used=52, ours=51)], server(9000), pids=2, launch_command=command)
    ledgers = card_ledgers(told(run, config))
    assert [gib(one.pool.value) for one in ledgers] == [35.16, 35.16], "16 of 32 layers each"
    assert [gib(one.weights.value) for one in ledgers] == [6.28, 6.28], "the embedding lies on the first, the output head on the last"


def test_layers_that_do_not_divide_are_counted_stage_by_stage(tmp_path: Path, config: Path) -> None:
    """Field case G04: 61 layers on three nodes; here 31 on four stages, of which the last also holds the head."""
    config.write_text(json.dumps({**LLAMA2_7B, "num_hidden_layers": 31}))
    run = run_on(tmp_path, [card(n, used=40, ours=39) for n in range(4)], server(9000), pids=4, launch_command=["vllm", "serve", "m", "-pp", "4"])
    ledgers = card_ledgers(told(run, config))
    pools = [gib(one.pool.value) for one in ledgers]
    layers = [round(pool / (9000 * 16 * 16384 / GIB)) for pool in pools]
    assert sum(layers) == 31
    assert max(layers) - min(layers) == 1, "and not a quarter of 31 on each"
    weights = [gib(one.weights.value) for one in ledgers]
    assert weights == [3.26, 3.02, 3.02, 2.88], "eight layers and the embedding, eight, eight, seven and the head"


def test_a_pool_that_the_card_cannot_hold_is_called_that(tmp_path: Path, config: Path) -> None:
    """Field case A22: 8,348 blocks of 8 MiB are 65 GiB, and the card has 24."""
    hidden = [GpuRow(0, "GPU-0", "A10", 24 * GIB, 22 * GIB, 2 * GIB)]
    ledger = only(told(run_on(tmp_path, hidden, server(8348), pids=0), config))
    assert gib(ledger.pool.value) == 65.22
    assert any("more than the card has in use" in note for note in ledger.notes)


def test_cards_whose_processes_are_hidden_are_the_servers_where_it_needs_them_all(tmp_path: Path, config: Path) -> None:
    """An exporter on another machine names no process, and a card is not given to the server by guess."""
    cards = [GpuRow(n, f"GPU-{n}", "H100", 80 * GIB, 52 * GIB, 28 * GIB, host="node-a") for n in range(2)]
    hidden = card_ledgers(told(run_on(tmp_path / "a", cards, server(9000), pids=0), config))
    assert all(isinstance(one.pool.value, Missing) for one in hidden)
    known = run_on(tmp_path / "b", cards, server(9000), pids=0, launch_command=["vllm", "serve", "m", "-tp", "2"])
    assert [gib(one.pool.value) for one in card_ledgers(told(known, config))] == [35.16, 35.16]
    one = card_ledgers(told(run_on(tmp_path / "c", cards[:1], server(2304), pids=0), config))
    assert gib(one[0].squeezed) == 41.45, "the only card of a server is its own"


def test_an_override_is_as_many_bytes_as_its_blocks(tmp_path: Path, config: Path) -> None:
    analysis = told(run_on(tmp_path, [card(used=20, ours=20)], server(512, num_gpu_blocks_override=512)), config)
    ledger = only(analysis)
    assert gib(ledger.pool.value) == 4
    assert ledger.reasons[0] == "a pool that was set by hand (num_gpu_blocks_override 512 blocks)"


def test_sglang_states_the_weights_of_each_rank(tmp_path: Path) -> None:
    before = msgspec.structs.replace(
        snapshot(T0 - 0.5, weights_bytes=7.7 * GIB, pool_bytes=18.0 * GIB, gpu_memory_utilization=0.85, pool_tokens=262144), engine="sglang"
    )
    run = run_on(tmp_path, [card(0, used=30, ours=29), card(1, used=30, ours=29)], before, pids=2, engine="sglang")
    ledgers = card_ledgers(analyse(run))
    assert [(gib(one.weights.value), gib(one.pool.value), one.weights.how) for one in ledgers] == [(7.7, 18, STATED)] * 2


def test_an_fp8_cache_halves_the_block(config: Path) -> None:
    parts = read_model(config, server(2304, kv_dtype="fp8")).parts
    assert parts["block.tp1"].value == BLOCK // 2
    assert parts["block.tp4"].value == BLOCK // 8
    assert parts["block.tp1.pp2.1"].value == BLOCK // 4


def test_a_configuration_that_the_server_contradicts_gives_no_pool(config: Path, tmp_path: Path) -> None:
    # 999 blocks for a longest request are not this model's 256
    other = server(2304, max_concurrency=2304 / 999)
    found = read_model(config, other)
    parts = found.parts
    assert found.groups == [], "and no group either: what requests hold would be reckoned by another model's rule"
    assert "does not reproduce this server's own figures" in str(parts["layout"].missing)
    assert not [name for name in parts if name.startswith("block.")]
    ledger = only(told(run_on(tmp_path, [card(used=58, ours=58)], other), config))
    assert isinstance(ledger.squeezed, Missing)
    assert "does not reproduce" in ledger.squeezed.reason


def test_a_server_that_tells_too_little_to_contradict_is_computed_all_the_same(config: Path) -> None:
    """Before vLLM 0.22 /metrics says blocks and their size, and nothing of what one request takes."""
    full = server(2304)
    few = msgspec.structs.replace(
        full, quantities={n: v for n, v in full.quantities.items() if n in {"pool_blocks", "usable_blocks", "block_size", "kv_dtype"}}
    )
    assert read_model(config, few).parts["block.tp2"].value == BLOCK // 2


def test_what_an_engine_does_not_group_still_has_weights(config: Path, tmp_path: Path) -> None:
    other = msgspec.structs.replace(server(10), engine="sglang")
    found = read_model(config, other)
    assert found.groups == []
    assert {"weights", "weights.spread"} <= set(found.parts)
    assert not [name for name in found.parts if name.startswith("block.")]
    config.write_text(json.dumps({**LLAMA2_7B, "vocab_size": None}))
    with pytest.raises(UsageError, match="sglang"):
        read_model(config, other)


@pytest.mark.parametrize(
    ("command", "right"),
    [
        (["vllm", "serve", "m", "--tensor-parallel-size", "4", "--pipeline-parallel-size=2"], (4, 2)),
        (["vllm", "serve", "m", "-tp", "2"], (2, 1)),
        (["python", "-m", "sglang.launch_server", "--tp", "8", "--pp-size", "2"], (8, 2)),
        (["vllm", "serve", "m", "--port", "8000"], (1, 1)),
    ],
)
def test_the_command_says_over_how_many_cards_a_model_is_spread(command: list[str], right: tuple[int, int], tmp_path: Path) -> None:
    split = split_of(run_on(tmp_path, [], server(10), launch_command=command).record, [], 0)
    assert not isinstance(split, Missing)
    assert (split.tp, split.pp) == right


def test_a_log_of_another_start_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    """The file of --log, or one that is appended to, may tell of a pool that is no more."""
    log = (
        "(EngineCore pid=1) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', tensor_parallel_size=1\n"
        "(Worker pid=2) INFO Model loading took 14.0 GiB memory and 9.1 seconds\n"
        "(Worker pid=2) INFO [gpu_worker.py:760] Available KV cache memory: 40.0 GiB\n"
        "(EngineCore pid=1) INFO [kv_cache_utils.py:2327] GPU KV cache size: 81,920 tokens, Maximum concurrency for 4,096 tokens per request: 20.00x\n"
    )
    from pytest_kvcache.server.startlogs.memory import read_memory

    start = read_memory(log)
    same = server(5120)
    label = msgspec.structs.replace(same.quantities["pool_tokens"], source="vllm:cache_config_info{kv_cache_size_tokens}")
    for blocks, kept in ((5120, True), (2304, False)):
        told = msgspec.structs.replace(label, value=float(blocks * 16))
        before = msgspec.structs.replace(same, quantities={**same.quantities, "pool_tokens": told})
        run = run_on(tmp_path / str(blocks), [card(used=58, ours=58)], before, start_memory=start)
        ledger = only(analyse(run))
        assert isinstance(ledger.pool.value, Reading) is kept
        assert any("speaks of a pool of 81,920 tokens and the server of 36,864" in note for note in ledger.notes) is not kept


def test_a_run_that_was_recorded_with_the_memory_of_another_pool_does_not_keep_it(tmp_path: Path) -> None:
    """Runs of before hold what vLLM found as the pool of nine blocks: the log beside them says what it is, else it is not known."""
    stated = {"pool": 1.0 * GIB, "weights": 0.01 * GIB}
    start = [StartMemory("Worker", 1, 0, {name: ValueRecord.of(Reading(size, "bytes", "start-up log")) for name, size in stated.items()})]
    run = run_on(tmp_path, [card(used=2, ours=2)], server(9, num_gpu_blocks_override=9), start_memory=start)
    assert isinstance(only(analyse(run)).pool.value, Missing)
    (run.folder / "server.log").write_text(
        "(Worker pid=1) INFO [cpu_worker.py:260] Explicitly set (1.0/8.34) GiB for KV cache on node 0.\n"
        "(EngineCore pid=3) INFO [kv_cache_utils.py:2619] Overriding num_gpu_blocks=65536 with num_gpu_blocks_override=9\n"
    )
    pool = only(analyse(run)).pool.value
    assert isinstance(pool, Reading)
    assert pool.value == 9 * 16_384
