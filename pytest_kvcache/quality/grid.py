"""Which prompt lengths the standard set asks, and how often: kernels fail at particular lengths, so the grid is the point.

Lengths are those of the whole prompt in tokens, as the server counts it. On and beside every power of two, on and beside multiples of the
server's own block size, and close to the longest context. The powers of two are the same for every server, so that two sides with
different block sizes still share most of their items.
"""

from __future__ import annotations

from collections.abc import Sequence

BANDS = 5
"""The prompt is cut into this many bands; the items of a length are spread over them."""
TOTAL = 300
"""No loss in 299 items bounds it at 1 % (exact, one-sided 95 %)."""
LONGEST = 32_768
"""The longest prompt in tokens: five prompts of a million tokens would take hours."""
MULTIPLES = (1, 2, 3, 5, 7)
"""Which multiples of the block size are asked beside the powers of two."""
MARGIN = 16
"""How far the longest prompts stay below the longest context, which must hold the answer too."""
ASSUMED_BLOCK = 16
"""Where the server does not tell its block size: the usual one."""

_UNTOLD = 2049
_FROM = 64
_FEW_ABOVE = 2048
_FEW = 2
_NEAR = 5
_MOST_BLOCK = 16_384


def plan(max_model_len: int | None, block_sizes: Sequence[int] = (), shortest: int = 12) -> list[tuple[int, int]]:
    """Return (prompt length in tokens, number of items) in order of length: ``TOTAL`` items, all of which the model holds.

    ``block_sizes`` are in tokens, of one side or of both. A server that does not tell its longest context gets no more than 2,049. Empty where the model holds nothing of ``shortest`` tokens.
    """
    room = _UNTOLD if max_model_len is None else min(max_model_len - MARGIN, LONGEST)
    if room < shortest:
        return []
    powers = [1 << n for n in range(_FROM.bit_length() - 1, LONGEST.bit_length())]
    marks = {length for power in powers for length in _beside(power)}
    for block in block_sizes or (ASSUMED_BLOCK,):
        if 1 < block <= _MOST_BLOCK:
            marks |= {length for k in MULTIPLES for length in _beside(k * block)}
            marks |= set(_beside(room // block * block))  # the last boundary that the longest prompts cross
    counts = {length: BANDS if length <= _FEW_ABOVE + 1 else _FEW for length in marks if shortest <= length <= room}
    if max_model_len is not None:
        counts[room] = _NEAR
    if not counts:
        counts[room] = _NEAR
    return sorted(_fill(counts).items())


def _beside(length: int) -> tuple[int, int, int]:
    return length - 1, length, length + 1


def _fill(counts: dict[int, int]) -> dict[int, int]:
    """Return the counts raised to ``TOTAL``: more items of the shorter lengths, which cost least, evenly over them."""
    counts = dict(counts)
    cheap = sorted(counts)[: max(1, len(counts) // 2)]
    missing = TOTAL - sum(counts.values())
    step = 0
    while missing > 0:
        more = min(BANDS, missing)
        counts[cheap[step % len(cheap)]] += more
        missing -= more
        step += 1
    return counts
