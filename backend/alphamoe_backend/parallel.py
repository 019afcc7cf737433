"""The tensor-parallel group: one process a rank, NCCL with one GPU a rank and gloo otherwise.

A world of one needs no process group and makes no collective. While a CUDA graph is being captured, a collective that
a stream capture cannot hold (gloo works on the host) is handed to the capture in progress, which cuts the graph there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from alphamoe_tracers.errors import AlphaMoEError

CommunicationBackend = Literal["nccl", "gloo"]
DEFAULT_TIMEOUT_S = 120.0
NCCL_DEFAULTS = {
    # NVLink multicast needs fabric rights that virtual and shared machines do not give, and what follows is a hang or a
    # fault of the whole fabric. Decode sums a few KiB, for which NCCL takes rings anyway.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # A non-blocking communicator launches from a thread of NCCL's, outside the ranges that the caller has open.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    # torch's watchdog would abort the process, with everything that a recording has not written yet, and make a rank
    # that merely lost its peer look like the one that failed. Whoever started the ranks watches them.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Environment of a process that joins an NCCL group, where the user has not set it."""
_ABANDON_S = 1.0


class CollectiveCut(Protocol):
    """A graph capture in progress that wants collectives as eager steps between its segments."""

    def cut(self, name: str, layer: int | None, step: Callable[[], None]) -> None:
        """End the segment, remember ``step`` to be run at each replay, and begin the next segment."""


