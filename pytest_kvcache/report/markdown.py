"""summary.md: the verdict for a change request, in which nothing from outside is markup, a link or a mention."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvcache.records import GateRecord
from pytest_kvcache.report import answers, diagnosed, sections
from pytest_kvcache.report.escape import code, markdown
from pytest_kvcache.report.model import (
    SessionView,
    aside_by_reason,
    beside,
    gate_sentence,
    gate_title,
    improvement,
    in_order,
    not_judged,
    show_bound,
    show_interval,
    show_record,
    shown_verdict,
    told_notes,
    warns,
    why,
)
from pytest_kvcache.report.pairs import pairs

MAX_GATES = 60
_SIGNS = {"PASS": "✅", "FAIL": "❌", "INCONCLUSIVE": "❔", "INVALID": "⚠️"}

_MOST_LENGTHS = 12
"""Of more prompt lengths than this only those that gave a wrong answer are listed, and the others together."""


def summary(view: SessionView) -> str:
    """Return the session as Markdown: verdict and reason, configuration diff, gates, findings, numbers together, rejections, quality, how to repeat it."""
    verdict = view.verdict
    badge = " · **EMBEDDED** engine, not a server of yours" if verdict.embedded else ""
    lines = [
        f"## {_SIGNS.get(verdict.verdict, '')} {markdown(verdict.verdict, 20)}: {markdown(verdict.name or verdict.session, 80)}{badge}".replace(
            "  ", " "
        ),
        "",
    ]
    lines += [markdown(why(verdict), 900), ""]
    if notes := told_notes(verdict):
        lines += [*(f"- Note: {markdown(note, 600)}" for note in notes), ""]
    subject = [f"{code(' '.join(part for part in (verdict.engine, verdict.engine_version) if part))}", code(verdict.model)]
    lines += [
        f"Measured on {', '.join(part for part in subject if part) or 'nothing'}."
        + (f" Compared: {code(verdict.comparison, 400)}." if verdict.comparison else ""),
        "",
    ]
    if verdict.config_diff:
        rows = [[code(c.name, 60), code(c.before, 100) or "(none)", code(c.after, 100) or "(none)"] for c in verdict.config_diff[:MAX_GATES]]
        lines += ["### What changed in the configuration", "", _table(["name", "before", "after"], rows, 3), ""]
    lines += _gates(view)
    for one in pairs(view):
        table = one.table()
        lines += [
            f"### Pair by pair: {markdown(one.name)}",
            "",
            _table(table.columns, [[markdown(cell) for cell in row] for row in table.rows], 2),
            "",
        ]
        lines += [f"- {markdown(note)}" for note in table.notes] + ([""] if table.notes else [])
    lines += _findings(view)
    for title, table in (
        ("Usage, free space and running requests together", sections.three_numbers(view)),
        ("Requests and rejections", sections.rejections(view)),
        ("Latency", sections.latency(view)),
    ):
        if table.rows:
            lines += [
                f"### {title}",
                "",
                _table([markdown(head, 80) for head in table.columns], [[markdown(cell) for cell in row] for row in table.rows], table.labels),
                "",
            ]
            lines += [f"- {markdown(note)}" for note in table.notes] + ([""] if table.notes else [])
    lines += _quality(view)
    if found := sections.problems(view):
        lines += ["### Problems of the evidence", ""]
        lines += [
            f"- {markdown(where)}: {markdown(what)}" + (f" To mend it: {markdown(mend)}" if mend else "") for where, what, mend in found[:40]
        ] + [""]
    if verdict.repeat:
        lines += ["### How to repeat it", "", *(f"- {code(command, 500)}" for command in verdict.repeat[:20]), ""]
    lines += [f"Full report: {code('report.html')} in {code(view.folder.name)}."]
    return "\n".join(lines) + "\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], labels: int) -> str:
    from tabulate import tabulate

    align = ["left"] * labels + ["right"] * (len(heads) - labels)
    return str(tabulate(rows, headers=list(heads), tablefmt="github", disable_numparse=True, colalign=align))


def _gates(view: SessionView) -> list[str]:
    gates = in_order(view.verdict.gates)
    compared = any(gate.before is not None for gate in gates)
    lines = ["### Gates", ""]
    if gates:
        heads = ["verdict", "gate", *(["before", "after", "worse by"] if compared else ["value"]), "bound"]
        lines += [_table(heads, [_row(view, gate, compared) for gate in gates[:MAX_GATES]], 2), ""]
        if len(gates) > MAX_GATES:
            lines += [f"{len(gates) - MAX_GATES} further gates are in verdict.json.", ""]
    else:
        lines += ["No gate was judged.", ""]
    lines += [
        f"- {shown_verdict(gate)} {markdown(gate_title(gate))}: {markdown(gate_sentence(gate))}"
        for gate in gates[:MAX_GATES]
        if gate.verdict in _SIGNS and gate.verdict != "PASS" and gate.text
    ]
    aside = aside_by_reason(view.verdict.gates)
    lines += [f"- not applicable: {markdown(', '.join(titles), 600)} ({markdown(reason)})" for reason, titles in list(aside.items())[:40]]
    left_out = [(how, name) for how, names in not_judged(view.verdict).items() for name in names]
    lines += [f"- {how}, not judged: {code(name)}" for how, name in left_out[:40]]
    return lines if lines[-1] == "" else [*lines, ""]


def _row(view: SessionView, gate: GateRecord, compared: bool) -> list[str]:
    title = markdown(gate_title(gate))
    if better := improvement(gate):
        title += f"<br>better: {markdown(better)}"
    if text := beside(view, gate):
        title += f"<br>{markdown(text)}"
    word = f"{'' if warns(gate) else _SIGNS.get(gate.verdict, '')} {markdown(shown_verdict(gate), 20)}".strip()
    value, bound = markdown(show_record(gate.value), 60), markdown(show_bound(gate), 80)
    if not compared:
        return [word, title, value, bound]
    if gate.before is None and gate.after is None:
        sides = [value, ""] if gate.side == "before" else ["", value]
        return [word, title, *sides, "", bound]
    interval = markdown(show_interval(gate))
    change = f"{value} ({interval})" if value and interval else value or interval
    return [word, title, markdown(show_record(gate.before), 60), markdown(show_record(gate.after), 60), change, bound]


def _findings(view: SessionView) -> list[str]:
    """Return whether the percentage is real: the three numbers, what was found with what to do, and the three reconciliations."""
    found = diagnosed.section(view)
    if not found.shows:
        return []
    lines = ["### Is the percentage real?", "", markdown(found.numbers, 700), ""]
    lines += [
        f"- **{markdown(item.title)}** ({markdown(item.severity)}): {markdown(item.text)}"
        + (f" ({markdown(item.beside)})" if item.beside else "")
        + f" Do: {markdown('; '.join(item.do))}"
        for item in found.findings
    ]
    lines += [] if found.findings else ["- No rule found a cause for concern."]
    for one in found.reconciliations:
        told = "; ".join(one.lines) or "not known"
        lines.append(f"- {markdown(one.name)}: {markdown(told, 900)}" + (f" (not told: {markdown(one.lacking)})" if one.lacking else ""))
    return [*lines, ""]


def _quality(view: SessionView) -> list[str]:
    rates = sections.quality(view)
    if not rates:
        return []
    lengths = sorted({length for side in rates.values() for length in side})
    broke = [length for length in lengths if any(side.get(length, (0, 0))[0] < side.get(length, (0, 0))[1] for side in rates.values())]
    listed = (lengths if len(lengths) <= _MOST_LENGTHS else broke)[:60]
    rows = [[f"{length:,}", *(answers.share(*side[length]) if length in side else "" for side in rates.values())] for length in listed]
    if len(listed) < len(lengths):
        name = f"{'the other' if listed else 'all'} {len(lengths) - len(listed)}"
        rests = [[cell for length, cell in side.items() if length not in listed] for side in rates.values()]
        rows.append([name, *(answers.share(sum(p for p, _ in rest), sum(a for _, a in rest)) if rest else "" for rest in rests)])
    head = ["prompt length, tokens", *(side or "measured" for side in rates)]
    lines = ["### Quality by prompt length", "", _table(head, rows, 0), ""]
    broken = sections.broken_lengths(rates)
    more = [*(f"- worse at {markdown(line)}" for line in broken[:40]), *(f"- {markdown(line)}" for line in answers.lines(view))]
    return [*lines, *more, *([""] if more else [])]
