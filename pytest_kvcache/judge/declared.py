"""What a change changed beside what it was declared to: every difference of the effective configurations and of the commands is named.

The effective configuration decides; the words of the launch commands show what no server tells (a window override, a scheduler flag).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_kvcache.analysis.soundness import Problem
from pytest_kvcache.quantities import QUANTITIES, Missing, Reading, Value
from pytest_kvcache.records import ConfigChange, RunRecord

SIZES = frozenset({"pool_blocks", "usable_blocks", "pool_tokens", "pool_bytes", "weights_bytes", "max_concurrency"})
"""What follows from other settings: the pool is what they leave of the card."""

_RESIZES_NOTHING = frozenset({"prefix_caching", "reset_cache"})
_SAME = {
    "kv_cache_dtype": "kv_dtype", "kv_type": "kv_dtype", "cache_dtype": "kv_dtype", "cache_type_k": "kv_dtype", "cache_type_v": "kv_dtype",
    "enable_prefix_caching": "prefix_caching", "no_enable_prefix_caching": "prefix_caching", "disable_radix_cache": "prefix_caching",
    "max_seq_len": "max_model_len", "context_length": "max_model_len", "max_running_requests": "max_num_seqs", "max_batch_size": "max_num_seqs",
    "slots": "max_num_seqs", "parallel": "max_num_seqs", "mem_fraction_static": "gpu_memory_utilization", "page_size": "block_size",
    "ctx": "pool_tokens", "ctx_size": "pool_tokens", "max_total_tokens": "pool_tokens", "kv_cache_memory_bytes": "pool_bytes",
    "num_gpu_blocks_override": "pool_blocks", "vllm_cpu_kvcache_space": "pool_bytes", "version": "engine_version",
}  # fmt: skip
_COMPARED_ELSEWHERE = frozenset({"gpu", "machine"})
_JITTER = 0.01
_OPTION = re.compile(r"--?([A-Za-z][A-Za-z0-9_-]*)")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
COMMAND = "command"


def canonical(name: str) -> str:
    """Return the name by which a setting is known here: ``--kv-cache-dtype`` is ``kv_dtype``."""
    plain = name.strip("-").lower().replace("-", "_")
    return _SAME.get(plain, plain)


def check_declared(before: RunRecord, after: RunRecord, diff: Sequence[ConfigChange], declared: Sequence[str]) -> tuple[list[Problem], list[str]]:
    """Return (problems, notes) of a change that was declared to change ``declared`` and nothing else.

    A problem is any other difference, and a declared setting that both servers state and state alike: the change was not made. The sizes of
    the pool may follow from any setting that can resize it. Notes tell what no server states.
    """
    named = {name for given in declared for name in (given, canonical(given))}
    resizes = bool(named - _RESIZES_NOTHING)
    words = word_changes(before.launch_command, after.launch_command)
    allowed = {change.name for change in diff if change.name in named or (change.name in SIZES and resizes)}
    others = [change for change in diff if change.name not in allowed and change.name != "launch_command" and not _jitter(change.name, before, after)]
    told = {change.name for change in others}
    others += [
        c for c in words if c.name not in named and canonical(c.name) not in named | told and not _stated_alike(canonical(c.name), before, after)
    ]
    if {"model", "engine", "engine_version"} & named:  # another build or model is another program or path
        others = [change for change in others if change.name != COMMAND]
    problems = []
    if others:
        shown = "; ".join(f"{change.name} was {change.before} and is {change.after}" for change in others[:5])
        problems.append(
            Problem("undeclared", f"something changed that was not declared: {shown}", "undo it, or declare it too with --kv-expect-change")
        )
    moved = {change.name for change in diff} | {canonical(change.name) for change in words} | {change.name for change in words}
    notes = []
    for given in dict.fromkeys(declared):
        if {given, canonical(given)} & (moved | _COMPARED_ELSEWHERE):
            continue
        if _stated_alike(canonical(given), before, after) or given not in QUANTITIES:
            value = before.config.get(canonical(given))
            stays = f" ({value.value} on both sides)" if value is not None and value.missing is None else ""
            problems.append(
                Problem(
                    "not_changed",
                    f"{given} was declared to change and did not{stays}",
                    "see whether the server took the setting; its log says why not",
                )
            )
        else:
            notes.append(f"whether {given} changed as declared is not known: the server does not tell it")
    return problems, notes


def _jitter(name: str, before: RunRecord, after: RunRecord) -> bool:
    """Return whether a difference is what two starts of one configuration bring: an engine that sizes its pool by free memory finds another."""
    if name not in SIZES:
        return False
    values: list[Value] = [r.config[name].to_value() if name in r.config else Missing("not read") for r in (before, after)]
    numbers = [value.number() for value in values if isinstance(value, Reading)]
    return len(numbers) == 2 and abs(numbers[0] - numbers[1]) <= _JITTER * numbers[0]


def _stated_alike(name: str, before: RunRecord, after: RunRecord) -> bool:
    """Return whether both servers state a setting, and state it alike."""
    values: list[Value] = [r.config[name].to_value() if name in r.config else Missing("not read") for r in (before, after)]
    return all(isinstance(value, Reading) for value in values) and len({v.value for v in values if isinstance(v, Reading)}) == 1


def word_changes(before: Sequence[str], after: Sequence[str]) -> list[ConfigChange]:
    """Return how two launch commands differ, option by option and without their ports; positional words are ``command`` together."""
    left, right = _options(before), _options(after)
    names = sorted({*left, *right})
    return [ConfigChange(name, left.get(name, "not given"), right.get(name, "not given")) for name in names if left.get(name) != right.get(name)]


def _options(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    plain: list[str] = []
    name = ""
    leading = True
    for word in words:
        assignment = _ASSIGNMENT.fullmatch(word) if leading else None
        if assignment:
            found.setdefault(assignment[1].lower(), []).append(assignment[2])
            continue
        leading = False
        option, equals, value = word.partition("=")
        match = _OPTION.fullmatch(option)
        if match:
            name = match[1].lower().replace("-", "_")
            found.setdefault(name, []).append(value if equals else "given")
            name = "" if equals else name
        elif name:
            found[name][-1] = word
            name = ""
        else:
            plain.append(word)
    found.pop("port", None)
    options = {name: " ".join(values) for name, values in found.items()}
    return {**options, **({COMMAND: " ".join(plain)} if plain else {})}
