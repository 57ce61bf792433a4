"""Memory of cards on other machines, from the text of NVIDIA's DCGM exporter.

Source: dcgm-exporter, ``etc/default-counters.csv`` (``DCGM_FI_DEV_FB_FREE``, ``_USED``, ``_RESERVED``, ``_TOTAL``, all in MiB) and its labels
``gpu``, ``UUID``, ``modelName``, ``Hostname``, with ``GPU_I_ID`` and ``GPU_I_PROFILE`` for MIG instances and ``namespace``, ``pod``,
``container`` where it runs in Kubernetes. DCGM's used does not hold what the driver reserves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pytest_kvcache.engines import Samples, clean
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import GpuRow

_PREFIX = "DCGM_FI_DEV_FB_"
FIELDS = ("USED", "FREE", "TOTAL", "RESERVED")
FAMILIES = frozenset(_PREFIX + name for name in FIELDS)
_MIB = 1 << 20
_MOST_CARDS = 4096
# Where Prometheus scraped the exporter, the labels of the workload are called exported_... and the plain ones are the exporter's.
_USERS = ("namespace", "pod", "container")
HOSTS = ("Hostname", "hostname", "node", "instance")

Card = tuple[str, str, str, str]


def read_dcgm(text: str | bytes | Samples) -> list[GpuRow] | Missing:
    """Return one row a card (or MIG instance) of a DCGM exporter's text, in bytes, sorted by node and card. Never raises.

    ``host`` is the node, ``labels`` holds namespace, pod, container and MIG instance where they are told; a card that several pods
    share has their names with commas. Missing, with the reason, where the text holds no card, or one of the cards cannot be read:
    a list that lacks a card would look like a measurement of all of them.
    """
    samples = text if isinstance(text, Samples) else parse_samples(text, FAMILIES)
    cards: dict[Card, dict[str, float]] = {}
    labels: dict[Card, dict[str, dict[str, None]]] = {}
    names: dict[Card, str] = {}
    for field in FIELDS:
        for row in samples.rows.get(_PREFIX + field, ()):
            card = _card(row.labels)
            if card not in cards and len(cards) >= _MOST_CARDS:
                return Missing(f"more than {_MOST_CARDS} cards in one text")
            held = cards.setdefault(card, {})
            if not math.isfinite(row.value) or row.value < 0:
                return Missing(f"{_PREFIX}{field} of card {_shown(card)} reads {row.value:g}")
            if held.get(field, row.value) != row.value:
                return Missing(f"{_PREFIX}{field} of card {_shown(card)} is there twice with different values")
            held[field] = row.value
            names[card] = row.labels.get("modelName", "") or names.get(card, "")
            for name, value in _users(row.labels).items():
                labels.setdefault(card, {}).setdefault(name, {})[value] = None
    if not cards:
        return Missing("no DCGM_FI_DEV_FB_ series in the text: is it a DCGM exporter's, with the frame buffer counters on?")
    rows = []
    for card in sorted(cards, key=_order):
        sizes = _sizes(cards[card])
        if isinstance(sizes, Missing):
            return Missing(f"card {_shown(card)}: {sizes.reason}")
        host, uuid, index, _ = card
        rows.append(
            GpuRow(
                index=int(index) if index.isdecimal() and len(index) < 6 else -1,
                uuid=clean(uuid, 100),
                name=clean(names[card], 100),
                total_bytes=sizes["TOTAL"],
                used_bytes=sizes["USED"],
                free_bytes=sizes["FREE"],
                reserved_bytes=sizes["RESERVED"],
                host=clean(host, 200),
                labels={name: ", ".join(values)[:300] for name, values in labels.get(card, {}).items()},
            )
        )
    return rows


def _card(labels: Mapping[str, str]) -> Card:
    host = next((labels[name] for name in HOSTS if labels.get(name)), "")
    return host, labels.get("UUID", ""), labels.get("gpu", ""), labels.get("GPU_I_ID", "")


def _order(card: Card) -> tuple[str, int, str, str]:
    host, uuid, index, part = card
    return host, int(index) if index.isdecimal() and len(index) < 6 else 0, part, uuid


def _shown(card: Card) -> str:
    host, uuid, index, part = card
    return (
        clean(" ".join(word for word in (host, f"gpu {index}" if index else uuid, f"instance {part}" if part else "") if word), 100) or "(no labels)"
    )


def _users(labels: Mapping[str, str]) -> dict[str, str]:
    found = {}
    exported = any(labels.get(f"exported_{name}") for name in _USERS)
    for name in _USERS:
        value = labels.get(f"exported_{name}" if exported else name, "")
        if value:
            found[name] = clean(value, 100)
    for name, shown in (("GPU_I_ID", "mig_instance"), ("GPU_I_PROFILE", "mig_profile")):
        if labels.get(name):
            found[shown] = clean(labels[name], 60)
    return found


def _sizes(held: Mapping[str, float]) -> dict[str, int] | Missing:
    """Return all four sizes in bytes; total = used + free + reserved gives the one that an exporter leaves out."""
    known = {field: round(value * _MIB) for field, value in held.items()}
    if "USED" not in known and not {"TOTAL", "FREE"} <= known.keys():
        return Missing(f"{_PREFIX}USED is not told, and total and free, which would give it, are not both there")
    if "TOTAL" not in known:
        if "FREE" not in known:
            return Missing(f"neither {_PREFIX}TOTAL nor {_PREFIX}FREE is told: the size of the card is not known")
        known["TOTAL"] = known["USED"] + known["FREE"] + known.get("RESERVED", 0)
    if "USED" not in known:
        known["USED"] = max(known["TOTAL"] - known["FREE"] - known.get("RESERVED", 0), 0)
    if "FREE" not in known:
        known["FREE"] = max(known["TOTAL"] - known["USED"] - known.get("RESERVED", 0), 0)
    known.setdefault("RESERVED", max(known["TOTAL"] - known["USED"] - known["FREE"], 0))
    if known["USED"] > known["TOTAL"]:
        return Missing(f"{known['USED'] // _MIB} MiB of {known['TOTAL'] // _MIB} MiB are said to be used")
    return known
