"""The sampler: on its schedule, on disk, and honest about what it could not read or write."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.errors import CannotWrite, EndpointRefused
from pytest_kvcache.observe import sampler as sampler_module
from pytest_kvcache.observe.sampler import SAMPLED, Sampler
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import GpuRow, TelemetryRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.address import Endpoint, parse_endpoint
from pytest_kvcache.settings import resolve

VLLM, LLAMA = DIALECTS["vllm"], DIALECTS["llamacpp"]
ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "tests" / "data" / "exposition" / "vllm" / "0.32.0-dp2.prom").read_text()
GAUGE = "vllm:kv_cache_usage_perc 0.5\n"


def wait_for(condition: Callable[[], Any], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def rows_of(folder: Path) -> list[TelemetryRow]:
    return list(read_lines(folder / "telemetry.jsonl", TelemetryRow))


def sampling(server: ScriptedServer, folder: Path, hz: float = 50.0, **more: Any) -> Sampler:
    more.setdefault("dialects", [VLLM])
    return Sampler([Endpoint(server.url)], folder, hz, gpus=False, **more)


def test_rows_hold_the_numbers_of_the_server_and_of_each_rank(tmp_path: Path) -> None:
    with ScriptedServer(metrics=TEXT) as server, sampling(server, tmp_path) as sampler:
        wait_for(lambda: sampler.latest)
        assert sampler.latest == sampler.latest_of(0)
    row = rows_of(tmp_path)[0]
    assert row.error == ""
    assert row.values["free_blocks"] == 4096
    assert row.values["rejections"] == 0
    assert {part: values["usage"] for part, values in row.ranks.items()} == {"0": 0.25, "1": 0.75}
    assert set(row.values) <= SAMPLED
    assert "block_size" not in row.values, "what does not move is in the snapshots"
    assert "swapped" not in row.values, "what is missing has no number"


def test_looks_come_at_their_turns_and_do_not_drift(tmp_path: Path) -> None:
    with ScriptedServer(metrics=GAUGE) as server, sampling(server, tmp_path, hz=40.0) as sampler:
        wait_for(lambda: len(rows_of(tmp_path)) >= 24)
        stats = sampler.stop()
    rows = rows_of(tmp_path)
    turns = [int((row.wall_s - sampler._wall_base) * 40.0 + 1e-3) for row in rows]
    assert turns == sorted(set(turns)), "no turn is taken twice, and no look comes before its turn"
    assert stats.samples + stats.missed >= turns[-1] + 1, "a look that is late takes the next turn, it does not push the others"
    late = [(row.wall_s - sampler._wall_base) * 40.0 - turn for row, turn in zip(rows, turns, strict=True)]
    assert sorted(late)[len(late) // 2] < 0.5, "most looks begin with their turn"
    assert stats.samples == len(rows)
    assert 0 < stats.longest_gap_s < 5


def test_a_slow_server_is_never_asked_twice_at_once(tmp_path: Path) -> None:
    inside, most = [0], [0]
    lock = threading.Lock()

    def slow(server: Any) -> str:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        with lock:
            inside[0] -= 1
        return GAUGE

    with ScriptedServer(metrics=slow) as server, sampling(server, tmp_path, hz=200.0) as sampler:
        wait_for(lambda: len(rows_of(tmp_path)) >= 5)
        stats = sampler.stop()
    assert most[0] == 1
    assert stats.missed >= 5
    assert stats.achieved_hz < 30
    assert all(row.read_s >= 0.05 for row in rows_of(tmp_path))


def test_a_failed_look_is_a_row_with_its_reason_and_a_gap_in_the_figures(tmp_path: Path) -> None:
    with ScriptedServer(metrics=GAUGE) as server, sampling(server, tmp_path) as sampler:
        wait_for(lambda: sampler.latest)
        server.script.metrics = "# nothing\n"
        wait_for(lambda: sum(bool(row.error) for row in rows_of(tmp_path)) >= 3)
        server.script.metrics = GAUGE
        wait_for(lambda: sampler.latest and not sampler.latest.error)
        stats = sampler.stop()
    rows = rows_of(tmp_path)
    failed = [row for row in rows if row.error]
    assert {row.error for row in failed} == {"/metrics answers with text that holds no sample"}
    assert all(not row.values for row in failed)
    assert (stats.samples, stats.errors) == (len(rows) - len(failed), len(failed))
    assert stats.reasons == {"/metrics answers with text that holds no sample": len(failed)}
    assert stats.longest_gap_s >= 3 / 50.0


def test_a_gauge_that_goes_away_in_mid_run_is_an_error_and_not_a_shorter_row(tmp_path: Path) -> None:
    both = GAUGE + "vllm:num_requests_running 3\n"
    with ScriptedServer(metrics=both) as server, sampling(server, tmp_path) as sampler:
        wait_for(lambda: sampler.latest)
        server.script.metrics = both.replace("0.5", "NaN")
        wait_for(lambda: sampler.latest and sampler.latest.error)
        assert sampler.latest is not None
        assert sampler.latest.error == "vllm:kv_cache_usage_perc reads nan"
        assert sampler.latest.values == {"running": 3}


def test_a_server_that_dies_is_said_to_be_dead(tmp_path: Path) -> None:
    def die(server: Any) -> str:
        raise RuntimeError("the connection of the sampler ends here, and no new one is taken")

    server = ScriptedServer(metrics=GAUGE).start()
    with sampling(server, tmp_path, timeout_s=1.0) as sampler:
        wait_for(lambda: sampler.latest)
        server.stop()
        server.script.metrics = die
        wait_for(lambda: sampler.latest and "nobody answers" in sampler.latest.error)


def test_every_endpoint_has_its_own_rows_and_a_slow_one_holds_up_nobody(tmp_path: Path) -> None:
    def slow(server: Any) -> str:
        time.sleep(0.3)
        return GAUGE

    with ScriptedServer(metrics=slow) as one, ScriptedServer(metrics=GAUGE.replace("0.5", "0.25")) as two:
        sampler = Sampler([Endpoint(one.url), Endpoint(two.url)], tmp_path, 50.0, dialects=[VLLM, VLLM], gpus=False)
        with sampler:
            wait_for(lambda: sampler.latest_of(0))
            stats = sampler.stop()
    rows = rows_of(tmp_path)
    assert {row.endpoint: row.values.get("usage") for row in rows} == {0: 0.5, 1: 0.25}
    assert sum(row.endpoint == 1 for row in rows) > 2 * sum(row.endpoint == 0 for row in rows)
    assert stats.achieved_hz < 10, "the figure is that of the endpoint that fared worst"


def test_llama_cpp_is_sampled_by_its_slots(tmp_path: Path) -> None:
    slots = [{"id": 0, "n_ctx": 4096, "is_processing": True, "n_prompt_tokens": 1024}]
    with ScriptedServer(metrics=None, pages={"/slots": slots}) as server, sampling(server, tmp_path, dialects=[LLAMA]) as sampler:
        wait_for(lambda: sampler.latest)
    assert rows_of(tmp_path)[0].values == {"pool_tokens": 4096, "used_tokens": 1024, "free_tokens": 3072, "usage": 0.25, "running": 1}


def test_stopping_takes_no_longer_than_one_read_and_can_be_done_twice(tmp_path: Path) -> None:
    over = threading.Event()

    def stuck(server: Any) -> str:
        over.wait(30)
        return GAUGE

    with ScriptedServer(metrics=stuck) as server:
        sampler = sampling(server, tmp_path, timeout_s=0.3)
        sampler.start()
        time.sleep(0.05)
        began = time.monotonic()
        stats = sampler.stop()
        assert time.monotonic() - began < 15
        over.set()
    assert stats == sampler.stop()
    assert stats.samples == 0
    assert "0.3 s" in next(iter(stats.reasons))


def test_a_sampler_that_was_never_started_stops_quietly(tmp_path: Path) -> None:
    with ScriptedServer(metrics=GAUGE) as server:
        assert sampling(server, tmp_path).stop().samples == 0


def test_a_folder_that_cannot_be_written_is_known_before_the_load_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with ScriptedServer(metrics=GAUGE) as server, pytest.raises(CannotWrite, match="cannot write telemetry"):
        sampling(server, tmp_path / "file").start()


def test_a_full_disk_is_told_and_leaves_a_file_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, [0]

    def filling(fd: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] in (3, 5):
            return real(fd, data[:10])
        if calls[0] in (4, 6):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    with ScriptedServer(metrics=GAUGE) as server, sampling(server, tmp_path) as sampler:
        monkeypatch.setattr(os, "write", filling)
        wait_for(lambda: calls[0] >= 8)
        stats = sampler.stop()
        monkeypatch.undo()
    assert "2 telemetry rows could not be written: No space left on device" in stats.error
    assert "telemetry.jsonl" in stats.error
    rows = rows_of(tmp_path)
    assert len(rows) == stats.samples - 2
    assert all(json.loads(line) for line in (tmp_path / "telemetry.jsonl").read_text().splitlines())


def test_rows_of_a_killed_process_are_on_disk(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from pytest_kvcache.engines import DIALECTS
        from pytest_kvcache.observe.sampler import Sampler
        from pytest_kvcache.server.address import Endpoint
        Sampler([Endpoint(sys.argv[1])], Path(sys.argv[2]), 100.0, dialects=[DIALECTS["vllm"]], gpus=False).start()
        time.sleep(30)
    """)
    with ScriptedServer(metrics=GAUGE) as server:
        process = subprocess.Popen([sys.executable, "-c", code, server.url, str(tmp_path)], cwd=ROOT)
        try:
            wait_for(lambda: server.paths().count("GET /metrics") > 5, 20.0)
            looks = server.paths().count("GET /metrics")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
    rows = rows_of(tmp_path)
    assert len(rows) >= looks - 1
    assert all(row.values["usage"] == 0.5 for row in rows)


