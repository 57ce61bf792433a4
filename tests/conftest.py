"""What every test of this repository gets."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import hypothesis
import pytest
from loopback_tls import Tls, make_tls

from pytest_kvcache.server import redaction

# The same examples at every run and no deadline, so that no test fails by chance or on a busy machine; HYPOTHESIS_PROFILE=default looks for others.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


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


@pytest.fixture(autouse=True)
def no_remembered_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no secret of one test be taken out of the texts of another."""
    monkeypatch.setattr(redaction, "_remembered", frozenset())
