"""Targets and options: what is sent, what is never shown, and what the command line offers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_kvcache.errors import UsageError
from pytest_kvcache.load import flags
from pytest_kvcache.load.contract import ProfileOption
from pytest_kvcache.load.runner import command, environment, profile_path, profiles
from pytest_kvcache.load.target import Handed, Target, from_endpoint, handed_over, named_by_hand
from pytest_kvcache.server.address import Endpoint, parse_endpoint
from pytest_kvcache.settings import Settings

OPTIONS = (ProfileOption("margin", 8, "tokens left 50 % free"),)


def body(target: Target, **more: Any) -> Any:
    return json.loads(target.body_head(32, **more) + b'"x"' + target.body_tail)


def test_a_request_asks_for_a_stream_with_usage_and_all_its_tokens() -> None:
    sent = body(Target("http://h", model="m"))
    assert sent == {
        "model": "m", "prompt": "x", "max_tokens": 32, "stream": True, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    chat = body(Target("http://h", model="m", api="chat"), ignore_eos=False, usage=False)
    assert chat == {"model": "m", "messages": "x", "max_tokens": 32, "stream": True, "temperature": 0}


def test_the_extra_body_wins_also_over_the_number_of_tokens() -> None:
    target = Target("http://h", extra_body={"temperature": 1, "max_tokens": 5, "ignore_eos": False})
    assert (body(target)["temperature"], body(target)["ignore_eos"], target.output_tokens(32)) == (1, False, 5)
    assert Target("http://h").output_tokens(32) == 32


def test_a_prefix_of_the_address_is_kept() -> None:
    target = named_by_hand(["http://h:8000/llm/v1/"], {"api": "chat"})[0]
    assert (target.root, target.prefix, target.path) == ("http://h:8000/llm", "/llm", "/llm/v1/chat/completions")
    assert named_by_hand(["h:8000"], {})[0].root == "http://h:8000"


def test_the_key_is_read_from_the_environment_and_is_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    target = from_endpoint(parse_endpoint("http://h", Settings(api_key_env="MY_KEY")))
    assert target.request_headers()["Authorization"] == "Bearer sk-secret"
    assert b"sk-secret" not in msgspec.json.encode(target)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UsageError, match="MY_KEY"):
        target.request_headers()


def test_user_info_and_headers_travel_in_the_environment_and_not_in_argv(tmp_path: Path) -> None:
    endpoint = parse_endpoint("http://ann:geheim@h:1/x", Settings(header=("X-Team: secret",)))
    target = from_endpoint(endpoint)
    assert target.request_headers()["Authorization"].startswith("Basic ")
    assert target.request_headers()["X-Team"] == "secret"
    words = command(profile_path("normal"), tmp_path / "requests.jsonl", target.root)
    assert not [word for word in words if "geheim" in word or "secret" in word]
    handed = handed_over(environment(Handed([target], 7))["PYTEST_KVCACHE_LOAD_JSON"])
    assert handed == Handed([target], 7)
    with pytest.raises(UsageError):
        handed_over("{")


def test_locust_variables_do_not_reach_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCUST_USERS", "5")
    monkeypatch.setenv("PATH_OF_MINE", "kept")
    env = environment(Handed([], 1))
    assert "LOCUST_USERS" not in env
    assert env["PATH_OF_MINE"] == "kept"


def test_what_the_load_sets_itself_is_refused_in_the_extra_body() -> None:
    with pytest.raises(UsageError, match="stream_options"):
        from_endpoint(Endpoint("http://h", extra_body={"stream_options": {}}))
    for addresses in ([], ["ftp://h"], ["http://"]):
        with pytest.raises(UsageError):
            named_by_hand(addresses, {})


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    for name in ("web-host", "master-bind-host", "stop-timeout", "run-time", "spawn-rate"):
        made.add_argument("--" + name)
    made.add_argument("-u", dest="num_users")
    flags.declare(made, OPTIONS, {"users": 3})
    return made


def test_every_option_has_help_and_a_sane_default() -> None:
    made = parser()
    ours = [action for action in made._actions if action.dest.startswith("kv_")]
    assert len(ours) > 20
    assert all(action.help for action in ours)
    assert "50 % free" in made.format_help()
    parsed = made.parse_args([])
    assert (parsed.web_host, parsed.master_bind_host) == ("127.0.0.1", "127.0.0.1")
    assert (parsed.num_users, parsed.spawn_rate, parsed.run_time, parsed.stop_timeout) == (3, 3, 300, 30)
    knobs = flags.knobs(parsed, OPTIONS)
    assert knobs == flags.Knobs(profile_options={"margin": 8})


def test_options_are_read_with_their_types_and_addresses_are_parted() -> None:
    words = [
        "--kv-endpoints",
        "http://a, http://b",
        "--kv-endpoints=http://c",
        "--kv-margin",
        "3",
        "--kv-think-s=0.5",
        "--kv-keep-text",
        "--kv-api",
        "chat",
    ]
    knobs = flags.knobs(parser().parse_args(words), OPTIONS)
    assert knobs.endpoints == ("http://a", "http://b", "http://c")
    assert (knobs.profile_options["margin"], knobs.think_s, knobs.keep_text, knobs.api) == (3, 0.5, True, "chat")


@pytest.mark.parametrize(
    ("words", "length_s"),
    [
        ([], 300),
        (["--kv-duration-s=20"], 20),
        (["--kv-duration-s=900"], 900),
        (["--kv-stages=10m:2,1m:4-8"], 660),
        (["--kv-stages=ramp"], 300),
        (["--kv-stages=10m:nonsense"], 300),
    ],
)
def test_a_load_by_hand_lasts_as_long_as_was_asked_for_from_its_begin_on(words: list[str], length_s: float) -> None:
    options = parser().parse_args(words)
    flags.own_clock(options, 100.0)
    assert options.kv_duration_s == length_s
    assert options.run_time == length_s + 100
    assert f"{options.run_time}" == f"{length_s:g}"  # as Locust says it
    asked = parser().parse_args(words)
    asked.run_time = 7  # -t wins where it is shorter
    flags.own_clock(asked, 100.0)
    assert asked.kv_duration_s == 7


@pytest.mark.parametrize("word", ["--kv-margin=x", "--kv-think-s=-1", "--kv-requests=nan", "--kv-api=telnet", "--kv-think-s=inf"])
def test_values_that_cannot_be_meant_are_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([word])
    assert "--kv-" in capsys.readouterr().err


def test_secrets_are_not_shown_on_locusts_web_page() -> None:
    shown = {action.dest for action in parser()._actions if getattr(action, "include_in_web_ui", False)}
    assert "kv_margin" in shown
    assert not shown & {"kv_header", "kv_proxy", "kv_extra_body", "kv_api_key_env", "kv_rows", "kv_ca"}


def test_profiles_are_found_by_name_and_by_path_and_listed_when_not(tmp_path: Path) -> None:
    assert {"normal", "longctx", "nearmax", "overlimit"} <= profiles().keys()
    assert profile_path("longctx").name == "longctx.py"
    own = tmp_path / "mine.py"
    own.write_text("")
    assert profile_path(str(own)) == own
    for name in ("nothing", str(tmp_path / "gone.py"), str(tmp_path)):
        with pytest.raises(UsageError) as caught:
            profile_path(name)
        assert "longctx" in caught.value.hint


def test_a_counted_load_is_bounded_in_time_too(tmp_path: Path) -> None:
    words = command(Path("p.py"), tmp_path / "r", "http://h", options={"requests": 3, "nonce": "x"}, request_timeout_s=100)
    assert words[words.index("--kv-duration-s") + 1] == "200"
    assert {"--kv-requests=3", "--kv-nonce=x"} <= set(words)
    for options in ({"rows": "x"}, {"bad name": 1}, {"margin": None}):
        with pytest.raises(UsageError):
            command(Path("p.py"), tmp_path / "r", "http://h", options=options)
