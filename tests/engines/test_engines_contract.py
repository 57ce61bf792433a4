"""The contract of every dialect, run with the product's own reader on recorded text. A new engine adds a Case and gets all of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache import engines
from pytest_kvcache.engines import DIALECTS, Dialect, RawState, Values, detect, read, read_values
from pytest_kvcache.errors import UnknownEngine
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value

DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class Case:
    """One recorded server: its texts, and what a right reading of them is. ``log`` is what its start-up log states."""

    engine: str
    name: str
    metrics: str = ""
    bodies: dict[str, str] = field(default_factory=dict)
    log: dict[str, Value] = field(default_factory=dict)
    right: dict[str, float | str | bool] = field(default_factory=dict)
    never: frozenset[str] = frozenset()

    def text(self) -> str:
        return (DATA / self.metrics).read_text() if self.metrics else ""

    def json(self) -> dict[str, Any]:
        return {path: json.loads((DATA / file).read_text()) for path, file in self.bodies.items()}

    def raw(self, dialect: Dialect | None = None) -> RawState:
        return state(self.text() if self.metrics else None, self.json(), self.log, dialect)


def state(text: str | None, bodies: dict[str, Any], log: dict[str, Value], dialect: Dialect | None = None) -> RawState:
    wanted = dialect.wanted if dialect is not None else frozenset().union(*(d.wanted for d in DIALECTS.values()))
    metrics = None if text is None else parse_samples(text, wanted)
    return RawState(metrics=metrics, metrics_reason="/metrics was taken away", json=bodies, log_facts=log)


def fact(value: float | str | bool, unit: str = "tokens") -> Reading:
    return Reading(value, unit, "start-up log: a line")


_VLLM_NEVER = frozenset({"swapped"})
_LLAMA_NEVER = frozenset(
    {
        "pool_blocks", "usable_blocks", "block_size", "used_blocks", "free_blocks", "num_gpu_blocks_override", "gpu_memory_utilization",
        "swapped", "preemptions", "rejections",
    }
)  # fmt: skip

CASES = [
    Case(
        "vllm",
        "0.32.0 on a CPU, recorded",
        "exposition/vllm/0.32.0-cpu.prom",
        {"/v1/models": "exposition/vllm/0.32.0-v1_models.json"},
        right={
            "pool_blocks": 16384, "usable_blocks": 16383, "block_size": 128, "pool_tokens": 2097152, "pool_bytes": 1 << 30, "max_concurrency": 512,
            "max_model_len": 8192, "kv_dtype": "auto", "prefix_caching": True, "gpu_memory_utilization": 0.92, "used_blocks": 0,
            "free_blocks": 16383, "usage": 0, "running": 0, "waiting": 0, "waiting_capacity": 0, "preemptions": 0, "rejections": 0,
            "prefix_queries": 4, "prefix_hits": 0, "prompt_tokens": 4, "generation_tokens": 20, "finished": 1, "finished_stop": 0,
            "finished_length": 1, "finished_abort": 0, "finished_error": 0, "start_time": 1795964917.66,
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.32.0 on a CPU, overridden and preempted, recorded",
        "exposition/vllm/0.32.0-cpu-override-preempted.prom",
        right={
            "pool_blocks": 600, "usable_blocks": 599, "num_gpu_blocks_override": 600, "pool_tokens": 19200, "max_concurrency": 4.6875,
            "preemptions": 1, "prompt_tokens": 9005, "generation_tokens": 12001, "finished": 7, "finished_length": 7, "used_blocks": 0,
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.32.0 on a GPU",
        "exposition/vllm/0.32.0.prom",
        log={"pool_tokens": fact(131088), "max_model_len": fact(8192), "pool_bytes": fact(16 << 30, "bytes")},
        right={
            "pool_blocks": 8193, "usable_blocks": 8192, "pool_tokens": 131088, "used_blocks": 4096, "free_blocks": 4096, "usage": 0.5,
            "running": 8, "waiting": 3, "preemptions": 2, "pool_bytes": 16 << 30, "max_model_len": 8192,
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.32.0 with two data-parallel ranks",
        "exposition/vllm/0.32.0-dp2.prom",
        right={
            "pool_blocks": 8194, "usable_blocks": 8192, "block_size": 16, "pool_tokens": 131104, "max_concurrency": 16.00390625,
            "used_blocks": 4096, "free_blocks": 4096, "usage": 0.5, "running": 16, "waiting": 7, "waiting_capacity": 6, "preemptions": 3,
            "rejections": 0, "finished": 100, "finished_length": 80,
        },
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.32.0, sliding-window hybrid",
        "exposition/vllm/0.32.0-hybrid-swa.prom",
        right={"pool_blocks": 29135, "used_blocks": 8820, "free_blocks": 20314, "pool_tokens": 327680, "max_concurrency": 2.5},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.9.2 with both names",
        "exposition/vllm/0.9.2-both-names.prom",
        right={"usage": 0.625, "used_blocks": 2560, "free_blocks": 1536, "prefix_queries": 16000, "prefix_hits": 4000, "pool_tokens": 65552},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "0.6.6, engine V0",
        "exposition/vllm/0.6.6-v0.prom",
        right={
            "pool_blocks": 24188, "usable_blocks": 24188, "used_blocks": 18141, "free_blocks": 6047, "usage": 0.75, "swapped": 2, "running": 30,
            "waiting": 4, "preemptions": 7, "finished": 600, "finished_length": 120,
        },
    ),
    Case(
        "vllm",
        "relabelled with underscores",
        "exposition/vllm/relabelled-underscore.prom",
        right={"usage": 0.5, "used_blocks": 4096, "free_blocks": 4096, "running": 8, "preemptions": 2, "pool_tokens": 131088},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "two replicas of Ray Serve",
        "exposition/vllm/ray-serve.prom",
        right={"pool_blocks": 16386, "usage": 0.375, "used_blocks": 6144, "free_blocks": 10240, "running": 12, "prompt_tokens": 70000},
        never=_VLLM_NEVER,
    ),
    Case(
        "vllm",
        "llm-d-inference-sim",
        "exposition/vllm/llm-d-inference-sim-0.10.2.prom",
        right={"pool_blocks": 1024, "usable_blocks": 1024, "used_blocks": 256, "free_blocks": 768, "usage": 0.25, "finished_stop": 20},
        never=_VLLM_NEVER,
    ),
    Case(
        "llamacpp",
        "unified, busy, recorded",
        "llamacpp/metrics-busy-unified.txt",
        {"/slots": "llamacpp/slots-busy-unified.json", "/props": "llamacpp/props-unified.json", "/v1/models": "llamacpp/models-unified.json"},
        {"pool_tokens": fact(16384), "pool_bytes": fact(16 << 20, "bytes"), "kv_dtype": fact("f16", "")},
        right={
            "pool_tokens": 16384, "used_tokens": 4464, "free_tokens": 11920, "usage": 4464 / 16384, "running": 4, "waiting": 2,
            "max_model_len": 16384, "max_num_seqs": 4, "kv_dtype": "f16", "pool_bytes": 16 << 20,
        },
        never=_LLAMA_NEVER,
    ),
    Case(
        "llamacpp",
        "split, busy, recorded, without a log",
        "llamacpp/metrics-busy-split.txt",
        {"/slots": "llamacpp/slots-busy-split.json", "/props": "llamacpp/props.json", "/v1/models": "llamacpp/models.json"},
        right={"running": 4, "waiting": 2, "max_model_len": 4096, "max_num_seqs": 4},
        never=_LLAMA_NEVER,
    ),
    Case(
        "llamacpp",
        "b11434, unified",
        "exposition/llamacpp/b11434.prom",
        {"/slots": "exposition/llamacpp/b11434-slots-unified.json", "/v1/models": "exposition/llamacpp/b11434-v1_models.json"},
        {"pool_tokens": fact(8192)},
        right={"pool_tokens": 8192, "used_tokens": 3206, "free_tokens": 4986, "running": 2, "waiting": 1, "prompt_tokens": 1234570,
               "prefix_hits": 43210, "prefix_queries": 1277780, "generation_tokens": 98765},
        never=_LLAMA_NEVER,
    ),
    Case(
        "llamacpp",
        "b11434, split, without --metrics",
        bodies={"/slots": "exposition/llamacpp/b11434-slots-split.json"},
        log={"pool_tokens": fact(8192)},
        right={"pool_tokens": 8192, "used_tokens": 1147, "free_tokens": 7045, "running": 1, "max_model_len": 2048, "max_num_seqs": 4},
        never=_LLAMA_NEVER,
    ),
]  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.engine}: {case.name}")


def _same(name: str, before: Value, after: Value) -> bool:
    """Say whether a reading is the same number. Counters of one process are created within milliseconds of one another."""
    assert isinstance(before, Reading)
    assert isinstance(after, Reading)
    if name == "start_time":
        return abs(before.number() - after.number()) < 1
    return before.value == after.value


def _assert_no_invention(before: Values, after: Values, taken: str) -> None:
    """Assert that taking something away gave Missing, or the number that was there, for the whole and for each rank."""
    pairs = [("", before.whole, after.whole), *((part, before.ranks[part], after.ranks[part]) for part in after.ranks if part in before.ranks)]
    for part, old, new in pairs:
        for name in QUANTITIES:
            was, now = old[name], new[name]
            if isinstance(now, Reading):
                assert isinstance(was, Reading), f"{taken} taken away: {part} {name} appeared as {now.value}"
                assert _same(name, was, now), f"{taken} taken away: {part} {name} went from {was.value} to {now.value} ({now.source})"
            else:
                assert now.reason, f"{taken} taken away: {name} is missing without a reason"
                if isinstance(was, Reading):
                    assert not now.cannot_happen, f"{taken} taken away: {name} turned into what cannot happen"


@every_case
def test_the_server_is_known_for_what_it_is(case: Case) -> None:
    assert detect(case.raw()).name == case.engine
    others = [dialect for dialect in DIALECTS.values() if dialect.name != case.engine]
    with pytest.raises(UnknownEngine):
        detect(case.raw(), others)


@every_case
def test_every_number_is_the_right_one(case: Case) -> None:
    snapshot = read(DIALECTS[case.engine], case.raw(), 1.0)
    for name, right in case.right.items():
        value = snapshot.value(name)
        assert isinstance(value, Reading), f"{name}: {value}"
        shown = value.value if isinstance(right, (str, bool)) else pytest.approx(value.value, rel=1e-9, abs=0.01 if name == "start_time" else 0)
        assert right == shown, name
        assert value.unit == QUANTITIES[name].unit or value.source.startswith("start-up log")
        assert value.source


@every_case
def test_what_cannot_happen_is_told_from_what_is_not_told(case: Case) -> None:
    values = read_values(DIALECTS[case.engine], case.raw()).whole
    assert {name for name, value in values.items() if isinstance(value, Missing) and value.cannot_happen} == case.never
    assert all(value.reason for value in values.values() if isinstance(value, Missing))


@every_case
def test_a_series_that_goes_never_becomes_a_number(case: Case) -> None:
    dialect = DIALECTS[case.engine]
    before = read_values(dialect, case.raw())
    lines = case.text().splitlines()
    names = {line.partition("{")[0].split(" ")[0] for line in lines if not line.startswith("#")} & dialect.wanted
    assert names or not case.metrics
    for name in names:
        left = "\n".join(line for line in lines if line.partition("{")[0].split(" ")[0] != name)
        _assert_no_invention(before, read_values(dialect, state(left, case.json(), case.log)), name)


@every_case
def test_a_row_that_goes_never_makes_a_partial_sum(case: Case) -> None:
    dialect = DIALECTS[case.engine]
    before = read_values(dialect, case.raw())
    lines = case.text().splitlines()
    for number, line in enumerate(lines):
        name = line.partition("{")[0]
        # A row per reason is created with its first event in some versions: the sum over the rows that are there is then the sum.
        if name in dialect.wanted and not any(word in line for word in ("reason=", "sleep_state=")):
            left = "\n".join([*lines[:number], *lines[number + 1 :]])
            _assert_no_invention(before, read_values(dialect, state(left, case.json(), case.log)), f"line {number + 1} ({name})")


@every_case
def test_a_body_that_goes_never_becomes_a_number(case: Case) -> None:
    dialect = DIALECTS[case.engine]
    before = read_values(dialect, case.raw())
    for path in case.bodies:
        left = {**case.json(), path: Missing(f"{path} was taken away")}
        _assert_no_invention(before, read_values(dialect, state(case.text() if case.metrics else None, left, case.log)), path)
    _assert_no_invention(before, read_values(dialect, state(None, case.json(), case.log)), "/metrics")
    _assert_no_invention(before, read_values(dialect, state(case.text() if case.metrics else None, case.json(), {})), "the log")


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_nothing_said_is_nothing_read(dialect: Dialect) -> None:
    for raw in (RawState(), RawState(metrics=parse_samples("", dialect.wanted)), RawState(json={path.path: {} for path in dialect.json_paths})):
        values = read_values(dialect, raw).whole
        assert [name for name, value in values.items() if isinstance(value, Reading)] == []


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_every_dialect_speaks_of_every_quantity(dialect: Dialect) -> None:
    assert set(dialect.reads) == set(QUANTITIES)
    assert all(rule.describe() for rule in dialect.reads.values())
    assert dialect.counts in {"blocks", "tokens"}
    assert dialect.wanted
    assert dialect.gauge_scale > 0


def test_a_dialect_that_is_silent_about_a_quantity_cannot_be_made() -> None:
    vllm = DIALECTS["vllm"]
    with pytest.raises(ValueError, match=r"says nothing of.*usage"):
        Dialect("x", "X", "x", "blocks", True, {name: rule for name, rule in vllm.reads.items() if name != "usage"}, vllm.version)
    with pytest.raises(ValueError, match=r"unknown.*made_up"):
        Dialect("x", "X", "x", "blocks", True, {**vllm.reads, "made_up": vllm.reads["usage"]}, vllm.version)


def test_an_engine_is_one_file_that_nothing_else_lists() -> None:
    modules = {path.stem for path in Path(engines.__file__).parent.glob("*.py") if not path.name.startswith("_")}
    assert set(DIALECTS) == modules
    assert not [module for module in modules if f"engines.{module}" in Path(engines.__file__).read_text()]


def test_every_engine_has_a_recorded_case() -> None:
    assert {case.engine for case in CASES} == set(DIALECTS)


@every_case
def test_no_two_dialects_read_one_series(case: Case) -> None:
    mine = DIALECTS[case.engine]
    for other in DIALECTS.values():
        if other is not mine:
            assert not {name for name in mine.wanted & other.wanted if ":" in name}
