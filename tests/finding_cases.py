"""Made Runs, for each rule one that it must speak of and one, alike but for the cause, of which it must be silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from made_run import T0, USABLE, MadeRun, closed_loop, request, sample, snapshot

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import GpuRow, MemoryRow, RequestRow, StartMemory, ValueRecord

GIB = 1 << 30
Each = Callable[[int], dict[str, Any]]
Case = Callable[[Path], Analysis]


def made(
    folder: Path,
    rows: Sequence[RequestRow] | None = None,
    each: Each | Mapping[str, Any] | None = None,
    *,
    seconds: float = 4.8,
    hz: float = 10.0,
    usable: int = USABLE,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    servers: int = 1,
    **record: Any,
) -> Analysis:
    """Return the Analysis of a Run whose server says ``each`` at every look; ``rows`` () is a server that is only watched."""
    load = list(closed_loop() if rows is None else rows)
    told: Each = each if callable(each) else (lambda _: dict(each or {}))
    samples = []
    for i in range(int(seconds * hz)):
        for server in range(servers):
            values = told(i) if servers == 1 else told(server)
            samples.append(msgspec.structs.replace(sample(load, T0 - 0.3 + i / hz, usable=usable, **values), endpoint=server))
    last = max((row.end_s for row in load), default=T0 + seconds)
    states = [snapshot(T0 - 0.5, usable=usable, **(before or {})) for _ in range(servers)]
    ends = [snapshot(max(last, T0 + seconds) + 0.6, usable=usable, **{**(before or {}), **(after or {})}) for _ in range(servers)]
    if not load:
        record = {"load_started_wall_s": T0 - 0.3, "load_ended_wall_s": T0 + seconds, **record}
    return analyse(MadeRun(rows=load, samples=samples, before=states, after=ends, hz=hz, record=record).write(folder))


def card(index: int = 0, *, total: float = 80.0, used: float, ours: float, others: float = 0.0) -> GpuRow:
    """Return a card in GiB; process 1 is the server's, process 9 another's."""
    held = {str(index + 1): int(ours * GIB), **({"9": int(others * GIB)} if others else {})}
    return GpuRow(index, f"GPU-{index}", "A100-SXM4-80GB", int(total * GIB), int(used * GIB), int((total - used) * GIB), processes=held)


def worker(index: int = 0, **parts: float) -> StartMemory:
    """Return what the log of one worker states, in GiB."""
    return StartMemory(
        f"Worker{index}", index + 1, 0, {name: ValueRecord.of(Reading(size * GIB, "bytes", "start-up log")) for name, size in parts.items()}
    )


def on_cards(
    folder: Path,
    cards: Sequence[GpuRow],
    start: Sequence[StartMemory],
    utilization: float = 0.9,
    rows: Sequence[RequestRow] | None = None,
    **more: Any,
) -> Analysis:
    """Return the Analysis of a Run on these cards."""
    load = list(closed_loop() if rows is None else rows)
    memory = MemoryRow(128 * GIB, 100 * GIB, processes={str(number + 1): GIB for number in range(len(cards))})
    samples = [sample(load, T0 - 0.3 + i / 10) for i in range(48)]
    samples[10] = msgspec.structs.replace(samples[10], gpus=list(cards), memory=memory)
    before = [snapshot(T0 - 0.5, gpu_memory_utilization=utilization, **more)]
    return analyse(MadeRun(rows=load, samples=samples, before=before, record={"start_memory": list(start)}).write(folder))


def tiny() -> list[RequestRow]:
    """Return requests of six tokens: each holds a block of sixteen."""
    return closed_loop(users=8, prompt=3, output=3)


def uneven() -> list[RequestRow]:
    """Return the article's batch: one sequence of 2,048 tokens and fifteen of 256."""
    return [request(i, 0.01 * i, prompt=1920 if i == 0 else 128, output=128, length_s=3.0) for i in range(16)]


def shared(users: int = 8) -> list[RequestRow]:
    """Return requests of 100 tokens that begin with the same 80."""
    return [request(i, 0.01 * i, prompt=100, length_s=3.0, prefix_id="system", prefix_tokens=80) for i in range(users)]


def prefix_run(folder: Path, rows: Sequence[RequestRow], hits: float, *, caching: bool, preemptions: float = 0.0) -> Analysis:
    def each(i: int) -> dict[str, Any]:
        begun = i >= 5
        return {"prefix_hits": hits * begun, "prefix_queries": 800.0 * begun, "preemptions": preemptions * begun}

    return made(
        folder,
        rows,
        each,
        seconds=3.6,
        before={"prefix_caching": caching, "prefix_queries": 0.0},
        after={"prefix_hits": hits, "prefix_queries": 800.0, "preemptions": preemptions},
    )


