"""Charts of the report as SVG text: the server over time, and quality by prompt length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvcache.report.escape import plain
from pytest_kvcache.report.svg import AFTER, BEFORE, BOUND, INK, MUTED, PAYLOAD, WAITING, canvas, context, to_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINT_BUDGET = 60_000
MAX_LINES = 12
MAX_LENGTHS = 40


@dataclass(frozen=True)
class Trace:
    """One server in one window over time: columns of equal length, NaN where nothing is known.

    ``t_s`` counts from the start of the load. ``used`` and ``free`` are in the unit that the engine counts (``Scale.unit``).
    """

    t_s: Sequence[float]
    usage: Sequence[float]
    used_tokens: Sequence[float]
    payload_tokens: Sequence[float]
    payload_upper: Sequence[float]
    free: Sequence[float]
    running: Sequence[float]
    waiting: Sequence[float]

    def peak(self) -> float:
        """Return the highest usage, or -1 where none was read."""
        return _highest(self.usage, -1.0)

    def busy(self) -> bool:
        """Return whether anything ran, waited or was held, or whether that is not known."""
        tops = [_highest(column, math.nan) for column in (self.usage, self.running, self.waiting)]
        return any(top > 0 for top in tops) or all(map(math.isnan, tops))


@dataclass(frozen=True)
class Scale:
    """The axes that the charts of one profile share, so that sides compare by eye. ``unit`` is blocks or tokens."""

    start_s: float
    end_s: float
    free: float
    requests: float
    tokens: float
    unit: str
    pool: str
    bound: float | None = None


def _highest(values: Sequence[float], default: float) -> float:
    """Return the highest of the values that are there, or ``default``."""
    import numpy as np

    column = np.asarray(values, dtype=np.float64)
    there = column[np.isfinite(column)]
    return float(there.max()) if len(there) else default


def scale_of(traces: Sequence[Trace], unit: str, pool: str, bound: float | None = None) -> Scale:
    """Return the axes that hold every trace. ``pool`` is the pool's size as people read it."""

    def top(*columns: Sequence[float]) -> float:
        return max((_highest(column, 0.0) for column in columns), default=0.0)

    return Scale(
        min((trace.t_s[0] for trace in traces if len(trace.t_s)), default=0.0),
        max((trace.t_s[-1] for trace in traces if len(trace.t_s)), default=1.0),
        top(*(t.free for t in traces)),
        top(*(c for t in traces for c in (t.running, t.waiting))),
        top(*(c for t in traces for c in (t.used_tokens, t.payload_tokens, t.payload_upper))),
        unit,
        pool,
        bound,
    )


def thin(t_s: Sequence[float], values: Sequence[float], points: int) -> tuple[list[float], list[float]]:
    """Return at most about ``points`` points of a series: each bucket keeps its lowest, its highest and one gap.

    The highest and the lowest value of the whole series, and every gap longer than a bucket, survive.
    """
    import numpy as np

    times, column = np.asarray(t_s, dtype=np.float64), np.asarray(values, dtype=np.float64)
    buckets = max(points // 3, 1)
    if len(column) > points:
        edges = np.linspace(0, len(column), buckets + 1).astype(int)[:-1]
        real = np.isfinite(column)
        kept = []
        for fill, arg in ((np.inf, np.argmin), (-np.inf, np.argmax)):
            filled = np.where(real, column, fill)
            kept += [start + int(arg(part)) for start, part in zip(edges, np.split(filled, edges[1:]), strict=True)]
        kept += [start + int(np.argmin(part)) for start, part in zip(edges, np.split(real, edges[1:]), strict=True) if not part.all()]
        chosen = np.unique(kept)
        times, column = times[chosen], column[chosen]
    return times.tolist(), column.tolist()


def _ticks(axes: Axes, top: float, *, percent: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_ylim(0, top if top > 0 else 1)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=not percent))
    shown = (lambda v, _: f"{v * 100:.0f} %") if percent else (lambda v, _: compact(v, top))
    axes.yaxis.set_major_formatter(FuncFormatter(shown))


def compact(value: float, top: float) -> str:
    """Return a count in few characters for an axis that ends at ``top``: ``8``, ``8k``, ``1.05M``, in one scale along the axis."""
    size, letter = next(((size, letter) for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if top >= 2 * size), (1.0, ""))
    return f"{value / size:,.10g}{letter if value else ''}" if top >= 2 else f"{value:.3g}"


