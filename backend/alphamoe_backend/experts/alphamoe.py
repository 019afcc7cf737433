"""The AlphaMoE experts of one layer: one fused launch over interleaved gate/up weights."""

from __future__ import annotations

import torch
from torch import Tensor

from alphamoe_backend.experts.alphamoe_w8a8 import alphamoe_fp8_block_scale_aligned_moe, implementation
from alphamoe_backend.experts.registry import (
    ALPHAMOE_W8A8_KERNEL,
    ALPHAMOE_W8A8_SYMBOL,
    KernelSubmission,
    new_identity,
)
from alphamoe_backend.geometry import LocalGeometry
from alphamoe_backend.quantization.fp8 import (
    ExpertWeights,
    deinterleave_gated,
    interleave_gated,
    per_token_group_quant_fp8,
)
from alphamoe_backend.routing import AlignedPlan, align_block_size
from alphamoe_backend.workspaces import Workspaces, buffer


class AlphaMoEExperts:
    """Routed experts behind ``alphamoe_fp8_block_scale_aligned_moe``.

    The canonical gate/up weight is not kept: :meth:`canonical` gives it back, which a weight reload starts from.
    """

    name = "flashinfer_alphamoe"

    def __init__(self, geometry: LocalGeometry, weights: ExpertWeights) -> None:
        weights.check(geometry)
        self.geometry = geometry
        self.identity = new_identity(self.name)
        self.gate_up, self.gate_up_scale = interleave_gated(weights.gate_up, weights.gate_up_scale)
        self.down, self.down_scale = weights.down.contiguous(), weights.down_scale.contiguous()

    def canonical(self) -> ExpertWeights:
        """Give the weights back in the canonical layout."""
        return ExpertWeights(*deinterleave_gated(self.gate_up, self.gate_up_scale), self.down, self.down_scale)

    def submissions(self, M: int) -> tuple[KernelSubmission, ...]:
        """List the one fused launch."""
        return (KernelSubmission(ALPHAMOE_W8A8_KERNEL, ALPHAMOE_W8A8_SYMBOL, self.geometry.block_m),)

    def plan(self, topk_ids: Tensor) -> AlignedPlan:
        """Align topk_ids int32 [M, top_k] to the geometry's block_m."""
        return align_block_size(topk_ids, self.geometry.block_m, self.geometry.E)

    def run(
        self,
        q: Tensor,
        q_scale: Tensor,
        plan: AlignedPlan,
        topk_weights: Tensor,
        dtype: torch.dtype,
        workspaces: Workspaces | None = None,
    ) -> Tensor:
        """Give this rank's partial sum ``dtype`` [M, H]; see :class:`alphamoe_backend.experts.registry.Experts`."""
        # The fused kernels add in bfloat16; only the torch reference can add in another dtype.
        out_dtype = dtype if implementation(q.device) == "reference" else torch.bfloat16
        out = buffer(workspaces, "experts.out", (q.shape[0], self.geometry.H), out_dtype, q.device).zero_()
        alphamoe_fp8_block_scale_aligned_moe(
            q,
            q_scale,
            self.gate_up,
            self.gate_up_scale,
            self.down,
            self.down_scale,
            *plan,
            topk_weights,
            top_k=self.geometry.top_k,
            block_m=self.geometry.block_m,
            out=out,
        )
        return out.to(dtype)

    def dispatch(self, hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Quantise, plan and run: hidden [M, H] to this rank's partial sum in the same dtype."""
        q, q_scale = per_token_group_quant_fp8(hidden)
        return self.run(q, q_scale, self.plan(topk_ids), topk_weights, hidden.dtype)
