"""What our own request log proves of the pool where polling saw less: requests that live shorter than the time between two polls are missed."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.judge.wording import readings
from pytest_kvcache.quantities import Missing, Reading


def logged_usage(analysis: Analysis) -> float | None:
    """Return the peak share of the pool that our own requests held at least; None where a token of the log is not a token of the pool."""
    payload, pool = analysis.values.get("payload.peak"), analysis.values.get("pool_tokens")
    blocks, size = analysis.values.get("usable_blocks"), analysis.values.get("block_size")
    if not isinstance(payload, Reading) or analysis.facts.sharing_meant:
        return None
    if isinstance(blocks, Reading) and isinstance(size, Reading):
        tokens = blocks.number() * size.number()
        # of hybrid models the engine's own figure is another: there a token takes a slot in several groups
        if isinstance(pool, Reading) and abs(pool.number() - tokens) > 2 * size.number():
            return None
        return payload.number() / tokens if tokens else None
    return payload.number() / pool.number() if isinstance(pool, Reading) and pool.number() else None


def joined(analyses: Sequence[Analysis], quantity: str, polled: Sequence[float]) -> list[float] | None:
    """Return the peak usage (``usage.hottest``) or the fewest free (``free_*.tightest``) of each window, ``polled`` joined with the request log.

    None for other quantities, and where the log of any window proves nothing. A peak that was polled is what some poll happened to see; tokens
    of requests that were answering at one moment were in the pool at that moment.
    """
    shares = [logged_usage(analysis) for analysis in analyses]
    if None in shares:
        return None
    known = [share for share in shares if share is not None]
    if quantity == "usage.hottest":
        return [max(seen, min(share, 1.0)) for seen, share in zip(polled, known, strict=True)]
    if quantity not in {"free_blocks.tightest", "free_tokens.tightest"}:
        return None
    pools = readings(analyses, "usable_blocks" if quantity.startswith("free_blocks") else "pool_tokens")
    if isinstance(pools, Missing):
        return None
    # of several servers the fullest has no more free than an equal part of what all have
    parts = [pool.number() / max(len(analysis.run.record.endpoints), 1) for analysis, pool in pools]
    return [min(seen, part * max(1 - share, 0.0)) for seen, share, part in zip(polled, known, parts, strict=True)]
