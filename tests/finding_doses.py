"""For each rule its cause in rising doses: below a stated dose the rule is silent, from it on it speaks, and its rivals never do.

``python tests/finding_doses.py docs/diagnose.md`` writes the table of that page again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finding_cases import busy, card, climbing, made, on_cards, prefix_run, tail, worker
from made_engine import Ask, Engine, poisson, run_of
from made_run import request

from pytest_kvcache.analysis.timeline import Analysis

Make = Callable[[Path, float], Analysis]


@dataclass(frozen=True)
class Dose:
    """The doses of one cause (``what`` is one), rising; from ``speaks`` on the rule does. ``beside`` are rules that the same cause is known to wake.

    ``scale`` and ``unit`` are for people.
    """

    rule: str
    what: str
    doses: tuple[float, ...]
    speaks: float
    make: Make
    beside: frozenset[str] = frozenset()
    unit: str = ""
    percent: bool = False

    def show(self, dose: float) -> str:
        """Return a dose as people write it."""
        return f"{dose * 100:g} %" if self.percent else f"{dose:g}{' ' + self.unit if self.unit else ''}"


def beside(text: str) -> frozenset[str]:
    return frozenset(text.split())


def loop(users: int, turns: int, every_s: float, prompt: int, output: int) -> list[Ask]:
    """Return the requests of users who ask again at fixed times."""
    return [Ask(0.07 * user + turn * every_s, prompt, output) for user in range(users) for turn in range(turns)]


def squeezed(folder: Path, lacking: float) -> Analysis:
    return on_cards(folder, [card(used=72 - lacking + 1, ours=72 - lacking + 1)], [worker(pool=58 - lacking, weights=14)])


def foreign(folder: Path, others: float) -> Analysis:
    return on_cards(folder, [card(used=60 + others, ours=60, others=others)], [worker(pool=56, weights=14)], 0.92)


def share(folder: Path, utilization: float) -> Analysis:
    """Two GiB of graphs come on top of the share."""
    ours = utilization * 80 + 2
    return on_cards(folder, [card(used=ours, ours=ours)], [worker(pool=utilization * 80 - 15, weights=14, context=1)], utilization)


def blocks_of(folder: Path, block: float) -> Analysis:
    """Requests of twelve to twenty tokens."""
    engine = Engine(block=int(block), usable=2000, longest=1024)
    return run_of(folder, engine, loop(8, 6, 0.6, 12, 8))


def longest(folder: Path, length: float) -> Analysis:
    """One request in eight has this length, the others 256 tokens, and each is given room for the longest."""
    asks = [Ask(0.07 * n + 3.2 * turn, int(length) - 56 if n == 0 else 200, 56) for n in range(8) for turn in range(3)]
    return run_of(folder, Engine(reserve=int(length), usable=4000), asks)


def sliced(folder: Path, fixed: float) -> Analysis:
    return run_of(folder, Engine(fixed=int(fixed), usable=8000), loop(6, 3, 3.2, 260, 60))


def repeated(caching: bool, forgets: float = 0.0) -> Make:
    def make(folder: Path, tokens: float) -> Analysis:
        asks = [Ask(0.11 * n, 400, 20, "system", int(tokens)) for n in range(60)]
        return run_of(folder, Engine(caching=caching, forgets=forgets), asks)

    return make


def forgotten(folder: Path, lost: float) -> Analysis:
    return repeated(True, lost)(folder, 256.0)


def own_hits(folder: Path, hits: float) -> Analysis:
    rows = [request(i, 0.01 * i, length_s=3.0, prefix_id=f"own{i}", prefix_tokens=100) for i in range(5)]
    return prefix_run(folder, rows, hits, caching=True, preemptions=3.0)


def prompts(folder: Path, length: float) -> Analysis:
    asks = [Ask(0.3 * n, int(length), 3) for n in range(16)]
    return run_of(folder, Engine(budget=512, usable=180, longest=2048, seats=4), asks)


def offered(folder: Path, load: float) -> Analysis:
    """Requests that come by chance, over what eight seats can serve."""
    engine = Engine(seats=8)
    return run_of(folder, engine, poisson(load * 8 / (71 * engine.step_s), 30.0, random.Random(7)))


def pressed(prompt: int, output: int) -> Make:
    """Twelve users in a closed loop, and a pool that is smaller than what they need by ``need``."""

    def make(folder: Path, need: float) -> Analysis:
        blocks = 12 * -(-(prompt + output) // 16)
        engine = Engine(usable=int(blocks / need), longest=1024)
        return run_of(folder, engine, loop(12, 4, (output + 4) * engine.step_s * max(need, 1.0), prompt, output))

    return make


def budget(folder: Path, load: float) -> Analysis:
    """Prompts of 2,000 tokens, over the tokens that the steps have."""
    engine = Engine(budget=512, seats=64, usable=12_000)
    rate = load * engine.budget / engine.step_s / 2000
    return run_of(folder, engine, poisson(rate, 10.0, random.Random(3), prompt=(1800, 2200), output=(10, 30)))


def of_looks(**state: float) -> Make:
    """A watched server that is in a state for a share of the looks, two seconds at a time."""

    def make(folder: Path, part: float) -> Analysis:
        def each(i: int) -> dict[str, Any]:
            on = (i % 40) < part * 40
            return busy(0.4, 4.0, 3.0 if on else 0.0, generation_tokens=5.0 * i, **({name: value if on else 0.0 for name, value in state.items()}))

        return made(folder, (), each, seconds=16.0)

    return make


def nearmax(folder: Path, part: float) -> Analysis:
    """A pool of 6,400 tokens, half of which usual traffic holds, and a longest length that is this share of it."""
    return run_of(folder, Engine(usable=400, longest=int(part * 6400)), loop(7, 3, 3.2, 400, 60))


def standing(**values: float) -> Make:
    """A server whose counters stand for so many seconds while it says this."""

    def make(folder: Path, seconds: float) -> Analysis:
        def each(i: int) -> dict[str, Any]:
            moves = i if i / 4 <= 10.0 else max(40, i - int(seconds * 4))
            still = 10.0 < i / 4 <= 10.0 + seconds
            state = busy(0.1, values["running"] if still else 4.0, values["waiting"] if still else 0.0)
            return {**state, "generation_tokens": 100.0 * moves, "prompt_tokens": 10.0}

        return made(folder, (), each, seconds=30 + seconds, hz=4)

    return make


def climb(folder: Path, tokens: float) -> Analysis:
    """One request of somebody's, at 128 tokens a second."""
    return made(folder, (), climbing(0.0), seconds=tokens / 128 + 2, hz=4, usable=4000, before={"max_model_len": 4096})


