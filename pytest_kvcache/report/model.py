"""What every output is made from: a session's verdict with the Analyses of its Runs, and the sentences that all outputs share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_kvcache import units
from pytest_kvcache.errors import CannotJudge, KvError, UnknownSchema
from pytest_kvcache.judge import wording
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import GateRecord, ValueRecord, VerdictRecord
from pytest_kvcache.report.escape import clip, plain
from pytest_kvcache.runfolder import decode_record, read_runs

if TYPE_CHECKING:
    from pytest_kvcache.analysis.findings import Rule
    from pytest_kvcache.analysis.timeline import Analysis

NOT_RUN = "not run"
_WORST_FIRST = {"FAIL": 0, "INVALID": 1, "INCONCLUSIVE": 2, "PASS": 3}


@dataclass(frozen=True)
class SessionView:
    """A session as the outputs read it. Where nothing was compared, ``before`` is empty and ``after`` holds the Analyses.

    ``unread`` says which Runs could not be analysed, and why; ``rules`` are those that findings are made by (None: the shipped ones).
    """

    folder: Path
    verdict: VerdictRecord
    before: Sequence[Analysis] = ()
    after: Sequence[Analysis] = ()
    unread: Sequence[str] = ()
    rules: Sequence[Rule] | None = None

    @property
    def compared(self) -> bool:
        """Whether there are two sides."""
        return bool(self.before) or any(gate.before is not None for gate in self.verdict.gates)

    @property
    def report(self) -> Path:
        """Where the HTML report lies."""
        return self.folder / "report.html"

    def sides(self) -> list[tuple[str, Sequence[Analysis]]]:
        """Return the sides that were measured: ``before`` and ``after``, or one without a name."""
        if self.compared:
            return [("before", self.before), ("after", self.after)]
        return [("", self.after)]

    def profiles(self) -> list[str]:
        """Return the names of the loads in the order in which they were first run."""
        return list(dict.fromkeys(load_name(analysis) for analysis in (*self.before, *self.after)))

    def of(self, profile: str, side: str) -> list[Analysis]:
        """Return the windows of one load on one side."""
        return [a for a in dict(self.sides()).get(side, ()) if load_name(a) == profile]


def is_probe(analysis: Analysis) -> bool:
    """Return whether the Run sent single requests to see what they cost, and is no window of a load."""
    return bool(analysis.run.record.options.get("requests"))


def load_name(analysis: Analysis) -> str:
    """Return the name of the Run's load: its profile; probes of single requests and the settings of a sweep stand apart from windows of it."""
    profile = analysis.run.record.profile
    if analysis.run.record.variant:
        return f"{profile} ({analysis.run.record.variant})"
    return f"{profile} (probe)" if is_probe(analysis) else profile


