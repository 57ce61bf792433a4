"""A sweep: the server launched anew with each value of one of its options, the same load on each, and what came of it side by side."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pytest_kvcache.analysis import sweep as analysis_sweep
from pytest_kvcache.analysis.sweep import Sweep, variants_of
from pytest_kvcache.errors import CannotJudge, UsageError
from pytest_kvcache.judge import gates
from pytest_kvcache.load.runner import profile_path
from pytest_kvcache.planned import Planned
from pytest_kvcache.records import GateRecord
from pytest_kvcache.runfolder import Run
from pytest_kvcache.server.launch import parse_command
from pytest_kvcache.session import EMBEDDED_DEFAULT, Session
from pytest_kvcache.settings import Settings

WINDOWS = 3
MOST_VALUES = 32
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,60}")


@dataclass(frozen=True)
class Swept:
    """An option of the server and its values, in the order in which they are measured; the first is what the others must beat."""

    option: str
    values: tuple[str, ...]

    def variant(self, value: str) -> str:
        """Return the setting as it is shown: ``block-size=32``."""
        return f"{self.option}={value}"


def parse_sweep(text: str) -> Swept:
    """Return what ``block-size=32,64,128`` says. Raises UsageError."""
    name, equals, rest = text.strip().partition("=")
    name, values = name.strip().lstrip("-"), [value.strip() for value in rest.split(",")]
    hint = "an option of the server and its values, as in block-size=32,64,128"
    if not equals or not _NAME.fullmatch(name):
        raise UsageError(f"--kv-sweep={text[:80]!r} names no option", hint=hint)
    if len(values) < 2 or not all(values) or len(set(values)) != len(values):
        raise UsageError(f"--kv-sweep={text[:80]!r}: two or more different values are needed", hint=hint)
    if len(values) > MOST_VALUES:
        raise UsageError(f"--kv-sweep: {len(values)} values are too many", hint=f"at most {MOST_VALUES}: each is a launch of the server")
    return Swept(name, tuple(values))


def command_with(command: str, option: str, value: str) -> str:
    """Return the launch command with ``--option value``: in place of ``{sweep}``, or of the value that it has, else at its end.

    Raises UsageError for a command that cannot be split into words.
    """
    if "{sweep}" in command:
        return command.replace("{sweep}", shlex.quote(value))
    parse_command(command)
    words = shlex.split(command)
    flag = f"--{option}"
    spellings = {flag, f"--{option.replace('-', '_')}", f"--{option.replace('_', '-')}"}
    for index, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in spellings and equals:
            words[index] = f"{name}={value}"
            return shlex.join(words)
        if word in spellings and index + 1 < len(words):
            words[index + 1] = value
            return shlex.join(words)
    return shlex.join([*words, flag, value])


def check_sweep(settings: Settings) -> Swept:
    """Return the sweep that the settings ask for. Raises UsageError where it cannot be meant: only a server that we launch can be swept."""
    swept = parse_sweep(settings.sweep)
    for value in swept.values:
        parse_command(command_with(settings.launch or EMBEDDED_DEFAULT, swept.option, value))
    return swept


def run_sweep(session: Session, planned: Planned, *, say: Callable[[str], object] = lambda _: None) -> Sweep:
    """Launch, measure and stop each value in turn, and return the comparison; the Runs belong to the session.

    ``--kv-windows`` windows of each where it was given, else three. Raises UsageError, LaunchFailed (with the cause), LoadFailed, CannotJudge.
    """
    settings = session.settings
    swept = check_sweep(settings)
    profile_path(planned.profile)
    windows = settings.windows if "windows" in settings.sources else WINDOWS
    runs: list[Run] = []
    for value in swept.values:
        variant = swept.variant(value)
        say(f"{variant}: {windows} window{'s' if windows > 1 else ''} of {planned.name}")
        # the same prompts on each value: every launch begins with a cold cache
        runs += session.sweep(command_with(settings.launch or EMBEDDED_DEFAULT, swept.option, value), variant, planned, windows)
    return judge_sweep(session, runs)


def sweep_gates(session: Session, found: Sweep) -> list[GateRecord]:
    """Return the gates of a sweep: that a value can be recommended, and those of one configuration on that value.

    The other values are not judged: to find out what a poor one costs is what a sweep is for.
    """
    by_variant, settings = variants_of([session.analysis(run) for run in session.runs()]), session.settings
    verdict = gates.PASS if found.recommended else gates.INVALID if any(one.unsound for one in found.variants) else gates.INCONCLUSIVE
    judged = [GateRecord("sweep", "", verdict, f"{found.text} {found.rests_on}")]
    analyses = by_variant.get(found.recommended, [])
    if analyses:
        judged += [gates.peak_usage(analyses, settings.max_usage), gates.free_space(analyses, settings.min_free), gates.no_rejections(analyses)]
        judged += [gates.no_preemptions(analyses), gates.returns_to_idle(analyses)]
    suffix = f" ({found.recommended})"
    return [judged[0], *(msgspec.structs.replace(gate, lane=f"{gate.lane}{suffix}".strip()) for gate in judged[1:])]


def judge_sweep(session: Session, runs: Sequence[Run]) -> Sweep:
    """Return the comparison of Runs of a sweep. Raises CannotJudge where they are not of two variants."""
    settings = session.settings
    found = analysis_sweep.sweep(
        variants_of([session.analysis(run) for run in runs]),
        usage_margin=settings.usage_margin,
        throughput_margin=settings.throughput_margin,
        ttft_margin=settings.ttft_margin,
    )
    if found is None:
        raise CannotJudge("fewer than two values of the sweep were measured", hint="measure again")
    return found


def show_sweep(found: Sweep) -> str:
    """Return the sweep as a table of plain text with its recommendation."""
    import textwrap

    from tabulate import tabulate

    columns = ("usage, peak", "payload in pages", "output rate", "TTFT p50", "CPU per 1,000 tokens", "preemptions", "rejected")
    rows = [
        (v.name, v.windows, *(figure.text for figure in (v.usage, v.payload_share, v.throughput, v.ttft, v.cpu, v.preemptions, v.rejections)))
        for v in found.variants
    ]
    told = [*(f"{v.name}: {v.beside}" for v in found.variants), found.text, found.rests_on]
    said = [line for text in told for line in textwrap.wrap(text, 100, subsequent_indent="  ")]
    return "\n".join([tabulate(rows, headers=("setting", "windows", *columns)), "", *said])
