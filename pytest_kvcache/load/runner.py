"""Runs a load profile as a Locust process of its own and says whether what it left is whole.

The process gets an empty environment of Locust (no ``LOCUST_*``), the Run's folder as its own, every knob on its command line,
and the servers with their secrets in one environment variable. It leads its own process group, and it ends in bounded time:
by its own clock, by TERM, by KILL.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec

import pytest_kvcache
from pytest_kvcache.errors import Broken, CannotWrite, LoadFailed, UsageError
from pytest_kvcache.load import contract
from pytest_kvcache.load.arrivals import is_listed, parse_stages, total_s
from pytest_kvcache.load.contract import LoadFile, read_load, workload_hash
from pytest_kvcache.load.rejections import clean_text
from pytest_kvcache.load.target import Handed, from_endpoint
from pytest_kvcache.load.traces import span_of

if TYPE_CHECKING:
    from pytest_kvcache.server.address import Endpoint

ROWS = "requests.jsonl"
OWN_WORDS = "pytest-kvcache: "
LOG = "locust.log"
PREPARE_S = 300.0
STOP_TIMEOUT_S = 30.0
GRACE_S = 20.0
TERM_S = 10.0
DEFAULT_DURATION_S = 30.0
_TAKEN = frozenset({"api", "model", "rows", "endpoints", "duration_s", "seed", "users", "output_tokens", "max_model_len", "keep_text"})


class Asked(TypedDict, total=False):
    """What is asked of a load, by keyword. 0 users and output tokens take the profile's own, 0 seconds take 30.

    ``options`` holds options of the profile and of the load by name (``requests``, ``nonce``, ``lengths``, ``think_s``,
    ``backoff_s``, ``retries``, ``stop_timeout_s``; ``rate``, ``arrivals``, ``stages`` and the others that ``--kv-help`` lists). ``processes``
    above 1 spreads the load over so many worker processes of this machine, whose rows come together in the one file.
    """

    users: int
    duration_s: float
    output_tokens: int
    seed: int
    max_model_len: int | None
    request_timeout_s: float
    keep_text: bool
    options: Mapping[str, Any] | None
    processes: int


@dataclass(frozen=True)
class LoadResult:
    """One load as it ended. ``complete`` says that it came to its planned end and every row is there; else ``problems`` says why.

    ``rows`` counts request rows, ``workload`` is the hash over what was asked (contract.workload_hash), and ``notes`` say in what recorded traffic was
    sent otherwise than it was.
    """

    rows_path: Path
    exit_code: int
    complete: bool
    rows: int
    argv: list[str]
    workload: str
    planned_users: int
    planned_duration_s: float
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def profiles() -> dict[str, Path]:
    """Return the shipped profiles by name. In a checkout they lie beside the package, in a wheel inside it."""
    package = Path(pytest_kvcache.__file__).parent
    for folder in (package / "loadprofiles", package.parent / "loadprofiles"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    return {}


def profile_path(name: str) -> Path:
    """Return the Locust file of a profile: a shipped one by name, or a path. Raises UsageError, which lists the profiles."""
    shipped = profiles()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    known = ", ".join(shipped) or "none"
    if path.suffix == ".py" or len(path.parts) > 1:
        if path.is_file() and path.suffix == ".py":
            return path.resolve()
        raise UsageError("there is no such load profile", where=name, hint=f"name a Python file that is there, or one of {known}")
    raise UsageError(f"there is no load profile {name!r}", hint=f"shipped are {known}; or give the path of a Locust file")


def own_length(options: Mapping[str, Any]) -> bool:
    """Return whether a load with these options knows itself how long it lasts: by listed stages, or by the times of a trace."""
    return is_listed(str(options.get("stages") or "")) or bool(options.get("trace"))


def command(profile: Path, rows: Path, host: str, **asked: Unpack[Asked]) -> list[str]:
    """Return the command line of the load; it holds no key and no header. Raises UsageError for an option that cannot be meant."""
    users, duration_s, processes = asked.get("users", 0), asked.get("duration_s", 0.0), asked.get("processes", 1)
    request_timeout_s = asked.get("request_timeout_s", 300.0)
    extra = dict(asked.get("options") or {})
    taken = sorted(_TAKEN & extra.keys())
    if taken:
        raise UsageError(f"{', '.join(taken)} cannot be given as an option of the load", hint="it is set by its own argument")
    stop_timeout_s = float(extra.pop("stop_timeout_s", STOP_TIMEOUT_S))
    if processes > 1 and extra.get("rate"):
        users = max(users, processes)  # one user of each worker starts its share of the arrivals
    bounds = [number for number in (users, int(extra.get("requests", 0) or 0)) if number]
    processes = min([processes, *bounds])
    spawn_rate = float(extra.pop("spawn_rate", 0) or max(1, users))
    requests = int(extra.get("requests", 0))
    if requests and not duration_s:
        # a counted load ends by its count; time only bounds it
        duration_s = max(DEFAULT_DURATION_S, 2 * request_timeout_s)
    if not duration_s and is_listed(str(extra.get("stages") or "")):
        duration_s = total_s(parse_stages(str(extra["stages"]), 1.0, 0.0))
    if not duration_s and extra.get("trace") and not float(extra.get("rate") or 0):
        span_s = span_of(extra)
        duration_s = span_s + 1.0 if span_s else 0.0
    duration_s = duration_s or DEFAULT_DURATION_S
    words = [sys.executable, "-m", "locust", "-f", str(profile), "--headless", "-H", host]
    if users:
        words += ["-u", str(users), "-r", f"{spawn_rate:g}"]
    words += ["-t", f"{int(duration_s + PREPARE_S) + 1}s", "-s", f"{max(1, round(stop_timeout_s))}s"]
    if processes > 1:
        words += ["--processes", str(processes), *_own_port()]
    words += ["--exit-code-on-error", "0", "--only-summary", "--loglevel", "INFO", "--kv-rows", str(rows)]
    words += ["--kv-duration-s", f"{duration_s:g}", "--kv-seed", str(asked.get("seed", 1)), "--kv-request-timeout-s", f"{request_timeout_s:g}"]
    if output_tokens := asked.get("output_tokens"):
        words += ["--kv-output-tokens", str(output_tokens)]
    if max_model_len := asked.get("max_model_len"):
        words += ["--kv-max-model-len", str(max_model_len)]
    if asked.get("keep_text"):
        words.append("--kv-keep-text")
    for name, value in extra.items():
        if not name.replace("_", "").isalnum() or value is None:
            raise UsageError(f"{name!r} is no option of a load profile", hint="locust -f PROFILE --kv-help lists them")
        flag = "--kv-" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [f"{flag}={value}"]
    return words


def _own_port() -> list[str]:
    """Return the words that give master and workers a port of their own, so that two loads on one machine do not meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return ["--master-bind-port", port, "--master-port", port]


