"""The ledgers of one Run: its cards and the machine's memory, from telemetry, start-up logs and what the server states."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_kvcache import units
from pytest_kvcache.analysis.holding import GROUPING
from pytest_kvcache.analysis.ledger import GPU, HOST, CardLedger, Facts, Part, reconcile
from pytest_kvcache.analysis.memory_seen import Memory, card_name, cpu_seconds, host_name, read_telemetry_memory
from pytest_kvcache.analysis.modelfile import Split, computed_parts, split_of
from pytest_kvcache.capacity.card import DEFAULT_UTILIZATION
from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GpuRow, StartMemory
from pytest_kvcache.runfolder import Run
from pytest_kvcache.server.startlogs.memory import read_memory

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

_PARTS = (
    "pool", "weights", "activation", "graphs", "graphs_planned", "workspace", "context", "budget", "utilization", "total", "free_at_start", "pool_allowed",
    "consumed",
)  # fmt: skip
_NO_SHARE = frozenset({"llamacpp"})
_OF_FREE = "sglang"
_PER_RANK = frozenset({"sglang"})
"""Engines that state memory of one tensor-parallel rank."""
_MOST_LOG_BYTES = 4 << 20


def start_memory(run: Run) -> list[StartMemory]:
    """Return what the start-up logs of the Run's servers state: as recorded, else out of its server.log."""
    kept = list(run.record.start_memory)
    stale = [worker for worker in kept if _is_overridden(run, worker.endpoint) and "blocks" not in worker.parts and "pool" in worker.parts]
    if kept and not stale:
        return kept
    if len(run.record.endpoints) < 2:
        with contextlib.suppress(OSError), (run.folder / "server.log").open("rb") as file:
            if (found := read_memory(file.read(_MOST_LOG_BYTES).decode("utf-8", "replace"))) or not kept:
                return found
    # recorded before overridden pools were told from the memory that was found for them
    return [_without_pool(worker) if worker in stale else worker for worker in kept]


def _is_overridden(run: Run, endpoint: int) -> bool:
    return endpoint < len(run.record.before) and isinstance(run.record.before[endpoint].value("num_gpu_blocks_override"), Reading)


def _without_pool(worker: StartMemory) -> StartMemory:
    return StartMemory(worker.worker, worker.pid, worker.endpoint, {name: part for name, part in worker.parts.items() if name != "pool"})


def read_ledgers(run: Run, values: Mapping[str, Value], memory: Memory | None = None) -> list[CardLedger]:
    """Return the ledgers of a Run: one a card where cards were seen, else one for each server whose processes were; of a start-up log alone
    one a worker. Raises CannotJudge on a broken line of telemetry.
    """
    memory = read_telemetry_memory(run) if memory is None else memory
    start, said = _of_this_start(run, start_memory(run))
    if memory.cards:
        found = _of_cards(run, values, memory, start)
    elif memory.hosts:
        found = [_of_host(run, values, memory, start, endpoint) for endpoint in sorted(memory.hosts)]
    else:
        found = log_ledgers(start, run.record.engine)
    return [replace(one, notes=(*said, *one.notes)) for one in found] if said else found


def _of_this_start(run: Run, start: Sequence[StartMemory]) -> tuple[list[StartMemory], tuple[str, ...]]:
    """Return the workers whose log is of the start that was measured, and what to say of others: the pool of another start is another pool."""
    kept: list[StartMemory] = []
    said: dict[str, None] = {}
    for worker in start:
        stated = worker.parts["pool_tokens"].to_value() if "pool_tokens" in worker.parts else None
        told = run.record.before[worker.endpoint].value("pool_tokens") if worker.endpoint < len(run.record.before) else None
        ranks = run.record.before[worker.endpoint].per_rank if worker.endpoint < len(run.record.before) else {}
        own = isinstance(told, Reading) and "kv_cache_size_tokens" in told.source and len(ranks) < 2
        if own and isinstance(stated, Reading) and isinstance(told, Reading) and stated.number() != told.number():
            said[
                f"the start-up log speaks of a pool of {stated.number():,.0f} tokens and the server of {told.number():,.0f}: the log is of another start,"
                " and what it states is left out"
            ] = None
        else:
            kept.append(worker)
    return kept, tuple(said)


def log_ledgers(start: Sequence[StartMemory], engine: str = "") -> list[CardLedger]:
    """Return what start-up logs alone tell, one ledger a worker; those that state neither pool nor weights are left out."""
    workers = [worker for worker in start if worker.parts.keys() & {"pool", "weights", "free_at_start"}]
    return [
        reconcile(
            Facts(
                f"worker {worker.worker}" if worker.worker else "the card of the start-up log",
                GPU,
                stated=stated_of(worker),
                by_hand=by_hand_of(worker, {}),
                has_share=engine not in _NO_SHARE,
                share_of_free=engine == _OF_FREE,
                usual_share=usual_share(engine),
            )
        )
        for worker in workers
    ]


