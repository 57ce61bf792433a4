"""lm-evaluation-harness: sample logs of a real run (0.4.13, a local task on the embedded engine) pair, and its tasks are asked without a key in sight."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from pytest_kvcache.cli import main
from pytest_kvcache.errors import CannotJudge, EndpointRefused, UsageError
from pytest_kvcache.quality import harness, likelihood
from pytest_kvcache.records import QualityRow
from pytest_kvcache.runfolder import read_lines
from pytest_kvcache.server.endpoint import Completion, Endpoint, choose_model, parse_endpoint
from pytest_kvcache.session import Session
from pytest_kvcache.settings import Settings

DATA = Path(__file__).parents[1] / "data" / "lm_eval"
# Stands in for the program: says what it was started with, and leaves the log of a real run.
PROGRAM = """#!{python}
import json, os, pathlib, shutil, sys
words = sys.argv[1:]
pathlib.Path({told!r}).write_text(json.dumps({{"words": words, "key": os.environ.get("OPENAI_API_KEY")}}))
print("asking with", os.environ.get("OPENAI_API_KEY"))
if {fails!r}:
    print("ValueError: Tasks not found: nonsense")
    sys.exit(1)
out = pathlib.Path(words[words.index("--output_path") + 1]) / "recall"
out.mkdir(parents=True)
for file in pathlib.Path({data!r}).glob("*.jsonl"):
    shutil.copy(file, out)
"""


def test_sample_logs_of_two_sides_pair() -> None:
    before, after = harness.read_samples(DATA / "f16"), harness.read_samples(DATA / "q4_0")
    assert len(before) == len(after) == 24
    assert all(row.passed and row.part == harness.PART and row.match == "lm-eval:exact_match (strip)" for row in before)
    assert not any(row.passed for row in after)
    assert [(row.item, row.expected_hash) for row in before] == [(row.item, row.expected_hash) for row in after]
    assert len({row.expected_hash for row in before}) == 24


def test_the_command_judges_two_folders_of_logs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", str(DATA / "f16"), str(DATA / "q4_0")]) == 1
    assert "FAIL: 100.0 % of 24 paired items passed before, 0.0 % after: 24 lost" in capsys.readouterr().out
    assert main(["quality", str(DATA / "f16"), str(DATA / "f16"), "--margin", "0.2"]) == 0
    assert main(["quality", str(DATA / "f16"), str(DATA / "f16"), "--margin", "0.01"]) == 3
    assert "about 299 items would decide it" in capsys.readouterr().out
    assert main(["quality", str(DATA / "f16"), str(DATA / "nowhere")]) != 0


def write(folder: Path, *samples: dict[str, Any], name: str = "samples_t_2026-01-01T00-00-00.000001.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def sample(number: int, **more: Any) -> dict[str, Any]:
    return {
        "doc_id": number,
        "filter": "none",
        "metrics": ["acc"],
        "acc": 1.0,
        "resps": [["x"]],
        "prompt_hash": f"p{number}",
        "target_hash": "t",
        **more,
    }


def test_of_several_filters_and_runs_one_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", sample(0), sample(0, filter="flexible", acc=0.0))
    assert [row.passed for row in harness.read_samples(tmp_path / "a")] == [True]
    write(tmp_path / "a", sample(0, acc=0.0), name="samples_t_2026-02-01T00-00-00.000001.jsonl")
    assert [row.passed for row in harness.read_samples(tmp_path / "a")] == [False], "the newest run"


def test_another_prompt_is_another_item(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", sample(0))
    write(tmp_path / "b", sample(0, prompt_hash="five shots more"))
    assert main(["quality", str(tmp_path / "a"), str(tmp_path / "b")]) == 4
    assert "do not pair" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([sample(0, acc=0.4)], "no metric says pass or fail"),
        ([sample(0, metrics=[])], "no metric"),
        ([sample(0), {"doc_id": 1}], "no metric"),
        ([], "empty"),
    ],
)
def test_what_says_no_pass_or_fail_is_not_judged(tmp_path: Path, samples: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(CannotJudge, match=says):
        harness.read_samples(write(tmp_path / "a", *samples))


@pytest.mark.parametrize("text", ["[1, 2]\n", "{\n", "\udcff"])
def test_a_damaged_log_is_named_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "samples_t.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CannotJudge, match="line 1"):
        harness.read_samples(path)
    with pytest.raises(CannotJudge, match="no sample log"):
        harness.read_samples(tmp_path / "nothing")


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> Path:
    """Put a stand-in for lm_eval on the path and return where it says how it was started."""
    told = folder / "told.json"
    (folder / "bin").mkdir()
    program = folder / "bin" / "lm_eval"
    program.write_text(PROGRAM.format(python=sys.executable, told=str(told), data=str(DATA / "f16"), fails=fails))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    return told


def endpoint_of(server: ScriptedServer, settings: Settings) -> Endpoint:
    return choose_model(parse_endpoint(server.url, settings))


def test_tasks_are_asked_through_the_endpoint_and_no_text_or_key_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = installed(tmp_path, monkeypatch)
    monkeypatch.setenv("A_KEY", "sk-very-secret-1234567890")
    settings = Settings(quality_tasks="recall_local, other", quality_tasks_dir=str(tmp_path), quality_tasks_limit=24, api_key_env="A_KEY")
    run = tmp_path / "run"
    run.mkdir()
    with ScriptedServer() as server:
        rows = harness.ask_tasks(endpoint_of(server, settings), settings, run)
        address = server.url
    assert len(rows) == 24
    assert list(read_lines(run / "quality.jsonl", QualityRow)) == rows
    seen = json.loads(told.read_text())
    assert seen["key"] == "sk-very-secret-1234567890"
    words = " ".join(seen["words"])
    assert f"base_url={address}/v1/completions" in words
    assert "model=scripted" in words
    assert "--tasks recall_local,other" in words
    assert "--limit 24" in words
    assert "secret" not in words
    assert "secret" not in (run / "lm-eval.log").read_text()
    assert not (run / "lm-eval").exists(), "its logs hold prompts and answers"


def test_a_harness_that_fails_or_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, fails=True)
    settings = Settings(quality_tasks="nonsense")
    with ScriptedServer() as server:
        endpoint = endpoint_of(server, settings)
        with pytest.raises(EndpointRefused, match="Tasks not found: nonsense"):
            harness.ask_tasks(endpoint, settings, tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        assert shutil.which("lm_eval") is None
        with pytest.raises(UsageError, match="not installed"):
            harness.ask_tasks(endpoint, settings, tmp_path)
        with pytest.raises(UsageError, match="no name of a task"):
            harness.command(endpoint, Settings(quality_tasks="a;b c"), tmp_path)


# Stands in for the package, whose index tells what a task is without its data.
INDEX = """
class Entry:
    def __init__(self, cfg, tags=()):
        self.cfg, self.tags = cfg, set(tags)

