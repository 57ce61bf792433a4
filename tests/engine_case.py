"""What a recorded server is. A new engine adds a Case and gets the whole contract."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_kvcache.engines import DIALECTS, Dialect, RawState, wanted_by
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import Reading, Value

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Case:
    """One recorded server: its texts, and what a right reading of them is. ``log`` is what its start-up log states."""

    engine: str
    name: str
    metrics: str = ""
    bodies: dict[str, str] = field(default_factory=dict)
    log: dict[str, Value] = field(default_factory=dict)
    right: dict[str, float | str | bool] = field(default_factory=dict)
    never: frozenset[str] = frozenset()

    def text(self) -> str:
        return (DATA / self.metrics).read_text() if self.metrics else ""

    def json(self) -> dict[str, Any]:
        return {path: json.loads((DATA / file).read_text()) for path, file in self.bodies.items()}

    def raw(self, dialect: Dialect | None = None) -> RawState:
        return state(self.text() if self.metrics else None, self.json(), self.log, dialect)


def state(text: str | None, bodies: dict[str, Any], log: dict[str, Value], dialect: Dialect | None = None) -> RawState:
    wanted = dialect.wanted if dialect is not None else wanted_by(DIALECTS.values())
    metrics = None if text is None else parse_samples(text, wanted)
    return RawState(metrics=metrics, metrics_reason="/metrics was taken away", json=bodies, log_facts=log)


def fact(value: float | str | bool, unit: str = "tokens") -> Reading:
    return Reading(value, unit, "start-up log: a line")
