"""A change is judged: equal passes, worse fails, too little evidence decides nothing, and what is not alike is not compared."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_run import T0, MadeRun, closed_loop, quality_rows, quality_run, refused, request, snapshot

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.judge.change import Margins, not_worse
from pytest_kvcache.judge.compare import RESTARTS_NOT_COVERED, Comparison, compare, config_diff
from pytest_kvcache.judge.gates import FAIL, INCONCLUSIVE, INVALID, PASS
from pytest_kvcache.judge.quality import quality_not_worse
from pytest_kvcache.judge.validity import check_side
from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import GateRecord, ValueRecord
from pytest_kvcache.runfolder import read_run
from pytest_kvcache.settings import Settings

Make = Callable[..., list[Analysis]]


@pytest.fixture
def side(tmp_path: Path) -> Make:
    """Return a function that makes the windows of one side; each window differs a little, as real ones do."""
    number = iter(range(1000))

    def make(windows: int = 5, length_s: float = 0.5, output: int = 50, users: int = 2, spread: float = 0.01, **fields: Any) -> list[Analysis]:
        found = []
        for window in range(windows):
            stretch = length_s * (1 + spread * (window - windows // 2))
            rows = closed_loop(users=users, length_s=stretch, ttft_s=stretch / 5, output=output)
            record = {"window": window, "workload": f"w{window}", **fields.get("record", {})}
            rest = {name: value for name, value in fields.items() if name != "record"}
            found.append(analyse(MadeRun(**{"rows": rows, "record": record, **rest}).write(tmp_path / "runs" / f"{next(number)}-normal")))
        return found

    return make


def by_name(gates: list[GateRecord]) -> dict[str, GateRecord]:
    return {gate.name: gate for gate in gates}


def verdicts(comparison: Comparison) -> set[str]:
    return {gate.verdict for gate in comparison.gates}


def test_the_same_configuration_against_itself_passes(side: Make) -> None:
    comparison = compare(side(), side())
    assert {gate.name: gate.verdict for gate in comparison.gates} == dict.fromkeys(
        ["usage_not_worse", "free_not_worse", "ttft_not_worse", "throughput_not_worse", "rejections_not_worse", "preemptions_not_worse"], PASS
    )
    assert comparison.verdict == PASS
    assert comparison.config_diff == []
    assert comparison.notes == [RESTARTS_NOT_COVERED, "the GPU of neither side is known, so it was not compared"]


def test_before_and_after_stand_beside_the_interval(side: Make) -> None:
    gate = by_name(compare(side(), side()).gates)["ttft_not_worse"]
    for record in (gate.before, gate.after):
        assert record is not None
        assert record.value == pytest.approx(0.1, rel=0.02)
    assert gate.low is not None
    assert gate.high is not None
    assert gate.low <= 0 <= gate.high < 0.25
    assert "paired windows" in gate.method
    assert gate.side == "after"


def test_a_slower_candidate_fails_on_time_and_throughput(side: Make) -> None:
    gates = by_name(compare(side(), side(length_s=1.0)).gates)
    assert gates["ttft_not_worse"].verdict == FAIL
    assert gates["throughput_not_worse"].verdict == FAIL
    assert "200 ms after" in gates["ttft_not_worse"].text
    assert "25.0 % may be" in gates["ttft_not_worse"].text


def test_an_improvement_is_told_with_both_bounds(side: Make) -> None:
    gates = by_name(compare(side(users=8), side(users=2, length_s=0.25)).gates)
    usage, ttft, rate = gates["usage_not_worse"], gates["ttft_not_worse"], gates["throughput_not_worse"]
    assert {usage.verdict, ttft.verdict} == {PASS}
    assert re.fullmatch(r"\d+\.\d % of the pool lower(, between \d+\.\d % and \d+\.\d % \(90 % interval\))?", usage.better), usage.better
    assert re.fullmatch(r"50\.\d % lower, between 4\d\.\d % and 5\d\.\d % \(90 % interval\)|50\.0 % lower", ttft.better), ttft.better
    assert ttft.better in ttft.text
    assert f"{ttft.better}, and 25.0 % higher may be" in ttft.text
    assert rate.better == ""
    free = gates["free_not_worse"]
    assert re.fullmatch(r"\d+ blocks higher(, between .* blocks and .* blocks \(90 % interval\))?", free.better), free.better
    worse = by_name(compare(side(users=2), side(users=8)).gates)
    assert worse["usage_not_worse"].better == ""
    assert re.fullmatch(r"29\d\.\d % higher, between 29\d\.\d % and 29\d\.\d % \(90 % interval\)", worse["throughput_not_worse"].better)


def test_a_peak_that_spreads_in_a_closed_loop_names_the_open_one_and_more_repeats(side: Make) -> None:
    def peaks(*users: int, **record: str) -> list[Analysis]:
        found = [side(1, users=n, record={"window": number, **record})[0] for number, n in enumerate(users)]
        return [replace(a, run=replace(a.run, record=msgspec.structs.replace(a.run.record, window=n, workload=f"w{n}"))) for n, a in enumerate(found)]

    gate = by_name(not_worse(peaks(4, 4, 4), peaks(3, 5, 4), Margins()))["usage_not_worse"]
    assert gate.verdict == INCONCLUSIVE
    assert "an open loop (--kv-rate) sends both sides the same arrivals" in gate.text
    assert "--kv-most-repeats" not in gate.text, "these servers were not launched by us"
    launched = by_name(not_worse(peaks(4, 4, 4, launch_id="a"), peaks(3, 5, 4, launch_id="b"), Margins()))["usage_not_worse"]
    assert "--kv-most-repeats takes as many repeats as the spread asks for" in launched.text


def test_a_fuller_pool_fails_with_its_three_numbers(side: Make) -> None:
    gates = by_name(compare(side(users=2), side(users=8)).gates)
    assert gates["usage_not_worse"].verdict == FAIL
    assert gates["free_not_worse"].verdict == FAIL
    before, after = gates["usage_not_worse"].beside.removeprefix("before: ").split("; after: ")
    assert "2 requests running" in before
    assert "8 requests running" in after
    assert before.count("pool 127 blocks") == after.count("pool 127 blocks") == 1


def test_a_milliseconds_worth_of_ttft_is_not_worth_a_verdict(side: Make) -> None:
    fast, slower = side(length_s=0.01), side(length_s=0.02)
    assert by_name(not_worse(fast, slower, Margins()))["ttft_not_worse"].verdict == PASS


def test_one_window_a_side_decides_nothing_and_says_so(side: Make) -> None:
    comparison = compare(side(1), side(1))
    gate = by_name(comparison.gates)["usage_not_worse"]
    assert gate.verdict == INCONCLUSIVE
    assert "about 2 windows a side" in gate.text
    assert comparison.verdict == INCONCLUSIVE


def test_noise_is_inconclusive_and_says_how_many_windows_would_do(side: Make) -> None:
    gate = by_name(not_worse(side(3, spread=0.2), side(3, spread=-0.2), Margins()))["ttft_not_worse"]
    assert gate.verdict == INCONCLUSIVE
    assert "windows a side would decide it (there are 3 and 3)" in gate.text


def test_what_seeds_alone_bring_falls_out_where_windows_pair(side: Make) -> None:
    before, after = side(4, spread=0.3), side(4, spread=0.3)
    gate = by_name(not_worse(before, list(reversed(after)), Margins()))["ttft_not_worse"]
    assert gate.verdict == PASS
    assert "paired windows" in gate.method
    alone = by_name(not_worse(before, side(3, spread=0.3), Margins()))["ttft_not_worse"]
    assert alone.verdict == INCONCLUSIVE
    assert "Welch" in alone.method
    others = side(4, spread=0.3, record={"workload": "other"})
    assert "Welch" in by_name(not_worse(before, others, Margins()))["ttft_not_worse"].method


def test_margins_come_from_the_settings(side: Make) -> None:
    before, after = side(), side(length_s=1.0)
    assert by_name(compare(before, after, Settings().replace(ttft_margin=1.5, throughput_margin=0.6)).gates)["ttft_not_worse"].verdict == PASS


def test_preemptions_after_the_change_fail(side: Make) -> None:
    before, after = side(), side(after=[snapshot(T0 + 5, preemptions=3)])
    gate = by_name(compare(before, after).gates)["preemptions_not_worse"]
    assert gate.verdict == FAIL
    assert "0 over 76 requests before, 15 over 76 after" in gate.text


def test_no_events_on_both_sides_pass_with_their_bound(side: Make) -> None:
    gate = by_name(compare(side(), side()).gates)["rejections_not_worse"]
    assert gate.verdict == PASS
    assert "at most 3.9 % of requests" in gate.text


def test_what_an_engine_cannot_do_does_not_apply(side: Make) -> None:
    never = {"before": [snapshot(T0 - 1, never=["preemptions"])], "after": [snapshot(T0 + 5, never=["preemptions"])]}
    sides = [side(**never), side(**never)]
    for analyses in sides:
        for analysis in analyses:
            assert isinstance(analysis.values["preemptions"], Reading)  # the samples of this made server count them
    samples = [msgspec.structs.replace(s, values={k: v for k, v in s.values.items() if k != "preemptions"}) for s in sides[0][0].run.telemetry()]
    comparison = compare(side(samples=samples, **never), side(samples=samples, **never))
    gate = by_name(comparison.gates)["preemptions_not_worse"]
    assert not gate.applicable
    assert comparison.verdict == PASS


def test_a_quantity_that_one_side_does_not_tell_never_passes(side: Make) -> None:
    hidden = {"before": [snapshot(T0 - 1, missing=["usage"])]}
    samples = [msgspec.structs.replace(s, values={k: v for k, v in s.values.items() if k != "usage"}) for s in side(1)[0].run.telemetry()]
    gate = by_name(compare(side(), side(samples=samples, **hidden)).gates)["usage_not_worse"]
    assert gate.verdict == INCONCLUSIVE
    assert "after the change: usage is not told" in gate.text


def test_a_larger_pool_is_told_in_blocks_too(side: Make) -> None:
    big = {"before": [snapshot(T0 - 1, usable=255)], "after": [snapshot(T0 + 5, usable=255)]}
    comparison = compare(side(), side(**big))
    gate = by_name(comparison.gates)["usage_not_worse"]
    assert "the pool was 128 blocks and is 256 blocks (used at most" in gate.text
    assert ["pool_blocks", "128 blocks", "256 blocks"] in [[c.name, c.before, c.after] for c in comparison.config_diff]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"engine": "llama.cpp"}, "the engine is vllm before and llama.cpp after"),
        ({"model": "other"}, "the model is m before and other after"),
        ({"embedded": True}, "embedded engine"),
        ({"settings": {"api": {"value": "chat", "source": "default"}}}, "through completions and after through chat"),
        ({"settings": {"api": {"value": "completions"}, "extra_body": {"value": '{"top_k": 1}'}}}, "had nothing in its body before and"),
    ],
)
def test_what_is_not_alike_is_not_compared(side: Make, record: dict[str, Any], says: str) -> None:
    comparison = compare(side(), side(record=record))
    assert verdicts(comparison) == {INVALID}
    assert comparison.verdict == INVALID
    assert says in comparison.gates[0].text
    assert comparison.problems


def test_a_missing_repeat_cannot_pass(side: Make) -> None:
    planned = {"record": {"planned_windows": 5}}
    assert compare(side(5, **planned), side(5, **planned)).verdict == PASS
    comparison = compare(side(5, **planned), side(4, **planned))
    gate = by_name(comparison.gates)["ttft_not_worse"]
    assert comparison.verdict == gate.verdict == INCONCLUSIVE
    assert "after the change window 5 of 5 missing, so it cannot pass" in gate.text
    assert compare(side(5, **planned), side(4, length_s=1.0, **planned)).verdict == FAIL
    absurd = {"record": {"planned_windows": 10**12}}
    (gate,) = [gate for gate in compare(side(2, **absurd), side(2, **absurd)).gates if gate.quantity == "throughput"]
    assert "windows 3, 4, 5, 6, 7 of 1000000000000 missing" in gate.text, "a damaged record takes neither the memory nor the afternoon"


def test_lengths_that_were_planned_decide_and_not_the_longest_context(side: Make) -> None:
    longer = {"before": [snapshot(T0 - 1, max_model_len=2048)], "after": [snapshot(T0 + 5, max_model_len=2048)]}
    comparison = compare(side(), side(**longer))
    assert comparison.verdict == PASS
    assert [(change.name, change.after) for change in comparison.config_diff] == [("max_model_len", "2,048 tokens")]
    stretched = [closed_loop(prompt=104)[i] for i in range(16)]
    assert compare(side(), side(rows=stretched)).verdict == PASS, "within what lengths can be planned to"
    comparison = compare(side(), side(rows=closed_loop(prompt=200)))
    assert comparison.verdict == INVALID
    assert "request 0 of lane normal has prompt 100 tokens before and 200 after" in comparison.gates[0].text
    assert "--kv-expect-change max_model_len" in comparison.gates[0].text


def test_blocks_of_two_sizes_are_compared_by_what_they_hold(side: Make) -> None:
    def halved(row: Any) -> Any:
        values = {**row.values, **{name: 2 * row.values[name] for name in ("used_blocks", "free_blocks")}}
        return msgspec.structs.replace(row, values=values)

    rows = side(1)[0].run
    small = {"before": [snapshot(T0 - 1, usable=254, block_size=8)], "after": [snapshot(T0 + 5, usable=254, block_size=8)]}
    gate = by_name(compare(side(), side(samples=[halved(row) for row in rows.telemetry()], rows=rows.requests(), **small)).gates)["free_not_worse"]
    assert gate.verdict == PASS
    assert gate.unit == "tokens"
    assert gate.after is not None
    assert gate.before is not None
    assert gate.after.value == pytest.approx(gate.before.value, rel=0.03)


def test_a_prefix_cache_that_went_off_fails_where_prompts_share(side: Make) -> None:
    def reused(hits: int) -> dict[str, Any]:
        counted: dict[str, Any] = {"prefix_queries": 1600, "prefix_hits": hits}
        return {"before": [snapshot(T0 - 1, prefix_queries=0)], "after": [snapshot(T0 + 5, **counted)], "record": {"options": {"shared_prefix": 64}}}

    gates = by_name(compare(side(**reused(1000)), side(**reused(0))).gates)
    assert gates["prefix_reuse_not_worse"].verdict == FAIL
    assert "62.5 % before, 0.0 % after" in gates["prefix_reuse_not_worse"].text
    assert by_name(compare(side(**reused(1000)), side(**reused(990))).gates)["prefix_reuse_not_worse"].verdict == PASS
    assert "prefix_reuse_not_worse" not in by_name(compare(side(), side()).gates)


def test_too_few_requests_without_an_event_decide_nothing(side: Make) -> None:
    gate = by_name(compare(side(2, length_s=1.5), side(2, length_s=1.5)).gates)["rejections_not_worse"]
    assert gate.verdict == INCONCLUSIVE
    assert "about 30 requests a side would decide it (there are 8), or 8 windows of these" in gate.text


def test_another_build_card_or_machine_is_not_comparable_unless_declared(side: Make) -> None:
    def cards(name: str, count: int = 1) -> dict[str, Any]:
        return {"machine": {"gpus": [{"name": name}] * count, "cores": 8, "machine": "x86_64"}, "owned": True}

    cases: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
        ({}, {"engine_version": "0.33.0"}, "engine_version", "the engine's build was 0.32.0 before and is 0.33.0 after"),
        (cards("H200"), cards("L4"), "gpu", "the GPU was 1 x H200 before and is 1 x L4 after"),
        (cards("L4"), cards("L4", 2), "gpu", "is 2 x L4 after"),
        (
            {"machine": {"cores": 8, "machine": "x86_64"}, "owned": True},
            {"machine": {"cores": 64, "machine": "aarch64"}, "owned": True},
            "machine",
            "was x86_64 with 8 cores before and is aarch64 with 64 cores after",
        ),
    ]
    for old, new, rule, says in cases:
        comparison = compare(side(record=old), side(record=new))
        assert comparison.verdict == INVALID, rule
        assert says in comparison.problems[0].text
        assert f"--kv-expect-change {rule}" in comparison.problems[0].mend
        assert compare(side(record=old), side(record=new), Settings(expect_change=rule)).verdict == PASS, rule
    assert compare(side(record=cards("L4")), side(record=cards("L4"))).verdict == PASS
    notes = compare(side(record=cards("L4")), side()).notes
    assert any("the GPU of the side after is not known" in note for note in notes)


def test_another_load_is_not_compared(side: Make) -> None:
    after = side(record={"workload": "other"})
    comparison = compare(side(), after)
    assert verdicts(comparison) == {INVALID}
    assert "another load" in comparison.gates[0].text


def test_unsound_evidence_on_either_side_is_invalid(side: Make) -> None:
    assert verdicts(compare(side(no_end=True), side())) == {INVALID}
    assert verdicts(compare(side(), side(no_end=True))) == {INVALID}


def test_windows_of_one_side_on_two_configurations_are_not_pooled(side: Make) -> None:
    mixed = [*side(2), *side(2, before=[snapshot(T0 - 1, max_num_seqs=4)], after=[snapshot(T0 + 5, max_num_seqs=4)])]
    comparison = compare(mixed, side(4))
    assert comparison.verdict == INVALID
    assert "seats 8 requests and 4 requests" in comparison.problems[0].text


def test_a_whole_number_is_the_same_fresh_and_from_a_stored_run(side: Make) -> None:
    windows = side(4)
    for number, window in enumerate(windows):
        fresh = ValueRecord(1024, "tokens", "/props")
        stored = msgspec.json.decode(msgspec.json.encode(fresh), type=ValueRecord)
        window.run.record.config["max_model_len"] = stored if number < 2 else fresh
    assert {type(window.run.record.config["max_model_len"].value) for window in windows} == {int, float}
    assert not any(problem.rule == "mixed" for problem in check_side(windows))


def test_a_profile_that_is_missing_after_the_change_does_not_pass(side: Make) -> None:
    comparison = compare([*side(), *side(record={"profile": "longctx"})], side())
    lonely = by_name(comparison.gates)["measured_on_both_sides"]
    assert lonely.verdict == INCONCLUSIVE
    assert "longctx was measured before the change and not after" in lonely.text
    assert comparison.verdict == INCONCLUSIVE
    assert "longctx" in compare(side(), [*side(), *side(record={"profile": "longctx"})]).notes[0]


def test_restarts_are_covered_only_where_both_sides_had_several(side: Make) -> None:
    def launched(start_s: float) -> list[Analysis]:
        samples = [msgspec.structs.replace(s, values={**s.values, "start_time": start_s}) for s in side(1)[0].run.telemetry()]
        return side(2, samples=samples, before=[snapshot(T0 - 1, start_time=start_s)], after=[snapshot(T0 + 5, start_time=start_s)])

    several = [*launched(T0 - 900), *launched(T0 - 500)]
    assert RESTARTS_NOT_COVERED not in compare(several, several).notes
    assert RESTARTS_NOT_COVERED in compare(several, launched(T0 - 100)).notes


def test_a_single_request_that_is_no_longer_served_fails(side: Make, tmp_path: Path) -> None:
    def probe(name: str, *rows: Any) -> list[Analysis]:
        return [analyse(MadeRun(rows=list(rows), record={"profile": "nearmax", "options": {"requests": 1}}).write(tmp_path / "runs" / name))]

    served, gone = probe("50-a", request(0, 0.0, length_s=2.0)), probe("51-b", refused(0, 0.5, "server_error", "out of memory"))
    assert by_name(compare(served, served).gates)["probe_not_worse"].verdict == PASS
    assert by_name(compare(gone, served).gates)["probe_not_worse"].verdict == PASS
    failed = by_name(compare(served, gone).gates)["probe_not_worse"]
    assert failed.verdict == FAIL
    assert "answered before and server_error after" in failed.text


def asked(tmp_path: Path, name: str, passed: int, **fields: Any) -> list[Analysis]:
    return [analyse(quality_run(passed, **fields).write(tmp_path / "runs" / name))]


def test_quality_that_broke_fails_and_names_the_lengths(tmp_path: Path) -> None:
    comparison = compare(asked(tmp_path, "1-quality", 300), asked(tmp_path, "2-quality", 53))
    gate = comparison.gates[0]
    assert comparison.verdict == gate.verdict == FAIL
    assert "247 lost, 0 gained" in gate.text
    assert "247 of 300 at 64 tokens" in gate.text
    assert gate.before is not None
    assert gate.before.value == 1.0


def test_quality_that_stayed_passes_and_says_what_is_excluded(tmp_path: Path) -> None:
    gate = compare(asked(tmp_path, "1-quality", 300), asked(tmp_path, "2-quality", 300)).gates[0]
    assert gate.verdict == PASS
    assert "at most 1.0 % lost" in gate.text


def test_too_few_items_decide_nothing_and_say_how_many_would(tmp_path: Path) -> None:
    sides = [asked(tmp_path, f"{i}-quality", 20, items=20) for i in (1, 2)]
    gate = quality_not_worse(sides[0], sides[1], 0.02)
    assert gate.verdict == INCONCLUSIVE
    assert "about 149 items would decide it" in gate.text


def test_items_that_changed_under_one_id_do_not_pair(tmp_path: Path) -> None:
    changed = [msgspec.structs.replace(row, expected_hash="other") for row in quality_rows(300)]
    after = [analyse(MadeRun(rows=[], quality=changed, after=[], record={"profile": "quality"}).write(tmp_path / "runs" / "2-quality"))]
    gate = quality_not_worse(asked(tmp_path, "1-quality", 300), after, 0.02)
    assert gate.verdict == INVALID


def test_items_of_one_side_only_are_told_and_none_in_common_decide_nothing(tmp_path: Path) -> None:
    fewer = asked(tmp_path, "2-quality", 250, items=250)
    gate = quality_not_worse(asked(tmp_path, "1-quality", 300), fewer, 0.02)
    assert gate.verdict == PASS
    assert "50 were asked only before" in gate.text
    none = [analyse(MadeRun(rows=[], after=[], record={"profile": "quality"}).write(tmp_path / "runs" / "3-quality"))]
    assert quality_not_worse(fewer, none, 0.02).verdict == INCONCLUSIVE


def test_a_configuration_diff_is_what_the_servers_state(tmp_path: Path) -> None:
    left = MadeRun(record={"launch_command": ["vllm", "--port", "8001", "--kv-cache-dtype", "auto"]}).write(tmp_path / "1")
    right = MadeRun(
        before=[snapshot(T0 - 1, kv_dtype="fp8", missing=["max_num_seqs"])],
        record={"launch_command": ["vllm", "--port=8002", "--kv-cache-dtype", "fp8"], "engine_version": "0.33.0"},
    ).write(tmp_path / "2")
    diff = {change.name: (change.before, change.after) for change in config_diff(left, right)}
    assert diff == {
        "kv_dtype": ("auto", "fp8"),
        "max_num_seqs": ("8 requests", "not told"),
        "engine_version": ("0.32.0", "0.33.0"),
        "launch_command": ("vllm --kv-cache-dtype auto", "vllm --kv-cache-dtype fp8"),
    }
    assert config_diff(left, read_run(left.folder)) == []


def test_a_side_without_runs_is_an_error(side: Make) -> None:
    with pytest.raises(ValueError, match="at least one Run"):
        compare([], side(1))


def test_gates_are_records_that_can_be_written(side: Make) -> None:
    comparison = compare(side(2), side(2))
    again = msgspec.json.decode(msgspec.json.encode(comparison.gates), type=list[GateRecord])
    assert again == comparison.gates
    assert isinstance(again[0].before, ValueRecord)


def test_a_session_against_its_own_copy_says_that_it_is_no_comparison(tmp_path: Path) -> None:
    stored = [MadeRun(record={"window": n, "load_started_wall_s": T0 + n}).write(tmp_path / "runs" / f"{n + 1}-normal") for n in range(5)]
    shutil.copytree(tmp_path / "runs", tmp_path / "moved")
    copies = [analyse(read_run(tmp_path / "moved" / run.folder.name)) for run in stored]
    other = [
        analyse(MadeRun(record={"window": n, "load_started_wall_s": T0 + 9 + n}).write(tmp_path / "other" / f"{n + 1}-normal")) for n in range(5)
    ]
    originals = [analyse(run) for run in stored]
    (note,) = [note for note in compare(originals, copies).notes if "the same measurement" in note]
    assert "1-normal, 2-normal, 3-normal and 2 more" in note
    assert not [note for note in compare(originals, other).notes if "the same measurement" in note]
