"""The recall model (``recall_weights``) on disk: as GGUF for llama.cpp, as a Hugging Face folder for vLLM, in a cache folder shared by all projects."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvcache.errors import CannotWrite, UsageError
from pytest_kvcache.server.embedded import recall_tokenizer, recall_weights
from pytest_kvcache.server.embedded.recall_tokenizer import WORDS

if TYPE_CHECKING:
    from pytest_kvcache.server.embedded.recall_weights import Array

__all__ = ["WORDS", "ModelPaths", "build_recall_model", "cache_folder", "model_folder", "model_paths", "need_libraries"]

MODEL_VERSION = "1"  # part of the folder's name: raise it whenever the bytes of the model change
MODEL_NAME = "recall"
GGUF_FILE = "recall.gguf"
HF_FOLDER = "hf"
STAMP = "complete.json"


@dataclass(frozen=True)
class ModelPaths:
    """Where the model lies: ``folder`` holds ``gguf`` (llama.cpp) and ``hf`` (the Hugging Face folder)."""

    folder: Path
    gguf: Path
    hf: Path


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of everything that we build or install: ``$PYTEST_KVCACHE_CACHE_DIR``, else below the XDG cache folder."""
    environ = os.environ if environ is None else environ
    if own := environ.get("PYTEST_KVCACHE_CACHE_DIR", ""):
        return Path(own).expanduser().absolute()
    if xdg := environ.get("XDG_CACHE_HOME", ""):
        return Path(xdg).expanduser().absolute() / "pytest-kvcache"
    try:
        home = Path.home()
    except RuntimeError:
        raise CannotWrite("there is no home folder to keep the embedded model in", hint="set PYTEST_KVCACHE_CACHE_DIR to a folder") from None
    return home / ".cache" / "pytest-kvcache"


def model_folder() -> Path:
    """Return the cached model's folder, which exists only once ``model_paths`` built it."""
    return cache_folder() / f"recall-{MODEL_VERSION}"


