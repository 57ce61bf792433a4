"""Where the telemetry of each engine lies, and what must not be read without leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.errors import UnknownEngine, UsageError
from pytest_kvcache.observe.scrape import Reader, detect_endpoint, fetch, take_snapshot
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.server.address import Endpoint, parse_endpoint
from pytest_kvcache.settings import Settings

DATA = Path(__file__).parent.parent / "data" / "exposition"
TRTLLM = DIALECTS["trtllm_serve"]


def text(name: str) -> str:
    return (DATA / name).read_text()


def page(name: str) -> tuple[int, str, str]:
    return (200, "text/plain; version=0.0.4", text(name))


def trtllm(prometheus: bool) -> ScriptedServer:
    pages = {"/prometheus/metrics": page("trtllm_serve/1.x.prom")} if prometheus else {}
    return ScriptedServer(metrics=text("trtllm_serve/1.x-metrics.json"), pages=pages, owned_by="tensorrt_llm")


def number(value: Reading | Missing) -> float:
    assert isinstance(value, Reading), value
    return value.number()


def test_trtllm_serve_is_read_where_reading_takes_nothing_away() -> None:
    with trtllm(prometheus=True) as server:
        endpoint = Endpoint(server.url)
        assert detect_endpoint(endpoint) is TRTLLM
        record = take_snapshot(endpoint, TRTLLM)
        assert "GET /metrics" not in server.paths()
    assert number(record.value("used_blocks")) == 2055


def test_json_that_is_gone_once_read_is_left_alone_unless_the_user_allows_it() -> None:
    with trtllm(prometheus=False) as server:
        endpoint = Endpoint(server.url)
        assert detect_endpoint(endpoint) is TRTLLM
        record = take_snapshot(endpoint, TRTLLM)
        assert "GET /metrics" not in server.paths()
        refused = record.value("used_blocks")
        assert isinstance(refused, Missing)
        assert "--kv-allow-destructive-reads" in refused.reason
        allowed = parse_endpoint(server.url, Settings(allow_destructive_reads=True))
        assert detect_endpoint(allowed) is TRTLLM
        assert number(take_snapshot(allowed, TRTLLM).value("used_blocks")) == 2055


def test_each_sample_of_json_that_moves_is_read_anew() -> None:
    with trtllm(prometheus=False) as server:
        with Reader(Endpoint(server.url, allow_destructive_reads=True), TRTLLM) as reader:
            for _ in range(3):
                reader.look(once=False)
        assert server.paths().count("GET /metrics") == 3


def test_nim_is_found_under_its_own_path_and_read_there_from_then_on() -> None:
    with ScriptedServer(pages={"/v1/metrics": page("nim/1.x.prom")}) as server:
        endpoint = Endpoint(server.url)
        assert detect_endpoint(endpoint).name == "nim"
        server.seen.clear()
        with Reader(endpoint, DIALECTS["nim"]) as reader:
            for _ in range(3):
                state = reader.look(once=False)
        assert state.metrics is not None
        asked = server.paths()
    assert (asked.count("GET /v1/metrics"), asked.count("GET /metrics")) == (3, 0)


def test_the_path_that_answered_is_asked_first_the_next_time() -> None:
    with ScriptedServer(metrics=text("nim/1.x.prom")) as server:
        with Reader(Endpoint(server.url), DIALECTS["nim"]) as reader:
            for _ in range(3):
                reader.look(once=False)
        asked = server.paths()
    assert (asked.count("GET /v1/metrics"), asked.count("GET /metrics")) == (1, 3)


def test_sglang_without_metrics_is_known_and_read_by_its_bodies() -> None:
    names = {"/v1/loads": "0.5.20-v1_loads.json", "/server_info": "0.5.20-server_info.json", "/v1/models": "0.5.20-v1_models.json"}
    pages: dict[str, Any] = {path: json.loads((DATA / "sglang" / name).read_text()) for path, name in names.items()}
    with ScriptedServer(pages=pages) as server:
        dialect = detect_endpoint(Endpoint(server.url))
        record = take_snapshot(Endpoint(server.url), dialect)
        with Reader(Endpoint(server.url), dialect) as reader:
            reader.look()
            server.seen.clear()
            reader.look(once=False)
        moved = server.paths()
    assert (record.engine, record.version) == ("sglang", "0.5.20")
    assert (number(record.value("used_tokens")), number(record.value("pool_tokens"))) == (65536, 262144)
    assert "GET /v1/loads" in moved
    assert "GET /server_info" not in moved


def test_bodies_that_repeat_the_metrics_are_not_asked_beside_them() -> None:
    with ScriptedServer(metrics=text("sglang/0.5.20.prom")) as server:
        fetch(Endpoint(server.url), DIALECTS["sglang"])
        assert "GET /v1/loads" not in server.paths()


def test_an_unknown_server_whose_metrics_are_a_list_is_not_taken_for_trtllm() -> None:
    with ScriptedServer(metrics='[{"a": 1}]') as server, pytest.raises(UnknownEngine, match="JSON"):
        detect_endpoint(Endpoint(server.url))


def test_a_users_dialect_is_asked_before_the_one_that_knows_the_same_series() -> None:
    import dataclasses

    fork = dataclasses.replace(DIALECTS["vllm"], name="fork", title="Our fork")
    with ScriptedServer(metrics="vllm:kv_cache_usage_perc 0.5\n") as server:
        assert detect_endpoint(Endpoint(server.url), extra=[fork]) is fork
        assert detect_endpoint(Endpoint(server.url)).name == "vllm"


MODULE = """
import dataclasses
from pytest_kvcache.engines import DIALECTS
OURS = dataclasses.replace(DIALECTS["vllm"], name="ours", title="Ours", series_prefix="ours")
OTHER = 3
"""


def test_a_dialect_is_imported_by_name_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_kvcache.engines import imported

    (tmp_path / "kv_engine_of_a_user.py").write_text(MODULE)
    (tmp_path / "kv_engine_that_breaks.py").write_text("raise RuntimeError('boom \\x1b[2J')\n")
    monkeypatch.chdir(tmp_path)
    assert imported("kv_engine_of_a_user:OURS").name == "ours"
    for spec, said in (
        ("kv_engine_of_a_user:OTHER", "is of type int and no Dialect"),
        ("kv_engine_of_a_user:NONE", "is not there"),
        ("kv_engine_that_breaks:X", "RuntimeError: boom"),
        ("no_such_module_here:X", "cannot be imported"),
        ("just_a_module", "is not module:NAME"),
        ("../evil:X", "is not module:NAME"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            imported(spec)
        assert caught.value.what.isprintable()


def test_a_session_takes_the_dialect_that_the_option_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_kvcache.session import Session

    (tmp_path / "kv_engine_for_a_session.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    session = Session(Settings(engine_from="kv_engine_for_a_session:OURS", reports=str(tmp_path / "reports")))
    assert [dialect.name for dialect in session._servers._dialects] == ["ours"]
    with pytest.raises(UsageError, match="cannot be imported"):
        Session(Settings(engine_from="no_such_module_here:OURS", reports=str(tmp_path / "reports")))


def test_asking_a_server_that_hangs_which_engine_it_is_costs_two_timeouts_and_not_one_a_page() -> None:
    from pytest_kvcache.errors import EndpointUnreachable

    with ScriptedServer(faults=["hang"]) as server:
        with pytest.raises(EndpointUnreachable):
            detect_endpoint(Endpoint(server.url), timeout_s=0.3)
        asked = server.paths()
    assert len(asked) <= 2, asked
