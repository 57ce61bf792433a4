"""The cards that a launched server gets: chosen, held against other sessions, free of other processes, and given back between launches.

NVML tells all of it (observe/gpu.py). Where there is no NVIDIA driver and no card was named, there is nothing to watch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_kvcache import units
from pytest_kvcache.errors import CannotWrite, LaunchFailed, UsageError
from pytest_kvcache.observe.gpu import read_gpus, read_pids
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import GpuRow
from pytest_kvcache.settings import Settings

VISIBLE = "CUDA_VISIBLE_DEVICES"
# What a card holds without any process: the driver keeps less than this for itself beside what it reserves.
IDLE_BYTES = 1 << 30
SLACK_BYTES = 256 << 20
_POLL_S = 0.25


@dataclass
class Cards:
    """The cards of this machine that a launched server will see. ``rows`` is how they were before the first launch."""

    rows: list[GpuRow]
    settings: Settings
    named: bool
    launched: bool = False
    known: dict[int, frozenset[int]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The environment that shows a server these cards alone, in this order; empty where the user named none."""
        return {VISIBLE: ",".join(row.uuid for row in self.rows)} if self.named else {}

    @property
    def facts(self) -> list[dict[str, Any]]:
        """The cards as a Run records them: index, UUID, name, memory in bytes."""
        return [{"index": row.index, "uuid": row.uuid, "name": row.name, "total_bytes": row.total_bytes} for row in self.rows]

    def make_ready(self) -> list[str]:
        """Wait until what an earlier server of ours held is given back, and return who else is on the cards, where that is allowed.

        Raises LaunchFailed where others are there and are not allowed, and where memory is not given back in time.
        """
        deadline = time.monotonic() + (self.settings.gpu_release_s if self.launched else 0.0)
        while True:
            busy = self._busy()
            if not busy or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        if busy and self.settings.gpu_others == "refuse":
            shown = "; ".join(busy[:4])
            if self.launched:
                what = f"a card is not free again {units.show_seconds(self.settings.gpu_release_s)} after its server was stopped: {shown}"
                raise LaunchFailed(what, hint="end what is left there, or allow more time with --kv-gpu-release-s")
            hint = "end it, name other cards with --kv-gpus, or let it be recorded with --kv-gpu-others=record"
            raise LaunchFailed(f"a card of the launched server is not free: {shown}", hint=hint)
        if not self.launched:
            self.launched, self.rows = True, self._now()
            self.known = {row.index: read_pids(row.index) for row in self.rows}
        return [f"while this was measured, others were on its cards: {'; '.join(busy[:4])}"] if busy else []

    def _now(self) -> list[GpuRow]:
        rows = read_gpus([row.index for row in self.rows])
        if isinstance(rows, Missing):
            raise LaunchFailed(f"the cards can no longer be read: {rows.reason}", hint="see what the driver says: nvidia-smi")
        return rows

    def _busy(self) -> list[str]:
        """Return what is on the cards, as text; after a launch only what was not there before it."""
        found = []
        for row, first in zip(self._now(), self.rows, strict=True):
            pids = read_pids(row.index) - self.known.get(row.index, frozenset())
            allowed = first.used_bytes + SLACK_BYTES if self.launched else IDLE_BYTES
            if pids:
                found += [f"card {row.index} ({row.name}) is used by {_process(pid, row)}" for pid in sorted(pids)]
            elif row.used_bytes > allowed:
                found.append(f"card {row.index} ({row.name}) has {units.show(row.used_bytes, 'bytes')} in use by processes that are not told")
        return found


def _process(pid: int, row: GpuRow) -> str:
    """Return a process as text: its name where it can be seen from here, and what it holds where the driver tells."""
    import psutil

    name = ""
    with contextlib.suppress(psutil.Error):
        name = f" ({psutil.Process(pid).name()})"
    held = row.processes.get(str(pid))
    return f"pid {pid}{name}" + (f" with {units.show(held, 'bytes')}" if held else "")