def model_paths() -> ModelPaths:
    """Return the cached model, built now (about a second) where it is missing or damaged.

    It is built in a folder beside and renamed, so a half build is never used and two processes may build at once.
    Raises CannotWrite (cache folder unwritable or full) and UsageError (a library of the ``demo`` extra is missing).
    """
    folder = model_folder()
    if not _is_complete(folder):
        need_libraries("numpy", "gguf")
        with _writing(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            with _writing(folder.parent):
                building.chmod(0o755)
                build_recall_model(building)
                _put_in_place(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return ModelPaths(folder, folder / GGUF_FILE, folder / HF_FOLDER)


def build_recall_model(folder: Path, slow_amp: float = recall_weights.SLOW_AMP) -> ModelPaths:
    """Write the model into ``folder``: ``recall.gguf``, ``hf/`` and, last, a stamp with the size of each file.

    The bytes are the same at every build. Raises UsageError where a library of the ``demo`` extra is missing, OSError where
    the folder cannot be written.
    """
    need_libraries("numpy", "gguf")
    tensors = recall_weights.weights(slow_amp)
    paths = ModelPaths(folder, folder / GGUF_FILE, folder / HF_FOLDER)
    paths.hf.mkdir(parents=True, exist_ok=True)
    _write_hf(paths.hf, tensors)
    _write_gguf(paths.gguf, tensors)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file() and path.name != STAMP}
    _write_json(folder / STAMP, {"version": MODEL_VERSION, "slow_amp": slow_amp, "bytes": sizes})
    return paths


def need_libraries(*names: str) -> None:
    """Raise UsageError where one of these libraries of the ``demo`` extra cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(
                f"the embedded engine needs the library {name}, which cannot be imported: {error}", hint='pip install "pytest-kvcache[demo]"'
            ) from None


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWrite(
            f"the embedded model cannot be written: {error.strerror or error}",
            where=str(folder),
            hint="free some space there (5 MB are needed), or set PYTEST_KVCACHE_CACHE_DIR to a folder that can be written",
        ) from None


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / STAMP).read_text(encoding="utf-8"))["bytes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _put_in_place(building: Path, folder: Path) -> None:
    """Rename the finished build to its name. Where another process was faster its build stays; a damaged one is moved away first."""
    for _ in range(5):
        try:
            building.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if _is_complete(folder):
            return
        damaged = Path(tempfile.mkdtemp(prefix=f".{folder.name}-damaged-", dir=folder.parent))
        try:
            with contextlib.suppress(FileNotFoundError):  # another process moved it away just now
                folder.rename(damaged / "model")
        finally:
            shutil.rmtree(damaged, ignore_errors=True)
    raise OSError(f"{folder.name} keeps changing while it is being built")


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _write_hf(folder: Path, tensors: Mapping[str, Array]) -> None:
    cfg = recall_weights.config()
    special = {"bos_token": recall_tokenizer.BOS, "eos_token": recall_tokenizer.EOS}
    ids = {"bos_token_id": recall_tokenizer.BOS_ID, "eos_token_id": recall_tokenizer.EOS_ID}
    _write_json(folder / "config.json", cfg)
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "tokenizer.json", recall_tokenizer.tokenizer_json())
    _write_json(folder / "tokenizer_config.json", recall_tokenizer.tokenizer_config(recall_weights.CONTEXT))
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(folder / "words.json", list(recall_tokenizer.WORDS))
    _write_safetensors(folder / "model.safetensors", tensors)


def _bf16(array: Array) -> bytes:
    """Return the numbers as little-endian bfloat16, rounded to nearest, ties to even. The numbers are finite."""
    import numpy as np

    bits = np.ascontiguousarray(array, dtype="<f4").view("<u4")
    data: bytes = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return data


def _write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write the tensors as bfloat16: the header's size in 8 bytes, a JSON header padded to 8 bytes, the numbers.

    Not through the safetensors library: its numpy call knows no bfloat16, and its call for raw bytes takes other arguments in
    each series of versions.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs = {name: _bf16(tensors[name]) for name in sorted(tensors)}
    at = 0
    for name, blob in blobs.items():
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [at, at + len(blob)]}
        at += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(blobs.values())


_GGUF_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[part]}.weight"


def _interleaved(array: Array, heads: int) -> Array:
    """Return the rows in the order in which GGUF keeps a Llama's rotated pairs: next to each other, not half a head apart."""
    rows, columns = array.shape
    return array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_gguf(path: Path, tensors: Mapping[str, Array]) -> None:
    import gguf
    import numpy as np

    names = recall_tokenizer.vocabulary()
    special = {recall_tokenizer.BOS_ID, recall_tokenizer.EOS_ID}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(MODEL_NAME)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(len(names))
    writer.add_context_length(recall_weights.CONTEXT)
    writer.add_embedding_length(recall_weights.HIDDEN)
    writer.add_feed_forward_length(recall_weights.INTERMEDIATE)
    writer.add_block_count(recall_weights.LAYERS)
    writer.add_head_count(recall_weights.HEADS)
    writer.add_head_count_kv(recall_weights.KV_HEADS)
    writer.add_key_length(recall_weights.HEAD_DIM)
    writer.add_value_length(recall_weights.HEAD_DIM)
    writer.add_rope_dimension_count(recall_weights.HEAD_DIM)
    writer.add_rope_freq_base(recall_weights.ROPE_THETA)
    writer.add_layer_norm_rms_eps(recall_weights.RMS_EPS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(names))])
    writer.add_token_merges([" ".join(pair) for pair in recall_tokenizer.merges()])
    writer.add_bos_token_id(recall_tokenizer.BOS_ID)
    writer.add_eos_token_id(recall_tokenizer.EOS_ID)
    writer.add_add_bos_token(True)
    writer.add_chat_template(recall_tokenizer.CHAT_TEMPLATE)
    heads = {"q_proj": recall_weights.HEADS, "k_proj": recall_weights.KV_HEADS}
    for name, array in tensors.items():
        turned = next((_interleaved(array, count) for part, count in heads.items() if part in name), array)
        writer.add_tensor(_gguf_name(name), turned.astype(np.float32 if turned.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
