"""A paged engine by arithmetic, step by step as vLLM schedules: seats, blocks, a step's tokens, prefix cache, preemption. It makes Runs.

What a finding rests on (gauges that are polled at any phase of a step, counters, a client's log) is then made by a cause that is known: a
load and an engine, and not by figures that were written to fit a rule.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from made_run import T0, MadeRun, request, snapshot

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.records import RequestRow, TelemetryRow


@dataclass(frozen=True)
class Ask:
    """One request: when it comes, its prompt and answer in tokens, and the text that its prompt begins with. ``gone_s``: its client hangs up so
    long after; ``put_off_s``: what it needs beside blocks and a seat (an adapter, a grammar) is there so long after."""

    at_s: float
    prompt: int = 300
    output: int = 60
    prefix: str = ""
    prefix_tokens: int = 0
    gone_s: float = math.inf
    put_off_s: float = 0.0


@dataclass(frozen=True)
class Engine:
    """What is served, and by which engine's rules its counters are read. ``reserve``: each request holds this length whatever it has; ``fixed``: so
    many tokens of room on top (state layers); ``forgets``: the share of cached prefixes that others take before they are asked for again; ``leaks``:
    blocks that a hung-up client leaves behind; ``gauges_s``: its gauges are set so seldom; ``counts_at_end``: a request's tokens are counted when
    it ends."""

    name: str = "vllm"
    usable: int = 4000
    block: int = 16
    seats: int = 16
    budget: int = 8192
    step_s: float = 0.05
    caching: bool = True
    forgets: float = 0.0
    reserve: int = 0
    fixed: int = 0
    leaks: int = 0
    longest: int = 8192
    gauges_s: float = 0.0
    counts_at_end: bool = False


@dataclass
class _Live:
    number: int
    ask: Ask
    computed: int = 0
    made: int = 0
    blocks: int = 0
    shared: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    gap_s: float = 0.0
    gap_at_s: float | None = None
    end_s: float = 0.0
    done: bool = False


@dataclass
class Served:
    """What came of it: the client's rows, the server's gauges at the end of each step (``at_s`` and the values), and its counters."""

    rows: list[RequestRow]
    at_s: list[float] = field(default_factory=list)
    told: list[dict[str, float]] = field(default_factory=list)


class _Server:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.running: list[_Live] = []
        self.waiting: list[_Live] = []
        self.cached: set[str] = set()
        self.lost = 0
        self.count = dict.fromkeys(("preemptions", "prefix_hits", "prefix_queries", "prompt_tokens", "generation_tokens", "finished"), 0.0)

    def used(self) -> int:
        texts: dict[str, int] = {}
        for one in self.running:
            if one.shared:
                texts[one.ask.prefix] = max(texts.get(one.ask.prefix, 0), one.shared)
        return sum(one.blocks - one.shared for one in self.running) + sum(texts.values()) + self.lost

    def _need(self, tokens: int) -> int:
        engine = self.engine
        return math.ceil((max(tokens, engine.reserve) + engine.fixed) / engine.block)

    def _takes(self, one: _Live, tokens: int) -> bool:
        """Give a request the blocks of so many tokens; False where there are none left."""
        more = self._need(tokens) - one.blocks
        if more > self.engine.usable - self.used():
            return False
        one.blocks += max(more, 0)
        return True

    def _release(self, one: _Live) -> None:
        one.blocks = one.shared = one.computed = 0

    def step(self, now: float, end: float) -> None:
        """Schedule one step, and hand out what it made at ``end``."""
        left = self.engine.budget
        put_back = False
        work: list[tuple[_Live, int]] = []
        for one in list(self.running):
            if one not in self.running:
                continue
            chunk = min(one.ask.prompt + one.made - one.computed, left)
            while chunk and not self._takes(one, one.computed + chunk):
                victim = self.running.pop()
                self._release(victim)
                work = [(other, size) for other, size in work if other is not victim]
                self.waiting.insert(0, victim)
                self.count["preemptions"] += 1
                put_back = True
                if victim is one:
                    chunk = 0
            if chunk:
                work.append((one, chunk))
                left -= chunk
        while not put_back and left > 0 and len(self.running) < self.engine.seats:
            ready = [one for one in self.waiting if now >= one.ask.at_s + one.ask.put_off_s]
            if not ready:
                break
            one = ready[0]
            hit = self._hit(one)
            chunk = min(one.ask.prompt + one.made - hit, left)
            one.blocks = one.shared = hit // self.engine.block
            self.running.append(one)
            if not self._takes(one, hit + chunk):
                self.running.pop()
                self._release(one)
                break
            self.waiting.remove(one)
            self.count["prefix_hits"] += hit
            self.count["prefix_queries"] += one.ask.prompt if self.engine.caching else 0
            one.computed = hit
            work.append((one, chunk))
            left -= chunk
        for one, chunk in work:
            self._advance(one, chunk, end)

    def _hit(self, one: _Live) -> int:
        """Return how many leading tokens the cache gives; those who come later find what this one writes."""
        engine, ask = self.engine, one.ask
        if not engine.caching or not ask.prefix or one.made:
            return 0
        there = ask.prefix in self.cached and one.number % 10 >= engine.forgets * 10
        self.cached.add(ask.prefix)
        return min(ask.prefix_tokens, ask.prompt - 1) // engine.block * engine.block if there else 0

    def _advance(self, one: _Live, chunk: int, end: float) -> None:
        one.computed += chunk
        if one.computed < one.ask.prompt + one.made:
            return
        if not one.made:
            self.count["prompt_tokens"] += 0 if self.engine.counts_at_end else one.ask.prompt
            one.first_s = one.last_s = end
        if end - one.last_s > one.gap_s:
            one.gap_s, one.gap_at_s = end - one.last_s, one.last_s
        one.last_s = end
        one.made += 1
        self.count["generation_tokens"] += 0 if self.engine.counts_at_end else 1
        if one.made >= one.ask.output:
            self._ends(one, end)
            self.count["finished"] += 1
            if self.engine.counts_at_end:
                self.count["prompt_tokens"] += one.ask.prompt
                self.count["generation_tokens"] += one.made

    def _ends(self, one: _Live, end: float) -> None:
        one.end_s, one.done = end, True
        self._release(one)
        if one in self.running:
            self.running.remove(one)

    def hang_up(self, now: float) -> None:
        for one in [*self.running, *self.waiting]:
            if now >= one.ask.at_s + one.ask.gone_s:
                self.lost += min(self.engine.leaks, one.blocks)
                self._ends(one, now)
                if one in self.waiting:
                    self.waiting.remove(one)


def serve(engine: Engine, asks: Sequence[Ask], *, most_s: float = 120.0) -> Served:
    """Return what a server does with these requests, until all have ended (or ``most_s``) and three seconds more."""
    server, come = _Server(engine), sorted(asks, key=lambda ask: ask.at_s)
    lives = [_Live(number, ask) for number, ask in enumerate(come)]
    found = Served([])
    now, begun, calm, idle_s, told_s = -0.3, 0, 0.0, 3.0 + engine.gauges_s, -math.inf
    while now < most_s and calm < idle_s:
        end = now + engine.step_s
        while begun < len(lives) and lives[begun].ask.at_s <= now:
            server.waiting.append(lives[begun])
            begun += 1
        server.hang_up(now)
        server.step(now, end)
        used = server.used()
        found.at_s.append(end)
        gauges = {"used_blocks": float(used), "free_blocks": float(engine.usable - used), "usage": used / engine.usable}
        capacity = sum(now >= one.ask.at_s + one.ask.put_off_s for one in server.waiting)
        gauges |= {"running": float(len(server.running)), "waiting": float(len(server.waiting)), "waiting_capacity": float(capacity)}
        if end - told_s < engine.gauges_s:
            gauges = {name: found.told[-1][name] for name in gauges}
        else:
            told_s = end
        found.told.append({**gauges, **server.count})
        calm = calm + engine.step_s if begun == len(lives) and not server.running and not server.waiting else 0.0
        now = end
    found.rows = [_row(one, now) for one in lives if one.ask.at_s <= now]
    return found


def _row(one: _Live, now: float) -> RequestRow:
    ask = one.ask
    changes: dict[str, Any] = {"prefix_id": ask.prefix, "prefix_tokens": ask.prefix_tokens if ask.prefix else None}
    end = one.end_s or now
    if one.first_s is None or one.made < ask.output:
        changes |= {"outcome": "timeout", "finish_reason": "", "completion_tokens": None, "chunks": one.made, "status": 200 if one.made else 0}
    row = request(one.number, ask.at_s, prompt=ask.prompt, output=ask.output, length_s=end - ask.at_s)
    first = T0 + one.first_s if one.first_s is not None else None
    gap_at = T0 + one.gap_at_s if one.gap_at_s is not None else None
    return msgspec.structs.replace(row, first_token_s=first, longest_gap_s=one.gap_s, longest_gap_at_s=gap_at, **changes)


def polled(served: Served, hz: float, seed: int, endpoint: int = 0) -> list[TelemetryRow]:
    """Return the looks of a sampler at any phase of the steps: each reads the step that ended before it."""
    chance, at, index, looks = random.Random(seed), served.at_s[0], 0, []
    while at < served.at_s[-1]:
        while index + 1 < len(served.at_s) and served.at_s[index + 1] <= at:
            index += 1
        values = {**served.told[index], "rejections": 0.0, "start_time": T0 - 100}
        looks.append(TelemetryRow(wall_s=T0 + at, values=values, read_s=0.002, endpoint=endpoint))
        at += (1.0 / hz) * chance.uniform(0.9, 1.1)
    return looks


COUNTED = ("preemptions", "prefix_hits", "prefix_queries", "prompt_tokens", "generation_tokens", "finished")


def stated(engine: Engine, wall_s: float, last: dict[str, float] | None = None, **more: Any) -> Any:
    """Return what the idle server states, with its counters."""
    counters = {name: (last or {}).get(name, 0.0) for name in COUNTED}
    about = {"block_size": engine.block, "max_num_seqs": engine.seats, "max_model_len": engine.longest, "prefix_caching": engine.caching}
    left = {name: (last or {}).get(name, 0.0) for name in ("used_blocks", "usage")}
    return snapshot(wall_s, usable=engine.usable, **{**about, "pool_tokens": (engine.usable + 1) * engine.block, **left, **counters, **more})


def run_of(folder: Path, engine: Engine, *asks: Sequence[Ask], hz: float = 10.0, seed: int = 0, watched: bool = False, **record: Any) -> Analysis:
    """Return the Analysis of one server's Run, or of as many alike servers' as lists are given. ``watched``: no log of ours."""
    done = [serve(engine, part) for part in asks]
    rows: list[RequestRow] = []
    looks: list[TelemetryRow] = []
    for number, one in enumerate(done):
        rows += [msgspec.structs.replace(row, endpoint=number) for row in one.rows]
        looks += polled(one, hz, seed + number, number)
    looks.sort(key=lambda look: look.wall_s)
    rows = [msgspec.structs.replace(row, id=number) for number, row in enumerate(sorted(rows, key=lambda row: row.sent_s))]
    until = max(one.at_s[-1] for one in done)
    before = [stated(engine, T0 - 0.5) for _ in done]
    after = [stated(engine, T0 + until + 0.5, one.told[-1]) for one in done]
    if watched or not rows:
        record = {"load_started_wall_s": T0 - 0.3, "load_ended_wall_s": T0 + until, **record}
        rows = []
    made = MadeRun(rows=rows, samples=looks, before=before, after=after, hz=hz, record={"engine": engine.name, **record})
    return analyse(made.write(folder))


def poisson(
    rate: float, seconds: float, chance: random.Random, *, prompt: tuple[int, int] = (100, 900), output: tuple[int, int] = (20, 120)
) -> list[Ask]:
    """Return requests that come by chance, ``rate`` a second, of even lengths between two bounds."""
    found, at = [], chance.expovariate(rate)
    while at < seconds:
        found.append(Ask(at, chance.randint(*prompt), chance.randint(*output)))
        at += chance.expovariate(rate)
    return found
