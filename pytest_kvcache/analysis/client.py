"""Was the load client itself the bottleneck: how late it sent, how late its event loop was, and how busy its processes were."""

from __future__ import annotations

from typing import NamedTuple

from pytest_kvcache.analysis.rows import Frame, Rows
from pytest_kvcache.quantities import Missing, Reading, Value

CAP_NOTE = "in-flight cap"
CPU_NOTE = "cpu warning"
_SHORTEST_S = 2.0


class Client(NamedTuple):
    """``lag_p99_s`` is sent minus intended start; ``cpu_share`` is of one core, of the busiest load process (0: not known).

    ``cap`` is how many requests an open loop let in flight where arrivals had to wait for that, and ``held`` how many had to.
    """

    lag_p99_s: float
    loop_lag_p99_s: float
    loop_stall_s: float
    cpu_share: float
    cpu_warning: bool
    cap: int
    held: int


def read_client(rows: Rows, frame: Frame) -> Client:
    """Return what the rows and the notes of the load say of the client."""
    import numpy as np

    lag = rows.sent_s - rows.intended_s
    caps = [note.values for note in frame.notes if note.subject == CAP_NOTE]
    shares = [end.cpu_s / end.ran_s for end in frame.ends if end.ran_s >= _SHORTEST_S]
    return Client(
        # the value at or below the 99th percentile: among few requests the percentile itself is all but the latest one, a single stall
        float(np.quantile(lag, 0.99, method="lower")) if len(lag) else 0.0,
        # in a short window the 99th percentile of the loop's lag is its maximum, so that one stall would look like steady lag
        max((end.lag_p99_s for end in frame.ends if end.lag_p99_s < end.lag_max_s), default=0.0),
        max((end.lag_max_s for end in frame.ends), default=0.0),
        max(shares, default=0.0),
        any(note.subject == CPU_NOTE for note in frame.notes),
        int(sum(values.get("cap", 0.0) for values in caps)),
        int(sum(values.get("held", 0.0) for values in caps)),
    )


def client_values(client: Client, rows: Rows) -> dict[str, Value]:
    """Return the client's own lag and CPU by the names that conditions use."""
    log = "requests.jsonl"
    nothing = Missing("no request was sent")
    busy = Reading(client.cpu_share, "ratio", f"{log}: CPU time of the busiest load process over its run, 1 is one core")
    return {
        "client.lag_p99": Reading(client.lag_p99_s, "s", f"{log}: sent minus intended start, p99") if len(rows) else nothing,
        "client.loop_lag_p99": Reading(client.loop_lag_p99_s, "s", f"{log}: lag of the event loop, p99 of the worst load process"),
        "client.cpu_share": busy if client.cpu_share else Missing("the load was too short to tell, or kept no CPU time"),
        "client.held": Reading(client.held, "requests", f"{log}: arrivals that waited for --kv-max-in-flight"),
    }
