"""Items asked while the server is under pressure, because that is when caches break, and the proof that it was.

``fill``: a lane of long prompts holds the cache full, so that requests wait and running ones are preempted. ``prefix``: each prompt comes when the
cache holds three quarters of it, and again when it holds all of it; both answers must be right. ``cancel``: long requests are broken off in mid-answer all the time, so
that blocks are freed and taken at once. Each item is asked under one of them, so that together they make one set.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from pytest_kvcache.engines import Dialect
from pytest_kvcache.errors import KvError, UsageError
from pytest_kvcache.load.runner import run_load
from pytest_kvcache.observe.sampler import Sampler
from pytest_kvcache.observe.scrape import take_snapshot
from pytest_kvcache.quality.ask import ask_items
from pytest_kvcache.quality.graders import grade
from pytest_kvcache.quality.items import Item
from pytest_kvcache.quantities import Reading
from pytest_kvcache.records import PressureRecord, SnapshotRecord, TelemetryRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.endpoint import Endpoint, complete
from pytest_kvcache.server.openai import API_PATHS, request_body

FILL, PREFIX, CANCEL = "fill", "prefix", "cancel"
PRESSURES = (FILL, PREFIX, CANCEL)
AUTO, NONE = "auto", "none"
FILL_LIMIT_S = 60.0
"""How long items are asked behind a lane that fills the cache where nobody named that pressure: what is left then is asked under another."""

FULL = 0.85
"""The peak of usage from which the cache counts as full, where no request waited or was preempted."""

_MOST_USERS = 256
_FILL_STEP = 12
"""So many items are asked between two looks at the clock."""
_LONGEST_FILL_S = 1800.0
_FULL_WITHIN_S = 60.0
_CANCELLERS = 2
_CANCEL_TOKENS = 400
_COUNTERS = ("preemptions", "prefix_queries", "prefix_hits")


def read_pressures(text: str) -> list[str]:
    """Return the pressures that an option names: names with commas between, ``all``, ``none``, or nothing. Raises UsageError.

    ``auto`` is none as well: whether it means some is known only where two sides are compared (adopting.py).
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return list(PRESSURES)
    if names in ([AUTO], [NONE]):
        return []
    unknown = [name for name in names if name not in PRESSURES]
    if unknown:
        raise UsageError(
            f"there is no pressure {unknown[0][:60]!r}",
            where="--kv-quality-pressure",
            hint=f"name some of {', '.join(PRESSURES)}, or all, none, auto",
        )
    return [name for name in PRESSURES if name in names]


def share_out(items: Sequence[Item], pressures: Sequence[str]) -> dict[str, list[Item]]:
    """Return which items are asked under which pressure: each under one, by its id alone, so that other sets share what they have in common.

    Half as many under ``fill`` as under the others: there each waits behind long prompts.
    """
    found: dict[str, list[Item]] = {pressure: [] for pressure in pressures}
    turns = [pressure for pressure in pressures for _ in range(1 if pressure == FILL else 2)]
    for item in items:
        found[turns[zlib.crc32(item.id.encode()) % len(turns)]].append(item)
    return found


@dataclass(frozen=True)
class Pressing:
    """What the pressures need to know: the servers, how to read them, where the rows go, and how long ``fill`` may ask."""

    endpoints: Sequence[Endpoint]
    dialects: Sequence[Dialect]
    folder: Path
    keep_text: bool = False
    timeout_s: float = 300.0
    scrape_timeout_s: float = 5.0
    sample_hz: float = 10.0
    seed: int = 1
    fill_limit_s: float = math.inf


def ask_under_pressure(pressing: Pressing, items: Sequence[Item], pressures: Sequence[str]) -> list[PressureRecord]:
    """Ask the items under pressure, each under one of ``pressures``; rows are appended to quality.jsonl. Return what the server went through.

    Raises what ``ask_items`` raises. A pressure that could not be brought about is a record with ``pressed`` False.
    """
    found: list[PressureRecord] = []
    left: list[Item] = []
    for pressure, share in share_out(items, pressures).items():
        # what a filling lane kept from being asked in its time is asked under the last pressure
        chosen = [*share, *(left if pressure == pressures[-1] else [])]
        if chosen:
            record, late = _under(pressing, pressure, chosen, may_leave=len(pressures) > 1)
            found.append(record)
            left += late
    return found


def _in_steps(items: Sequence[Item], pressure: str) -> list[list[Item]]:
    """Return the items in the order in which they are asked; under ``fill`` in steps, each of which has something of every length."""
    if pressure != FILL:
        return [list(items)]
    mixed = sorted(items, key=lambda item: zlib.crc32(item.id[::-1].encode()))
    return [mixed[at : at + _FILL_STEP] for at in range(0, len(mixed), _FILL_STEP)]


