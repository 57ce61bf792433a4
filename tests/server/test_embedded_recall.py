"""The recall model on disk: what is built, that it is the same for both engines, and that a cache is never trusted half done."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_kvcache.errors import CannotWrite, UsageError
from pytest_kvcache.server.embedded import recall, recall_tokenizer, recall_weights


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PYTEST_KVCACHE_CACHE_DIR", str(folder))
    return folder


def _hashes(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def _safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_two_builds_have_the_same_bytes(tmp_path: Path) -> None:
    recall.build_recall_model(tmp_path / "one")
    recall.build_recall_model(tmp_path / "two")
    first = _hashes(tmp_path / "one")
    assert first == _hashes(tmp_path / "two")
    assert {"recall.gguf", "hf/config.json", "hf/tokenizer.json", "hf/tokenizer_config.json", "hf/model.safetensors", "hf/words.json"} <= set(first)


def test_any_two_tokens_can_be_told_apart() -> None:
    codes = recall_weights.token_codes(len(recall_tokenizer.vocabulary()))
    cosines = codes @ codes.T
    assert np.allclose(np.diag(cosines), 1.0)
    np.fill_diagonal(cosines, 0.0)
    assert np.abs(cosines).max() <= 0.125
    with pytest.raises(ValueError, match="2048"):
        recall_weights.token_codes(2049)


def test_words_are_distinct_and_last_in_the_vocabulary() -> None:
    names = recall_tokenizer.vocabulary()
    assert len(set(names)) == len(names)
    assert len(set(recall.WORDS)) == 256
    assert [names[i] for i in recall_tokenizer.word_ids()] == [recall_tokenizer.BLANK + word for word in recall.WORDS]


def test_both_engines_get_the_same_vocabulary_and_template(tmp_path: Path) -> None:
    import gguf

    paths = recall.build_recall_model(tmp_path)
    fields = gguf.GGUFReader(str(paths.gguf)).fields
    tokenizer = json.loads((paths.hf / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((paths.hf / "tokenizer_config.json").read_text(encoding="utf-8"))
    config = json.loads((paths.hf / "config.json").read_text(encoding="utf-8"))
    tokens = fields["tokenizer.ggml.tokens"].contents()
    by_id = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    assert tokens == [by_id[i] for i in range(len(by_id))]
    assert config["vocab_size"] == len(tokens)
    assert fields["tokenizer.ggml.merges"].contents() == [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    assert fields["tokenizer.chat_template"].contents() == settings["chat_template"]
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert tokenizer["post_processor"]["single"][0] == {"SpecialToken": {"id": "<s>", "type_id": 0}}
    assert fields["llama.context_length"].contents() == config["max_position_embeddings"] == 32768
    assert json.loads((paths.hf / "words.json").read_text(encoding="utf-8")) == list(recall.WORDS)


def test_weights_for_vllm_are_those_that_were_constructed(tmp_path: Path) -> None:
    header, data = _safetensors(recall.build_recall_model(tmp_path).hf / "model.safetensors")
    assert header.pop("__metadata__") == {"format": "pt"}
    wanted = recall_weights.weights()
    assert set(header) == set(wanted)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        assert start == end
        end = stop
        bits = np.frombuffer(data[start:stop], dtype="<u2").astype("<u4") << 16
        found = bits.view("<f4").reshape(entry["shape"])
        assert entry["dtype"] == "BF16"
        assert np.all(np.abs(found - wanted[name]) <= np.abs(wanted[name]) * 2.0**-8), name  # to nearest: half a unit of 8 significant bits
    assert end == len(data)


def test_a_built_model_is_reused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = recall.model_paths()
    assert paths.folder.parent == cache
    assert paths.gguf.is_file()
    monkeypatch.setattr(recall, "build_recall_model", lambda folder: pytest.fail("built again"))
    assert recall.model_paths() == paths


@pytest.mark.parametrize("damage", ["stamp", "short", "missing", "garbage"])
def test_a_half_build_is_never_used(cache: Path, damage: str) -> None:
    paths = recall.model_paths()
    whole = _hashes(paths.folder)
    if damage == "stamp":
        (paths.folder / recall.STAMP).unlink()
    elif damage == "short":
        paths.gguf.write_bytes(paths.gguf.read_bytes()[:1000])
    elif damage == "missing":
        (paths.hf / "tokenizer.json").unlink()
    else:
        (paths.folder / recall.STAMP).write_text("[1, 2")
    assert _hashes(recall.model_paths().folder) == whole
    assert [path.name for path in cache.iterdir()] == [paths.folder.name]


def test_two_processes_may_build_at_once(cache: Path) -> None:
    code = "from pytest_kvcache.server.embedded.recall import model_paths; print(model_paths().gguf.stat().st_size)"
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) for _ in range(3)]
    answers = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], answers
    assert len({out for out, _ in answers}) == 1
    assert [path.name for path in cache.iterdir()] == [recall.model_folder().name]


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYTEST_KVCACHE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CannotWrite) as caught:
        recall.model_paths()
    assert "PYTEST_KVCACHE_CACHE_DIR" in caught.value.hint
    assert str(tmp_path / "file" / "cache") in caught.value.where


def test_a_full_disk_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, tensors: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recall, "_write_gguf", full)
    with pytest.raises(CannotWrite, match="No space left"):
        recall.model_paths()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("library", ["numpy", "gguf"])
def test_a_missing_library_names_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError) as caught:
        recall.model_paths()
    assert library in caught.value.what
    assert caught.value.hint == 'pip install "pytest-kvcache[demo]"'


def test_the_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    assert recall.cache_folder({"PYTEST_KVCACHE_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": "/x"}) == tmp_path
    assert recall.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "pytest-kvcache"
    assert recall.cache_folder({}).parts[-2:] == (".cache", "pytest-kvcache")


def test_importing_costs_no_numpy() -> None:
    names = ["", ".recall", ".recall_tokenizer", ".recall_weights", ".llamacpp", ".vllm_cpu"]
    code = "; ".join(f"import pytest_kvcache.server.embedded{name}" for name in names)
    code += "; import sys; print([n for n in ('numpy', 'gguf', 'xllamacpp', 'httpx', 'msgspec') if n in sys.modules])"
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root, check=True)
    assert done.stdout.strip() == "[]"
