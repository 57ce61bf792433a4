"""Result files of other load tools, by our names for what they tell: AIPerf, GuideLLM, vLLM's ``bench serve`` and SGLang's benchmarks.

A tool that sees only its own requests tells nothing of the server's KV: usage, free blocks and preemptions stay Missing, and a gate on them
never passes. AIPerf's export of server metrics tells them. Each format is one file of this room: ``claims`` says whether what a file holds is of
that tool, ``read`` gives its loads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.imports import aiperf, aiperf_server, guidellm, guidellm_table, sglang_bench, sglang_one_batch, vllm_bench
from pytest_kvcache.imports.looks import looks_like
from pytest_kvcache.imports.reading import Columns, Table, read_file
from pytest_kvcache.imports.result import Result, merged

MOST_RESULTS = 1000
_MOST_BESIDE = 20
IN_FOLDER = ("profile_export_aiperf.json", "benchmarks.json", "benchmarks.yaml", "benchmarks.csv", "summary.csv", "summary.json")
"""The result file by which a tool's own output folder is known: AIPerf's, GuideLLM's, and that of a sweep of vLLM or of one combination of it."""

TOOLS: tuple[tuple[str, Callable[[Any], bool], Callable[[Any], list[Result]]], ...] = (
    ("AIPerf", aiperf.claims, aiperf.read),
    ("AIPerf's server metrics", aiperf_server.claims, aiperf_server.read),
    ("GuideLLM", guidellm.claims, guidellm.read),
    ("GuideLLM", guidellm_table.claims, guidellm_table.read),
    ("SGLang bench_serving", sglang_bench.claims, sglang_bench.read),
    ("SGLang bench_one_batch_server", sglang_one_batch.claims, sglang_one_batch.read),
    ("vllm bench serve", vllm_bench.claims, vllm_bench.read),
)


def read_results(path: Path) -> list[Result]:
    """Return the loads that a result file tells of, in its order. Raises UsageError where it cannot be read, CannotJudge where no tool claims it.

    What AIPerf wrote of the server in the same folder and benchmark belongs to the load: it is read with it.
    """
    return [_with_server(result, path) for result in _read_alone(path)]


def result_file(path: Path) -> Path | None:
    """Return the result file of another tool that ``path`` is, or that lies in its folder; None where it is neither."""
    if path.is_file():
        return path
    if (path / "runs").is_dir() or (path / "run.json").is_file():  # ours
        return None
    return next((path / name for name in IN_FOLDER if (path / name).is_file()), None)


def _read_alone(path: Path) -> list[Result]:
    found: list[Result] = []
    for value in read_file(path):
        for one in value if isinstance(value, list) else [value]:
            found += _read_one(one, path)
            if len(found) > MOST_RESULTS:
                raise UsageError(f"more than {MOST_RESULTS} results in one file", where=str(path))
    if not found:
        raise CannotJudge("cannot judge: the file holds no result", where=str(path), hint="did the load tool come to its end?")
    return found


def _read_one(one: Any, path: Path) -> list[Result]:
    tool = next((tool for tool in TOOLS if isinstance(one, dict | Table | Columns) and tool[1](one)), None)
    if tool is None:
        what, hint = looks_like(one)
        if what:
            raise CannotJudge(f"cannot judge: this looks like {what}", where=str(path), hint=hint)
        raise CannotJudge(
            "cannot judge: no load tool that is known wrote this file",
            where=str(path),
            hint=f"known: files of {', '.join(dict.fromkeys(name for name, _, _ in TOOLS))} (docs/interchange.md)",
        )
    try:
        return tool[2](one)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise CannotJudge(
            f"cannot judge: this looks like a result of {tool[0]}, and has another layout: {type(error).__name__}: {str(error)[:120]}",
            where=str(path),
            hint="name the file as the tool wrote it",
        ) from None


def _with_server(result: Result, path: Path) -> Result:
    """Return a load of AIPerf with what it wrote of the server in the same benchmark, where that lies beside its file."""
    if result.tool != aiperf.TOOL or not result.benchmark or result.engine:
        return result
    for beside in sorted(path.parent.glob("*server_metrics*.json"))[:_MOST_BESIDE]:
        try:
            found = _read_alone(beside)
        except (CannotJudge, UsageError):
            continue
        if len(found) == 1 and found[0].engine and found[0].benchmark == result.benchmark:
            return merged(result, found[0], f"with {beside.name} of the same benchmark, which lies beside it")
    return result
