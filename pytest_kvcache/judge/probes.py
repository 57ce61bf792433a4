"""The gates on single requests: close to the limit, and over it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_kvcache import units
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, PASS
from pytest_kvcache.judge.wording import MISSED, beside, gate, missing, show
from pytest_kvcache.load.contract import OK, OVER_LENGTH, STOPPED_EARLY
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import GateRecord, SnapshotRecord

NEAR_MAX = 0.9
"""A request counts as close to the limit when its prompt and output reach this share of max_model_len."""


def near_max_served(analyses: Sequence[Analysis]) -> GateRecord:
    """Judge that every request close to max_model_len was answered in full; the text gives the level before, at the peak and after."""
    name, quantity = "near_max_served", "requests.ok"
    bound = f"all answered in full, prompt and output at least {NEAR_MAX * 100:.0f} % of max_model_len"
    for analysis in analyses:
        sent, served = analysis.values["requests.sent"], analysis.values["requests.ok"]
        limit, prompt = analysis.values["max_model_len"], analysis.values["prompt_length.max"]
        for value in (sent, served, limit, prompt):
            if isinstance(value, Missing):
                return missing(name, quantity, value, analyses, decisive=analysis, bound_text=bound)
        assert isinstance(sent, Reading)
        assert isinstance(served, Reading)
        assert isinstance(limit, Reading)
        assert isinstance(prompt, Reading)
        output = analysis.values["output_tokens"]
        length = prompt.number() + (output.number() / max(sent.number(), 1.0) if isinstance(output, Reading) else 0.0)
        shape = f"{prompt.number():,.0f} prompt tokens of max {limit.number():,.0f}"
        if not sent.number() or served.number() < sent.number():
            kinds = ", ".join(f"{sum(lanes.values())} {kind}" for kind, lanes in analysis.rejections.items()) or "no full answer"
            error = next((text for text in analysis.errors.values()), "")
            text = f"{served.number():.0f} of {sent.number():.0f} requests close to the limit answered in full ({shape}): {kinds}"
            text += f": {error[:200]}" if error else ""
            return gate(name, quantity, FAIL, text, analyses, decisive=analysis, value=served, bound_text=bound, fails_despite=MISSED)
        if length < NEAR_MAX * limit.number():
            text = f"the longest request had {length:,.0f} of {limit.number():,.0f} tokens, which is not close to the limit"
            return gate(name, quantity, INCONCLUSIVE, text, analyses, decisive=analysis, value=served, bound_text=bound)
    last = analyses[-1]
    text = f"answered in full with {show(last.values['prompt_length.max'])} in the prompt; {three_moments(last)}"
    return gate(name, quantity, PASS, text, analyses, decisive=last, value=last.values["requests.ok"], bound_text=bound, beside=beside(last))


def three_moments(analysis: Analysis) -> str:
    """Return usage and free space before the load, at the peak and after it, as far as the engine tells."""
    record = analysis.run.record
    unit = next((u for u in ("blocks", "tokens") if isinstance(analysis.values.get(f"free_{u}.min"), Reading)), "blocks")

    def level(snapshots: Sequence[SnapshotRecord]) -> str:
        usage = [v.number() for s in snapshots if isinstance(v := s.value("usage"), Reading)]
        free = [v.number() for s in snapshots if isinstance(v := s.value(f"free_{unit}"), Reading)]
        return f"{units.show(max(usage), 'ratio') if usage else 'unknown usage'} with {f'{sum(free):,.0f}' if free else 'unknown'} {unit} free"

    peak, low = analysis.values["usage.peak"], analysis.values[f"free_{unit}.min"]
    at_peak = (
        f"{show(peak) if isinstance(peak, Reading) else 'unknown usage'} with {show(low) if isinstance(low, Reading) else f'unknown {unit}'} free"
    )
    return f"before {level(record.before)}, at the peak {at_peak}{_missed(analysis)}, after {level(record.after)}"


def _missed(analysis: Analysis) -> str:
    """Return what our own log says of the peak where the polls saw less; empty where they saw it."""
    payload = analysis.values.get("payload.peak")
    used, size = analysis.values.get("used_blocks.peak"), analysis.values.get("block_size")
    if not isinstance(payload, Reading) or not isinstance(used, Reading) or not isinstance(size, Reading) or not size.number():
        return ""
    held = math.ceil(payload.number() / size.number())
    return f" (the polls missed it: by our own log {held:,} blocks were held)" if used.number() < held - 1 else ""


def over_limit_refused(analyses: Sequence[Analysis]) -> GateRecord:
    """Judge that requests longer than max_model_len are refused as too long, and that the server can still be read afterwards."""
    name, quantity = "over_limit_refused", "rejections"
    bound = "each refused as too long, and the server lives on"
    for analysis in analyses:
        sent, limit, prompt = analysis.values["requests.sent"], analysis.values["max_model_len"], analysis.values["prompt_length.max"]
        for value in (sent, limit, prompt):
            if isinstance(value, Missing):
                return missing(name, quantity, value, analyses, decisive=analysis, bound_text=bound)
        assert isinstance(sent, Reading)
        assert isinstance(limit, Reading)
        assert isinstance(prompt, Reading)
        refused = analysis.rejections.get(OVER_LENGTH, {})
        count = sum(refused.values())
        error = analysis.errors.get(OVER_LENGTH, "")
        shape = f"{prompt.number():,.0f} tokens against max {limit.number():,.0f}"
        value = Reading(count, "requests", "requests.jsonl: outcome over_length")
        if prompt.number() <= limit.number():
            text = f"the prompt of {shape} is not over the limit"
            return gate(name, quantity, INCONCLUSIVE, text, analyses, decisive=analysis, value=value, bound_text=bound)
        others = {kind: sum(lanes.values()) for kind, lanes in analysis.rejections.items() if kind != OVER_LENGTH}
        answered = sum(v.number() for n in (OK, STOPPED_EARLY) if isinstance(v := analysis.values[f"requests.{n}"], Reading))
        if answered or others or count < sent.number() or not count:
            said = [f"{answered:.0f} answered"] if answered else []
            said += [f"{number} {kind}: {analysis.errors.get(kind, '')[:200]}" for kind, number in others.items()]
            text = f"a prompt of {shape} was not refused as too long, but {'; '.join(said) or 'got no answer'}"
            return gate(name, quantity, FAIL, text, analyses, decisive=analysis, value=value, bound_text=bound, fails_despite=MISSED)
        if not analysis.run.record.after:
            text = f"a prompt of {shape} was refused, and then the server could no longer be read"
            return gate(name, quantity, FAIL, text, analyses, decisive=analysis, value=value, bound_text=bound)
    text = f"a prompt of {shape} was refused: {error[:200] or 'without a message'}"
    return gate(name, quantity, PASS, text, analyses, value=value, bound_text=bound)
