"""A gate as properties of its test: they travel through xdist and into JUnit XML."""

from __future__ import annotations

from pytest_kvcache.records import GateRecord
from pytest_kvcache.report.escape import plain
from pytest_kvcache.report.model import improvement, is_usage, show_interval, show_record


def properties(gate: GateRecord, *, embedded: bool = False) -> list[tuple[str, str]]:
    """Return ``(name, value)`` texts of one gate, without characters that XML cannot hold; empty values are left out.

    Names are ``kv.<gate>[<lane>].<part>``, so that several gates of one test stay apart. A usage ratio brings the numbers that it
    is never shown without, as ``beside``; ``embedded`` says that it was judged on the embedded engine.
    """
    stem = "kv." + plain(gate.name, 80).replace(" ", "_") + (f"[{plain(gate.lane, 40)}]" if gate.lane else "")
    parts = {
        "verdict": gate.verdict if gate.applicable else "not applicable",
        "engine": "EMBEDDED" if embedded else "",
        "quantity": gate.quantity,
        "value": show_record(gate.value),
        "before": show_record(gate.before),
        "after": show_record(gate.after),
        "bound": gate.bound_text,
        "better": improvement(gate),
        "interval": show_interval(gate),
        "beside": gate.beside or ("pool size, free space and running requests are in the report" if is_usage(gate) else ""),
        "method": gate.method,
        "text": gate.text,
        "evidence": gate.evidence,
    }
    return [(f"{stem}.{part}", text) for part, value in parts.items() if (text := plain(value))]
