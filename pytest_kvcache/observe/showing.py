"""An Inspection as text for a terminal and as JSON. A usage ratio never stands alone: pool, free space and running stand beside it."""

from __future__ import annotations

import textwrap
import time
from typing import Any

from pytest_kvcache import units
from pytest_kvcache.engines import clean
from pytest_kvcache.observe.inspecting import Inspection
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value
from pytest_kvcache.records import GpuRow

_RANK_COLUMNS = ("usage", "free_blocks", "free_tokens", "usable_blocks", "pool_tokens", "running", "waiting")


def as_json(found: Inspection) -> dict[str, Any]:
    """Return the inspection as JSON values: engine, version, quantities, per_rank, notes, gpus and inputs."""
    return {
        "engine": found.engine or "unknown",
        "version": found.version,
        "quantities": {name: _value(found.quantities.get(name, Missing("nothing was read"))) for name in QUANTITIES},
        "per_rank": [{"rank": rank, "quantities": {name: _value(value) for name, value in values.items()}} for rank, values in found.ranks.items()],
        "notes": [*found.notes, *([found.why] if found.why else [])],
        "gpus": [_gpu(row) for row in found.gpus],
        "inputs": found.inputs,
    }


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, Missing):
        return {"missing": value.reason, **({"cannot_happen": True} if value.cannot_happen else {})}
    return {"value": value.value, "unit": value.unit, "source": value.source}


def _gpu(row: GpuRow) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(row))


def as_text(found: Inspection, width: int = 100) -> str:
    """Return the inspection as tables, at most about ``width`` columns wide; foreign text in it is made harmless."""
    from tabulate import tabulate

    width = max(width, 60)
    lines = [f"{found.title or found.engine or 'unknown engine'}{f' {clean(found.version, 60)}' if found.version else ''}"]
    lines += [f"  from {clean(text, 300)}" for text in found.inputs]
    lines += ["", three_numbers(found.quantities), ""] if found.engine else [""]
    told = {name: value for name, value in found.quantities.items() if isinstance(value, Reading)}
    absent = {name: value for name, value in found.quantities.items() if isinstance(value, Missing)}
    if told:
        # a value is wrapped before the name of a series is broken
        left = width - 4 - max(map(len, told))
        figures = [_wrapped(_shown(name, value, found.quantities), max(left - 60, 20)) for name, value in told.items()]
        room = max(left - max(len(line) for text in figures for line in text.split("\n")), 24)
        rows = [(name, figure, _wrapped(value.source, room)) for (name, value), figure in zip(told.items(), figures, strict=True)]
        lines += [tabulate(rows, headers=("quantity", "value", "source"), disable_numparse=True), ""]
    if absent and found.engine:
        by_reason: dict[str, list[str]] = {}
        for name, value in absent.items():
            by_reason.setdefault(f"cannot happen: {value.reason}" if value.cannot_happen else value.reason, []).append(name)
        gaps = [(_wrapped(", ".join(names), 32), _wrapped(reason, max(width - 36, 24))) for reason, names in by_reason.items()]
        lines += [tabulate(gaps, headers=("missing", "why"), disable_numparse=True), ""]
    if found.ranks:
        columns = [name for name in _RANK_COLUMNS if any(isinstance(values.get(name), Reading) for values in found.ranks.values())]
        ranks = [(clean(rank, 60), *(_cell(values.get(name)) for name in columns)) for rank, values in found.ranks.items()]
        lines += [tabulate(ranks, headers=("engine", *columns), disable_numparse=True), ""] if columns else []
    if found.gpus:
        lines += [_gpu_table(found.gpus), ""]
    for note in [*found.notes, *([found.why] if found.why else [])]:
        lines += textwrap.wrap(clean(note, 1200), width, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines).rstrip()


def three_numbers(quantities: dict[str, Value]) -> str:
    """Return usage, free space and running requests with their mean length in one line; what is not told says so."""
    usage, running = quantities.get("usage"), quantities.get("running")
    usage_text = f"usage {units.show(usage.value, usage.unit)}" if isinstance(usage, Reading) else "usage not told"
    held = ""
    if isinstance(running, Reading):
        count = running.number()
        for name, unit in (("used_tokens", "tokens"), ("used_blocks", "blocks")):
            used = quantities.get(name)
            if isinstance(used, Reading) and count:
                held = f", {used.number() / count:,.0f} {unit} each on average"
                break
        held = held or (", mean length not told" if count else "")
    running_text = f"{running.number():,.0f} running{held}" if isinstance(running, Reading) else "running not told"
    return f"{usage_text} | {_space(quantities)} | {running_text}"


def _space(quantities: dict[str, Value]) -> str:
    pairs = (("free_blocks", "usable_blocks"), ("free_tokens", "pool_tokens"))
    for free_name, pool_name in pairs:
        free, pool = quantities.get(free_name), quantities.get(pool_name)
        if isinstance(free, Reading) and isinstance(pool, Reading):
            return f"{free.number():,.0f} of {pool.number():,.0f} {free.unit} free"
    for _, pool_name in pairs:
        pool = quantities.get(pool_name)
        if isinstance(pool, Reading):
            return f"pool of {pool.number():,.0f} {pool.unit}, free not told"
    return "pool size not told"


def _shown(name: str, value: Reading, quantities: dict[str, Value]) -> str:
    if name == "start_time":
        return _utc(value.number())
    shown = clean(units.show(value.value, value.unit), 80)
    return f"{shown} ({_space(quantities)})" if name == "usage" else shown


def _utc(wall_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))
    except (ValueError, OverflowError, OSError):
        return f"{wall_s:g} s"


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(clean(text, 600), width) or [""])


def _cell(value: Value | None) -> str:
    return (
        clean(units.show(value.value, value.unit), 60) if isinstance(value, Reading) else "n/a" if value is not None and value.cannot_happen else "-"
    )


def _gpu_table(rows: list[GpuRow]) -> str:
    from tabulate import tabulate

    shown = [
        (
            row.host or "-",
            row.index if row.index >= 0 else row.uuid,
            row.name,
            units.show_bytes(row.used_bytes),
            units.show_bytes(row.free_bytes),
            units.show_bytes(row.total_bytes),
            ", ".join(f"{name} {value}" for name, value in row.labels.items()),
        )
        for row in rows
    ]
    return tabulate(shown, headers=("node", "card", "model", "used", "free", "total", "of"), disable_numparse=True)
