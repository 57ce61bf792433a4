"""The page that explains the rules says nothing that the code does not do."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_kvcache.capacity.formats import FORMATS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "capacity.md").read_text()


def test_the_example_runs_as_it_stands() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code
    for block in code:
        exec(compile(block, "docs/capacity.md", "exec"), {})


def test_the_table_of_types_names_real_types_with_their_bytes() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| q8_0"))
    names, sizes = (cell.strip() for cell in row.split("|")[1:3])
    assert [FORMATS[name].block_bytes for name in names.split(", ")] == [int(size) for size in re.findall(r"\d+", sizes)[:-1]]
    assert all(FORMATS[name].block == 32 for name in names.split(", "))
