"""Reads servers on a fixed schedule into telemetry.jsonl while something else presses them."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_kvcache.engines import Dialect, Values, read_values
from pytest_kvcache.errors import CannotWrite, EndpointRefused
from pytest_kvcache.observe.gpu import read_gpus
from pytest_kvcache.observe.memory import ProcessReader
from pytest_kvcache.observe.remote_cards import RemoteCards
from pytest_kvcache.observe.sampled import SAMPLED
from pytest_kvcache.observe.scrape import Reader
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GpuRow, MemoryRow, TelemetryRow
from pytest_kvcache.runfolder import encode_line
from pytest_kvcache.server.address import Endpoint

__all__ = ["SAMPLED", "Sampler", "SamplerStats"]

# Without one of these a look told nothing about the KV cache: it counts as an error, not as a sample. What the first good look told
# must be in every later one.
_TELLING = ("usage", "used_blocks", "used_tokens", "running")
_GPU_HZ = 2.0
# Adding up the pages of a process with a large pool takes the kernel milliseconds.
_MEMORY_HZ = 1.0
_REMOTE_GPU_HZ = 1.0  # DCGM exporters refresh no more often


@dataclass(frozen=True)
class SamplerStats:
    """What the sampler did. ``samples`` are rows that told something, ``errors`` looks that failed, ``missed`` looks left out because
    the one before was still under way. ``achieved_hz`` and ``longest_gap_s`` are of the endpoint that fared worst. ``error`` is
    what a reader of the evidence must know ("" if nothing): a full disk, a reader that hung. ``reasons`` counts failed looks.
    """

    samples: int
    errors: int
    achieved_hz: float
    longest_gap_s: float
    missed: int = 0
    error: str = ""
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass
class _Lane:
    """The state of one endpoint's thread. Only that thread writes it while it lives."""

    reader: Reader
    dialect: Dialect
    samples: int = 0
    errors: int = 0
    missed: int = 0
    expected: frozenset[str] = frozenset()
    last_good: float | None = None
    longest_gap_s: float = 0.0
    latest: TelemetryRow | None = None
    reasons: Counter[str] = field(default_factory=Counter)


