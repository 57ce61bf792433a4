"""The gate's own error rates: how often a whole verdict is wrong, by simulation of what a comparison measures.

    python benchmarks/operating_curve.py                    the table, in a few minutes
    python benchmarks/operating_curve.py --trials 200       the same, coarser
    python benchmarks/operating_curve.py --write docs       writes docs/operating-curve.md and .svg again
    python benchmarks/operating_curve.py --chosen           only the part in which the spread chooses the repeats

Each trial makes the windows of both sides of an experiment (two profiles, ABBA order) with a known change, and has them judged by the
same ``judge.compare.compare`` that judges real ones: every gate of every profile, the quality items, and the verdict over all.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from pytest_kvcache.analysis.soundness import Facts
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, PASS
from pytest_kvcache.judge.change import Margins
from pytest_kvcache.judge.compare import compare
from pytest_kvcache.judge.experiment import Cell, cells
from pytest_kvcache.judge.pilot import CHANCE, choose
from pytest_kvcache.quantities import Reading, Value
from pytest_kvcache.records import SCHEMA_VERSION, QualityRow, QualitySummary, RunRecord
from pytest_kvcache.runfolder import Run
from pytest_kvcache.settings import Settings

MARGINS = Margins()
SETTINGS = Settings(before="a", after="b")
PROFILES = ("normal", "longctx")
BLOCKS = 2000
ITEMS = 300
QUANTITIES = ("usage", "ttft", "throughput", "quality")
REPEATS = "repeats"
FOLDER = Path("runs/1-simulated")


@dataclass(frozen=True)
class World:
    """What is true in a simulation. ``effect`` is the worsening of ``worse`` in margins: 0 is an equal candidate, 1 exactly at the margin.

    Only the profile ``lane`` worsens, which is the hardest to see; "all" worsens every quantity of it.
    ``noise`` multiplies the spreads of one window: 1 % of the pool in peak usage, 8 % in the median time to first token, 3 % in throughput.
    Twice that comes from the seeds and is the same on both sides of a pair. ``drift`` is a drift over the whole experiment, in spreads of
    a window; ``tails`` draws the noise from Student's t with 3 degrees of freedom instead of a normal distribution. ``paired`` False gives
    the sides other seeds and one window more after the change, so that nothing pairs.

    ``rejected`` and ``preempted`` are rates per request: of rejections that the change brings, and of preemptions on both sides, which come
    in bursts of ``bursts``. A window has ``requests`` requests. With ``most`` the spread of the first ``repeats`` chooses how many repeats there are, at most so many.
    """

    worse: str = "usage"
    effect: float = 0.0
    noise: float = 1.0
    repeats: int = 5
    drift: float = 0.0
    tails: bool = False
    bursts: int = 1
    paired: bool = True
    requests: int = 60
    rejected: float = 0.0
    preempted: float = 0.0
    lane: str = "longctx"
    most: int = 0

    def amount(self, name: str, profile: str, side: str) -> float:
        """Return by how many margins a quantity of a profile is worse on a side."""
        return self.effect if side == "after" and profile in {self.lane, "quality"} and self.worse in {name, "all"} else 0.0


@dataclass(frozen=True)
class Simulated(Run):
    """A Run that lies nowhere: its quality rows are in memory."""

    rows: Sequence[QualityRow] = ()

    def quality(self) -> list[QualityRow]:
        """Return the rows."""
        return list(self.rows)


def judge(world: World, dice: random.Random) -> str:
    """Return the verdict of one simulated comparison."""
    return judge_counted(world, dice)[0]


def judge_counted(world: World, dice: random.Random) -> tuple[str, int]:
    """Return the verdict of one simulated comparison, and how many repeats it took."""
    if not world.most:
        return compare(*simulate(world, dice), SETTINGS, MARGINS).verdict, world.repeats
    # all that may be measured is drawn, and what was not chosen is never looked at; drift then runs over all of it
    before, after = simulate(replace(world, repeats=world.most), dice)
    repeats = choose(before, after, MARGINS, world.repeats, world.most).repeats
    return compare(_first(before, repeats, world.repeats), _first(after, repeats, world.repeats), SETTINGS, MARGINS).verdict, repeats


def _first(side: Sequence[Analysis], repeats: int, pilot: int = 0) -> list[Analysis]:
    """Return the windows of the first ``repeats`` as they would have been recorded, had no more been planned."""
    records = [(a, a.run.record) for a in side if a.run.record.window < repeats]
    # single Runs, such as that of the quality items, are planned once
    records = [(a, structs.replace(r, planned_windows=repeats, pilot_windows=pilot) if r.planned_windows else r) for a, r in records]
    return [replace(a, run=Simulated(FOLDER, record, _rows(a.run))) for a, record in records]


def judge_again(world: World, dice: random.Random, more: int) -> str:
    """Return the verdict where an INCONCLUSIVE one is followed by ``more`` further repeats and a second look at all of them."""
    whole = replace(world, repeats=world.repeats + more)
    sides = simulate(whole, dice)
    verdict = compare(_first(sides[0], world.repeats), _first(sides[1], world.repeats), SETTINGS, MARGINS).verdict
    return verdict if verdict != INCONCLUSIVE else compare(*sides, SETTINGS, MARGINS).verdict


def _rows(run: Run) -> Sequence[QualityRow]:
    return run.rows if isinstance(run, Simulated) else ()


def simulate(world: World, dice: random.Random) -> tuple[list[Analysis], list[Analysis]]:
    """Return the windows and quality items of both sides, as a session would have analysed them."""
    sides: dict[str, list[Analysis]] = {"before": [], "after": []}
    order = [*cells(world.repeats), *([] if world.paired else [Cell(world.repeats, "after")])]
    seeds = {(side, profile, repeat): _seed(world, dice) for side in sides for profile in PROFILES for repeat in range(world.repeats + 1)}
    for place, cell in enumerate(order):
        drift = world.drift * (place / max(1, len(order) - 1) - 0.5)
        for profile in PROFILES:
            seed = seeds["before" if world.paired else cell.side, profile, cell.repeat]
            sides[cell.side].append(_window(world, dice, cell.side, profile, cell.repeat, seed, drift))
    for side, analyses in sides.items():
        analyses.append(_quality(world, dice, side))
    return sides["before"], sides["after"]


def _seed(world: World, dice: random.Random) -> tuple[float, float, float]:
    return (2 * world.noise * dice.gauss(0, 1), 2 * world.noise * dice.gauss(0, 1), 2 * world.noise * dice.gauss(0, 1))


def _draw(world: World, dice: random.Random) -> float:
    if not world.tails:
        return world.noise * dice.gauss(0, 1)
    # Student's t with 3 degrees of freedom, scaled to a standard deviation of 1
    chi = math.fsum(dice.gauss(0, 1) ** 2 for _ in range(3))
    return world.noise * dice.gauss(0, 1) / math.sqrt(chi / 3) / math.sqrt(3)


def _poisson(dice: random.Random, mean: float) -> int:
    limit, count, product = math.exp(-mean), 0, dice.random()
    while product > limit:
        count += 1
        product *= dice.random()
    return count


def _window(world: World, dice: random.Random, side: str, profile: str, repeat: int, seed: tuple[float, float, float], drift: float) -> Analysis:
    worse = {name: world.amount(name, profile, side) for name in ("usage", "ttft", "throughput", "preemptions")}
    usage = 0.60 + 0.010 * (seed[0] + drift + _draw(world, dice)) + MARGINS.usage * worse["usage"]
    ttft = 0.200 * math.exp(0.08 * (seed[1] + drift + _draw(world, dice))) * (1 + MARGINS.ttft) ** worse["ttft"]
    rate = 1000.0 * math.exp(0.03 * (seed[2] - drift + _draw(world, dice))) * (1 - MARGINS.throughput) ** worse["throughput"]
    rejected = _poisson(dice, world.requests * world.rejected) if side == "after" and profile == world.lane else 0
    mean = world.requests * world.preempted * (1 + MARGINS.counts * worse["preemptions"])
    preempted = world.bursts * _poisson(dice, mean / world.bursts)
    used = min(max(round(usage * BLOCKS), 0), BLOCKS)
    values: dict[str, Value] = {
        name: Reading(float(value), unit, "simulated")
        for name, value, unit in (
            ("usage.hottest", used / BLOCKS, "ratio"), ("usage.peak", used / BLOCKS, "ratio"), ("free_blocks.tightest", BLOCKS - used, "blocks"),
            ("free_blocks.min", BLOCKS - used, "blocks"), ("usable_blocks", BLOCKS, "blocks"), ("block_size", 16, "tokens"), ("ttft.p50", ttft, "s"),
            ("throughput", rate, "tokens/s"), ("rejections", rejected, "requests"), ("preemptions", preempted, "events"),
            ("requests.sent", world.requests, "requests"),
        )
    }  # fmt: skip
    record = _record(profile, side, window=repeat, planned_windows=world.repeats, workload=f"w{repeat}")
    return Analysis(Simulated(FOLDER, record), values, facts=Facts())


def _quality(world: World, dice: random.Random, side: str) -> Analysis:
    lost = MARGINS.quality * world.amount("quality", "quality", side)
    rows = [QualityRow(str(number), dice.random() >= lost, length_tokens=64) for number in range(ITEMS)]
    passed = sum(row.passed for row in rows)
    summary = QualitySummary(ITEMS, passed, 0, {64: (passed, ITEMS)})
    return Analysis(Simulated(FOLDER, _record("quality", side), rows), {}, quality=summary, facts=Facts(loaded=False))


def _record(profile: str, side: str, **fields: Any) -> RunRecord:
    return RunRecord(SCHEMA_VERSION, id="simulated", profile=profile, side=side, engine="vllm", engine_version="1", model="m", **fields)


def shares(world: World, trials: int, seed: int = 1) -> dict[str, float]:
    """Return the share of each verdict over ``trials`` simulated comparisons, and the mean of their repeats."""
    dice = random.Random(f"{seed} {_name(world)}")
    found = [judge_counted(world, dice) for _ in range(trials)]
    verdicts = [verdict for verdict, _ in found]
    return {**{v: verdicts.count(v) / trials for v in (PASS, FAIL, INCONCLUSIVE)}, REPEATS: sum(repeats for _, repeats in found) / trials}


def _name(world: World) -> str:
    """Return a world's name, which its dice are seeded with: a field that is newer than the figures of the page is in it only where it is set."""
    return repr(world) if world.most else repr(world).replace(", most=0", "")


EFFECTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)


def main_grid() -> list[World]:
    """Return the worlds of the main table: peak usage worsens, by noise and repeats."""
    return [World("usage", effect, noise, repeats) for noise in (0.5, 1.0, 2.0) for repeats in (3, 5, 8, 12) for effect in EFFECTS]


def each_quantity() -> list[World]:
    """Return the worlds in which another quantity worsens, or all at once."""
    return [World(name, effect) for name in (*QUANTITIES, "all") for effect in EFFECTS]


def hard_cases() -> dict[str, World]:
    """Return what the statistics do not assume, each with the worsening exactly at the margin."""
    at = World("usage", 1.0)
    return {
        "two repeats": replace(at, repeats=2),
        "drift of 5 spreads, ABBA order": replace(at, drift=5.0),
        "heavy tails (Student's t, 3 degrees)": replace(at, tails=True),
        "very little noise (a block is a fifth of it)": replace(at, noise=0.25),
        "sides not paired": replace(at, paired=False),
        "time to first token, heavy tails": replace(at, worse="ttft", tails=True),
        "throughput, drift of 5 spreads": replace(at, worse="throughput", drift=5.0),
        "preemptions, 1 in 2 requests": replace(at, worse="preemptions", preempted=0.5),
        "preemptions, 1 in 2 requests, in bursts of 10": replace(at, worse="preemptions", preempted=0.5, bursts=10),
        "rejections of 1 in 10, 30 requests in all": replace(at, worse="", requests=6, rejected=MARGINS.rare),
        "quality": replace(at, worse="quality"),
    }


