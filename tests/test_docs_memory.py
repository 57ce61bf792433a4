"""docs/memory.md: its code runs and prints what the page says, its names are known, its commands are ones that the command line takes."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

from made_run import MadeRun

from pytest_kvcache import cli, options
from pytest_kvcache.quantities import KNOWN
from pytest_kvcache.sweeping import parse_sweep

PAGE = (Path(__file__).parent.parent / "docs" / "memory.md").read_text()
NAME = re.compile(r"`((?:ledger|server|waste|length|balance|usage)\.[a-z_0-9]+)`")


def test_the_code_of_the_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    names: dict[str, Any] = {"folder": MadeRun().write(tmp_path / "run").folder}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(code, "docs/memory.md", "exec"), names)
    assert "padded to the longest, 2,048: 5,888 of 32,768 tokens are payload, 18 %" in printed.getvalue()
    assert "padded to the longest, 2,048: 5,888 of 32,768 tokens are payload, 18 %" in PAGE


def test_every_quantity_of_the_page_is_known_and_none_is_left_out() -> None:
    named = set(NAME.findall(PAGE))
    assert named <= set(KNOWN)
    assert {name for name in KNOWN if name.startswith(("ledger.", "balance.", "server."))} <= named


def test_the_commands_of_the_page_are_taken() -> None:
    words = [shlex.split(line, comments=True) for line in PAGE.splitlines() if line.startswith("pytest-kvcache ")]
    assert {line[1] for line in words} == {"load", "waste"}
    for line in words:
        arguments = cli.build_parser().parse_args(line[1:])
        if line[1] == "load":
            assert parse_sweep(options.settings_from(arguments).sweep).option == "block-size"
