"""Which engine is it: exactly one, or an answer that says what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.engines import DIALECTS, RawState, detect, named
from pytest_kvcache.errors import UnknownEngine, UsageError
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import Missing

DATA = Path(__file__).parent.parent / "data"


def test_a_model_list_is_enough_where_metrics_are_switched_off() -> None:
    raw = RawState(metrics_reason="/metrics answers HTTP 404", json={"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}})
    assert detect(raw).name == "vllm"


@pytest.mark.parametrize("path", ["/slots", "/props"])
def test_one_body_of_its_own_is_enough_for_llama_cpp(path: str) -> None:
    body = json.loads((DATA / "llamacpp" / f"{path[1:]}{'-fresh-split' if path == '/slots' else ''}.json").read_text())
    off = Missing("answers HTTP 501")
    assert detect(RawState(json={"/slots": off, "/props": off, path: body})).name == "llamacpp"


def test_series_outweigh_what_a_gateway_claims_to_own() -> None:
    raw = RawState(metrics=parse_samples('vllm:kv_cache_usage_perc{engine="0"} 0.5'), json={"/v1/models": {"data": [{"owned_by": "llamacpp"}]}})
    assert detect(raw).name == "vllm"


def test_an_unknown_engine_is_refused_with_what_it_said() -> None:
    text = "\n".join(f"other:series_{n:03} 1" for n in range(200)) + "\nprocess_cpu_seconds_total 1"
    raw = RawState(metrics=parse_samples(text, frozenset()), json={"/v1/models": {"data": [{"owned_by": "somebody\x1b[2J"}]}})
    with pytest.raises(UnknownEngine) as caught:
        detect(raw)
    assert "cannot judge" in caught.value.what
    assert "201 series: other:series_000, other:series_001" in caught.value.what
    assert "and 189 more" in caught.value.what
    assert "owned_by somebody [2J" in caught.value.what
    assert caught.value.what.isprintable()
    assert len(caught.value.what) < 800
    assert "--kv-engine" in caught.value.hint
    assert ", ".join(DIALECTS) in caught.value.hint


def test_the_reason_why_nothing_was_read_is_in_the_refusal() -> None:
    with pytest.raises(UnknownEngine, match="HTTP 401"):
        detect(RawState(metrics_reason="/metrics answers HTTP 401: it wants a key", json={"/v1/models": Missing("no")}))


def test_signs_of_two_engines_are_not_settled_by_a_coin() -> None:
    with pytest.raises(UnknownEngine, match=r"several engines: llama\.cpp, vLLM"):
        detect(RawState(metrics=parse_samples("vllm:kv_cache_usage_perc 0.5\nllamacpp:requests_processing 1")))


@pytest.mark.parametrize("odd", [None, [], {}, {"data": {}}, {"data": [None, 1, {"owned_by": 5}]}])
def test_a_model_list_of_another_shape_is_no_sign(odd: Any) -> None:
    with pytest.raises(UnknownEngine):
        detect(RawState(json={"/v1/models": odd}))


def test_a_name_that_only_begins_like_an_engine_is_no_sign() -> None:
    with pytest.raises(UnknownEngine):
        detect(RawState(metrics=parse_samples("vllmish:kv_cache_usage_perc 0.5\nvllm 1\nray_vllmx_y 1")))


def test_a_name_on_the_command_line_is_a_dialect_or_a_clear_no() -> None:
    assert named("vllm") is DIALECTS["vllm"]
    with pytest.raises(UsageError, match="no engine is called 'vlm'") as caught:
        named("vlm")
    assert caught.value.hint == f"auto, {', '.join(DIALECTS)}"


def test_series_of_a_recording_rule_are_refused_with_what_they_are() -> None:
    raw = RawState(metrics=parse_samples("cluster:vllm_kv_cache_usage_perc:avg 0.5"))
    with pytest.raises(UnknownEngine, match="recording rule"):
        detect(raw)
