"""The page about what fills the pool names values that exist, and none of them is left out."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_kvcache.quantities import KNOWN

PAGE = (Path(__file__).parents[2] / "docs" / "accounting.md").read_text(encoding="utf-8")


def test_every_value_that_the_page_names_is_known() -> None:
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", PAGE)) - {"kvgate.toml", "report.html", "config.json"}
    assert len(named) > 25
    assert named <= set(KNOWN)


def test_every_value_of_the_accounting_is_on_the_page() -> None:
    rooms = (
        "fill.",
        "level.",
        "live_length.",
        "accounting.",
        "leak.",
        "phase.",
        "demand.",
        "prefill.",
        "preempted.",
        "prefix.",
        "waiting.c",
        "waiting.d",
    )
    missing = [name for name in KNOWN if name.startswith(rooms) and f"`{name}`" not in PAGE]
    assert not missing
    wastes = [name for name in KNOWN if name.startswith("waste.") and f"{name}_blocks" in KNOWN]
    assert wastes
    assert all(f"`{name}`" in PAGE for name in wastes)
