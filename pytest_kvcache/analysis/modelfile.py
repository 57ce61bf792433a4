"""What follows from the model's files that the user names (``--kv-model-config``): its cache groups, its weights, and the bytes of one block.

A server's own log states weights and pool; without it they are computed, and say so. The layout is the one whose figures are the server's own
(block size, blocks of a longest request); where none is, that is told and the layout of the settings that are known counts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pytest_kvcache.analysis.holding import GROUPING, footprint_of, groups_of, planned_blocks
from pytest_kvcache.capacity.agreement import UNTOLD, adopted, check, settings_of
from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.layers import Architecture
from pytest_kvcache.capacity.layout import EngineShape, Layout
from pytest_kvcache.capacity.planner import plan
from pytest_kvcache.capacity.pool import lay_out
from pytest_kvcache.capacity.told import told
from pytest_kvcache.capacity.weighing import stage_shares, weigh
from pytest_kvcache.errors import CannotJudge, KvError
from pytest_kvcache.observe.inspecting import Inspection
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import RunRecord, SnapshotRecord, StartMemory, ValueRecord

RANKS, STAGES = (1, 2, 4, 8, 16), (1, 2, 4, 8)
_NUMBER = r"[ =]([0-9]{1,4})(?= |$)"
_TP = re.compile(rf"(?:^| )(?:--tensor-parallel-size|-tp|--tp-size|--tp|--tensor_parallel_size|--tp_size){_NUMBER}")
_PP = re.compile(rf"(?:^| )(?:--pipeline-parallel-size|-pp|--pp-size|--pp|--pipeline_parallel_size|--pp_size){_NUMBER}")


@dataclass(frozen=True)
class Model:
    """The cache groups of a model (holding.Group), and its ``parts`` as a Run's record holds them.

    ``weights`` and ``weights.spread`` are of the whole model, ``weights.ppM.S`` the share of stage S of M; ``block.tpN`` the bytes of one block on one of N GPUs, ``block.tpN.ppM.S`` on a GPU
    of stage S of M; ``layout`` says why the layout is not the server's own, and then there is no block.
    """

    groups: list[dict[str, int]]
    parts: dict[str, ValueRecord]


@dataclass(frozen=True)
class Split:
    """Over how many GPUs one engine is spread: tensor-parallel ranks, pipeline stages, and how that is known."""

    tp: int
    pp: int
    how: str

    @property
    def gpus(self) -> int:
        """The GPUs of one engine."""
        return self.tp * self.pp


def read_model(config: Path, server: SnapshotRecord) -> Model:
    """Return what the named files tell of the model that ``server`` serves. Raises UsageError or CannotJudge where they tell nothing at all."""
    architecture = read_architecture(config)
    parts: dict[str, ValueRecord] = {}
    try:
        found = weigh(config, architecture)
        source = f"{found.source}, over all GPUs"
        parts["weights"] = ValueRecord.of(Reading(float(found.total_bytes), "bytes", source))
        parts["weights.spread"] = ValueRecord.of(Reading(float(found.spread_bytes), "bytes", source))
    except KvError as error:
        parts["weights"] = ValueRecord.of(Missing(f"{error.what}; the folder with its safetensors would tell"))
    with contextlib.suppress(KvError):
        for pp in STAGES[1:]:
            for stage, share in enumerate(stage_shares(config, architecture, pp)):
                parts[f"weights.pp{pp}.{stage}"] = ValueRecord.of(Reading(share, "ratio", "layers of the stage, with embedding or output head"))
    if server.engine not in GROUPING:
        if isinstance(parts["weights"].to_value(), Missing):
            groups_of(config, server)  # says why nothing is told
        return Model([], parts)
    layout, why = _own_layout(config, server)
    if layout is not None:
        groups = [{name: int(value) for name, value in asdict(group).items() if value is not None} for group in footprint_of(layout).groups]
        return Model(groups, {**parts, **_blocks(architecture, layout.shape)})
    groups = groups_of(config, server)
    if why:
        parts["layout"] = ValueRecord.of(Missing(why))
        groups = groups if _possible(groups, server) else []
    else:
        parts.update(_blocks(architecture, _known_shape(server)))
    return Model(groups, parts)


def with_model(record: RunRecord, config: Path) -> RunRecord:
    """Return the record of a Run with what the named files tell. Raises what ``read_model`` raises."""
    import msgspec

    if not record.before:
        raise CannotJudge("the Run holds no reading of its server", where=record.id, hint="leave --model-config out")
    found = read_model(config, record.before[0])
    return msgspec.structs.replace(record, kv_groups=found.groups, model_parts=found.parts)


def _own_layout(config: Path, server: SnapshotRecord) -> tuple[Layout | None, str]:
    """Return the layout that reproduces the server's own figures, else why none does; "" where it tells too little to be contradicted."""
    ranks = {name: {key: value.to_value() for key, value in values.items()} for name, values in server.per_rank.items()}
    said = told(Inspection(engine=server.engine, quantities={name: value.to_value() for name, value in server.quantities.items()}, ranks=ranks))
    try:
        settings, _ = settings_of(said, {})
        settings |= adopted(plan(config, **settings).answer.question, said)
        agreement = check(plan(config, **settings).answer.question, said)
    except KvError as error:
        return None, error.what
    if agreement.verdict == UNTOLD or not agreement.rows:
        return None, ""
    if agreement.reproduced is None:
        return None, f"the model named does not reproduce this server's own figures: {'; '.join(agreement.explanations)[:400]}"
    question = agreement.reproduced
    return lay_out(question.architecture, question.shape), ""