def _draw(axes: Axes, trace: Trace, column: str, points: int, **style: Any) -> None:
    t, v = thin(trace.t_s, getattr(trace, column), points)
    axes.plot(t, v, **style)
    # A sample between two gaps has no line to belong to; without a dot it would vanish.
    real = [math.isfinite(x) for x in v]
    lonely = [i for i, ok in enumerate(real) if ok and not any(real[j] for j in (i - 1, i + 1) if 0 <= j < len(real))]
    if lonely:
        dots = {key: style[key] for key in ("color", "alpha") if key in style}
        axes.plot([t[i] for i in lonely], [v[i] for i in lonely], linestyle="none", marker=".", markersize=3, **dots)


def _mark(axes: Axes, trace: Trace, column: str, pick: Any, text: Any, colour: str) -> None:
    """Put a dot and its figure on the highest or lowest value of a line, kept inside the axes."""
    import numpy as np

    values = np.asarray(getattr(trace, column), dtype=np.float64)
    there = np.flatnonzero(np.isfinite(values))
    if not len(there):
        return
    at = int(there[pick(values[there])])
    value, when = float(values[at]), float(trace.t_s[at])
    (left, right), (_, top) = axes.get_xlim(), axes.get_ylim()
    axes.plot([when], [value], marker="o", markersize=3, color=colour, linestyle="none", clip_on=False)
    side = "right" if (when - left) > 0.75 * (right - left) else "left"
    above = value < 0.8 * top
    note = axes.annotate(
        text(value),
        (when, value),
        xytext=(4 if side == "left" else -4, 3 if above else -3),
        textcoords="offset points",
        ha=side,
        va="bottom" if above else "top",
        color=INK,
        fontsize=7.5,
        fontweight="bold",
    )
    note.set_gid("mark")


def time_chart(
    traces: Sequence[Trace], scale: Scale, *, key: str, label: str, colour: str = AFTER, panels: Sequence[str] = (), lines: int = 8
) -> str:
    """Return one column of panels over time (``usage``, ``free``, ``requests``, ``tokens``) as SVG.

    The trace with the highest peak is drawn in full colour and carries the marks, the others faintly behind it. ``lines`` is how
    many lines the whole page draws, which shares out the points. Raises ValueError where there is nothing to draw.
    """
    if not any(len(trace.t_s) for trace in traces):
        raise ValueError("no sample was taken")
    wanted = list(panels or ("usage", "free", "requests", "tokens"))
    points = max(120, min(1000, _POINT_BUDGET // max(lines, 1)))
    ordered = sorted((t for t in traces if len(t.t_s)), key=Trace.peak)[-MAX_LINES:]
    main, others = ordered[-1], ordered[:-1]
    with context():
        height = 1.42 * len(wanted) + 0.35
        figure = canvas(5.4, height)
        grid = figure.subplots(len(wanted), 1, sharex=True, squeeze=False)
        for axes, panel in zip(grid[:, 0], wanted, strict=True):
            axes.set_xlim(scale.start_s, max(scale.end_s, scale.start_s + 1e-3))
            _PANELS[panel](axes, main, others, scale, colour, points)
        grid[-1, 0].set_xlabel("seconds from the start of the load", fontsize=7.5)
        figure.subplots_adjust(left=0.085, right=0.985, top=1 - 0.24 / height, bottom=0.4 / height, hspace=0.36)
        return to_text(figure, key, label)


def _head(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=8, color=INK, pad=4)


def _legend(axes: Axes) -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.01, 0.96), ncols=3, borderpad=0, handlelength=1.4, columnspacing=1.2, handletextpad=0.5, labelcolor=MUTED
    )


def _usage(axes: Axes, main: Trace, others: Sequence[Trace], scale: Scale, colour: str, points: int) -> None:
    import numpy as np

    _ticks(axes, 1.0, percent=True)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    for trace in others:
        _draw(axes, trace, "usage", points, color=colour, alpha=0.3, linewidth=0.8)
    _draw(axes, main, "usage", points, color=colour)
    if scale.bound is not None:
        axes.axhline(scale.bound, color=BOUND, linewidth=0.9, linestyle=(0, (4, 2)), label=f"bound {scale.bound * 100:g} %")
        _legend(axes)
    _mark(axes, main, "usage", np.argmax, lambda v: f"{v * 100:.1f} %", colour)
    _head(axes, plain(f"KV usage of {scale.pool}" if scale.pool else "KV usage (pool size not told)", 70))


def _free(axes: Axes, main: Trace, others: Sequence[Trace], scale: Scale, colour: str, points: int) -> None:
    import numpy as np

    _ticks(axes, scale.free * 1.05)
    for trace in others:
        _draw(axes, trace, "free", points, color=colour, alpha=0.3, linewidth=0.8)
    _draw(axes, main, "free", points, color=colour)
    _mark(axes, main, "free", np.argmin, lambda v: f"{v:,.0f}", colour)
    _head(axes, f"free {plain(scale.unit, 20)}")


