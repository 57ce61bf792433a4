"""Run folders made by arithmetic: a server with a pool of blocks, and clients that press it, every figure known beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvcache.quantities import QUANTITIES, Missing, Reading
from pytest_kvcache.records import (
    SCHEMA_VERSION,
    LoadEnd,
    LoadNote,
    LoadStart,
    QualityRow,
    RequestRow,
    RunRecord,
    SnapshotRecord,
    TelemetryRow,
    ValueRecord,
)
from pytest_kvcache.runfolder import Run, encode_line, write_run

T0 = 1_800_000_000.0
BLOCK = 16
USABLE = 127


def request(
    number: int, start_s: float, *, prompt: int = 100, output: int = 50, ttft_s: float = 0.1, length_s: float = 0.5, **changes: Any
) -> RequestRow:
    """Return a request that starts ``start_s`` seconds into the load and was answered in full."""
    row = RequestRow(
        id=number,
        lane="normal",
        intended_s=T0 + start_s,
        sent_s=T0 + start_s,
        first_token_s=T0 + start_s + ttft_s,
        end_s=T0 + start_s + length_s,
        outcome="ok",
        status=200,
        prompt_tokens_planned=prompt,
        prompt_tokens=prompt,
        output_tokens_planned=output,
        completion_tokens=output,
        chunks=output,
        longest_gap_s=0.02,
        finish_reason="length",
    )
    return msgspec.structs.replace(row, **changes)


def closed_loop(users: int = 2, seconds: float = 4.0, length_s: float = 0.5, **changes: Any) -> list[RequestRow]:
    """Return the requests of users who each ask again as soon as they are answered."""
    per_user = int(seconds / length_s)
    rows = [request(0, i * length_s + 0.01 * user, length_s=length_s, **changes) for i in range(per_user) for user in range(users)]
    return [msgspec.structs.replace(row, id=number) for number, row in enumerate(rows)]


def refused(number: int, start_s: float, outcome: str, error: str = "", **changes: Any) -> RequestRow:
    """Return a request that was not served."""
    gone: dict[str, Any] = {
        "first_token_s": None,
        "completion_tokens": None,
        "prompt_tokens": None,
        "chunks": 0,
        "finish_reason": "",
        "longest_gap_s": 0.0,
    }
    return request(number, start_s, length_s=0.05, **{**gone, "outcome": outcome, "error": error, "status": 400, **changes})


def used_at(rows: Sequence[RequestRow], wall_s: float) -> tuple[int, int]:
    """Return the blocks held and the requests running at a moment, by the rule of a paged engine."""
    blocks = running = 0
    for row in rows:
        if row.first_token_s is None or not row.sent_s <= wall_s < row.end_s:
            continue
        running += 1
        share = max(0.0, wall_s - row.first_token_s) / (row.end_s - row.first_token_s)
        blocks += math.ceil(((row.prompt_tokens or 0) + share * (row.completion_tokens or 0)) / BLOCK)
    return blocks, running


def sample(rows: Sequence[RequestRow], wall_s: float, *, usable: int = USABLE, **values: Any) -> TelemetryRow:
    """Return what the server says at a moment."""
    blocks, running = used_at(rows, wall_s)
    told = {"usage": blocks / usable, "used_blocks": float(blocks), "free_blocks": float(usable - blocks), "running": float(running), "waiting": 0.0}
    return TelemetryRow(wall_s=wall_s, values={**told, "preemptions": 0.0, "rejections": 0.0, "start_time": T0 - 100, **values}, read_s=0.002)


def snapshot(wall_s: float, *, usable: int = USABLE, missing: Sequence[str] = (), never: Sequence[str] = (), **values: Any) -> SnapshotRecord:
    """Return an idle server read once; ``missing`` and ``never`` name quantities that it does not tell or cannot have."""
    told: dict[str, Any] = {
        "pool_blocks": usable + 1, "usable_blocks": usable, "block_size": BLOCK, "pool_tokens": (usable + 1) * BLOCK, "pool_bytes": (usable + 1) * BLOCK * 512,
        "max_model_len": 1024, "max_num_seqs": 8, "kv_dtype": "auto", "usage": 0.0, "used_blocks": 0, "free_blocks": usable, "running": 0, "waiting": 0,
        "preemptions": 0, "rejections": 0, "start_time": T0 - 100, "prefix_hits": 0,
    }  # fmt: skip
    told.update(values)
    records = {name: ValueRecord.of(Reading(value, QUANTITIES[name].unit, f"series {name}", wall_s)) for name, value in told.items()}
    records.update({name: ValueRecord.of(Missing(f"{name} is not told")) for name in missing})
    records.update({name: ValueRecord.of(Missing(f"{name} cannot happen here", cannot_happen=True)) for name in never})
    return SnapshotRecord("vllm", wall_s, endpoint="http://127.0.0.1:1", version="0.32.0", quantities=records)


@dataclass
class MadeRun:
    """What a Run's folder holds; change a field and ``write`` it."""

    rows: list[RequestRow] = field(default_factory=closed_loop)
    samples: list[TelemetryRow] | None = None
    before: list[SnapshotRecord] = field(default_factory=lambda: [snapshot(T0 - 0.5)])
    after: list[SnapshotRecord] | None = None
    notes: list[LoadNote] = field(default_factory=list)
    end: LoadEnd | None = None
    no_end: bool = False
    quality: list[QualityRow] = field(default_factory=list)
    hz: float = 10.0
    options: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Run:
        """Write the folder and return the Run."""
        folder.mkdir(parents=True, exist_ok=True)
        last = max((row.end_s for row in self.rows), default=T0)
        samples = self.samples
        if samples is None:
            samples = [sample(self.rows, T0 - 0.3 + i / self.hz) for i in range(int((last - T0 + 0.8) * self.hz))]
        end = self.end or LoadEnd(last + 0.1, rows=len(self.rows), reason="duration", lag_p99_s=0.001)
        lines: list[msgspec.Struct] = [
            LoadStart(T0 - 0.1, profile="normal", options=self.options),
            *self.rows,
            *self.notes,
            *([] if self.no_end else [end]),
        ]
        if self.rows or self.record.get("profile") != "quality":
            (folder / "requests.jsonl").write_bytes(b"".join(map(encode_line, lines)))
            (folder / "telemetry.jsonl").write_bytes(b"".join(map(encode_line, samples)))
        if self.quality:
            (folder / "quality.jsonl").write_bytes(b"".join(map(encode_line, self.quality)))
        loaded = self.record.get("profile") != "quality"
        record = RunRecord(
            schema_version=SCHEMA_VERSION,
            id=folder.name,
            profile="normal",
            engine="vllm",
            engine_version="0.32.0",
            model="m",
            endpoints=[s.endpoint for s in self.before],
            load_started_wall_s=T0 - 0.2 if loaded else 0.0,
            load_ended_wall_s=last + 0.2 if loaded else 0.0,
            config={n: r for n, r in self.before[0].quantities.items() if QUANTITIES[n].kind == "config"} if self.before else {},
            before=self.before,
            after=[snapshot(last + 0.6)] if self.after is None else self.after,
            workload="w",
            sample_hz=self.hz if loaded else 0.0,
            settings={"api": {"value": "completions", "source": "default"}},
        )
        return write_run(folder, msgspec.structs.replace(record, **self.record))


def quality_rows(passed: int, items: int = 300, length: int = 64) -> list[QualityRow]:
    """Return the rows of a quality set of which the first ``passed`` passed."""
    return [QualityRow(f"recall-{length}-{i}", i < passed, length_tokens=length, expected_hash=f"h{i}", answer_hash="a") for i in range(items)]


def quality_run(passed: int, items: int = 300, **record: Any) -> MadeRun:
    """Return a Run in which only quality items were asked."""
    return MadeRun(rows=[], quality=quality_rows(passed, items), after=[], record={"profile": "quality", **record})
