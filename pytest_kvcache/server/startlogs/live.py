"""The periodic lines of a log: what the server said last about running requests and its KV usage.

Sources: vLLM ``v1/metrics/loggers.py`` and V0's ``engine/metrics.py``; SGLang's scheduler ("Decode batch"); LMDeploy
``lmdeploy/metrics/loggers.py``. A log shows usage in percent, rounded: an exact count of blocks cannot be had from it.
"""

from __future__ import annotations

import re

from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value
from pytest_kvcache.server.redaction import redact
from pytest_kvcache.server.rootcause import log_lines
from pytest_kvcache.server.startlogs.reading import FLOAT, INT, to_int

_VLLM = re.compile(
    rf"Running: {INT} reqs,(?: Swapped: {INT} reqs,)? (?:Waiting|Pending): {INT} reqs,[^\n]{{0,200}}?\b(?!CPU)\w{{2,10}}(?: \+ host)? KV cache usage: {FLOAT}%"
)
_VLLM_CPU = re.compile(
    rf"Running: {INT} reqs,(?: Swapped: {INT} reqs,)? (?:Waiting|Pending): {INT} reqs,[^\n]{{0,200}}?\bCPU KV cache usage: {FLOAT}%"
)
_ENGINE = re.compile(r"\bEngine ([0-9]{1,5}): ")
_SGLANG = re.compile(rf"#running-req: {INT}, (?:#(?:full )?token: {INT}, )?[^\n]{{0,200}}?\btoken usage: {FLOAT}\b[^\n]{{0,300}}?#queue-req: {INT}")
_SGLANG_PREFILL = re.compile(rf"\btoken usage: {FLOAT}, #running-req: {INT}, #queue-req: {INT}")
# A hybrid model's line has a usage for each pool: full attention, sliding windows, state.
_SGLANG_POOLS = re.compile(rf"\b(?:token|mamba) usage: {FLOAT}")
# V0 warns at every fiftieth preemption, with the count since the start.
_PREEMPTED = re.compile(r"total_num_cumulative_preemption=([0-9]{1,12})")
# V1 counts those of each interval.
_PUT_BACK = re.compile(r" reqs, (?:[^\n]{0,200}?, )?Preemptions: ([0-9]{1,9})\b")
_HIT_RATE = re.compile(rf"(?<!External )(?<!MM )[Pp]refix cache hit rate: (?:GPU: )?{FLOAT}%")
_DP = re.compile(r"\b(DP[0-9]{1,4})\b")
_LMDEPLOY = re.compile(rf"Engine \(running/waiting\): {INT} / {INT}, KV cache: {FLOAT}%")
_HINT = re.compile(r"KV cache(?: usage)?: |token usage: ")

# A hit rate in percent, and a usage: below either, requests that were put back do not make the rate.
_SOME_HITS = 5.0
_CROWDED = 0.8

Row = dict[str, float]


