"""What one scrape costs: our parser of the families in use against prometheus_client's full parse, on a recorded vLLM text.

Run: ``python benchmarks/scrape_parse.py [FILE] [--pairs N]``. Prints CPU milliseconds per parse (median of pairs that alternate) and
the median of the paired ratios. The budget is 1.5 ms for the recorded 55 KB of vLLM 0.32. ``reading`` is what the sampler adds: the
quantities that it writes ten times a second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pytest_kvcache.engines import DIALECTS, RawState, read_values
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.observe.sampler import SAMPLED

RECORDED = Path(__file__).parent.parent / "tests" / "data" / "exposition" / "vllm" / "0.32.0-cpu.prom"


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the CPU milliseconds of one call."""
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=RECORDED)
    parser.add_argument("--pairs", type=int, default=200)
    options = parser.parse_args()
    data = options.file.read_bytes()
    dialect = DIALECTS["vllm"]
    raw = RawState(metrics=parse_samples(data, dialect.wanted))

    def ours() -> object:
        return parse_samples(data, dialect.wanted)

    def full() -> object:
        return list(text_string_to_metric_families(data.decode()))

    def reading() -> object:
        return read_values(dialect, raw, only=SAMPLED)

    for work in (ours, full, reading):
        work()
    pairs = [(cpu_ms(ours), cpu_ms(full)) for _ in range(options.pairs)]
    readings = [cpu_ms(reading) for _ in range(options.pairs)]
    print(f"{options.file.name}: {len(data)} bytes, {len(data.splitlines())} lines, {options.pairs} pairs")
    print(
        f"  ours           {statistics.median(a for a, _ in pairs):7.3f} ms CPU (90 % under {sorted(a for a, _ in pairs)[int(0.9 * len(pairs))]:.3f})"
    )
    print(f"  full parse     {statistics.median(b for _, b in pairs):7.3f} ms CPU")
    print(f"  paired ratio   {statistics.median(b / a for a, b in pairs):7.1f} x")
    print(f"  reading        {statistics.median(readings):7.3f} ms CPU for {len(SAMPLED)} quantities")


if __name__ == "__main__":
    main()
