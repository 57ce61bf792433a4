"""A plan as text for a terminal, as Markdown for a change request, and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_kvcache import units
from pytest_kvcache.capacity.layout import Group, Layout, Pool

if TYPE_CHECKING:
    from pytest_kvcache.capacity.agreement import Compared
    from pytest_kvcache.capacity.levers import Lever
    from pytest_kvcache.capacity.planner import Plan
    from pytest_kvcache.capacity.verdicts import Checked

Rows = list[tuple[str, str]]
_AGREED = {
    "equal": "",
    "explained": ": every difference has a name",
    "different": ": a difference has no name, which is a finding",
    "untold": ": it tells nothing to compare",
}
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values: sizes in bytes, lengths in tokens; of one GPU or one engine where there are several. None where there is no pool."""
    given = plan.answer
    growth, layout, pool, shape = given.growth, given.layout, given.pool, given.question.shape
    body: dict[str, Any] = {
        "model": given.question.architecture.name,
        "model_type": given.question.architecture.model_type,
        "engine": shape.engine,
        "growth_bytes_per_token": growth.growth_bytes_per_token,
        "fixed_bytes": growth.fixed_bytes,
        "sliding_bytes_per_token": growth.sliding_bytes_per_token,
        "sliding_saturated_bytes": growth.sliding_saturated_bytes,
        "window": growth.window,
        "kv_dtype": growth.kv_dtype,
        "length": plan.length,
        "bytes_per_sequence": plan.bytes_per_sequence,
        "blocks_per_sequence": plan.blocks_per_sequence,
        "max_model_len": given.max_model_len,
        "block_size": layout.block_size,
        "bytes_per_block": layout.bytes_per_block,
        "unit": layout.unit,
        "groups": [_group(group) for group in layout.groups],
        "pool_bytes": pool.pool_bytes if pool else None,
        "pool_blocks": pool.pool_blocks if pool else None,
        "usable_blocks": pool.usable_blocks if pool else None,
        "pool_tokens": pool.pool_tokens if pool else None,
        "blocks_per_request": pool.blocks_per_request if pool else given.blocks(given.max_model_len),
        "max_concurrency": pool.max_concurrency if pool else None,
        "requests": given.requests(plan.length) * pool.engines if pool else None,
        "longest": pool.longest if pool else None,
        "starts": given.starts,
        "reason": given.reason,
        "verdict": plan.verdict,
        "verdict_text": plan.reason,
        "equations": dict(equations(plan)),
        "layers": [_layer(layer) for layer in given.question.architecture.layers],
        "tp": shape.tp, "pp": shape.pp, "dp": shape.dp, "dcp": shape.dcp,
        "assumptions": list(plan.assumptions),
        "notes": list(plan.notes),
    }  # fmt: skip
    if given.ledger is not None:
        body["ledger"] = {
            "budget_bytes": given.ledger.budget_bytes,
            "lines": [{"name": name, "bytes": value, "source": source} for name, value, source in given.ledger.lines],
            "kv_bytes": given.ledger.kv_bytes,
            "idle_bytes": given.ledger.idle_bytes,
        }
    body |= _traffic_json(plan)
    if plan.checklist:
        body["checklist"] = [
            {**asdict(one.input), "blocks": one.blocks, "share": _finite(one.share), "fits": one.fits, "verdict": one.verdict, "reason": one.reason}
            for one in plan.checklist
        ]
    if plan.agreement is not None:
        agreement = plan.agreement
        body["agreement"] = {
            "verdict": agreement.verdict,
            "rows": [asdict(row) for row in agreement.rows],
            "explanations": list(agreement.explanations),
        }
    if plan.levers:
        body["levers"] = [asdict(lever) for lever in plan.levers]
    return body


