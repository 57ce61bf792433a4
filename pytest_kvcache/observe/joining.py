"""Joins the samples of several servers into one state, each under its own ``instance``, so that pools add and usage is weighted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pytest_kvcache.engines import Dialect, Sample, Samples

LABEL = "instance"


def join_samples(parts: Sequence[tuple[str, Samples]], *, always: bool = False) -> Samples:
    """Return the samples of several expositions as one.

    Where two of them hold the same series they are different servers: every row then gets the label ``instance`` with the name of
    its part, unless it has one. ``always`` labels them in any case.
    """
    if len(parts) == 1 and not always:
        return parts[0][1]
    kept = [set(samples.rows) for _, samples in parts]
    apart = always or any(kept[i] & kept[j] for i in range(len(kept)) for j in range(i))
    rows: dict[str, list[Sample]] = {}
    names: set[str] = set()
    bad: list[str] = []
    for name, samples in parts:
        for series, found in samples.rows.items():
            labelled = [Sample({LABEL: name, **row.labels}, row.value) for row in found] if apart else list(found)
            rows.setdefault(series, []).extend(labelled)
        names |= samples.names
        bad += samples.bad_lines
    return Samples(rows, frozenset(names), tuple(bad[:5]), frozenset[str]().union(*(samples.in_blocks for _, samples in parts)))


def telling_servers_apart(dialect: Dialect, *labels: str) -> Dialect:
    """Return the dialect with ``labels`` (default: ``instance``) among those that tell servers apart."""
    more = tuple(label for label in labels or (LABEL,) if label not in dialect.server_labels)
    return dataclasses.replace(dialect, server_labels=(*more, *dialect.server_labels)) if more else dialect
