"""A model's layers, read from its own files: a ``config.json``, a model folder, a GGUF header, or the configuration as a mapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_kvcache.capacity import families
from pytest_kvcache.capacity.card import split_files
from pytest_kvcache.capacity.fields import Fields, read_json
from pytest_kvcache.capacity.gguf_models import read_gguf
from pytest_kvcache.capacity.kinds import WORDS, layer_count, layer_kinds
from pytest_kvcache.capacity.layers import Architecture, Kind, Layer
from pytest_kvcache.capacity.states import state_of
from pytest_kvcache.capacity.widths import Widths, attention_layer, expanded_layer, latent_layer, widths_of
from pytest_kvcache.errors import CannotJudge, UsageError

__all__ = ["Architecture", "Layer", "read_architecture"]

# Where the longest length of a model may stand; the smallest of those that are there counts (as in vLLM 0.32).
CONTEXT = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len", "n_ctx",
)  # fmt: skip
# Rotary scalings whose factor is already part of the stated length.
SCALED_ALREADY = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope", "proportional")
ENCODER_DECODER = frozenset({"whisper", "t5", "mt5", "bart", "mbart", "m2m_100", "pegasus", "marian"})


def read_architecture(source: Path | str | Mapping[str, Any], *, assume: Mapping[str, str] | None = None) -> Architecture:
    """Return the layers of a model.

    ``source`` is a ``config.json``, a folder with one, a GGUF file, the address of a server that tells (Ollama), or the configuration itself.
    ``assume`` states fields that the file lacks or has wrong, by their own names; each ends up in ``assumptions``. Raises CannotJudge naming the field that is missing, UsageError for a file that cannot be read, and
    for an address what the connection raises.
    """
    if isinstance(source, Mapping):
        return _from_config(source, "configuration", assume or {})
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        from pytest_kvcache.capacity.served import read_served

        return read_served(source, assume or {})
    path = Path(source)
    if path.is_dir():
        return _from_folder(path, assume or {})
    if not path.is_file():
        raise UsageError(f"no configuration at {path}", where=str(source), hint="a config.json, a model folder that holds one, or a .gguf file")
    if path.suffix.lower() == ".gguf" or _begins(path) == b"GGUF":
        return read_gguf(path, assume or {})
    made = _from_config(read_json(path), str(path), assume or {})
    return _beside(made, path.parent) if path.name == "config.json" else made


def _begins(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise UsageError(f"cannot read {path.name}: {error.strerror or error}", where=str(path)) from error


def _from_folder(folder: Path, assume: Mapping[str, str]) -> Architecture:
    path = folder / "config.json"
    if not path.is_file() and (folder / "params.json").is_file():
        path = folder / "params.json"  # Mistral's own format
    if not path.is_file():
        packed = [file for file in sorted(folder.glob("*.gguf")) if not file.name.startswith("mmproj")]  # an image projector is no language model
        if packed and not set(packed) - set(split_files(packed[0])):
            return read_gguf(packed[0], assume)
        several = f", and {len(packed)} GGUF files: name the one that is meant" if packed else ""
        raise UsageError(f"{folder} holds no config.json{several}", where=str(folder), hint="a folder with a config.json, or a .gguf file")
    return _beside(_from_config(read_json(path), str(folder), assume), folder)


def _beside(made: Architecture, folder: Path) -> Architecture:
    """Add what ModelOpt writes into a file of its own beside the configuration: the cache type of a quantised checkpoint."""
    quantised = folder / "hf_quant_config.json"
    if not made.kv_dtype_stated and quantised.is_file():
        made = replace(made, kv_dtype_stated=_kv_type({"quantization_config": {"quant_method": "modelopt", **read_json(quantised)}}, made.layers))
    return made


def _from_config(raw: Mapping[str, Any], name: str, assume: Mapping[str, str]) -> Architecture:
    text, model_type = text_model(raw)
    architectures = raw.get("architectures") if isinstance(raw.get("architectures"), list) else []
    model_type = (
        assume.get("model_type")
        or model_type
        or next((families.OF_CLASS[str(name)] for name in architectures or [] if str(name) in families.OF_CLASS), "")
    )
    family = families.family_of(model_type)
    if family in families.ENCODERS:
        raise CannotJudge(
            f"{model_type!r} is an encoder: it reads its whole input at once and keeps no KV cache, so there is nothing to plan", where=name
        )
    names = (family, model_type, *(() if "model_type" in assume else (str(raw.get("model_type")),)))
    unmodelled = next((name for name in names if name in families.UNMODELLED), None)
    if unmodelled is not None:
        raise CannotJudge(
            f"cannot judge model_type {unmodelled!r}: it keeps {families.UNMODELLED[unmodelled]}, and no field says its size", where=name
        )
    fields = Fields(text, defaults=families.class_defaults(family), assume=assume, name=name, family=family)
    if family in ENCODER_DECODER:
        layers, queries = _encoder_decoder(fields)
    else:
        layers, queries = _decoder(fields)
    context = _context(fields, raw)
    notes = [f"{key} was stated and decides nothing for this model" for key in fields.unused if key != "model_type"]
    if family in families.EXPANDED:
        notes.append("K and V of every head are kept, as vLLM, transformers and llama.cpp do; a latent would be smaller")
    notes += [
        f"vLLM's own code of {name} ended with {families.GONE_FROM_VLLM[str(name)]}: 0.32 hands it to its Transformers backend, where that can serve it"
        for name in architectures or []
        if str(name) in families.BY_TRANSFORMERS
    ]
    return Architecture(
        model_type=model_type,
        name=name,
        layers=tuple(layers),
        context=context,
        dtype=_dtype(raw, text),
        kv_dtype_stated=_kv_type(raw, layers) or _kv_type(text, layers),
        query_heads=queries,
        assumptions=tuple(dict.fromkeys(fields.assumptions)),
        notes=tuple(notes),
        refused_by_vllm=_refused(architectures or [], fields, layers),
        context_stated=fields.has(*CONTEXT, "model_max_length"),
        unscaled_context=_unscaled(fields),
        mtp_layers=_draft_layers(fields, layers),
    )


def text_model(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the configuration of the text model, and its model_type: a file of several modalities nests it, some twice."""
    model_type = str(raw.get("model_type") or "")
    found: Mapping[str, Any] = raw
    for _ in range(3):
        key = next((key for key in families.INSIDE if isinstance(found.get(key), Mapping)), None)
        if key is None or (key.startswith("decoder") and found.get("num_hidden_layers")):
            break
        found = found[key]
        model_type = str(found.get("model_type") or model_type)
    return found, model_type


