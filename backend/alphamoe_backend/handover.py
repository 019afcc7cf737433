"""What a layer hands over when somebody wants the real inputs and output of one of its dispatches.

A layer asks in eager forwards only. While a graph is captured nothing has run yet, and in a replay no layer runs on the
host: the inputs of its kernels lie in the graph's own buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from alphamoe_tracers.records import Execution, ForwardMode, Purpose

if TYPE_CHECKING:
    from torch import Tensor

    from alphamoe_backend.experts.registry import Experts
    from alphamoe_backend.routing import AlignedPlan


@dataclass(frozen=True)
class OpenForward:
    """The eager forward that is open, as its receipt will say."""

    step: int
    purpose: Purpose
    request_ids: tuple[str, ...]
    execution: Execution
    forward_mode: ForwardMode
    real_tokens: int | None
    batch_size: int | None


@dataclass(frozen=True)
class DispatchHandover:
    """One dispatch after it was submitted. The tensors are the layer's own: copy before returning, write nothing."""

    layer: int
    M: int
    """Rows of the dispatch, padding included."""
    experts: Experts
    """With the weights. What it really is decides what was launched."""
    q: Tensor
    """e4m3 [M, H]."""
    q_scale: Tensor
    """float32 [M, H / 128]."""
    plan: AlignedPlan
    topk_weights: Tensor
    """float32 [M, top_k]."""
    topk_ids: Tensor
    """int32 [M, top_k]."""
    output: Tensor
    """[M, H] of the experts: this rank's partial sum, not yet added up over the ranks."""
    forward: OpenForward


class HandoverSink(Protocol):
    """Takes dispatches that it wants."""

    def wants(self, layer: int, M: int, forward: OpenForward) -> bool:
        """Say whether this dispatch is wanted; asked for every layer of every eager forward, so it must be quick."""

    def take(self, handover: DispatchHandover) -> None:
        """Take a dispatch, whose kernels may still be running on the current stream."""
