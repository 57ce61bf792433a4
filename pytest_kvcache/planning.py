"""``pytest-kvcache plan``: what fits, before anybody restarts a server. Reads files; only ``--check URL`` asks a server, and only reads."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_kvcache.capacity.layers import Architecture
    from pytest_kvcache.capacity.planner import Plan
    from pytest_kvcache.capacity.told import Told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="config.json, a model folder, a GGUF file, or the address of a server that tells its model (Ollama)")
    add("--gpu-memory", metavar="SIZE", help="memory of one card, as 80GiB; the pool is what utilization and weights leave")
    add("--utilization", type=float, metavar="SHARE", help="share of the card that the engine may use [default: the engine's own]")
    add("--weights", metavar="SIZE", help="weights of the whole model [default: found beside CONFIG]")
    add("--parameters", metavar="N", help="count of parameters, as 7B, instead of --weights")
    add("--activation", metavar="SIZE", help="activation peak of one card, as the start-up log of a profile run says")
    add("--graphs", metavar="SIZE", help="memory of CUDA graphs on one card")
    add("--other", metavar="SIZE", help="context and libraries on one card (non-torch memory)")
    add("--gpu-free", metavar="SIZE", help="what is free on the card before the engine starts")
    add("--kv-memory", metavar="SIZE", help="the pool of one worker, instead of a card")
    add("--engine", default=None, choices=("vllm", "sglang", "llamacpp", "paged"), help="whose rules [default: vllm]")
    add("--platform", default="auto", choices=("auto", "gpu", "cpu"), help="vLLM on cards or its CPU build [default: auto]")
    add("--dtype", default=None, metavar="TYPE", help="data type of the model [default: auto]")
    add("--kv-dtype", default=None, metavar="TYPE", help="auto, bfloat16, fp8, int8, q8_0, q4_0, nvfp4, ..., or K/V as q8_0/f16 [default: auto]")
    add("--block-size", type=int, metavar="TOKENS", help="tokens per block [default: the engine's]")
    add("--max-model-len", type=int, metavar="TOKENS", help="longest prompt and output [default: the model's; -1: fitted by vLLM]")
    add("--max-num-batched-tokens", type=int, metavar="TOKENS", help="tokens of one step; window layers are charged for them")
    add("--max-num-seqs", type=int, metavar="N", help="seats: most requests at once")
    add("--tp", type=int, metavar="N", help="tensor parallelism [default: 1]")
    add("--pp", type=int, metavar="N", help="pipeline parallelism [default: 1]")
    add("--dp", type=int, metavar="N", help="data parallelism: engines with a pool each [default: 1]")
    add("--dcp", type=int, metavar="N", help="decode context parallelism [default: 1]")
    add("--num-gpu-blocks-override", type=int, metavar="N", help="an artificial pool")
    add("--no-prefix-caching", action="store_true", help="prefix caching is off")
    add("--no-hybrid", action="store_true", help="vLLM's hybrid KV cache manager is off")
    add("--mtp", action="store_true", help="the checkpoint's own draft layers are served too (multi-token prediction)")
    add("--encoder-tokens", type=int, default=0, metavar="N", help="image or encoder tokens of one request (cross attention)")
    add("--slots", type=int, metavar="N", help="llama.cpp's slots (-np)")
    add("--unified", action="store_true", help="llama.cpp's slots share one cache (-kvu)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a further setting of capacity.layout.EngineShape; repeatable")
    add("--concurrency", type=int, metavar="N", help="requests at once")
    add("--length", type=int, metavar="TOKENS", help="prompt and output of one of them")
    add("--traffic", metavar="FILE|RUN", help="lanes or histograms (TOML or JSON), or a Run's folder or requests.jsonl")
    add("--checklist", metavar="FILE", help="extreme inputs (TOML or JSON): name, prompt, output, concurrency")
    add("--levers", action="store_true", help="what each lever would do to this model and traffic")
    add("--shared-prefix", type=int, default=0, metavar="TOKENS", help="tokens that prompts have in common, for the lever prefix caching")
    add("--hit-share", type=float, default=0.0, metavar="SHARE", help="share of the requests that find them cached")
    add("--risk", type=float, default=0.001, metavar="P", help="probability of overflow that counts as safe [default: 0.001]")
    add("--seed", type=int, default=1, metavar="N", help="seed of the Monte Carlo [default: 1]")
    add("--assume", action="append", default=[], metavar="FIELD=VALUE", help="state a field of the configuration; repeatable")
    add(
        "--check",
        action="append",
        default=[],
        metavar="LOG|URL",
        help="compare with what an engine printed or exposes; repeatable: a log and a scrape",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown for a change request")


def _pairs(texts: list[str], option: str) -> dict[str, str]:
    from pytest_kvcache.errors import UsageError

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"{option} {text[:60]!r} is no NAME=VALUE", hint=f"{option} num_key_value_heads=8")
        found[name.strip()] = value.strip()
    return found


def _more(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the settings that have no parameter of their own."""
    more: dict[str, object] = {}
    for name, text in _pairs(arguments.set, "--set").items():
        try:
            more[name] = text if name in ("cpu_space", "threads_bind") else json.loads(text)
        except (ValueError, RecursionError):
            more[name] = text
    if arguments.encoder_tokens:
        more["encoder_tokens"] = arguments.encoder_tokens
    if arguments.slots is not None:
        more["slots"] = arguments.slots
    if arguments.unified:
        more["unified"] = True
    if arguments.mtp:
        more["mtp"] = True
    return more


