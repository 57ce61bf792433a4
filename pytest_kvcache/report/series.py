"""A Run's level over time as the charts draw it: one trace a server, tokens beside the engine's own unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_kvcache.quantities import Reading
from pytest_kvcache.report.charts import Trace

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis


def traces(analysis: Analysis) -> list[Trace]:
    """Return one trace for each server of the Run; used tokens are NaN where the block size is not known."""
    timeline = analysis.timeline
    if timeline.unit == "tokens":
        tokens = 1.0
    else:
        size = analysis.values.get("block_size")
        tokens = size.number() if isinstance(size, Reading) and not isinstance(size.value, str) else float("nan")
    return [
        Trace(one.t_s, one.usage, [used * tokens for used in one.used], one.payload_tokens, one.payload_upper, one.free, one.running, one.waiting)
        for one in timeline.endpoints or (timeline,)
        if one.t_s
    ]


def free_unit(analyses: Sequence[Analysis]) -> str:
    """Return what the engine counts free space in: blocks or tokens, or ``space`` where it tells neither."""
    return next((a.timeline.unit for a in analyses if a.timeline.unit), "space")
