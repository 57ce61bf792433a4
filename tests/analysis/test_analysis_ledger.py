"""Reconciliation 1: the parts of a card add up to it, the squeeze is said with its reasons, and what is not known is never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import T0, MadeRun, closed_loop, sample, snapshot

from pytest_kvcache.analysis.cards import card_ledgers, log_ledgers
from pytest_kvcache.analysis.ledger import COMPUTED, GPU, HOST, MEASURED, STATED, UNKNOWN, CardLedger, Facts, reconcile
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GpuRow, MemoryRow, StartMemory, ValueRecord
from pytest_kvcache.server.startlogs.memory import read_memory

GIB = 1 << 30
B05 = (
    "INFO gpu_worker.py:433] Free memory on device (22.52/23.51 GiB) on startup. Desired GPU memory utilization is (0.8641841836125489, 20.32 GiB). "
    "Actual usage is 3.61 GiB for weight, 0.59 GiB for peak activation, 0.02 GiB for non-torch memory, and 2.28 GiB for CUDAGraph memory. "
    "Replace gpu_memory_utilization config with `--kv-cache-memory=14689787392`. Current kv cache memory in use is 17292353024 bytes.\n"
)


def gib(value: Value) -> float:
    assert isinstance(value, Reading), value
    return round(value.number() / GIB, 2)


def sizes(**parts: float) -> dict[str, Value]:
    return {
        name: Reading(size * GIB if name != "utilization" else size, "ratio" if name == "utilization" else "bytes", name)
        for name, size in parts.items()
    }


def by_name(ledger: CardLedger) -> dict[str, float]:
    return {part.name: gib(part.value) for part in ledger.parts}


def adds_up(ledger: CardLedger) -> bool:
    return sum(part.bytes or 0.0 for part in ledger.parts) == pytest.approx(ledger.total.bytes, abs=2.0)


def test_the_articles_card_is_squeezed_and_22_gib_lie_idle() -> None:
    # A100-80G, a 7B model, utilization 0.9: the pool should be over 50 GB, the log says 18 and 22 are free
    ledger = reconcile(
        Facts(
            "GPU 0",
            GPU,
            measured=sizes(total=80, used=58, free=22, reserved=0, server=48, others=10),
            stated=sizes(pool=18, weights=14, utilization=0.9, activation=9, graphs=3),
        )
    )
    assert gib(ledger.expected_pool) == 58
    assert gib(ledger.squeezed) == 40
    assert gib(ledger.idle_outside) == 0
    assert gib(ledger.idle_inside) == 22, "22 GiB are free, and the share would still allow 24 of them"
    assert by_name(ledger) == {"pool": 18, "weights": 14, "rest": 16, "others": 10, "free": 22}
    assert adds_up(ledger)
    assert "squeezed by 40.00 GiB because of" in ledger.text
    assert "activation peak 9.00 GiB" in ledger.text
    assert "other processes 10.00 GiB" in ledger.text
    assert "14.00 GiB of the share that nothing holds" in ledger.text


def test_memory_outside_the_share_is_idle_however_full_the_pool() -> None:
    facts = Facts(
        "GPU 0", GPU, measured=sizes(total=80, used=71, free=9, reserved=0, server=71, others=0), stated=sizes(pool=54, weights=14, utilization=0.9)
    )
    ledger = reconcile(facts)
    assert gib(ledger.idle_outside) == 8
    assert gib(ledger.squeezed) == 4
    assert gib(ledger.rest.value) == 3


def test_the_whole_equation_of_one_log_line_balances() -> None:
    # field case A10
    text = (
        "the current vLLM instance can use total_gpu_memory (79.32GiB) x gpu_memory_utilization (0.80) = 63.45GiB\n"
        "model weights take 15.53GiB; non_torch_memory takes 0.09GiB; PyTorch activation peak memory takes 1.72GiB; "
        "the rest of the memory reserved for KV Cache is 46.11GiB. # gpu_memory_utilization\n"
    )
    (ledger,) = log_ledgers(read_memory(text))
    assert gib(ledger.squeezed) == 1.81
    assert ledger.reasons == ("activation peak 1.72 GiB", "context and libraries 92.16 MiB")
    assert isinstance(ledger.over_budget, Reading)
    assert ledger.over_budget.number() == 0
    assert adds_up(ledger)


def test_a_pool_sized_before_the_graphs_is_over_its_share() -> None:
    # field case B05: all five terms, 2.28 GiB over; without the graphs the card would seem to balance
    (ledger,) = log_ledgers(read_memory(B05))
    assert gib(ledger.over_budget) == pytest.approx(2.28, abs=0.02)
    assert any("over the share" in note for note in ledger.notes)
    assert adds_up(ledger)


def test_what_was_taken_before_the_start_bounds_the_utilization() -> None:
    # field case B02: 0.9 x 22.05 = 19.84 and 19.77 are free, so someone holds 2.28 GiB and 0.896 would start
    text = (
        "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB). "
        "Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
    )
    (ledger,) = log_ledgers(read_memory(text))
    assert gib(ledger.budget) == 19.84
    assert isinstance(ledger.highest_utilization, Reading)
    assert round(ledger.highest_utilization.number(), 4) == 0.8966
    assert "2.28 GiB of the card were in use before the server started" in ledger.notes
    assert isinstance(ledger.squeezed, Missing), "no pool was made"


def test_no_available_memory_asks_for_the_profile_line() -> None:
    # field case B10: 0.4 x 80 = 32 GB less 16 GB of weights leaves room; what took it is in neither
    facts = Facts("GPU 0", GPU, stated={**sizes(total=80, weights=16, utilization=0.4), "pool": Reading(0.0, "bytes", "no block")})
    ledger = reconcile(facts)
    assert gib(ledger.squeezed) == 16
    assert "16.00 GiB that neither log nor card explains" in ledger.reasons


def test_the_smaller_rank_is_the_reason_and_the_larger_ones_room_lies_idle() -> None:
    # field case G02
    text = "".join(
        f"(VllmWorker TP{rank} pid={100 + rank}) INFO worker.py] {line}\n"
        for rank, room in ((0, 8.69), (1, 7.46))
        for line in ("Model loading took 13.95 GiB memory and 4.1 seconds", f"Available KV cache memory: {room} GiB")
    )
    first, second = log_ledgers(read_memory(text))
    assert gib(first.pool.value) == gib(second.pool.value) == 7.46
    facts = Facts("GPU 0", GPU, stated={**sizes(total=23.08, utilization=0.98), **{k: v.to_value() for k, v in read_memory(text)[0].parts.items()}})
    assert "another worker that has room for 1.23 GiB less, while all hold as many blocks" in reconcile(facts).reasons


def test_what_the_driver_does_not_attribute_is_a_part_of_its_own() -> None:
    ledger = reconcile(
        Facts("GPU 0", GPU, measured=sizes(total=24, used=20, free=3.5, reserved=0.5, server=18, others=1), stated=sizes(pool=8, weights=9))
    )
    assert by_name(ledger) == {"pool": 8, "weights": 9, "rest": 1, "unattributed": 1, "others": 1, "reserved": 0.5, "free": 3.5}
    assert [part.how for part in ledger.parts] == [STATED, STATED, COMPUTED, COMPUTED, MEASURED, MEASURED, MEASURED]


def test_a_server_in_a_container_is_not_told_from_others() -> None:
    hidden = Missing("the driver names no process")
    ledger = reconcile(
        Facts("GPU 0", GPU, measured={**sizes(total=24, used=20, free=4), "server": hidden, "others": hidden}, stated=sizes(pool=8, weights=9))
    )
    assert (ledger.server.how, ledger.others.how, ledger.rest.how) == (UNKNOWN, UNKNOWN, UNKNOWN)
    assert by_name(ledger) == {"pool": 8, "weights": 9, "unattributed": 3, "free": 4}
    assert adds_up(ledger)


def test_a_log_of_another_start_does_not_make_a_negative_rest() -> None:
    ledger = reconcile(Facts("GPU 0", GPU, measured=sizes(total=24, used=12, free=12, server=12, others=0), stated=sizes(pool=8, weights=9)))
    assert by_name(ledger) == {"server": 12, "free": 12}
    assert any("the log is of another start" in note for note in ledger.notes)


def test_without_weights_or_share_no_pool_is_expected() -> None:
    ledger = reconcile(Facts("GPU 0", GPU, measured=sizes(total=24, used=12, free=12, server=12, others=0), stated=sizes(pool=8, utilization=0.9)))
    assert isinstance(ledger.squeezed, Missing)
    assert "weights" in ledger.squeezed.reason
    assert "is not known" in ledger.text
    assert ledger.rest.title == "graphs, workspace, context and weights"
    without = reconcile(Facts("GPU 0", GPU, stated=sizes(pool=8, weights=4), has_share=False))
    assert isinstance(without.expected_pool, Missing)


def test_a_pool_set_by_hand_is_said_so() -> None:
    facts = Facts(
        "GPU 0", GPU, measured=sizes(total=80, used=30, free=50), stated=sizes(pool=12, weights=14, utilization=0.9), by_hand="to 12.00 GiB"
    )
    assert reconcile(facts).reasons[0] == "a pool that was set by hand (to 12.00 GiB)"
    assert gib(reconcile(facts).idle_outside) == 4, "46 of the 50 free GiB could still be taken within the share"


@given(
    st.dictionaries(st.sampled_from(["used", "free", "reserved", "server", "others"]), st.integers(0, 90)),
    st.dictionaries(
        st.sampled_from(["pool", "weights", "activation", "graphs", "context", "total", "free_at_start", "pool_allowed"]), st.integers(0, 90)
    ),
    st.sampled_from([GPU, HOST]),
)
def test_the_parts_add_up_whatever_is_known(measured: dict[str, int], stated: dict[str, int], kind: str) -> None:
    """Figures that contradict each other may shrink a part, and never the sum, nor below zero."""
    held = min(sum(measured.get(name, 0) for name in ("server", "others", "reserved", "free")), 400)
    ledger = reconcile(Facts("GPU 0", kind, measured=sizes(total=max(100, held), **measured), stated=sizes(**stated)))
    assert adds_up(ledger)
    assert all((part.bytes or 0) >= 0 for part in ledger.parts)
    assert ledger.text


def test_a_longer_context_lost_five_gib_of_pool_to_the_profile_run_and_not_to_the_dtype() -> None:
    # field case B04: the same model and card, 10.55 and then 5.59 GiB; what grew is the activation peak
    ledgers = [
        reconcile(Facts("GPU 0", GPU, stated=sizes(total=48, utilization=0.9, weights=29, pool=pool, activation=43.2 - 29 - pool)))
        for pool in (10.55, 5.59)
    ]
    first, second = (gib(ledger.squeezed) for ledger in ledgers)
    assert second - first == pytest.approx(4.96)
    assert ledgers[1].reasons == ("activation peak 8.61 GiB",)


def test_weights_beyond_the_share_say_which_share_would_hold_them() -> None:
    # field case B08: an H200 of 140.4 GB, weights of 125.65 GB and 0.88 of it
    text = (
        "[2026-09-09 11:57:09] server_args=ServerArgs(model_path='m', mem_fraction_static=0.88, tp_size=1)\n"
        "[2026-09-09 11:57:10 TP0] Load weight begin. avail mem=140.40 GB\n"
        "[2026-09-09 11:57:17 TP0] Load weight end. type=M, dtype=torch.bfloat16, avail mem=14.75 GB, mem usage=125.65 GB.\n"
    )
    (ledger,) = log_ledgers(read_memory(text), "sglang")
    assert gib(ledger.budget) == 123.55
    assert gib(ledger.expected_pool) == 0
    assert any("the share would have to be above 0.895" in note for note in ledger.notes)


def test_sglangs_share_is_of_what_was_free_at_its_start() -> None:
    text = "".join(
        f"[2026-09-09 11:57:1{n} TP{n}] {line}\n"
        for n in range(2)
        for line in (
            "Load weight begin. avail mem=70.00 GB",
            "Load weight end. avail mem=30.00 GB, mem usage=40.00 GB.",
            "KV Cache is allocated. #tokens: 9, KV size: 16.00 GB",
        )
    )
    first, second = log_ledgers(read_memory("server_args=ServerArgs(mem_fraction_static=0.8)\n" + text), "sglang")
    assert gib(first.budget) == gib(second.budget) == 56
    # field case G07: a latent cache is whole on each card, and the figure of one rank is not divided by their number
    assert gib(first.pool.value) == gib(second.pool.value) == 16
    assert gib(first.squeezed) == 0


def test_ranks_that_differ_by_half_a_percent_are_alike() -> None:
    # field case G05: five sizes, the smallest counts, and 0.5 % is memory outside the framework
    text = "".join(
        f"(Worker_TP{n} pid={n}) Model loading took 84.0 GiB memory\n(Worker_TP{n} pid={n}) Available KV cache memory: {room} GiB\n"
        for n, room in enumerate((7.20, 7.18, 7.17, 7.18, 7.17))
    )
    ledgers = log_ledgers(read_memory(text))
    assert {gib(ledger.pool.value) for ledger in ledgers} == {7.17}


# -- a Run ------------------------------------------------------------------------------------------------------------


def card(index: int = 0, used: float = 20, total: float = 24, **processes: float) -> GpuRow:
    held = {pid.removeprefix("p"): int(size * GIB) for pid, size in processes.items()}
    return GpuRow(index, f"GPU-{index}", "L4", int(total * GIB), int(used * GIB), int((total - used) * GIB), processes=held)


def worker(name: str = "", pid: int | None = None, **parts: float) -> StartMemory:
    return StartMemory(name, pid, 0, {part: ValueRecord.of(value) for part, value in sizes(**parts).items()})


def gpu_run(folder: Path, looks: list[list[GpuRow]], start: list[StartMemory], pids: Mapping[str, int] | None, **record: Any) -> Analysis:
    rows = closed_loop()
    memory = MemoryRow(64 * GIB, 50 * GIB, processes=dict(pids)) if pids is not None else None
    samples = [sample(rows, T0 - 0.3 + i / 10) for i in range(48)]
    for number, cards in enumerate(looks):
        samples[5 + 5 * number] = msgspec.structs.replace(samples[5 + 5 * number], gpus=cards, memory=memory)
    before = snapshot(T0 - 0.5, gpu_memory_utilization=0.9)
    return analyse(MadeRun(rows=rows, samples=samples, before=[before], record={"start_memory": start, **record}).write(folder))


def test_a_run_shows_the_card_of_its_server_and_the_process_beside_it(tmp_path: Path) -> None:
    looks = [[card(p7=15, p9=1, used=16.5)], [card(p7=15, p9=4, used=19.5)], [card(p7=15, p9=2, used=17.5)]]
    analysis = gpu_run(tmp_path, looks, [worker("Worker", 7, pool=5, weights=8, graphs=1)], {"7": 1 * GIB, "8": GIB})
    (ledger,) = card_ledgers(analysis)
    assert by_name(ledger) == {"pool": 5, "weights": 8, "rest": 2, "unattributed": 0.5, "others": 4, "free": 4.5}
    assert gib(ledger.squeezed) == 8.6
    assert any("moved between 1.00 GiB and 4.00 GiB" in note for note in ledger.notes), "a neighbour that comes and goes is field case B11"
    values = analysis.values
    assert gib(values["ledger.squeezed_bytes"]) == 8.6
    assert gib(values["ledger.other_bytes"]) == 4
    assert gib(values["ledger.free_bytes"]) == 4.5
    share = values["ledger.squeezed_share"]
    assert isinstance(share, Reading)
    assert share.number() == pytest.approx(8.6 / 13.6)


def test_each_worker_of_the_log_lies_on_the_card_of_its_process(tmp_path: Path) -> None:
    cards = [card(0, used=3, p99=3), card(1, used=20, p12=20), card(2, used=16, p11=16)]
    start = [worker("TP0", 11, pool=5, weights=10), worker("TP1", 12, pool=5, weights=10)]
    analysis = gpu_run(tmp_path, [cards], start, {"10": GIB, "11": GIB, "12": GIB})
    foreign, second, first = card_ledgers(analysis)
    assert isinstance(foreign.pool.value, Missing)
    assert by_name(foreign) == {"others": 3, "free": 21}
    assert (gib(first.rest.value), gib(second.rest.value)) == (1, 5)
    spread = analysis.balance.of("gpu.used_bytes")
    assert spread is not None
    assert (spread.highest, spread.lowest) == ("GPU 1 L4", "GPU 2 L4"), "a card without this server is no member"
    assert gib(analysis.values["balance.gpu_memory_spread"]) == 4


def test_one_pool_for_two_cards_of_a_server_we_only_attached_to_is_not_split_by_guess(tmp_path: Path) -> None:
    analysis = gpu_run(tmp_path, [[card(0, p1=9), card(1, p2=9)]], [], {"1": GIB, "2": GIB})
    assert all(isinstance(ledger.pool.value, Missing) for ledger in card_ledgers(analysis))


def test_cards_whose_processes_are_hidden_get_the_workers_only_where_no_doubt_is_left(tmp_path: Path) -> None:
    start = [worker("", None, pool=10, weights=8)]
    (ledger,) = card_ledgers(gpu_run(tmp_path / "a", [[card(0, used=20)]], start, None))
    assert gib(ledger.pool.value) == 10
    full, empty = card_ledgers(gpu_run(tmp_path / "b", [[card(0, used=20), card(1, used=1)]], start, None))
    assert gib(full.pool.value) == 10
    assert isinstance(empty.pool.value, Missing)
    both = card_ledgers(gpu_run(tmp_path / "c", [[card(0, used=20), card(1, used=20)]], start, None))
    assert all(isinstance(ledger.pool.value, Missing) for ledger in both)
    assert "which is on which is not known" in both[0].notes[0]


def test_a_server_on_the_cpu_is_reconciled_with_the_machines_memory(tmp_path: Path) -> None:
    start = [worker("CPU", None, pool=2, weights=1, workspace=0.5)]
    analysis = gpu_run(tmp_path, [[]], start, {"1": 4 * GIB}, engine="llamacpp")
    (ledger,) = card_ledgers(analysis)
    assert ledger.kind == HOST
    assert by_name(ledger) == {"pool": 2, "weights": 1, "rest": 1, "others": 10, "free": 50}
    assert isinstance(ledger.squeezed, Missing), "llama.cpp sizes its pool by tokens"
    assert adds_up(ledger)


def test_a_run_without_any_memory_says_so(tmp_path: Path) -> None:
    analysis = analyse(MadeRun().write(tmp_path))
    assert card_ledgers(analysis) == []
    assert isinstance(analysis.values["ledger.squeezed_bytes"], Missing)
    assert isinstance(analysis.values["server.cpu_s"], Missing)
