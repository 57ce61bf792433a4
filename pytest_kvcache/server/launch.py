"""Starting a server of the user's: the command, a free port, the wait for a first token, and what to say where it does not come."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pytest_kvcache.errors import EndpointRefused, EndpointUnreachable, KvError, LaunchFailed, UsageError
from pytest_kvcache.server.address import Endpoint, parse_endpoint
from pytest_kvcache.server.causes import explain
from pytest_kvcache.server.endpoint import check_ready
from pytest_kvcache.server.process import OwnedProcess
from pytest_kvcache.server.redaction import HIDDEN, header_secrets, is_secret_name, redact, redact_words
from pytest_kvcache.server.startlog import last_lines, read_log_tail, root_cause
from pytest_kvcache.settings import Settings

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PUBLISHED = re.compile(r"(?:(?:[0-9]+(?:\.[0-9]+){3}|\[[0-9a-fA-F:]+\]):)?([0-9]{1,5})(?::[0-9]{1,5})?(?:/tcp)?")
_EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::", "localhost", "*"})  # noqa: S104 -- named to be replaced by loopback
_TAIL_BYTES = 1 << 20
_KILLED = "the kernel ends processes so when memory runs out: see dmesg, and give the server less"


@dataclass(frozen=True)
class LaunchSpec:
    """A command ready to run. ``engine`` is the name of an engine of ours, "" for a command of the user's.

    ``shown`` is the command as records may hold it, ``secrets`` what was hidden in it. ``host`` is where it will answer.
    """

    command: tuple[str, ...] = field(repr=False)
    env: dict[str, str] = field(repr=False)
    engine: str
    shown: tuple[str, ...]
    port: int
    host: str = "127.0.0.1"
    is_port_fixed: bool = False
    secrets: tuple[str, ...] = field(default=(), repr=False)


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse_command(text: str, port: int | None = None) -> LaunchSpec:
    """Return what a launch text means: split like a shell does, and never given to one.

    Leading ``NAME=value`` words are environment; ``{port}`` is replaced in every word, other braces stay. A first word that names
    an engine of ours is one; any other is a command, which must have ``{port}`` or name its port (``--port 8000``, ``--port=8000``,
    ``-p 8000``). ``port`` is taken for ``{port}``; None takes a free one. Raises UsageError.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"the launch command cannot be split into words: {str(error).lower()}", where=redact(text)[:200], hint="close the quotes"
        ) from None
    if "\0" in text:
        raise UsageError("the launch command holds a NUL character", hint="write the command as you would in a shell")
    env: dict[str, str] = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        env[match.group(1)] = match.group(2)
        words.pop(0)
    if not words:
        raise UsageError(
            "the launch command names no program", where=redact(text)[:200], hint='such as "vllm serve MODEL --port {port}", or llamacpp'
        )
    has_port = any("{port}" in word for word in (*words, *env.values()))
    number = port if port is not None else free_port()
    words = [word.replace("{port}", str(number)) for word in words]
    env = {name: value.replace("{port}", str(number)) for name, value in env.items()}
    shown, secrets = redact_words(words)
    shown_env = [f"{name}={HIDDEN if is_secret_name(name) else redact(value)}" for name, value in env.items()]
    secrets += [value for name, value in env.items() if is_secret_name(name)]

    def spec(command: list[str], variables: dict[str, str], engine: str, at: int, host: str) -> LaunchSpec:
        is_fixed = not (has_port or engine)
        return LaunchSpec(tuple(command), variables, engine, (*shown_env, *shown), at, host, is_fixed, tuple(secrets))

    from pytest_kvcache.server.embedded import embedded_command

    own = embedded_command(words, number)
    if own is not None:
        argv, variables = own
        return spec(argv, {**variables, **env}, words[0], number, "127.0.0.1")
    if not has_port:
        fixed = _named_port(words)
        if fixed is None:
            hint = "write {port} where the command takes its port, such as --port {port}"
            raise UsageError("the launch command does not say on which port the server answers", where=shlex.join(shown)[:300], hint=hint)
        number = fixed
    return spec(words, env, "", number, _named_host(words))