def chosen_worlds() -> list[World]:
    """Return worlds in which the spread of the first five pairs chooses how many there are, at most twenty."""
    return [World("usage", effect, noise, 5, most=20) for noise in (0.5, 1.0, 2.0) for effect in (0.0, 0.5, 1.0)]


def chosen_hard_cases() -> dict[str, World]:
    """Return what the choice does not assume, each with the worsening exactly at the margin."""
    at = World("usage", 1.0, most=20)
    return {
        "a first look at three pairs": replace(at, repeats=3),
        "time to first token": replace(at, worse="ttft"),
        "throughput": replace(at, worse="throughput"),
        "drift of 5 spreads, ABBA order": replace(at, drift=5.0),
        "heavy tails (Student's t, 3 degrees)": replace(at, tails=True),
        "time to first token, heavy tails": replace(at, worse="ttft", tails=True),
    }


def rare_worlds() -> list[World]:
    """Return worlds in which nothing was rejected before the change and a few requests are after it."""
    return [World("", rejected=rate) for rate in (0.0, 0.001, 0.003, 0.01, 0.03, 0.10)]


def percent(share: float) -> str:
    """Return a share as the page shows it."""
    return f"{share * 100:.1f} %"


def _cells(found: dict[str, float]) -> list[str]:
    return [percent(found[verdict]) for verdict in (PASS, FAIL, INCONCLUSIVE)]


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def chart(found: dict[World, dict[str, float]], path: Path) -> None:
    """Draw PASS and FAIL against the size of the effect, for each noise, into an SVG file."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "operating-curve"
    from matplotlib import pyplot as plt

    noises = sorted({world.noise for world in found})
    figure, axes = plt.subplots(1, len(noises), figsize=(11, 3.6), sharey=True, layout="constrained")
    for axis, noise in zip(axes, noises, strict=True):
        for number, repeats in enumerate(sorted({world.repeats for world in found})):
            worlds = sorted((w for w in found if (w.noise, w.repeats) == (noise, repeats)), key=lambda w: w.effect)
            for verdict, style in ((PASS, "-"), (FAIL, "--")):
                label = f"{verdict}, {repeats} repeats"
                axis.plot([w.effect for w in worlds], [found[w][verdict] for w in worlds], style, color=f"C{number}", label=label, marker=".")
        axis.axvline(1.0, color="0.6", linewidth=0.8)
        axis.axhline(0.05, color="0.6", linewidth=0.8)
        axis.set_title(f"spread of a window: {noise:g} % of the pool", fontsize=9)
        axis.set_xlabel("worsening of peak usage, in margins (2 % of the pool)", fontsize=8)
    axes[0].set_ylabel("share of comparisons")
    axes[-1].legend(fontsize=7, loc="center right")
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


INTRO = """# The gate's own error rates

