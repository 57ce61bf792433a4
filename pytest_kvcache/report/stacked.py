"""The level taken apart over time: what fills the pool as stacked bands, and below it how much of what is held is payload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_kvcache.report.charts import compact
from pytest_kvcache.report.svg import AFTER, BOUND, INK, MUTED, PAYLOAD, WAITING, canvas, context, to_text

if TYPE_CHECKING:
    import numpy as np

    from pytest_kvcache.analysis.accounting import Account
    from pytest_kvcache.analysis.phases import Span

    Floats = np.ndarray[Any, np.dtype[np.float64]]

POINTS = 240
# What each band is called, its colour and its strength, from the bottom up.
BANDS = {
    "common": ("shared prefix, held once", AFTER, 0.95),
    "prompt": ("prompt", AFTER, 0.55),
    "prefilling": ("prompt being written, at most", AFTER, 0.25),
    "generated": ("generated", PAYLOAD, 0.75),
    "rounding": ("rest of last blocks", MUTED, 0.6),
    "reserved": ("reserved ahead", MUTED, 0.3),
    "not_ours": ("not ours", WAITING, 0.75),
    "held_after": ("held after its request", BOUND, 0.75),
}


def chosen(one: Account) -> Any:
    """Return the indices of at most ``POINTS`` samples that stand for all: the highest of each stretch, and one gap where there is one."""
    import numpy as np

    count = len(one.t_s)
    if count <= POINTS:
        return np.arange(count)
    slots = np.where(np.isfinite(one.slots), one.slots, -np.inf)
    edges = np.linspace(0, count, POINTS // 2 + 1).astype(int)
    kept = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = slots[start:stop]
        kept += [start + int(np.argmax(part)), start + int(np.argmin(part))]
    return np.unique(kept)


def level_chart(one: Account, spans: Sequence[Span], pool_slots: float | None, *, key: str, label: str) -> str:
    """Return the level of one Run taken apart, as SVG. Raises ValueError where nothing was ever held, or what our requests hold is not known."""
    import numpy as np
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    at = chosen(one)
    slots = one.slots[at]
    if not len(at) or not np.isfinite(slots).any() or not np.nanmax(slots) > 0:
        raise ValueError("the engine told nothing that was held")
    if not np.isfinite(one.high).any():
        raise ValueError("what a request holds is not known for this model")
    t = one.t_s[at]
    pause = max(3.0 * float(np.median(np.diff(one.t_s))), 1.0) if len(one.t_s) > 1 else 1.0
    if len(at) < len(one.t_s):
        pause += 4.0 * (float(one.t_s[-1]) - float(one.t_s[0])) / POINTS
    t, columns = _with_gaps(t, {**{name: one.parts[name][at] for name in BANDS}, "used": slots, "payload": one.payload[at]}, pause)
    with context():
        figure = canvas(7.6, 3.7)
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
        bottom = np.zeros(len(t))
        for name, (title, colour, strength) in BANDS.items():
            band = np.maximum(columns[name], 0.0)
            if not np.nansum(band) > 0:
                continue
            top.fill_between(t, bottom, bottom + band, color=colour, alpha=strength, linewidth=0, step="mid", label=title)
            bottom = bottom + np.nan_to_num(band)
        top.plot(t, columns["used"], color=INK, linewidth=0.9, drawstyle="steps-mid", label="held, as the engine says")
        highest = max(float(np.nanmax(columns["used"])), float(np.nanmax(bottom)))
        # far above what was ever held the pool would press the bands flat: the table and the usage chart say how large it is
        if pool_slots and pool_slots < 3 * highest:
            top.axhline(pool_slots, color=MUTED, linewidth=0.8, linestyle=(0, (4, 2)), label="pool")
            highest = max(highest, pool_slots)
        top.set_ylim(0, highest * 1.05)
        top.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value, highest)))
        top.set_title("what fills the pool, tokens", loc="left", fontsize=8, color=INK, pad=4)
        top.set_xlim(float(np.nanmin(t)), float(np.nanmax(t)) + 1e-3)
        handles, names = top.get_legend_handles_labels()
        figure.legend(
            handles, names, loc="lower center", ncols=4, labelcolor=MUTED, handlelength=1.4, columnspacing=1.2, handletextpad=0.5, borderpad=0
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            fill = np.where(columns["used"] > 0, columns["payload"] / columns["used"], np.nan)
        below.plot(t, fill, color=PAYLOAD, linewidth=1.0)
        below.axhline(0.5, color=BOUND, linewidth=0.7, linestyle=(0, (4, 2)))
        above = max(1.0, float(np.nanmax(fill, initial=0.0)))
        below.set_ylim(0, above * 1.08)
        below.yaxis.set_major_locator(MaxNLocator(3))
        below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.0f} %"))
        below.set_title(
            "fill: tokens of our requests over slots held" + (" (above 100 %: shared prefixes)" if above > 1.01 else ""),
            loc="left",
            fontsize=8,
            color=INK,
            pad=4,
        )
        below.set_xlabel("seconds from the start of the load", fontsize=7.5)
        for span in spans:
            if span.name == "prefill" and span.until_s - span.since_s > 0.004 * (float(np.nanmax(t)) - float(np.nanmin(t))):
                below.axvspan(span.since_s, span.until_s, color=AFTER, alpha=0.12, linewidth=0)
        figure.subplots_adjust(left=0.065, right=0.985, top=0.94, bottom=0.22, hspace=0.3)
        return to_text(figure, key, label)


def _with_gaps(t: Floats, columns: dict[str, Floats], pause_s: float) -> tuple[Floats, dict[str, Floats]]:
    """Return the series with a row of NaN in every pause."""
    import numpy as np

    breaks = np.flatnonzero(np.diff(t) > pause_s) + 1 if len(t) > 1 else np.empty(0, dtype=int)
    moments = np.insert(t, breaks, (t[breaks - 1] + t[breaks]) / 2 if len(breaks) else np.nan)
    return moments, {name: np.insert(column, breaks, np.nan) for name, column in columns.items()}
