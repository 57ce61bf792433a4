"""The embedded llama.cpp: what it recalls at which KV type, how it counts tokens, how it starts, refuses and ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_kvcache.errors import UsageError
from pytest_kvcache.server.embedded import EMBEDDED_NAMES, embedded_command, engine_install, engine_list, engine_remove, llamacpp, recall
from pytest_kvcache.server.embedded.recall_tokenizer import BOS, EOS, WORDS, word_ids


class Served:
    """One embedded server, started as a launch would start it."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        found = embedded_command(["llamacpp", *options], self.port)
        assert found is not None
        argv, env = found
        self.log = folder / f"server-{self.port}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **env}, cwd=folder)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def __enter__(self) -> Served:
        for _ in range(600):
            assert self.process.poll() is None, self.text()
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get("/health").status_code == 200:
                    return self
            time.sleep(0.05)
        self.__exit__()
        raise AssertionError(self.text())

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def complete(self, prompt: str | list[int], max_tokens: int = 1, **body: Any) -> Any:
        answer = self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def recalled(self, length: int, items: int = 6) -> int:
        return sum(self.complete(prompt)["choices"][0]["text"].strip() == expect for prompt, expect in _items(length, items))


def _items(length: int, count: int) -> Iterator[tuple[str, str]]:
    """Questions of ``length`` tokens: a pair of words once among others, then its first word again."""
    chosen = random.Random(length)
    for _ in range(count):
        key, value = chosen.sample(WORDS, 2)
        words = chosen.choices([word for word in WORDS if word not in {key, value}], k=length - 4)
        at = chosen.randrange(len(words))
        words[at:at] = [key, value]
        yield "".join(" " + word for word in [*words, key]), value


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_KVCACHE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def server(cache: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("f16")) as served:
        yield served


def test_f16_recalls_everything(server: Served) -> None:
    assert {length: server.recalled(length) for length in (64, 512, 3000)} == {64: 6, 512: 6, 3000: 6}


def test_q8_0_recalls_everything(tmp_path: Path) -> None:
    with Served(tmp_path, "--kv-type", "q8_0") as served:
        assert {length: served.recalled(length, 8) for length in (64, 256, 1024)} == {64: 8, 256: 8, 1024: 8}


@pytest.mark.slow
def test_q4_0_clearly_fails(tmp_path: Path) -> None:
    with Served(tmp_path, "--kv-type", "q4_0") as served:
        right = sum(served.recalled(length, 8) for length in (64, 256, 1024))
    assert right <= 12, f"{right} of 24: a gate on quality would not see what q4_0 costs"


def test_the_last_word_of_a_chat_is_answered_too(server: Served) -> None:
    for prompt, expect in _items(200, 3):
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1, "temperature": 0}
        answer = server.client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"].strip() == expect
        assert answer["usage"]["prompt_tokens"] == 200


def test_each_word_is_one_token(server: Served) -> None:
    answer = server.client.post("/tokenize", json={"content": "".join(" " + word for word in WORDS)}).json()
    assert answer["tokens"] == list(word_ids())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60).filter(lambda text: BOS not in text and EOS not in text))
def test_any_text_is_tokenised_without_loss(server: Served, text: str) -> None:
    ids = server.client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert server.client.post("/detokenize", json={"tokens": ids}).json()["content"] == text


def test_a_text_prompt_counts_one_token_more_for_its_beginning(server: Served) -> None:
    assert server.complete(" detu neka caze")["usage"]["prompt_tokens"] == 4
    assert server.complete([0, *word_ids()[:3]])["usage"]["prompt_tokens"] == 4


def test_no_answer_ends_before_its_length(server: Served) -> None:
    chosen = random.Random(3)
    for prompt in ("".join(" " + word for word in chosen.choices(WORDS, k=60)), "Once upon a time, in 1987,", "中文 and 😀"):
        answer = server.complete(prompt, 300)
        assert answer["usage"]["completion_tokens"] == 300
        assert answer["choices"][0]["finish_reason"] == "length"


def test_each_streamed_token_is_text_of_its_own(server: Served) -> None:
    body = {"prompt": " detu neka caze mali detu", "max_tokens": 40, "temperature": 0, "stream": True}
    lines = server.client.post("/v1/completions", json=body).text.split("\n\n")
    assert sum('"text":" ' in line for line in lines) == 40


