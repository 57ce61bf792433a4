"""The card: what is left for the pool by each engine's own rule, and which card a pool needs."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from pytest_kvcache.capacity.card import Card, card_for, find_weights, ledger, weights_of_parameters
from pytest_kvcache.errors import CannotJudge, UsageError

GIB = 1 << 30


def gib(value: float) -> int:
    return round(value * GIB)


def test_a_start_of_an_80_gb_card_adds_up_as_its_log_says() -> None:
    # field case A10: 79.32 x 0.80 = 63.45; weights 15.53, other 0.09, activation 1.72, pool 46.11
    found = ledger(Card(gib(79.32), 0.80, gib(15.53), gib(1.72), 0, gib(0.09)), "vllm")
    assert found.kv_bytes / GIB == pytest.approx(46.11, abs=0.011)
    assert "46.1" in found.equation
    assert not found.assumptions


def test_graphs_are_part_of_the_sum() -> None:
    # field case B05: 20.32 - 3.61 - 0.59 - 0.02 = 16.10 in use, 13.82 with the graphs
    stated = Card(gib(23.51), 0.8641841836125489, gib(3.61), gib(0.59), 0, gib(0.02))
    assert ledger(stated, "vllm").kv_bytes / GIB == pytest.approx(16.10, abs=0.01)
    with_graphs = Card(gib(23.51), 0.8641841836125489, gib(3.61), gib(0.59), gib(2.28), gib(0.02))
    assert ledger(with_graphs, "vllm").kv_bytes / GIB == pytest.approx(13.82, abs=0.01)


def test_what_is_free_before_the_start_decides_whether_vllm_starts() -> None:
    # field case B02
    found = ledger(Card(gib(22.0456), 0.9, gib(10), 0, 0, free_bytes=gib(19.77)), "vllm")
    assert not found.starts
    for words in ("GiB are free and 0.9", "0.07 GiB short", "2.28 GiB are held", "0.896"):
        assert words in found.reason
    assert ledger(Card(gib(22.045), 0.896, gib(10), 0, 0, free_bytes=gib(19.77)), "vllm").starts


def test_sglang_counts_weights_and_pool_inside_its_share_and_the_rest_outside() -> None:
    # field case B08: 0.88 x 140.4 < 125.65 of weights; the least share is 0.895, with graphs and all 0.9113
    found = ledger(Card(gib(140.4), 0.88, gib(125.65)), "sglang")
    assert not found.starts
    assert "mem-fraction-static" in found.reason
    assert "0.8949" in found.reason
    assert ledger(Card(gib(140.4), 0.9113, gib(125.65), gib(4), gib(4)), "sglang").kv_bytes / GIB == pytest.approx(2.3, abs=0.01)
    tight = ledger(Card(gib(140.4), 0.98, gib(125.65), gib(4), gib(4)), "sglang")
    assert tight.starts
    assert "runs out of memory" in tight.notes[0]


def test_what_is_not_stated_is_said_and_not_guessed() -> None:
    found = ledger(Card(gib(80), 0.9, gib(14)), "vllm")
    assert found.kv_bytes == gib(58)
    assert "activation peak and graphs not stated" in found.assumptions[0]
    assert found.idle_bytes == pytest.approx(gib(8), abs=1)


def test_a_share_of_ninety_is_ninety_cards() -> None:
    for wrong in (90, 0, -0.5, float("nan")):
        with pytest.raises(UsageError):
            ledger(Card(gib(80), wrong, gib(14)), "vllm")


def test_both_directions_agree() -> None:
    down = ledger(Card(gib(80), 0.9, gib(14), gib(2), gib(1)), "vllm")
    up = card_for(down.kv_bytes, gib(14), cards=1, utilization=0.9, engine="vllm", beside_bytes=gib(3))
    assert up.card_bytes == pytest.approx(gib(80), abs=4)
    assert up.fits == "94 GB (H100 NVL)"  # an 80 GB card reports 79.1 GiB
    assert card_for(gib(500), gib(14), cards=1, utilization=0.9, engine="vllm").fits == ""


def tensors(path: Path, payload: int) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [payload // 2], "data_offsets": [0, payload]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * payload)


def test_weights_come_from_the_index_then_from_the_files(tmp_path: Path) -> None:
    assert find_weights(tmp_path) is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 77)
    assert find_weights(tmp_path) is not None
    tensors(tmp_path / "model-1.safetensors", 1000)
    tensors(tmp_path / "model-2.safetensors", 500)
    found = find_weights(tmp_path)
    assert found is not None
    assert found.total_bytes == 1500
    assert "2 *.safetensors files" in found.source
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 4242}}))
    found = find_weights(tmp_path / "config.json")
    assert found is not None
    assert found.total_bytes == 4242
    (tmp_path / "model.safetensors.index.json").write_text("{" * 1000)
    found = find_weights(tmp_path)
    assert found is not None
    assert found.total_bytes == 1500


def test_a_pointer_of_git_lfs_is_not_taken_for_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CannotJudge, match="pointer"):
        find_weights(tmp_path)


def test_copies_and_adapters_are_not_counted_twice(tmp_path: Path) -> None:
    for name in ("model.safetensors", "consolidated.safetensors", "adapter_model.safetensors"):
        tensors(tmp_path / name, 1000)
    found = find_weights(tmp_path)
    assert found is not None
    assert found.total_bytes == 1000


def test_a_split_gguf_is_all_its_parts_and_several_files_are_asked_about(tmp_path: Path) -> None:
    for number, size in ((1, 10), (2, 20), (3, 30)):
        (tmp_path / f"m-{number:05d}-of-00003.gguf").write_bytes(b"x" * size)
    (tmp_path / "mmproj-f16.gguf").write_bytes(b"x" * 500)
    for source in (tmp_path, tmp_path / "m-00001-of-00003.gguf"):
        found = find_weights(source)
        assert found is not None
        assert (found.total_bytes, found.source) == (60, "size of 3 parts of m-00001-of-00003.gguf")
    (tmp_path / "other.gguf").write_bytes(b"x")
    with pytest.raises(CannotJudge, match="4 GGUF files lie there"):
        find_weights(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CannotJudge, match="1 of its 3 parts are missing"):
        find_weights(tmp_path / "m-00001-of-00003.gguf")


def test_seven_billion_parameters_in_fp16_take_14_gb() -> None:
    assert weights_of_parameters(7_000_000_000, 16, "fp16").total_bytes == 14 * 10**9
