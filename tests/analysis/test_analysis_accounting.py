"""The blocks that we say our requests hold are those that a real vLLM said were used, poll by poll; what differs has a name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import oracle_traces as oracle
import pytest
from made_run import BLOCK, T0, USABLE, MadeRun, closed_loop, refused, request, sample, snapshot

from pytest_kvcache.analysis.accounting import PARTS, Accounting
from pytest_kvcache.analysis.holding import Footprint, Group, footprint, footprint_of, groups_of, plain, reserves_of
from pytest_kvcache.analysis.live import OFF, Moments, hold
from pytest_kvcache.analysis.rows import read_rows
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.layout import EngineShape
from pytest_kvcache.capacity.pool import blocks_for, lay_out
from pytest_kvcache.errors import UsageError
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import RequestRow, TelemetryRow


def taken(analysis: Analysis) -> Accounting:
    assert isinstance(analysis.accounting, Accounting)
    return analysis.accounting


def number(analysis: Analysis, name: str) -> float:
    value = analysis.values[name]
    assert isinstance(value, Reading), f"{name}: {value}"
    return value.number()


@pytest.mark.parametrize("name", oracle.NAMES)
def test_a_polls_blocks_follow_from_the_tokens_that_came(name: str) -> None:
    rows = {row.id: row for row in oracle.requests(name)}
    shape, off, checked = plain(oracle.BLOCK), 0, 0
    for poll in oracle.polls(name):
        live = [(rows[n], k) for n, k in poll.received.items() if 1 <= k < (rows[n].completion_tokens or rows[n].chunks)]
        alone = all(row.prefix_id == "" for row, _ in live) and poll.waiting == 0 and len(live) == poll.running
        if not live or not alone:
            continue
        tokens = np.array([(row.prompt_tokens or 0) + k - 1 for row, k in live], dtype=np.float64)
        step = [shape.blocks(tokens + d).sum() for d in (-1, 0, 1)]
        checked += 1
        off += poll.used != step[1]
        assert step[0] <= poll.used <= step[2], poll
    if name != "prefix_off_chunked":  # its requests share a text, which is held twice with the cache off
        assert checked > 200
    assert off <= 0.02 * checked


@pytest.mark.parametrize("name", oracle.NAMES)
def test_every_poll_of_a_real_engine_is_explained_within_one_step(name: str, tmp_path: Path) -> None:
    analysis = analyse(oracle.run(name, tmp_path / "1-normal"))
    found = taken(analysis)
    assert not found.missing
    whole = found.whole
    wrong = np.flatnonzero(~whole.agrees)
    assert not len(wrong), [(whole.t_s[i], whole.used[i], whole.low[i], whole.high[i]) for i in wrong[:5]]
    known = (whole.used > 0) & (whole.answering > 0)
    assert float(np.median((whole.high - whole.low)[known] / whole.answering[known])) <= 1.0, "a step adds no more than a block for each that runs"
    assert abs(number(analysis, "waste.unexplained")) == 0
    assert number(analysis, "accounting.agreement") == 1.0
    assert number(analysis, "leak.blocks") == 0
    assert number(analysis, "other_traffic.running") == 0


def test_a_shared_prefix_is_held_once_where_the_cache_is_on_and_twice_where_it_is_off(tmp_path: Path) -> None:
    on, off = (taken(analyse(oracle.run(name, tmp_path / name))) for name in ("prefix_on", "prefix_off_chunked"))
    assert (on.sharing, off.sharing) == ("sure", "off")
    assert on.values["waste.shared"].number() < -0.05  # type: ignore[union-attr]
    assert off.values["waste.shared"].number() == 0  # type: ignore[union-attr]
    assert on.whole.parts["common"].max() == 8 * oracle.BLOCK
    assert off.whole.parts["common"].max() == 0


def test_a_preempted_request_loses_its_blocks_until_it_goes_on(tmp_path: Path) -> None:
    analysis = analyse(oracle.run("overload", tmp_path / "1-normal"))
    found = taken(analysis)
    assert found.put_back == 2
    whole = found.whole
    waiting = [i for i, poll in enumerate(oracle.polls("overload")) if poll.waiting]
    assert (whole.high[waiting] <= oracle.USABLE).all(), "eight requests of 9 blocks would be 72"
    peak = analysis.values["payload.peak"]
    assert isinstance(peak, Reading)
    assert peak.number() <= oracle.USABLE * oracle.BLOCK
    assert number(analysis, "preempted.tokens") == pytest.approx((200 + 57) + (200 + 89), abs=8)


def test_the_parts_add_up_to_what_the_engine_says(tmp_path: Path) -> None:
    for name in oracle.NAMES:
        whole = taken(analyse(oracle.run(name, tmp_path / name))).whole
        total = np.sum([whole.parts[part] for part in PARTS], axis=0)
        np.testing.assert_allclose(total, whole.slots, atol=1e-6)


def made(tmp_path: Path, rows: list[RequestRow], **changes: object) -> Analysis:
    return analyse(MadeRun(rows=rows, **changes).write(tmp_path / "1-normal"))  # type: ignore[arg-type]


def test_a_seventeen_token_prompt_wastes_nearly_half_of_its_two_blocks(tmp_path: Path) -> None:
    """Field case C05: the gauge says 66.7 %, and 36.5 % of the slots hold tokens: 17 tokens in two blocks of 16."""
    rows = [request(i, 0.001 * i, prompt=17, output=4, ttft_s=0.1, length_s=3.0) for i in range(42)]
    analysis = made(tmp_path, rows)
    assert number(analysis, "usage.peak") == pytest.approx(84 / USABLE, abs=1e-6)
    assert number(analysis, "fill.mean") == pytest.approx(18 / 32, abs=0.04)
    assert number(analysis, "waste.rounding") == pytest.approx(1 - 18 / 32, abs=0.04)
    assert number(analysis, "waste.rounding_blocks") == pytest.approx(84 * (1 - 18 / 32), abs=4)
    assert number(analysis, "live_length.max") <= 20


def test_what_others_hold_is_not_taken_for_ours(tmp_path: Path) -> None:
    rows = closed_loop(users=2, seconds=4.0)
    samples = [sample(rows, T0 - 0.3 + i / 10) for i in range(50)]
    foreign = []
    for row in samples:
        values = dict(row.values)
        values["used_blocks"] += 40.0
        values["free_blocks"] -= 40.0
        values["usage"] = values["used_blocks"] / USABLE
        values["running"] += 3.0
        foreign.append(TelemetryRow(wall_s=row.wall_s, values=values, read_s=0.002))
    analysis = made(tmp_path, rows, samples=foreign)
    assert number(analysis, "other_traffic.running") >= 2
    whole = taken(analysis).whole
    inside = (whole.t_s > 0.2) & (whole.t_s < 3.8)
    # what one of ours may be writing of its prompt cannot be told from theirs: that much stays open
    assert np.median(whole.parts["not_ours"][inside]) == pytest.approx(40 * BLOCK, rel=0.25)
    assert number(analysis, "waste.not_ours") > 0.5
    clean = made(tmp_path / "clean", rows)
    assert number(clean, "other_traffic.running") == 0
    assert number(clean, "waste.not_ours") == 0


@pytest.mark.parametrize(("seconds", "expected"), [(4.0, 12.0), (1.0, None)])
def test_blocks_that_stay_after_the_last_request_are_a_leak_once_they_lasted(seconds: float, expected: float | None, tmp_path: Path) -> None:
    """Field case D04: running 0, waiting 0 and usage above zero after the load, long enough."""
    rows = closed_loop(users=2, seconds=2.0)
    end = max(row.end_s for row in rows) - T0
    samples = [sample(rows, T0 - 0.3 + i / 10) for i in range(int((end + 0.3) * 10))]
    stuck: dict[str, Any] = {"used_blocks": 12.0, "free_blocks": USABLE - 12.0, "usage": 12 / USABLE, "running": 0.0, "waiting": 0.0}
    samples += [sample(rows, T0 + end + 0.05 + i / 10, **stuck) for i in range(int(seconds * 10))]
    analysis = made(tmp_path, rows, samples=samples)
    value = analysis.values["leak.blocks"]
    if expected is None:
        assert isinstance(value, Missing), "a second tells nothing yet"
        assert "12 blocks" in value.reason
    else:
        assert isinstance(value, Reading)
        assert value.number() == expected
        assert taken(analysis).whole.parts["held_after"][-1] == 12 * BLOCK


def test_a_server_that_is_still_busy_has_no_leak_and_is_not_called_clean(tmp_path: Path) -> None:
    rows = closed_loop(users=2, seconds=2.0)
    samples = [sample(rows, T0 - 0.3 + i / 10) for i in range(22)]
    samples += [sample(rows, T0 + 2.2 + i / 10, running=34.0, used_blocks=120.0) for i in range(40)]
    value = made(tmp_path, rows, samples=samples).values["leak.blocks"]
    assert isinstance(value, Missing), "field case D02: 99 % for hours with 34 running is no leak"


@pytest.mark.parametrize(
    ("said", "engine", "reserved"),
    [
        ("auto", "vllm", ""),
        ("auto", "tgi", "output"),
        ("longest", "tgi", "longest"),
        ("nothing", "tgi", ""),
        ("output", "vllm", "output"),
        ("longest-output", "vllm", "longest-output"),
        ("all of it", "vllm", ""),
    ],
)
def test_what_the_user_says_of_reservations_wins_over_the_dialect(said: str, engine: str, reserved: str, tmp_path: Path) -> None:
    record = MadeRun(record={"engine": engine, "settings": {"reserves": {"value": said, "source": "ini"}}}).write(tmp_path).record
    assert reserves_of(record) == reserved
    assert reserves_of(msgspec.structs.replace(record, settings={})) == ("output" if engine == "tgi" else "")


@pytest.mark.parametrize(("reserves", "each", "ahead"), [("longest", 1920 + 63, 0), ("longest-output", 1920 + 128, 65)])
def test_a_padded_batch_holds_the_longest_for_each(reserves: str, each: int, ahead: int) -> None:
    """Three requests in the middle of their answers: all their tokens are padded, or their prompts where the output is reserved as it was planned."""
    rows, _ = read_rows([request(i, 0.0, prompt=1920 if i == 0 else 128, output=128, ttft_s=0.1, length_s=3.0) for i in range(3)])
    at = np.array([T0 + 1.55])
    everyone = np.ones(3, dtype=bool)
    held = hold(rows, everyone, ~everyone, Footprint(1, (Group(1),), reserves), Moments(at, at, np.array([0.0])), OFF)
    assert held.likely[0] == pytest.approx(3 * each, abs=6)
    assert held.reserved[0] == pytest.approx(2 * (1920 - 128) + 3 * ahead, abs=6)


def test_an_engine_that_reserves_the_output_shows_what_it_reserved(tmp_path: Path) -> None:
    rows = [request(i, 0.0, prompt=100, output=200, ttft_s=0.1, length_s=4.0) for i in range(3)]
    told = {"used_tokens": 900.0, "free_tokens": 1100.0, "usage": 0.45}
    samples = [
        TelemetryRow(
            wall_s=T0 + i / 10,
            values={
                **(told if 1 <= i < 40 else {"used_tokens": 0.0, "free_tokens": 2000.0, "usage": 0.0}),
                "running": 3.0 * (1 <= i < 40),
                "waiting": 0.0,
            },
        )
        for i in range(45)
    ]
    before = snapshot(T0 - 0.5, missing=("block_size", "used_blocks", "free_blocks", "usable_blocks", "pool_blocks"), pool_tokens=2000)
    analysis = made(tmp_path, rows, samples=samples, before=[msgspec.structs.replace(before, engine="tgi")], after=[], record={"engine": "tgi"})
    assert taken(analysis).whole.unit == "tokens"
    assert number(analysis, "accounting.agreement") > 0.95
    assert number(analysis, "waste.reserved") == pytest.approx(100 / 300, abs=0.03)
    assert isinstance(analysis.values["leak.blocks"], Missing)


def test_a_padded_batch_shows_its_padding(tmp_path: Path) -> None:
    """The article: 16 sequences, one of 2,048 and the rest of 256, all reserved at 2,048: 18 % are real."""
    rows, _ = read_rows([request(i, 0.0, prompt=2048 if i == 0 else 256, output=1, ttft_s=0.1, length_s=2.0) for i in range(16)])
    at = np.array([T0 + 1.0])
    held = hold(rows, np.ones(16, dtype=bool), np.zeros(16, dtype=bool), Footprint(1, (Group(1),), "longest"), Moments(at, at, np.array([0.0])), OFF)
    assert held.total[0] == 5888
    assert held.likely[0] == 32768
    assert held.reserved[0] == 32768 - 5888
    assert held.total[0] / held.likely[0] == pytest.approx(0.18, abs=0.001)


def test_window_groups_shrink_as_measured() -> None:
    """oracle/rules.md section 4, trace F: one full and five sliding groups, window 512, blocks of 32."""
    shape = Footprint(32, (Group(32), Group(32, count=5, window=512)))

    def used(prompt: int, received: int) -> float:
        return float(shape.blocks(np.array([prompt + received - 1.0]), sliding=received > 1)[0])

    seen = {1: 210, 2: 120, 21: 115, 22: 121, 53: 116, 54: 122}
    assert {k: used(1100, k) for k in seen} == seen
    seen = {2: 96, 24: 102, 55: 97, 56: 103}
    assert {k: used(490, k) for k in seen} == seen


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000, "sliding_window": 512, "max_position_embeddings": 4096,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}  # fmt: skip


def test_a_models_layout_gives_the_same_blocks_as_the_plan() -> None:
    layout = lay_out(read_architecture(GEMMA3), EngineShape(block_size=32, max_model_len=4096))
    shape = footprint_of(layout)
    assert shape.slides
    for tokens in (1, 31, 32, 33, 511, 512, 513, 600, 1100, 4000):
        assert shape.blocks(np.array([float(tokens)]))[0] == blocks_for(layout, tokens, live=True)


def test_a_window_model_is_accounted_for_where_its_config_was_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    before = snapshot(T0 - 0.5, usable=599, block_size=32, max_model_len=2048, max_concurrency=600 / 200)
    groups = groups_of(tmp_path / "config.json", before)
    rows = [request(0, 0.0, prompt=1100, output=60, ttft_s=0.3, length_s=6.2)]
    shape = Footprint(32, (Group(32), Group(32, count=5, window=512)))
    samples = []
    for i in range(70):
        k = int((i / 10 - 0.3) / 0.1) + 1 if 3 <= i < 62 else 0
        used = float(shape.blocks(np.array([1100.0 + k - 1]), sliding=k > 1)[0]) if k else 0.0
        samples.append(sample([], T0 + i / 10, used_blocks=used, free_blocks=599 - used, usage=used / 599, running=float(k > 0)))
    values: dict[str, Any] = {"rows": rows, "samples": samples, "before": [before], "after": []}
    known = analyse(MadeRun(**values, record={"kv_groups": groups}).write(tmp_path / "1-normal"))
    assert not taken(known).missing
    whole = taken(known).whole
    wrong = np.flatnonzero(~whole.agrees)
    assert not len(wrong), [(whole.t_s[i], whole.used[i], whole.low[i], whole.high[i]) for i in wrong]
    assert number(known, "used_blocks.peak") == 210, "nothing is given back before the first decode step"
    total = np.sum([taken(known).whole.parts[part] for part in PARTS], axis=0)
    np.testing.assert_allclose(total, taken(known).whole.slots, atol=1e-6)
    unknown = analyse(MadeRun(**values).write(tmp_path / "2-normal"))
    assert "--kv-model-config" in taken(unknown).missing


def test_groups_of_an_engine_that_we_do_not_know_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    with pytest.raises(UsageError, match="llamacpp"):
        groups_of(tmp_path, msgspec.structs.replace(snapshot(T0), engine="llamacpp"))


def test_an_engine_that_counts_idle_cache_as_used_has_no_leak(tmp_path: Path) -> None:
    rows = closed_loop(users=2, seconds=2.0)
    samples = [sample(rows, T0 + i / 10) for i in range(21)]
    samples += [sample(rows, T0 + 2.1 + i / 10, used_blocks=12.0, running=0.0) for i in range(40)]
    before = msgspec.structs.replace(snapshot(T0 - 0.5), engine="lmdeploy")
    value = made(tmp_path, rows, samples=samples, before=[before], after=[], record={"engine": "lmdeploy"}).values["leak.blocks"]
    assert isinstance(value, Missing)
    assert "reuse" in value.reason


def test_a_model_with_unknown_groups_is_not_guessed(tmp_path: Path) -> None:
    rows = closed_loop(users=2)
    told: dict[str, Any] = {"max_concurrency": 128 / 300, "max_model_len": 1024}
    analysis = made(tmp_path, rows, before=[snapshot(T0 - 0.5, **told)])
    found = taken(analysis)
    assert "window or state layers" in found.missing
    for name in ("fill.mean", "waste.rounding", "demand.peak", "headroom"):
        value = analysis.values[name]
        assert isinstance(value, Missing), name
        assert "300 blocks" in value.reason


def test_a_plain_model_is_recognised_by_the_engines_own_figures(tmp_path: Path) -> None:
    run = MadeRun(before=[snapshot(T0 - 0.5, max_concurrency=128 / 64, max_model_len=1024)]).write(tmp_path / "1-normal")
    assert footprint(run.record, "blocks") == plain(BLOCK)


def test_without_a_request_of_ours_everything_is_somebody_elses(tmp_path: Path) -> None:
    rows = [refused(0, 0.0, "queue_full")]
    samples = [sample([], T0 - 0.3 + i / 10, running=2.0, used_blocks=30.0, free_blocks=97.0, usage=30 / USABLE) for i in range(30)]
    analysis = made(tmp_path, rows, samples=samples)
    assert np.nanmin(taken(analysis).whole.parts["not_ours"]) == 30 * BLOCK
    assert number(analysis, "other_traffic.running") == 2
    assert isinstance(analysis.values["headroom"], Missing)


def test_replicas_are_taken_apart_each_and_together(tmp_path: Path) -> None:
    rows = [msgspec.structs.replace(row, endpoint=i % 2) for i, row in enumerate(closed_loop(users=2, seconds=3.0))]
    samples = []
    for number_ in (0, 1):
        mine = [row for row in rows if row.endpoint == number_]
        samples += [
            TelemetryRow(wall_s=s.wall_s + 0.01 * number_, endpoint=number_, values=s.values, read_s=0.002)
            for s in (sample(mine, T0 - 0.3 + i / 10) for i in range(38))
        ]
    samples.sort(key=lambda row: row.wall_s)
    analysis = made(tmp_path, rows, samples=samples, before=[snapshot(T0 - 0.5), snapshot(T0 - 0.5)], after=[])
    found = taken(analysis)
    assert len(found.servers) == 2
    inside = np.isfinite(found.whole.used)
    assert found.whole.used[inside].max() > max(one.used.max() for one in found.servers)
    assert number(analysis, "accounting.agreement") > 0.95


def test_too_many_requests_for_every_sample_thin_the_samples_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_kvcache.analysis import accounting

    monkeypatch.setattr(accounting, "MOST_PAIRS", 30)
    analysis = made(tmp_path, closed_loop(users=4, seconds=4.0))
    found = taken(analysis)
    assert any("every" in note for note in found.notes)
    assert len(found.whole.t_s) < len(analysis.timeline.t_s)
    assert np.nanmax(found.whole.used) == number(analysis, "used_blocks.peak"), "the highest sample is kept"


def test_a_level_that_climbs_with_one_long_answer_is_no_leak(tmp_path: Path) -> None:
    """Field case D01: usage climbs 0.1 point in ten seconds from one request: 118 tokens a second into a pool of 1.18 million."""
    usable, rate = 73_750, 118
    rows = [request(0, 0.0, prompt=75_000, output=rate * 40, ttft_s=0.01, length_s=40.0)]
    samples = []
    for i in range(1, 400):
        held = math.ceil((75_000 + rate * i / 10) / BLOCK)
        samples.append(sample([], T0 + i / 10, used_blocks=float(held), free_blocks=float(usable - held), usage=held / usable, running=1.0))
    samples += [sample([], T0 + 40.05 + i / 10, used_blocks=0.0, free_blocks=float(usable), usage=0.0, running=0.0) for i in range(25)]
    before = snapshot(T0 - 0.5, usable=usable, max_model_len=131_072)
    analysis = made(tmp_path, rows, samples=samples, before=[before], after=[])
    used = taken(analysis).whole.used
    assert (used[370] - used[70]) / usable == pytest.approx(0.003, abs=2e-4), "0.1 point in ten seconds"
    assert number(analysis, "accounting.agreement") == 1.0
    assert number(analysis, "waste.unexplained") == 0
    assert number(analysis, "leak.blocks") == 0
    assert number(analysis, "level.generated") == pytest.approx(rate * 40, rel=0.05)
