"""What a server's own log says: the facts of its start, its last lines, and why it did not start.

A line about the KV pool is no proof of a running server: vLLM prints it before the engine is up, and a failure can follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pytest_kvcache.quantities import QUANTITIES, Reading, Value
from pytest_kvcache.server.redaction import redact
from pytest_kvcache.server.rootcause import last_lines, log_lines, root_cause, strip_escapes
from pytest_kvcache.server.startlogs.llamacpp import LlamaLog
from pytest_kvcache.server.startlogs.lmdeploy import LmdeployLog
from pytest_kvcache.server.startlogs.reading import LogReader
from pytest_kvcache.server.startlogs.sglang import SglangLog
from pytest_kvcache.server.startlogs.tgi import TgiLog
from pytest_kvcache.server.startlogs.trtllm import TrtllmLog
from pytest_kvcache.server.startlogs.vllm import VllmLog

__all__ = [
    "READERS",
    "StartLog",
    "facts",
    "last_lines",
    "read_facts",
    "read_log",
    "read_log_head",
    "read_log_tail",
    "redact",
    "root_cause",
    "strip_escapes",
]

READERS: tuple[type[LogReader], ...] = (VllmLog, LlamaLog, SglangLog, TrtllmLog, TgiLog, LmdeployLog)

_MAX_TEXT = 4 << 20
_MAX_LINE = 8000  # vLLM prints its whole configuration in one
_MAX_SOURCE = 200


@dataclass(frozen=True)
class StartLog:
    """What a log states: whose it is ("" where no engine of ours is known by it), its version, its facts, and what to know of them."""

    engine: str
    title: str
    version: str
    facts: dict[str, Value]
    notes: tuple[str, ...] = ()


def read_log_tail(path: Path, limit_bytes: int = 1 << 20) -> str:
    """Return the last ``limit_bytes`` of a log as text, from the start of a line where it was cut; "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - limit_bytes))
            data = file.read(limit_bytes)
    except OSError:
        return ""
    if size > limit_bytes:
        data = data.partition(b"\n")[2] or data
    return data.decode("utf-8", "replace")


def read_facts(path: Path, limit_bytes: int = 8 << 20) -> dict[str, Value]:
    """Return what the start-up lines of a log file state; they stand in its first ``limit_bytes``. {} where it cannot be read."""
    return facts(read_log_head(path, limit_bytes))


def read_log_head(path: Path, limit_bytes: int = 8 << 20) -> str:
    """Return the first ``limit_bytes`` of a log as text; "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit_bytes).decode("utf-8-sig", "replace")
    except OSError:
        return ""


def facts(text: str) -> dict[str, Value]:
    """Return the quantities that a start-up log states, each a Reading whose source is its line. Never raises.

    Read are the lines of vLLM (V1 and V0), SGLang, llama.cpp, TensorRT-LLM, TGI and LMDeploy. Engines of one data-parallel server
    have a pool each, and these are added up; ranks of one engine share one, and are not. ``pool_bytes`` is the memory of the pool
    over all cards for vLLM, and of one tensor-parallel rank for SGLang: its source says which.
    """
    return read_log(text).facts


def read_log(text: str) -> StartLog:
    """Return what a start-up log states and whose it is. Never raises."""
    readers = [reader() for reader in READERS]
    for line in log_lines(starts_of(text), _MAX_LINE):
        for reader in readers:
            reader.take(line)
    # A line of one engine that another's log quotes must not become a fact: the engine that most lines speak of is believed.
    best = max(readers, key=lambda reader: reader.score)
    if not best.score:
        return StartLog("", "", "", {})
    stated = best.facts()
    found: dict[str, Value] = {name: Reading(value, QUANTITIES[name].unit, _source(line)) for name, (value, line) in stated.items()}
    return StartLog(best.ENGINE, best.TITLE, best.version, found, tuple(best.notes()))


def starts_of(text: str) -> str:
    """Return the parts of a log that tell of a start: its beginning and, of a long one, what follows the last sign of a restart."""
    if len(text) <= _MAX_TEXT:
        return text
    head = text[: _MAX_TEXT // 2]
    words = [reader.START for reader in READERS if reader.START] + ["LLM engine (v", "llama_context: constructing"]
    last = max(text.rfind(word) for word in words)
    if last < len(head):
        return head
    last = text.rfind("\n", 0, last) + 1
    return head + "\n" + text[last : last + _MAX_TEXT // 2]


def _source(line: str) -> str:
    line = redact(" ".join(line.split()))
    return "start-up log: " + (line if len(line) <= _MAX_SOURCE else line[: _MAX_SOURCE - 1] + "…")


def known_facts() -> Iterable[str]:
    """Return the names of the quantities that ``facts`` can give."""
    names = {name for reader in READERS for name, *_ in reader.ONE}
    return sorted(names | {"pool_tokens", "pool_blocks", "pool_bytes", "max_concurrency", "kv_dtype"})