def left_behind(folder: Path, blocks: float) -> Analysis:
    asks = [Ask(0.3 * n, 300, 100, gone_s=1.0 if n % 3 else 99.0) for n in range(12)]
    return run_of(folder, Engine(leaks=int(blocks)), asks)


def stale(folder: Path, seconds: float) -> Analysis:
    """After the load running stays up, and no token is counted."""
    return made(
        folder,
        None,
        lambda i: {"generation_tokens": 20.0 * min(i, 43), **tail(4.1, running=24.0)(i)},
        seconds=4.2 + seconds,
        before={"generation_tokens": 0.0},
        after={"generation_tokens": 860.0},
    )


def elsewhere(folder: Path, part: float) -> Analysis:
    counted = 800.0 * (1 - part)
    each = lambda i: {"generation_tokens": round(counted * min(max(i - 4, 0) / 40, 1.0))}  # noqa: E731
    return made(folder, None, each, before={"generation_tokens": 0.0}, after={"generation_tokens": counted})


def level(folder: Path, usage: float) -> Analysis:
    return made(folder, None, busy(usage, 4.0, 0.0), before={"max_model_len": 256})


def apart(folder: Path, gib: float) -> Analysis:
    cards = [card(number, used=72 - gib * number, ours=72 - gib * number) for number in range(2)]
    return on_cards(folder, cards, [worker(number, pool=56 - gib, weights=14) for number in range(2)], (72 - gib) / 80)


def sticky(folder: Path, part: float) -> Analysis:
    """Two servers, and this share of the requests goes to the first."""
    chance = random.Random(5)
    asks = poisson(5.0, 20.0, chance)
    parts: tuple[list[Ask], list[Ask]] = ([], [])
    for number, ask in enumerate(asks):
        parts[(number * 0.618) % 1 >= part].append(ask)
    return run_of(folder, Engine(seats=32), parts[0], parts[1] or [Ask(19.0, 20, 1)])


