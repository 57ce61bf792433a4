"""What a record, a report or a terminal shows of options: never a key."""

from __future__ import annotations

import pytest

from pytest_kvcache.server.shown import shown_argv, shown_command, shown_settings
from pytest_kvcache.settings import Settings

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endpoint", (f"http://user:{SECRET}@host:1",)),
        ("header", (f"X-Team: {SECRET}",)),
        ("launch", f"HF_TOKEN={SECRET} vllm serve M --api-key {SECRET} --port {{port}}"),
        ("before", f"vllm serve M --api-key={SECRET} --port {{port}}"),
        ("proxy", f"http://user:{SECRET}@proxy:1"),
        ("extra_body", f'{{"api_key": "{SECRET}"}}'),
    ],
)
def test_a_record_of_the_options_holds_no_secret(name: str, value: object) -> None:
    settings = Settings(**{name: value})  # type: ignore[arg-type]
    assert SECRET not in str(shown_settings(settings))


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-header", f"Authorization: Bearer {SECRET}", "-m", "capacity"],
        [f"--kv-header=X-Any: {SECRET}"],
        [f"--kv-launch=vllm serve M --api-key {SECRET}"],
        ["--launch", f"vllm serve M --api-key {SECRET}"],
        [f"--kv-endpoint=https://{SECRET}@host"],
    ],
)
def test_the_command_to_repeat_a_session_holds_no_secret(words: list[str]) -> None:
    shown = shown_argv("pytest", words)
    assert SECRET not in shown
    assert shown.startswith("pytest ")


def test_a_command_without_secrets_is_shown_as_it_was_written() -> None:
    assert shown_command('vllm serve "my model"  --port {port}') == 'vllm serve "my model"  --port {port}'
    assert shown_command("broken 'quote") == "broken 'quote"
