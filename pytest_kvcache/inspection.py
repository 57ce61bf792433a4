"""``pytest-kvcache inspect``: files, standard input, a running server, or a fleet in a Prometheus server. Reads only."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pytest_kvcache import units
from pytest_kvcache.engines import DIALECTS, RawState, clean, imported
from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.observe.extremes import COUNTED, extremes
from pytest_kvcache.observe.fleet_cards import Cards, read_cards
from pytest_kvcache.observe.inspecting import Inspection, inspect, of_fleet, read_sources
from pytest_kvcache.observe.prometheus import Prometheus, Target
from pytest_kvcache.observe.scrape import fetch
from pytest_kvcache.observe.showing import as_json, as_text
from pytest_kvcache.server.address import metrics_page, parse_endpoint
from pytest_kvcache.settings import Settings


def run_inspect(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print what was found and return the exit code: 0, or 3 where it cannot be judged. Raises KvError."""
    if arguments.prometheus:
        if arguments.sources:
            raise UsageError("--prometheus and files exclude each other", hint="one source at a time")
        return _fleet(arguments, settings)
    if arguments.at or arguments.window or arguments.step or arguments.selector or arguments.cards:
        raise UsageError("--at, --window, --step, --selector and --cards belong to --prometheus", hint="name the server with --prometheus URL")
    names = arguments.sources or ([] if sys.stdin.isatty() else ["-"])
    urls = [name for name in names if name.lower().startswith(("http://", "https://")) and not Path(name).exists()]
    if len(urls) > 1:
        raise UsageError("one running server at a time", hint="save the scrapes of several into files, or use --prometheus")
    live, shown = running(urls[0], settings) if urls else (None, "")
    files = [name for name in names if name not in urls]
    own = [imported(settings.engine_from)] if settings.engine_from else []
    dialects = [*own, *(dialect for name, dialect in DIALECTS.items() if name not in {other.name for other in own})]
    engine = own[0].name if own and settings.engine == "auto" else settings.engine
    found = inspect(read_sources(files) if files or not urls else [], engine=engine, live=live, dialects=dialects, model=settings.model)
    if shown:
        found.inputs.insert(0, shown)
    return _print(found, arguments.json)


def running(url: str, settings: Settings) -> tuple[RawState, str]:
    """Return what a running server says. An address that ends in a path of telemetry stands for its server."""
    text = url.strip().rstrip("/")
    if text.endswith("/metrics"):
        page = metrics_page(text, settings)
        text = page.endpoint.root if page.path in ("/metrics", "/prometheus/metrics", "/v1/metrics") else text.removesuffix("/metrics")
    endpoint = parse_endpoint(text, settings)
    own = [imported(settings.engine_from)] if settings.engine_from else None
    return fetch(endpoint, timeout_s=settings.scrape_timeout_s, candidates=own), f"{endpoint.shown}: a running server"


def _print(found: Inspection, machine: bool) -> int:
    if machine:
        print(json.dumps(as_json(found), indent=1, ensure_ascii=True))
    elif found.judged:
        print(as_text(found, shutil.get_terminal_size((100, 40)).columns))
    if found.judged:
        return 0
    notes = "" if machine else "".join(f"\n  - {clean(note, 500)}" for note in found.notes)
    raise CannotJudge(clean(found.why, 1500) + notes, hint="paste /metrics, or name the engine: --engine vllm; a start-up log helps as well")


def prometheus_of(arguments: argparse.Namespace, settings: Settings) -> Prometheus:
    """Return the Prometheus server that a command line names, with its selector and key. Raises UsageError."""
    return Prometheus(
        arguments.prometheus,
        arguments.selector,
        api_key_env=arguments.prometheus_api_key_env,
        ca=settings.ca,
        proxy=settings.proxy,
        timeout_s=max(settings.scrape_timeout_s, 30.0),
        model=settings.model,
    )


