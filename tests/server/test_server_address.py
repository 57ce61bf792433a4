"""An address is read as its writer meant it, refused where it cannot be meant, and never shows a key."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback_tls import Tls

from pytest_kvcache.errors import UsageError
from pytest_kvcache.server.endpoint import Endpoint, parse_endpoint
from pytest_kvcache.settings import Settings


def refused(url: str = "http://h:8000", **settings: Any) -> str:
    with pytest.raises(UsageError) as caught:
        parse_endpoint(url, Settings(**settings))
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("http://host:8000//v1//", "http://host:8000"),
        ("  http://host:8000/v1\n", "http://host:8000"),
        ("https://host/prefix/v1/", "https://host/prefix"),
        ("https://host/a/b", "https://host/a/b"),
        ("https://host/v1/v1", "https://host/v1"),
        ("HTTP://Host.Example.ORG:80/v1", "http://host.example.org:80"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://[2001:DB8:0::1]/x/", "http://[2001:db8::1]/x"),
        ("http://127.0.0.1:65535", "http://127.0.0.1:65535"),
        ("http://bücher.example:1", "http://xn--bcher-kva.example:1"),
        ("http://my_service.internal.:8000", "http://my_service.internal.:8000"),
    ],
)
def test_every_way_to_write_an_address_gives_its_root(url: str, root: str) -> None:
    endpoint = parse_endpoint(url, Settings())
    assert endpoint.root == root == endpoint.shown
    assert endpoint.url("/v1/models") == f"{root}/v1/models"
    assert endpoint.url("/metrics") == f"{root}/metrics"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("host:8000", "write http://host:8000"),
        ("localhost", "write http://localhost"),
        ("//host:8000", "write http://host:8000"),
        ("user:geheim@host:8000", "write http://***@host:8000"),
        ("file:///etc/passwd", "only http and https"),
        ("ftp://host", "only http and https"),
        ("http://", "names no host"),
        ("http:", "names no host"),
        ("http:///v1", "names no host"),
        ("http://:8000", "names no host"),
        ("http://host:0", "port 0"),
        ("http://host:99999", "up to 65535"),
        ("http://host:eighty", "cannot be read"),
        ("http://[::1", "in brackets"),
        ("http://[::zz]:80", "IPv6"),
        ("http://[1.2.3.4]:80", "IPv6"),
        ("http://ho st:80", "spaces"),
        ("http://host:80\r\nX: y", "control characters"),
        ("http://host\\@evil:80", "backslash"),
        ("http://host:80/v1?key=geheim", "query"),
        ("http://host:80/#top", "fragment"),
        ("http://-host-:80", "host name"),
        ("http://host:80/v1/chat/completions", "write http://host:80"),
        ("http://host:80/llm/v1/models", "write http://host:80/llm"),
        ("http://host:80/metrics", "write http://host:80"),
    ],
)
def test_an_address_that_cannot_be_meant_is_a_usage_error_with_the_right_hint(url: str, words: str) -> None:
    text = refused(url)
    assert words in text
    assert "geheim" not in text


def test_user_info_becomes_a_basic_header_and_is_never_shown() -> None:
    endpoint = parse_endpoint("https://ann:p%40ss%2Fgeheim@host:8443/v1", Settings())
    expected = "Basic " + base64.b64encode(b"ann:p@ss/geheim").decode()
    assert endpoint.api_headers() == {"Authorization": expected}
    # It guards the address itself, so whoever reads the telemetry there needs it too.
    assert endpoint.metrics_headers() == {"Authorization": expected}
    assert endpoint.root == "https://host:8443"
    for secret in ("geheim", "ann", expected.split()[1]):
        assert secret not in repr(endpoint)
        assert secret not in endpoint.shown


def test_a_password_that_breaks_the_url_is_not_shown_by_the_error() -> None:
    for url in (
        "http://ann:ge/heim@host:80",
        "http://ann:geheim@host:port",
        "http://ann:ge#heim@host",
        "ftp://ann:geheim@host",
        "http://ann:geheim@",
    ):
        text = refused(url)
        assert "heim" not in text, text
        assert "ann" not in text.replace("cannot", ""), text


def test_the_key_comes_from_the_named_variable_and_goes_to_the_api_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "geheim-1\n")
    monkeypatch.setenv("METRICS_KEY", "geheim-2")
    endpoint = parse_endpoint("http://host:8000", Settings(api_key_env="MY_KEY"))
    assert endpoint.api_headers() == {"Authorization": "Bearer geheim-1"}
    assert endpoint.metrics_headers() == {}
    assert "geheim" not in repr(endpoint)
    both = parse_endpoint("http://host:8000", Settings(api_key_env="MY_KEY", metrics_api_key_env="METRICS_KEY"))
    assert both.metrics_headers() == {"Authorization": "Bearer geheim-2"}
    with both.client(metrics=True) as client:
        assert client.headers["Authorization"] == "Bearer geheim-2"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UsageError, match="MY_KEY is not set"):
        endpoint.api_headers()


def test_a_missing_empty_or_impossible_key_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY_KEY", "  ")
    monkeypatch.setenv("BROKEN_KEY", "geheim\r\nHost: evil")
    assert "--kv-api-key-env: the environment variable NOT_SET_KEY is not set" in refused(api_key_env="NOT_SET_KEY")
    assert "METRICS_NOT_SET is not set" in refused(metrics_api_key_env="METRICS_NOT_SET")
    assert "EMPTY_KEY is empty" in refused(api_key_env="EMPTY_KEY")
    assert "geheim" not in refused(api_key_env="BROKEN_KEY")


def test_a_key_given_in_place_of_a_variable_name_is_not_shown() -> None:
    for key in ("sk-geheim-1234567890", "geheim" * 20):
        text = refused(api_key_env=key)
        assert "geheim" not in text
        assert "name of an environment variable" in text


def test_headers_are_parsed_and_refused_without_showing_their_value() -> None:
    endpoint = parse_endpoint("http://h", Settings(header=("X-Tenant: blue", "X-Time:12:30", "Host: other.example")))
    assert endpoint.api_headers() == {"X-Tenant": "blue", "X-Time": "12:30", "Host": "other.example"}
    assert endpoint.metrics_headers() == {}
    for line in (
        "geheim",
        ": geheim",
        "X Y: geheim",
        "X: geh\r\nY: eim",
        "X: geheim\0",
        "X: gehéim",
        "Content-Length: 5",
        "transfer-encoding: chunked",
    ):
        assert "geheim" not in refused(header=(line,)), line
    assert "given twice" in refused(header=("X-A: 1", "x-a: 2"))


def test_authorization_set_in_two_ways_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "geheim-key")
    assert "more than one way" in refused("http://u:geheim@h", api_key_env="MY_KEY")
    assert "more than one way" in refused(header=("authorization: Bearer geheim",), api_key_env="MY_KEY")
    assert parse_endpoint("http://h", Settings(header=("Authorization: Token x",))).api_headers() == {"Authorization": "Token x"}


def test_the_extra_body_is_a_json_object_that_leaves_our_fields_alone() -> None:
    endpoint = parse_endpoint("http://h", Settings(extra_body='{"ignore_eos": true, "n": 1}'))
    assert endpoint.extra_body == {"ignore_eos": True, "n": 1}
    for text in ("[1]", "3", "{", "null", '{"a": NaN}', "[" * 100_000, '{"stream": false}', '{"prompt": "x"}', '{"messages": []}'):
        assert "--kv-extra-body" in refused(extra_body=text)
    assert "--kv-model" in refused(extra_body='{"model": "x"}')


def test_the_ca_bundle_must_exist_and_hold_certificates(tmp_path: Path, tls: Tls) -> None:
    assert "no such file" in refused(ca=str(tmp_path / "none.pem"))
    assert "no such file" in refused(ca=str(tmp_path))
    broken = tmp_path / "broken.pem"
    broken.write_text("not a certificate")
    assert "cannot be read" in refused(ca=str(broken))
    assert parse_endpoint("https://h", Settings(ca=str(tls.ca))).ca == str(tls.ca)


def test_a_proxy_is_taken_from_the_option_alone_and_its_password_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://environment.example:3128")
    with parse_endpoint("http://h", Settings()).client() as client:
        assert not client.trust_env
        assert not client.follow_redirects
    endpoint = parse_endpoint("http://h", Settings(proxy="http://u:geheim@proxy.example:3128"))
    assert endpoint.proxy == "http://u:geheim@proxy.example:3128"
    assert "geheim" not in repr(endpoint)
    for proxy in ("proxy:3128", "socks9://p:1", "http://u:geheim@", "http://u:geheim@h:x"):
        text = refused(proxy=proxy)
        assert "--kv-proxy" in text
        assert "geheim" not in text


URLISH = st.text(alphabet="htps:/@[]%?#.v1aé \\-_~\x00\n0123456789", max_size=60)


@given(st.one_of(URLISH, URLISH.map("http://".__add__), st.text(max_size=40).map("https://".__add__)))
def test_any_text_is_an_endpoint_or_a_usage_error(url: str) -> None:
    try:
        endpoint = parse_endpoint(url, Settings())
    except UsageError as error:
        assert str(error)
        return
    assert endpoint.root.startswith(("http://", "https://"))
    assert not endpoint.root.endswith("/")
    assert "@" not in endpoint.root.split("/")[2]
    assert endpoint.root.isprintable()


@given(st.text(alphabet=st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=20), st.integers(1, 65535))
def test_root_of_a_root_is_itself(host: str, port: int) -> None:
    first = parse_endpoint(f"http://{host}:{port}/v1/", Settings())
    assert parse_endpoint(first.root, Settings()) == first


def test_an_endpoint_is_a_value() -> None:
    assert Endpoint("http://h:1") == Endpoint("http://h:1")
    assert Endpoint("http://h:1").api == "completions"
