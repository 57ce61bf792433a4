"""How much of our prompts is the same text again, what prefix caching saved of it, and what it would save if it were on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.payload import REFUSED
from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import RunRecord

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]

UNMARKED = "the load's rows do not say which prompts begin with the same text (prefix_id)"


@dataclass(frozen=True)
class Prefix:
    """One text that several prompts begin with: how many ``requests``, its ``tokens`` (the longest part that a prompt takes of it),
    how many tokens of prompt later requests could take over (``reusable``), and the most live requests that had it at once."""

    requests: int
    tokens: int
    reusable: int
    at_once: int


@dataclass(frozen=True)
class Prefixes:
    """The shared texts of a Run, the largest saving first (at most 20), whether caching is on, and the values drawn from it.

    ``prefix.shared`` is the share of all prompt tokens that later requests could take over, ``prefix.would_save`` the same in tokens,
    ``prefix.saved`` what the engine's counter says was found, ``prefix.unexplained_hits`` hits beyond what our prompts repeat: its own
    preempted requests, or others. All of it is an upper bound: blocks that are evicted in between cannot be found again.
    """

    texts: tuple[Prefix, ...]
    caching: bool | None
    values: dict[str, Value]


def _reusable(rows: Rows, chosen: Any, block: int) -> Floats:
    """Return how many leading tokens of each chosen prompt a cache could give back, in whole blocks, never the prompt's last token."""
    import numpy as np

    most = np.minimum(rows.prefix_tokens[chosen], np.maximum(np.nan_to_num(rows.prompt[chosen]) - 1.0, 0.0))
    return np.asarray(np.floor(np.maximum(np.nan_to_num(most), 0.0) / block) * block, dtype=np.float64)


def _named(rows: Rows) -> Mask:
    import numpy as np

    mask: Mask = (rows.prefix >= 0) & np.isfinite(rows.prefix_tokens) & ~rows.outcome_in(REFUSED) & np.isfinite(rows.first_s)
    return mask


def _by_text(rows: Rows, block: int) -> tuple[Any, Floats]:
    """Return the named requests in order of text and time of sending, and what each could take over of the ones before it.

    Servers do not share a cache: each text counts once for every server.
    """
    import numpy as np

    chosen = np.flatnonzero(_named(rows))
    order = chosen[np.lexsort((rows.sent_s[chosen], rows.endpoint[chosen], rows.prefix[chosen]))]
    own = _reusable(rows, order, block)
    if not len(order):
        return order, own
    first = np.ones(len(order), dtype=bool)
    first[1:] = (rows.prefix[order][1:] != rows.prefix[order][:-1]) | (rows.endpoint[order][1:] != rows.endpoint[order][:-1])
    # of what was sent before, the longest part counts: a running maximum within each text
    starts = np.flatnonzero(first)
    length = np.floor(np.nan_to_num(rows.prefix_tokens[order]) / block) * block
    span = float(length.max()) + 1.0
    group = np.cumsum(first) - 1
    before = np.maximum.accumulate(length + group * span) - group * span
    seen = np.concatenate([[0.0], before[:-1]])
    seen[starts] = 0.0
    return order, np.minimum(own, seen)


def reusable_tokens(rows: Rows, block: int) -> float:
    """Return how many prompt tokens a prefix cache that forgets nothing would find, from what our prompts say that they share."""
    return float(_by_text(rows, max(block, 1))[1].sum())


def prefixes(record: RunRecord, rows: Rows, hits: Value, queries: Value, preemptions: Value, block: int) -> Prefixes:
    """Return what our prompts repeat, and what was found of it."""
    import numpy as np

    dialect = DIALECTS.get(record.engine)
    stated = record.before[0].value("prefix_caching") if record.before else Missing("the server was not read")
    caching = None if isinstance(stated, Missing) else stated.value not in (False, 0.0, "False", "false")
    block = max(block, 1)
    values: dict[str, Value] = {"prefix.saved": hits, "prefix.hit_rate": _rate(hits, queries)}
    held = ~rows.outcome_in(REFUSED)
    prompts = float(np.nansum(rows.prompt[held]))
    order, found = _by_text(rows, block)
    if not len(order) or prompts <= 0:
        lacking = Missing(UNMARKED if len(rows) else "no request was sent")
        values.update(dict.fromkeys(("prefix.would_save", "prefix.shared", "prefix.unexplained_hits"), lacking))
        return Prefixes((), caching, values)
    total = float(found.sum())
    source = (
        f"our request log: {len(np.unique(rows.prefix[order]))} texts in {len(order)} prompts, whole blocks of {block}, nothing forgotten in between"
    )
    values["prefix.would_save"] = Reading(total, "tokens", source)
    values["prefix.shared"] = Reading(total / prompts, "ratio", source)
    if isinstance(hits, Reading):
        back = f", beside {preemptions.number():.0f} preemptions" if isinstance(preemptions, Reading) and preemptions.number() else ""
        values["prefix.unexplained_hits"] = Reading(max(hits.number() - total, 0.0), "tokens", f"hits beyond what our prompts repeat{back}")
    else:
        values["prefix.unexplained_hits"] = hits
    if dialect is not None and not dialect.shares_prefixes:
        values["prefix.would_save"] = Reading(total, "tokens", source + "; a slot of this engine takes over only what it held itself")
    return Prefixes(_texts(rows, order, found), caching, values)


def _rate(hits: Value, queries: Value) -> Value:
    if isinstance(hits, Missing):
        return hits
    if isinstance(queries, Missing):
        return queries
    if queries.number() <= 0:
        return Missing("nothing was looked up in the prefix cache")
    return Reading(hits.number() / queries.number(), "ratio", f"{hits.source} / {queries.source}"[:300])


def _texts(rows: Rows, order: Any, found: Floats) -> tuple[Prefix, ...]:
    import numpy as np

    _, group = np.unique(rows.prefix[order], return_inverse=True)
    saving = np.bincount(group, weights=found)
    texts = []
    for number in np.argsort(-saving, kind="stable")[:20].tolist():
        mine = order[group == number]
        moments = np.concatenate([rows.sent_s[mine], rows.end_s[mine]])
        steps = np.concatenate([np.ones(len(mine)), -np.ones(len(mine))])
        live = np.cumsum(steps[np.lexsort((steps, moments))])
        longest = float(np.nan_to_num(rows.prefix_tokens[mine]).max())
        texts.append(Prefix(len(mine), int(longest), int(saving[number]), int(live.max())))
    return tuple(texts)
