"""When a packet reached this machine, as the kernel noted it: the client's own queue of other streams is not in it.

Linux tells it for plain TCP with SO_TIMESTAMPNS (socket(7)): Unix seconds of the last packet that a read took from. Elsewhere, and through
TLS, a read has the time at which it was made.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from time import monotonic
from typing import Any

READ_SIZE = 65_536
# Older than that the note and the clock do not belong together: the clock was set.
OLDEST_S = 5.0
_OPTION = 35
_FORM = struct.Struct("@qq")
_SPACE = socket.CMSG_SPACE(_FORM.size) if hasattr(socket, "CMSG_SPACE") else 0


def arrivals_are_stamped(sock: Any) -> bool:
    """Ask the kernel to note arrivals on a connected socket; return whether it does."""
    if sys.platform != "linux" or sock is None or hasattr(sock, "getpeercert"):
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, _OPTION, 1)
    except OSError:
        return False
    return True


def receive(sock: Any) -> tuple[bytes, float]:
    """Return what a read of the socket gives, and when it came in monotonic seconds; 0 where the kernel did not note it."""
    data, notes, _, _ = sock.recvmsg(READ_SIZE, _SPACE)
    return data, came_s(notes)


def came_s(notes: list[tuple[int, int, bytes]]) -> float:
    """Return the monotonic time of a read's notes; 0 without a note that can be true."""
    for level, kind, body in notes:
        if level == socket.SOL_SOCKET and kind == _OPTION and len(body) >= _FORM.size:
            seconds, nanoseconds = _FORM.unpack_from(body)
            age_s = time.time() - (seconds + nanoseconds * 1e-9)
            return monotonic() - age_s if 0.0 <= age_s < OLDEST_S else 0.0
    return 0.0
