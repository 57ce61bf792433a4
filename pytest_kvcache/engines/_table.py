"""Writes what each engine tells, quantity by quantity, as docs/engines.md holds it. Everything in it comes from the dialects.

Run: ``python -m pytest_kvcache.engines._table docs/engines.md``.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.engines._dialect import Dialect, FirstOf, NoReading, Rule
from pytest_kvcache.quantities import QUANTITIES

_INTRO = """\
# What each engine tells

Made from the dialects in `pytest_kvcache/engines`; `nox -s docs` writes this page again. A quantity that is absent is Missing, with that
reason, and is never taken for zero; a gate on one that cannot happen does not apply. Sources are tried in the order in which they
stand; what they share with a second series is never added. Names are the engine's own: `vllm:x` is read as `vllm_x`, `vllm.x`, `ray_vllm_x`
and `vllm_x_ratio` (OpenTelemetry) as well, and labels that Prometheus renamed to `exported_x` as `x`.
"""


def engine_page(dialects: Iterable[Dialect] = tuple(DIALECTS.values())) -> str:
    """Return the page: how engines are read, a matrix of what they tell, and a table for each with the sources."""
    shown = list(dialects)
    return "\n".join([_INTRO, *_engines(shown), "", *_matrix(shown), "", *(line for dialect in shown for line in _sources(dialect))])


def _engines(dialects: list[Dialect]) -> list[str]:
    lines = [
        "| engine | `--kv-engine` | read at | unit of the pool | idle cached KV | usage gauge, full | from version |",
        "|---|---|---|---|---|---|---|",
    ]
    idle = {True: "is free", False: "is used", None: "not told"}
    for dialect in dialects:
        bodies = [f"`{path.path}`" + (" (only where allowed)" if path.destructive else "") for path in dialect.json_paths]
        read_at = ", ".join([*(f"`{path}`" for path in dialect.metrics_paths), *bodies])
        lines.append(
            f"| {dialect.title} | `{dialect.name}` | {read_at} | {dialect.counts} | {idle[dialect.idle_cached_is_free]}"
            f" | {dialect.gauge_scale:g} | {_cell(dialect.since.get('', ''))} |"
        )
    return lines


def _matrix(dialects: list[Dialect]) -> list[str]:
    lines = [
        "A dot is a quantity that can be read, `log` one that only a start-up log tells, n/a one that cannot happen.",
        "",
        f"| quantity | {' | '.join(dialect.name for dialect in dialects)} |",
        f"|---|{'---|' * len(dialects)}",
    ]
    for name in QUANTITIES:
        lines.append(f"| `{name}` | {' | '.join(_mark(dialect.reads[name]) for dialect in dialects)} |")
    return lines


def _mark(rule: Rule) -> str:
    if isinstance(rule, NoReading):
        return "n/a" if rule.never else ""
    if isinstance(rule, FirstOf) and any(isinstance(inner, NoReading) for inner in rule.rules):
        sources = {type(inner).__name__ for inner in rule.rules} - {"NoReading"}
        return "log" if sources == {"LogFact"} else "•"
    return "•"


def _sources(dialect: Dialect) -> list[str]:
    lines = [f"## {dialect.title}", ""]
    if dialect.meaning:
        lines += [f"{dialect.meaning[0].upper()}{dialect.meaning[1:]}.", ""]
    lines += ["| quantity | unit | read from | since |", "|---|---|---|---|"]
    for name, quantity in QUANTITIES.items():
        since = dialect.since.get(name, "")
        lines.append(f"| `{name}` | {quantity.unit} | {_cell(dialect.reads[name].describe())} | {_cell(since)} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    import sys
    from pathlib import Path

    Path(sys.argv[1]).write_text(engine_page())
