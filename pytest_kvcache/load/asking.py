"""Asking a server before the load: one request and its whole answer, which model it serves, and how long a request may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pytest_kvcache.errors import EndpointRefused, UsageError
from pytest_kvcache.load.rejections import classify, clean_text
from pytest_kvcache.load.target import Target


@dataclass(frozen=True)
class Answer:
    """What came back: status, at most some MiB of body, headers by lower-case name."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


class Ask(Protocol):
    """Sends one request to a path below the target's root. Raises EndpointUnreachable where nobody answers."""

    def __call__(self, method: str, path: str, body: bytes | None = None) -> Answer: ...


def choose_model(ask: Ask, target: Target) -> tuple[str, int | None]:
    """Return (model, longest context in tokens or None). Raises UsageError, EndpointRefused, EndpointUnreachable."""
    answer = ask("GET", "/v1/models")
    where = target.root + "/v1/models"
    if answer.status in {401, 403, 407}:
        raise _refused(answer, where, "set the key in an environment variable and name it with --kv-api-key-env")
    listed = answer.json
    rows = listed.get("data") if answer.status == 200 and isinstance(listed, dict) else None
    if not isinstance(rows, list):
        if target.model:
            return target.model, _context_of_props(ask)
        raise _refused(answer, where, "check the address (the part before /v1), or name the model with --kv-model")
    models = [row for row in rows[:1000] if isinstance(row, dict) and isinstance(row.get("id"), str)]
    whole = [row for row in models if not row.get("parent")]
    chosen = [row for row in models if row["id"] == target.model] if target.model else whole
    if len(chosen) != 1:
        names = clean_text(", ".join(row["id"] for row in models) or "none")
        what = f"the model {clean_text(target.model, 100)!r} is not served" if target.model else f"there are {len(whole)} models"
        raise UsageError(what, where=where, hint=f"name one with --kv-model; served are: {names}")
    row = chosen[0]
    meta = row.get("meta")
    limit = count_of(row.get("max_model_len")) or (count_of(meta.get("n_ctx")) if isinstance(meta, dict) else None)
    if limit is None and row.get("parent"):
        limit = next((count_of(base.get("max_model_len")) for base in whole if base["id"] == row["parent"]), None)
    if limit is None:
        limit = _context_of_props(ask)
    return row["id"], limit


def _context_of_props(ask: Ask) -> int | None:
    """Return the context of one slot of llama.cpp, whose older builds tell it only here."""
    answer = ask("GET", "/props")
    props = answer.json if answer.status == 200 else None
    settings = props.get("default_generation_settings") if isinstance(props, dict) else None
    return count_of(settings.get("n_ctx")) if isinstance(settings, dict) else None


def count_of(value: Any) -> int | None:
    """Return a number above zero as it is; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _refused(answer: Answer, where: str, hint: str) -> EndpointRefused:
    if 300 <= answer.status < 400:
        target = clean_text(answer.headers.get("location", "nowhere"), 200)
        return EndpointRefused(f"the server redirects to {target}, which is not followed", where=where, hint="name the address that it redirects to")
    _, text, _ = classify(answer.status, answer.body, answer.headers)
    return EndpointRefused(f"the server says HTTP {answer.status}: {text}", where=where, hint=hint)
