"""``pytest-kvcache diagnose``: a stored Run, a server in passing; what cannot be told is said, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from article_case import article_case
from finding_cases import CASES, made, padded, uneven
from made_run import quality_run
from scripted_server import ScriptedServer

from pytest_kvcache.cli import main
from pytest_kvcache.quantities import KNOWN

LABELS = '{engine="0",model_name="m"}'
PAGE = Path(__file__).parents[1] / "docs" / "diagnose.md"


def vllm_text(usage: float, running: int, waiting: int, generated: int = 0) -> str:
    info = 'block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",num_gpu_blocks="1001",num_gpu_blocks_override="None"'
    return (
        f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{info}}} 1.0\n"
        f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{LABELS} {usage}\n"
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{LABELS} {running}\n"
        f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{LABELS} {waiting}\n"
        f"# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{LABELS} 0\n"
        f"# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{LABELS} {generated}\n"
    )


def test_the_articles_case_is_printed_with_its_three_causes_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    article_case(tmp_path / "runs" / "1-normal")
    assert main(["diagnose", str(tmp_path)]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "usage 92.0 % at the peak of pool 2,303 blocks of 16 tokens; 184 blocks free at the tightest; 16 requests running" in text
    assert text.index("1. Pool against card") < text.index("2. Payload against usage") < text.index("3. Peak against pool") < text.index("Findings")
    assert "squeezed by 40.00 GiB because of" in text
    for title in ("The pool is squeezed", "Room is padded", "One long prompt is kept many times"):
        assert title in text
    assert text.count(" do: ") >= 5
    assert text.count(" not: ") == 5


def test_json_holds_every_number_and_why_a_rule_was_not_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "runs" / "1-normal")
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["reconciliations"]] == ["pool against card", "payload against usage", "peak against pool"]
    assert found["findings"] == []
    assert found["values"]["fill.mean"]["unit"] == "ratio"
    unseen = {one["id"]: one["why"] for one in found["could_not_be_looked_at"]}
    assert "no card" in unseen["squeezed-pool"]


def test_a_server_in_passing_is_only_read_and_says_that_it_knows_no_payload(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(model="m", metrics=vllm_text(0.9, 9, 0), owned_by="vllm") as server:
        assert main(["diagnose", f"http://127.0.0.1:{server.port}", "--window", "1s", "--sample-hz", "10"]) == 0
        posted = [path for path in server.paths() if path.startswith("POST")]
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert posted == [], "a guest sends no load"
    assert "usage 90.0 % at the peak of pool 1,000 blocks of 16 tokens; 100 blocks free at the tightest; 9 requests running" in text
    assert "held 1,600 tokens of the pool on average" in text
    assert "there is no request log" in text
    assert "A high percentage, and nobody suffers" in text
    assert "hollow" not in text.split("could not be looked at")[0]


def test_replicas_in_passing_show_who_carries_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        ScriptedServer(model="m", metrics=vllm_text(0.85, 9, 2), owned_by="vllm") as one,
        ScriptedServer(model="m", metrics=vllm_text(0.15, 1, 0), owned_by="vllm") as two,
    ):
        addresses = [f"http://127.0.0.1:{server.port}" for server in (one, two)]
        assert main(["diagnose", *addresses, "--window", "1s", "--sample-hz", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "replica-imbalance" in [finding["id"] for finding in found["findings"]], "a mean of 50 % was 85 and 15 (field case G01)"


def test_an_empty_page_of_metrics_is_no_usage_of_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """Field case C08: 200 with an empty body."""
    with ScriptedServer(model="m", metrics="", owned_by="vllm") as server:
        assert main(["diagnose", f"http://127.0.0.1:{server.port}", "--engine", "vllm", "--window", "0.5s"]) == 3
    assert "neither usage nor running requests are told" in capsys.readouterr().err


def passing(text: str, capsys: pytest.CaptureFixture[str], *words: str, engine: str = "vllm") -> str:
    """Return what is printed of a server with this page of metrics, in one line."""
    with ScriptedServer(model="m", metrics=text, owned_by=engine) as server:
        assert main(["diagnose", f"http://127.0.0.1:{server.port}", "--engine", engine, "--window", "0.5s", "--sample-hz", "10", *words]) == 0
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def test_eight_processes_of_one_engine_are_one_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Field case C01: the mean of the eight would be 8.2 %, and the first is zero."""
    gauge = "".join(f'vllm:kv_cache_usage_perc{{engine="0",model_name="m",pid="{n}"}} {0.6530455880475035 * (n == 273)}\n' for n in range(270, 278))
    page = re.sub(r"^vllm:kv_cache_usage_perc.*\n", gauge, vllm_text(0.0, 4, 0), flags=re.M)
    assert "usage 65.3 % at the peak of pool 1,000 blocks of 16 tokens; 347 blocks free" in passing(page, capsys)


