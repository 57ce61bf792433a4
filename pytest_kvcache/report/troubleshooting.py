"""docs/troubleshooting.md, made of the rules: symptom, what to measure, likely cause, action, what not to do.

``python -m pytest_kvcache.report.troubleshooting docs/troubleshooting.md`` writes it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvcache.analysis.findings import SEVERITIES, Rule, shipped_rules
from pytest_kvcache.analysis.own_words import in_own_words

_HEAD = """# Troubleshooting

Made of the rules that `pytest-kvcache diagnose` looks with; `nox -s docs` writes this page again. A rule speaks where its condition holds (the
grammar of [thresholds](verdicts.md)); what its quantities are stands in [diagnose](diagnose.md), [memory](memory.md) and [accounting](accounting.md).

| symptom | what to measure | likely cause | action | what not to do |
|---|---|---|---|---|
"""


def page(rules: Sequence[Rule] | None = None) -> str:
    """Return the page in Markdown: the table in order of gravity, then each rule with its reason, its condition and why its numbers are these."""
    chosen = sorted(shipped_rules() if rules is None else rules, key=lambda rule: (SEVERITIES.index(rule.severity), -rule.weight))
    lines = [_HEAD.rstrip("\n")]
    for rule in chosen:
        measure = ", ".join(f"`{name}`" for name in rule.measure)
        link = f"[{rule.title}](#{rule.id})"
        lines.append(f"| {_cell(rule.symptom)} | {measure} | {link}: {_cell(rule.cause)} | {_cell(' '.join(rule.do))} | {_cell(rule.avoid)} |")
    lines.append("\n## The rules\n")
    for rule in chosen:
        lines += [f"### {rule.id}\n", f"{rule.title} ({rule.severity}). {rule.reason}\n", f"```\n{rule.condition}\n```\n"]
        if rule.because:
            lines.append(f"{rule.because}\n")
    return "\n".join(lines).rstrip("\n") + "\n"


def _cell(text: str) -> str:
    return in_own_words(text).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    import sys
    from pathlib import Path

    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
