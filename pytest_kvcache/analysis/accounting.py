"""Payload against usage: what our requests must hold at each sample, what the engine says is held, and where the difference lies.

Every sample's used blocks are taken apart into prompt, generated tokens, prompts being written, prefixes that several requests hold
once, the empty rest of last blocks, room reserved ahead, what requests hold that are not ours, what stays held after its request, and
what nothing explains. The parts add up to what the engine reports, sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.holding import Footprint, plain
from pytest_kvcache.analysis.levels import Levels, Window, pool_of
from pytest_kvcache.analysis.live import MOST_PAIRS, OFF, SURE, UNSURE, Held, Moments, hold, pairs
from pytest_kvcache.analysis.pace import step_clock
from pytest_kvcache.analysis.payload import Payload, payload
from pytest_kvcache.analysis.prefixes import reusable_tokens
from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.analysis.series import Series
from pytest_kvcache.analysis.traffic import beyond_ours, leak, other_running
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import RunRecord

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]

PARTS = ("prompt", "common", "generated", "prefilling", "rounding", "reserved", "not_ours", "held_after", "timing", "unexplained")
"""The parts of a level in token slots; they add up to what the engine reports. ``common`` is what several requests hold once, ``timing``
what one scheduling step sooner or later explains (either sign), ``unexplained`` what lies beyond that (either sign)."""

_HITS_AS_MEANT = 0.95


@dataclass(frozen=True)
class Account:
    """The level of one server, or of all together, taken apart at each sample.

    ``t_s`` counts from the start of the load. ``used`` is what the engine says, ``low``, ``likely`` and ``high`` what our requests must
    hold by the engine's own rule, all in ``unit`` (blocks or tokens); ``parts`` (``PARTS``) and ``shared`` (what prompts would hold
    more without sharing: the negative waste) are in token slots. ``answering`` and ``sent`` count our requests, ``longest`` and
    ``mean_length`` are lengths of the answering ones, ``beyond`` the requests that ran and were not ours. NaN is a gap.
    """

    t_s: Floats
    unit: str
    block: int
    used: Floats
    low: Floats
    likely: Floats
    high: Floats
    parts: dict[str, Floats]
    shared: Floats
    answering: Floats
    sent: Floats
    longest: Floats
    mean_length: Floats
    beyond: Floats

    @property
    def slots(self) -> Floats:
        """What the engine says is held, in token slots."""
        return self.used * self.block

    @property
    def payload(self) -> Floats:
        """The tokens of our requests in the cache; a shared prefix counts for each of them."""
        return self.parts["prompt"] + self.parts["common"] + self.shared + self.parts["generated"] + self.parts["prefilling"]

    @property
    def agrees(self) -> Mask:
        """At which samples the engine's figure lies between what our requests must and can hold."""
        return (self.used >= self.low - 1e-6) & (self.used <= self.high + 1e-6)


@dataclass(frozen=True)
class Accounting:
    """Payload against usage for one Run: the account over time, of each server where there are several, and the values drawn from it.

    ``missing`` says why nothing could be expected ("" it could). ``sharing`` says whether live requests share prefixes (``off``,
    ``sure``, ``unsure``); ``put_back`` how many of our requests were preempted, as far as their pauses show. ``notes`` are for the reader.
    """

    whole: Account
    servers: tuple[Account, ...]
    values: dict[str, Value]
    footprint: Footprint | Missing
    sharing: str = OFF
    put_back: int = 0
    missing: str = ""
    notes: tuple[str, ...] = field(default=())


def sharing_of(record: RunRecord, rows: Rows, hits: Value, block: int) -> str:
    """Return whether live requests share the blocks of a common prefix: what the engine says, and what its hit counter proves."""
    dialect = DIALECTS.get(record.engine)
    caching = record.before[0].value("prefix_caching") if record.before else Missing("not read")
    if dialect is not None and not dialect.shares_prefixes:
        return OFF
    if isinstance(caching, Reading) and caching.value in (False, 0.0, "False", "false"):
        return OFF
    if isinstance(hits, Missing):
        return UNSURE
    if hits.number() <= 0:
        return OFF
    return SURE if (meant := reusable_tokens(rows, block)) > 0 and hits.number() >= _HITS_AS_MEANT * meant else UNSURE


