"""Two real vLLM 0.32 servers (pools of 64 and 128 blocks of 32) behind a sticky and a fair proxy, as they were recorded: what one replica carries.

Every fifth look of a sampler at 20 Hz is kept, with what the rules look at. Six users, answers of 40 tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvcache.analysis.balance import REPLICAS
from pytest_kvcache.analysis.findings import find
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.assertions import assert_balanced
from pytest_kvcache.conditions import PASS
from pytest_kvcache.errors import GateFailed
from pytest_kvcache.runfolder import read_run

DATA = Path(__file__).parents[1] / "data" / "vllm_replicas"


def recorded(name: str) -> Analysis:
    return analyse(read_run(DATA / name))


def test_behind_a_sticky_proxy_one_replica_carries_the_load_and_nothing_else_is_wrong() -> None:
    sticky = recorded("sticky")
    assert not sticky.problems
    (finding,) = find(sticky).found
    assert finding.id == "replica-imbalance"
    assert "of server 1 and 0.0 % of server 2" in finding.text
    assert "live requests, highest over mean: 2" in finding.text
    running = sticky.balance.of("running", REPLICAS)
    assert running is not None
    assert (running.highest, running.members["server 2"]) == ("server 1", 0)
    with pytest.raises(GateFailed, match=r"on server 1 and 0 requests on server 2, highest over mean 2\.00, at most 1\.50"):
        assert_balanced(sticky)


def test_by_turns_neither_does() -> None:
    fair = recorded("fair")
    assert not fair.problems
    assert find(fair).found == ()
    assert assert_balanced(fair).verdict == PASS
