"""report.html says the verdict first, leaves nothing out, loads nothing and runs nothing, whatever the records hold."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from html_page import Page, check_harmless
from made_sessions import LOADS, Server, make_run, ratio, single_gates, verdict_of

from pytest_kvcache.analysis.timeline import Analysis, Timeline, analyse
from pytest_kvcache.records import ConfigChange, GateRecord
from pytest_kvcache.report import charts, html
from pytest_kvcache.report.model import SessionView


def test_the_page_runs_nothing_and_loads_nothing(single_page: str, compared_page: str, embedded_page: str) -> None:
    for text in (single_page, compared_page, embedded_page):
        page = Page(text)
        check_harmless(page)
        policy = next(a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
        assert policy is not None
        assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
        css = text[text.index("<style>") : text.index("</style>")]
        assert not re.search(r"url\(|@import|http", css)
        ids = [a["id"] for _, a in page.elements if "id" in a]
        assert len(ids) == len(set(ids))
        anchors = {str(a["href"])[1:] for tag, a in page.elements if tag == "a" and str(a["href"]).startswith("#")}
        assert anchors <= set(ids)


def test_the_verdict_and_its_reason_come_before_everything_else(single_page: str) -> None:
    text = Page(single_page).text
    top = text.index("FAIL")
    assert top < 100
    assert text.index("2 of 8 gates failed: longctx: peak KV usage 99.9 % is above 95 %") < text.index("What was measured")


def test_a_verdict_is_a_word_and_a_sign_and_not_colour_alone(single: SessionView) -> None:
    signs = []
    for word in ("PASS", "FAIL", "INCONCLUSIVE", "INVALID"):
        text = html.report(replace(single, verdict=msgspec.structs.replace(single.verdict, verdict=word), before=(), after=()))
        band = text[text.index('<header class="verdict') : text.index("</header>")]
        assert f"<h1>{word}" in band
        signs.append(band[band.index("<svg") : band.index("</svg>")])
    assert len(set(signs)) == 4


def test_the_embedded_engine_is_named_beside_the_verdict(embedded_page: str, single_page: str) -> None:
    assert Page(embedded_page).text.index("EMBEDDED") < 120
    assert "EMBEDDED" not in single_page


def test_a_changed_configuration_stands_before_the_gates(compared: SessionView, compared_page: str) -> None:
    text = Page(compared_page).text
    assert text.index("What changed in the configuration") < text.index("What was compared") < text.index("drawn")
    assert "bfloat16" in text
    assert "893,200 tokens" in text


def test_a_usage_ratio_is_never_shown_alone(single: SessionView, single_page: str, compared_page: str, embedded_page: str) -> None:
    bare = [msgspec.structs.replace(gate, beside="") for gate in single_gates()]
    for text in (
        single_page,
        compared_page,
        embedded_page,
        html.report(replace(single, verdict=msgspec.structs.replace(single.verdict, gates=bare))),
    ):
        gates = text[text.index('<section id="gates">') : text.index('<section id="numbers">')]
        for row in gates.split('<span class="word ')[1:]:
            if "usage" in row:
                assert re.search(r"pool [\d,]+ (?:tokens|blocks of)", row), row
                assert "running" in row
                assert re.search(r"free|held", row)
        for caption in re.findall(r"<h3>.*?</div>", text[text.index('<section id="time">') :], re.DOTALL)[:1]:
            assert "pool" in caption


def test_gates_that_cannot_apply_and_gates_left_out_are_listed(single_page: str) -> None:
    text = Page(single_page).text
    assert "no swapping: vLLM V1 does not swap" in text
    assert "Deselected or not run, not judged suite/test_capacity.py::test_nothing" in text


def test_before_after_interval_bound_and_method_stand_in_the_row(compared_page: str) -> None:
    text = Page(compared_page).text
    row = text[text.index("ttft not worse") :][:400]
    assert "about 9 windows a side would decide it" in row
    assert re.search(r"81\.0 ms 94\.0 ms -1\.2 to 33\.0 % \d ≤ 25\.0 % higher", row)
    assert "non-inferiority by Welch's t interval over windows, one-sided 95 % of logarithms" in text


def test_the_lengths_that_broke_are_named(compared_page: str) -> None:
    text = Page(compared_page).text
    assert "512 tokens: 7 of 12, was 12 of 12" in text
    assert "2,048 tokens: 3 of 12, was 12 of 12" in text
    assert "before: 72 of 72 right · after: 58 of 72 right" in text


def test_rejections_are_counted_by_class_and_lane_with_their_first_error(tmp_path: Path) -> None:
    server = Server()
    run = make_run(tmp_path, 1, server, replace(LOADS["longctx"], duration_s=6.0, rejected={"queue_full": 0.3}))
    analysis = analyse(run)
    count = analysis.rejections["queue_full"]["longctx"]
    text = Page(html.report(SessionView(tmp_path, verdict_of("FAIL", tmp_path, [], server), (), [analysis]))).text
    assert re.search(rf"queue full rejected longctx \d+ \d+ 0 {count} {count} ", text)
    assert "queue full, the first: the queue is full" in text


def test_a_probe_of_one_request_stands_apart_and_an_idle_one_is_not_drawn(embedded: SessionView) -> None:
    first = embedded.after[0]
    probe = replace(first, run=replace(first.run, record=msgspec.structs.replace(first.run.record, options={"requests": 1})))
    still = [0.0] * len(first.timeline.t_s)
    idle = replace(probe, timeline=replace(first.timeline, usage=still, running=still, waiting=still))
    text = html.report(replace(embedded, after=[first, probe]))
    assert "<h3>normal</h3>" in text
    assert "<h3>normal (probe)</h3>" in text
    text = html.report(replace(embedded, after=[first, idle]))
    assert "<h3>normal (probe)</h3>" not in text
    assert "Not drawn, because nothing ran in it: normal (probe)." in text


def test_what_is_missing_is_a_dash_with_its_reason_and_never_a_zero(embedded_page: str) -> None:
    text = Page(embedded_page).text
    table = text[text.index("Usage, free space and running requests together") :][:900]
    assert "n/a" in table
    assert "preemptions: llama.cpp never preempts" in table


def test_what_spoiled_the_evidence_is_named_with_how_to_mend_it(tmp_path: Path) -> None:
    server = Server()
    run = make_run(
        tmp_path, 1, server, replace(LOADS["nearmax"], duration_s=5.0), change=lambda r: msgspec.structs.replace(r, problems=["the scraper broke"])
    )
    verdict = verdict_of("INVALID", tmp_path, [], server, problems=["the scraper broke"])
    text = Page(html.report(SessionView(tmp_path, verdict, (), [analyse(run)]))).text
    assert "The evidence is unsound: the scraper broke." in text
    assert "mend what is named and measure again" in text


def test_a_chart_that_cannot_be_drawn_costs_nothing_but_itself(single: SessionView, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> str:
        raise RuntimeError("no <fonts> here")

    monkeypatch.setattr(charts, "time_chart", broken)
    text = html.report(single)
    assert "This chart could not be drawn: RuntimeError: no &lt;fonts&gt; here." in text
    assert "2 of 8 gates failed" in text
    assert Page(text).text.count("could not be drawn") == 6


def test_evidence_links_lead_nowhere_but_into_the_session(single: SessionView) -> None:
    paths = [
        "runs/1-normal/telemetry.jsonl",
        "../../etc/passwd",
        "/etc/passwd",
        "javascript:alert(1)",
        "https://evil.example/",
        "runs/../../x",
        'runs/"><b>',
    ]
    gates = [GateRecord("g", "running.peak", "PASS", "", evidence=path) for path in paths]
    page = Page(html.report(replace(single, verdict=msgspec.structs.replace(single.verdict, gates=gates))))
    check_harmless(page)
    links = [a["href"] for tag, a in page.elements if tag == "a" and not str(a["href"]).startswith("#")]
    links = [link for link in links if link not in {"runs/1-normal/", "runs/2-longctx/"}]  # those of the findings
    assert links[:2] == ["runs/1-normal/telemetry.jsonl", "runs/%22%3E%3Cb%3E"]
    assert links[2] == "runs/1-normal/run.json"
    assert all(str(link).startswith("runs/") and ".." not in str(link) for link in links)


def test_the_same_session_gives_the_same_page(compared: SessionView) -> None:
    assert html.report(compared) == html.report(compared)


def test_a_session_without_any_run_still_says_its_verdict(tmp_path: Path) -> None:
    gate = GateRecord("near_max_served", "", "INVALID", "the server did not answer")
    page = Page(html.report(SessionView(tmp_path, verdict_of("INVALID", tmp_path, [gate], Server()))))
    check_harmless(page)
    assert "The evidence is unsound: the server did not answer." in page.text


@pytest.mark.slow
def test_a_large_session_stays_under_three_megabytes(single: SessionView) -> None:
    first = single.after[0]
    count = 5_000
    wave = [0.5 + 0.4 * ((i * 7919) % 101) / 101 for i in range(count)]
    space, tokens = [v * 1e5 for v in wave], [v * 1e6 for v in wave]
    columns = {"used": space, "free": space, "running": wave, "waiting": wave, "payload_tokens": tokens, "payload_upper": tokens}
    long = Timeline(t_s=[i / 10 for i in range(count)], usage=wave, unit="blocks", **columns)  # type: ignore[arg-type]
    many: list[Analysis] = []
    for profile in [f"profile-{i}" for i in range(8)]:
        run = replace(first.run, record=msgspec.structs.replace(first.run.record, profile=profile))
        many += [replace(first, run=run, timeline=replace(long, endpoints=(long, long)))] * 10
    gates = [
        GateRecord(f"gate_{i}", "usage.peak", "PASS", "x" * 400, "ratio", value=ratio(0.5), bound=0.9, bound_text="≤ 90 %", method=f"m{i}" * 40)
        for i in range(2_000)
    ]
    verdict = msgspec.structs.replace(
        single.verdict, gates=gates, deselected=["y" * 200] * 5_000, config_diff=[ConfigChange(f"n{i}", "a" * 500, "b" * 500) for i in range(5_000)]
    )
    text = html.report(SessionView(single.folder, verdict, many, many))
    assert len(text.encode()) < 3_000_000
    assert "1700 further gates that passed are in verdict.json" in text
    assert "could not be drawn" not in text


def test_a_long_name_of_a_lane_breaks_so_that_the_last_column_of_the_gates_is_seen() -> None:
    css = (Path(html.__file__).parent / "templates" / "report.css").read_text()
    rule = css.partition(".gates tbody th {")[2].partition("}")[0]
    assert "overflow-wrap: anywhere" in rule
    assert "white-space: normal" in rule