def account(
    record: RunRecord, rows: Rows, series: Sequence[Series], seen: Levels, window: Window, lost: Mask, shape: Footprint | Missing, hold_s: float
) -> Accounting:
    """Return the accounting of one Run whose load was run."""
    notes: list[str] = []
    usual = shape if isinstance(shape, Footprint) else plain(1)
    sharing = sharing_of(record, rows, seen.counters["prefix_hits"].value, usual.block)
    loads = [payload(rows, number if len(series) > 1 else None, lost) for number in range(len(series))]
    stride = _stride(rows, series)
    if stride > 1:
        notes.append(f"taken apart at every {stride}th sample: there are too many requests for all of them")
    tracks = [
        _one(
            record.engine,
            one,
            pool_of(record.before[number]) if number < len(record.before) else None,
            rows,
            rows.endpoint == number if len(series) > 1 else rows.endpoint >= 0,
            lost,
            usual,
            sharing,
            seen.counts,
            loads[number],
            window,
            stride,
        )
        for number, one in enumerate(series)
    ]
    whole = tracks[0] if len(tracks) == 1 else _together(tracks, hold_s)
    wall_s = whole.t_s + window.since_s
    busy_end = float(rows.end_s.max()) if len(rows) else window.since_s
    left = leak(seen.wall_s, _used(seen.columns, seen.counts), seen.columns["running"], seen.columns["waiting"], busy_end, seen.counts)
    dialect = DIALECTS.get(record.engine)
    if dialect is not None and dialect.idle_cached_is_free is not True and not (isinstance(left, Reading) and not left.number()):
        left = Missing(f"{dialect.title} may count as used what it keeps for reuse, so what is held when idle is no leak")
    missing = shape.reason if isinstance(shape, Missing) else ""
    if not missing and not seen.counts:
        missing = "the engine tells neither used blocks nor used tokens"
    other = other_running(wall_s, whole.beyond, window)
    back = int(lost.sum())
    if back:
        notes.append(f"{back} requests of ours were put back into the queue: they count as holding nothing in their longest pause")
    values = _values(whole, wall_s, window, missing)
    values["other_traffic.running"] = other
    for unit in ("blocks", "tokens"):
        other_unit = Missing(f"the engine counts {seen.counts}", cannot_happen=True) if seen.counts not in {unit, ""} else left
        values[f"leak.{unit}"] = other_unit
    parts = tuple(tracks) if len(tracks) > 1 else ()
    if missing:
        whole = _without(whole)
        parts = tuple(_without(part) for part in parts)
    return Accounting(whole, parts, values, shape, sharing, back, missing, tuple(notes))


def _used(columns: dict[str, Floats], counts: str) -> Floats:
    import numpy as np

    return columns[f"used_{counts}"] if counts else np.full(len(columns["usage"]), np.nan)


