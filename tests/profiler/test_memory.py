"""Visible GPUs and memory, with and without a driver."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphamoe_profiler.memory import host_rss_bytes, select_visible, snapshot, survey_gpus


class FakeNvml(SimpleNamespace):
    """Two GPUs; this process is listed on the second one."""

    class NVMLError(Exception):
        """As pynvml has it."""

    def __init__(self, devices: int = 2) -> None:
        super().__init__(nvmlInit=lambda: None, nvmlShutdown=lambda: None, devices=devices)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802 -- pynvml's name, as are those below
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return int(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if not uuid.startswith("GPU-"):
            raise self.NVMLError("not found")
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=100 << 30, free=(90 + handle) << 30, used=(10 - handle) << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return (9, 0)

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 << 30)
        other = SimpleNamespace(pid=1, usedGpuMemory=5 << 30)
        return [other, mine] if handle == 1 else [other]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_the_survey_lists_gpus_in_the_order_of_cuda_visible_devices(nvml: FakeNvml) -> None:
    survey = survey_gpus({"CUDA_VISIBLE_DEVICES": "1,0"})
    assert [gpu.info.index for gpu in survey.gpus] == [1, 0]
    assert survey.gpus[0].free_bytes == 91 << 30
    assert survey.gpus[0].info.compute_capability == "9.0"
    assert survey.driver == "580.1"
    assert len(survey_gpus({}).gpus) == 2


def test_a_hidden_or_missing_gpu_has_a_reason(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert survey_gpus({"CUDA_VISIBLE_DEVICES": ""}).reason == "CUDA_VISIBLE_DEVICES='' hides every GPU"
    nvml.devices = 0
    assert survey_gpus({}).reason == "the driver lists no GPU"

    def no_driver() -> None:
        raise nvml.NVMLError("library not found")

    nvml.nvmlInit = no_driver
    assert survey_gpus({}).reason == "no NVIDIA driver (library not found)"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert survey_gpus({}).reason == "nvidia-ml-py is not installed"


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2, 0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("1,1,0", [1]),
        ("GPU-bb", [1]),
        ("GPU-", []),
        ("7,0", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_the_cuda_runtime_reads_it(visible: str, chosen: list[int]) -> None:
    assert select_visible(visible, ["GPU-aa", "GPU-bb", "GPU-cc"]) == chosen


def test_a_snapshot_separates_this_process_from_the_device(nvml: FakeNvml) -> None:
    taken = snapshot("after_run", "GPU-1", (1 << 30, 2 << 30))
    assert (taken.device_used_bytes, taken.device_total_bytes) == (9 << 30, 100 << 30)
    assert taken.process_bytes == 3 << 30
    assert (taken.torch_allocated_bytes, taken.torch_reserved_bytes, taken.source) == (1 << 30, 2 << 30, "nvml")


def test_a_process_that_the_driver_does_not_list_is_null_and_not_zero(nvml: FakeNvml) -> None:
    assert snapshot("after_run", "GPU-0").process_bytes is None


def test_a_device_that_cannot_be_asked_leaves_the_host_measured(nvml: FakeNvml) -> None:
    taken = snapshot("after_run", "MIG-1")
    assert (taken.device_used_bytes, taken.source) == (None, "procfs")
    assert taken.host_rss_bytes is not None
    assert taken.host_rss_bytes > 1 << 20


def test_resident_memory_is_unknown_without_procfs(tmp_path: Path) -> None:
    assert host_rss_bytes(tmp_path / "status") is None
