"""Pressure: which item is asked under which, whether it was felt, and that requests are broken off in mid-answer."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from made_run import quality_run, snapshot
from scripted_server import ScriptedServer

from pytest_kvcache import measure
from pytest_kvcache import session as session_module
from pytest_kvcache.adopting import pressed_as
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.errors import UsageError
from pytest_kvcache.planned import Target
from pytest_kvcache.quality import pressure
from pytest_kvcache.quality.needle import recall_items
from pytest_kvcache.records import PressureRecord, QualityRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.endpoint import choose_model, parse_endpoint
from pytest_kvcache.session import Session
from pytest_kvcache.settings import Settings, resolve


def test_pressures_are_named_or_all_of_them() -> None:
    assert pressure.read_pressures("") == pressure.read_pressures("none") == pressure.read_pressures("auto") == []
    assert pressure.read_pressures("all") == ["fill", "prefix", "cancel"]
    assert pressure.read_pressures(" cancel, fill") == ["fill", "cancel"]
    with pytest.raises(UsageError, match="no pressure 'heat'"):
        pressure.read_pressures("fill,heat")


def test_each_item_is_asked_under_one_pressure_whatever_else_is_asked() -> None:
    items = recall_items(4096, [16])
    shares = pressure.share_out(items, pressure.PRESSURES)
    assert sum(map(len, shares.values())) == 300
    assert {item.id for chosen in shares.values() for item in chosen} == {item.id for item in items}
    assert all(len(chosen) > 40 and len({item.length_tokens for item in chosen}) > 20 for chosen in shares.values())
    of_others = pressure.share_out(recall_items(4096, [784]), pressure.PRESSURES)
    where = {item.id: part for part, chosen in shares.items() for item in chosen}
    assert all(where.get(item.id, part) == part for part, chosen in of_others.items() for item in chosen)


@pytest.mark.parametrize(
    ("part", "fields", "says"),
    [
        ("fill", {"usage_peak": 0.9}, ""),
        ("fill", {"usage_peak": 0.4, "preemptions": 2.0}, ""),
        ("fill", {"usage_peak": 0.4, "waiting_peak": 3.0}, ""),
        ("fill", {"usage_peak": 0.4, "waiting_peak": 0.0, "preemptions": 0.0}, "usage peaked at 40%"),
        ("fill", {}, "usage is not told"),
        ("prefix", {"prefix_hits": 10.0}, ""),
        ("prefix", {"prefix_hits": 0.0}, "no prompt was found"),
        ("prefix", {}, "does not tell prefix hits"),
        ("cancel", {"cancelled": 1}, ""),
        ("cancel", {}, "no request was broken off"),
    ],
)
def test_what_was_not_felt_is_no_pressure(part: str, fields: dict[str, Any], says: str) -> None:
    why = pressure._lacking(PressureRecord(part, True, **fields), fields)
    assert (says in why) if says else why == ""


def test_users_of_a_filling_lane_want_more_than_the_pool_holds() -> None:
    users, longest = pressure.fill_users([snapshot(0.0, pool_tokens=100_000, max_model_len=8192, max_num_seqs=256)])
    assert longest == 8192
    assert users * 0.7 * 8192 > 1.4 * 100_000
    assert pressure.fill_users([snapshot(0.0, pool_tokens=10**9, max_model_len=1024, max_num_seqs=8)])[0] == 10, (
        "no more than seats and two that wait"
    )


def test_answers_must_be_right_with_a_part_of_the_prompt_cached_and_with_all_of_it(tmp_path: Path) -> None:
    items = [item for item in recall_items(600, [16]) if item.length_tokens in {64, 65}][:6]
    lock, seen = threading.Lock(), set[str]()
    wanted = {str(item.prompt): item.expect for item in items}

    def answer(prompt: str) -> str:
        with lock:
            again = prompt in seen
            seen.add(prompt)
        # wrong only where the whole prompt comes for the first time
        return wanted.get(prompt, "x") if again else "wrong"

    with ScriptedServer(answer=answer, metrics="vllm") as server:
        endpoint = choose_model(parse_endpoint(server.url, Settings()))
        pressing = pressure.Pressing([endpoint], [DIALECTS["vllm"]], tmp_path, sample_hz=20.0)
        (record,) = pressure.ask_under_pressure(pressing, items, ["prefix"])
    rows = list(read_lines(tmp_path / "quality.jsonl", QualityRow))
    assert [row.part for row in rows] == ["prefix"] * len(items)
    assert not any(row.passed for row in rows)
    assert {row.note for row in rows} == {"wrong with a part of its prompt from the cache"}
    assert len(seen) == 2 * len(items)
    assert not record.pressed, "the script caches nothing, and tells so"


def test_requests_are_broken_off_in_mid_answer_while_items_are_asked(tmp_path: Path) -> None:
    items = [item for item in recall_items(600, [16]) if item.length_tokens in {64, 65}][:6]
    with ScriptedServer(itl_s=0.02, metrics="vllm") as server:
        endpoint = choose_model(parse_endpoint(server.url, Settings()))
        pressing = pressure.Pressing([endpoint], [DIALECTS["vllm"]], tmp_path, sample_hz=20.0)
        (record,) = pressure.ask_under_pressure(pressing, items, ["cancel"])
    assert record.pressed
    assert record.cancelled >= 1
    assert len(list(read_lines(tmp_path / "quality.jsonl", QualityRow))) == 6


def test_what_a_filling_lane_kept_from_being_asked_in_its_time_is_asked_under_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item for item in recall_items(600, [16]) if item.length_tokens in {63, 64, 65}][:20]
    shares = pressure.share_out(items, ["fill", "cancel"])
    monkeypatch.setattr(pressure, "run_load", lambda *_, stop, **__: stop.wait(30))
    monkeypatch.setattr(pressure, "_FULL_WITHIN_S", 0.1)
    with ScriptedServer(itl_s=0.02, metrics="vllm") as server:
        endpoint = choose_model(parse_endpoint(server.url, Settings()))
        pressing = pressure.Pressing([endpoint], [DIALECTS["vllm"]], tmp_path, sample_hz=20.0, fill_limit_s=0.0)
        fill, cancel = pressure.ask_under_pressure(pressing, items, ["fill", "cancel"])
    rows = list(read_lines(tmp_path / "quality.jsonl", QualityRow))
    assert (fill.items, cancel.items) == (0, 20)
    assert {row.item for row in rows if row.part == "cancel"} == {item.id for item in items}
    assert len(rows) == 20
    assert shares["fill"], "some were meant for it"


def test_a_filling_lane_asks_something_of_every_length_in_each_step() -> None:
    items = pressure.share_out(recall_items(4096, [16]), pressure.PRESSURES)["fill"]
    steps = pressure._in_steps(items, "fill")
    assert sorted(item.id for step in steps for item in step) == sorted(item.id for item in items)
    assert all(len({item.length_tokens for item in step}) > len(step) / 2 for step in steps)
    assert pressure._in_steps(items, "prefix") == [items]


@pytest.mark.parametrize(
    ("options", "felt", "names"),
    [
        ({"before": "a {port}", "after": "b {port}"}, (), "all"),
        ({"before": "a {port}", "after": "b {port}", "quality_pressure": "none"}, (), "none"),
        ({"before": "http://a:1", "after": "http://b:1"}, (), "none"),
        ({"before": "http://a:1", "after": "b {port}"}, (), "none"),
        ({"endpoint": ["http://a:1"]}, (), "none"),
        ({"endpoint": ["http://a:1"], "baseline": "x"}, ("prefix", "cancel"), "prefix,cancel"),
        ({"endpoint": ["http://a:1"], "quality_pressure": "fill"}, (), "fill"),
    ],
)
def test_a_comparison_of_two_launches_presses_unless_told_otherwise(
    tmp_path: Path, options: dict[str, Any], felt: tuple[str, ...], names: str
) -> None:
    made = quality_run(3, 3, pressure=[PressureRecord(part, True) for part in felt]).write(tmp_path / "1-quality")
    found = pressed_as([made], resolve(options, {}, {}))
    assert found.quality_pressure == names
    assert ("quality_pressure" in found.sources) == ("quality_pressure" in options), "what was chosen for the user is not the user's choice"


def test_a_session_asks_a_side_of_its_experiment_under_all_pressures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def measured(target: object, settings: Settings, *_: object, **__: object) -> object:
        pressing: list[pressure.Pressing] = []

        def ask(made: pressure.Pressing, *_: object) -> list[PressureRecord]:
            pressing.append(made)
            return []

        monkeypatch.setattr(measure, "ask_under_pressure", ask)
        measure._under_pressure(Target((), ()), settings, tmp_path, [])
        asked.append((settings.quality_pressure, pressing[0].fill_limit_s if pressing else 0.0))
        return quality_run(1, 1).write(tmp_path / f"{len(asked)}-quality")

    monkeypatch.setattr(session_module, "measure_quality", measured)
    for options in ({"before": "a {port}", "after": "b {port}"}, {"before": "a {port}", "after": "b {port}", "quality_pressure": "all"}, {}):
        with Session(resolve({**options, "reports": str(tmp_path / "reports")}, {}, {})) as session:
            session._ask(Target((), ()), [])
    assert asked == [("all", pressure.FILL_LIMIT_S), ("all", math.inf), ("none", 0.0)]
