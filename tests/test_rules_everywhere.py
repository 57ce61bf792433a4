"""A user's own rules in every command and session: their findings in all outputs, kept with the session, and refused before anything is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from finding_cases import made
from made_sessions import LLAMACPP, SMALL_LOADS, make_run, single_gates, verdict_of

from pytest_kvcache.analysis.own_rules import MOST_FILES, keep_rules, kept_rules, readable_rules, rule_set
from pytest_kvcache.cli import main
from pytest_kvcache.report.write import write_session
from pytest_kvcache.settings import Settings

OWN = """
[[rule]]
id = "house-limit"
title = "More runs than the house allows"
when = "running.peak >= 1"
severity = "critical"
weight = 100
say = "{running.peak} ran at once, and the house allows none."
do = ["Ask the house."]
avoid = "Do not tell the cat."
reason = "The cat minds."
"""
BROKEN = OWN.replace("running.peak >= 1", "running.top >= 1")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(OWN)
    Path("broken.toml").write_text(BROKEN)


def _stored(name: str) -> Path:
    folder = Path(name)
    make_run(folder, 1, LLAMACPP, SMALL_LOADS["normal"])
    write_session(folder, verdict_of("PASS", folder, [gate for gate in single_gates() if gate.verdict == "PASS"], LLAMACPP))
    return folder


def _findings(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / "verdict.json").read_text()).get("findings", [])
    return found


def _told(folder: Path) -> dict[str, bool]:
    return {
        "report.html": "the house allows none" in (folder / "report.html").read_text(),
        "summary.md": "the house allows none" in (folder / "summary.md").read_text(),
        "verdict.json": "house-limit" in [finding["id"] for finding in _findings(folder)],
    }


def test_a_report_that_is_made_again_carries_them_and_keeps_them(capsys: pytest.CaptureFixture[str]) -> None:
    folder = _stored("session")
    assert not any(_told(folder).values())
    assert main(["report", str(folder), "--rules", "own.toml"]) == 0
    assert all(_told(folder).values())
    (finding,) = [one for one in _findings(folder) if one["id"] == "house-limit"]
    assert finding["do"] == ["Ask the house."]
    assert finding["avoid"] == "Do not tell the cat."
    assert finding["rules"] == "own.toml"
    assert str(finding["run"]).startswith("runs/1-")
    Path("own.toml").unlink()
    moved = Path("elsewhere")
    shutil.move(folder, moved)
    assert main(["report", str(moved)]) == 0, "on another machine, without the user's file"
    assert all(_told(moved).values())
    capsys.readouterr()
    for place in (moved, next((moved / "runs").iterdir())):
        assert main(["diagnose", str(place)]) == 0
        assert "the house allows none" in capsys.readouterr().out
    assert main(["report", str(moved), "--rules", str(kept_rules(moved)[0])]) == 0
    assert len(kept_rules(moved)) == 1, "the same file is kept once"


def test_two_stored_sessions_are_compared_with_them() -> None:
    folders = [str(_stored(name)) for name in ("one", "two")]
    assert main(["compare", *folders, "--rules", "own.toml"]) in range(5)
    (session,) = Path("reports").iterdir()
    assert all(_told(session).values())


def test_stored_runs_are_gated_with_them() -> None:
    folder = _stored("one")
    assert main(["gate", str(folder), "--require", "usage.peak < 2", "--rules", "own.toml"]) in range(5)
    (session,) = Path("reports").iterdir()
    assert all(_told(session).values())


@pytest.mark.parametrize(
    "words",
    [
        ["load", "normal", "--launch", "touch started --port {port}"],
        ["compare", "--before", "touch started --port {port}", "--after", "touch started --port {port}"],
        ["load", "normal", "--launch", "touch started --port {port}", "--sweep", "x=1,2"],
        ["search", "--launch", "touch started --port {port}", "--until", "usage.peak > 0.9"],
        ["report", "session"],
        ["diagnose", "session"],
    ],
)
def test_a_broken_file_is_refused_before_a_server_is_started(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _stored("session")
    assert main([*words, "--rules", "broken.toml"]) == 2
    said = capsys.readouterr().err
    for part in ("broken.toml", "rule 1", "house-limit", "when", "unknown quantity 'running.top'"):
        assert part in said
    assert not Path("started").exists()
    assert not Path("reports").exists()


def test_pytest_refuses_it_at_collection_also_from_the_ini_file(pytester: pytest.Pytester) -> None:
    pytester.makefile(".toml", broken=BROKEN)
    pytester.makepyfile("import pytest\n\n@pytest.mark.capacity\ndef test_gate(kv_load):\n    kv_load('normal')\n")
    for words, ini in ((["--kv-rules=broken.toml"], ""), ([], "kv_rules = broken.toml\n")):
        pytester.makeini(f"[pytest]\n{ini}")
        result = pytester.runpytest_inprocess("--kv-endpoint=http://127.0.0.1:1", *words)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*unknown quantity 'running.top'*", "*broken.toml, rule 1 (house-limit)*"])
    assert not (pytester.path / "reports").exists()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (OWN.replace("{running.peak}", "{running.top}"), ["say: unknown quantity 'running.top'", "rule 1 (house-limit)"]),
        (OWN.replace('do = ["Ask', 'measure = ["nothing"]\ndo = ["Ask'), ["measure: unknown quantity 'nothing'", "rule 1 (house-limit)"]),
        (OWN.replace('"critical"', '"terrible"'), ["severity: 'terrible'", "rule 1 (house-limit)"]),
        (OWN + "surprise = 1\n", ["no key 'surprise'", "rule 1 (house-limit)"]),
        (
            OWN + OWN.replace("house-limit", "second").replace("running.peak >= 1", "running.peak >= 1 GiB"),
            ["when: ", "is no unit", "rule 2 (second)"],
        ),
    ],
)
def test_an_error_names_file_rule_and_key(text: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _stored("session")
    Path("bad.toml").write_text(text)
    assert main(["diagnose", "session", "--rules", "bad.toml"]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in ["bad.toml", *parts]), said


def test_a_later_file_replaces_a_rule_of_an_earlier_one_and_marks_are_no_part_of_it(tmp_path: Path) -> None:
    Path("more.toml").write_bytes(b"\xef\xbb\xbf" + OWN.replace("allows none", "allows one").encode())
    rules = rule_set(["own.toml", "more.toml"])
    (own,) = [rule for rule in rules.rules if rule.id == "house-limit"]
    assert own.say.endswith("allows one.")
    keep_rules(tmp_path / "kept", rules)
    assert [path.name for path in kept_rules(tmp_path / "kept")] == ["01-own.toml", "02-more.toml"]
    assert rule_set(kept_rules(tmp_path / "kept")).rules[-1].say == own.say


def test_a_kept_file_that_this_build_does_not_read_is_told_and_the_report_stands(capsys: pytest.CaptureFixture[str]) -> None:
    folder = _stored("session")
    (folder / "rules").mkdir()
    (folder / "rules" / "01-new.toml").write_text(BROKEN)
    assert main(["report", str(folder)]) == 0
    assert "unknown quantity" in (folder / "summary.md").read_text()
    capsys.readouterr()
    assert main(["diagnose", str(folder)]) == 0
    assert "left out: rules/01-new.toml: when: condition" in capsys.readouterr().out


def test_more_files_than_are_read_are_not_left_out_in_silence(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    for number in range(MOST_FILES + 1):
        (tmp_path / "rules" / f"{number:02}-own.toml").write_text(OWN)
    found, wrong = readable_rules(tmp_path)
    assert len(found) == MOST_FILES
    assert wrong == [f"rules/: {MOST_FILES + 1} files, of which the first {MOST_FILES} are read"]


def test_a_rule_that_says_it_better_silences_the_other(tmp_path: Path) -> None:
    from pytest_kvcache.analysis.findings import find

    Path("two.toml").write_text(OWN + OWN.replace("house-limit", "exact") + 'instead_of = ["house-limit"]\n')
    found = [one.id for one in find(made(tmp_path / "run"), rule_set(["two.toml"]).rules).found]
    assert "exact" in found
    assert "house-limit" not in found


def test_the_option_is_a_list_of_files_in_all_three_places() -> None:
    from pytest_kvcache.settings import resolve

    assert resolve({"rules": ["a.toml", "b.toml"]}, {}).rules == ("a.toml", "b.toml")
    assert resolve({}, {"rules": ["a.toml"]}).rules == ("a.toml",)
    assert resolve({}, {}, {"PYTEST_KVCACHE_RULES": "a.toml\nb.toml"}).rules == ("a.toml", "b.toml")
    assert Settings().rules == ()