def _traffic_json(plan: Plan) -> dict[str, Any]:
    load = plan.load
    if load is None:
        return {}
    return {
        "traffic": {
            "source": load.traffic.source,
            "concurrency": load.traffic.concurrency,
            "longest": load.traffic.longest,
            "peak_blocks": load.demand.peak_blocks,
            "mean_blocks": load.demand.mean_blocks,
            "replayed_blocks": load.demand.replayed_blocks,
            "peak_bytes": load.kv_bytes,
            "lanes": [
                {"name": name, "concurrency": count, "longest": longest, "peak_blocks": blocks}
                for name, count, longest, blocks in load.demand.by_lane
            ],
            "overflow": {**asdict(load.chance), "error": load.chance.error} if load.chance else None,
            "safe_concurrency": asdict(load.safe) if load.safe else None,
            "longest_at_this_concurrency": load.longest if load.safe else None,
            "cards": [asdict(need) for need in load.needs],
        }
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _layer(layer: Any) -> dict[str, Any]:
    body = {"kind": layer.kind}
    for name in ("kv_heads", "key_size", "value_size", "window", "latent", "index_size"):
        if getattr(layer, name):
            body[name] = getattr(layer, name)
    if layer.state is not None:
        body["state"] = layer.state.family
    return body


def _group(group: Group) -> dict[str, Any]:
    return {
        "kind": group.kind, "layers": group.layers, "padding": group.padding, "block_size": group.block_size, "page_bytes": group.page_bytes,
        "window": group.window, "states": group.states,
    }  # fmt: skip


def equations(plan: Plan) -> Rows:
    """Return the equations with their numbers, in the order in which they are worked out."""
    given = plan.answer
    growth, layout, pool = given.growth, given.layout, given.pool
    rows: Rows = [("growth", f"{growth.derivation} B/token{_per_gpu(plan)}")]
    rows.append(("sequence", _sequence(plan)))
    if given.memory:
        rows.append(("memory", given.memory))
    if pool is not None and layout.bytes_per_block and layout.unit == "blocks":
        pages = max((group.layers + group.padding for group in layout.groups), default=0)
        pp = given.question.shape.pp
        stage = ""
        if pp > 1:
            stage = f", on the fullest of {pp} pipeline stages"
            pages = max((max(group.stage_bytes, default=0) // group.page_bytes for group in layout.groups if group.page_bytes), default=0)
        rows.append(("block", f"{pages} layers a group{stage} -> {layout.bytes_per_block:,} B"))
        override = given.question.shape.num_gpu_blocks_override
        rows.append(
            ("pool", f"{pool.pool_blocks:,} blocks, set by num_gpu_blocks_override")
            if override is not None
            else ("pool", f"{pool.pool_bytes:,} B // {layout.bytes_per_block:,} B = {pool.pool_blocks:,} blocks")
        )
    elif pool is not None:
        rows.append(("pool", f"{pool.pool_bytes:,} B -> {pool.pool_blocks:,} {layout.unit}"))
    if layout.groups:
        rows.append(
            (
                "request",
                f"{request_equation(layout, given.max_model_len)} = {given.blocks(given.max_model_len):,} {layout.unit} at {given.max_model_len:,} tokens",
            )
        )
    if pool is not None and pool.blocks_per_request:
        rows.append(("capacity", f"{_capacity(layout, pool)} requests of {pool.max_model_len:,} tokens"))
    return rows


def _capacity(layout: Layout, pool: Pool) -> str:
    if layout.unit == "cells" and not layout.unified:
        return f"{layout.slots} slots of {pool.pool_blocks // max(layout.slots, 1):,} cells = {pool.max_concurrency:.2f}"
    whole = pool.pool_blocks / pool.blocks_per_request
    bounded = "" if abs(whole - pool.max_concurrency) < 0.005 else f", and {pool.max_concurrency:.2f} by the slots:"
    return f"{pool.pool_blocks:,} / {pool.blocks_per_request:,} = {whole:.2f}{bounded}"


def _per_gpu(plan: Plan) -> str:
    shape = plan.answer.question.shape
    return "" if shape.tp * shape.pp == 1 else f" on one of {shape.tp * shape.pp} GPUs"


def _sequence(plan: Plan) -> str:
    growth, length = plan.answer.growth, plan.length
    shared = growth.shared_by
    parts = [f"ceil({length:,}/{shared}) x {growth.held_bytes_per_token:,}" if shared > 1 else f"{length:,} x {growth.growth_bytes_per_token:,}"]
    parts += [f"min({length:,}, {window:,}) x {per_token:,}" for window, per_token in growth.windows]
    if growth.fixed_bytes:
        parts.append(f"{growth.fixed_bytes:,}")
    encoder = plan.answer.question.shape.encoder_tokens
    if encoder and growth.cross_bytes_per_encoder_token:
        parts.append(f"{encoder:,} x {growth.cross_bytes_per_encoder_token:,}")
    total = plan.bytes_per_sequence
    return f"{' + '.join(parts)} = {total:,} B = {units.show_bytes(total)}"


def request_equation(layout: Layout, tokens: int) -> str:
    """Return what one request is charged in each group, as arithmetic; equal groups are one term."""
    if layout.engine == "llamacpp":
        return f"one cell a token: {tokens:,}"
    terms: dict[str, int] = {}
    if layout.engine == "sglang" and (window := next((group.window for group in layout.groups if group.window), None)):
        page = layout.block_size
        return f"max(ceil({tokens:,}/{page}), ceil(min({tokens:,}, {window:,}+{page})/{page}) / {layout.shape.swa_ratio:g})"
    for group in layout.groups:
        size = group.block_size
        if group.kind == "state":
            term = f"{group.states}"
        elif group.kind == "sliding" and group.window is not None:
            term = f"(ceil(min({group.window:,}-1+{layout.in_flight_tokens:,}, {tokens:,})/{size})+1)"
        elif group.kind == "chunked" and group.window is not None:
            term = f"ceil(min({group.window:,}+{layout.in_flight_tokens:,}, {tokens:,})/{size})"
        elif group.kind == "cross":
            term = f"ceil({layout.encoder_tokens:,}/{size})"
        else:
            held = f"{tokens:,}" if layout.shape.dcp == 1 else f"ceil({tokens:,}/{layout.shape.dcp})"
            term = f"ceil({held}/{size})"
        terms[term] = terms.get(term, 0) + 1
    return " + ".join(f"{count} x {term}" if count > 1 else term for term, count in terms.items())


def facts(plan: Plan) -> Rows:
    """Return the rows of the main table."""
    given = plan.answer
    growth, layout, pool = given.growth, given.layout, given.pool
    each = _per_gpu(plan)
    rows: Rows = [("growth", f"{growth.growth_bytes_per_token:,} B/token{each} ({units.show_bytes(growth.growth_bytes_per_token)})")]
    if growth.fixed_bytes:
        rows.append(("fixed", f"{units.show_bytes(growth.fixed_bytes)} per sequence, whatever its length"))
    if growth.window is not None:
        rows.append(("window layers", f"{growth.saturation} ({units.show_bytes(growth.sliding_saturated_bytes)})"))
    if growth.cross_bytes_per_encoder_token:
        rows.append(("cross attention", f"{growth.cross_bytes_per_encoder_token:,} B per image or encoder token"))
    rows.append(
        (f"one sequence of {plan.length:,} tokens", f"{units.show_bytes(plan.bytes_per_sequence)}{each}, {plan.blocks_per_sequence:,} {layout.unit}")
    )
    if given.ledger is not None:
        for name, value, source in given.ledger.lines:
            rows.append((name, f"{units.show_bytes(value)} ({source})"))
    if pool is None:
        return rows
    engines = f", each of {pool.engines} engines" if pool.engines > 1 else ""
    size = f" of {layout.block_size:,} tokens" if layout.unit == "blocks" else ""
    rows.append(("pool", f"{units.show_bytes(pool.pool_bytes)}, {pool.pool_blocks:,} {layout.unit}{size}, {pool.usable_blocks:,} usable{engines}"))
    rows.append(("pool tokens (the engine's figure)", f"{pool.pool_tokens:,}"))
    rows.append((f"requests of {pool.max_model_len:,} tokens", f"{pool.max_concurrency:.2f} (the engine's figure)"))
    if plan.length != pool.max_model_len:
        rows.append((f"requests of {plan.length:,} tokens", f"{given.requests(plan.length) * pool.engines:,} at once"))
    rows.append(("longest request that starts", f"{pool.longest:,} tokens"))
    return rows


def traffic_facts(plan: Plan) -> Rows:
    """Return the rows about traffic; empty where none was stated."""
    load = plan.load
    if load is None:
        return []
    unit, pool = plan.answer.layout.unit, plan.answer.pool
    rows: Rows = [
        (
            "traffic",
            f"{load.traffic.concurrency:,} requests at once, mean {load.traffic.mean:,.0f}, longest {load.traffic.longest:,} tokens ({load.traffic.source})",
        )
    ]
    if len(load.demand.by_lane) > 1:
        rows += [(f"  {name}", f"{count:,} x {longest:,} tokens: {blocks:,} {unit}") for name, count, longest, blocks in load.demand.by_lane]
    of = f" of {pool.usable_blocks:,} usable" if pool is not None else ""
    rows.append(
        (
            "peak",
            f"{load.demand.peak_blocks:,} {unit}{of}; mean {load.demand.mean_blocks:,.0f}; {units.show_bytes(load.kv_bytes)} of pool{_per_gpu(plan)}",
        )
    )
    if load.demand.replayed_blocks is not None:
        rows.append(("peak of that run", f"{load.demand.replayed_blocks:,} {unit} at one moment, each request at its full length"))
    if load.chance is not None and not load.traffic.is_one_shape:
        chance = load.chance
        rows.append(("the sum exceeds the pool", f"{chance.probability:.4f} +/- {chance.error:.4f} ({chance.trials:,} trials, seed {chance.seed})"))
    if load.safe is not None:
        safe = load.safe
        text = f"{safe.always:,} whatever comes"
        if safe.at_risk > safe.always:
            text += f"; {safe.at_risk:,} of this mix at a risk of {safe.risk:g}"
        rows.append(("largest safe concurrency", text + (" per engine" if pool is not None and pool.engines > 1 else "")))
        rows.append(("longest request at this concurrency", f"{load.longest:,} tokens"))
    rows += [
        (
            f"card for it, {need.cards} GPU{'s' if need.cards > 1 else ''}",
            f"{units.show_bytes(need.card_bytes)} each: {need.fits or 'none of the common cards'}",
        )
        for need in load.needs
    ]
    return rows


def plan_text(plan: Plan) -> str:
    """Return the plan for a terminal."""
    from tabulate import tabulate

    parts = [_title(plan), "", tabulate([*facts(plan), *traffic_facts(plan)], tablefmt="plain", disable_numparse=True), ""]
    width = max(len(name) for name, _ in equations(plan))
    parts += [f"  {name.ljust(width)}  {text}" for name, text in equations(plan)]
    for heads, rows in tables(plan):
        parts += ["", tabulate(rows, headers=heads, disable_numparse=True)]
    parts += ["", f"{plan.verdict or 'no verdict'}: {plan.reason}"]
    if plan.agreement is not None:
        parts.append(f"against the engine: {plan.agreement.verdict}{_AGREED[plan.agreement.verdict]}")
    parts += _listed("differences and what moves the figures", _explanations(plan), "- ")
    parts += _listed("assumptions", plan.assumptions, "- ") + _listed("notes", plan.notes, "- ")
    return _printable("\n".join(parts))


def _title(plan: Plan) -> str:
    architecture, shape = plan.answer.question.architecture, plan.answer.question.shape
    cards = shape.tp * shape.pp * shape.dp
    split = f", {cards} GPUs (tp {shape.tp}, pp {shape.pp}, dp {shape.dp})" if cards > 1 else ""
    return f"{architecture.name}: {architecture.model_type or 'model'}, {len(architecture.layers)} layers, KV {plan.answer.growth.kv_dtype}, {shape.engine}{split}"


def _explanations(plan: Plan) -> tuple[str, ...]:
    return plan.agreement.explanations if plan.agreement is not None else ()


def _listed(head: str, lines: tuple[str, ...], mark: str) -> list[str]:
    return ["", f"{head}:", *(f"{mark}{line}" for line in lines)] if lines else []


def tables(plan: Plan) -> list[Table]:
    """Return the tables of the checklist and of the levers, as far as they were asked for."""
    unit = plan.answer.layout.unit
    found: list[Table] = []
    if plan.checklist:
        found.append(
            (("input", "prompt", "output", "at once", f"peak {unit}", "of pool", "verdict", "why"), [_input_row(one) for one in plan.checklist])
        )
    if plan.levers:
        heads = ("lever", "change", f"a {plan.length:,}-token request", f"pool {unit}", "requests", f"peak {unit}", "cost")
        found.append((heads, [_lever_row(one) for one in plan.levers]))
    if plan.agreement is not None:
        found.append((("against the engine", "ours", "the engine's", "", "its source"), [_compared_row(one) for one in plan.agreement.rows]))
    return found


def _compared_row(one: Compared) -> tuple[str, ...]:
    low, high = (_figure(value, one.unit) for value in one.ours)
    return (one.name, low if low == high else f"{low} to {high}", _figure(one.theirs, one.unit), one.verdict, one.source[:90])


def _figure(value: float, unit: str) -> str:
    if unit == "bytes":
        return units.show_bytes(value)
    return f"{value:,.2f}" if unit == "requests" or value != round(value) else f"{value:,.0f}"


def _input_row(one: Checked) -> tuple[str, ...]:
    asked = one.input
    share = units.show(one.share, "ratio") if math.isfinite(one.share) else "-"
    numbers = (f"{asked.prompt:,}", f"{asked.output:,}", f"{asked.concurrency:,}", f"{one.blocks:,}" if one.blocks else "-")
    return (asked.name, *numbers, share, one.verdict or "-", one.reason)


def _lever_row(one: Lever) -> tuple[str, ...]:
    held = units.show_bytes(one.sequence_bytes) if one.sequence_bytes is not None else "-"
    numbers = (f"{value:,}" if value is not None else "-" for value in (one.pool_blocks, one.requests, one.demand_blocks))
    return (one.name, one.change, held, *numbers, one.cost)


def plan_markdown(plan: Plan) -> str:
    """Return the plan for a change request. Text from files is made harmless."""
    from tabulate import tabulate

    def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
        return tabulate([[_cell(text) for text in row] for row in rows], headers=heads, tablefmt="github", disable_numparse=True)

    parts = [f"### KV cache plan: {_cell(_title(plan))}", "", f"**{plan.verdict or 'no verdict'}**: {_cell(plan.reason)}", ""]
    parts += [table(("", "value"), [*facts(plan), *traffic_facts(plan)]), "", "```", *(f"{name}: {text}" for name, text in equations(plan)), "```"]
    for heads, rows in tables(plan):
        parts += ["", table(heads, rows)]
    if plan.agreement is not None:
        parts += ["", f"Against the engine: **{plan.agreement.verdict}**{_AGREED[plan.agreement.verdict]}"]
    parts += _listed("Differences and what moves the figures", tuple(_cell(line) for line in _explanations(plan)), "- ")
    parts += _listed("Assumptions", tuple(_cell(line) for line in plan.assumptions), "- ") + _listed(
        "Notes", tuple(_cell(line) for line in plan.notes), "- "
    )
    return _printable("\n".join(parts))


def _printable(text: str) -> str:
    """Return a text without control characters: names come from files and servers."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'").replace("\n", " ")
