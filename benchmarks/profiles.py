"""Each shipped profile against one server: planned and real prompt tokens, and how the requests ended, as a Markdown table.

usage: python benchmarks/profiles.py URL [--seconds 20] [--api chat] [--profile NAME ...]

Sizes suit a server with a context of 4,096 tokens on a laptop's CPU. The trace that is replayed is the sample of the tests.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pytest_kvcache.load.contract import read_rows
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.server.endpoint import choose_model
from pytest_kvcache.settings import Settings

TRACE = Path(__file__).parent.parent / "tests" / "data" / "traces" / "timed_trace.jsonl"
OPTIONS: dict[str, dict[str, Any]] = {
    "normal": {"median": 256},
    "longctx": {},
    "nearmax": {},
    "mixed": {"median": 256, "long_share": 0.2},
    "sharedprefix": {"prefix_tokens": 512},
    "multiturn": {"think_s": 0.2},
    "prefillburst": {"burst_size": 4},
    "overlimit": {"backoff_s": 0.25, "think_s": 0.25},
    "trace": {"trace": str(TRACE)},
}


def row_of(url: str, profile: str, seconds: float, api: str) -> list[Any]:
    """Return one line of the table: a profile pressed for that long."""
    endpoint = choose_model(parse_endpoint(url, Settings(api=api)))
    own = 0.0 if profile == "trace" else seconds
    with tempfile.TemporaryDirectory() as folder:
        # nearmax is exact up to the last token only without a margin
        options = {**OPTIONS[profile], "margin": 0} if profile == "nearmax" else OPTIONS[profile]
        result = run_load([endpoint], profile, Path(folder), duration_s=own, options=options)
        rows = list(read_rows(result.rows_path))
    served = [row for row in rows if row.prompt_tokens is not None]
    off = sum(row.prompt_tokens != row.prompt_tokens_planned for row in served)
    short = sum((row.completion_tokens or 0) != row.output_tokens_planned for row in served if row.outcome == "ok")
    planned = sum(row.prompt_tokens_planned or 0 for row in served)
    real = sum(row.prompt_tokens or 0 for row in served)
    classes = ", ".join(f"{count} {name}" for name, count in Counter(row.outcome for row in rows).most_common())
    lanes = ", ".join(f"{name} {count}" for name, count in sorted(Counter(row.lane for row in rows).items()))
    return [profile, api, len(rows), lanes, f"{planned:,}", f"{real:,}", off, short, classes]


def main() -> None:
    """Press the server with each profile and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--api", action="append", choices=("completions", "chat"))
    parser.add_argument("--profile", action="append", choices=tuple(OPTIONS))
    arguments = parser.parse_args()
    lines = [
        row_of(arguments.url, profile, arguments.seconds, api)
        for api in arguments.api or ("completions",)
        for profile in arguments.profile or OPTIONS
    ]
    headers = ["profile", "API", "requests", "lanes", "prompt tokens planned", "real", "prompts off", "answers off", "outcomes"]
    print(tabulate(lines, headers=headers, tablefmt="github"))


if __name__ == "__main__":
    main()
