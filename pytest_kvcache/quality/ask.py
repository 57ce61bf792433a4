"""Asking quality items: a few at a time, greedy, each answer graded and written as it comes."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import msgspec

from pytest_kvcache.errors import CannotWrite, EndpointUnreachable, UsageError
from pytest_kvcache.quality.graders import LONGEST_ANSWER, MARKED, grade, is_garbage, summarise
from pytest_kvcache.quality.items import Item
from pytest_kvcache.quality.marking import MarkingProcess
from pytest_kvcache.quality.patterns import PatternProcess
from pytest_kvcache.records import QualityRow, QualitySummary
from pytest_kvcache.runfolder import encode_line
from pytest_kvcache.server.endpoint import Endpoint, complete

DEADLINE_S = 3600.0
GIVE_UP_AFTER = 8
"""This many items in a row without any answer from the address, and the server is taken to be gone."""

_JOIN_S = 0.2


def ask_items(
    endpoint: Endpoint,
    items: Sequence[Item],
    path: Path,
    *,
    keep_text: bool = False,
    concurrency: int = 4,
    timeout_s: float = 300.0,
    deadline_s: float = DEADLINE_S,
    replica: int = 0,
    append: bool = False,
    part: str = "",
    first: Callable[[Item, httpx.Client], str] | None = None,
) -> QualitySummary:
    """Ask each item once and return the pass counts. One QualityRow an item is written to ``path`` as its answer comes.

    At most ``concurrency`` items are under way, and together they hold no more tokens than the longest one alone: items that fit the
    server one by one must not fill its pool together. ``replica`` is the endpoint's number in the rows; ``append`` keeps earlier rows; ``part`` is
    that of the rows. ``first`` is called before an item is asked and says what is wrong already, "" where nothing is: then the item did not pass.

    An item that gets no answer in ``timeout_s`` seconds, or an error, is a row with ``error``: asked and not passed. So are those
    not asked when ``deadline_s`` seconds have passed. Prompts and answers are kept only with ``keep_text``; their hashes always.
    Raises EndpointUnreachable where nobody answers any more (the rows until then are kept), CannotWrite, and UsageError for
    chat messages asked through the completions API.
    """
    if endpoint.api != "chat" and any(not isinstance(item.prompt, str) for item in items):
        raise UsageError("quality items with chat messages need the chat API", where=endpoint.shown, hint="--kv-api chat, or prompts that are texts")
    asking = _Asking(endpoint, items, keep_text, timeout_s, time.monotonic() + deadline_s, replica, part, first)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            path.open("ab" if append else "wb") as file,
            endpoint.client(timeout_s) as client,
            PatternProcess() as patterns,
            MarkingProcess() as marks,
        ):
            asking.marks = marks
            asking.run(file, client, patterns, max(1, min(concurrency, len(items))))
    except OSError as error:
        raise CannotWrite(
            f"cannot write the quality rows: {error.strerror or error}", where=str(path), hint="free space or check permissions"
        ) from None
    return summarise(asking.rows)


class _Asking:
    def __init__(
        self,
        endpoint: Endpoint,
        items: Sequence[Item],
        keep_text: bool,
        timeout_s: float,
        deadline: float,
        replica: int,
        part: str,
        first: Callable[[Item, httpx.Client], str] | None,
    ) -> None:
        self.endpoint = endpoint
        self.part = part
        self.first = first
        self.marks: MarkingProcess | None = None
        self.replica = replica
        self._longest_tokens = max((item.length_tokens for item in items), default=0)
        self._held_tokens = 0
        self._room = threading.Condition()
        self.keep_text = keep_text
        self.timeout_s = timeout_s
        self.deadline = deadline
        self.rows: list[QualityRow] = []
        self._todo: queue.SimpleQueue[Item] = queue.SimpleQueue()
        # the longest first: otherwise one long prompt, asked last, keeps everybody waiting
        for item in sorted(items, key=lambda item: -item.length_tokens):
            self._todo.put(item)
        self._lock = threading.Lock()
        self._unanswered = 0
        self._failure: BaseException | None = None
        self._stop = threading.Event()

    def run(self, file: BinaryIO, client: httpx.Client, patterns: PatternProcess, concurrency: int) -> None:
        # daemon threads: a server that never answers must not keep the interpreter from ending on Ctrl-C
        threads = [
            threading.Thread(target=self._work, args=(file, client, patterns), name=f"kv-quality-{i}", daemon=True) for i in range(concurrency)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(_JOIN_S)
        finally:
            self._stop.set()
            if any(thread.is_alive() for thread in threads):
                client.close()
                for thread in threads:
                    thread.join(5.0)
        if self._failure is not None:
            raise self._failure

    def _work(self, file: BinaryIO, client: httpx.Client, patterns: PatternProcess) -> None:
        while not self._stop.is_set():
            try:
                item = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                if not self._take_room(item.length_tokens):
                    return
                try:
                    row = self._ask(item, client, patterns)
                finally:
                    self._give_room(item.length_tokens)
                with self._lock:
                    if self._stop.is_set():
                        return
                    file.write(encode_line(row))
                    file.flush()
                    self.rows.append(row)
            except BaseException as error:
                self._failure = self._failure or error
                self._stop.set()

    def _take_room(self, tokens: int) -> bool:
        """Wait until ``tokens`` more may be under way; False where the asking was stopped meanwhile."""
        with self._room:
            while self._held_tokens + tokens > self._longest_tokens and not self._stop.is_set():
                self._room.wait(_JOIN_S)
            self._held_tokens += tokens
            return not self._stop.is_set()

    def _give_room(self, tokens: int) -> None:
        with self._room:
            self._held_tokens -= tokens
            self._room.notify_all()

    def _ask(self, item: Item, client: httpx.Client, patterns: PatternProcess) -> QualityRow:
        wall_s, began = time.time(), time.monotonic()
        left = self.deadline - began
        if left <= 0:
            return self._row(item, wall_s, error="not asked: the quality set took too long")
        body: dict[str, Any] = {} if isinstance(item.prompt, str) else {"messages": list(item.prompt)}
        prompt = item.prompt if isinstance(item.prompt, str) else ""
        try:
            before = self.first(item, client) if self.first is not None else ""
            done = complete(self.endpoint, prompt, item.max_tokens, timeout_s=min(self.timeout_s, left), client=client, **body)
        except EndpointUnreachable as gone:
            with self._lock:
                self._unanswered += 1
                if self._unanswered >= GIVE_UP_AFTER:
                    raise
            return self._row(item, wall_s, error=gone.what, latency_s=time.monotonic() - began)
        self._unanswered = 0
        answer = done.text[:LONGEST_ANSWER]
        error = "" if done.status == 200 and not done.error else done.error or f"HTTP {done.status}"
        passed: bool | None = False
        if not error and item.match in MARKED and self.marks is not None and answer.strip():
            passed, error = self.marks.mark(item, answer)
        elif not error and item.match not in MARKED:
            passed = grade(item, answer, patterns.search)
            if passed is None:
                error = "the pattern took too long on this answer"
        row = self._row(item, wall_s, bool(passed) and not before, error[:500], done.prompt_tokens, done.latency_s, answer)
        return msgspec.structs.replace(row, note=row.note or before) if before else row

    def _row(
        self,
        item: Item,
        wall_s: float,
        passed: bool = False,
        error: str = "",
        prompt_tokens: int | None = None,
        latency_s: float = 0.0,
        answer: str = "",
    ) -> QualityRow:
        return QualityRow(
            item=item.id,
            part=self.part,
            endpoint=self.replica,
            passed=passed,
            wall_s=wall_s,
            length_tokens=item.length_tokens or _bucket(prompt_tokens),
            depth=item.depth,
            match=item.match,
            error=error,
            expected_hash=digest(item),
            answer_hash=_hash(answer),
            note="one character repeated" if is_garbage(answer) else "",
            prompt_tokens=prompt_tokens,
            latency_s=latency_s,
            prompt=_text(item) if self.keep_text else None,
            answer=answer if self.keep_text else None,
        )


def digest(item: Item) -> str:
    """Return a hash over what an item asks and expects: items of one id are the same item only where it is equal."""
    more = (repr(item.tolerance), *item.choices) if item.tolerance or item.choices else ()
    return _hash("\0".join((_text(item), item.expect, item.match, str(item.max_tokens), *more)))


def _text(item: Item) -> str:
    return item.prompt if isinstance(item.prompt, str) else json.dumps([dict(message) for message in item.prompt], ensure_ascii=False)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _bucket(prompt_tokens: int | None) -> int:
    """Return the power of two at or above the prompt's length, so that items of unknown length group; 0 where it is not told."""
    return 1 << (prompt_tokens - 1).bit_length() if prompt_tokens else 0
