"""GGUF headers: the layers that llama.cpp would keep, and files that lie about themselves."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.gguf_header import read_header
from pytest_kvcache.capacity.growth import growth
from pytest_kvcache.errors import CannotJudge, KvError, UsageError

FORMS = {"B": 0, "i": 5, "I": 4, "f": 6, "?": 7, "Q": 10}


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(entry) for entry in value)
    form = "?" if isinstance(value[0], bool) else "i"
    return struct.pack("<IIQ", 9, FORMS[form], len(value)) + struct.pack(f"<{len(value)}{form}", *value)


def _gguf(path: Path, keys: dict[str, Any], tensors: tuple[tuple[int, ...], ...] = ()) -> Path:
    raw = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    raw += b"".join(_text(key) + _value(value) for key, value in keys.items())
    for index, dimensions in enumerate(tensors):
        raw += _text(f"t{index}") + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, 0, 0)
    path.write_bytes(raw + b"\0" * 32)
    return path


def _keys(family: str, **own: Any) -> dict[str, Any]:
    return {
        "general.architecture": family,
        "tokenizer.ggml.tokens": ["a", "b"],
        **{f"{family}.{key.replace('__', '.')}": value for key, value in own.items()},
    }


def _plain(**more: Any) -> dict[str, Any]:
    return {"block_count": 4, "embedding_length": 512, "context_length": 8192, "attention__head_count": 8, "attention__head_count_kv": 2, **more}


def test_a_plain_file_gives_heads_and_context(tmp_path: Path) -> None:
    path = _gguf(tmp_path / "m.gguf", _keys("llama", **_plain()), tensors=((512, 100), (512,)))
    made = read_architecture(path)
    assert growth(made).growth_bytes_per_token == 4 * 2 * 2 * 64 * 2
    assert (made.context, made.query_heads, read_header(path).elements) == (8192, 8, 51_712)


def test_heads_may_differ_from_layer_to_layer_and_keys_from_values(tmp_path: Path) -> None:
    keys = _keys("openelm", **_plain(attention__head_count_kv=[1, 2, 3, 4], attention__key_length=64, attention__value_length=32))
    assert growth(read_architecture(_gguf(tmp_path / "m.gguf", keys))).growth_bytes_per_token == (1 + 2 + 3 + 4) * (64 + 32) * 2


@pytest.mark.parametrize(
    ("family", "own", "sliding"),
    [
        ("gemma3", {}, [0, 1, 2, 3]),
        ("gemma2", {}, [0, 2]),
        ("gpt-oss", {"attention__sliding_window_pattern": [True, True, False, False]}, [0, 1]),
        ("cohere2", {"attention__sliding_window_pattern": 2}, [0, 2]),
        ("smallthinker", {}, [1, 2, 3]),
        ("llama", {}, []),
    ],
)
def test_window_layers_follow_the_file_then_the_architecture(tmp_path: Path, family: str, own: dict[str, Any], sliding: list[int]) -> None:
    made = read_architecture(_gguf(tmp_path / "m.gguf", _keys(family, **_plain(attention__sliding_window=1024, **own))))
    assert [index for index, layer in enumerate(made.layers) if layer.kind == "sliding"] == sliding
    assert bool(made.notes) == (family == "llama")


def test_a_latent_file_keeps_one_vector_and_an_old_one_keeps_every_head(tmp_path: Path) -> None:
    latent = _plain(
        attention__kv_lora_rank=512, attention__key_length=576, attention__value_length=512, attention__key_length_mla=192, attention__head_count_kv=1
    )
    assert growth(read_architecture(_gguf(tmp_path / "a.gguf", _keys("deepseek2", **latent)))).growth_bytes_per_token == 4 * 576 * 2
    old = _plain(attention__kv_lora_rank=512, attention__key_length=192, attention__value_length=128, attention__head_count_kv=8)
    assert growth(read_architecture(_gguf(tmp_path / "b.gguf", _keys("deepseek2", **old)))).growth_bytes_per_token == 4 * 8 * (192 + 128) * 2


def test_a_hybrid_file_has_attention_where_it_has_kv_heads(tmp_path: Path) -> None:
    own = _plain(attention__head_count_kv=[0, 0, 2, 0], ssm__conv_kernel=4, ssm__inner_size=1024, ssm__state_size=128, ssm__group_count=1)
    made = read_architecture(_gguf(tmp_path / "m.gguf", _keys("granitehybrid", **own)))
    assert [layer.kind for layer in made.layers] == ["state", "state", "full", "state"]
    assert growth(made).fixed_bytes == 3 * ((1024 + 2 * 128) * 3 * 2 + 1024 * 128 * 4)


def test_layers_that_share_a_cache_and_draft_layers_are_not_counted(tmp_path: Path) -> None:
    own = _plain(attention__shared_kv_layers=1, nextn_predict_layers=1)
    made = read_architecture(_gguf(tmp_path / "m.gguf", _keys("llama", **own)))
    assert [layer.kind for layer in made.layers] == ["full", "full", "shared"]


def test_a_missing_key_is_named_and_may_be_assumed(tmp_path: Path) -> None:
    own = _plain()
    del own["attention__head_count"]
    path = _gguf(tmp_path / "m.gguf", _keys("llama", **own))
    with pytest.raises(CannotJudge, match=r"attention\.head_count"):
        read_architecture(path)
    made = read_architecture(path, assume={"attention.head_count": "8"})
    assert any("stated by the user" in sentence for sentence in made.assumptions)


def test_an_architecture_that_keeps_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge, match="rwkv7"):
        read_architecture(_gguf(tmp_path / "m.gguf", _keys("rwkv7", **_plain())))


def _head(tensors: int = 0, keys: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


@pytest.mark.parametrize(
    "raw",
    [
        b"GGUF",
        b"GGJT" + b"\0" * 40,
        _head(version=1) + b"\0" * 40,
        _head(keys=2**40) + b"\0" * 40,
        _head(tensors=2**60) + b"\0" * 40,
        _head() + struct.pack("<Q", 2**62) + b"\0" * 40,
        _head() + _text("k") + struct.pack("<I", 99) + b"\0" * 40,
        _head() + _text("k") + struct.pack("<IIQ", 9, 8, 10**7) + b"\xff" * 64,
        _head() + _text("k") + struct.pack("<IIQ", 9, 10, 10**7) + b"\0" * 64,
        _head() + _text("k") + struct.pack("<IIQ", 9, 9, 2**63) + b"\0" * 64,
        _head(tensors=1, keys=0) + _text("t") + struct.pack("<I", 2**31) + b"\0" * 64,
        _head(tensors=1, keys=0) + _text("t") + struct.pack("<I2QIQ", 2, 2**60, 2**60, 0, 0) + b"\0" * 64,
    ],
    ids=["short", "magic", "version", "keys", "tensors", "name", "type", "texts", "numbers", "nested", "dimensions", "elements"],
)
def test_a_file_that_lies_about_itself_is_refused_at_once(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=r"bad\.gguf"):
        read_header(path)


@given(st.binary(max_size=400))
def test_no_bytes_make_the_reader_fail_otherwise(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(_head(tensors=1, keys=3) + raw)
    try:
        read_architecture(path)
    except KvError:
        return


def test_a_folder_of_a_split_file_is_one_model_and_one_of_several_files_is_none(tmp_path: Path) -> None:
    _gguf(tmp_path / "m-00001-of-00002.gguf", _keys("llama", **_plain()))
    _gguf(tmp_path / "m-00002-of-00002.gguf", {"split.no": 1})
    _gguf(tmp_path / "mmproj-f16.gguf", {"general.architecture": "clip"})
    assert growth(read_architecture(tmp_path)).growth_bytes_per_token == 4 * 2 * 2 * 64 * 2
    _gguf(tmp_path / "q8.gguf", _keys("llama", **_plain()))
    with pytest.raises(UsageError, match="3 GGUF files: name the one that is meant"):
        read_architecture(tmp_path)


def test_a_window_of_an_architecture_that_is_not_known_is_refused_until_it_is_said_which_layers_slide(tmp_path: Path) -> None:
    path = _gguf(tmp_path / "m.gguf", _keys("brandnew", **_plain(attention__sliding_window=1024)))
    with pytest.raises(CannotJudge, match=r"attention\.sliding_window_pattern"):
        read_architecture(path)
    stated = read_architecture(path, assume={"attention.sliding_window_pattern": "2"})
    assert [layer.kind for layer in stated.layers] == ["sliding", "full", "sliding", "full"]
