"""Memory as telemetry saw it: each card and each server's processes where they were fullest, and all of them over time on the one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_kvcache.analysis.card_parts import GPU, HOST
from pytest_kvcache.analysis.series import Card, Series
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GpuRow, MemoryRow
from pytest_kvcache.runfolder import Run, read_lines

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

_MOST_CARDS = 4096
_SHORTEST_PAUSE_S = 2.5
"""Cards are looked at twice a second, processes once; a pause in a line is longer than this, and longer than three of its usual steps."""


class _Look(msgspec.Struct):
    """What a line of telemetry says of memory; everything else in it is passed over."""

    wall_s: float
    endpoint: int = 0
    gpus: list[GpuRow] = []
    memory: MemoryRow | None = None


@dataclass
class Memory:
    """The memory that a Run's telemetry saw: each card and each server's processes where they were fullest, and how they moved.

    ``cards`` and ``hosts`` hold the moment and the row; ``other_bytes`` lowest and highest of what other processes held; ``cpu_s`` the CPU time of
    each server's processes at each look, ``resident`` the moment, total, available and resident bytes.
    """

    cards: dict[tuple[str, str], tuple[float, GpuRow]] = field(default_factory=dict)
    hosts: dict[int, tuple[float, MemoryRow]] = field(default_factory=dict)
    pids: dict[int, set[str]] = field(default_factory=dict)
    other_bytes: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    cpu_s: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    resident: dict[int, list[tuple[float, float, float, float]]] = field(default_factory=dict)

    @property
    def ours(self) -> set[str]:
        """The processes of all servers of the Run."""
        return set().union(*self.pids.values())


@dataclass(frozen=True)
class MemoryLine:
    """The memory of one card (``kind`` GPU), or of the machine with one server's processes (HOST), over time, in bytes.

    ``t_s`` counts from the start of the load; NaN is a pause in the looks, or a figure that was not told. ``server`` are this server's processes,
    ``others`` all other processes. ``label`` is the name of the ledger of the same memory.
    """

    label: str
    kind: str
    uuid: str
    t_s: list[float]
    total: list[float]
    used: list[float]
    free: list[float]
    server: list[float]
    others: list[float]


def read_telemetry_memory(run: Run) -> Memory:
    """Return what telemetry.jsonl says of memory. Raises CannotJudge on a broken line."""
    found = Memory()
    for look in read_lines(run.folder / "telemetry.jsonl", _Look):
        if look.memory is not None and len(found.hosts) < _MOST_CARDS:
            held = sum(look.memory.processes.values())
            before = found.hosts.get(look.endpoint)
            if before is None or held > sum(before[1].processes.values()):
                found.hosts[look.endpoint] = (look.wall_s, look.memory)
            found.pids.setdefault(look.endpoint, set()).update(look.memory.processes)
            found.cpu_s.setdefault(look.endpoint, []).append((look.wall_s, look.memory.cpu_s))
            row = (look.wall_s, float(look.memory.total_bytes), float(look.memory.available_bytes), float(held))
            found.resident.setdefault(look.endpoint, []).append(row)
        for card in look.gpus:
            key = (card.host, card.uuid or str(card.index))
            if key not in found.cards and len(found.cards) >= _MOST_CARDS:
                continue
            known = found.cards.get(key)
            if known is None or card.used_bytes > known[1].used_bytes:
                found.cards[key] = (look.wall_s, card)
            others = _others_of(card, found.ours)
            if others is not None:
                low, high = found.other_bytes.get(key, (others, others))
                found.other_bytes[key] = (min(low, others), max(high, others))
    return found


def card_name(host: str, index: int, name: str) -> str:
    """Return what a card is called: short enough for a table, and another for each card, however long the names of hosts are."""
    return " ".join(part for part in (_short(host, 40), f"GPU {index}", _short(name, 40)) if part)


def host_name(number: int, servers: int) -> str:
    """Return what a machine's memory is called, where ``number`` is the server whose processes are looked at, from 0."""
    return "memory of the machine" + (f", server {number + 1} of {servers}" if servers > 1 else "")


