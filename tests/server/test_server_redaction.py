"""No key reaches a log, a record or a screen, and what is no key stays readable."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_kvcache.server.redaction import header_secrets, hide_known, is_secret_flag, is_secret_name, redact, redact_json, redact_words, remember


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --api-key GEHEIM --port 8000",
        "vllm serve m --api-key=GEHEIM",
        "--hf-token GEHEIM",
        "non-default args: {'model_tag': 'm', 'api_key': ['GEHEIM', 'GEHEIM-2'], 'port': 8000}",
        '{"api_key": "GEHEIM \\"with\\" quotes GEHEIM", "port": 8000}',
        "api_key=GEHEIM, port=8000",
        "OPENAI_API_KEY=GEHEIM python x.py",
        "HF_TOKEN='GEHEIM' AWS_SECRET_ACCESS_KEY=GEHEIM",
        "Authorization: Bearer GEHEIM-TOKEN",
        '"authorization": "Basic GEHEIM=="',
        "headers: {'x-api-key': 'GEHEIM'}",
        "Cookie: session=GEHEIM; other=GEHEIM",
        "using bearer GEHEIMGEHEIM today",
        "connecting to https://ann:GEHEIM@host:8443/path",
        "proxy http://GEHEIM@proxy:3128",
        "GET /v1/models?api_key=GEHEIM&x=1",
        "password: GEHEIM",
        "client_secret = GEHEIM",
        "access_token: 'GEHEIM'",
        "api_key=123456GEHEIM",
    ],
)
def test_a_key_is_hidden_by_its_place(text: str) -> None:
    hidden = redact(text)
    assert "GEHEIM" not in hidden
    assert "***" in hidden
    assert redact(hidden) == hidden


@pytest.mark.parametrize(
    "key",
    [
        "sk-abcdefgh12345678",
        "hf_abcdefghijklmnop",
        "nvapi-abcdefghijkl",
        "ghp_abcdefghijklmnopqrst",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJI.eyJzdWIiOiIx.abc-def",
    ],
)
def test_a_key_is_hidden_by_its_form(key: str) -> None:
    assert redact(f"loaded ({key}).") == "loaded (***)."


@pytest.mark.parametrize(
    "text",
    [
        "--max-num-batched-tokens 8192 --tokenizer meta/x --tokenizer-mode auto --ssl-keyfile /etc/x.pem",
        "TOKENIZERS_PARALLELISM=false MAX_TOKENS=5",
        "[2026-09-09 TP0] Decode batch, #running-req: 8, #token: 65536, token usage: 0.25, cuda graph: True",
        "KV Cache is allocated. #tokens: 262144, K size: 9.00 GB, V size: 9.00 GB",
        "llama_kv_cache: size =   96.00 MiB (  8192 cells,  24 layers,  4/1 seqs), K (f16):   48.00 MiB, V (f16):   48.00 MiB",
        "print_info: EOS token        = 2 '</s>'",
        "eos_token: </s> pad_token='<pad>' bos_token_id=1 first_token: x",
        "non-default args: {'api_key': None, 'hf_token': None, 'max_model_len': 4096}",
        "Maximum concurrency for 4,096 tokens per request: 512.00x",
        "cache key: abc, dictionary keys: [a, b]",
        "http://host:8000/v1 and mail to ann@example.org",
        "Avg prompt throughput: 0.4 tokens/s",
        "basic math and a digest of news",
    ],
)
def test_what_is_no_key_stays(text: str) -> None:
    assert redact(text) == text


def test_known_secrets_are_hidden_wherever_they_stand() -> None:
    assert redact("xgeheim-1y geheim-12", ["geheim-1", "geheim-12", "ab", ""]) == "x***y ***"
    assert redact("abc", ["ab"]) == "abc"


def test_words_of_a_command_lose_their_keys_one_by_one() -> None:
    words = [
        "prog",
        "--api-key",
        "a1",
        "b2",
        "--port",
        "1",
        "--key=k3",
        "X_TOKEN=t4",
        "--header",
        "Authorization: Bearer abcdefgh",
        "https://u:p@h",
        "--flag",
    ]
    shown, secrets = redact_words(words)
    assert shown == [
        "prog",
        "--api-key",
        "***",
        "***",
        "--port",
        "1",
        "--key=***",
        "X_TOKEN=***",
        "--header",
        "Authorization: ***",
        "https://***@h",
        "--flag",
    ]
    assert secrets == ["a1", "b2", "k3", "t4"]


def test_names_are_told_apart() -> None:
    assert all(is_secret_name(name) for name in ("HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "key", "Api-Key"))
    assert not any(is_secret_name(name) for name in ("TOKENIZERS_PARALLELISM", "KEYBOARD", "EOS_TOKEN", "MAX_TOKENS", "PATH", ""))
    assert all(is_secret_flag(flag) for flag in ("--api-key", "--key", "--hf-token", "--token", "-api-key", "--password"))
    assert not any(is_secret_flag(flag) for flag in ("--max-tokens", "--tokenizer", "--ssl-keyfile", "--port", "api-key", "--"))


PIECES = [
    "api_key",
    "token",
    "=",
    ": ",
    "'",
    '"',
    "[",
    "]",
    "Bearer ",
    "Authorization",
    "http://",
    "@",
    "***",
    "--",
    "\\",
    " ",
    "\n",
    "abcdefgh",
    "1,024",
    "sk-",
    "EOS_",
]


@given(st.text(max_size=100) | st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
@example("KEY='0\\")
@example("api_key='a'b")
def test_hiding_twice_is_hiding_once(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@given(st.text(alphabet=st.characters(codec="ascii", categories=("L", "N")), min_size=8, max_size=20).filter(lambda key: not key.isdigit()))
def test_no_key_after_a_flag_or_in_an_address_gets_through(key: str) -> None:
    secret = f"Z{key}Z"
    for text in (f"--api-key {secret}", f"api_key='{secret}'", f"MY_KEY={secret}", f"https://u:{secret}@h/", f"Authorization: Bearer {secret}"):
        assert secret not in redact(text)


def test_what_is_remembered_is_hidden_in_any_words_and_short_words_are_not() -> None:
    remember(["zebra-on-the-moon", "blue"])
    assert redact("no zebra-on-the-moon is blue") == hide_known("no zebra-on-the-moon is blue") == "no *** is blue"


def test_the_secrets_of_headers_are_known_by_the_names_of_the_headers() -> None:
    headers = {"Authorization": "Bearer zebra-on-the-moon", "X-Session": "s3ss10n-zebra", "X-Tenant": "blue-team"}
    assert set(header_secrets(headers)) >= {"zebra-on-the-moon", "s3ss10n-zebra"}
    assert "blue-team" not in header_secrets(headers)


def test_json_keeps_its_shape_and_loses_its_secrets() -> None:
    body = {"api_key": "zebra", "ignore_eos": True, "deep": [{"hf_token": "zebra", "n": 3}, "https://ann:zebra@host/x"], "max_tokens": 5}
    assert redact_json(body) == {
        "api_key": "***", "ignore_eos": True, "deep": [{"hf_token": "***", "n": 3}, "https://***@host/x"], "max_tokens": 5,
    }  # fmt: skip
