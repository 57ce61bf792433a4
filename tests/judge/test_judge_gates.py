"""The gates of one configuration: each passes on good evidence, fails on bad, and never passes on none."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_run import T0, USABLE, MadeRun, closed_loop, quality_run, refused, request, sample, snapshot

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conditions import parse
from pytest_kvcache.judge import gates
from pytest_kvcache.judge.gates import FAIL, INCONCLUSIVE, INVALID, PASS
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import GateRecord, TelemetryRow, ValueRecord


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Return a function that analyses a MadeRun with the given fields."""
    number = iter(range(1000))

    def make(run: MadeRun | None = None, **fields: Any) -> Analysis:
        return analyse((run or MadeRun(**fields)).write(tmp_path / "runs" / f"{next(number)}-normal"))

    return make


def unpolled(**columns: float) -> list[TelemetryRow]:
    return [TelemetryRow(T0 - 0.3 + i / 10, values={"running": 2.0, **columns}) for i in range(48)]


def test_peak_usage_passes_and_fails_at_its_bound(made: Any) -> None:
    analysis = made(samples=[sample([], T0 - 0.3 + i / 10, usage=0.5, running=2.0) for i in range(48)])
    assert gates.peak_usage([analysis], 0.5).verdict == PASS
    failed = gates.peak_usage([analysis], 0.4999)
    assert failed.verdict == FAIL
    assert failed.evidence == "runs/0-normal"
    assert failed.lane == "normal"
    assert failed.bound == 0.4999


def test_a_usage_ratio_is_never_alone(made: Any) -> None:
    gate = gates.peak_usage([made()], 0.9)
    for words in (
        "pool 127 blocks of 16 tokens",
        "109 blocks free at the tightest",
        "the true peak is at least this",
        "2 requests running",
        "mean length",
    ):
        assert words in gate.beside
        assert words in gate.text


def test_beside_the_usage_of_replicas_stands_the_free_space_of_the_fullest(made: Any) -> None:
    analysis = made()
    values = {**analysis.values, "free_blocks.tightest": Reading(3.0, "blocks", "free_blocks, lowest of 2 servers")}
    gate = gates.peak_usage([dataclasses.replace(analysis, values=values)], 0.9)
    assert "109 blocks free at the tightest (3 blocks of the fullest server)" in gate.beside
    assert "fullest" not in gates.peak_usage([analysis], 0.9).beside


def test_the_worst_window_decides(made: Any) -> None:
    calm, full = made(), made(rows=closed_loop(users=10))
    gate = gates.peak_usage([calm, full, calm], 0.5)
    assert gate.verdict == FAIL
    assert gate.evidence == "runs/1-normal"


def test_a_preemption_proves_that_the_pool_was_full_whatever_was_polled(made: Any) -> None:
    analysis = made(after=[snapshot(T0 + 5, preemptions=2)])
    usage, free = gates.peak_usage([analysis], 0.95), gates.free_space([analysis], 1)
    assert usage.verdict == free.verdict == FAIL
    assert "2 preemptions prove" in usage.text
    assert gates.no_preemptions([analysis]).verdict == FAIL


def test_a_peak_that_polls_missed_and_our_own_log_shows_does_not_pass(made: Any) -> None:
    rows = closed_loop(users=8, prompt=220, output=20)
    samples = [sample([], T0 - 0.3 + i / 10, usage=0.1, running=8.0) for i in range(48)]
    gate = gates.peak_usage([made(rows=rows, samples=samples)], 0.8)
    assert gate.verdict == INCONCLUSIVE
    assert "our request log" in gate.text


def test_space_that_polls_saw_free_and_our_own_log_shows_taken_does_not_pass(made: Any) -> None:
    rows = closed_loop(users=8, prompt=220, output=20)
    samples = [sample([], T0 - 0.3 + i / 10, usage=0.1, used_blocks=12.0, free_blocks=115.0, running=8.0) for i in range(48)]
    hollow, calm = made(rows=rows, samples=samples), made(samples=unpolled(usage=0.3, used_blocks=38.0, free_blocks=89.0))
    gate = gates.free_space([hollow], 64)
    assert gate.verdict == INCONCLUSIVE
    assert "our request log leaves" in gate.text
    # the window that polls saw fullest is not the one that our log shows fullest
    for gate in (gates.free_space([calm, hollow], 64), gates.peak_usage([calm, hollow], 0.8)):
        assert (gate.verdict, gate.evidence) == (INCONCLUSIVE, hollow.run.folder.parent.name + "/" + hollow.run.folder.name)
    assert gates.free_space([calm], 64).verdict == PASS