def _fleet(arguments: argparse.Namespace, settings: Settings) -> int:
    at = time_of(arguments.at)
    with prometheus_of(arguments, settings) as server:
        end = time.time() if at is None else at
        if not arguments.window:
            fleet = server.snapshot(end)
            cards = read_cards(server, fleet.labels, end, end, 1.0, arguments.cards)
            found = of_fleet(fleet, cards.rows)
            found.notes += [f"cards: {cards.note}"] if cards.note else []
            return _print(found, arguments.json)
        length, step = units.parse_seconds(arguments.window), step_of(arguments.step)
        targets = server.window(end - length, end, step)
        cards = read_cards(server, [target.labels for target in targets], end - length, end, step, arguments.cards)
    if arguments.json:
        print(json.dumps({**_window_json(targets), **_cards_json(cards)}, indent=1, ensure_ascii=True))
    else:
        print(_window_text(targets, end - length, end))
        print(_cards_text(cards), end="")
    if not any(row.values for target in targets for row in target.rows):
        raise CannotJudge("no target told a quantity in this window", where=server.endpoint.shown, hint="another --at, or a wider --window")
    return 0


def step_of(text: str) -> float | None:
    """Return the seconds of ``--step``; None, which is a step by the window's length, where it is not given. Raises UsageError."""
    return units.parse_seconds(text) if text else None


def time_of(text: str) -> float | None:
    """Return Unix seconds of ``--at``; None where it is not given. Raises UsageError."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise UsageError("--at is no time", where=clean(text, 60), hint="Unix seconds, or 2026-11-29T08:30:00Z") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(value) or not 0 < value < 1e11:
        raise UsageError("--at is no time", where=clean(text, 60), hint="Unix seconds, or 2026-11-29T08:30:00Z")
    return value


def _window_json(targets: Sequence[Target]) -> dict[str, object]:
    import msgspec

    return {
        "targets": [
            {
                "name": target.name,
                "labels": dict(target.labels),
                "engine": target.dialect.name if target.dialect is not None else "unknown",
                "error": target.error,
                "summary": extremes(target.rows),
                "gaps": sum(bool(row.error) for row in target.rows),
                "rows": msgspec.to_builtins(target.rows),
            }
            for target in targets
        ]
    }


def _cards_json(cards: Cards) -> dict[str, object]:
    import msgspec

    return {
        "cards": [{"card": msgspec.to_builtins(one.card), "least_free_bytes": one.least_free_bytes, "points": one.points} for one in cards.windows],
        "cards_note": cards.note,
    }


def _cards_text(cards: Cards) -> str:
    from tabulate import tabulate

    if not cards.windows:
        return f"- cards: {clean(cards.note, 400)}\n" if cards.note else ""
    rows = [
        (
            one.card.host or "-",
            one.card.index if one.card.index >= 0 else one.card.uuid,
            one.card.name,
            units.show_bytes(one.card.used_bytes),
            units.show_bytes(one.least_free_bytes),
            units.show_bytes(one.card.total_bytes),
            ", ".join(f"{name} {value}" for name, value in one.card.labels.items()),
            one.points,
        )
        for one in cards.windows
    ]
    heads = ("node", "card", "model", "used peak", "free min", "of total", "of", "points")
    return f"\n{tabulate(rows, headers=heads, disable_numparse=True)}\n\n- cards: {clean(cards.note, 400)}\n"


def _window_text(targets: Sequence[Target], start: float, end: float) -> str:
    from tabulate import tabulate

    heads = ("target", "engine", "usage peak", "free min", "of pool", "running peak", "waiting peak", "preempted", "refused", "points", "gaps")
    rows = []
    for target in targets:
        told = extremes(target.rows)
        free = next(((told[f"{name}.min"], name.removeprefix("free_")) for name in ("free_blocks", "free_tokens") if f"{name}.min" in told), None)
        pool = told.get("usable_blocks", told.get("pool_tokens"))
        rows.append(
            (
                target.name,
                target.dialect.title if target.dialect is not None else "unknown",
                units.show(told["usage.peak"], "ratio") if "usage.peak" in told else "-",
                f"{free[0]:,.0f} {free[1]}" if free else "-",
                f"{pool:,.0f}" if pool is not None else "-",
                *(f"{told[name]:,.0f}" if name in told else "-" for name in ("running.peak", "waiting.peak", *COUNTED)),
                len(target.rows),
                sum(bool(row.error) for row in target.rows),
            )
        )
    between = " to ".join(datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") for moment in (start, end))
    notes = [f"- {target.name}: {clean(target.error, 300)}" for target in targets if target.error]
    return "\n".join(
        [
            between,
            "",
            tabulate(rows, headers=heads, disable_numparse=True),
            "",
            *notes,
            "- a peak between two scrapes of Prometheus is not seen: usage peaks are lower bounds, preemptions and refusals are counted",
        ]
    )