def usual_share(engine: str, version: str = "") -> float:
    """Return the engine's default share of a card; 0 where it takes none or chooses it by the card (SGLang). vLLM's was 0.9 until 0.19."""
    if GROUPING.get(engine) != "vllm":
        return 0.0
    match = re.match(r"0\.([0-9]{1,3})\b", version)
    return 0.9 if match is not None and int(match.group(1)) < 20 else DEFAULT_UTILIZATION["vllm"]


def card_ledgers(analysis: Analysis) -> list[CardLedger]:
    """Return the ledgers of an Analysis, as it holds them."""
    return list(analysis.ledgers)


def stated_of(worker: StartMemory) -> dict[str, Value]:
    """Return the parts of one worker's log by name."""
    return {name: record.to_value() for name, record in worker.parts.items() if name in _PARTS}


def by_hand_of(worker: StartMemory | None, values: Mapping[str, Value]) -> str:
    """Return how the user set the pool's size; "" where the engine chose it."""
    override = values.get("num_gpu_blocks_override")
    if not isinstance(override, Reading) and worker is not None and "blocks" in worker.parts:
        override = worker.parts["blocks"].to_value()
    if isinstance(override, Reading):
        return f"num_gpu_blocks_override {units.show(override.value, override.unit)}"
    asked = worker.parts["by_hand"].to_value() if worker is not None and "by_hand" in worker.parts else None
    return f"to {units.show(asked.value, asked.unit)}" if isinstance(asked, Reading) else ""


def _of_cards(run: Run, values: Mapping[str, Value], memory: Memory, start: Sequence[StartMemory]) -> list[CardLedger]:
    cards = sorted(memory.cards.items(), key=lambda item: (item[1][1].host, item[1][1].index))
    ours = memory.ours
    owners = {key: number for number, pids in memory.pids.items() for key, (_, card) in cards if pids & card.processes.keys()}
    served = [key for key, _ in cards if key in owners]
    workers, notes = _place(cards, served, start, values)
    splits = {number: _split(run, number, start, [key for key in served if owners[key] == number], cards) for number in {*owners.values(), 0}}
    if not served and _fills(run, splits[0], len(cards)):
        # the driver names no process, and the engine needs as many cards as there are: each of them is this server's
        owners = {key: 0 for key, _ in cards}
    found = []
    for key, (wall_s, card) in cards:
        mine = {pid: held for pid, held in card.processes.items() if pid in ours}
        measured: dict[str, Value] = {
            "total": _bytes(card.total_bytes, "the driver"),
            "used": _bytes(card.used_bytes, "the driver"),
            "free": _bytes(card.free_bytes, "the driver"),
            "reserved": _bytes(card.reserved_bytes, "the driver"),
        }
        if served:
            measured["server"] = _bytes(sum(mine.values()), f"the driver: {len(mine)} processes of this server")
            measured["others"] = _bytes(sum(card.processes.values()) - sum(mine.values()), "the driver: processes that are not this server's")
        else:
            reason = "the driver names no process of this server on any card: in a container it may see none, or other numbers"
            measured["server"] = measured["others"] = Missing(reason)
        worker = workers.get(key)
        stated = stated_of(worker) if worker is not None else {}
        computed: dict[str, Value] = {}
        server = owners.get(key)
        told: Mapping[str, Value] = values
        if server is not None or (worker is not None and not served) or (not served and len(cards) == 1):
            number = server if server is not None else 0
            told = _values_of(run, values, number)
            beside = [one for one, _ in cards if owners.get(one) == server]
            engines = _engines(run, number)
            stated = _with_server(stated, told, run.record.engine, engines, alone=len(beside if server is not None else cards) == 1)
            rank = beside.index(key) if key in beside else 0
            computed = computed_parts(run.record.model_parts, splits.get(number, splits[0]), _blocks_of(told), engines, rank)
        elif not stated:
            stated = {"utilization": Missing("this server has no process on this card")}
        spread = computed.pop("weights.spread", None)
        found.append(
            reconcile(
                Facts(
                    card_name(card.host, card.index, card.name),
                    GPU,
                    measured,
                    stated,
                    computed,
                    {"weights": spread.number()} if isinstance(spread, Reading) else {},
                    by_hand=by_hand_of(worker, told) if "pool" in stated or "pool" in computed else "",
                    has_share=run.record.engine not in _NO_SHARE,
                    share_of_free=run.record.engine == _OF_FREE,
                    usual_share=usual_share(run.record.engine, run.record.engine_version),
                    wall_s=wall_s,
                    notes=(*notes, *_moved(memory.other_bytes.get(key))),
                )
            )
        )
    return found


