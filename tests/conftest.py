"""What every test of this repository gets."""

from __future__ import annotations

import pytest
from loopback_tls import Tls, make_tls

from pytest_kvcache.server import redaction


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A CA and a server's certificate of it, which live as long as this run of the tests."""
    return make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(autouse=True)
def no_remembered_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no secret of one test be taken out of the texts of another."""
    monkeypatch.setattr(redaction, "_remembered", frozenset())
