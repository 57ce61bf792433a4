"""The page about engines is what the dialects say."""

from __future__ import annotations

import pytest

from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.engines._table import engine_page
from pytest_kvcache.quantities import QUANTITIES


def test_the_engine_page_is_the_dialects(request: pytest.FixtureRequest) -> None:
    page = (request.config.rootpath / "docs" / "engines.md").read_text()
    assert page == engine_page(), "run: nox -s docs"


def test_the_page_tells_every_quantity_of_every_engine() -> None:
    page = engine_page()
    for dialect in DIALECTS.values():
        section = page.partition(f"## {dialect.title}\n")[2].partition("\n## ")[0]
        assert all(f"| `{name}` |" in section for name in QUANTITIES)
    assert all(dialect.since.get("") for dialect in DIALECTS.values())