class Sampler:
    """Samples endpoints at ``hz`` looks a second each, in a thread each, until stopped. A context manager as well.

    Rows go to ``folder/telemetry.jsonl`` and are with the operating system when the next look begins, so that a killed process loses
    none. ``gpus`` reads the cards of this machine twice a second beside it, or those of the exporters that the first endpoint names, once
    a second; they come with the rows of the first endpoint. ``memory`` reads the processes of each endpoint whose processes run on this
    machine, once a second.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        folder: Path,
        hz: float,
        *,
        dialects: Sequence[Dialect],
        gpus: bool = True,
        memory: bool = True,
        timeout_s: float = 5.0,
    ) -> None:
        if not endpoints or len(endpoints) != len(dialects) or not hz > 0:
            raise ValueError("a sampler needs endpoints, a dialect for each, and a rate above zero")
        self.hz = hz
        self.timeout_s = timeout_s
        self.path = folder / "telemetry.jsonl"
        self._pairs = list(zip(endpoints, dialects, strict=True))
        self._gpus_wanted = gpus
        self._memory_wanted = memory
        self._cards: RemoteCards | None = None
        self._lanes: list[_Lane] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._file: _RowFile | None = None
        self._gpu_rows: list[GpuRow] | None = None
        self._memory_rows: dict[int, MemoryRow] = {}
        self._processes: dict[int, ProcessReader] = {}
        self._latest: TelemetryRow | None = None
        self._wall_base = 0.0
        self._began = 0.0
        self._stats: SamplerStats | None = None

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def latest(self) -> TelemetryRow | None:
        """The row that was written last, of whichever endpoint; None before the first."""
        return self._latest

    def latest_of(self, endpoint: int) -> TelemetryRow | None:
        """Return the last row of one endpoint, by its number; None before its first."""
        return self._lanes[endpoint].latest if endpoint < len(self._lanes) else None

    def start(self) -> None:
        """Open the file and start the threads.

        Raises CannotWrite, UsageError for a key or CA bundle that cannot be read, and EndpointRefused for cards that were named and cannot be.
        """
        if self._threads:
            raise RuntimeError("this sampler was started before")
        self._file = _RowFile(self.path)
        try:
            for endpoint, dialect in self._pairs:
                self._lanes.append(_Lane(Reader(endpoint, dialect, timeout_s=self.timeout_s), dialect))
            pages = self._pairs[0][0].cards
            if pages and self._gpus_wanted:
                self._cards = RemoteCards(pages, self.timeout_s)
                first = self._cards.read()
                if isinstance(first, Missing):
                    raise EndpointRefused(f"the cards cannot be read: {first.reason}", where="--kv-dcgm-url", hint="the address of a DCGM exporter")
        except BaseException:
            self._close()
            raise
        if self._memory_wanted:  # looking through the connections of a busy machine takes a while, and must not hold up a look
            self._processes = {n: reader for n, (endpoint, _) in enumerate(self._pairs) if (reader := ProcessReader(endpoint)).known}
        self._wall_base, self._began = time.time(), time.monotonic()
        targets = [threading.Thread(target=self._sample, args=(n,), name=f"kv-sampler-{n}", daemon=True) for n in range(len(self._lanes))]
        if self._gpus_wanted:
            targets.append(threading.Thread(target=self._watch_gpus, name="kv-sampler-gpus", daemon=True))
        if self._processes:
            targets.append(threading.Thread(target=self._watch_memory, name="kv-sampler-memory", daemon=True))
        self._threads = targets
        for thread in targets:
            thread.start()

    def stop(self) -> SamplerStats:
        """End the threads, within the time of one read, and say what was done. A second call gives the same answer."""
        if self._stats is not None:
            return self._stats
        self._ended.set()
        deadline = time.monotonic() + self.timeout_s + 2.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hung = sum(thread.is_alive() for thread in self._threads)
        elapsed = max(time.monotonic() - self._began, 1e-9) if self._threads else 0.0
        with self._lock:
            trouble = self._file.trouble if self._file is not None else ""
            self._close()
        if hung:
            trouble = "; ".join(filter(None, (trouble, f"{hung} reads of the server were still under way when the sampler was stopped")))
        reasons: Counter[str] = Counter()
        for lane in self._lanes:
            reasons.update(lane.reasons)
        self._stats = SamplerStats(
            samples=sum(lane.samples for lane in self._lanes),
            errors=sum(lane.errors for lane in self._lanes),
            achieved_hz=min((lane.samples / elapsed for lane in self._lanes), default=0.0) if elapsed else 0.0,
            longest_gap_s=max((self._gap(lane, elapsed) for lane in self._lanes), default=0.0),
            missed=sum(lane.missed for lane in self._lanes),
            error=trouble,
            reasons=dict(reasons.most_common(20)),
        )
        return self._stats

    def _gap(self, lane: _Lane, elapsed: float) -> float:
        """Return the longest time without a good look, from the start and to the end as well."""
        since = elapsed if lane.last_good is None else self._began + elapsed - lane.last_good
        return max(lane.longest_gap_s, since)

    def _close(self) -> None:
        for lane in self._lanes:
            lane.reader.close()
        if self._cards is not None:
            self._cards.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _sample(self, number: int) -> None:
        """Look at one endpoint at start + k / hz. A look that outlasts its turn makes the turns it covers missed, never late ones."""
        lane = self._lanes[number]
        period, turn = 1.0 / self.hz, 0
        while not self._ended.is_set():
            row = self._look(lane, number)
            self._account(lane, row)
            self._write(row)
            now = time.monotonic()
            following = int((now - self._began) / period) + 1
            lane.missed += following - turn - 1
            turn = following
            self._ended.wait(max(0.0, self._began + turn * period - now))

    def _look(self, lane: _Lane, number: int) -> TelemetryRow:
        began = time.monotonic()
        wall_s = self._wall_base + (began - self._began)
        try:
            raw = lane.reader.look(once=False)
            silence = lane.reader.silence
            values = read_values(lane.dialect, raw, wall_s, only=SAMPLED)
            error = silence.what if silence is not None else _trouble(values, lane)
        except Exception as failure:  # a fault of ours must not end the series in silence
            values, error = Values({}, {}, [], ""), f"{type(failure).__name__}: {str(failure)[:200]}"
        gpus = self._take_gpus() if number == 0 else []
        return TelemetryRow(
            wall_s=wall_s,
            endpoint=number,
            values=_numbers(values.whole),
            ranks={part: _numbers(quantities) for part, quantities in values.ranks.items()},
            gpus=gpus,
            memory=self._take_memory(number),
            read_s=time.monotonic() - began,
            error=error,
        )

    def _account(self, lane: _Lane, row: TelemetryRow) -> None:
        lane.latest = self._latest = row
        if row.error:
            lane.errors += 1
            if row.error in lane.reasons or len(lane.reasons) < 50:
                lane.reasons[row.error] += 1
            return
        now = time.monotonic()
        lane.samples += 1
        lane.longest_gap_s = max(lane.longest_gap_s, now - (self._began if lane.last_good is None else lane.last_good))
        lane.last_good = now

    def _write(self, row: TelemetryRow) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write(encode_line(row))

    def _watch_gpus(self) -> None:
        """Read the cards beside the endpoints: a driver call may take long, and must not hold up a look."""
        period = 1.0 / min(_GPU_HZ if self._cards is None else _REMOTE_GPU_HZ, self.hz)
        while not self._ended.is_set():
            rows = read_gpus() if self._cards is None else self._cards.read()
            if not isinstance(rows, Missing):
                with self._lock:
                    self._gpu_rows = rows
            elif self._cards is None:
                return  # no driver: there will be none
            self._ended.wait(period)

    def _watch_memory(self) -> None:
        """Read the servers' processes beside the endpoints, as long as any of them can be read."""
        period = 1.0 / min(_MEMORY_HZ, self.hz)
        readers = dict(self._processes)
        while readers and not self._ended.is_set():
            for number, reader in list(readers.items()):
                row = reader.read()
                if isinstance(row, Missing):
                    del readers[number]
                    continue
                with self._lock:
                    self._memory_rows[number] = row
            self._ended.wait(period)

    def _take_memory(self, number: int) -> MemoryRow | None:
        with self._lock:
            return self._memory_rows.pop(number, None)

    def _take_gpus(self) -> list[GpuRow]:
        with self._lock:
            rows, self._gpu_rows = self._gpu_rows, None
        return rows or []


