"""Cards of a fleet out of Prometheus: the DCGM exporters' series of the nodes and pods that the engines run on.

The exporters are other targets than the engines, so the fleet's selector does not match them. Cards are joined to it by pod
(``exported_pod``, which the exporter names as the card's user), else by node; a selector of their own takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_kvcache.engines import Sample, Samples, clean
from pytest_kvcache.observe.dcgm import FAMILIES, HOSTS, read_dcgm
from pytest_kvcache.observe.moments import TooMany, at_steps
from pytest_kvcache.observe.prometheus import MOST_LOOKS, Prometheus
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import GpuRow

Labels = Mapping[str, str]


@dataclass(frozen=True)
class CardWindow:
    """One card in a window of time: ``card`` is its row when it was fullest, ``least_free_bytes`` the least that was free at a point."""

    card: GpuRow
    least_free_bytes: int
    points: int


@dataclass(frozen=True)
class Cards:
    """The cards of a fleet: ``rows`` are those of the last point, ``points`` those of each with its moment.

    ``note`` says how they were found, or why there are none.
    """

    rows: list[GpuRow]
    windows: list[CardWindow]
    note: str = ""
    points: list[tuple[float, list[GpuRow]]] = field(default_factory=list)


def read_cards(
    server: Prometheus, targets: Sequence[Labels], start_wall_s: float, end_wall_s: float, step_s: float | None = None, selector: str = ""
) -> Cards:
    """Return the cards of these targets (their labels) at each step of a window; ``selector`` names the exporters' targets instead.

    One moment is a window whose start is its end; without ``step_s`` the step follows the length of the window. Raises UsageError for a
    selector that cannot be meant and for too many points, and what ``Prometheus.series`` raises.
    """
    return at_steps(end_wall_s - start_wall_s, step_s, lambda step: _read(server, targets, start_wall_s, end_wall_s, step, selector))


def _read(server: Prometheus, targets: Sequence[Labels], start_wall_s: float, end_wall_s: float, step_s: float, selector: str) -> Cards:
    series = server.series(sorted(FAMILIES), selector, start_wall_s, end_wall_s, step_s)
    if not series:
        return Cards([], [], f"no card matches {{{selector}}}" if selector else "")
    how = f"cards that match {{{selector}}}"
    chosen = series
    if not selector:
        chosen, how = _of_fleet(series, targets)
    if not chosen:
        return Cards([], [], f"{how}; name the exporters' targets: --cards 'job=\"dcgm\"'")
    by_time: dict[float, dict[str, list[Sample]]] = {}
    for labels, points in chosen:
        name = labels.get("__name__", "")
        sample = {key: text for key, text in labels.items() if key != "__name__"}
        for at, value in points:
            by_time.setdefault(at, {}).setdefault(name, []).append(Sample(sample, value))
    if len(by_time) * len(chosen) > MOST_LOOKS:
        raise TooMany("too many cards x points", hint="a longer step, a shorter window or a narrower --cards")
    rows: list[GpuRow] = []
    each: list[tuple[float, list[GpuRow]]] = []
    seen: dict[tuple[str, str, int, str], CardWindow] = {}
    missing = ""
    for at, families in sorted(by_time.items()):
        found = read_dcgm(Samples(families, frozenset(families)))
        if isinstance(found, Missing):
            missing = found.reason
            continue
        rows = found
        each.append((at, found))
        for row in found:
            key = (row.host, row.uuid, row.index, row.labels.get("mig_instance", ""))
            before = seen.get(key)
            fullest = row if before is None or row.used_bytes > before.card.used_bytes else before.card
            least = row.free_bytes if before is None else min(before.least_free_bytes, row.free_bytes)
            seen[key] = CardWindow(fullest, least, 1 if before is None else before.points + 1)
    return Cards(rows, list(seen.values()), f"{how}{f'; at some points they could not be read: {missing}' if missing else ''}", each)


def _of_fleet(
    series: Sequence[tuple[dict[str, str], list[tuple[float, float]]]], targets: Iterable[Labels]
) -> tuple[list[tuple[dict[str, str], list[tuple[float, float]]]], str]:
    """Return the series of the cards that the targets' pods hold, else of the cards on their nodes, and how they were found."""
    every = list(targets)
    pods = {(target.get("namespace", ""), target["pod"]) for target in every if target.get("pod")}
    mine = [one for one in series if pods & _pods(one[0])]
    if mine:
        return mine, "cards that the targets' pods hold"
    nodes = {name for target in every for name in (target.get("node", ""), _host(target.get("instance", ""))) if name}
    mine = [one for one in series if nodes & _nodes(one[0])]
    if mine:
        return mine, f"cards on the targets' nodes ({', '.join(clean(name, 60) for name in sorted(nodes)[:6])})"
    there = sorted({name for labels, _ in series for name in _nodes(labels)})
    return [], f"this Prometheus holds cards of other nodes only ({', '.join(clean(name, 60) for name in there[:6])})"


def _pods(labels: Labels) -> set[tuple[str, str]]:
    """Return the pods that a card's series names, with and without their namespace: a target may not tell its own."""
    exported = labels.get("exported_pod", "")
    pod = exported or labels.get("pod", "")
    namespace = labels.get("exported_namespace" if exported else "namespace", "")
    return {(namespace, pod), ("", pod)} if pod else set()


def _nodes(labels: Labels) -> set[str]:
    return {labels[name] if name != "instance" else _host(labels[name]) for name in HOSTS if labels.get(name)}


def _host(instance: str) -> str:
    """Return an instance's address without its port."""
    if instance.startswith("["):
        return instance[1:].partition("]")[0]
    return instance.rpartition(":")[0] if instance.count(":") == 1 else instance