def test_an_error_that_only_a_full_pool_gives_proves_it_whatever_was_polled(made: Any) -> None:
    rows = [*closed_loop(), refused(90, 1.0, "error_in_stream", "in the stream: Context size has been exceeded.")]
    fields: dict[str, Any] = {"rows": rows, "samples": unpolled(usage=0.2, used_blocks=25.0, free_blocks=102.0)}
    analysis = made(**fields, record={"engine": "llamacpp"})
    usage, free = gates.peak_usage([analysis], 0.95), gates.free_space([analysis], 1)
    assert usage.verdict == free.verdict == FAIL
    assert "1 request that failed for want of free space proves" in usage.text
    # the words are llama.cpp's: elsewhere they prove nothing
    assert gates.peak_usage([made(**fields)], 0.95).verdict == PASS


@pytest.mark.parametrize("judge", [lambda a: gates.peak_usage(a, 0.9), lambda a: gates.free_space(a, 1)])
def test_what_is_not_told_never_passes(made: Any, judge: Any) -> None:
    names = ["usage", "used_blocks", "free_blocks", "used_tokens", "free_tokens"]
    analysis = made(samples=unpolled(), before=[snapshot(T0 - 0.5, missing=names)], after=[snapshot(T0 + 5, missing=names)])
    gate = judge([analysis])
    assert gate.verdict == INCONCLUSIVE
    assert gate.applicable
    assert "is not told" in gate.text


def test_what_cannot_happen_is_listed_and_not_counted(made: Any) -> None:
    never: dict[str, Any] = {"never": ["preemptions"]}
    analysis = made(
        samples=unpolled(usage=0.2, used_tokens=100, free_tokens=900), before=[snapshot(T0 - 1, **never)], after=[snapshot(T0 + 5, **never)]
    )
    gate = gates.no_preemptions([analysis])
    assert not gate.applicable
    assert gate.verdict != PASS
    assert gates.session_verdict([gate]) == (INCONCLUSIVE, ["no gate was judged"])
    assert gates.session_verdict([gate, gates.free_space([analysis], 1)])[0] == PASS


def test_free_space_is_judged_in_what_the_engine_counts(made: Any) -> None:
    blocks = gates.free_space([made()], 64)
    assert (blocks.verdict, blocks.unit, blocks.quantity) == (PASS, "blocks", "free_blocks.min")
    idle = snapshot(T0 - 1, missing=["free_blocks", "used_blocks", "usable_blocks"])
    tokens = gates.free_space([made(samples=unpolled(usage=0.2, used_tokens=90, free_tokens=10), before=[idle])], 64)
    assert (tokens.verdict, tokens.unit, tokens.quantity) == (FAIL, "tokens", "free_tokens.min")


def test_no_rejection_tells_how_rare_they_may_still_be(made: Any) -> None:
    gate = gates.no_rejections([made()])
    assert gate.verdict == PASS
    assert "0 of 16 requests" in gate.text
    assert "17.1 %" in gate.text


def test_a_rejection_fails_with_its_class_and_the_servers_words(made: Any) -> None:
    analysis = made(rows=[*closed_loop(), refused(90, 1.0, "queue_full", "engine is busy"), refused(91, 1.1, "timeout", "30 s")])
    gate = gates.no_rejections([analysis])
    assert gate.verdict == FAIL
    assert "1 queue_full" in gate.text
    assert "engine is busy" in gate.text
    assert gates.no_rejections([analysis], max=2).verdict == PASS


def test_refusals_that_only_the_engine_counted_fail(made: Any) -> None:
    gate = gates.no_rejections([made(after=[snapshot(T0 + 5, rejections=4)])])
    assert gate.verdict == FAIL
    assert "engine itself counts 4" in gate.text


def test_an_empty_log_never_passes(made: Any) -> None:
    for gate in (gates.no_rejections([made(rows=[])]), gates.no_preemptions([made(rows=[])]), gates.peak_usage([made(rows=[])], 0.9)):
        assert gate.verdict == INVALID


def test_nothing_passes_without_a_load(made: Any) -> None:
    analysis = made(quality_run(300))
    for gate in (
        gates.no_rejections([analysis]),
        gates.no_preemptions([analysis]),
        gates.peak_usage([analysis], 1.0),
        gates.free_space([analysis], 0),
    ):
        assert gate.verdict == INCONCLUSIVE
        assert "no load was run" in gate.text


