"""What the plugin adds to a pytest start, and how long ``pytest-kvcache --help`` takes. CPU seconds, paired, median of N.

usage: python benchmarks/startup.py [N=15]
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile


def cpu_s(command: list[str], folder: str) -> float:
    """Return the CPU seconds (user and system) of one run of ``command``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the medians."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "test_a.py"), "w") as file:  # noqa: PTH118, PTH123
            file.write("def test_a():\n    pass\n")
        base = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        cpu_s(base, folder)
        pairs = [(cpu_s([*base, "-p", "no:kvcache"], folder), cpu_s(base, folder)) for _ in range(repeats)]
        added = statistics.median(with_plugin - without for without, with_plugin in pairs)
        print(f"pytest without the plugin: {statistics.median(p[0] for p in pairs):.3f} s CPU; the plugin adds {added * 1e3:.1f} ms")
        helps = [cpu_s([sys.executable, "-m", "pytest_kvcache.cli", "--help"], folder) for _ in range(repeats)]
        bare = [cpu_s([sys.executable, "-c", "pass"], folder) for _ in range(repeats)]
        print(f"pytest-kvcache --help: {statistics.median(helps):.3f} s CPU (bare interpreter {statistics.median(bare):.3f} s)")


if __name__ == "__main__":
    main()