def _split(run: Run, number: int, start: Sequence[StartMemory], mine: Sequence[tuple[str, str]], cards: Sequence[object]) -> Split | Missing:
    """Return over how many GPUs one engine of a server is spread; where the driver names no process, its only card is taken for its own."""
    seen = len(mine) or (1 if len(cards) == 1 else 0)
    return split_of(run.record, [worker for worker in start if worker.endpoint == number], seen)


def _fills(run: Run, split: Split | Missing, cards: int) -> bool:
    return len(run.record.endpoints) <= 1 and isinstance(split, Split) and split.gpus * _engines(run, 0) == cards


def _engines(run: Run, number: int) -> int:
    """Return how many data-parallel engines a server has."""
    return max(len(run.record.before[number].per_rank), 1) if number < len(run.record.before) else 1


def _blocks_of(values: Mapping[str, Value]) -> Reading | Missing:
    value = values.get("pool_blocks", Missing("the server does not tell the blocks of its pool"))
    return Missing("the blocks of its pool are no number") if isinstance(value, Reading) and isinstance(value.value, str) else value


def _moved(others: tuple[float, float] | None) -> tuple[str, ...]:
    if others is None or others[1] - others[0] < 64 << 20:
        return ()
    low, high = (units.show(size, "bytes") for size in others)
    return (f"what other processes hold moved between {low} and {high} during the Run: they share the card with it",)


def _place(
    cards: Sequence[tuple[tuple[str, str], tuple[float, GpuRow]]],
    served: Sequence[tuple[str, str]],
    start: Sequence[StartMemory],
    values: Mapping[str, Value],
) -> tuple[dict[tuple[str, str], StartMemory], tuple[str, ...]]:
    """Return which worker of the log is on which card: by process, else in their order where there are as many cards as workers."""
    workers = [worker for worker in start if worker.parts.keys() & {"pool", "weights"}]
    placed = {key: worker for worker in workers for key, (_, card) in cards if worker.pid is not None and str(worker.pid) in card.processes}
    if placed or not workers:
        return placed, ()
    candidates = list(served) or [key for key, _ in cards]
    if len(candidates) != len(workers):
        pool = sum((value.number() for name in ("pool", "weights") if isinstance(value := stated_of(workers[0]).get(name), Reading)), 0.0)
        candidates = [key for key, (_, card) in cards if key in candidates and card.used_bytes >= pool > 0]
    if len(candidates) != len(workers):
        return {}, (f"the log speaks of {len(workers)} workers and {len(cards)} cards were seen: which is on which is not known",)
    note = () if len(workers) == 1 and len(cards) == 1 else ("the workers of the log are laid on the cards in their order",)
    return dict(zip(candidates, workers, strict=True)), note


def _with_server(stated: Mapping[str, Value], values: Mapping[str, Value], engine: str, engines: int, *, alone: bool) -> dict[str, Value]:
    """Return what the log states with what the server itself states where the log does not: its share, its weights, and its pool where that is of one card."""
    found = dict(stated)
    pool = values.get("pool_bytes")
    if engine in _PER_RANK and engines > 1 and not alone and isinstance(pool, Reading):
        values = {**values, "pool_bytes": Reading(pool.number() / engines, "bytes", f"{pool.source}, one of {engines} engines")}
    one = alone or engine in _PER_RANK or (isinstance(pool, Reading) and pool.source.endswith("(one worker)"))
    told = isinstance(values.get("weights_bytes"), Reading) and (alone or engine in _PER_RANK)
    weights = (("weights", "weights_bytes"),) if told else ()
    for part, name in (("utilization", "gpu_memory_utilization"), *((("pool", "pool_bytes"),) if one else ()), *weights):
        value = values.get(name)
        if not isinstance(found.get(part), Reading) and value is not None:
            found[part] = value
    if not one and not isinstance(found.get("pool"), Reading):
        found["pool"] = Missing("the server states the memory of its pool, and not whether of one card or of all")
    return found


