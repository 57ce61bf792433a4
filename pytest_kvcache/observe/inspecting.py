"""``pytest-kvcache inspect``: what the engine is and every canonical quantity with its source, from whatever was pasted or read.

Works offline. A quantity comes from the engine's dialect first (scrape, JSON bodies, start-up log), then from what the log alone
states. What is not there is Missing with the reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_kvcache.engines import DIALECTS, Dialect, RawState, Samples, clean, detect, named, read_values, wanted_by
from pytest_kvcache.errors import UnknownEngine, UsageError
from pytest_kvcache.observe.answered import read_answers
from pytest_kvcache.observe.dcgm import FAMILIES as DCGM_FAMILIES
from pytest_kvcache.observe.dcgm import read_dcgm
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.observe.joining import join_samples, telling_servers_apart
from pytest_kvcache.observe.log_moves import are_two_starts, moves, started
from pytest_kvcache.observe.pasted import MOST_BYTES, Pasted, body_paths, error_of, sort_text
from pytest_kvcache.observe.prometheus import Fleet
from pytest_kvcache.observe.series import TARGET
from pytest_kvcache.observe.size_notes import size_notes
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value
from pytest_kvcache.records import GpuRow
from pytest_kvcache.server.causes import diagnose
from pytest_kvcache.server.redaction import redact
from pytest_kvcache.server.startlog import READERS, StartLog, read_log, starts_of
from pytest_kvcache.server.startlogs.ledger import memory_notes
from pytest_kvcache.server.startlogs.live import live_values
from pytest_kvcache.server.startlogs.trend import trend_notes

_TAIL = 2 << 20
_MOST_FILES = 64
_V0_BLOCKS = re.compile(r"# ?\w{1,20} blocks: ")
_V0_EXECUTOR = re.compile(r"executor(?:_base)?\.py:[0-9]{1,5}\] # ?\w{1,20} blocks: ")
_MOST_ERRORS = 12
_FIRST = ("usage", "running", "pool_blocks", "pool_tokens")
_NO_SCRAPE = "no scrape of /metrics was given"


@dataclass
class Inspection:
    """What was found. ``judged`` is False where the engine is not known or tells nothing; ``why`` then says what was seen.

    ``ranks`` holds the quantities of each engine rank or server where there are several; ``gpus`` the cards of a DCGM exporter's text.
    """

    engine: str = ""
    title: str = ""
    version: str = ""
    quantities: dict[str, Value] = field(default_factory=dict)
    ranks: dict[str, dict[str, Value]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gpus: list[GpuRow] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    judged: bool = True
    why: str = ""


def read_source(name: str) -> Pasted:
    """Return what a file, or standard input ("-"), holds. Raises UsageError where it cannot be read.

    At most 32 MiB are read from the beginning; of a longer file the last 2 MiB as well.
    """
    cut = ""
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                data, cut = data[:MOST_BYTES], "only its first 32 MiB were read"
        else:
            with Path(name).open("rb") as file:
                data = file.read(MOST_BYTES)
                more = file.read(1)
                if more and file.seekable():
                    end = file.seek(0, 2)
                    file.seek(max(MOST_BYTES, end - _TAIL))
                    data += b"\n" + file.read(_TAIL).partition(b"\n")[2]
                if more:
                    cut = "its first 32 MiB and its last 2 MiB were read, and what lies between was not"
    except OSError as error:
        raise UsageError(
            f"it cannot be read: {error.strerror or error}", where=clean(name, 200), hint="FILE..., a URL, or - for standard input"
        ) from None
    except ValueError:  # a name with a zero byte
        raise UsageError("this is no name of a file", where=clean(name, 200)) from None
    pasted = sort_text("standard input" if name == "-" else clean(Path(name).name, 100), data)
    pasted.problem = pasted.problem or cut
    return pasted


def read_sources(names: Sequence[str]) -> list[Pasted]:
    """Return what each of the files holds, in order. Raises UsageError."""
    if not names:
        raise UsageError("what is to be inspected?", hint="pytest-kvcache inspect FILE... | URL | -")
    if len(names) > _MOST_FILES:
        raise UsageError(f"{len(names)} files at once", hint=f"at most {_MOST_FILES}")
    if names.count("-") > 1:
        raise UsageError("standard input can be read once only")
    return [read_source(name) for name in names]


def inspect(
    pasted: Sequence[Pasted], *, engine: str = "auto", live: RawState | None = None, dialects: Iterable[Dialect] | None = None, model: str = ""
) -> Inspection:
    """Return what the pasted texts say, with what a running server said (``live``) where one was read. ``engine`` names the dialect.

    Raises UsageError for an unknown engine name. What is not known is told by ``Inspection.judged`` and ``why``, never raised.
    """
    candidates = list(DIALECTS.values() if dialects is None else dialects)
    chosen = None if engine == "auto" else named(engine, candidates)
    found = Inspection(inputs=[f"{part.name}: {part.kinds}" + (f" ({part.problem})" if part.problem else "") for part in pasted])
    log_text, log = _logs(found, [part for part in pasted if part.log])
    raw = live if live is not None else RawState(metrics_reason=_NO_SCRAPE)
    raw.model = raw.model or model
    raw.log_given = raw.log_given or bool(log_text)
    apart = _take_scrapes(found, raw, pasted, candidates)
    _take_bodies(found, raw, pasted, candidates)
    dialect = chosen or _dialect(found, raw, log, candidates)
    if log.engine and dialect is not None and _contradict(dialect, log):
        found.notes.append(f"the log is one of {log.title}, and the rest is of {dialect.title}: the log's figures were left out")
    elif log.facts:
        raw.log_facts = {**raw.log_facts, **log.facts}
    if dialect is not None:
        found.engine, found.title = dialect.name, dialect.title
        values = read_values(telling_servers_apart(dialect, *apart) if apart else dialect, raw)
        found.quantities, found.ranks, found.version = dict(values.whole), values.ranks, values.version
        found.notes = [*values.notes, *found.notes]
    elif log.engine and not found.why:
        found.engine, found.title = log.engine, log.title
    found.version = found.version or log.version
    for name in QUANTITIES:
        found.quantities.setdefault(name, Missing("the start-up log does not state it"))
    _take_log(found, raw, log, log_text, pasted)
    for name, value in found.quantities.items():
        if isinstance(value, Missing):
            found.quantities[name] = Missing("; ".join(dict.fromkeys(value.reason.split("; "))), value.cannot_happen)
    found.notes += size_notes(found.quantities, found.engine, dialect is not None and dialect.idle_cached_is_free is False)
    found.notes = list(dict.fromkeys(found.notes))  # a scrape and a log may both say it
    told = [value for value in found.quantities.values() if isinstance(value, Reading)]
    if found.gpus and not found.engine and not found.why and dialect is None and not log_text:
        found.title = "the cards of a DCGM exporter, and no engine"
        found.quantities = {name: Missing("a DCGM exporter tells of cards, and of no engine") for name in QUANTITIES}
    elif not found.engine or not (told or any(note.startswith("the start failed") for note in found.notes)):
        found.judged = False
        found.why = found.why or _nothing(pasted, raw, found)
    return found


def _logs(found: Inspection, parts: Sequence[Pasted]) -> tuple[str, StartLog]:
    """Return the text of the logs and what it states: all of one server, or the last of several starts, with a note of what moved."""
    text = "\n".join(part.log for part in parts)
    log = read_log(text)
    apart = [read_log(part.log) for part in parts] if len(parts) > 1 else []
    if not apart or not are_two_starts(apart, log):
        return text, log
    found.notes += moves([part.name for part in parts], apart)
    number = started(apart)[-1]
    return parts[number].log, apart[number]


def _take_scrapes(found: Inspection, raw: RawState, pasted: Sequence[Pasted], candidates: Sequence[Dialect]) -> tuple[str, ...]:
    """Parse the expositions into ``raw`` and the cards into ``found``; return the labels that tell servers apart where there are several."""
    wanted = wanted_by(candidates, DCGM_FAMILIES)
    told: list[tuple[str, Samples]] = []
    texts = {""}
    for part in pasted:
        if part.exposition not in texts:
            texts.add(part.exposition)
            told.append((part.name, parse_samples(part.exposition, wanted)))
    answered = read_answers([body for part in pasted for body in part.answers], candidates)
    found.notes += answered.notes
    if answered.samples is not None:
        told.append(("Prometheus", answered.samples))
    parts: list[tuple[str, Samples]] = []
    cards: dict[str, list[Any]] = {}
    for name, samples in told:
        for family in DCGM_FAMILIES & samples.rows.keys():
            cards.setdefault(family, []).extend(samples.rows[family])
        rest = {family: rows for family, rows in samples.rows.items() if family not in DCGM_FAMILIES}
        if rest or not DCGM_FAMILIES & samples.names:
            parts.append((name, Samples(rest, samples.names, samples.bad_lines, samples.in_blocks)))
    if cards:
        rows = read_dcgm(Samples(cards, frozenset(cards)))
        if isinstance(rows, Missing):
            found.notes.append(f"cards: {rows.reason}")
        else:
            found.gpus = rows
    if raw.metrics is not None:
        parts.insert(0, ("server", raw.metrics))
    if not parts:
        return ()
    names = [name for name, _ in parts]
    unique = [(name if names.count(name) == 1 else f"{name} #{number}", samples) for number, (name, samples) in enumerate(parts, start=1)]
    raw.metrics = join_samples(unique)
    shared = [name for name, rows in raw.metrics.rows.items() if len({row.labels.get("instance") for row in rows}) > 1]
    apart = len(parts) > 1 and any(len(samples.rows.get(name, ())) for name in shared for _, samples in unique[1:])
    if apart:
        found.notes.append(f"{len(parts)} scrapes are read as {len(parts)} servers; for one server at two moments inspect them one by one")
    return TARGET if answered.targets > 1 else ("instance",) if apart else ()


def _take_bodies(found: Inspection, raw: RawState, pasted: Sequence[Pasted], candidates: Sequence[Dialect]) -> None:
    bodies: dict[str, Any] = dict(raw.json)
    for part in pasted:
        unknown: dict[str, int] = {}
        errors: dict[str, int] = {}
        for body in part.json:
            said = error_of(body)
            paths = [] if said else body_paths(body, candidates)
            if said:
                errors[redact(said)] = errors.get(redact(said), 0) + 1
            elif body in ([], {}):
                found.notes.append(
                    f"{part.name}: an empty JSON body: nothing is told, which is not zero (trtllm-serve answers so before its first request)"
                )
            elif not paths:
                keys = ", ".join(clean(str(key), 40) for key in list(_first(body))[:8]) or "none"
                unknown[keys] = unknown.get(keys, 0) + 1
            for path in paths:
                if path in bodies and not isinstance(bodies[path], Missing) and bodies[path] != body:
                    found.notes.append(f"{part.name}: a second body of {path}; the last one counts")
                bodies[path] = body
        found.notes += [f"{part.name}: {_times('an error of the server', count)}: {said}" for said, count in list(errors.items())[:_MOST_ERRORS]]
        if len(errors) > _MOST_ERRORS:
            found.notes.append(f"{part.name}: {len(errors) - _MOST_ERRORS} more errors of the server")
        found.notes += [
            f"{part.name}: {_times('a JSON body', count)} that no dialect reads (keys: {keys})"
            for keys, count in list(unknown.items())[:_MOST_ERRORS]
        ]
    raw.json = bodies


def _times(what: str, count: int) -> str:
    return what if count == 1 else f"{count} times {what}"


def _first(body: Any) -> Mapping[str, Any]:
    first = body[0] if isinstance(body, list) and body else body
    return first if isinstance(first, dict) else {}


def _dialect(found: Inspection, raw: RawState, log: StartLog, candidates: Sequence[Dialect]) -> Dialect | None:
    """Return the dialect that the state shows, else that of the log; None, with the reason in ``found.why``, where neither is known."""
    by_log = next((dialect for dialect in candidates if dialect.name == log.engine), None)
    if raw.metrics is None and not any(not isinstance(body, Missing) for body in raw.json.values()):
        return by_log
    try:
        return detect(raw, candidates)
    except UnknownEngine as error:
        if "several engines" not in error.what and log.engine:
            if raw.metrics is not None:
                found.notes.append(f"no dialect reads the scrape ({error.what.partition('. ')[2][:200]}); what follows is from the log")
            return by_log
        found.why = error.what + (f" ({error.hint})" if error.hint else "")
        return None


def _contradict(dialect: Dialect, log: StartLog) -> bool:
    """Say whether a log is of another engine than a dialect; a wrapper's dialect (Ray, Dynamo, NIM) goes with the log of any."""
    known = {reader.ENGINE for reader in READERS}
    return dialect.name in known and dialect.name != log.engine