def run_load(endpoints: Sequence[Endpoint], profile: str, folder: Path, *, stop: threading.Event | None = None, **asked: Unpack[Asked]) -> LoadResult:
    """Press ``endpoints`` with a profile and return what was left in ``folder``: requests.jsonl and locust.log.

    ``asked`` is what ``Asked`` names. The same ``nonce`` and seed send the same prompts; without one every load sends prompts
    that were never sent before. ``stop`` ends the load early.

    Raises UsageError for what cannot be meant, LoadFailed where the process broke or left no end record (rows so far stay in
    the file), CannotWrite where the folder cannot be written.
    """
    if not endpoints:
        raise UsageError("a load needs an endpoint")
    path = profile_path(profile)
    options = asked["options"] = {"nonce": secrets.token_hex(8), **(asked.get("options") or {})}
    rows, log = folder.resolve() / ROWS, folder.resolve() / LOG
    handed = Handed([from_endpoint(endpoint) for endpoint in endpoints], os.getpid(), str(Path.cwd()))
    words = command(path, rows, handed.targets[0].root, **asked)
    bound_s = float(words[words.index("--kv-duration-s") + 1]) + STOP_TIMEOUT_S + GRACE_S
    process = _start(words, folder, log, handed)
    problems: list[str] = []
    try:
        problems += _wait(process, rows, bound_s, stop)
    finally:
        _end(process)
    exit_code = process.wait()
    load = read_load(rows)
    _check(load, exit_code, log, stopped=stop is not None and stop.is_set())
    problems += _problems(load, int(options.get("requests", 0)))
    start = load.start
    told = start.options if start is not None else {}
    return LoadResult(
        rows_path=rows,
        exit_code=exit_code,
        complete=load.complete and not (stop is not None and stop.is_set()),
        rows=load.rows,
        argv=words,
        workload=workload_hash(start) if start is not None else "",
        planned_users=int(told.get("users", asked.get("users", 0))),
        planned_duration_s=float(told.get("duration_s", asked.get("duration_s", 0.0))),
        problems=problems,
        notes=list(dict.fromkeys(note.text for note in load.notes if note.subject == contract.OTHER_NOTE)),
    )


