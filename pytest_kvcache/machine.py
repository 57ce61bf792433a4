"""Where a Run was measured, and with which versions: what a reader needs to repeat it."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from pytest_kvcache import __version__


def machine_facts() -> dict[str, Any]:
    """Return what this machine is: cores, memory in bytes, kernel, Python."""
    import psutil

    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "python": platform.python_version(),
    }


def version_facts(engine: str, engine_version: str) -> dict[str, str]:
    """Return the versions that a reader needs to repeat a Run."""
    from importlib import metadata

    versions = {"pytest-kvcache": __version__, "python": sys.version.split()[0]}
    for name in ("locust", "httpx", "pytest"):
        versions[name] = metadata.version(name)
    if engine:
        versions[engine] = engine_version or "not told"
    return versions
