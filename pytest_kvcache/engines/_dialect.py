"""A dialect is a value: for every canonical quantity it says how one engine states it, or why it does not.

A rule is data. The reader in ``_reading.py`` applies it to what was read from a server. Adding an engine is one file with one
``DIALECT`` in it; nothing else lists engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pytest_kvcache.quantities import QUANTITIES, Value

if TYPE_CHECKING:
    from pytest_kvcache.engines._reading import View
    from pytest_kvcache.engines._state import RawState, Sample

Counts = Literal["blocks", "tokens"]
Reserves = Literal["", "output", "longest", "longest-output"]
Parse = Literal["number", "text", "flag"]

# What Prometheus, its relabelling and Ray add to a series to say which server it came from.
TARGET_LABELS = ("instance", "pod", "ReplicaId", "WorkerId")
# The rest of what they add; no part of what an engine says.
ADDED_LABELS = frozenset(
    {*TARGET_LABELS, "job", "namespace", "node", "container", "service", "endpoint", "cluster", "server", "Component", "NodeAddress"}
)


@dataclass(frozen=True)
class Series:
    """The value of a series: the first of ``names`` that the exposition has.

    ``where`` narrows rows by label (any of the label names in the key that a row has, any of the values). Rows may differ in the
    labels of ``over`` and are then added. Rows that differ in ``pid`` are one gauge told by several processes: the highest
    counts. ``hint`` says what it takes for the series to be there, unless one of ``followed`` is there, which shows that it was done. ``shared`` takes a row that the ranks of one front end share as each
    rank's own (a size that holds for all of them). ``scale`` is what one unit of the series is in units of the quantity. ``unborn``
    says why a counter that is not there is zero, where the engine shows a counter only after its first event and ``alive`` (series
    of the same engine, each of them) show that it is being read; "" where absence tells nothing, which is the rule.
    """

    names: tuple[str, ...]
    where: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    over: tuple[str, ...] = ()
    hint: str = ""
    followed: tuple[str, ...] = ()
    shared: bool = False
    scale: float = 1.0
    unborn: str = ""
    alive: tuple[str, ...] = ()

    def source(self, spelled: str) -> str:
        """Return what was read, for a Reading: the series as it is spelled there, narrowed as the rule narrows it."""
        narrowed = ",".join(f"{keys[0]}={'|'.join(values)}" for keys, values in self.where.items())
        return spelled + (f"{{{narrowed}}}" if narrowed else "") + (f" x {self.scale:.0f}" if self.scale != 1 else "")

    def describe(self) -> str:
        """Return where the value comes from, in words for the docs."""
        narrowed = ", ".join(f"{keys[0]}={'|'.join(values)}" for keys, values in self.where.items())
        scaled = f" x {self.scale:.0f}" if self.scale != 1 else ""
        return (
            " or ".join(self.names) + (f" where {narrowed}" if narrowed else "") + scaled + (f" (absent is 0: {self.unborn})" if self.unborn else "")
        )


@dataclass(frozen=True)
class InfoLabel:
    """A label of an info series. The literal ``None`` and the empty text are no value."""

    family: str
    label: str
    parse: Parse = "number"

    def describe(self) -> str:
        """Return where the value comes from, in words for the docs."""
        return f"{self.family}{{{self.label}}}"


@dataclass(frozen=True)
class JsonField:
    """A field of a JSON body, reached by keys; a number as key indexes a list, -1 is its last element."""

    path: str
    keys: tuple[str | int, ...]
    parse: Parse = "number"

    def describe(self) -> str:
        """Return where the value comes from, in words for the docs."""
        return f"{self.path} {'.'.join('last' if key == -1 else str(key) for key in self.keys)}"


@dataclass(frozen=True)
class LogFact:
    """What the start-up log states under this name; "" is the quantity's own name."""

    name: str = ""

    def describe(self) -> str:
        """Return where the value comes from, in words for the docs."""
        return "start-up log"