def _short(text: str, most: int) -> str:
    """Return a name with its middle left out where it is long: hosts differ at their ends."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"


def _others_of(card: GpuRow, ours: set[str]) -> float | None:
    if not card.processes or not ours & card.processes.keys():
        return None
    return float(sum(held for pid, held in card.processes.items() if pid not in ours))


def cpu_seconds(memory: Memory, since_s: float, until_s: float) -> Value:
    """Return the CPU time that the servers' processes used over the load, read once a second and drawn straight between two looks."""
    import numpy as np

    if not memory.cpu_s:
        return Missing("the server's processes are not on this machine, or not known")
    total = 0.0
    for looks in memory.cpu_s.values():
        if len(looks) < 2:
            return Missing("the server's processes were looked at only once")
        wall, cpu = np.array(looks, dtype=np.float64).T
        total += max(float(np.interp(until_s, wall, cpu) - np.interp(since_s, wall, cpu)), 0.0)
    return Reading(total, "s", f"the kernel: CPU time of {len(memory.cpu_s)} server{'s' if len(memory.cpu_s) != 1 else ''}' processes over the load")


def memory_lines(memory: Memory, series: Sequence[Series], since_s: float) -> tuple[MemoryLine, ...]:
    """Return the cards over time, and beside them each server's processes in the machine's memory."""
    ours = memory.ours
    cards = [_of_card(card, ours, since_s) for one in series for card in one.cards]
    hosts = [_of_host(number, looks, len(memory.resident), since_s) for number, looks in sorted(memory.resident.items())]
    return (*cards, *hosts)


def _of_card(card: Card, ours: set[str], since_s: float) -> MemoryLine:
    import numpy as np

    known = bool(ours & card.processes.keys())
    none = np.full(len(card.wall_s), np.nan)
    server, others = (
        (_added([held for pid, held in card.processes.items() if (pid in ours) == mine], len(none)) if known else none) for mine in (True, False)
    )
    return _line(card_name(card.host, card.index, card.name), GPU, card.uuid, card.wall_s - since_s, card.total, card.used, card.free, server, others)


def _added(columns: Sequence[Floats], count: int) -> Floats:
    """Return the sum of what the processes held; one that is not told at a look was not there."""
    import numpy as np

    total = np.zeros(count)
    for column in columns:
        total += np.nan_to_num(column)
    return total


def _of_host(number: int, looks: Sequence[tuple[float, float, float, float]], servers: int, since_s: float) -> MemoryLine:
    import numpy as np

    wall_s, total, available, held = np.array(sorted(looks), dtype=np.float64).T
    used = total - available
    return _line(host_name(number, servers), HOST, "", wall_s - since_s, total, used, available, held, np.maximum(used - held, 0.0))


def _line(label: str, kind: str, uuid: str, t_s: Floats, *columns: Floats) -> MemoryLine:
    """Return the line with a row of NaN in each pause."""
    import numpy as np

    steps = np.diff(t_s)
    pause = max(3.0 * float(np.median(steps)), _SHORTEST_PAUSE_S) if len(steps) else _SHORTEST_PAUSE_S
    breaks = np.flatnonzero(steps > pause) + 1
    moments = np.insert(t_s, breaks, (t_s[breaks - 1] + t_s[breaks]) / 2)
    total, used, free, server, others = (np.insert(np.asarray(column, dtype=np.float64), breaks, np.nan).tolist() for column in columns)
    return MemoryLine(label, kind, uuid, moments.tolist(), total, used, free, server, others)


@dataclass(frozen=True)
class Course:
    """How one figure of a line moved, in bytes: at the first look, least and most with their moments (seconds from the start of the load), at the last look."""

    first: float
    least: float
    least_at_s: float
    most: float
    most_at_s: float
    last: float


def course(line: MemoryLine, name: str) -> Course | None:
    """Return how ``server``, ``others``, ``used`` or ``free`` of a line moved; None where it was never told."""
    import numpy as np

    column = np.asarray(getattr(line, name), dtype=np.float64)
    there = np.flatnonzero(np.isfinite(column))
    if not len(there):
        return None
    low, top = int(there[np.argmin(column[there])]), int(there[np.argmax(column[there])])
    first, last = (float(column[there[place]]) for place in (0, -1))
    return Course(first, float(column[low]), float(line.t_s[low]), float(column[top]), float(line.t_s[top]), last)
