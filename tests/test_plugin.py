"""The plugin as a user of pytest meets it: silent when unused, one message for a mistake, and no gate that turns itself off."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

CAPACITY_TEST = """
import pytest

@pytest.mark.capacity
@pytest.mark.kv_profile("normal")
def test_gate(kv_load):
    kv_load("normal")
"""


@pytest.fixture
def unused_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_an_unused_plugin_prints_and_writes_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*KV cache*")
    result.stdout.no_fnmatch_line("kvcache:*")
    assert not (pytester.path / "reports").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-endpoint="], "*--kv-endpoint: it is empty*"),
        (["--kv-launch="], "*--kv-launch was given and is empty*"),
        (["--kv-before=llamacpp"], "*--kv-before and --kv-after belong together*"),
        (["--kv-endpoint=http://127.0.0.1:1", "--kv-launch=x"], "*exclude each other*"),
        (["--kv-max-usage=90"], "*0.9 means 90 %*"),
    ],
)
def test_an_option_that_cannot_be_meant_is_a_usage_error(pytester: pytest.Pytester, arguments: list[str], words: str) -> None:
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_inprocess(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([words])


def test_an_unreachable_endpoint_is_one_message_and_no_traceback(pytester: pytest.Pytester, unused_url: str) -> None:
    pytester.makepyfile(CAPACITY_TEST)
    result = pytester.runpytest_subprocess(f"--kv-endpoint={unused_url}", "--kv-ready-timeout-s=1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"*{unused_url}*"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*session.py*")


def test_an_unwritable_reports_folder_is_found_before_a_server_starts(pytester: pytest.Pytester, unused_url: str) -> None:
    pytester.makepyfile(CAPACITY_TEST)
    (pytester.path / "taken").write_text("a file, not a folder")
    result = pytester.runpytest_subprocess("--kv-launch=sleep 60 {port}", "--kv-reports=taken/reports")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*cannot make the session's folder*", "*--kv-reports*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_under_xdist_a_gate_refuses_and_never_turns_green(pytester: pytest.Pytester, unused_url: str) -> None:
    pytester.makepyfile(CAPACITY_TEST)
    result = pytester.runpytest_subprocess("-n", "2", f"--kv-endpoint={unused_url}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*nothing is measured under pytest-xdist*"])


def test_an_experiment_is_not_split_over_workers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CAPACITY_TEST)
    sides = ["--kv-before=sleep 60 {port}", "--kv-after=sleep 61 {port}"]
    result = pytester.runpytest_subprocess("-n", "1", "--kv-xdist=lease", *sides)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*cannot be split over workers of pytest-xdist*"])


def test_a_misspelt_profile_keyword_stops_the_run_at_collection(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CAPACITY_TEST.replace('"normal")', '"normal", user=3)', 1))
    result = pytester.runpytest_inprocess("--collect-only")
    assert result.ret != pytest.ExitCode.OK
    (result.stderr if "kv_profile" in result.stderr.str() else result.stdout).fnmatch_lines(
        ["*kv_profile(*unknown limit 'user'; did you mean users?*"]
    )


def test_load_profiles_are_never_imported_by_collection(pytester: pytest.Pytester) -> None:
    folder = pytester.mkdir("loadprofiles")
    (folder / "normal.py").write_text("raise SystemExit('imported')\n")
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_inprocess("--doctest-modules")
    result.assert_outcomes(passed=1)


def test_a_hook_that_is_misspelt_stops_the_run(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_kvcache_engine(config): return []")
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_subprocess()
    assert result.ret != pytest.ExitCode.OK


def test_the_suite_is_found_by_its_package_name(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--pyargs", "pytest_kvcache.suite", "-m", "capacity", "--collect-only", "-q")
    result.stdout.fnmatch_lines(["*test_one_request_close_to_max_model_len_is_served*"])


def test_options_may_stand_in_the_ini_file(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nkv_endpoint =\n    http://127.0.0.1:1\n    http://127.0.0.1:2\n")
    pytester.makepyfile("def test_a(kv_settings): assert kv_settings.endpoint == ('http://127.0.0.1:1', 'http://127.0.0.1:2')")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["kvcache: 2 endpoints*"])


def test_secrets_in_an_endpoint_are_not_printed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_inprocess("--kv-launch=serve --hub https://user:hunter2@host/ --port {port}")
    result.stdout.no_fnmatch_line("*hunter2*")
    assert Path(pytester.path / "reports").exists() is False
