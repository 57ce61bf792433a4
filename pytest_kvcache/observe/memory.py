"""Memory and CPU time of a server's processes on this machine, and the memory of the machine, by psutil."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import MemoryRow
from pytest_kvcache.server.address import Endpoint

# They listen for a server, or start one, that runs in a container or on another machine: their memory is not its memory.
BETWEEN = frozenset(
    {
        "docker", "docker-proxy", "podman", "nerdctl", "kubectl", "ssh", "sshd", "autossh", "socat", "nginx", "haproxy", "envoy", "traefik", "caddy",
        "conmon", "rootlesskit", "rootlessport", "slirp4netns", "pasta", "srun", "salloc", "gcloud", "aws", "az", "cloudflared", "tailscaled",
    }
)  # fmt: skip
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "env", "timeout", "nice", "sudo", "tini", "dumb-init"})


class ProcessReader:
    """Reads the process tree of one server: the one that we launched, or the one that listens on a loopback address of this machine.

    Where a container engine, a tunnel or a proxy stands between, the server's own processes are not known.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._root = endpoint.pid or _listener_of(endpoint)
        self._limit = _group_limit()

    @property
    def known(self) -> bool:
        """Whether the server's own process is known."""
        return self._root is not None

    def read(self) -> MemoryRow | Missing:
        """Return what the tree holds now. Missing, with the reason, where its root is not known or has ended. Never raises."""
        if self._root is None:
            return Missing("the server's process is not known: it was not launched here, and no process of ours listens on its port")
        import psutil

        machine = psutil.virtual_memory()
        held: dict[str, int] = {}
        cpu_s = 0.0
        names: set[str] = set()
        try:
            root = psutil.Process(self._root)
            tree = [root, *root.children(recursive=True)]
        except psutil.Error as error:
            return Missing(f"process {self._root} of the server cannot be read: {error}")
        for process in tree:
            with contextlib.suppress(psutil.Error, OSError):
                names.add(process.name())
                held[str(process.pid)] = _resident(process.pid) or int(process.memory_info().rss)
                times = process.cpu_times()
                cpu_s += times.user + times.system
        if (between := names & BETWEEN) and not names - BETWEEN - _SHELLS:
            return Missing(f"{', '.join(sorted(between))} stands between: the server's own processes are in a container or on another machine")
        if not held:
            return Missing(f"the memory of process {self._root} cannot be read")
        return MemoryRow(int(machine.total), int(machine.available), self._limit, held, cpu_s)


def _resident(pid: int) -> int:
    """Return the proportional resident memory of a process (proc(5), smaps_rollup: shared pages count by their share); 0 where it is not told."""
    with contextlib.suppress(OSError, ValueError, IndexError), Path(f"/proc/{pid}/smaps_rollup").open("rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _listener_of(endpoint: Endpoint) -> int | None:
    """Return the pid that listens on the endpoint's port, where the address is a loopback one and the system tells."""
    parts = urlsplit(endpoint.root)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(ValueError):
        if not (host == "localhost" or ipaddress.ip_address(host).is_loopback):
            return None
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            for connection in psutil.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port and connection.pid:
                    return int(connection.pid)
    return None


def _group_limit() -> int:
    """Return the memory limit of our control group in bytes (cgroup v2 or v1); 0 where there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(path).read_text())
            return limit if limit < 1 << 60 else 0
    return 0
