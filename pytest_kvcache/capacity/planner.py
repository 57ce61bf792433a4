"""``plan``: what fits, from a model's configuration, an engine's settings and a card or a pool; and what card a traffic needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pytest_kvcache import units
from pytest_kvcache.capacity.agreement import Agreement
from pytest_kvcache.capacity.architecture import read_architecture
from pytest_kvcache.capacity.card import DEFAULT_UTILIZATION, Card, Weights, find_weights, weights_of_parameters
from pytest_kvcache.capacity.documents import Input, read_checklist, read_traffic
from pytest_kvcache.capacity.formats import parse_format
from pytest_kvcache.capacity.growth import resolve_dtypes, stages
from pytest_kvcache.capacity.layers import Architecture, Layer
from pytest_kvcache.capacity.layout import EngineShape
from pytest_kvcache.capacity.levers import Lever, Sharing, levers
from pytest_kvcache.capacity.sizing import Answer, Question, answer
from pytest_kvcache.capacity.traffic import MOST_TOKENS, Traffic, one_shape
from pytest_kvcache.capacity.verdicts import Checked, Load, check, judge, load_on
from pytest_kvcache.capacity.vllm_blocks import default_seats
from pytest_kvcache.errors import CannotJudge, UsageError

Size = int | float | str
_SHOWN_LENGTH = 4096
_LEAST_CARD = 1 << 28
# Settings of one engine only, and what stands there where nobody says.
_OWN = {"slots": ("llamacpp", None), "unified": ("llamacpp", None), "swa_full": ("llamacpp", False), "micro_batch": ("llamacpp", 512),
    "swa_ratio": ("sglang", 0.8), "state_slots": ("sglang", None)}  # fmt: skip
_FLAGS = frozenset({"async_scheduling", "chunked_local_hybrid", "mtp", "unified", "swa_full", "prefix_caching", "hybrid"})
_TEXTS = frozenset({"dtype", "kv_dtype", "state_dtype", "cpu_space", "threads_bind", "engine", "platform"})
ENGINES = ("vllm", "sglang", "llamacpp", "paged")


@dataclass(frozen=True)
class Plan:
    """A plan: ``answer`` holds growth, layout, ledger and pool; ``verdict`` is "" where nothing was asked that could fail."""

    answer: Answer
    length: int
    verdict: str
    reason: str
    load: Load | None = None
    checklist: tuple[Checked, ...] = ()
    levers: tuple[Lever, ...] = ()
    agreement: Agreement | None = None
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def growth_bytes_per_token(self) -> int:
        """Bytes that each further token of a long sequence takes on one GPU."""
        return self.answer.growth.growth_bytes_per_token

    @property
    def starts(self) -> bool:
        """Whether the engine would start, as far as it is known."""
        return self.answer.starts

    @property
    def pool_blocks(self) -> int | None:
        """Blocks of one engine's pool, as it prints them; None where no memory was stated."""
        return self.answer.pool.pool_blocks if self.answer.pool is not None else None

    @property
    def max_concurrency(self) -> float | None:
        """Requests of max_model_len at once, as the engine prints it; None where no memory was stated."""
        return self.answer.pool.max_concurrency if self.answer.pool is not None else None

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The model's layers."""
        return self.answer.question.architecture.layers

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of one sequence of ``length`` tokens on one GPU, before any rounding to blocks."""
        return self.answer.growth.sequence_bytes(self.length, self.answer.question.shape.encoder_tokens)

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of one sequence of ``length`` tokens, as the engine charges it."""
        return self.answer.blocks(self.length)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; sizes in bytes, per GPU where several share the model."""
        from pytest_kvcache.capacity.showing import plan_json

        return plan_json(self)


def size(value: Size | None) -> int | None:
    """Return bytes of a size: a number of bytes, or text with a unit such as ``80GiB``. Raises UsageError."""
    if value is None:
        return None
    if isinstance(value, str):
        return units.parse_bytes(value)
    if isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise UsageError(f"{value!r} is no size", hint="bytes, or text such as 80GiB")
    return round(value)


def plan(
    source: Path | str | Mapping[str, Any] | Architecture,
    *,
    engine: str = "vllm",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    block_size: int | None = None,
    max_model_len: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    dcp: int = 1,
    num_gpu_blocks_override: int | None = None,
    prefix_caching: bool = True,
    hybrid: bool = True,
    platform: str = "auto",
    gpu_memory: Size | None = None,
    utilization: float | None = None,
    weights: Size | None = None,
    parameters: float | str | None = None,
    activation: Size | None = None,
    graphs: Size | None = None,
    other: Size | None = None,
    gpu_free: Size | None = None,
    kv_memory: Size | None = None,
    concurrency: int | None = None,
    length: int | None = None,
    traffic: Traffic | Path | str | None = None,
    checklist: Sequence[Input] | Path | str | None = None,
    with_levers: bool = False,
    shared_prefix: int = 0,
    hit_share: float = 0.0,
    risk: float = 0.001,
    seed: int = 1,
    assume: Mapping[str, str] | None = None,
    **more: Any,
) -> Plan:
    """Return what fits.

    ``source`` is a ``config.json``, a model folder, a GGUF file, a configuration as a mapping, or an ``Architecture``. ``kv_memory`` is the pool of one worker; or
    ``gpu_memory`` with ``utilization``, ``weights`` (of the whole model; found beside the configuration where they lie there, or ``parameters``),
    ``activation``, ``graphs``, ``other`` per card give it. Sizes are bytes, or text with a unit. ``length`` and ``concurrency`` are one shape of
    traffic; ``traffic`` states lanes, a file of them or a Run. ``more`` are further fields of ``EngineShape``.

    Raises UsageError for what contradicts itself, CannotJudge where the configuration or the weights do not tell what is needed.
    """
    _contradictions(gpu_memory, kv_memory, utilization, weights, parameters, activation, graphs, other, gpu_free)
    _counts(concurrency=concurrency, length=length, max_num_batched_tokens=max_num_batched_tokens, block_size=block_size, max_num_seqs=max_num_seqs)
    _counts(tp=tp, pp=pp, dp=dp, dcp=dcp, num_gpu_blocks_override=num_gpu_blocks_override)
    if not 0 < risk < 1:
        raise UsageError(f"a risk of {risk} is no probability", hint="0.001 means once in a thousand")
    _counts(max_model_len=None if max_model_len == -1 else max_model_len)
    _meant({"prefix_caching": prefix_caching, "hybrid": hybrid, "dtype": dtype, "kv_dtype": kv_dtype, "engine": engine, "platform": platform, **more})
    if engine not in ENGINES:
        raise UsageError(f"no engine {str(engine)[:40]!r} is planned for", hint=f"one of {', '.join(ENGINES)}")
    architecture = source if isinstance(source, Architecture) else read_architecture(source, assume=assume)
    assumptions: list[str] = []
    chosen = _platform(platform, engine, gpu_memory, block_size, assumptions)
    if max_model_len is None and architecture.context is None and (length is not None or (kv_memory is None and gpu_memory is None)):
        # without a pool the length decides nothing but which request is shown
        max_model_len = length or _SHOWN_LENGTH
        assumptions.append(f"max_model_len is taken as {max_model_len}: neither the configuration nor --max-model-len states one")
    settings: dict[str, Any] = {
        "engine": engine, "dtype": dtype, "kv_dtype": kv_dtype, "block_size": block_size, "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs, "tp": tp, "pp": pp, "dp": dp, "dcp": dcp,
        "num_gpu_blocks_override": num_gpu_blocks_override, "prefix_caching": prefix_caching, "hybrid": hybrid, **chosen, **more,
    }  # fmt: skip
    unknown = settings.keys() - {field.name for field in fields(EngineShape)}
    if unknown:
        raise UsageError(f"unknown settings: {', '.join(sorted(unknown))}", hint=f"EngineShape has {', '.join(f.name for f in fields(EngineShape))}")
    _parallel(engine, tp, pp, dp, dcp)
    if num_gpu_blocks_override is not None and engine in ("sglang", "llamacpp"):
        raise UsageError(f"num_gpu_blocks_override is not of {engine}", hint="--kv-memory states its pool")
    if settings.get("card_bytes") is None:
        settings["card_bytes"] = size(gpu_memory)
    shape = EngineShape(**settings)
    found = _weights(source, architecture, shape, size(weights), parameters)
    card = None
    if gpu_memory is not None:
        card = _card(gpu_memory, utilization, activation, graphs, other, gpu_free, engine, found, assumptions)
    question = Question(architecture, shape, size(kv_memory), card, found.total_bytes if found else None)
    given = answer(question)
    stated = _traffic(traffic, concurrency, length)
    at = length or (stated.longest if stated else given.max_model_len)
    load = None
    if stated is not None:
        load = load_on(given, stated, risk, seed, utilization or DEFAULT_UTILIZATION[engine])
        assumptions += _cards_assume(load, question, utilization)
    inputs = read_checklist(Path(checklist)) if isinstance(checklist, (str, Path)) else list(checklist or ())
    checked = tuple(check(given, one) for one in inputs)
    verdict, reason = judge(given, load, checked, at, length is not None, risk)
    notes = [*_notes(given), *_seats_note(given, load)]
    if utilization is not None and gpu_memory is None and load is None:
        notes.append(f"utilization {utilization:g} decides nothing: no card is stated (--gpu-memory)")
    made = Plan(given, at, verdict, reason, load, checked, (), None, tuple(dict.fromkeys([*given.assumptions, *assumptions])), tuple(notes))
    if with_levers:
        made = replace(made, levers=tuple(levers(given, load.per_engine if load else None, at, Sharing(shared_prefix, hit_share))))
    return made


def _contradictions(gpu: Any, kv: Any, utilization: Any, weights: Any, parameters: Any, *rest: Any) -> None:
    if gpu is not None and kv is not None:
        raise UsageError("--kv-memory and --gpu-memory both state the pool", hint="one of them: --kv-memory is what one worker's pool gets")
    if weights is not None and parameters is not None:
        raise UsageError("--weights and --parameters both state the weights", hint="one of them")
    if gpu is None and kv is None and any(value is not None for value in rest):
        raise UsageError("--activation, --graphs, --other and --gpu-free are of a card, and none is stated", hint="--gpu-memory 80GiB states it")
    if kv is not None and (utilization is not None or any(value is not None for value in rest)):
        raise UsageError(
            "--kv-memory states the pool itself", hint="--utilization, --activation, --graphs, --other and --gpu-free go with --gpu-memory"
        )


def _cards_assume(load: Load, question: Question, utilization: float | None) -> list[str]:
    """Say what stands behind the cards that would hold the traffic, or why none is named."""
    engine = question.shape.engine
    if not load.needs:
        unknown = question.weights_total is None and engine != "llamacpp"
        return ["the card for this traffic is not told: the weights are not known (--weights or --parameters)"] if unknown else []
    share = utilization or DEFAULT_UTILIZATION[engine]
    beside = "" if question.card is not None else ", with nothing for activations and graphs"
    return [f"the cards for this traffic are told at a utilization of {share:g}{beside}: real ones need more"]


def _seats_note(given: Answer, load: Load | None) -> list[str]:
    """Say what nobody stated and decides how many run at once: vLLM's default of seats."""
    shape = given.question.shape
    if load is None or shape.engine != "vllm" or shape.max_num_seqs is not None or load.per_engine.concurrency <= default_seats(shape):
        return []
    return [
        f"max_num_seqs is not stated, and vLLM's default for this machine is {default_seats(shape):,}: of {load.per_engine.concurrency:,} requests at once"
        " the others wait, whatever the pool holds; --max-num-seqs lets them run"
    ]