def alone(folder: Path, seconds: float) -> Analysis:
    """One request waits beside an empty pool for so long, and then its client gives up."""

    def each(i: int) -> dict[str, Any]:
        return {**busy(0.0, 0.0, float(i / 4 <= seconds)), "generation_tokens": 100.0, "prompt_tokens": 10.0}

    return made(folder, (), each, seconds=seconds + 5, hz=4)


def above_the_pool(folder: Path, part: float) -> Analysis:
    return run_of(folder, Engine(usable=400, longest=int(part * 6400)), loop(1, 3, 1.2, 60, 8))


def shrunk(folder: Path, part: float) -> Analysis:
    return made(folder, usable=round(1000 * (1 - part)))


DOSES: tuple[Dose, ...] = (
    Dose("squeezed-pool", "memory that the pool lacks, of 58 GiB", (0, 2, 5, 8, 18, 40), 8, squeezed, unit="GiB"),
    Dose("foreign-memory", "memory of other processes on the card", (0, 0.5, 1, 2.3, 10), 1, foreign, unit="GiB"),
    Dose("over-utilization", "share of a card of 80 GiB, 2 GiB of graphs on top", (0.85, 0.9, 0.92, 0.93, 0.95), 0.93, share),
    Dose("hollow-usage", "block size under requests of 12 to 20 tokens", (8, 16, 32, 64, 128), 32, blocks_of, beside("fragments"), "tokens"),
    Dose("fragments", "block size under requests of 12 to 20 tokens", (8, 16, 32, 64, 128), 16, blocks_of, beside("hollow-usage"), "tokens"),
    Dose("padding", "length of one request in eight, the others 256", (256, 512, 1024, 2048), 1024, longest, beside("hollow-usage"), "tokens"),
    Dose("fixed-slice", "room on top of 260 to 320 tokens", (0, 200, 1000, 4000), 1000, sliced, beside("hollow-usage"), "tokens"),
    Dose(
        "long-shared-prompt",
        "shared part of prompts of 400 tokens, cache off",
        (0, 32, 64, 160, 320),
        160,
        repeated(False),
        beside("prefix-cache-off"),
        "tokens",
    ),
    Dose(
        "prefix-cache-off", "shared part of prompts of 400 tokens", (0, 32, 64, 160, 320), 64, repeated(False), beside("long-shared-prompt"), "tokens"
    ),
    Dose(
        "prefix-cache-thrashing",
        "cached prefixes lost before their use",
        (0, 0.3, 0.5, 0.8, 1),
        0.8,
        forgotten,
        beside("long-shared-prompt"),
        percent=True,
    ),
    Dose(
        "recomputed-hits", "hits without a repeated prompt, of 800 looked up", (0, 64, 160, 256), 160, own_hits, beside("preemption-storm"), "tokens"
    ),
    Dose(
        "prefill-peak",
        "prompt length beside answers of 3 tokens",
        (100, 400, 1000, 2000),
        2000,
        prompts,
        beside("token-budget-bound campaign-day"),
        "tokens",
    ),
    Dose("seat-bound", "load that comes over what 8 seats serve", (0.4, 0.6, 0.75, 1.0, 1.3), 1.0, offered),
    Dose(
        "kv-bound",
        "need of the live requests over the pool",
        (0.5, 0.8, 1.5, 2.0),
        1.5,
        pressed(400, 40),
        beside("true-fullness preemption-storm campaign-day lonely-percentage"),
    ),
    Dose(
        "true-fullness",
        "need of the live requests over the pool",
        (0.5, 0.8, 1.5, 2.0),
        1.5,
        pressed(400, 40),
        beside("kv-bound preemption-storm campaign-day lonely-percentage"),
    ),
    Dose(
        "preemption-storm",
        "need of the live requests over the pool",
        (0.5, 0.8, 1.5, 2.0),
        1.5,
        pressed(100, 200),
        beside("kv-bound true-fullness campaign-day lonely-percentage"),
    ),
    Dose("token-budget-bound", "prompt tokens that come over those of the steps", (0.3, 0.6, 1.2, 2.0), 1.2, budget, beside("prefill-peak")),
    Dose("waiting-beside-free", "share of the looks with requests waiting", (0, 0.2, 0.4, 0.8), 0.4, of_looks(), percent=True),
    Dose("deferred-waiting", "share of the looks with requests put off", (0, 0.05, 0.2, 0.8), 0.2, of_looks(waiting_capacity=0.0), percent=True),
    Dose("campaign-day", "longest length over the pool, half of it in use", (0.1, 0.25, 0.4, 0.7, 0.9), 0.7, nearmax, percent=True),
    Dose(
        "longer-than-the-pool", "longest length over the pool", (0.5, 0.9, 1.0, 1.1, 2.0), 1.1, above_the_pool, beside("campaign-day"), percent=True
    ),
    Dose("never-admitted", "time in which one request waits beside an empty pool", (0, 5, 9, 12, 60), 12, alone, unit="s"),
    Dose("stuck-queue", "time in which requests wait and nothing moves", (0, 5, 9, 12, 60), 12, standing(running=1.0, waiting=5.0), unit="s"),
    Dose("runaway-generation", "rise of the level by one request that does not end", (500, 2000, 3500, 5000, 10_000), 5000, climb, unit="tokens"),
    Dose("leak", "blocks left behind by each client that hangs up", (0, 1, 5), 1, left_behind, unit="blocks"),
    Dose("stale-gauge", "time in which running stands and no token is counted", (0, 4, 7, 9, 30), 9, stale, unit="s"),
    Dose("wrong-endpoint", "share of our tokens that other servers made", (0, 0.1, 0.15, 0.25, 0.5, 1), 0.25, elsewhere, percent=True),
    Dose("lonely-percentage", "peak usage with nobody waiting", (0.3, 0.6, 0.8, 0.86, 0.97), 0.86, level, percent=True),
    Dose("gpu-imbalance", "distance between the cards of one server", (0, 1, 3, 4, 8, 31), 4, apart, unit="GiB"),
    Dose("replica-imbalance", "share of the requests on one of two", (0.5, 0.55, 0.6, 0.85, 1.0), 0.85, sticky, percent=True),
    Dose("pool-changed", "blocks lost by a restart", (0, 0.005, 0.01, 0.02, 0.2), 0.02, shrunk, percent=True),
)


