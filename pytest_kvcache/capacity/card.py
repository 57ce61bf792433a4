"""From a card to the memory that its KV pool gets, and from a pool that is needed to the card: one ledger, line by line.

vLLM 0.32 (``vllm/v1/worker/gpu_worker.py``): ceil(total x utilization) - weights - activation peak - non-torch memory - CUDA graphs. SGLang 0.5
(``python/sglang/srt/model_executor``): total x mem-fraction-static - weights; activations and graphs live in the rest of the card.
llama.cpp takes no share: its pool is what --ctx-size asks for, and what the card has left decides whether that fits.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

from pytest_kvcache import units
from pytest_kvcache.errors import CannotJudge, UsageError

GIB = 1 << 30
_MOST_INDEX = 64 << 20
_MOST_HEADER = 100 << 20
_MOST_FILES = 2000
_SPLIT = re.compile(r"(.{1,200})-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.IGNORECASE)
DEFAULT_UTILIZATION = {"vllm": 0.92, "sglang": 0.88, "paged": 0.9, "llamacpp": 1.0}
"""vLLM 0.32's own default (0.9 until 0.19); SGLang computes its own from the card, mostly 0.83 to 0.9."""

CARDS: tuple[tuple[str, float], ...] = (
    ("16 GB (T4, V100)", 14.6), ("24 GB (L4, A10, 3090, 4090)", 22.0), ("32 GB (5090)", 31.3), ("40 GB (A100)", 39.4), ("48 GB (L40S, A6000)", 44.4),
    ("80 GB (A100, H100)", 79.1), ("94 GB (H100 NVL)", 93.0), ("141 GB (H200)", 139.8), ("180 GB (B200)", 178.3), ("192 GB (MI300X)", 191.5),
)  # fmt: skip
"""Common cards and the GiB that a driver reports of each, the smallest seen of its class."""

COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Weights:
    """The bytes of a whole model's weights, over all cards, and where the figure is from."""

    total_bytes: int
    source: str


@dataclass(frozen=True)
class Card:
    """What is stated of one card. ``free_bytes`` is what is free on it before the engine starts (None: not stated); all others are bytes per card."""

    total_bytes: int
    utilization: float
    weights_bytes: int
    activation_bytes: int | None = None
    graphs_bytes: int | None = None
    other_bytes: int | None = None
    free_bytes: int | None = None
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ledger:
    """What becomes of one card. ``lines`` are (name, bytes, source) whose sum is the budget; ``kv_bytes`` what is left for the pool, 0 or more.

    ``starts`` is False, with the ``reason``, where the engine would refuse before a pool is sized. ``idle_bytes`` lie outside the budget.
    """

    budget_bytes: int
    lines: tuple[tuple[str, int, str], ...]
    kv_bytes: int
    idle_bytes: int
    starts: bool
    reason: str
    equation: str
    assumptions: tuple[str, ...]
    notes: tuple[str, ...] = ()


def check_share(value: float, name: str = "--utilization") -> float:
    """Return a share of the card. Raises UsageError for what is none: 90 would be ninety cards."""
    if not (math.isfinite(value) and 0 < value <= 1):
        raise UsageError(f"{name} {value:g} is no share of a card", hint="0.9 means 90 %")
    return value