def _parallel(engine: str, tp: int, pp: int, dp: int, dcp: int) -> None:
    if dcp > 1 and engine != "vllm":
        raise UsageError(f"decode context parallelism is planned for vLLM and not for {engine}", hint="leave --dcp out")
    if engine == "llamacpp" and max(tp, pp, dp) > 1:
        raise UsageError(
            "llama.cpp's caches are planned as a whole: it has no --tp, --pp or --dp, and splits layers and rows among cards by itself",
            hint="leave them out; --gpu-memory is then what all its cards have together",
        )


def _counts(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST_TOKENS):
            hint = "a whole number, 1 or more" + (", or -1: fitted by vLLM" if name == "max_model_len" else "")
            raise UsageError(f"{name} = {str(value)[:40]} is no count", hint=hint)


def _meant(more: Mapping[str, Any]) -> None:
    """Raise UsageError for a further setting whose value cannot be meant; None stands for the engine's own default."""
    for name, value in more.items():
        if value is None:
            continue
        if name in _TEXTS and not isinstance(value, str):
            raise UsageError(f"{name} = {str(value)[:40]} is no text")
        if name in _FLAGS and not isinstance(value, bool):
            raise UsageError(f"{name} = {str(value)[:40]} is neither true nor false")
        if name in ("slots", "micro_batch", "numa_nodes"):
            _counts(**{name: value})
        least = {"encoder_tokens": 0, "state_slots": 0}.get(name)
        if least is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TOKENS):
            raise UsageError(f"{name} = {str(value)[:40]} is no count", hint=f"a whole number, {least} or more")
        if name == "swa_ratio" and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1):
            raise UsageError(f"swa_ratio = {str(value)[:40]} is no share", hint="0.8 means 80 %")


