"""Windows that are past: whatever their length, both ends are looked at, no more is asked than Prometheus gives, and a repeated value is no new one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_prometheus import RecordedPrometheus, every

from pytest_kvcache.cli import main
from pytest_kvcache.errors import UsageError
from pytest_kvcache.observe.fleet_cards import read_cards
from pytest_kvcache.observe.moments import MOST_POINTS, TooMany, at_steps, moments, step_for
from pytest_kvcache.observe.passing import past_run
from pytest_kvcache.observe.prometheus import Prometheus

T0 = 1_795_990_000.0
DAY = 86_400.0


def vllm_text(usage: float, running: int = 1, waiting: int = 0, generated: float = 0, blocks: int = 1001) -> str:
    labels = '{engine="0",model_name="m"}'
    info = f'block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="{blocks}"'
    return (
        f"vllm:cache_config_info{{{info}}} 1.0\nvllm:kv_cache_usage_perc{labels} {usage}\nvllm:num_requests_running{labels} {running}\n"
        f"vllm:num_requests_waiting{labels} {waiting}\nvllm:generation_tokens_total{labels} {generated}\n"
    )


def card_text(used: int) -> str:
    labels = 'gpu="0",UUID="GPU-0",modelName="NVIDIA H100",Hostname="node-a"'
    return f"DCGM_FI_DEV_FB_USED{{{labels}}} {used}\nDCGM_FI_DEV_FB_FREE{{{labels}}} {81000 - used}\n"


@pytest.fixture
def server() -> Iterator[RecordedPrometheus]:
    with RecordedPrometheus() as found:
        yield found


def asked(server: RecordedPrometheus, capsys: pytest.CaptureFixture[str], command: str, *words: str) -> dict[str, Any]:
    assert main([command, "--prometheus", server.url, *words, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


@pytest.mark.parametrize(
    ("length_s", "step_s"), [(0, 1), (0.5, 1), (6, 1), (60, 1), (90, 1.5), (600, 10), (900, 15), (7200, 15), (DAY, 15), (10 * DAY, 78.553)]
)
def test_the_step_follows_the_window(length_s: float, step_s: float) -> None:
    assert step_for(length_s) == step_s


@given(st.floats(1, 4e9), st.floats(0, 1e8), st.one_of(st.none(), st.floats(0.001, 1e6)))
def test_both_ends_are_points_and_no_more_are_asked_for_than_there_may_be(start: float, length_s: float, named: float | None) -> None:
    try:
        every_one = moments(start, start + length_s, named or step_for(length_s))
    except UsageError:
        assert named is not None, "a step of ours always fits"
        assert length_s / named > MOST_POINTS - 2
        return
    assert abs(every_one[0] - start * 1000) <= 2
    assert abs(every_one[-1] - (start + length_s) * 1000) <= 2
    assert every_one == sorted(set(every_one))
    assert len(every_one) <= MOST_POINTS + 1


def test_a_window_shorter_than_fifteen_seconds_is_seen_in_its_middle(server: RecordedPrometheus, capsys: pytest.CaptureFixture[str]) -> None:
    """The first scrape is younger than the window's start, and the load came and went within it."""
    for at in every(T0, T0 + 5, 1):
        server.scrape(at, vllm_text(0.9 if at == T0 + 3 else 0.0), job="vllm", instance="node-a:8000")
        server.scrape(at, card_text(70000 if at == T0 + 3 else 1000), job="dcgm", instance="node-a:9400")
    told = asked(server, capsys, "inspect", "--selector", 'job="vllm"', "--at", str(T0 + 5), "--window", "6s")
    (target,) = told["targets"]
    assert target["summary"]["usage.peak"] == 0.9
    assert target["summary"]["free_blocks.min"] == 100
    assert target["gaps"] == 1
    (card,) = told["cards"]
    assert (card["card"]["used_bytes"] >> 20, card["least_free_bytes"] >> 20) == (70000, 11000)
    found = asked(server, capsys, "diagnose", "--selector", 'job="vllm"', "--at", str(T0 + 5), "--window", "6s")
    assert found["values"]["usage.peak"]["value"] == 0.9


@pytest.mark.parametrize("step", [["--step", "15s"], ["--step", "7s"], []])
def test_the_end_of_a_window_is_looked_at_whatever_the_step(step: list[str], server: RecordedPrometheus, capsys: pytest.CaptureFixture[str]) -> None:
    for at in every(T0, T0 + 40, 1):
        server.scrape(at, vllm_text(0.9 if at == T0 + 40 else 0.1), job="vllm", instance="a:8000")
    words = ["--at", str(T0 + 40), "--window", "40s", *step]
    (target,) = asked(server, capsys, "inspect", *words)["targets"]
    assert target["summary"]["usage.peak"] == 0.9
    assert (target["rows"][0]["wall_s"], target["rows"][-1]["wall_s"]) == (T0, T0 + 40)
    assert asked(server, capsys, "diagnose", *words)["values"]["usage.peak"]["value"] == 0.9