def _option(words: list[str], names: tuple[str, ...]) -> str | None:
    """Return the value of the last of these options in a command: ``--port 8000`` or ``--port=8000``."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            if equals:
                found = value
            elif index + 1 < len(words):
                found = words[index + 1]
    return found


def _named_port(words: list[str]) -> int | None:
    match = _PUBLISHED.fullmatch(_option(words, ("--port", "-p", "--publish")) or "")
    port = int(match.group(1)) if match else 0
    return port if 0 < port < 65536 else None


def _named_host(words: list[str]) -> str:
    """Return the address on which a server with these options answers us; loopback where it listens everywhere."""
    host = _option(words, ("--host",)) or ""
    if host in _EVERY_ADDRESS or not re.fullmatch(r"[A-Za-z0-9.:_-]{1,253}", host):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


class LaunchedServer:
    """A server that we started and own; ready, with its model chosen. A context manager: leaving it ends the server.

    ``command`` is the command as records may hold it (keys hidden), ``engine`` the name of an engine of ours or "". The server also
    ends with this process, however that dies.
    """

    def __init__(self, endpoint: Endpoint, spec: LaunchSpec, process: OwnedProcess, ready_s: float) -> None:
        self.endpoint = endpoint
        self.command = list(spec.shown)
        self.engine = spec.engine
        self.ready_s = ready_s
        self._process = process

    @property
    def log(self) -> Path:
        """The file with the server's output, keys taken out."""
        return self._process.log

    def is_alive(self) -> bool:
        """Return whether the server's own process still runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise LaunchFailed with the cause out of the log where the server has died."""
        if not self._process.poll():
            raise _died(self._process, self.command, "while it was in use")

    def pids(self) -> list[int]:
        """Return the pids of the server's process tree that are alive, the root first."""
        return self._process.pids()

    def stop(self) -> None:
        """End the whole tree: TERM, then KILL after the stop time of the settings. A second call does nothing."""
        self._process.stop()

    def __enter__(self) -> LaunchedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def launch(text: str, settings: Settings, log: Path, env: Mapping[str, str] | None = None) -> LaunchedServer:
    """Start the command and return the server once it lives, answers, lists its model and has given a token.

    Its output goes to ``log`` with keys taken out; ``env`` is added to its environment. Raises UsageError for a text that cannot be meant and for a model that is not
    served, CannotWrite for the log, and LaunchFailed within the ready time of the settings, with the cause and the last lines of
    the log; whatever was started is then ended.
    """
    began = time.monotonic()
    log = log.absolute()
    spec = parse_command(text)
    at = parse_endpoint(f"http://{spec.host}:{spec.port}", settings)
    _check_program(spec)
    if spec.is_port_fixed:
        _check_port(spec)
    secrets = [*spec.secrets, *_secrets_at_hand(at)]
    try:
        process = OwnedProcess(spec.command, env={**(env or {}), **spec.env}, log=log, stop_timeout_s=settings.stop_timeout_s, secrets=secrets)
    except LaunchFailed as error:
        raise LaunchFailed(error.what, where=_where(spec.shown, log, ""), hint="check that the program exists and may be run") from None
    if spec.engine:
        _yield_cpu(process.pid)
    try:
        # The server is on this machine: a proxy has nothing to do on the way.
        at = dataclasses.replace(at, proxy="", owned=True, pid=process.pid, log=log)
        ready = _await_ready(process, spec, at, began, settings.ready_timeout_s)
        return LaunchedServer(ready, spec, process, time.monotonic() - began)
    except BaseException:
        process.stop()
        raise


