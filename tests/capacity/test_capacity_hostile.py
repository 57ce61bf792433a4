"""Whatever a configuration holds, it is read, refused in words, or named as nonsense."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.capacity import plan
from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.growth import growth
from pytest_kvcache.capacity.pool import EngineShape, blocks_for, lay_out, size_pool
from pytest_kvcache.errors import KvError, UsageError

DATA = Path(__file__).parent.parent / "data" / "capacity"
CONFIGS = [json.loads(path.read_text()) for path in sorted([*DATA.glob("configs/*.json"), *DATA.glob("oracle/*.json")])]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_configuration_never_breaks_the_reader(data: st.DataObject) -> None:
    config: dict[str, Any] = json.loads(json.dumps(data.draw(st.sampled_from(CONFIGS))))
    inside = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    for key in data.draw(
        st.lists(st.sampled_from([*inside, "sliding_window", "layer_types", "head_dim", "quantization_config", "rope_scaling"]), max_size=3)
    ):
        inside[key] = data.draw(JSON)
    engine: Any = data.draw(st.sampled_from(["vllm", "sglang", "llamacpp", "paged"]))
    try:
        made = read_architecture(config)
        cost = growth(made, data.draw(st.sampled_from(["auto", "fp8", "q8_0"])), tp=data.draw(st.sampled_from([1, 2])))
        layout = lay_out(made, EngineShape(engine=engine))
        pool = size_pool(layout, 2**30)
    except KvError:
        return
    assert cost.growth_bytes_per_token >= 0
    assert cost.sequence_bytes(1000) >= cost.sequence_bytes(1)
    assert pool.pool_blocks >= 0
    assert blocks_for(layout, 1000) >= 0


@pytest.mark.parametrize("text", ["", "[]", "{", '"text"', "[" * 100_000, "\ufeff{}", '{"num_hidden_layers": 1e999}'])
def test_a_file_that_is_no_configuration_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(KvError):
        read_architecture(path)


def test_a_missing_or_enormous_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no configuration"):
        read_architecture(tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        read_architecture(tmp_path)
    big = tmp_path / "config.json"
    with big.open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(UsageError, match="larger than"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("value", [0, -1, 0.25, 10**30, "x", "", True, [], {}, float("nan")])
@pytest.mark.parametrize("name", [field.name for field in fields(EngineShape)])
def test_no_setting_of_whatever_kind_breaks_a_plan(name: str, value: Any) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
    try:
        plan(config, **{"kv_memory": "1MiB", name: value}).as_dict()
    except KvError:
        return