def apart(values: Sequence[Mapping[str, Any]]) -> Each:
    """Return what each of several servers says."""
    return lambda server: dict(values[server])


def rising(**last: float) -> Each:
    """Return counters that reach their last value evenly."""
    return lambda i: {name: round(value * min(i / 40, 1.0)) for name, value in last.items()}


def busy(usage: float, running: float, waiting: float, **more: Any) -> dict[str, Any]:
    used = round(usage * USABLE)
    return {"usage": usage, "used_blocks": float(used), "free_blocks": float(USABLE - used), "running": running, "waiting": waiting, **more}


def hung(prompt: int, length_s: float = 18.0) -> list[RequestRow]:
    """Return one request that got no token until its client gave up."""
    row = request(0, 0.0, prompt=prompt, output=8, length_s=length_s)
    return [msgspec.structs.replace(row, outcome="timeout", first_token_s=None, completion_tokens=0, chunks=0)]


def nothing_runs() -> dict[str, Any]:
    return {"usage": 0.0, "used_blocks": 0.0, "free_blocks": float(USABLE), "running": 0.0, "generation_tokens": 9.0, "prompt_tokens": 1.0}


def padded(i: int) -> dict[str, Any]:
    """Every running request of the uneven batch holds the 128 blocks of the longest."""
    del i
    return {"usage": 0.5, "used_blocks": 2048.0, "free_blocks": 2048.0, "running": 16.0}


def tail(after_s: float, **values: Any) -> Each:
    """Return a server that says ``values`` from so many seconds after the load's start on."""
    return lambda i: dict(values) if -0.3 + i / 10 > after_s else {}


def climbing(finished: float) -> Each:
    def each(i: int) -> dict[str, Any]:
        used = 500 + 2 * i
        share = {"usage": used / 4000, "used_blocks": float(used), "free_blocks": float(4000 - used)}
        return {**share, "running": 1.0, "generation_tokens": 32.0 * i, "prompt_tokens": 10.0, "finished": finished * i}

    return each