def _under(pressing: Pressing, pressure: str, items: Sequence[Item], *, may_leave: bool) -> tuple[PressureRecord, list[Item]]:
    """Ask the items under one pressure, and return what the server went through and what was left when the time was over."""
    folder = pressing.folder / f"pressure-{pressure}"
    folder.mkdir(parents=True, exist_ok=True)
    before = [take_snapshot(e, d, e.log) for e, d in zip(pressing.endpoints, pressing.dialects, strict=True)]
    sampler = Sampler(pressing.endpoints, folder, pressing.sample_hz, dialects=pressing.dialects, timeout_s=pressing.scrape_timeout_s)
    press = {FILL: _fill, PREFIX: _nothing, CANCEL: _cancel}[pressure]
    began = time.monotonic()
    sampler.start()
    try:
        with press(pressing, before, items, folder, sampler) as felt:
            until = time.monotonic() + (pressing.fill_limit_s if pressure == FILL and may_leave else math.inf)
            steps = _in_steps(items, pressure)
            while steps and time.monotonic() < until:
                step = steps.pop(0)
                for replica, endpoint in enumerate(pressing.endpoints):
                    ask_items(
                        endpoint,
                        step[replica :: len(pressing.endpoints)],
                        pressing.folder / "quality.jsonl",
                        keep_text=pressing.keep_text,
                        timeout_s=pressing.timeout_s,
                        replica=replica,
                        append=True,
                        part=pressure,
                        first=_warm(endpoint, pressing.timeout_s) if pressure == PREFIX else None,
                    )
    finally:
        sampler.stop()
    seconds = time.monotonic() - began
    after = [take_snapshot(e, d, e.log) for e, d in zip(pressing.endpoints, pressing.dialects, strict=True)]
    rows = list(read_lines(folder / "telemetry.jsonl", TelemetryRow))
    fields: dict[str, Any] = {name: _moved(name, before, after) for name in _COUNTERS}
    fields |= {f"{name}_peak": _peak(name, rows) for name in ("usage", "running", "waiting")}
    pools = [value.number() for snapshot in before if isinstance(value := snapshot.value("pool_tokens"), Reading)]
    fields["pool_tokens"] = sum(pools) if pools else None
    left = [item for step in steps for item in step]
    record = PressureRecord(pressure, True, items=len(items) - len(left), seconds=round(seconds, 2), **felt, **fields)
    why = _lacking(record, felt)
    return msgspec.structs.replace(record, pressed=not why, why=why), left


def _lacking(record: PressureRecord, felt: Mapping[str, Any]) -> str:
    """Return why this was no pressure; "" where it was."""
    if record.part == FILL:
        if (record.usage_peak or 0) >= FULL or record.waiting_peak or record.preemptions:
            return ""
        known = f"usage peaked at {record.usage_peak:.0%}" if record.usage_peak is not None else "usage is not told"
        return f"the cache was not full: {known}, and no request waited"
    if record.part == PREFIX:
        if record.prefix_hits is None:
            return "the server does not tell prefix hits"
        return "" if record.prefix_hits > 0 else "no prompt was found in the prefix cache"
    return "" if felt.get("cancelled") else "no request was broken off in mid-answer"


def _moved(name: str, before: Sequence[SnapshotRecord], after: Sequence[SnapshotRecord]) -> float | None:
    """Return by how much a counter rose over all servers; None where one does not tell it."""
    moved = 0.0
    for old, new in zip(before, after, strict=True):
        one, two = old.value(name), new.value(name)
        if not isinstance(one, Reading) or not isinstance(two, Reading):
            return None
        moved += max(0.0, two.number() - one.number())
    return moved


def _peak(name: str, rows: Sequence[TelemetryRow]) -> float | None:
    values = [row.values[name] for row in rows if name in row.values]
    return max(values) if values else None


Press = Callable[..., contextlib.AbstractContextManager[dict[str, Any]]]


@contextlib.contextmanager
def _nothing(pressing: Pressing, before: object, items: object, folder: Path, sampler: Sampler) -> Iterator[dict[str, Any]]:
    yield {}


@contextlib.contextmanager
def _fill(pressing: Pressing, before: Sequence[SnapshotRecord], items: Sequence[Item], folder: Path, sampler: Sampler) -> Iterator[dict[str, Any]]:
    """Press with long prompts of more users than the pool holds until the items are asked; they start once the cache is full."""
    users, longest = fill_users(before)
    stop, felt = threading.Event(), {"users": users}
    failed: list[KvError] = []

    def press() -> None:
        try:
            run_load(
                pressing.endpoints,
                "longctx",
                folder,
                users=users,
                duration_s=_LONGEST_FILL_S,
                seed=pressing.seed,
                max_model_len=longest,
                request_timeout_s=pressing.timeout_s,
                stop=stop,
                options={"nonce": secrets.token_hex(4), "min_share": 0.6, "max_share": 0.9, "stop_timeout_s": 1},
            )
        except KvError as error:
            failed.append(error)

    load = threading.Thread(target=press, name="kv-fill", daemon=True)
    load.start()
    try:
        until = time.monotonic() + _FULL_WITHIN_S
        while load.is_alive() and time.monotonic() < until and not _is_full(sampler, len(pressing.endpoints)):
            time.sleep(0.05)
        yield felt
    finally:
        stop.set()
        load.join(60.0)
    if failed:
        raise failed[0]


