"""What a Prometheus server answered, saved in a file: it reads like a scrape, of its last moment, and says what an answer cannot tell."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.observe.inspecting import Inspection, inspect
from pytest_kvcache.observe.pasted import sort_text
from pytest_kvcache.quantities import Missing, Reading

AT = 1_764_000_000
ONE = {"instance": "10.0.0.1:8000", "job": "vllm", "engine": "0"}
TWO = {**ONE, "instance": "10.0.0.2:8000"}


def told(*texts: str) -> Inspection:
    return inspect([sort_text(f"text {number}", text.encode()) for number, text in enumerate(texts)])


def value(found: Inspection, name: str) -> Any:
    quantity = found.quantities[name]
    return quantity.value if isinstance(quantity, Reading) else None


def vector(*rows: dict[str, Any], kind: str = "vector", **more: Any) -> str:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": list(rows)}, **more})


def row(name: str, *values: object, **labels: str) -> dict[str, Any]:
    metric = {"__name__": f"vllm:{name}", **labels}
    if len(values) == 1:
        return {"metric": metric, "value": [AT + 0.123, str(values[0])]}
    return {"metric": metric, "values": [[AT + 15 * number, str(one)] for number, one in enumerate(values) if one is not None]}


def server(labels: dict[str, str], blocks: int, usage: float, running: int) -> list[dict[str, Any]]:
    return [
        row("cache_config_info", 1, **labels, block_size="16", num_gpu_blocks=str(blocks)),
        row("kv_cache_usage_perc", usage, **labels, model_name="m"),
        row("num_requests_running", running, **labels, model_name="m"),
    ]


def test_an_instant_answer_reads_like_a_scrape() -> None:
    found = told(vector(*server(ONE, 1001, 0.5, 7)))
    assert (found.engine, found.judged) == ("vllm", True)
    assert [value(found, name) for name in ("usable_blocks", "used_blocks", "free_blocks", "usage", "running")] == [1000, 500, 500, 0.5, 7]
    assert any("as of 2025-11-24 16:00:00 UTC" in note for note in found.notes)
    assert found.ranks == {}


def test_two_servers_of_an_answer_stay_apart_and_add() -> None:
    found = told(vector(*server(ONE, 1001, 0.5, 7), *server(TWO, 3001, 0.9, 2)))
    assert [value(found, name) for name in ("usable_blocks", "usage", "running")] == [4000, pytest.approx(0.8), 9]
    assert set(found.ranks) == {"10.0.0.1:8000", "10.0.0.2:8000"}


def test_answers_to_one_query_each_are_one_server() -> None:
    parts = [vector(one) for one in server(ONE, 1001, 0.5, 7)]
    assert value(told(*parts), "free_blocks") == 500
    assert value(told("\n".join(parts)), "free_blocks") == 500, "in one file as well"


def test_of_a_range_the_last_moment_is_read_and_its_peak_is_told() -> None:
    rows = [
        row("cache_config_info", 1, 1, 1, **ONE, block_size="16", num_gpu_blocks="1001"),
        row("kv_cache_usage_perc", 0.1, 0.97, 0.5, **ONE, model_name="m"),
        row("num_requests_running", 1, 30, 7, **ONE, model_name="m"),
        row("num_requests_waiting", 2, 12, None, **ONE, model_name="m"),
        row("num_preemptions_total", 3, 9, 9, **ONE, model_name="m"),
    ]
    found = told(vector(*rows, kind="matrix"))
    assert [value(found, name) for name in ("usage", "running", "preemptions")] == [0.5, 7, 9]
    assert value(found, "waiting") is None, "its series had ended: that is not its last value"
    (went,) = (note for note in found.notes if "usage at most" in note)
    for said in (
        "3 points from 2025-11-24 16:00:00 UTC",
        "97.0 % (at 2025-11-24 16:00:15 UTC)",
        "free at least 30 blocks",
        "running at most 30",
        "6 preemptions",
    ):
        assert said in went


def test_an_expression_is_no_series_of_an_engine() -> None:
    found = told(vector({"metric": {}, "value": [AT, "0.7"]}))
    assert not found.judged
    assert "an expression" in found.why
    mixed = told(vector({"metric": {"model_name": "m"}, "value": [AT, "0.7"]}, *server(ONE, 1001, 0.5, 7)))
    assert value(mixed, "usage") == 0.5
    assert any("1 series of Prometheus' answer have no name" in note for note in mixed.notes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (vector(), "holds no series: nothing matched at that time, which is not zero"),
        (json.dumps({"status": "success", "data": {"resultType": "scalar", "result": [AT, "1"]}}), "holds a scalar and no series"),
        (vector({"metric": "x"}), "holds a vector and no series"),
        (json.dumps({"status": "error", "errorType": "bad_data", "error": "parse error"}), "errors of a server"),
    ],
)
def test_an_answer_that_tells_nothing_says_why(text: str, why: str) -> None:
    found = told(text)
    assert not found.judged
    assert why in found.why


def test_cards_of_an_answer_are_cards() -> None:
    card = {"UUID": "GPU-1", "gpu": "0", "Hostname": "node-a", "instance": "10.0.0.9:9400"}
    read = {"DCGM_FI_DEV_FB_USED": 60_000, "DCGM_FI_DEV_FB_FREE": 20_000}
    rows: list[dict[str, Any]] = [{"metric": {"__name__": name, **card}, "value": [AT, str(mib)]} for name, mib in read.items()]
    found = told(vector(*rows, *server(ONE, 1001, 0.5, 7)))
    assert [gpu.host for gpu in found.gpus] == ["node-a"]
    assert value(found, "usage") == 0.5


def test_lines_of_promtool_read_like_a_scrape() -> None:
    found = told(
        'vllm:kv_cache_usage_perc{engine="0", instance="10.0.0.1:8000", model_name="m => n"} => 0.5 @[1764000000.123]\n'
        'vllm:cache_config_info{block_size="16", engine="0", instance="10.0.0.1:8000", num_gpu_blocks="1001"} => 1 @[1764000000.123]\n'
    )
    assert [value(found, name) for name in ("usage", "free_blocks")] == [0.5, 500]


_JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["metric", "value", "values", "__name__", "instance", "x"]), inner, max_size=4), max_leaves=12)  # fmt: skip


@settings(max_examples=150)
@given(result=_JSON, kind=st.sampled_from(["vector", "matrix", "scalar", ["vector"], {}, None]))
def test_no_answer_breaks_the_reader(result: Any, kind: Any) -> None:
    found = told(json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}))
    assert all(isinstance(one, (Reading, Missing)) for one in found.quantities.values())