What is a PASS worth? Whole comparisons are simulated, with a change whose truth is known, and judged by the code that judges real ones:
two profiles with six gates each, 300 quality items, and the verdict over all of them. `python benchmarks/operating_curve.py --write docs`
makes this page again; {trials:,} comparisons a figure, so that a share of 5 % is known to {error:.1f} points. `tests/judge/` holds the same with
fewer, at every run of the tests.

- **A false PASS** is a PASS although some quantity is worse by its margin or more. Every gate holds it at 5 % at the margin, where it is hardest;
  it can only be less for the verdict, which needs all gates. The highest seen below is {false_pass}.
- **A false FAIL** is a FAIL although nothing is worse by more than its margin. Of equal candidates, the highest seen below is {false_fail}.
- What is neither is INCONCLUSIVE, and says how many repeats would decide. Noise costs repeats and not truth.

One unit of effect is one margin: 2 % of the pool for peak usage, 25 % for the time to first token, 10 % for throughput, 2 % of the items for quality. One
unit of noise is what one window spreads by itself: 1 % of the pool, 8 %, 3 %; twice that comes from the seeds, which are the same on both sides.

![PASS and FAIL against the worsening](operating-curve.svg)
"""


def main() -> None:
    """Simulate, print, and write the page where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000, help="simulated comparisons for each figure")
    parser.add_argument("--write", metavar="FOLDER", help="write operating-curve.md and operating-curve.svg there")
    parser.add_argument(
        "--chosen", action="store_true", help="only the part in which the spread chooses the repeats; --write replaces it in the page"
    )
    arguments = parser.parse_args()
    began, cpu = time.monotonic(), time.process_time()
    chosen = {world: shares(world, arguments.trials) for world in chosen_worlds()}
    chosen_hard = {name: shares(world, arguments.trials) for name, world in chosen_hard_cases().items()}
    for name, told in [*((repr(world), told) for world, told in chosen.items()), *chosen_hard.items()]:
        print(name, *_cells(told), f"{told[REPEATS]:.1f} repeats", flush=True)
    if arguments.chosen:
        if arguments.write:
            page = Path(arguments.write) / "operating-curve.md"
            before, _, rest = page.read_text().partition(CHOSEN_TITLE if CHOSEN_TITLE in page.read_text() else NEXT_TITLE)
            page.write_text(before + chosen_part(chosen, chosen_hard, arguments.trials) + NEXT_TITLE + (rest.partition(NEXT_TITLE)[2] or rest))
        return
    worlds = {*main_grid(), *each_quantity(), *rare_worlds()}
    found: dict[World, dict[str, float]] = {}
    for world in sorted(worlds, key=repr):
        found[world] = shares(world, arguments.trials)
        print(world, *_cells(found[world]), flush=True)
    hard = {name: shares(world, arguments.trials) for name, world in hard_cases().items()}
    dice = random.Random(2)
    twice = [judge_again(World("usage", 1.0), dice, 5) for _ in range(arguments.trials)]
    hard["a second look: 5 repeats, and 5 more where INCONCLUSIVE"] = {v: twice.count(v) / arguments.trials for v in (PASS, FAIL, INCONCLUSIVE)}
    for name, told in hard.items():
        print(f"{name:>56}", *_cells(told), flush=True)
    if arguments.write:
        folder = Path(arguments.write)
        (folder / "operating-curve.md").write_text(page_of(found, hard, arguments.trials, chosen_part(chosen, chosen_hard, arguments.trials)))
        chart({world: told for world, told in found.items() if world in main_grid()}, folder / "operating-curve.svg")
    print(f"{arguments.trials} comparisons a figure, {time.process_time() - cpu:.0f} s of CPU, {time.monotonic() - began:.0f} s")