def ledger(card: Card, engine: str) -> Ledger:
    """Return what becomes of the card under this engine's rule. Raises UsageError for a share that is none."""
    check_share(card.utilization)
    budget = math.ceil(card.total_bytes * card.utilization)
    unstated = [name for name, value in (("activation peak", card.activation_bytes), ("graphs", card.graphs_bytes)) if value is None]
    assumptions: list[str] = []
    inside = [("weights", card.weights_bytes, card.sources.get("weights", "stated"))]
    beside = [
        (name, value or 0, card.sources.get(key, "stated" if value is not None else "not stated: counted as 0"))
        for name, key, value in (
            ("activation peak", "activation", card.activation_bytes),
            ("graphs", "graphs", card.graphs_bytes),
            ("other (context, libraries)", "other", card.other_bytes),
        )
    ]
    notes: list[str] = []
    if engine == "sglang":
        room = card.total_bytes - budget
        needed = sum(value for _, value, _ in beside)
        if needed > room:
            notes.append(
                f"activations, graphs and the rest need {units.show_bytes(needed)}, and outside the share there are {units.show_bytes(room)}:"
                " it starts and then runs out of memory; lower --utilization (mem-fraction-static)"
            )
        lines = inside
    else:
        lines = inside + beside
    if unstated and engine != "sglang":
        assumptions.append(f"{' and '.join(unstated)} not stated and counted as 0: the real pool is smaller")
    left = budget - sum(value for _, value, _ in lines)
    figures = " - ".join([_gib(budget), *(_gib(value) for _, value, _ in lines if value)])
    names = " - ".join([f"{card.utilization:g} x {_gib(card.total_bytes)}", *(name for name, value, _ in lines if value)])
    equation = f"{names} = {figures} = {_gib(left)} GiB for the pool"
    reason = ""
    if card.free_bytes is not None and engine == "vllm" and card.free_bytes < budget:
        best = math.floor(card.free_bytes / card.total_bytes * 1000) / 1000
        short, held = budget - card.free_bytes, card.total_bytes - card.free_bytes
        reason = (
            f"{_gib(card.free_bytes)} of {_gib(card.total_bytes)} GiB are free and {card.utilization:g} of the card ({_gib(budget)} GiB) is wanted"
            f" before the model loads: {_gib(short)} GiB short; {_gib(held)} GiB are held by others; --utilization {best:g} or less starts"
        )
    elif left <= 0:
        reason = _no_room(card, engine, budget, lines)
    if card.free_bytes is not None and engine != "vllm" and not reason:
        left = min(left, card.free_bytes - sum(value for _, value, _ in inside + beside))
    return Ledger(budget, tuple(lines), max(left, 0), card.total_bytes - budget, not reason, reason, equation, tuple(assumptions), tuple(notes))


def _no_room(card: Card, engine: str, budget: int, lines: list[tuple[str, int, str]]) -> str:
    spent = sum(value for _, value, _ in lines)
    least = spent / card.total_bytes
    knob = "mem-fraction-static" if engine == "sglang" else "--utilization"
    mend = f"more than {least:.4f} is the least {knob} that leaves any" if least < 1 else "no share of this card is enough"
    parts = ", ".join(f"{name} {_gib(value)}" for name, value, _ in lines if value)
    return f"no memory is left for the pool: {parts} = {_gib(spent)} GiB, and the share is {_gib(budget)} GiB; {mend}"


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"


@dataclass(frozen=True)
class Need:
    """What one worker count needs: ``cards`` of at least ``card_bytes`` each, and the smallest common card that has it ("" none)."""

    cards: int
    card_bytes: int
    fits: str
    kv_bytes: int


def card_for(kv_bytes: int, weights_bytes: int, *, cards: int, utilization: float, engine: str, beside_bytes: int = 0) -> Need:
    """Return the card that holds a pool of ``kv_bytes`` and ``weights_bytes`` on each of ``cards``; ``beside_bytes`` are activations, graphs and the rest."""
    check_share(utilization)
    if engine == "sglang":
        least = max((kv_bytes + weights_bytes) / utilization, beside_bytes / (1 - utilization) if utilization < 1 else 0.0)
    else:
        least = (kv_bytes + weights_bytes + beside_bytes) / utilization
    size = math.ceil(least)
    return Need(cards, size, next((name for name, gib in CARDS if size <= gib * GIB), ""), kv_bytes)


