"""Make text from outside harmless for each place that it is shown in.

Model names, error texts, log lines and notes come from servers and files. None of them may move a terminal's cursor, run in a
browser, break a table or an XML document, notify somebody in a code review, or fill a page.
"""

from __future__ import annotations

import re

# Escape sequences first (CSI, then OSC and its kin up to their terminator, then two-byte ones), so that their tails do not stay as text.
_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]")
_SPACES = re.compile(r"[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]+")
# Control characters, zero-width and direction marks, surrogates and non-characters: nothing that a reader could see.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufdd0-\ufdef\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
_MARKDOWN = re.compile(r"([\\`*_\[\](){}|~!])")
_LEADING = re.compile(r"^(?:[-+=#]|\d+(?=[.)](?:\s|\Z)))")
_REFERENCE = re.compile(r"([@#])(?=\w)|(:)(?=//)|(www)(?=\.)", re.IGNORECASE)


def clip(text: str, limit: int) -> str:
    """Return ``text`` with at most ``limit`` characters; what was cut is shown by an ellipsis."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)].rstrip() + "…"


def plain(text: object, limit: int = 500) -> str:
    """Return one line of visible text: no escape sequences, no control or direction characters, at most ``limit`` characters."""
    raw = str(text)[: 8 * limit + 64]
    return clip(_UNSEEN.sub("", _SPACES.sub(" ", _SEQUENCES.sub("", raw))).strip(), limit)


def block(text: object, limit: int = 4000) -> str:
    """Return visible text of several lines, each made harmless as ``plain`` does; at most ``limit`` characters in all."""
    lines = str(text)[: 8 * limit].splitlines()
    return clip("\n".join(plain(line, limit) for line in lines), limit)


def markdown(text: object, limit: int = 500) -> str:
    """Return a sentence for Markdown in which nothing from outside is markup, HTML, a link, a mention or a reference.

    ``@name``, ``#12`` and bare addresses are recognised by code review sites after Markdown is rendered, where a backslash does not
    help; a word joiner between their parts does.
    """
    safe = plain(text, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = _MARKDOWN.sub(r"\\\1", safe)
    safe = _LEADING.sub(lambda found: found.group(0) + "\u2060" if found.group(0).isdigit() else "\\" + found.group(0), safe)
    return _REFERENCE.sub(lambda found: found.group(0) + "\u2060", safe)


def code(text: object, limit: int = 200) -> str:
    """Return a name or command as a Markdown code span that also holds inside a table."""
    safe = plain(text, limit).replace("`", "'").replace("|", "\\|")
    return f"`{safe}`" if safe else ""
