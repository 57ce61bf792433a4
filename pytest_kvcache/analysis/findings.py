"""Findings: rules as data over the named quantities of one Run, in the grammar of conditions.py; nothing in a rule is run as code.

A rule says under which condition it speaks, how grave that is, the sentence with its numbers, what to measure, what to do and what not to
do, and why. The rules of this package lie in ``rules/*.toml``; a user's own file has the same form.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvcache import units
from pytest_kvcache.analysis.own_words import in_own_words
from pytest_kvcache.analysis.three import beside
from pytest_kvcache.conditions import INCONCLUSIVE, NOT_APPLICABLE, PASS, Condition, Limit, Lookup, evaluate, joined_by_and, limits_in, parse
from pytest_kvcache.errors import UsageError
from pytest_kvcache.quantities import KNOWN, QUANTITIES, Missing, Reading, Value
from pytest_kvcache.userfiles import read_user_text

if TYPE_CHECKING:
    from pytest_kvcache.analysis.timeline import Analysis

SEVERITIES = ("critical", "warning", "notice")
"""From the gravest on."""
MOST_SHOWN = 5
FILES = ("memory", "payload", "pressure", "evidence")
_TEXTS = ("id", "title", "when", "severity", "say", "symptom", "cause", "avoid", "reason", "because")
_LISTS = ("do", "measure", "spare", "instead_of")
_NEEDED = ("id", "when", "say")
_PLACE = re.compile(r"\{([^{}]*)\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")
MOST_BYTES = 1 << 20
"""Of a file of rules."""
_MOST_RULES = 500
_LONGEST_TEXT = 2000
# Without a request log these are computed from nothing: what a server holds is then not ours, which says nothing about it.
_OF_REQUESTS = re.compile(r"(?:fill|waste|level|accounting|length|live_length|payload|demand|endpoint|mean_length)\.|prefix\.(?!on|saved|hit_rate)")
NO_LOG = Missing("there is no request log beside these metrics: measure with pytest-kvcache load, or name a Run")


@dataclass(frozen=True)
class Rule:
    """One rule. In ``say`` ``{usage.peak}`` is a number, ``{a|b}`` the first that is known, ``{baseline:x}`` the baseline's, ``{source:x}`` what x was read
    from (of a distance: the pair), and what stands in ``[...]`` is left out where a number in it is not known. ``spare`` are quantities whose term is left out where the engine cannot have them; any other such term silences the rule.
    ``because`` says what the numbers of ``when`` rest on. Where it speaks, the rules of ``instead_of``, which say the same less exactly, are silent."""

    id: str
    when: Condition
    say: str
    title: str = ""
    severity: str = "warning"
    weight: float = 50.0
    symptom: str = ""
    cause: str = ""
    measure: tuple[str, ...] = ()
    do: tuple[str, ...] = ()
    avoid: str = ""
    reason: str = ""
    because: str = ""
    spare: tuple[str, ...] = ()
    instead_of: tuple[str, ...] = ()
    condition: str = ""
    where: str = ""

    @property
    def limits(self) -> list[Limit]:
        """The single comparisons of the condition."""
        return list(limits_in(self.when))


@dataclass(frozen=True)
class Evidence:
    """One number that a finding rests on: the quantity, its value as text (or why it is missing), and where it was read."""

    name: str
    title: str
    shown: str
    source: str


@dataclass(frozen=True)
class Finding:
    """What a rule says of one Run. ``text`` holds the numbers, ``beside`` what stands beside a usage ratio where ``text`` has one, ``why`` the condition with what was measured, ``run`` the Run's folder."""

    id: str
    title: str
    severity: str
    weight: float
    text: str
    do: tuple[str, ...]
    avoid: str
    reason: str
    cause: str
    evidence: tuple[Evidence, ...]
    why: str
    run: str = ""
    profile: str = ""
    beside: str = ""


@dataclass(frozen=True)
class Unseen:
    """A rule that could not be looked at, and why."""

    id: str
    title: str
    why: str
    run: str = ""


@dataclass(frozen=True)
class Findings:
    """``found`` from the gravest on; ``unseen`` are rules whose quantities are missing. Show at most ``MOST_SHOWN`` of ``found``."""

    found: tuple[Finding, ...] = ()
    unseen: tuple[Unseen, ...] = ()

    @property
    def shown(self) -> tuple[Finding, ...]:
        """The gravest, at most ``MOST_SHOWN``."""
        return self.found[:MOST_SHOWN]


@cache
def shipped_rules() -> tuple[Rule, ...]:
    """Return the rules of this package, in the order of their files."""
    folder = Path(__file__).parent / "rules"
    return tuple(rule for name in FILES for rule in read_rules(folder / f"{name}.toml"))


def rules_with(*paths: str | Path) -> tuple[Rule, ...]:
    """Return the shipped rules with those of users' files; one of the same id replaces ours. Raises UsageError."""
    found = {rule.id: rule for rule in shipped_rules()}
    for path in paths:
        found.update({rule.id: rule for rule in read_rules(Path(path))})
    return tuple(found.values())


