"""Hooks that a ``conftest.py`` may implement. Each has an example that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvcache.engines import Dialect
    from pytest_kvcache.records import GateRecord
    from pytest_kvcache.runfolder import Run


@pytest.hookspec
def pytest_kvcache_engines(config: pytest.Config) -> list[Dialect]:
    """Return dialects of engines that the package does not know; they are asked before its own.

    ::

        def pytest_kvcache_engines(config):
            from my_engine import DIALECT

            return [DIALECT]
    """
    raise NotImplementedError


@pytest.hookspec
def pytest_kvcache_provenance(config: pytest.Config) -> dict[str, str]:
    """Return facts to keep with every Run: image tag, commit, driver. Later plugins win.

    ::

        def pytest_kvcache_provenance(config):
            return {"image": os.environ.get("IMAGE_TAG", "unknown")}
    """
    raise NotImplementedError


@pytest.hookspec
def pytest_kvcache_run_finished(config: pytest.Config, run: Run) -> None:
    """Called after each Run was written; ``run.folder`` holds its files.

    ::

        def pytest_kvcache_run_finished(config, run):
            shutil.copytree(run.folder, "/archive/" + run.record.id)
    """


@pytest.hookspec
def pytest_kvcache_verdict(config: pytest.Config, gate: GateRecord) -> None:
    """Called for every gate as it is judged.

    ::

        def pytest_kvcache_verdict(config, gate):
            if gate.verdict == "FAIL":
                notify(gate.text)
    """
