"""May this configuration ship? Near-max probe, over-limit refusal, three lanes of load, idle, quality, and the change itself.

Each gate is a test of its own, so that one that fails hides no other; a profile is measured once and judged by several.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_kvcache import assertions, sweeping
from pytest_kvcache.analysis.sweep import Sweep
from pytest_kvcache.judge import gates, quality
from pytest_kvcache.judge.compare import Comparison
from pytest_kvcache.judge.thresholds import Threshold
from pytest_kvcache.records import GateRecord
from pytest_kvcache.runfolder import Run
from pytest_kvcache.session import Session
from pytest_kvcache.settings import Settings

pytestmark = pytest.mark.capacity

Windows = Callable[..., list[Run]]

lanes = pytest.mark.parametrize(
    "lane",
    [pytest.param(name, marks=pytest.mark.kv_profile(name)) for name in ("normal", "longctx", "nearmax")],
)
probe = pytest.mark.kv_profile("nearmax", users=1, requests=1)
over_limit = pytest.mark.kv_profile("overlimit", users=1, requests=1)


@probe
def test_one_request_close_to_max_model_len_is_served(kv_load: Callable[..., Run]) -> None:
    run = kv_load("nearmax", users=1, requests=1)
    assertions.settle(gates.near_max_served(assertions.analyses(run)))


@probe
def test_the_near_max_request_gives_its_blocks_back(kv_load: Callable[..., Run]) -> None:
    assertions.assert_returns_to_idle(kv_load("nearmax", users=1, requests=1))


@over_limit
def test_a_request_over_the_limit_is_refused_cleanly(kv_load: Callable[..., Run]) -> None:
    run = kv_load("overlimit", users=1, requests=1)
    assertions.settle(gates.over_limit_refused(assertions.analyses(run)))


@lanes
def test_peak_usage_leaves_room(kv_windows: Windows, kv_settings: Settings, lane: str) -> None:
    assertions.assert_peak_usage(kv_windows(lane), max=kv_settings.max_usage)


@lanes
def test_free_space_never_runs_out(kv_windows: Windows, kv_settings: Settings, lane: str) -> None:
    assertions.assert_free_blocks(kv_windows(lane), min=kv_settings.min_free)


@lanes
def test_no_request_is_rejected(kv_windows: Windows, lane: str) -> None:
    assertions.assert_no_rejections(kv_windows(lane))


@lanes
def test_no_request_is_preempted(kv_windows: Windows, lane: str) -> None:
    assertions.assert_no_preemptions(kv_windows(lane))


@lanes
def test_everything_is_given_back_after_the_load(kv_windows: Windows, lane: str) -> None:
    assertions.assert_returns_to_idle(kv_windows(lane))


def test_quality_items_are_answered(kv_quality: Callable[[], Run], kv_settings: Settings) -> None:
    assertions.assert_quality(kv_quality(), min=kv_settings.quality_min)


def test_quality_items_are_answered_under_pressure(kv_quality: Callable[[], Run], kv_settings: Settings) -> None:
    assertions.settle(quality.pressed(assertions.analyses(kv_quality()), kv_settings.quality_min))


def test_the_change_made_nothing_worse(kv_compare: Callable[[], Comparison]) -> None:
    assertions.assert_not_worse(kv_compare())


def test_a_sweep_of_one_option_recommends_a_value(kv_sweep: Callable[..., Sweep], kv_session: Session) -> None:
    assertions.settle_all(sweeping.sweep_gates(kv_session, kv_sweep("normal")))


@pytest.mark.kv_profile("normal")
@pytest.mark.kv_profile("longctx")
@pytest.mark.kv_profile("nearmax")
def test_a_threshold_of_the_file_holds(kv_thresholds: Callable[[Threshold], list[GateRecord]], kv_threshold: Threshold) -> None:
    assertions.settle_all(kv_thresholds(kv_threshold))