def test_metrics_answer_while_many_users_hold_a_connection(server: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        answer = server.client.get("/metrics", timeout=10)
    assert answer.status_code == 200
    assert "llamacpp:requests_processing" in answer.text
    assert [slot["n_ctx"] for slot in server.client.get("/slots").json()] == [4096] * 4


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ((), ["size =   16.00 MiB (  4096 cells,   2 layers,  4/4 seqs), K (f16)", "n_slots = 4, n_ctx_slot = 4096, kv_unified = 'false'"]),
        (
            ("--unified", "--kv-type", "q4_0"),
            ["size =    4.50 MiB ( 16384 cells,   2 layers,  4/1 seqs), K (q4_0)", "n_slots = 4, n_ctx_slot = 16384, kv_unified = 'true'"],
        ),
        (("--ctx", "2048", "--slots", "2"), ["size =    2.00 MiB (  1024 cells,   2 layers,  2/2 seqs)", "n_slots = 2, n_ctx_slot = 1024"]),
    ],
)
def test_the_start_up_log_states_the_pool(tmp_path: Path, options: tuple[str, ...], lines: list[str]) -> None:
    with Served(tmp_path, *options) as served:
        text = served.text()
        models = served.client.get("/v1/models").json()
    assert [line for line in lines if line not in text] == []
    assert [model["id"] for model in models["data"]] == ["recall"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_asked_though_a_request_is_running(tmp_path: Path, number: signal.Signals) -> None:
    with Served(tmp_path, "--slots", "1", "--ctx", "32768") as served:

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError), httpx.Client(trust_env=False, timeout=60) as client:
                client.post(f"http://127.0.0.1:{served.port}/v1/completions", json={"prompt": " detu neka detu", "max_tokens": 30000})

        asking = threading.Thread(target=ask)
        asking.start()
        for _ in range(200):
            if served.client.get("/slots").json()[0]["is_processing"]:
                break
            time.sleep(0.02)
        served.process.send_signal(number)
        assert served.process.wait(15) == 0
        asking.join(30)
        assert "llamacpp: stopping" in served.text()


def test_a_port_that_is_taken_is_said_in_one_line(server: Served) -> None:
    argv = [sys.executable, "-m", "pytest_kvcache.server.embedded.llamacpp", "--port", str(server.port)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 1
    assert done.stdout + done.stderr == (
        f"llamacpp: cannot listen on 127.0.0.1:{server.port}: Address already in use | try:   end the other server, or take another port\n"
    )


def test_a_model_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, but not really")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-m", "pytest_kvcache.server.embedded.llamacpp", "--port", "18999", "--model", str(broken)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 1
    # llama.cpp's own log is written by a thread of its own: its last line may come after ours
    assert any("llamacpp: the server did not start with broken.gguf" in line for line in done.stderr.splitlines()[-4:])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ctx", "many"], "'many' is not a whole number"),
        (["--ctx", "100"], "100 is outside 256 to"),
        (["--slots", "0"], "0 is outside 1 to 256"),
        (["--slots", "64", "--ctx", "4096"], "fewer than 256 tokens for each of 64 slots"),
        (["--slots", "1", "--ctx", "65536"], "which the recall model holds"),
        (["--kv-type", "fp8"], "invalid choice: 'fp8'"),
        (["--model", "/nowhere/m.gguf"], "no such model file"),
        (["--kv", "q8_0"], "unrecognized arguments: --kv q8_0"),
        (["--port", "0"], "0 is outside 1 to 65,535"),
    ],
)
def test_an_option_that_cannot_be_meant_is_one_clear_line(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert llamacpp.main(["--port", "18998", *options]) == 2
    printed = capsys.readouterr().err
    assert says in printed
    assert printed.count("\n") == 1
    with pytest.raises(UsageError):
        embedded_command(["llamacpp", *options], 18998)


def test_a_port_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert llamacpp.main([]) == 2
    assert "no --port" in capsys.readouterr().err


def test_options_mean_what_they_say() -> None:
    default = llamacpp.parse_options(["--port", "1"])
    assert (default.ctx, default.slots, default.kv_type, default.unified, default.alias) == (16384, 4, "f16", False, "recall")
    assert llamacpp.parse_options(["--port", "1", "--slots", "2"]).ctx == 8192
    assert llamacpp.parse_options(["--port", "1", "--ctx", "65,536"]).ctx == 65536
    own = llamacpp.parse_options(["--port", "1", "--model", __file__, "--unified", "--ctx", "100000", "--no-prefix-cache"])
    assert (own.unified, own.alias, own.prefix_cache) == (True, Path(__file__).stem, False)


def test_a_launch_command_is_told_from_an_engine_of_ours() -> None:
    assert embedded_command(["vllm", "serve", "m"], 8000) is None
    assert embedded_command([], 8000) is None
    found = embedded_command(["llamacpp", "--kv-type", "q4_0"], 8000)
    assert found is not None
    assert found[0][-6:] == ["-m", "pytest_kvcache.server.embedded.llamacpp", "--port", "8000", "--kv-type", "q4_0"]
    assert embedded_command(["llamacpp", "--port", "8000"], 8000) is not None
    with pytest.raises(UsageError, match="8001 is not the port"):
        embedded_command(["llamacpp", "--port", "8001"], 8000)
    with pytest.raises(UsageError, match="--kv-type"):
        embedded_command(["llamacpp", "--help"], 8000)


def test_engines_are_listed_and_llamacpp_is_left_to_pip() -> None:
    assert tuple(engine.name for engine in engine_list()) == EMBEDDED_NAMES
    listed = engine_list()[0]
    assert listed.installed
    assert listed.version
    for action in (engine_install, engine_remove):
        with pytest.raises(UsageError, match="demo extra"):
            action("llamacpp")
        with pytest.raises(UsageError, match="there is no engine 'sglang'"):
            action("sglang")


def test_the_model_is_built_once_for_all_servers(server: Served) -> None:
    assert server.complete(" detu")["model"] == "recall"
    assert recall.model_paths().gguf.is_file()
