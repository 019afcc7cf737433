"""The MoE runner backends by name: what each must launch, what it must not, and how its experts are built.

No torch is imported until experts are built.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from alphamoe_backend.geometry import LocalGeometry
from alphamoe_tracers.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from alphamoe_backend.routing import AlignedPlan
    from alphamoe_backend.workspaces import Workspaces

RunnerBackend = Literal["flashinfer_alphamoe", "triton"]

ALPHAMOE_W8A8_KERNEL = "alphamoe_fp8_block_scale_aligned_moe"
ALPHAMOE_W8A8_SYMBOL = "kernel_alpha_moe_w8a8_up_down"
STOCK_SYMBOL = "fused_moe_kernel"


@dataclass(frozen=True)
class BackendSymbols:
    """Base names of kernels that tell one backend from the others."""

    required: tuple[str, ...]
    forbidden: tuple[str, ...]


BACKENDS: dict[str, BackendSymbols] = {
    "flashinfer_alphamoe": BackendSymbols(required=(ALPHAMOE_W8A8_SYMBOL,), forbidden=(STOCK_SYMBOL,)),
    "triton": BackendSymbols(required=(STOCK_SYMBOL,), forbidden=(ALPHAMOE_W8A8_SYMBOL,)),
}


def known_backend(name: str) -> BackendSymbols:
    """Give what a backend's runs show and must not show.

    Raises:
        UsageError: no such backend.
    """
    try:
        return BACKENDS[name]
    except KeyError:
        raise UsageError(
            f"unknown MoE runner backend {name!r}", hint=f"use --moe-runner-backend with one of: {', '.join(BACKENDS)}"
        ) from None


def required_symbols(moe_runner_backend: str) -> tuple[str, ...]:
    """Give the base names that a run of this backend must show.

    Raises:
        UsageError: no such backend.
    """
    return known_backend(moe_runner_backend).required


def forbidden_symbols(moe_runner_backend: str) -> tuple[str, ...]:
    """Give the base names that a run of this backend must not show: seen, they mean a fallback.

    Raises:
        UsageError: no such backend.
    """
    return known_backend(moe_runner_backend).forbidden


@dataclass(frozen=True)
class KernelSubmission:
    """One kernel that an experts object submits for a batch of tokens."""

    kernel: str
    """The operator."""
    symbol: str
    """Base name of the kernel that it launches on CUDA."""
    block_m: int


class Experts(Protocol):
    """The routed experts of one layer and rank, behind one of the backends."""

    name: str
    """The MoE runner backend that this object really is."""
    identity: str
    """Unique among the objects of this process, for graph keys."""
    geometry: LocalGeometry

    def submissions(self, M: int) -> tuple[KernelSubmission, ...]:
        """List, in order, the kernels that :meth:`run` submits for M tokens."""

    def plan(self, topk_ids: Tensor) -> AlignedPlan:
        """Align topk_ids int32 [M, top_k] to the blocks that :meth:`run` wants for that M."""

    def run(
        self,
        q: Tensor,
        q_scale: Tensor,
        plan: AlignedPlan,
        topk_weights: Tensor,
        dtype: torch.dtype,
        workspaces: Workspaces | None = None,
    ) -> Tensor:
        """Give this rank's partial sum ``dtype`` [M, H] from e4m3 [M, H] and scales float32 [M, H / 128].

        With workspaces the result is one of their buffers, which the next run in the same workspaces overwrites.
        """

    def dispatch(self, hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Quantise, plan and run: hidden [M, H] to this rank's partial sum [M, H] in the same dtype."""


_sequence = itertools.count()


def new_identity(name: str) -> str:
    """Give the next identity string; a counter, because ``id()`` values are reused after an object dies."""
    return f"{name}#{next(_sequence)}"
