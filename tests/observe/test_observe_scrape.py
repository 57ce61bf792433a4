"""One look at a server: what each way of answering means, in words that a user can act on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.errors import EndpointUnreachable, UnknownEngine, UsageError
from pytest_kvcache.observe.scrape import Reader, detect_endpoint, fetch, take_snapshot, take_snapshot_raw
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.server.address import Endpoint, parse_endpoint
from pytest_kvcache.server.openai import complete
from pytest_kvcache.server.transport import ask
from pytest_kvcache.settings import Settings

VLLM, LLAMA = DIALECTS["vllm"], DIALECTS["llamacpp"]
DATA = Path(__file__).parent.parent / "data"
EXPOSITION = DATA / "exposition" / "vllm"


def reason(endpoint: Endpoint, timeout_s: float = 2.0) -> str:
    """Return why usage is missing."""
    value = take_snapshot(endpoint, VLLM, timeout_s=timeout_s).value("usage")
    assert isinstance(value, Missing)
    return value.reason


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_real_exposition_becomes_a_snapshot_and_its_text_is_kept() -> None:
    text = (EXPOSITION / "0.32.0-cpu.prom").read_text()
    with ScriptedServer(metrics=text, owned_by="vllm", max_model_len=4096, pages={"/version": {"version": "0.32.0"}}) as server:
        began = time.time()
        record, raw = take_snapshot_raw(Endpoint(server.url))
    assert (record.engine, record.version, record.endpoint) == ("vllm", "0.32.0", server.url)
    assert raw == text
    assert record.value("usable_blocks") == Reading(16383, "blocks", "vllm:cache_config_info{num_gpu_blocks} - 1 (null block)", record.wall_s)
    assert record.value("max_model_len") == Reading(4096, "tokens", "/v1/models max_model_len", record.wall_s)
    assert began <= record.wall_s <= time.time()
    assert record.quantities.keys() == VLLM.reads.keys()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("metrics-empty", "/metrics answers HTTP 200 with an empty body: nothing is told, which is not zero"),
        ("metrics-html", "/metrics answers with a web page (Welcome to the portal): a login page or a gateway stands in the way"),
        ("metrics-status=404", "/metrics answers HTTP 404: there is no such page"),
        (
            "metrics-status=401",
            "/metrics answers HTTP 401: it wants a key, whose environment variable --kv-metrics-api-key-env names: metrics say 401",
        ),
        (
            "metrics-status=403",
            "/metrics answers HTTP 403: it wants a key, whose environment variable --kv-metrics-api-key-env names: metrics say 403",
        ),
        ("metrics-status=501", "/metrics answers HTTP 501: metrics say 501"),
        ("metrics-status=503", "/metrics answers HTTP 503: metrics say 503"),
        ("metrics-status=302", "/metrics answers HTTP 302: it redirects, and redirects are not followed"),
    ],
)
def test_each_way_of_telling_nothing_has_its_own_reason(fault: str, said: str) -> None:
    with ScriptedServer(faults=[fault]) as server:
        assert reason(Endpoint(server.url)) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"status": "ok"}', "/metrics answers with JSON and not with the text format: another engine, or another page of it"),
        ("[]", "/metrics answers with JSON and not with the text format: another engine, or another page of it"),
        ("# HELP only comments\n# TYPE only gauge\n", "/metrics answers with text that holds no sample"),
        ("  \n \n", "/metrics answers HTTP 200 with an empty body: nothing is told, which is not zero"),
        ("process_cpu_seconds_total 5\n", "vllm:kv_cache_usage_perc is not in /metrics"),
        ("vllm:kv_cache_usage_perc\n", "/metrics answers with text that holds no sample"),
    ],
)
def test_a_body_without_the_gauge_is_missing_and_not_zero(text: str, said: str) -> None:
    with ScriptedServer(metrics=text) as server:
        assert reason(Endpoint(server.url)) == said


def test_an_endless_body_is_cut_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_kvcache.observe.scrape.MOST_METRICS_BYTES", 2 << 20)
    with ScriptedServer(metrics=lambda server: "a 1\n" * 1_000_000) as server:
        assert reason(Endpoint(server.url)) == "/metrics is longer than 2 MiB and was not read"


def test_a_server_that_hangs_costs_the_timeout_and_no_more() -> None:
    over = threading.Event()

    def slow(server: Any) -> str:
        over.wait(30)
        return ""

    with ScriptedServer(metrics=slow) as server:
        began = time.monotonic()
        assert reason(Endpoint(server.url), timeout_s=1.0) == "/metrics: no complete answer within 1 s"
        assert time.monotonic() - began < 15
        over.set()


def test_nobody_there_is_said_with_the_address() -> None:
    endpoint = Endpoint(f"http://127.0.0.1:{free_port()}")
    for dialect in (None, VLLM, LLAMA):
        with pytest.raises(EndpointUnreachable, match="nobody answers") as caught:
            take_snapshot(endpoint, dialect)
        assert caught.value.where.startswith(endpoint.root)
    with pytest.raises(EndpointUnreachable):
        detect_endpoint(endpoint)


def test_an_unknown_engine_is_refused_with_what_was_seen() -> None:
    with ScriptedServer(metrics="acme_queue_depth 4\n", owned_by="acme") as server, pytest.raises(UnknownEngine) as caught:
        take_snapshot(Endpoint(server.url))
    assert "1 series: acme_queue_depth; /v1/models says owned_by acme" in caught.value.what


def test_a_named_engine_is_taken_without_asking_and_a_wrong_name_is_refused() -> None:
    endpoint = Endpoint(f"http://127.0.0.1:{free_port()}")
    assert detect_endpoint(endpoint, "llamacpp") is LLAMA
    with pytest.raises(UsageError, match="no engine is called"):
        detect_endpoint(endpoint, "nonesuch")


def test_a_dialect_of_the_user_is_found_by_its_series_and_by_its_name() -> None:
    import dataclasses

    acme = dataclasses.replace(VLLM, name="acme", title="Acme", series_prefix="acme", owned_by="acme")
    with ScriptedServer(metrics="acme:queue_depth 4\n") as server:
        assert detect_endpoint(Endpoint(server.url), "auto", [acme]) is acme
        assert detect_endpoint(Endpoint(server.url), "acme", [acme]) is acme


def llama_pages(kind: str) -> dict[str, Any]:
    import json

    folder = DATA / "llamacpp"
    suffix = "-unified" if kind == "unified" else ""
    return {
        "/slots": json.loads((folder / f"slots-busy-{kind}.json").read_text()),
        "/props": json.loads((folder / f"props{suffix}.json").read_text()),
        "/v1/models": json.loads((folder / f"models{suffix}.json").read_text()),
    }


def test_llama_cpp_without_the_metrics_flag_is_known_and_read_by_its_slots(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes((DATA / "llamacpp" / "startup-f16-split.log").read_bytes())
    with ScriptedServer(faults=["metrics-status=501"], pages=llama_pages("split")) as server:
        record, raw = take_snapshot_raw(Endpoint(server.url), None, log)
    assert (record.engine, raw) == ("llamacpp", "")
    used, pool, waiting = record.value("used_tokens"), record.value("pool_tokens"), record.value("waiting")
    assert isinstance(used, Reading)
    assert isinstance(pool, Reading)
    assert (used.value, pool.value) == (4412, 16384)
    assert pool.source.startswith("start-up log: ")
    assert isinstance(waiting, Missing)
    assert "HTTP 501" in waiting.reason


def test_a_log_that_is_gone_is_no_log() -> None:
    with ScriptedServer(pages=llama_pages("unified"), metrics=None) as server:
        pool = take_snapshot(Endpoint(server.url), log=Path("/nonexistent/server.log")).value("pool_tokens")
    assert isinstance(pool, Missing)
    assert "only the start-up log tells" in pool.reason


def test_bodies_that_do_not_move_are_read_once_and_again_where_they_failed() -> None:
    with ScriptedServer(pages=llama_pages("unified"), metrics="llamacpp:requests_deferred 0\n") as server:
        with Reader(Endpoint(server.url), LLAMA) as reader:
            props = server.script.pages.pop("/props")
            for _ in range(3):
                reader.look(once=False)
            server.script.pages["/props"] = props
            for _ in range(3):
                state = reader.look(once=False)
        asked = server.paths()
    assert asked.count("GET /metrics") == 6
    assert asked.count("GET /slots") == 6
    assert asked.count("GET /v1/models") == 1
    assert asked.count("GET /props") == 4
    assert not isinstance(state.json["/props"], Missing)


def test_a_kept_connection_that_the_server_closed_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def closing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise EndpointUnreachable("the connection broke")
        return ask(*args, **kwargs)

    monkeypatch.setattr("pytest_kvcache.observe.scrape.ask", closing)
    with ScriptedServer(metrics="vllm:kv_cache_usage_perc 0.5\n") as server, Reader(Endpoint(server.url), VLLM) as reader:
        reader.look(once=False)
        assert reader.look(once=False).metrics is not None


def test_the_api_key_goes_to_the_api_and_not_to_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", "sk-secret")
    monkeypatch.setenv("METRICS_KEY", "metrics-secret")
    with ScriptedServer(metrics="vllm:kv_cache_usage_perc 0.5\n", api_key="sk-secret") as server:
        endpoint = Endpoint(server.url, api_key_env="OUR_KEY")
        fetch(endpoint)
        sent = {seen.path: seen.headers.get("Authorization") for seen in server.seen}
        assert sent["/metrics"] is None
        assert sent["/v1/models"] == "Bearer sk-secret"
        server.seen.clear()
        fetch(Endpoint(server.url, api_key_env="OUR_KEY", metrics_api_key_env="METRICS_KEY"))
        assert server.seen[0].headers.get("Authorization") == "Bearer metrics-secret"


def test_a_key_that_the_server_repeats_is_in_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRICS_KEY", "zebra-on-the-moon")
    text = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n# seen with zebra-on-the-moon\n'
    with ScriptedServer(metrics=text) as server:
        endpoint = parse_endpoint(server.url, Settings(metrics_api_key_env="METRICS_KEY"))
        record, raw = take_snapshot_raw(endpoint, DIALECTS["vllm"])
        assert raw == text.replace("zebra-on-the-moon", "***")
        server.script.metrics = None
        server.script.faults = ["token-status=401", "token-error=zebra-on-the-moon is no key"]
        assert "*** is no key" in complete(endpoint, "Hello", 1).error
    assert "zebra" not in repr(record)


def test_a_key_that_is_gone_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="NOT_THERE"):
        take_snapshot(Endpoint("http://127.0.0.1:9", metrics_api_key_env="NOT_THERE"))


def test_json_that_is_none_has_a_reason() -> None:
    pages = {"/v1/models": (200, "text/html", "<html><title>Sign in</title></html>"), "/version": (200, "application/json", "{broken")}
    with ScriptedServer(metrics="vllm:kv_cache_usage_perc 0.5\n", pages=pages) as server:
        state = fetch(Endpoint(server.url))
    assert state.json["/v1/models"] == Missing("/v1/models answers with a web page")
    assert state.json["/version"] == Missing("/version answers with text that is not JSON")
