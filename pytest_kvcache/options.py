"""Settings as pytest flags, ini keys and environment variables, and as flags of the command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pytest_kvcache.errors import UsageError
from pytest_kvcache.settings import Settings, flag, option_fields, resolve

if TYPE_CHECKING:
    import pytest


def help_text(option: dataclasses.Field[Any]) -> str:
    """Return the help of an option with its choices and default, as ``--help`` and the docs show it."""
    default, meta = option.default, option.metadata
    text = str(meta["help"])
    if meta["choices"]:
        text += f" ({', '.join(meta['choices'])})"
    if isinstance(default, bool):
        return text
    if default not in ("", ()):
        unit = " s" if meta["parse"] == "seconds" else ""
        text += f" [default: {default:g}{unit}]" if isinstance(default, float) else f" [default: {default}]"
    return text


def _arguments(option: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return the keywords that both pytest's and argparse's ``addoption`` take; the default is None so that "given" is known."""
    arguments: dict[str, Any] = {"dest": "kv_" + option.name, "default": None, "help": help_text(option).replace("%", "%%")}
    if isinstance(option.default, bool):
        return arguments | {"action": "store_const", "const": True}
    arguments["metavar"] = option.metadata["metavar"] or option.name.rsplit("_", 1)[-1].upper()
    if isinstance(option.default, tuple):
        arguments["action"] = "append"
    return arguments


def add_pytest_options(parser: pytest.Parser) -> None:
    """Add every option to pytest, as a flag and as an ini key."""
    group = parser.getgroup("kvcache", "KV cache of an LLM server (pytest-kvcache)")
    for option in option_fields():
        group.addoption(flag(option.name), **_arguments(option))
        kind: Any = "linelist" if isinstance(option.default, tuple) else "string"
        parser.addini("kv_" + option.name, help_text(option), type=kind, default=None)


def settings_of(config: pytest.Config) -> Settings:
    """Return the Settings of a pytest session. Raises pytest.UsageError for what cannot be meant."""
    import pytest  # here, so that the command line, which shares this module, starts without pytest

    given = {o.name: config.getoption("kv_" + o.name) for o in option_fields() if config.getoption("kv_" + o.name, None) is not None}
    ini = {o.name: config.getini("kv_" + o.name) for o in option_fields() if config.getini("kv_" + o.name) is not None}
    try:
        return resolve(given, ini)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def add_cli_options(add_argument: Callable[..., Any], names: Iterable[str]) -> None:
    """Add the named options to an argparse parser, without the ``kv-`` of pytest: ``--endpoint``, ``--users``."""
    wanted = list(names)
    for option in option_fields():
        if option.name in wanted:
            add_argument(flag(option.name).replace("--kv-", "--"), **_arguments(option))


def as_here(words: Iterable[str]) -> list[str]:
    """Return the words of a command line with pytest's names of options as this one has them, so that a hint can be pasted: ``--kv-resume`` is ``--resume``."""
    known = {flag(option.name) for option in option_fields()}
    return ["--" + word.removeprefix("--kv-") if word.partition("=")[0] in known else word for word in words]


def settings_from(arguments: argparse.Namespace, **fixed: Any) -> Settings:
    """Return the Settings of a command line; ``fixed`` overrides. Raises UsageError."""
    given = {name[3:]: value for name, value in vars(arguments).items() if name.startswith("kv_") and value is not None}
    return resolve({**given, **fixed}, {})


def option_table() -> str:
    """Return the table of all options in Markdown, as docs/options.md holds it."""
    lines = ["| flag | environment | help |", "|---|---|---|"]
    group = ""
    for option in option_fields():
        if option.metadata["group"] != group:
            group = option.metadata["group"]
            lines.append(f"| **{group}** | | |")
        text = help_text(option).replace("|", "\\|")
        lines.append(f"| `{flag(option.name)}` | `PYTEST_KVCACHE_{option.name.upper()}` | {text} |")
    return "\n".join(lines) + "\n"


def one_line(text: str, most: int = 200) -> str:
    """Return ``text`` fit for one line of a terminal: control characters out, at most ``most`` characters."""
    return "".join(ch if ch.isprintable() else " " for ch in text)[:most]


if __name__ == "__main__":
    import sys
    from pathlib import Path

    Path(sys.argv[1]).write_text("# Options\n\nMade from the fields of `Settings`; `nox -s docs` writes this page again.\n\n" + option_table())
