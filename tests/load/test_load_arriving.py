"""When a packet came, by the kernel's note: a client that is busy with other streams reads it later."""

from __future__ import annotations

import socket
import struct
import sys
import time

import pytest

from pytest_kvcache.load.arriving import OLDEST_S, arrivals_are_stamped, came_s, receive


def note(ago_s: float, kind: int = 35) -> tuple[int, int, bytes]:
    at_s = time.time() - ago_s
    return socket.SOL_SOCKET, kind, struct.pack("@qq", int(at_s), int(at_s % 1 * 1e9))


def test_the_time_is_that_of_the_arrival_and_not_that_of_a_late_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        with there:
            stamped = arrivals_are_stamped(client)
            assert stamped == (sys.platform == "linux")
            if stamped:
                before_s = time.monotonic()
                there.sendall(b"token")
                after_s = time.monotonic()
                time.sleep(0.15)
                data, at_s = receive(client)
                assert data == b"token"
                assert before_s - 0.02 <= at_s <= after_s + 0.1


def test_a_note_that_cannot_be_true_is_no_time() -> None:
    assert came_s([note(0.5)]) == pytest.approx(time.monotonic() - 0.5, abs=0.05)
    assert came_s([note(-1.0)]) == 0.0
    assert came_s([note(OLDEST_S + 1)]) == 0.0
    assert came_s([note(0.5, kind=1)]) == 0.0
    assert came_s([(socket.SOL_SOCKET, 35, b"short")]) == 0.0
    assert came_s([]) == 0.0


def test_what_is_no_plain_connection_is_not_asked() -> None:
    class Encrypted:
        def getpeercert(self) -> None:
            """As an SSLSocket has it."""

    assert not arrivals_are_stamped(None)
    assert not arrivals_are_stamped(Encrypted())
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as closed:
        closed.close()
        assert not arrivals_are_stamped(closed)
