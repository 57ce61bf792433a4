"""``pytest-kvcache watch``: the three numbers of a server, live. Reads only; no load is sent."""

from __future__ import annotations

import time

from pytest_kvcache import units
from pytest_kvcache.measure import Target
from pytest_kvcache.observe.scrape import take_snapshot
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import SnapshotRecord

COLUMNS = ("usage", "free_blocks", "free_tokens", "usable_blocks", "pool_tokens", "running", "waiting", "preemptions")


def watch(target: Target, *, count: int, interval_s: float) -> int:
    """Print one table a reading until ``count`` readings were taken or Ctrl-C; return 0."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def table() -> Table:
        shown = Table(title=Text("KV cache now"), title_justify="left")
        shown.add_column("endpoint")
        for name in COLUMNS:
            shown.add_column(name.replace("_", " "), justify="right")
        for endpoint, dialect in zip(target.endpoints, target.dialects, strict=True):
            snapshot = take_snapshot(endpoint, dialect, endpoint.log)
            shown.add_row(Text(endpoint.shown), *(Text(cell(snapshot, name)) for name in COLUMNS))
        return shown

    console = Console()
    readings = 0
    try:
        with Live(table(), console=console, auto_refresh=False) as live:
            while True:
                readings += 1
                if count and readings >= count:
                    return 0
                time.sleep(max(0.1, interval_s))
                live.update(table(), refresh=True)
    except KeyboardInterrupt:
        return 0


def cell(snapshot: SnapshotRecord, name: str) -> str:
    """Return one value as text; a value that is not there is a dash, and one that the engine cannot have is n/a."""
    value = snapshot.value(name)
    if isinstance(value, Missing):
        return "n/a" if value.cannot_happen else "-"
    return units.show(value.value, value.unit)
