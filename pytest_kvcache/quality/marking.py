"""Answers marked by a JSON Schema or by a user's own function, in a process of its own: one that hangs or dies costs its item only.

``python -m pytest_kvcache.quality.marking`` is that process: a line of JSON in, a line of JSON out. The function is imported with the folder
that the session runs in on the path, is called as ``NAME(answer, item)``, and what it prints goes to the session's error output.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any

from pytest_kvcache.quality.child import Child
from pytest_kvcache.quality.graders import LONGEST_ANSWER

if TYPE_CHECKING:
    from pytest_kvcache.quality.items import Item

LIMIT_S = 10.0
START_S = 60.0
_LONGEST_LINE = 1 << 16
_NEEDS = 'the match "schema" needs the library jsonschema: pip install "pytest-kvcache[quality]"'


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for what is no JSON Schema, and where the library that reads one is not installed."""
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
    except ImportError:
        raise ValueError(_NEEDS) from None
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"not a JSON Schema: {error.message[:200]}") from None


class MarkingProcess(Child):
    """Marks answers one at a time, each within ``limit_s`` seconds. Started at the first use; safe to use from several threads."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        super().__init__(limit_s)

    def mark(self, item: Item, answer: str) -> tuple[bool, str]:
        """Return (passed, why there is no mark): "" where it was marked."""
        prompt = item.prompt if isinstance(item.prompt, str) else [dict(message) for message in item.prompt]
        asked = {"match": item.match, "expect": item.expect, "answer": answer[:LONGEST_ANSWER], "item": {"id": item.id, "prompt": prompt}}
        with self._lock:
            try:
                process = self._process = self._process or self._start()
                assert process.stdin is not None
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
                found = json.loads(_line(process, self._limit_s))
                return bool(found["passed"]), str(found["error"])[:300]
            except TimeoutError:
                why = f"marking took more than {self._limit_s:g} s"
            except (OSError, ValueError, KeyError, TypeError):
                why = "the process that marks answers ended"
            self._stop()
            return False, why

    def _start(self) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path]))}
        command = [sys.executable, "-m", "pytest_kvcache.quality.marking"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        self._process = process
        _line(process, START_S)
        return process


def _line(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """Return the next line of the process. Raises TimeoutError where none comes in time, OSError where it ended."""
    assert process.stdout is not None
    number, held, until = process.stdout.fileno(), b"", time.monotonic() + limit_s
    while not held.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([number], [], [], left)[0]:
            raise TimeoutError
        more = os.read(number, 4096)
        if not more or len(held) > _LONGEST_LINE:
            raise BrokenPipeError
        held += more
    return held


def _by_schema(answer: str, schema: Mapping[str, Any]) -> bool:
    """Return whether an answer is JSON that the schema allows; a fence of Markdown around it is no fault. References are never fetched."""
    from jsonschema.validators import validator_for
    from referencing import Registry

    text = answer.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text[text.index("\n") + 1 : -3]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(validator_for(schema)(schema, registry=Registry()).is_valid(value))


def _by_function(answer: str, name: str, item: Mapping[str, Any], known: dict[str, Callable[..., Any]]) -> bool:
    if name not in known:
        module, _, attribute = name.partition(":")
        known[name] = getattr(importlib.import_module(module), attribute)
    said = known[name](answer, item)
    if not isinstance(said, bool):
        raise TypeError(f"it returned {type(said).__name__} and not True or False")
    return said


def serve(lines: IO[bytes], out: IO[bytes]) -> None:
    """Mark one answer a line until the input ends."""
    known: dict[str, Callable[..., Any]] = {}
    out.write(b"ready\n")
    out.flush()
    for line in lines:
        asked = json.loads(line)
        passed, error = False, ""
        try:
            if asked["match"] == "schema":
                passed = _by_schema(asked["answer"], json.loads(asked["expect"]))
            else:
                passed = _by_function(asked["answer"], asked["expect"], asked["item"], known)
        except BaseException as raised:
            error = f"{asked['expect'][:100] if asked['match'] == 'function' else 'the schema'}: {type(raised).__name__}: {raised}"
        out.write(json.dumps({"passed": passed, "error": error[:300]}).encode() + b"\n")
        out.flush()


def main() -> None:
    """Serve on standard input and output, with a user's prints led away from the output."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, out)


if __name__ == "__main__":
    main()