def _stated(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the keyword arguments of ``capacity.plan`` that the command line states."""
    names = (
        "engine", "dtype", "kv_dtype", "block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override",
        "gpu_memory", "utilization", "weights", "parameters", "activation", "graphs", "other", "gpu_free", "kv_memory", "concurrency", "length",
        "traffic", "checklist", "tp", "pp", "dp", "dcp",
    )  # fmt: skip
    stated: dict[str, object] = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    stated |= {"platform": arguments.platform, "risk": arguments.risk, "seed": arguments.seed, "with_levers": arguments.levers}
    stated |= {"shared_prefix": arguments.shared_prefix, "hit_share": arguments.hit_share, "assume": _pairs(arguments.assume, "--assume")}
    if arguments.no_prefix_caching:
        stated["prefix_caching"] = False
    if arguments.no_hybrid:
        stated["hybrid"] = False
    return stated | _more(arguments)


def _check(arguments: argparse.Namespace, stated: dict[str, object]) -> tuple[Told, list[str]]:
    """Read what the engine says, put into ``stated`` what only it states, and return both it and notes."""
    from pytest_kvcache.capacity.agreement import settings_of
    from pytest_kvcache.capacity.told import told
    from pytest_kvcache.errors import CannotJudge
    from pytest_kvcache.inspection import running
    from pytest_kvcache.observe.inspecting import inspect, read_sources
    from pytest_kvcache.options import settings_from

    urls = [name for name in arguments.check if name.lower().startswith(("http://", "https://")) and not Path(name).exists()]
    live = running(urls[0], settings_from(arguments))[0] if urls else None
    files = [name for name in arguments.check if name not in urls]
    pasted = read_sources(files) if files else []
    found = inspect(pasted, live=live)
    log = "\n".join(part.log for part in pasted)
    said = told(found, log)
    if not found.judged and said.needed is None and said.tokens is None:
        raise CannotJudge(found.why[:1500], hint="a start-up log, a scrape of /metrics, or the address of a server")
    given, notes = settings_of(said, stated)
    stated |= given
    return said, notes


def _source(arguments: argparse.Namespace) -> str | Architecture:
    """Return what the plan reads: a path, or the model of a running server, asked with the options that say how to reach it."""
    name: str = arguments.config
    if not name.lower().startswith(("http://", "https://")) or Path(name).exists():
        return name
    from pytest_kvcache.capacity.served import read_served
    from pytest_kvcache.options import settings_from

    return read_served(name, _pairs(arguments.assume, "--assume"), settings_from(arguments))


def _held_to(arguments: argparse.Namespace, stated: dict[str, object]) -> Plan:
    """Return the plan beside the engine's own figures. What only the engine states is taken from it; the comparison itself takes its memory as printed."""
    from pytest_kvcache.capacity import plan
    from pytest_kvcache.capacity.agreement import adopted, check

    memory = bool({"kv_memory", "gpu_memory"} & stated.keys())
    said, notes = _check(arguments, stated)
    source = _source(arguments)
    first = plan(source, **stated)  # type: ignore[arg-type]
    stated |= adopted(first.answer.question, said)
    made = plan(source, **stated)  # type: ignore[arg-type]
    question = made.answer.question
    agreement = check(question if memory else replace(question, kv_bytes=None), said)
    return replace(made, agreement=agreement, notes=(*notes, *made.notes))


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan and return the exit code: 0 it fits (or nothing was asked that could fail), 1 it does not, 3 it cannot be told."""
    from pytest_kvcache.capacity import plan
    from pytest_kvcache.capacity.showing import plan_json, plan_markdown, plan_text

    stated = _stated(arguments)
    made = _held_to(arguments, stated) if arguments.check else plan(_source(arguments), **stated)  # type: ignore[arg-type]
    if arguments.json:
        print(json.dumps(plan_json(made), indent=1))
    elif arguments.markdown:
        print(plan_markdown(made))
    else:
        print(plan_text(made))
    if made.agreement is not None and made.agreement.verdict == "different":
        return 1
    if made.agreement is not None and made.agreement.verdict == "untold" and made.verdict != "FAIL":
        return 3
    return {"FAIL": 1, "INCONCLUSIVE": 3}.get(made.verdict, 0)