def live_values(text: str) -> tuple[dict[str, Value], list[str]]:
    """Return the values of the last periodic line of each engine in a log, combined, and notes. Never raises.

    ``usage`` is 0 to 1. Where several engines differ in usage it is Missing, for a log does not tell their pools' weights.
    """
    rows: dict[str, tuple[Row, str]] = {}
    put_back, hit_rate = 0, 0.0
    for line in log_lines(text[-(1 << 20) :], 2000):
        if _HINT.search(line) is None:
            continue
        found = _row(line)
        if found is not None:
            rows[found[0]] = (found[1], line)
            match = _PUT_BACK.search(line)
            put_back += int(match.group(1)) if match else 0
            match = _HIT_RATE.search(line)
            hit_rate = float(match.group(1)) if match else hit_rate
    counted = _PREEMPTED.findall(text[-(1 << 20) :])
    values: dict[str, Value] = {}
    if counted:
        source = f"log, V0's last warning: total_num_cumulative_preemption={counted[-1]} (printed at every fiftieth, so later ones are not in it)"
        values["preemptions"] = Reading(int(counted[-1]), QUANTITIES["preemptions"].unit, source)
    if not rows:
        return values, []
    lines = [line for _, line in rows.values()]
    source = f"log, last periodic line: {_end(redact(' '.join(lines[-1].split())))}"
    for name in ("running", "waiting", "swapped", "used_tokens"):
        told = [row[name] for row, _ in rows.values() if name in row]
        if len(told) == len(rows):
            values[name] = Reading(
                int(sum(told)), QUANTITIES[name].unit, source if len(rows) == 1 else f"sum over {len(rows)} engines of the {source}"
            )
    usages = {engine: row["usage"] for engine, (row, _) in rows.items()}
    notes = ["usage, running and waiting are those of the last periodic line of the log, rounded as it prints them"]
    if put_back:
        notes.append(
            f"preemptions of the log's periodic lines: {put_back:,}; a request that is put back is computed again, which its client sees as a pause"
        )
    if hit_rate >= _SOME_HITS and (
        put_back or counted or (any(usage >= _CROWDED for usage in usages.values()) and any(row["waiting"] for row, _ in rows.values()))
    ):
        notes.append(
            f"a prefix hit rate of {hit_rate:g} % while requests wait for a crowded pool may be no sharing: one that is put back reads its own blocks"
            " again, which many releases count as hits. Hold it against the counter of preemptions before the cache gets the credit"
        )
    if any(usage > 1 for usage in usages.values()):
        values["usage"] = Missing("the log's usage is above 100 %: it is not what it says")
    elif len(usages) == 1:
        values["usage"] = Reading(next(iter(usages.values())), "ratio", source)
    else:
        shown = ", ".join(f"{engine or '-'}: {usage * 100:.1f} %" for engine, usage in sorted(usages.items(), key=lambda item: -item[1])[:8])
        values["usage"] = Missing(f"{len(usages)} engines, and the log does not tell the weights of their pools: {shown}")
        notes.append(f"usage by engine in the log, fullest first: {shown}")
    return values, notes


def fullest(line: str) -> float:
    """Return the usage of the fullest pool in a periodic line of SGLang, which is what its gauge shows; 0.0 where there is none."""
    return max((float(usage) for usage in _SGLANG_POOLS.findall(line)), default=0.0)


def _end(line: str, most: int = 160) -> str:
    """Return the end of a line, from the start of a word on."""
    return line if len(line) <= most else f"… {line[-most:].partition(' ')[2]}"


def _row(line: str) -> tuple[str, Row] | None:
    match = _VLLM.search(line) or _VLLM_CPU.search(line)
    if match is not None:
        running, swapped, waiting, usage = match.groups()
        engine = _ENGINE.search(line)
        row = {"running": float(to_int(running)), "waiting": float(to_int(waiting)), "usage": round(float(usage) / 100, 9)}
        if swapped is not None:
            row["swapped"] = float(to_int(swapped))
        return engine.group(1) if engine else "", row
    rank = _DP.search(line)
    name = rank.group(1) if rank else ""
    match = _SGLANG.search(line)
    if match is not None:
        running, tokens, _, waiting = match.groups()
        row = {"running": float(to_int(running)), "waiting": float(to_int(waiting)), "usage": fullest(line)}
        if tokens is not None:
            row["used_tokens"] = float(to_int(tokens))
        return name, row
    match = _SGLANG_PREFILL.search(line)
    if match is not None:
        _, running, waiting = match.groups()
        return name, {"running": float(to_int(running)), "waiting": float(to_int(waiting)), "usage": fullest(line)}
    match = _LMDEPLOY.search(line)
    if match is not None:
        running, waiting, usage = match.groups()
        return name, {"running": float(to_int(running)), "waiting": float(to_int(waiting)), "usage": round(float(usage) / 100, 9)}
    return None
