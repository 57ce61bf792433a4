"""The options of a load as Locust's command line takes them."""

from __future__ import annotations

import argparse

import pytest

from pytest_kvcache.load import flags
from pytest_kvcache.load.flags import LONGEST_RAMP_S, Knobs


def parsed(*words: str) -> Knobs:
    parser = argparse.ArgumentParser()
    flags.declare(parser, [], {"users": 4})
    return flags.knobs(parser.parse_args(list(words)), [])


def test_users_start_spread_over_a_moment_unless_told_otherwise() -> None:
    assert parsed().ramp_over_s(60.0) == LONGEST_RAMP_S
    assert parsed().ramp_over_s(2.0) == pytest.approx(0.2)
    assert parsed().ramp_over_s(0.0) == LONGEST_RAMP_S
    assert parsed("--kv-ramp-s", "0").ramp_over_s(60.0) == 0.0
    assert parsed("--kv-ramp-s", "7").ramp_over_s(60.0) == 7.0
    assert parsed("--kv-requests", "5").ramp_over_s(60.0) == 0.0


@pytest.mark.parametrize("words", [("--kv-think-s", "-1"), ("--kv-ramp-s", "-2"), ("--kv-requests", "many"), ("--kv-seed", "nan")])
def test_a_number_that_cannot_be_meant_is_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*words)
    assert f"{words[0]} takes a number" in capsys.readouterr().err


def test_telemetry_elsewhere_is_for_the_panel_and_not_for_the_load() -> None:
    knobs = parsed("--kv-metrics-url", "http://a:1", "--kv-metrics-url", "http://b:1", "--kv-metrics-api-key-env", "KEY")
    assert knobs.of_telemetry() == {"metrics_url": ("http://a:1", "http://b:1"), "metrics_api_key_env": "KEY"}
    assert not set(knobs.of_telemetry()) & set(knobs.of_server())
