"""Field cases of the kinds b, c, d and g: what people met, as Runs with their figures, and what the rules say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from finding_cases import card, hung, made, on_cards, prefix_run, worker
from made_run import T0, MadeRun, closed_loop, request, sample, snapshot

from pytest_kvcache.analysis.findings import find
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.server.startlogs.memory import read_memory

B05 = (
    "INFO gpu_worker.py:433] Free memory on device (22.52/23.51 GiB) on startup. Desired GPU memory utilization is (0.8641841836125489, 20.32 GiB). "
    "Actual usage is 3.61 GiB for weight, 0.59 GiB for peak activation, 0.02 GiB for non-torch memory, and 2.28 GiB for CUDAGraph memory. "
    "Replace gpu_memory_utilization config with `--kv-cache-memory=14689787392`. Current kv cache memory in use is 17292353024 bytes.\n"
)


def said(analysis: Analysis, baseline: Analysis | None = None) -> dict[str, str]:
    return {finding.id: finding.text for finding in find(analysis, baseline=baseline).found}


def state(pool: int, usage: float, running: float, waiting: float, **more: Any) -> dict[str, Any]:
    used = round(usage * pool)
    return {"usage": usage, "used_blocks": float(used), "free_blocks": float(pool - used), "running": running, "waiting": waiting, **more}


def test_b05_graphs_on_top_of_a_spent_budget_are_over_utilization(tmp_path: Path) -> None:
    found = said(on_cards(tmp_path, [card(total=23.51, used=22.6, ours=22.6)], read_memory(B05), 0.8641841836125489))
    assert "2.28 GiB beyond its share, and 3.9 % of the card are left" in found["over-utilization"]
    log_alone = said(on_cards(tmp_path / "log", [], read_memory(B05), 0.8641841836125489))
    assert "2.28 GiB beyond its share, and 3.9 % of the card are left" in log_alone["over-utilization"]
    room = said(on_cards(tmp_path / "room", [card(total=80, used=72.6, ours=72.6)], [worker(pool=56, weights=14, activation=1.5, graphs=1.1)], 0.9))
    assert "over-utilization" not in room, "graphs on top of the share are no danger where a tenth of the card is free"


def test_cards_that_nobody_reads_are_not_the_machines_memory(tmp_path: Path) -> None:
    """As on a machine with AMD's cards: share times the machine's memory is no expected pool."""
    unread = on_cards(tmp_path, [], [worker(pool=56, weights=14, activation=1.2, graphs=0.6)], 0.9)
    assert not {"squeezed-pool", "over-utilization"} & set(said(unread))
    why = {one.id: one.why for one in find(unread).unseen}
    assert "cards that nobody reads here" in why["squeezed-pool"]


def test_b11_equal_inputs_and_another_pool(tmp_path: Path) -> None:
    before = made(tmp_path / "1", usable=10_000)
    assert "pool-changed" in said(made(tmp_path / "2", usable=9_800), before)
    assert "pool-changed" not in said(made(tmp_path / "3", usable=9_950), before), "half a percent is no race with a neighbour"


def test_b11_a_neighbour_that_started_at_the_same_time_is_foreign_memory(tmp_path: Path) -> None:
    found = said(on_cards(tmp_path, [card(used=78, ours=60, others=18)], [worker(pool=38, weights=16)]))
    assert "18.00 GiB" in found["foreign-memory"]
    assert "squeezed-pool" in found


def test_c05_seventeen_tokens_in_blocks_of_sixteen(tmp_path: Path) -> None:
    rows = closed_loop(users=8, prompt=17, output=3)
    found = said(made(tmp_path / "a", rows))
    assert "fragments" in found
    assert "empty ends of last blocks" in found["fragments"]
    long = [request(i, 0.01 * i, prompt=400, output=20, length_s=3.0) for i in range(4)]
    assert "fragments" not in said(made(tmp_path / "b", long))


def test_c10_a_cache_of_reusable_blocks_is_no_leak_and_no_finding(tmp_path: Path) -> None:
    rows = [request(i, 0.5 * i, prompt=100, length_s=0.4, prefix_id="same", prefix_tokens=96) for i in range(8)]
    found = said(prefix_run(tmp_path, rows, 7 * 96.0, caching=True))
    assert "leak" not in found
    assert "prefix-cache-off" not in found
    assert "prefix-cache-thrashing" not in found


def test_c11_gauges_that_stay_up_after_idle_are_stale_and_no_leak(tmp_path: Path) -> None:
    def each(i: int) -> dict[str, Any]:
        return state(127, 0.6, 24.0, 0.0, generation_tokens=5000.0) if i > 4.5 * 2 else {"generation_tokens": 100.0 * i}

    found = said(made(tmp_path, None, each, seconds=35, hz=2))
    assert "stale-gauge" in found
    assert "leak" not in found


def test_c17_a_storm_that_shows_as_a_better_hit_rate(tmp_path: Path) -> None:
    rows = [request(i, 0.01 * i, length_s=3.0, prefix_id=f"own{i}", prefix_tokens=100) for i in range(20)]
    found = said(prefix_run(tmp_path, rows, 644.0, caching=True, preemptions=40.0))
    assert {"preemption-storm", "recomputed-hits"} <= set(found)


def test_d01_one_answer_without_an_end_is_no_leak(tmp_path: Path) -> None:
    pool = 1_180_000 // 16

    def each(i: int) -> dict[str, Any]:
        tokens = 70_800 + 118.0 * i
        return state(
            pool, tokens / 1_180_000, 1.0, 0.0, generation_tokens=118.0 * i, prompt_tokens=0.0, finished=0.0, used_blocks=float(tokens // 16)
        )

    found = said(made(tmp_path, (), each, seconds=120, hz=1, usable=pool, before={"max_model_len": 131_072}))
    assert "runaway-generation" in found
    assert "leak" not in found
    assert "tokens/s" in found["runaway-generation"]


def test_d02_99_percent_for_hours_with_tokens_coming_is_saturation(tmp_path: Path) -> None:
    def each(i: int) -> dict[str, Any]:
        return state(20_000, 0.992 - 0.0001 * i, 34 - i // 8, 18 + i // 2, generation_tokens=756.7 * i, prompt_tokens=9.0, preemptions=float(i))

    found = said(made(tmp_path, (), each, seconds=60, hz=1, usable=20_000, after={"preemptions": 60.0}))
    assert {"kv-bound", "preemption-storm"} <= set(found)
    assert not {"leak", "stuck-queue", "stale-gauge", "lonely-percentage"} & set(found)


def test_d04_blocks_of_aborted_loads_that_never_come_back(tmp_path: Path) -> None:
    def each(i: int) -> dict[str, Any]:
        return state(127, 0.4, 0.0, 0.0) if i > 42 else {}

    found = said(made(tmp_path / "run", None, each, seconds=12, after={"used_blocks": 51.0, "usage": 0.4}))
    assert "51 blocks stayed held" in found["leak"]
    passing = said(made(tmp_path / "passing", (), state(127, 0.4, 0.0, 0.0), seconds=60, hz=1, after={"used_blocks": 51.0, "usage": 0.4}))
    assert "held for 59.00 s" in passing["leak"]


@pytest.mark.parametrize(("stays", "leaks"), [(6.0, True), (0.0, False)])
def test_d04_a_level_that_rises_with_each_wave_of_aborts_is_a_leak_before_its_minute_is_over(stays: float, leaks: bool, tmp_path: Path) -> None:
    def each(i: int) -> dict[str, Any]:
        wave, at = divmod(i / 4, 8.0)  # 4 s of requests, 4 s of quiet
        held = stays * (wave + (at >= 4.0))
        return state(127, (held + 40.0 * (at < 4.0)) / 127, 4.0 * (at < 4.0), 0.0, generation_tokens=float(i))

    found = said(made(tmp_path, (), each, seconds=44, hz=4))
    assert ("leak" in found) is leaks
    if leaks:
        assert "4 times in a row more than after the wave before" in found["leak"]


def test_d05_waiting_with_an_empty_pool_is_stuck_whatever_the_probes_say(tmp_path: Path) -> None:
    found = said(made(tmp_path, (), state(2047, 0.0, 0.0, 6.0, generation_tokens=900.0, prompt_tokens=50.0), seconds=60, hz=1, usable=2047))
    assert next(iter(found)) == "stuck-queue"


def test_d05_two_that_hold_what_the_other_needs_are_a_deadlock_and_no_request_too_large(tmp_path: Path) -> None:
    """2,048 blocks less the null block, 512 and 736 held: 799 are free, and neither can be finished."""
    each = state(2047, 1248 / 2047, 0.0, 2.0, generation_tokens=900.0, prompt_tokens=50.0)
    (stuck, *_) = find(made(tmp_path, (), each, seconds=60, hz=1, usable=2047)).found
    assert stuck.id == "stuck-queue"
    assert "799 blocks free" in stuck.beside
    assert "hold blocks that each other needs" in stuck.cause


def test_d07_a_short_prompt_that_pins_a_quarter_of_the_pool(tmp_path: Path) -> None:
    pool = 356_667 // 16
    rows = [request(i, i * 2.0, prompt=2400, output=100, length_s=1.8) for i in range(4)]

    def each(i: int) -> dict[str, Any]:
        live = any(row.sent_s <= T0 - 0.3 + i / 10 < row.end_s for row in rows)
        return state(pool, 0.255 * live, float(live), 0.0)

    found = said(made(tmp_path, rows, each, seconds=8.2, usable=pool))
    assert "fixed-slice" in found
    assert "90," in found["fixed-slice"], "about 90,900 tokens a request: three fit, and not the 148 that tokens over pool would say"


@pytest.mark.parametrize("put_back", [False, True])
def test_d10_a_request_that_was_accepted_and_can_never_be_scheduled(put_back: bool, tmp_path: Path) -> None:
    def each(i: int) -> dict[str, Any]:
        if put_back and i % 2:
            return state(63, 1.0, 1.0, 0.0, generation_tokens=9.0, preemptions=float(i))
        return state(63, 0.0, 0.0, 1.0, generation_tokens=9.0, preemptions=float(i) * put_back)

    found = said(made(tmp_path / "run", (), each, seconds=60, hz=1, usable=63, after={"preemptions": 60.0 * put_back}))
    named = "stuck-queue" if put_back else "never-admitted"
    assert next(iter(found)) == named
    assert "59.00 s" in found[named], "waiting at one look and running at the next is one livelock"
    if put_back:
        assert "room for 0 requests at 1,024 tokens" in found[named]
    else:
        assert "1 request waited while nothing ran" in found[named]
        assert "an empty pool holds 0.98 requests at 1,024 tokens" in found[named]
        assert "stuck-queue" not in found, "said once, and by its name"
    assert "0.98 requests at 1,024 tokens" in found["longer-than-the-pool"], "and it is predicted: need(len) > pool"

    def moving(i: int) -> dict[str, Any]:
        return {**each(i), "generation_tokens": 9.0 + i}

    moved = said(made(tmp_path / "moving", (), moving, seconds=60, hz=1, usable=63, after={"preemptions": 60.0 * put_back}))
    assert not {"stuck-queue", "never-admitted"} & set(moved)


def test_d10_is_told_before_the_near_max_request_comes(tmp_path: Path) -> None:
    found = said(made(tmp_path / "short", usable=63))
    assert "at 1,024 tokens" in found["longer-than-the-pool"], "64 blocks are needed, and the null block is none of them"
    assert "campaign-day" not in found
    assert not {"longer-than-the-pool", "campaign-day"} & set(said(made(tmp_path / "enough", usable=96)))


def test_d10_a_prompt_of_9000_tokens_before_8209_pages_of_one(tmp_path: Path) -> None:
    each = {**state(8209, 0.0, 0.0, 1.0), "generation_tokens": 9.0}
    found = said(made(tmp_path, (), each, seconds=60, hz=1, usable=8209, before={"block_size": 1, "max_model_len": 9024}))
    assert "an empty pool holds 0.91 requests at 9,024 tokens" in found["never-admitted"]


@pytest.mark.parametrize("waiting", [0.0, 1.0])
def test_d10_our_own_request_that_hangs_is_named_with_what_it_needs(waiting: float, tmp_path: Path) -> None:
    """From a Run: the client's deadline passed without a token; not every engine counts such a request as waiting."""
    idle = {**state(8208, 0.0, 0.0, waiting), "generation_tokens": 9.0, "prompt_tokens": 1.0}
    long, short = hung(9000), [request(0, 0.0, prompt=900, output=8, ttft_s=17.0, length_s=18.0)]
    found = said(made(tmp_path / "hung", long, idle, seconds=20, hz=2, usable=8208, before={"block_size": 1, "max_model_len": 8192}))
    assert next(iter(found)) == "never-admitted"
    assert "the largest request that was sent needs 109.7 % of the whole pool (its prompt: 9,000 tokens)" in found["never-admitted"]
    answered = said(made(tmp_path / "slow", short, {**idle, "waiting": 0.0, "running": 1.0}, seconds=20, hz=2, usable=8208, before={"block_size": 1}))
    assert not {"never-admitted", "stuck-queue"} & set(answered), "a long prefill is no hang"


