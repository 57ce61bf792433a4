"""Telemetry behind a router: pages of several servers as one state, whole or not at all, and keys only where they are named."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import ScriptedServer

from pytest_kvcache.engines import Sample, Samples
from pytest_kvcache.errors import CannotJudge, EndpointRefused, EndpointUnreachable, UsageError
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.observe.joining import join_samples
from pytest_kvcache.observe.passing import past_run
from pytest_kvcache.observe.prometheus import Prometheus, snapshot, window
from pytest_kvcache.observe.scrape import detect_endpoint, fetch, take_snapshot
from pytest_kvcache.quantities import Missing
from pytest_kvcache.server.address import Endpoint, metrics_page, parse_endpoint
from pytest_kvcache.settings import resolve

SCRAPE = (Path(__file__).parent.parent / "data" / "exposition" / "vllm" / "0.32.0.prom").read_text()
SMALLER = SCRAPE.replace('num_gpu_blocks="8193"', 'num_gpu_blocks="4097"').replace("} 0.5\n", "} 0.25\n")


def router(url: str, pages: list[str], **options: Any) -> Endpoint:
    return parse_endpoint(url, resolve({"endpoint": [url], "metrics_url": pages, **options}, {}, {}))


def test_pages_of_two_servers_behind_a_router_are_one_state() -> None:
    with ScriptedServer(owned_by="vllm", max_model_len=4096) as front, ScriptedServer(metrics=SCRAPE) as one, ScriptedServer(metrics=SMALLER) as two:
        endpoint = router(front.url, [one.url, two.url + "/metrics"])
        dialect = detect_endpoint(endpoint)
        found = take_snapshot(endpoint, dialect)
        assert found.quantities["usable_blocks"].value == 8192 + 4096
        assert found.quantities["usage"].value == pytest.approx((4096 + 1024) / 12288)
        assert found.quantities["max_model_len"].value == 4096, "what the API says comes from the router"
        assert set(found.per_rank) == {f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}"}
        assert "GET /metrics" not in front.paths()
        two.script.metrics = None
        half = take_snapshot(endpoint, dialect)
        missing = half.value("usage")
        assert isinstance(missing, Missing), "half of a fleet is no measurement of it"
        assert f"127.0.0.1:{two.port}" in missing.reason
        assert "404" in missing.reason


def test_one_page_behind_a_router_reads_like_the_server_itself() -> None:
    with ScriptedServer(owned_by="vllm") as front, ScriptedServer(metrics=SCRAPE) as worker:
        found = take_snapshot(router(front.url, [worker.url]))
        assert found.quantities["used_blocks"].value == 4096
        assert found.per_rank == {}


def test_servers_without_labels_are_told_apart_by_their_address() -> None:
    text = "llamacpp:requests_processing {}\nllamacpp:requests_deferred 1\n"
    with (
        ScriptedServer(owned_by="llamacpp") as front,
        ScriptedServer(metrics=text.format(2)) as one,
        ScriptedServer(metrics=text.format(3)) as two,
    ):
        endpoint = router(front.url, [one.url, two.url])
        found = take_snapshot(endpoint, detect_endpoint(endpoint))
        assert found.quantities["waiting"].value == 2
        assert len(found.per_rank) == 2


def test_a_page_with_a_path_of_its_own() -> None:
    with ScriptedServer(owned_by="vllm") as front, ScriptedServer(pages={"/worker/1/metrics": (200, "text/plain", SCRAPE)}) as worker:
        assert take_snapshot(router(front.url, [worker.url + "/worker/1/metrics"])).quantities["used_blocks"].value == 4096
        assert "GET /worker/1/metrics" in worker.paths()


def test_the_api_key_never_goes_to_a_metrics_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_API", "secret-of-the-api")
    monkeypatch.setenv("KV_METRICS", "secret-of-metrics")
    with ScriptedServer(owned_by="vllm", api_key="secret-of-the-api") as front, ScriptedServer(metrics=SCRAPE) as worker:
        fetch(router(front.url, [worker.url], api_key_env="KV_API"))
        assert all("authorization" not in {name.lower() for name in seen.headers} for seen in worker.seen)
        fetch(router(front.url, [worker.url], api_key_env="KV_API", metrics_api_key_env="KV_METRICS"))
        assert worker.seen[-1].headers["Authorization"] == "Bearer secret-of-metrics"
        assert "secret" not in repr(router(front.url, ["http://u:secret@127.0.0.1:1"]))


@pytest.mark.parametrize("url", ["", "host:1/metrics", "file:///metrics", "http://h/metrics?x=1"])
def test_a_page_that_cannot_be_meant_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        metrics_page(url, resolve({}, {}, {}))


@pytest.mark.parametrize(
    "options",
    [
        {"metrics_url": ["http://a:1"]},
        {"metrics_url": ["http://a:1"], "endpoint": ["http://b:1", "http://c:1"]},
        {"prometheus": "http://a:1"},
        {"prometheus": "http://a:1", "metrics_url": ["http://a:1"], "endpoint": ["http://b:1"]},
        {"prometheus_selector": 'job="x"', "endpoint": ["http://b:1"]},
        {"prometheus": "", "endpoint": ["http://b:1"]},
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        resolve(options, {}, {})


def test_joining_labels_rows_only_where_servers_share_a_series() -> None:
    one, two = parse_samples("a 1\n"), parse_samples("b 2\n")
    assert join_samples([("x", one), ("y", two)]).rows == {"a": [Sample({}, 1.0)], "b": [Sample({}, 2.0)]}
    joined = join_samples([("x", one), ("y", parse_samples('a{instance="own"} 3\n'))])
    assert [dict(row.labels) for row in joined.rows["a"]] == [{"instance": "x"}, {"instance": "own"}]


NAMES = "/api/v1/label/__name__/values"
GOOD = {NAMES: {"status": "success", "data": ["vllm:num_requests_running"]}}


@pytest.mark.parametrize(
    ("pages", "faults", "words"),
    [
        ({NAMES: (401, "text/plain", "who are you")}, [], "wants a key.*who are you"),
        ({NAMES: (404, "text/plain", "nothing")}, [], "no Prometheus API"),
        (
            {NAMES: (400, "application/json", '{"status":"error","errorType":"bad_data","error":"parse error"}')},
            [],
            "does not take the query.*parse error",
        ),
        ({NAMES: (503, "application/json", '{"status":"error","error":"query timed out"}')}, [], "too long.*timed out"),
        ({NAMES: (500, "text/plain", "oops")}, [], "HTTP 500"),
        ({NAMES: (302, "text/plain", "")}, [], "redirects"),
        ({NAMES: (200, "text/html", "<html><title>Sign in</title></html>")}, [], "web page"),
        ({NAMES: (200, "application/json", "")}, [], "does not answer as a Prometheus"),
        ({NAMES: {"status": "success", "data": {"a": 1}}}, [], "another form"),
        ({**GOOD, "/api/v1/query": {"status": "success", "data": {"resultType": "scalar", "result": []}}}, [], "no vector"),
        ({**GOOD, "/api/v1/query": {"status": "success", "data": {"resultType": "vector", "result": [5]}}}, [], "another form"),
        ({**GOOD, "/api/v1/query": {"status": "error", "error": "bad"}}, [], "bad"),
    ],
)
def test_each_way_that_prometheus_fails_has_its_own_words(pages: dict[str, Any], faults: list[str], words: str) -> None:
    with ScriptedServer(pages=pages, faults=faults) as server, pytest.raises(EndpointRefused, match=words):
        snapshot(server.url)


def test_no_prometheus_at_all_is_unreachable() -> None:
    with pytest.raises(EndpointUnreachable):
        snapshot("http://127.0.0.1:1")


@pytest.mark.parametrize(
    "selector",
    ["up", 'job="a"} or up{', '{job="a"', 'job="a"}', "job=a", 'job="a', 'a="b" c="d"', '__name__="up"', 'a="b",__name__=~".*"', "x" * 3000],
)
def test_a_selector_that_is_none_never_reaches_the_server(selector: str) -> None:
    with pytest.raises(UsageError):
        Prometheus("http://127.0.0.1:1", selector)


@pytest.mark.parametrize("selector", ["", "{}", 'job="a"', '{job="a"}', ' job =~ "a.*" , ns != "b",', 'a="with \\" quote and } brace"'])
def test_a_selector_in_its_usual_forms(selector: str) -> None:
    Prometheus("http://127.0.0.1:1", selector).close()


@pytest.mark.parametrize("frame", [(10, 0, 1), (0, 10, 0), (0, float("nan"), 1), (0, 1e9, 1)])
def test_a_window_that_cannot_be_meant_is_a_usage_error(frame: tuple[float, float, float]) -> None:
    with pytest.raises(UsageError):
        window("http://127.0.0.1:1", "", *frame)


def test_odd_samples_of_prometheus_are_no_numbers() -> None:
    result = [
        {"metric": {"__name__": "vllm:num_requests_running", "instance": "a:1"}, "values": [[1, "3"], [2, "NaN"], [3, "x"], "?", [4]]},
        {"metric": {"__name__": "vllm:num_requests_waiting", "instance": "a:1"}, "values": [[1, "2"], [2, "1e1"], [3, "4"]]},
    ]
    pages = {**GOOD, "/api/v1/query_range": {"status": "success", "data": {"resultType": "matrix", "result": result}}}
    with ScriptedServer(pages=pages) as server:
        (target,) = window(server.url, "", 1, 4, 1)
    assert [row.values.get("running") for row in target.rows] == [3, None, None, None]
    assert [row.values.get("waiting") for row in target.rows] == [2, 10, 4, None]
    assert target.rows[3].error


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_selector_is_taken_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        Prometheus("http://127.0.0.1:1", text).close()


def test_samples_stay_bounded_in_their_bad_lines() -> None:
    parts = [(str(n), Samples({}, frozenset(), ("x",) * 5)) for n in range(9)]
    assert len(join_samples(parts).bad_lines) == 5


# as vLLM names a model that was given by its folder
SNAPSHOT = "/models/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a16976918f6564b8830bc894c89659"


def _two_models(kind: str, second: str = "llama") -> dict[str, Any]:
    result = []
    for pod, blocks, model, usage in (("a:8000", 1001, "mixtral", 0.0045), ("b:8000", 3001, second, 0.95)):
        told: list[tuple[str, dict[str, str], float]] = [
            ("cache_config_info", {"block_size": "16", "num_gpu_blocks": str(blocks)}, 1),
            ("kv_cache_usage_perc", {"model_name": model}, usage),
            ("num_requests_running", {"model_name": model}, 4),
        ]
        for name, labels, value in told:
            points: dict[str, Any] = {"value": [2, str(value)]} if kind == "vector" else {"values": [[1, str(value)], [2, str(value)]]}
            metric: dict[str, Any] = {"__name__": f"vllm:{name}", "instance": pod, "job": "vllm", "engine": "0", **labels}
            result.append({"metric": metric} | points)
    return {"status": "success", "data": {"resultType": kind, "result": result}}


TWO_MODELS = {
    NAMES: {"status": "success", "data": ["vllm:cache_config_info", "vllm:kv_cache_usage_perc", "vllm:num_requests_running"]},
    "/api/v1/query": _two_models("vector"),
    "/api/v1/query_range": _two_models("matrix"),
}


def test_a_selector_that_matches_two_models_gives_no_mean_usage_of_them(tmp_path: Path) -> None:
    with ScriptedServer(pages=TWO_MODELS) as server:
        both = snapshot(server.url)
        for name in ("usage", "used_blocks", "free_blocks"):
            missing = both.whole.value(name)
            assert isinstance(missing, Missing)
            assert "2 models (llama, mixtral)" in missing.reason
        assert both.whole.quantities["usable_blocks"].value == 4000, "pools add"
        assert [record.quantities["usage"].value for record in both.targets.values()] == [0.0045, 0.95], "and each has its own row"
        one = snapshot(server.url, model="llama")
        assert (list(one.targets), one.whole.quantities["usage"].value) == (["vllm/b:8000"], 0.95)
        with pytest.raises(CannotJudge, match="no target serves qwen"):
            snapshot(server.url, model="qwen")
        assert [target.name for target in window(server.url, "", 1, 2, 1, model="llama")] == ["vllm/b:8000"]
        with Prometheus(server.url) as source, pytest.raises(CannotJudge, match="matches 2 models: llama, mixtral"):
            past_run(source, tmp_path / "both", 1, 2, 1)
        with Prometheus(server.url, model="llama") as source:
            run = past_run(source, tmp_path / "one", 1, 2, 1)
        assert run.record.endpoints == ["vllm/b:8000"]


def test_a_model_is_found_by_a_name_that_is_too_long_to_be_shown(tmp_path: Path) -> None:
    pages = {**TWO_MODELS, "/api/v1/query": _two_models("vector", SNAPSHOT), "/api/v1/query_range": _two_models("matrix", SNAPSHOT)}
    with ScriptedServer(pages=pages) as server:
        assert list(snapshot(server.url, model=SNAPSHOT).targets) == ["vllm/b:8000"]
        assert [target.name for target in window(server.url, "", 1, 2, 1, model=SNAPSHOT)] == ["vllm/b:8000"]
        with Prometheus(server.url) as source, pytest.raises(CannotJudge, match="matches 2 models: /models/hub") as refused:
            past_run(source, tmp_path, 1, 2, 1)
    assert SNAPSHOT not in refused.value.what
