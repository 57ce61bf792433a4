"""Published models: bytes per token against figures that were checked by hand and against start-up logs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.growth import growth
from pytest_kvcache.errors import UsageError

CONFIGS = Path(__file__).parent.parent / "data" / "capacity" / "configs"
ROWS = list(csv.DictReader((CONFIGS / "expected.csv").read_text().splitlines()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["model"]))
def test_a_published_model_costs_what_was_checked(row: dict[str, str]) -> None:
    cost = growth(read_architecture(CONFIGS / row["config"]))
    assert cost.growth_bytes_per_token == int(row["kv_bytes_per_token"])
    assert cost.growth_bytes_per_token == int(row["with_default_flags"])
    assert cost.sliding_bytes_per_token == int(row["sliding_bytes_per_token"])
    assert cost.window == (int(row["window"]) if row["window"] else None)
    assert cost.sliding_saturated_bytes == int(row["sliding_saturated_bytes"])
    assert cost.all_layers_bytes_per_token == int(row["all_layers_bytes_per_token"])
    assert cost.saturation == row["saturation"]
    assert cost.derivation == row["derivation"]


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["model"]))
def test_tensor_parallelism_splits_heads_and_replicates_what_it_cannot_split(row: dict[str, str], tp: int) -> None:
    expected = row[f"per_gpu_tp{tp}"]
    architecture = read_architecture(CONFIGS / row["config"])
    if expected.startswith("n/a"):
        with pytest.raises(UsageError, match="query heads cannot be divided"):
            growth(architecture, tp=tp)
    else:
        assert growth(architecture, tp=tp).growth_bytes_per_token == int(expected)