def find_cards(settings: Settings, environment: Mapping[str, str]) -> Cards | None:
    """Return the cards that a command with this environment of its own will see; None where this machine has none to watch.

    Raises UsageError for cards that there are not, or that were named twice in two ways.
    """
    rows = read_gpus()
    if settings.gpus:
        if VISIBLE in environment:
            raise UsageError(f"the launch command sets {VISIBLE} and --kv-gpus was given", hint="name the cards in one way")
        if isinstance(rows, Missing):
            raise UsageError(f"--kv-gpus names cards, and none can be seen: {rows.reason}", hint="leave it out on a machine without NVIDIA cards")
        chosen = [_named(word.strip(), rows) for word in settings.gpus.split(",")]
        if len({row.uuid for row in chosen}) != len(chosen):
            raise UsageError("a card is named twice", where=f"--kv-gpus={settings.gpus[:80]}", hint="name each card once")
        return Cards(chosen, settings, named=True)
    if isinstance(rows, Missing):
        return None
    seen = environment.get(VISIBLE, os.environ.get(VISIBLE))
    visible = rows if seen is None else _visible(seen, rows)
    return Cards(visible, settings, named=False) if visible else None


def _named(word: str, rows: list[GpuRow]) -> GpuRow:
    """Return the card of an index or of (the beginning of) a UUID. Raises UsageError."""
    found = [row for row in rows if (word.isdigit() and row.index == int(word)) or (len(word) >= 5 and row.uuid.startswith(word))]
    if len(found) == 1:
        return found[0]
    what = f"{word[:80]!r} names {len(found)} cards" if found else f"there is no card {word[:80]!r}"
    hint = f"there are {', '.join(f'{row.index} ({row.uuid})' for row in rows[:16])}"
    if word.startswith("MIG-"):
        hint = f"a MIG instance cannot be watched alone: name its whole card; {hint}"
    raise UsageError(what, where="--kv-gpus", hint=hint)


def _visible(text: str, rows: list[GpuRow]) -> list[GpuRow]:
    """Return the cards of a CUDA_VISIBLE_DEVICES, all where it cannot be read: CUDA stops at the first word that it does not know."""
    chosen: list[GpuRow] = []
    for word in (part.strip() for part in text.split(",")):
        if word in {"", "-1"}:
            break
        try:
            chosen.append(_named(word, rows))
        except UsageError:
            return rows
    return chosen


@contextmanager
def held(cards: Cards, say: Callable[[str], None]) -> Iterator[None]:
    """Hold one lock a card while the block runs, so that two sessions on this machine do not measure each other.

    The locks are files in the temporary folder, the same for every user of the machine. Raises LaunchFailed where another session keeps
    a card for longer than ``gpu_wait_s``, CannotWrite where no lock can be made.
    """
    with contextlib.ExitStack() as stack:
        for row in sorted(cards.rows, key=lambda row: row.uuid):
            stack.callback(os.close, _locked(row, cards.settings.gpu_wait_s, say))
        yield


def _locked(row: GpuRow, wait_s: float, say: Callable[[str], None]) -> int:
    import fcntl

    path = Path(tempfile.gettempdir()) / f"pytest-kvcache-card-{re.sub(r'[^A-Za-z0-9-]', '', row.uuid)[:80]}.lock"
    descriptor = _open(path)
    deadline, told = time.monotonic() + wait_s, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EACCES} or time.monotonic() >= deadline:
                os.close(descriptor)
                what = f"another session measures on card {row.index} ({row.name})"
                raise LaunchFailed(
                    what, where=str(path), hint="wait for it, allow more with --kv-gpu-wait-s, or name other cards with --kv-gpus"
                ) from None
        if not told:
            say(f"waiting for card {row.index} ({row.name}): another session measures on it")
            told = True
        time.sleep(_POLL_S)


def _open(path: Path) -> int:
    """Return a descriptor of a lock file that another user may have made: reading is enough to lock, and nothing is written to it."""
    try:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY | os.O_NOFOLLOW, 0o644))
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise CannotWrite(
            f"no lock can be taken for a card: {error.strerror or error}", where=str(path), hint="check the temporary folder (TMPDIR)"
        ) from None
