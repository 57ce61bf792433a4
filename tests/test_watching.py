"""What ``watch`` prints: the three numbers together, and no zero for what is not known."""

from __future__ import annotations

from typing import Any

from made_run import snapshot

from pytest_kvcache.server.endpoint import parse_endpoint
from pytest_kvcache.settings import Settings
from pytest_kvcache.watching import cell, line, mean_length


def _line(**changes: Any) -> str:
    return line(parse_endpoint("http://user:secret@127.0.0.1:1", Settings()), snapshot(0.0, **changes))


def test_a_line_for_a_log_has_usage_beside_pool_free_and_running() -> None:
    text = _line(usage=0.5, used_blocks=64, free_blocks=63, running=2)
    for words in ("usage 50.0 %", "free_blocks 63 blocks", "usable_blocks 127 blocks", "running 2 requests", "mean length ≤ 512 tokens"):
        assert words in text
    assert "secret" not in text


def test_what_is_not_told_is_a_dash_and_what_cannot_be_is_left_out() -> None:
    read = snapshot(0.0, missing=["free_blocks"], never=["preemptions"])
    assert cell(read, "free_blocks") == "-"
    assert cell(read, "preemptions") == "n/a"
    assert "preemptions" not in _line(never=["preemptions"])
    assert mean_length(read) == "-"