def baseline_of(rule: str, folder: Path) -> Analysis | None:
    return made(folder / "baseline", usable=1000) if rule == "pool-changed" else None


def said(dose: Dose, folder: Path) -> Iterable[tuple[float, set[str]]]:
    """Yield each dose with the rules that speak at it."""
    from pytest_kvcache.analysis.findings import find

    baseline = baseline_of(dose.rule, folder)
    for number, size in enumerate(dose.doses):
        found = find(dose.make(folder / f"{number}-normal", size), baseline=baseline)
        yield size, {one.id for one in found.found}


BEGIN, END = "<!-- doses -->\n", "<!-- end of doses -->"


def row(dose: Dose) -> str:
    """Return the row of a rule in the table of docs/diagnose.md."""
    from pytest_kvcache.analysis.findings import shipped_rules

    rule = next(one for one in shipped_rules() if one.id == dose.rule)
    below = max(size for size in dose.doses if size < dose.speaks)
    condition = rule.condition.replace("|", "\\|")
    return f"| [{rule.id}](troubleshooting.md#{rule.id}) | `{condition}` | {dose.what} | {dose.show(below)} | {dose.show(dose.speaks)} |"


def table() -> str:
    """Return the table."""
    head = "| rule | speaks where | raised | silent at | speaks from |\n|---|---|---|---|---|\n"
    return head + "".join(row(dose) + "\n" for dose in DOSES)


if __name__ == "__main__":
    import sys
    import tempfile

    if len(sys.argv) > 1 and sys.argv[1].endswith(".md"):
        page = Path(sys.argv[1])
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
        sys.exit()
    for dose in DOSES:
        if len(sys.argv) > 1 and dose.rule not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for size, ids in said(dose, Path(folder)):
                wrong = "ok   " if (dose.rule in ids) == (size >= dose.speaks) else "WRONG"
                print(wrong, dose.rule, dose.show(size), sorted(ids - {dose.rule}), "" if ids - {dose.rule} <= dose.beside else "RIVAL")  # noqa: T201