def _numbers(values: dict[str, Value]) -> dict[str, float]:
    return {name: value.number() for name, value in values.items() if isinstance(value, Reading) and not isinstance(value.value, str)}


def _trouble(values: Values, lane: _Lane) -> str:
    """Return why a look told nothing about the KV cache, or less than the first good one; "" where it was as good."""
    told = frozenset(name for name in _TELLING if isinstance(values.whole.get(name), Reading))
    lane.expected = lane.expected or told
    if told and told >= lane.expected:
        return ""
    silent = [(name, values.whole.get(name)) for name in _TELLING if name in lane.expected or not lane.expected]
    reasons = [value.reason for _, value in silent if isinstance(value, Missing) and not value.cannot_happen]
    return "; ".join(dict.fromkeys(reasons))[:500] or "nothing was told"


class _RowFile:
    """A file of whole lines. A line that could not be written whole is taken back, so that the file stays readable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lost = 0
        self._reason = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._end = os.fstat(self._fd).st_size
        except OSError as error:
            raise CannotWrite(
                f"cannot write telemetry: {error.strerror or error}",
                where=str(path),
                hint="free space, check permissions, or name another folder with --kv-reports",
            ) from None

    @property
    def trouble(self) -> str:
        """What could not be written, and why; "" if everything was."""
        return f"{self._lost} telemetry rows could not be written: {self._reason} ({self.path})" if self._lost else ""

    def write(self, line: bytes) -> None:
        """Append a line, or count it as lost."""
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:])
            self._end += written
        except OSError as error:
            self._lost += 1
            self._reason = self._reason or error.strerror or str(error)
            if written:
                self._take_back()

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._end)
        except OSError as error:
            self._reason = f"{self._reason}; and the half-written row could not be taken back: {error.strerror}"

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
