"""The cost of a request on a server that runs: its own figures, reproduced from the model's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_kvcache.capacity.agreement import adopted, check, settings_of
from pytest_kvcache.capacity.planner import plan
from pytest_kvcache.capacity.sizing import answer
from pytest_kvcache.capacity.told import told
from pytest_kvcache.observe.inspecting import Inspection
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import SnapshotRecord


def cost_on(server: SnapshotRecord, config: Path | str | Mapping[str, Any], **stated: Any) -> Callable[[int], int] | Missing:
    """Return how many blocks (tokens, cells) of a server's pool a request of a length takes; Missing where its figures are not reproduced.

    ``stated`` are arguments of ``capacity.plan`` that the server does not tell (``tp``, ``assume``). Raises UsageError and CannotJudge as ``plan`` does.
    """
    ranks = {name: {key: value.to_value() for key, value in values.items()} for name, values in server.per_rank.items()}
    found = Inspection(engine=server.engine, quantities={name: value.to_value() for name, value in server.quantities.items()}, ranks=ranks)
    said = told(found)
    given, _ = settings_of(said, stated)
    settings = {**stated, **given}
    settings |= adopted(plan(config, **settings).answer.question, said)
    agreement = check(plan(config, **settings).answer.question, said)
    if agreement.reproduced is None:
        return Missing(f"the configuration does not reproduce this server's own figures: {'; '.join(agreement.explanations)[:400]}")
    return answer(agreement.reproduced).blocks
