"""Result files of other load tools, by our names for what they tell: AIPerf, GuideLLM, vLLM's ``bench serve`` and SGLang's ``bench_serving``.

A tool that sees only its own requests tells nothing of the server's KV: usage, free blocks and preemptions stay Missing, and a gate on them
never passes. Each format is one file of this room: ``claims`` says whether a parsed file is of that tool, ``read`` gives its loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.imports import aiperf, guidellm, sglang_bench, vllm_bench
from pytest_kvcache.imports.result import Result

LARGEST_BYTES = 512 << 20
MOST_RESULTS = 1000
TOOLS: tuple[tuple[str, Callable[[Any], bool], Callable[[Any], list[Result]]], ...] = (
    ("AIPerf", aiperf.claims, aiperf.read),
    ("GuideLLM", guidellm.claims, guidellm.read),
    ("SGLang bench_serving", sglang_bench.claims, sglang_bench.read),
    ("vllm bench serve", vllm_bench.claims, vllm_bench.read),
)


def read_results(path: Path) -> list[Result]:
    """Return the loads that a result file tells of, in its order. Raises UsageError where it cannot be read, CannotJudge where no tool claims it."""
    found: list[Result] = []
    for value in _values(path):
        for one in value if isinstance(value, list) else [value]:
            tool = next((tool for tool in TOOLS if isinstance(one, dict) and tool[1](one)), None)
            if tool is None:
                known = ", ".join(name for name, _, _ in TOOLS)
                raise CannotJudge(
                    "cannot judge: no load tool that is known wrote this file",
                    where=str(path),
                    hint=f"known: the JSON of {known}; for AIPerf profile_export_aiperf.json, for a sweep of vLLM its summary.json",
                )
            try:
                found += tool[2](one)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise CannotJudge(
                    f"cannot judge: this looks like a result of {tool[0]}, and has another layout: {type(error).__name__}: {str(error)[:120]}",
                    where=str(path),
                    hint="name the file as the tool wrote it",
                ) from None
            if len(found) > MOST_RESULTS:
                raise UsageError(f"more than {MOST_RESULTS} results in one file", where=str(path))
    if not found:
        raise CannotJudge("cannot judge: the file holds no result", where=str(path), hint="did the load tool come to its end?")
    return found


def _values(path: Path) -> Iterator[Any]:
    """Yield the JSON values of a file: one, or one a line."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UsageError("a result file of more than 512 MiB is not read", where=str(path), hint="write it without the text of answers")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"no result file: {error.strerror or error}", where=str(path)) from None
    except UnicodeDecodeError:
        raise CannotJudge("cannot judge: this is no text", where=str(path), hint="name the JSON file that the load tool wrote") from None
    try:
        yield json.loads(text)
    except RecursionError:
        raise CannotJudge("cannot judge: this is nested too deep", where=str(path)) from None
    except ValueError as whole:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            values = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            values = []
        if len(values) < 2:
            raise CannotJudge(f"cannot judge: this is no JSON: {str(whole)[:120]}", where=str(path), hint="name the JSON file, not the CSV") from None
        yield from values
