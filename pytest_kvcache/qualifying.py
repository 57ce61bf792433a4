"""``pytest-kvcache quality``: judges the answers of two sides that were asked elsewhere, item by item, or the pass rate of one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_kvcache.records import QualityRow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("before", metavar="BEFORE", help="sample log of lm-evaluation-harness, a folder that holds some, a session, or a Run")
    parser.add_argument("after", metavar="AFTER", help="the same of the side after the change")
    parser.add_argument("--margin", type=float, default=0.01, help="largest share of the items that may be lost (0.01)")
    parser.add_argument("--metric", default="", help="metric of the harness that says pass or fail (default: the first that is 0 or 1 everywhere)")


def run_quality(arguments: argparse.Namespace) -> int:
    """Print how the items of both sides compare and return the exit code of the verdict."""
    from pytest_kvcache.errors import UsageError
    from pytest_kvcache.judge.quality import judge_items
    from pytest_kvcache.report.escape import plain

    if not 0 < arguments.margin < 1:
        raise UsageError("--margin is a share between 0 and 1", hint="--margin 0.01")
    before, after = (_rows(Path(path), arguments.metric) for path in (arguments.before, arguments.after))
    judged = judge_items(before, after, arguments.margin)
    if isinstance(judged, str):
        print(f"INVALID: {plain(judged or 'no item was asked on both sides', 500)}")
        return 4
    print(f"{judged.found.verdict}: {plain(judged.text, 2000)}")
    return {"PASS": 0, "FAIL": 1}.get(judged.found.verdict, 3)


def _rows(path: Path, metric: str) -> list[QualityRow]:
    from pytest_kvcache.quality.harness import read_samples
    from pytest_kvcache.runfolder import read_runs

    if path.is_dir() and ((path / "run.json").exists() or (path / "runs").is_dir()):
        return [row for run in read_runs(path) for row in run.quality()]
    return read_samples(path, metric)