def _stride(rows: Rows, series: Sequence[Series]) -> int:
    """Return of how many samples one is taken apart: all, unless there are more live requests over all of them than can be summed."""
    total = sum(pairs(rows, rows.endpoint == number, one.wall_s) for number, one in enumerate(series))
    return max(-(-total // MOST_PAIRS), 1)


def _one(
    engine: str,
    one: Series,
    pool: float | None,
    rows: Rows,
    chosen: Mask,
    lost: Mask,
    shape: Footprint,
    sharing: str,
    counts: str,
    load: Payload,
    window: Window,
    stride: int,
) -> Account:
    import numpy as np

    picked = np.arange(0, len(one.wall_s), stride)
    usage = one.column("usage")
    if stride > 1 and np.isfinite(usage).any():
        picked = np.unique(np.append(picked, int(np.nanargmax(usage))))
    wall_s = one.wall_s[picked]
    read_s = one.read_s[picked] if one.read_s is not None else np.zeros(len(wall_s))
    running, waiting = one.column("running")[picked], one.column("waiting")[picked]
    beyond = beyond_ours(wall_s, running + np.nan_to_num(waiting), load)
    # who waits is known only where all who do are ours
    queue = np.where(np.nan_to_num(beyond, nan=1.0) > 0.5, np.nan, waiting)
    clock = step_clock(engine, one, rows, chosen, lost)
    held = hold(rows, chosen, lost, shape, Moments(wall_s, np.maximum.accumulate(wall_s + read_s), queue, clock), sharing)
    if pool:  # nobody holds more than there is, whatever our log allows for
        held = replace(held, high=np.minimum(held.high, pool), low=np.minimum(held.low, pool))
    used = one.column(f"used_{counts}")[picked] if counts else np.full(len(wall_s), np.nan)
    return _account(wall_s - window.since_s, used, running, waiting, beyond, held, shape, counts)


def _account(t_s: Floats, used: Floats, running: Floats, waiting: Floats, beyond: Floats, held: Held, shape: Footprint, counts: str) -> Account:
    """Return the account of one server: what is certain first, then prompts being written, then who else holds the rest."""
    import numpy as np

    slots = used * shape.block
    certain = held.prompt - held.shared + held.generated + held.rounding + held.reserved
    rest = slots - certain
    prefilling = np.clip(rest, 0.0, held.prefilling)
    rest = rest - prefilling
    over = used > held.high + 1e-6
    idle = (running <= 0) & (np.nan_to_num(waiting) <= 0)
    none = np.zeros(len(t_s))
    not_ours = np.where(over & (beyond > 0.5), rest, none)
    held_after = np.where(over & idle & (not_ours == 0), rest, none)
    left = rest - not_ours - held_after
    outside = np.where(over, (used - held.high) * shape.block, np.where(used < held.low - 1e-6, (used - held.low) * shape.block, none))
    unexplained = np.where((not_ours != 0) | (held_after != 0), none, outside) + 0.0 * used
    parts = {
        "prompt": held.prompt - held.shared - held.common,
        "common": held.common,
        "generated": held.generated,
        "prefilling": prefilling,
        "rounding": held.rounding,
        "reserved": held.reserved,
        "not_ours": not_ours,
        "held_after": held_after,
        "timing": left - unexplained,
        "unexplained": unexplained,
    }
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(held.answering > 0, held.total / held.answering, np.nan)
    longest = np.where(held.answering > 0, held.longest, np.nan)
    return Account(
        t_s, counts, shape.block, used, held.low, held.likely, held.high, parts, held.shared, held.answering, held.sent, longest, mean, beyond
    )


def _together(tracks: Sequence[Account], hold_s: float) -> Account:
    """Return the sum over servers at the moments of any of them; the others count with their newest sample, no older than ``hold_s``."""
    import numpy as np

    t_s = np.unique(np.concatenate([one.t_s for one in tracks])) if tracks else np.empty(0)
    index, fresh = [], []
    for one in tracks:
        at = np.searchsorted(one.t_s, t_s, side="right") - 1
        there = at >= 0
        there[there] &= t_s[there] - one.t_s[at[there]] <= hold_s
        index.append(at)
        fresh.append(there)

    def total(read: Any, how: Any = np.sum) -> Floats:
        columns = [
            np.where(ok, read(one)[at], np.nan) if len(one.t_s) else np.full(len(t_s), np.nan)
            for one, at, ok in zip(tracks, index, fresh, strict=True)
        ]
        return np.asarray(how(columns, axis=0), dtype=np.float64) if columns else np.empty(0)

    answering = total(lambda one: one.answering)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(answering > 0, total(lambda one: np.nan_to_num(one.mean_length) * one.answering) / answering, np.nan)
    longest = total(lambda one: np.nan_to_num(one.longest), np.max)
    first = tracks[0]
    return Account(
        t_s,
        first.unit,
        first.block,
        total(lambda one: one.used),
        total(lambda one: one.low),
        total(lambda one: one.likely),
        total(lambda one: one.high),
        {name: total(lambda one, name=name: one.parts[name]) for name in PARTS},
        total(lambda one: one.shared),
        answering,
        total(lambda one: one.sent),
        np.where(answering > 0, longest, np.nan),
        mean,
        total(lambda one: one.beyond),
    )


def highest(column: Floats) -> int:
    """Return the index of the highest value that is there; of several equal ones the middle, where things have settled."""
    import numpy as np

    there = np.flatnonzero(column >= np.nanmax(column))
    return int(there[len(there) // 2])


def _without(one: Account) -> Account:
    """Return the account without what rests on the blocks of a request, which are not known."""
    import numpy as np

    gap = np.full(len(one.t_s), np.nan)
    return Account(
        one.t_s,
        one.unit,
        one.block,
        one.used,
        gap,
        gap,
        gap,
        dict.fromkeys(PARTS, gap),
        gap,
        one.answering,
        one.sent,
        one.longest,
        one.mean_length,
        one.beyond,
    )


def _values(one: Account, wall_s: Floats, window: Window, missing: str) -> dict[str, Value]:
    """Return the values that conditions name: over the load, and at the sample with the highest level."""
    import numpy as np

    found: dict[str, Value] = {}
    pressed = (wall_s >= window.since_s) & (wall_s <= window.until_s)
    lengths = one.mean_length[pressed & np.isfinite(one.mean_length)]
    nobody = Missing("no request of ours was answering at a sample inside the load")
    found["live_length.mean"] = (
        Reading(float(lengths.mean()), "tokens", f"mean of {len(lengths)} samples, requests that answer") if len(lengths) else nobody
    )
    longest = one.longest[np.isfinite(one.longest)]
    found["live_length.max"] = Reading(float(longest.max()), "tokens", "longest request that answered at a sample") if len(longest) else nobody
    slots = one.slots
    busy = pressed & np.isfinite(slots) & (slots > 0)
    if missing or not busy.any():
        reason = Missing(missing or "nothing was held at any sample inside the load")
        names = (
            "fill.mean",
            "fill.at_peak",
            "accounting.agreement",
            *(f"waste.{name}" for name in _WASTE),
            *(f"waste.{name}_blocks" for name in _WASTE),
        )
        return {**found, **dict.fromkeys((*names, *(f"level.{name}" for name in _LEVELS)), reason)}
    total = float(slots[busy].sum())
    over = f"{int(busy.sum())} samples inside the load"
    load = one.payload
    found["fill.mean"] = Reading(float(load[busy].sum()) / total, "ratio", f"tokens of our requests over slots held, {over}")
    known = pressed & np.isfinite(one.used)
    found["accounting.agreement"] = Reading(
        float(one.agrees[known].mean()), "ratio", f"share of {int(known.sum())} samples within one step of what our requests hold"
    )
    peak = highest(np.where(wall_s >= window.since_s, slots, np.nan))
    when = f"at the highest sample, {one.t_s[peak]:.1f} s into the load"
    found["fill.at_peak"] = (
        Reading(float(load[peak] / slots[peak]), "ratio", f"tokens of our requests over slots held {when}")
        if slots[peak] > 0
        else Missing("nothing was held")
    )
    for name in _WASTE:
        column = -one.shared if name == "shared" else one.parts[name]
        found[f"waste.{name}"] = Reading(float(column[busy].sum()) / total, "ratio", f"share of the slots held, {over}")
        found[f"waste.{name}_blocks"] = (
            Reading(float(column[peak]) / one.block, "blocks", when)
            if one.unit == "blocks"
            else Missing("the engine counts tokens", cannot_happen=True)
        )
    for name in _LEVELS:
        column = one.parts["prompt"] + one.parts["prefilling"] if name == "prompt" else one.parts[name]
        found[f"level.{name}"] = Reading(float(column[peak]), "tokens", when)
    return found


_WASTE = ("rounding", "shared", "reserved", "not_ours", "held_after", "unexplained")
_LEVELS = ("prompt", "generated", "common")
