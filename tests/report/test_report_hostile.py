"""Names, errors and notes that a server or a file says cannot run, move, break or flood any output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from html_page import Page, check_harmless
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_sessions import LLAMACPP, Load, make_run, ratio, verdict_of

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.records import ConfigChange, GateRecord, RunRecord, ValueRecord
from pytest_kvcache.report import html, markdown, terminal
from pytest_kvcache.report.model import SessionView
from pytest_kvcache.report.write import build_view, write_session

EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></title><svg onload=alert(1)>",
    r"$\frac{1}{0}$ $x^{$ \usepackage",
    "a|b|c `code` [x](javascript:alert(1)) @all #1",
    "\x1b[2J\x1b]0;title\x07\x9b31m\r\n\x00\u202e",
    "]]> <!-- --> &amp; &lt; {{ 7*7 }} {% raw %}",
    "z" * 200_000,
]


def hostile(folder: Path, evil: str) -> SessionView:
    """Return a session in which everything that a server, a file or a user names is ``evil``."""

    def change(record: RunRecord) -> RunRecord:
        texts: dict[str, Any] = dict.fromkeys(("engine_version", "model", "workload", "cache_state"), evil)
        lists: dict[str, Any] = {key: [evil] for key in ("endpoints", "launch_command", "problems", "notes", "load_argv")}
        maps: dict[str, Any] = {key: {evil: evil} for key in ("versions", "machine", "provenance")}
        config = {
            **record.config,
            evil: ValueRecord(evil, evil, evil),
            "kv_dtype": ValueRecord(evil, "", evil),
            "pool_tokens": ValueRecord(missing=evil),
        }
        after = [msgspec.structs.replace(s, quantities={**s.quantities, "usage": ValueRecord(missing=evil)}) for s in record.after]
        before = [
            msgspec.structs.replace(s, quantities={**s.quantities, "preemptions": ValueRecord(missing=evil, cannot_happen=True)})
            for s in record.before
        ]
        more = {"profile": evil[:200], "settings": {evil: {"value": evil, "source": evil}}, "config": config, "after": after, "before": before}
        return msgspec.structs.replace(record, **texts, **lists, **maps, **more)

    run = make_run(folder, 1, LLAMACPP, Load("normal", 2, (60, 120), (16, 32), 3.5), change=change)
    rows = (run.folder / "requests.jsonl").read_bytes().splitlines(keepends=True)
    request = msgspec.json.decode(rows[1]) | {"outcome": evil[:100], "lane": evil[:100], "error": evil}
    (run.folder / "requests.jsonl").write_bytes(b"".join([rows[0], msgspec.json.encode(request) + b"\n", *rows[2:]]))
    gate = GateRecord(
        evil, "usage.peak", "FAIL", evil, "ratio", evil, evil, evil, value=ratio(0.5), before=ValueRecord(missing=evil), after=ValueRecord(evil), bound=0.4,
        bound_text=evil, low=0.1, high=float("inf"), method=evil, evidence=evil, beside=evil,
    )  # fmt: skip
    gates = [gate, msgspec.structs.replace(gate, applicable=False), msgspec.structs.replace(gate, verdict=evil, value=ratio(float("nan")))]
    verdict = msgspec.structs.replace(
        verdict_of(evil, folder, gates, LLAMACPP, name=evil, comparison=evil, problems=[evil], notes=[evil], deselected=[evil], repeat=[evil, "b\n" + evil]),
        session=evil, engine=evil, engine_version=evil, model=evil, versions={evil: evil}, machine={evil: {evil: [evil]}},
        config_diff=[ConfigChange(evil, evil, evil)],
    )  # fmt: skip
    analyses: list[Analysis] = [analyse(run)]
    return SessionView(folder, verdict, (), analyses, [evil])


@pytest.mark.parametrize("evil", EVIL, ids=range(len(EVIL)))
def test_every_output_of_a_hostile_session_is_harmless(tmp_path: Path, evil: str) -> None:
    view = hostile(tmp_path, evil)
    text = html.report(view)
    page = Page(text)
    check_harmless(page)
    assert "could not be drawn" not in text
    assert not [tag for tag, _ in page.elements if tag not in KNOWN_TAGS]
    assert len(text) < 400_000
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]", text)
    shown = terminal.summary(view, color=False)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)
    assert len(shown) < 20_000
    review = markdown.summary(view)
    assert len(review) < 100_000
    outside_code = re.sub(r"(?<!\\)`[^`\n]*`", "", review)
    assert "<" not in outside_code.replace("<br>", "")
    assert not re.search(r"@\w|#1", outside_code)


@pytest.fixture
def every_verdict_meets_the_published_schema() -> None:
    """Leave that check out here: what is written here is what no build of ours would write."""


def test_a_hostile_session_is_written_and_made_again(tmp_path: Path) -> None:
    view = hostile(tmp_path, "".join(EVIL[:-1]))
    write_session(tmp_path, view.verdict, view.before, view.after)
    again = build_view(tmp_path)
    check_harmless(Page(html.report(again)))
    assert len(again.after) == 1


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(evil=st.text(alphabet=st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=60))
def test_any_text_at_all_gives_a_page_that_holds_together(tmp_path: Path, evil: str) -> None:
    text = html.report(hostile(tmp_path, evil))
    check_harmless(Page(text))
    assert "could not be drawn" not in text


KNOWN_TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "div", "span", "b", "header", "svg", "circle", "path", "h1", "h2", "h3", "p", "dl", "dt", "dd",
    "nav", "a", "section", "table", "thead", "tbody", "tr", "th", "td", "small", "sup", "del", "ins", "ul", "li", "figure", "figcaption", "pre", "code",
    "details", "summary", "footer", "g", "defs", "use", "text", "clippath", "rect", "tspan",
}  # fmt: skip
