"""report.html: one file that carries everything, loads nothing, runs nothing, and reads well with scripts off, on paper and in the dark."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pytest_kvcache import __version__, units
from pytest_kvcache.quantities import QUANTITIES, Reading
from pytest_kvcache.records import GateRecord
from pytest_kvcache.report import answers, charts, diagnosed, knee, memory, memory_time, sections, svg, taken
from pytest_kvcache.report import pairs as paired
from pytest_kvcache.report.escape import block, plain
from pytest_kvcache.report.model import (
    SessionView,
    aside_by_reason,
    at_peak,
    beside,
    gate_sentence,
    gate_title,
    improvement,
    in_order,
    show_bound,
    show_interval,
    show_record,
    show_value,
    shown_verdict,
    three_numbers,
    warns,
    why,
)
from pytest_kvcache.report.series import free_unit, traces

if TYPE_CHECKING:
    import jinja2

    from pytest_kvcache.analysis.timeline import Analysis

_KINDS = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "unsure", "INVALID": "unsound"}
_FILES = ("run.json", "telemetry.jsonl", "requests.jsonl", "quality.jsonl", "metrics-before.prom", "metrics-after.prom", "server.log")
_EVIDENCE = re.compile(r"runs/(?!\.)[^/:\\\x00-\x1f]+(?:/(?!\.)[^/:\\\x00-\x1f]+)?\Z")
MAX_GATES, MAX_RUNS, MAX_PROFILES = 300, 200, 12


@cache
def _template() -> jinja2.Template:
    import jinja2
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        # Markup is ours; everything else that reaches the page is made plain here, once, and then escaped by autoescape.
        return value if isinstance(value, Markup | jinja2.Undefined | int | float) else plain(value, 1200)

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pytest_kvcache.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


def report(view: SessionView) -> str:
    """Return the whole page. A chart that cannot be drawn is replaced by the reason; the verdict and the tables never depend on one."""
    from markupsafe import Markup

    verdict = view.verdict
    gates = in_order(verdict.gates)
    css = (Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    timelines, undrawn = _timelines(view)
    over_time = memory_time.over_time(view)
    methods = list(dict.fromkeys(method for gate in gates if (method := plain(gate.method, 300))))[:20]
    context: dict[str, Any] = {
        "css": Markup(css),  # noqa: S704 (our own file)
        "verdict": verdict,
        "kind": _KINDS.get(verdict.verdict, "unsure"),
        "title": verdict.name or verdict.session,
        "when": _period(verdict.started_wall_s, verdict.ended_wall_s),
        "why": why(verdict),
        "facts": _facts(view),
        "compared": view.compared,
        "diff": verdict.config_diff[: sections.MAX_ROWS],
        "sides": sections.sides(view),
        "gates": [_gate(view, gate, methods) for gate in gates[:MAX_GATES]],
        "methods": methods,
        "more_gates": max(len(gates) - MAX_GATES, 0),
        "aside": [(", ".join(titles), reason) for reason, titles in list(aside_by_reason(verdict.gates).items())[:MAX_GATES]],
        "deselected": verdict.deselected[:MAX_GATES],
        "numbers": sections.three_numbers(view),
        "pairs": [_drawn(partial(one.draw, f"pair{n}")) | {"name": one.name, "table": one.table()} for n, one in enumerate(paired.pairs(view))],
        "timelines": timelines,
        "undrawn": ", ".join(undrawn),
        "levels": [
            _drawn(level.draw, side=level.side, caption=level.caption) | {"name": level.name, "notes": level.notes} for level in taken.levels(view)
        ],
        "payload": taken.payload_table(view),
        "demand": taken.demand_table(view),
        "ledgers": memory.ledgers(view),
        "memory_charts": [_drawn(one.draw, side=one.side, caption=one.caption) for one in over_time.charts],
        "memory_courses": over_time.table,
        "diagnosed": diagnosed.section(view),
        "sweep": memory.sweep_table(view),
        "search": _search(view),
        "waste": memory.waste_table(view),
        "balance": memory.balance_table(view),
        "rejections": sections.rejections(view),
        "latency": sections.latency(view),
        "quality": _quality(view),
        "problems": sections.problems(view),
        "run_count": len(view.before) + len(view.after),
        "repeat": Markup.escape(block("\n".join(verdict.repeat))) if verdict.repeat else "",
        **_runs(view),
        "versions": sections.flat(dict(verdict.versions)) or [["", "not recorded"]],
        "machine": _machine(verdict.machine) or [["", "not recorded"]],
        "config": sections.config(view),
        "settings": sections.settings(view),
        "provenance": sections.flat(dict(next((a.run.record.provenance for a in (*view.after, *view.before)), {}))),
        "footer": f"Written by pytest-kvcache {__version__}. Session {verdict.session}.",
    }
    present = {
        "findings": context["diagnosed"].shows,
        "diff": context["diff"],
        "numbers": context["numbers"].rows,
        "time": timelines,
        "rejections": context["rejections"].rows,
    }
    present |= {"payload": context["payload"].rows, "demand": context["demand"].rows}
    present |= {"memory": context["ledgers"], **{name: context[name].rows for name in ("sweep", "waste", "balance")}}
    present |= {"search": context["search"], "pairs": context["pairs"], "latency": context["latency"].rows, "quality": context["quality"]}
    names = {
        "findings": "Findings", "diff": "Configuration", "compared": "Compared" if view.compared else "Measured", "gates": "Gates", "pairs": "Pairs", "search": "Search", "sweep": "Sweep", "numbers": "Three numbers", "time": "Over time",
        "payload": "What fills the pool", "demand": "Peak and pool", "memory": "Memory", "waste": "Waste", "balance": "Balance",
        "rejections": "Rejections", "latency": "Latency", "quality": "Quality", "validity": "Validity", "again": "Repeat", "environment": "Environment",
    }  # fmt: skip
    context["contents"] = [(id, name) for id, name in names.items() if id not in present or present[id]]
    return _template().render(context)


def _search(view: SessionView) -> dict[str, Any] | None:
    found = knee.section(view)
    return {"table": found["table"], "chart": _drawn(found["draw"])} if found else None


def _moment(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(wall_s)) if 0 < wall_s < 4e9 else ""


def _period(start_s: float, end_s: float) -> str:
    if not 0 < start_s < 4e9:
        return ""
    took = (
        f", took {round(end_s - start_s)} s"
        if 0 < end_s - start_s < 600
        else f", took {round((end_s - start_s) / 60)} min"
        if end_s > start_s
        else ""
    )
    return _moment(start_s) + took


def _facts(view: SessionView) -> list[tuple[str, str]]:
    verdict = view.verdict
    rows = [
        ("engine", f"{verdict.engine} {verdict.engine_version}".strip()),
        ("model", verdict.model),
        ("compared" if view.compared else "measured", plain(verdict.comparison, 400)),
        ("Runs", str(len(view.before) + len(view.after))),
    ]
    return [(name, value) for name, value in rows if value]


def _machine(machine: dict[str, Any]) -> list[list[str]]:
    shown = {name: units.show_bytes(v) if name.endswith("_bytes") and isinstance(v, int | float) else v for name, v in machine.items()}
    return [[name.removesuffix("_bytes").replace("_", " "), text] for name, text in sections.flat(shown)]


def _gate(view: SessionView, gate: GateRecord, methods: Sequence[str]) -> dict[str, Any]:
    value = show_record(gate.value)
    before, after = show_record(gate.before), show_record(gate.after)
    if gate.before is None and gate.after is None and view.compared:
        before, after, value = (value, "", "") if gate.side == "before" else ("", value, "")
    # in a comparison that column says how much worse a change is: the interval of a single side has no place in it
    interval = show_interval(gate) if not view.compared or gate.before is not None or gate.after is not None else ""
    missing = gate.value.missing if gate.value is not None else None
    text = gate_sentence(gate) or missing or ""
    text = text if gate.verdict != "PASS" or gate.before is not None or gate.bound is None else ""
    return {
        "verdict": shown_verdict(gate),
        "kind": "unsure" if warns(gate) else _KINDS.get(gate.verdict, "unsure"),
        "title": gate_title(gate),
        "text": text,
        "beside": beside(view, gate),
        "better": better if (better := improvement(gate)) not in text else "",
        "note": methods.index(method) + 1 if (method := plain(gate.method, 300)) in methods else 0,
        "before": before,
        "after": after,
        "value": value or interval,
        "interval": interval if value else "",
        "bound": show_bound(gate),
        "href": quote(gate.evidence) if len(gate.evidence) < 300 and _EVIDENCE.match(gate.evidence) else "",
        "bullet": bullet(gate),
    }


def bullet(gate: GateRecord) -> dict[str, Any] | None:
    """Return where value, interval and bound lie on a line of 130 units, with the side that passes; None where there is no number."""
    value = (
        gate.value.value if gate.value is not None and isinstance(gate.value.value, int | float) and not isinstance(gate.value.value, bool) else None
    )
    real = [float(x) for x in (value, gate.low, gate.high) if x is not None and math.isfinite(x)]
    if gate.bound is None or not math.isfinite(gate.bound) or not real:
        return None
    low, high = min(*real, gate.bound), max(*real, gate.bound)
    if gate.unit == "ratio" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low > 0:
        low = 0.0
    room = (high - low) * 0.08 or 1.0
    start, end = low - (room if low < 0 else 0), high + room

    def at(x: float) -> float:
        return round(4 + 122 * (min(max(x, start), end) - start) / (end - start), 1)

    text = gate.bound_text.lower()
    better = QUANTITIES[base].better if (base := gate.quantity.split(".", 1)[0]) in QUANTITIES else ""
    way = "lower" if re.search(r"<|≤|at most|no more|not more", text) else "higher" if re.search(r">|≥|at least|no less|not less", text) else better
    bound = at(gate.bound)
    good = (0.0, bound) if way == "lower" else (bound, round(130 - bound, 1)) if way == "higher" else None
    ends = (
        (None, None)
        if gate.low is None and gate.high is None
        else (at(gate.low if gate.low is not None else start), at(gate.high if gate.high is not None else end))
    )
    return {
        "value": at(float(value)) if value is not None and math.isfinite(value) else None,
        "low": ends[0],
        "high": ends[1],
        "bound": bound,
        "good": good,
    }


def _drawn(draw: Callable[[], str], **caption: str) -> dict[str, Any]:
    """Return a chart, or why it could not be drawn: whatever a chart trips over, the rest of the report stands."""
    from markupsafe import Markup

    item: dict[str, Any] = {"svg": "", "error": "", "caption": "", "side": "", **caption}
    try:
        item["svg"] = Markup(draw())  # noqa: S704 (made by charts, which escapes all text)
    except Exception as error:
        item["error"] = plain(f"{type(error).__name__}: {error}", 300).rstrip(".")
    return item


def _timelines(view: SessionView) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the charts of each load, and the names of the loads in which nothing ever ran or was held."""
    found: list[dict[str, Any]] = []
    undrawn: list[str] = []
    for number, profile in enumerate(view.profiles()):
        by_side = [(side, windows, [t for a in windows for t in traces(a)]) for side, _ in view.sides() if (windows := view.of(profile, side))]
        by_side = [entry for entry in by_side if any(len(t.t_s) for t in entry[2])]
        if by_side and any(t.busy() for _, _, seen in by_side for t in seen):
            found.append({"name": plain(profile, 60), "number": number, "sides": by_side, "profile": profile, "notes": [], "lead": ""})
        elif by_side:
            undrawn.append(plain(profile, 60))
    lines = sum(min(len(t), charts.MAX_LINES) * 6 for entry in found[:MAX_PROFILES] for _, _, t in entry["sides"])
    for entry in found[:MAX_PROFILES]:
        entry["charts"] = _time_charts(view, entry, lines)
        for side, _, seen in entry["sides"]:
            if len(seen) > charts.MAX_LINES:
                entry["notes"].append(f"{side or 'measured'}: the {charts.MAX_LINES} lines with the highest peaks of {len(seen)} are drawn.")
    return found[:MAX_PROFILES], undrawn


