"""The writer of requests.jsonl: rows are encoded as they end and go to disk within half a second, in whole lines."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from pytest_kvcache.errors import CannotWrite
from pytest_kvcache.records import LoadEnd, LoadNote, LoadStart, RequestRow

FLUSH_S = 0.5
_PENDING_LIMIT = 256 * 1024


def rows_path(name: str, profile: str, *, fixed: bool) -> Path:
    """Return the file of a load: ``name``, or one of its own below reports/; unless it is ``fixed``, one that is not there yet.

    The web page starts one load after the other in one process, and none may lie over another.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    first = Path(name) if name else Path("reports") / f"{stamp}-locust-{profile}" / "requests.jsonl"
    number, path = 2, first
    while not fixed and path.exists() and not path.is_char_device():
        path = first.with_name(f"{first.stem}-{number}{first.suffix}")
        number += 1
    return path


class RowsFile:
    """An open requests.jsonl. ``rows`` counts request rows; ``failure`` says why writing stopped, and is empty while it works.

    After the first failed write nothing more is written, so that a full disk leaves whole lines and at most one cut last line.
    """

    def __init__(self, path: Path) -> None:
        """Create the file and its folder. Raises CannotWrite where it is there already or cannot be made."""
        self.path = path
        self.rows = 0
        self.failure = ""
        self._pending: list[bytes] = []
        self._size = 0
        self._encode = msgspec.json.Encoder().encode
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_EXCL if not path.is_char_device() else 0)
            self._fd = os.open(path, flags, 0o644)
        except OSError as error:
            raise CannotWrite(
                f"cannot write the rows of the load: {error.strerror or error}",
                where=str(path),
                hint="name another file with --kv-rows; a file that holds an earlier load is never overwritten",
            ) from None

    def add(self, row: RequestRow) -> None:
        """Take one request row."""
        self.rows += 1
        self._put(row)

    def take(self, lines: bytes, rows: int) -> None:
        """Take ``rows`` request rows that are encoded already: whole lines, each with its end."""
        self.rows += rows
        self.flush()
        self._write(memoryview(lines))

    def put(self, line: LoadStart | LoadNote | LoadEnd) -> None:
        """Take a line of the frame and write everything that waits."""
        self._put(line)
        self.flush()

    def _put(self, line: RequestRow | LoadStart | LoadNote | LoadEnd) -> None:
        if self._fd < 0 or self.failure:
            return
        data = self._encode(line)
        self._pending.append(data)
        self._size += len(data)
        if self._size > _PENDING_LIMIT:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Never raises: ``failure`` tells."""
        if not self._pending or self._fd < 0 or self.failure:
            return
        data = memoryview(b"\n".join(self._pending) + b"\n")
        self._pending.clear()
        self._size = 0
        self._write(data)

    def _write(self, data: memoryview) -> None:
        if self._fd < 0 or self.failure:
            return
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self.failure = f"cannot write {self.path}: {error.strerror or error}"

    def close(self) -> None:
        """Write what waits and close the file; lines that come later are dropped."""
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
