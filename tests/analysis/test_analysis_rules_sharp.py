"""Rules are sharp: none speaks of a healthy Run, each speaks from a stated dose of its cause on, and its rivals do not."""

from __future__ import annotations

import re
from pathlib import Path

import oracle_traces
import pytest
from finding_doses import BEGIN, DOSES, END, Dose, said, table
from healthy_runs import KINDS, made

from pytest_kvcache.analysis.findings import find, shipped_rules
from pytest_kvcache.analysis.timeline import analyse

PAGE = Path(__file__).parents[2] / "docs" / "diagnose.md"
OF_EACH = 6
"""How many healthy Runs of each kind a test makes; the page tells what was said of many more."""


def test_every_rule_says_what_its_numbers_rest_on_and_has_a_dose() -> None:
    assert [rule.id for rule in shipped_rules() if len(rule.because) < 60] == []
    assert {dose.rule for dose in DOSES} == {rule.id for rule in shipped_rules()}
    assert len(DOSES) == len(shipped_rules())


NAMED = (
    "squeezed-pool foreign-memory over-utilization hollow-usage padding fragments long-shared-prompt prefix-cache-off prefix-cache-thrashing prefill-peak "
    "seat-bound kv-bound token-budget-bound deferred-waiting preemption-storm leak stale-gauge true-fullness campaign-day gpu-imbalance "
    "replica-imbalance pool-changed wrong-endpoint lonely-percentage"
)
"""What a user was promised to be told of."""
ARTICLE = {
    "squeezed-pool": "20 GB is 12 GB", "padding": "18 % are real", "long-shared-prompt": "5,000-token system prompt for each of 20 users",
    "prefix-cache-off": "remedy for prefill peaks", "prefill-peak": "is not the same as overload", "kv-bound": "not whether to add a card",
    "true-fullness": "quality first, memory second", "campaign-day": "resting at 50 % went to 95 %", "lonely-percentage": "a lonely 90 %",
}  # fmt: skip
"""Rules whose reason is the article's own, and words of it; the others name a public case."""


def test_every_promised_finding_is_a_rule_and_each_names_the_articles_or_a_public_case() -> None:
    rules = {rule.id: rule for rule in shipped_rules()}
    assert set(NAMED.split()) <= set(rules)
    for name, rule in rules.items():
        public = re.search(r"[A-Za-z0-9.-]+/[A-Za-z0-9._-]+#\d+", rule.reason)
        assert ARTICLE[name] in rule.reason if name in ARTICLE else public, name


@pytest.mark.parametrize("kind", KINDS)
def test_no_rule_speaks_of_a_healthy_run(kind: str, tmp_path: Path) -> None:
    for number in range(OF_EACH):
        found = find(made(kind, number, tmp_path)).found
        wrong = {one.id: one.why for one in found if one.id not in KINDS[kind][1]}
        assert not wrong, f"Run {number} of {kind}"


@pytest.mark.parametrize("dose", DOSES, ids=lambda dose: dose.rule)
def test_a_rule_speaks_from_its_dose_on_and_its_rivals_never(dose: Dose, tmp_path: Path) -> None:
    assert min(dose.doses) < dose.speaks <= max(dose.doses)
    for size, ids in said(dose, tmp_path):
        assert (dose.rule in ids) == (size >= dose.speaks), f"at {dose.show(size)}: {sorted(ids)}"
        assert ids - {dose.rule} <= dose.beside, f"at {dose.show(size)}"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        # the longest length is the whole pool in all three, and prompts repeat: with the cache on that is well
        ("prefix_on", {"campaign-day"}),
        ("prefix_off_chunked", {"campaign-day", "prefix-cache-off"}),
        ("overload", {"true-fullness", "kv-bound"}),
    ],
)
def test_of_recorded_runs_of_a_real_vllm_is_said_what_is_so_and_no_more(name: str, told: set[str], tmp_path: Path) -> None:
    assert {one.id for one in find(analyse(oracle_traces.run(name, tmp_path / "1-normal"))).found} == told


def test_the_table_of_the_page_is_that_of_the_rules() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), "python tests/finding_doses.py docs/diagnose.md writes it again"
    assert f"{len(KINDS)} kinds" in text
