"""The one place that knows the order of a measurement: before, sample while loading, after, and the Run that holds it.

Everything measured is on disk before anything is judged, and a Run is written also when the load broke: what was seen until
then is kept, and ``problems`` says what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_kvcache.analysis.modelfile import Model, read_model
from pytest_kvcache.diskroom import give_back
from pytest_kvcache.errors import CannotWrite, EndpointUnreachable, KvError
from pytest_kvcache.load.runner import LoadResult, run_load
from pytest_kvcache.machine import machine_facts, version_facts
from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.observe.scrape import take_snapshot_raw
from pytest_kvcache.planned import Planned, Target, Window
from pytest_kvcache.quality.agreement import ask_agreement, choose_probes
from pytest_kvcache.quality.ask import ask_items
from pytest_kvcache.quality.harness import ask_tasks
from pytest_kvcache.quality.items import Item
from pytest_kvcache.quality.pressure import FILL_LIMIT_S, Pressing, ask_under_pressure, read_pressures
from pytest_kvcache.records import SCHEMA_VERSION, PressureRecord, RunRecord, SnapshotRecord, StartMemory, ValueRecord
from pytest_kvcache.runfolder import Run, write_atomic, write_run
from pytest_kvcache.server.endpoint import complete
from pytest_kvcache.server.shown import shown_settings
from pytest_kvcache.server.startlog import read_log_head, redact
from pytest_kvcache.server.startlogs.memory import read_memory
from pytest_kvcache.server.transport import ask
from pytest_kvcache.settings import Settings

__all__ = ["Planned", "Target", "Window", "effective_config", "longest_context", "measure_load", "measure_quality", "run_folder"]

# Drain: the server may need a moment to free what the last requests held; gauges of some engines move only on a step (engines.md, trap 14).
DRAIN_LIMIT_S = 10.0
LEAK_WATCH_S = 2.5
WARM_UP_REQUESTS = 2
_LOG_KEPT_BYTES = 4 << 20


def run_folder(session: Path, name: str) -> Path:
    """Create and return ``runs/<n>-<name>`` with the next free number. Raises CannotWrite."""
    runs = session / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(p.name.split("-", 1)[0]) for p in runs.iterdir() if p.name.split("-", 1)[0].isdigit()), default=0)
        while True:
            folder = runs / f"{number}-{name}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise CannotWrite(
            f"cannot make a folder for the Run: {error.strerror or error}",
            where=str(runs),
            hint="free space, check permissions, or name another folder with --kv-reports",
        ) from None


def _snapshots(target: Target, timeout_s: float) -> tuple[list[SnapshotRecord], str]:
    records, texts = [], []
    for endpoint, dialect in zip(target.endpoints, target.dialects, strict=True):
        record, raw = take_snapshot_raw(endpoint, dialect, endpoint.log, timeout_s=timeout_s)
        records.append(record)
        texts.append(raw)
    return records, "\n".join(texts)


def effective_config(snapshots: Sequence[SnapshotRecord]) -> dict[str, ValueRecord]:
    """Return the configuration that the server itself states: the ``config`` quantities of the first endpoint.

    With replicas, a quantity that differs between them is recorded as Missing with the values seen.
    """
    from pytest_kvcache.quantities import QUANTITIES, Missing, Reading

    config: dict[str, ValueRecord] = {}
    for name, quantity in QUANTITIES.items():
        if quantity.kind != "config":
            continue
        values = [snapshot.value(name) for snapshot in snapshots]
        shown = {value.value for value in values if isinstance(value, Reading)}
        if len(shown) > 1:
            config[name] = ValueRecord.of(Missing(f"replicas differ: {', '.join(sorted(str(v) for v in shown))[:200]}"))
        elif values:
            config[name] = ValueRecord.of(values[0])
    return config


def _drain(target: Target, sampler: Sampler) -> float:
    """Wait until nothing runs or waits on two samples, at most DRAIN_LIMIT_S; return the seconds waited.

    Some engines publish their gauges only when a step runs (vLLM after mass aborts: engines.md, trap 14), so a tiny request is sent
    once the server looks busy without cause. Where nothing runs and something is still held, it is watched for LEAK_WATCH_S: what is
    given back late is no leak.
    """
    began = time.monotonic()
    calm, nudged, idle_since = 0, False, 0.0
    while (waited := time.monotonic() - began) < DRAIN_LIMIT_S:
        rows = [sampler.latest_of(number) for number in range(len(target.endpoints))]
        # a row that tells no running requests (a failed read, an engine that does not say) is no sign of calm
        told = all(row is not None and "running" in row.values for row in rows)
        busy = any(row is not None and row.values.get("running", 0.0) + row.values.get("waiting", 0.0) > 0 for row in rows)
        held = any(row is not None and (row.values.get("used_blocks", 0.0) or row.values.get("used_tokens", 0.0)) > 0 for row in rows)
        calm = calm + 1 if told and not busy else 0
        idle_since = (idle_since or time.monotonic()) if calm else 0.0
        if (calm >= 2 and (not held or time.monotonic() - idle_since >= LEAK_WATCH_S)) or (not told and not busy and waited > 1.0):
            break
        if busy and waited > 2.0 and not nudged:
            nudged = True
            for endpoint in target.endpoints:
                with contextlib.suppress(EndpointUnreachable):  # a server that is this slow is told by its own samples
                    complete(endpoint, "a", 1, timeout_s=5.0)
        time.sleep(max(0.05, 1.0 / sampler.hz))
    return time.monotonic() - began


def _warm_up(target: Target, nonce: str) -> None:
    """Send a few short requests that no window counts: first requests pay for compilation and page faults."""
    for endpoint in target.endpoints:
        for number in range(WARM_UP_REQUESTS):
            complete(endpoint, f"warm up {nonce} {number}", 4, timeout_s=60.0)


def _reset_cache(target: Target) -> str:
    """Ask each server to empty its prefix cache by its own call, and say what came of it (vLLM: POST /reset_prefix_cache, dev mode)."""
    answers = []
    for endpoint in target.endpoints:
        with endpoint.client(timeout_s=30.0) as client:
            answers.append(ask(endpoint, client, "POST", "/reset_prefix_cache", timeout_s=30.0).status)
    if all(status == 200 for status in answers):
        return "emptied by the engine's own call"
    return f"the engine's own call answered HTTP {', '.join(map(str, answers))}; prompts never sent before"


@dataclass(frozen=True)
class _Pressed:
    """What came of a load: its result where it came to one, when it ran, and what cut it short."""

    load: LoadResult | None
    began_wall_s: float
    ended_wall_s: float
    raised: BaseException | None


def _press(target: Target, settings: Settings, folder: Path, window: Window, max_model_len: int | None) -> _Pressed:
    """Run the load, and hold back what ends it early until everything measured so far is written."""
    planned = window.planned
    began_wall_s = time.time()
    load, raised = None, None
    try:
        load = run_load(
            target.endpoints,
            planned.profile,
            folder,
            users=planned.users,
            duration_s=planned.duration_s,
            output_tokens=planned.output_tokens,
            seed=window.seed,
            max_model_len=max_model_len,
            request_timeout_s=settings.request_timeout_s,
            keep_text=settings.keep_text,
            processes=settings.load_processes,
            options={"nonce": window.nonce, **({"requests": planned.requests} if planned.requests else {}), **planned.options},
        )
    except (KvError, KeyboardInterrupt) as error:
        raised = error
    return _Pressed(load, began_wall_s, time.time(), raised)


def measure_load(target: Target, settings: Settings, session: Path, window: Window, *, run_id: str, keep: Callable[[Run], Run]) -> Run:
    """Measure one window of load and return its Run, as ``keep`` gives it back.

    The Run is on disk, and ``keep`` was called, before anything is raised: LoadFailed when the load process broke, KeyboardInterrupt.
    Raises CannotWrite when the disk is full, and what reading the server raises when it does not answer at all.
    """
    planned = window.planned
    folder = run_folder(session, planned.name)
    started_wall_s, started_s = time.time(), time.monotonic()
    if window.number == 0 or target.fresh:
        _warm_up(target, window.nonce)
    cache_state = "cold by a fresh start; prompts never sent before" if target.fresh else "prompts never sent before"
    if settings.reset_cache:
        cache_state = _reset_cache(target)
    before, raw_before = _snapshots(target, settings.scrape_timeout_s)
    write_atomic(folder / "metrics-before.prom", raw_before)
    model = read_model(Path(settings.model_config), before[0]) if settings.model_config else Model([], {})
    sampler = Sampler(target.endpoints, folder, window.sample_hz, dialects=target.dialects, timeout_s=settings.scrape_timeout_s)
    sampler.start()
    try:
        pressed = _press(target, settings, folder, window, _shorter(_max_model_len(before), window.longest))
        if pressed.raised is None:
            _drain(target, sampler)
    finally:
        stats = sampler.stop()
    load, problems = pressed.load, _cut_short(pressed.raised)
    if load is not None:
        problems += load.problems
    if stats.error:
        problems.append(stats.error)
    after: list[SnapshotRecord] = []
    try:
        after, raw_after = _snapshots(target, settings.scrape_timeout_s)
        write_atomic(folder / "metrics-after.prom", raw_after)
    except KvError as error:
        problems.append(f"the server could not be read after the load: {error.what}")
    run = _keep_run(
        target,
        settings,
        session,
        folder,
        before,
        id=run_id,
        profile=planned.name,
        window=window.number,
        planned_windows=window.of,
        pilot_windows=window.pilot,
        kv_groups=model.groups,
        model_parts=model.parts,
        started_wall_s=started_wall_s,
        load_started_wall_s=pressed.began_wall_s,
        load_ended_wall_s=pressed.ended_wall_s,
        after=after,
        seed=window.seed,
        workload=load.workload if load is not None else "",
        cache_state=cache_state,
        sample_hz=window.sample_hz,
        load_argv=list(load.argv) if load is not None else [],
        load_exit=load.exit_code if load is not None else None,
        options={
            **planned.options,
            "nonce": window.nonce,
            "users": planned.users,
            "duration_s": planned.duration_s,
            "output_tokens": planned.output_tokens,
            "requests": planned.requests,
        },
        problems=problems,
        notes=load.notes if load is not None else [],
        clock_step_s=round(time.time() - started_wall_s - (time.monotonic() - started_s), 3),
    )
    run = keep(run)
    if pressed.raised is not None:
        raise pressed.raised
    return run


def measure_quality(target: Target, settings: Settings, session: Path, items: Sequence[Item], *, run_id: str, keep: Callable[[Run], Run]) -> Run:
    """Ask the quality items and return their Run, as ``keep`` gives it back. Replicas share the items in turn, always in the same way.

    What was answered is on disk, and ``keep`` was called, before anything is raised: EndpointUnreachable, CannotWrite, KeyboardInterrupt.
    """
    folder = run_folder(session, "quality")
    started_wall_s = time.time()
    before, raw = _snapshots(target, settings.scrape_timeout_s)
    write_atomic(folder / "metrics-before.prom", raw)
    raised: BaseException | None = None
    pressure: list[PressureRecord] = []
    try:
        for replica, endpoint in enumerate(target.endpoints):
            ask_items(
                endpoint,
                items[replica :: len(target.endpoints)],
                folder / "quality.jsonl",
                keep_text=settings.keep_text,
                timeout_s=settings.request_timeout_s,
                replica=replica,
                append=replica > 0,
            )
            if probes := choose_probes(items, settings.quality_probes)[replica :: len(target.endpoints)]:
                ask_agreement(endpoint, probes, folder / "agreement.jsonl", timeout_s=settings.request_timeout_s, replica=replica)
        if settings.quality_tasks:
            ask_tasks(target.endpoints[0], settings, folder)
        pressure = _under_pressure(target, settings, folder, items)
    except (KvError, KeyboardInterrupt) as error:
        raised = error
    workload = hashlib.sha256("\n".join(f"{item.id}:{item.expect}" for item in items).encode()).hexdigest()[:16]
    run = _keep_run(
        target,
        settings,
        session,
        folder,
        before,
        id=run_id,
        profile="quality",
        started_wall_s=started_wall_s,
        workload=workload,
        problems=_cut_short(raised),
        pressure=pressure,
    )
    run = keep(run)
    if raised is not None:
        raise raised
    return run


def _under_pressure(target: Target, settings: Settings, folder: Path, items: Sequence[Item]) -> list[PressureRecord]:
    """Ask the items once more, each under one of the pressures that ``settings.quality_pressure`` names."""
    pressing = Pressing(
        target.endpoints,
        target.dialects,
        folder,
        keep_text=settings.keep_text,
        timeout_s=settings.request_timeout_s,
        scrape_timeout_s=settings.scrape_timeout_s,
        sample_hz=settings.sample_hz,
        seed=settings.seed,
        fill_limit_s=math.inf if "quality_pressure" in settings.sources else FILL_LIMIT_S,
    )
    return ask_under_pressure(pressing, items, pressures) if (pressures := read_pressures(settings.quality_pressure)) else []


def _cut_short(raised: BaseException | None) -> list[str]:
    if raised is None:
        return []
    return [raised.what if isinstance(raised, KvError) else "interrupted before its end"]


def _keep_run(target: Target, settings: Settings, session: Path, folder: Path, before: Sequence[SnapshotRecord], **fields: Any) -> Run:
    """Write run.json, with everything that is known of the side, and the server's log beside it; return the Run.

    On a full disk the room that the session holds back is used for it. Raises CannotWrite.
    """
    try:
        _keep_log(target, folder)
    except CannotWrite as error:
        fields["problems"] = [*fields["problems"], f"the server's log is not kept: {error.what}"]
    first = before[0]
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        side=target.side,
        engine=first.engine,
        engine_version=first.version,
        embedded=target.embedded,
        owned=all(endpoint.owned for endpoint in target.endpoints),
        model=target.endpoints[0].model,
        endpoints=[endpoint.shown for endpoint in target.endpoints],
        launch_command=list(target.command),
        ended_wall_s=time.time(),
        settings=shown_settings(settings),
        config=effective_config(before),
        before=list(before),
        start_memory=_start_memory(target),
        variant=target.variant,
        versions=version_facts(first.engine, first.version),
        machine={**machine_facts(), **({"gpus": [dict(card) for card in target.gpus]} if target.gpus else {})},
        launch_id=target.launch_id,
        provenance=dict(target.provenance),
        **fields,
    )
    try:
        return write_run(folder, record)
    except CannotWrite:
        if not give_back(session):
            raise
        return write_run(folder, record)


def _start_memory(target: Target) -> list[StartMemory]:
    """Return what the logs of owned servers state of their memory."""
    logs = [(number, endpoint.log) for number, endpoint in enumerate(target.endpoints) if endpoint.log is not None]
    return [worker for number, log in logs for worker in read_memory(read_log_head(log), number)]


def _max_model_len(snapshots: Sequence[SnapshotRecord]) -> int | None:
    from pytest_kvcache.quantities import Reading

    values = [snapshot.value("max_model_len") for snapshot in snapshots]
    lengths = [int(value.number()) for value in values if isinstance(value, Reading)]
    return min(lengths) if lengths else None


def _shorter(own: int | None, wanted: int | None) -> int | None:
    """Return the context in tokens that prompts are sized by; never longer than what the server takes."""
    known = [length for length in (own, wanted) if length is not None]
    return min(known) if known else None


def longest_context(target: Target, settings: Settings) -> int | None:
    """Return the longest context in tokens that every server of a side takes; None where none tells."""
    return _max_model_len(_snapshots(target, settings.scrape_timeout_s)[0])


def _keep_log(target: Target, folder: Path) -> None:
    """Copy the end of an owned server's log into the Run, with secrets taken out."""
    for endpoint in target.endpoints:
        if endpoint.log is None or not endpoint.log.exists():
            continue
        with endpoint.log.open("rb") as file:
            file.seek(max(0, endpoint.log.stat().st_size - _LOG_KEPT_BYTES))
            write_atomic(folder / "server.log", redact(file.read().decode(errors="replace")))
