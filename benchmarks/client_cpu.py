"""What the load client costs: CPU seconds per million streamed tokens, and how true its time to first token is.

usage: python benchmarks/client_cpu.py [--seconds 8] [--pairs 3] [--vllm PYTHON]

Against the same mock server: 64-token streams as fast as they come with 32 users, and paced at 20 ms per token after 50 ms with
200 users, whose starts are spread over one stream or all in the same instant. In each, our profile (every row written, prompts made,
events decoded), a plain FastHttpUser loop, and, with --vllm, the load client of vLLM run in turn; the ratio of a turn is the figure
that a noisy machine cannot spoil. CPU is user + system time of the load process from the start of the load to its end, without
imports. The time to first token is compared with the one that the server kept from reading a request on: users who all start at once
queue in front of it, which is theirs to feel and no error of the client.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tabulate import tabulate

from pytest_kvcache.load.contract import read_load, read_rows
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.server.embedded.recall import model_paths
from pytest_kvcache.settings import Settings

HERE = Path(__file__).parent
TOKENS = 64
# name, time to first token, time per token, users, seconds over which they start, budget in CPU seconds per million tokens
SETTINGS = (
    ("as fast as they come, 32 users", 0.0, 0.0, 32, 0.0, "7"),
    ("20 ms per token, 200 users, spread", 0.05, 0.02, 200, 1.33, "35"),
    ("the same, all started at once", 0.05, 0.02, 200, 0.0, "35"),
)


@contextmanager
def mock(ttft_s: float, itl_s: float, tokens: int = TOKENS) -> Iterator[str]:
    """Yield the address of a mock server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, str(HERE / "mock_sse.py"), str(port), str(tokens), str(ttft_s), str(itl_s)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(100):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def children_s() -> float:
    """Return the CPU seconds of all processes below this one that have ended: imports and preparation included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kept(url: str) -> float:
    """Return the median time to first token that the mock kept since it was asked last."""
    with urllib.request.urlopen(url + "/stats", timeout=10) as answer:
        return float(json.load(answer)["ttft_s"])


def ours(url: str, users: int, seconds: float, ramp_s: float) -> tuple[float, float, float]:
    """Return (CPU seconds per million tokens, error of the median time to first token in seconds, p99 of the loop's lag)."""
    kept(url)
    with tempfile.TemporaryDirectory() as folder:
        options = {"stop_timeout_s": 5, "median": 64, "sigma": 0.3, "ramp_s": ramp_s}
        result = run_load(
            [parse_endpoint(url, Settings())], "normal", Path(folder), users=users, duration_s=seconds, output_tokens=TOKENS, options=options
        )
        rows = [row for row in read_rows(result.rows_path) if row.outcome == "ok"]
        end = read_load(result.rows_path).ends[0]
    tokens = sum(row.completion_tokens or 0 for row in rows)
    firsts = [row.first_token_s - row.sent_s for row in rows if row.first_token_s is not None]
    return end.cpu_s / tokens * 1e6, statistics.median(firsts) - kept(url), end.lag_p99_s


def plain(url: str, users: int, seconds: float, ramp_s: float) -> float:
    """Return CPU seconds per million tokens of a plain loop."""
    words = [sys.executable, "-m", "locust", "-f", str(HERE / "plain_user.py"), "--headless", "--only-summary", "-H", url]
    words += ["-u", str(users), "-r", str(users), "-t", f"{int(seconds)}s", "-s", "5s"]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"BENCHMARK_RAMP_S": str(ramp_s)}
        out = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds + 60, check=False).stdout
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    return float(found["cpu_s"]) / float(found["tokens"]) * 1e6


def vllm_bench(python: str, url: str, users: int, prompts: int) -> tuple[float, float]:
    """Return (CPU seconds per million tokens, error of the median time to first token in seconds) of vLLM's own client."""
    kept(url)
    words = [python, str(HERE / "vllm_bench.py"), url, str(model_paths().hf), str(users), str(prompts), str(TOKENS)]
    out = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout
    found = json.loads(next(line for line in out.splitlines() if line.startswith('{"tokens"')))
    return float(found["cpu_s"]) / float(found["tokens"]) * 1e6, float(found["ttft_ms"]) / 1e3 - kept(url)


def main() -> None:
    """Run the settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one run")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs in each setting")
    parser.add_argument("--vllm", default=os.environ.get("BENCHMARK_VLLM_PYTHON", ""), help="a Python that has vLLM: its bench runs as well")
    arguments = parser.parse_args()
    table, whole = [], []
    for name, ttft_s, itl_s, users, ramp_s, budget in SETTINGS:
        runs = []
        with mock(ttft_s, itl_s) as url:
            for _ in range(arguments.pairs):
                began_s = children_s()
                cpu, first, lag = ours(url, users, arguments.seconds, ramp_s)
                mine_s = children_s() - began_s
                other = plain(url, users, arguments.seconds, ramp_s)
                prompts = int(users * arguments.seconds / max(ttft_s + TOKENS * itl_s, 0.06))
                began_s = children_s()
                theirs = vllm_bench(arguments.vllm, url, users, prompts) if arguments.vllm else (float("nan"), float("nan"))
                whole.append((name, mine_s, children_s() - began_s))
                runs.append((cpu, cpu / other, first, lag, other, *theirs, theirs[0] / cpu))
        cpu, ratio, first, lag, other, bench, bench_first, bench_ratio = (statistics.median(column) for column in zip(*runs, strict=True))
        off = [f"{value * 1e3:+.1f}" if ttft_s else "-" for value in (first, bench_first)]
        table.append([name, f"{cpu:.1f}", budget, f"{other:.1f}", f"{ratio:.2f}", f"{bench:.1f}", f"{bench_ratio:.1f}", *off, f"{lag * 1e3:.1f}"])
    headers = ["64-token streams", "CPU s per 1M", "budget", "plain loop", "ours / plain", "vllm bench", "bench / ours"]
    print(tabulate(table, headers=[*headers, "TTFT off, ms", "bench off, ms", "loop lag p99, ms"]))
    if arguments.vllm:
        print("\nCPU seconds of whole processes, with imports and the making of prompts, a run each:\n")
        print(tabulate([[name, f"{a:.1f}", f"{b:.1f}"] for name, a, b in whole], headers=["", "ours", "vllm bench"]))


if __name__ == "__main__":
    main()
