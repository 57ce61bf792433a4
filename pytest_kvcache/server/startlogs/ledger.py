"""The memory lines of a start-up log, added up: what the card's share went to, and whether it fits."""

from __future__ import annotations

import re

from pytest_kvcache.server.rootcause import log_lines

_F = r"([0-9]{1,12}(?:\.[0-9]{1,18})?)"
_GIB = 1 << 30
# Figures are printed with two decimals each; a sum of five of them may be off by this much.
_ROUNDING_GIB = 0.03
# vLLM keeps 150 MiB back from the sizes that it suggests.
_RESERVE_GIB = 0.15

_V0_BUDGET = re.compile(rf"total_gpu_memory \({_F} ?GiB\) x gpu_memory_utilization \({_F}\) = {_F} ?GiB")
_V0_PARTS = re.compile(
    rf"model weights take {_F} ?GiB; non_torch_memory takes {_F} ?GiB; PyTorch activation peak memory takes {_F} ?GiB;"
    rf" the rest of the memory reserved for KV Cache is {_F} ?GiB"
)
_V1 = re.compile(
    rf"Free memory on device[^(]{{0,40}}\({_F}/{_F} GiB\) on startup\. Desired GPU memory utilization is \({_F}, {_F} GiB\)\. Actual usage is"
    rf" {_F} GiB for weight, {_F} GiB for peak activation, {_F} GiB for non-torch memory, and {_F} GiB for CUDAGraph memory"
)
_IN_USE = re.compile(r"Current kv cache memory in use is ([0-9]{1,18}) bytes")
_SUGGESTED = re.compile(r"--kv-cache-memory(?:-bytes)?[= ](-?[0-9]{1,18})\b")
_SGLANG = re.compile(rf"\bavailable_gpu_mem={_F} GB")
_LOADED = re.compile(rf"(?:model weights took|Model loading took) {_F} ?(?:GiB|GB)", re.IGNORECASE)
_TRT = re.compile(rf"Memory usage when calculating max tokens in paged kv cache: total: {_F} GiB, available: {_F} GiB")


def memory_notes(text: str) -> list[str]:
    """Return one sentence for each memory line of a start-up log, with its figures added up. Never raises; sizes are in GiB."""
    notes: dict[str, None] = {}
    budget: tuple[float, float, float] | None = None
    for line in log_lines(text[: 4 << 20], 2000):
        if "emory" not in line and "gpu_mem" not in line and "took" not in line:
            continue
        match = _V0_BUDGET.search(line)
        if match is not None:
            budget = (float(match.group(1)), float(match.group(2)), float(match.group(3)))
        match = _V0_PARTS.search(line)
        if match is not None:
            notes[_v0(budget, *(float(part) for part in match.groups()))] = None
        match = _V1.search(line)
        if match is not None:
            for note in _v1(line, *(float(part) for part in match.groups())):
                notes[note] = None
        match = _SGLANG.search(line)
        if match is not None:
            notes[f"{float(match.group(1)):g} GiB of a card are left beside weights and pool, for activations and graphs"] = None
        match = _LOADED.search(line)
        if match is not None:
            notes[f"the weights took {float(match.group(1)):g} GiB"] = None
        match = _TRT.search(line)
        if match is not None:
            notes[f"{float(match.group(2)):g} of {float(match.group(1)):g} GiB were free when the pool was sized"] = None
    return list(notes)[:20]