def _take_log(found: Inspection, raw: RawState, log: StartLog, text: str, pasted: Sequence[Pasted]) -> None:
    if not text:
        return
    if found.engine and raw.log_facts:
        for name, value in log.facts.items():
            stated = found.quantities.get(name)
            if isinstance(stated, Missing) and not stated.cannot_happen and name in raw.log_facts:
                found.quantities[name] = value
    blocks = found.quantities["pool_blocks"]
    if (
        log.engine == "vllm"
        and raw.metrics is None
        and isinstance(blocks, Reading)
        and (_V0_BLOCKS.search(blocks.source) or _V0_EXECUTOR.search(starts_of(text)))
    ):
        # V0 prints its blocks so, and keeps no null block; of V1 only its first releases do, from kv_cache_utils.
        kept = 1 if "kv_cache_utils" in blocks.source else 0
        found.quantities["usable_blocks"] = Reading(
            max(int(blocks.number()) - kept, 0), "blocks", f"{blocks.source} {'- 1 (null block)' if kept else '(V0: no null block)'}"
        )
    if raw.metrics is None and not any(part.json for part in pasted):
        values, notes = live_values(text)
        for name, value in values.items():
            if isinstance(found.quantities[name], Missing):
                found.quantities[name] = value
        pool, used = found.quantities["pool_tokens"], values.get("used_tokens")
        found.notes += [*notes, *trend_notes(text, pool.number() if isinstance(pool, Reading) else None)]
        if isinstance(used, Reading) and isinstance(pool, Reading) and isinstance(found.quantities["free_tokens"], Missing):
            free = int(pool.number() - used.number())
            found.quantities["free_tokens"] = (
                Reading(free, "tokens", "pool_tokens - used_tokens of the last periodic line")
                if free >= 0
                else Missing("the log's used tokens are more than its pool")
            )
    found.notes += [*log.notes, *(f"memory: {note}" for note in memory_notes(starts_of(text)))]
    failure = diagnose(text)
    if failure is None:
        return
    if not log.engine and not found.engine:
        found.why = f"cannot judge: the log is of no engine that is known; it says: {failure.cause}"
        found.notes += [f"what that means: {failure.means}"] if failure.means else []
        found.notes += [f"what to change: {failure.change}"] if failure.change else []
        return
    found.notes.append(f"{'after the start, the log says' if failure.after_start else 'the start failed'}: {failure.cause}")
    if failure.means:
        found.notes.append(f"what that means: {failure.means}")
    if failure.change:
        found.notes.append(f"what to change: {failure.change}")
    if not failure.after_start and any(name.startswith("pool_") for name in log.facts):
        found.notes.append("the pool's size was printed before the failure: it is no sign of a running server")


