"""A user's regular expressions, run in a small process of their own: one that never ends costs its item and not the session."""

from __future__ import annotations

import json
import select
import subprocess
import sys

from pytest_kvcache.quality.child import Child
from pytest_kvcache.quality.graders import LONGEST_ANSWER

TIME_LIMIT_S = 2.0
START_LIMIT_S = 20.0

_PROGRAM = """
import json, re, sys
sys.stdout.write("r")
sys.stdout.flush()
for line in sys.stdin:
    pattern, text = json.loads(line)
    sys.stdout.write("1" if re.search(pattern, text) else "0")
    sys.stdout.flush()
"""


class PatternProcess(Child):
    """Searches patterns within a time limit each. Started at the first use; safe to use from several threads; close it, or use ``with``."""

    def __init__(self, limit_s: float = TIME_LIMIT_S) -> None:
        super().__init__(limit_s)

    def search(self, pattern: str, text: str) -> bool | None:
        """Return whether the pattern is found in the text; None where it did not finish in time."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._read(START_LIMIT_S)
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(json.dumps([pattern, text[:LONGEST_ANSWER]]).encode() + b"\n")
                self._process.stdin.flush()
                answer = self._read(self._limit_s)
            except BrokenPipeError:
                answer = b""
            if answer not in {b"0", b"1"}:
                self._stop()
                return None
            return answer == b"1"

    def _read(self, limit_s: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        return self._process.stdout.read(1) if ready else b""
