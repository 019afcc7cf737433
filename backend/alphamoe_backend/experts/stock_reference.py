"""The stock two-GEMM path in plain torch, with its rounding points, for a CPU and for tests of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from alphamoe_backend.experts.reference import block_scaled_product, plan_groups, refuse_capture
from alphamoe_backend.geometry import GROUP
from alphamoe_backend.quantization.fp8 import ExpertWeights, per_token_group_quant_fp8_reference
from alphamoe_backend.routing import AlignedPlan


def stock_experts_reference(
    q: Tensor,
    q_scale: Tensor,
    weights: ExpertWeights,
    plan: AlignedPlan,
    topk_weights: Tensor,
    *,
    block_m: int,
    dtype: torch.dtype,
    routed_scaling_factor: float = 1.0,
) -> Tensor:
    """Run gate/up, SwiGLU, quantisation, down and the sum over routes, rounding to ``dtype`` where a kernel stores it.

    Args:
        q: e4m3 [M, H]; q_scale: float32 [M, H / 128].
        weights: in the canonical layout.
        plan: aligned to ``block_m``.
        topk_weights: float32 [M, top_k].
        dtype: of the result and of everything stored between the kernels.

    Returns:
        ``dtype`` [M, H].

    Raises:
        AlphaMoEError: the current stream is capturing.
    """
    refuse_capture(q.device)
    M, top_k = topk_weights.shape
    H = q.shape[1]
    by_pair = torch.zeros((M * top_k, H), dtype=dtype, device=q.device)
    route_weights = topk_weights.reshape(-1).to(torch.float32) * routed_scaling_factor
    for expert, pair_ids in plan_groups(*plan, block_m, M * top_k):
        tokens = torch.div(pair_ids, top_k, rounding_mode="floor")
        x = q.view(torch.uint8)[tokens].view(q.dtype).to(torch.float32)
        gate_up = block_scaled_product(
            x, q_scale[tokens], weights.gate_up[expert].to(torch.float32), weights.gate_up_scale[expert]
        ).to(dtype)
        gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
        inner, inner_scale = per_token_group_quant_fp8_reference((functional.silu(gate) * up).to(dtype), GROUP)
        down = block_scaled_product(
            inner.to(torch.float32), inner_scale, weights.down[expert].to(torch.float32), weights.down_scale[expert]
        )
        by_pair[pair_ids] = (down * route_weights[pair_ids, None]).to(dtype)
    return by_pair.view(M, top_k, H).to(torch.float32).sum(dim=1).to(dtype)
