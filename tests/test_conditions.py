"""The grammar of thresholds: what is written is what is judged, and what cannot be meant is refused with what is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, NOT_APPLICABLE, PASS, Condition, Group, Limit, evaluate, from_limits, parse
from pytest_kvcache.errors import UsageError
from pytest_kvcache.quantities import KNOWN, QUANTITIES, Missing, Reading, Value


def judge(text: str, values: dict[str, float | None], baseline: dict[str, float] | None = None) -> str:
    def lookup(known: dict[str, float | None] | dict[str, float]) -> object:
        def find(limit: Limit) -> Value:
            value = known.get(limit.key)
            return Missing("not measured") if value is None else Reading(value, KNOWN[limit.name].unit, "test")

        return find

    return evaluate(parse(text), lookup(values), lookup(baseline) if baseline is not None else None).verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("usage.peak < 0.9", Limit("usage.peak", "<", 0.9)),
        ("usage.peak<90%", Limit("usage.peak", "<", 0.9)),
        ("free_blocks.min >= 64", Limit("free_blocks.min", ">=", 64)),
        ("free_blocks.min >= 64 blocks", Limit("free_blocks.min", ">=", 64)),
        ("rejections{lane=nearmax} == 0", Limit("rejections", "==", 0, "nearmax")),
        ("rejections{lane=near-max, class=queue_full} != 1", Limit("rejections", "!=", 1, "near-max", "queue_full")),
        ("ttft.p95 <= 1.5s", Limit("ttft.p95", "<=", 1.5)),
        ("ttft.p95 <= 250ms", Limit("ttft.p95", "<=", 0.25)),
        ("pool_bytes >= 10GiB", Limit("pool_bytes", ">=", 10 * 2**30)),
        ("quality.pass_rate >= 0.98", Limit("quality.pass_rate", ">=", 0.98)),
        ("usage.peak <= baseline + 0.02", Limit("usage.peak", "<=", 0.02, relative="+")),
        ("usage.peak <= baseline - 2%", Limit("usage.peak", "<=", -0.02, relative="+")),
        ("usage.peak <= baseline-0.02", Limit("usage.peak", "<=", -0.02, relative="+")),
        ("usage.peak <= baseline", Limit("usage.peak", "<=", 0.0, relative="+")),
        ("throughput >= baseline * 0.97", Limit("throughput", ">=", 0.97, relative="*")),
        ("throughput >= baseline / 2", Limit("throughput", ">=", 0.5, relative="*")),
        ("throughput >= 10 tokens/s", Limit("throughput", ">=", 10)),
        ("idle.running < -1", Limit("idle.running", "<", -1)),
    ],
)
def test_a_condition_means_what_it_says(text: str, limit: Limit) -> None:
    assert parse(text) == limit
    assert parse(limit.text) == limit


def test_and_binds_closer_than_or() -> None:
    a, b, c = (parse(f"{name} > 1") for name in ("preemptions", "rejections", "waiting.peak"))
    assert parse("preemptions > 1 or rejections > 1 and waiting.peak > 1") == Group("or", (a, Group("and", (b, c))))
    assert parse("(preemptions > 1 or rejections > 1) and waiting.peak > 1") == Group("and", (Group("or", (a, b)), c))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("usag.peak < 1", "unknown quantity 'usag.peak'"),
        ("usage < 1", "unknown quantity 'usage'"),
        ("usage.peak < 3GiB", "'GiB' is no unit of usage.peak"),
        ("ttft.p95 < 3 blocks", "'blocks' is no unit"),
        ("pool_bytes < 3 parsecs", "'parsecs' is no unit"),
        ("throughput >= baseline * 2s", "'s' is no unit"),
        ("usage.peak{lane=x} < 1", "has no label 'lane'"),
        ("ttft.p50{class=timeout} < 1", "has no label 'class'"),
        ("usage.peak", "one of < <="),
        ("usage.peak <", "a number is expected"),
        ("usage.peak < 1e999", "'1e999' is too large a number"),
        ("pool_bytes < 1e999 GiB", "'1e999' is too large a number"),
        ("usage.peak = 1", "one of < <="),
        ("(usage.peak < 1", "')' is expected"),
        ("usage.peak < 1)", "'and', 'or' or the end"),
        ("usage.peak < 1 and", "a quantity is expected"),
        ("", "a quantity is expected"),
        ("usage.peak < 0.9; import os", "cannot be read"),
        ("__import__('os').system('x') < 1", "cannot be read"),
        ("kv_dtype == fp8", "unknown quantity"),
        ("throughput >= baseline / 0", "division by zero"),
        ("(" * 40 + "usage.peak < 1" + ")" * 40, "nested"),
        ("usage.peak < 1 and " * 300 + "usage.peak < 1", "too long"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=None) as caught:
        parse(text)
    assert says in caught.value.what


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        parse("kv_usage < 1")
    assert "usage.peak" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        from_limits({"kv_usage": 1})
    assert "usage_peak" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("usage.peak < 0.9", PASS),
        ("usage.peak > 0.9", FAIL),
        ("usage.peak <= 0.5", PASS),
        ("usage.peak < 0.5", FAIL),
        ("usage.peak == 0.5", PASS),
        ("usage.peak != 0.5", FAIL),
        ("waiting.peak < 3", INCONCLUSIVE),
        ("usage.peak <= baseline + 0.1", PASS),
        ("usage.peak <= baseline * 1.1", FAIL),
        ("waiting.peak <= baseline", INCONCLUSIVE),
        ("preemptions <= baseline", INCONCLUSIVE),
        ("usage.peak < 0.9 and preemptions == 0", PASS),
        ("usage.peak < 0.9 and waiting.peak < 3", INCONCLUSIVE),
        ("usage.peak > 0.9 and waiting.peak < 3", FAIL),
        ("usage.peak < 0.9 or waiting.peak < 3", PASS),
        ("usage.peak > 0.9 or waiting.peak < 3", INCONCLUSIVE),
        ("usage.peak > 0.9 or preemptions > 0", FAIL),
    ],
)
def test_missing_never_passes(text: str, verdict: str) -> None:
    assert judge(text, {"usage.peak": 0.5, "preemptions": 0.0}, {"usage.peak": 0.41}) == verdict


def test_a_baseline_that_was_not_given_is_inconclusive() -> None:
    assert judge("usage.peak <= baseline", {"usage.peak": 0.5}) == INCONCLUSIVE


def test_what_cannot_happen_is_left_out() -> None:
    def lookup(limit: Limit) -> Value:
        return Missing("llama.cpp never preempts", cannot_happen=True) if limit.name == "preemptions" else Reading(0.5, "ratio", "test")

    assert evaluate(parse("preemptions == 0"), lookup).verdict == NOT_APPLICABLE
    assert evaluate(parse("preemptions == 0 and usage.peak < 0.9"), lookup).verdict == PASS
    assert evaluate(parse("preemptions > 0 or usage.peak > 0.9"), lookup).verdict == FAIL


def test_the_text_of_an_outcome_has_the_numbers() -> None:
    outcome = evaluate(parse("usage.peak <= baseline + 2%"), lambda _: Reading(0.5, "ratio", "t"), lambda _: Reading(0.4, "ratio", "t"))
    assert outcome.text == "usage.peak is 50.0 %, asked for <= 42.0 % (baseline 40.0 %)"
    assert outcome.value == 0.5
    assert outcome.bound == pytest.approx(0.42)


def test_limits_of_a_mark() -> None:
    limits = from_limits({"usage_peak": 0.9, "ttft_p95": "1.5s", "free_blocks_min": 64, "rejections": "< 3", "throughput": ">= baseline * 0.9"})
    assert [limit.text for limit in limits] == [
        "usage.peak <= 0.9",
        "ttft.p95 <= 1.5",
        "free_blocks.min >= 64",
        "rejections < 3",
        "throughput >= baseline * 0.9",
    ]


@pytest.mark.parametrize(
    "limits", [{"running_peak": 8}, {"usage_peak": True}, {"usage_peak": [1]}, {"usage_peak": "0.9 and preemptions == 0"}, {"usage_peak": "x"}]
)
def test_limits_that_cannot_be_meant(limits: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        from_limits(limits)


def test_every_quantity_has_a_unit_that_it_can_be_compared_in() -> None:
    assert {name for name, quantity in QUANTITIES.items() if quantity.kind == "config" and quantity.unit} <= set(KNOWN)
    for name, known in KNOWN.items():
        assert known.unit, name
        assert parse(f"{name} < 1") == Limit(name, "<", 1.0)


names = st.sampled_from(sorted(KNOWN))
numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


@st.composite
def limits(draw: st.DrawFn) -> Limit:
    name = draw(names)
    known = KNOWN[name]
    word = st.from_regex(r"[a-z_]+(-[a-z]+)?", fullmatch=True)
    lane = draw(word) if known.lanes and draw(st.booleans()) else ""
    kind = draw(word) if known.classes and draw(st.booleans()) else ""
    relative = draw(st.sampled_from(["", "+", "*"]))
    bound = draw(numbers if relative != "*" else st.floats(min_value=0, max_value=1e6))
    return Limit(name, draw(st.sampled_from(["<", "<=", ">", ">=", "==", "!="])), bound, lane, kind, relative)


conditions = st.recursive(
    limits(), lambda inner: st.builds(Group, st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3).map(tuple)), max_leaves=6
)


@given(conditions)
def test_every_condition_reads_back_from_its_text(condition: Condition) -> None:
    text = condition.text
    if len(text) <= 2000:
        assert parse(text) == condition


@given(st.text(max_size=80))
def test_any_text_is_a_condition_or_one_clear_error(text: str) -> None:
    try:
        condition = parse(text)
    except UsageError as error:
        assert error.hint
    else:
        assert parse(condition.text) == condition


@pytest.mark.parametrize(("text", "meant"), [("waiting > 0", "waiting.peak"), ("usage.peek < 0.9", "usage.peak"), ("ttft.p59 < 1s", "ttft.p95")])
def test_a_misspelt_or_shortened_quantity_is_met_with_what_it_may_mean_first(text: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    first, _, rest = caught.value.hint.partition("? known: ")
    assert first.startswith("did you mean ")
    assert meant in first
    assert "usage.peak" in rest