def memory_parts(text: str) -> dict[str, float]:
    """Return what a start-up log says of one card, in GiB: ``card``, ``share`` (a ratio), ``free``, ``weights``, ``activation``, ``other``, ``graphs``, ``pool``.

    Of several starts or workers the last counts. What is not printed is not in it. Never raises.
    """
    found: dict[str, float] = {}
    for line in log_lines(text[: 4 << 20], 2000):
        if "emory" not in line and "took" not in line:
            continue
        if (match := _V0_BUDGET.search(line)) is not None:
            found |= {"card": float(match.group(1)), "share": float(match.group(2))}
        if (match := _V0_PARTS.search(line)) is not None:
            found |= dict(zip(("weights", "other", "activation", "pool"), map(float, match.groups()), strict=True))
        if (match := _V1.search(line)) is not None:
            names = ("free", "card", "share", "budget", "weights", "activation", "other", "graphs")
            found |= dict(zip(names, map(float, match.groups()), strict=True))
            found.pop("budget")
        if (match := _IN_USE.search(line)) is not None:
            found["pool"] = int(match.group(1)) / _GIB
        if (match := _LOADED.search(line)) is not None:
            found.setdefault("weights", float(match.group(1)))
    return found


def _v0(budget: tuple[float, float, float] | None, weights: float, other: float, peak: float, pool: float) -> str:
    parts = f"weights {weights:g} + activation peak {peak:g} + other {other:g} + KV pool {pool:g} GiB"
    total = weights + other + peak + pool
    if budget is None:
        return f"{parts} = {total:.2f} GiB"
    card, share, allowed = budget
    gap = total - allowed
    fits = "adds up" if abs(gap) <= _ROUNDING_GIB else f"is {abs(gap):.2f} GiB {'over' if gap > 0 else 'under'} it"
    return f"{parts} = {total:.2f} GiB; the share is {share:g} x {card:g} = {allowed:g} GiB: it {fits}"


def _v1(line: str, free: float, total: float, share: float, allowed: float, *held: float) -> list[str]:
    weights, peak, other, graphs = held
    notes = []
    match = _IN_USE.search(line)
    if match is not None:
        pool = int(match.group(1)) / _GIB
        spent = weights + peak + other + graphs + pool
        gap = spent - allowed
        fits = f"{gap:.2f} GiB over it" if gap > _ROUNDING_GIB else "within it"
        notes.append(
            f"weights {weights:g} + activation peak {peak:g} + other {other:g} + graphs {graphs:g} + KV pool {pool:.2f} = {spent:.2f} GiB;"
            f" the share is {share:.3g} x {total:g} = {allowed:g} GiB: {fits}"
        )
        if gap > _ROUNDING_GIB:
            left = f"{free - spent:.2f} GiB are left" if spent < free else f"{spent - free:.2f} GiB more than there was: out of memory is near"
            notes.append(f"the pool was sized before the graphs ({graphs:g} GiB) were there; {free:g} GiB were free at the start: {left}")
    for text in _SUGGESTED.findall(line):
        suggested = int(text)
        floor = (free - weights - peak - other - graphs) * _GIB
        if suggested <= 0:
            notes.append(f"the log suggests --kv-cache-memory={suggested}, which cannot be: do not copy it")
        elif suggested > floor:
            notes.append(
                f"the log suggests --kv-cache-memory={suggested} ({suggested / _GIB:.2f} GiB), more than the {floor / _GIB:.2f} GiB that were free for it"
            )
        elif suggested < (least := _least(line, allowed - weights - peak - other, graphs)) * _GIB:
            notes.append(
                f"the log suggests --kv-cache-memory={suggested} ({suggested / _GIB:.2f} GiB), less than the {least:.2f} GiB that are left once the graphs"
                f" ({graphs:g} GiB) are taken off once: they may be counted twice, so do not copy it"
            )
        else:
            notes.append(f"the log suggests --kv-cache-memory={suggested} ({suggested / _GIB:.2f} GiB)")
    return notes


def _least(line: str, left: float, graphs: float) -> float:
    """Return the least that a suggestion can be, in GiB: what the share leaves, or what is in use where that is less, without graphs and reserve."""
    match = _IN_USE.search(line)
    pool = int(match.group(1)) / _GIB if match is not None else left
    return min(pool, left) - graphs - _RESERVE_GIB - _ROUNDING_GIB
