"""Models whose layers hold different things: what the server states is used, what it does not state is named, and no rule takes it for waste."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from finding_cases import made
from made_run import T0, MadeRun, request, sample, snapshot

from pytest_kvcache.analysis.findings import find
from pytest_kvcache.analysis.holding import Footprint, Group, footprint, planned_blocks
from pytest_kvcache.analysis.reconciliations import reconciliations
from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.engines import DIALECTS, RawState, read
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import RunRecord, SnapshotRecord

DATA = Path(__file__).parents[1] / "data" / "exposition" / "vllm"
WASTE = {"hollow-usage", "padding", "fragments", "fixed-slice", "leak", "stale-gauge"}


def scrape(name: str, length: int, **labels: str) -> SnapshotRecord:
    """Return what a recorded exposition says, with some labels of its configuration replaced."""
    text = (DATA / name).read_text()
    for label, value in labels.items():
        head, _, tail = text.partition(f'{label}="')
        text = f'{head}{label}="{value}"{tail.partition(chr(34))[2]}'
    models = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": length}]}
    return read(DIALECTS["vllm"], RawState(parse_samples(text), json={"/v1/models": models}), 1.0)


def of(snapshot: SnapshotRecord) -> Footprint | Missing:
    return footprint(RunRecord(1, "r", "normal", engine="vllm", before=[snapshot]), "blocks")


def test_a_hybrids_scrape_says_what_is_missing_and_which_option_gives_it() -> None:
    server = scrape("0.32.0-hybrid-swa.prom", 131072)
    assert planned_blocks(server) == 11654
    missing = of(server)
    assert isinstance(missing, Missing)
    assert "plans 11654 blocks for one request at the longest length, and full attention in one group would take 8192" in missing.reason
    assert "--kv-model-config PATH, of diagnose --model-config PATH" in missing.reason


def test_a_model_that_slides_in_every_layer_needs_no_file() -> None:
    # Mistral 7B v0.1: the label sliding_window is set, and the engine plans ceil((4096 - 1 + 8192) / 16) + 1 blocks for 32,768 tokens
    labels = {"effective_attention_block_size": "None", "sliding_window": "4096", "kv_cache_max_concurrency": str(29135 / 769)}
    shape = of(scrape("0.32.0-hybrid-swa.prom", 32768, **labels))
    assert shape == Footprint(16, (Group(16, window=4096),))
    assert isinstance(shape, Footprint)
    import numpy as np

    assert shape.blocks(np.array([100.0, 20_000.0])).tolist() == [7, 256], "a long request holds its window, and no more"


def test_a_window_that_the_plan_contradicts_is_not_believed() -> None:
    labels = {"sliding_window": "4096", "kv_cache_max_concurrency": str(29135 / 11654)}
    assert isinstance(of(scrape("0.32.0-hybrid-swa.prom", 131072, **labels)), Missing)


def test_a_latent_cache_is_one_group_and_needs_no_file() -> None:
    # DeepSeek: one latent page a block, blocks of 64
    labels = {"block_size": "64", "effective_attention_block_size": "64", "kv_cache_max_concurrency": str(29135 / 2048)}
    assert of(scrape("0.32.0-hybrid-swa.prom", 131072, **labels)) == Footprint(64, (Group(64),))


def test_a_state_of_fixed_size_is_no_empty_block(tmp_path: Path) -> None:
    """Pure Mamba: a block is as long as the longest request, and a request of forty tokens that holds it wastes nothing."""
    rows = [request(i, 0.01 * i, prompt=30, output=10, length_s=3.0) for i in range(8)]
    level = {"usage": 8 / 99, "used_blocks": 8.0, "free_blocks": 91.0, "running": 8.0}
    about: dict[str, Any] = {"block_size": 4096, "max_model_len": 4096, "max_concurrency": 100.0, "pool_tokens": 409_600}
    samples = [
        sample(rows, T0 - 0.3 + i / 10, usable=99, **(level if 4 < i < 32 else {"usage": 0.0, "used_blocks": 0.0, "free_blocks": 99.0}))
        for i in range(45)
    ]
    before = [snapshot(T0 - 0.5, usable=99, **about)]
    analysis = analyse(MadeRun(rows=rows, samples=samples, before=before, after=[snapshot(T0 + 5, usable=99, **about)]).write(tmp_path))
    fill = analysis.values["fill.mean"]
    assert isinstance(fill, Reading)
    assert fill.number() == pytest.approx(1, abs=0.02)
    assert not {finding.id for finding in find(analysis).found} & WASTE


def test_no_rule_takes_the_groups_of_a_hybrid_for_waste(tmp_path: Path) -> None:
    """A Gemma-3-like server: every token takes a slot in seven groups, so that a seventh of the slots seems to hold tokens."""
    rows = [request(i, 0.01 * i, prompt=1000, output=50, length_s=4.0) for i in range(8)]
    level = {"usage": 8 * 441 / 29134, "used_blocks": 8.0 * 441, "free_blocks": 29134 - 8.0 * 441, "running": 8.0}
    about: dict[str, Any] = {"max_model_len": 131072, "max_concurrency": 2.5, "pool_tokens": 327_680}
    analysis = made(tmp_path, rows, lambda i: level if 4 < i < 42 else {"running": 0.0}, usable=29134, before=about)
    assert isinstance(analysis.values["fill.mean"], Missing)
    found = find(analysis)
    assert not {finding.id for finding in found.found} & WASTE
    assert {"hollow-usage", "fragments", "fixed-slice"} <= {one.id for one in found.unseen}
    room = analysis.values["nearmax.room"]
    assert isinstance(room, Reading), "how much the longest request needs is the engine's own figure"
    assert room.number() == pytest.approx(29134 * (1 - 8 * 441 / 29134) / 11654, rel=0.05)


def test_a_server_that_is_only_watched_does_not_bound_a_length_by_what_a_window_leaves(tmp_path: Path) -> None:
    about: dict[str, Any] = {"max_model_len": 131072, "max_concurrency": 2.5, "pool_tokens": 327_680}
    hybrid = made(tmp_path / "a", (), {"usage": 0.1, "used_blocks": 2913.0, "free_blocks": 26221.0, "running": 8.0}, usable=29134, before=about)
    line = reconciliations(hybrid)[1].lines[1]
    assert "its length is at most that" not in line
    assert "window or state layers hide its length" in line
    plain = made(tmp_path / "b", (), {"usage": 0.5, "used_blocks": 64.0, "free_blocks": 63.0, "running": 2.0})
    assert "held 512 tokens of the pool on average at the highest level: its length is at most that" in reconciliations(plain)[1].lines[1]


def test_a_payload_above_the_slots_of_a_window_is_not_cut(tmp_path: Path) -> None:
    rows = [request(i, 0.01 * i, prompt=6000, output=50, length_s=3.0) for i in range(4)]
    level = {"usage": 4 * 17 / 99, "used_blocks": 4.0 * 17, "free_blocks": 99 - 4.0 * 17, "running": 4.0, "prefix_hits": 0.0}
    about: dict[str, Any] = {"block_size": 16, "sliding_window": 256, "max_model_len": 8192, "max_concurrency": 100 / 145, "prefix_caching": False}
    samples = [
        sample(rows, T0 - 0.3 + i / 10, usable=99, **(level if 4 < i < 32 else {"usage": 0.0, "used_blocks": 0.0, "free_blocks": 99.0}))
        for i in range(45)
    ]
    before = [snapshot(T0 - 0.5, usable=99, **about)]
    analysis = analyse(MadeRun(rows=rows, samples=samples, before=before, after=[msgspec.structs.replace(before[0], wall_s=T0 + 5)]).write(tmp_path))
    payload = analysis.values["payload.peak"]
    assert isinstance(payload, Reading)
    assert payload.number() > 20_000, "four requests of 6,000 tokens, of which the pool of 1,584 slots keeps the windows"


def test_with_its_config_a_hybrid_is_accounted_for(tmp_path: Path) -> None:
    from pytest_kvcache.analysis.modelfile import read_model

    layers = [*["sliding_attention"] * 5, "full_attention"]
    raw = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000, "sliding_window": 512, "max_position_embeddings": 4096,
        "layer_types": layers,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    server = snapshot(T0, usable=899, block_size=32, max_model_len=2048, max_concurrency=900 / 389, pool_tokens=4738)
    found = read_model(tmp_path / "config.json", server)
    assert sorted((group["count"], group.get("window", 0)) for group in found.groups) == [(1, 0), *[(1, 512)] * 5]
    assert found.parts["block.tp1"].value == 32 * 2 * 32 * 2 * 2, "one layer a group, K and V of two heads of 32 in bfloat16"


def test_the_block_that_a_real_log_implies_is_the_one_that_the_config_gives(tmp_path: Path) -> None:
    """Recorded on vLLM 0.32's CPU build: a Gemma 3 of six layers, 900 blocks set by hand where a GiB would have held 65,536."""
    from pytest_kvcache.analysis.modelfile import read_model
    from pytest_kvcache.server.startlog import facts
    from pytest_kvcache.server.startlogs.memory import read_memory

    log = (DATA.parents[1] / "startup" / "vllm-0.32.0-cpu-gemma3-override.log").read_text()
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "bfloat16", "vocab_size": 684, "hidden_size": 256,
        "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 512,
        "sliding_window_pattern": 6, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = facts(log)
    assert told["pool_bytes"] == Reading(900 * 16_384.0, "bytes", told["pool_bytes"].source if isinstance(told["pool_bytes"], Reading) else "")
    (worker,) = read_memory(log)
    assert worker.parts["pool"].value == 900 * 16_384
    server = snapshot(
        T0, usable=899, block_size=32, max_model_len=2048, max_concurrency=2.3136246786632393, pool_tokens=4738, num_gpu_blocks_override=900
    )
    found = read_model(tmp_path / "config.json", server)
    assert found.parts["block.tp1"].value == 16_384
    assert found.parts["weights"].value == pytest.approx(3.3e6, rel=0.01)
    assert sorted(group.get("window", 0) for group in found.groups) == [0, 512, 512, 512, 512, 512]
