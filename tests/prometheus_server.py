"""A real Prometheus server (Debian's package) on 127.0.0.1, with a configuration and a data folder of its own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType


def prometheus_binary() -> str:
    """Return the path of the server; the test fails, and says what to install, where there is none."""
    found = shutil.which("prometheus") or ("/usr/bin/prometheus" if Path("/usr/bin/prometheus").exists() else "")
    assert found, "a real Prometheus server is needed: apt-get update && apt-get install -y prometheus"
    return found


class PrometheusServer:
    """Scrapes ``jobs`` (name -> addresses as host:port) once a second; a context manager. ``url`` is its address."""

    def __init__(self, folder: Path, jobs: Mapping[str, Sequence[str]], interval: str = "1s") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.targets = sum(len(addresses) for addresses in jobs.values())
        scrapes = "".join(
            f"  - job_name: {name}\n    static_configs:\n      - targets: {json.dumps(list(addresses))}\n" for name, addresses in jobs.items()
        )
        config = folder / "prometheus.yml"
        config.write_text(f"global:\n  scrape_interval: {interval}\n  scrape_timeout: {interval}\nscrape_configs:\n{scrapes}")
        self.log = folder / "prometheus.log"
        self._command = [
            prometheus_binary(),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrometheusServer:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        try:
            self.wait(f"count(up == 1) == {self.targets}", 30)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)

    def wait(self, query: str, within_s: float = 30.0) -> float:
        """Wait until a query has a result and return the time (Unix seconds) that it has it for; the test fails, with the server's log, where it has none.

        A scrape that began before that time may still come in: what was so a second earlier stays so.
        """
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            try:
                at = time.time()
                address = f"{self.url}/api/v1/query?query={urllib.parse.quote(query)}&time={at:.3f}"
                with urllib.request.urlopen(address, timeout=5) as answer:
                    if json.load(answer)["data"]["result"]:
                        return at
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"{query} has no result within {within_s} s: {self.log.read_text()[-2000:]}")
