"""Memory of the cards in this machine, read with NVIDIA's own bindings (``pynvml`` of nvidia-ml-py), imported late.

Source: NVML API reference, ``nvmlDeviceGetMemoryInfo_v2`` (total = reserved + used + free; the older call counts what the driver
reserves as used) and ``nvmlDeviceGetComputeRunningProcesses``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import GpuRow

_lock = threading.Lock()
_ready: dict[str, Any] = {}


def _nvml() -> Any | Missing:
    """Return pynvml, initialised once for the process, or why there is none."""
    with _lock:
        if "nvml" in _ready:
            return _ready["nvml"]
        try:
            import pynvml
        except ImportError as error:
            return Missing(f"pynvml cannot be imported: {error}")
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            return Missing("no NVIDIA driver on this machine: libnvidia-ml.so.1 is not found")
        except pynvml.NVMLError as error:
            return Missing(f"NVML does not start: {error}")
        _ready["nvml"] = pynvml
        return pynvml


def read_gpus(indices: Sequence[int] | None = None) -> list[GpuRow] | Missing:
    """Return one row a card, in bytes, with the memory of each process where the driver tells it; ``indices`` chooses cards.

    Missing, with the reason, where there is no NVIDIA driver, no card, or a card cannot be read. Never raises. A card in MIG
    mode gives the row of the whole card; what its processes hold may not be told there. ``processes`` are pids as the driver sees
    them (inside a container they may be others, or none).
    """
    nvml = _nvml()
    if isinstance(nvml, Missing):
        return nvml
    try:
        wanted = range(nvml.nvmlDeviceGetCount()) if indices is None else indices
        rows = [_row(nvml, index) for index in wanted]
    except nvml.NVMLError as error:
        return Missing(f"NVML cannot read the cards: {error}")
    return rows or Missing("NVML finds no card in this machine")


def _row(nvml: Any, index: int) -> GpuRow:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        reserved = int(memory.reserved)
    except (nvml.NVMLError, AttributeError):  # a driver before 510 has no second version
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        reserved = 0
    return GpuRow(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        free_bytes=int(memory.free),
        reserved_bytes=reserved,
        processes=_processes(nvml, handle),
    )


def _processes(nvml: Any, handle: Any) -> dict[str, int]:
    """Return bytes by pid. One process may hold a compute and a graphics context: both lists name it with one figure, so the larger counts."""
    held: dict[str, int] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            processes = ask(handle)
        except nvml.NVMLError:  # not told: MIG, no permission, an older driver
            continue
        for process in processes:
            if process.usedGpuMemory is not None:
                pid = str(process.pid)
                held[pid] = max(held.get(pid, 0), int(process.usedGpuMemory))
    return held


def read_pids(index: int) -> frozenset[int]:
    """Return the processes on a card as the driver tells them, also those whose memory it does not tell; none where it tells none."""
    nvml = _nvml()
    found: set[int] = set()
    if isinstance(nvml, Missing):
        return frozenset()
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            found |= {int(process.pid) for process in ask(nvml.nvmlDeviceGetHandleByIndex(index))}
        except nvml.NVMLError:
            continue
    return frozenset(found)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
