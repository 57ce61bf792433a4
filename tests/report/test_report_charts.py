"""The charts keep peaks and gaps, load nothing, and are the same for the same input."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.report import charts
from pytest_kvcache.report.charts import Rates, Trace, quality_chart, scale_of, thin, time_chart

NAN = math.nan


def trace(count: int = 200, seed: int = 1, **columns: list[float]) -> Trace:
    dice = random.Random(seed)
    t = [i / 10 for i in range(count)]
    names = ("usage", "used_tokens", "payload_tokens", "payload_upper", "free", "running", "waiting")
    return Trace(t, **{name: columns.get(name, [dice.random() for _ in t]) for name in names})


@given(st.lists(st.floats(0, 1) | st.just(NAN), max_size=3_000), st.integers(30, 600))
def test_thinning_keeps_the_highest_the_lowest_and_the_gaps(values: list[float], points: int) -> None:
    t, kept = thin([float(i) for i in range(len(values))], values, points)
    assert len(t) == len(kept) <= max(points, 3)
    assert t == sorted(t)
    real = [v for v in values if math.isfinite(v)]
    assert [v for v in kept if math.isfinite(v)] or not real
    if real:
        assert max(real) == max(v for v in kept if math.isfinite(v))
        assert min(real) == min(v for v in kept if math.isfinite(v))
    assert any(map(math.isnan, kept)) == any(map(math.isnan, values))


def test_one_sample_at_full_usage_among_a_million_is_drawn() -> None:
    usage = [0.3] * 1_000_000
    usage[777_777] = 0.999
    t, kept = thin([float(i) for i in range(len(usage))], usage, 600)
    assert len(kept) <= 600
    assert max(kept) == 0.999
    assert t[kept.index(0.999)] == 777_777


def test_a_gap_is_a_gap_and_not_a_line_across() -> None:
    usage = [0.5] * 200
    usage[80:120] = [NAN] * 40
    text = time_chart([trace(usage=usage)], scale_of([trace()], "blocks", "1,000 tokens"), key="a", label="x", panels=("usage",))
    lines = [d for d in re.findall(r'<path d="([^"]+)"[^>]*var\(--after\)', text) if "L" in d]
    assert any(d.count("M") == 2 for d in lines)


def test_a_sample_between_two_gaps_is_still_seen() -> None:
    lonely = [NAN] * 200
    lonely[100] = 0.9
    many = time_chart([trace(usage=lonely)], scale_of([trace()], "blocks", ""), key="a", label="x", panels=("usage",))
    none = time_chart([trace(usage=[NAN] * 200)], scale_of([trace()], "blocks", ""), key="a", label="x", panels=("usage",))
    assert many.count("<use") > none.count("<use")


def test_the_chart_is_one_svg_that_loads_nothing() -> None:
    text = time_chart([trace(), trace(seed=2)], scale_of([trace()], "blocks", "1,000 tokens", 0.95), key="k1", label='<b> & "quoted" $x^2$')
    root = ElementTree.fromstring(text)
    assert root.tag == "svg"
    assert root.get("role") == "img"
    assert root.get("aria-label") == '<b> & "quoted" $x^2$'
    assert not re.search(r"http|<style|<script|<!DOCTYPE|<\?xml|font-family|@import|data:|metadata", text)
    assert "#0101" not in text
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    assert all(str(i).startswith("k1-") for i in ids)
    links = [e.get("href") for e in root.iter() if e.get("href")]
    assert {str(link)[1:] for link in links} <= set(map(str, ids))


def test_the_same_run_gives_the_same_chart() -> None:
    texts = {time_chart([trace()], scale_of([trace()], "blocks", "x"), key="a", label="x") for _ in range(2)}
    assert len(texts) == 1


def test_a_pool_name_with_mathematics_in_it_is_drawn_as_it_is() -> None:
    text = time_chart([trace()], scale_of([trace()], "$b$", r"$\frac{1}{0}$"), key="a", label="x")
    assert r"$\frac{1}{0}$" in text


def test_no_sample_is_an_error_and_not_an_empty_chart() -> None:
    with pytest.raises(ValueError, match="no sample"):
        time_chart([Trace([], [], [], [], [], [], [], [])], scale_of([], "blocks", ""), key="a", label="x")


def test_a_run_of_one_sample_or_of_nothing_but_gaps_is_drawn() -> None:
    one = trace(1)
    assert "<svg" in time_chart([one], scale_of([one], "blocks", ""), key="a", label="x")
    gaps = Trace([0.0, 1.0], *[[NAN, NAN]] * 7)
    assert "<svg" in time_chart([gaps], scale_of([gaps], "blocks", ""), key="a", label="x")


def test_the_users_matplotlibrc_and_pyplot_stay_out(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nsvg.fonttype: path\nbackend: TkAgg\n")
    program = (
        "import sys; from pytest_kvcache.report.charts import *;"
        "q = quality_chart([Rates('', {64: (1, 2, 0.0, 1.0)})], key='q', label='x');"
        "assert '1/2' in q and 'matplotlib.pyplot' not in sys.modules, q[:200]"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=Path(charts.__file__).parents[2],
        env={"MATPLOTLIBRC": str(tmp_path / "matplotlibrc"), "HOME": str(tmp_path), "PYTHONPATH": str(Path(charts.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_quality_says_how_many_of_how_many_and_keeps_the_worst_lengths() -> None:
    many = {length: (12 if length % 7 else 3, 12, 0.1, 1.0) for length in range(1, 200)}
    text = quality_chart([Rates("before", {64: (12, 12, 0.7, 1.0)}), Rates("after", {64: (3, 12, 0.05, 0.6)})], key="q", label="x")
    assert "3/12" in text
    assert "12/12" in text
    crowded = quality_chart([Rates("", many)], key="q", label="x")
    assert ">196<" in crowded
    assert ">199<" not in crowded
    with pytest.raises(ValueError, match="no quality item"):
        quality_chart([], key="q", label="x")
