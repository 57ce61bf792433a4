"""The writer of requests.jsonl: rows are encoded as they end and go to disk within half a second, in whole lines."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from pytest_kvcache.errors import CannotWrite
from pytest_kvcache.records import LoadEnd, LoadNote, LoadStart, RequestRow

FLUSH_S = 0.5
_PENDING_LIMIT = 256 * 1024


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
