"""What one request holds of a pool: blocks for the tokens that are in the cache, by the engine's own rule.

A paged engine takes ``ceil(v / block)`` blocks for ``v`` tokens in the cache, and after the client has ``k`` tokens of the answer the
cache holds ``prompt + k - 1``: the token drawn last is not stored yet. Checked poll by poll on vLLM 0.32. A group of sliding-window
layers gives back the blocks before its window, from the first decode step on; a state group holds a fixed number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.layout import Engine, EngineShape, Layout
from pytest_kvcache.capacity.pool import lay_out
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.errors import UsageError
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import RunRecord, SnapshotRecord

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

RESERVES_OUTPUT = ("output", "longest-output")
"""A request takes the room of its whole planned output when it starts."""
RESERVES_LONGEST = ("longest", "longest-output")
"""Every request of a batch takes what the longest of them takes: of all its tokens, or of its prompt where the output is reserved as well."""
_LARGEST_BLOCK = 1024
"""No attention kernel takes blocks of more tokens."""
GROUPING: Mapping[str, Engine] = {"vllm": "vllm", "nim": "vllm", "ray_vllm": "vllm"}


@dataclass(frozen=True)
class Group:
    """KV-cache groups of one kind: ``count`` of them, of blocks of ``size`` tokens.

    ``window`` tokens where the layers slide (``chunked``: where they look back to the start of their chunk); ``fixed`` blocks of a
    group that holds a state or an encoder's tokens.
    """

    size: int
    count: int = 1
    window: int | None = None
    chunked: bool = False
    fixed: int | None = None

    def gone(self, tokens: Floats) -> Floats:
        """Return how many of the first tokens no layer of the group looks at any more."""
        import numpy as np

        if self.window is None:
            return np.zeros(len(tokens))
        if self.chunked:
            return np.floor(np.maximum(tokens - 1.0, 0.0) / self.window) * self.window
        return np.maximum(tokens - self.window, 0.0)


@dataclass(frozen=True)
class Footprint:
    """What a request takes of the pool: the groups that draw from it, and ``block`` tokens a block as the engine shows it.

    An engine that counts tokens has blocks of 1. ``reserves`` says what is taken beyond what is filled: nothing, the whole planned
    output from the start (``output``), for each request the length of the batch's longest (``longest``: padded batches), or that of the longest
    prompt and the planned output (``longest-output``).
    """

    block: int
    groups: tuple[Group, ...]
    reserves: str = ""

    @property
    def full(self) -> int:
        """How many groups keep every token: the ones whose leading blocks several requests can share for long."""
        return sum(group.count for group in self.groups if group.window is None and group.fixed is None)

    @property
    def slides(self) -> bool:
        """Whether a group gives blocks back while a request grows."""
        return any(group.window is not None for group in self.groups)

    def blocks(self, tokens: Floats, *, sliding: bool = True) -> Floats:
        """Return the blocks held for so many tokens in the cache; with ``sliding`` off, before a window gave anything back."""
        import numpy as np

        total = np.zeros(len(tokens))
        for group in self.groups:
            if group.fixed is not None:
                total += group.count * group.fixed * (tokens > 0)
                continue
            held = np.ceil(tokens / group.size)
            if sliding:
                held -= np.floor(group.gone(tokens) / group.size)
            total += group.count * held
        return total

    def filled(self, tokens: Floats) -> Floats:
        """Return the token slots that are filled for so many tokens in the cache; a slot is a ``block``-th of a block of any group."""
        import numpy as np

        total = np.zeros(len(tokens))
        for group in self.groups:
            if group.fixed is not None:
                total += group.count * group.fixed * self.block * (tokens > 0)
            else:
                total += group.count * (tokens - group.gone(tokens)) * (self.block / group.size)
        return total


def plain(block: int, reserves: str = "") -> Footprint:
    """Return the footprint of a model whose layers all keep everything, in one group."""
    return Footprint(block, (Group(block),), reserves)


def footprint_of(layout: Layout, reserves: str = "") -> Footprint:
    """Return the footprint that follows from a model's layout (capacity.pool.lay_out)."""
    groups = []
    for group in layout.groups:
        if group.kind == "state":
            groups.append(Group(group.block_size, fixed=group.states))
        elif group.kind == "cross":
            groups.append(Group(group.block_size, fixed=-(-layout.shape.encoder_tokens // group.block_size)))
        else:
            slides = group.window is not None and group.kind in {"sliding", "chunked"}
            groups.append(Group(group.block_size, window=group.window if slides else None, chunked=group.kind == "chunked"))
    return Footprint(layout.block_size, tuple(groups), reserves)


def groups_of(config: Path, snapshot: SnapshotRecord) -> list[dict[str, int]]:
    """Return the cache groups of the model whose config.json (or folder) is named, as the server of ``snapshot`` lays them out.

    Raises UsageError or CannotJudge for a file that cannot be read, and for an engine whose grouping is not known.
    """
    if snapshot.engine not in GROUPING:
        raise UsageError(
            f"how {snapshot.engine or 'this engine'} groups layers is not known: --kv-model-config says nothing there", hint="leave it out"
        )
    told = {name: int(value.number()) for name in ("block_size", "max_model_len") if isinstance(value := snapshot.value(name), Reading)}
    caching = snapshot.value("prefix_caching")
    shape = EngineShape(
        GROUPING[snapshot.engine],
        block_size=told.get("block_size"),
        max_model_len=told.get("max_model_len"),
        prefix_caching=not isinstance(caching, Reading) or caching.value not in (False, 0.0, "False", "false"),
        platform="gpu",
    )
    found = footprint_of(lay_out(read_architecture(config), shape))
    return [{name: int(value) for name, value in asdict(group).items() if value is not None} for group in found.groups]


def footprint(record: RunRecord, counts: str, layout: Layout | None = None) -> Footprint | Missing:
    """Return what a request takes of the pool of a Run's server; Missing, with the reason, where the record does not tell.

    ``counts`` is blocks or tokens, ``layout`` what is known of the model. Without it one full-attention group is taken where the
    engine's own figures agree: ``pool_blocks / max_concurrency`` is what it plans for one request at the longest length.
    """
    dialect = DIALECTS.get(record.engine)
    counts = counts or (dialect.counts if dialect is not None else "")
    first = record.before[0] if record.before else None
    if not counts or first is None:
        return Missing("what the engine counts its pool in, blocks or tokens, is not known")
    reserves = reserves_of(record)
    size = first.value("block_size")
    if isinstance(size, Missing) or isinstance(size.value, str):
        return plain(1, reserves) if counts == "tokens" else Missing(f"the block size is not known: {getattr(size, 'reason', 'it is no number')}")
    block = int(size.number())
    if block < 1:
        return Missing(f"a block of {block} tokens")
    if layout is not None:
        return footprint_of(layout, reserves)
    if record.kv_groups:
        return Footprint(block, tuple(_group(one) for one in record.kv_groups), reserves)
    planned, one = planned_blocks(first), _plain_blocks(first, block)
    window = first.value("sliding_window")
    if isinstance(window, Reading) and _slides(planned, one, block, int(window.number())):
        return Footprint(block, (Group(block, window=int(window.number())),), reserves)
    if planned == 1 and block > _LARGEST_BLOCK and one == 1:
        # a block as long as the longest request: a state of fixed size, and no room for tokens that could be empty
        return Footprint(block, (Group(block, fixed=1),), reserves)
    if planned and one and planned not in {one, one * max(len(first.per_rank), 1)}:
        return Missing(
            f"the engine plans {planned} blocks for one request at the longest length, and full attention in one group would take {one}:"
            f" the model has window or state layers, and which ones {'its config.json did not explain' if record.model_parts else 'the server does not say'};"
            " name the model's config.json (--kv-model-config PATH, of diagnose --model-config PATH)"
        )
    return plain(block, reserves)


def _slides(planned: int, one: int, block: int, window: int) -> bool:
    """Say whether the engine charges a longest request for one group of sliding layers: its window, what is in flight, and one block more."""
    return window > 0 and (not planned or min(-(-window // block), one) + 1 <= planned <= one + 1)


def reserves_of(record: RunRecord) -> str:
    """Return what a Run's engine takes for a request beyond what it fills: as the user said it (``--kv-reserves``), else as its dialect does."""
    stated = record.settings.get("reserves")
    said = stated.get("value") if isinstance(stated, dict) else None
    if said in {*RESERVES_OUTPUT, *RESERVES_LONGEST, "nothing"}:
        return "" if said == "nothing" else str(said)
    dialect = DIALECTS.get(record.engine)
    return dialect.reserves if dialect is not None else ""


def _group(one: Mapping[str, int]) -> Group:
    return Group(max(one.get("size", 1), 1), one.get("count", 1), one.get("window"), bool(one.get("chunked")), one.get("fixed"))


def planned_blocks(snapshot: SnapshotRecord) -> int:
    """Return the blocks that the engine plans for one request of the longest length, by its own pool and concurrency; 0 where it does not tell them."""
    pool, requests = snapshot.value("pool_blocks"), snapshot.value("max_concurrency")
    if isinstance(pool, Missing) or isinstance(requests, Missing) or not requests.number() > 0:
        return 0
    # the figure of a log has two decimals only: it tells the blocks where that is precise enough
    exact = pool.number() / requests.number()
    loosest = pool.number() / max(requests.number() - 0.005, 1e-9)
    return round(exact) if "log" not in requests.source or loosest - exact < 0.4 else 0


def _plain_blocks(snapshot: SnapshotRecord, block: int) -> int:
    longest = snapshot.value("max_model_len")
    return -(-int(longest.number()) // block) if isinstance(longest, Reading) else 0
