"""What records and reports may hold of options and command lines: the values as given, without keys, passwords and user-info."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from pytest_kvcache.server.redaction import HIDDEN, redact, redact_words
from pytest_kvcache.settings import Settings, flag

_COMMANDS = ("launch", "before", "after")


def shown_command(text: str) -> str:
    """Return a launch text with its secrets hidden; a text that has none comes back as it is."""
    try:
        words = shlex.split(text)
    except ValueError:
        return redact(text)
    shown = redact_words(words)[0]
    return text if shown == words else shlex.join(shown)


def shown_header(text: str) -> str:
    """Return an HTTP header option by its name alone: a header's value may be a key whatever its name is."""
    return f"{text.partition(':')[0].strip()}: {HIDDEN}"


def shown_settings(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the options with their sources as run.json keeps them."""
    return {name: {**entry, "value": _shown(name, entry["value"])} for name, entry in settings.provenance().items()}


def _shown(name: str, value: Any) -> Any:
    if name == "header":
        return [shown_header(text) for text in value]
    if isinstance(value, tuple):
        return [redact(text) for text in value]
    if name in _COMMANDS:
        return shown_command(value)
    return redact(value) if isinstance(value, str) else value


def shown_argv(program: str, words: Sequence[str]) -> str:
    """Return a command line of ours, ready to paste, with the secrets in its options hidden."""
    shown = [program]
    names = {prefix + flag(name).removeprefix("--kv-"): name for name in (*_COMMANDS, "header") for prefix in ("--kv-", "--")}
    pending = ""
    for word in words:
        option, equals, value = word.partition("=")
        if pending:
            shown.append(_shown_value(pending, word))
            pending = ""
        elif option in names and equals:
            shown.append(f"{option}={_shown_value(names[option], value)}")
        elif option in names:
            shown.append(word)
            pending = names[option]
        else:
            shown.append(redact(word))
    return shlex.join(shown)


def _shown_value(name: str, value: str) -> str:
    return shown_header(value) if name == "header" else shown_command(value)