def find_weights(source: Path) -> Weights | None:
    """Return the weights of a model folder or a GGUF file; None where nothing there tells.

    Looked at, in this order: the total of a safetensors index, the headers of the ``*.safetensors`` files, their sizes or those of ``*.bin`` and
    ``*.gguf`` files. Copies of the same weights (Mistral's ``consolidated``) and adapters do not count. Nothing is loaded. Raises CannotJudge where parts
    of a split file are missing, or several GGUF files lie there.
    """
    if source.is_file() and source.suffix.lower() == ".gguf":
        return _packed(split_files(source))
    folder = source if source.is_dir() else source.parent if source.name == "config.json" else None
    if folder is None:
        return None
    for index in sorted(folder.glob("*.safetensors.index.json"))[:1]:
        total = _index_total(index)
        if total:
            return Weights(total, f"total_size of {index.name}")
    for pattern in ("*.safetensors", "*.bin", "*.gguf"):
        files = _without_copies(sorted(folder.glob(pattern))[:_MOST_FILES])
        if not files:
            continue
        if pattern == "*.gguf":
            parts = split_files(files[0])
            if set(files) - set(parts):
                raise CannotJudge(
                    f"{len(files)} GGUF files lie there: which one is served?",
                    where=str(folder)[:200],
                    hint="name the file, or state --weights 14GiB",
                )
            return _packed(parts)
        sizes = [_tensor_bytes(file) if pattern == "*.safetensors" else file.stat().st_size for file in files]
        return Weights(sum(sizes), f"size of {len(files)} {pattern} file{'s' if len(files) > 1 else ''}")
    return None


def split_files(path: Path) -> list[Path]:
    """Return all parts of a GGUF file (``NAME-00001-of-00003.gguf``), itself where it is whole. Raises CannotJudge where parts are missing."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match.group(3))
    parts = [path.with_name(f"{match.group(1)}-{number:05d}-of-{match.group(3)}{match.group(4)}") for number in range(1, min(count, _MOST_FILES) + 1)]
    missing = sum(not part.is_file() for part in parts)
    if missing or not parts:
        raise CannotJudge(f"{missing} of its {count} parts are missing", where=str(path)[:200], hint="fetch them all, or state --weights 14GiB")
    return parts


def _packed(parts: list[Path]) -> Weights:
    return Weights(
        sum(part.stat().st_size for part in parts),
        f"size of {parts[0].name}" if len(parts) == 1 else f"size of {len(parts)} parts of {parts[0].name}",
    )


def _without_copies(files: list[Path]) -> list[Path]:
    """Leave out adapters, what a trainer left, and Mistral's own format where the same weights lie beside it."""
    kept = [file for file in files if not file.name.startswith(("adapter_", "training_args", "optimizer", "scheduler", "rng_state", "mmproj"))]
    models = [file for file in kept if file.name.startswith(("model", "pytorch_model"))]
    return models or kept


def _index_total(path: Path) -> int:
    try:
        if path.stat().st_size > _MOST_INDEX:
            return 0
        body = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return 0
    meta = body.get("metadata") if isinstance(body, dict) else None
    total = meta.get("total_size") if isinstance(meta, dict) else None
    return int(total) if isinstance(total, (int, float)) and not isinstance(total, bool) and 0 < total < 1 << 60 else 0


def _tensor_bytes(path: Path) -> int:
    """Return the bytes of the tensors in a safetensors file: its size without the header. A link that leads nowhere (git-lfs) is refused."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
    if len(head) < 8 or head[:7] == b"version":
        raise CannotJudge("this is a pointer and not the weights themselves", where=str(path)[:200], hint="state them: --weights 14GiB")
    (header,) = struct.unpack("<Q", head)
    if header > min(size, _MOST_HEADER):
        raise CannotJudge("this is no safetensors file", where=str(path)[:200], hint="state the weights: --weights 14GiB")
    return size - 8 - int(header)


def weights_of_parameters(parameters: int, bits: float, note: str) -> Weights:
    """Return the weights of so many parameters at ``bits`` each."""
    return Weights(math.ceil(parameters * bits / 8), f"{parameters:,} parameters x {bits / 8:g} B ({note})")
