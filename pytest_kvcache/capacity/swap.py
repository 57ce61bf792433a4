"""vLLM V0's blocks in host memory: their count alone tells how many bytes a token takes, since the size of that pool is a setting."""

from __future__ import annotations

from pytest_kvcache import units

_GIB = 1 << 30
_DEFAULT_GIB = 4
_MOST_GIB = 64


def swap_fact(count: int, bytes_per_block: int) -> str:
    """Return what a log's count of host blocks says of ours: it is floor(swap space / bytes of a block), 4 GiB unless it was set."""
    size = units.show_bytes(bytes_per_block)
    ours = _DEFAULT_GIB * _GIB // bytes_per_block
    if ours == count:
        return f"host blocks: {count:,} are {_DEFAULT_GIB} GiB of swap space // {size}: a block takes what this plan says"
    other = next((gib for gib in range(1, _MOST_GIB + 1) if gib * _GIB // bytes_per_block == count), None)
    if other is not None:
        return f"host blocks: {count:,} are {other} GiB of swap space // {size}; with the default of {_DEFAULT_GIB} GiB they would be {ours:,}"
    theirs = units.show_bytes(_DEFAULT_GIB * _GIB / count)
    return (
        f"host blocks: the engine has {count:,}, and {_DEFAULT_GIB} GiB of swap space // {size} are {ours:,}: its block takes about {theirs},"
        " so it is of another model, KV type, block size or parallelism, or the swap space was set"
    )
