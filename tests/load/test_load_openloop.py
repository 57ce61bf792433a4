"""The open loop and stages as whole loads: requests start at their own times, and what keeps them from it is told."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import gevent
import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.errors import LoadFailed
from pytest_kvcache.load import contract
from pytest_kvcache.load.arrivals import Stage, arrivals
from pytest_kvcache.load.contract import read_load, read_rows
from pytest_kvcache.load.lags import call_at
from pytest_kvcache.load.runner import LoadResult, run_load
from pytest_kvcache.records import RequestRow
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import Settings


def press(server: ScriptedServer, folder: Path, *, duration_s: float = 1.0, users: int = 2, **options: Any) -> tuple[LoadResult, list[RequestRow]]:
    endpoint = parse_endpoint(server.url, Settings())
    result = run_load(
        [endpoint], "normal", folder, users=users, duration_s=duration_s, output_tokens=4, options={"stop_timeout_s": 3, "median": 40, **options}
    )
    return result, sorted(read_rows(result.rows_path), key=lambda row: row.id)


@pytest.mark.slow
def test_requests_of_an_open_loop_start_at_their_times_whatever_earlier_ones_do(tmp_path: Path) -> None:
    with ScriptedServer(ttft_s=0.6) as server:
        result, rows = press(server, tmp_path, rate=20, arrivals="constant")
    assert result.complete
    assert result.problems == []
    assert {row.outcome for row in rows} == {contract.OK}
    assert [row.id for row in rows] == list(range(len(rows)))
    assert 18 <= len(rows) <= 20
    assert all(later.intended_s - earlier.intended_s == pytest.approx(0.05, abs=1e-4) for earlier, later in pairwise(rows))
    lags = sorted(row.sent_s - row.intended_s for row in rows)
    assert lags[0] >= 0
    assert lags[len(rows) // 2] < 0.2, "a closed loop would have them wait for answers, 0.6 s and more"
    # a closed loop of two users would have sent two before the first answer came
    assert sum(row.sent_s < rows[0].end_s for row in rows) >= 10
    start = read_load(result.rows_path).start
    assert start is not None
    assert (start.options["rate"], start.options["arrivals"], start.options["users"]) == (20.0, "constant", 0)


def test_poisson_arrivals_are_those_of_the_seed_and_a_counted_load_ends_by_its_count(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        result, rows = press(server, tmp_path, duration_s=20, rate=40, requests=12)
    assert result.complete
    assert read_load(result.rows_path).reason == contract.BY_REQUESTS
    times = arrivals("poisson", (Stage(1e9, 40.0, 40.0),), 1)
    expected = [next(times) for _ in rows]
    begun_s = rows[0].intended_s - expected[0]
    assert len(rows) == 12
    assert [row.intended_s - begun_s for row in rows] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_a_cap_that_bites_is_told_and_its_wait_is_part_of_the_latency(tmp_path: Path) -> None:
    with ScriptedServer(ttft_s=0.3) as server:
        result, rows = press(server, tmp_path, rate=20, arrivals="constant", max_in_flight=2)
    load = read_load(result.rows_path)
    (note,) = (note for note in load.notes if note.subject == "in-flight cap")
    assert note.values["cap"] == 2
    assert note.values["held"] >= 4
    assert rows[-1].sent_s - rows[-1].intended_s > 0.3
    assert rows[-1].end_s - rows[-1].sent_s < rows[-1].end_s - rows[-1].intended_s - 0.3
    for row in rows:
        assert sum(other.sent_s <= row.sent_s < other.end_s for other in rows) <= 2


@pytest.mark.slow
def test_what_is_in_flight_when_an_open_loop_ends_is_cut_off_and_written_down(tmp_path: Path) -> None:
    def slow_down() -> None:
        while not (path := tmp_path / "requests.jsonl").exists() or not path.stat().st_size:
            time.sleep(0.005)
        server.script.ttft_s = 30.0

    with ScriptedServer() as server:
        thread = threading.Thread(target=slow_down)
        thread.start()
        result, rows = press(server, tmp_path, duration_s=0.5, rate=20, arrivals="constant", stop_timeout_s=1)
        thread.join()
    assert {row.outcome for row in rows[5:]} == {contract.CUT_OFF}, "on a busy machine the server slows down a few requests late"
    assert 8 <= len(rows) <= 10
    assert result.complete
    assert read_load(result.rows_path).ends[0].in_flight >= len(rows) - 5


@pytest.mark.slow
def test_stages_of_a_rate_put_requests_where_they_belong(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        result, rows = press(server, tmp_path, duration_s=0, rate=1, arrivals="constant", stages="0.5s:4,0.5s:0,0.5s:40")
    assert result.complete
    assert result.planned_duration_s == 1.5
    offsets = [row.intended_s - rows[0].intended_s for row in rows]
    assert sum(offset < 0.49 for offset in offsets) == 2
    assert not [offset for offset in offsets if 0.5 <= offset < 0.99]
    assert 18 <= sum(offset >= 0.99 for offset in offsets) <= 20


def test_stages_of_a_rate_are_no_users(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        # a hundred thousand a second later on: nobody has so many connections, and nobody needs them
        result, rows = press(server, tmp_path, duration_s=0.3, rate=2, stages="1s:0,5s:100000", max_in_flight=20)
    assert (result.complete, len(rows)) == (True, 0)


def test_nothing_is_called_sooner_than_due_however_long_the_loop_stood_still() -> None:
    called: list[float] = []
    gevent.sleep(0)
    time.sleep(0.2)
    due_s = time.monotonic() + 0.1
    call_at(due_s, lambda: called.append(time.monotonic())).join()
    assert called[0] >= due_s


@pytest.mark.slow
def test_stages_of_users_are_followed_by_locust(tmp_path: Path) -> None:
    with ScriptedServer(ttft_s=0.05) as server:
        result, rows = press(server, tmp_path, duration_s=0, users=1, stages="1s:1,3s:4")
    assert result.complete
    assert read_load(result.rows_path).reason == contract.BY_DURATION
    begun_s = rows[0].sent_s

    def most(since_s: float, until_s: float) -> int:
        chosen = [row for row in rows if since_s <= row.sent_s - begun_s < until_s]
        return max(sum(other.sent_s <= row.sent_s < other.end_s for other in rows) for row in chosen)

    assert (most(0.2, 0.8), most(2.4, 3.8)) == (1, 4)
    assert result.planned_users == 4


@pytest.mark.parametrize("options", [{"stages": "fast"}, {"rate": 5, "arrivals": "gamma", "burstiness": 0}])
def test_what_cannot_be_meant_fails_the_load_in_one_message(tmp_path: Path, options: dict[str, Any]) -> None:
    with ScriptedServer() as server, pytest.raises(LoadFailed, match=r"no stage of a load|--kv-burstiness"):
        press(server, tmp_path, **options)
