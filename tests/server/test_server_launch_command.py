"""A launch text means what its writer would expect of a shell, without one, and its keys are never shown."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.errors import UsageError
from pytest_kvcache.server.launch import parse_command


def test_a_command_is_split_and_its_port_and_environment_are_filled_in() -> None:
    spec = parse_command("A=1 MY_URL='http://x:{port}' prog 'two words' --at {port} --json '{\"p\": {port}, \"q\": {}}' $HOME ~ *.py", 8123)
    assert spec.command == ("prog", "two words", "--at", "8123", "--json", '{"p": 8123, "q": {}}', "$HOME", "~", "*.py")
    assert spec.env == {"A": "1", "MY_URL": "http://x:8123"}
    assert (spec.port, spec.host, spec.engine, spec.is_port_fixed) == (8123, "127.0.0.1", "", False)


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("vllm serve m --port 8001", 8001),
        ("vllm serve m --port=8001", 8001),
        ("serve -p 8001", 8001),
        ("serve --port 1 --port 8001", 8001),
        ("docker run -p 8001:8000 image", 8001),
        ("docker run --publish=127.0.0.1:8001:8000/tcp image", 8001),
    ],
)
def test_a_command_may_name_its_port_itself(text: str, port: int) -> None:
    spec = parse_command(text)
    assert (spec.port, spec.is_port_fixed) == (port, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve m", "write {port}"),
        ("vllm serve m --port", "write {port}"),
        ("vllm serve m --port eighty", "write {port}"),
        ("vllm serve m --port 0", "write {port}"),
        ("vllm serve m --port 70000", "write {port}"),
        ("vllm serve 'm --port {port}", "cannot be split into words"),
        ("vllm serve m --port {port} \\", "cannot be split into words"),
        ("", "names no program"),
        ("   ", "names no program"),
        ("A=1 B={port}", "names no program"),
        ("prog {port} \0", "NUL"),
    ],
)
def test_a_text_that_cannot_be_meant_is_a_usage_error(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("::1", "[::1]"),
        ("/run/x.sock", "127.0.0.1"),
    ],
)
def test_the_server_is_looked_for_where_it_was_told_to_listen(host: str, reached: str) -> None:
    assert parse_command(f"serve --host {host} --port {{port}}").host == reached


def test_keys_in_a_command_are_hidden_wherever_it_is_shown() -> None:
    spec = parse_command(
        "HF_TOKEN=geheim1 TOKENIZERS_PARALLELISM=false vllm serve m --api-key geheim2 geheim3 --port {port} --x-token=geheim4 sk-geheim567890", 8000
    )
    assert "geheim" not in repr(spec)
    assert spec.shown == (
        "HF_TOKEN=***", "TOKENIZERS_PARALLELISM=false", "vllm", "serve", "m", "--api-key", "***", "***", "--port", "8000", "--x-token=***", "***",
    )  # fmt: skip
    assert set(spec.secrets) == {"geheim1", "geheim2", "geheim3", "geheim4"}
    assert spec.command[3:6] == ("--api-key", "geheim2", "geheim3")
    for text in ("prog --api-key geheim", "TOKEN=geheim", "prog 'x --api-key=geheim {port}"):
        with pytest.raises(UsageError) as caught:
            parse_command(text)
        assert "geheim" not in str(caught.value)


@given(st.text(alphabet="abc ='\"\\{}port0189-$\n\x00", max_size=60))
def test_any_text_is_a_command_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        spec = parse_command(text, 8000)
        assert spec.command
        assert 0 < spec.port < 65536
        assert not any("{port}" in word for word in spec.command)
