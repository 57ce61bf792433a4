"""What --kv-sweep means, and a sweep on real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvcache.analysis.cards import card_ledgers
from pytest_kvcache.cli import main
from pytest_kvcache.errors import UsageError
from pytest_kvcache.measure import Planned
from pytest_kvcache.session import Session
from pytest_kvcache.settings import resolve
from pytest_kvcache.sweeping import command_with, parse_sweep, run_sweep, show_sweep, sweep_gates

MIB = 1 << 20


def test_a_sweep_names_an_option_and_its_values() -> None:
    swept = parse_sweep(" --block-size = 32, 64,128")
    assert (swept.option, swept.values) == ("block-size", ("32", "64", "128"))
    assert swept.variant("32") == "block-size=32"


@pytest.mark.parametrize(
    "text", ["block-size", "=32,64", "block-size=32", "block-size=32,,64", "block-size=32,32", "a b=1,2", "x=" + ",".join(map(str, range(33)))]
)
def test_a_sweep_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_sweep(text)


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("serve m --port {port}", "serve m --port '{port}' --block-size 64"),
        ("serve --block-size 16 --port {port}", "serve --block-size 64 --port '{port}'"),
        ("serve --block_size=16 --port {port}", "serve --block_size=64 --port '{port}'"),
        ("A=1 bash -c 'serve --block-size {sweep} --port {port}'", "A=1 bash -c 'serve --block-size 64 --port {port}'"),
    ],
)
def test_the_value_takes_the_place_of_the_one_that_the_command_has(command: str, wanted: str) -> None:
    assert command_with(command, "block-size", "64") == wanted


def test_only_a_server_that_we_launch_can_be_swept(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="names what it cannot launch"):
        resolve({"sweep": "block-size=1,2", "endpoint": ["http://127.0.0.1:1"]}, {}, {})
    assert main(["load", "normal", "--sweep", "block-size=32"]) == 2
    assert "two or more" in capsys.readouterr().err


@pytest.mark.live
def test_a_sweep_on_llamacpp_measures_each_value_and_reports_them_side_by_side(tmp_path: Path) -> None:
    options = {"sweep": "kv-type=f16,q8_0", "windows": 1, "duration_s": 2, "users": 2, "reports": str(tmp_path)}
    with Session(resolve(options, {}, {})) as session:
        found = run_sweep(session, Planned("normal"))
        for gate in sweep_gates(session, found):
            session.record(gate)
        session.finish()
    assert [variant.name for variant in found.variants] == ["kv-type=f16", "kv-type=q8_0"]
    assert all(variant.usage.number and variant.cpu.number for variant in found.variants)
    assert "kv-type=q8_0" in show_sweep(found)
    assert "the pools differ" in found.rests_on
    page = (session.folder / "report.html").read_text()
    assert "normal (kv-type=q8_0)" in page
    assert len(list((session.folder / "runs").iterdir())) == 2


@pytest.mark.vllm
@pytest.mark.slow
def test_blocks_of_32_hold_less_than_blocks_of_128_on_a_real_vllm(tmp_path: Path) -> None:
    server = f"vllm-cpu --max-model-len 2048 --kv-cache-memory-bytes {768 * MIB}"
    options = {
        "launch": server, "sweep": "block-size=128,32", "windows": 1, "duration_s": 5, "users": 6, "reports": str(tmp_path),
        # on a busy machine speed is no matter of this test
        "usage_margin": 0, "throughput_margin": 1, "ttft_margin": 1000,
    }  # fmt: skip
    with Session(resolve(options, {}, {})) as session:
        found = run_sweep(session, Planned("normal", options={"median": 20, "sigma": 0.01, "shortest": 16}, output_tokens=8))
        large, small = found.variants
        assert large.usage.number is not None
        assert small.usage.number is not None
        # a request of 28 tokens holds one block of either size: a fourth of the pool, and never more than half
        assert small.usage.number < 0.5 * large.usage.number
        assert small.payload_share.number is not None
        assert large.payload_share.number is not None
        assert small.payload_share.number > 3 * large.payload_share.number
        assert small.cpu.number
        for run in session.runs():
            (ledger,) = card_ledgers(session.analysis(run))
            assert ledger.pool.bytes == 768 * MIB
            assert (ledger.server.bytes or 0) > 768 * MIB
            assert sum(part.bytes or 0 for part in ledger.parts) == pytest.approx(ledger.total.bytes, abs=2)
            assert "set by hand" in ledger.text
