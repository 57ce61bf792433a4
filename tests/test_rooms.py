"""The house: who may import whom, what starts with pytest, and what may never be imported where."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_kvcache

PACKAGE = Path(pytest_kvcache.__file__).parent
# The order of the rooms: a module imports what stands before it, never what stands after it.
ORDER = [
    "errors", "userfiles", "units", "quantities", "qualityrecords", "experimentrecords", "findingrecords", "loadrecords", "records", "runfolder", "machine", "settings", "conditions", "server", "engines", "observe", "load", "capacity", "quality",
    "imports", "analysis", "judge", "report", "planned", "diskroom", "measure", "conclusion", "cards", "opening", "adopting", "importing", "experimenting", "foreseeing", "session", "sweeping", "assertions", "options", "hookspecs", "marks", "fixtures", "plugin", "watching",
    "inspection", "diagnosis", "qualifying", "gating", "searching", "planning", "wasting", "demo", "cli", "suite",
]  # fmt: skip
HEAVY = ("pandas", "numpy", "scipy", "matplotlib", "httpx", "pynvml", "msgspec", "prometheus_client", "jinja2", "rich", "locust", "gevent", "psutil")
PYTEST_ROOMS = {"marks", "options", "fixtures", "hookspecs", "plugin", "suite"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> list[tuple[str, bool]]:
    """Return the imported module names of a file, each with whether it is imported for type checking only."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        found += [(name, id(node) in typing_only) for name in names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_never_imports_a_later_room(path: Path) -> None:
    room = _room(path)
    if room == "__init__":
        return
    assert room in ORDER, f"{room} is no room of the design"
    for name, typing_only in _imports(path):
        parts = name.split(".")
        if parts[0] != "pytest_kvcache" or len(parts) < 2 or parts[1] not in ORDER or typing_only:
            continue
        assert ORDER.index(parts[1]) <= ORDER.index(room), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_locust_and_pytest_stay_in_their_rooms(path: Path) -> None:
    for name, typing_only in _imports(path):
        top = name.split(".")[0]
        if top in {"locust", "gevent", "geventhttpclient"}:
            assert path.relative_to(PACKAGE).parts[0] == "load", f"{path} imports {name}"
        if top in {"pytest", "_pytest"} and not typing_only:
            assert _room(path) in PYTEST_ROOMS, f"{path} imports {name}"
        assert top != "_pytest", f"{path} imports a private module of pytest"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_keeps_to_one_subject(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400, "over 400 lines: two subjects in one file"
    assert path.stem not in {"utils", "helpers", "common", "base"}


def test_what_imports_gevent_is_reached_through_users_alone() -> None:
    load = [path for path in MODULES if path.parent.name == "load"]
    patched = {path.stem for path in load if any(name.split(".")[0] in {"locust", "gevent", "geventhttpclient"} for name, _ in _imports(path))}
    assert "users" in patched
    # a user class that stands on users.py
    patched |= {path.stem for path in load if any(name == "pytest_kvcache.load.users" for name, _ in _imports(path))} - {
        "hooks",
        "openloop",
        "session",
    }
    for path in MODULES:
        for name, typing_only in _imports(path):
            parts = name.split(".")
            if parts[:2] == ["pytest_kvcache", "load"] and len(parts) > 2 and parts[2] in patched and not typing_only:
                assert path in load, f"{path.relative_to(PACKAGE)} imports {name}"
                assert path.stem in patched, f"{path.relative_to(PACKAGE)} imports {name}"


def test_an_unused_plugin_costs_no_heavy_import() -> None:
    code = "import sys, pytest; before = set(sys.modules); import pytest_kvcache.plugin; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert "pytest_kvcache.plugin" in out
    assert not [name for name in out if name.split(".")[0] in HEAVY]


def test_the_command_line_starts_without_pytest_or_anything_heavy() -> None:
    code = "import sys; import pytest_kvcache.cli as c; c.build_parser(); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert not [name for name in out if name.split(".")[0] in (*HEAVY, "pytest")]


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import pytest_kvcache; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert out == ["pytest_kvcache"]


def test_measuring_does_not_patch_sockets() -> None:
    code = "import sys, socket; import pytest_kvcache.session, pytest_kvcache.cli; print('locust' in sys.modules, 'gevent' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert out == ["False", "False"]
