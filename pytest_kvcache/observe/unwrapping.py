"""Takes off what a pasted text was carried in: gzip, colour codes, what container runtimes, journals and pagers write before each line, and lost line ends.

A carrier is taken off only where most lines begin with it, so that a line of an engine that merely looks like it stays whole.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from typing import Any

_MOST_PASSES = 4
_LOOKED_AT = 200
_MOST_OF = 0.8
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?(?:Z|[+-][0-9]{2}:?[0-9]{2})"
_UNIT = r"[\w.-]{1,64} [\w./@:-]{1,64}(?:\[[0-9]{1,10}\])?: ?"
# TGI's own lines begin with such a time and a level, and vLLM's with a level and a date.
_OWN_LEVEL = r"(?!\s{1,8}(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR)\s{1,8}(?![0-9]{2}-[0-9]{2} ))"
_CARRIERS = tuple(
    re.compile(rf"^(?:{pattern})", re.MULTILINE)
    for pattern in (
        rf"{_TIME} (?:stdout|stderr) [FP] ",  # containerd and CRI-O
        r"\[pod/[\w.-]{1,253}/[\w.-]{1,63}\] ",  # kubectl logs --prefix
        r"[\w.-]{1,64}[ \t]{0,24}\| ",  # docker compose logs
        rf"(?:[A-Z][a-z]{{2}} [ 0-9][0-9] [0-9:]{{8}}(?:\.[0-9]{{1,6}})?|{_TIME}) {_UNIT}",  # journalctl, syslog
        rf"{_TIME}{_OWN_LEVEL} ",  # docker logs -t, kubectl logs --timestamps
        r"[\w./-]{1,200}\.(?:log|txt|out|prom|json)(?:\.[0-9]{1,4})?[:-](?:[0-9]{1,7}[:-])?",  # grep over files
        r" {0,8}[0-9]{1,8}\t",  # cat -n
        r"> ?",  # a quotation
    )
)
_PARTIAL = re.compile(rf"^{_TIME} (?:stdout|stderr) P ([^\n]*)\n{_TIME} (?:stdout|stderr) [FP] ", re.MULTILINE)
# How engines begin the lines of their logs, for lines that were run together.
_BEGINNINGS = re.compile(
    r"(?:(?<=\s)|(?<=^))(?:"
    r"(?P<vllm>(?:\([A-Z]\w{1,30}(?: pid=[0-9]{1,9})?\) )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [0-9]{2}-[0-9]{2} [0-9:]{8} )"
    r"|(?P<dated>\[[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}[^\]\n]{0,30}\] )"
    r"|(?P<tgi>[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\.[0-9]{1,9}Z\s{1,4}(?:DEBUG|INFO|WARN|ERROR) )"
    r"|(?P<trtllm>\[TensorRT-LLM\]\[[A-Z]{1,10}\] |\[[0-9]{2}/[0-9]{2}/[0-9]{4}-[0-9:]{8}\] )"
    r"|(?P<llamacpp>(?:llama_\w{1,40}|print_info|load_tensors|common_init_\w{1,30}|(?:srv|slot|main) {1,8}\w{1,30}): )"
    r")",
    re.MULTILINE,
)
_LONGEST_RUN = 1 << 20
# Where logs in JSON lines keep the line, the most particular first.
_MESSAGE = ("log", "MESSAGE", "message", "msg", "textPayload", "line", "text")
# A body of an API that has a message is no line of a log.
_ANSWER = frozenset({"error", "object", "choices", "code"})
_DOCKER = frozenset({"log", "stream"})


def unpack(data: bytes, most: int) -> tuple[bytes, str]:
    """Return what a gzip file holds, at most ``most`` bytes of it, and what is wrong with it; other data is returned as it is."""
    if data[:2] != b"\x1f\x8b":
        return data, ""
    found = bytearray()
    rest = data
    try:
        while rest and len(found) < most:
            stream = zlib.decompressobj(wbits=31)
            found += stream.decompress(rest, most - len(found))
            if stream.unconsumed_tail:
                return bytes(found), f"only its first {most >> 20} MiB were unpacked"
            if not stream.eof:
                return bytes(found), "the gzip file ends too early: what it held after that is not known"
            rest = stream.unused_data.lstrip(b"\x00")
    except zlib.error as error:
        return bytes(found), f"it is a gzip file that cannot be unpacked: {error}"
    return bytes(found), ""


def unwrap(text: str) -> str:
    """Return a text without colour codes and without what carried its lines. Never raises."""
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    text = text.replace("\r\n", "\n")
    for _ in range(_MOST_PASSES):
        told = _messages(text)
        told = _without_carrier(text) if told is None else told
        if told is None:
            break
        text = told
    return text if len(text) > _LONGEST_RUN else _apart(text)


def _apart(text: str) -> str:
    """Return the lines that a tracker or a chat ran together as lines again.

    Only a line with two beginnings of the same kind is taken apart: one alone is what an engine quotes, or a carrier's own.
    """
    if text.count("\\n") > 1 and text.count("\n") < 2:
        text = text.replace("\\r", "").replace("\\n", "\n")  # a text that a program printed as a literal
    told: list[str] = []
    for line in text.split("\n"):
        found = list(_BEGINNINGS.finditer(line)) if len(line) > 60 else []
        kinds = Counter(match.lastgroup for match in found)
        cuts = [match.start() for match in found if kinds[match.lastgroup] > 1]
        told += [line[start:end].rstrip() for start, end in zip([0, *cuts], [*cuts, len(line)], strict=True) if start < end] if cuts else [line]
    return "\n".join(told)


def _first_lines(text: str) -> list[str]:
    lines: list[str] = []
    at = 0
    while at < len(text) and len(lines) < _LOOKED_AT:
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        if text[at:end].strip():
            lines.append(text[at:end])
        at = end + 1
    return lines


def _without_carrier(text: str) -> str | None:
    """Return the text without the first carrier that most of its lines begin with; None where there is none."""
    lines = _first_lines(text)
    for carrier in _CARRIERS:
        # A blank line may have lost the blank that ends what stood before it.
        if lines and sum(carrier.match(line + " ") is not None for line in lines) >= _MOST_OF * len(lines):
            joined = _PARTIAL.sub(lambda match: match.group(0)[: -len(match.group(0).partition(" P ")[2])] + match.group(1), text)
            return carrier.sub("", joined)
    indent = min((len(line) - len(line.lstrip(" ")) for line in lines), default=0)
    return re.sub(rf"^ {{{indent}}}", "", text, flags=re.MULTILINE) if indent else None


def _messages(text: str) -> str | None:
    """Return the lines that a log in JSON lines carries; None where the text is no such log."""
    lines = _first_lines(text)
    if not lines or lines[0].lstrip()[:1] != "{":
        return None
    told = [_message(line) for line in lines]
    if sum(message is not None for message in told) < _MOST_OF * len(lines):
        return None
    if len(lines) < 2 and not _object(lines[0]).keys() >= _DOCKER:
        return None
    parts: list[str] = []
    for line in text.split("\n"):
        message = _message(line) if line.lstrip()[:1] == "{" else None
        if message is None:
            parts.append(line + "\n" if line.strip() else "")
        else:
            # Docker cuts a long line into parts, of which the last ends it.
            parts.append(message if _is_docker(line) else message.rstrip("\n") + "\n")
    return "".join(parts)


def _is_docker(line: str) -> bool:
    return '"stream"' in line and '"log"' in line


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _message(line: str) -> str | None:
    found = _object(line)
    if not found or _ANSWER & found.keys():
        return None
    payload = found.get("jsonPayload")
    for name in _MESSAGE:
        value = found.get(name)
        if value is None and isinstance(payload, dict):
            value = payload.get(name)
        if isinstance(value, str):
            return value
        if name == "MESSAGE" and isinstance(value, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in value):
            return bytes(value).decode("utf-8", "replace")  # journalctl -o json writes lines with colour codes so
    return None