def test_cards_come_with_the_rows_of_the_first_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = GpuRow(0, "GPU-1", "Card", 100, 60, 30, 10, {"7": 50})
    monkeypatch.setattr(sampler_module, "read_gpus", lambda: [card])
    with ScriptedServer(metrics=GAUGE) as one, ScriptedServer(metrics=GAUGE) as two:
        sampler = Sampler([Endpoint(one.url), Endpoint(two.url)], tmp_path, 50.0, dialects=[VLLM, VLLM])
        with sampler:
            wait_for(lambda: sum(row.endpoint == 0 for row in rows_of(tmp_path)) > 10)
    rows = rows_of(tmp_path)
    with_cards = [row for row in rows if row.gpus]
    assert with_cards
    assert len(with_cards) < len(rows) / 2, "cards are read less often than the servers"
    assert all(row.endpoint == 0 and row.gpus == [card] for row in with_cards)


def exporter(node: str, used: int) -> str:
    labels = f'gpu="0",UUID="GPU-{node}",Hostname="{node}"' if node else 'gpu="0",UUID="GPU-x"'
    return f"DCGM_FI_DEV_FB_USED{{{labels}}} {used}\nDCGM_FI_DEV_FB_FREE{{{labels}}} {1000 - used}\n"


def test_cards_of_other_machines_come_from_their_exporters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "read_gpus", lambda: pytest.fail("the cards of this machine are not those of the server"))
    monkeypatch.setenv("KV_METRICS", "secret-of-metrics")
    with (
        ScriptedServer(metrics=GAUGE) as server,
        ScriptedServer(metrics=exporter("node-b", 300)) as one,
        ScriptedServer(metrics=exporter("", 500)) as two,
    ):
        settings = resolve({"endpoint": [server.url], "dcgm_url": [one.url, two.url + "/metrics"], "metrics_api_key_env": "KV_METRICS"}, {}, {})
        with Sampler([parse_endpoint(server.url, settings)], tmp_path, 20.0, dialects=[VLLM]):
            wait_for(lambda: any(row.gpus for row in rows_of(tmp_path)))
            one.script.metrics = None
            wait_for(lambda: len(one.seen) >= 3)
        assert all("Authorization" not in seen.headers for seen in one.seen), "no key goes to an exporter"
        assert any(seen.headers.get("Authorization") == "Bearer secret-of-metrics" for seen in server.seen)
    told = [row.gpus for row in rows_of(tmp_path) if row.gpus]
    assert [(card.host, card.used_bytes >> 20) for card in told[0]] == [(f"127.0.0.1:{two.port}", 500), ("node-b", 300)]
    assert all(len(cards) == 2 for cards in told), "half of the cards is no measurement of them"