def _time_charts(view: SessionView, entry: dict[str, Any], lines: int) -> list[dict[str, Any]]:
    profile, number, by_side = entry["profile"], entry["number"], entry["sides"]
    bounds = [
        g.bound
        for g in view.verdict.gates
        if g.quantity == "usage.peak"
        and g.lane in {windows[0].run.record.profile for _, windows, _ in by_side} | {""}
        and g.bound is not None
        and g.before is None
    ]
    common = charts.scale_of([t for _, _, seen in by_side for t in seen], "", "", bounds[0] if bounds else None)
    items = []
    for side, windows, seen in by_side:
        tightest = at_peak(windows)
        pool = next((show_value(v) for a in windows for n in ("pool_tokens", "pool_blocks") if isinstance(v := a.values.get(n), Reading)), "")
        servers = max((len(a.run.record.endpoints) for a in windows), default=1)
        pool += f" on {servers} servers" if pool and servers > 1 else ""
        scale = charts.Scale(common.start_s, common.end_s, common.free, common.requests, common.tokens, free_unit(windows), pool, common.bound)
        numbers = three_numbers(tightest) if tightest else ""
        halves = [("usage", "free", "requests", "tokens")] if view.compared else [("usage", "free"), ("requests", "tokens")]
        for half, panels in enumerate(halves):
            label = f"{plain(profile, 60)} {side}: {', '.join(panels)} over time. {numbers}"
            colour = svg.BEFORE if side == "before" else svg.AFTER
            key = f"t{number}{side[:1]}{half}"

            def draw(
                seen: Sequence[charts.Trace] = seen,
                scale: charts.Scale = scale,
                panels: Sequence[str] = panels,
                key: str = key,
                label: str = label,
                colour: str = colour,
            ) -> str:
                return charts.time_chart(seen, scale, key=key, label=label, colour=colour, panels=panels, lines=lines)

            items.append(_drawn(draw, side=side, caption=numbers if view.compared else ""))
    if not view.compared:
        entry["lead"] = numbers
    return items


