"""A Run without a load: servers watched in passing, or a window that a Prometheus server holds. Nothing is sent but reads."""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pytest_kvcache import units
from pytest_kvcache.engines import DIALECTS, Dialect, shown_models
from pytest_kvcache.errors import CannotJudge, KvError, UsageError
from pytest_kvcache.observe.fleet_cards import Cards, read_cards
from pytest_kvcache.observe.prometheus import Prometheus, Target
from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.observe.scrape import detect_endpoint, take_snapshot
from pytest_kvcache.quantities import QUANTITIES
from pytest_kvcache.records import SCHEMA_VERSION, GpuRow, RunRecord, SnapshotRecord, StartMemory, TelemetryRow
from pytest_kvcache.runfolder import Run, encode_line, write_atomic, write_run
from pytest_kvcache.server.endpoint import Endpoint
from pytest_kvcache.server.startlog import read_log_head, redact
from pytest_kvcache.server.startlogs.memory import read_memory

PROFILE = "watched"
LONGEST_S = 24 * 3600.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def watch_run(
    endpoints: Sequence[Endpoint],
    folder: Path,
    seconds: float,
    *,
    hz: float,
    engine: str = "auto",
    own: Sequence[Dialect] = (),
    log: Path | None = None,
    timeout_s: float = 5.0,
    wait: Callable[[float], None] = time.sleep,
) -> Run:
    """Watch servers for ``seconds`` and return what was seen as a Run in ``folder``; Ctrl-C ends the window early and keeps it.

    ``log`` is the start-up log of the first server. Raises UsageError for a window that cannot be meant, and what reading a server raises.
    """
    if not 0 < seconds <= LONGEST_S:
        raise UsageError("this window cannot be meant", hint="a length above zero and of at most a day, as in --window 60s")
    if log is not None and not log.is_file():
        raise UsageError("there is no such log", where=str(log))
    endpoints = [replace(one, log=log) if number == 0 and log is not None else one for number, one in enumerate(endpoints)]
    dialects = [detect_endpoint(one, engine, own, timeout_s=timeout_s) for one in endpoints]
    if len({dialect.name for dialect in dialects}) > 1:
        raise UsageError(
            f"the servers are of several engines: {', '.join(sorted({dialect.title for dialect in dialects}))}", hint="look at each by itself"
        )

    def look() -> list[SnapshotRecord]:
        return [take_snapshot(one, dialect, one.log) for one, dialect in zip(endpoints, dialects, strict=True)]

    before = look()
    # cards of this machine say nothing of a server elsewhere
    local = all(urlsplit(one.root).hostname in _LOOPBACK for one in endpoints)
    sampler = Sampler(endpoints, folder, hz, dialects=dialects, gpus=local or bool(endpoints[0].cards), timeout_s=timeout_s)
    began = time.time()
    sampler.start()
    try:
        wait(seconds)
    except KeyboardInterrupt:
        pass
    finally:
        stats = sampler.stop()
    ended = time.time()
    notes = [] if ended - began >= 0.9 * seconds else [f"ended by hand after {ended - began:.0f} s"]
    try:
        after = look()
    except KvError as error:
        after, notes = [], [*notes, f"the server could not be read at the end: {error.what}"]
    memory: list[StartMemory] = []
    if log is not None:
        memory = read_memory(read_log_head(log), 0)
        write_atomic(folder / "server.log", redact(read_log_head(log)))
    return _keep(folder, before, after, began, ended, hz, [one.shown for one in endpoints], notes + ([stats.error] if stats.error else []), memory)


