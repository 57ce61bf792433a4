"""The facts that the rules of soundness look at, gathered from the rows, the telemetry and the snapshots of one Run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.client import read_client
from pytest_kvcache.analysis.levels import Levels, Window
from pytest_kvcache.analysis.payload import REFUSED, Payload
from pytest_kvcache.analysis.requests import wrong_lengths
from pytest_kvcache.analysis.rows import Frame, Rows
from pytest_kvcache.analysis.series import Growth, Series, coverage
from pytest_kvcache.analysis.soundness import Facts, Limits
from pytest_kvcache.load.contract import FAILED_NOTE, REJECTIONS
from pytest_kvcache.quantities import Reading, Value
from pytest_kvcache.records import RunRecord

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

_COMPARED_REQUESTS = 2000
_BROKEN_NOTES = (FAILED_NOTE, "task exception")
_FIXED = ("pool_blocks", "usable_blocks", "pool_tokens", "max_model_len", "block_size", "kv_dtype", "max_num_seqs")

_PREFIX_CACHE = {"prefix_caching", "enable_prefix_caching", "no_enable_prefix_caching", "disable_radix_cache"}
"""The names by which a change of the prefix cache is declared."""


def gather(
    record: RunRecord, rows: Rows, frame: Frame, series: Sequence[Series], window: Window, seen: Levels, load: Payload, ttft_p50: Value
) -> Facts:
    """Return the facts of one Run whose load was run."""
    import numpy as np

    client = read_client(rows, frame)
    fresh = max(2.5 / window.hz, 0.25) if window.hz else 1.0
    covered = [coverage(one.wall_s, window.since_s, window.until_s, fresh) for one in series]
    usages = [one.column("usage") for one in series]
    off, known, worst = wrong_lengths(rows)
    hits = seen.counters["prefix_hits"].value
    cached = float(np.nansum(rows.cached))
    return Facts(
        incomplete=tuple(frame.gaps()),
        tool=tuple(record.problems),
        exceptions=tuple(note.text[:300] for note in frame.notes if note.subject in _BROKEN_NOTES),
        sent=len(rows),
        asked=_asked(record, frame),
        due=_due(frame),
        users=_users(rows, frame),
        most_live=round(load.live.peak()[0]),
        lag_p99_s=client.lag_p99_s,
        loop_lag_p99_s=client.loop_lag_p99_s,
        loop_stall_s=client.loop_stall_s,
        client_cpu_share=client.cpu_share,
        client_cpu_warning=client.cpu_warning,
        cap=client.cap,
        held=client.held,
        window_s=window.until_s - window.since_s,
        ttft_p50_s=ttft_p50.number() if isinstance(ttft_p50, Reading) else 0.0,
        polled=record.sample_hz > 0,
        coverage=min((share for share, _ in covered), default=0.0),
        longest_gap_s=max((gap for _, gap in covered), default=0.0),
        lowest_usage=min((float(np.nanmin(one)) for one in usages if np.isfinite(one).any()), default=0.0),
        read_errors=tuple(error for one in series for error in one.errors),
        restarts=tuple(_restarts(record, series, seen.counters)),
        moved=tuple(_moved(record, series)),
        foreign=tuple(_foreign(rows, frame, seen, load, window)),
        hit_tokens=max(hits.number() if isinstance(hits, Reading) else 0.0, cached),
        prompt_tokens=float(np.nansum(rows.prompt)),
        sharing_meant=_sharing_meant(record, frame),
        lane_sent={name: int(rows.lane_is(name).sum()) for name in rows.lanes},
        lengths_off=off,
        lengths_known=known,
        worst_length=worst,
        outside_s=_outside(record, rows),
        clock_step_s=record.clock_step_s,
        worker_clocks={end.worker: (end.clock_offset_s, end.clock_error_s) for end in frame.ends if end.clock_offset_s is not None},
        pool_full=frame.pool_full,
        lengths=_lengths(rows),
    )


def _asked(record: RunRecord, frame: Frame) -> int:
    """Return how many requests the load was told to send at most; 0 where only its duration bounds it."""
    told = [record.options.get("requests"), *(start.options.get("requests") for start in frame.starts)]
    return next((number for number in told if isinstance(number, int) and number > 0), 0)


def _due(frame: Frame) -> int:
    """Return how many requests an open loop had scheduled for its window, over all workers; 0 where the load is no open loop."""
    told = [start.options.get("scheduled") for start in frame.starts]
    return sum(number for number in told if isinstance(number, int) and number > 0)


def _users(rows: Rows, frame: Frame) -> int:
    """Return how many users a closed loop was to keep busy; 0 where think time, a count or refusals let fewer be in flight."""
    users = 0
    for start in frame.starts:
        told = start.options.get("users")
        own = start.options.get("profile_options")
        thinks = start.options.get("think_s") or (isinstance(own, dict) and any(value and "think" in name for name, value in own.items()))
        if thinks or start.options.get("stages") or start.options.get("requests") or start.options.get("scheduled") or not isinstance(told, int):
            return 0
        users += told
    return users if not rows.outcome_in(REJECTIONS).any() else 0


def _lengths(rows: Rows) -> dict[tuple[str, int], tuple[int, int]]:
    """Return what the first requests of a load were planned with: equal seeds plan equal lengths, however fast they were answered."""
    import numpy as np

    known = (rows.number < _COMPARED_REQUESTS) & np.isfinite(rows.prompt_planned) & np.isfinite(rows.output_planned)
    columns = (rows.lane, rows.number, rows.prompt_planned, rows.output_planned)
    return {
        (rows.lanes[int(lane)], int(number)): (int(prompt), int(output))
        for lane, number, prompt, output in zip(*(column[known] for column in columns), strict=True)
    }


def _declared(record: RunRecord) -> set[str]:
    names = str(record.settings.get("expect_change", {}).get("value", "")).split(",")
    return {name.strip().strip("-").lower().replace("-", "_") for name in names}


def _sharing_meant(record: RunRecord, frame: Frame) -> bool:
    """Return whether prompts repeat on purpose: an option of the profile whose name says shared or prefix and that is not off, or a change of the
    prefix cache that was declared, between servers that we started with an empty one."""
    if record.launch_id and _PREFIX_CACHE & _declared(record):
        return True
    options = {**record.options}
    for start in frame.starts:
        options.update(start.options)
    return any(bool(value) for name, value in options.items() if "shared" in name or "prefix" in name)


def _outside(record: RunRecord, rows: Rows) -> float:
    """Return by how many seconds requests lie outside the load's window, which two clocks that disagree would show."""
    if not len(rows) or not record.load_started_wall_s:
        return 0.0
    early = record.load_started_wall_s - float(rows.sent_s.min())
    late = float(rows.end_s.max()) - record.load_ended_wall_s
    backward = float((rows.sent_s - rows.end_s).max())  # ended before it was sent
    return max(early, late, backward, 0.0)


