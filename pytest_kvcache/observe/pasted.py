"""Sorts what people paste: an exposition, JSON bodies, a start-up log, in one text or several. The kind is told by content alone.

Nothing that the text names is opened. ``curl -i`` headers are passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pytest_kvcache.engines import Dialect, clean
from pytest_kvcache.engines._dialect import looks_like
from pytest_kvcache.observe.unwrapping import unpack, unwrap
from pytest_kvcache.server.rootcause import strip_escapes
from pytest_kvcache.server.transport import bounded_int

MOST_BYTES = 32 << 20
_MOST_TRIES = 200
_PROMETHEUS = frozenset({"vector", "matrix", "scalar", "string"})
_SAMPLE = re.compile(
    r"[ \t]*+(?:[a-zA-Z_:][a-zA-Z0-9_:.]*+[ \t]*+(?:\{(?:[^\"}]++|\"(?:[^\"\\]++|\\.)*+\")*+\})?|\{(?:[^\"}]++|\"(?:[^\"\\]++|\\.)*+\")*+\})[ \t]*+"
    r"(?:[-+]?[0-9][0-9.]*+(?:[eE][-+]?[0-9]+)?|[-+]?[Ii]nf|NaN|nan)(?:[ \t]++[-+]?[0-9.]+)?(?:[ \t]*#[ \t]*\{.*)?[ \t]*\r?\Z"
)
_COMMENT = re.compile(r"[ \t]*# (?:HELP|TYPE|UNIT|EOF)\b")
# promtool query: name{label="value", ...} => value @[time]
_PROMTOOL = re.compile(r"^([a-zA-Z_:{][^\n]*?) => ([-+]?[0-9][0-9.eE+-]*|[-+]?Inf|NaN) @\[[0-9.]+\][ \t]*$", re.MULTILINE)
_CUT = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:.]*+(?:\{|\Z)")
_STATUS = re.compile(r"HTTP/[0-9.]{1,3} ([0-9]{3})")


@dataclass
class Pasted:
    """What one source held. ``json`` are the bodies as parsed, ``answers`` those of a Prometheus server, ``log`` all that is neither sample nor
    JSON, ``problem`` why it is of no use.
    """

    name: str
    exposition: str = ""
    json: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    log: str = ""
    problem: str = ""

    @property
    def kinds(self) -> str:
        """What was found, in words."""
        found = ["a scrape"] if self.exposition else []
        found += ["an answer of Prometheus"] if self.answers else []
        found += [f"{len(self.json)} JSON bodies" if len(self.json) > 1 else "a JSON body"] if self.json else []
        found += ["a log"] if self.log else []
        return ", ".join(found) or "nothing that is known"

    def take(self, body: Any) -> None:
        """Keep a parsed JSON body."""
        (self.answers if is_answer(body) else self.json).append(body)


def sort_text(name: str, data: bytes) -> Pasted:
    """Return what a pasted text holds. Never raises; ``name`` is only for messages."""
    found = Pasted(name)
    data, found.problem = unpack(data, MOST_BYTES)
    text = data.decode("utf-8-sig", "replace")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what a redirection of an older PowerShell writes
        text = data.decode("utf-16", "replace")
    whole = _json(text)  # a body on one line may look like a line of a log
    text = text if whole is not None else _PROMTOOL.sub(r"\1 \2", _without_headers(unwrap(text), found))
    if not text.strip():
        found.problem = found.problem or "it is empty: nothing is told, which is not zero"
        return found
    if "\x00" in text[:4096]:
        found.problem = "it is a binary file"
        return found
    if text.lstrip()[:200].lower().startswith(("<!doctype", "<html")):
        title = re.search(r"<title[^>]*>([^<]{1,200})", text[:20000], re.IGNORECASE)
        found.problem = f"it is a web page{f' ({clean(title.group(1), 80)})' if title else ''}: a login page or a gateway stood in the way"
        return found
    whole = _json(text)
    if whole is not None:
        found.take(whole)
        return found
    _split(text, found)
    _end(text, found)
    return found


def _end(text: str, found: Pasted) -> None:
    """Say so where an exposition ends within a line: what was cut off is not known, and a number may have lost digits."""
    last = text[text.rfind("\n") + 1 :].strip()
    if not found.exposition or found.problem or not last:
        return
    if _SAMPLE.match(last):
        found.problem = f"it does not end with a line end: if it was cut, {clean(re.split('[{ ]', last, maxsplit=1)[0], 80)} has lost digits"
    elif _CUT.match(last):
        found.problem = "it ends in the middle of a line: what should follow is not known"


def _without_headers(text: str, found: Pasted) -> str:
    """Take off the headers that ``curl -i`` prints, and keep what the status line says."""
    status = _STATUS.match(text)
    if status is None:
        return text
    head, _, body = text.replace("\r\n", "\n").partition("\n\n")
    if status.group(1) != "200":
        found.problem = f"the server answered HTTP {status.group(1)}"
    return body if head else text


def _json(text: str) -> Any | None:
    if text.lstrip()[:1] not in {"{", "["}:
        return None
    try:
        value = json.loads(text, parse_int=bounded_int)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def _split(text: str, found: Pasted) -> None:
    """Sort the lines of a text that is not one JSON body; a JSON body may begin at any line."""
    decoder = json.JSONDecoder(parse_int=bounded_int)
    samples: list[str] = []
    log: list[str] = []
    tries, at, end = 0, 0, len(text)
    while at < end:
        stop = text.find("\n", at)
        stop = end if stop < 0 else stop
        line = text[at:stop]
        start = line.lstrip(" \t")[:1]
        if start in {"{", "["} and tries < _MOST_TRIES:
            tries += 1
            try:
                value, after = decoder.raw_decode(text, at + len(line) - len(line.lstrip(" \t")))
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict) or (isinstance(value, list) and (not value or isinstance(value[0], dict))):
                found.take(value)
                at = after
                continue
        if _COMMENT.match(line) or _SAMPLE.match(line):
            samples.append(line)
        elif line.strip():
            log.append(line)
        at = stop + 1
    if any(not _COMMENT.match(line) for line in samples):
        found.exposition = "\n".join(samples) + "\n"
    found.log = "\n".join(log) + "\n" if any(strip_escapes(line).strip() for line in log[:1000]) else ""


def is_answer(body: object) -> bool:
    """Say whether a JSON body is an answer of Prometheus' query API, or of one that speaks it (Thanos, Mimir, VictoriaMetrics)."""
    data = body.get("data") if isinstance(body, dict) else None
    kind = data.get("resultType") if isinstance(data, dict) and "result" in data else None
    return isinstance(kind, str) and kind in _PROMETHEUS


