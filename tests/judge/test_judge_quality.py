"""A change judged by its answers: quiet, under pressure and token by token. Field cases of kind e (quantised caches and prefix caching) are tests here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_run import MadeRun, snapshot

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, INVALID, NOT_APPLICABLE, PASS
from pytest_kvcache.judge.compare import compare
from pytest_kvcache.judge.quality import agreement_gate, determinism_gate, judge_items, notes, pressed, pressed_not_worse, quality_gates
from pytest_kvcache.records import AgreementRow, PressureRecord, QualityRow
from pytest_kvcache.runfolder import encode_line
from pytest_kvcache.settings import Settings

Make = Callable[..., Analysis]


def rows(length: int, passed: int, items: int = 20, part: str = "") -> list[QualityRow]:
    return [QualityRow(f"i-{length}-{n}", n < passed, length_tokens=length, expected_hash=f"h{length}-{n}", part=part) for n in range(items)]


def felt(part: str, pressed: bool = True, why: str = "", **more: Any) -> PressureRecord:
    return PressureRecord(part, pressed, why, items=300, **more)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def write(asked: Sequence[QualityRow], greedy: Sequence[AgreementRow] = (), pressure: Sequence[PressureRecord] = (), **record: Any) -> Analysis:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}-quality"
        made = MadeRun(rows=[], quality=list(asked), after=[], record={"profile": "quality", "pressure": list(pressure), **record})
        run = made.write(folder)
        (folder / "agreement.jsonl").write_bytes(b"".join(map(encode_line, greedy)))
        return analyse(run)

    return write


def greedy(tokens: Sequence[Sequence[int]], again: Sequence[Sequence[int]] | None = None) -> list[AgreementRow]:
    first = [AgreementRow(f"p{n}", 0, expected_hash="h", tokens=list(said)) for n, said in enumerate(tokens)]
    return first + [AgreementRow(f"p{n}", 1, expected_hash="h", tokens=list(said)) for n, said in enumerate(again or tokens)]


def test_the_lengths_that_broke_are_named_and_only_those(make: Make) -> None:
    good = [row for length in (31, 32, 33, 64) for row in rows(length, 20)]
    bad = [*rows(31, 20), *rows(32, 20), *rows(33, 9), *rows(64, 20)]
    gates = {gate.name: gate for gate in quality_gates([make(good)], [make(bad)], 0.02)}
    assert set(gates) == {"quality_not_worse"}
    assert gates["quality_not_worse"].verdict == FAIL
    assert gates["quality_not_worse"].lengths == [33]
    assert "lost by length: 11 of 20 at 33 tokens" in gates["quality_not_worse"].text


def test_a_cache_that_breaks_under_pressure_alone_fails_there(make: Make) -> None:
    quiet = rows(64, 300, 300)
    before = make([*quiet, *rows(64, 300, 300, "fill")], pressure=[felt("fill", preemptions=9)])
    after = make([*quiet, *rows(64, 280, 300, "fill")], pressure=[felt("fill", preemptions=9)])
    gates = {gate.name: gate for gate in quality_gates([before], [after], 0.02)}
    assert gates["quality_not_worse"].verdict == PASS
    assert gates["quality_pressed_not_worse"].verdict == FAIL
    assert "lost under: 20 of 300 under fill" in gates["quality_pressed_not_worse"].text
    assert "9 preemptions" in gates["quality_pressed_not_worse"].beside
    assert compare([before], [after], Settings()).verdict == FAIL
    assert analyse(before.run).quality.items == 300, "items under pressure are not counted twice"  # type: ignore[union-attr]


def test_what_was_no_pressure_cannot_pass(make: Make) -> None:
    asked = [*rows(64, 300, 300), *rows(64, 300, 300, "fill")]
    sides = [make(asked, pressure=[felt("fill", False, "the cache was not full: usage peaked at 12%, and no request waited")]) for _ in range(2)]
    gate = pressed_not_worse([sides[0]], [sides[1]], 0.02)
    assert gate.verdict == INCONCLUSIVE
    assert "the cache was not full" in gate.text
    assert pressed([sides[0]], 0.98).verdict == INCONCLUSIVE
    assert pressed([make(rows(64, 300, 300))], 0.98).verdict == NOT_APPLICABLE


def test_too_few_items_are_inconclusive_and_say_how_many_would_do(make: Make) -> None:
    judged = judge_items(rows(64, 48, 48), rows(64, 48, 48), 0.01)
    assert not isinstance(judged, str)
    assert judged.found.verdict == INCONCLUSIVE
    assert "at most 6.1 % lost" in judged.text
    assert "about 299 items would decide it" in judged.text


def test_greedy_agreement_is_held_against_the_noise_of_the_side_before(make: Make) -> None:
    tokens = [[n, n + 1, n + 2, n + 3] for n in range(20)]
    noisy = [[n, n + 1, 99, 98] for n in range(20)]
    exact, shaky, moved = make([], greedy(tokens)), make([], greedy(tokens, noisy)), make([], greedy(noisy))
    same = agreement_gate([exact], [exact])
    assert same is not None
    assert (same.verdict, same.level) == (PASS, "warn")
    drifted = agreement_gate([exact], [moved])
    assert drifted is not None
    assert drifted.verdict == FAIL
    assert "50.0 % of greedy tokens are equal" in drifted.text
    assert "20 of 20 probes diverge (at token 2 in the median)" in drifted.text
    assert "before against itself 100.0 %" in drifted.text
    within = agreement_gate([shaky], [moved])
    assert within is not None
    assert within.verdict == PASS, "no more than the server differs from itself"
    gone = agreement_gate([exact], [make([], [AgreementRow("p0", expected_hash="h", error="HTTP 500: out of memory")])])
    assert gone is not None
    assert gone.verdict == INCONCLUSIVE
    assert "out of memory" in gone.text
    assert agreement_gate([exact], [make([])]) is None
    asked = rows(64, 300, 300)
    assert compare([make(asked, greedy(tokens))], [make(asked, greedy(noisy))], Settings()).verdict == PASS, "a warning decides nothing"


def test_a_change_that_makes_greedy_answers_waver_is_warned_of(make: Make) -> None:
    tokens = [[n, n + 1] for n in range(24)]
    steady, wavering = make([], greedy(tokens)), make([], greedy(tokens, [[n, 99] if n < 6 else said for n, said in enumerate(tokens)]))
    worse = determinism_gate([steady], [wavering])
    assert worse is not None
    assert (worse.verdict, worse.level) == (FAIL, "warn")
    assert "0 of 24 greedy probes were answered otherwise the second time before the change, and 6 of 24 after it (p = 0.016)" in worse.text
    for before, after in ((steady, steady), (wavering, wavering), (wavering, steady)):
        same = determinism_gate([before], [after])
        assert same is not None
        assert same.verdict == PASS, "what wavered before is no worse for it"
    slightly = determinism_gate([steady], [make([], greedy(tokens, [[99], *tokens[1:]]))])
    assert slightly is not None
    assert slightly.verdict == INCONCLUSIVE
    assert determinism_gate([steady], [make([])]) is None


def test_the_verdict_says_that_servers_were_quiet_and_whether_they_are_deterministic(make: Make) -> None:
    asked, tokens = rows(64, 300, 300), [[n, n + 1] for n in range(24)]
    quiet = [make(asked, greedy(tokens))]
    assert any("asked of a quiet server alone" in note and "--kv-quality-pressure=all" in note for note in compare(quiet, quiet, Settings()).notes)
    assert any("48 probes asked twice gave the same tokens both times" in note for note in notes(quiet, quiet))
    shaky = [make(asked, greedy(tokens, [[99], *tokens[1:]]))]
    said = notes(quiet, shaky)
    assert any("not deterministic here: asked twice, 1 of 24 after the change were answered otherwise" in note for note in said)
    felt_it = [make([*asked, *rows(64, 300, 300, "fill")], greedy(tokens), [felt("fill")])]
    assert not any("quiet" in note for note in notes(felt_it, felt_it))
    in_vain = [make([*asked, *rows(64, 300, 300, "fill")], greedy(tokens), [felt("fill", pressed=False, why="the cache was not full")])]
    assert any("quiet" in note for note in notes(felt_it, in_vain))
    assert notes([make([])], [make([])]) == [], "no item was asked at all"


# -- field cases of kind e ---------------------------------------------------------------------------------------------


def test_e01_a_prefix_cache_that_answers_wrong_at_the_second_send_fails(make: Make) -> None:
    # the first send of each prompt is right; with prefix hits 24 % are, and 95 % were
    quiet = rows(512, 142, 150)
    before = make([*quiet, *rows(512, 142, 150, "prefix")], pressure=[felt("prefix", prefix_hits=70_000)])
    after = make([*quiet, *rows(512, 36, 150, "prefix")], pressure=[felt("prefix", prefix_hits=70_000)])
    gates = {gate.name: gate for gate in quality_gates([before], [after], 0.02)}
    assert gates["quality_not_worse"].verdict != FAIL
    assert gates["quality_pressed_not_worse"].verdict == FAIL
    assert "under prefix" in gates["quality_pressed_not_worse"].text
    # the same prompt sent twice: the server's own noise shows it as well
    floor = agreement_gate([make([], greedy([[1, 2]] * 3, [[3, 4]] * 3))], [make([], greedy([[1, 2]] * 3))])
    assert floor is not None
    assert "before against itself 0.0 %, 3 diverge" in floor.text


def test_e02_only_the_pair_of_features_fails(make: Make) -> None:
    plain, prefix, drafts, both = (
        make([*rows(256, 300, 300), *rows(256, passed, 300, "prefix")], pressure=[felt("prefix", prefix_hits=1)]) for passed in (300, 300, 300, 240)
    )
    assert [pressed_not_worse([plain], [side], 0.02).verdict for side in (prefix, drafts, both)] == [PASS, PASS, FAIL]


def test_e04_strings_of_one_character_are_named(make: Make) -> None:
    broken = [QualityRow(r.item, False, length_tokens=64, expected_hash=r.expected_hash, note="one character repeated") for r in rows(64, 0, 20)]
    judged = judge_items(rows(64, 20), broken, 0.02)
    assert not isinstance(judged, str)
    assert judged.found.verdict == FAIL
    assert "20 answers are one character over and over" in judged.text
    # and a PASS of one family of models is none of another
    assert compare([make(rows(64, 300, 300), model="qwen3")], [make(rows(64, 300, 300), model="qwen2.5")], Settings()).verdict == INVALID


def test_e05_short_prompts_that_pass_do_not_hide_long_ones_that_broke(make: Make) -> None:
    before = [*rows(64, 280, 280), *rows(32_768, 5, 5), *rows(32_767, 5, 5)]
    after = [*rows(64, 280, 280), *rows(32_768, 0, 5), *rows(32_767, 1, 5)]
    gate = quality_gates([make(before)], [make(after)], 0.05)[0]
    assert gate.verdict == FAIL
    assert gate.lengths == [32_767, 32_768]


def test_e07_another_api_template_or_answer_length_does_not_pair(make: Make, tmp_path: Path) -> None:
    asked = rows(64, 291, 300)
    chat = {"settings": {"api": {"value": "chat", "source": "command line"}}}
    assert compare([make(asked)], [make(rows(64, 300, 300), **chat)], Settings()).verdict == INVALID
    reworded = [QualityRow(r.item, True, length_tokens=64, expected_hash="other") for r in asked]
    assert isinstance(judge_items(asked, reworded, 0.02), str)


def test_e10_two_forms_of_fp8_are_two_configurations(tmp_path: Path) -> None:
    sides = []
    for number, dtype in enumerate(("fp8_e4m3", "fp8_e5m2")):
        made = MadeRun(rows=[], quality=rows(64, 300, 300), after=[], record={"profile": "quality"})
        made.before = [snapshot(0.0, kv_dtype=dtype)]
        sides.append(analyse(made.write(tmp_path / str(number))))
    judged = compare([sides[0]], [sides[1]], Settings(expect_change="max_num_seqs"))
    assert ("kv_dtype", "fp8_e4m3", "fp8_e5m2") in [(change.name, change.before, change.after) for change in judged.config_diff]
    assert judged.verdict == INVALID
