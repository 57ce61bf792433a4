"""What people paste was carried by something: container logs, journals, pagers, gzip. It must read like the server's own words."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.observe.inspecting import inspect
from pytest_kvcache.observe.pasted import sort_text
from pytest_kvcache.observe.showing import as_json
from pytest_kvcache.observe.unwrapping import unpack, unwrap

DATA = Path(__file__).parent.parent / "data"
TEXTS = {
    name: (DATA / name).read_bytes()
    for name in (
        "exposition/vllm/0.32.0-dp2.prom",
        "exposition/triton_trtllm/backend.prom",
        "exposition/sglang/0.5.20-v1_loads.json",
        "startup/vllm-0.32.0-startup.log",
        "startup/vllm-0.32.0-fail-kv-too-small.log",
        "startup/sglang-0.5.20-startup.log",
        "startup/tgi-3.3.7-startup.log",
        "startup/trtllm-serve-startup.log",
        "startup/llamacpp-b11434-startup.log",
    )
}


def found(data: bytes) -> dict[str, Any]:
    told = as_json(inspect([sort_text("a text", data)]))
    return {"engine": told["engine"], "notes": told["notes"], "values": {name: value.get("value") for name, value in told["quantities"].items()}}


def lines(change: Callable[[str], str]) -> Callable[[bytes], bytes]:
    return lambda data: "\n".join(change(line) for line in data.decode().split("\n")).encode()


CARRIERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "two gzip members": lambda data: gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]),
    "colours": lines(lambda line: f"\x1b[36m{line}\x1b[0m"),
    "carriage returns": lines(lambda line: line + "\r"),
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "kubectl logs --timestamps": lines(lambda line: f"2026-11-29T15:08:35.123456789Z {line}"),
    "containerd": lines(lambda line: f"2026-11-29T15:08:35.123456789+00:00 stdout F {line}"),
    "docker compose": lines(lambda line: f"vllm-1  | {line}"),
    "kubectl logs --prefix": lines(lambda line: f"[pod/vllm-0/vllm] {line}"),
    "journalctl": lines(lambda line: f"Nov 29 15:08:35 gpu-host-1 vllm[1234]: {line}"),
    "syslog": lines(lambda line: f"2026-11-29T15:08:35.123456+01:00 gpu-host-1 docker/vllm[1234]: {line}"),
    "docker's json-file": lines(lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-11-29T15:08:35Z"})),
    "JSON lines": lines(lambda line: json.dumps({"timestamp": "2026-11-29T15:08:35Z", "level": "INFO", "message": line})),
    "journalctl -o json": lines(lambda line: json.dumps({"MESSAGE": list(line.encode()), "_PID": "1"})),
    "Google Cloud": lines(lambda line: json.dumps({"jsonPayload": {"message": line}, "severity": "INFO"})),
    "compose in a journal": lines(lambda line: f"Nov 29 15:08:35 gpu-host-1 compose[1]: vllm-1  | {line}"),
    "cat -n": lambda data: "\n".join(f"{number:6d}\t{line}" for number, line in enumerate(data.decode().split("\n"), 1)).encode(),
    "grep over files": lines(lambda line: f"logs/server.log:{line}"),
    "a quotation": lines(lambda line: f"> {line}"),
    "indented": lines(lambda line: f"    {line}"),
    "a shell": lambda data: b"$ curl -s localhost:8000/metrics\n" + data,
    "a code fence": lambda data: b"```\n" + data + b"\n```\n",
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_carried_text_tells_what_the_bare_one_tells(carrier: str, name: str) -> None:
    bare = found(TEXTS[name])
    assert any(value is not None for value in bare["values"].values()) or "fail" in name
    assert found(CARRIERS[carrier](TEXTS[name])) == bare


def test_a_line_that_docker_cut_in_parts_is_one_line_again() -> None:
    whole = "INFO GPU KV cache size: 148,336 tokens"
    parts = [json.dumps({"log": part, "stream": "stdout", "time": "t"}) for part in (whole[:20], whole[20:] + "\n", "next\n")]
    assert unwrap("\n".join(parts)) == f"{whole}\nnext\n"
    time = "2026-11-29T15:08:35.1Z stdout"
    assert unwrap(f"{time} P {whole[:20]}\n{time} F {whole[20:]}\n{time} F next\n") == f"{whole}\nnext\n"


def test_an_answer_on_one_line_is_a_body_and_no_line_of_a_log() -> None:
    told = inspect([sort_text("x", b'{"object":"error","message":"GPU KV cache size: 5 tokens","code":400}')])
    assert not told.judged
    assert any("an error of the server: GPU KV cache size" in note for note in told.notes)


def test_what_an_engine_itself_writes_before_its_lines_stays() -> None:
    for name in ("startup/tgi-3.3.7-startup.log", "startup/sglang-0.5.20-startup.log", "startup/vllm-0.32.0-startup.log"):
        assert unwrap(TEXTS[name].decode()) == TEXTS[name].decode()


def test_a_text_that_was_cut_says_so() -> None:
    text = TEXTS["exposition/vllm/0.32.0-dp2.prom"]
    line = text.index(b"vllm:num_requests_waiting{")
    for cut, words in ((line + 20, "ends in the middle of a line"), (text.index(b"\n", line), "has lost digits")):
        problem = sort_text("x", text[:cut]).problem
        assert words in problem
        assert "vllm:num_requests_waiting" in problem or "middle" in problem
    assert sort_text("x", text).problem == ""


def test_a_gzip_file_that_ends_too_early_or_holds_too_much_says_so() -> None:
    packed = gzip.compress(TEXTS["startup/vllm-0.32.0-startup.log"] * 50)
    assert "ends too early" in sort_text("x", packed[: len(packed) // 2]).problem
    assert "cannot be unpacked" in sort_text("x", packed[:2] + b"nonsense").problem
    bomb = gzip.compress(b"\n" * (1 << 20))
    data, problem = unpack(bomb, 1 << 10)
    assert len(data) == 1 << 10
    assert "only its first" in problem


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "2026-11-29T15:08:35Z ",
                "stdout P ",
                "stdout F ",
                "x | ",
                '{"log":"',
                '","stream":"a"}',
                "> ",
                "\n",
                "\t1",
                "Nov 29 15:08:35 h u[1]: ",
                "INFO ",
            ]
        ),
        max_size=40,
    ).map("".join)
    | st.text(max_size=200)
)
def test_any_text_is_unwrapped_without_raising(text: str) -> None:
    assert isinstance(unwrap(text), str)


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes_are_unpacked_without_raising(data: bytes) -> None:
    assert isinstance(unpack(b"\x1f\x8b" + data, 1000)[0], bytes)


LOGS = [name for name in TEXTS if name.endswith(".log")]


@pytest.mark.parametrize("name", [*LOGS, "startup/vllm-0.6.6-v0-startup.log", "startup/vllm-0.32.0-fail-no-memory.log"])
def test_a_log_whose_line_ends_were_lost_tells_what_it_told(name: str) -> None:
    lines_of = (DATA / name).read_text().splitlines()
    bare = found("\n".join(lines_of).encode())
    assert found(" ".join(lines_of).encode()) == bare, "a tracker joined the lines"
    assert found("\\n".join(lines_of).encode()) == bare, "a program printed the text as a literal"


def test_a_line_that_quotes_another_stays_one_line() -> None:
    for line in (
        "(APIServer pid=1) INFO 11-29 15:08:35 [launcher.py:1] the worker said: [TensorRT-LLM][INFO] Number of tokens per block: 32.",
        "2026-11-29T15:08:35.1Z INFO router: upstream (EngineCore pid=3) INFO 11-29 15:08:35 [kv.py:1] GPU KV cache size: 5 tokens",
    ):
        assert (
            unwrap(line + "\n" + "another line without any sign of an engine in it\n")
            == line + "\nanother line without any sign of an engine in it\n"
        )