class TaskManager:
    def __init__(self, include_path=None):
        self.task_index = {
            "arc": Entry({"output_type": "multiple_choice"}, ["hard"]), "gsm": Entry({}), "odd": Entry({"class": 1}), "ppl": Entry({"output_type": "loglikelihood_rolling"}),
            "both": Entry({"task": ["arc", {"task": "gsm"}]}),
        }
"""


def test_what_a_task_is_comes_from_the_harness_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").write_text("")
    (tmp_path / "lm_eval" / "tasks.py").write_text(INDEX)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    kinds = likelihood.task_kinds((sys.executable, "-m", "lm_eval"), ("both", "hard", "odd", "ppl", "gone"), "")
    assert kinds == {"arc": "multiple_choice", "gsm": "generate_until", "odd": "", "ppl": "loglikelihood_rolling", "gone": ""}
    script = tmp_path / "lm_eval.sh"
    script.write_text(f"#!{sys.executable}\n")
    assert likelihood.task_kinds((str(script),), ("arc",), "") == {"arc": "multiple_choice"}
    for first in ("#!/bin/sh\n", "#!/usr/bin/env python3\n", "", "#!/nowhere/python\n"):
        script.write_text(first)
        assert likelihood.task_kinds((str(script),), (f"arc{len(first)}",), "") == {}, first


VLLM = {"choices": [{"logprobs": {"token_logprobs": [None, -1.0, -2.0, -0.5, -0.1, -3.0], "tokens": list("abcdef")}}]}
LLAMA = {"choices": [{"logprobs": {"content": [{"token": "a", "logprob": -0.1}]}}]}


@pytest.mark.parametrize(
    ("body", "error", "status", "says"),
    [
        (VLLM, "", 200, ""),
        (LLAMA, "", 200, "those of 1 token:"),
        ({"choices": [{"text": "x"}]}, "", 200, "those of 0 tokens"),
        ({}, "Only no echo is supported", 400, "Only no echo is supported"),
    ],
)
def test_a_server_that_tells_nothing_of_a_prompt_is_found_out(
    body: dict[str, Any], error: str, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def answer(endpoint: Endpoint, prompt: str, tokens: int, *, timeout_s: float, **more: Any) -> Completion:
        asked.append(more)
        return Completion(status, "x", 8, 1, "length", error, 0.1, body)

    monkeypatch.setattr(likelihood, "complete", answer)
    lacking = likelihood.prompt_logprobs_lacking(Endpoint("http://127.0.0.1:1", model="m"))
    assert (says in lacking) if says else lacking == ""
    assert asked == [{"echo": True, "logprobs": 1}]
    assert "chat API" in likelihood.prompt_logprobs_lacking(Endpoint("http://127.0.0.1:1", model="m", api="chat"))


def test_tasks_weighed_by_likelihood_are_refused_before_anything_is_measured_where_the_server_cannot_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch)
    monkeypatch.setattr(harness, "task_kinds", lambda *_: {"arc": "multiple_choice", "gsm": "generate_until"})
    settings = Settings(quality_tasks="arc,gsm", quality_tasks_limit=3)
    with ScriptedServer() as server:
        with Session(Settings(endpoint=(server.url,), quality_tasks="arc,gsm", engine="vllm", reports=str(tmp_path / "r"))) as session:
            with pytest.raises(UsageError, match="arc weighs given answers by their likelihood, and this server cannot tell it"):
                session.target  # noqa: B018
            assert not list((tmp_path / "r").rglob("run.json"))
        endpoint = endpoint_of(server, settings)
        monkeypatch.setattr(harness, "prompt_logprobs_lacking", lambda _: "")
        with pytest.raises(UsageError, match="needs the model's tokenizer"):
            harness.ask_tasks(endpoint, settings, tmp_path)
        words = " ".join(harness.command(endpoint, settings.replace(quality_tokenizer=str(tmp_path)), tmp_path, ["arc"]))
        assert f"tokenizer_backend=huggingface,tokenizer={tmp_path},tokenized_requests=True" in words
        server.script.pages["/tokenizer_info"] = {"eos_token": "</s>"}
        assert "tokenizer_backend=remote" in " ".join(harness.command(endpoint, settings, tmp_path, ["arc"]))
        assert "max_length=4096" in words, "or the harness cuts prompts at its own default"
        assert "tokenizer_backend=None" in " ".join(harness.command(endpoint, settings, tmp_path))


def test_the_log_of_a_real_multiple_choice_task_is_read_and_known_as_weighed() -> None:
    # lm-eval 0.4.13, asked of a server that tells the log-probabilities of a prompt
    rows = harness.read_samples(DATA / "choice")
    assert len(rows) == 6
    assert all(row.passed and row.match == "lm-eval:acc" for row in rows)
    (log,) = (DATA / "choice").glob("samples_*.jsonl")
    assert all(likelihood.is_weighed(json.loads(line)) for line in log.read_text().splitlines())
    generated = next((DATA / "f16").glob("samples_*.jsonl")).read_text().splitlines()
    assert not any(likelihood.is_weighed(json.loads(line)) for line in generated)


def test_a_score_by_likelihoods_that_the_server_did_not_tell_is_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "logs"
    write(data, sample(0, resps=[[["0.0", "False"]], [["0.0", "True"]]]))
    installed(tmp_path, monkeypatch)
    program = tmp_path / "bin" / "lm_eval"
    program.write_text(PROGRAM.format(python=sys.executable, told=str(tmp_path / "told"), data=str(data), fails=False))
    settings = Settings(quality_tasks="of_a_class")  # the harness does not tell what it is
    with ScriptedServer() as server:
        endpoint = endpoint_of(server, settings)
        with pytest.raises(CannotJudge, match="weighed by their likelihood, which this server cannot tell"):
            harness.ask_tasks(endpoint, settings, tmp_path)
        monkeypatch.setattr(harness, "prompt_logprobs_lacking", lambda _: "")
        (tmp_path / "again").mkdir()
        assert len(harness.ask_tasks(endpoint, settings, tmp_path / "again")) == 1