def test_ten_days_are_asked_for_in_as_many_points_as_prometheus_gives(server: RecordedPrometheus) -> None:
    for at in every(T0 + 9.9 * DAY, T0 + 10 * DAY, 290):
        server.scrape(at, "vllm:num_requests_running 3\n", job="vllm", instance="a:8000")
    with Prometheus(server.url) as prometheus:
        (target,) = prometheus.window(T0, T0 + 10 * DAY)
        assert 10_990 <= len(target.rows) <= MOST_POINTS + 1
        assert float(server.windows()[0]["step"]) == pytest.approx(10 * DAY / (MOST_POINTS - 1), rel=1e-4)
        with pytest.raises(UsageError, match="11,000"):
            prometheus.window(T0, T0 + 10 * DAY, 15.0)


def test_a_large_fleet_is_looked_at_in_longer_steps_and_a_step_of_ones_own_is_kept(
    server: RecordedPrometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets times points are more than is taken: without a step it is a longer one, with one it is said; so with cards."""
    for number in range(3):
        for at in every(T0, T0 + 7200, 60):
            server.scrape(at, "vllm:num_requests_running 3\n", job="vllm", instance=f"10.0.0.{number}:8000")
            server.scrape(at, card_text(1000), job="dcgm", instance=f"10.0.0.{number}:9400")
    monkeypatch.setattr("pytest_kvcache.observe.prometheus.MOST_LOOKS", 1000)
    monkeypatch.setattr("pytest_kvcache.observe.fleet_cards.MOST_LOOKS", 1000)
    with Prometheus(server.url) as prometheus:
        targets = prometheus.window(T0, T0 + 7200)
        assert [len(target.rows) for target in targets] == [121] * 3
        assert [float(form["step"]) for form in server.windows()] == [15.0, 60.0]
        with pytest.raises(UsageError, match="more than 1,000"):
            prometheus.window(T0, T0 + 7200, 15.0)
        (card,) = read_cards(prometheus, [target.labels for target in targets], T0, T0 + 7200, selector='job="dcgm"').windows
        assert card.points == 121
        with pytest.raises(UsageError, match="too many cards"):
            read_cards(prometheus, [], T0, T0 + 7200, 15.0, 'job="dcgm"')


def test_what_is_too_much_at_every_step_is_said() -> None:
    steps = []

    def ask(step: float) -> None:
        steps.append(step)
        raise TooMany("too much")

    with pytest.raises(TooMany):
        at_steps(100.0, None, ask)
    assert steps == [1.667, 6.668, 26.672, 100.0]


@pytest.mark.parametrize("window", ["300s", "600s", "1200s"])
@pytest.mark.parametrize("apart_s", [1, 15, 30, 60])
def test_a_busy_server_does_not_stand_still_between_two_scrapes(apart_s: int, window: str, server: RecordedPrometheus, tmp_path: Path) -> None:
    """Prometheus repeats a value until the next scrape: at points closer than that no token seems to be counted."""
    length = float(window.removesuffix("s"))
    for at in every(T0 - 60, T0 + length, apart_s):
        server.scrape(at, vllm_text(0.5, 4, 3, generated=100 * (at - T0 + 100)), job="vllm", instance="a:8000")
    with Prometheus(server.url) as prometheus:
        run = past_run(prometheus, tmp_path, T0, T0 + length)
    from pytest_kvcache.analysis.findings import find
    from pytest_kvcache.analysis.timeline import analyse

    analysis = analyse(run)
    assert analysis.values["stuck.seconds"].number() == 0  # type: ignore[union-attr]
    assert not {"stuck-queue", "stale-gauge"} & {finding.id for finding in find(analysis).found}
    assert 1 / run.record.sample_hz == pytest.approx(max(apart_s, step_for(length)), rel=0.5)


def test_a_queue_that_stands_still_is_found_between_scrapes_too(server: RecordedPrometheus, tmp_path: Path) -> None:
    for at in every(T0 - 60, T0 + 600, 30):
        server.scrape(at, vllm_text(0.0, 0, 3, generated=100), job="vllm", instance="a:8000")
    with Prometheus(server.url) as prometheus:
        run = past_run(prometheus, tmp_path, T0, T0 + 600)
    from pytest_kvcache.analysis.findings import find
    from pytest_kvcache.analysis.timeline import analyse

    assert "stuck-queue" in {finding.id for finding in find(analyse(run)).found}


def test_a_step_without_prometheus_cannot_be_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect", "/dev/null"], ["diagnose", "http://127.0.0.1:1"]):
        assert main([*words, "--step", "5s"]) == 2
        assert "--step" in capsys.readouterr().err
