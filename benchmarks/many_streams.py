"""Ten thousand streams at once from load processes on two cores: what they cost, and whether every one of them is written down.

usage: python benchmarks/many_streams.py [--users 10000] [--processes 2] [--seconds 30]

The mock server, on the same machine, streams one token a second to each. Printed are the most streams that were in flight at once by
our rows, the requests by outcome, CPU seconds of each worker, and the most memory that each load process held.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from client_cpu import kept, mock
from tabulate import tabulate

from pytest_kvcache.load.contract import read_load, read_rows
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import Settings

TOKENS = 8


def watch_memory(ended: threading.Event, most: dict[int, float], masters: set[int]) -> None:
    """Note the most memory of each Locust process below this one, in MiB, until ``ended``."""
    while not ended.wait(0.5):
        for child in psutil.Process().children(recursive=True):
            try:
                if "locust" in " ".join(child.cmdline()):
                    masters |= {child.pid} if child.children() else set()
                    most[child.pid] = max(most.get(child.pid, 0.0), child.memory_info().rss / 2**20)
            except psutil.Error:
                continue


def most_at_once(begins: list[float], ends: list[float]) -> int:
    """Return how many of the intervals overlap at most."""
    steps = np.concatenate([np.ones(len(begins)), -np.ones(len(ends))])
    order = np.lexsort((steps, np.concatenate([begins, ends])))
    return int(np.cumsum(steps[order]).max(initial=0))


def main() -> None:
    """Press, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most: dict[int, float] = {}
    masters: set[int] = set()
    ended = threading.Event()
    threading.Thread(target=watch_memory, args=(ended, most, masters), daemon=True).start()
    with mock(0.05, 1.0, TOKENS) as url, tempfile.TemporaryDirectory() as folder:
        options = {"stop_timeout_s": 15, "median": 64, "sigma": 0.3, "ramp_s": arguments.seconds / 3}
        began_s = time.monotonic()
        result = run_load(
            [parse_endpoint(url, Settings())],
            "normal",
            Path(folder),
            users=arguments.users,
            duration_s=arguments.seconds,
            output_tokens=TOKENS,
            options=options,
            processes=arguments.processes,
        )
        took_s = time.monotonic() - began_s
        true_s = kept(url)
        rows = list(read_rows(result.rows_path))
        load = read_load(result.rows_path)
        size = result.rows_path.stat().st_size
    ended.set()
    firsts = [row.first_token_s - row.sent_s for row in rows if row.first_token_s is not None]
    print(
        f"{arguments.users} users, {arguments.processes} processes, {arguments.seconds:g} s of load, {took_s:.0f} s in all, complete: {load.complete}"
    )
    print(f"most streams at once: {most_at_once([row.sent_s for row in rows], [row.end_s for row in rows])}")
    print(f"requests: {dict(Counter(row.outcome for row in rows))}, {size / 2**20:.1f} MiB of rows, {len({row.id for row in rows})} different ids")
    print(f"median time to first token: {np.median(firsts) * 1e3:.1f} ms, the server kept {true_s * 1e3:.1f} ms")
    for problem in result.problems:
        print(f"problem: {problem}")
    ends = [[end.worker or "-", end.rows, f"{end.cpu_s:.1f}", f"{end.lag_p99_s * 1e3:.0f}", f"{end.lag_max_s * 1e3:.0f}"] for end in load.ends]
    print(tabulate(ends, headers=["worker", "requests", "CPU s", "loop lag p99 ms", "max ms"]))
    print(
        tabulate([["master" if pid in masters else "worker", f"{size:.0f}"] for pid, size in sorted(most.items())], headers=["process", "most MiB"])
    )


if __name__ == "__main__":
    main()
