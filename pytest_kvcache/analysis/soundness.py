"""Is the evidence of one Run sound? Each rule looks for one thing that spoils a measurement, and says how to mend it.

A Run with a Problem is INVALID evidence: no verdict rests on it, whichever way its numbers point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_kvcache import units


@dataclass(frozen=True, slots=True)
class Problem:
    """What broke the evidence: the rule's name, what was seen, and how to mend it."""

    rule: str
    text: str
    mend: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sound measurement may show. Times in seconds; shares from 0 to 1.

    The client's own lag may be ``lag_s`` or ``lag_share`` of the median time to first token, whichever is more; a single stall of
    its event loop may last ``stall_share`` of the window, or ``stall_s`` where that is more: it may lie beside a short window. A load
    process may use ``cpu_share`` of one core: from there on Locust itself warns that its times are no longer true.
    The clock of a load worker may be ``worker_clock_s`` off the master's, which is corrected, and uncertain by ``worker_clock_error_s``.
    """

    lag_s: float = 0.25
    lag_share: float = 0.10
    stall_share: float = 0.25
    stall_s: float = 1.0
    cpu_share: float = 0.9
    coverage: float = 0.80
    gap_s: float = 3.0
    below_zero: float = 0.05  # some engines fall a block or two below zero when what they evict is counted twice
    foreign_share: float = 0.05
    warm_share: float = 0.10
    requests: int = 3
    length_share: float = 0.05
    clock_s: float = 2.0
    load_share: float = 0.95
    users_share: float = 0.80
    worker_clock_s: float = 1.0
    worker_clock_error_s: float = 0.1


@dataclass(frozen=True)
class Facts:
    """What the rules look at, as measured in one Run; the defaults are those of a sound one.

    ``due`` is how many requests an open loop was to send, ``users`` how many a closed loop was to keep in flight (0: neither is
    known, or think time and refusals explain fewer) and ``most_live`` the most that were. ``lengths`` maps the first requests, by lane
    and number, to the prompt and output tokens planned for them.
    ``worker_clocks`` maps a load worker to the offset of its clock from the master's and by how much that may be wrong (None where
    it could not be measured).
    """

    loaded: bool = True
    incomplete: tuple[str, ...] = ()
    tool: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()
    sent: int = 0
    asked: int = 0
    due: int = 0
    users: int = 0
    most_live: int = 0
    lag_p99_s: float = 0.0
    loop_lag_p99_s: float = 0.0
    loop_stall_s: float = 0.0
    client_cpu_share: float = 0.0
    client_cpu_warning: bool = False
    cap: int = 0
    held: int = 0
    window_s: float = 0.0
    ttft_p50_s: float = 0.0
    polled: bool = True
    coverage: float = 1.0
    longest_gap_s: float = 0.0
    lowest_usage: float = 0.0
    read_errors: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    hit_tokens: float = 0.0
    prompt_tokens: float = 0.0
    sharing_meant: bool = False
    lane_sent: Mapping[str, int] = field(default_factory=dict)
    lengths_off: int = 0
    lengths_known: int = 0
    worst_length: str = ""
    outside_s: float = 0.0
    clock_step_s: float = 0.0
    worker_clocks: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    pool_full: int = 0
    lengths: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)


def problems(facts: Facts, limits: Limits | None = None) -> list[Problem]:
    """Return everything that makes the evidence of a Run unsound; empty where it is sound."""
    if limits is None:
        limits = Limits()
    found = [Problem("tool", text, "mend what is named and measure again") for text in facts.tool]
    if facts.loaded:
        found += [*_load(facts, limits), *_telemetry(facts, limits), *_server(facts, limits)]
    return found


def _load(facts: Facts, limits: Limits) -> Iterator[Problem]:
    if facts.incomplete:
        yield Problem(
            "incomplete",
            f"the load's record is incomplete: {'; '.join(facts.incomplete[:3])}",
            "measure again; the load process was killed, or the disk was full",
        )
    if facts.exceptions:
        yield Problem(
            "exception",
            f"the load profile itself broke {len(facts.exceptions)} times: {facts.exceptions[0]}",
            "mend the profile; its stderr lies in the Run's folder",
        )
    if not facts.sent:
        yield Problem("no_requests", "no request was sent", "look at the load's stderr in the Run's folder")
        return
    yield from _client(facts, limits)
    yield from _achieved(facts, limits)
    fewest = min(limits.requests, facts.asked) if facts.asked else limits.requests
    for lane, sent in facts.lane_sent.items():
        if sent < fewest:
            yield Problem(
                "too_few",
                f"lane {lane} has {sent} request{'s' if sent != 1 else ''}, and fewer than {fewest} tell nothing",
                "a longer window (--kv-duration-s) or more users",
            )
    if facts.lengths_off > limits.length_share * max(facts.lengths_known, 1):
        yield Problem(
            "lengths",
            f"{facts.lengths_off} of {facts.lengths_known} prompts had another length than planned: {facts.worst_length}",
            "prompts are exact where the server takes token ids or has /tokenize; another program between client and server may change them",
        )
    if facts.outside_s > limits.clock_s:
        yield Problem(
            "clock",
            f"requests lie {units.show_seconds(facts.outside_s)} outside the load's own window: a clock was set, or two machines disagree",
            "let the machines' clocks follow one source, and measure again",
        )
    elif abs(facts.clock_step_s) > limits.clock_s:
        yield Problem(
            "clock",
            f"the clock of this machine was set by {facts.clock_step_s:+.1f} s while it measured (or the machine slept)",
            "let the clock be slewed and not stepped while a measurement runs, keep the machine awake, and measure again",
        )
    yield from _worker_clocks(facts, limits)


def _client(facts: Facts, limits: Limits) -> Iterator[Problem]:
    """Yield what shows that the load client itself was the bottleneck."""
    allowed = max(limits.lag_s, limits.lag_share * facts.ttft_p50_s)
    lag, which = max((facts.lag_p99_s, "from the intended to the real start of a request"), (facts.loop_lag_p99_s, "of its event loop"))
    if facts.loop_stall_s > max(allowed, limits.stall_share * facts.window_s, limits.stall_s):
        yield Problem(
            "client_bound",
            f"the load client stood still for {units.show_seconds(facts.loop_stall_s)} of a window of {units.show_seconds(facts.window_s)}",
            "a longer window (--kv-duration-s), or a machine of its own for the load",
        )
    elif lag > allowed and facts.held and lag == facts.lag_p99_s:
        yield Problem(
            "capped",
            f"{facts.held} arrivals waited up to {units.show_seconds(lag)} (p99) because {facts.cap} requests were in flight: the loop was not open",
            "a higher cap (--kv-max-in-flight), or a lower rate: the server does not keep up with this one",
        )
    elif lag > allowed:
        yield Problem(
            "client_bound",
            f"the load client was late: its lag {which} was {units.show_seconds(lag)} (p99), and at most {units.show_seconds(allowed)} is sound",
            "fewer users, more load processes (--kv-load-processes), or a machine of its own for the load",
        )
    elif facts.client_cpu_share > limits.cpu_share or facts.client_cpu_warning:
        used = f"{facts.client_cpu_share * 100:.0f} %" if facts.client_cpu_share > limits.cpu_share else "more than 90 % for a while"
        yield Problem(
            "client_bound",
            f"a load process was out of CPU: it used {used} of one core, so that its times are not those of the server",
            "more load processes (--kv-load-processes), fewer users, or a machine of its own for the load",
        )


def _achieved(facts: Facts, limits: Limits) -> Iterator[Problem]:
    """Yield what shows that less was sent than planned: the server was then pressed less than the verdict would say."""
    if facts.due and facts.sent < limits.load_share * facts.due:
        yield Problem(
            "under_load",
            f"{facts.sent} requests were sent and {facts.due} were planned, {facts.sent / facts.due * 100:.0f} %",
            "a lower rate, a higher cap on requests in flight, or more worker processes for the load",
        )
    elif facts.most_live < int(limits.users_share * facts.users):
        yield Problem(
            "under_load",
            f"at most {facts.most_live} requests were in flight at once, and {facts.users} users were planned",
            "a longer window (--kv-duration-s), more worker processes for the load, or fewer users",
        )


def _worker_clocks(facts: Facts, limits: Limits) -> Iterator[Problem]:
    for worker, (offset_s, error_s) in facts.worker_clocks.items():
        if error_s is None:
            what = f"how far the clock of the load worker {worker} is from the master's could not be measured"
        elif abs(offset_s) > limits.worker_clock_s:
            at_most = f"at most {units.show_seconds(limits.worker_clock_s)} is sound"
            what = f"the clock of the load worker {worker} is {units.show_seconds(abs(offset_s))} off the master's, and {at_most}"
        elif error_s > limits.worker_clock_error_s:
            known = f"known to {units.show_seconds(error_s)} only, and {units.show_seconds(limits.worker_clock_error_s)} is needed"
            what = f"the clock of the load worker {worker} against the master's is {known}"
        else:
            continue
        yield Problem("worker_clock", what, "let the load machines' clocks follow one source (NTP), on a network that is not full")
        return


def _telemetry(facts: Facts, limits: Limits) -> Iterator[Problem]:
    if not facts.polled:
        return
    reason = f" ({facts.read_errors[0]})" if facts.read_errors else ""
    if facts.lowest_usage < -limits.below_zero:
        yield Problem(
            "impossible",
            f"the server told a usage of {facts.lowest_usage * 100:.4g} %, which no cache can have: what it counts is not what is used",
            "update the server, or find out in its log what it counts twice",
        )
    if facts.coverage < limits.coverage:
        yield Problem(
            "coverage",
            f"telemetry covers {_short_of(facts.coverage, limits.coverage)} of the load, and {limits.coverage * 100:.0f} % is needed{reason}",
            "a longer --kv-scrape-timeout-s, a lower --kv-sample-hz, or a less busy machine for the client",
        )
    elif facts.longest_gap_s > limits.gap_s:
        yield Problem(
            "gap",
            f"telemetry has a gap of {units.show_seconds(facts.longest_gap_s)} inside the load{reason}: a peak may lie in it",
            "a longer --kv-scrape-timeout-s, or a less busy machine for the client",
        )


def _short_of(share: float, needed: float) -> str:
    """Return a share that is below what is needed, so that it also reads as below it."""
    text = f"{share * 100:.0f} %"
    return text if text != f"{needed * 100:.0f} %" else f"{math.floor(share * 1000) / 10:.1f} %"


def _server(facts: Facts, limits: Limits) -> Iterator[Problem]:
    if facts.restarts:
        yield Problem(
            "restart",
            f"the server restarted while it was measured: {facts.restarts[0]}",
            "find out why in the server's log; what was measured mixes two lives",
        )
    if facts.moved:
        yield Problem(
            "moved",
            f"the server's configuration changed while it was measured: {'; '.join(facts.moved[:3])}",
            "measure a server that nobody else changes",
        )
    if facts.foreign:
        yield Problem(
            "other_traffic",
            f"the server had requests that we did not send, or no longer waited for: {facts.foreign[0]}",
            "measure a server without other users",
        )
    share = facts.hit_tokens / facts.prompt_tokens if facts.prompt_tokens > 0 else 0.0
    if not facts.sharing_meant and share > limits.warm_share:
        yield Problem(
            "warm_cache",
            f"{share * 100:.0f} % of the prompt tokens came out of the prefix cache, although no prompt repeats another",
            "start with a cold cache (launch the server from here, or --kv-reset-cache), or find out who else sends these prompts",
        )