def _decoder(fields: Fields) -> tuple[list[Layer], int]:
    count = layer_count(fields)
    kinds = layer_kinds(fields, count)
    latent = _latent(fields, kinds)
    state = state_of(fields) if any(kind in ("state", "both") for kind in kinds) else None
    attends = any(kind not in ("state", "none") for kind in kinds)
    if not attends:
        return [Layer("state", state=state) if kind == "state" else Layer("none") for kind in kinds], _state_heads(fields)
    widths = None if latent else widths_of(fields, count)
    cross = set(_cross_layers(fields))
    shared_from = count - (fields.whole("num_kv_shared_layers", default=0) or 0)
    share = (fields.whole("cla_share_factor", default=1, least=1) or 1) if fields.flag("use_cla") else 1
    layers = []
    for index, kind in enumerate(kinds):
        if kind == "none":
            layers.append(Layer("none"))
        elif kind == "state":
            layers.append(Layer("state", state=state))
        elif index >= shared_from or index % share:
            layers.append(Layer("shared"))
        elif latent is not None and kind in ("sliding", "chunked"):
            raise CannotJudge(
                f"cannot judge model_type {fields.family!r}: it has window layers beside a latent, and what those keep is not known",
                where=fields.name,
                hint="--assume sliding_window=null where no layer slides",
            )
        elif latent is not None:
            layers.append(latent if kind == "indexed" or not latent.index_size else replace(latent, index_size=0))
        else:
            assert widths is not None
            layers.append(_attention(fields, widths, kind, index, cross=index in cross))
            if kind == "both":
                layers[-1] = replace(layers[-1], state=state)
    queries = fields.whole("num_attention_heads", default=0) or 0 if latent else widths.query_heads if widths else 0
    return layers, queries