def _requests(axes: Axes, main: Trace, others: Sequence[Trace], scale: Scale, colour: str, points: int) -> None:
    _ticks(axes, scale.requests * 1.1)
    for trace in others:
        _draw(axes, trace, "running", points, color=colour, alpha=0.3, linewidth=0.8, drawstyle="steps-post")
        _draw(axes, trace, "waiting", points, color=WAITING, alpha=0.3, linewidth=0.8, drawstyle="steps-post")
    _draw(axes, main, "running", points, color=colour, drawstyle="steps-post", label="running")
    _draw(axes, main, "waiting", points, color=WAITING, drawstyle="steps-post", label="waiting")
    _legend(axes)
    _head(axes, "requests")


def _tokens(axes: Axes, main: Trace, others: Sequence[Trace], scale: Scale, colour: str, points: int) -> None:
    _ticks(axes, scale.tokens * 1.1)
    for trace in others:
        _draw(axes, trace, "used_tokens", points, color=colour, alpha=0.3, linewidth=0.8)
        _draw(axes, trace, "payload_tokens", points, color=PAYLOAD, alpha=0.3, linewidth=0.8)
    _draw(axes, main, "used_tokens", points, color=colour, label="used")
    if any(math.isfinite(v) for v in main.payload_tokens):
        _draw(axes, main, "payload_tokens", points, color=PAYLOAD, label="payload, at least")
        _draw(axes, main, "payload_upper", points, color=PAYLOAD, linewidth=0.8, linestyle=(0, (1, 1.5)), label="at most")
    _legend(axes)
    _head(axes, "tokens")


_PANELS: Mapping[str, Any] = {"usage": _usage, "free": _free, "requests": _requests, "tokens": _tokens}


@dataclass(frozen=True)
class Rates:
    """Passed and asked items of one side by prompt length in tokens, with the interval of each rate: ``{length: (passed, asked, low, high)}``."""

    side: str
    by_length: Mapping[int, tuple[int, int, float, float]]


def quality_chart(sides: Sequence[Rates], *, key: str, label: str, bound: float | None = None) -> str:
    """Return pass rates by prompt length, sides beside each other, as SVG. Raises ValueError where nothing was asked.

    At most ``MAX_LENGTHS`` lengths are drawn; where there are more, the ones with the lowest rates are kept.
    """
    lengths = sorted({length for rates in sides for length in rates.by_length})
    if not lengths:
        raise ValueError("no quality item was asked")

    def worst(length: int) -> float:
        cells = [rates.by_length[length] for rates in sides if length in rates.by_length]
        return min(passed / max(asked, 1) for passed, asked, _, _ in cells)

    lengths = sorted(sorted(lengths, key=worst)[:MAX_LENGTHS])
    with context():
        longest = max(len(f"{passed}/{asked}") for rates in sides for passed, asked, _, _ in rates.by_length.values())
        wide = max(3.4, min(7.6, 1.0 + (0.2 + 0.045 * longest) * len(lengths) * max(len(sides), 1)))
        figure = canvas(wide, 2.3)
        axes = figure.subplots()
        width = 0.8 / max(len(sides), 1)
        for number, rates in enumerate(sides):
            at = [i + (number - (len(sides) - 1) / 2) * width for i in range(len(lengths))]
            cells = [rates.by_length.get(length, (0, 0, 0.0, 0.0)) for length in lengths]
            heights = [c[0] / c[1] if c[1] else 0.0 for c in cells]
            spread = [
                [max(h - c[2], 0.0) for h, c in zip(heights, cells, strict=True)],
                [max(c[3] - h, 0.0) for h, c in zip(heights, cells, strict=True)],
            ]
            fill = BEFORE if rates.side == "before" else AFTER
            axes.bar(at, heights, width * 0.86, color=fill, alpha=0.85, label=rates.side or "measured")
            axes.errorbar(at, heights, yerr=spread, fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
            if len(lengths) * len(sides) * (0.2 + 0.045 * longest) <= 7:
                for x, c in zip(at, cells, strict=True):
                    axes.text(x, 1.04, f"{c[0]}/{c[1]}", ha="center", va="bottom", fontsize=6.5, color=MUTED)
        _ticks(axes, 1.15, percent=True)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=90 if len(lengths) > 12 else 0)
        axes.set_xlabel("prompt length, tokens")
        if bound is not None:
            axes.axhline(bound, color=BOUND, linewidth=0.9, linestyle=(0, (4, 2)))
        axes.grid(visible=False, axis="x")
        if len(sides) > 1:
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderpad=0, handlelength=1, labelcolor=MUTED)
        figure.subplots_adjust(left=0.42 / wide, right=1 - 0.08 / wide, top=0.9, bottom=0.32 if len(lengths) > 12 else 0.19)
        return to_text(figure, key, label)
