"""A small process of our own that works for one caller at a time, and is ended whatever it does."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from types import TracebackType
from typing import Self


class Child:
    """What a worker process needs beside its work: a lock, its end, and ``with``. A subclass starts ``_process`` at its first use."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait(timeout=10)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