def _quality(view: SessionView) -> dict[str, Any] | None:
    rates = sections.quality(view)
    if not rates:
        return None

    def draw() -> str:
        from scipy.stats import binomtest

        sides = []
        for side, lengths in rates.items():
            cells = {}
            for length, (passed, asked) in lengths.items():
                interval = binomtest(passed, asked).proportion_ci(method="exact") if asked else None
                cells[length] = (passed, asked, float(interval.low), float(interval.high)) if interval else (0, 0, 0.0, 0.0)
            sides.append(charts.Rates(side, cells))
        words = "; ".join(
            f"{side or 'measured'} {sum(p for p, _ in v.values())} of {sum(a for _, a in v.values())} right" for side, v in rates.items()
        )
        return charts.quality_chart(sides, key="q", label=f"Share of right answers by prompt length: {words}")

    totals = [f"{side or 'measured'}: {sum(p for p, _ in v.values()):,} of {sum(a for _, a in v.values()):,} right" for side, v in rates.items()]
    notes = ["Bars carry the exact 95 % interval of each rate (Clopper and Pearson)."]
    longest = max(len(v) for v in rates.values())
    if longest > charts.MAX_LENGTHS:
        notes.append(f"The {charts.MAX_LENGTHS} lengths with the lowest rates of {longest} are drawn.")
    return {
        "chart": _drawn(draw, caption=" · ".join(totals)),
        "broken": sections.broken_lengths(rates)[:60],
        "notes": notes,
        "lines": answers.lines(view),
        "wide": longest > 10,
    }


def _runs(view: SessionView) -> dict[str, Any]:
    everything: list[tuple[str, Analysis]] = [(side, a) for side, analyses in view.sides() for a in analyses]
    runs = []
    for side, analysis in everything[:MAX_RUNS]:
        record, folder = analysis.run.record, analysis.run.folder
        # Only files of our own names, and only inside the session: a record cannot make the page link elsewhere.
        inside = folder.parent.name == "runs"
        files = [(name, f"runs/{quote(folder.name)}/{name}") for name in _FILES if inside and (folder / name).is_file()]
        when = time.strftime("%H:%M:%S", time.gmtime(record.started_wall_s)) if 0 < record.started_wall_s < 4e9 else ""
        runs.append({"name": folder.name, "side": side, "profile": record.profile, "window": record.window + 1, "when": when, "files": files})
    logs = [(path.name, quote(path.name)) for path in sorted(view.folder.glob("server*.log"))[:8]]
    return {"runs": runs, "more_runs": max(len(everything) - MAX_RUNS, 0), "logs": logs}