def environment(handed: Handed) -> dict[str, str]:
    """Return the environment of the load process: ours without Locust's own variables, with the servers."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
    env[contract.ENVIRONMENT] = msgspec.json.encode(handed).decode()
    package = str(Path(pytest_kvcache.__file__).parent.parent)
    if package not in {*site.getsitepackages(), site.getusersitepackages()}:
        # a checkout on sys.path only: the profile must find the same package from the Run's folder
        env["PYTHONPATH"] = os.pathsep.join(part for part in (package, env.get("PYTHONPATH", "")) if part)
    return env


def _start(words: Sequence[str], folder: Path, log: Path, handed: Handed) -> subprocess.Popen[bytes]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(
                words, cwd=folder, env=environment(handed), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
    except OSError as error:
        raise CannotWrite(
            f"the load cannot be started: {error.strerror or error}", where=str(folder), hint="check the folder's permissions and free space"
        ) from None


def _wait(process: subprocess.Popen[bytes], rows: Path, bound_s: float, stop: threading.Event | None) -> list[str]:
    """Wait until the process ends, is asked to stop, or has outlived its bound; the clock of the bound starts with the load."""
    deadline_s = time.monotonic() + PREPARE_S
    begun = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            return []
        if stop is not None and stop.is_set():
            return ["the load was stopped before its end"]
        now_s = time.monotonic()
        if not begun and rows.exists() and rows.stat().st_size > 0:
            begun, deadline_s = True, now_s + bound_s
        if now_s > deadline_s:
            return ["the load process did not end in time and was stopped"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process group: TERM, then KILL."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: Path, count: int = 15) -> str:
    """Return the last lines of a log, cleaned for a terminal: our own where there are some; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65_536))
            tail = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    own = [line for line in tail if line.startswith((OWN_WORDS, "  where:", "  try:"))]
    return "\n".join(deque((clean_text(line, 300) for line in own or tail if line.strip()), count))


def _check(load: LoadFile, exit_code: int, log: Path, *, stopped: bool) -> None:
    """Raise LoadFailed where the load said that it failed, or left no end record."""
    for note in load.notes:
        if note.subject == contract.FAILED_NOTE:
            what, where, hint = (*note.text.split("\n"), "", "")[:3]
            raise _failed(f"the load failed: {what}", where or str(log), hint or "look at the log of the load", exit_code)
    if load.broken:
        raise LoadFailed(f"the rows of the load are damaged: {load.broken}", where=str(load.path), hint="measure again")
    if load.ends or stopped:
        return
    tail = last_lines(log)
    if load.start is None:
        what = f"the load process ended with exit code {exit_code} before it began"
    else:
        what = f"the load process ended with exit code {exit_code} and without its end record; {load.rows} rows were kept in {load.path.name}"
    refused = load.start is None and ": error: " in tail
    hint = "pytest-kvcache load PROFILE --show-options lists all options" if refused else "the last lines of its log are above"
    raise _failed(f"{what}\n{tail}" if tail else what, str(log), hint, exit_code if refused else Broken.exit_code)


def _failed(what: str, where: str, hint: str, exit_code: int) -> LoadFailed:
    """Return the error; it exits as a usage error where the load process did, for an option or a file of the user's."""
    error = LoadFailed(what, where=where, hint=hint)
    if exit_code == UsageError.exit_code:
        error.exit_code = exit_code
    return error


def _problems(load: LoadFile, wanted: int) -> list[str]:
    problems = []
    if load.reason in contract.PLANNED_ENDS and load.rows - load.repeated < wanted:
        problems.append(f"{load.rows - load.repeated} of {wanted} requests were sent")
    if load.ends and load.reason not in contract.PLANNED_ENDS:
        problems.append(f"the load ended early: {load.reason}")
    counted = sum(end.rows for end in load.ends)
    if load.ends and counted != load.rows:
        problems.append(f"the load counted {counted} requests, and the file holds {load.rows}")
    problems += [note.text for note in load.notes if note.subject == contract.LOST_NOTE]
    broken = [note for note in load.notes if note.subject == "task exception"]
    if broken:
        problems.append(f"{len(broken)} exceptions in the profile's task, first: {broken[0].text}")
    return problems
