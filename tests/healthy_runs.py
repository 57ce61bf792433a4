"""Healthy Runs of many kinds, made by a seeded generator: no rule may speak of them but the one that a kind names.

``python tests/healthy_runs.py 200`` makes so many of each kind and prints what was said of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from finding_cases import card, on_cards, worker
from made_engine import Ask, Engine, poisson, run_of
from made_run import closed_loop

from pytest_kvcache.analysis.timeline import Analysis

Kind = Callable[[Path, random.Random], Analysis]


def _engine(chance: random.Random, **changes: object) -> Engine:
    """Return a server of a usual size: blocks of 16 or 32, a step of 20 to 80 ms, a pool that its seats do not fill."""
    block = chance.choice((16, 16, 32))
    usual = {"block": block, "usable": 96_000 // block, "step_s": chance.uniform(0.02, 0.08), "seats": chance.choice((16, 32, 64))}
    return Engine(**{**usual, **changes})  # type: ignore[arg-type]


def idle(folder: Path, chance: random.Random) -> Analysis:
    """Nobody asks, or hardly anybody."""
    asks = [Ask(chance.uniform(0, 20), chance.randint(50, 600), chance.randint(5, 60)) for _ in range(chance.randint(0, 2))]
    return run_of(folder, _engine(chance), asks or [Ask(0.0, 100, 4)], hz=2.0, seed=chance.randrange(1 << 30), watched=chance.random() < 0.5)


def light(folder: Path, chance: random.Random) -> Analysis:
    """One request in three or four seats, now and then."""
    return run_of(folder, _engine(chance), poisson(chance.uniform(0.3, 1.0), 15.0, chance), hz=10.0, seed=chance.randrange(1 << 30))


def moderate(folder: Path, chance: random.Random) -> Analysis:
    """Seats taken to three fifths at most, by chance arrivals."""
    engine = _engine(chance)
    mean_s = 70 * engine.step_s
    rate = chance.uniform(0.3, 0.6) * engine.seats / mean_s
    return run_of(folder, engine, poisson(rate, 8.0, chance), hz=10.0, seed=chance.randrange(1 << 30))


def full_but_fine(folder: Path, chance: random.Random) -> Analysis:
    """A closed loop that takes nearly the whole pool, in which everybody has his blocks to the end."""
    engine = _engine(chance, block=16, usable=chance.randint(802, 850), longest=800)
    asks = [Ask(0.02 * user + turn * 44 * engine.step_s, 760, 40) for user in range(16) for turn in range(4)]
    return run_of(folder, engine, asks, hz=10.0, seed=chance.randrange(1 << 30))


def bursty(folder: Path, chance: random.Random) -> Analysis:
    """Bursts that the seats just take, and quiet between them."""
    engine = _engine(chance, budget=16384)
    asks = [
        Ask(start + chance.uniform(0, 0.3), chance.randint(100, 800), chance.randint(20, 60))
        for start in range(0, 16, 4)
        for _ in range(chance.randint(4, 16))
    ]
    return run_of(folder, engine, asks, hz=10.0, seed=chance.randrange(1 << 30))


def short(folder: Path, chance: random.Random) -> Analysis:
    """A load of a second or two: few requests, few looks."""
    engine = _engine(chance)
    asks = [Ask(chance.uniform(0, 1.5), chance.randint(60, 600), chance.randint(8, 30)) for _ in range(chance.randint(1, 8))]
    return run_of(folder, engine, asks, hz=chance.choice((5.0, 10.0)), seed=chance.randrange(1 << 30))


def shared_prompt(folder: Path, chance: random.Random) -> Analysis:
    """A system prompt before every question, with the cache on."""
    length = chance.choice((128, 512, 1024))
    asks = [
        Ask(ask.at_s, length + chance.randint(20, 200), chance.randint(20, 80), "system", length)
        for ask in poisson(chance.uniform(1, 4), 10.0, chance)
    ]
    return run_of(folder, _engine(chance), asks or [Ask(0.0)], hz=10.0, seed=chance.randrange(1 << 30))


def chat_template(folder: Path, chance: random.Random) -> Analysis:
    """Caching off, and nothing shared but the few tokens of a template."""
    asks = [Ask(ask.at_s, ask.prompt, ask.output, "template", chance.choice((8, 16, 32))) for ask in poisson(2.0, 8.0, chance, prompt=(60, 400))]
    return run_of(folder, _engine(chance, caching=False), asks or [Ask(0.0)], hz=10.0, seed=chance.randrange(1 << 30))


def hung_up(folder: Path, chance: random.Random) -> Analysis:
    """Clients that disconnect in the middle of their answers, and an engine that gives everything back."""
    asks = [Ask(ask.at_s, ask.prompt, 200, gone_s=chance.uniform(0.3, 2.0)) for ask in poisson(2.0, 8.0, chance)]
    return run_of(folder, _engine(chance), asks or [Ask(0.0)], hz=10.0, seed=chance.randrange(1 << 30))


def long_answers(folder: Path, chance: random.Random) -> Analysis:
    """Few users with long answers: the level climbs evenly, and nothing is wrong."""
    asks = [Ask(chance.uniform(0, 2), chance.randint(100, 300), chance.randint(300, 500)) for _ in range(chance.randint(1, 4))]
    return run_of(folder, _engine(chance), asks, hz=10.0, seed=chance.randrange(1 << 30), watched=chance.random() < 0.5)


def some_preempted(folder: Path, chance: random.Random) -> Analysis:
    """A busy hour in which one or two of many requests were put back: what a server does to be used well."""
    engine = _engine(chance, block=16, usable=420, seats=16, longest=2048)
    asks = poisson(chance.uniform(4.0, 5.0) * 0.05 / engine.step_s, 8.0, chance, prompt=(100, 500), output=(20, 60))
    return run_of(folder, engine, asks, hz=10.0, seed=chance.randrange(1 << 30))


def in_passing(folder: Path, chance: random.Random) -> Analysis:
    """A server of others that is looked at twice a second, without a log of ours."""
    engine = _engine(chance)
    rate = chance.uniform(0.1, 0.6) * engine.seats / (70 * engine.step_s)
    return run_of(folder, engine, poisson(rate, 12.0, chance), hz=2.0, seed=chance.randrange(1 << 30), watched=True)


def short_chats(folder: Path, chance: random.Random) -> Analysis:
    """Questions and answers of a line or two in blocks of sixteen."""
    asks = poisson(chance.uniform(1.0, 5.0), 8.0, chance, prompt=(40, 120), output=(20, 60))
    return run_of(folder, _engine(chance, block=16, usable=6000), asks or [Ask(0.0)], hz=10.0, seed=chance.randrange(1 << 30))


def an_adapter_loaded(folder: Path, chance: random.Random) -> Analysis:
    """The first requests wait a moment for an adapter or a grammar."""
    asks = [replace(ask, put_off_s=chance.uniform(0.1, 0.5) if number < 2 else 0.0) for number, ask in enumerate(poisson(3.0, 10.0, chance))]
    return run_of(folder, _engine(chance), asks or [Ask(0.0)], hz=10.0, seed=chance.randrange(1 << 30))


def seldom_told(folder: Path, chance: random.Random) -> Analysis:
    """An engine that sets its gauges every ten seconds (LMDeploy), and is watched until they fall."""
    engine = _engine(chance, name="lmdeploy", gauges_s=10.0, block=16)
    asks = poisson(chance.uniform(0.1, 0.5) * engine.seats / (70 * engine.step_s), chance.choice((25.0, 110.0)), chance)
    return run_of(folder, engine, asks, hz=2.0, seed=chance.randrange(1 << 30), watched=True)


def counted_at_the_end(folder: Path, chance: random.Random) -> Analysis:
    """An engine that counts a request's tokens when it ends, and one answer of half a minute."""
    engine = _engine(chance, name="sglang", counts_at_end=True, block=16)
    asks = [Ask(chance.uniform(0, 3), chance.randint(100, 900), int(chance.uniform(20, 40) / engine.step_s))]
    return run_of(folder, engine, asks, hz=2.0, seed=chance.randrange(1 << 30), watched=True)


