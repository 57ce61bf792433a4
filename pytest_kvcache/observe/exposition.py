"""Parses the Prometheus text format, quickly: of a 55 KB scrape only the families in use are looked into.

The form is that of the text exposition format 0.0.4, with what OpenMetrics adds (exemplars, ``# EOF``) tolerated. Lines in the newer
quoted-name form go through prometheus_client's parser. ``tests/observe`` holds the two parsers against each other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache

from pytest_kvcache.engines import Sample, Samples, clean

MOST_ROWS = 50_000
_MOST_NAMES = 5_000
_MOST_BAD = 5
_LONGEST_KEPT_LABELS = 4_096

# Possessive (++, *+): a hostile line cannot make them backtrack.
_LINE = re.compile(
    r"""[ \t]*+(?P<name>[a-zA-Z_:][a-zA-Z0-9_:.]*+)[ \t]*+
        (?:\{(?P<labels>(?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\}[ \t]*+)?
        (?P<value>[^ \t]++)""",
    re.VERBOSE | re.DOTALL,
)
_LABEL = re.compile(r"""[ \t]*+([a-zA-Z_][a-zA-Z0-9_.]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"[ \t]*+(,|\Z)""", re.DOTALL)
# vLLM 0.8 says in its HELP texts that its prefix counters count blocks; later versions have "tokens" there.
_IN_BLOCKS = ("queried blocks.", "cached blocks.", "queried blocks.\r", "cached blocks.\r")
_ESCAPE = re.compile(r'\\([\\n"])')
_ESCAPED = {"\\": "\\", "n": "\n", '"': '"'}


def parse_samples(text: str | bytes, wanted: Collection[str] | None = None) -> Samples:
    """Return the samples of the series in ``wanted`` (names as spelled in the text; default: all) and the names of all series.

    Never raises: a line that cannot be read is kept in ``bad_lines`` and its series is then missing, not zero. Bytes that are
    no UTF-8 are replaced. Timestamps and exemplars are left out. Pass a set as ``wanted``: it is asked for every line.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    rows: dict[str, list[Sample]] = {}
    names: set[str] = set()
    bad: list[str] = []
    in_blocks: set[str] = set()
    count = 0
    # Only \n ends a line here: str.splitlines would also cut at characters that a label may hold.
    for line in text.split("\n"):
        if not line or line[0] == "#":
            if line.endswith(_IN_BLOCKS) and len(words := line.split(None, 3)) == 4 and words[1] == "HELP":
                in_blocks.add(words[2].removesuffix("_total"))
            continue
        at = line.find("{")
        if at < 0:
            word = line.split(None, 1)
            if not word:
                continue
            name = word[0]
        else:
            name = line[:at]
        if wanted is not None and name not in wanted:
            if name and not (name[0] <= " " or name[-1] <= " ") and " " not in name and "\t" not in name:
                names.add(name)
                continue
            # An indented line, or a blank or an exemplar before the brace: look again, slowly.
            name = _name_of(line)
            if name and name not in wanted:
                names.add(name)
                continue
            if not name and line.strip()[:1] in {"", "#"}:
                continue
        sample = _sample(line)
        if sample is None:
            if len(bad) < _MOST_BAD:
                bad.append(clean(line, 120))
            continue
        name, labels, value = sample
        names.add(name)
        if wanted is None or name in wanted:
            count += 1
            if count > MOST_ROWS:
                bad.append(f"more than {MOST_ROWS} rows: the rest was not read")
                break
            rows.setdefault(name, []).append(Sample(labels, value))
    return Samples(rows, frozenset(names if len(names) <= _MOST_NAMES else sorted(names)[:_MOST_NAMES]), tuple(bad), frozenset(in_blocks))


def _name_of(line: str) -> str:
    match = _LINE.match(line)
    return match["name"] if match else ""


def _sample(line: str) -> tuple[str, Mapping[str, str], float] | None:
    match = _LINE.match(line)
    if match is None:
        return _odd_sample(line)
    value = _number(match["value"].rstrip("\r"))
    text = match["labels"]
    labels = _labels(text) if text and len(text) <= _LONGEST_KEPT_LABELS else _read_labels(text or "")
    return None if value is None or labels is None else (match["name"], labels, value)


def _number(text: str) -> float | None:
    """Return the value; Python's float reads every form that the format has, and the underscore, which it has not."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _read_labels(text: str) -> Mapping[str, str] | None:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None or match[1] in labels:
            # A comma may stand before the closing brace, and nothing else may.
            return None if text[at:].strip(" \t") else labels
        value = match[2]
        labels[match[1]] = _ESCAPE.sub(lambda m: _ESCAPED[m[1]], value) if "\\" in value else value
        at = match.end()
    return labels


# A scrape ten times a second repeats its label texts; the mapping is shared and never changed.
_labels = lru_cache(maxsize=1024)(_read_labels)


def _odd_sample(line: str) -> tuple[str, Mapping[str, str], float] | None:
    """Read a line that is not of the classic form, such as one with a quoted name, with prometheus_client's parser."""
    if not line.lstrip(" \t").startswith("{"):
        return None
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(line.strip() + "\n"):
            for sample in family.samples:
                return sample.name, dict(sample.labels), float(sample.value)
    except (ValueError, IndexError, KeyError):
        pass
    return None