@dataclass(frozen=True)
class Derived:
    """A value computed from others by ``formula``, which is stated wherever the value is shown.

    ``series`` names every series that ``compute`` looks at, so that the parser keeps them.
    """

    formula: str
    compute: Callable[[View], Value]
    series: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return where the value comes from, in words for the docs."""
        return self.formula


@dataclass(frozen=True)
class FirstOf:
    """Sources in order of preference: the first that has a value counts."""

    rules: tuple[Rule, ...]

    def describe(self) -> str:
        """Return where the value comes from, in words for the docs."""
        return "; else ".join(rule.describe() for rule in self.rules)


@dataclass(frozen=True)
class NoReading:
    """The engine does not tell (``absent``), or it can never happen there (``cannot_happen``)."""

    why: str
    never: bool = False

    def describe(self) -> str:
        """Return why there is no value, in words for the docs."""
        return f"cannot happen: {self.why}" if self.never else f"absent: {self.why}"


Rule = Series | InfoLabel | JsonField | LogFact | Derived | FirstOf | NoReading


def absent(why: str) -> NoReading:
    """Return the rule of a quantity that the engine has and does not tell."""
    return NoReading(why)


def cannot_happen(why: str) -> NoReading:
    """Return the rule of a quantity that the engine can never have; gates on it do not apply."""
    return NoReading(why, never=True)


def first_of(*rules: Rule) -> FirstOf:
    """Return a rule that tries each source in turn."""
    return FirstOf(rules)


@dataclass(frozen=True)
class JsonPath:
    """A JSON body that the dialect reads. ``per_sample`` bodies move and are cheap; the others are read once a snapshot.

    ``sign`` are keys that only this engine's body has (of the first element, where the body is a list): they identify it.
    ``without_metrics`` bodies repeat what the metrics say, and are read only where those are switched off. ``destructive`` bodies are
    gone once they are read, for every other reader as well: they are read only where the user allows it.
    """

    path: str
    per_sample: bool = False
    sign: tuple[str, ...] = ()
    without_metrics: bool = False
    destructive: bool = False


@dataclass(frozen=True)
class Dialect:
    """How one engine is read.

    ``series_prefix`` and ``owned_by`` (of /v1/models) and the signs of ``json_paths`` identify it; ``claims`` replaces the first and the
    last where a prefix is not enough. ``covers`` are the names of dialects whose series an exposition of this one holds as well: a
    wrapper, or a special form. ``counts`` is the unit of its pool; ``idle_cached_is_free`` says whether KV that is cached and not
    referenced counts as free (None: nobody told), and ``meaning`` in a sentence what "used" is where it is not "held by live requests".
    ``gauge_scale`` is what a full pool reads on its usage gauge. ``metrics_paths`` are tried in order.

    Series with different values of ``rank_label`` are engine ranks behind one front end; ``server_labels`` tell servers apart where one
    exposition holds several. ``label_aliases`` are other names of a label on some series. ``mirror_labels`` tell copies of one value
    apart, which are never added; rows with a value of one of ``share_labels`` are shares of the row that has none, which is their total.
    ``rows`` makes series out of JSON bodies, or of series that were given other names. ``remarks`` says what a reader should know of a
    state; ``asides`` are series that only it looks at, in ``View.raw``. ``info_aliases`` are other families that hold the labels of an info
    series, each with what stands before its labels there. Series whose names end in one of ``endings`` are kept as well: an engine whose
    users choose the prefix.
    ``since`` is the version in which a quantity can be read first; "" is the version that the dialect as a whole begins with.
    ``full_errors`` are words of the engine's errors that a request gets only when the pool is full. ``reserves`` says what a request takes
    beyond what it fills: nothing, its whole planned output (``output``), the length of the longest of its batch (``longest``), or both.
    ``shares_prefixes``: live requests can hold one copy of the same leading blocks. ``generates_by_step``: its counter of generated tokens
    grows with every step, and not when requests end. ``gauges_every_s``: its gauges stand still for so long between two updates, whatever
    happens.
    """

    name: str
    title: str
    series_prefix: str
    counts: Counts
    idle_cached_is_free: bool | None
    reads: Mapping[str, Rule]
    version: Rule
    owned_by: str = ""
    gauge_scale: float = 1.0
    json_paths: tuple[JsonPath, ...] = ()
    metrics_paths: tuple[str, ...] = ("/metrics",)
    rank_label: str = ""
    server_labels: tuple[str, ...] = ()
    model_label: str = ""
    model_in_any_case: bool = False
    reserves: Reserves = ""
    shares_prefixes: bool = True
    generates_by_step: bool = False
    gauges_every_s: float = 0.0
    label_aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mirror_labels: frozenset[str] = frozenset()
    share_labels: frozenset[str] = frozenset()
    extra_series: tuple[str, ...] = ()
    full_errors: tuple[str, ...] = ()
    claims: Callable[[RawState], bool] | None = None
    covers: tuple[str, ...] = ()
    rows: Callable[[RawState], Mapping[str, Sequence[Sample]]] | None = None
    remarks: Callable[[View], list[str]] | None = None
    meaning: str = ""
    asides: tuple[str, ...] = ()
    info_aliases: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    endings: tuple[str, ...] = ()
    since: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        silent = [name for name in QUANTITIES if name not in self.reads]
        unknown = [name for name in (*self.reads, *self.since) if name and name not in QUANTITIES]
        if silent or unknown:
            raise ValueError(f"dialect {self.name}: says nothing of {silent}, speaks of unknown {unknown}")

    @cached_property
    def families(self) -> tuple[str, ...]:
        """The names of all series that this dialect reads, in the engine's own spelling."""
        found: dict[str, None] = dict.fromkeys(self.extra_series)
        for rule in (*self.reads.values(), self.version):
            found.update(dict.fromkeys(_series_of(rule)))
        found.update(dict.fromkeys(alias for aliases in self.info_aliases.values() for alias, _ in aliases))
        return tuple(found)

    @cached_property
    def read_names(self) -> frozenset[str]:
        """Every spelling of every series that a quantity is read from."""
        return frozenset(spelled for name in self.families for spelled in spellings(name))

    @cached_property
    def wanted(self) -> frozenset[str]:
        """What the parser has to keep: ``read_names``, and what remarks look at."""
        names = self.read_names | set(self.asides)
        return Wanted.of(names, self.endings) if self.endings else names  # a plain set is asked faster


