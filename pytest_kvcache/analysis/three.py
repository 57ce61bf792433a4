"""What a usage ratio is never shown without: the pool, what was free, and the running requests with their mean length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvcache import units
from pytest_kvcache.quantities import Missing, Reading, Value

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis


def show(value: Value) -> str:
    """Return a value with its unit, or why it is missing."""
    return units.show(value.value, value.unit) if isinstance(value, Reading) else f"not known ({value.reason})"


def beside(analysis: Analysis) -> str:
    """Return what a usage ratio is never shown without: the pool, what was free, and the running requests with their mean length."""
    values = analysis.values
    if analysis.run.record.imported_from and not analysis.run.record.engine:
        return f"{analysis.run.record.imported_from} tells nothing of the pool"

    def first(*names: str) -> Value:
        found = [values.get(name, Missing("not measured")) for name in names]
        return next((value for value in found if isinstance(value, Reading)), found[0])

    pool = first("usable_blocks", "pool_blocks", "pool_tokens")
    block = values.get("block_size")
    of = f" of {show(block)}" if isinstance(pool, Reading) and pool.unit == "blocks" and isinstance(block, Reading) else ""
    free = first("free_blocks.min", "free_tokens.min")
    tightest = first("free_blocks.tightest", "free_tokens.tightest")
    # of replicas the sums hide the full one, whose usage is the one that is judged
    alone = f" ({show(tightest)} of the fullest server)" if isinstance(tightest, Reading) and tightest.value != getattr(free, "value", None) else ""
    running = first("running.at_peak", "running.peak")
    length = first("mean_length.at_peak")
    record = analysis.run.record
    polled = "; polled, so the true peak is at least this" if record.sample_hz > 0 or record.imported_from else ""
    return f"pool {show(pool)}{of}; {_low(free)} free at the tightest{alone}; {show(running)} running at the peak, mean length {show(length)}{polled}"


def _low(free: Value) -> str:
    return show(free) if isinstance(free, Reading) else "an unknown number"
