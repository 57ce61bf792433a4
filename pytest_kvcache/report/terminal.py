"""The verdict and its gates for a terminal: pytest's summary and the command line print the same text."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

import msgspec

from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import GateRecord
from pytest_kvcache.report.escape import clip, plain
from pytest_kvcache.report.model import (
    SessionView,
    aside_by_reason,
    beside,
    gate_title,
    improvement,
    in_order,
    not_judged,
    show_bound,
    show_interval,
    show_record,
    shown_verdict,
    told_notes,
    why,
)
from pytest_kvcache.report.model import three_numbers as _three_numbers
from pytest_kvcache.units import show_seconds

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

_COLOURS = {"PASS": "\x1b[32m", "FAIL": "\x1b[31m", "INCONCLUSIVE": "\x1b[33m", "INVALID": "\x1b[35m"}
_BOLD, _DIM, _OFF = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_UNIT = re.compile(r" (?:tokens/s|tokens|blocks|requests|events|items)\Z")
# What a bound says beyond its figure ("of the pool higher") is in the head of the column beside it.
_SHORT = re.compile(r"([≤≥] \S+ \S+) .*")
MAX_PASSED = 40
MAX_LENGTHS = 60


def summary(view: SessionView, *, color: bool, width: int = 100) -> str:
    """Return a table of the gates, the verdict with what decided it, and where the report is; at most ``width`` columns wide.

    Escape sequences are only ours, and only with ``color``; everything from outside is made plain.
    """
    verdict = view.verdict
    lines = [*_table(view, color, width)]
    for reason, titles in aside_by_reason(verdict.gates).items():
        lines += textwrap.wrap(clip(f"not applicable: {', '.join(titles)} ({reason})", 4 * width), width, subsequent_indent=" " * 4)
    for how, left_out in not_judged(verdict).items():
        names = ", ".join(plain(name, 100) for name in left_out[:6])
        more = f" and {len(left_out) - 6} more" if len(left_out) > 6 else ""
        lines += textwrap.wrap(f"{how}, not judged: {names}{more}", width, subsequent_indent=" " * 4)
    if lines:
        lines.append("")
    if verdict.config_diff:
        changes = [f"{plain(c.name, 40)} {plain(c.before, 40) or '(none)'} -> {plain(c.after, 40) or '(none)'}" for c in verdict.config_diff]
        more = f"; and {len(changes) - 6} more" if len(changes) > 6 else ""
        lines += textwrap.wrap("changed: " + "; ".join(changes[:6]) + more, width, subsequent_indent=" " * 9)
    word = plain(verdict.verdict, 20)
    badge = "  EMBEDDED engine, not a server of yours" if verdict.embedded else ""
    lines.append(_paint(word, word, color, bold=True) + (_BOLD + badge + _OFF if badge and color else badge))
    lines += textwrap.wrap(why(verdict), width, initial_indent="  ", subsequent_indent="  ")
    for note in told_notes(verdict):
        lines += textwrap.wrap(note, width, initial_indent="  note: ", subsequent_indent="        ", break_long_words=False, break_on_hyphens=False)
    lines.append(f"report: {plain(view.report, 1000)}")
    return "\n".join(lines)


def load_numbers(analysis: Analysis) -> str:
    """Return what a load did: requests and how they ended, times and throughput, and the longest pauses where some are striking."""
    from pytest_kvcache.report.model import show_value

    def shown(name: str) -> str:
        return show_value(analysis.values.get(name)) or "—"

    ends = "".join(f", {sum(lanes.values())} {plain(kind, 40)}" for kind, lanes in analysis.rejections.items())
    return (
        f"{shown('requests.sent')} sent, {shown('requests.ok')} answered in full{ends}; "
        f"{shown('prompt_tokens')} in prompts, {shown('output_tokens')} generated, {shown('throughput')}\n"
        f"time to first token {shown('ttft.p50')} (p95 {shown('ttft.p95')}), latency {shown('latency.p50')} (p95 {shown('latency.p95')}) "
        f"from the intended start, {shown('latency_sent.p50')} (p95 {shown('latency_sent.p95')}) from sending, longest gap {shown('gap.max')}"
        f"{_pauses(analysis)}"
    )


def _pauses(analysis: Analysis) -> str:
    """Return a line on answers that paused for ten times their usual time for a token: a preempted request shows nothing else."""
    striking = [pause for pause in analysis.pauses if pause.length_s > 10 * pause.pace_s][:5]
    if not striking:
        return ""
    since_s = analysis.run.record.load_started_wall_s
    shown = ", ".join(
        f"#{pause.number} {show_seconds(pause.length_s)} at {pause.at_s - since_s:.1f} s{' (preempted)' if pause.put_back else ''}"
        for pause in striking
    )
    return f"\nlongest pauses inside an answer: {shown}"


def three_numbers(analysis: Analysis) -> str:
    """Return usage at its peak, or why it is not known, with pool size, free space and running requests with their mean length, in one line."""
    from pytest_kvcache.report.model import show_value

    usage = analysis.values.get("usage.peak")
    shown = show_value(usage) or "—"
    if isinstance(usage, Missing) and not usage.cannot_happen:
        shown = f"not known ({plain(usage.reason, 300)})"
    return f"usage {shown} at the peak of {_three_numbers(analysis)}"


def _paint(text: str, verdict: str, color: bool, *, bold: bool = False) -> str:
    return f"{_BOLD if bold else ''}{_COLOURS.get(verdict, '')}{text}{_OFF}" if color else text


def _table(view: SessionView, color: bool, width: int) -> list[str]:
    from tabulate import tabulate

    ordered = in_order(view.verdict.gates)
    passed = [gate for gate in ordered if gate.verdict == "PASS"]
    shown = [gate for gate in ordered if gate.verdict != "PASS"] + passed[:MAX_PASSED]
    if not shown:
        return []
    compared = any(gate.before is not None for gate in shown)
    heads = ["verdict", "gate", *(("before", "after", "worse by") if compared else ("value",)), "bound"]
    for narrow in (False, True):
        rows = [_row(gate, compared, narrow) for gate in shown]
        # tabulate puts two spaces between columns and makes each two wider than its head
        room = width - sum(max(len(head) + 2, *(len(row[i]) for row in rows)) + 2 for i, head in enumerate(heads) if i != 1)
        if room >= 24:
            break
    room = max(room, 12)
    rows = [[row[0], clip(row[1], room), *row[2:]] for row in rows]
    text = str(tabulate(rows, headers=heads, disable_numparse=True, colalign=["left", "left", *["right"] * (len(heads) - 2)])).splitlines()
    indent = text[1].index(" ") + 2
    lines = [line.rstrip() for line in text[:2]]
    for gate, row, line in zip(shown, rows, text[2:], strict=True):
        lines.append(_paint(row[0], row[0], color) + line[len(row[0]) :].rstrip())
        for note in _notes(view, gate, width - indent):
            lines.append(" " * indent + (_DIM + note + _OFF if color else note))
    if len(passed) > MAX_PASSED:
        lines.append(f"and {len(passed) - MAX_PASSED} more gates that passed")
    return lines


def _notes(view: SessionView, gate: GateRecord, width: int) -> list[str]:
    """Return the lines below a gate: what a usage ratio is never shown without, and the interval of one that could not tell."""
    texts = [text] if (text := beside(view, gate)) else []
    if better := improvement(gate):
        texts.insert(0, f"better: {better}")
    if gate.verdict != "PASS" and gate.value is not None and (interval := show_interval(gate)):
        texts.append(f"interval {interval}")
    if gate.lengths:
        more = f" and {len(gate.lengths) - MAX_LENGTHS} more" if len(gate.lengths) > MAX_LENGTHS else ""
        texts.append(f"broke at {', '.join(f'{length:,}' for length in gate.lengths[:MAX_LENGTHS])}{more} tokens")
    return [line for text in texts for line in textwrap.wrap(clip(text, 6 * width), max(width, 20))]


def _row(gate: GateRecord, compared: bool, narrow: bool) -> list[str]:
    """Return the cells of a gate; on a narrow terminal figures without their units, which the bound keeps, and one end of an interval."""
    word, title, value, bound = shown_verdict(gate), gate_title(gate), show_record(gate.value), show_bound(gate)
    if not compared:
        return [word, title, clip(value, 16), clip(bound, 28)]
    bound = clip(_SHORT.sub(r"\1", bound), 16)
    if gate.before is None and gate.after is None:
        return [word, title, *([value, ""] if gate.side == "before" else ["", value]), "", bound]
    # The end that decided: a change that failed is worse by at least this, one that passed by at most that.
    other = {"high": None} if gate.verdict == "FAIL" else {"low": None}
    worse = value or show_interval(msgspec.structs.replace(gate, **other) if narrow and None not in (gate.low, gate.high) else gate)
    cells = [clip(cell, 24) for cell in (show_record(gate.before), show_record(gate.after), worse)]
    return [word, title, *(_UNIT.sub("", cell) if narrow else cell for cell in cells), bound]