class TensorParallelGroup:
    """The collectives of one rank.

    Attributes:
        rank: this process's tensor-parallel rank, never derived from a device index.
        world_size: ranks in the group.
        backend: None in a world of one.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, backend: CommunicationBackend | None = None) -> None:
        """Describe a group that is already connected; :meth:`connect` makes one."""
        self.rank = rank
        self.world_size = world_size
        self.backend = backend if world_size > 1 else None
        self._capture: CollectiveCut | None = None
        self._staging: dict[torch.dtype, torch.Tensor] = {}

    @classmethod
    def connect(
        cls,
        rank: int,
        world_size: int,
        backend: CommunicationBackend,
        init_method: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> TensorParallelGroup:
        """Join the group that all ranks meet in at ``init_method``.

        Args:
            rank: 0 to ``world_size`` - 1.
            world_size: 1 makes no process group.
            backend: of the whole group; NCCL refuses two ranks on one GPU, and wants the process's device set before.
            init_method: ``tcp://127.0.0.1:PORT`` or ``file:///PATH`` of a path that does not exist yet.
            timeout_s: how long joining, and under gloo each later collective, may wait for the other ranks. Under NCCL
                a collective whose peer is gone waits for ever: whoever started the ranks has to end it.

        For NCCL, :data:`NCCL_DEFAULTS` is put into this process's environment, beside what is set there already.

        Raises:
            AlphaMoEError: when the other ranks do not come in time.
        """
        if world_size == 1:
            return cls()
        if backend == "nccl":
            for name, value in NCCL_DEFAULTS.items():
                os.environ.setdefault(name, value)
        try:
            dist.init_process_group(
                backend,
                init_method=init_method,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None,
            )
        except (RuntimeError, ValueError) as error:
            hint = "Another rank died before it joined, or something else listens on that port."
            if backend == "nccl":
                hint += " NCCL_DEBUG=INFO has NCCL say what it tried."
            raise AlphaMoEError(
                f"rank {rank} could not join the group of {world_size} at {init_method}: {error}", hint
            ) from error
        return cls(rank, world_size, backend)

    @property
    def capturable(self) -> bool:
        """Whether a stream capture can hold this group's collectives."""
        return self.backend != "gloo"

    @contextmanager
    def cutting(self, capture: CollectiveCut) -> Iterator[None]:
        """Hand every all-reduce made inside to ``capture`` instead of making it."""
        self._capture = capture
        try:
            yield
        finally:
            self._capture = None

    def all_reduce(self, tensor: torch.Tensor, layer: int | None = None) -> torch.Tensor:
        """Sum ``tensor`` over the ranks, in place.

        Every rank gets the same bits: each element is summed once and then handed out, by gloo's ring as by NCCL.

        Args:
            tensor: contiguous, of one shape and dtype on all ranks.
            layer: which layer it belongs to, for the range around it in a replayed graph.

        Returns:
            ``tensor`` itself.
        """
        if self._capture is not None:
            self._capture.cut("all_reduce", layer, lambda: self._sum(tensor))
        else:
            self._sum(tensor)
        return tensor

    def compare(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Queue the comparison of the sampled ``token_ids`` [n] int64 between the ranks; :meth:`settle` judges it.

        The ids come from replicated logits over all-reduced activations, so they are equal unless a collective is
        broken or a rank computes something else. Taking rank 0's choice would hide just that, and going on with
        different tokens would hang the ranks as soon as their step counts part: so they are compared, at the cost of
        one tiny collective. All ranks see the same numbers, so that a difference ends the run on every rank at the
        same step.

        Returns:
            int64 [2, n], the largest and the negated smallest id over the ranks; [1, n], the ids, in a world of one.
        """
        if self.world_size == 1:
            return token_ids[None]
        on_host = token_ids.cpu() if self.backend == "gloo" else token_ids
        extremes = torch.stack([on_host, -on_host])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        return extremes

    @staticmethod
    def settle(numbers: list[list[int]]) -> list[int]:
        """Give the token ids that all ranks sampled, from what :meth:`compare` gave.

        Raises:
            AlphaMoEError: when two ranks differ.
        """
        largest, *rest = numbers
        if rest and any(high != -low for high, low in zip(largest, rest[0], strict=True)):
            raise AlphaMoEError(
                f"ranks disagree on sampled tokens: ids up to {largest}, down to {[-low for low in rest[0]]}",
                "The ranks' activations have parted: an all-reduce did not sum what all of them gave.",
            )
        return largest

    def agreed(self, token_ids: torch.Tensor) -> list[int]:
        """Compare and settle at once.

        Raises:
            AlphaMoEError: when two ranks differ.
        """
        return self.settle(self.compare(token_ids).tolist())

    def barrier(self) -> None:
        """Wait, on the host too, until every rank is here. NCCL uses the device that the group was bound to."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group; afterwards this object makes no collective.

        Under NCCL graphs that captured its all-reduces must be gone by then (close the engine first): they hold the
        communicator, and this call would wait for them for ever.
        """
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def abandon(self, wait_s: float = _ABANDON_S) -> None:
        """Give up the group after a failure, so that the device becomes idle: no collective is possible afterwards.

        A kernel of NCCL whose peer is gone spins for ever, and whoever waits for the device with it. Aborting the
        communicator makes it leave. That call itself only returns when no captured graph holds the communicator any
        more, so it gets a thread of its own and this one goes on after ``wait_s`` seconds. Does nothing under gloo,
        which has an error for a lost peer.
        """
        if self.backend != "nccl":
            return
        aborting = threading.Thread(target=_abort, name="alphamoe-nccl-abort", daemon=True)
        aborting.start()
        aborting.join(wait_s)

    def _sum(self, tensor: torch.Tensor) -> None:
        if self.world_size == 1:
            return
        if self.backend == "nccl" or not tensor.is_cuda:
            dist.all_reduce(tensor)
            return
        # gloo sums on the host. Copies through one pinned buffer on the tensor's own stream keep the order obvious and
        # mark no block of a graph's memory pool as used by gloo's side streams.
        staged = self._pinned(tensor.dtype, tensor.numel())
        staged.copy_(tensor.view(-1), non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        dist.all_reduce(staged)
        tensor.view(-1).copy_(staged, non_blocking=True)

    def _pinned(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        held = self._staging.get(dtype)
        if held is None or held.numel() < numel:
            # The last copy out of the old buffer may still be running.
            torch.cuda.current_stream().synchronize()
            held = torch.empty(numel, dtype=dtype, pin_memory=True)
            self._staging[dtype] = held
        return held[:numel]


def _abort() -> None:
    # Experimental and NCCL's alone, but the one call that ends kernels which wait for a lost peer.
    with suppress(AttributeError, RuntimeError, ValueError, AssertionError):
        dist.distributed_c10d._abort_process_group()
