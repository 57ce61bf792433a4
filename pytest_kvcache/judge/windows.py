"""What is compared of the windows of one profile before and after a change: each quantity with its margin, and which windows pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.judge import stats
from pytest_kvcache.judge.logged import joined
from pytest_kvcache.judge.wording import readings
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.settings import Settings

TIME_FLOOR_S = 0.010
"""A time to first token may always grow by this much: a quarter of two milliseconds is nothing that anybody waits for."""
COUNT_MARGIN = 0.5
"""By how much the rate of rejections or preemptions may be higher, as a share, before a change counts as worse."""
_TITLES = {
    "usage": "peak usage", "free_blocks": "fewest free blocks", "free_tokens": "fewest free tokens", "ttft": "time to first token",
    "latency": "time to last token", "throughput": "output rate", "prefix": "prefix hit rate",
}  # fmt: skip

_Sides = tuple[list[float], list[float]]


def title(quantity: str) -> str:
    """Return what people call a quantity that is compared."""
    return _TITLES.get(quantity.split(".", maxsplit=1)[0], quantity)


@dataclass(frozen=True, slots=True)
class Margins:
    """How much worse a change may be: usage and free space as a share of the pool, the others as a share of their value before.

    ``rare`` is how high the rate of rejections or preemptions need not be excluded where none was seen. The 95th percentiles are judged
    where a margin for them is given: of short windows they rest on few requests. ``reuse`` is how much of the prefix cache's hit rate may be lost.
    """

    usage: float = 0.02
    ttft: float = 0.25
    throughput: float = 0.10
    quality: float = 0.02
    counts: float = COUNT_MARGIN
    rare: float = stats.RARE
    ttft_p95: float | None = None
    latency_p95: float | None = None
    reuse: float = 0.05

    @classmethod
    def of(cls, settings: Settings) -> Margins:
        """Return the margins of a session."""
        return cls(settings.usage_margin, settings.ttft_margin, settings.throughput_margin, settings.quality_margin, rare=settings.rare_margin)


@dataclass(frozen=True, slots=True)
class Asked:
    """A quantity of every window that may be worse by a margin: absolute in its own unit, or a share of the value before where ``relative``.

    ``tokens_a_block`` compares blocks of two sizes by what they hold: the margin is then in tokens. ``lacking`` says why there is no margin.
    """

    name: str
    quantity: str
    margin: float
    higher_is_worse: bool = True
    relative: bool = False
    tokens_a_block: tuple[float, float] | None = None
    lacking: Missing | None = None

    @property
    def title(self) -> str:
        """What people call the quantity."""
        return title(self.quantity)

    @property
    def bound(self) -> float:
        """The margin on the scale on which the values are compared."""
        return stats.scaled_margin(self.margin, lower_is_better=self.higher_is_worse, relative=self.relative)

    def values(self, before: Sequence[Analysis], after: Sequence[Analysis]) -> _Sides | Missing:
        """Return the value of each window of both sides, or why one, or the margin, is not there.

        Peaks and lows are what was polled, joined with what our own request log proves where it does so in every window of both sides.
        """
        polled = self._polled(before, after)
        if isinstance(polled, Missing):
            return polled
        left, right = self._joined(before, after, polled)
        if self.tokens_a_block is not None:
            left, right = ([number * size for number in side] for side, size in zip((left, right), self.tokens_a_block, strict=True))
        return left, right

    def missed(self, before: Sequence[Analysis], after: Sequence[Analysis]) -> int:
        """Return in how many windows of both sides the request log proves more than polling saw, so that its figure was taken."""
        polled = self._polled(before, after)
        if isinstance(polled, Missing):
            return 0
        return sum(
            value != seen for sides in zip(self._joined(before, after, polled), polled, strict=True) for value, seen in zip(*sides, strict=True)
        )

    def _polled(self, before: Sequence[Analysis], after: Sequence[Analysis]) -> _Sides | Missing:
        if self.lacking is not None:
            return self.lacking
        left, right = numbers(before, self.quantity), numbers(after, self.quantity)
        if isinstance(left, Missing) or isinstance(right, Missing):
            lacking, side = (left, "before") if isinstance(left, Missing) else (right, "after")
            assert isinstance(lacking, Missing)
            return lacking if lacking.cannot_happen else Missing(f"{side} the change: {lacking.reason}")
        return left, right

    def _joined(self, before: Sequence[Analysis], after: Sequence[Analysis], polled: _Sides) -> _Sides:
        old, new = joined(before, self.quantity, polled[0]), joined(after, self.quantity, polled[1])
        return polled if old is None or new is None else (old, new)  # on one side alone it would be a difference that polling made

    def unit(self, before: Sequence[Analysis]) -> str:
        """Return the unit of the values; windows that have them are given."""
        return "tokens" if self.tokens_a_block is not None else str(getattr(before[0].values[self.quantity], "unit", ""))


def asked(before: Sequence[Analysis], after: Sequence[Analysis], margins: Margins) -> list[Asked]:
    """Return what is compared of the windows of one profile, in the order of the gates; the 95th percentiles where they have a margin."""
    free = next((unit for unit in ("blocks", "tokens") if _known(before, after, f"free_{unit}.tightest")), "blocks")
    tails = {"ttft.p95": margins.ttft_p95, "latency.p95": margins.latency_p95}
    found = [
        Asked("usage_not_worse", "usage.hottest", margins.usage),
        _free(f"free_{free}.tightest", before, after, margins.usage),
        _time("ttft_not_worse", "ttft.p50", before, margins.ttft),
        *(_time(f"{name.replace('.', '_')}_not_worse", name, before, margin) for name, margin in tails.items() if margin is not None),
        Asked("throughput_not_worse", "throughput", margins.throughput, higher_is_worse=False, relative=True),
    ]
    # what the prefix cache gives, where the profile shares prefixes and the side before told: a cache that went off shows here
    if any(analysis.facts.sharing_meant for analysis in before) and not isinstance(readings(before, "prefix.hit_rate"), Missing):
        found.append(Asked("prefix_reuse_not_worse", "prefix.hit_rate", margins.reuse, higher_is_worse=False))
    return found


def numbers(analyses: Sequence[Analysis], name: str) -> list[float] | Missing:
    """Return a quantity of each window, or why one does not have it."""
    found = readings(analyses, name)
    return found if isinstance(found, Missing) else [reading.number() for _, reading in found]


def pair(before: Sequence[Analysis], after: Sequence[Analysis]) -> tuple[Sequence[Analysis], Sequence[Analysis], bool]:
    """Return the windows of both sides in one order, and whether they pair: each number once a side, with an equal workload."""
    sides = [{analysis.run.record.window: analysis for analysis in side} for side in (before, after)]
    if len(sides[0]) != len(before) or len(sides[1]) != len(after) or set(sides[0]) != set(sides[1]):
        return before, after, False
    order = sorted(sides[0])
    alike = all(sides[0][n].run.record.workload == sides[1][n].run.record.workload for n in order)
    return [sides[0][n] for n in order], [sides[1][n] for n in order], alike


def pilot(before: Sequence[Analysis], after: Sequence[Analysis]) -> int:
    """Return of how many first pairs the spread chose how many there are; 0 where their number was given."""
    return max((analysis.run.record.pilot_windows for analysis in (*before, *after)), default=0)


def _known(before: Sequence[Analysis], after: Sequence[Analysis], name: str) -> bool:
    return not any(isinstance(readings(side, name), Missing) for side in (before, after))


def _free(quantity: str, before: Sequence[Analysis], after: Sequence[Analysis], share: float) -> Asked:
    """Return free space, which may fall by the usage margin of the pool before."""
    unit = quantity.removeprefix("free_").removesuffix(".tightest")
    pools = [_pool(analysis, unit) for analysis in before]
    known = [pool for pool in pools if pool is not None]
    if not known:
        return Asked("free_not_worse", quantity, 0.0, higher_is_worse=False, lacking=Missing("the size of the pool before is not known"))
    margin = float(max(round(share * sum(known) / len(known)), 1))
    sizes = [_block_size(side) for side in (before, after)] if unit == "blocks" else [None, None]
    if sizes[0] is not None and sizes[1] is not None and sizes[0] != sizes[1]:
        # blocks of two sizes are two units: what they hold is compared
        return Asked("free_not_worse", quantity, margin * sizes[0], higher_is_worse=False, tokens_a_block=(sizes[0], sizes[1]))
    return Asked("free_not_worse", quantity, margin, higher_is_worse=False)


def _block_size(analyses: Sequence[Analysis]) -> float | None:
    value = analyses[0].values.get("block_size")
    return value.number() if isinstance(value, Reading) else None


def _pool(analysis: Analysis, unit: str) -> float | None:
    names = ("usable_blocks", "pool_blocks") if unit == "blocks" else ("pool_tokens",)
    return next((v.number() for name in names if isinstance(v := analysis.values.get(name), Reading)), None)


def _time(name: str, quantity: str, before: Sequence[Analysis], margin: float) -> Asked:
    left = numbers(before, quantity)
    mean = 0.0 if isinstance(left, Missing) else sum(left) / len(left)
    if 0 < margin * mean < TIME_FLOOR_S:
        return Asked(name, quantity, TIME_FLOOR_S)
    return Asked(name, quantity, margin, relative=True)
