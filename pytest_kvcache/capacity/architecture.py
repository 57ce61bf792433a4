"""A model's layers, read from its own files: a ``config.json``, a model folder, a GGUF header, or the configuration as a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_kvcache.capacity.fields import Fields, read_json
from pytest_kvcache.capacity.layers import Architecture, Layer
from pytest_kvcache.errors import UsageError

__all__ = ["Architecture", "Layer", "read_architecture"]


def read_architecture(source: Path | str | Mapping[str, Any], *, assume: Mapping[str, str] | None = None) -> Architecture:
    """Return the layers of a model.

    ``source`` is a ``config.json``, a folder with one, a GGUF file, or the configuration itself. ``assume`` states fields that the file lacks or has wrong,
    by their own names; each ends up in ``assumptions``. Raises CannotJudge naming the field that is missing, UsageError for a file that cannot be read.
    """
    if isinstance(source, Mapping):
        return _from_config(source, "configuration", assume or {})
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UsageError(f"no configuration at {path}", where=str(source), hint="a config.json, a model folder that holds one, or a .gguf file")
    return _from_config(read_json(path), str(path), assume or {})


def _from_config(raw: Mapping[str, Any], name: str, assume: Mapping[str, str]) -> Architecture:
    family = str(raw.get("model_type") or "")
    fields = Fields(raw, assume=assume, name=name, family=family)
    count = fields.need("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = fields.need("num_attention_heads", "n_head", "n_heads")
    size = fields.whole("head_dim", least=1) or fields.need("hidden_size", "n_embd", "d_model") // heads
    kv_heads = fields.whole("num_key_value_heads", least=1) or heads
    return Architecture(
        model_type=family,
        name=name,
        layers=(Layer("full", kv_heads, size, size),) * count,
        context=fields.whole("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        dtype=str(fields.get("dtype", "torch_dtype", default="")),
        query_heads=heads,
        assumptions=tuple(fields.assumptions),
    )
