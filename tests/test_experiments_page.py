"""The page on experiments: every command on it can be meant, and every option exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from pytest_kvcache.cli import build_parser
from pytest_kvcache.options import settings_from
from pytest_kvcache.settings import flag, option_fields

PAGE = (Path(__file__).parent.parent / "docs" / "experiments.md").read_text()


def test_the_commands_of_the_page_can_be_meant() -> None:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S)).replace("\\\n", " ")
    commands = [shlex.split(line) for line in blocks.splitlines() if line.startswith("pytest-kvcache ")]
    assert len(commands) == 7
    for words in commands:
        settings_from(build_parser().parse_args(words[1:]))


def test_every_option_of_the_page_exists() -> None:
    known = {flag(option.name) for option in option_fields()}
    named = {
        name for name in re.findall(r"--kv-[a-z-]+", PAGE) if name not in {"--kv-type", "--kv-cache-memory-bytes", "--kv-cache-dtype"}
    }  # options of the engines
    assert named
    assert named <= known