def _possible(groups: Sequence[Mapping[str, int]], server: SnapshotRecord) -> bool:
    """Say whether the engine's plan for its longest request lies between what these groups take at least and at most, whatever is in flight."""
    planned, longest = planned_blocks(server), server.value("max_model_len")
    if not planned or isinstance(longest, Missing):
        return True
    least = most = 0
    for group in groups:
        count, whole = group.get("count", 1), -(-int(longest.number()) // max(group.get("size", 1), 1))
        if "fixed" in group:
            least, most = least + count * group["fixed"], most + count * (group["fixed"] + 2)
        elif "window" in group:
            least, most = least + count * min(-(-group["window"] // group["size"]), whole), most + count * (whole + 1)
        else:
            least, most = least + count * whole, most + count * whole
    return least <= planned <= most


def _known_shape(server: SnapshotRecord) -> EngineShape:
    told = {name: int(value.number()) for name in ("block_size", "max_model_len") if isinstance(value := server.value(name), Reading)}
    dtype = server.value("kv_dtype")
    return EngineShape(
        "vllm",
        kv_dtype=str(dtype.value) if isinstance(dtype, Reading) else "auto",
        block_size=told.get("block_size"),
        max_model_len=told.get("max_model_len"),
        platform="gpu",
    )


def _blocks(architecture: Architecture, shape: EngineShape) -> dict[str, ValueRecord]:
    """Return the bytes of one block on one GPU, for each way of spreading the model that it allows."""
    found = {}
    for tp in RANKS:
        for pp in STAGES:
            try:
                layout = lay_out(architecture, replace(shape, tp=tp, pp=pp, numa_nodes=None))
            except KvError:
                continue
            if layout.refusal or not layout.groups:
                continue
            stages = [max(group.stage_bytes[stage] for group in layout.groups) for stage in range(pp)]
            for stage, size in enumerate(stages):
                name = f"block.tp{tp}" + (f".pp{pp}.{stage}" if pp > 1 else "")
                found[name] = ValueRecord.of(
                    Reading(float(size), "bytes", f"one block of {layout.block_size} tokens, computed from the model's config.json")
                )
    return found


def split_of(record: RunRecord, start: Sequence[StartMemory], cards: int) -> Split | Missing:
    """Return over how many GPUs one engine is spread: as its log or its command says, else as many as it has processes on."""
    stated = {name: part.to_value() for worker in start for name, part in worker.parts.items() if name in ("tensor_parallel", "pipeline_parallel")}
    tp, pp = (value.number() if isinstance(value := stated.get(name), Reading) else 0.0 for name in ("tensor_parallel", "pipeline_parallel"))
    if tp >= 1:
        return Split(int(tp), max(int(pp), 1), "start-up log")
    if record.launch_command:
        command = " ".join(record.launch_command)
        ranks, stages = (max(int(match.group(1)), 1) if (match := pattern.search(command)) else 1 for pattern in (_TP, _PP))
        return Split(ranks, stages, "the command that started it")
    engines = max((len(snapshot.per_rank) for snapshot in record.before), default=0) or 1
    if cards and cards % engines == 0:
        count = cards // engines
        return Split(
            count, 1, "the GPU that it has a process on" if count == 1 else f"the {count} GPUs that it has processes on, taken as tensor-parallel"
        )
    return Missing("over how many GPUs it is spread is not known: its start-up log tells (--log FILE)")


def computed_parts(
    parts: Mapping[str, ValueRecord], split: Split | Missing, blocks: Reading | Missing, engines: int, rank: int
) -> dict[str, Reading | Missing]:
    """Return pool and weights of one GPU as they follow from the model's files, with ``weights.spread``; {} where no files were named.

    ``blocks`` are those of the whole server over ``engines`` data-parallel engines, ``rank`` is the GPU's place among those of its engine.
    """
    if not parts:
        return {}
    if isinstance(split, Missing):
        return {"weights": split, "pool": split}
    found: dict[str, Reading | Missing] = {}
    whole = parts["weights"].to_value() if "weights" in parts else Missing("the model's files were not weighed")
    found["weights"] = whole
    stage = min(rank // split.tp, split.pp - 1)
    if isinstance(whole, Reading):
        told = parts[f"weights.pp{split.pp}.{stage}"].to_value() if f"weights.pp{split.pp}.{stage}" in parts else None
        share = told.number() if isinstance(told, Reading) else 1.0 / split.pp
        how = f", {share * 100:.1f} % of them on stage {stage + 1} of {split.pp}" if split.pp > 1 else ""
        how += f", shared evenly by {split.tp} GPUs" if split.tp > 1 else ""
        mine = whole.number() * share / split.tp
        spread = parts["weights.spread"].to_value() if "weights.spread" in parts else None
        off = spread.number() / whole.number() if isinstance(spread, Reading) and whole.number() else 0.0
        # norms and small matrices are whole on each rank; where layers could not be counted, embedding and head make stages uneven
        off += (0.02 if split.tp > 1 else 0.0) + (0.1 if split.pp > 1 and not isinstance(told, Reading) else 0.0)
        words = f"computed: {whole.source.removesuffix(', over all GPUs')}{how}" + (f" ({split.how})" if split.gpus > 1 else "")
        found["weights"] = Reading(mine, "bytes", words)
        found["weights.spread"] = Reading(off * mine, "bytes", "")
    name = f"block.tp{split.tp}" + (f".pp{split.pp}.{stage}" if split.pp > 1 else "")
    lacking = (
        parts["layout"].to_value() if "layout" in parts else Missing(f"the model's files tell no block for {split.tp} ranks and {split.pp} stages")
    )
    size = parts[name].to_value() if name in parts else lacking
    if isinstance(size, Missing) or isinstance(blocks, Missing):
        found["pool"] = size if isinstance(size, Missing) else blocks
    else:
        mine = blocks.number() / max(engines, 1)
        found["pool"] = Reading(mine * size.number(), "bytes", f"computed: {mine:,.0f} blocks x {size.number():,.0f} bytes ({split.how})")
    return found