def _nothing(pasted: Sequence[Pasted], raw: RawState, found: Inspection) -> str:
    """Return in one sentence what was there, where nothing could be judged."""
    title = found.title
    reasons = [f"{part.name}: {part.problem}" for part in pasted if part.problem]
    if not reasons and raw.metrics is None and any(part.answers for part in pasted):
        reasons = found.notes[:3]
    if not reasons and raw.metrics is None and not raw.json:
        lines = [line for part in pasted for line in part.log.splitlines() if line.strip()][:2]
        shown = "; ".join(repr(clean(redact(line), 120)) for line in lines)
        if any(part.json for part in pasted) and not shown:
            errors = all(error_of(body) for part in pasted for body in part.json)
            reasons = [
                "the JSON bodies are errors of a server and tell no quantity" if errors else "none of the JSON bodies is one that a dialect reads"
            ]
        else:
            begins = f", which begins {shown}" if shown else ""
            reasons = [f"this is of {title} and tells no quantity{begins}" if title else f"no engine is known by this text{begins}"]
    if not reasons and title:
        seen = [value.reason for name in _FIRST if isinstance(value := found.quantities[name], Missing) and not value.cannot_happen]
        reasons = [f"this is of {title} and tells no quantity: {'; '.join(dict.fromkeys(seen))[:600]}"]
    return "cannot judge: " + ("; ".join(reasons) or "what was given tells no quantity")


def of_fleet(fleet: Fleet, cards: Sequence[GpuRow] = ()) -> Inspection:
    """Return what a Prometheus server tells of a fleet and its ``cards``, as an Inspection with one row a target."""
    whole = fleet.whole
    ranks = {name: {n: value.to_value() for n, value in record.quantities.items()} for name, record in fleet.targets.items()}
    notes = list(whole.notes)
    if fleet.skipped:
        notes.append(f"{len(fleet.skipped)} targets match and are no engine that is known: {', '.join(fleet.skipped[:6])}")
    notes.append("Prometheus repeats a value until the next scrape: these are as old as its scrape interval at most")
    return Inspection(
        engine=whole.engine,
        title=fleet.title,
        version=whole.version,
        quantities={name: value.to_value() for name, value in whole.quantities.items()},
        ranks=ranks if len(ranks) > 1 else {rank: {n: v.to_value() for n, v in values.items()} for rank, values in whole.per_rank.items()},
        notes=notes,
        gpus=list(cards),
        inputs=[f"Prometheus {whole.endpoint}: {len(fleet.targets)} targets"],
        judged=any(isinstance(record.to_value(), Reading) for record in whole.quantities.values()),
    )
