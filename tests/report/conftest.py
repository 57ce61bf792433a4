"""Sessions that the tests of the report look at; made once, and read only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_sessions import (
    DIFF,
    LLAMACPP,
    LOADS,
    SMALL_LOADS,
    Server,
    compare_gates,
    fp8,
    make_quality,
    make_run,
    single_gates,
    verdict_of,
)

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.report import html
from pytest_kvcache.report.model import SessionView


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> SessionView:
    """One vLLM server, three lanes and quality, a FAIL, a deselected gate and a gap of two seconds in the samples."""
    folder = tmp_path_factory.mktemp("single")
    server = Server()
    runs = [
        make_run(folder, n + 1, server, replace(load, duration_s=12.0), gap=(8.0, 10.0) if load.lane == "normal" else None)
        for n, load in enumerate(LOADS.values())
    ]
    runs.append(make_quality(folder, 4, server))
    verdict = verdict_of(
        "FAIL", folder, single_gates(), server, name="nightly", deselected=["suite/test_capacity.py::test_nothing"], repeat=["pytest -m capacity"]
    )
    return SessionView(folder, verdict, (), [analyse(run) for run in runs])


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> SessionView:
    """bf16 against fp8 on vLLM, two windows a side, quality lost at two lengths."""
    folder = tmp_path_factory.mktemp("compared")
    sides: dict[str, list[Analysis]] = {"before": [], "after": []}
    number = 0
    for side, server in (("before", Server()), ("after", fp8(Server()))):
        for window in range(2):
            number += 1
            sides[side].append(analyse(make_run(folder, number, server, replace(LOADS["longctx"], duration_s=10.0), side=side, window=window)))
        number += 1
        sides[side].append(analyse(make_quality(folder, number, server, side=side, fails={512: 5, 2_048: 9} if side == "after" else {})))
    verdict = verdict_of("FAIL", folder, compare_gates(0.8, "FAIL"), fp8(Server()), config_diff=DIFF, comparison="bf16 against fp8", notes=["a note"])
    return SessionView(folder, verdict, sides["before"], sides["after"])


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> SessionView:
    """The embedded llama.cpp, which counts tokens and never preempts; a PASS."""
    folder = tmp_path_factory.mktemp("embedded")
    runs = [make_run(folder, n + 1, LLAMACPP, load) for n, load in enumerate(SMALL_LOADS.values())]
    gates = [gate for gate in single_gates() if gate.verdict == "PASS"]
    return SessionView(folder, verdict_of("PASS", folder, gates, LLAMACPP, name="laptop"), (), [analyse(run) for run in runs])


@pytest.fixture(scope="session")
def single_page(single: SessionView) -> str:
    return html.report(single)


@pytest.fixture(scope="session")
def compared_page(compared: SessionView) -> str:
    return html.report(compared)


@pytest.fixture(scope="session")
def embedded_page(embedded: SessionView) -> str:
    return html.report(embedded)
