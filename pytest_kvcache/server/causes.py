"""What the sentence of a failed start means, in numbers, and what to change. ``rootcause`` finds the sentence.

An engine's own advice is not always a diagnosis ("try increasing" where lowering is right), so what is said here is computed
from the figures of the sentence and the log around it: ``explanations/``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_kvcache.server.explanations import llamacpp, machine, others, sglang, vllm
from pytest_kvcache.server.rootcause import log_lines, root_cause, strip_prefix

# The machine comes last: an engine's own sentence about a full card says more.
_KNOWN = (*vllm.KNOWN, *sglang.KNOWN, *others.KNOWN, *llamacpp.KNOWN, *machine.KNOWN)
# A line that only a server which is up prints. What fails after it is no failed start.
_UP = re.compile(
    r"Application startup complete|Uvicorn running on|server is listening|The server is fired up|Avg prompt throughput|Decode batch"
    r"|\bConnected$|HTTP Server started|Avg thr \(in/out\)|Started GRPCInferenceService"
)
_MOST_CHARS = 4 << 20


@dataclass(frozen=True)
class Diagnosis:
    """Why a start failed. ``cause`` is the engine's sentence, ``means`` what it says in numbers, ``change`` what to try ("" where not
    known). ``after_start`` says that the server had been up before.
    """

    cause: str
    means: str = ""
    change: str = ""
    after_start: bool = False

    @property
    def hint(self) -> str:
        """``means`` and ``change`` as one text; "" where the sentence is not one that is known."""
        return "; ".join(part for part in (self.means, self.change) if part)


def diagnose(text: str) -> Diagnosis | None:
    """Return why the server of this start-up log did not start; None where the log holds no failure. Never raises."""
    cause = root_cause(text)
    if not cause:
        return None
    means, change = explain(cause, text)
    lines = log_lines(text[-_MOST_CHARS:])
    failed = [number for number, line in enumerate(lines) if cause[:60] in " ".join(strip_prefix(line).split())]
    up = next((number for number, line in enumerate(lines) if _UP.search(line)), None)
    return Diagnosis(cause, means, change, after_start=up is not None and bool(failed) and failed[-1] > up)


def explain(cause: str, text: str = "") -> tuple[str, str]:
    """Return what a sentence means in numbers and what to change; ("", "") where it is not known. ``text`` is the log around it."""
    for pattern, tell in _KNOWN:
        match = pattern.search(cause)
        if match is not None:
            try:
                return tell(match, text)
            except (ValueError, OverflowError, ZeroDivisionError):
                return "", ""
    return "", ""
