"""The assertion helpers. Each takes a Run, an Analysis, several of them, or a pair (before, after), and returns the judged gate.

A gate that does not pass raises GateFailed, an AssertionError, with one readable message: quantity, value, bound, unit, before and
after, and where the evidence lies. A gate that cannot apply to the engine returns with ``applicable`` False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.errors import GateFailed, UsageError
from pytest_kvcache.judge import gates
from pytest_kvcache.judge.change import Margins
from pytest_kvcache.judge.compare import Comparison, compare, compare_quality
from pytest_kvcache.judge.room import Cost
from pytest_kvcache.records import GateRecord
from pytest_kvcache.runfolder import Run
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.settings import Settings

Evidence = Run | Analysis | Sequence[Run] | Sequence[Analysis]


@dataclass(frozen=True)
class Recorder:
    """Where judged gates go (a session), how a Run is analysed, and what INCONCLUSIVE does."""

    record: Callable[[GateRecord], None]
    analysis: Callable[[Run], Analysis] = analyse
    inconclusive_passes: bool = False


_recorder: ContextVar[Recorder | None] = ContextVar("kv_recorder", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Send every gate that is judged inside the block to ``recorder``."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def analyses(evidence: Evidence) -> list[Analysis]:
    """Return the Analyses of whatever form of evidence was given. Raises TypeError for anything else."""
    items = list(evidence) if isinstance(evidence, Sequence) else [evidence]
    recorder = _recorder.get()
    analyse_run = recorder.analysis if recorder is not None else analyse
    result = []
    for item in items:
        if isinstance(item, Run):
            result.append(analyse_run(item))
        elif isinstance(item, Analysis):
            result.append(item)
        else:
            raise TypeError(f"a Run or an Analysis was expected, not {type(item).__name__}")
    if not result:
        raise TypeError("no Run was given")
    return result


def _share(value: float, name: str) -> float:
    """Return a ratio. Raises UsageError for what is none: 90 would be a gate that cannot fail."""
    if not 0 <= value <= 1:
        raise UsageError(f"{name}={value!r} is no share from 0 to 1", hint="0.9 means 90 %")
    return value


def _count(value: float, name: str) -> float:
    """Return a count. Raises UsageError for one below zero, or no number."""
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name}={value!r} is no count from 0 on", hint="a number of blocks, tokens or requests")
    return value


def settle(gate: GateRecord) -> GateRecord:
    """Record a judged gate and return it where it passed or cannot apply. Raises GateFailed otherwise."""
    __tracebackhide__ = True
    recorder = _recorder.get()
    if recorder is not None:
        recorder.record(gate)
    if not gate.applicable or gate.verdict == gates.PASS or gate.level == "warn":
        return gate
    if gate.verdict == gates.INCONCLUSIVE and recorder is not None and recorder.inconclusive_passes:
        return gate
    raise GateFailed(gates.failure_text(gate), gate)


def settle_all(judged: Sequence[GateRecord]) -> list[GateRecord]:
    """Record all gates, then raise one GateFailed that holds the message of each that did not pass."""
    __tracebackhide__ = True
    failed = []
    for gate in judged:
        try:
            settle(gate)
        except GateFailed as error:
            failed.append(error)
    if failed:
        raise GateFailed("\n".join(str(error) for error in failed), failed[0].gate)
    return list(judged)


def assert_peak_usage(evidence: Evidence, *, max: float = 0.95) -> GateRecord:
    """Pass where the peak KV usage (a ratio) stayed at or under ``max``."""
    __tracebackhide__ = True
    return settle(gates.peak_usage(analyses(evidence), _share(max, "max")))


def assert_free_blocks(evidence: Evidence, *, min: float = 1) -> GateRecord:
    """Pass where the fewest free blocks were ``min`` or more; tokens, where the engine counts tokens."""
    __tracebackhide__ = True
    return settle(gates.free_space(analyses(evidence), _count(min, "min")))


def assert_no_rejections(evidence: Evidence) -> GateRecord:
    """Pass where no request of ours was rejected, by any class of load/rejections.py, nor by the engine's own counter."""
    __tracebackhide__ = True
    return settle(gates.no_rejections(analyses(evidence)))


def assert_no_preemptions(evidence: Evidence) -> GateRecord:
    """Pass where the engine's preemption counter did not move. Not applicable to engines that never preempt."""
    __tracebackhide__ = True
    return settle(gates.no_preemptions(analyses(evidence)))


def assert_returns_to_idle(evidence: Evidence) -> GateRecord:
    """Pass where nothing ran, waited or held KV once the load had ended."""
    __tracebackhide__ = True
    return settle(gates.returns_to_idle(analyses(evidence)))


