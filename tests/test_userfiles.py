"""Every text file that a user hands in may begin with a byte-order mark, as editors of Windows write it."""

from __future__ import annotations

import codecs
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loopback_tls import make_tls

from pytest_kvcache.analysis.findings import read_rules
from pytest_kvcache.analysis.length_files import read_lengths
from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.documents import read_checklist, read_traffic
from pytest_kvcache.errors import UsageError
from pytest_kvcache.judge.thresholds import read_thresholds
from pytest_kvcache.load.draws import parse_histogram
from pytest_kvcache.load.files import read_text
from pytest_kvcache.load.traces import read_trace
from pytest_kvcache.observe.inspecting import read_source
from pytest_kvcache.quality.items import read_items
from pytest_kvcache.records import LoadLine
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.address import _tls
from pytest_kvcache.server.startlog import read_log_head
from pytest_kvcache.userfiles import read_user_text

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "torch_dtype": "bfloat16",
}
TRACE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "thresholds.toml": ('fail = ["usage.peak < 0.9"]\n', lambda path: [line.condition for line in read_thresholds(path).lines]),
    "rules.toml": ('[[rule]]\nid = "a"\nwhen = "usage.peak > 0.5"\nsay = "x"\n', lambda path: [rule.id for rule in read_rules(path)]),
    "traffic.toml": ("[[lane]]\nconcurrency = 2\nlength = 100\n", read_traffic),
    "traffic.json": ('{"concurrency": 2, "length": 100}', read_traffic),
    "checklist.json": ('[{"name": "long", "prompt": 10, "output": 2}]', read_checklist),
    "items.jsonl": ('{"prompt": "2 + 2 =", "expect": "4"}\n', read_items),
    "mooncake.jsonl": (TRACE, lambda path: read_trace(path).requests),
    "azure.csv": ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n", lambda path: read_trace(path).requests),
    "sharegpt.json": (
        '[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]',
        lambda path: read_trace(path).requests,
    ),
    "histogram.csv": ("100,3\n200,4\n", lambda path: parse_histogram(read_text(path))),
    "content.txt": ("words to cut prompts from", read_text),
    "lengths.jsonl": ('{"prompt_tokens": 3, "completion_tokens": 4}\n', lambda path: dict(read_lengths(path).counts)),
    "requests.jsonl": ('{"kind":"start","wall_s":1.0,"profile":"normal"}\n', lambda path: list(read_lines(path, LoadLine))),
    "config.json": (json.dumps(CONFIG), lambda path: read_architecture(path).layers),
    "start.log": ("INFO GPU KV cache size: 148,336 tokens\n", read_log_head),
    "scrape.prom": (
        "vllm:num_requests_running 3\n",
        lambda path: read_source(str(path)).exposition,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_mark_at_the_head_changes_nothing(name: str, tmp_path: Path) -> None:
    text, read = FILES[name]
    path = tmp_path / name
    path.write_text(text)
    plain = read(path)
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert read(path) == plain


@pytest.mark.parametrize("name", ["thresholds.toml", "rules.toml", "traffic.toml", "items.jsonl"])
def test_a_file_in_utf_16_with_its_mark_is_read_as_well(name: str, tmp_path: Path) -> None:
    text, read = FILES[name]
    (tmp_path / name).write_text(text)
    plain = read(tmp_path / name)
    (tmp_path / name).write_bytes(codecs.BOM_UTF16_LE + text.encode("utf-16-le"))
    assert read(tmp_path / name) == plain


def test_what_is_no_text_is_said_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(b"abc\xff")
    with pytest.raises(UsageError, match=r"no UTF-8 text \(byte 3\)"):
        read_user_text(path, "the rules", most_bytes=100)
    path.write_bytes(b"x" * 101)
    with pytest.raises(UsageError, match="longer"):
        read_user_text(path, "the rules", most_bytes=100)
    with pytest.raises(UsageError, match="No such file"):
        read_user_text(tmp_path / "none", "the rules", most_bytes=100)
    with pytest.raises(UsageError):
        read_user_text(Path("a\0b"), "the rules", most_bytes=100)


def test_a_ca_bundle_with_a_mark_still_vouches_for_its_first_certificate(tmp_path: Path) -> None:
    plain = make_tls(tmp_path).ca
    marked = tmp_path / "marked.pem"
    marked.write_bytes(codecs.BOM_UTF8 + plain.read_bytes())
    trusted = ssl.create_default_context(cafile=str(plain)).get_ca_certs()
    assert trusted
    assert _tls(str(marked)).get_ca_certs() == trusted
    assert _tls(str(plain)).get_ca_certs() == trusted
    (tmp_path / "none.pem").write_bytes(codecs.BOM_UTF8 + b"no certificate")
    with pytest.raises(UsageError, match="PEM"):
        _tls(str(tmp_path / "none.pem"))