def read_rules(path: Path) -> tuple[Rule, ...]:
    """Return the rules of a TOML file. Raises UsageError: the file, the rule and its key, and what is known where a name or a unit is not."""
    return rules_in(read_user_text(path, "the rules", most_bytes=MOST_BYTES, hint="name a TOML file of [[rule]] tables; docs/diagnose.md"), str(path))


def rules_in(text: str, where: str) -> tuple[Rule, ...]:
    """Return the rules of a TOML text; ``where`` names its file in errors. Raises UsageError."""
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"the rules are no TOML: {str(error)[:200]}", where=where) from None
    tables = raw.get("rule")
    if set(raw) - {"rule"} or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError("a file of rules holds [[rule]] tables and nothing else", where=where, hint="docs/diagnose.md has an example")
    if len(tables) > _MOST_RULES:
        raise UsageError(f"{len(tables)} rules are too many", where=where, hint=f"at most {_MOST_RULES}")
    rules = [_rule(table, f"{where}, rule {number}") for number, table in enumerate(tables, start=1)]
    seen: set[str] = set()
    for rule in rules:
        if rule.id in seen:
            raise UsageError(f"two rules are called {rule.id!r}", where=where, hint="give each an id of its own")
        seen.add(rule.id)
    return tuple(rules)


def _rule(table: Mapping[str, Any], where: str) -> Rule:
    if isinstance(table.get("id"), str) and table["id"]:
        where = f"{where} ({table['id'][:80]})"
    known = {*_TEXTS, *_LISTS, "weight"}
    if strange := sorted(set(table) - known):
        raise UsageError(f"a rule has no key {strange[0]!r}", where=where, hint="known: " + ", ".join(sorted(known)))
    for name in _TEXTS:
        if name in table and not (isinstance(table[name], str) and len(table[name]) <= _LONGEST_TEXT):
            raise UsageError(f"{name} is no text of at most {_LONGEST_TEXT} characters", where=where)
    if lacking := [name for name in _NEEDED if not table.get(name)]:
        raise UsageError(f"a rule needs {lacking[0]!r}", where=where, hint=f"needed: {', '.join(_NEEDED)}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", table["id"]):
        raise UsageError(f"id: {table['id'][:80]!r} is no id of a rule", where=where, hint="letters, digits, dashes, at most 64")
    lists: dict[str, tuple[str, ...]] = {}
    for name in _LISTS:
        value = table.get(name, [])
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or len(value) > 20 or not all(isinstance(one, str) and len(one) <= _LONGEST_TEXT for one in value):
            raise UsageError(f"{name} is no list of texts", where=where)
        lists[name] = tuple(value)
    severity = table.get("severity", "warning")
    if severity not in SEVERITIES:
        raise UsageError(f"severity: {severity[:80]!r} is no severity", where=where, hint="known: " + ", ".join(SEVERITIES))
    weight = table.get("weight", 50)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 100:
        raise UsageError("weight is a number from 0 to 100", where=where)
    try:
        when = parse(table["when"])
    except UsageError as error:
        raise UsageError(f"when: {error.what}", where=where, hint=error.hint) from None
    places = [_bare(name) for place in _PLACE.findall(table["say"]) for name in place.split("|")]
    for key, names in (("measure", lists["measure"]), ("spare", lists["spare"]), ("say", places)):
        for name in names:
            if name not in KNOWN and name not in _TEXTUAL:
                raise UsageError(f"{key}: unknown quantity {name[:80]!r}", where=where, hint="known: " + ", ".join(sorted({*KNOWN, *_TEXTUAL})))
    texts: dict[str, str] = {name: table[name] for name in _TEXTS if name in table and name != "when"}
    texts.setdefault("title", table["id"])
    return Rule(when=when, condition=table["when"], weight=float(weight), where=where, **lists, **texts)  # type: ignore[arg-type]


def _bare(name: str) -> str:
    return name.removeprefix("baseline:").removeprefix("source:")


_TEXTUAL = frozenset(name for name, quantity in QUANTITIES.items() if quantity.kind == "config" and not quantity.unit)


def find(analysis: Analysis, rules: Sequence[Rule] | None = None, baseline: Analysis | None = None) -> Findings:
    """Return what the rules (the shipped ones, where None) say of a Run; ``baseline`` is the Run that relative terms compare with."""
    lookup = _lookup(analysis)
    before = _lookup(baseline) if baseline is not None else None
    found: list[Finding] = []
    unseen: list[Unseen] = []
    folder = analysis.run.folder
    where = f"{folder.parent.name}/{folder.name}" if folder.parent.name == "runs" else folder.name
    chosen = shipped_rules() if rules is None else rules
    for rule in chosen:
        verdict, text = _holds(rule, lookup, before)
        if verdict == PASS:
            named = _named(rule, analysis.run.record.engine)
            finding = _finding(named, lookup, before, text, where, analysis.run.record.profile)
            found.append(replace(finding, beside=beside(analysis)) if "{usage." in rule.say else finding)
        elif verdict == INCONCLUSIVE:
            unseen.append(Unseen(rule.id, rule.title, _missing(rule, lookup, before), where))
    spoken = {one.id for one in found}
    silent = {name for rule in chosen if rule.id in spoken for name in rule.instead_of}
    return Findings(tuple(sorted((one for one in found if one.id not in silent), key=_order)), tuple(unseen))


