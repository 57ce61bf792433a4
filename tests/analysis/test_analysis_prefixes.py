"""How much our prompts repeat, and what a prefix cache did or would do with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import BLOCK, T0, MadeRun, closed_loop, request, sample, snapshot

from pytest_kvcache.analysis.prefixes import Prefixes, reusable_tokens
from pytest_kvcache.analysis.rows import read_rows
from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import RequestRow


def prefixes_of(analysis: Analysis) -> Prefixes:
    assert isinstance(analysis.prefixes, Prefixes)
    return analysis.prefixes


def number(analysis: Analysis, name: str) -> float:
    value = analysis.values[name]
    assert isinstance(value, Reading), f"{name}: {value}"
    return value.number()


def shared(users: int = 8, prompt: int = 100, common: int = 80) -> list[RequestRow]:
    return [request(i, 0.01 * i, prompt=prompt, length_s=3.0, prefix_id="system", prefix_tokens=common) for i in range(users)]


def made(tmp_path: Path, rows: list[RequestRow], hits: float = 0.0, caching: bool = True, **changes: Any) -> Analysis:
    samples = [sample(rows, T0 - 0.3 + i / 10, prefix_hits=0.0 if i < 5 else hits, prefix_queries=0.0 if i < 5 else 800.0) for i in range(36)]
    before = [snapshot(T0 - 0.5, prefix_caching=caching)]
    after = [snapshot(T0 + 3.5, prefix_caching=caching, prefix_hits=hits)]
    return analyse(MadeRun(rows=rows, samples=samples, before=before, after=after, **changes).write(tmp_path / "1-normal"))


def test_what_caching_would_save_is_known_while_it_is_off(tmp_path: Path) -> None:
    analysis = made(tmp_path, shared(), caching=False)
    assert number(analysis, "prefix.would_save") == 7 * 80
    assert number(analysis, "prefix.shared") == 7 * 80 / 800
    assert number(analysis, "prefix.saved") == 0
    assert prefixes_of(analysis).caching is False
    (text,) = prefixes_of(analysis).texts
    assert (text.requests, text.tokens, text.reusable, text.at_once) == (8, 80, 560, 8)
    assert number(analysis, "level.common") == 0
    assert number(analysis, "level.prompt") >= 790


def test_what_caching_saved_lowers_the_level(tmp_path: Path) -> None:
    analysis = made(tmp_path, shared(), hits=560.0)
    assert number(analysis, "prefix.saved") == 560
    assert number(analysis, "prefix.hit_rate") == 560 / 800
    assert number(analysis, "prefix.unexplained_hits") == 0
    assert number(analysis, "level.common") == 80
    assert number(analysis, "waste.shared") < 0


def test_hits_that_no_prompt_of_ours_explains_are_named(tmp_path: Path) -> None:
    """Field case C17: a random data set with a hit rate of 32 %: preempted requests read their own blocks again."""
    rows = [request(i, 0.01 * i, length_s=3.0, prefix_id=f"own{i}", prefix_tokens=100) for i in range(6)]
    analysis = made(tmp_path, rows, hits=256.0)
    assert number(analysis, "prefix.shared") == 0
    assert number(analysis, "prefix.unexplained_hits") == 256


def test_prompts_that_name_no_text_are_not_called_different(tmp_path: Path) -> None:
    value = made(tmp_path, closed_loop()).values["prefix.would_save"]
    assert isinstance(value, Missing)
    assert "prefix_id" in value.reason


def test_turns_of_a_conversation_take_over_what_came_before() -> None:
    rows = [request(i, float(i), prompt=100 * (i + 1), prefix_id="talk", prefix_tokens=100 * (i + 1), length_s=0.5) for i in range(4)]
    assert reusable_tokens(read_rows(rows)[0], BLOCK) == 96 + 192 + 288, "each turn finds the one before, in whole blocks"


def test_replicas_do_not_share_a_cache() -> None:
    rows = [request(i, 0.1 * i, prompt=100, prefix_id="system", prefix_tokens=80, endpoint=i % 2) for i in range(4)]
    assert reusable_tokens(read_rows(rows)[0], BLOCK) == 2 * 80


def test_the_last_token_of_a_prompt_is_never_found() -> None:
    rows = [request(i, 0.1 * i, prompt=96, prefix_id="same", prefix_tokens=96) for i in range(2)]
    assert reusable_tokens(read_rows(rows)[0], BLOCK) == 80


texts = st.lists(
    st.builds(
        lambda at, prompt, share, text, server: request(0, at, prompt=prompt, prefix_id=text, prefix_tokens=int(prompt * share), endpoint=server),
        st.floats(0, 10),
        st.integers(1, 400),
        st.floats(0, 1),
        st.sampled_from("abc"),
        st.integers(0, 1),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=200)
@given(texts, st.sampled_from([1, 16, 32]))
def test_reuse_is_what_a_cache_that_forgets_nothing_finds(rows: list[RequestRow], block: int) -> None:
    known: dict[tuple[str, int], int] = {}
    found = 0
    for row in sorted(rows, key=lambda row: row.sent_s):
        key = row.prefix_id, row.endpoint
        length = (row.prefix_tokens or 0) // block * block
        own = min(row.prefix_tokens or 0, max((row.prompt_tokens or 0) - 1, 0)) // block * block
        found += min(own, known.get(key, 0))
        known[key] = max(known.get(key, 0), length)
    assert reusable_tokens(read_rows(rows)[0], block) == found