def fill_users(before: Sequence[SnapshotRecord]) -> tuple[int, int | None]:
    """Return (users of long prompts that want half as much again as all pools hold, the longest context in tokens where it is told)."""
    pools = [value.number() for snapshot in before if isinstance(value := snapshot.value("pool_tokens"), Reading)]
    lengths = [value.number() for snapshot in before if isinstance(value := snapshot.value("max_model_len"), Reading)]
    seats = [value.number() for snapshot in before if isinstance(value := snapshot.value("max_num_seqs"), Reading)]
    longest = int(min(lengths)) if lengths else None
    if not pools or longest is None:
        return 16, longest
    wanted = int(1.5 * sum(pools) / (0.7 * longest)) + 2
    return max(2, min(wanted, int(sum(seats)) + 2 if seats else wanted, _MOST_USERS)), longest


def _is_full(sampler: Sampler, servers: int) -> bool:
    rows = [row for number in range(servers) if (row := sampler.latest_of(number)) is not None]
    return any(row.values.get("usage", 0.0) >= FULL or row.values.get("waiting", 0.0) > 0 for row in rows)


def _warm(endpoint: Endpoint, timeout_s: float) -> Callable[[Item, httpx.Client], str]:
    """Return what puts three quarters of a prompt into the prefix cache, asks the whole of it, and says whether that answer was wrong already.

    Items that a process of its own must mark, and patterns, are judged by their second answer alone.
    """

    def warm(item: Item, client: httpx.Client) -> str:
        body: dict[str, Any] = {}
        if isinstance(item.prompt, str):
            complete(endpoint, item.prompt[: len(item.prompt) * 3 // 4] or "a", 1, timeout_s=timeout_s, client=client)
        else:
            body = {"messages": list(item.prompt)}
        prompt = item.prompt if isinstance(item.prompt, str) else ""
        done = complete(endpoint, prompt, item.max_tokens, timeout_s=timeout_s, client=client, **body)
        if done.error or item.match in {"schema", "function", "regex"}:
            return done.error[:200]
        return "" if grade(item, done.text) else "wrong with a part of its prompt from the cache"

    return warm


@contextlib.contextmanager
def _cancel(pressing: Pressing, before: Sequence[SnapshotRecord], items: Sequence[Item], folder: Path, sampler: Sampler) -> Iterator[dict[str, Any]]:
    """Break off long requests in mid-answer, all the time that the items are asked."""
    stop, lock, felt = threading.Event(), threading.Lock(), {"cancelled": 0}
    texts = [item.prompt for item in sorted(items, key=lambda item: item.length_tokens)[len(items) // 2 :] if isinstance(item.prompt, str)]

    def break_off(number: int) -> None:
        endpoint = pressing.endpoints[number % len(pressing.endpoints)]
        with endpoint.client(pressing.timeout_s) as client:
            turn = number
            while not stop.is_set():
                text = texts[turn % len(texts)] if texts else "Tell me a story. " * 40
                turn += _CANCELLERS
                if _break_off(endpoint, client, f"{secrets.token_hex(3)} {text[len(text) // 3 :]}", stop):
                    with lock:
                        felt["cancelled"] += 1
                stop.wait(0.02)

    with ThreadPoolExecutor(_CANCELLERS, thread_name_prefix="kv-cancel") as pool:
        for number in range(_CANCELLERS):
            pool.submit(break_off, number)
        try:
            until = time.monotonic() + 10.0
            while not felt["cancelled"] and time.monotonic() < until:
                time.sleep(0.02)
            yield felt
        finally:
            stop.set()


def _break_off(endpoint: Endpoint, client: httpx.Client, prompt: str, stop: threading.Event) -> bool:
    """Send a request, close its stream after the first token, and return whether it was still answering."""
    body = request_body(endpoint, prompt, _CANCEL_TOKENS, temperature=0.0, stream=True)
    try:
        with client.stream("POST", endpoint.url(API_PATHS[endpoint.api]), json=body, headers=endpoint.api_headers()) as answer:
            if answer.status_code != 200:
                return False
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    return "[DONE]" not in line
                if stop.is_set():
                    return False
    except httpx.HTTPError:
        pass
    return False
