"""The helpers: a bound that cannot be meant is no gate, and each takes a Run, an Analysis or several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_run import T0, MadeRun, closed_loop, quality_run, snapshot

from pytest_kvcache import assertions
from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.errors import GateFailed, UsageError
from pytest_kvcache.records import GateRecord
from pytest_kvcache.runfolder import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return MadeRun().write(tmp_path / "runs" / "1-normal")


@pytest.mark.parametrize(
    "call",
    [
        lambda run: assertions.assert_peak_usage(run, max=90),
        lambda run: assertions.assert_peak_usage(run, max=float("nan")),
        lambda run: assertions.assert_free_blocks(run, min=-5),
        lambda run: assertions.assert_quality(run, min=98),
        lambda run: assertions.assert_balanced(run, max_spread=-0.1),
        lambda run: assertions.assert_fits(run, concurrency=-1, length=10),
    ],
)
def test_a_bound_that_no_value_could_miss_is_refused(run: Run, call: Callable[[Run], Any]) -> None:
    with pytest.raises(UsageError):
        call(run)


def test_every_form_of_evidence_is_taken_and_nothing_else(run: Run) -> None:
    for evidence in (run, analyse(run), [run, run], [analyse(run)]):
        assert assertions.assert_peak_usage(evidence, max=1.0).verdict == "PASS"
    for wrong in (None, [], ["runs/1-normal"], 3):
        with pytest.raises(TypeError):
            assertions.assert_peak_usage(wrong, max=1.0)  # type: ignore[arg-type]


def test_a_gate_that_fails_says_everything_in_one_message_and_is_recorded(run: Run) -> None:
    judged: list[GateRecord] = []
    with assertions.recording(assertions.Recorder(judged.append)), pytest.raises(GateFailed) as caught:
        assertions.assert_peak_usage(run, max=0.01)
    assert [gate.verdict for gate in judged] == ["FAIL"]
    text = str(caught.value)
    for words in ("peak_usage", "1.0 %", "pool 127 blocks", "free", "running", "runs/1-normal"):
        assert words in text


def test_inconclusive_passes_only_where_the_user_asked_for_it(tmp_path: Path) -> None:
    run = MadeRun().write(tmp_path / "runs" / "1-normal")  # sound, and without a quality item
    with pytest.raises(GateFailed, match="INCONCLUSIVE"):
        assertions.assert_quality(run)
    with assertions.recording(assertions.Recorder(lambda _: None, inconclusive_passes=True)):
        assert assertions.assert_quality(run).verdict == "INCONCLUSIVE"


def windows(tmp_path: Path, name: str, count: int = 5, **fields: Any) -> list[Run]:
    made = []
    for window in range(count):
        run = MadeRun(
            record={"window": window, "workload": f"w{window}", **fields.get("record", {})}, **{k: v for k, v in fields.items() if k != "record"}
        )
        made.append(run.write(tmp_path / "runs" / f"{name}{window}-normal"))
    return made


def test_two_sides_are_judged_with_margins_of_ones_own(tmp_path: Path) -> None:
    before, after = windows(tmp_path, "a"), windows(tmp_path, "b", rows=closed_loop(length_s=0.8, ttft_s=0.16))
    judged = assertions.assert_not_worse(before, windows(tmp_path, "c"), ttft_p95=0.25, latency_p95=0.25)
    assert {"usage_not_worse", "ttft_p95_not_worse", "latency_p95_not_worse"} <= {gate.name for gate in judged}
    with pytest.raises(GateFailed, match="ttft_not_worse"):
        assertions.assert_not_worse(before, after, throughput=0.9)
    assert assertions.assert_not_worse(before, after, ttft=1.0, throughput=0.9)


def test_a_change_that_was_not_declared_is_invalid_here_too(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"before": [snapshot(T0 - 1, max_num_seqs=4)], "after": [snapshot(T0 + 5, max_num_seqs=4)]}
    before, after = windows(tmp_path, "a"), windows(tmp_path, "b", **changed)
    assert assertions.assert_not_worse(before, after, expect_change="max_num_seqs")
    with pytest.raises(GateFailed, match="max_num_seqs was 8 requests and is 4 requests"):
        assertions.assert_not_worse(before, after, expect_change="block_size")


def test_quality_of_two_sides_is_bounded_by_its_margin(tmp_path: Path) -> None:
    before, same, worse = (quality_run(passed).write(tmp_path / "runs" / f"{n}-quality") for n, passed in enumerate((300, 300, 280)))
    assert assertions.assert_quality(before, same, margin=0.01).verdict == "PASS"
    with pytest.raises(GateFailed, match="20 lost"):
        assertions.assert_quality(before, worse, margin=0.01)
    few = [quality_run(48, items=48).write(tmp_path / "runs" / f"{n}-quality") for n in (10, 11)]
    with pytest.raises(GateFailed, match="about 299 items would decide it"):
        assertions.assert_quality(few[0], few[1], margin=0.01)


def test_one_side_is_no_comparison(run: Run) -> None:
    with pytest.raises(TypeError, match="after the change is missing"):
        assertions.assert_not_worse([run])
    for wrong in (-0.1, 2.0, float("nan")):
        with pytest.raises(UsageError):
            assertions.assert_not_worse([run], [run], usage=wrong)


def test_what_fits_a_hybrid_is_told_with_its_configuration(tmp_path: Path) -> None:
    # two groups share the pool: 64 blocks of 16 for a request of 1,024 tokens in the full layers, and 33 in the window layers
    config = {
        "model_type": "gemma2", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
        "sliding_window": 256, "max_position_embeddings": 1024, "torch_dtype": "bfloat16",
    }  # fmt: skip
    need = 64 + 33
    server = snapshot(T0 - 1, usable=399, max_concurrency=400 / need, pool_tokens=int(400 / need * 1024), pool_bytes=400 * 2 * 16 * 512)
    run = MadeRun(before=[server], after=[server]).write(tmp_path / "runs" / "1-normal")
    with pytest.raises(GateFailed, match="INCONCLUSIVE"):
        assertions.assert_fits(run, concurrency=6, length=512)
    stated: dict[str, Any] = {"config": config, "max_num_batched_tokens": 256, "async_scheduling": False}
    assert assertions.assert_fits(run, concurrency=6, length=512, **stated).verdict == "PASS"  # 32 + 33 blocks each
    with pytest.raises(GateFailed, match="FAIL: the pool holds 6 requests"):
        assertions.assert_fits(run, concurrency=7, length=512, **stated)
    # a configuration of another model reproduces nothing, and decides nothing
    with pytest.raises(GateFailed, match="does not reproduce"):
        assertions.assert_fits(run, concurrency=1, length=512, config={**config, "num_hidden_layers": 7, "head_dim": 80})
    with pytest.raises(UsageError):
        assertions.assert_fits(run, concurrency=1, length=512, tp=2)
