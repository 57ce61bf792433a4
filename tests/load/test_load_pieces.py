"""The rows of a worker on their way to its master: exact over a line that loses, doubles and stalls; and the clocks of both."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest
from gevent.pool import Group
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.load import link
from pytest_kvcache.load.clocks import Clock
from pytest_kvcache.load.pieces import AGAIN_AFTER_S, MOST_WAITING_BYTES, UNDER_WAY, RowsSender
from pytest_kvcache.records import LoadEnd, LoadNote, RequestRow


def row(number: int, text: str = "") -> RequestRow:
    return RequestRow(id=number, lane="normal", intended_s=0.0, sent_s=0.0, end_s=1.0, outcome="ok", prompt=text or None)


class Master:
    """Takes pieces as the master does, over a line that may lose what is sent and what is answered."""

    def __init__(self, loses: float = 0.0, seed: int = 0) -> None:
        self.now_s = 0.0
        self.loses = loses
        self.draw = random.Random(seed)
        self.got = b""
        self.number = 0
        self.sent = 0
        self.answers: list[int] = []
        self.sender = RowsSender(self.send, lambda: self.now_s)

    def send(self, number: int, data: bytes) -> None:
        self.sent += 1
        if self.draw.random() < self.loses:
            if self.draw.random() < 0.5:
                raise OSError("the line is broken")
            return
        if number == self.number + 1:
            self.number = number
            self.got += data
        self.answers.append(self.number)

    def answer(self) -> None:
        answers, self.answers = self.answers, []
        for number in answers:
            if self.draw.random() >= self.loses:
                self.sender.taken(number)

    def finish(self) -> None:
        self.sender.close()
        for _ in range(2000):
            self.answer()
            if not self.sender.under_way:
                return
            self.now_s += AGAIN_AFTER_S / 2
            self.sender.flush()
        raise AssertionError("the rows never arrived")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), loses=st.sampled_from([0.0, 0.2, 0.6]), count=st.integers(0, 400))
def test_every_row_arrives_once_and_in_order_whatever_the_line_loses(seed: int, loses: float, count: int) -> None:
    master = Master(loses, seed)
    for number in range(count):
        master.sender.add(row(number, "x" * master.draw.choice([0, 2000])))
        if master.draw.random() < 0.1:
            master.now_s += 1.0
            master.sender.flush()
        if master.draw.random() < 0.3:
            master.answer()
    master.sender.put(LoadEnd(1.0, count, "duration"))
    master.finish()
    lines = master.got.splitlines()
    assert [msgspec.json.decode(line)["id"] for line in lines[:-1]] == list(range(count))
    assert msgspec.json.decode(lines[-1])["kind"] == "end"


def test_no_more_than_a_few_pieces_are_under_way_at_a_time() -> None:
    master = Master()
    for number in range(2000):
        master.sender.add(row(number, "x" * 3000))
    assert master.sent == UNDER_WAY
    assert master.sender.under_way > UNDER_WAY
    master.now_s = 2.0
    assert master.sender.silent_s == pytest.approx(2.0)
    master.finish()
    assert len(master.got.splitlines()) == 2000
    assert master.sender.silent_s == 0.0


def test_a_master_that_takes_nothing_is_told_before_the_memory_is_full() -> None:
    sender = RowsSender(lambda number, data: None)
    for number in range(MOST_WAITING_BYTES // 100_000 + 2):
        sender.add(row(number, "x" * 100_000))
        sender.flush()
    assert "takes no rows" in sender.failure
    assert sender.under_way == 0
    sender.add(row(1))
    sender.close()
    assert sender.under_way == 0


def test_an_offset_is_found_between_a_question_and_its_answer() -> None:
    clock = Clock()
    assert clock.error_s is None
    assert clock.adopt() == 0.0
    for late_s in (0.5, 0.002, 0.08):
        clock.add(100.0, 107.0 + 0.001, 100.0 + late_s)
    assert clock.adopt() == pytest.approx(7.0, abs=0.001)
    assert clock.error_s == pytest.approx(0.001)


def test_clocks_that_drift_apart_during_a_load_are_found() -> None:
    clock = Clock()
    clock.add(0.0, 5.0, 0.0)
    clock.adopt()
    clock.add(60.0, 65.3, 60.0)
    clock.add(61.0, 66.0, 61.9)
    assert clock.error_s == pytest.approx(0.3)


def test_an_answer_from_the_future_is_no_measure() -> None:
    clock = Clock()
    clock.add(5.0, 5.0, 4.0)
    assert clock.known == 0


class NoReader:
    """A worker's runner after "quit": it sends, and nobody reads what comes."""

    def __init__(self) -> None:
        self.greenlet = Group()
        self.sent: list[tuple[str, Any]] = []

    def register_message(self, *_: Any, **__: Any) -> None:
        pass

    def send_message(self, kind: str, data: Any) -> None:
        self.sent.append((kind, data))


def test_a_worker_does_not_wait_long_for_a_word_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "DEAF_S", 0.1)
    runner = NoReader()
    line = link.Link(runner)
    rows = line.opens("load", lambda: None, lambda _: None)
    rows.put(LoadNote(0.0, "subject", "text"))
    begun_s = time.monotonic()
    line.drain()
    assert time.monotonic() - begun_s < link.DRAIN_S / 2
    assert [data["number"] for kind, data in runner.sent if kind == link.ROWS] == [1]