def assert_fits(
    evidence: Evidence | Endpoint | str, *, concurrency: int, length: int, config: Path | str | Mapping[str, Any] | None = None, **stated: Any
) -> GateRecord:
    """Pass where ``concurrency`` requests of ``length`` tokens (prompt and output) fit the pool that the server has.

    ``evidence`` is a Run, an Analysis, several of them, or a server: an Endpoint or its address, which is read now. With ``config`` (the
    model's config.json, folder or GGUF file) a request costs what ``capacity.plan`` says, which settles window and hybrid models; the plan must
    reproduce the server's own figures first, else the gate is INCONCLUSIVE. ``stated`` are further arguments of ``plan``, such as ``tp``.
    """
    __tracebackhide__ = True
    _count(concurrency, "concurrency")
    _count(length, "length")
    if stated and config is None:
        raise UsageError(f"{', '.join(sorted(stated))} belong to a plan", hint='name the model: config="config.json"')
    cost: Cost | None = None
    if config is not None:
        from pytest_kvcache.capacity.serving import cost_on

        cost = partial(cost_on, config=config, **stated)
    if isinstance(evidence, (str, Endpoint)):
        from pytest_kvcache.observe.scrape import take_snapshot
        from pytest_kvcache.server.address import parse_endpoint

        endpoint = parse_endpoint(evidence, Settings()) if isinstance(evidence, str) else evidence
        return settle(gates.fits_now([take_snapshot(endpoint, log=endpoint.log)], concurrency=concurrency, length=length, cost=cost))
    return settle(gates.fits(analyses(evidence), concurrency=concurrency, length=length, cost=cost))


def assert_balanced(
    evidence: Evidence, *, max_spread: float = 0.2, max_idle_while_waiting: float = 0.2, max_over_mean: float = 1.5, max_card_over_mean: float = 1.1
) -> GateRecord:
    """Pass where replicas, ranks and the cards of a server are used evenly.

    Their mean usages differ by no more than ``max_spread`` (a ratio of the pool), requests waited on one while another idled for no more than
    ``max_idle_while_waiting`` (a ratio of the load's time), the busiest had no more than ``max_over_mean`` times the mean of live requests, and the
    fullest card no more than ``max_card_over_mean`` times the mean memory in use (or less than 1 GiB more than the emptiest).
    """
    __tracebackhide__ = True
    spread, idle = _share(max_spread, "max_spread"), _share(max_idle_while_waiting, "max_idle_while_waiting")
    for name, factor in (("max_over_mean", max_over_mean), ("max_card_over_mean", max_card_over_mean)):
        if not factor >= 1:
            raise UsageError(f"{name}={factor!r}: the highest is never below the mean", hint="1.5 lets the busiest have half more")
    return settle(gates.balanced(analyses(evidence), spread, idle, max_over_mean, max_card_over_mean))


def assert_quality(evidence: Evidence, after: Evidence | None = None, *, min: float = 0.98, margin: float = 0.01) -> GateRecord:
    """Pass where the pass rate of the quality items is ``min`` or more; of two sides, where the change lost at most ``margin`` of the items.

    ``assert_quality(run)`` judges one side, ``assert_quality(before, after, margin=0.01)`` a change: items pair by their id, and it takes
    299 of them without a loss to bound the loss by 1 %.
    """
    __tracebackhide__ = True
    if after is None:
        return settle(gates.quality(analyses(evidence), _share(min, "min")))
    return settle(compare_quality(analyses(evidence), analyses(after), _share(margin, "margin")))


def assert_not_worse(
    before: Comparison | Evidence,
    after: Evidence | None = None,
    *,
    usage: float = 0.02,
    ttft: float = 0.25,
    throughput: float = 0.10,
    quality: float = 0.01,
    counts: float = 0.50,
    rare: float = 0.10,
    ttft_p95: float | None = None,
    latency_p95: float | None = None,
    expect_change: str = "",
) -> list[GateRecord]:
    """Pass where nothing that was measured on both sides became worse by more than its margin.

    Takes the Runs of both sides, several windows of each, or a Comparison (of ``kv_compare``, which has the session's margins). ``usage``
    is a share of the pool, for peak usage and free space; ``ttft`` (median), ``throughput``, ``ttft_p95`` and ``latency_p95`` (left out
    by default) are shares of the value before; ``quality`` is the share of items that may be lost; ``counts`` by how much the rates of rejections
    and preemptions may rise, ``rare`` the rate that need not be excluded where none was seen. With ``expect_change`` any other difference
    of the configurations is INVALID.
    """
    __tracebackhide__ = True
    if isinstance(before, Comparison):
        if after is not None:
            raise TypeError("a Comparison holds both sides already")
        return settle_all(before.gates)
    if after is None:
        raise TypeError("the side after the change is missing: assert_not_worse(before, after)")
    shares = {"usage": usage, "throughput": throughput, "quality": quality, "rare": rare}
    growths = {"ttft": ttft, "counts": counts, "ttft_p95": ttft_p95, "latency_p95": latency_p95}
    margins = Margins(
        **{name: _share(value, name) for name, value in shares.items()},
        **{name: _count(value, name) if value is not None else None for name, value in growths.items()},  # type: ignore[arg-type]
    )
    return settle_all(compare(analyses(before), analyses(after), Settings(expect_change=expect_change), margins).gates)
