"""Makes one server of its parts: canonical quantities for the whole and for each engine rank, replica and model.

One exposition may hold several engines: data-parallel ranks, replicas, models, targets of a federation. Rows are first sorted into
parts by the labels that tell parts apart; each part is read by itself, and the parts are then combined by the rule of each
quantity: pools and requests add, usage is weighted by the pool, what is configured must agree. A part that lacks a quantity makes
it Missing for the whole: a partial sum would look like a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pytest_kvcache.engines._dialect import Derived, Dialect
from pytest_kvcache.engines._parts import Parts
from pytest_kvcache.engines._reading import LATEST, LEAST, MOST, REASON_LIMIT, SAME, View, notes_of, plain, samples_of, version_of
from pytest_kvcache.engines._state import RawState
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value

# Of several models these are nobody's: a full pool would hide behind the others, and a block of one is not a block of another.
NOT_OVER_MODELS = frozenset({"usage", "used_blocks", "free_blocks", "used_tokens", "free_tokens"})


@dataclass(frozen=True)
class Values:
    """Canonical quantities of one look at a server: for the whole, and by part where it has several. ``notes`` is what to know of them."""

    whole: dict[str, Value]
    ranks: dict[str, dict[str, Value]]
    notes: list[str]
    version: str


def read_values(dialect: Dialect, raw: RawState, wall_s: float = 0.0, only: Collection[str] | None = None) -> Values:
    """Return the quantities of ``only`` (default: all) and, when all are read, the notes and the version.

    What cannot be read is Missing with its reason. ``wall_s`` is the Unix time that each Reading carries.
    """
    samples = samples_of(dialect, raw)
    parts = Parts(dialect, samples)
    names = [name for name in QUANTITIES if only is None or name in only]
    numbers = parts.of_model(raw.model) or range(len(parts.keys))
    views = [View(dialect, raw, samples, parts, number, wall_s) for number in numbers]
    for view in views:
        view.parts = views
    everything = only is None
    names_of = [parts.names[number] for number in numbers]
    if len(views) == 1:
        view = views[0]
        whole = {name: view.value(name) for name in names}
        notes = [*notes_of(view), *parts.of_models(numbers)] if everything else []
        return Values(whole, {}, notes, version_of(view) if everything else "")
    rest = View(dialect, raw, samples, parts, None, wall_s)
    rest.parts = views
    lacks = parts.lacks(raw.model)
    whole = {}
    for name in names:
        combined = _combine(name, views, names_of)
        if isinstance(combined, Missing) and not combined.cannot_happen and not isinstance(dialect.reads[name], Derived):
            # Series that name no part (vLLM's admission_rejections_total) speak of the whole server. What is computed from several
            # series is not asked: one of them might speak of one part only.
            of_all = rest.value(name)
            combined = of_all if isinstance(of_all, Reading) else combined
        whole[name] = Missing(lacks) if lacks and name in NOT_OVER_MODELS else combined
    ranks = {part: {name: view.value(name) for name in names} for part, view in zip(names_of, views, strict=True)}
    notes = [*notes_of(rest), *parts.of_models(numbers), *_spread(ranks)] if everything else []
    return Values(whole, ranks, notes, version_of(rest) if everything else "")


def models_of(dialect: Dialect, raw: RawState) -> list[str]:
    """Return the models that an exposition tells apart, by their names there: foreign text, which ``shown_models`` makes fit to be read."""
    return Parts(dialect, samples_of(dialect, raw)).models


def _combine(name: str, views: Sequence[View], names: Sequence[str]) -> Value:
    values = [view.value(name) for view in views]
    if all(isinstance(value, Missing) and value.cannot_happen for value in values):
        return values[0]
    lacking = [value for value in values if isinstance(value, Missing)]
    if len(lacking) == len(values) and len({value.reason for value in lacking}) == 1:
        return lacking[0]
    for value, part in zip(values, names, strict=True):
        if isinstance(value, Missing):
            return Missing(f"engine {part}: {value.reason}"[:REASON_LIMIT])
    readings = [value for value in values if isinstance(value, Reading)]
    first, many = readings[0], len(readings)
    if name in SAME:
        shown = sorted({str(reading.value) for reading in readings})
        return first if len(shown) == 1 else Missing(f"{many} engines differ: {', '.join(shown)[:100]}")
    if name == "usage":
        return _weighted(readings, views)
    numbers = [reading.number() for reading in readings]
    rule: tuple[str, Callable[[list[float]], float]] = ("sum", sum)
    if name in LEAST:
        rule = ("least", min)
    elif name in LATEST:
        rule = ("latest", max)
    elif name in MOST:
        rule = ("most", max)
    total = rule[1](numbers)
    return Reading(plain(total, first.unit), first.unit, f"{rule[0]} over {many} engines of {first.source}", first.wall_s)


def _weighted(usages: Sequence[Reading], views: Sequence[View]) -> Value:
    """Return the pool-weighted mean of the engines' usage (never their sum, and no plain mean: engines.md, trap 6)."""
    pool = "usable_blocks" if views[0].dialect.counts == "blocks" else "pool_tokens"
    weights = [view.number(pool) for view in views]
    for weight in weights:
        if isinstance(weight, Missing):
            return Missing(f"usage of {len(views)} engines cannot be weighted without their pools: {weight.reason}"[:REASON_LIMIT])
    sizes = [weight for weight in weights if not isinstance(weight, Missing)]
    if not sum(sizes):
        return Missing("the pools of all engines are empty")
    mean = sum(usage.number() * size for usage, size in zip(usages, sizes, strict=True)) / sum(sizes)
    return Reading(mean, "ratio", f"{usages[0].source} of {len(views)} engines, weighted by {pool}", usages[0].wall_s)


def _spread(ranks: Mapping[str, Mapping[str, Value]]) -> list[str]:
    """Return the note that shows each engine's usage with its free and usable pool: a mean hides the full one."""
    shown = []
    for part, values in ranks.items():
        usage = values["usage"]
        if not isinstance(usage, Reading):
            continue
        room = ""
        for free, pool, unit in (
            (values["free_blocks"], values["usable_blocks"], "blocks"),
            (values["free_tokens"], values["pool_tokens"], "tokens"),
        ):
            if isinstance(free, Reading) and isinstance(pool, Reading) and not room:
                room = f" ({free.number():.0f} of {pool.number():.0f} {unit} free)"
        shown.append((usage.number(), f"{part}: {usage.number() * 100:.1f} %{room}"))
    if not shown:
        return []
    fullest = sorted(shown, reverse=True)[:8]
    more = f"; {len(shown) - len(fullest)} more" if len(shown) > len(fullest) else ""
    return [f"usage by engine, fullest first: {'; '.join(text for _, text in fullest)}{more}"]
