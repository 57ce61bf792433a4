"""Is the evidence sound? Of one Run, by the rules of analysis/soundness.py; of one side, that its windows measured one thing."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvcache import units
from pytest_kvcache.analysis.soundness import Limits, Problem
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.judge.declared import SIZES
from pytest_kvcache.quantities import QUANTITIES, Reading
from pytest_kvcache.records import RunRecord

__all__ = ["Limits", "Problem", "check", "check_pair", "check_side"]


def check(analysis: Analysis) -> list[Problem]:
    """Return what makes one Run unsound; ``analyse`` found it, with its own Limits where they were given."""
    return list(analysis.problems)


def check_side(analyses: Sequence[Analysis]) -> list[Problem]:
    """Return what makes the windows of one side unfit to stand together: another engine, model or configuration in between."""
    found: list[Problem] = []
    facts = ["engine", "engine_version", "model"]
    for name in facts:
        seen = list(dict.fromkeys(str(getattr(analysis.run.record, name)) for analysis in analyses))
        if len(seen) > 1:
            found.append(_mixed(f"{name.replace('_', ' ')} {' and '.join(seen[:3])}"))
    for name, quantity in QUANTITIES.items():
        if quantity.kind != "config":
            continue
        values = [record.to_value() for analysis in analyses if (record := analysis.run.record.config.get(name)) is not None]
        # By value and not by its text: a whole number is an int when it was just read, and a float when it comes from a stored Run.
        told = {value.value: units.show(value.value, value.unit) for value in values if isinstance(value, Reading)}
        if len(told) > 1 and not _per_launch(name, analyses):
            found.append(_mixed(f"{quantity.title} {' and '.join(list(told.values())[:3])}"))
    return found


def _mixed(what: str) -> Problem:
    return Problem(
        "mixed", f"the windows of one side were measured on different servers: {what}", "measure all windows of a side on one configuration"
    )


def _per_launch(name: str, analyses: Sequence[Analysis]) -> bool:
    """Return whether a difference is what restarts alone bring: an engine that sizes its pool by free memory finds another each time."""
    return name in SIZES and launches(analyses) > 1


def launches(analyses: Sequence[Analysis]) -> int:
    """Return how many starts of the server a side covers: those that we made, else by the start times that it told; 1 where it told none."""
    known = {analysis.run.record.launch_id for analysis in analyses if analysis.run.record.launch_id}
    if known:
        return len(known)
    starts: list[float] = []
    for analysis in analyses:
        for snapshot in analysis.run.record.before[:1]:
            value = snapshot.value("start_time")
            if isinstance(value, Reading) and all(abs(value.number() - known) > 2.0 for known in starts):
                starts.append(value.number())
    return max(len(starts), 1)


def check_comparable(before: RunRecord, after: RunRecord, declared: Sequence[str] = ()) -> tuple[list[Problem], list[str]]:
    """Return (problems, notes) of two sides that were measured apart: another build of the engine, other cards, another machine.

    What was declared to change is no problem. Cards are known of servers of this machine; a note says where they are not.
    """
    found: list[Problem] = []
    notes: list[str] = []

    def unlike(rule: str, what: str, old: str, new: str) -> None:
        if rule not in declared:
            mend = f"measure both sides alike, or declare it with --kv-expect-change {rule}"
            found.append(Problem(rule, f"not comparable: {what} was {old} before and is {new} after", mend))

    if before.engine == after.engine and before.engine_version != after.engine_version:
        unlike("engine_version", "the engine's build", before.engine_version or "not told", after.engine_version or "not told")
    cards = [_cards(record) for record in (before, after)]
    if cards[0] != cards[1] and all(cards):
        unlike("gpu", "the GPU", cards[0], cards[1])
    elif any(cards) and not all(cards):
        notes.append(f"the GPU of the side {'after' if cards[0] else 'before'} is not known, so it was not compared with {cards[0] or cards[1]}")
    elif not any(cards) and not (before.owned and after.owned):
        notes.append("the GPU of neither side is known, so it was not compared")
    elif not any(cards):
        hosts = [f"{record.machine.get('machine', '?')} with {record.machine.get('cores', '?')} cores" for record in (before, after)]
        if hosts[0] != hosts[1]:
            unlike("machine", "the machine that served without a GPU", *hosts)
    return found, notes


def _cards(record: RunRecord) -> str:
    """Return the cards of the server as text, equal for equal sets; empty where they are not known."""
    cards = record.machine.get("gpus")
    names = [str(card.get("name", "?")) for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))


def check_pair(before: RunRecord, after: RunRecord) -> list[Problem]:
    """Return why two Runs cannot be compared: another engine, another model, embedded against a real server, another API."""
    found = []
    for name, shown in (("engine", "engine"), ("model", "model")):
        left, right = getattr(before, name), getattr(after, name)
        if left != right:
            found.append(
                Problem(
                    name,
                    f"the {shown} is {left or 'unknown'} before and {right or 'unknown'} after",
                    f"compare Runs of one {shown}; save a new baseline",
                )
            )
    if before.embedded != after.embedded:
        sides = ("the embedded engine", "a server of yours")
        left, right = (sides[not record.embedded] for record in (before, after))
        found.append(Problem("embedded", f"before was measured on {left} and after on {right}", "measure both sides on your server"))
    apis = [str(record.settings.get("api", {}).get("value", "")) for record in (before, after)]
    if all(apis) and apis[0] != apis[1]:
        found.append(Problem("api", f"before was measured through {apis[0]} and after through {apis[1]}", "use one --kv-api on both sides"))
    bodies = [record.settings.get("extra_body", {}).get("value", "") for record in (before, after)]
    if before.settings and after.settings and bodies[0] != bodies[1]:
        said = [str(body)[:80] or "nothing" for body in bodies]
        what = f"every request had {said[0]} in its body before and {said[1]} after"
        found.append(Problem("extra_body", what, "use one --kv-extra-body on both sides: another protocol looks like another model"))
    return found