def _restarts(record: RunRecord, series: Sequence[Series], counters: dict[str, Growth]) -> list[str]:
    import numpy as np

    found = [f"the counter {name} fell" for name, growth in counters.items() if growth.resets]
    for index, one in enumerate(series):
        starts = one.column("start_time")
        known = [float(v) for v in starts[np.isfinite(starts)]]
        for side in (record.before, record.after):
            value = side[index].value("start_time") if index < len(side) else None
            if isinstance(value, Reading):
                known.append(value.number())
        if known and max(known) - min(known) > 2.0:
            found.append(f"its start time moved by {max(known) - min(known):.0f} s")
    return found


def _moved(record: RunRecord, series: Sequence[Series]) -> list[str]:
    import numpy as np

    found = []
    for before, after in zip(record.before, record.after, strict=False):
        for name in _FIXED:
            left, right = before.value(name), after.value(name)
            if isinstance(left, Reading) and isinstance(right, Reading) and left.value != right.value:
                found.append(f"{name} {left.value} before and {right.value} after")
    for one in series:
        for name in _FIXED:
            column = one.columns.get(name)
            if column is not None and len(known := column[np.isfinite(column)]) and known.min() != known.max():
                found.append(f"{name} between {known.min():g} and {known.max():g}")
    return list(dict.fromkeys(found))


def _foreign(rows: Rows, frame: Frame, seen: Levels, load: Payload, window: Window) -> list[str]:
    """Return what shows requests that are not ours: more finished, more tokens or more running than our log explains."""
    import numpy as np

    limits = Limits()
    held = ~rows.outcome_in(REFUSED)
    ours = int(held.sum())
    found = []
    finished, prompts = seen.counters["finished"].value, seen.counters["prompt_tokens"].value
    # the load asks the server a few things before its first request, and the last of them may end after the last poll before it
    spent = [note.values for note in frame.notes if note.subject == "prepared"]
    asked, asked_tokens = (sum(values.get(name, 0.0) for values in spent) for name in ("requests", "prompt_tokens"))
    if isinstance(finished, Reading):
        # three more may be asked beside the load: one that makes an idle engine publish its gauges
        if finished.number() - ours > 3.0 + asked + limits.foreign_share * ours:
            found.append(f"it finished {finished.number():.0f} requests in the window, and {ours} were ours")
    elif isinstance(prompts, Reading):
        sent = float(np.nansum(rows.prompt[held]))
        if prompts.number() - sent > 64.0 + asked_tokens + limits.foreign_share * sent:
            found.append(f"it processed {prompts.number():,.0f} prompt tokens in the window, and {sent:,.0f} were ours")
    busy = seen.columns["running"] + np.nan_to_num(seen.columns["waiting"])
    inside = (seen.wall_s >= window.since_s) & (seen.wall_s <= window.until_s) & np.isfinite(busy)
    moments = seen.wall_s[inside]
    if len(moments):
        # a server counts a request a little before and after the client does; a second around each sample covers that
        most = np.max([load.live(moments + shift) for shift in (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)], axis=0)
        extra = busy[inside] - most > 0.5
        if extra.sum() >= 3 and extra.mean() > limits.foreign_share:
            worst = int(np.argmax(busy[inside] - most))
            found.append(f"it had {busy[inside][worst]:.0f} requests at a moment when we had {most[worst]:.0f}")
    return found
