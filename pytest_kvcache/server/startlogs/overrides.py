"""A pool that was set by hand in blocks: how many bytes it takes, by what the log says of the memory that was found for it.

vLLM prints ``Overriding num_gpu_blocks=A with num_gpu_blocks_override=B`` for each worker (``v1/core/kv_cache_utils.py``; V0's executors alike). A is the
memory that was found for the pool over the bytes of one block, rounded down, so one block has between M / (A + 1) and M / A bytes. Only B blocks are
allocated; the memory that was found, and ``kv_cache_memory_bytes`` of /metrics with it, no longer describes the pool.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

OVERRIDE = re.compile(r"Overriding num_gpu_blocks=([0-9]{1,18}) with num_gpu_blocks_override=([0-9]{1,18})")
ASKED = re.compile(r"'?kv_cache_memory_bytes'?[:=] ?([0-9]{1,18})\b")
_PRINTED = 0.005 * (1 << 30)  # sizes are printed in GiB with two decimals
_SAME = 0.0051 * (1 << 30)  # the same with what floats add


@dataclass(frozen=True)
class Room:
    """The memory that was found for one worker's pool, in bytes: ``exact``, or as a log prints it."""

    size: float
    exact: bool = False

    @property
    def span(self) -> tuple[float, float]:
        """The least and the most that it can be."""
        slack = 0.0 if self.exact else _PRINTED
        return max(self.size - slack, 0.0), self.size + slack


@dataclass(frozen=True)
class Overridden:
    """One worker's pool of ``blocks`` where ``found`` would have had room: bytes of one block, of which ``low`` and ``high`` are the bounds."""

    blocks: int
    found: int
    block_bytes: float
    low: float
    high: float

    @property
    def size(self) -> float:
        """The bytes of the pool."""
        return self.blocks * self.block_bytes

    @property
    def text(self) -> str:
        """The sum in words."""
        each = f"{self.block_bytes:,.0f} bytes"
        if self.high - self.low > 0.01 * self.block_bytes:
            each += f" ({self.low:,.0f} to {self.high:,.0f} by the log's rounding)"
        return f"{self.blocks:,} blocks of {each}, of which the memory that was found would hold {self.found:,}"


def room_of(printed: float, asked: float) -> Room:
    """Return the room that a log prints as ``printed`` bytes: the bytes that were ``asked`` for (0: none), where they print alike."""
    return Room(asked, exact=True) if abs(asked - printed) <= _SAME else Room(printed)


def settle(room: Room, found: int, blocks: int) -> Overridden | None:
    """Return what an override makes of one worker's pool; None where the log's figures tell nothing (no block would have fitted)."""
    least, most = room.span
    if found < 1 or blocks < 1 or most <= 0:
        return None
    low, high = least / (found + 1), most / found
    return Overridden(blocks, found, _roundest(low, high), low, high)


def pair(rooms: Sequence[Room], overrides: Sequence[tuple[int, int]]) -> list[Overridden | None]:
    """Return what becomes of each worker's pool: lines in the order of the workers, or one line for all of them."""
    if not overrides:
        return [None] * len(rooms)
    if len(overrides) != len(rooms):
        # one line for workers that are alike, or lines that were lost: the tightest memory belongs to the fewest blocks
        least = min(rooms, key=lambda room: room.size, default=None)
        one = settle(least, *min(overrides)) if least is not None else None
        return [one] * len(rooms)
    return [settle(room, found, blocks) for room, (found, blocks) in zip(rooms, overrides, strict=True)]


def _roundest(low: float, high: float) -> float:
    """Return the whole number above ``low`` and up to ``high`` that most twos divide: a block is a power of two times small factors."""
    for shift in range(40, -1, -1):
        step = 1 << shift
        number = math.floor(high / step) * step
        if number > low:
            return float(number)
    return high