def body_paths(body: Any, dialects: Iterable[Dialect]) -> list[str]:
    """Return the addresses that a JSON body may have come from, told by its keys; [] where none is known."""
    paths: dict[str, None] = {}
    for dialect in dialects:
        for path in dialect.json_paths:
            if path.sign and looks_like(body, path.sign):
                paths[path.path] = None
    if isinstance(body, dict) and not paths:
        rows = body.get("data")
        if isinstance(rows, list) and rows and all(isinstance(row, dict) and "id" in row for row in rows[:5]):
            paths["/v1/models"] = None
        elif set(body) == {"version"}:
            paths["/version"] = None
    return list(paths)


def error_of(body: Any) -> str:
    """Return the message of an error body (``{"error": ...}``, ``{"object": "error"}``); "" where it is none.

    An answer that a client wrote down with its status (``{"status": 400, "body": {...}}``) is its body.
    """
    if not isinstance(body, dict):
        return ""
    if "status" in body and isinstance(inner := body.get("body", body.get("sse")), dict):
        said = error_of(inner)
        return f"HTTP {clean(str(body['status']), 10)}: {said}" if said else ""
    error = body.get("error")
    if isinstance(error, dict):
        return clean(str(error.get("message", "an error without a message")), 300)
    if isinstance(error, str):
        return clean(error, 300)
    if body.get("object") == "error":
        return clean(str(body.get("message", "")), 300)
    return ""
