"""What people paste is known by its content, read together, and told with its source; what cannot be judged says what was seen."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import ScriptedServer

from pytest_kvcache.cli import main
from pytest_kvcache.errors import UsageError
from pytest_kvcache.observe.inspecting import inspect, read_sources
from pytest_kvcache.observe.pasted import sort_text
from pytest_kvcache.observe.showing import as_json, as_text
from pytest_kvcache.quantities import QUANTITIES, Reading

DATA = Path(__file__).parent.parent / "data"
VLLM = DATA / "exposition" / "vllm"
STARTUP = DATA / "startup"


def told(*texts: str, **how: Any) -> dict[str, Any]:
    found = inspect([sort_text(f"text {number}", text.encode()) for number, text in enumerate(texts)], **how)
    as_text(found)
    return as_json(found)


def value(found: dict[str, Any], name: str) -> Any:
    return found["quantities"][name].get("value")


SCRAPE = (VLLM / "0.32.0.prom").read_text()
MODELS = (VLLM / "0.32.0-v1_models.json").read_text()
LOG = (STARTUP / "vllm-0.32.0-startup.log").read_text()


def test_a_scrape_alone() -> None:
    found = told(SCRAPE)
    assert found["engine"] == "vllm"
    assert set(found["quantities"]) == set(QUANTITIES)
    assert value(found, "pool_blocks") == 8193
    assert value(found, "usable_blocks") == 8192
    assert value(found, "usage") == 0.5
    assert value(found, "used_blocks") == 4096
    assert found["quantities"]["usage"] == {"value": 0.5, "unit": "ratio", "source": "vllm:kv_cache_usage_perc"}
    assert "was not read" in found["quantities"]["max_model_len"]["missing"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_texts_together_in_any_order(order: tuple[int, ...]) -> None:
    texts = [SCRAPE, MODELS, LOG]
    found = told(*(texts[number] for number in order))
    assert found["version"] == "0.32.0"
    assert value(found, "max_model_len") == 8192
    assert found["quantities"]["max_model_len"]["source"] == "/v1/models max_model_len"
    assert value(found, "pool_bytes") == 16 << 30
    assert value(found, "usage") == 0.5


def test_one_paste_of_everything_is_the_same_as_three_files() -> None:
    joined = told(LOG + SCRAPE + MODELS)
    assert joined["quantities"] == told(LOG, SCRAPE, MODELS)["quantities"]


@pytest.mark.parametrize(
    ("log", "engine", "pool"),
    [
        ("vllm-0.32.0-startup", "vllm", 131_088),
        ("vllm-0.32.0-cpu-startup", "vllm", 2_097_152),
        ("sglang-0.5.20-startup", "sglang", 262_144),
        ("tgi-3.3.7-startup", "tgi", 133_696),
        ("trtllm-serve-startup", "trtllm_serve", 263_008),
        ("llamacpp-b11434-startup", "llamacpp", 8192),
    ],
)
def test_a_log_alone_tells_its_engine_and_its_pool(log: str, engine: str, pool: int) -> None:
    found = told((STARTUP / f"{log}.log").read_text())
    assert found["engine"] == engine
    assert value(found, "pool_tokens") == pool
    assert found["quantities"]["pool_tokens"]["source"].startswith("start-up log: ")


def test_the_last_periodic_line_of_a_log_counts_where_there_is_no_scrape() -> None:
    alone, both = told(LOG), told(LOG, SCRAPE.replace('vllm:kv_cache_usage_perc{engine="0"', 'vllm:kv_cache_usage_perc{engine="0"'))
    assert (value(alone, "usage"), value(alone, "running"), value(alone, "waiting")) == (0.5, 8, 3)
    assert "periodic line" in alone["quantities"]["usage"]["source"]
    assert both["quantities"]["usage"]["source"] == "vllm:kv_cache_usage_perc"


def test_a_failed_start_is_told_with_what_to_change() -> None:
    notes = " ".join(told((STARTUP / "vllm-0.32.0-fail-kv-too-small.log").read_text())["notes"])
    assert "the start failed: ValueError: To serve at least one request" in notes
    assert "6.03 GiB short" in notes
    assert "--max-model-len to 81664" in notes
    sized = " ".join(told((STARTUP / "vllm-0.32.0-cpu-fail-block-size.log").read_text())["notes"])
    assert "no sign of a running server" in sized


INFO = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="%s",engine="0"} 1.0\nvllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'


def test_a_pool_that_the_scrape_does_not_tell_comes_from_the_log() -> None:
    scrape = INFO % "None"
    assert value(told(scrape), "pool_blocks") is None, "None is not zero"
    assert value(told(scrape, "INFO GPU KV cache size: 148,336 tokens\n"), "pool_blocks") == 9271


def test_the_block_size_that_the_engine_aligned_wins_over_the_label() -> None:
    found = told(INFO % "321", "INFO Setting attention block size to 544 tokens to ensure that attention page size is >= mamba page size.\n")
    assert value(found, "block_size") == 544


def test_one_live_process_of_eight_is_the_usage() -> None:
    rows = "".join(f'vllm:kv_cache_usage_perc{{engine="0",model_name="m",pid="{pid}"}} {0.653 if pid == 3 else 0.0}\n' for pid in range(8))
    assert value(told(INFO.splitlines()[0] % "1001" + "\n" + rows), "usage") == 0.653


def test_a_log_of_v0_keeps_no_null_block() -> None:
    found = told((STARTUP / "vllm-0.6.6-v0-startup.log").read_text())
    assert value(found, "usable_blocks") == value(found, "pool_blocks") == 24188
    assert value(found, "usage") == 0.75


def test_the_forms_of_the_first_account() -> None:
    found = told("GPU KV cache size: 12.00 GB\n# GPU blocks: 800\n")
    assert found["engine"] == "vllm"
    assert value(found, "pool_blocks") == 800
    assert value(found, "pool_bytes") == 12 << 30
    assert any("GiB" in note for note in found["notes"])


EVERY = sorted(path for path in (DATA / "exposition").glob("*/*.*"))


@pytest.mark.parametrize("path", EVERY, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_recorded_sample_is_known_by_its_content(path: Path) -> None:
    found = told(path.read_text())
    if path.name == "1.x-metrics-empty.json":
        assert found["engine"] == "unknown", "[] is what trtllm-serve says before its first request"
        return
    assert found["engine"] == path.parent.name
    assert any("value" in quantity for quantity in found["quantities"].values())
    for quantity in found["quantities"].values():
        assert set(quantity) >= {"value", "unit", "source"} or quantity["missing"]


def test_a_token_figure_below_the_max_length_is_no_failure() -> None:
    found = told("INFO GPU KV cache size: 37,392 tokens\nINFO Maximum concurrency for 262,144 tokens per request: 1.53x\n")
    assert value(found, "max_concurrency") == 1.53
    notes = " ".join(found["notes"])
    assert "0.14" in notes
    assert "failed" not in notes


def test_two_scrapes_are_two_servers_and_the_same_text_twice_is_one() -> None:
    other = SCRAPE.replace('num_gpu_blocks="8193"', 'num_gpu_blocks="4097"').replace("} 0.5\n", "} 0.25\n")
    found = told(SCRAPE, other)
    assert value(found, "usable_blocks") == 8192 + 4096
    assert value(found, "usage") == pytest.approx((4096 + 1024) / 12288)
    assert len(found["per_rank"]) == 2
    assert any("2 scrapes are read as 2 servers" in note for note in found["notes"])
    assert told(SCRAPE, SCRAPE)["quantities"] == told(SCRAPE)["quantities"]


def test_ranks_are_told_one_by_one() -> None:
    found = told((VLLM / "0.32.0-dp2.prom").read_text())
    assert [rank["rank"] for rank in found["per_rank"]] == ["0", "1"]
    assert all(set(rank["quantities"]) == set(QUANTITIES) for rank in found["per_rank"])


def test_llamacpp_from_its_json_bodies() -> None:
    folder = DATA / "llamacpp"
    found = told((folder / "slots-busy-split.json").read_text(), (folder / "props.json").read_text(), (folder / "startup-f16-split.log").read_text())
    assert found["engine"] == "llamacpp"
    assert value(found, "running") > 0
    assert value(found, "pool_tokens") > 0
    assert value(found, "used_tokens") > 0


def test_headers_of_curl_and_a_foreign_line_end_are_passed_over() -> None:
    for text in ("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n" + SCRAPE, SCRAPE.replace("\n", "\r\n"), "\ufeff" + SCRAPE):
        assert told(text)["quantities"] == told(SCRAPE)["quantities"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("   \n\n", "empty"),
        ("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n", "empty: nothing is told, which is not zero"),
        ("HTTP/1.1 503 Service Unavailable\r\n\r\n", "HTTP 503"),
        ("<!DOCTYPE html><html><title>Sign in</title></html>", "web page (Sign in)"),
        ("PNG\x00\x01\x02", "binary"),
        ("jvm_threads 3\njvm_memory_bytes 5\n", "jvm_memory_bytes, jvm_threads"),
        ("dear diary, today nothing happened\n", "dear diary"),
        ('{"hello": 1}', "none of the JSON bodies"),
        ("[]", "none of the JSON bodies"),
    ],
)
def test_what_cannot_be_judged_says_what_was_seen(text: str, words: str) -> None:
    found = inspect([sort_text("x", text.encode())])
    assert not found.judged
    assert words in found.why
    assert as_json(found)["engine"] == "unknown"
    assert not any(isinstance(value, Reading) for value in found.quantities.values())


def test_an_error_body_is_told_and_counts_for_nothing() -> None:
    body = {
        "error": {"code": 501, "message": "This server does not support metrics endpoint. Start it with `--metrics`", "type": "not_supported_error"}
    }
    found = inspect([sort_text("x", json.dumps(body).encode())])
    assert not found.judged
    assert any("Start it with `--metrics`" in note for note in found.notes)


def test_a_log_of_another_engine_does_not_mix_in() -> None:
    found = told(SCRAPE, (STARTUP / "sglang-0.5.20-startup.log").read_text())
    assert found["engine"] == "vllm"
    assert value(found, "pool_tokens") == 131_088
    assert any("left out" in note for note in found["notes"])


def test_the_null_block_is_v1s_also_where_only_the_first_v1_prints_blocks() -> None:
    v1 = "INFO 02-13 15:01:40 kv_cache_utils.py:407] # GPU blocks: 33660\n"
    v0 = "INFO 02-13 15:01:40 executor_base.py:110] # cuda blocks: 33660, # CPU blocks: 2048\n"
    assert [value(told(text), "usable_blocks") for text in (v1, v0, "# GPU blocks: 33660\n")] == [33659, 33660, 33660]


def test_cards_alone_are_shown_and_no_engine_is_made_up() -> None:
    page = 'DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-1",exported_pod="vllm-0",pod="dcgm-x",hostname="a"} 4096\nDCGM_FI_DEV_FB_TOTAL{gpu="1",UUID="GPU-1",exported_pod="vllm-0",pod="dcgm-x",hostname="a"} 81920\n'
    found = inspect([sort_text("cards.prom", page.encode())])
    assert found.judged
    assert as_json(found)["engine"] == "unknown"
    assert all("missing" in value for value in as_json(found)["quantities"].values())
    assert as_text(found).splitlines()[-1].split()[:6] == ["a", "1", "4.00", "GiB", "76.00", "GiB"]


def test_cards_of_a_dcgm_exporter_are_shown_beside() -> None:
    dcgm = "".join(
        f'DCGM_FI_DEV_FB_{field}{{gpu="0",UUID="GPU-1",modelName="H100",Hostname="node-a"}} {n}\n' for field, n in (("USED", 70000), ("FREE", 10000))
    )
    found = told(SCRAPE, dcgm)
    assert found["gpus"][0]["host"] == "node-a"
    assert found["gpus"][0]["used_bytes"] == 70000 << 20
    assert value(found, "usage") == 0.5


def test_a_usage_never_stands_alone_and_no_escape_gets_through() -> None:
    found = inspect([sort_text("bad\x1b[31mname", SCRAPE.encode())])
    shown = as_text(found)
    assert "50.0 % (4,096 of 8,192 blocks free)" in as_text(found, 140)
    assert re.search(r"50\.0 % \(4,096 of .*\n +8,192 blocks free\)", shown), "on a narrow terminal below each other"
    assert max(map(len, shown.splitlines())) <= 100
    assert "usage 50.0 % | 4,096 of 8,192 blocks free | 8 running, 512 blocks each" in shown
    only = as_text(inspect([sort_text("x", b'vllm:kv_cache_usage_perc{engine="0"} 0.9\n')]))
    assert "pool size not told" in only
    hostile = as_text(inspect([sort_text("x", LOG.replace("Worker pid", "W\x1b]0;boo\x07orker pid").encode())]))
    assert "\x1b" not in shown + only + hostile


def test_a_path_inside_a_text_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret.log"
    secret.write_text("GPU KV cache size: 7 tokens\n")
    opened: list[str] = []
    real = Path.open

    def watched(self: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(str(self))
        return real(self, *args, **kwargs)

    (tmp_path / "a.log").write_text(f"vllm see {secret}\n{LOG}")
    monkeypatch.setattr(Path, "open", watched)
    inspect(read_sources([str(tmp_path / "a.log")]))
    assert opened == [str(tmp_path / "a.log")]


def test_a_file_of_any_size_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    with path.open("wb") as file:
        file.write(LOG.encode())
        file.write(b"INFO a request came and went, and nothing else happened in this server\n" * (36 * 15_000))
        file.write(b"\nValueError: No available memory for the cache blocks.\n")
    (pasted,) = read_sources([str(path)])
    assert len(pasted.log) < 40 << 20
    assert "was not" in pasted.problem
    assert "No available memory" in pasted.log


@pytest.mark.parametrize("name", ["/no/such/file", "/", "with\x00zero"])
def test_a_file_that_cannot_be_read_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError):
        read_sources([name])


def test_the_command_reads_files_standard_input_and_servers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(VLLM / "0.32.0.prom"), "--json"]) == 0
    from_file = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(SCRAPE.encode()), isatty=lambda: False))
    assert main(["inspect", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantities"] == from_file["quantities"]
    with ScriptedServer(metrics=SCRAPE, owned_by="vllm", max_model_len=4096, pages={"/version": {"version": "0.32.0"}}) as server:
        for address in (server.url, server.url + "/v1", server.url + "/metrics"):
            assert main(["inspect", address, "--json"]) == 0
            live = json.loads(capsys.readouterr().out)
            assert live["version"] == "0.32.0"
            assert live["quantities"]["used_blocks"] == from_file["quantities"]["used_blocks"]
        assert main(["inspect", server.url, str(STARTUP / "vllm-0.32.0-startup.log"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["quantities"]["pool_bytes"]["value"] == 16 << 30


def test_the_exit_codes_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = tmp_path / "x.txt"
    unknown.write_text("jvm_threads 3\n")
    assert main(["inspect", str(unknown)]) == 3
    error = capsys.readouterr().err
    assert "cannot judge" in error
    assert "jvm_threads" in error
    assert main(["inspect", str(unknown), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["engine"] == "unknown"
    assert main(["inspect", str(tmp_path / "absent")]) == 2
    assert main(["inspect", str(unknown), "--engine", "nonsense"]) == 2
    assert main(["inspect", str(unknown), "--window", "60s"]) == 2
    assert main(["inspect", "http://127.0.0.1:1", "http://127.0.0.1:2"]) == 2
    assert main(["inspect", "http://127.0.0.1:1"]) == 5
    assert main(["inspect", "--prometheus", "http://127.0.0.1:1", "--selector", "not a selector"]) == 2
    assert main(["inspect", "--prometheus", "http://127.0.0.1:1", "--at", "yesterday"]) == 2
    assert "Traceback" not in capsys.readouterr().err


PIECES = [SCRAPE[:400], "{", "}", "[", "]", '"', "vllm:kv_cache_usage_perc ", "0.5", "\n", '{"data":[{"id":"m","max_model_len":', "]}", "GPU KV cache size: ", " tokens", "# TYPE ", "HTTP/1.1 200 OK\r\n\r\n",
          "DCGM_FI_DEV_FB_USED 5", '[{"id":0,"n_ctx":8,"is_processing":', "true", "}]", '{"error":', "\x00", "\x1b[31m", "Running: 1 reqs, Waiting: 1 reqs, GPU KV cache usage: 5%"]  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join).map(str.encode) | st.binary(max_size=300))
def test_any_bytes_are_inspected_without_raising(data: bytes) -> None:
    found = inspect([sort_text("x", data)])
    json.dumps(as_json(found))
    assert "\x1b" not in as_text(found)
    assert found.judged or found.why


def test_an_overridden_pool_of_engine_v0_keeps_no_null_block() -> None:
    text = (
        "INFO 05-13 23:28:53 [llm_engine.py:438] Overriding num_gpu_blocks=600 with num_gpu_blocks_override=512\n"
        "INFO 05-13 23:28:53 [executor_base.py:112] # cuda blocks: 512, # CPU blocks: 0\n"
    )
    found = told(text)
    assert (value(found, "pool_blocks"), value(found, "usable_blocks")) == (512, 512)
    assert value(told(text.partition("\n")[0]), "usable_blocks") == 511


def test_a_known_engine_whose_series_cannot_be_meant_is_told_by_reason() -> None:
    found = inspect([sort_text("x", b'vllm:kv_cache_usage_perc{engine="0"} +Inf\nvllm:num_requests_running{engine="0"} -1\n')])
    assert not found.judged
    assert "this is of vLLM and tells no quantity: vllm:kv_cache_usage_perc reads inf; vllm:num_requests_running reads -1" in found.why
