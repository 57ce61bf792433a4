"""The quality set on a real vLLM: what breaks recall beyond a window is caught, and answers hold under prefix hits, preemption and cancelling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conditions import FAIL, PASS
from pytest_kvcache.judge.quality import pressed, pressed_not_worse, quality_gates
from pytest_kvcache.quantities import Reading
from pytest_kvcache.session import Session
from pytest_kvcache.settings import Settings

pytestmark = pytest.mark.vllm

# a pool of 2,048 tokens for requests of up to 1,024: long prompts of a few users preempt each other
SERVER = "vllm-cpu --max-model-len 1024 --block-size 32 --num-gpu-blocks-override 65 --max-num-batched-tokens 256 --max-num-seqs 16"
WINDOW = 128
OVERRIDE = json.dumps({"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention"]})
EVERY = 3
"""Every third item of the standard set, which keeps two items or more of each length: a CPU is slow."""


def measured(command: str, folder: Path, **options: object) -> Analysis:
    settings = Settings(launch=command, reports=str(folder), quality_probes=0).replace(**options)
    with Session(settings) as session:
        items = session.standard_items(session.target)
        assert len(items) == 300
        return analyse(session.quality(items[::EVERY]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """The whole cache in bf16, asked quiet and under every pressure."""
    return measured(SERVER, tmp_path_factory.mktemp("whole"), quality_pressure="all")


def test_the_grid_lies_on_the_blocks_that_the_server_tells_and_every_item_passes(whole: Analysis) -> None:
    rows = [row for row in whole.run.quality() if not row.part]
    assert len(rows) == 100
    assert all(row.passed for row in rows), [row.item for row in rows if not row.passed]
    assert {31, 32, 33, 95, 96, 97, 159, 160, 161, 1008} <= {row.length_tokens for row in rows}
    assert all(row.prompt_tokens == row.length_tokens for row in rows), "lengths are exact"


def test_a_sliding_window_breaks_recall_beyond_it_and_only_there(whole: Analysis, tmp_path: Path) -> None:
    windowed = measured(f"{SERVER} --hf-overrides '{OVERRIDE}'", tmp_path)
    gates = {gate.name: gate for gate in quality_gates([whole], [windowed], 0.02)}
    assert gates["quality_not_worse"].verdict == FAIL, gates["quality_not_worse"].text
    assert gates["quality_not_worse"].lengths
    assert min(gates["quality_not_worse"].lengths) > WINDOW
    assert 1008 in gates["quality_not_worse"].lengths
    before, after = (analysis.values["max_concurrency"] for analysis in (whole, windowed))
    assert isinstance(before, Reading)
    assert isinstance(after, Reading)
    assert after.number() > 1.5 * before.number(), "and what it buys is fewer blocks a request"


def test_answers_hold_while_long_prompts_fill_the_cache_with_prefix_hits_and_after_cancelled_requests(whole: Analysis) -> None:
    felt = {record.part: record for record in whole.run.record.pressure}
    assert {part for part, record in felt.items() if record.pressed} == {"fill", "prefix", "cancel"}, felt
    assert (felt["fill"].usage_peak or 0) > 0.85, felt["fill"]
    assert felt["fill"].preemptions is not None, "counted: one to four in a few seconds, and none on a slow day"
    assert felt["prefix"].prefix_hits, felt["prefix"]
    assert felt["cancel"].cancelled > 3, felt["cancel"]
    assert pressed([whole], 0.98).verdict == PASS
    assert pressed_not_worse([whole], [whole], 0.04).verdict == PASS
