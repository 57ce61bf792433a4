"""docs/load.md: its profile runs, and it names every profile, option, trace format and outcome that there is."""

from __future__ import annotations

import re
from pathlib import Path

from scripted_server import ScriptedServer

import pytest_kvcache.load
from pytest_kvcache.load.arrivals import PROCESSES, SHAPES, parse_stages
from pytest_kvcache.load.contract import OUTCOMES, read_rows
from pytest_kvcache.load.draws import parse_histogram
from pytest_kvcache.load.runner import profiles, run_load
from pytest_kvcache.load.traces import FORMATS
from pytest_kvcache.server.address import parse_endpoint
from pytest_kvcache.settings import Settings

PAGE = (Path(__file__).parent.parent / "docs" / "load.md").read_text()


def test_the_profile_of_the_page_runs(tmp_path: Path) -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "KvUser" in block)
    (tmp_path / "short.py").write_text(code)
    with ScriptedServer() as server:
        options = {"requests": 4, "stop_timeout_s": 2}
        endpoint = parse_endpoint(server.url, Settings())
        result = run_load([endpoint], str(tmp_path / "short.py"), tmp_path / "run", users=2, output_tokens=4, options=options)
    rows = list(read_rows(result.rows_path))
    assert {(row.lane, row.outcome) for row in rows} == {("short", "ok")}
    assert all(50 <= (row.prompt_tokens or 0) <= 200 for row in rows)


def test_the_page_names_what_there_is() -> None:
    own = Path(pytest_kvcache.load.__file__).parent / "replay.py"
    for name, path in profiles().items():
        assert f"| `{name}` |" in PAGE
        for option in re.findall(r'ProfileOption\("(\w+)"', (own if name == "trace" else path).read_text()):
            assert f"`{option}`" in PAGE, (name, option)
    for word in (*PROCESSES, *SHAPES, *FORMATS, *OUTCOMES):
        assert f"`{word}`" in PAGE, word


def test_the_examples_of_the_page_can_be_meant() -> None:
    assert len(parse_stages("30s:2,1m:2-8,2m:8", 1.0, 0.0)) == 3
    assert "`30s:2,1m:2-8,2m:8`" in PAGE
    assert len(parse_histogram("100-200:60,200-2000:35,4000:5").bins) == 3
    assert "`100-200:60,200-2000:35,4000:5`" in PAGE
