"""``pytest-kvcache waste``: the table and its JSON, of files and of Runs, and numbers that cannot be meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from made_run import MadeRun, quality_run, request

from pytest_kvcache.cli import main


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["waste", *words]) == 0
    return re.sub(r" +", " ", capsys.readouterr().out)


def test_the_articles_batch_is_18_percent_payload_and_two_buckets_mend_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "batch.json").write_text('{"256": 15, "2048": 1}')
    text = said(capsys, str(tmp_path / "batch.json"))
    assert text.startswith("batch.json: 16 requests, 368 tokens on average, the longest 2,048")
    assert "padded to the longest, 2,048 18.0 % 32,768 26,880" in text
    assert "best 2 buckets 256, 2,048 100.0 % 5,888 0" in text
    assert "pages in blocks of 16 100.0 % 5,888 0" in text


def test_json_holds_the_same_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,completion_tokens\n100,28\n10,2\n500,12\n")
    found = json.loads(
        said(capsys, str(path), "--json", "--buckets", "64,128", "--block-size", "16,128", "--reserve", "512", "--best", "0", "--batch", "2")
    )
    assert (found["requests"], found["payload_tokens"], found["longest_tokens"]) == (3, 652, 512)
    ways = {(way["scheme"], way["detail"]): way for way in found["ways"]}
    assert ways["padded", "to the longest, 512"]["payload_share"] == 652 / 1536
    assert ways["padded", "to the longest of each 2 in turn"]["reserved_tokens"] == 128 * 2 + 512
    assert ways["reserved", "512 for each"]["reserved_tokens"] == 1536
    assert "1 request is longer" in ways["buckets", "64, 128"]["missing"]
    assert ways["paged", "in blocks of 128"]["reserved_tokens"] == 128 + 128 + 512


def test_a_run_is_shown_with_the_limit_of_its_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MadeRun(rows=[request(0, 0.0, prompt=100, output=28), request(1, 0.1, prompt=10, output=2)]).write(tmp_path / "runs" / "1-normal")
    text = " ".join(said(capsys, str(tmp_path)).split())
    assert "2 requests, 70 tokens on average, the longest 128" in text
    assert "reserved 1,024 for each 6.8 % 2,048 1,908" in text


def test_a_way_into_which_a_request_does_not_fit_has_no_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("300\n")
    text = said(capsys, str(tmp_path / "one.txt"), "--reserve", "256")
    assert re.search(r"reserved 256 for each: 1 request .* — — —", text)
    assert "is longer and would not fit" in re.sub(r" — — —|\s+", " ", text).replace("  ", " ")


def test_no_line_is_wider_than_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"{'a long name ' * 12}.csv"
    path.write_text("prompt_tokens,completion_tokens\n" + "".join(f"{n * 997},{n}\n" for n in range(1, 60)))
    words = ["--reserve", "1000,2000", "--best", "12", "--buckets", ",".join(str(n * 1000) for n in range(1, 40))]
    assert main(["waste", str(path), *words]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "and 27 more" in re.sub(r"\s+", " ", shown)


@pytest.mark.parametrize(
    "words",
    [
        ["--buckets", "256,x"],
        ["--buckets", "0"],
        ["--block-size", "-16"],
        ["--best", "-1"],
        ["--best", "1000"],
        ["--batch", "-2"],
        ["--batch", "4"],
        ["--reserve", "9" * 12],
    ],
)
def test_numbers_that_cannot_be_meant_are_usage(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "batch.json").write_text('{"256": 15, "2048": 1}')
    assert main(["waste", str(tmp_path / "batch.json"), *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_what_is_not_there_or_holds_no_load_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["waste", "nowhere"]) == 2
    assert "there is no file, Run, session or saved baseline 'nowhere'" in capsys.readouterr().err
    quality_run(300).write(tmp_path / "runs" / "1-quality")
    assert main(["waste", str(tmp_path)]) == 3


def test_a_name_with_escape_sequences_does_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a\x1b[31mred.txt"
    path.write_text("12\n")
    assert "\x1b" not in said(capsys, str(path))