def test_unsound_evidence_is_invalid_and_says_how_to_mend_it(made: Any) -> None:
    unsound = made(no_end=True)
    gate = gates.peak_usage([made(), unsound], 0.9)
    assert gate.verdict == INVALID
    assert "no end line" in gate.text
    assert "measure again" in gate.text
    assert gate.evidence == "runs/1-normal" or gate.evidence == "runs/0-normal"


@pytest.mark.parametrize(
    ("after", "verdict", "says"),
    [
        (snapshot(T0 + 5), PASS, "nothing ran or waited"),
        (snapshot(T0 + 5, running=1), FAIL, "running 1 request"),
        (snapshot(T0 + 5, waiting=2), FAIL, "waiting 2 requests"),
        (snapshot(T0 + 5, used_blocks=3), FAIL, "used blocks 3 blocks"),
        (snapshot(T0 + 5, missing=["running"]), INCONCLUSIVE, "running is not told"),
        (snapshot(T0 + 5, missing=["used_blocks", "usage"]), INCONCLUSIVE, "is not told"),
    ],
)
def test_what_was_taken_must_be_given_back(made: Any, after: Any, verdict: str, says: str) -> None:
    gate = gates.returns_to_idle([made(after=[after])])
    assert gate.verdict == verdict
    assert says in gate.text


def test_a_server_that_could_not_be_read_after_the_load_is_not_idle(made: Any) -> None:
    assert gates.returns_to_idle([made(after=[])]).verdict == INCONCLUSIVE


def test_what_was_held_before_the_load_may_be_held_after_it(made: Any) -> None:
    analysis = made(before=[snapshot(T0 - 1, used_blocks=3)], after=[snapshot(T0 + 5, used_blocks=3)])
    assert gates.returns_to_idle([analysis]).verdict == PASS


def test_an_engine_that_keeps_its_idle_cache_is_not_said_to_leak(made: Any) -> None:
    analysis = made(after=[snapshot(T0 + 5, used_blocks=300)])
    record = msgspec.structs.replace(analysis.run.record, engine="lmdeploy")
    kept = dataclasses.replace(analysis, run=dataclasses.replace(analysis.run, record=record))
    gate = gates.returns_to_idle([kept])
    assert gate.verdict == PASS
    assert "no sign of a leak" in gate.text
    assert gates.returns_to_idle([analysis]).verdict == FAIL


def test_quality_passes_at_its_rate_and_shows_the_bound(made: Any) -> None:
    good, bad = made(quality_run(298)), made(quality_run(280))
    passed = gates.quality([good], 0.98)
    assert passed.verdict == PASS
    assert "298 of 300 items passed" in passed.text
    assert passed.low == pytest.approx(0.979, abs=1e-3)
    failed = gates.quality([bad], 0.98)
    assert failed.verdict == FAIL
    assert "280 of 300 at 64 tokens" in failed.text
    assert gates.quality([made()], 0.98).verdict == INCONCLUSIVE


def probe(**changes: Any) -> MadeRun:
    rows = [request(0, 0.0, prompt=980, output=32, length_s=2.0, lane="nearmax", **changes)]
    return MadeRun(rows=rows, record={"profile": "nearmax", "options": {"requests": 1}})


def test_a_near_max_request_tells_its_level_before_at_the_peak_and_after(made: Any) -> None:
    gate = gates.near_max_served([made(probe())])
    assert gate.verdict == PASS
    assert "before 0.0 % with 127 blocks free" in gate.text
    assert "at the peak 50.4 % with 63 blocks free" in gate.text
    assert "after 0.0 % with 127 blocks free" in gate.text


def test_a_peak_that_the_polls_missed_is_said(made: Any) -> None:
    run = probe()
    run.samples = [sample([], T0 - 0.3 + i / 10) for i in range(30)]
    assert "by our own log 64 blocks were held" in gates.near_max_served([made(run)]).text


def test_a_near_max_request_that_was_clamped_fails(made: Any) -> None:
    gate = gates.near_max_served([made(probe(outcome="clamped", completion_tokens=6, error="6 of 32 tokens"))])
    assert gate.verdict == FAIL
    assert "clamped" in gate.text


def test_a_short_request_is_no_near_max_probe(made: Any) -> None:
    run = MadeRun(rows=[request(0, 0.0, length_s=2.0)], record={"options": {"requests": 1}})
    assert gates.near_max_served([made(run)]).verdict == INCONCLUSIVE


def over(outcome: str, planned: int = 1040, **changes: Any) -> MadeRun:
    row = refused(0, 0.5, outcome, "maximum context length is 1024", prompt_tokens_planned=planned, lane="overlimit", **changes)
    return MadeRun(rows=[row], record={"profile": "overlimit", "options": {"requests": 1}})


