"""``pytest-kvcache plan`` as people type it: options, keys, exit codes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_models import LLAMA_31_8B
from scripted_server import ScriptedServer

from pytest_kvcache import cli

CONFIGS = Path(__file__).parent / "data" / "capacity" / "configs"
KEYS = {
    "growth_bytes_per_token", "fixed_bytes", "sliding_bytes_per_token", "sliding_saturated_bytes", "window", "bytes_per_sequence",
    "blocks_per_sequence", "pool_bytes", "pool_blocks", "pool_tokens", "blocks_per_request", "starts", "max_concurrency", "layers", "assumptions",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_31_8B))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def body(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    _, out, _ = run(capsys, *words, "--json")
    found: dict[str, Any] = json.loads(out)
    return found


def test_every_key_of_the_json_is_there_with_and_without_a_pool(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    bare = body(capsys, config)
    assert bare.keys() >= KEYS
    assert bare["growth_bytes_per_token"] == 131072
    assert bare["pool_blocks"] is None
    full = body(capsys, config, "--kv-memory", "4GiB", "--block-size", "16", "--max-model-len", "8192", "--length", "1000", "--concurrency", "4")
    assert full.keys() >= KEYS
    assert (full["pool_bytes"], full["pool_blocks"], full["pool_tokens"]) == (4 << 30, 2048, 32768)
    assert (full["blocks_per_request"], full["max_concurrency"], full["starts"]) == (512, 4.0, True)
    assert (full["bytes_per_sequence"], full["blocks_per_sequence"]) == (131_072_000, 63)
    assert len(full["layers"]) == 32
    assert full["layers"][0] == {"kind": "full", "kv_heads": 8, "key_size": 128, "value_size": 128}


def test_every_option_of_the_synopsis_is_taken(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(
        "--utilization 0.9 --weights 14GiB --engine vllm --dtype bfloat16 --kv-dtype fp8 --block-size 16 --max-model-len 4096"
        " --max-num-batched-tokens 2048 --tp 2 --pp 1 --dp 1 --no-prefix-caching --no-hybrid --concurrency 32 --length 4096"
    )
    found = body(capsys, config, "--gpu-memory", "80GiB", *words)
    assert found["growth_bytes_per_token"] == 131072 // 2 // 2
    assert found["verdict"] == "PASS"
    override = body(capsys, config, "--num-gpu-blocks-override", "65", "--block-size", "32", "--max-model-len", "2048")
    assert (override["pool_blocks"], override["starts"], override["max_concurrency"]) == (65, True, 65 / 64)


def test_a_latent_cache_is_whole_on_each_gpu_and_the_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Field case G07: a budget multiplied by the number of GPUs over-commits a latent cache 4 to 8 times."""
    words = (str(CONFIGS / "deepseek-v3.json"), "--platform", "gpu", "--kv-memory", "20GiB", "--max-model-len", "32768", "--block-size", "64")
    one, eight, split = (body(capsys, *words, *more) for more in ((), ("--tp", "8"), ("--tp", "8", "--dcp", "8")))
    assert one["growth_bytes_per_token"] == eight["growth_bytes_per_token"] == 70_272
    assert one["max_concurrency"] == eight["max_concurrency"] == pytest.approx(4774 / 512)
    assert split["max_concurrency"] == pytest.approx(4774 / 64), "context parallelism divides the tokens"
    assert "a latent cache is whole on each of 8 GPUs: --tp does not lower its bytes per GPU (--dcp does)" in eight["notes"]
    assert not any("latent cache" in note for note in one["notes"])


