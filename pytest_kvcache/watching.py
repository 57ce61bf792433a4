"""``pytest-kvcache watch``: the three numbers of a server, live. Reads only; no load is sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

from rich.table import Table
from rich.text import Text

from pytest_kvcache import units
from pytest_kvcache.errors import UsageError
from pytest_kvcache.measure import Target
from pytest_kvcache.observe.scrape import take_snapshot
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import SnapshotRecord
from pytest_kvcache.server.endpoint import Endpoint

LEAST_INTERVAL_S = 0.1
ALWAYS = ("usage", "running", "waiting")
COLUMNS = ("usage", "free_blocks", "free_tokens", "usable_blocks", "pool_tokens", "running", "waiting", "preemptions")


def watch(target: Target, *, count: int, interval_s: float) -> int:
    """Print a table (on a terminal) or a line (elsewhere) a reading until ``count`` readings were taken or Ctrl-C; return 0.

    Raises UsageError for a count below zero and an interval under a tenth of a second, and what reading the server raises.
    """
    if count < 0 or not interval_s >= LEAST_INTERVAL_S:
        raise UsageError("--count is 0 or more, --interval-s at least 0.1", hint="--count 0 goes on until Ctrl-C")
    from rich.console import Console
    from rich.live import Live

    console = Console()
    readings = 0
    try:
        with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
            while True:
                snapshots = _look(target)
                if live is not None:
                    live.update(_table(target, snapshots), refresh=True)
                else:
                    for endpoint, snapshot in zip(target.endpoints, snapshots, strict=True):
                        console.print(Text(line(endpoint, snapshot)), soft_wrap=True)
                readings += 1
                if count and readings >= count:
                    return 0
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return 0


def _look(target: Target) -> list[SnapshotRecord]:
    return [take_snapshot(endpoint, dialect, endpoint.log) for endpoint, dialect in zip(target.endpoints, target.dialects, strict=True)]


def _table(target: Target, snapshots: Sequence[SnapshotRecord]) -> Table:
    embedded = "  EMBEDDED engine" if target.embedded else ""
    shown = Table(title=Text(f"KV cache now{embedded}"), title_justify="left")
    shown.add_column("endpoint")
    names = [name for name in COLUMNS if any(isinstance(snapshot.value(name), Reading) for snapshot in snapshots) or name in ALWAYS]
    for name in (*names, "mean length"):
        shown.add_column(name.replace("_", " "), justify="right")
    for endpoint, snapshot in zip(target.endpoints, snapshots, strict=True):
        shown.add_row(Text(endpoint.shown), *(Text(cell(snapshot, name)) for name in names), Text(mean_length(snapshot)))
    return shown


def line(endpoint: Endpoint, snapshot: SnapshotRecord) -> str:
    """Return one reading as one line for a log, without what the engine does not have."""
    told = [f"{name} {cell(snapshot, name)}" for name in COLUMNS if cell(snapshot, name) != "n/a"]
    return f"{time.strftime('%H:%M:%S')} {endpoint.shown}  " + ", ".join([*told, f"mean length {mean_length(snapshot)}"])


def mean_length(snapshot: SnapshotRecord) -> str:
    """Return what a running request holds on average, in tokens; from blocks it is an upper bound, and says so. A dash where nothing runs."""
    running, tokens = snapshot.value("running"), snapshot.value("used_tokens")
    blocks, size = snapshot.value("used_blocks"), snapshot.value("block_size")
    if isinstance(running, Missing) or not running.number():
        return "-"
    if isinstance(tokens, Reading):
        return units.show(round(tokens.number() / running.number()), "tokens")
    if isinstance(blocks, Reading) and isinstance(size, Reading):
        return "≤ " + units.show(round(blocks.number() * size.number() / running.number()), "tokens")
    return "-"


def cell(snapshot: SnapshotRecord, name: str) -> str:
    """Return one value as text; a value that is not there is a dash, and one that the engine cannot have is n/a."""
    value = snapshot.value(name)
    if isinstance(value, Missing):
        return "n/a" if value.cannot_happen else "-"
    return units.show(value.value, value.unit)
