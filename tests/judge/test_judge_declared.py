"""What was not declared to change makes a comparison INVALID, and so does what was declared and did not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_run import T0, MadeRun, snapshot

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.judge.compare import Comparison, compare
from pytest_kvcache.judge.declared import canonical, word_changes
from pytest_kvcache.judge.gates import INVALID
from pytest_kvcache.settings import Settings

SERVE = ["vllm", "serve", "m", "--port", "8000"]


@pytest.fixture
def judge(tmp_path: Path) -> Any:
    """Return a function that compares a server with a changed one, under a declaration."""
    number = iter(range(1000))

    def side(words: list[str], config: dict[str, Any], **record: Any) -> list[Analysis]:
        made = MadeRun(
            before=[snapshot(T0 - 1, **config)], after=[snapshot(T0 + 5, **config)], record={"launch_command": SERVE + words, "owned": True, **record}
        )
        return [analyse(made.write(tmp_path / "runs" / f"{next(number)}-normal"))]

    def run(
        declared: str, words: list[str] | None = None, old: list[str] | None = None, record: dict[str, Any] | None = None, **config: Any
    ) -> Comparison:
        settings = Settings(before="a", after="b", expect_change=declared)
        return compare(side(old or [], {}), side(words or [], config, **(record or {})), settings)

    return run


def rules(comparison: Comparison) -> list[str]:
    return [problem.rule for problem in comparison.problems]


def test_what_was_declared_is_no_problem(judge: Any) -> None:
    assert rules(judge("max_num_seqs", ["--max-num-seqs", "4"], max_num_seqs=4)) == []
    assert rules(judge("--max-num-seqs", ["--max-num-seqs=4"], max_num_seqs=4)) == []
    assert rules(judge("kv_cache_dtype", ["--kv-cache-dtype", "fp8"], kv_dtype="fp8", usable=255)) == [], "the pool follows from the dtype"
    assert rules(judge("", ["--anything"], max_num_seqs=4)) == [], "nothing was declared: the difference is shown and not judged"


def test_any_other_change_is_invalid_and_named(judge: Any) -> None:
    comparison = judge("kv_dtype", ["--kv-cache-dtype", "fp8", "--max-num-seqs", "4"], kv_dtype="fp8", max_num_seqs=4, usable=255)
    assert comparison.verdict == INVALID
    assert "max_num_seqs was 8 requests and is 4 requests" in comparison.problems[0].text
    assert "pool_blocks" not in comparison.problems[0].text


def test_what_no_server_states_is_seen_in_the_command(judge: Any) -> None:
    comparison = judge("kv_dtype", ["--kv-cache-dtype", "fp8", "--hf-overrides", '{"sliding_window": 512}'], kv_dtype="fp8")
    assert comparison.verdict == INVALID
    assert "hf_overrides was not given and is" in comparison.problems[0].text
    assert rules(judge("kv_dtype,hf_overrides", ["--kv-cache-dtype", "fp8", "--hf-overrides", "{}"], kv_dtype="fp8")) == []


def test_a_side_effect_of_the_engine_is_seen(judge: Any) -> None:
    # an fp8 cache that silently switches prefix caching off: the change met its memory goal, and is another change
    comparison = judge("kv_dtype", ["--kv-cache-dtype", "fp8"], kv_dtype="fp8", prefix_caching=False)
    assert comparison.verdict == INVALID
    assert "prefix_caching" in comparison.problems[0].text


def test_a_change_that_was_not_made_is_invalid(judge: Any) -> None:
    comparison = judge("max_num_seqs", ["--max-num-seqs", "8"], old=["--max-num-seqs", "8"])
    assert rules(comparison) == ["not_changed"]
    assert "8.0 on both sides" in comparison.problems[0].text or "8 on both sides" in comparison.problems[0].text
    assert rules(judge("hf_overrides")) == ["not_changed"]


def test_what_the_server_does_not_tell_is_said(judge: Any) -> None:
    comparison = judge("gpu_memory_utilization")
    assert rules(comparison) == []
    assert any("whether gpu_memory_utilization changed as declared is not known" in note for note in comparison.notes)


def test_a_pool_sized_anew_at_each_start_is_no_change(judge: Any) -> None:
    assert rules(judge("prefix_caching", prefix_caching=True, usable=126)) == [], "one block of 127 is what free memory brings"
    assert rules(judge("prefix_caching", prefix_caching=True, usable=100)) == ["undeclared"]


def test_another_build_may_have_another_path(judge: Any) -> None:
    settings = "engine_version"
    words = {"launch_command": ["/opt/new/bin/vllm", "serve", "m"], "engine_version": "0.33.0"}
    assert rules(judge(settings, record=words)) == []
    assert rules(judge("max_num_seqs", ["--max-num-seqs", "4"], max_num_seqs=4, record=words)) == ["undeclared"]


def test_commands_are_compared_by_option_and_without_their_ports() -> None:
    left = ["CUDA_VISIBLE_DEVICES=0", "vllm", "serve", "m", "--port", "1", "--seed=3", "--enforce-eager"]
    right = ["CUDA_VISIBLE_DEVICES=1", "vllm", "serve", "m", "--seed", "3", "--port=2"]
    changes = {change.name: (change.before, change.after) for change in word_changes(left, right)}
    assert changes == {"cuda_visible_devices": ("0", "1"), "enforce_eager": ("given", "not given")}
    assert (canonical("--kv-cache-dtype"), canonical("slots"), canonical("seed")) == ("kv_dtype", "max_num_seqs", "seed")