def test_a_plan_over_pipeline_stages_is_made_by_stage(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Field case G04: 61 layers on three nodes are not 20.33 each, and the last holds the output head as well."""
    words = (str(CONFIGS / "deepseek-v3.json"), "--platform", "gpu", "--kv-memory", "20GiB", "--max-model-len", "32768", "--tp", "8")
    code, out, _ = run(capsys, *words, "--pp", "3")
    assert code == 0
    assert "21x576x2 = 24192 B/token on one of 24 GPUs" in out
    assert "21 layers a group, on the fullest of 3 pipeline stages" in out
    assert "the 3 pipeline stages have 20, 21, 20 layers; the last also holds the output head" in " ".join(out.split())
    whole = body(capsys, config)
    assert not any("pipeline" in note or "latent" in note for note in whole["notes"])


def test_an_engine_that_would_not_start_is_a_fail_with_its_reason(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num-gpu-blocks-override", "64", "--block-size", "32", "--max-model-len", "2048")
    found = body(capsys, config, *words)
    assert found["starts"] is False
    assert "2016" in found["reason"]
    code, out, _ = run(capsys, config, *words)
    assert code == 1
    assert "FAIL: the engine would refuse to start" in out


def test_the_equation_stands_there_with_its_numbers(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, config, "--gpu-memory", "80GiB", "--utilization", "0.9", "--weights", "16GiB", "--max-model-len", "8192")
    assert code == 0
    for words in (
        "32x8x(128+128)x2 = 131072 B/token",
        "0.9 x 80.00 - weights = 72.00 - 16.00 = 56.00 GiB for the pool",
        "= 28,672 blocks",
        "ceil(8,192/16) = 512 blocks",
        "28,672 / 512 = 56.00 requests of 8,192 tokens",
        "counted as 0: the real pool is smaller",
    ):
        assert words in out


def test_markdown_for_a_change_request_keeps_a_hostile_name_harmless(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checklist = tmp_path / "c.json"
    checklist.write_text(json.dumps([{"name": "a|b <script>`x`\n# h\x1b[31m", "prompt": 10, "output": 1}]))
    code, out, _ = run(capsys, config, "--kv-memory", "4GiB", "--max-model-len", "2048", "--checklist", str(checklist), "--levers", "--markdown")
    assert code == 0
    assert "### KV cache plan" in out
    assert "<script>" not in out
    assert "\x1b" not in out
    assert "a\\|b" in out
    assert out.count("|-") >= 3


def test_traffic_and_risk_decide_the_exit_code(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traffic = tmp_path / "t.toml"
    traffic.write_text('[[lane]]\nname="all"\nconcurrency=40\nlengths={1000=95, 30000=5}\n')
    common = (config, "--max-model-len", "32000", "--block-size", "16", "--traffic", str(traffic))
    assert run(capsys, *common, "--kv-memory", "8GiB")[0] == 1
    assert run(capsys, *common, "--kv-memory", "60GiB")[0] == 0
    assert run(capsys, *common, "--kv-memory", "60GiB", "--risk", "1e-6")[0] == 3
    found = body(capsys, *common, "--kv-memory", "60GiB", "--seed", "4")
    assert found["traffic"]["overflow"]["seed"] == 4
    assert found["traffic"]["overflow"]["error"] > 0
    assert found["traffic"]["safe_concurrency"]["at_risk"] > found["traffic"]["safe_concurrency"]["always"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--gpu-memory", "80XB", "--weights", "1GiB"), 2),
        (("--gpu-memory", "80GiB", "--kv-memory", "1GiB"), 2),
        (("--gpu-memory", "80GiB"), 3),
        (("--assume", "nonsense"), 2),
        (("--set", "nothing=1"), 2),
        (("--concurrency", "5"), 2),
    ],
)
def test_a_mistake_is_told_in_one_sentence_and_never_a_traceback(
    config: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int
) -> None:
    got, out, err = run(capsys, config, *words)
    assert got == code
    assert not out
    assert "Traceback" not in err
    assert "try:" in err


def test_what_the_user_assumes_is_carried_by_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in LLAMA_31_8B.items() if key != "num_hidden_layers"} | {"model_type": "brand_new"}))
    code, _, err = run(capsys, str(path))
    assert code == 3
    assert "num_hidden_layers" in err
    found = body(capsys, str(path), "--assume", "num_hidden_layers=32")
    assert found["growth_bytes_per_token"] == 131072
    assert any("num_hidden_layers" in line for line in found["assumptions"])


PAGE = (Path(__file__).parents[1] / "docs" / "plan.md").read_text()


def test_the_commands_of_the_page_run_and_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    lanes, inputs = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "lanes.toml").write_text(lanes)
    (tmp_path / "release.toml").write_text(inputs)
    log = Path(__file__).parent / "data" / "startup" / "vllm-0.32.0-startup.log"
    (tmp_path / "server.log").write_text(log.read_text())
    block = next(text for text in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) if "pytest-kvcache plan" in text)
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    assert len(commands) == 4
    printed = []
    for words in commands:
        assert words[:2] == ["pytest-kvcache", "plan"]
        code = cli.main(words[1:])
        out = capsys.readouterr()
        assert code in (0, 1), out.err
        printed.append(out.out)
    shown = next(text for text in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) if text.startswith("growth"))
    for line in filter(None, shown.splitlines()):
        assert line in printed[0].replace("\n  ", "\n"), line


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/plan.md", "exec"), {})


def test_a_text_that_looks_like_a_number_stays_the_text_that_the_engine_reads(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, config, "--kv-memory", "20GiB", "--platform", "cpu", "--set", "cpu_space=0.25")
    assert code == 1
    assert "VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB, and is '0.25'" in out
    code, _, err = run(capsys, config, "--set", "state_dtype=5")
    assert code == 2
    assert "state_dtype = 5 is no text" in err


def test_a_server_of_several_models_is_planned_for_the_one_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"general.architecture": "llama", "llama.block_count": 4, "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2,
        "llama.embedding_length": 512, "llama.context_length": 4096}  # fmt: skip
    row = {"object": "list", "data": [{"id": name, "object": "model"} for name in ("a", "b")]}
    with ScriptedServer(model="a", pages={"/v1/models": row, "/api/show": {"model_info": keys}}) as server:
        code, _, err = run(capsys, server.url, "--kv-memory", "1GiB")
        assert code == 3
        assert "--model NAME" in err
        code, out, _ = run(capsys, server.url, "--kv-memory", "1GiB", "--model", "b")
    assert code == 0
    assert "2,048 B/token" in out.replace("2048", "2,048")


def test_a_reader_that_leaves_early_turns_no_verdict_into_a_pass(config: str) -> None:
    words = [sys.executable, "-m", "pytest_kvcache.cli", "plan", config, "--length", "1000000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 141


def test_settings_of_another_engine_are_said_to_decide_nothing(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "slots is a setting of llamacpp and decides nothing for vllm" in run(capsys, config, "--slots", "4")[1]
    assert "decides nothing" not in run(capsys, config, "--slots", "4", "--engine", "llamacpp")[1]


def test_a_card_of_80_bytes_is_asked_for_its_unit(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, config, "--gpu-memory", "80", "--weights", "14GiB")
    assert code == 2
    assert "80GiB" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--engine sglang --block-size 64", "request   max(ceil(131,072/64), ceil(min(131,072, 128+64)/64) / 0.8) = 2,048 blocks at 131,072 tokens"),
        ("--engine llamacpp --max-model-len 8192 --slots 4", "capacity  4 slots of 108,288 cells = 4.00 requests of 8,192 tokens"),
        ("--engine llamacpp --max-model-len 8192 --slots 4", "request   one cell a token: 8,192 = 8,192 cells at 8,192 tokens"),
        ("--engine llamacpp --max-model-len 8192 --unified --slots 4", "435,712 / 8,192 = 53.19, and 4.00 by the slots: requests of 8,192 tokens"),
    ],
)
def test_every_equation_comes_out_as_it_says(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, str(CONFIGS / "gpt-oss-20b.json"), "--kv-memory", "10GiB", *words.split())
    assert line in out, out


def test_a_cache_type_that_an_engine_lacks_is_refused_and_sizes_are_shown_in_gib(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, config, "--engine", "sglang", "--kv-dtype", "q8_0", "--kv-memory", "40GiB")
    assert code == 1
    assert "SGLang has no KV cache type q8_0" in out
    code, out, _ = run(capsys, config, "--engine", "llamacpp", "--max-model-len", "32768", "--slots", "8", "--kv-memory", "9GiB")
    assert code == 1
    assert "8 caches of 32,768 cells need 32.00 GiB and 9.00 GiB are there" in out
    code, out, _ = run(capsys, config, "--engine", "sglang", "--kv-memory", "4GiB")
    assert "SGLang starts and refuses requests beyond 32768 tokens" in out
    assert "such a request fits" not in out


def test_draft_layers_that_are_served_are_part_of_every_figure(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--kv-memory", "10GiB", "--max-model-len", "8192")
    deepseek = str(CONFIGS / "deepseek-v3.json")
    bare, drafted = body(capsys, deepseek, *sizes), body(capsys, deepseek, *sizes, "--mtp")
    assert (bare["growth_bytes_per_token"], drafted["growth_bytes_per_token"]) == (70_272, 71_424)
    assert (bare["bytes_per_block"], drafted["bytes_per_block"]) == (16 * 70_272, 16 * 71_424)
    assert drafted["bytes_per_sequence"] == 8192 * 71_424
    assert "no draft layers are counted" in run(capsys, config, "--mtp")[1]
    staged = body(capsys, deepseek, *sizes, "--mtp", "--pp", "3")
    assert staged["bytes_per_block"] == 16 * 21 * 1152  # 20, 21 and 20 layers, and the draft on the last stage


def test_levers_of_llamacpp_split_its_layers_and_its_cache_is_f16_whatever_the_checkpoint_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = {**LLAMA_31_8B, "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    words = ("--engine", "llamacpp", "--max-model-len", "8192", "--slots", "4", "--levers", "--gpu-memory", "24GiB", "--weights", "9GiB")
    made = body(capsys, str(tmp_path), *words)
    assert (made["kv_dtype"], made["growth_bytes_per_token"], made["bytes_per_block"]) == ("float16", 131072, 131072)
    rows = {(one["name"], one["change"]): one for one in made["levers"]}
    assert rows["another GPU", "1 -> 2 cards"]["pool_blocks"] == pytest.approx(39 / 15 * made["pool_blocks"], rel=0.01)
    assert rows["another GPU", "a second server"]["requests"] == 2 * made["requests"] == 8
    assert rows["KV dtype", "float16 -> q8_0"]["pool_blocks"] > 1.8 * made["pool_blocks"]
    assert not any("tp" in change for _, change in rows)


def test_a_card_for_a_traffic_says_what_it_assumes_and_none_says_why(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    bare = body(capsys, config, "--concurrency", "4", "--length", "2048")
    assert bare["traffic"]["cards"] == []
    assert any("the weights are not known" in line for line in bare["assumptions"])
    told = body(capsys, config, "--concurrency", "4", "--length", "2048", "--parameters", "8B")
    assert told["traffic"]["cards"]
    assert any("told at a utilization of 0.92, with nothing for activations and graphs" in line for line in told["assumptions"])
