"""The one grammar of thresholds, stop rules and findings: ``usage.peak < 0.9``, ``rejections{lane=nearmax} == 0``.

::

    condition  := and ("or" and)*
    and        := term ("and" term)*
    term       := "(" condition ")" | quantity labels? op bound
    labels     := "{" ("lane" | "class") "=" word ("," ...)* "}"
    op         := "<" | "<=" | ">" | ">=" | "==" | "!="
    bound      := number unit? | "baseline" (("+" | "-") number unit? | ("*" | "/") number)?

The text is parsed and never evaluated as code. A quantity that is Missing gives INCONCLUSIVE, never PASS; one that cannot happen on
the engine leaves its term out. Only the standard library is used.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from pytest_kvcache import units
from pytest_kvcache.errors import UsageError
from pytest_kvcache.quantities import KNOWN, Known, Missing, Value

PASS, FAIL, INCONCLUSIVE, INVALID = "PASS", "FAIL", "INCONCLUSIVE", "INVALID"
NOT_APPLICABLE = "NOT_APPLICABLE"

_LONGEST = 2000
_DEEPEST = 20


@dataclass(frozen=True, slots=True)
class Limit:
    """One comparison. ``bound`` is in the quantity's unit; with ``relative`` it is what is added to or multiplied with the baseline."""

    name: str
    op: str
    bound: float
    lane: str = ""
    rejection_class: str = ""
    relative: str = ""

    @property
    def key(self) -> str:
        """The quantity with its labels, as it is written."""
        labels = [f"{k}={v}" for k, v in (("lane", self.lane), ("class", self.rejection_class)) if v]
        return self.name + ("{" + ",".join(labels) + "}" if labels else "")

    @property
    def text(self) -> str:
        """The comparison in the grammar, without its unit: ``parse(limit.text)`` gives it back."""
        if not self.relative:
            return f"{self.key} {self.op} {_number(self.bound)}"
        if (self.relative, self.bound) == ("+", 0.0):
            return f"{self.key} {self.op} baseline"
        sign = "-" if self.relative == "+" and self.bound < 0 else self.relative
        return f"{self.key} {self.op} baseline {sign} {_number(abs(self.bound) if self.relative == '+' else self.bound)}"


def _meant(name: str) -> str:
    """Return the known quantities that a misspelt or shortened name may mean, as the beginning of a hint; empty where none is near."""
    family = [known for known in KNOWN if known.startswith(name + ".")]
    near = family or difflib.get_close_matches(name, KNOWN, 3, 0.75)
    return f"did you mean {' or '.join(sorted(near)[:4])}? " if near else ""


def _number(value: float) -> str:
    """Return a number as people write it; ``float`` gives the same back."""
    return str(int(value)) if abs(value) < 1e15 and value == int(value) else repr(value)


@dataclass(frozen=True, slots=True)
class Group:
    """Several conditions joined by ``and`` or ``or``."""

    word: str
    parts: tuple[Limit | Group, ...]

    @property
    def text(self) -> str:
        """The group in the grammar."""
        return f" {self.word} ".join(f"({part.text})" if isinstance(part, Group) else part.text for part in self.parts)


Condition = Limit | Group


def limits_in(condition: Condition) -> Iterator[Limit]:
    """Yield the single comparisons of a condition, in the order in which they are written."""
    if isinstance(condition, Limit):
        yield condition
        return
    for part in condition.parts:
        yield from limits_in(part)


def joined_by_and(condition: Condition) -> tuple[Condition, ...]:
    """Return the conditions that must all hold for this one to hold; itself, where it is not several joined by ``and``."""
    return condition.parts if isinstance(condition, Group) and condition.word == "and" else (condition,)


