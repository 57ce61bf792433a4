"""What the weights of a model take in memory where no log says it: read from the files that the user names, or counted from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_kvcache.capacity.architecture import read_architecture, text_model
from pytest_kvcache.capacity.card import Weights, find_weights
from pytest_kvcache.capacity.fields import read_json
from pytest_kvcache.capacity.formats import parse_format
from pytest_kvcache.capacity.growth import resolve_dtypes, stages
from pytest_kvcache.capacity.layers import Architecture
from pytest_kvcache.capacity.parameters import count_parameters
from pytest_kvcache.errors import CannotJudge

# What a figure may be off, as a share of it: checkpoints are loaded nearly as they are; what is counted leaves norms and biases out.
_STORED, _COUNTED, _QUANTISED, _MODULES = 0.01, 0.01, 0.06, 0.1
# Bits of a quantised weight with its scales: groups of 128 with a scale and a zero point, MX blocks of 32 with a scale.
_METHODS = {"gptq": 4.25, "awq": 4.25, "marlin": 4.25, "mxfp4": 4.25, "nvfp4": 4.5, "fp8": 8.05, "fbgemm_fp8": 8.05, "ptpc_fp8": 8.05}


@dataclass(frozen=True)
class Weighed:
    """The weights of a whole model in bytes, over all cards, by how much they may be off to either side, and how that is known."""

    total_bytes: int
    spread_bytes: int
    source: str


def weigh(source: Path, architecture: Architecture | None = None, dtype: str = "auto") -> Weighed:
    """Return the weights of the model whose folder, config.json or GGUF file is named.

    The safetensors beside a configuration count before what it counts itself; nothing is loaded. Raises CannotJudge with what is missing.
    """
    stored = find_weights(source)
    if stored is not None:
        return Weighed(stored.total_bytes, round(_STORED * stored.total_bytes), stored.source)
    architecture = architecture if architecture is not None else read_architecture(source)
    if architecture.parameters is not None:
        return _counted(Weights(architecture.parameters * 2, f"{architecture.parameters:,} parameters"), _COUNTED)
    raw = read_json(source / "config.json" if source.is_dir() else source)
    text, _ = text_model(raw)
    found = count_parameters(raw, text, architecture)
    kind = parse_format(resolve_dtypes(architecture, "auto", dtype)[1])
    wide = kind.block_bytes / kind.block
    bits, everywhere, name = _bits(raw)
    if not bits:
        total, words = found.total * wide, f"{found.total:,} parameters x {wide:g} B ({kind.name})"
    else:
        narrow = found.linear if everywhere else found.experts
        total = narrow * bits / 8 + (found.total - narrow) * wide
        words = f"{narrow:,} parameters x {bits:g} bits ({name}) and {found.total - narrow:,} x {wide:g} B ({kind.name})"
    off = (_QUANTISED if bits else _COUNTED) + (_MODULES if found.beside else 0.0)
    beside = ", without the modules for images or sound" if found.beside else ""
    return _counted(Weights(round(total), f"counted from {_named(source)}: {words}{beside}"), off)


def stage_shares(source: Path, architecture: Architecture, pp: int) -> tuple[float, ...]:
    """Return the share of a model's weights on each of ``pp`` pipeline stages. Raises CannotJudge where its matrices are not known."""
    if source.suffix.lower() == ".gguf":
        raise CannotJudge("a GGUF file is not spread over pipeline stages", where=str(source)[:200])
    raw = read_json(source / "config.json" if source.is_dir() else source)
    return count_parameters(raw, text_model(raw)[0], architecture).shares(stages(len(architecture.layers), pp))


def _counted(weights: Weights, off: float) -> Weighed:
    return Weighed(weights.total_bytes, round(off * weights.total_bytes), weights.source)


def _named(source: Path) -> str:
    return "config.json" if source.is_dir() else source.name[:80]


def _bits(raw: Mapping[str, Any]) -> tuple[float, bool, str]:
    """Return the bits of a quantised weight (0: none is), whether all layers are (else only experts), and the method. Raises CannotJudge for others."""
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not isinstance(config, Mapping):
        return 0.0, False, ""
    method = str(config.get("quant_method") or "").lower()
    if method == "mxfp4":
        return _METHODS["mxfp4"], False, method
    width = config.get("bits", config.get("w_bit"))
    if method in ("gptq", "awq", "awq_marlin", "gptq_marlin") and isinstance(width, int) and 2 <= width <= 8:
        return width + 0.25, True, f"{method}, {width} bits"
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        first = next((group.get("weights") for group in groups.values() if isinstance(group, Mapping)), None) if isinstance(groups, Mapping) else None
        width = first.get("num_bits") if isinstance(first, Mapping) else None
        if isinstance(width, int) and 2 <= width <= 8:
            return width + (0.25 if width < 8 else 0.05), True, f"{method}, {width} bits"
    if method == "bitsandbytes":
        return (4.5, True, method) if config.get("load_in_4bit") else (8.05, True, method)
    if method == "modelopt":
        algorithm = str(config.get("quant_algo") or "").lower()
        method = "nvfp4" if "nvfp4" in algorithm or "fp4" in algorithm else "fp8" if "fp8" in algorithm else method
    if method in _METHODS:
        return _METHODS[method], True, method
    raise CannotJudge(
        f"what its quantisation ({method[:40] or 'not named'}) makes of the weights is not known", hint="name the folder with its safetensors"
    )
