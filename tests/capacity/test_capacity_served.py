"""What a live server tells of its model, and what is said where it does not tell."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.growth import growth
from pytest_kvcache.errors import CannotJudge, EndpointUnreachable

OLLAMA = {
    "model_info": {
        "general.architecture": "qwen2", "qwen2.block_count": 24, "qwen2.attention.head_count": 14, "qwen2.attention.head_count_kv": 2,
        "qwen2.embedding_length": 896, "qwen2.context_length": 32768, "tokenizer.ggml.tokens": None,
    }
}  # fmt: skip


def _server(**pages: Any) -> ScriptedServer:
    return ScriptedServer(model="m", pages={key.replace("_", "/"): value for key, value in pages.items()})


def test_a_server_that_gives_the_files_own_keys_is_read() -> None:
    with _server(_api_show=OLLAMA) as server:
        made = read_architecture(server.url)
    assert growth(made).growth_bytes_per_token == 24 * 2 * 2 * 64 * 2
    assert made.name == "m"


def test_a_server_that_tells_the_name_alone_is_refused_with_what_it_told() -> None:
    with _server() as server, pytest.raises(CannotJudge, match="the server tells the model's name 'm'") as found:
        read_architecture(server.url)
    assert "config.json" in found.value.hint


@pytest.mark.parametrize("page", [{"model_info": "no"}, {"model_info": {"a": 1}}, [], "text", {"model_info": {"general.architecture": 5}}])
def test_nonsense_of_a_server_is_no_model(page: Any) -> None:
    with _server(_api_show=page) as server, pytest.raises(CannotJudge, match="not its layers"):
        read_architecture(server.url)


def test_a_path_that_a_server_names_is_never_opened(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    row = {"object": "list", "data": [{"id": "m", "object": "model", "root": str(tmp_path), "max_model_len": 4096}]}
    with _server(_v1_models=row) as server, pytest.raises(CannotJudge, match="which is not opened"):
        read_architecture(server.url)


def test_nobody_there_is_said_as_such() -> None:
    with pytest.raises(EndpointUnreachable):
        read_architecture("http://127.0.0.1:9")


def test_a_list_that_the_short_answer_leaves_out_is_asked_for_and_refused_where_it_stays_out() -> None:
    info = {**OLLAMA["model_info"], "qwen2.attention.head_count_kv": None}
    with _server(_api_show={"model_info": info}) as server:
        with pytest.raises(CannotJudge, match=r"leaves out qwen2\.attention\.head_count_kv"):
            read_architecture(server.url)
        assert server.paths().count("POST /api/show") == 2