CASES: dict[str, tuple[Case, Case]] = {
    "squeezed-pool": (
        lambda folder: on_cards(folder, [card(used=58, ours=48, others=10)], [worker(pool=18, weights=14)]),
        lambda folder: on_cards(folder, [card(used=74, ours=74)], [worker(pool=56, weights=14)]),
    ),
    "foreign-memory": (
        lambda folder: on_cards(folder, [card(used=58, ours=48, others=10)], [worker(pool=56, weights=14)]),
        lambda folder: on_cards(folder, [card(used=58, ours=58)], [worker(pool=56, weights=14)]),
    ),
    "over-utilization": (
        lambda folder: on_cards(folder, [card(used=78, ours=78)], [worker(pool=60, weights=14)], 0.95),
        lambda folder: on_cards(folder, [card(used=71, ours=71)], [worker(pool=56, weights=14)], 0.9),
    ),
    "hollow-usage": (lambda folder: made(folder, tiny()), made),
    "padding": (
        lambda folder: made(folder, uneven(), padded, usable=4096, seconds=3.0),
        lambda folder: made(folder, uneven(), usable=4096, seconds=3.0),
    ),
    "fragments": (lambda folder: made(folder, tiny()), made),
    "fixed-slice": (lambda folder: made(folder, closed_loop(), busy(0.9, 2.0, 0.0)), made),
    "long-shared-prompt": (
        lambda folder: prefix_run(folder, shared(), 0.0, caching=False),
        lambda folder: prefix_run(folder, shared(), 560.0, caching=True),
    ),
    "prefix-cache-off": (
        lambda folder: prefix_run(folder, shared(), 0.0, caching=False),
        lambda folder: prefix_run(folder, shared(), 0.0, caching=True),
    ),
    "prefix-cache-thrashing": (
        lambda folder: prefix_run(folder, shared(16), 0.0, caching=True),
        lambda folder: prefix_run(folder, shared(16), 560.0, caching=True),
    ),
    "recomputed-hits": (
        lambda folder: prefix_run(
            folder,
            [request(i, 0.01 * i, length_s=3.0, prefix_id=f"own{i}", prefix_tokens=100) for i in range(6)],
            256.0,
            caching=True,
            preemptions=6.0,
        ),
        lambda folder: prefix_run(folder, shared(), 560.0, caching=True, preemptions=6.0),
    ),
    "prefill-peak": (
        lambda folder: made(folder, [request(i, 0.01 * i, prompt=150, ttft_s=2.8, length_s=3.0) for i in range(8)], busy(0.6, 8.0, 0.0), seconds=3.0),
        lambda folder: made(folder, [request(i, 0.01 * i, prompt=150, ttft_s=0.2, length_s=3.0) for i in range(8)], busy(0.6, 8.0, 0.0), seconds=3.0),
    ),
    "seat-bound": (lambda folder: made(folder, None, busy(0.4, 8.0, 3.0)), lambda folder: made(folder, None, busy(0.97, 8.0, 3.0))),
    "kv-bound": (lambda folder: made(folder, None, busy(0.97, 4.0, 3.0)), lambda folder: made(folder, None, busy(0.4, 8.0, 3.0))),
    "token-budget-bound": (
        lambda folder: made(folder, closed_loop(users=8), busy(0.4, 4.0, 3.0)),
        lambda folder: made(folder, None, busy(0.4, 8.0, 3.0)),
    ),
    "waiting-beside-free": (
        lambda folder: made(folder, (), busy(0.765, 1.0, 14.0, generation_tokens=5.0)),
        lambda folder: made(folder, (), busy(0.765, 1.0, 0.0, generation_tokens=5.0)),
    ),
    "deferred-waiting": (
        lambda folder: made(folder, None, busy(0.4, 4.0, 3.0, waiting_capacity=1.0)),
        lambda folder: made(folder, None, busy(0.4, 4.0, 3.0, waiting_capacity=3.0)),
    ),
    "preemption-storm": (
        lambda folder: made(folder, None, rising(preemptions=20.0), after={"preemptions": 20.0}),
        lambda folder: made(
            folder, None, rising(preemptions=1.0, finished=400.0), after={"preemptions": 1.0, "finished": 400.0}, before={"finished": 0.0}
        ),
    ),
    "true-fullness": (
        lambda folder: made(folder, None, {"waiting": 2.0}, usable=20),
        lambda folder: made(folder, None, {"waiting": 2.0}, usable=40),
    ),
    "campaign-day": (lambda folder: made(folder, before={"max_model_len": 2000}), made),
    "stuck-queue": (
        lambda folder: made(folder, (), busy(0.0, 0.0, 5.0, generation_tokens=100.0, prompt_tokens=10.0), seconds=20, hz=2),
        lambda folder: made(folder, (), lambda i: busy(0.0, 0.0, 5.0, generation_tokens=100.0 + i), seconds=20, hz=2),
    ),
    "never-admitted": (
        lambda folder: made(folder, hung(3000), {**nothing_runs(), "waiting": 1.0}, seconds=20, hz=2),
        lambda folder: made(folder, hung(3000), lambda i: {**nothing_runs(), "waiting": 1.0, "generation_tokens": 9.0 + i}, seconds=20, hz=2),
    ),
    "longer-than-the-pool": (
        lambda folder: made(folder, before={"max_model_len": 2048}),
        lambda folder: made(folder, before={"max_model_len": 2032}),
    ),
    "runaway-generation": (
        lambda folder: made(folder, (), climbing(0.0), seconds=40, hz=4, usable=4000),
        lambda folder: made(folder, (), climbing(1.0), seconds=40, hz=4, usable=4000),
    ),
    "leak": (
        lambda folder: made(folder, None, tail(4.1, usage=5 / USABLE, used_blocks=5.0, free_blocks=122.0), seconds=9.0, after={"used_blocks": 5.0}),
        lambda folder: made(folder, seconds=9.0),
    ),
    "stale-gauge": (
        lambda folder: made(folder, None, lambda i: {"generation_tokens": 100.0, **tail(4.1, running=24.0)(i)}, seconds=16.0),
        lambda folder: made(folder, None, {"generation_tokens": 100.0}, seconds=16.0),
    ),
    "wrong-endpoint": (
        lambda folder: made(folder, None, {"generation_tokens": 7.0}, before={"generation_tokens": 7.0}),
        lambda folder: made(folder, None, rising(generation_tokens=800.0), before={"generation_tokens": 0.0}, after={"generation_tokens": 800.0}),
    ),
    "lonely-percentage": (lambda folder: made(folder, None, busy(0.9, 4.0, 0.0)), lambda folder: made(folder, None, busy(0.9, 4.0, 2.0))),
    "gpu-imbalance": (
        lambda folder: on_cards(
            folder, [card(0, used=72, ours=72), card(1, used=41, ours=41)], [worker(0, pool=20, weights=14), worker(1, pool=20, weights=14)]
        ),
        lambda folder: on_cards(
            folder, [card(0, used=72, ours=72), card(1, used=71, ours=71)], [worker(0, pool=20, weights=14), worker(1, pool=20, weights=14)]
        ),
    ),
    "replica-imbalance": (
        lambda folder: made(folder, (), apart([busy(0.9, 8.0, 0.0), busy(0.5, 2.0, 0.0)]), servers=2),
        lambda folder: made(folder, (), apart([busy(0.7, 5.0, 0.0), busy(0.65, 5.0, 0.0)]), servers=2),
    ),
    "pool-changed": (lambda folder: made(folder, usable=100), made),
}
"""Rule id -> a Run that shows it, and one that does not. ``pool-changed`` compares with ``made(folder)``."""
