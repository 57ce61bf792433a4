"""The frozen records that cross files. How a Run's folder is read and written stands in runfolder.py.

A session is a folder ``<utc>-<name>-<short id>/`` with ``report.html``, ``summary.md``, ``verdict.json`` and
``runs/<n>-<profile>/``. A Run is one of those: ``run.json`` (RunRecord), ``telemetry.jsonl`` (TelemetryRow),
``requests.jsonl`` (RequestRow and its frame), ``quality.jsonl`` (QualityRow), ``agreement.jsonl`` (AgreementRow), ``metrics-before.prom``,
``metrics-after.prom`` and ``server.log``.

Schema history: 1 first layout.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pytest_kvcache.findingrecords import FindingRecord
from pytest_kvcache.loadrecords import LoadEnd, LoadLine, LoadNote, LoadStart, RequestRow
from pytest_kvcache.qualityrecords import AgreementRow, PressureRecord, QualityRow, QualitySummary
from pytest_kvcache.quantities import Missing, Reading, Value

__all__ = [
    "SCHEMA_VERSION",
    "AgreementRow",
    "ConfigChange",
    "FindingRecord",
    "GateRecord",
    "GateVerdict",
    "GpuRow",
    "LoadEnd",
    "LoadLine",
    "LoadNote",
    "LoadStart",
    "MemoryRow",
    "PressureRecord",
    "QualityRow",
    "QualitySummary",
    "RequestRow",
    "RunRecord",
    "SnapshotRecord",
    "StartMemory",
    "TelemetryRow",
    "ValueRecord",
    "Verdict",
    "VerdictRecord",
]  # fmt: skip

SCHEMA_VERSION = 1
Verdict = Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["PASS", "FAIL", "INCONCLUSIVE", "INVALID"]})]
GateVerdict = Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["PASS", "FAIL", "INCONCLUSIVE", "INVALID", "NOT_APPLICABLE"]})]


class ValueRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Reading or a Missing as a file holds it: ``missing`` is the reason, and then there is no value."""

    value: float | str | bool | None = None
    unit: str = ""
    source: str = ""
    wall_s: float = 0.0
    missing: str | None = None
    cannot_happen: bool = False

    @classmethod
    def of(cls, value: Value) -> ValueRecord:
        """Return the record of a Reading or Missing."""
        if isinstance(value, Missing):
            return cls(missing=value.reason, cannot_happen=value.cannot_happen)
        return cls(value.value, value.unit, value.source, value.wall_s)

    def to_value(self) -> Value:
        """Return the Reading or Missing that was recorded."""
        if self.missing is not None or self.value is None:
            return Missing(self.missing or "recorded without a value", self.cannot_happen)
        return Reading(self.value, self.unit, self.source, self.wall_s)


class SnapshotRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One server read once: canonical quantities for the whole server, and per engine rank where it has several."""

    engine: str
    wall_s: float
    endpoint: str = ""
    version: str = ""
    quantities: dict[str, ValueRecord] = {}
    per_rank: dict[str, dict[str, ValueRecord]] = {}
    notes: list[str] = []

    def value(self, name: str) -> Value:
        """Return the quantity called ``name``; Missing where the snapshot does not hold it."""
        record = self.quantities.get(name)
        return record.to_value() if record is not None else Missing(f"{name} was not read")


class GpuRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory of one card at one moment, in bytes; ``processes`` maps pid to bytes where NVML tells.

    ``host`` is the node's name where another machine told it (a DCGM exporter), and ``labels`` what it says of the card's users
    (namespace, pod, container, MIG instance).
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int = 0
    processes: dict[str, int] = {}
    host: str = ""
    labels: dict[str, str] = {}


class MemoryRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory of the machine and of one server's processes on it, in bytes, at one moment.

    ``total_bytes`` and ``available_bytes`` are the machine's own (available: what could be had without swapping), ``limit_bytes`` a
    limit of the control group (0: none). ``processes`` maps the pid of each process of the server to its resident memory with pages that
    several share counted once, and ``cpu_s`` is the CPU time that those processes had used up to then.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int = 0
    processes: dict[str, int] = {}
    cpu_s: float = 0.0


class StartMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the start-up log of one worker (one card, one device) states of memory, by part.

    Parts in bytes: ``total``, ``free_at_start``, ``budget`` (the share of the card that it may use), ``weights``, ``consumed`` (weights and what
    lies outside the framework together, where the log tells no more), ``activation``, ``context`` (outside the framework), ``graphs``,
    ``graphs_planned`` (kept for them when the pool was sized), ``workspace``, ``pool`` (in use), ``pool_allowed`` (what this worker had room for) and
    ``by_hand`` (the pool that the user asked for); ``blocks`` of a pool that was overridden and ``blocks_allowed``; ``pool_tokens`` of the engine; ``utilization``, a ratio;
    ``tensor_parallel`` and ``pipeline_parallel``.
    """

    worker: str = ""
    pid: int | None = None
    endpoint: int = 0
    parts: dict[str, ValueRecord] = {}


class TelemetryRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample of one server. ``values`` holds numeric quantities that were there; ``error`` says why a read failed.

    ``wall_s`` is Unix seconds on a monotonic clock (wall time at start + monotonic seconds since), so that differences are
    durations and files of one machine join. ``ranks`` holds the numeric quantities of each engine rank, where there are several.
    ``gpus`` and ``memory`` come twice a second at most: the cards of this machine with the first endpoint, memory with each
    whose processes run on this machine.
    """

    wall_s: float
    endpoint: int = 0
    values: dict[str, float] = {}
    ranks: dict[str, dict[str, float]] = {}
    gpus: list[GpuRow] = []
    memory: MemoryRow | None = None
    read_s: float = 0.0
    error: str = ""


class RunRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """run.json: everything about a Run that is not a time series. Lines are files beside it.

    ``settings`` maps each option to ``{"value", "source"}``; ``config`` is the effective configuration read back from the
    server; ``workload`` is a hash over profile, seed and arrivals, equal on both sides of a comparison. ``launch_id`` is another for
    each start of a server of ours; ``planned_windows`` is how many windows of this profile the side was to have, ``pilot_windows`` of how many first ones the spread chose that;
    ``kv_groups`` are the model's cache groups where its config.json was named (analysis/holding.py: Group), ``model_parts`` what follows from its files
    (analysis/modelfile.py: Model); ``clock_step_s`` is by how much the wall clock moved against the monotonic one meanwhile.
    ``start_memory`` is what the start-up logs state of memory, ``variant`` the setting of a sweep (``block-size=32``), ``pressure`` what the items
    asked under pressure were asked under. ``imported`` holds what another load tool, ``imported_from``, told; then there are no series.
    """

    schema_version: int
    id: str
    profile: str
    side: str = ""
    window: int = 0
    engine: str = ""
    engine_version: str = ""
    embedded: bool = False
    owned: bool = False
    model: str = ""
    endpoints: list[str] = []
    launch_command: list[str] = []
    started_wall_s: float = 0.0
    ended_wall_s: float = 0.0
    load_started_wall_s: float = 0.0
    load_ended_wall_s: float = 0.0
    settings: dict[str, dict[str, Any]] = {}
    config: dict[str, ValueRecord] = {}
    before: list[SnapshotRecord] = []
    after: list[SnapshotRecord] = []
    start_memory: list[StartMemory] = []
    variant: str = ""
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    seed: int = 0
    workload: str = ""
    cache_state: str = ""
    sample_hz: float = 0.0
    load_argv: list[str] = []
    load_exit: int | None = None
    options: dict[str, Any] = {}
    problems: list[str] = []
    notes: list[str] = []
    unmeasured: list[str] = []
    planned_windows: int = 0
    pilot_windows: int = 0
    kv_groups: list[dict[str, int]] = []
    model_parts: dict[str, ValueRecord] = {}
    launch_id: str = ""
    clock_step_s: float = 0.0
    pressure: list[PressureRecord] = []
    imported: dict[str, ValueRecord] = {}
    imported_from: str = ""


class GateRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One gate as judged. ``verdict`` is PASS, FAIL, INCONCLUSIVE or INVALID; one that cannot apply has ``applicable`` False.

    ``value`` is what was gated against ``bound`` (``bound_text`` as people read it); in a comparison ``before`` and ``after``
    stand beside it and ``low``/``high`` are the interval that was judged. ``beside`` holds the three numbers that a usage
    ratio is never shown without, ``better`` says by how much the side after is better where the interval shows that it is. ``evidence`` is a path inside the session folder, ``method`` names the test and its source.
    ``level`` is ``warn`` for a gate that decides nothing, ``rule`` says which line of a file of thresholds it was made from, ``lengths`` are the
    prompt lengths in tokens at which answers broke.
    """

    name: str
    quantity: str
    verdict: GateVerdict
    text: str
    unit: str = ""
    lane: str = ""
    test: str = ""
    side: str = ""
    value: ValueRecord | None = None
    before: ValueRecord | None = None
    after: ValueRecord | None = None
    bound: float | None = None
    bound_text: str = ""
    low: float | None = None
    high: float | None = None
    method: str = ""
    evidence: str = ""
    beside: str = ""
    better: str = ""
    applicable: bool = True
    level: str = ""
    rule: str = ""
    lengths: list[int] = []


class ConfigChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the difference between two effective configurations, as text."""

    name: str
    before: str
    after: str


class VerdictRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """verdict.json: the session's verdict and every gate it rests on."""

    schema_version: int
    verdict: Verdict
    session: str
    name: str = ""
    engine: str = ""
    engine_version: str = ""
    model: str = ""
    embedded: bool = False
    comparison: str = ""
    started_wall_s: float = 0.0
    ended_wall_s: float = 0.0
    gates: list[GateRecord] = []
    config_diff: list[ConfigChange] = []
    problems: list[str] = []
    notes: list[str] = []
    findings: list[FindingRecord] = []
    deselected: list[str] = []
    repeat: list[str] = []
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}
