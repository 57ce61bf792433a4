"""A plan beside servers that run: llama.cpp's cells and vLLM's blocks are what the plan says, from the model's own files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from pytest_kvcache import cli
from pytest_kvcache.assertions import assert_fits
from pytest_kvcache.errors import GateFailed
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.server.embedded.recall import model_paths
from pytest_kvcache.server.launch import launch
from pytest_kvcache.settings import Settings


@pytest.fixture(scope="module", params=["--kv-type q8_0", "--kv-type f16 --unified"], ids=["split-q8_0", "unified-f16"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Endpoint, bool]]:
    log = tmp_path_factory.mktemp("llamacpp") / "server.log"
    command = f"{sys.executable} -m pytest_kvcache.server.embedded.llamacpp --port {{port}} --ctx 8192 --slots 4 {request.param}"
    with launch(command, Settings(ready_timeout_s=60.0), log) as server:
        yield server.endpoint, "unified" in request.param


def test_a_running_llamacpp_has_the_cells_of_its_plan(llama: tuple[Endpoint, bool], capsys: pytest.CaptureFixture[str]) -> None:
    endpoint, unified = llama
    words = ["plan", str(model_paths().gguf), "--check", endpoint.root, "--check", str(endpoint.log), "--slots", "4", "--json"]
    code = cli.main([*words, *(["--unified"] if unified else [])])
    out = capsys.readouterr()
    assert code == 0, out.out[-1500:] + out.err
    found = json.loads(out.out)
    assert found["engine"] == "llamacpp"
    assert found["agreement"]["verdict"] == "equal", found["agreement"]
    assert {row["name"] for row in found["agreement"]["rows"]} >= {"pool tokens"}
    assert found["pool_tokens"] == 8192


def test_a_running_llamacpp_is_asked_whether_requests_fit(llama: tuple[Endpoint, bool]) -> None:
    endpoint, unified = llama
    for config in (None, model_paths().gguf):
        assert assert_fits(endpoint, concurrency=4, length=2048, config=config).verdict == "PASS"
        with pytest.raises(GateFailed, match="fits FAIL"):
            assert_fits(endpoint, concurrency=2 if unified else 1, length=8000 if unified else 2049, config=config)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_running_vllm_has_the_blocks_of_its_plan(roomy_vllm: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    vllm = roomy_vllm
    code = cli.main(["plan", str(model_paths().hf), "--check", vllm.root, "--check", str(vllm.log), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.out[-1500:] + out.err
    found = json.loads(out.out)
    assert found["agreement"]["verdict"] == "equal", found["agreement"]
    assert {row["name"] for row in found["agreement"]["rows"]} == {"blocks per request", "max concurrency", "pool tokens"}
    assert (found["pool_blocks"], found["blocks_per_request"], found["max_concurrency"]) == (600, 128, 4.6875)
    explained = " ".join(found["agreement"]["explanations"])
    for words in ("num_gpu_blocks_override", "null block", "no multiple of the block of 32"):
        assert words in explained
    for config in (None, model_paths().hf):
        assert assert_fits(vllm, concurrency=4, length=4090, config=config).verdict == "PASS"
        with pytest.raises(GateFailed):
            assert_fits(vllm, concurrency=5, length=4090, config=config)
