"""Captures of a traced run: each rank stores the dispatches that ``--capture`` asked for while it serves.

A capture that fails, on a full disk for example, is noted and the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphamoe_profiler.rank_main import run_rank
from alphamoe_profiler.rank_messages import RankDevice, RankTask, one_line
from alphamoe_profiler.run_identity import utc_now, versions
from alphamoe_profiler.run_records import RunInfo
from alphamoe_sanitizer_replays.captures.records import (
    Capture,
    GeometryRecord,
    LaunchInfo,
    SeededWeightsFrom,
    TensorRole,
)
from alphamoe_sanitizer_replays.captures.request import CaptureRequest, estimate
from alphamoe_sanitizer_replays.captures.store import check_room, find_captures, write_capture
from alphamoe_sanitizer_replays.captures.tensors import tensor_sha256
from alphamoe_tracers.errors import AlphaMoEError

if TYPE_CHECKING:
    from torch import Tensor

    from alphamoe_backend.handover import DispatchHandover, OpenForward
    from alphamoe_backend.kernels.launch import Variant

ALPHAMOE_PLUGIN, STOCK_PLUGIN = "alphamoe_w8a8", "triton_stock"


@dataclass(frozen=True)
class RankWithCaptures:
    """What each rank process of a run with captures runs: a target for ``run_session``."""

    requests: tuple[CaptureRequest, ...]
    store_weights: bool = False

    def __call__(self, task: RankTask, connection: Connection) -> None:
        """Run the rank; see :func:`alphamoe_profiler.rank_main.run_rank`."""
        run_rank(task, connection, self.store)

    def store(self, task: RankTask, device: RankDevice) -> CaptureRecorder:
        """Make what stores this rank's captures."""
        return CaptureRecorder(task, device, self.requests, store_weights=self.store_weights)


def announce(
    requests: tuple[CaptureRequest, ...], store_weights: bool, say: Callable[[str], None]
) -> Callable[[RunInfo, Path], None]:
    """Make what ``run_session`` calls before it writes anything: it states the size and refuses what does not fit.

    Args:
        requests: what is asked for.
        store_weights: whether weights are stored.
        say: takes one line.
    """

    def check(run: RunInfo, path: Path) -> None:
        bound = estimate(requests, run, weights=store_weights)
        for request in requests:
            say(f"--capture {request.text}: {request.told()}")
        stored = "weights included" if store_weights else "weights by their hash only"
        count = "1 capture" if bound.captures == 1 else f"{bound.captures} captures"
        say(f"up to {count}, {_size(bound.bytes)} at most ({stored}), in {path}")
        check_room(path, bound.bytes)

    return check


def summary(path: Path) -> str | None:
    """Say in one line how many captures a run holds and what they take on disk; null where there is none."""
    found = find_captures(path)
    if not found:
        return None
    root = path / "captures"
    taken = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    return f"{len(found)} capture{'s' if len(found) > 1 else ''} in {root}, {_size(taken)}"