def _platform(platform: str, engine: str, gpu_memory: Any, block_size: int | None, assumptions: list[str]) -> dict[str, Any]:
    """Return the platform, and what follows from it where the user states none."""
    if platform in ("gpu", "cpu"):
        return {"platform": platform}
    if platform != "auto":
        raise UsageError(f"no platform {platform[:20]!r}", hint="gpu, cpu or auto")
    if engine != "vllm":
        return {"platform": "gpu"}
    if gpu_memory is not None:
        assumptions.append(
            "a card is meant (--gpu-memory states one): vLLM's block size for cards unless stated, two batches in flight as asynchronous scheduling"
            " has; --platform cpu is for its CPU build"
        )
        return {"platform": "gpu"}
    if block_size is not None and block_size % 32:
        # vLLM's CPU build takes multiples of 32 only
        assumptions.append(
            "a card is meant (the block size says so), with one batch in flight; --platform gpu counts two, as asynchronous scheduling has"
        )
        return {"platform": "gpu", "async_scheduling": False}
    assumptions.append("vLLM's CPU build is meant (blocks of 128 tokens unless stated, one batch in flight); --platform gpu is for cards")
    return {"platform": "cpu"}


def _weights(source: Any, architecture: Architecture, shape: EngineShape, stated: int | None, parameters: float | str | None) -> Weights | None:
    if stated is not None:
        return Weights(stated, "stated")
    if parameters is not None or architecture.parameters is not None:
        count = _parameters(parameters) if parameters is not None else int(architecture.parameters or 0)
        kind = resolve_dtypes(architecture, "auto", shape.dtype)[1]
        form = parse_format(kind)
        return weights_of_parameters(count, form.block_bytes * 8 / form.block, kind)
    if isinstance(source, (str, Path)) and not str(source).startswith(("http://", "https://")):
        return find_weights(Path(source))
    return None