def test_cards_that_were_named_and_cannot_be_read_are_an_error_and_no_gap(tmp_path: Path) -> None:
    with ScriptedServer(metrics=GAUGE) as server, ScriptedServer(metrics="jvm_threads 3\n") as other:
        settings = resolve({"endpoint": [server.url], "dcgm_url": [other.url]}, {}, {})
        with pytest.raises(EndpointRefused, match=r"no DCGM_FI_DEV_FB_ series"):
            Sampler([parse_endpoint(server.url, settings)], tmp_path, 20.0, dialects=[VLLM]).start()


def test_a_machine_without_a_card_is_sampled_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "read_gpus", lambda: Missing("no NVIDIA driver on this machine"))
    with ScriptedServer(metrics=GAUGE) as server:
        sampler = Sampler([Endpoint(server.url)], tmp_path, 50.0, dialects=[VLLM])
        with sampler:
            wait_for(lambda: sampler.latest)
            assert sampler.stop().error == ""


def test_a_fault_of_the_reader_is_a_row_and_not_the_end_of_the_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("by zero")

    with ScriptedServer(metrics=GAUGE) as server, sampling(server, tmp_path) as sampler:
        wait_for(lambda: sampler.latest)
        monkeypatch.setattr(sampler_module, "read_values", broken)
        wait_for(lambda: sampler.latest and sampler.latest.error)
        monkeypatch.undo()
        wait_for(lambda: sampler.latest and not sampler.latest.error)
        assert sampler.stop().reasons == {"ZeroDivisionError: by zero": pytest.approx(1, abs=50)}
