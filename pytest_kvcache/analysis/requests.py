"""What the client saw: counts, times and lengths of the requests of a Run, over all of them or one lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.rows import Rows
from pytest_kvcache.load.contract import CUT_OFF, OK, STOPPED_EARLY, is_rejection
from pytest_kvcache.quantities import Missing, Reading, Value

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]

SERVED = (OK, STOPPED_EARLY)


def request_values(rows: Rows, chosen: Mask, since_s: float, until_s: float) -> dict[str, Value]:
    """Return the quantities of the chosen requests, by the names that conditions use.

    Times are over requests that succeeded: percentiles of the rows themselves, linear between neighbours. Throughput counts the
    output tokens that fell inside the window, each request's spread evenly from its first token to its end.
    """
    import numpy as np

    count = int(chosen.sum())
    good = chosen & rows.outcome_in(SERVED)
    of = f"{count} requests" if count != 1 else "1 request"
    log = "requests.jsonl"
    found: dict[str, Value] = {}

    def number(name: str, value: float, unit: str, source: str) -> None:
        found[name] = Reading(float(value), unit, source)

    number("requests.sent", count, "requests", log)
    number("requests.ok", (chosen & rows.outcome_in([OK])).sum(), "requests", f"{log}: all tokens came and the stream ended properly")
    number("requests.stopped_early", (chosen & rows.outcome_in([STOPPED_EARLY])).sum(), "requests", f"{log}: finish_reason stop")
    number("requests.cut_off", (chosen & rows.outcome_in([CUT_OFF])).sum(), "requests", f"{log}: in flight when the load ended")
    number("rejections", (chosen & _rejected(rows)).sum(), "requests", f"{log}: outcomes that are a refusal or a failure")

    def over(name: str, values: Floats, unit: str, source: str, how: Callable[[Floats], float], lacking: str) -> None:
        there = values[np.isfinite(values)]
        found[name] = Reading(float(how(there)), unit, f"{source}, {len(there)} of {of}") if len(there) else Missing(lacking)

    nobody = "no request succeeded" if count else "no request was sent"
    for name, end in (("ttft", rows.first_s), ("latency", rows.end_s)):
        for suffix, begin, start in (("", rows.intended_s, "intended"), ("_sent", rows.sent_s, "sent")):
            for share in (50, 95):
                over(f"{name}{suffix}.p{share}", (end - begin)[good], "s", f"{log}, from {start} start", _quantile(share), nobody)
    over("gap.max", rows.gap_s[good], "s", f"{log}, longest time between two content events", np.max, nobody)
    over("prompt_tokens", rows.prompt_real[chosen], "tokens", f"{log}, the server's usage", np.sum, "the server told no prompt tokens")
    over("output_tokens", rows.output[chosen], "tokens", f"{log}, the server's usage", np.sum, "the server told no completion tokens")
    over("prompt_length.mean", rows.prompt[chosen], "tokens", f"{log}, the server's usage, else as planned", np.mean, "no prompt length is known")
    over("prompt_length.max", rows.prompt[chosen], "tokens", f"{log}, the server's usage, else as planned", np.max, "no prompt length is known")
    differs = np.where(np.isfinite(rows.prompt_planned), np.abs(rows.prompt_real - rows.prompt_planned) > 0, np.nan)
    differs[~np.isfinite(rows.prompt_real)] = np.nan
    over("prompt_length.off", differs[good], "requests", f"{log}, the server's usage against the plan", np.sum, "no prompt length is known")
    told = chosen & np.isfinite(rows.output)
    if until_s > since_s and told.any():
        begin = np.where(np.isfinite(rows.first_s), rows.first_s, rows.sent_s)[told]
        length = np.maximum(rows.end_s[told] - begin, 1e-9)
        inside = np.clip(np.minimum(rows.end_s[told], until_s) - np.maximum(begin, since_s), 0.0, length) / length
        number("throughput", float((rows.output[told] * inside).sum() / (until_s - since_s)), "tokens/s", f"{log}, inside {until_s - since_s:.1f} s")
    else:
        found["throughput"] = Missing("no output tokens are known")
    return found


def _rejected(rows: Rows) -> Mask:
    return rows.outcome_in([name for name in rows.outcomes if is_rejection(name)])


def _quantile(share: int) -> Callable[[Floats], float]:
    import numpy as np

    return lambda values: float(np.quantile(values, share / 100))


def rejections(rows: Rows) -> dict[str, dict[str, int]]:
    """Return how many requests were rejected: ``{class: {lane: count}}``, classes and lanes that had any."""
    import numpy as np

    found: dict[str, dict[str, int]] = {}
    bad = _rejected(rows)
    pairs, counts = np.unique(np.stack([rows.outcome[bad], rows.lane[bad]]), axis=1, return_counts=True)
    for (outcome, lane), count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
        found.setdefault(rows.outcomes[outcome], {})[rows.lanes[lane]] = int(count)
    return found


def wrong_lengths(rows: Rows) -> tuple[int, int, str]:
    """Return how many successful prompts had another length than planned, of how many known, and the worst as text.

    A prompt may differ by 4 tokens or 2 %, since some servers cannot be asked for exact lengths.
    """
    import numpy as np

    known = rows.outcome_in(SERVED) & np.isfinite(rows.prompt_real) & np.isfinite(rows.prompt_planned)
    planned, real = rows.prompt_planned[known], rows.prompt_real[known]
    off = np.abs(real - planned)
    wrong = off > np.maximum(4.0, 0.02 * planned)
    if not wrong.any():
        return 0, int(known.sum()), ""
    worst = int(np.argmax(off))
    return int(wrong.sum()), int(known.sum()), f"the worst was planned with {planned[worst]:.0f} tokens and had {real[worst]:.0f}"