def _attention(fields: Fields, widths: Widths, kind: str, index: int, *, cross: bool) -> Layer:
    if widths.kv_heads[index] == 0:
        return Layer("none")
    if fields.family in families.EXPANDED:
        return expanded_layer(fields)
    as_kind: Kind = (
        "cross"
        if cross
        else "full"
        if kind in ("both", "indexed")
        else "sliding"
        if kind == "sliding"
        else "chunked"
        if kind == "chunked"
        else "full"
    )
    return attention_layer(fields, widths, as_kind, index)


def _latent(fields: Fields, kinds: list[str]) -> Layer | None:
    known = families.is_known(fields.family)
    if fields.has("use_mla") and not fields.flag("use_mla"):
        return None
    if fields.family in families.LATENT or (not known and fields.has("kv_lora_rank")):
        indexed = "indexed" in kinds or (fields.has("index_head_dim") and fields.has("index_topk"))
        found = latent_layer(fields, indexed=indexed)
        if found is not None and not known:
            fields.assumptions.append("one latent for all heads: the configuration has kv_lora_rank")
        if found is not None and indexed and "indexed" not in kinds:
            kinds[:] = ["indexed" if kind == "full" else kind for kind in kinds]
        return found
    if known and fields.family not in families.EXPANDED and fields.whole("kv_lora_rank", least=0):
        raise CannotJudge(
            f"cannot judge model_type {fields.family!r}: kv_lora_rank says that a latent is kept, and how is not known of this family",
            where=fields.name,
            hint="--assume model_type=deepseek_v3 where it is one of that design, or --assume kv_lora_rank=null where it decides nothing",
        )
    return None


def _cross_layers(fields: Fields) -> list[int]:
    listed = fields.listed("cross_attention_layers")
    if listed is None and fields.family == "mllama_text_model":
        listed = [3, 8, 13, 18, 23, 28, 33, 38]
        fields.assumptions.append(f"cross_attention_layers = {listed}, the class default of {fields.family}")
    return [entry for entry in listed or [] if isinstance(entry, int)]


def _state_heads(fields: Fields) -> int:
    return fields.whole("num_heads", default=0) or 0 if fields.family == "mamba2" else 0


def _encoder_decoder(fields: Fields) -> tuple[list[Layer], int]:
    """The decoder's own tokens grow; the encoder's are kept once, in as many cross-attention layers."""
    count = fields.need("decoder_layers", "num_decoder_layers", "num_layers")
    heads = fields.need("decoder_attention_heads", "num_heads", "num_attention_heads")
    size = fields.whole("d_kv", least=1) or fields.need("d_model", "hidden_size") // heads
    own, cross = Layer("full", heads, size, size), Layer("cross", heads, size, size)
    return [layer for _ in range(count) for layer in (own, cross)], heads