def a_long_document(folder: Path, chance: random.Random) -> Analysis:
    """One prompt that is read for twenty seconds and more, in which no token is counted."""
    engine = _engine(chance, block=16, usable=30_000, budget=1024, step_s=0.25, longest=160_000)
    return run_of(folder, engine, [Ask(1.0, chance.randint(80_000, 120_000), 20)], hz=2.0, seed=chance.randrange(1 << 30), watched=True)


def fair_replicas(folder: Path, chance: random.Random) -> Analysis:
    """Two or three servers by turns."""
    count, engine = chance.choice((2, 3)), _engine(chance)
    asks = poisson(count * chance.uniform(0.2, 0.5) * engine.seats / (70 * engine.step_s), 8.0, chance)
    parts: list[Sequence[Ask]] = [asks[number::count] for number in range(count)]
    return run_of(folder, engine, *(part or [Ask(0.0)] for part in parts), hz=10.0, seed=chance.randrange(1 << 30))


def replicas_by_chance(folder: Path, chance: random.Random) -> Analysis:
    """Two servers of which each request takes either: with few requests one has most of them for a while."""
    parts: tuple[list[Ask], list[Ask]] = ([], [])
    for ask in poisson(chance.choice((0.5, 1.0, 2.0, 5.0)), chance.choice((8.0, 20.0)), chance):
        parts[chance.randrange(2)].append(ask)
    return run_of(folder, _engine(chance, seats=64), parts[0] or [Ask(0.0)], parts[1] or [Ask(0.0)], hz=10.0, seed=chance.randrange(1 << 30))