class Wanted(frozenset[str]):
    """Names of series to keep; a name that ends in one of ``endings`` is in it as well."""

    endings: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str], endings: Iterable[str]) -> Wanted:
        """Return a set of these names and endings."""
        found = cls(names)
        found.endings = tuple(dict.fromkeys(endings))
        return found

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.endswith(self.endings))


def wanted_by(dialects: Iterable[Dialect], more: Iterable[str] = ()) -> frozenset[str]:
    """Return what several dialects want together, and ``more`` names."""
    every = list(dialects)
    names = frozenset(more).union(*(dialect.wanted for dialect in every))
    endings = [ending for dialect in every for ending in dialect.endings]
    return Wanted.of(names, endings) if endings else names


def _series_of(rule: Rule) -> tuple[str, ...]:
    if isinstance(rule, Series):
        return (*rule.names, *rule.alive)
    if isinstance(rule, InfoLabel):
        return (rule.family,)
    if isinstance(rule, Derived):
        return rule.series
    if isinstance(rule, FirstOf):
        return tuple(name for inner in rule.rules for name in _series_of(inner))
    return ()


_SPELLINGS: dict[str, tuple[str, ...]] = {}


def spellings(name: str) -> tuple[str, ...]:
    """Return the forms in which a series name of an engine is found, its own form first.

    Exporters, collectors and Ray rename: ``vllm:x`` is also ``vllm_x``, ``vllm.x``, ``ray_vllm_x`` and ``ray_vllm:x``; a counter
    ``vllm:x_total`` is also ``vllm.x.total`` and ``vllm.x.count``, and a gauge ``vllm:x`` that OpenTelemetry gave the unit 1 is ``vllm_x_ratio``.
    Ray's own adapter writes ``ray_serve_sglang_x``. Source: engines.md, sections 10 and 11; OpenTelemetry's Prometheus normalization.
    A name without a colon has one form, but for TensorRT-LLM's, which Dynamo printed with a colon (section 5).
    """
    known = _SPELLINGS.get(name)
    if known is None:
        prefix, colon, rest = name.partition(":")
        forms: tuple[str, ...] = (name,)
        if colon:
            forms = (name, f"{prefix}_{rest}", f"ray_{prefix}_{rest}", f"ray_{name}", f"{prefix}.{rest}", f"ray_serve_{prefix}_{rest}")
        if colon and rest.endswith("_total"):
            forms += (f"{prefix}.{rest.removesuffix('_total')}.total", f"{prefix}.{rest.removesuffix('_total')}.count")
        elif colon and not rest.endswith(("_info", "_created")):
            forms += (f"{prefix}_{rest}_ratio", f"{name}_ratio")
        elif name.startswith("trtllm_"):
            forms += (name.replace("_", ":", 1),)
        known = _SPELLINGS[name] = forms
    return known


def has_prefix(name: str, prefix: str) -> bool:
    """Say whether a series name as found in an exposition belongs to an engine whose own names begin with ``prefix`` and a colon."""
    bares = (name, name.removeprefix("ray_"), name.removeprefix("ray_serve_"))
    return any(bare.startswith(prefix) and bare[len(prefix) : len(prefix) + 1] in {":", "_", "."} for bare in bares)


def looks_like(body: Any, sign: tuple[str, ...]) -> bool:
    """Say whether a JSON body (of a list: its first element) has all keys of ``sign``.

    ``a|b`` is either key, ``rows.a`` a key of the first element of a list under ``rows``.
    """
    first = body[0] if isinstance(body, list) and body else body
    return bool(sign) and isinstance(first, dict) and all(any(_has(first, key) for key in keys.split("|")) for keys in sign)


def _has(body: dict[str, Any], key: str) -> bool:
    name, _, inner = key.partition(".")
    if not inner:
        return name in body
    rows = body.get(name)
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], dict) and inner in rows[0]