def _draft_layers(fields: Fields, layers: list[Layer]) -> tuple[Layer, ...]:
    """The checkpoint's own draft layers (multi-token prediction), served only where asked for.

    They are like the layers that a list names beyond the model's own (Step), like its window layers (MiMo-V2), with an indexer where the model has one, or
    else like its last attention layer.
    """
    number = min(fields.whole("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0) or 0, 64)
    attention = [layer for layer in reversed(layers) if layer.kind in ("full", "mla", "sliding")]
    if not number or not attention:
        return ()
    beyond = (fields.listed("layer_types") or [])[len(layers) : len(layers) + number]
    if fields.family == "mimo_v2_flash":
        beyond = ["sliding_attention"] * number
    last = next((layer for layer in attention if layer.index_size), attention[0])
    if len(beyond) < number:
        return (last,) * number
    return tuple(next((layer for layer in attention if layer.kind == WORDS.get(str(word))), last) for word in beyond)


def _context(fields: Fields, raw: Mapping[str, Any]) -> int | None:
    stated = [length for key in CONTEXT if fields.has(key) and (length := fields.whole(key, least=1))]
    own = fields.whole("model_max_length", least=1)
    length = own or (min(stated) if stated else fields.whole(*CONTEXT, least=1))
    if length is None:
        return None
    scaling = fields.get("rope_scaling", "rope_parameters")
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default") if isinstance(scaling, Mapping) else "default"
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    if (
        kind not in SCALED_ALREADY
        and isinstance(factor, (int, float))
        and not isinstance(factor, bool)
        and 1 <= factor <= 10_000
        and "gemma3" not in str(raw.get("model_type"))
    ):
        return int(length * factor)
    return length


def _unscaled(fields: Fields) -> int | None:
    """Return the length that a model with LongRoPE was first made for; None for all others."""
    scaling = fields.get("rope_scaling", "rope_parameters")
    kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, Mapping) else None
    if kind not in ("longrope", "su"):
        return None
    return fields.whole("original_max_position_embeddings", default=4096 if fields.family in ("phi3", "phi4_multimodal") else None, least=1)


def _dtype(raw: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for config in (raw, text):
        for key in ("dtype", "torch_dtype"):
            if isinstance(config.get(key), str):
                return str(config[key]).removeprefix("torch.")
    return ""


def _kv_type(config: Mapping[str, Any], layers: Sequence[Layer]) -> str:
    """Return the cache type that a quantised checkpoint asks for: ``kv_cache_scheme``, or a ModelOpt name. "" where it asks for none.

    ModelOpt's fp8 is plain fp8 (vLLM 0.32), also where a sparse latent's fp8 would have rows of its own.
    """
    quantised = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(quantised, Mapping):
        return ""
    inner = quantised.get("quantization")
    groups = [inner, quantised] if isinstance(inner, Mapping) else [quantised]
    for group in groups:
        scheme = group.get("kv_cache_scheme")
        if isinstance(scheme, Mapping):
            found = {"8 float": "fp8", "4 float": "nvfp4", "8 int": "int8"}.get(f"{scheme.get('num_bits')} {scheme.get('type')}")
            if found:
                return found
    for group in groups:
        for key in ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_dtype"):
            name = str(group.get(key) or "").lower()
            if name == "fp8" and str(quantised.get("quant_method") or "").startswith("modelopt") and any(layer.index_size for layer in layers):
                return "fp8_e4m3"
            if name in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4", "int8"):
                return name
    return ""


def _refused(architectures: list[Any], fields: Fields, layers: list[Layer]) -> str:
    for name in architectures:
        last = families.GONE_FROM_VLLM.get(str(name))
        if last and str(name) not in families.BY_TRANSFORMERS:
            return f"{name} was served by vLLM until {last}, and is not by 0.32"
    if fields.family in families.UNSERVED:
        return f"vLLM 0.32 does not serve {fields.family}: it has no code of its own for it, and its Transformers backend cannot run it"
    if fields.family in ENCODER_DECODER - {"whisper"}:
        return f"vLLM 0.32 serves Whisper of the models with an encoder and a decoder, and not {fields.family}"
    kinds = {layer.kind for layer in layers}
    if fields.family in ("qwen2", "qwen3") and {"sliding", "full"} <= kinds:
        first, count = fields.whole("max_window_layers", default=0), len(layers)
        return f"Sliding window for some but all layers is not supported: max_window_layers = {first} is less than num_hidden_layers = {count}"
    return ""