def _parameters(value: float | str) -> int:
    """Return a count of parameters: a number, or text such as 7B, 6.7e9 or 350M."""
    text = str(value).strip()
    scale = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        count = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        count = math.nan
    if not (math.isfinite(count) and 0 < count < 1e15):
        raise UsageError(f"{text[:40]!r} is no count of parameters", hint="7B, 350M or 6.7e9")
    return round(count)


def _card(
    gpu_memory: Size,
    utilization: float | None,
    activation: Any,
    graphs: Any,
    other: Any,
    free: Any,
    engine: str,
    found: Weights | None,
    said: list[str],
) -> Card:
    if found is None:
        raise CannotJudge(
            "cannot judge what the card leaves: the weights are not known",
            hint="--weights 14GiB or --parameters 7B, or name the model's folder, whose safetensors tell",
        )
    total = size(gpu_memory) or 0
    if total < _LEAST_CARD:
        raise UsageError(f"--gpu-memory {str(gpu_memory)[:40]} is no size of a card", hint="with its unit: 80GiB")
    if utilization is None:
        utilization = DEFAULT_UTILIZATION[engine]
        said.append(f"utilization is taken as {utilization:g}, {'the default of vLLM 0.32' if engine == 'vllm' else 'as none was stated'}")
    return Card(total, utilization, found.total_bytes, size(activation), size(graphs), size(other), size(free), {"weights": found.source})


def _traffic(traffic: Traffic | Path | str | None, concurrency: int | None, length: int | None) -> Traffic | None:
    if traffic is not None:
        if concurrency is not None or length is not None:
            raise UsageError("--traffic states concurrency and lengths itself", hint="--concurrency and --length are one shape without --traffic")
        return traffic if isinstance(traffic, Traffic) else read_traffic(Path(traffic))
    if concurrency is None:
        return None
    if length is None:
        raise UsageError("--concurrency needs the length of a request", hint="--length 8192 (prompt and output, in tokens)")
    return one_shape(concurrency, length)


def _notes(given: Answer) -> tuple[str, ...]:
    model, shape = given.question.architecture, given.question.shape
    parts = [*model.notes, *given.layout.notes]
    parts += [
        f"{name} is a setting of {engine} and decides nothing for {shape.engine}"
        for name, (engine, unset) in _OWN.items()
        if engine != shape.engine and getattr(shape, name) != unset
    ]
    if shape.mtp and not model.mtp_layers:
        parts.append("no draft layers are counted: the configuration has none")
    if shape.tp > 1 and any(layer.kind == "mla" for layer in model.layers):
        parts.append(
            f"a latent cache is whole on each of {shape.tp} GPUs: --tp does not lower its bytes per GPU{' (--dcp does)' if shape.engine == 'vllm' else ''}"
        )
    if shape.pp > 1:
        sizes = ", ".join(str(len(stage)) for stage in stages(len(model.layers), shape.pp))
        parts.append(
            f"the {shape.pp} pipeline stages have {sizes} layers; the last also holds the output head, so its weights leave less room: "
            "the stage with the fewest blocks decides for all"
        )
    if given.pool is not None:
        parts += given.pool.notes
        if shape.engine == "vllm" and given.pool.pool_tokens < given.max_model_len and given.starts and given.pool.pool_blocks:
            parts.append(
                "the token figure is smaller than one request of max length, and such a request fits: capacity is counted in blocks per group"
            )
    if given.ledger is not None:
        parts += given.ledger.notes
        if given.ledger.idle_bytes > (1 << 30):
            parts.append(f"{units.show_bytes(given.ledger.idle_bytes)} of each card lie outside the engine's share")
    return tuple(dict.fromkeys(parts))
