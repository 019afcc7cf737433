"""Which GPU each rank gets, whether it has it alone, and what all ranks then sum with."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from fake_ranks import task

from alphamoe_profiler import rank_main
from alphamoe_profiler.memory import GpuSurvey, VisibleGpu
from alphamoe_profiler.rank_messages import RankTask, one_line
from alphamoe_profiler.run_records import GpuInfo
from alphamoe_profiler.trace_config import Resolved, TraceConfig, resolve
from alphamoe_profiler.watchdog import Watchdog
from alphamoe_tracers.errors import AlphaMoEError


def plan(ranks: int, gpus: int, device: str = "auto") -> Resolved:
    """Resolve a run of ``qwen3-next-80b`` on a machine with that many GPUs."""
    visible = tuple(
        VisibleGpu(GpuInfo(number, "NVIDIA H200", f"GPU-{number}", 140 << 30, "9.0"), 139 << 30)
        for number in range(gpus)
    )
    config = TraceConfig(prompts=("gsm8k:17",), ranks=ranks, device=device, model="qwen3-next-80b")
    return resolve(config, GpuSurvey(visible, "580", None))


@pytest.mark.parametrize(
    ("ranks", "gpus", "devices", "shared", "communication"),
    [
        (1, 1, (0,), (False,), "nccl"),
        (2, 2, (0, 1), (False, False), "nccl"),
        (2, 4, (0, 1), (False, False), "nccl"),
        (4, 2, (0, 1, 0, 1), (True,) * 4, "gloo"),
        (4, 1, (0,) * 4, (True,) * 4, "gloo"),
        (4, 3, (0, 1, 2, 0), (True, False, False, True), "gloo"),
    ],
)
def test_all_ranks_sum_with_one_library_also_where_only_some_share_a_gpu(
    ranks: int, gpus: int, devices: tuple[int, ...], shared: tuple[bool, ...], communication: str
) -> None:
    """Four ranks on three GPUs: ranks 1 and 2 have theirs alone and must still join the others' gloo."""
    resolved = plan(ranks, gpus)
    assert [resolved.device_of(rank) for rank in range(ranks)] == [f"cuda:{number}" for number in devices]
    assert tuple(resolved.shares_gpu(rank) for rank in range(ranks)) == shared
    assert resolved.communication == communication


def test_ranks_on_cpus_sum_with_gloo() -> None:
    """GPUs that are there and not used change nothing."""
    assert plan(2, 2, device="cpu").communication == "gloo"


class LostPeer:
    """A group whose owner fails while a peer is gone."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def abandon(self) -> None:
        """Remember when."""
        self._order.append("abandon")


def test_a_failing_rank_gives_up_its_group_before_the_collector_waits_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would wait for a kernel of NCCL that waits for a dead rank, and leave no rank file."""
    order: list[str] = []

    class Failing(rank_main.RankRun):
        def _serve(self) -> None:
            self._group = LostPeer(order)  # type: ignore[assignment]
            raise RuntimeError("the engine failed")

        def _finish(self, ended: Any, error: str | None) -> None:
            order.append(f"finish {ended}: {error}")

    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(rank_main.BundleWriter, "join", staticmethod(lambda out: None))
    given: RankTask = task(0, str(tmp_path))
    run = Failing(given, theirs, Watchdog(theirs, 0), None)
    assert run.run() == rank_main.EXIT_FAILED
    assert order == ["abandon", "finish exception: RuntimeError: the engine failed"]
    ours.close()


def test_an_error_of_nccl_is_one_line_with_its_reason_and_without_source_paths() -> None:
    """What NCCL says last is what tells a full /dev/shm from a lost peer."""
    error = RuntimeError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclSystemError: System call (e.g. socket, malloc) or "
        "external library call failed or device error.\nLast error:\nError while creating shared memory segment"
    )
    told = "RuntimeError: NCCL 2.28.9: unhandled system error; Error while creating shared memory segment"
    assert one_line(error) == told
    joined = AlphaMoEError(f"rank 1 could not join the group of 2: {error}")
    assert one_line(joined) == f"rank 1 could not join the group of 2: {told.removeprefix('RuntimeError: ')}"
