"""What the report says of answers beside pass rates by length: under pressure, tasks of a harness, and greedy agreement against noise."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvcache.judge.quality import describe, shown_pressure
from pytest_kvcache.judge.stats import proportion_lower, proportion_upper
from pytest_kvcache.quality.agreement import agree, noise_floor
from pytest_kvcache.quality.harness import PART as TASKS
from pytest_kvcache.records import AgreementRow, QualityRow
from pytest_kvcache.report.escape import plain
from pytest_kvcache.report.model import SessionView
from pytest_kvcache.units import show

_SURE = 0.975
"""Each end of an interval, so that both together leave out 5 %."""


def share(passed: int, asked: int) -> str:
    """Return a pass rate with its exact 95 % interval, in words."""
    low, high = proportion_lower(passed, asked, _SURE), proportion_upper(passed, asked, _SURE)
    return f"{passed:,} of {asked:,} right ({show(low, 'ratio')} to {show(high, 'ratio')})"


def lines(view: SessionView) -> list[str]:
    """Return one line for each pressure and task set of each side, and those on greedy agreement; empty where only quiet items were asked."""
    found: list[str] = []
    greedy: dict[str, list[AgreementRow]] = {}
    for side, analyses in view.sides():
        named = f"{side}, " if side else ""
        rows = [row for analysis in analyses for row in analysis.run.quality() if row.part]
        for record in [record for analysis in analyses for record in analysis.run.record.pressure]:
            mine = [row for row in rows if row.part == record.part]
            lacking = f"; this was no pressure: {record.why}" if record.why else ""
            found.append(f"{named}under {shown_pressure(record)}: {_right(mine)}{lacking}")
        tasks = [row for row in rows if row.part == TASKS]
        found += [f"{named}{TASKS}: {_right(tasks)}"] if tasks else []
        greedy[side] = [row for analysis in analyses for row in analysis.run.agreement()]
    return [plain(line, 600) for line in (*found, *_greedy(greedy))]


def _right(rows: Sequence[QualityRow]) -> str:
    wrong = sorted({row.length_tokens for row in rows if not row.passed and row.length_tokens})
    at = f", wrong at {', '.join(f'{length:,}' for length in wrong[:20])} tokens" if wrong else ""
    return f"{share(sum(row.passed for row in rows), len(rows))}{at}" if rows else "nothing asked"


def _greedy(greedy: dict[str, list[AgreementRow]]) -> list[str]:
    floors = {side: noise_floor(rows) for side, rows in greedy.items()}
    before, after = greedy.get("before"), greedy.get("after")
    if before and after and (across := agree([row for row in before if not row.repeat], [row for row in after if not row.repeat])):
        return [f"Greedy answers: {describe(across, floors['before'], floors['after'])}."]
    return [
        f"Greedy answers{f' {side}' if side else ''}: {show(floor.equal, 'ratio')} of tokens are equal where a probe was asked twice "
        f"({floor.diverged} of {floor.probes} probes diverge): the server's own noise."
        for side, floor in floors.items()
        if floor is not None
    ]
