"""One Run taken apart: its values by name, its lanes, its rejections, its level over time, and what makes it unsound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.accounting import Accounting, account
from pytest_kvcache.analysis.answers import answer_values
from pytest_kvcache.analysis.balance import Balance, balance_values, no_balance, read_balance
from pytest_kvcache.analysis.cards import ledger_values, read_ledgers
from pytest_kvcache.analysis.client import client_values, read_client
from pytest_kvcache.analysis.demand import Demand, demand, lanes_of
from pytest_kvcache.analysis.facts import gather
from pytest_kvcache.analysis.holding import Footprint, footprint
from pytest_kvcache.analysis.ledger import GPU, HOST, CardLedger
from pytest_kvcache.analysis.levels import Levels, Window, config_values, idle_values, levels
from pytest_kvcache.analysis.memory_seen import MemoryLine, memory_lines, read_telemetry_memory
from pytest_kvcache.analysis.payload import REFUSED, Payload, bounded_by_pool, payload
from pytest_kvcache.analysis.phases import Phases, phases
from pytest_kvcache.analysis.prefixes import Prefixes, prefixes
from pytest_kvcache.analysis.requests import rejections, request_values
from pytest_kvcache.analysis.rows import Rows, read_rows
from pytest_kvcache.analysis.series import Series, read_series
from pytest_kvcache.analysis.signals import Seen, signals
from pytest_kvcache.analysis.soundness import Facts, Limits, Problem, problems
from pytest_kvcache.analysis.stalls import Pause, longest_pauses, put_back
from pytest_kvcache.analysis.waste import Lengths, lengths_of_rows, waste_values
from pytest_kvcache.capacity.layout import Layout
from pytest_kvcache.conditions import Limit
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.quality.graders import summarise
from pytest_kvcache.quantities import KNOWN, Missing, Reading, Value
from pytest_kvcache.records import QualitySummary, TelemetryRow
from pytest_kvcache.runfolder import Run, read_lines

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

__all__ = ["Analysis", "MemoryLine", "Problem", "Timeline", "analyse"]


_NO_LOAD = Missing("no load was run")


@dataclass(frozen=True)
class Timeline:
    """The level over time, a list a column. ``t_s`` counts from the start of the load; NaN is a gap and never a zero.

    ``used`` and ``free`` are in ``unit`` (blocks, tokens, or empty where the engine tells neither). ``payload_tokens`` is the lower
    bound from our own log, ``payload_upper`` the upper. ``endpoints`` holds one Timeline per server where there are several, ``ranks``
    one per engine rank of a server that has several (NaN for the payload: a client does not know which rank served it), ``cards`` the
    cards that the driver told of, ``hosts`` each server's processes in the machine's memory. ``label`` names a server or rank.
    """

    t_s: list[float] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    payload_tokens: list[float] = field(default_factory=list)
    payload_upper: list[float] = field(default_factory=list)
    unit: str = ""
    endpoints: tuple[Timeline, ...] = ()
    label: str = ""
    ranks: tuple[Timeline, ...] = ()
    cards: tuple[MemoryLine, ...] = ()
    hosts: tuple[MemoryLine, ...] = ()


@dataclass(frozen=True)
class Analysis:
    """What happened in one Run. The keys of ``values`` are those of ``conditions.KNOWN`` and the textual configuration.

    ``lanes`` holds the request quantities of each lane, ``rejections`` counts by class and lane, ``problems`` what makes the Run
    INVALID evidence, ``facts`` what those rules looked at, ``errors`` one error text for each outcome that had any, ``pauses`` the longest pauses inside answers. ``ledgers`` holds the
    memory of each card (or of the machine), ``balance`` how evenly servers, ranks and cards are used, ``lengths``
    what the requests reached in tokens. ``accounting`` (payload against usage), ``phases``, ``demand`` (peak against pool) and ``prefixes`` take the level apart; Missing without a load.
    """

    run: Run
    values: dict[str, Value]
    lanes: dict[str, dict[str, Value]] = field(default_factory=dict)
    rejections: dict[str, dict[str, int]] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    quality: QualitySummary | Missing = field(default_factory=lambda: Missing("no quality item was asked"))
    problems: list[Problem] = field(default_factory=list)
    facts: Facts = field(default_factory=lambda: Facts(loaded=False))
    errors: dict[str, str] = field(default_factory=dict)
    pauses: list[Pause] = field(default_factory=list)
    ledgers: tuple[CardLedger, ...] = ()
    lengths: Lengths = field(default_factory=Lengths)
    balance: Balance = field(default_factory=lambda: no_balance("no load was run"))
    accounting: Accounting | Missing = field(default_factory=lambda: _NO_LOAD)
    phases: Phases | Missing = field(default_factory=lambda: _NO_LOAD)
    demand: Demand | Missing = field(default_factory=lambda: _NO_LOAD)
    prefixes: Prefixes | Missing = field(default_factory=lambda: _NO_LOAD)

    def value(self, limit: Limit) -> Value:
        """Return what a condition compares: a value of the whole Run, of one lane, or a count of one rejection class."""
        if limit.rejection_class:
            lanes = self.rejections.get(limit.rejection_class, {})
            total = lanes.get(limit.lane, 0) if limit.lane else sum(lanes.values())
            known = self.lanes.get(limit.lane, {}).get("rejections") if limit.lane else self.values["rejections"]
            if not isinstance(known, Reading):
                return known if known is not None else Missing(f"no request of lane {limit.lane} was sent")
            return Reading(total, "requests", f"requests.jsonl: outcome {limit.rejection_class}")
        if limit.lane:
            lane = self.lanes.get(limit.lane)
            return lane[limit.name] if lane is not None else Missing(f"no request of lane {limit.lane} was sent")
        return self.values.get(limit.name, Missing(f"{limit.name} was not measured"))


def analyse(run: Run, limits: Limits | None = None, *, layout: Layout | None = None) -> Analysis:
    """Return the Analysis of a Run from its folder alone. Raises CannotJudge where a file in it cannot be read.

    ``layout`` says how the engine lays out the model where the caller knows it: models with window or state layers need it.

    Counters count what they grew by over the load; peaks are over every sample from the first request to the last sample, so that
    the drain belongs to them; means and throughput are over the load itself.
    """
    record = run.record
    if record.imported_from:
        return _imported(run, limits)
    answers = run.quality()
    asked = [row for row in answers if not row.part]  # those under pressure and of other sets are judged by gates of their own
    quality: QualitySummary | Missing = summarise(asked) if asked else Missing("no quality item was asked")
    values = config_values(record)
    values.update(answer_values(run, answers, quality))
    values.update(idle_values(record))
    dialect = DIALECTS.get(record.engine)
    rows, frame = read_rows(run.load_lines(), dialect.full_errors if dialect is not None else ())
    if not record.load_started_wall_s and not len(rows):
        values.update({name: _NO_LOAD for name in KNOWN if name not in values})
        facts = Facts(loaded=False, tool=tuple(record.problems))
        return Analysis(run, values, quality=quality, problems=problems(facts, limits), facts=facts, ledgers=tuple(read_ledgers(run, values)))
    window = _window(run, rows)
    series = read_series(read_lines(run.folder / "telemetry.jsonl", TelemetryRow), len(record.endpoints))
    lost = put_back(rows, series)
    load = payload(rows, lost=lost)
    seen = levels(record, series, window, load)
    values.update(seen.values)
    until_s = _measured_until(run, window)
    values.update(request_values(rows, rows.endpoint >= 0, window.since_s, until_s))
    values.update(client_values(read_client(rows, frame), rows))
    reached = lengths_of_rows(rows, REFUSED)
    values.update(waste_values(reached, values["block_size"]))
    memory = read_telemetry_memory(run)
    ledgers = tuple(read_ledgers(run, values, memory))
    values.update(ledger_values(ledgers, memory, window.since_s, window.until_s))
    evenness = read_balance(series, ledgers, window.since_s, window.until_s, max(3.0 / window.hz, 1.0) if window.hz else 2.0)
    values.update(balance_values(evenness))
    lanes = {name: request_values(rows, rows.lane_is(name), window.since_s, until_s) for name in rows.lanes}
    facts = gather(record, rows, frame, series, window, seen, load, values["ttft_sent.p50"])
    values["scrape.coverage"] = (
        Reading(facts.coverage, "ratio", "telemetry.jsonl: share of the load with a fresh sample") if facts.polled else Missing("not polled")
    )
    rejected = rejections(rows)
    fresh_s = max(3.0 / window.hz, 1.0) if window.hz else 2.0
    shape = footprint(record, seen.counts, layout)
    taken = account(record, rows, series, seen, window, lost, shape, fresh_s)
    spans = phases(taken.whole, seen, series, rows, window, fresh_s, by_step=dialect is None or dialect.generates_by_step)
    asked_for = demand(record, rows, frame, seen, window, shape, lost, rejected)
    shared = prefixes(
        record,
        rows,
        values["prefix_hits"],
        seen.counters["prefix_queries"].value,
        values["preemptions"],
        1 if isinstance(shape, Missing) else shape.block,
    )
    for part in (taken, spans, asked_for, shared):
        values.update(part.values)
    values.update(signals(Seen(record, values, series, rows, window, seen, shape, ledgers, shared)))
    for lane, headroom in lanes_of(asked_for, rows.lanes).items():
        lanes[lane]["headroom"] = headroom
    if isinstance(shape, Footprint) and shape.full:  # a window or a state lets a request be longer than what it holds
        values["payload.peak"] = bounded_by_pool(values["payload.peak"], values, seen.counts, taken.sharing)
    return Analysis(
        run,
        values,
        lanes=lanes,
        rejections=rejected,
        timeline=_timeline(series, seen, window, rows, load, lost, memory_lines(memory, series, window.since_s)),
        quality=quality,
        problems=problems(facts, limits),
        facts=facts,
        errors=dict(frame.errors),
        ledgers=ledgers,
        lengths=reached,
        balance=evenness,
        accounting=taken,
        phases=spans,
        demand=asked_for,
        prefixes=shared,
        pauses=longest_pauses(rows, lost),
    )


def _imported(run: Run, limits: Limits | None) -> Analysis:
    """Return the Analysis of a load that another tool ran: what it told, and nothing of the server."""
    lacking = Missing(f"a result file of {run.record.imported_from} does not tell it")
    values: dict[str, Value] = {**dict.fromkeys(KNOWN, lacking), **{name: held.to_value() for name, held in run.record.imported.items()}}
    facts = Facts(polled=False, tool=tuple(run.record.problems), sent=1)
    return Analysis(run, values, problems=problems(facts, limits), facts=facts)


def _window(run: Run, rows: Rows) -> Window:
    record = run.record
    if len(rows):
        return Window(float(rows.intended_s.min()), float(rows.end_s.max()), record.sample_hz)
    return Window(record.load_started_wall_s, record.load_ended_wall_s, record.sample_hz)


def _measured_until(run: Run, window: Window) -> float:
    """Return where throughput stops counting: at the planned end, so that one straggler does not stretch the window."""
    planned = run.record.options.get("duration_s") or 0.0
    if not isinstance(planned, (int, float)) or planned <= 0 or run.record.options.get("requests"):
        return window.until_s
    return min(window.since_s + float(planned), window.until_s)


def _timeline(series: Sequence[Series], seen: Levels, window: Window, rows: Rows, load: Payload, lost: Any, lines: Sequence[MemoryLine]) -> Timeline:
    step = max(3.0 / window.hz, 1.0) if window.hz else 2.0
    parts: tuple[Timeline, ...] = ()
    if len(series) > 1:
        parts = tuple(
            replace(
                _columns(one.wall_s, one.column, window, seen.counts, step, payload(rows, index, lost)),
                label=f"server {index + 1}",
                ranks=_ranks(one, window, seen.counts, step),
            )
            for index, one in enumerate(series)
        )
    whole = _columns(seen.wall_s, lambda name: seen.columns[name], window, seen.counts, step, load)
    ranks = _ranks(series[0], window, seen.counts, step) if len(series) == 1 else ()
    cards, hosts = (tuple(line for line in lines if line.kind == kind) for kind in (GPU, HOST))
    return replace(whole, endpoints=parts, ranks=ranks, cards=cards, hosts=hosts)


def _ranks(one: Series, window: Window, unit: str, step_s: float) -> tuple[Timeline, ...]:
    if len(one.parts) < 2:
        return ()
    return tuple(replace(_columns(part.wall_s, part.column, window, unit, step_s, None), label=f"rank {rank}") for rank, part in one.parts.items())


def _columns(wall_s: Floats, column: Callable[[str], Floats], window: Window, unit: str, step_s: float, load: Payload | None) -> Timeline:
    """Return the columns as lists, with a row of NaN put into every pause longer than ``step_s``."""
    import numpy as np

    breaks = np.flatnonzero(np.diff(wall_s) > step_s) + 1 if len(wall_s) > 1 else np.empty(0, dtype=int)
    names = {"usage": "usage", "used": f"used_{unit}", "free": f"free_{unit}", "running": "running", "waiting": "waiting"}
    lists: dict[str, Any] = {}
    gap = np.full(len(wall_s), np.nan)

    def put(name: str, values: Floats, filling: Any) -> None:
        lists[name] = np.insert(values, breaks, filling).tolist()

    put("t_s", wall_s - window.since_s, (wall_s[breaks - 1] + wall_s[breaks]) / 2 - window.since_s if len(breaks) else np.nan)
    for name, source in names.items():
        put(name, column(source) if unit or name not in {"used", "free"} else gap, np.nan)
    put("payload_tokens", load.lower(wall_s) if load is not None else gap, np.nan)
    put("payload_upper", load.upper(wall_s) if load is not None else gap, np.nan)
    return Timeline(**lists, unit=unit)
