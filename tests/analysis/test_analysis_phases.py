"""When the server read prompts, when it decoded, when it drained, and when nobody looked."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import oracle_traces as oracle
import pytest
from finding_cases import busy, made
from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import T0, USABLE, MadeRun, closed_loop, request, sample

from pytest_kvcache.analysis.phases import DECODE, DRAIN, GAP, IDLE, PREFILL, Phases
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import TelemetryRow


def phases_of(analysis: Analysis) -> Phases:
    assert isinstance(analysis.phases, Phases)
    return analysis.phases


def share(analysis: Analysis, name: str) -> float:
    value = analysis.values[name]
    assert isinstance(value, Reading), value
    return value.number()


def test_long_prompts_and_short_answers_are_a_prefill_load(tmp_path: Path) -> None:
    """The article: 20 users with 5,000-token prompts fill half a pool while few tokens come out."""
    rows = [request(i, 0.001 * i, prompt=90, output=4, ttft_s=3.0, length_s=3.2) for i in range(20)]
    samples = [sample(rows, T0 - 0.3 + i / 10, running=20.0 * (0 <= i - 3 < 32), used_blocks=100.0 * (0 <= i - 3 < 32)) for i in range(45)]
    analysis = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / "1-normal"))
    assert share(analysis, "phase.prefill") > 0.85
    assert share(analysis, "phase.decode") < 0.1


def test_a_decoding_load_says_so_and_drains_at_its_end(tmp_path: Path) -> None:
    rows = closed_loop(users=2, seconds=4.0)
    analysis = analyse(MadeRun(rows=rows).write(tmp_path / "1-normal"))
    assert share(analysis, "phase.decode") > 0.5
    spans = phases_of(analysis).spans
    assert spans[0].name == IDLE
    assert spans[-1].name == IDLE
    named = {phase.name: phase for phase in phases_of(analysis).phases}
    assert named[DRAIN].seconds <= 0.6
    peak = named[DECODE].usage_peak
    assert peak is not None
    assert peak > 0


def test_a_pause_of_the_sampler_is_a_gap_and_no_phase(tmp_path: Path) -> None:
    rows = closed_loop(users=2, seconds=6.0)
    samples = [sample(rows, T0 + i / 10) for i in range(65) if not 20 <= i < 45]
    analysis = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / "1-normal"))
    gaps = [span for span in phases_of(analysis).spans if span.name == GAP]
    assert len(gaps) == 1
    assert gaps[0].until_s == pytest.approx(4.5, abs=0.11)
    assert phases_of(analysis).phases[-1].seconds == pytest.approx(gaps[0].until_s - gaps[0].since_s)


def test_a_server_that_only_others_use_is_told_apart_by_its_counters(tmp_path: Path) -> None:
    rows = [request(0, 0.0, prompt=10, output=2, ttft_s=0.05, length_s=0.1)]
    samples = []
    for i in range(60):
        made = 0.0 if i < 30 else 10.0 * (i - 30)
        samples.append(sample([], T0 - 2.0 + i / 10, running=4.0, used_blocks=50.0, usage=50 / USABLE, generation_tokens=made))
    analysis = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / "1-normal"))
    by_name = {span.name for span in phases_of(analysis).spans}
    assert PREFILL in by_name, "running and no token made"
    assert by_name & {DECODE, DRAIN}


def test_the_chunked_prefill_of_a_real_engine_is_seen(tmp_path: Path) -> None:
    analysis = analyse(oracle.run("prefix_off_chunked", tmp_path / "1-normal"))
    assert 0.08 < share(analysis, "phase.prefill") < 0.2, "five prompts of 256 to 500 tokens at 64 a step of 60 ms"
    assert share(analysis, "phase.idle") > 0.2


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.02, 3.0), min_size=2, max_size=40), st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_spans_follow_each_other_and_cover_everything(steps: list[float], running: list[int]) -> None:
    import tempfile

    samples: list[TelemetryRow] = []
    at = T0
    for step, many in zip(steps, running, strict=False):
        samples.append(sample([], at, running=float(many), used_blocks=float(many), usage=many / USABLE))
        at += step
    values: dict[str, Any] = {"rows": [request(0, 0.0, length_s=0.5)], "samples": samples}
    with tempfile.TemporaryDirectory() as folder:
        analysis = analyse(MadeRun(**values).write(Path(folder) / "1-normal"))
    spans = phases_of(analysis).spans
    for left, right in pairwise(spans):
        assert left.until_s == pytest.approx(right.since_s, abs=1e-6)
        assert left.since_s <= left.until_s + 1e-6
    shares = (
        [share(analysis, f"phase.{name}") for name in (IDLE, PREFILL, DECODE, DRAIN)] if isinstance(analysis.values["phase.idle"], Reading) else [1.0]
    )
    assert sum(shares) == pytest.approx(1.0)


def test_one_sample_tells_no_phase(tmp_path: Path) -> None:
    rows = closed_loop(users=1, seconds=1.0)
    analysis = analyse(MadeRun(rows=rows, samples=[sample(rows, T0)]).write(tmp_path / "1-normal"))
    assert isinstance(analysis.values["phase.prefill"], Missing)


def test_one_prompt_beside_four_answers_is_decoding(tmp_path: Path) -> None:
    rows = [request(i, 0.0, output=100, ttft_s=0.05, length_s=5.0) for i in range(4)]
    rows += [request(10 + i, 0.2 + 0.6 * i, output=2, ttft_s=0.5, length_s=0.55) for i in range(8)]
    samples = [sample(rows, T0 + i / 10, running=5.0) for i in range(1, 50)]
    analysis = analyse(MadeRun(rows=rows, samples=samples).write(tmp_path / "1-normal"))
    assert share(analysis, "phase.prefill") == 0
    assert share(analysis, "phase.decode") + share(analysis, "phase.drain") > 0.95


@pytest.mark.parametrize(("engine", "told"), [("vllm", True), ("sglang", False)])
def test_tokens_counted_when_requests_end_tell_no_prompt_from_an_answer_of_others(engine: str, told: bool, tmp_path: Path) -> None:
    def each(i: int) -> dict[str, Any]:
        return busy(0.6, 4.0, 0.0, generation_tokens=100.0 * (i // 20))

    values = made(tmp_path / "a", (), each, engine=engine).values
    assert isinstance(values["phase.prefill"], Reading) is told
    assert "cannot be told apart" in getattr(values["phase.prefill"], "reason", "") or told
    hung = made(tmp_path / "b", (), busy(0.6, 4.0, 0.0, generation_tokens=100.0), engine=engine).values
    assert isinstance(hung["phase.prefill"], Missing), "nothing moved: nobody is seen to read a prompt"
