"""Sessions made for the tests of the report: Runs on disk as a measurement leaves them, with figures as vLLM and llama.cpp show them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import (
    SCHEMA_VERSION,
    ConfigChange,
    GateRecord,
    LoadEnd,
    LoadStart,
    QualityRow,
    RequestRow,
    RunRecord,
    SnapshotRecord,
    TelemetryRow,
    ValueRecord,
    VerdictRecord,
)
from pytest_kvcache.runfolder import Run, encode_line, write_run
from pytest_kvcache.settings import Settings

STARTED_S = 1_780_000_000.0


@dataclass(frozen=True)
class Server:
    """What a made server is: its engine, how its pool is counted, and how fast it is."""

    engine: str = "vllm"
    version: str = "0.32.0"
    model: str = "meta-llama/Llama-3.1-8B-Instruct"
    kv_dtype: str = "bfloat16"
    blocks: int = 27_913
    block_size: int = 16
    seats: int = 256
    max_model_len: int = 32_768
    bytes_per_token: int = 131_072
    command: tuple[str, ...] = ("vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--port", "8000")
    embedded: bool = False

    @property
    def counts_tokens(self) -> bool:
        return self.engine == "llamacpp"

    def config(self) -> dict[str, Value]:
        source = "vllm:cache_config_info" if self.engine == "vllm" else "/props"
        null = 0 if self.counts_tokens else 1
        values: dict[str, Value] = {
            "pool_tokens": Reading(float(self.blocks * self.block_size), "tokens", source),
            "pool_bytes": Reading(float(self.blocks * self.block_size * self.bytes_per_token), "bytes", "start-up log"),
            "max_model_len": Reading(float(self.max_model_len), "tokens", "/v1/models"),
            "max_num_seqs": Reading(float(self.seats), "requests", source),
            "kv_dtype": Reading(self.kv_dtype, "", source),
            "prefix_caching": Reading(True, "", source),
        }
        if self.counts_tokens:
            values |= {name: Missing("llama.cpp has no blocks", cannot_happen=True) for name in ("pool_blocks", "usable_blocks", "block_size")}
            values["gpu_memory_utilization"] = Missing("llama.cpp has no such setting", cannot_happen=True)
        else:
            values["pool_blocks"] = Reading(float(self.blocks), "blocks", source)
            values["usable_blocks"] = Reading(float(self.blocks - null), "blocks", "pool_blocks - 1")
            values["block_size"] = Reading(float(self.block_size), "tokens", source)
            values["gpu_memory_utilization"] = Reading(0.9, "ratio", source)
        return values


LLAMACPP = Server(
    engine="llamacpp", version="b11434", model="recall", kv_dtype="f16", blocks=16_384, block_size=1, seats=4, max_model_len=4_096, bytes_per_token=2_048,
    command=("llamacpp", "--kv-type", "f16", "--ctx", "16384", "--slots", "4"), embedded=True,
)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """A made load: users that send one request after another, with lengths in tokens."""

    lane: str
    users: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    duration_s: float = 30.0
    rejected: Mapping[str, float] = ()  # type: ignore[assignment]


LOADS = {
    "normal": Load("normal", 48, (300, 1_800), (96, 320)),
    "longctx": Load("longctx", 24, (12_000, 26_000), (120, 260)),
    "nearmax": Load("nearmax", 6, (32_200, 32_500), (64, 128)),
}
SMALL_LOADS = {
    "normal": Load("normal", 4, (60, 420), (24, 64), 6.0),
    "longctx": Load("longctx", 4, (1_800, 3_200), (24, 48), 6.0),
    "nearmax": Load("nearmax", 2, (3_900, 4_000), (16, 32), 6.0),
}


def make_run(
    session: Path,
    number: int,
    server: Server,
    load: Load,
    *,
    side: str = "",
    window: int = 0,
    hz: float = 10.0,
    gap: tuple[float, float] | None = None,
    change: Callable[[RunRecord], RunRecord] | None = None,
) -> Run:
    """Write one load Run of a made server into ``session/runs`` and return it. ``gap`` is a stretch of seconds with no sample."""
    folder = session / "runs" / f"{number}-{f'{side}-' if side == 'before' else ''}{load.lane}"
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(f"{load.lane}-{window}")
    start = STARTED_S + number * 60
    rows, samples, preempted = _simulate(server, load, dice, start, hz)
    lines = [encode_line(LoadStart(start, load.lane, seed=window + 1, argv=["locust", "-f", f"{load.lane}.py"]))]
    lines += [encode_line(row) for row in rows]
    lines.append(encode_line(LoadEnd(start + load.duration_s, len(rows), "duration", cpu_s=1.9, lag_p99_s=0.002, lag_max_s=0.006)))
    (folder / "requests.jsonl").write_bytes(b"".join(lines))
    missed = [TelemetryRow(s.wall_s, error="timed out") if gap and gap[0] <= s.wall_s - start < gap[1] else s for s in samples]
    (folder / "telemetry.jsonl").write_bytes(b"".join(encode_line(s) for s in missed))
    (folder / "metrics-before.prom").write_text("vllm:kv_cache_usage_perc 0.0\n")
    end = max([row.end_s for row in rows], default=start + load.duration_s)
    config = {name: ValueRecord.of(value) for name, value in server.config().items()}
    idle = _state(server, 0, 0, 0)
    sent = float(sum(row.prompt_tokens or 0 for row in rows))
    counters = {
        "preemptions": float(preempted),
        "prefix_hits": 0.0,
        "finished": float(len(rows)),
        "prompt_tokens": sent,
        "generation_tokens": sent / 8,
    }

    def snapshot(wall_s: float, share: int) -> SnapshotRecord:
        values = {name: ValueRecord(value, "", "made", wall_s) for name, value in idle.items()}
        values |= {name: ValueRecord(value * share, "", "made", wall_s) for name, value in counters.items()}
        values["rejections"] = ValueRecord(missing=f"{server.engine} has no limit of its own", cannot_happen=True)
        if server.counts_tokens:
            values["preemptions"] = ValueRecord(missing="llama.cpp never preempts", cannot_happen=True)
        return SnapshotRecord(server.engine, wall_s, "http://127.0.0.1:8000", server.version, {**config, **values})

    record = RunRecord(
        SCHEMA_VERSION, f"made-{number}", load.lane, side=side, window=window, engine=server.engine, engine_version=server.version, embedded=server.embedded,
        owned=True, model=server.model, endpoints=["http://127.0.0.1:8000"], launch_command=list(server.command), started_wall_s=start - 2,
        ended_wall_s=end + 2, load_started_wall_s=start, load_ended_wall_s=end,
        settings=Settings().provenance() | {"users": {"value": load.users, "source": "command line"}}, config=config, before=[snapshot(start - 1, 0)],
        after=[snapshot(end + 1, 1)], versions={"pytest-kvcache": "0.1.0", server.engine: server.version}, machine=MACHINE,
        provenance={"image": "registry.example/vllm:0.32.0"}, seed=window + 1, workload=f"{load.lane}{window}".encode().hex()[:16],
        cache_state="prompts never sent before", sample_hz=hz, load_exit=0, options={"nonce": "x", "users": load.users},
    )  # fmt: skip
    return write_run(folder, change(record) if change else record)


MACHINE: dict[str, Any] = {
    "system": "Linux-6.8.0-x86_64-with-glibc2.36",
    "machine": "x86_64",
    "cores": 26,
    "memory_bytes": 216 << 30,
    "python": "3.11.9",
}


def _state(server: Server, used: int, running: int, waiting: int) -> dict[str, float]:
    usable = server.blocks - (0 if server.counts_tokens else 1)
    unit = "tokens" if server.counts_tokens else "blocks"
    return {
        f"used_{unit}": float(used),
        f"free_{unit}": float(usable - used),
        "usage": used / usable,
        "running": float(running),
        "waiting": float(waiting),
        "waiting_capacity": float(waiting),
    }


def _simulate(server: Server, load: Load, dice: random.Random, start: float, hz: float) -> tuple[list[RequestRow], list[TelemetryRow], int]:
    """Play users against a pool in steps of 20 ms: a request waits until its prompt fits, then fills and decodes."""
    step, preempted, number = 0.02, 0, 0
    usable = server.blocks - (0 if server.counts_tokens else 1)
    rows: list[RequestRow] = []
    samples: list[TelemetryRow] = []
    waiting: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    idle = [0.3 * i / load.users for i in range(load.users)]
    next_sample = -0.5

    def blocks(request: dict[str, Any]) -> int:
        return int(-(-request["tokens"] // server.block_size))

    now = next_sample
    while now < load.duration_s + 1.0 or ((running or waiting) and now < load.duration_s + 60.0):
        while idle and idle[0] <= now < load.duration_s - 2.5:
            idle.pop(0)
            waiting.append(
                {"sent": now, "prompt": dice.randint(*load.prompt), "output": dice.randint(*load.output), "tokens": 0.0, "first": None, "id": number}
            )
            number += 1
        used = sum(map(blocks, running))
        while waiting and len(running) < server.seats and used + waiting[0]["prompt"] // server.block_size + 8 <= usable:
            request = waiting.pop(0)
            request["ready"] = now + 0.03 + request["prompt"] / 60_000
            running.append(request)
            used += request["prompt"] // server.block_size
        for request in list(running):
            if now < request["ready"]:
                request["tokens"] = min(request["prompt"], request["tokens"] + 60_000 * step)
                continue
            request["first"] = request["first"] or now
            request["tokens"] = request["prompt"] + (now - request["first"]) * 55
            if request["tokens"] >= request["prompt"] + request["output"]:
                running.remove(request)
                outcome = next((name for name, share in dict(load.rejected).items() if dice.random() < share), "ok")
                rows.append(_row(request, load, start, now, outcome))
                idle.append(now + 0.05)
        used = sum(map(blocks, running))
        if used > usable and running:
            victim = running.pop()
            victim["tokens"], victim["first"] = 0.0, None
            waiting.insert(0, victim)
            preempted += 1
        if now >= next_sample:
            samples.append(TelemetryRow(start + now, values=_state(server, min(used, usable), len(running), len(waiting)), read_s=0.002))
            next_sample += 1 / hz
        now = round(now + step, 6)
    return rows, samples, preempted


def _row(request: dict[str, Any], load: Load, start: float, now: float, outcome: str) -> RequestRow:
    ok = outcome == "ok"
    return RequestRow(
        request["id"], load.lane, start + request["sent"], start + request["sent"] + 0.001, start + now, outcome, first_token_s=start + request["first"],
        status=200 if ok else 503, prompt_tokens_planned=request["prompt"], prompt_tokens=request["prompt"], output_tokens_planned=request["output"],
        completion_tokens=request["output"], chunks=request["output"], longest_gap_s=0.04 + (request["id"] % 7) * 0.01, finish_reason="length",
        error="" if ok else "the queue is full", length_source="token ids",
    )  # fmt: skip


def make_quality(session: Path, number: int, server: Server, *, side: str = "", fails: Mapping[int, int] | None = None) -> Run:
    """Write a quality Run: 12 items at each length, of which ``fails[length]`` are answered wrong."""
    folder = session / "runs" / f"{number}-{f'{side}-' if side == 'before' else ''}quality"
    folder.mkdir(parents=True, exist_ok=True)
    lengths = (64, 128, 256, 512, 1_024, 2_048)
    wrong = dict(fails or {})
    rows = [
        QualityRow(
            f"needle-{length}-{i}", i >= wrong.get(length, 0), STARTED_S + i, length_tokens=length, depth=i / 12, prompt_tokens=length, latency_s=0.2
        )
        for length in lengths
        for i in range(12)
    ]
    (folder / "quality.jsonl").write_bytes(b"".join(map(encode_line, rows)))
    config = {name: ValueRecord.of(value) for name, value in server.config().items()}
    return write_run(
        folder,
        RunRecord(
            SCHEMA_VERSION, f"made-{number}", "quality", side=side, engine=server.engine, engine_version=server.version, embedded=server.embedded, owned=True,
            model=server.model, endpoints=["http://127.0.0.1:8000"], launch_command=list(server.command), started_wall_s=STARTED_S + number * 60,
            ended_wall_s=STARTED_S + number * 60 + 20, settings=Settings().provenance(), config=config, workload="needle-72", machine=MACHINE,
        ),
    )  # fmt: skip


def ratio(value: float) -> ValueRecord:
    return ValueRecord(value, "ratio", "made")


def count(value: float, unit: str = "requests") -> ValueRecord:
    return ValueRecord(value, unit, "made")


def verdict_of(word: str, folder: Path, gates: list[GateRecord], server: Server, **more: Any) -> VerdictRecord:
    """Return a verdict as the session writes it."""
    return VerdictRecord(
        SCHEMA_VERSION, word, folder.name, more.pop("name", "fp8-kv"), server.engine, server.version, server.model, server.embedded,
        started_wall_s=STARTED_S, ended_wall_s=STARTED_S + 412, gates=gates, versions={"pytest-kvcache": "0.1.0", "python": "3.11.9", server.engine: server.version},
        machine=MACHINE, **more,
    )  # fmt: skip


BESIDE = "pool 446,608 tokens; 1,204 blocks free at the tightest; 21 requests running, mean length 19,530 tokens"


def single_gates() -> list[GateRecord]:
    """Gates of a session on one vLLM server, one of which failed."""
    where = "runs/2-longctx/telemetry.jsonl"
    return [
        GateRecord("peak_usage", "usage.peak", "PASS", "peak KV usage 12.9 % is within 95 %", "ratio", "normal", value=ratio(0.129), bound=0.95, bound_text="≤ 95.0 %", evidence="runs/1-normal/telemetry.jsonl", beside="pool 446,608 tokens; 24,310 blocks free at the tightest; 48 requests running, mean length 1,180 tokens"),
        GateRecord("peak_usage", "usage.peak", "FAIL", "peak KV usage 99.9 % is above 95 %", "ratio", "longctx", value=ratio(0.999), bound=0.95, bound_text="≤ 95.0 %", evidence=where, beside=BESIDE),
        GateRecord("free_blocks", "free_blocks.min", "FAIL", "0 blocks were free at the tightest moment, 64 are asked for", "blocks", "longctx", value=count(0, "blocks"), bound=64, bound_text="≥ 64 blocks", evidence=where),
        GateRecord("free_blocks", "free_blocks.min", "PASS", "24,310 blocks were free", "blocks", "normal", value=count(24_310, "blocks"), bound=64, bound_text="≥ 64 blocks"),
        GateRecord("no_rejections", "rejections", "PASS", "0 of 512 requests were rejected", "requests", "normal", value=count(0), bound=0, bound_text="= 0", high=0.0058, method="exact one-sided 95 % bound (binomial)"),
        GateRecord("no_preemptions", "preemptions", "INCONCLUSIVE", "the counter was not read", "events", "nearmax", value=ValueRecord(missing="vllm:num_preemptions_total was not there"), bound=0, bound_text="= 0"),
        GateRecord("returns_to_idle", "idle.usage", "PASS", "everything was given back", "ratio", "longctx", value=ratio(0.0), bound=0, bound_text="= 0 %"),
        GateRecord("quality", "quality.pass_rate", "PASS", "72 of 72 items were answered", "ratio", value=ratio(1.0), bound=0.98, bound_text="≥ 98.0 %", low=0.9501, high=1.0, beside="72 of 72 items", method="Clopper-Pearson 95 %"),
        GateRecord("no_swapping", "swapped", "PASS", "vLLM V1 does not swap", applicable=False),
    ]  # fmt: skip


def compare_gates(quality_after: float = 1.0, verdict: str = "PASS") -> list[GateRecord]:
    """Gates of a comparison, with intervals."""
    welch = "non-inferiority by Welch's t interval over windows, one-sided 95 %"
    lost = round(72 * (1 - quality_after))
    return [
        GateRecord("usage_not_worse", "usage.hottest", "PASS", "98.6 % before, 49.9 % after (means of 5 and 5 windows): at most 0.0 % of the pool higher (95 %), and 2.0 % of the pool may be; the pool was 27,913 blocks and is 55,825 blocks", "ratio", "longctx", before=ratio(0.986), after=ratio(0.499), bound=0.02, bound_text="at most 2.0 % of the pool higher", low=-0.51, high=-0.46, method=welch, beside="pool 55,824 blocks of 16 tokens; 27,940 blocks free at the tightest; 24 requests running at the peak, mean length 19,480 tokens", side="after"),
        GateRecord("free_not_worse", "free_blocks.tightest", "PASS", "1,204 blocks before, 27,940 blocks after (means of 5 and 5 windows)", "blocks", "longctx", before=count(1_204, "blocks"), after=count(27_940, "blocks"), bound=558, bound_text="at most 558 blocks lower", low=-27_300, high=-26_100, method=welch, side="after"),
        GateRecord("ttft_not_worse", "ttft.p50", "INCONCLUSIVE", "81.0 ms before, 94.0 ms after (means of 5 and 5 windows): at most 33.0 % higher (95 %), and 25.0 % may be; about 9 windows a side would decide it (there are 5 and 5)", "ratio", "normal", before=ValueRecord(0.081, "s"), after=ValueRecord(0.094, "s"), bound=0.25, bound_text="at most 25.0 % higher", low=-0.012, high=0.33, method=welch + " of logarithms", side="after"),
        GateRecord("throughput_not_worse", "throughput", "PASS", "2,410 tokens/s before, 2,388 tokens/s after (means of 5 and 5 windows): at most 3.4 % lower (95 %), and 10.0 % may be", "ratio", "normal", before=count(2_410.0, "tokens/s"), after=count(2_388.0, "tokens/s"), bound=0.1, bound_text="at most 10.0 % lower", low=-0.015, high=0.034, method=welch + " of logarithms", side="after"),
        GateRecord("rejections_not_worse", "rejections", "PASS", "0 of 419 requests before, 0 of 427 after: none after the change; at most 0.7 % of requests (95 %)", "requests", "longctx", before=count(0), after=count(0), bound=1.5, bound_text="at most 1.50 times the rate before, or none", method="exact conditional binomial test of two rates, one-sided 95 %", side="after"),
        GateRecord("quality_not_worse", "quality.pass_rate", verdict, f"100.0 % of 72 paired items passed before, {quality_after * 100:.1f} % after: {lost} lost, 0 gained", "ratio", "quality", before=ratio(1.0), after=ratio(quality_after), bound=0.02, bound_text="at most 2.0 % of the items lost", high=min(1 - quality_after + 0.04, 1.0), method="paired items, exact one-sided McNemar test, 95 %", evidence="runs/5-quality", side="after"),
        GateRecord("preemptions_not_worse", "preemptions", "PASS", "does not apply: llama.cpp never preempts", applicable=False),
    ]  # fmt: skip


def fp8(server: Server) -> Server:
    """Return the server with an fp8 cache: twice the pool."""
    return replace(
        server,
        kv_dtype="fp8",
        blocks=server.blocks * 2 - 1,
        bytes_per_token=server.bytes_per_token // 2,
        command=(*server.command, "--kv-cache-dtype", "fp8"),
    )


DIFF = [
    ConfigChange("kv_dtype", "bfloat16", "fp8"),
    ConfigChange("pool_blocks", "27,913 blocks", "55,825 blocks"),
    ConfigChange("pool_tokens", "446,608 tokens", "893,200 tokens"),
]
