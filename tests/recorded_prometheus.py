"""What a Prometheus server answers for samples that a test made: instant and range queries of names, ``timestamp``, and label matchers.

Standard library only, loopback only. A value is repeated for five minutes after its scrape, as the real one does it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from loopback_http import LoopbackHttp

LOOKBACK_S = 300.0
_MATCHER = re.compile(r'(\w+)(=~|=)"((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"(\w[\w:]*)(?:\{(.*)\})? (\S+)$")


@dataclass
class Recorded:
    """One series: its labels with ``__name__``, the times of its scrapes in order (Unix seconds), and the values."""

    labels: dict[str, str]
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def at(self, wall_s: float) -> tuple[float, float] | None:
        """Return when the value that holds at ``wall_s`` was scraped, and the value; None where there is none."""
        place = bisect_right(self.times, wall_s + 1e-6) - 1
        return (self.times[place], self.values[place]) if place >= 0 and wall_s - self.times[place] < LOOKBACK_S else None


class RecordedPrometheus(LoopbackHttp):
    """A context manager; ``url`` is its address, ``asked`` the forms of the queries that came."""

    def __init__(self) -> None:
        self.series: dict[tuple[tuple[str, str], ...], Recorded] = {}
        self.asked: list[dict[str, str]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode() or urlsplit(self.path).query
                form = {name: values[0] for name, values in parse_qs(text).items()}
                body = json.dumps({"status": "success", "data": owner.data(urlsplit(self.path).path, form)}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer  # noqa: N815 -- the names that http.server calls

        super().__init__(Handler)

    def scrape(self, wall_s: float, text: str, **target: str) -> None:
        """Keep what an exposition says at a time, with the labels of its target (``job="vllm", instance="a:8000"``)."""
        for line in text.splitlines():
            if found := _LINE.match(line):
                labels = {"__name__": found[1], **{name: value for name, _, value in _MATCHER.findall(found[2] or "")}, **target}
                one = self.series.setdefault(tuple(sorted(labels.items())), Recorded(labels))
                one.times.append(wall_s)
                one.values.append(float(found[3]))

    def data(self, path: str, form: dict[str, str]) -> Any:
        """Return the ``data`` of an answer."""
        self.asked.append({"path": path, **form})
        if path.endswith("/values"):
            start, end = float(form["start"]), float(form["end"])
            chosen = [one for one in self._matching(form.get("match[]", "{}")) if any(start <= at <= end for at in one.times)]
            return sorted({one.labels["__name__"] for one in chosen})
        query = form["query"]
        stamps = query.startswith("timestamp(")
        chosen = self._matching(query.removeprefix("timestamp(").removesuffix(")") if stamps else query)
        instant = path.endswith("/query")
        times = [float(form["time"])] if instant else _grid(float(form["start"]), float(form["end"]), float(form["step"]))
        result = []
        for one in chosen:
            told = [(at, found[0] if stamps else found[1]) for at in times if (found := one.at(at)) is not None]
            labels = {name: text for name, text in one.labels.items() if not (stamps and name == "__name__")}
            points = [[at, str(value)] for at, value in told]
            if points:
                result.append({"metric": labels, "value": points[0]} if instant else {"metric": labels, "values": points})
        return {"resultType": "vector" if instant else "matrix", "result": result}

    def _matching(self, selector: str) -> list[Recorded]:
        matchers = [(name, kind, text.replace("\\\\", "\\")) for name, kind, text in _MATCHER.findall(selector)]

        def fits(one: Recorded) -> bool:
            return all(
                re.fullmatch(text, one.labels.get(name, "")) if kind == "=~" else one.labels.get(name, "") == text for name, kind, text in matchers
            )

        return [one for one in self.series.values() if fits(one)]

    def windows(self) -> list[dict[str, str]]:
        """Return the range queries of values that came, oldest first."""
        return [form for form in self.asked if form["path"].endswith("query_range") and not form["query"].startswith("timestamp(")]


def _grid(start: float, end: float, step: float) -> Sequence[float]:
    first, last, gap = round(start * 1000), round(end * 1000), round(step * 1000)
    return [moment / 1000 for moment in range(first, last + 1, gap)]


def every(start: float, end: float, step: float) -> Iterable[float]:
    """Return the times of scrapes from ``start`` to ``end``."""
    return _grid(start, end, step)
