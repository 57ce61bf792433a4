"""Options: where a value came from, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvcache.errors import UsageError
from pytest_kvcache.options import option_table, settings_from
from pytest_kvcache.settings import Settings, flag, option_fields, resolve


def test_the_command_line_wins_over_the_environment_over_ini() -> None:
    environ = {"PYTEST_KVCACHE_USERS": "3", "PYTEST_KVCACHE_SEED": "7"}
    settings = resolve({"users": "4"}, {"users": "1", "seed": "2", "name": "nightly"}, environ)
    assert (settings.users, settings.seed, settings.name) == (4, 7, "nightly")
    provenance = settings.provenance()
    assert provenance["users"] == {"value": 4, "source": "command line"}
    assert provenance["seed"]["source"] == "environment"
    assert provenance["name"]["source"] == "ini"
    assert provenance["windows"]["source"] == "default"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endpoint": [""]}, "--kv-endpoint: it is empty"),
        ({"launch": ""}, "--kv-launch was given and is empty"),
        ({"baseline": "  "}, "--kv-baseline was given and is empty"),
        ({"endpoint": ["http://a"], "launch": "x"}, "exclude each other"),
        ({"endpoint": ["http://a"], "gpus": "0"}, "what a launched server sees"),
        ({"resume": "reports/x"}, "goes on with a comparison of two launches"),
        ({"before": "a {port}", "after": "b {port}", "baseline": "x"}, "exclude each other"),
        ({"before": "a {port}", "after": "b {port}", "repeats": "0"}, "at least 1"),
        ({"expect_change": " "}, "given and is empty"),
        ({"before": "a"}, "belong together"),
        ({"before": "a", "after": "b", "endpoint": ["http://a"]}, "exclude each other"),
        ({"users": "many"}, "not a number"),
        ({"users": "-1"}, "negative"),
        ({"max_usage": "90"}, "share from 0 to 1"),
        ({"ready_timeout_s": "soon"}, "--kv-ready-timeout-s"),
        ({"api": "grpc"}, "completions, chat"),
        ({"windows": "0"}, "above zero"),
        ({"xdist": "yes"}, "refuse, lease"),
        ({"sample_hz": "inf"}, "at most 1000"),
        ({"sample_hz": "nan"}, "above zero"),
        ({"ttft_margin": "nan"}, "from 0 on"),
        ({"ttft_margin": "-0.1"}, "from 0 on"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_flag(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(given, {}, {})


def test_durations_are_read_with_their_unit() -> None:
    assert resolve({"ready_timeout_s": "2m"}, {}, {}).ready_timeout_s == 120.0


def test_lists_come_from_ini_and_environment_line_by_line() -> None:
    assert resolve({}, {"endpoint": ["http://a", "http://b"]}, {}).endpoint == ("http://a", "http://b")
    assert resolve({}, {}, {"PYTEST_KVCACHE_ENDPOINT": "http://a\nhttp://b"}).endpoint == ("http://a", "http://b")


def test_every_option_tells_what_it_is() -> None:
    for option in option_fields():
        assert option.metadata["help"]
        assert option.metadata["group"]
        assert f"`{flag(option.name)}`" in option_table()
    assert not [option.name for option in option_fields() if "key" in option.name and not option.name.endswith("_env")]


def test_the_option_page_is_the_options(request: pytest.FixtureRequest) -> None:
    page = (request.config.rootpath / "docs" / "options.md").read_text()
    assert page.endswith(option_table()), "run: nox -s docs"


def test_a_changed_copy_is_checked_too() -> None:
    assert Settings().replace(users=3).sources["users"] == "call"
    with pytest.raises(UsageError):
        Settings().replace(users=-3)


def test_the_command_line_speaks_without_the_prefix() -> None:
    from pytest_kvcache.cli import build_parser

    arguments = build_parser().parse_args(["load", "longctx", "--endpoint", "http://a:1", "--users", "3", "--duration-s", "2m"])
    settings = settings_from(arguments)
    assert (settings.endpoint, settings.users, settings.duration_s) == (("http://a:1",), 3, 120.0)


def test_a_load_is_given_what_was_asked_for_and_nothing_else() -> None:
    assert resolve({}, {}).load_options("normal") == {}
    asked = resolve({"rate": "5", "stages": "ramp", "trace": "t.csv", "load_option": ["long-share=0.2", "median=99"]}, {})
    assert asked.load_options("mixed") == {"rate": 5.0, "stages": "ramp", "long_share": "0.2", "median": "99"}
    assert asked.load_options("trace")["trace"] == "t.csv"
    assert resolve({"max_in_flight": "7", "arrivals": "burst"}, {}).load_options("normal") == {"max_in_flight": 7, "arrivals": "burst"}
    for name, value in (("load_option", ["median"]), ("rate", "-1"), ("max_in_flight", "0"), ("arrivals", "sometimes"), ("stages", " ")):
        with pytest.raises(UsageError):
            resolve({name: value}, {})