def test_a_pool_of_none_is_unknown_until_the_log_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Field case C02: never zero, and never a free room that rests on it."""
    page = vllm_text(0.5, 4, 0).replace('num_gpu_blocks="1001"', 'num_gpu_blocks="None"')
    said = passing(page, capsys)
    assert 'pool not known (vllm:cache_config_info says num_gpu_blocks="None"; no start-up log is at hand); an unknown number free' in said
    assert "campaign-day" in said.split("could not be looked at")[1]
    (tmp_path / "log").write_text("INFO GPU KV cache size: 148,336 tokens\n")
    assert "pool 9,270 blocks of 16 tokens; 4,635 blocks free" in passing(page, capsys, "--log", str(tmp_path / "log"))


def test_the_block_that_was_aligned_is_the_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Field case C04: the label of a hybrid model is filled before its blocks are aligned."""
    (tmp_path / "log").write_text("INFO Setting attention block size to 544 tokens to ensure that attention page size is >= mamba page size.\n")
    assert "pool 1,000 blocks of 544 tokens" in passing(vllm_text(0.5, 4, 0), capsys, "--log", str(tmp_path / "log"))


@pytest.mark.parametrize(
    ("engine", "page", "words"),
    [
        # field case C07: the gauge was taken away; what else would tell it is named
        (
            "llamacpp",
            "llamacpp:requests_processing 2\nllamacpp:requests_deferred 0\n",
            ["kv_cache_usage_ratio is not in /metrics", "/slots answers HTTP 404"],
        ),
        # field case C13: a percentage under the name of a ratio
        (
            "sglang",
            'sglang:num_running_reqs{model_name="m"} 3\nsglang:token_usage{model_name="m"} 87.5\nsglang:cache_hit_rate{model_name="m"} 87.6\n',
            ["reads 87.5, above a full pool of 1"],
        ),
    ],
)
def test_a_usage_that_cannot_be_told_says_why_and_makes_no_finding(
    engine: str, page: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = passing(page, capsys, engine=engine)
    three = said.split("Three numbers")[1].split("1. Pool against card")[0]
    assert three.strip().startswith("usage not known (")
    for word in words:
        assert word in three, "the reason stands where the figure would"
    assert "none of the rules that could be looked at has anything to say" in said
    assert "lonely-percentage" in said.split("could not be looked at")[1]


def test_birth_times_are_no_counts_and_rejections_need_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Field case C16, on a page of a real vLLM 0.32 with two engines: every counter has a twin of about 1.8e9, and one has no label of an engine."""
    page = (Path(__file__).parent / "data" / "exposition" / "vllm" / "0.32.0-cpu-dp2.prom").read_text(encoding="utf-8")
    assert "vllm:num_preemptions_created" in page
    found = json.loads(passing(page.replace('reason="max_num_queued_reqs"} 0.0', 'reason="max_num_queued_reqs"} 7.0'), capsys, "--json"))
    assert {name: found["values"][name]["value"] for name in ("preemptions", "rejections")} == {"preemptions": 0, "rejections": 0}, (
        "seven before we came"
    )
    assert "preemption-storm" not in [finding["id"] for finding in found["findings"]]


@pytest.mark.slow
def test_a_request_that_hangs_alone_is_named_in_passing(capsys: pytest.CaptureFixture[str]) -> None:
    """Field case D10, on a server that is only looked at: one waits, nothing runs, the pool is empty, and no token comes for ten seconds."""
    with ScriptedServer(model="m", metrics=vllm_text(0.0, 0, 1, generated=9), owned_by="vllm") as server:
        assert main(["diagnose", f"http://127.0.0.1:{server.port}", "--engine", "vllm", "--window", "12s", "--sample-hz", "5"]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "critical: A request waits for ever that the engine can never admit [never-admitted]" in said
    assert "1 request waited while nothing ran" in said
    assert "stuck-queue" not in said


def test_a_name_that_is_nothing_and_a_file_that_is_no_run_are_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "nope"]) == 2
    assert "there is no Run, session or saved baseline 'nope'" in capsys.readouterr().err
    (tmp_path / "requests.jsonl").write_text("12\n")
    assert main(["diagnose", str(tmp_path / "requests.jsonl")]) == 2
    said = capsys.readouterr().err
    assert "is a file and no Run" in said
    assert "waste" in said


def test_what_an_engine_reserves_can_be_said_afterwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Padded batches: the article's batch of sixteen, each holding what the longest holds."""
    made(tmp_path / "runs" / "1-normal", uneven(), padded, usable=4096, seconds=3.0)

    def parts(*words: str) -> dict[str, float]:
        assert main(["diagnose", str(tmp_path), "--json", *words]) == 0
        values = json.loads(capsys.readouterr().out)["values"]
        return {name: values[f"waste.{name}"]["value"] for name in ("reserved", "unexplained")}

    plain, stated = parts(), parts("--reserves", "longest")
    assert plain["reserved"] == 0
    assert plain["unexplained"] > 0.7
    assert stated["reserved"] > 0.7
    assert stated["unexplained"] < 0.2
    assert parts("--reserves", "nothing") == plain


def test_quality_items_alone_cannot_be_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quality_run(300).write(tmp_path / "runs" / "1-quality")
    assert main(["diagnose", str(tmp_path)]) == 3
    assert "no load was measured here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nowhere"],
        ["http://127.0.0.1:1", "nowhere"],
        ["--selector", 'job="x"', "http://127.0.0.1:1"],
        ["--prometheus", "http://127.0.0.1:1", "nowhere"],
        ["http://127.0.0.1:1", "--window", "tomorrow"],
        ["http://127.0.0.1:1", "--window", "9000h"],
        ["nowhere", "--log", "x"],
        ["nowhere", "--rules", "no-such-file.toml"],
    ],
)
def test_what_cannot_be_meant_is_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_nobody_there_is_said_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "http://127.0.0.1:1", "--window", "1s"]) == 5
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_a_baseline_shows_that_the_pool_is_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "a" / "runs" / "1-normal")
    CASES["pool-changed"][0](tmp_path / "b" / "runs" / "1-normal")
    assert main(["diagnose", str(tmp_path / "b"), "--baseline", str(tmp_path / "a"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [finding["id"] for finding in found["findings"]] == ["pool-changed"]


def test_a_session_that_compared_is_told_by_its_side_after_the_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "runs" / "1-normal", side="before")
    made(tmp_path / "runs" / "2-normal", side="after", usable=100)
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["run"]) == (1, "2-normal")
    assert [finding["id"] for finding in found["findings"]] == ["pool-changed"]


def test_the_rule_on_the_page_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (tmp_path / "rules.toml").write_text(text.replace("60%", "1%"))
    made(tmp_path / "runs" / "1-normal")
    assert main(["diagnose", str(tmp_path), "--rules", str(tmp_path / "rules.toml")]) == 0
    assert "Only 109 blocks were free, with 137 tokens a request at the peak" in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_a_rule_cannot_send_escape_sequences_to_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules.toml").write_text('[[rule]]\nid = "a"\nwhen = "usage.peak > 0"\nsay = "x \\u001b[31m red"\n')
    made(tmp_path / "runs" / "1-normal")
    assert main(["diagnose", str(tmp_path), "--rules", str(tmp_path / "rules.toml")]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_the_page_names_every_signal() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = [
        name
        for name in KNOWN
        if name.split(".")[0] in {"bound", "seats", "stuck", "stale", "held", "endpoint", "served", "nearmax", "slots", "climb", "card"}
    ]
    assert len(names) >= 14
    assert [name for name in names if f"`{name}`" not in page] == []