CHOSEN_TITLE = "## The spread chooses the repeats"
NEXT_TITLE = "## Each quantity, 5 repeats"


def chosen_part(found: dict[World, dict[str, float]], hard: dict[str, dict[str, float]], trials: int) -> str:
    """Return the part of the page on ``--kv-most-repeats``."""
    part = f"{CHOSEN_TITLE}\n\n"
    part += (
        "`--kv-repeats=5 --kv-most-repeats=20`: after five pairs the spread of every quantity with a margin, and nothing else of them, chooses how many "
        f"there are, so that an equal candidate passes with {percent(CHANCE)} or more where the cap allows it. {trials:,} comparisons a figure. The highest "
        f"false PASS at the margin below is {percent(max(told[PASS] for told in [*hard.values(), *(t for w, t in found.items() if w.effect >= 1)]))}.\n\n"
    )
    effects = sorted({world.effect for world in found})
    rows = [
        [f"{noise:g}", *(f"{' / '.join(_cells(told)[:2])} / {told[REPEATS]:.1f}" for effect in effects for told in [_at(found, noise, effect)])]
        for noise in sorted({world.noise for world in found})
    ]
    part += _markdown(["noise", *(f"effect {effect:g}: PASS / FAIL / mean repeats" for effect in effects)], rows)
    part += "\nWhat it does not assume, or another quantity, with the worsening exactly at the margin:\n\n"
    part += _markdown(["", PASS, FAIL, INCONCLUSIVE, "mean repeats"], [[name, *_cells(told), f"{told[REPEATS]:.1f}"] for name, told in hard.items()])
    return part + "\n"


def _at(found: dict[World, dict[str, float]], noise: float, effect: float) -> dict[str, float]:
    return next(told for world, told in found.items() if (world.noise, world.effect) == (noise, effect))


def page_of(found: dict[World, dict[str, float]], hard: dict[str, dict[str, float]], trials: int, chosen: str = "") -> str:
    """Return the page of the docs."""
    once = {name: told for name, told in hard.items() if not name.startswith("a second look")}
    false_pass = max([told[PASS] for world, told in found.items() if world.effect >= 1] + [told[PASS] for told in once.values()])
    false_fail = max(told[FAIL] for world, told in found.items() if world.effect == 0 and not world.rejected)
    page = INTRO.format(trials=trials, error=196 * math.sqrt(0.05 * 0.95 / trials), false_pass=percent(false_pass), false_fail=percent(false_fail))
    page += "\n## Peak usage worsens, in one of two profiles\n\n"
    head = ["noise", "repeats", *(f"effect {effect:g}: PASS / FAIL" for effect in EFFECTS)]
    grid = sorted({(w.noise, w.repeats) for w in main_grid()})
    page += _markdown(
        head,
        [
            [f"{noise:g}", str(repeats), *(" / ".join(_cells(found[World("usage", effect, noise, repeats)])[:2]) for effect in EFFECTS)]
            for noise, repeats in grid
        ],
    )
    page += f"\n{chosen}{NEXT_TITLE}\n\n"
    rows = [[name, *(" / ".join(_cells(found[World(name, effect)])[:2]) for effect in EFFECTS)] for name in (*QUANTITIES, "all")]
    page += _markdown(["worse", *head[2:]], rows)
    page += "\nA quality item that is lost stays lost, so the exact test sees a loss at the margin in most cases: that is a FAIL on a true loss.\n"
    page += "\n## Rejections that were not there before, 300 requests after the change\n\n"
    page += _markdown(["true share of requests", PASS, FAIL, INCONCLUSIVE], [[percent(w.rejected), *_cells(found[w])] for w in rare_worlds()])
    page += "\nWhere none is seen, 300 requests exclude more than 1 %; the gate asks for less than 10 % (`--kv-rare-margin`), and says what it excludes.\n"
    page += "\n## What the statistics do not assume, with the worsening exactly at the margin\n\n"
    page += _markdown(["", PASS, FAIL, INCONCLUSIVE], [[name, *_cells(told)] for name, told in hard.items()])
    page += (
        "\nThe last row is why `--kv-resume` with more repeats says how often it was judged: each look adds its own chance; `--kv-most-repeats` looks once. What no simulation here "
        "covers: a server that behaves otherwise under other prompts than those of the profiles, and bursts so rare that no window had one.\n"
    )
    return page


if __name__ == "__main__":
    main()