class CaptureRecorder:
    """Stores dispatches of one rank: a :class:`alphamoe_profiler.rank_messages.RankCaptures`.

    Args:
        task: the rank's.
        device: what its GPU is.
        requests: of all ranks; those of others are left out.
        store_weights: store weights, once for each layer; otherwise their hash and how they are drawn again.
    """

    def __init__(
        self, task: RankTask, device: RankDevice, requests: tuple[CaptureRequest, ...], *, store_weights: bool
    ) -> None:
        self.wall_s = 0.0
        self._task = task
        self._device = device
        self._requests = tuple(item for item in requests if item.of_rank(task.rank, task.world_size))
        self._store_weights = store_weights
        self._directory = Path(task.out) / "captures" / f"rank={task.rank}"
        self._taken: set[tuple[CaptureRequest, int, int | None]] = set()
        self._matched: set[CaptureRequest] = set()
        self._notes: list[str] = []
        self._weights_sha256: dict[int, dict[str, str]] = {}
        self._cubins: dict[str, tuple[str, str]] = {}
        self._versions: dict[str, str] | None = None

    def wants(self, layer: int, M: int, forward: OpenForward) -> bool:
        """Say whether a request matches that this layer, or this layer and M, has not answered yet."""
        return bool(self._answers(layer, M, forward))

    def take(self, handover: DispatchHandover) -> None:
        """Store one dispatch. What goes wrong is noted; the run goes on without this capture."""
        begun_s = time.monotonic()
        for request in self._answers(handover.layer, handover.M, handover.forward):
            self._taken.add(_key(request, handover.layer, handover.M))
            self._matched.add(request)
        name = f"layer={handover.layer}-M={handover.M}-step={handover.forward.step}"
        try:
            self._write(self._directory / name, handover)
        except (AlphaMoEError, OSError, MemoryError) as error:
            self._notes.append(f"rank {self._task.rank}: capture {name} is missing: {one_line(error)}")
        finally:
            self.wall_s += time.monotonic() - begun_s

    def notes(self) -> tuple[str, ...]:
        """List captures that failed and requests that nothing matched."""
        unmatched = [
            f"rank {self._task.rank}: no eager forward matched --capture {request.text}"
            for request in self._requests
            if request not in self._matched
        ]
        return (*self._notes, *unmatched)

    def _answers(self, layer: int, M: int, forward: OpenForward) -> list[CaptureRequest]:
        layers, mode, purpose = self._task.layers, forward.forward_mode, forward.purpose
        return [
            request
            for request in self._requests
            if _key(request, layer, M) not in self._taken and request.matches(layer, layers, M, mode, purpose)
        ]

    def _write(self, directory: Path, handover: DispatchHandover) -> None:
        from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_SYMBOL, STOCK_SYMBOL

        task, forward, experts = self._task, handover.forward, handover.experts
        stock = experts.name == "triton"
        block_m = experts.submissions(handover.M)[0].block_m
        geometry = experts.geometry
        weights = _weights(experts)
        hashes = self._weights_sha256.get(handover.layer)
        if hashes is None:
            hashes = {name: tensor_sha256(tensor) for name, tensor in weights.items()}
            self._weights_sha256[handover.layer] = hashes
        launch, cubin = (None, None) if stock else self._launch(handover)
        if self._versions is None:
            self._versions = versions()
        drawn_from = SeededWeightsFrom(
            model=task.model,
            layers=task.layers,
            seed=task.seed,
            dtype=task.dtype,
            device_kind=task.device.partition(":")[0],
        )
        capture = Capture(
            plugin=STOCK_PLUGIN if stock else ALPHAMOE_PLUGIN,
            symbols=(STOCK_SYMBOL if stock else ALPHAMOE_W8A8_SYMBOL,),
            run_id=task.run_id,
            rank=task.rank,
            rank_source="engine",
            world_size=task.world_size,
            layer=handover.layer,
            M=handover.M,
            forward_mode=forward.forward_mode,
            step=forward.step,
            purpose=forward.purpose,
            request_ids=forward.request_ids,
            real_tokens=forward.real_tokens,
            batch_size=forward.batch_size,
            geometry=GeometryRecord(geometry.E, geometry.H, geometry.I_local, geometry.top_k, block_m),
            launch=launch,
            source_sha256=cubin[1] if cubin else None,
            cubin_sha256=cubin[0] if cubin else None,
            arguments={"top_k": geometry.top_k, "block_m": block_m, "routed_scaling_factor": 1.0},
            weights_from=None if self._store_weights else drawn_from,
            tensors=(),
            gpu_name=self._device.gpu_name,
            compute_capability=self._device.compute_capability,
            sm_count=self._device.sm_count,
            versions=self._versions,
            created=utc_now(),
            bytes=0,
        )
        write_capture(
            directory,
            capture,
            _tensors(handover),
            weights=weights,
            weights_directory=self._directory if self._store_weights else None,
            weights_sha256=hashes,
        )

    def _launch(self, handover: DispatchHandover) -> tuple[LaunchInfo | None, tuple[str, str] | None]:
        """Give the launch and the sha256 of cubin and source; nothing where no kernel of ours ran."""
        from alphamoe_backend.experts.alphamoe_w8a8 import implementation
        from alphamoe_backend.kernels.launch import choose_variant, shape_for_blocks

        if implementation(handover.q.device) != "hopper" or self._device.sm_count is None:
            return None, None
        geometry = handover.experts.geometry
        chosen = choose_variant(geometry, handover.M, self._device.sm_count)
        shape = shape_for_blocks(geometry, chosen, handover.plan.expert_ids.shape[0])
        launch = LaunchInfo(shape.variant, shape.grid, shape.block, shape.cluster, shape.dynamic_smem_bytes)
        return launch, self._cubin(chosen)

    def _cubin(self, chosen: Variant) -> tuple[str, str]:
        from alphamoe_backend.kernels.jit import compile_cubin
        from alphamoe_backend.kernels.launch import SOURCE_NAME
        from alphamoe_backend.kernels.launcher import ARCH

        if chosen.name not in self._cubins:
            # From the compiler's cache: the launcher compiled it before.
            cubin = compile_cubin(SOURCE_NAME, ARCH, chosen.defines())
            self._cubins[chosen.name] = (cubin.sha256, cubin.source_sha256)
        return self._cubins[chosen.name]


def _key(request: CaptureRequest, layer: int, M: int) -> tuple[CaptureRequest, int, int | None]:
    return request, layer, M if request.every == "bucket" else None


def _tensors(handover: DispatchHandover) -> dict[str, tuple[TensorRole, Tensor]]:
    import torch

    from alphamoe_backend.experts.alphamoe_w8a8 import implementation

    output = handover.output
    if handover.experts.name != "triton" and implementation(output.device) != "reference":
        # The kernel adds in bfloat16; a model in float32 got the same numbers converted. On the host, because a
        # conversion kernel would become part of the run's evidence.
        output = output.cpu().to(torch.bfloat16)
    plan = handover.plan
    return {
        "hidden_states": ("input", handover.q),
        "hidden_states_scale": ("input", handover.q_scale),
        "sorted_token_ids": ("input", plan.sorted_token_ids),
        "expert_ids": ("input", plan.expert_ids),
        "num_tokens_post_padded": ("input", plan.num_tokens_post_padded),
        "topk_weights": ("input", handover.topk_weights),
        "topk_ids": ("input", handover.topk_ids),
        "out": ("output", output),
    }


def _weights(experts: Any) -> dict[str, Tensor]:
    """Give the weights by the names and in the layout that the experts launch with."""
    if experts.name == "triton":
        weights = experts.weights
        return {name: getattr(weights, name) for name in ("gate_up", "gate_up_scale", "down", "down_scale")}
    return {
        "gemm1_weights": experts.gate_up,
        "gemm1_weights_scale": experts.gate_up_scale,
        "gemm2_weights": experts.down,
        "gemm2_weights_scale": experts.down_scale,
    }


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
