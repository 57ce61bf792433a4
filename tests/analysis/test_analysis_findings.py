"""Every rule speaks of the Run that shows its cause and is silent of the one that does not; users' rules are read and never run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from finding_cases import CASES, busy, made, on_cards
from made_run import T0, MadeRun, sample, snapshot

from pytest_kvcache.analysis.findings import FILES, MOST_SHOWN, SEVERITIES, Finding, find, find_in, read_rules, rules_with, shipped_rules
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.errors import UsageError

RULE = """
[[rule]]
id = "my-rule"
when = "usage.peak >= 10%"
say = "usage is {usage.peak} of {usable_blocks}"
"""


def baseline_of(rule: str, folder: Path) -> Analysis | None:
    return made(folder / "baseline") if rule == "pool-changed" else None


def ids(found: tuple[Finding, ...]) -> list[str]:
    return [finding.id for finding in found]


def test_every_rule_has_a_run_that_shows_it_and_one_that_does_not() -> None:
    assert set(CASES) == {rule.id for rule in shipped_rules()}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_speaks_where_its_cause_is(rule: str, tmp_path: Path) -> None:
    found = find(CASES[rule][0](tmp_path / "1-normal"), baseline=baseline_of(rule, tmp_path))
    (finding,) = [one for one in found.found if one.id == rule]
    assert "an unknown number" not in finding.text, finding.text
    assert "{" not in finding.text
    assert finding.do
    assert finding.avoid
    assert finding.reason
    assert finding.evidence[0].source


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_is_silent_where_its_cause_is_not(rule: str, tmp_path: Path) -> None:
    found = find(CASES[rule][1](tmp_path / "1-normal"), baseline=baseline_of(rule, tmp_path))
    assert rule not in ids(found.found)
    assert rule not in [one.id for one in found.unseen], "it must have been looked at"


def test_a_sound_server_has_no_findings(tmp_path: Path) -> None:
    assert ids(find(made(tmp_path / "1-normal")).found) == []


@pytest.mark.parametrize("rule", shipped_rules(), ids=lambda rule: rule.id)
def test_a_rule_says_all_that_a_reader_needs(rule: object) -> None:
    texts = [getattr(rule, name) for name in ("title", "symptom", "cause", "avoid", "reason")]
    assert all(texts)
    assert getattr(rule, "do")  # noqa: B009
    assert len(getattr(rule, "measure")) >= 2  # noqa: B009


def test_the_gravest_come_first_and_at_most_five_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        "".join(
            f'[[rule]]\nid = "r{number}"\nwhen = "usage.peak >= 0"\nsay = "x"\nseverity = "{SEVERITIES[number % 3]}"\nweight = {number}\n'
            for number in range(9)
        )
    )
    found = find(made(tmp_path / "1-normal"), read_rules(path))
    assert ids(found.found) == ["r6", "r3", "r0", "r7", "r4", "r1", "r8", "r5", "r2"]
    assert len(found.shown) == MOST_SHOWN


def test_a_rule_whose_quantity_is_missing_is_silent_and_says_why(tmp_path: Path) -> None:
    found = find(made(tmp_path / "1-normal", ()))
    why = {one.id: one.why for one in found.unseen}
    assert why["hollow-usage"].startswith("fill.mean, waste.not_ours, waste.rounding")
    assert "no request log" in why["hollow-usage"]
    assert "baseline" in why["pool-changed"]


def test_what_an_engine_cannot_have_silences_a_rule_and_does_not_make_it_true(tmp_path: Path) -> None:
    # prefix.used cannot happen on llama.cpp, whose slots share nothing: the other two terms hold
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nid = "a"\nwhen = "usage.peak >= 0 and usage.spread >= 0"\nsay = "x"\n')
    one = made(tmp_path / "1-normal")
    assert ids(find(one, read_rules(path)).found) == []
    path.write_text('[[rule]]\nid = "a"\nwhen = "usage.peak >= 0 and usage.spread >= 0"\nsay = "x"\nspare = ["usage.spread"]\n')
    assert ids(find(one, read_rules(path)).found) == ["a"]


def test_users_add_rules_and_replace_ours(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(RULE + '\n[[rule]]\nid = "leak"\nwhen = "usage.peak > 2"\nsay = "never"\n')
    rules = rules_with(path)
    assert len(rules) == len(shipped_rules()) + 1
    (finding,) = [one for one in find(made(tmp_path / "1-normal"), rules).found if one.id == "my-rule"]
    assert finding.text == "usage is 14.2 % of 127 blocks"
    assert "leak" not in ids(find(CASES["leak"][0](tmp_path / "2-normal"), rules).found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RULE.replace("usage.peak >=", "usage.top >="), "unknown quantity 'usage.top'"),
        (RULE.replace("10%", "10 GiB"), "is no unit of usage.peak"),
        (RULE.replace("{usable_blocks}", "{usable_block}"), "unknown quantity 'usable_block'"),
        (RULE.replace("{usable_blocks}", "{__class__}"), "unknown quantity"),
        (RULE + 'severity = "bad"\n', "is no severity"),
        (RULE + "weight = 1e9\n", "weight is a number from 0 to 100"),
        (RULE + 'extra = "x"\n', "no key 'extra'"),
        (RULE + RULE, "two rules are called"),
        (RULE.replace('say = "usage is {usage.peak} of {usable_blocks}"', ""), "needs 'say'"),
        (RULE.replace("my-rule", "../x"), "is no id"),
        ("rule = 3", "[[rule]]"),
        ("[[rule", "no TOML"),
        (RULE + 'do = [["x"]]\n', "do is no list of texts"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_an_error_that_says_where(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_rules(path)
    assert said in str(caught.value)
    assert str(path) in caught.value.where
    if "unknown quantity" in said:
        assert "usage.peak" in caught.value.hint, "the known ones are listed"


def test_of_several_runs_each_rule_speaks_once_and_the_first_is_the_baseline(tmp_path: Path) -> None:
    first, second = made(tmp_path / "runs" / "1-normal"), made(tmp_path / "runs" / "2-normal", usable=100)
    found = find_in([first, second, second])
    (finding,) = [one for one in found.found if one.id == "pool-changed"]
    assert finding.run == "runs/2-normal"
    assert "100 blocks" in finding.text
    assert "127 blocks" in finding.text
    assert "pool-changed" not in [one.id for one in found.unseen], "two of three Runs answered it"


def test_the_articles_case_is_told_by_its_three_causes(tmp_path: Path) -> None:
    """A100-80G, usage steady at 92 %, 22 GB free: a pool squeezed to 18 GB, uneven lengths, and a long system prompt sent again and again."""
    from article_case import article_case

    found = find(article_case(tmp_path / "1-normal"))
    assert {"squeezed-pool", "padding", "long-shared-prompt"} <= set(ids(found.shown))
    by_id = {finding.id: finding for finding in found.found}
    assert "22.00 GiB of the card are free" in by_id["squeezed-pool"].text
    assert "92" in by_id["squeezed-pool"].text
    assert set(ids(found.found)) <= {
        "squeezed-pool",
        "padding",
        "long-shared-prompt",
        "prefix-cache-off",
        "hollow-usage",
        "lonely-percentage",
        "campaign-day",
    }


def test_the_shipped_rules_are_in_the_wheel_and_their_files_are_known() -> None:
    from pytest_kvcache.analysis import findings

    folder = Path(findings.__file__).parent / "rules"
    assert sorted(path.stem for path in folder.glob("*.toml")) == sorted(FILES)


def test_a_finding_can_be_written_as_json(tmp_path: Path) -> None:
    from dataclasses import asdict

    found = find(on_cards(tmp_path / "1-normal", [], []))
    assert json.loads(json.dumps(asdict(found)))["unseen"]


def test_waiting_is_seen_also_where_the_seats_are_not_told(tmp_path: Path) -> None:
    """vLLM tells its seats in the start-up log alone: a server in passing without one must not be called fine, nor seat-bound."""
    waits = busy(0.4, 8.0, 3.0)
    samples = [sample((), T0 - 0.3 + i / 10, **waits) for i in range(48)]
    about = {"load_started_wall_s": T0 - 0.3, "load_ended_wall_s": T0 + 4.5}
    run = MadeRun(rows=[], samples=samples, before=[snapshot(T0 - 0.5, missing=("max_num_seqs",))], record=about).write(tmp_path / "1-x")
    found = find(analyse(run))
    assert "waiting-beside-free" in ids(found.found)
    assert "start-up log" in {one.id: one.why for one in found.unseen}["seat-bound"]
    told = find(made(tmp_path / "2-x", (), waits))
    assert "seat-bound" in ids(told.found)
    assert "waiting-beside-free" not in ids(told.found)


@pytest.mark.parametrize("rule", CASES)
def test_no_finding_shows_a_lonely_percentage(rule: str, tmp_path: Path) -> None:
    for one in find(CASES[rule][0](tmp_path / "1-normal"), baseline=baseline_of(rule, tmp_path)).found:
        spoken = next(other for other in shipped_rules() if other.id == one.id)
        assert ("{usage." in spoken.say) == bool(one.beside)
        assert not one.beside or ("pool" in one.beside and "free at the tightest" in one.beside and "mean length" in one.beside)


def test_a_pool_that_usual_traffic_fills_is_not_told_that_only_its_longest_request_is_missing(tmp_path: Path) -> None:
    """As seen on a real vLLM: a mean of 70 %, requests waiting for blocks in 40 % of the time."""
    wide = {"max_model_len": 2000}
    pressed = find(made(tmp_path / "1-x", None, lambda i: busy(1.0, 8.0, 2.0) if i % 5 < 2 else busy(0.5, 6.0, 0.0), before=wide))
    assert "kv-bound" in ids(pressed.found)
    assert "campaign-day" not in ids(pressed.found)
    resting = find(made(tmp_path / "2-x", None, busy(0.7, 6.0, 0.0), before=wide))
    assert ids(resting.found).count("campaign-day") == 1