def test_d11_a_window_pool_that_blocks_is_named_and_the_second_pool_as_well(tmp_path: Path) -> None:
    each = state(256, 0.0, 0.0, 1.0, generation_tokens=9.0)
    (stuck,) = find(made(tmp_path, (), each, seconds=60, hz=1, usable=256)).found
    assert stuck.id == "never-admitted"
    assert "less than a twentieth of the pool was held" in stuck.text
    assert "second pool" in stuck.cause
    assert any("--swa-full-tokens-ratio" in action for action in stuck.do)


def test_an_engine_whose_gauge_counts_what_it_keeps_is_not_said_to_have_an_empty_pool(tmp_path: Path) -> None:
    each = state(256, 0.6, 0.0, 1.0, generation_tokens=9.0)
    found = said(made(tmp_path, (), each, seconds=60, hz=1, usable=256, engine="lmdeploy"))
    assert "less than 90 % of the pool was held or kept for reuse" in found["never-admitted"]
    assert "twentieth" not in found["never-admitted"]


def test_a_request_that_is_put_off_for_another_reason_is_not_called_too_large(tmp_path: Path) -> None:
    each = state(256, 0.0, 0.0, 1.0, generation_tokens=9.0, waiting_capacity=0.0)
    found = said(made(tmp_path, (), each, seconds=60, hz=1, usable=256))
    assert {"stuck-queue", "deferred-waiting"} <= set(found)
    assert "never-admitted" not in found


