"""Units: parsing and printing of bytes, seconds, ratios and counts. ``GiB`` is 2^30 and ``GB`` is 10^9, everywhere."""

from __future__ import annotations

import math
import re

from pytest_kvcache.errors import UsageError

HUGE = 1e15
"""From here on no measurement of ours goes: a number that somebody sends all the same is shown by its power of ten."""
_BYTES = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SECONDS = {"": 1.0, "S": 1.0, "MS": 1e-3, "US": 1e-6, "M": 60.0, "MIN": 60.0, "H": 3600.0}
_NUMBER = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*\Z")


def _parse(text: str, scale: dict[str, float] | dict[str, int], kind: str, example: str) -> float:
    match = _NUMBER.match(text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in scale:
        known = ", ".join(name for name in scale if name)
        raise UsageError(f"cannot read {text[:80]!r} as {kind}", hint=f"a number with one of {known}, such as {example}")
    value = float(match.group(1).replace(",", "").replace("_", "")) * scale[unit]
    if not value < HUGE * 1024:
        raise UsageError(f"{text[:80]!r} is too large for {kind}", hint=f"a number such as {example}")
    return value


def parse_bytes(text: str) -> int:
    """Return bytes of ``"80GiB"``, ``"1.5 GB"`` or ``"1024"``. Raises UsageError."""
    return round(_parse(text, _BYTES, "a size", "80GiB"))


def parse_seconds(text: str) -> float:
    """Return seconds of ``"90"``, ``"1.5s"``, ``"200ms"`` or ``"2m"``. Raises UsageError."""
    return _parse(text, _SECONDS, "a duration", "1.5s")


def show_bytes(value_bytes: float) -> str:
    """Return bytes as ``"1.50 GiB"`` (powers of 1024)."""
    size = float(value_bytes)
    if not abs(size) < HUGE * 1024:
        return f"{size:.3g} B"
    for name in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if name == "B" else f"{size:.2f} {name}"
        size /= 1024
    return f"{size:.2f} TiB"


def show_seconds(value_s: float) -> str:
    """Return seconds as ``"1.25 s"`` or, under one second, ``"250 ms"``."""
    if not abs(value_s) < HUGE:
        return f"{value_s:.3g} s" if math.isfinite(value_s) else str(value_s)
    if abs(value_s) < 0.0995:
        return f"{value_s * 1e3:.1f} ms"
    if abs(value_s) < 0.9995:
        return f"{value_s * 1e3:.0f} ms"
    return f"{value_s:.2f} s"


def show(value: float | str | bool, unit: str) -> str:
    """Return any value of ours as text with its unit; ratios as percentages with one decimal, tiny ones with two digits."""
    if isinstance(value, (str, bool)):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    value += 0.0  # a zero below zero is a zero
    if unit == "ratio" and abs(value) >= HUGE:
        return f"{value * 100:.3g} %" if abs(value) < 1e300 else f"{value:.3g}"
    if unit == "ratio":
        # a small share is not none: 0.0001 is 0.01 %
        return f"{value * 100:.1f} %" if value == 0 or abs(value) >= 0.0005 else f"{value * 100:.2g} %"
    if unit == "bytes":
        return show_bytes(value)
    if unit == "s":
        return show_seconds(value)
    whole = value == round(value) or (unit == "tokens" and abs(value) >= 100)  # a mean length of hundreds has no use for hundredths
    number = f"{value:.3g}" if abs(value) >= HUGE else f"{value:,.0f}" if whole else f"{value:,.2f}"
    if unit == "factor":  # so many times another figure: nothing to name
        return number
    return f"{number} {unit.removesuffix('s') if number == '1' and unit.isalpha() else unit}".strip()
