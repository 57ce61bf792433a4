"""Balance: how far the GPUs of one server, its engine ranks and its replicas lie apart, and who waits while another idles.

An average hides imbalance: 85 % of the traffic on one of two replicas is a mean usage of 51 %. So every quantity is said of each member,
with the highest over the mean, and the pair that differs most is named.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pytest_kvcache import units
from pytest_kvcache.analysis.ledger import GPU, HOST, CardLedger
from pytest_kvcache.analysis.series import Series
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value

if TYPE_CHECKING:
    import numpy as np

    from pytest_kvcache.analysis.timeline import Analysis

    Floats = np.ndarray[Any, np.dtype[np.float64]]

SPREAD = ("usage", "used_blocks", "free_blocks", "used_tokens", "free_tokens", "running", "waiting")
LIVE = "live"
REPLICAS, RANKS, GPUS = "replicas", "ranks", "GPUs"
_TITLES = {LIVE: ("live requests", "requests")}
_PARTS = 8
# one-sided 95 % of Student's t by the number of parts, from two
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895)
_ALONE = Missing("one server with one engine rank has nothing to balance", cannot_happen=True)


@dataclass(frozen=True)
class Spread:
    """One quantity over the members of one kind: its mean over the load (memory: at its highest) for each, and how far they lie apart.

    ``highest`` and ``lowest`` name the pair that differs most, ``gap`` is their distance, ``over_mean`` the highest over the mean of all (1: all alike).
    ``lacking`` are members that do not tell it.
    """

    quantity: str
    title: str
    unit: str
    kind: str
    members: Mapping[str, float]
    gap: Reading
    over_mean: Value
    lacking: tuple[str, ...] = ()

    @property
    def highest(self) -> str:
        """The member with the most."""
        return max(self.members, key=self.members.__getitem__)

    @property
    def lowest(self) -> str:
        """The member with the least."""
        return min(self.members, key=self.members.__getitem__)

    @property
    def text(self) -> str:
        """The spread in one phrase."""
        high, low = self.members[self.highest], self.members[self.lowest]
        if high == low:
            return f"{self.title}: {units.show(high, self.unit)} on all {len(self.members)} {self.kind}"
        ratio = f", highest over mean {self.over_mean.number():.2f}" if isinstance(self.over_mean, Reading) else ""
        return f"{self.title}: {units.show(high, self.unit)} on {self.highest} and {units.show(low, self.unit)} on {self.lowest}{ratio}"


@dataclass(frozen=True)
class Idling:
    """Requests waited on ``waits`` while ``idles`` had neither running nor waiting ones: ``share`` of the load's time, ``seconds`` of it.

    ``surely`` is the lower 95 % bound of the share, by batch means over eighths of the load: where requests come in turn to equal servers, chance
    alone empties one of them now and then, in one or two long stretches. What a balancer does, it does all the time.
    """

    waits: str
    idles: str
    share: float
    seconds: float
    surely: float = 0.0

    @property
    def text(self) -> str:
        """The fact in one phrase."""
        return f"requests waited on {self.waits} while {self.idles} idled, for {self.seconds:.1f} s ({self.share * 100:.0f} % of the load)"


@dataclass(frozen=True)
class Balance:
    """How evenly load and memory lie. ``spreads`` by kind and quantity; ``idling`` is the pair with the longest such time, or why there is none.

    ``usage_spread`` is the widest distance between the mean usages of two members (replicas, else ranks); ``live_surely`` the lower 95 % bound of
    the highest live requests over the mean, as in ``Idling``.
    """

    spreads: tuple[Spread, ...]
    idling: Idling | Missing
    usage_spread: Value
    live_surely: Value = _ALONE

    def of(self, quantity: str, kind: str = "") -> Spread | None:
        """Return the spread of a quantity, of any kind where none is named; None where fewer than two members tell it."""
        return next((one for one in self.spreads if one.quantity == quantity and kind in {"", one.kind}), None)


def balance(analysis: Analysis) -> Balance:
    """Return the balance of an Analysis, as it holds it."""
    return analysis.balance


def no_balance(reason: str) -> Balance:
    """Return the balance of a Run without a load: nothing is known, and why."""
    missing = Missing(reason)
    return Balance((), missing, missing)


def read_balance(series: Sequence[Series], ledgers: Sequence[CardLedger], since_s: float, until_s: float, hold_s: float) -> Balance:
    """Return the balance between ``since_s`` and ``until_s``: of the servers where there are several, of engine ranks, and of cards.

    A sample counts until the next one, for ``hold_s`` at most, so that a server that is polled more often does not weigh more.
    """
    replicas = {f"server {number}": (one.wall_s, one.column) for number, one in enumerate(series, start=1)} if len(series) > 1 else {}
    ranks = {
        f"server {number}, rank {rank}": (part.wall_s, part.column)
        for number, one in enumerate(series, start=1)
        if len(one.parts) > 1
        for rank, part in one.parts.items()
    }
    if len(series) == 1 and ranks and all(":" in name for name in series[0].parts):
        # the parts of one endpoint that bear addresses are the servers behind a router
        replicas, ranks = {name.partition("rank ")[2]: member for name, member in ranks.items()}, {}
    spreads: list[Spread] = []
    for kind, members in ((REPLICAS, replicas), (RANKS, ranks)):
        for quantity in (*SPREAD, LIVE):
            means = {name: _mean(wall_s, _column(column, quantity), since_s, until_s, hold_s) for name, (wall_s, column) in members.items()}
            title, unit = _TITLES.get(quantity) or (QUANTITIES[quantity].title, QUANTITIES[quantity].unit)
            spread = _spread(quantity, title, unit, kind, means)
            if spread is not None:
                spreads.append(spread)
    cards = [ledger for ledger in ledgers if ledger.kind == GPU and ledger.server.bytes != 0]
    for name, title in (("used", "card memory in use"), ("server", "memory of this server"), ("pool", "KV pool")):
        sizes = {ledger.name: getattr(ledger, name).bytes for ledger in cards}
        spread = _spread(f"gpu.{name}_bytes", title, "bytes", GPUS, sizes)
        if spread is not None:
            spreads.append(spread)
    hosts = {f"server {number}": ledger.server.bytes for number, ledger in enumerate(ledgers, start=1) if ledger.kind == HOST}
    memory = _spread("server_bytes", "memory of the server's processes", "bytes", REPLICAS, hosts)
    spreads += [memory] if memory is not None else []
    grouped = replicas or ranks
    idling: Idling | Missing = _idling(grouped, since_s, until_s, hold_s) if len(grouped) > 1 else _ALONE
    live = next((one for one in spreads if one.quantity == LIVE), None)
    sure = _live_surely(live, replicas or ranks, since_s, until_s, hold_s) if live is not None else _ALONE
    count = max(len(series), len(replicas))
    told = sum(_mean(wall_s, column("usage"), since_s, until_s, hold_s) is not None for wall_s, column in replicas.values())
    return Balance(tuple(spreads), idling, _usage_spread(spreads, told, count, len(ranks)), sure)


def _usage_spread(spreads: Sequence[Spread], told: int, servers: int, ranks: int) -> Value:
    known = [one for one in spreads if one.quantity == "usage"]
    if not known:
        if servers > 1:
            return Missing(f"{told} of {servers} servers told their usage, and two are needed to weigh them")
        return Missing("the engine ranks do not tell their usage") if ranks > 1 else _ALONE
    widest = max(known, key=lambda one: one.gap.number())
    if widest.lacking:
        return Missing(f"{', '.join(widest.lacking[:4])} did not tell {widest.title}, so the widest distance is not known")
    return widest.gap


def _spread(quantity: str, title: str, unit: str, kind: str, means: Mapping[str, float | None]) -> Spread | None:
    members = {name: value for name, value in means.items() if value is not None}
    if len(members) < 2:
        return None
    high, low = max(members.values()), min(members.values())
    mean = sum(members.values()) / len(members)
    top, bottom = max(members, key=members.__getitem__), min(members, key=members.__getitem__)
    how = "" if kind == GPUS else "mean "
    source = f"{how}{title} {units.show(high, unit)} of {top} and {units.show(low, unit)} of {bottom}"
    over: Value = Reading(high / mean, "factor", f"highest over mean of {len(members)} {kind}") if mean else Missing(f"{title} is 0 everywhere")
    return Spread(
        quantity, title, unit, kind, members, Reading(high - low, unit, source), over, tuple(n for n, value in means.items() if value is None)
    )


def _steps(wall_s: Floats, since_s: float, until_s: float, hold_s: float) -> tuple[Floats, Floats]:
    """Return from when to when each sample counts."""
    import numpy as np

    ends = np.minimum(np.append(wall_s[1:], np.inf), wall_s + hold_s)
    return np.clip(wall_s, since_s, until_s), np.clip(ends, since_s, until_s)


def _column(column: Callable[[str], Floats], quantity: str) -> Floats:
    """Return a quantity's column; live requests are those that run and those that wait, where it is told."""
    import numpy as np

    return column("running") + np.nan_to_num(column("waiting")) if quantity == LIVE else column(quantity)


