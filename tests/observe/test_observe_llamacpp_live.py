"""On a real llama.cpp: what the sampler says follows a load whose tokens are known."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.observe.scrape import detect_endpoint, take_snapshot
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import SnapshotRecord, TelemetryRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings

PROMPT, ANSWER = 1000, 2500


@pytest.fixture(scope="module", params=["", " --unified"], ids=["split", "unified"])
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    log = tmp_path_factory.mktemp("llamacpp") / "server.log"
    command = f"{sys.executable} -m pytest_kvcache.server.embedded.llamacpp --port {{port}} --ctx 8192 --slots 2 --kv-type q8_0{request.param}"
    with launch(command, Settings(ready_timeout_s=60.0), log) as server:
        yield server.endpoint


def number(snapshot: SnapshotRecord, name: str) -> float:
    value = snapshot.value(name)
    assert isinstance(value, Reading), f"{name}: {value}"
    return value.number()


def stream(endpoint: Endpoint) -> list[tuple[float, int]]:
    """Ask for ANSWER tokens after PROMPT ones; return when each chunk had come and how many tokens there were by then."""
    body = {"model": endpoint.model, "prompt": [2 + n % 200 for n in range(PROMPT)], "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
    came: list[tuple[float, int]] = []
    with (
        endpoint.client(timeout_s=60.0) as client,
        client.stream(
            "POST", endpoint.url("/v1/completions"), json={**body, "temperature": 0, "stream_options": {"include_usage": True}}
        ) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                frame = json.loads(line[6:])
                if frame.get("usage"):
                    assert (frame["usage"]["prompt_tokens"], frame["usage"]["completion_tokens"]) == (PROMPT, ANSWER)
                if frame.get("choices"):
                    came.append((time.time(), len(came) + 1))
    return came


@pytest.mark.slow
def test_used_tokens_follow_a_known_load(endpoint: Endpoint, tmp_path: Path) -> None:
    dialect = detect_endpoint(endpoint)
    assert dialect.name == "llamacpp"
    with Sampler([endpoint], tmp_path, 50.0, dialects=[dialect], gpus=False) as sampler:
        came = stream(endpoint)
        deadline = time.monotonic() + 10
        while sampler.latest is None or sampler.latest.values.get("running") or sampler.latest.wall_s < came[-1][0]:
            assert time.monotonic() < deadline, "the server did not come to rest"
            time.sleep(0.01)
        stats = sampler.stop()
    rows: list[TelemetryRow] = list(read_lines(tmp_path / "telemetry.jsonl", TelemetryRow))
    assert not stats.errors
    busy = [row for row in rows if row.values["running"]]
    assert len(busy) >= 3
    assert all(row.values["pool_tokens"] == 8192 for row in rows)
    # What had come to us before a look began was in the cache at that look, less the last token, which is not computed on yet.
    close = 0
    for row in busy:
        delivered = max((count for at, count in came if at < row.wall_s), default=0)
        by_its_end = max((count for at, count in came if at < row.wall_s + row.read_s), default=0)
        close += row.values["used_tokens"] <= PROMPT + by_its_end + 1
        least = PROMPT + delivered - 1 if delivered else 0
        assert least <= row.values["used_tokens"] <= PROMPT + ANSWER
        assert row.values["usage"] == row.values["used_tokens"] / 8192
        assert row.values["free_tokens"] == 8192 - row.values["used_tokens"]
    assert close > len(busy) / 2, "a token is counted when it is computed; we may lag behind now and then"
    used = [row.values["used_tokens"] for row in busy]
    assert used == sorted(used), "one request only ever grows"
    rest = rows[-1].values
    assert (rest["used_tokens"], rest["usage"], rest["running"]) == (0, 0, 0), "what an idle slot keeps is not in use"
    assert rest["generation_tokens"] - rows[0].values["generation_tokens"] in range(ANSWER - 1, ANSWER + 1)


def test_the_snapshot_says_what_the_server_was_started_with(endpoint: Endpoint, request: pytest.FixtureRequest) -> None:
    snapshot = take_snapshot(endpoint)
    unified = "unified" in request.node.name
    assert number(snapshot, "pool_tokens") == 8192
    assert number(snapshot, "max_num_seqs") == 2
    assert number(snapshot, "max_model_len") == (8192 if unified else 4096)
    assert snapshot.value("kv_dtype").value == "q8_0"  # type: ignore[union-attr]
    # Two layers, one head of 128 for keys and for values; q8_0 holds 32 numbers in 34 bytes.
    assert number(snapshot, "pool_bytes") == pytest.approx(8192 * 2 * 2 * 128 * 34 / 32, rel=0.01)
    assert any("split slots" in note for note in snapshot.notes) is not unified
    preemptions = snapshot.value("preemptions")
    assert isinstance(preemptions, Missing)
    assert preemptions.cannot_happen
    assert snapshot.version
