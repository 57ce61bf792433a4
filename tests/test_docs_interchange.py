"""docs/search.md and docs/interchange.md: their commands can be meant, and those that need no server of the reader's run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from made_run import MadeRun

from pytest_kvcache.analysis.timeline import analyse
from pytest_kvcache.cli import build_parser, main
from pytest_kvcache.conditions import INCONCLUSIVE, parse
from pytest_kvcache.judge.search import Question
from pytest_kvcache.options import settings_from
from pytest_kvcache.quantities import KNOWN
from pytest_kvcache.records import SCHEMA_VERSION, VerdictRecord
from pytest_kvcache.report.write import write_session
from pytest_kvcache.searching import question_of
from pytest_kvcache.session import Session

ROOT = Path(__file__).parent.parent
SEARCH, INTERCHANGE = ((ROOT / "docs" / name).read_text() for name in ("search.md", "interchange.md"))
DATA = Path(__file__).parent / "data" / "imports"


def _commands(page: str) -> list[list[str]]:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.S))
    return [shlex.split(line)[1:] for line in blocks.splitlines() if line.startswith("pytest-kvcache ")]


def test_the_searches_of_the_page_can_be_meant() -> None:
    commands = _commands(SEARCH)
    assert len(commands) == 3
    axes = []
    for words in commands:
        arguments = build_parser().parse_args(words)
        parse(arguments.until)
        with Session(settings_from(arguments)) as session:
            axes.append(question_of(arguments, session)[1])
    assert axes == ["users", "rate", "users"]


def test_the_page_states_the_defaults_that_there_are() -> None:
    question = Question()
    arguments = build_parser().parse_args(["search", "--until", "preemptions > 0"])
    assert (arguments.probes, arguments.steps, arguments.precision) == (question.repeats, question.steps, question.precision) == (3, 24, 0.1)
    assert "`--probes` times (3)" in SEARCH
    assert f"`--steps` windows ({arguments.steps}) or `--minutes` ({arguments.minutes:g})" in SEARCH


def test_the_commands_on_other_tools_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(DATA / "vllm_bench_detailed.json", "result.json")
    for name in ("before.json", "after.json"):
        shutil.copy(DATA / "vllm_sweep_summary.json", name)
    first, second, export = _commands(INTERCHANGE)
    assert main(first) == 0
    assert main(second) in {0, 3}  # two windows a side of a few milliseconds
    folder = tmp_path / "reports" / "SESSION"
    analysis = analyse(MadeRun().write(folder / "runs" / "1-normal"))
    write_session(folder, VerdictRecord(SCHEMA_VERSION, INCONCLUSIVE, "SESSION"), (), [analysis])
    assert main(export) == 0
    assert (tmp_path / "out.yaml").stat().st_size > 1000
    capsys.readouterr()


def test_every_quantity_of_the_page_exists() -> None:
    named = set(re.findall(r"`((?:requests|prompt_length|gap)\.[a-z]+)`", INTERCHANGE))
    assert len(named) == 4
    assert named <= KNOWN.keys()