def _mean(wall_s: Floats, column: Floats, since_s: float, until_s: float, hold_s: float) -> float | None:
    import numpy as np

    there = np.isfinite(column)
    if not there.any():
        return None
    begin, end = _steps(wall_s[there], since_s, until_s, hold_s)
    weights = end - begin
    total = float(weights.sum())
    return float((column[there] * weights).sum()) / total if total > 0 else None


def _idling(members: Mapping[str, tuple[Floats, Any]], since_s: float, until_s: float, hold_s: float) -> Idling | Missing:
    """Return the pair of which one made requests wait for longest while the other had none; at most the 64 busiest members are paired."""
    import numpy as np

    if until_s <= since_s:
        return Missing("the load had no length")
    grid = np.linspace(since_s, until_s, max(2, min(20_000, int((until_s - since_s) * 20) + 1)))
    states: dict[str, tuple[Any, Any]] = {}
    for name, (wall_s, column) in members.items():
        running, waiting = column("running"), column("waiting")
        there = np.isfinite(running) & np.isfinite(waiting)
        if not there.any():
            return Missing(f"{name} did not tell running and waiting requests")
        at = wall_s[there]
        index = np.searchsorted(at, grid, side="right") - 1
        fresh = (index >= 0) & (grid - at[np.maximum(index, 0)] <= hold_s)
        waits, idle = waiting[there][index] > 0, (running[there][index] == 0) & (waiting[there][index] == 0)
        states[name] = (fresh & waits, fresh & idle)
    waiters = sorted(states, key=lambda name: -int(states[name][0].sum()))[:64]
    idlers = sorted(states, key=lambda name: -int(states[name][1].sum()))[:64]
    pairs = [(float((states[w][0] & states[i][1]).mean()), w, i) for w in waiters for i in idlers if w != i]
    share, waits_on, idles = max(pairs)
    if not share:
        return Idling(waits_on, idles, 0.0, 0.0)
    parts = np.array_split(states[waits_on][0] & states[idles][1], _parts(members, since_s, until_s))
    return Idling(waits_on, idles, share, share * (until_s - since_s), max(0.0, _lower(share, [float(part.mean()) for part in parts])))


