"""GPUs and memory as the driver sees them, through nvidia-ml-py: no CUDA context is ever made here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphamoe_profiler.run_records import GpuInfo, MemorySnapshot


@dataclass(frozen=True)
class VisibleGpu:
    """One GPU that this process may use; its place in the survey is its CUDA device number."""

    info: GpuInfo
    free_bytes: int


@dataclass(frozen=True)
class GpuSurvey:
    """The GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` leaves visible, in its order."""

    gpus: tuple[VisibleGpu, ...]
    driver: str | None
    reason: str | None
    """Why there is none. One line."""


def survey_gpus(environment: Mapping[str, str] = os.environ) -> GpuSurvey:
    """Ask the driver for the visible GPUs, without importing torch or initialising CUDA."""
    with _nvml() as (nvml, reason):
        if nvml is None:
            return GpuSurvey((), None, reason)
        driver = str(nvml.nvmlSystemGetDriverVersion())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if not handles:
            return GpuSurvey((), driver, "the driver lists no GPU")
        gpus = [_describe(nvml, index, handle) for index, handle in enumerate(handles)]
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return GpuSurvey(tuple(gpus), driver, None)
        chosen = select_visible(visible, [gpu.info.uuid for gpu in gpus])
        left = tuple(gpus[index] for index in chosen)
        return GpuSurvey(left, driver, None if left else f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU")


def select_visible(visible: str, uuids: list[str | None]) -> list[int]:
    """Return the device indices that a value of ``CUDA_VISIBLE_DEVICES`` leaves, in its order.

    As the CUDA runtime does, entries are numbers or beginnings of UUIDs, and the first invalid or repeated one hides
    itself and everything after it.
    """
    chosen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isascii() and entry.isdigit():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if entry and uuid and uuid.startswith(entry)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen.append(matches[0])
    return chosen


def host_rss_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Return the resident memory of this process, null where the system has no procfs."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return None


def snapshot(label: str, gpu_uuid: str | None = None, torch_bytes: tuple[int, int] | None = None) -> MemorySnapshot:
    """Take memory at this moment.

    Args:
        label: ``after_start_up``, ``after_graph_capture`` or ``after_run``.
        gpu_uuid: as NVML spells it (``GPU-...``); null for a rank on the CPU.
        torch_bytes: what torch's allocator says it has allocated and reserved.
    """
    allocated, reserved = torch_bytes if torch_bytes is not None else (None, None)
    device: dict[str, Any] = {}
    if gpu_uuid is not None:
        with _nvml() as (nvml, _):
            if nvml is not None:
                device = _device_memory(nvml, gpu_uuid)
    return MemorySnapshot(
        label=label,
        host_rss_bytes=host_rss_bytes(),
        torch_allocated_bytes=allocated,
        torch_reserved_bytes=reserved,
        source="nvml" if device else "procfs",
        **device,
    )


def _device_memory(nvml: Any, gpu_uuid: str) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        found: dict[str, Any] = {"device_used_bytes": int(memory.used), "device_total_bytes": int(memory.total)}
        # In a container with its own process numbers the driver lists the host's: then this rank is not found, null.
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                found["process_bytes"] = int(process.usedGpuMemory)
    except nvml.NVMLError:
        return {}
    return found


def _describe(nvml: Any, index: int, handle: Any) -> VisibleGpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    info = GpuInfo(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=int(memory.total),
        compute_capability=f"{major}.{minor}",
    )
    return VisibleGpu(info, int(memory.free))


@contextlib.contextmanager
def _nvml() -> Iterator[tuple[Any, str | None]]:
    """Yield the initialised NVML module, or None and the reason."""
    try:
        import pynvml
    except ImportError:
        yield None, "nvidia-ml-py is not installed"
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield None, f"no NVIDIA driver ({error})"
        return
    try:
        yield pynvml, None
    finally:
        pynvml.nvmlShutdown()
