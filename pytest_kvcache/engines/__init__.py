"""What each engine calls it. One module per engine, each with one value: ``DIALECT``."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pytest_kvcache.engines._combining import NOT_OVER_MODELS, Values, models_of, read_values
from pytest_kvcache.engines._dialect import Dialect, JsonPath, has_prefix, looks_like, wanted_by
from pytest_kvcache.engines._parts import shown as shown_models
from pytest_kvcache.engines._state import RawState, Sample, Samples, clean
from pytest_kvcache.errors import UnknownEngine, UsageError
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import SnapshotRecord, ValueRecord

__all__ = [
    "DIALECTS", "NOT_OVER_MODELS", "Dialect", "JsonPath", "RawState", "Sample", "Samples", "Values", "clean", "detect", "imported", "models_of",
    "named", "owned_by", "read", "read_values", "shown_models", "signs", "wanted_by",
]  # fmt: skip


def _found() -> dict[str, Dialect]:
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    dialects = [importlib.import_module(f"{__name__}.{name}").DIALECT for name in modules]
    return {dialect.name: dialect for dialect in dialects}


# level:metric:operation, as recording rules are named; has_prefix takes a name that begins with an engine's own.
_RULE = re.compile(r"\w+:\w+:\w+")

DIALECTS: dict[str, Dialect] = _found()


def named(name: str, extra: Sequence[Dialect] = ()) -> Dialect:
    """Return the dialect of that name; ``extra`` ones come first. Raises UsageError, which lists the names."""
    known = {**DIALECTS, **{dialect.name: dialect for dialect in extra}}
    dialect = known.get(name)
    if dialect is None:
        raise UsageError(f"no engine is called {clean(name, 60)!r}", where="--kv-engine", hint=f"auto, {', '.join(known)}")
    return dialect


def signs(raw: RawState, dialects: Iterable[Dialect] | None = None) -> tuple[list[Dialect], list[Dialect]]:
    """Return the dialects that a state names surely (by its series or a JSON body of its own) and weakly (``owned_by`` of /v1/models)."""
    candidates = list(DIALECTS.values() if dialects is None else dialects)
    names = raw.metrics.names if raw.metrics is not None else frozenset()
    owners = owned_by(raw.json.get("/v1/models"))
    sure = [dialect for dialect in candidates if _is_sure(dialect, raw, names)]
    covered = {name for dialect in sure for name in dialect.covers}
    weak = [dialect for dialect in candidates if dialect.owned_by in owners]
    return [dialect for dialect in sure if dialect.name not in covered], weak


def _is_sure(dialect: Dialect, raw: RawState, names: frozenset[str]) -> bool:
    if dialect.claims is not None:
        return dialect.claims(raw)
    if any(has_prefix(name, dialect.series_prefix) for name in names):
        return True
    return any(looks_like(raw.json.get(path.path), path.sign) for path in dialect.json_paths if path.sign)


def imported(spec: str) -> Dialect:
    """Return the dialect that ``module:NAME`` names. The module may lie in the current folder. Raises UsageError."""
    where = "--kv-engine-from"
    module_name, _, name = spec.partition(":")
    if not (module_name and name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise UsageError(f"{clean(spec, 80)!r} is not module:NAME", where=where, hint="my_engines:DIALECT")
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # what a module does while it is imported is its own
        reason = f"{type(error).__name__}: {clean(str(error), 200)}"
        raise UsageError(f"{module_name} cannot be imported: {reason}", where=where, hint="PYTHONPATH must hold its folder") from error
    finally:
        if added:
            sys.path.remove(here)
    found = getattr(module, name, None)
    if not isinstance(found, Dialect):
        seen_there = "is not there" if found is None else f"is of type {type(found).__name__} and no Dialect"
        raise UsageError(f"{module_name}:{name} {seen_there}", where=where, hint="a value of pytest_kvcache.engines.Dialect")
    return found


def detect(raw: RawState, dialects: Iterable[Dialect] | None = None) -> Dialect:
    """Return the one of ``dialects`` (default: all of ours) that reads this state.

    Raises UnknownEngine, which says what was seen, where none or several do.
    """
    candidates = list(DIALECTS.values() if dialects is None else dialects)
    sure, weak = signs(raw, candidates)
    found = sure or weak
    if len(found) == 1:
        return found[0]
    known = ", ".join(dialect.name for dialect in candidates)
    if found:
        shown = ", ".join(dialect.title for dialect in found)
        raise UnknownEngine(
            f"cannot judge: the server shows signs of several engines: {shown}", hint=f"name the one that serves: --kv-engine ({known})"
        )
    raise UnknownEngine(f"cannot judge: no dialect reads what this server says. {seen(raw)}", hint=f"name the engine: --kv-engine ({known})")


def seen(raw: RawState) -> str:
    """Return in one bounded sentence what a server said that no dialect knows."""
    said = []
    if raw.metrics is None:
        said.append(clean(raw.metrics_reason, 300))
    else:
        families = sorted({clean(name, 60) for name in raw.metrics.names})
        more = f" and {len(families) - 12} more" if len(families) > 12 else ""
        said.append(f"/metrics has {len(families)} series: {', '.join(families[:12])}{more}")
        rules = [name for name in families if _RULE.fullmatch(name)]
        if rules:
            said.append(f"{rules[0]} looks like a recording rule, which adds or averages already: the engine's own series are needed")
    owners = sorted(owned_by(raw.json.get("/v1/models")))
    if owners:
        said.append(f"/v1/models says owned_by {', '.join(owners[:5])}")
    answered = [path for path, body in raw.json.items() if not isinstance(body, Missing) and path != "/v1/models"]
    if answered:
        said.append(f"it answers {', '.join(answered)}")
    return "; ".join(said)


def owned_by(body: object) -> set[str]:
    """Return who owns the models of a /v1/models body; nobody where it has another shape."""
    rows = body.get("data") if isinstance(body, dict) else None
    if not isinstance(rows, list):
        return set()
    return {clean(owner, 60) for row in rows[:100] if isinstance(row, dict) and isinstance(owner := row.get("owned_by"), str)}


def read(dialect: Dialect, raw: RawState, wall_s: float, endpoint: str = "") -> SnapshotRecord:
    """Return every canonical quantity of a state as the dialect reads it, for the whole server and for each engine rank.

    Quantities that are not there are Missing with the reason. ``wall_s`` is Unix seconds, ``endpoint`` the address shown.
    """
    values = read_values(dialect, raw, wall_s)
    return SnapshotRecord(
        engine=dialect.name,
        wall_s=wall_s,
        endpoint=endpoint,
        version=values.version,
        quantities={name: ValueRecord.of(value) for name, value in values.whole.items()},
        per_rank={part: {name: ValueRecord.of(value) for name, value in quantities.items()} for part, quantities in values.ranks.items()},
        notes=values.notes,
    )