def test_d13_one_long_answer_before_fourteen_is_no_hang(tmp_path: Path) -> None:
    def each(i: int) -> dict[str, Any]:
        return state(20_000, 0.765 + 0.0001 * i, 1.0, 14.0, generation_tokens=5.4 * i)

    found = said(made(tmp_path, (), each, seconds=30, hz=1, usable=20_000))
    assert "waiting-beside-free" in found
    assert "stuck-queue" not in found
    capped = said(made(tmp_path / "capped", (), each, seconds=30, hz=1, usable=20_000, before={"max_num_seqs": 1}))
    assert "seat-bound" in capped


@pytest.mark.parametrize(("spread", "uneven"), [((0.85, 0.17), True), ((0.52, 0.50), False)])
def test_g01_a_mean_of_51_percent_may_be_one_replica(spread: tuple[float, float], uneven: bool, tmp_path: Path) -> None:
    found = said(made(tmp_path, (), lambda server: state(127, spread[server], 10 * spread[server], 0.0), servers=2))
    assert ("replica-imbalance" in found) is uneven


def test_g05_ranks_that_differ_by_half_a_percent_are_alike(tmp_path: Path) -> None:
    cards = [card(number, used=60 + 0.1 * number, ours=60 + 0.1 * number) for number in range(4)]
    assert "gpu-imbalance" not in said(on_cards(tmp_path, cards, [worker(number, pool=7.2, weights=50) for number in range(4)]))


def test_data_parallel_ranks_of_which_one_is_full_are_uneven(tmp_path: Path) -> None:
    """Field case C14: averages over idle ranks hide the full one."""
    rows = closed_loop()
    samples = []
    for i in range(44):
        ranks = {"0": state(127, 0.9, 8.0, 0.0), "1": state(127, 0.05, 1.0, 0.0)}
        samples.append(msgspec.structs.replace(sample(rows, T0 - 0.2 + i / 10), ranks=ranks))
    run = MadeRun(rows=rows, samples=samples, before=[snapshot(T0 - 0.5)]).write(tmp_path / "1-normal")
    assert "replica-imbalance" in said(analyse(run))
