"""The quick parser against prometheus_client's, and against text that no server should send."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pytest_kvcache.engines import DIALECTS
from pytest_kvcache.observe.exposition import parse_samples

DATA = Path(__file__).parent.parent / "data"
RECORDED = sorted([*DATA.glob("exposition/*/*.prom"), *DATA.glob("llamacpp/metrics-*.txt")])
Flat = list[tuple[str, tuple[tuple[str, str], ...], float]]


def ours(text: str | bytes) -> Flat:
    parsed = parse_samples(text)
    assert not parsed.bad_lines
    return sorted((name, tuple(sorted(row.labels.items())), row.value) for name, rows in parsed.rows.items() for row in rows)


def reference(text: str) -> Flat:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sorted((s.name, tuple(sorted(s.labels.items())), float(s.value)) for s in samples)


def same(left: Flat, right: Flat) -> bool:
    def plain(rows: Flat) -> list[tuple[str, tuple[tuple[str, str], ...], str]]:
        return [(name, labels, "nan" if math.isnan(value) else repr(value)) for name, labels, value in rows]

    return plain(left) == plain(right)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_recorded_text_is_read_as_the_reference_reads_it(path: Path) -> None:
    text = path.read_text()
    # The reference renames what it knows to be a counter; without the TYPE lines it reads names as they stand, as we do.
    bare = "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n"
    assert same(ours(text), reference(bare))
    assert ours(text)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_reading_some_series_only_gives_the_same_rows_and_all_names(path: Path) -> None:
    text = path.read_text()
    everything = parse_samples(text)
    for dialect in DIALECTS.values():
        some = parse_samples(text, dialect.wanted)
        assert some.names == everything.names
        assert some.rows == {name: rows for name, rows in everything.rows.items() if name in dialect.wanted}


NAMES = st.from_regex(r"\A[a-zA-Z_:][a-zA-Z0-9_:]{0,20}\Z")
LABEL_NAMES = st.from_regex(r"\A[a-zA-Z_][a-zA-Z0-9_]{0,10}\Z").filter(lambda name: not name.startswith("__"))
LABEL_VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=30)
NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True).map(repr),
    st.integers(-(10**15), 10**15).map(str),
    st.sampled_from(["NaN", "+Inf", "-Inf", "1e6", "1E+06", "1.23457e+06", "0", ".5", "5.", "+3"]),
)
BLANKS = st.sampled_from(["", " ", "  ", "\t"])


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@st.composite
def lines(draw: st.DrawFn) -> str:
    labels: dict[str, str] = draw(st.dictionaries(LABEL_NAMES, LABEL_VALUES, max_size=4))
    before, inside = draw(BLANKS), draw(BLANKS)
    body = f",{inside}".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    body += draw(st.sampled_from(["", ","])) if labels else ""
    block = f"{{{body}}}" if labels else draw(st.sampled_from(["", "{}"]))
    stamp = draw(st.sampled_from(["", " 1764428917010"]))
    gap = draw(st.sampled_from([" ", "  ", "   "]))
    return f"{before}{draw(NAMES)}{block}{gap}{draw(NUMBERS)}{stamp}"


@given(st.lists(st.one_of(lines(), st.sampled_from(["", "# a comment", "#", "# EOF"])), max_size=8), st.sampled_from(["\n", "\r\n"]), st.booleans())
@example(['a{b="}"} 1'], "\n", True)
@example(['a{b="{",c=","} 1'], "\n", False)
@settings(max_examples=300, deadline=None)
def test_any_exposition_is_read_as_the_reference_reads_it(parts: list[str], ending: str, last: bool) -> None:
    text = ending.join(parts) + (ending if last else "")
    assert same(ours(text), reference(text.replace("\r\n", "\n") + "\n"))


@given(st.one_of(st.text(max_size=300), st.binary(max_size=300)), st.sampled_from([None, frozenset({"a"})]))
@settings(max_examples=300, deadline=None)
def test_no_text_breaks_the_parser(text: str | bytes, wanted: frozenset[str] | None) -> None:
    parsed = parse_samples(text, wanted)
    assert all(line.isprintable() for line in parsed.bad_lines)
    assert wanted is None or set(parsed.rows) <= wanted


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        ('a{b="x"} 1 # {trace_id="y",n="}"} 0.5 1764428917', {"b": "x"}, 1),
        ("a 2 # {trace_id=\"y\"} 0.5", {}, 2),
        ("a\t3", {}, 3),
        ("  a   4  ", {}, 4),
        ('  a{b="x"} 5', {"b": "x"}, 5),
        ('a {b="x"} 6', {"b": "x"}, 6),
        ('a{ b = "x" , c = "y" , } 7', {"b": "x", "c": "y"}, 7),
        ('a{b="line\\nbreak \\"quoted\\" back\\\\slash \\t"} 8', {"b": 'line\nbreak "quoted" back\\slash \\t'}, 8),
        ('a{b="Zeile\u2028zwei\x0b\x1c\x85"} 9', {"b": "Zeile\u2028zwei\x0b\x1c\x85"}, 9),
        ("a 1e6", {}, 1e6),
        ("a{} 10", {}, 10),
        ('a{b="x"}11', {"b": "x"}, 11),
    ],
)  # fmt: skip
def test_the_forms_that_servers_and_proxies_send(line: str, labels: dict[str, str], value: float) -> None:
    for text in (line, line + "\n", line + "\r\n", "# HELP a\n" + line, "\n\n" + line):
        for wanted in (None, frozenset({"a"})):
            parsed = parse_samples(text, wanted)
            assert [(dict(row.labels), row.value) for row in parsed.rows["a"]] == [(labels, value)], (text, wanted)
            assert not parsed.bad_lines


def test_a_quoted_name_is_read_by_the_reference() -> None:
    parsed = parse_samples('{"a",b="x"} 12\n', frozenset({"a"}))
    assert [(dict(row.labels), row.value) for row in parsed.rows["a"]] == [({"b": "x"}, 12)]


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a ",
        'a{b="x"}',
        'a{b="x} 1',
        "a{b=x} 1",
        'a{b="x",,c="y"} 1',
        'a{b="x" c="y"} 1',
        'a{b="1",b="2"} 1',
        "a x",
        "a 1_000",
        "a --1",
        'a{"b"} 1',
    ],
)
def test_a_broken_line_leaves_its_series_out_and_says_so(line: str) -> None:
    parsed = parse_samples(f"{line}\nb 1\n", frozenset({"a", "b"}))
    assert "a" not in parsed.rows
    assert parsed.rows["b"][0].value == 1
    assert len(parsed.bad_lines) == 1


def test_bytes_that_are_no_text_are_replaced() -> None:
    parsed = parse_samples(b'a{b="\xff\xfe"} 1\n')
    assert parsed.rows["a"][0].labels == {"b": "\ufffd\ufffd"}


def test_a_repeated_series_is_kept_twice_for_the_reader_to_judge() -> None:
    assert [row.value for row in parse_samples("a 1\na 2\n").rows["a"]] == [1, 2]


def test_a_flood_of_rows_is_bounded() -> None:
    parsed = parse_samples("a 1\n" * 60_000)
    assert len(parsed.rows["a"]) == 50_000
    assert "the rest was not read" in parsed.bad_lines[-1]


def test_a_hostile_line_costs_no_more_than_its_length() -> None:
    for line in (
        "a{" + 'b="' * 50_000,
        "a{" + "," * 100_000 + "} 1",
        "a{" + 'b="x",' * 20_000 + "} 1",
        'a{b="' + "\\" * 100_000 + '"} 1',
        "a" * 200_000,
    ):
        parse_samples(line, frozenset({"a"}))