def _of_host(run: Run, values: Mapping[str, Value], memory: Memory, start: Sequence[StartMemory], endpoint: int) -> CardLedger:
    wall_s, row = memory.hosts[endpoint]
    ours = sum(row.processes.values())
    # an engine on CPUs has one worker, or one for each part of the machine: their parts add up in one memory
    workers = [worker for worker in start if worker.endpoint == endpoint and worker.parts.keys() & {"pool", "weights"}]
    stated: dict[str, Value] = {}
    for worker in workers:
        for name, value in stated_of(worker).items():
            before = stated.get(name)
            if name in {"utilization", "total", "free_at_start"} or not (isinstance(before, Reading) and isinstance(value, Reading)):
                stated[name] = value
            else:
                stated[name] = Reading(before.number() + value.number(), "bytes", f"the sum of {len(workers)} workers: {value.source}")
    told = _values_of(run, values, endpoint)
    stated = _with_server(stated, told, run.record.engine, 1, alone=True)
    computed = computed_parts(run.record.model_parts, Split(1, 1, "one memory"), _blocks_of(told), 1, 0)
    spread = computed.pop("weights.spread", None)
    measured: dict[str, Value] = {
        "total": _bytes(row.total_bytes, "the kernel: memory of the machine"),
        "used": _bytes(row.total_bytes - row.available_bytes, "the kernel: total less available"),
        "free": _bytes(row.available_bytes, "the kernel: available without swapping"),
        "server": _bytes(ours, f"the kernel: resident memory of {len(row.processes)} processes"),
    }
    notes = [] if not row.limit_bytes or row.limit_bytes >= row.total_bytes else [f"the control group may use {units.show(row.limit_bytes, 'bytes')}"]
    dialect = DIALECTS.get(run.record.engine)
    return reconcile(
        Facts(
            host_name(endpoint, len(memory.hosts)),
            HOST,
            measured,
            stated,
            computed,
            {"weights": spread.number()} if isinstance(spread, Reading) else {},
            by_hand=by_hand_of(workers[0] if workers else None, told),
            has_share=run.record.engine not in _NO_SHARE and dialect is not None,
            wall_s=wall_s,
            notes=tuple(notes),
        )
    )


def _values_of(run: Run, values: Mapping[str, Value], endpoint: int) -> Mapping[str, Value]:
    """Return what one server states: of several, its own snapshot and not their sum."""
    if len(run.record.before) > 1 and endpoint < len(run.record.before):
        snapshot = run.record.before[endpoint]
        return {name: record.to_value() for name, record in snapshot.quantities.items()}
    return values


def _bytes(size: float, source: str) -> Reading:
    return Reading(float(size), "bytes", source)


def ledger_values(ledgers: Sequence[CardLedger], memory: Memory, since_s: float, until_s: float) -> dict[str, Value]:
    """Return the named quantities that conditions may use: of several cards the worst, each with the card in its source."""
    mine = [ledger for ledger in ledgers if ledger.server.bytes != 0] or list(ledgers)
    none = Missing("no card, no process of the server and no start-up log was seen")

    def worst(read: str, lowest: bool = False) -> Value:
        known = [(value, ledger) for ledger in mine if isinstance(value := _value(ledger, read), Reading)]
        if not known:
            return next((value for ledger in mine if isinstance(value := _value(ledger, read), Missing)), none)
        value, ledger = (min if lowest else max)(known, key=lambda pair: pair[0].number())
        return Reading(value.number(), value.unit, f"{ledger.name}: {value.source}", ledger.wall_s)

    found = {
        "ledger.squeezed_bytes": worst("squeezed"),
        "ledger.expected_pool_bytes": worst("expected_pool"),
        "ledger.idle_bytes": worst("idle_outside"),
        "ledger.idle_inside_bytes": worst("idle_inside"),
        "ledger.over_bytes": worst("over_budget"),
        "ledger.other_bytes": worst("others"),
        "ledger.free_bytes": worst("free", lowest=True),
        "ledger.server_bytes": worst("server"),
        "ledger.rest_bytes": worst("rest"),
    }
    squeezed, expected = found["ledger.squeezed_bytes"], found["ledger.expected_pool_bytes"]
    shares = [
        Reading(one.squeezed.number() / one.expected_pool.number(), "ratio", f"{one.name}: of the pool that share and weights leave")
        for one in mine
        if isinstance(one.squeezed, Reading) and isinstance(one.expected_pool, Reading) and one.expected_pool.number()
    ]
    lacking = squeezed if isinstance(squeezed, Missing) else expected if isinstance(expected, Missing) else none
    found["ledger.squeezed_share"] = max(shares, key=Reading.number) if shares else lacking
    found["server.cpu_s"] = cpu_seconds(memory, since_s, until_s)
    return found


def _value(ledger: CardLedger, name: str) -> Value:
    found: Part | Value = getattr(ledger, name)
    return found.value if isinstance(found, Part) else found
