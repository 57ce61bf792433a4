"""Why a pool is smaller than it could be: the sentence names what took the bytes, and nothing that did not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from finding_cases import card, on_cards, worker

from pytest_kvcache.analysis.cards import log_ledgers, usual_share
from pytest_kvcache.analysis.ledger import COMPUTED, GPU, HOST, CardLedger, Facts, reconcile
from pytest_kvcache.analysis.reconciliations import reconciliations
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.server.startlogs.memory import read_memory

GIB = 1 << 30


def sizes(**parts: float) -> dict[str, Value]:
    return {
        name: Reading(size * (1 if name == "utilization" else GIB), "ratio" if name == "utilization" else "bytes", name)
        for name, size in parts.items()
    }


def made(measured: dict[str, Value] | None = None, **more: Any) -> CardLedger:
    return reconcile(Facts("GPU 0", more.pop("kind", GPU), measured or {}, **more))


def gib(value: Value) -> float:
    assert isinstance(value, Reading), value
    return round(value.number() / GIB, 2)


def test_foreign_memory_that_left_the_share_alone_is_no_reason() -> None:
    """vLLM V1 checks its whole share before it starts: what a neighbour holds beside it costs the pool nothing."""
    ledger = made(
        sizes(total=80, used=77, free=3, reserved=0, server=71, others=6),
        stated=sizes(pool=54.5, weights=14, utilization=0.9, activation=2, context=1.5),
    )
    assert gib(ledger.squeezed) == 3.5
    assert ledger.reasons == ("activation peak 2.00 GiB", "context and libraries 1.50 GiB")
    assert gib(ledger.others.value) == 6


def test_foreign_memory_counts_for_what_nothing_else_explains() -> None:
    ledger = made(
        sizes(total=80, used=77, free=3, reserved=0, server=67, others=10),
        stated=sizes(pool=48, weights=14, utilization=0.9, activation=2, context=1),
    )
    assert gib(ledger.squeezed) == 10
    assert ledger.reasons[0] == "other processes 5.00 GiB", "of its 10 GiB no more than what is missing"
    assert sum(float(reason.rpartition(" GiB")[0].rpartition(" ")[2]) for reason in ledger.reasons) == pytest.approx(10)


def test_graphs_beyond_their_plan_are_over_the_share_and_did_not_squeeze_the_pool() -> None:
    text = (
        "(Worker pid=1) INFO Model loading took 14.0 GiB memory and 9.1 seconds\n"
        "(Worker pid=1) INFO [gpu_worker.py:972] CUDA graph pool memory: 2.3 GiB (actual), 0.6 GiB (estimated), difference: 1.7 GiB (73.9%).\n"
        "(Worker pid=1) INFO [gpu_worker.py:1034] Free memory on device (79.0/79.2 GiB) on startup. Desired GPU memory utilization is (0.9, 71.28 GiB). "
        "Actual usage is 15.1 GiB for consumed memory (weights + non-torch), 2.0 GiB for peak activation, and 2.3 GiB for CUDAGraph memory. "
        "Current kv cache memory in use is 54.18 GiB.\n"
    )
    (ledger,) = log_ledgers(read_memory(text), "vllm")
    assert gib(ledger.squeezed) == 3.1
    assert ledger.reasons == ("activation peak 1.40 GiB", "context and libraries 1.10 GiB", "room kept for graphs 614.40 MiB")
    assert gib(ledger.over_budget) == 1.7, "2.3 taken and 0.6 kept"
    assert any("graphs took 2.30 GiB and 614.40 MiB were kept for them" in note and "1.70 GiB beyond the share" in note for note in ledger.notes)


def test_graphs_without_a_plan_explain_only_what_nothing_else_does() -> None:
    # before 0.21 they were captured after the pool was sized
    ledger = made(stated=sizes(total=80, pool=55, weights=14, utilization=0.9, activation=2, context=1, graphs=3))
    assert gib(ledger.squeezed) == 3
    assert ledger.reasons == ("activation peak 2.00 GiB", "context and libraries 1.00 GiB")


def test_a_share_below_the_default_is_no_squeeze_and_says_what_it_keeps_back() -> None:
    ledger = made(
        sizes(total=80, used=40, free=40, reserved=0, server=40, others=0),
        stated=sizes(pool=24.2, weights=14, utilization=0.5, activation=1.8),
        usual_share=0.92,
    )
    assert gib(ledger.squeezed) == 1.8
    assert ledger.reasons == ("activation peak 1.80 GiB",)
    assert gib(ledger.idle_outside) == 40
    (note,) = ledger.notes
    assert note == "the share of 0.5 is below the engine's default of 0.92, which would be 33.60 GiB more of the card"
    usual = made(stated=sizes(total=80, pool=56, weights=14, utilization=0.9), usual_share=0.92)
    assert usual.notes == (), "0.9 was the default for years"


def test_an_override_says_what_of_the_memory_that_was_found_is_no_part_of_the_pool() -> None:
    ledger = made(
        stated=sizes(total=80, pool=12, weights=14, utilization=0.9, pool_allowed=54, activation=4), by_hand="num_gpu_blocks_override 6,144 blocks"
    )
    assert gib(ledger.squeezed) == 46
    assert ledger.reasons == ("a pool that was set by hand (num_gpu_blocks_override 6,144 blocks)", "activation peak 4.00 GiB")
    assert "takes 12.00 GiB of the 54.00 GiB that was found or asked for it: 42.00 GiB of that are no part of the pool" in ledger.notes[0]
    above = made(stated=sizes(total=80, pool=60, weights=14, utilization=0.9, pool_allowed=54), by_hand="num_gpu_blocks_override 30,000 blocks")
    assert "6.00 GiB more than the 54.00 GiB that was found for it: the server may run out of memory" in " ".join(above.notes)
    assert "the pool of 60.00 GiB is 2.00 GiB more than share and weights leave (58.00 GiB)" in above.text


def test_on_cpus_an_override_is_told_and_no_squeeze_is_claimed() -> None:
    text = (Path(__file__).parent.parent / "data" / "startup" / "vllm-0.32.0-cpu-fail-kv-too-small.log").read_text()
    (start,) = read_memory(text)
    stated = {name: part.to_value() for name, part in start.parts.items()}
    ledger = made(kind=HOST, stated={**stated, **sizes(weights=0.1, utilization=0.9)}, by_hand="num_gpu_blocks_override 4 blocks")
    assert isinstance(ledger.squeezed, Missing)
    assert "the pool has 512.00 KiB; whether the pool is squeezed is not known: the pool was set by hand" in ledger.text
    assert "1023.50 MiB of that are no part of the pool" in ledger.notes[0]


def test_computed_weights_say_so_and_prove_no_squeeze_within_their_spread() -> None:
    facts: dict[str, Any] = {"computed": sizes(weights=14), "spread": {"weights": 1.0 * GIB}}
    tight = made(sizes(total=80), stated=sizes(pool=57.2, utilization=0.9), **facts)
    assert tight.weights.how == COMPUTED
    assert gib(tight.expected_pool) == 58
    assert gib(tight.squeezed) == 0, "0.8 GiB less lies within what the weights may be off"
    assert "the pool of 57.20 GiB is what share and weights leave (58.00 GiB) (weights ± 1.00 GiB computed)" in tight.text
    squeezed = made(sizes(total=80), stated=sizes(pool=18, utilization=0.9), **facts)
    assert gib(squeezed.squeezed) == 40
    assert "(weights ± 1.00 GiB computed): squeezed by 40.00 GiB" in squeezed.text
    assert isinstance(squeezed.squeezed, Reading)
    assert "± 1.00 GiB" in squeezed.squeezed.source


def test_computed_figures_that_do_not_fit_the_processes_are_called_those_of_another_model() -> None:
    ledger = made(sizes(total=80, used=20, free=60, server=20, others=0), stated=sizes(utilization=0.9), computed=sizes(weights=14, pool=40))
    assert any("computed as 54.00 GiB" in note and "the model named is not this server's" in note for note in ledger.notes)
    assert sum(part.bytes or 0.0 for part in ledger.parts) == pytest.approx(80 * GIB)


def test_the_terminal_shows_the_notes_of_a_card(tmp_path: Path) -> None:
    analysis = on_cards(tmp_path, [card(used=58, ours=48, others=10)], [worker(pool=18, weights=14)], utilization=0.6)
    lines = reconciliations(analysis)[0].lines
    assert any("the share of 0.6 is below the engine's default of 0.92" in line for line in lines)


@pytest.mark.parametrize(
    ("engine", "version", "share"),
    [("vllm", "0.32.0", 0.92), ("vllm", "0.19.1", 0.9), ("vllm", "", 0.92), ("sglang", "0.5.20", 0.0), ("llamacpp", "b1", 0.0)],
)
def test_the_default_share_is_that_of_the_version(engine: str, version: str, share: float) -> None:
    assert usual_share(engine, version) == share