def past_run(server: Prometheus, folder: Path, start_s: float, end_s: float, step_s: float | None = None, cards: str = "") -> Run:
    """Return a window that a Prometheus server holds as a Run in ``folder``; ``cards`` are matchers of its DCGM exporters.

    Prometheus repeats a value until the next scrape: of the points that show the same scrape the first is kept, so that a server does not
    seem to stand still between two. Without ``step_s`` the step follows the length of the window.

    Raises CannotJudge where no target told a quantity or the targets are of several engines or models, and what ``Prometheus.window`` raises.
    """
    told = server.window(start_s, end_s, step_s)
    targets = [target for target in told if target.dialect is not None and any(row.values for row in target.rows)]
    where = server.endpoint.shown
    if not targets:
        why = next((target.error for target in told if target.error), "")
        raise CannotJudge(
            f"no target told a quantity in this window{f': {why}' if why else ''}", where=where, hint="another --at, or a wider --window"
        )
    engines = sorted({target.dialect.title for target in targets if target.dialect is not None})
    if len(engines) > 1:
        raise CannotJudge(f"the selector matches several engines: {', '.join(engines)}", where=where, hint="a narrower --selector")
    models = sorted({model for target in targets for model in target.models})
    if len(models) > 1 and not server.model:
        raise CannotJudge(
            f"the selector matches {len(models)} models: {shown_models(models)}",
            where=where,
            hint="name one with --model, or a narrower --selector",
        )
    after = _at(server, targets, end_s)
    before = _at(server, targets, start_s, instead=after)
    seen = [[row for place, row in enumerate(target.rows) if place not in target.repeats] for target in targets]
    apart_s = _apart(seen, end_s - start_s)
    notes = [f"a peak between two looks is not seen; they lie {units.show_seconds(apart_s)} apart"]
    try:
        found = read_cards(server, [target.labels for target in targets], start_s, end_s, step_s, cards)
    except KvError as error:
        if cards:
            raise
        found = Cards([], [], error.what)
    if found.note:
        notes.append(f"cards: {found.note}")
    rows: list[TelemetryRow] = []
    for number, own in enumerate(seen):
        rows += [msgspec.structs.replace(row, endpoint=number) for row in own]
    rows.sort(key=lambda row: row.wall_s)
    rows = _with_cards(rows, found.points)
    write_atomic(folder / "telemetry.jsonl", b"".join(map(encode_line, rows)))
    names = [target.name for target in targets]
    return _keep(folder, before, after, start_s, end_s, 1.0 / apart_s, names, notes, [])


def _apart(seen: Sequence[Sequence[TelemetryRow]], length_s: float) -> float:
    """Return the median time between two looks at a target, in seconds; the window's length where none was looked at twice."""
    apart = [after.wall_s - before.wall_s for rows in seen for before, after in pairwise([row for row in rows if not row.error])]
    return statistics.median(apart) if apart else max(length_s, 1.0)


def _with_cards(rows: list[TelemetryRow], points: Sequence[tuple[float, list[GpuRow]]]) -> list[TelemetryRow]:
    """Return the rows with the cards of each point beside the first server's row of that moment, or the nearest; of two there the fuller cards."""
    places = [index for index, row in enumerate(rows) if row.endpoint == 0 and not row.error]
    moments = [rows[index].wall_s for index in places]
    found = list(rows)
    for wall_s, cards in points if places else ():
        after = min(bisect.bisect_left(moments, wall_s), len(moments) - 1)
        near = after if after == 0 or moments[after] - wall_s <= wall_s - moments[after - 1] else after - 1
        there = found[places[near]]
        if sum(card.used_bytes for card in cards) >= sum(card.used_bytes for card in there.gpus):
            found[places[near]] = msgspec.structs.replace(there, gpus=cards)
    return found


def _at(server: Prometheus, targets: Sequence[Target], wall_s: float, instead: Sequence[SnapshotRecord] = ()) -> list[SnapshotRecord]:
    """Return each target at one moment. Where it was not there then: what it states otherwise (``instead``), without what moves."""
    try:
        known: Mapping[str, SnapshotRecord] = server.snapshot(wall_s).targets
    except CannotJudge:
        known = {}
    found = []
    for number, target in enumerate(targets):
        engine = target.dialect.name if target.dialect is not None else ""
        one = known.get(target.name)
        if one is None:
            stated = instead[number].quantities if number < len(instead) else {}
            kept = {name: value for name, value in stated.items() if name in QUANTITIES and QUANTITIES[name].kind == "config"}
            one = SnapshotRecord(engine, wall_s, endpoint=target.name, quantities=kept)
        found.append(one)
    return found


def _keep(
    folder: Path,
    before: Sequence[SnapshotRecord],
    after: Sequence[SnapshotRecord],
    began_s: float,
    ended_s: float,
    hz: float,
    endpoints: Sequence[str],
    notes: Sequence[str],
    memory: Sequence[StartMemory],
) -> Run:
    first = before[0]
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        id=folder.name,
        profile=PROFILE,
        engine=first.engine if first.engine in DIALECTS or not after else after[0].engine,
        engine_version=first.version or (after[0].version if after else ""),
        endpoints=list(endpoints),
        started_wall_s=began_s,
        ended_wall_s=ended_s,
        load_started_wall_s=began_s,
        load_ended_wall_s=ended_s,
        before=list(before),
        after=list(after),
        start_memory=list(memory),
        sample_hz=hz,
        notes=list(notes),
        unmeasured=["no load was sent: there is no request log"],
    )
    return write_run(folder, record)
