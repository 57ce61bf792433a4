"""Cards out of Prometheus: those of the fleet's pods, else of its nodes, never those of somebody else, and none left out in silence."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.errors import UsageError
from pytest_kvcache.observe.fleet_cards import Cards, read_cards
from pytest_kvcache.observe.prometheus import Prometheus


def series(gpu: int, used: list[tuple[int, str]], **labels: str) -> list[dict[str, Any]]:
    card = {"gpu": str(gpu), "UUID": f"GPU-{labels.get('Hostname', '')}-{gpu}", **labels}
    return [
        {
            "metric": {"__name__": f"DCGM_FI_DEV_FB_{name}", **card},
            "values": [[at, str(float(value) if name == "USED" else 80000 - float(value))] for at, value in used],
        }
        for name in ("USED", "FREE")
    ]


def cards(result: list[dict[str, Any]], targets: list[dict[str, str]], selector: str = "") -> Cards:
    pages = {"/api/v1/query_range": {"status": "success", "data": {"resultType": "matrix", "result": result}}}
    with ScriptedServer(pages=pages) as fake, Prometheus(fake.url) as server:
        return read_cards(server, targets, 1, 3, 1, selector)


MINE = series(0, [(1, "100"), (2, "900"), (3, "200")], Hostname="node-a", exported_pod="vllm-0", exported_namespace="prod", pod="dcgm-x")
NEIGHBOUR = series(1, [(1, "7"), (2, "7"), (3, "7")], Hostname="node-a", exported_pod="training-0", exported_namespace="prod", pod="dcgm-x")
ELSEWHERE = series(0, [(1, "5"), (2, "5"), (3, "5")], Hostname="node-b", exported_pod="vllm-0", exported_namespace="test", pod="dcgm-y")
EVERY = [*MINE, *NEIGHBOUR, *ELSEWHERE]


def test_the_cards_that_the_fleets_pods_hold_and_no_other() -> None:
    found = cards(EVERY, [{"instance": "10.0.3.17:8000", "pod": "vllm-0", "namespace": "prod"}])
    assert [(row.host, row.index, row.used_bytes >> 20) for row in found.rows] == [("node-a", 0, 200)]
    (window,) = found.windows
    assert (window.card.used_bytes >> 20, window.least_free_bytes >> 20, window.points) == (900, 79100, 3)
    assert "pods" in found.note


@pytest.mark.parametrize("target", [{"instance": "node-a:8000"}, {"instance": "10.0.0.1:8000", "node": "node-a"}])
def test_without_pods_the_cards_of_the_node(target: dict[str, str]) -> None:
    found = cards(EVERY, [target])
    assert [(row.host, row.index) for row in found.rows] == [("node-a", 0), ("node-a", 1)]
    assert "node-a" in found.note


def test_cards_of_strangers_are_not_shown_and_the_note_says_what_to_do() -> None:
    found = cards(EVERY, [{"instance": "10.9.9.9:8000"}])
    assert (found.rows, found.windows) == ([], [])
    assert "node-a, node-b" in found.note
    assert "--cards" in found.note


def test_a_selector_of_its_own_takes_all_that_matches() -> None:
    assert len(cards(EVERY, [], 'job="dcgm"').rows) == 3
    assert "no card matches" in cards([], [], 'job="dcgm"').note
    assert cards([], [{"instance": "a:1"}]).note == ""
    with pytest.raises(UsageError):
        cards(EVERY, [], "not a selector")


def test_a_point_where_a_card_cannot_be_read_is_no_point() -> None:
    broken = [*MINE[:1], {**MINE[1], "values": [[1, "5"], [3, "NaN"]]}]
    found = cards(broken, [{"pod": "vllm-0", "namespace": "prod"}])
    assert found.windows[0].points == 1
    assert "could not be read" in found.note