def read_verdict(folder: Path) -> VerdictRecord:
    """Return the verdict of a session folder. Raises CannotJudge where there is none, UnknownSchema where it is of another layout."""
    path = folder / "verdict.json"
    try:
        return decode_record(path.read_bytes(), VerdictRecord, path, "cannot judge: this verdict")
    except OSError as error:
        raise CannotJudge(
            f"no verdict is here: {error.strerror or error}",
            where=str(path),
            hint="it ended before a verdict; its Runs are read by pytest-kvcache diagnose and gate"
            if (folder / "runs").is_dir()
            else "name a session folder; it holds verdict.json",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CannotJudge(
            f"verdict.json cannot be read: {str(error)[:200]}", where=str(path), hint="it was changed or damaged; measure again"
        ) from None


def build_view(folder: Path, rules: Sequence[str | Path] = ()) -> SessionView:
    """Return the view of a stored session folder (verdict.json, runs/ and its files of rules), on any machine and without the server.

    ``rules`` are further files of rules. A Run that cannot be analysed, or a stored file of rules that this build does not read, is named in
    ``unread`` and the others are kept. Raises CannotJudge, UnknownSchema, and UsageError for ``rules``.
    """
    from pytest_kvcache.analysis.own_rules import readable_rules, rule_set
    from pytest_kvcache.analysis.timeline import analyse

    verdict = read_verdict(folder)
    sides: dict[str, list[Analysis]] = {"before": [], "after": []}
    rule_set(rules)
    kept, wrong = readable_rules(folder)
    unread = [plain(one) for one in wrong]
    try:
        runs = read_runs(folder)
    except UnknownSchema:
        raise
    except CannotJudge as error:
        runs = []
        unread.append(plain(error.what))
    for run in runs:
        try:
            sides["before" if run.record.side == "before" else "after"].append(analyse(run))
        except KvError as error:
            unread.append(plain(f"{run.folder.name}: {error.what}"))
    return SessionView(folder, verdict, sides["before"], sides["after"], unread, rule_set([*kept, *rules]).rules)


def in_order(gates: Iterable[GateRecord]) -> list[GateRecord]:
    """Return the gates that apply, those that decide first; their own order is kept otherwise. What only warns stands before what passed."""
    return sorted((gate for gate in gates if gate.applicable), key=lambda gate: 2 if warns(gate) else _WORST_FIRST.get(gate.verdict, 2))


def warns(gate: GateRecord) -> bool:
    """Return whether a gate did not pass and decides nothing."""
    return gate.level == "warn" and gate.verdict != "PASS"


def shown_verdict(gate: GateRecord) -> str:
    """Return the word that a gate's verdict is shown by; one that decides nothing is a warning."""
    return "warning" if warns(gate) else plain(gate.verdict, 20)


def not_applicable(gates: Iterable[GateRecord]) -> list[GateRecord]:
    """Return the gates that this engine cannot meet or miss."""
    return [gate for gate in gates if not gate.applicable]


def not_judged(verdict: VerdictRecord) -> dict[str, list[str]]:
    """Return the tests that judged nothing by how they were left out: deselected, or not run to their end."""
    found: dict[str, list[str]] = {}
    for name in verdict.deselected:
        bare = name.removesuffix(f" ({NOT_RUN})")
        found.setdefault("deselected" if bare == name else NOT_RUN, []).append(bare)
    return found


def aside_by_reason(gates: Iterable[GateRecord]) -> dict[str, list[str]]:
    """Return the titles of the gates that do not apply, by the reason why."""
    reasons: dict[str, list[str]] = {}
    for gate in not_applicable(gates):
        reasons.setdefault(plain(gate.text, 300).removeprefix("does not apply: ") or "the engine cannot do this", []).append(gate_title(gate))
    return reasons


def _list(texts: Sequence[str], most: int = 3) -> str:
    shown = "; ".join(clip(plain(text).rstrip(". "), 500) for text in texts[:most])
    more = len(texts) - most
    return f"{shown}; and {more} more" if more > 0 else shown


def told_notes(verdict: VerdictRecord, most: int = 12) -> list[str]:
    """Return what must be known to read the verdict, each in one sentence; what already stands beside its word is left out."""
    notes = [clip(plain(note), 500) for note in verdict.notes if note.strip() and not note.startswith(wording.SAME)]
    return notes[:most] + ([f"and {len(notes) - most} more notes in verdict.json"] if len(notes) > most else [])


def why(verdict: VerdictRecord) -> str:
    """Return one sentence that says what decided the verdict, and one for what only warns."""
    told = _decided(verdict, [gate for gate in in_order(verdict.gates) if not warns(gate)])
    if warnings := [gate for gate in verdict.gates if gate.applicable and warns(gate)]:
        told += f" {len(warnings)} warning{'s' if len(warnings) != 1 else ''}: {_list([gate_text(gate) for gate in warnings])}."
    # what makes a comparison say nothing stands beside its word wherever that is read
    return told + "".join(f" But {plain(note, 300)}." for note in verdict.notes if note.startswith(wording.SAME))


def _decided(verdict: VerdictRecord, gates: Sequence[GateRecord]) -> str:
    by = {word: [gate for gate in gates if gate.verdict == word] for word in _WORST_FIRST}
    count = f"{len(gates)} gate{'s' if len(gates) != 1 else ''}"
    aside = len(not_applicable(verdict.gates))
    if verdict.verdict == "INVALID":
        causes = list(dict.fromkeys(_cause(gate) for gate in by["INVALID"])) or list(verdict.problems)
        mends = list(dict.fromkeys(mend for gate in by["INVALID"] if (mend := _mend(gate))))
        mended = f" To mend it: {_list(mends)}." if mends else ""
        return f"The evidence is unsound: {_list(causes)}.{mended}" if causes else "The evidence is unsound."
    if verdict.verdict == "FAIL" and by["FAIL"]:
        unsound = ""
        if spoilt := by["INVALID"]:
            causes = list(dict.fromkeys(_cause(gate) for gate in spoilt))
            unsound = f"; {len(spoilt)} more rest{'s' if len(spoilt) == 1 else ''} on unsound evidence: {_list(causes, 1)}"
        return f"{len(by['FAIL'])} of {count} failed: {_list([gate_text(gate) for gate in by['FAIL']])}{unsound}."
    if verdict.verdict == "INCONCLUSIVE":
        parts = []
        if unsure := by["INCONCLUSIVE"]:
            parts.append(f"{len(unsure)} of {count} could not tell: {_list([gate_text(gate) for gate in unsure])}")
        for how, names in not_judged(verdict).items():
            many = len(names) != 1
            said = f"{len(names)} {'gates were' if many else 'gate was'} deselected"
            if how == NOT_RUN:
                said = f"the session was broken off before {len(names)} of its tests {'were' if many else 'was'} over"
            parts.append(f"{said}, so the session was not judged in full")
        sentence = "; ".join(parts) or _nothing_decided(gates)
        return sentence[0].upper() + sentence[1:] + "."
    if verdict.verdict == "PASS":
        rest = f"; {aside} {'do' if aside != 1 else 'does'} not apply to this engine" if aside else ""
        if others := [gate for gate in gates if gate.verdict != "PASS"]:
            return f"{len(gates) - len(others)} of {count} passed, and the session's policy lets the others pass: {_list([gate_text(g) for g in others])}{rest}."
        return (f"All {count} passed{rest}" if len(gates) != 1 else f"The one gate passed{rest}") + f"{_improved(gates)}."
    return f"{count} judged."


def _nothing_decided(gates: Sequence[GateRecord]) -> str:
    if gates and all(gate.level == "warn" for gate in gates):
        return "every gate only warns, so nothing was judged that could fail"
    return "the evidence does not tell" if gates else "no gate was judged"


def _cause(gate: GateRecord) -> str:
    """Return what makes an INVALID gate so, without how to mend it and what was not judged: many gates share one cause."""
    text = plain(gate.text, 2000).partition("; to mend it: ")[0].partition(". Not judged: ")[0]
    return text.removeprefix("the evidence is unsound: ") or gate_title(gate)


def _mend(gate: GateRecord) -> str:
    """Return what would mend the evidence of an INVALID gate; nothing where the gate does not tell."""
    return plain(gate.text, 2000).partition("; to mend it: ")[2].partition(". Not judged: ")[0]


def gate_title(gate: GateRecord) -> str:
    """Return the gate's name with the lane that it was judged on."""
    name = plain(gate.name.replace("_", " "), 80)
    lane = plain(gate.lane, 40)
    return f"{name} [{lane}]" if lane and lane not in name else name


def gate_text(gate: GateRecord) -> str:
    """Return the gate in one phrase with its lane, for a place where nothing else of it is shown; a usage ratio keeps what stands beside it."""
    if gate.before is not None and gate.after is not None:
        phrase = f"{gate_title(gate)}: {show_record(gate.before)} before, {show_record(gate.after)} after"
        if gate.verdict == "INCONCLUSIVE" and gate.text:  # what is missing, and how much more would tell
            phrase = f"{gate_title(gate)}: {gate_sentence(gate).removeprefix('cannot tell: ')}"
        return f"{phrase} ({plain(gate.beside)})" if is_usage(gate) and gate.beside else phrase
    text = plain(gate.text)
    if not text:
        return f"{gate_title(gate)}: {show_record(gate.value)}"
    lane = plain(gate.lane, 40)
    return f"{lane}: {text}" if lane and lane not in text else text


def improvement(gate: GateRecord) -> str:
    """Return by how much the side after is better, with both bounds; empty where that is not shown or was not judged."""
    return plain(gate.better) if gate.verdict == "PASS" else ""


def _improved(gates: Sequence[GateRecord]) -> str:
    """Return what became better, after the word that all passed; free space is the other end of usage and is not said twice."""
    shown = [
        f"{gate_title(gate).replace(' not worse', '')} {better}" for gate in gates if (better := improvement(gate)) and gate.name != "free_not_worse"
    ]
    return f". Better: {_list(shown, 4)}" if shown else ""


def gate_sentence(gate: GateRecord) -> str:
    """Return the gate's own sentence without the numbers of ``beside``, for a place that shows those by themselves."""
    return plain(gate.text.replace(f" ({gate.beside})", "") if gate.beside else gate.text)


def show_value(value: Value | None) -> str:
    """Return a value with its unit; a missing one as a dash, one that the engine can never have as ``n/a``."""
    if value is None:
        return ""
    if isinstance(value, Missing):
        return "n/a" if value.cannot_happen else "—"
    return plain(show_number(value.value, value.unit), 120)


def show_number(value: float | str | bool, unit: str) -> str:
    """Return a value with its unit; counts of many whole things (tokens of a mean, blocks of a difference) without decimals."""
    if not isinstance(value, bool | str) and abs(value) >= 100 and unit not in {"s", "bytes", "ratio"} and math.isfinite(value):
        value = float(round(value))
    return units.show(value, unit)


def show_record(record: ValueRecord | None) -> str:
    """Return a recorded value as ``show_value`` does."""
    return show_value(record.to_value()) if record is not None else ""


def show_interval(gate: GateRecord) -> str:
    """Return the interval that was judged, as text with its unit once; empty where none was."""
    if gate.low is None and gate.high is None:
        return ""
    whole = gate.unit in {"blocks", "tokens"}  # half a block is none: the ends are told no better than they are
    low = "" if gate.low is None else show_number(float(math.floor(gate.low)) if whole else gate.low, gate.unit)
    high = "" if gate.high is None else show_number(float(math.ceil(gate.high)) if whole else gate.high, gate.unit)
    if not low or not high:
        return f"≥ {low}" if low else f"≤ {high}"
    figure, _, unit = low.partition(" ")
    return f"{figure} to {high}" if unit and high.endswith(f" {unit}") else f"{low} to {high}"


def show_bound(gate: GateRecord) -> str:
    """Return the bound in few characters: ``at most`` and ``at least`` as signs."""
    text = plain(gate.bound_text, 160) or (show_number(gate.bound, gate.unit) if gate.bound is not None else "")
    for words, sign in (("at most ", "≤ "), ("at least ", "≥ ")):
        if text.startswith(words):
            return sign + text.removeprefix(words)
    return text


def is_usage(gate: GateRecord) -> bool:
    """Whether a gate shows a usage ratio, which is never shown alone."""
    return gate.unit == "ratio" and "usage" in gate.quantity.split(".")


def number(analysis: Analysis, name: str) -> float | None:
    """Return a value of an Analysis as a float; None where it is missing or text."""
    value = analysis.values.get(name)
    return value.number() if isinstance(value, Reading) and not isinstance(value.value, str) else None


def at_peak(analyses: Sequence[Analysis]) -> Analysis | None:
    """Return the window with the highest peak usage, the one whose three numbers are shown together."""
    return max(analyses, key=lambda a: peak if (peak := number(a, "usage.peak")) is not None else -1.0, default=None)


def _say(analysis: Analysis, words: str, *names: str) -> str | None:
    """Return the first of the values that was measured, in words; None where none was."""
    found = next((v for name in names if isinstance(v := analysis.values.get(name), Reading)), None)
    return words.format(show_value(found)) if found is not None else None


def three_numbers(analysis: Analysis) -> str:
    """Return what stands beside a usage ratio: pool size, free blocks or tokens, running requests and their mean length."""
    return plain(wording.beside(analysis))


def idle_numbers(analysis: Analysis) -> str:
    """Return what stands beside a usage ratio after the load: pool size, what is still held, and what still runs."""
    pool = _say(analysis, "pool {}", "pool_tokens", "pool_blocks") or "pool size not told"
    held = _say(analysis, "{} held after the load", "idle.used_blocks", "idle.used_tokens") or "space held after the load not told"
    return f"{pool}; {held}; {_say(analysis, '{} running', 'idle.running') or 'running not told'}"


def beside(view: SessionView, gate: GateRecord) -> str:
    """Return what stands beside the gate's figures: always for a usage ratio, from the judge or from the Runs of its lane, of both sides in a
    comparison; for another gate where it did not pass, or where its sentence is all that it has.
    """
    if not is_usage(gate):
        return plain(gate.beside) if gate.verdict != "PASS" or gate.bound is None else ""
    own = plain(gate.beside, 1000) or _of_lane(view, gate, gate.side or "after")
    if gate.before is None or own.startswith("before: "):
        return own
    return f"before: {_of_lane(view, gate, 'before')}; after: {own}"


def _of_lane(view: SessionView, gate: GateRecord, side: str) -> str:
    measured = dict(view.sides()).get(side if view.compared else "", view.after)
    peak = at_peak([a for a in measured if a.run.record.profile == gate.lane] or measured)
    if peak is None:
        return "pool size, free space and running requests were not measured"
    return plain(idle_numbers(peak) if gate.quantity.startswith("idle.") else three_numbers(peak))
