"""llama.cpp's traps: one pool or many, what idle slots keep, rounded counters, and what no endpoint tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.engines import DIALECTS, RawState, Values, read, read_values
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.server.startlog import facts

LLAMA = DIALECTS["llamacpp"]
DATA = Path(__file__).parent.parent / "data"
UNIFIED: dict[str, Value] = {"pool_tokens": Reading(8192, "tokens", "start-up log: 8192 cells, 4/1 seqs")}
SPLIT: dict[str, Value] = {"pool_tokens": Reading(8192, "tokens", "start-up log: 2048 cells, 4/4 seqs")}


def slot(number: int, n_ctx: int = 2048, tokens: int | None = None, busy: bool = False) -> dict[str, Any]:
    row = {"id": number, "n_ctx": n_ctx, "is_processing": busy}
    return row if tokens is None else {**row, "n_prompt_tokens": tokens}


def values_of(slots: Any, log: dict[str, Value] | None = None, metrics: str | None = None) -> Values:
    samples = None if metrics is None else parse_samples(metrics, LLAMA.wanted)
    reason = "/metrics answers HTTP 501: This server does not support metrics endpoint. Start it with `--metrics`"
    return read_values(LLAMA, RawState(metrics=samples, metrics_reason=reason, json={"/slots": slots}, log_facts=log or {}))


def number(values: Values, name: str) -> float:
    value = values.whole[name]
    assert isinstance(value, Reading), f"{name}: {value}"
    return value.number()


def reason(values: Values, name: str) -> str:
    value = values.whole[name]
    assert isinstance(value, Missing), f"{name}: {value}"
    return value.reason


def test_slots_that_share_one_pool_are_not_added_up() -> None:
    slots = [slot(n, 8192, 1000, busy=n < 2) for n in range(4)]
    values = values_of(slots, UNIFIED)
    assert (number(values, "pool_tokens"), number(values, "used_tokens"), number(values, "free_tokens")) == (8192, 2000, 6192)
    assert number(values, "usage") == 2000 / 8192


def test_slots_with_pools_of_their_own_are_added_up_and_the_fullest_is_named() -> None:
    values = values_of([slot(0, 2048, 2000, busy=True), slot(1, 2048, 100, busy=True), slot(2, 2048, 2047), slot(3)], SPLIT)
    assert (number(values, "pool_tokens"), number(values, "used_tokens")) == (8192, 2100)
    assert any("fullest holds 2000 of 2048 tokens (48 free)" in note for note in values.notes)


def test_without_the_log_the_pool_of_several_slots_is_not_guessed() -> None:
    values = values_of([slot(n, 2048, 100, busy=True) for n in range(4)])
    assert "2048 (unified)" in reason(values, "pool_tokens")
    assert "8192 together (split)" in reason(values, "pool_tokens")
    assert "only the start-up log tells" in reason(values, "usage")
    assert number(values, "used_tokens") == 400


def test_one_slot_is_its_own_pool() -> None:
    values = values_of([slot(0, 4096, 1024, busy=True)])
    assert (number(values, "pool_tokens"), number(values, "usage")) == (4096, 0.25)


@pytest.mark.parametrize("kind", ["unified", "split"])
def test_the_pool_of_a_recorded_server_is_what_its_log_states(kind: str) -> None:
    folder = DATA / "llamacpp"
    log = facts((folder / f"startup-q8_0-{kind}.log").read_text())
    values = values_of(json.loads((folder / f"slots-busy-{kind}.json").read_text()), log, (folder / f"metrics-busy-{kind}.txt").read_text())
    assert number(values, "pool_tokens") == 16384
    assert number(values, "used_tokens") + number(values, "free_tokens") == 16384
    assert number(values, "pool_bytes") > 1 << 20
    assert any("split" in note for note in values.notes) == (kind == "split")


def test_what_an_idle_slot_keeps_is_free_for_the_next_request() -> None:
    idle = json.loads((DATA / "llamacpp" / "slots-idle-unified.json").read_text())
    assert any(row.get("n_prompt_tokens") for row in idle), "the recording holds stale tokens"
    values = values_of(idle, UNIFIED)
    assert (number(values, "used_tokens"), number(values, "running"), number(values, "usage")) == (0, 0, 0)


def test_a_slot_that_has_not_begun_its_prompt_does_not_count_the_tokens_of_the_request_before() -> None:
    # as a running server told it: the task is given, nothing of it is in the cache, and n_prompt_tokens is of the task before
    given = {**slot(0, 8192, 1475, busy=True), "n_prompt_tokens_processed": 0, "n_prompt_tokens_cache": 0, "next_token": [{"n_decoded": 0}]}
    begun = {**slot(1, 8192, 666, busy=True), "n_prompt_tokens_processed": 301, "n_prompt_tokens_cache": 0, "next_token": [{"n_decoded": 366}]}
    reused = {**slot(2, 8192, 500, busy=True), "n_prompt_tokens_processed": 100, "n_prompt_tokens_cache": 390, "next_token": [{"n_decoded": 11}]}
    assert number(values_of([given, begun, reused], UNIFIED), "used_tokens") == 666 + 500


def test_a_full_pool_is_full_and_not_fuller_by_the_token_that_was_drawn_last() -> None:
    # as a running server with a unified pool of 2,048 tokens told it, just before it gave up with "Context size has been exceeded"
    told = [(2009, 2008, 1), (680, 40, 0), (804, 0, 0), (603, 0, 0)]
    slots = [
        {**slot(n, 2048, tokens, busy=True), "n_prompt_tokens_processed": prompt, "n_prompt_tokens_cache": 0, "next_token": [{"n_decoded": drawn}]}
        for n, (tokens, prompt, drawn) in enumerate(told)
    ]
    values = values_of(slots, {"pool_tokens": Reading(2048, "tokens", "start-up log: 2048 cells, 4/1 seqs")})
    assert (number(values, "used_tokens"), number(values, "free_tokens"), number(values, "usage")) == (2048, 0, 1)


def test_fresh_slots_that_name_no_tokens_hold_none() -> None:
    values = values_of(json.loads((DATA / "llamacpp" / "slots-fresh-split.json").read_text()), SPLIT)
    assert (number(values, "used_tokens"), number(values, "free_tokens")) == (0, number(values, "pool_tokens"))


def test_a_busy_slot_of_an_older_build_that_names_no_tokens_is_unknown_and_not_zero() -> None:
    older = [{"id": 0, "n_ctx": 4096, "is_processing": True, "prompt": "text", "next_token": {"n_decoded": 7, "has_next_token": True}}]
    values = values_of(older)
    assert "states no n_prompt_tokens" in reason(values, "used_tokens")
    assert number(values, "running") == 1
    # A build between the two: next_token is an object still.
    assert number(values_of([{**older[0], "n_prompt_tokens": 300}]), "used_tokens") == 300


def test_slots_switched_off_leave_what_metrics_and_props_tell() -> None:
    raw = RawState(
        metrics=parse_samples((DATA / "llamacpp" / "metrics-busy-unified.txt").read_text(), LLAMA.wanted),
        json={
            "/slots": Missing("/slots answers HTTP 501: This server does not support slots endpoint. Start it with `--slots`"),
            "/props": json.loads((DATA / "llamacpp" / "props-unified.json").read_text()),
        },
        log_facts={"pool_tokens": Reading(16384, "tokens", "start-up log: cells")},
    )
    values = read_values(LLAMA, raw)
    assert (number(values, "running"), number(values, "waiting"), number(values, "max_num_seqs")) == (4, 2, 4)
    assert number(values, "pool_tokens") == 16384
    assert "--slots" in reason(values, "used_tokens")
    assert "--slots" in reason(values, "usage")


def test_without_the_metrics_flag_the_reason_says_so() -> None:
    values = values_of([slot(0, 4096, 10, busy=True)])
    for name in ("waiting", "prompt_tokens", "generation_tokens", "prefix_hits", "prefix_queries"):
        assert "--metrics" in reason(values, name)
    assert number(values, "running") == 1


def test_rounded_counters_say_that_they_are_rounded() -> None:
    text = "llamacpp:prompt_tokens_total 1.23457e+06\nllamacpp:prompt_tokens_cached_total 10\n"
    values = values_of([slot(0)], metrics=text)
    assert number(values, "prompt_tokens") == 1234570
    assert any("six significant digits" in note for note in values.notes)
    assert not any("six" in note for note in values_of([slot(0)], metrics=text.replace("1.23457e+06", "999999")).notes)


def test_a_reader_of_metrics_is_told_that_it_disturbs_the_rate_gauges() -> None:
    assert any("resets" in note for note in values_of([slot(0)], metrics="llamacpp:requests_deferred 0\n").notes)
    assert not any("resets" in note for note in values_of([slot(0)]).notes)


@pytest.mark.parametrize("odd", [{}, [], "text", 5, [1, 2], [{"id": 0}], {"error": {"code": 501}}])
def test_a_body_of_another_shape_is_missing_and_not_empty_slots(odd: Any) -> None:
    values = values_of(odd)
    assert reason(values, "pool_tokens")
    if not (isinstance(odd, list) and odd and isinstance(odd[0], dict)):
        assert reason(values, "used_tokens")
        assert reason(values, "running")


def test_more_tokens_than_the_pool_is_refused_and_not_clamped() -> None:
    values = values_of([slot(0, 100, 250, busy=True)])
    assert "above a full pool" in reason(values, "usage")
    assert reason(values, "free_tokens")


def test_a_clock_that_is_not_unix_time_is_no_start_time() -> None:
    assert "not Unix time" in reason(values_of([slot(0)]), "start_time")


def test_the_build_is_the_version() -> None:
    props = json.loads((DATA / "exposition" / "llamacpp" / "b11434-props-unified.json").read_text())
    assert read(LLAMA, RawState(json={"/props": props}), 1.0).version == "b11434-0000000"
