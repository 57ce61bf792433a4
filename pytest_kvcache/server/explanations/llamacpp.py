"""What llama.cpp's server says when it does not start."""

from __future__ import annotations

import re

from pytest_kvcache.server.explanations.phrases import F, Known, fixed, known, near

_SMALLER = "fewer layers on the card (-ngl), a smaller model or quantisation of it, or a second card"


def _asked(text: str) -> str:
    """Return the size of the buffer that could not be had, where a backend says it."""
    tail = near(text)
    told = re.search(rf"allocating {F} MiB", tail)
    if told is not None:
        return f" of {told.group(1)} MiB"
    told = re.search(rf"attempted to allocate\s+{F} MB", tail)
    if told is not None:
        return f" of {told.group(1)} MiB"
    told = re.search(r"(?:buffer|allocation) of size ([0-9]{1,18})", tail)
    return f" of {int(told.group(1)) / (1 << 20):.2f} MiB" if told is not None else ""


def _llama_kv(_: re.Match[str], text: str) -> tuple[str, str]:
    size = _asked(text)
    return (
        f"the buffer{size} for the KV cache could not be had",
        "use a smaller context (-c), fewer slots (-np), or a quantised KV cache (-ctk q8_0 -ctv q8_0)",
    )


def _llama_flash(_: re.Match[str], __: str) -> tuple[str, str]:
    return "a quantised V cache works with flash attention only", "add -fa on, or leave -ctv at f16"


def _projected(text: str) -> str:
    """Return what llama.cpp itself reckoned that it would need, where the log says so."""
    match = re.search(rf"projected to use {F} MiB of device memory vs\. {F} MiB of free device memory", near(text))
    if match is None:
        return ""
    need, free = float(match.group(1)), float(match.group(2))
    return f" ({need:g} MiB were reckoned and {free:g} MiB were free: {need - free:g} MiB short)" if need > free else ""


def _weights(match: re.Match[str], text: str) -> tuple[str, str]:
    size = _asked(text)
    return f"the buffer{size} for the weights could not be had on {match.group(1)}{_projected(text)}", f"use {_SMALLER}"


def _compute(_: re.Match[str], text: str) -> tuple[str, str]:
    size = _asked(text)
    means = f"weights and cache are loaded, and the buffer{size} for computing could not be had{_projected(text)}"
    return means, "use a smaller batch (-ub, -b), a smaller context (-c), or a quantised KV cache (-ctk q8_0 -ctv q8_0)"


KNOWN: tuple[Known, ...] = (
    known(r"failed to allocate buffer for kv cache", _llama_kv),
    known(r"failed to allocate compute \w{1,4} ?buffers", _compute),
    known(r"unable to allocate (\w{1,20}) buffer", _weights),
    known(r"V cache quantization requires flash.?attn", _llama_flash),
    known(
        r"unknown model architecture: '([^']{1,40})'",
        fixed("this build of llama.cpp does not know the model's architecture", "use a newer build"),
    ),
)