def _yield_cpu(pid: int) -> None:
    """Let an engine of ours yield the CPU to the load and the sampler as a group.

    Where the kernel schedules sessions as groups (autogroup, proc(5)), the niceness of its processes counts only among themselves: on two
    cores a sampler beside vLLM was seen to wait for 3 s, and for 20 ms once the group was nice.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("10")


def _secrets_at_hand(at: Endpoint) -> list[str]:
    """Return the secrets that the server may know and print: our key, and what the environment holds under such a name."""
    values = [*header_secrets(at.api_headers()), *(value for name, value in os.environ.items() if is_secret_name(name))]
    return [value for value in values if len(value) >= 8]


def _await_ready(process: OwnedProcess, spec: LaunchSpec, at: Endpoint, began: float, ready_timeout_s: float) -> Endpoint:
    deadline = began + ready_timeout_s

    def watch() -> None:
        if not process.poll():
            raise _died(process, spec.shown, "before it was ready")

    try:
        ready = check_ready(at, max(0.1, deadline - time.monotonic()), starting=True, watch=watch)
    except (EndpointUnreachable, EndpointRefused) as error:
        watch()
        is_late = time.monotonic() > deadline - 1.0
        raise _not_ready(process, spec, error, ready_timeout_s if is_late else None) from None
    watch()
    _check_listener(process, spec)
    return ready


def _check_program(spec: LaunchSpec) -> None:
    program = spec.command[0]
    if shutil.which(program, path=spec.env.get("PATH")) is not None:
        return
    path = Path(program)
    with contextlib.suppress(OSError):
        if os.sep in program and path.exists():
            raise LaunchFailed(
                f"the program cannot be run: {redact(program)[:200]}", where=_where(spec.shown, None, ""), hint="make it executable: chmod +x"
            )
    hint = "install it, or write its whole path; a command that needs a shell is written as: bash -c '...'"
    raise LaunchFailed(f"there is no program {redact(program)[:200]}", where=_where(spec.shown, None, ""), hint=hint)


def _check_port(spec: LaunchSpec) -> None:
    """Raise LaunchFailed where something already listens on the port that the command names."""
    with contextlib.suppress(OSError), socket.create_connection((spec.host.strip("[]"), spec.port), timeout=2.0):
        owner = _listener(spec.port)
        who = f" by {owner.name()} (pid {owner.pid})" if owner is not None else ""
        what = f"port {spec.port} is already in use{who}"
        raise LaunchFailed(
            what, where=_where(spec.shown, None, ""), hint="write {port} in place of the number, and a free one is taken; or end that process"
        )


def _listener(port: int) -> psutil.Process | None:
    """Return the process that listens on a port of this machine, None where that cannot be seen."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port and connection.pid:
                return psutil.Process(connection.pid)
    except (psutil.Error, OSError):
        pass
    return None


def _check_listener(process: OwnedProcess, spec: LaunchSpec) -> None:
    """Raise LaunchFailed where the port is answered by a process that was there before the one that we started.

    One that came later may well belong to it: a container's port is held by the container engine.
    """
    owner = _listener(spec.port)
    if owner is None or owner.pid in process.pids():
        return
    try:
        is_older = owner.create_time() < psutil.Process(process.pid).create_time()
        name = owner.name()
    except psutil.Error:
        return
    if is_older:
        what = f"port {spec.port} is answered by {name} (pid {owner.pid}), which was running before, and not by the launched server"
        raise LaunchFailed(what, where=_where(spec.shown, process.log, ""), hint="write {port} in place of the number, or attach with --kv-endpoint")


def _died(process: OwnedProcess, shown: tuple[str, ...] | list[str], when: str) -> LaunchFailed:
    process.stop()  # the rest of its tree; and the log is complete after that
    status, text = process.status, read_log_tail(process.log, _TAIL_BYTES)
    cause = root_cause(text)
    hint = "; ".join(part for part in explain(cause, text) if part) or "the log has the whole story"
    if status == 128 + signal.SIGKILL:
        hint = _KILLED
    if status is None:
        how = "was lost: the process that watches over it was ended from outside"
    elif status < 0:
        name = signal.Signals(-status).name if -status in {s.value for s in signal.Signals} else str(-status)
        how = f"was ended by {name}"
        if name == "SIGKILL":
            hint, cause = _KILLED, ""  # whoever is killed logs no cause; what the log ends with is an older matter
    else:
        how = f"exited with status {status}"
        if status == 0:
            hint = "the command must stay in the foreground while it serves"
    return LaunchFailed(f"the launched server {how} {when}" + (f": {cause}" if cause else ""), where=_where(shown, process.log, text), hint=hint)


def _not_ready(process: OwnedProcess, spec: LaunchSpec, error: KvError, late_s: float | None) -> LaunchFailed:
    process.stop()
    text = read_log_tail(process.log, _TAIL_BYTES)
    cause = root_cause(text)
    what = f"the launched server was not ready within {late_s:g} s" if late_s is not None else "the launched server runs, but cannot be used"
    what = f"{what}: {error.what} ({error.where})" + (f"; its log says: {cause}" if cause else "")
    hint = "if it needs longer, raise --kv-ready-timeout-s; the log says how far it came" if late_s is not None else error.hint
    return LaunchFailed(what, where=_where(spec.shown, process.log, text), hint=hint)


def _where(shown: tuple[str, ...] | list[str], log: Path | None, text: str) -> str:
    """Return the command, the log and its last lines as the lines of an error."""
    command = shlex.join(shown)
    lines = [command if len(command) <= 500 else command[:499] + "…"]
    if log is not None:
        lines.append(f"log: {log}")
    tail = last_lines(text)
    if tail:
        lines.append("its last lines:")
        lines += [f"  | {line}" for line in tail]
    return "\n         ".join(lines)