def _named(rule: Rule, engine: str) -> Rule:
    """Return the rule with the options in what to do as the engine calls them."""
    do = tuple(in_own_words(text, engine) for text in rule.do)
    return replace(rule, do=do, avoid=in_own_words(rule.avoid, engine), cause=in_own_words(rule.cause, engine))


def find_in(analyses: Sequence[Analysis], rules: Sequence[Rule] | None = None, baselines: Sequence[Analysis] = ()) -> Findings:
    """Return what the rules say of several Runs: each rule speaks once, of the first Run that shows it.

    A Run is compared with the first of ``baselines`` of its profile, or where there are none with the first Run given (of a sweep: not at
    all, its settings are meant to differ). A rule counts as not looked at only where no Run could answer it.
    """
    found: dict[str, Finding] = {}
    unseen: dict[str, Unseen] = {}
    answered: set[str] = set()
    chosen = shipped_rules() if rules is None else rules
    for number, analysis in enumerate(analyses):
        profile = analysis.run.record.profile
        alike = [other for other in baselines if other.run.record.profile == profile]
        first = analyses[0] if number and not baselines and analyses[0].run.record.variant == analysis.run.record.variant else None
        against = alike[0] if alike else first
        one = find(analysis, chosen, against)
        for finding in one.found:
            found.setdefault(finding.id, finding)
        for rule in one.unseen:
            unseen.setdefault(rule.id, rule)
        answered |= {rule.id for rule in chosen} - {rule.id for rule in one.unseen}
    left = [rule for name, rule in unseen.items() if name not in answered]
    return Findings(tuple(sorted(found.values(), key=_order)), tuple(left))


def _order(finding: Finding) -> tuple[int, float]:
    return SEVERITIES.index(finding.severity), -finding.weight


def _lookup(analysis: Analysis) -> Lookup:
    sent = analysis.values.get("requests.sent")
    watched = not isinstance(sent, Reading) or not sent.number()

    def read(limit: Limit) -> Value:
        if watched and _OF_REQUESTS.match(limit.name):
            return NO_LOG
        return analysis.value(limit)

    return read


def _holds(rule: Rule, lookup: Lookup, before: Lookup | None) -> tuple[str, str]:
    """Return the verdict of a rule's condition. A term that the engine cannot have silences the rule, unless it is spared."""
    outcome = evaluate(rule.when, lookup, before)
    if outcome.verdict != PASS:
        return outcome.verdict, outcome.text
    for part in joined_by_and(rule.when):
        if evaluate(part, lookup, before).verdict == NOT_APPLICABLE and not {limit.name for limit in limits_in(part)} <= set(rule.spare):
            return NOT_APPLICABLE, outcome.text
    return PASS, outcome.text


def _missing(rule: Rule, lookup: Lookup, before: Lookup | None) -> str:
    """Return which quantities of a rule are missing and why, each reason once."""
    reasons: dict[str, list[str]] = {}
    for limit in rule.limits:
        outcome = evaluate(limit, lookup, before)
        if outcome.verdict == INCONCLUSIVE:
            name, _, reason = outcome.text.partition(": ")
            names = reasons.setdefault(reason, [])
            names += [name] if name not in names else []
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in list(reasons.items())[:3])


def _finding(rule: Rule, lookup: Lookup, before: Lookup | None, why: str, run: str, profile: str) -> Finding:
    def values(place: str) -> list[Value]:
        return [_read(before if name.startswith("baseline:") else lookup, _bare(name)) for name in place.split("|")]

    def optional(match: re.Match[str]) -> str:
        known = all(any(isinstance(value, Reading) for value in values(place)) for place in _PLACE.findall(match.group(1)))
        return match.group(1) if known else ""

    def place(match: re.Match[str]) -> str:
        found = values(match.group(1))
        known = next((value for value in found if isinstance(value, Reading)), found[0])
        return known.source[:300] if isinstance(known, Reading) and match.group(1).startswith("source:") else _show(known)

    names = dict.fromkeys([limit.name for limit in rule.limits] + list(rule.measure))
    evidence = []
    for name in names:
        value = lookup(Limit(name, "==", 0.0))
        source = value.source if isinstance(value, Reading) else value.reason
        evidence.append(Evidence(name, _title(name), _show(value), source[:300]))
    text = _PLACE.sub(place, _OPTIONAL.sub(optional, rule.say))
    return Finding(
        rule.id, rule.title, rule.severity, rule.weight, text, rule.do, rule.avoid, rule.reason, rule.cause, tuple(evidence), why, run, profile
    )


def _title(name: str) -> str:
    return KNOWN[name].title if name in KNOWN else QUANTITIES[name].title


def _read(read: Lookup | None, name: str) -> Value:
    return read(Limit(name, "==", 0.0)) if read is not None else Missing("no baseline was given")


def _show(value: Value) -> str:
    if isinstance(value, Missing):
        return "an unknown number"
    return units.show(value.value, "" if value.unit == "events" else value.unit)