Lookup = Callable[[Limit], Value]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a condition came out. ``verdict`` is PASS (it holds), FAIL, INCONCLUSIVE (a value is missing) or NOT_APPLICABLE.

    ``text`` gives the numbers; ``value`` and ``bound`` are there for a single comparison whose numbers are known.
    """

    verdict: str
    text: str
    value: float | None = None
    bound: float | None = None


_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?P<unit>%|[A-Za-z]+(?:/s)?)?"
    r"|(?P<op><=|>=|==|!=|<|>)|(?P<mark>[(){},=+\-*/])|(?P<name>[A-Za-z_][A-Za-z0-9_.]*(?:-[A-Za-z_][A-Za-z0-9_.]*)*(?:/s)?))"
)


def parse(text: str) -> Condition:
    """Return the condition that ``text`` says. Raises UsageError: where it cannot be read, and the known quantities and units."""
    return _Parser(text).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LONGEST:
            raise UsageError(f"a condition of {len(text)} characters is too long", hint=f"at most {_LONGEST}")
        self.tokens = list(self._split())
        self.at = 0

    def _split(self) -> Iterator[tuple[str, str, str, int]]:
        at = 0
        while self.text[at:].strip():
            match = _TOKEN.match(self.text, at)
            if match is None:
                self.fail("cannot be read", at)
            kind = str(match.lastgroup if match.lastgroup != "unit" else "number")
            yield kind, match.group(kind), match.group("unit") or "", match.start(kind)
            at = match.end()
        yield "end", "", "", len(self.text)

    def fail(self, what: str, at: int | None = None, hint: str = "") -> NoReturn:
        position = self.tokens[self.at][3] if at is None else at
        rest = self.text[position : position + 40].strip() or "the end"
        raise UsageError(
            f"condition {self.text[:200]!r}: {what} at {rest!r}", hint=hint or "for example: usage.peak < 0.9 and rejections{lane=nearmax} == 0"
        )

    def peek(self, text: str) -> bool:
        kind, value, unit, _ = self.tokens[self.at]
        return kind in {"mark", "name", "op"} and value == text and not unit

    def take(self, kind: str, what: str) -> tuple[str, str]:
        found, value, unit, _ = self.tokens[self.at]
        if found != kind:
            self.fail(f"{what} is expected")
        self.at += 1
        return value, unit

    def whole(self) -> Condition:
        condition = self.group("or", 0)
        if self.tokens[self.at][0] != "end":
            self.fail("'and', 'or' or the end is expected")
        return condition

    def group(self, word: str, depth: int) -> Condition:
        if depth > _DEEPEST:
            self.fail(f"brackets are nested more than {_DEEPEST} deep")
        parts = [self.group("and", depth) if word == "or" else self.term(depth)]
        while self.peek(word):
            self.at += 1
            parts.append(self.group("and", depth) if word == "or" else self.term(depth))
        return parts[0] if len(parts) == 1 else Group(word, tuple(parts))

    def term(self, depth: int) -> Condition:
        if self.peek("("):
            self.at += 1
            inner = self.group("or", depth + 1)
            if not self.peek(")"):
                self.fail("')' is expected")
            self.at += 1
            return inner
        start = self.at
        name, _ = self.take("name", "a quantity")
        known = KNOWN.get(name)
        if known is None:
            self.at = start
            self.fail(f"unknown quantity {name!r}", hint=_meant(name) + "known: " + ", ".join(sorted(KNOWN)))
        labels = self.labels(name, known)
        op, _ = self.take("op", "one of < <= > >= == !=")
        bound, relative = self.bound(name, known)
        return Limit(name, op, bound, labels.get("lane", ""), labels.get("class", ""), relative)

    def labels(self, name: str, known: Known) -> dict[str, str]:
        labels: dict[str, str] = {}
        if not self.peek("{"):
            return labels
        self.at += 1
        while True:
            key, _ = self.take("name", "'lane' or 'class'")
            allowed = {"lane": known.lanes, "class": known.classes}
            if not allowed.get(key):
                has = [label for label, there in allowed.items() if there]
                self.at -= 1
                self.fail(
                    f"{name} has no label {key!r}",
                    hint=f"it has {' and '.join(has)}" if has else f"{name} has no labels: it belongs to the whole server",
                )
            if not self.peek("="):
                self.fail("'=' is expected")
            self.at += 1
            labels[key], _ = self.take("name", f"the {key}")
            if self.peek(","):
                self.at += 1
                continue
            if not self.peek("}"):
                self.fail("'}' is expected")
            self.at += 1
            return labels

    def bound(self, name: str, known: Known) -> tuple[float, str]:
        if not self.peek("baseline"):
            sign = -1.0 if self.peek("-") else 1.0
            self.at += sign < 0
            return sign * self.number(name, known.unit), ""
        self.at += 1
        for mark in "+-*/":
            if self.peek(mark):
                self.at += 1
                number = self.number(name, known.unit if mark in "+-" else "factor")
                if mark == "/" and number == 0:
                    self.fail("division by zero", self.tokens[self.at - 1][3])
                return {"+": number, "-": -number, "*": number, "/": 1 / (number or 1.0)}[mark], "*" if mark in "*/" else "+"
        return 0.0, "+"

    def number(self, name: str, unit: str) -> float:
        text, suffix = self.take("number", "a number")
        if not suffix and self.tokens[self.at][0] == "name" and self.tokens[self.at][1] not in {"and", "or"}:
            suffix, _ = self.take("name", "a unit")
        value = float(text.replace("_", ""))
        if not math.isfinite(value):
            self.at -= 2 if suffix else 1
            self.fail(f"{text!r} is too large a number", hint="nothing is ever above it, so it bounds nothing")
        if not suffix or suffix == unit:
            return value
        if suffix == "%" and unit in {"ratio", "factor"}:
            return value / 100
        parsers: dict[str, Callable[[str], float]] = {"s": units.parse_seconds, "bytes": units.parse_bytes}
        if unit in parsers:
            try:
                return parsers[unit](text + suffix)
            except UsageError:
                pass
        known = {"ratio": "none (0.9) or %", "s": "s, ms, us, m, h", "bytes": "B, KiB, MiB, GiB, TiB, kB, MB, GB, TB", "factor": "none or %"}
        self.at -= 1
        return self.fail(f"{suffix!r} is no unit of {name}", hint=f"units: {known.get(unit, f'none, or {unit}')}")


def from_limits(limits: Mapping[str, object]) -> list[Limit]:
    """Return the limits of a mark: ``usage_peak=0.9, ttft_p95="1.5s", free_blocks_min=64, rejections="< 3"``.

    A keyword is a quantity with ``_`` for the dot. A plain value is the worst that passes (at most, where lower is better; at least,
    where higher is); a text may begin with an operator or hold ``baseline``. Raises UsageError.
    """
    names = {name.replace(".", "_"): name for name in KNOWN}
    found: list[Limit] = []
    for keyword, value in limits.items():
        name = names.get(keyword.replace(".", "_"))
        if name is None:
            raise UsageError(f"unknown limit {keyword!r}", hint="known: " + ", ".join(sorted(names)))
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise UsageError(f"limit {keyword}={value!r} is no number and no text", hint=f"for example {keyword}=1 or {keyword}='<= 1'")
        text = str(value).strip()
        if not re.match(r"[<>=!]", text):
            op = {"lower": "<=", "higher": ">=", "": ""}[KNOWN[name].better]
            if not op:
                raise UsageError(
                    f"limit {keyword}={value!r}: neither way is better", hint=f"say it with an operator: {keyword}='<= {text}' or '>= {text}'"
                )
            text = f"{op} {text}"
        condition = parse(f"{name} {text}")
        if not isinstance(condition, Limit):
            raise UsageError(f"limit {keyword}={value!r} holds more than one comparison", hint="give each its own keyword")
        found.append(condition)
    return found


_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def evaluate(condition: Condition, lookup: Lookup, baseline: Lookup | None = None) -> Outcome:
    """Return how the condition comes out on the values that ``lookup`` gives, against those of ``baseline`` where it names one.

    ``and`` and ``or`` follow the logic of three values: one FAIL settles an ``and``, one PASS settles an ``or``, else what is
    INCONCLUSIVE stays so. Terms that cannot apply to the engine are left out.
    """
    if isinstance(condition, Limit):
        return _judge(condition, lookup, baseline)
    parts = [evaluate(part, lookup, baseline) for part in condition.parts]
    counted = [part for part in parts if part.verdict != NOT_APPLICABLE]
    text = f" {condition.word} ".join(part.text for part in parts)
    if not counted:
        return Outcome(NOT_APPLICABLE, text)
    verdicts = {part.verdict for part in counted}
    settles, other = (FAIL, PASS) if condition.word == "and" else (PASS, FAIL)
    return Outcome(settles if settles in verdicts else INCONCLUSIVE if INCONCLUSIVE in verdicts else other, text)


def _judge(limit: Limit, lookup: Lookup, baseline: Lookup | None) -> Outcome:
    unit = KNOWN[limit.name].unit
    value = lookup(limit)
    if isinstance(value, Missing):
        verdict = NOT_APPLICABLE if value.cannot_happen else INCONCLUSIVE
        return Outcome(verdict, f"{limit.key}: {value.reason}")
    number, bound, against = value.number(), limit.bound, ""
    if limit.relative:
        before = baseline(limit) if baseline is not None else Missing("no baseline was given")
        if isinstance(before, Missing):
            return Outcome(NOT_APPLICABLE if before.cannot_happen else INCONCLUSIVE, f"{limit.key} of the baseline: {before.reason}", number)
        bound = before.number() + limit.bound if limit.relative == "+" else before.number() * limit.bound
        against = f" (baseline {units.show(before.number(), unit)})"
    if math.isnan(number) or math.isnan(bound):
        return Outcome(INCONCLUSIVE, f"{limit.key}: not a number")
    verdict = PASS if _HOLDS[limit.op](number, bound) else FAIL
    return Outcome(verdict, f"{limit.key} is {units.show(number, unit)}, asked for {limit.op} {units.show(bound, unit)}{against}", number, bound)