def _parts(members: Mapping[str, tuple[Floats, Any]], since_s: float, until_s: float) -> int:
    """Return into how many parts the load is cut for batch means: eight, fewer where a member was seen less than twice in each."""
    least = min(int(((wall_s >= since_s) & (wall_s <= until_s)).sum()) for wall_s, _ in members.values())
    return max(2, min(_PARTS, least // 2))


def _lower(mean: float, parts: Sequence[float]) -> float:
    """Return the lower 95 % bound of a mean over the load, from its means over equal parts of it (batch means, Student's t)."""
    spread = statistics.stdev(parts) / math.sqrt(len(parts))
    return mean - (_T95[len(parts) - 2] * spread if spread else 0.0)


def _live_surely(live: Spread, members: Mapping[str, tuple[Floats, Any]], since_s: float, until_s: float, hold_s: float) -> Value:
    """Return the lower 95 % bound of the highest live requests over the mean."""
    if isinstance(live.over_mean, Missing):
        return live.over_mean
    count = _parts(members, since_s, until_s)
    edges = [since_s + (until_s - since_s) * number / count for number in range(count + 1)]
    ratios = []
    for begin, end in pairwise(edges):
        means = {name: _mean(wall_s, _column(column, LIVE), begin, end, hold_s) for name, (wall_s, column) in members.items()}
        known = [value for value in means.values() if value is not None]
        top, whole = means.get(live.highest), sum(known)
        ratios.append(1.0 if not whole or top is None else top * len(known) / whole)
    low = max(1.0, _lower(live.over_mean.number(), ratios))
    return Reading(low, "factor", f"lower 95 % bound over {count} parts of the load")


def balance_values(found: Balance) -> dict[str, Value]:
    """Return the named quantities that conditions may use."""
    values: dict[str, Value] = {"usage.spread": found.usage_spread}

    def gap(name: str, quantities: Sequence[str], kind: str = "") -> None:
        known = [one for one in found.spreads if one.quantity in quantities and kind in {"", one.kind}]
        none = found.usage_spread if isinstance(found.usage_spread, Missing) else Missing("fewer than two members told it")
        values[name] = max(known, key=lambda one: one.gap.number()).gap if known else none

    gap("balance.running_spread", ("running",))
    gap("balance.waiting_spread", ("waiting",))
    live = found.of(LIVE)
    none = found.usage_spread if isinstance(found.usage_spread, Missing) else Missing("fewer than two members told it")
    values["balance.live_over_mean"] = live.over_mean if live is not None else none
    values["balance.live_surely"] = found.live_surely if live is not None else none
    cards = [one for one in found.spreads if one.quantity == "gpu.used_bytes"]
    alone = Missing("fewer than two cards of this server were seen", cannot_happen=not cards)
    values["balance.gpu_memory_spread"] = cards[0].gap if cards else alone
    values["balance.gpu_over_mean"] = cards[0].over_mean if cards else alone
    factor = [one.over_mean for one in found.spreads if one.quantity == "usage" and isinstance(one.over_mean, Reading)]
    lacking = found.usage_spread if isinstance(found.usage_spread, Missing) else Missing("usage is 0 everywhere")
    values["balance.usage_over_mean"] = max(factor, key=Reading.number) if factor else lacking
    values["balance.idle_while_waiting"] = (
        found.idling if isinstance(found.idling, Missing) else Reading(found.idling.share, "ratio", found.idling.text)
    )
    values["balance.idle_surely"] = (
        found.idling if isinstance(found.idling, Missing) else Reading(found.idling.surely, "ratio", f"lower 95 % bound of: {found.idling.text}")
    )
    return values
