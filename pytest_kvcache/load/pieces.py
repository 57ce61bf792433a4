"""The rows of a load worker on their way to the master: in numbered pieces of whole lines, of which few are under way at a time.

A piece stays here until the master says that it has it, and goes out again where that takes too long, so that a connection that was
reset loses nothing and nothing counts twice. A master that takes no more is found out before the memory is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

import msgspec

from pytest_kvcache.records import LoadEnd, LoadNote, LoadStart, RequestRow

PIECE_BYTES = 64 * 1024
UNDER_WAY = 8
AGAIN_AFTER_S = 3.0
MOST_WAITING_BYTES = 64 * 2**20


class RowsSender:
    """Takes lines like RowsFile and hands them to ``send`` (number, lines). ``failure`` says why it gave up; empty while it works."""

    def __init__(self, send: Callable[[int, bytes], None], clock: Callable[[], float] = monotonic) -> None:
        self.path = "the master's file"
        self.rows = 0
        self.failure = ""
        self._send = send
        self._clock = clock
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._size = 0
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._made = 0
        self._sent = 0
        self._heard_s = clock()

    def add(self, row: RequestRow) -> None:
        """Take one request row."""
        self.rows += 1
        self._put(row)

    def put(self, line: LoadStart | LoadNote | LoadEnd) -> None:
        """Take a line of the frame and send everything that waits."""
        self._put(line)
        self.flush()

    def _put(self, line: RequestRow | LoadStart | LoadNote | LoadEnd) -> None:
        if self.failure:
            return
        data = self._encode(line)
        self._lines.append(data)
        self._size += len(data) + 1
        if self._size > PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Make a piece of what waits, and send as many as may be under way. Never raises: ``failure`` tells."""
        if self._lines and not self.failure:
            if not self._waiting:
                self._heard_s = self._clock()
            data = b"\n".join(self._lines) + b"\n"
            self._lines.clear()
            self._size = 0
            self._made += 1
            self._waiting.append((self._made, data))
            self._waiting_bytes += len(data)
        if self._waiting_bytes > MOST_WAITING_BYTES:
            self.failure = f"the master takes no rows: {self._waiting_bytes / 2**20:.0f} MiB wait to be sent"
            self._waiting.clear()
            self._waiting_bytes = 0
        elif self._waiting and self._sent >= self._waiting[0][0] and self._clock() - self._heard_s > AGAIN_AFTER_S:
            self._heard_s = self._clock()
            self._sent = self._waiting[0][0] - 1
        self._push()

    def _push(self) -> None:
        while self._waiting and self._sent < min(self._made, self._waiting[0][0] + UNDER_WAY - 1):
            number, data = self._waiting[self._sent + 1 - self._waiting[0][0]]
            try:
                self._send(number, data)
            except Exception:  # whatever the transport says: the piece is still here and goes out again
                return
            self._sent = number

    def taken(self, number: int) -> None:
        """Take the master's word that it has all pieces up to ``number``."""
        self._heard_s = self._clock()
        while self._waiting and self._waiting[0][0] <= number:
            self._waiting_bytes -= len(self._waiting.popleft()[1])
        self._sent = max(self._sent, number)
        self._push()

    @property
    def under_way(self) -> int:
        """How many pieces the master does not have yet."""
        return len(self._waiting)

    @property
    def silent_s(self) -> float:
        """For how many seconds the master has not taken a piece that waits; 0 where none does."""
        return self._clock() - self._heard_s if self._waiting else 0.0

    def close(self) -> None:
        """Send what waits; nothing is closed that another load could not use again."""
        self.flush()