def cards(folder: Path, chance: random.Random) -> Analysis:
    """One to four cards of 24 to 141 GiB at the engine's default share: what a profile run, graphs and contexts take, and a monitor beside."""
    total, weights = chance.choice(((24.0, 15.0), (40.0, 15.0), (80.0, 16.0), (80.0, 35.0), (141.0, 70.0)))
    share, count = chance.choice((0.85, 0.9, 0.92)), chance.randint(1, 4)
    held, start = [], []
    activation, graphs, context = chance.uniform(0.4, 1.8), chance.uniform(0.2, 0.8), chance.uniform(0.3, 0.6)
    for number in range(count):
        more = chance.uniform(0.0, 0.9)
        pool = share * total - weights - activation - context - more
        ours = pool + weights + activation + graphs + context + more
        beside = chance.choice((0.0, 0.0, 0.4))
        held.append(card(number, total=total, used=ours + beside, ours=ours, others=beside))
        start.append(worker(number, pool=pool, weights=weights, activation=activation, graphs=graphs, context=context))
    return on_cards(folder, held, start, share, closed_loop(users=4))


KINDS: dict[str, tuple[Kind, frozenset[str]]] = {
    "idle": (idle, frozenset()),
    "light": (light, frozenset()),
    "moderate": (moderate, frozenset()),
    "full but fine": (full_but_fine, frozenset({"lonely-percentage"})),
    "bursty": (bursty, frozenset()),
    "short": (short, frozenset()),
    "shared prompt, cached": (shared_prompt, frozenset()),
    "chat template": (chat_template, frozenset()),
    "clients that hang up": (hung_up, frozenset()),
    "long answers": (long_answers, frozenset()),
    "short chats": (short_chats, frozenset()),
    "an adapter loaded": (an_adapter_loaded, frozenset()),
    "gauges set every ten seconds": (seldom_told, frozenset()),
    "tokens counted at the end": (counted_at_the_end, frozenset()),
    "a long document": (a_long_document, frozenset()),
    "a few preempted": (some_preempted, frozenset({"lonely-percentage"})),
    "in passing": (in_passing, frozenset()),
    "replicas by turns": (fair_replicas, frozenset()),
    "replicas by chance": (replicas_by_chance, frozenset()),
    "cards": (cards, frozenset()),
}
"""Kind -> how a Run of it is made, and the notices that it is there to get."""


def made(kind: str, number: int, folder: Path) -> Analysis:
    """Return the ``number``-th Run of a kind."""
    return KINDS[kind][0](folder / f"{number}-normal", random.Random(f"{kind} {number}"))


if __name__ == "__main__":
    import os
    import sys
    import tempfile
    from collections import Counter

    from pytest_kvcache.analysis.findings import find, read_rules

    old = os.environ.get("RULES_FROM")
    rules = [rule for path in sorted(Path(old).glob("*.toml")) for rule in read_rules(path)] if old else None
    said: dict[str, Counter[str]] = {}
    for kind in sys.argv[2:] or KINDS:
        said[kind] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            for number in range(int(sys.argv[1])):
                found = find(made(kind, number, Path(folder)), rules)
                said[kind].update(one.id for one in found.found)
        print(kind, dict(said[kind]))  # noqa: T201