def test_over_the_limit_must_be_refused_as_too_long(made: Any) -> None:
    assert gates.over_limit_refused([made(over("over_length"))]).verdict == PASS
    for outcome in ("server_error", "timeout", "reset", "bad_request"):
        gate = gates.over_limit_refused([made(over(outcome))])
        assert gate.verdict == FAIL
        assert outcome in gate.text
    answered = MadeRun(rows=[request(0, 0.0, prompt=1040, length_s=2.0)], record={"options": {"requests": 1}})
    assert gates.over_limit_refused([made(answered)]).verdict == FAIL
    assert gates.over_limit_refused([made(over("over_length", planned=1000))]).verdict == INCONCLUSIVE


def test_a_server_that_died_of_a_long_prompt_did_not_refuse_it_cleanly(made: Any) -> None:
    run = over("over_length")
    run.after = []
    assert gates.over_limit_refused([made(run)]).verdict == FAIL


@pytest.mark.parametrize(
    ("concurrency", "length", "verdict"),
    [(7, 288, PASS), (7, 289, FAIL), (8, 240, PASS), (8, 241, FAIL), (9, 16, FAIL), (1, 1024, PASS), (1, 1025, FAIL), (2, 1024, FAIL)],
)
def test_what_fits_is_block_arithmetic(made: Any, concurrency: int, length: int, verdict: str) -> None:
    # 127 usable blocks of 16 tokens, 8 seats, max_model_len 1024
    gate = gates.fits([made()], concurrency=concurrency, length=length)
    assert gate.verdict == verdict, gate.text
    if length <= 1024:
        assert (min(USABLE // math.ceil(length / 16), 8) >= concurrency) is (verdict == PASS)


def test_a_pool_of_tokens_fits_by_tokens(made: Any) -> None:
    names = ["usable_blocks", "pool_blocks", "block_size", "used_blocks", "free_blocks"]
    server = snapshot(T0 - 1, missing=names, pool_tokens=4096, max_model_len=1024, max_num_seqs=4)
    analysis = made(samples=unpolled(usage=0.2), before=[server], after=[server])
    assert gates.fits([analysis], concurrency=4, length=1024).verdict == PASS
    assert gates.fits([analysis], concurrency=5, length=100).verdict == FAIL


def test_a_model_whose_requests_cost_otherwise_is_not_guessed_at(made: Any) -> None:
    # 128 blocks at 4.0x: 32 blocks at max length by the engine's own figure, where length alone says 64
    hybrid = made(before=[snapshot(T0 - 1, max_concurrency=4.0)])
    assert gates.fits([hybrid], concurrency=3, length=200).verdict == PASS
    assert gates.fits([hybrid], concurrency=5, length=200).verdict == INCONCLUSIVE
    plain = made(before=[snapshot(T0 - 1, max_concurrency=2.0)])
    assert gates.fits([plain], concurrency=8, length=200).verdict == PASS


def test_a_request_must_fit_into_one_replica(made: Any) -> None:
    pair = [snapshot(T0 - 1), snapshot(T0 - 1)]
    samples = [msgspec.structs.replace(sample(closed_loop(), T0 - 0.3 + i / 10), endpoint=e) for i in range(48) for e in (0, 1)]
    analysis = made(samples=samples, before=pair, after=[snapshot(T0 + 5)] * 2)
    assert gates.fits([analysis], concurrency=2, length=1024).verdict == PASS
    assert gates.fits([analysis], concurrency=3, length=1024).verdict == FAIL


def test_a_pool_that_is_not_told_fits_nothing(made: Any) -> None:
    names = ["usable_blocks", "pool_blocks", "pool_tokens"]
    assert gates.fits([made(before=[snapshot(T0 - 1, missing=names)])], concurrency=1, length=10).verdict == INCONCLUSIVE


def test_balance_is_judged_between_servers_and_not_of_one(made: Any) -> None:
    assert not gates.balanced([made()]).applicable
    rows = [request(i, 0.0, prompt=400, output=10, length_s=3.0) for i in range(4)]
    samples = []
    for i in range(40):
        at = T0 - 0.3 + i / 10
        samples += [sample(rows, at), msgspec.structs.replace(sample([], at + 0.01), endpoint=1)]
    uneven = made(rows=rows, samples=samples, before=[snapshot(T0 - 1)] * 2, after=[snapshot(T0 + 5)] * 2)
    gate = gates.balanced([uneven], 0.2)
    assert gate.verdict == FAIL
    assert "server 1" in gate.text
    assert gates.balanced([uneven], 0.99).verdict == FAIL, "its usage may be low, and all requests are on one"
    assert gates.balanced([uneven], 0.99, max_over_mean=2.0).verdict == PASS


def test_a_threshold_of_the_grammar_is_a_gate(made: Any) -> None:
    analysis = made()
    assert gates.threshold([analysis], parse("usage.peak < 0.9 and rejections{lane=normal} == 0")).verdict == PASS
    assert gates.threshold([analysis], parse("ttft.p95 <= 50ms")).verdict == FAIL
    assert gates.threshold([analysis], parse("rejections{lane=nearmax} == 0")).verdict == INCONCLUSIVE
    assert gates.threshold([analysis], parse("throughput >= baseline * 0.97"), [made(), made()]).verdict == PASS
    assert gates.threshold([analysis], parse("throughput >= baseline * 1.1"), [made()]).verdict == FAIL
    assert gates.threshold([analysis], parse("throughput >= baseline")).verdict == INCONCLUSIVE
    assert "pool 127 blocks" in gates.threshold([analysis], parse("usage.peak < 0.9")).text


def gate_of(verdict: str, applicable: bool = True) -> GateRecord:
    return GateRecord("g", "q", verdict, "t", applicable=applicable)


@pytest.mark.parametrize(
    ("verdicts", "session"),
    [
        ([PASS, PASS], PASS),
        ([PASS, INCONCLUSIVE], INCONCLUSIVE),
        ([INCONCLUSIVE, INVALID, PASS], INVALID),
        ([INVALID, FAIL, PASS], FAIL),
        ([], INCONCLUSIVE),
    ],
)
def test_the_session_is_as_good_as_its_worst_gate(verdicts: list[str], session: str) -> None:
    assert gates.session_verdict([gate_of(verdict) for verdict in verdicts])[0] == session


def test_a_session_with_gates_left_out_cannot_pass() -> None:
    verdict, notes = gates.session_verdict([gate_of(PASS)], ["test_quality"])
    assert verdict == INCONCLUSIVE
    assert notes
    assert gates.session_verdict([gate_of(FAIL)], ["test_quality"])[0] == FAIL


def test_the_message_of_a_failure_has_everything_that_is_needed(made: Any) -> None:
    text = gates.failure_text(gates.peak_usage([made()], 0.01))
    for words in ("peak_usage [normal] FAIL", "usage.peak", "at most 1.0 %", "polled at 10 Hz, a lower bound", "pool 127 blocks", "runs/0-normal"):
        assert words in text


def test_a_peak_without_a_pool_size_still_says_what_is_not_known(made: Any) -> None:
    names = ["usable_blocks", "pool_blocks", "pool_tokens"]
    gate = gates.peak_usage([made(before=[snapshot(T0 - 1, missing=names)])], 0.9)
    assert "pool not known" in gate.text
    assert gate.value is not None
    assert isinstance(gate.value.to_value(), Reading)


def test_a_pool_that_is_not_told_is_no_pool_that_cannot_be(made: Any) -> None:
    untold = {"free_blocks": Missing("it counts tokens", cannot_happen=True), "free_tokens": Missing("an attached server does not tell its pool")}
    untold |= {"usable_blocks": untold["free_blocks"], "pool_blocks": untold["free_blocks"], "pool_tokens": untold["free_tokens"]}
    untold |= {"usage": untold["free_tokens"], "used_blocks": untold["free_blocks"]}
    read = msgspec.structs.replace(
        snapshot(T0 - 0.5), quantities={**snapshot(T0 - 0.5).quantities, **{name: ValueRecord.of(value) for name, value in untold.items()}}
    )
    analysis = made(samples=unpolled(), before=[read], after=[read])
    for gate in (gates.free_space([analysis], 1), gates.fits([analysis], concurrency=1, length=10)):
        assert gate.applicable
        assert gate.verdict == INCONCLUSIVE
        assert "does not tell its pool" in gate.text


def test_replicas_that_tell_no_usage_are_not_called_balanced_nor_alone(made: Any) -> None:
    pair = [snapshot(T0 - 0.5), msgspec.structs.replace(snapshot(T0 - 0.5), endpoint="http://127.0.0.1:2")]
    both = [msgspec.structs.replace(row, endpoint=number) for row in unpolled(running=1.0) for number in range(2)]
    analysis = made(samples=both, before=pair, after=pair)
    gate = gates.balanced([analysis])
    assert gate.applicable
    assert gate.verdict == INCONCLUSIVE
    assert "0 of 2 servers told their usage" in gate.text
