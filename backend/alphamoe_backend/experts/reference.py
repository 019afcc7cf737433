"""The fused operator in plain torch, exact about rounding points, and an independent float64 oracle.

Rounding points of the operator, in order: e4m3 products are summed in float32 over 128 columns of K; each sum times
``token scale * block scale`` is added in float32 over the K blocks; SwiGLU in float32; the 128 columns of one
intermediate group are quantised to e4m3 with ``scale = amax / 448``; the down product of the group is a float32 sum
times ``token scale * routing weight * scaling factor`` and the block scale; that contribution is rounded to the dtype
of ``out`` and added there in that dtype, once for each route and intermediate group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from alphamoe_backend.geometry import GROUP
from alphamoe_backend.quantization.fp8 import (
    ExpertWeights,
    deinterleave_gated,
    dequantize_blocks_fp8,
    dequantize_groups_fp8,
    per_token_group_quant_fp8_reference,
)
from alphamoe_tracers.errors import AlphaMoEError

ORACLE_ROWS = 8192
"""Rows of one expert that the oracle holds in float64 at a time."""


class Oracle(NamedTuple):
    """What the operator computes when nothing but its inputs (and, if asked for, the intermediate) is rounded."""

    out: Tensor
    """float64 [M, H]."""
    sum_abs_terms: Tensor
    """float64 [M, H]: sum of the magnitudes of all contributions (route x intermediate group) to each element."""


def refuse_capture(device: torch.device) -> None:
    """Refuse to run the torch reference, which reads the plan back to the host, inside a CUDA graph capture.

    Raises:
        AlphaMoEError: the current stream of ``device`` is capturing.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise AlphaMoEError(
            "the torch reference of the experts cannot be captured in a CUDA graph",
            hint="serve with --executions eager on this GPU, or use --moe-runner-backend triton",
        )


def plan_groups(
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, block_m: int, pairs: int
) -> list[tuple[int, Tensor]]:
    """Split the rows in use into (expert, pair ids int64) groups, without the padding."""
    used = int(num_tokens_post_padded[0])
    ids = sorted_token_ids[:used].long()
    experts = expert_ids[: used // block_m].repeat_interleave(block_m)
    keep = (ids >= 0) & (ids < pairs) & (experts >= 0)
    present, counts = torch.unique_consecutive(experts[keep], return_counts=True)
    return list(zip(present.tolist(), torch.split(ids[keep], counts.tolist()), strict=True))


def block_scaled_product(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """Multiply x [n, K] by w [N, K] transposed, in float32, adding scaled 128-column sums in the order of K."""
    rows = w_scale.repeat_interleave(GROUP, dim=0)
    acc = torch.zeros((x.shape[0], w.shape[0]), dtype=torch.float32, device=x.device)
    for block in range(x.shape[1] // GROUP):
        columns = slice(block * GROUP, (block + 1) * GROUP)
        tile = x[:, columns] @ w[:, columns].T
        acc += tile * (x_scale[:, block, None] * rows[None, :, block])
    return acc


def alphamoe_fp8_block_scale_aligned_moe_reference(
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    topk_weights: Tensor,
    *,
    top_k: int,
    block_m: int = 8,
    routed_scaling_factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Run the routed experts in plain torch with the rounding points of the fused kernel (see the module's text).

    Args:
        hidden_states: e4m3 [M, H]; hidden_states_scale: float32 [M, H / 128].
        gemm1_weights: e4m3 [E, 2I, H], gate and up interleaved by 8 rows; gemm1_weights_scale: by 1 row.
        gemm2_weights: e4m3 [E, H, I]; gemm2_weights_scale: float32 [E, H / 128, I / 128].
        sorted_token_ids, expert_ids, num_tokens_post_padded: the aligned plan.
        topk_weights: float32 [M, top_k].
        out: bfloat16 or float32 [M, H]; contributions are added to what it holds. Zeros of bfloat16 when absent.

    Returns:
        ``out``, the same bits in every run on one machine: contributions are added by intermediate group, then route.

    Raises:
        AlphaMoEError: the current stream is capturing.
    """
    refuse_capture(hidden_states.device)
    M, H = hidden_states.shape
    if out is None:
        out = torch.zeros((M, H), dtype=torch.bfloat16, device=hidden_states.device)
    pairs = M * top_k
    slices = gemm2_weights.shape[2] // GROUP
    flat_weights = topk_weights.reshape(-1).to(torch.float32)
    contributions = torch.zeros((slices, pairs, H), dtype=out.dtype, device=out.device)
    groups = plan_groups(sorted_token_ids, expert_ids, num_tokens_post_padded, block_m, pairs)
    for expert, pair_ids in groups:
        tokens = torch.div(pair_ids, top_k, rounding_mode="floor")
        # Moved as bytes: indexing is not implemented for the fp8 dtypes everywhere.
        x = hidden_states.view(torch.uint8)[tokens].view(hidden_states.dtype).to(torch.float32)
        w1, w1_scale = deinterleave_gated(gemm1_weights[expert], gemm1_weights_scale[expert])
        gate_up = block_scaled_product(x, hidden_states_scale[tokens], w1.to(torch.float32), w1_scale)
        gate, up = gate_up.chunk(2, dim=-1)
        q, q_scale = per_token_group_quant_fp8_reference(functional.silu(gate) * up)
        q32, w2 = q.to(torch.float32), gemm2_weights[expert].to(torch.float32)
        w2_scale = gemm2_weights_scale[expert].repeat_interleave(GROUP, dim=0)
        route_scale = flat_weights[pair_ids] * routed_scaling_factor
        for s in range(slices):
            columns = slice(s * GROUP, (s + 1) * GROUP)
            tile = q32[:, columns] @ w2[:, columns].T
            tile = tile * (q_scale[:, s] * route_scale)[:, None] * w2_scale[None, :, s]
            contributions[s, pair_ids] = tile.to(out.dtype)
    for by_pair in contributions:
        for by_token in by_pair.view(M, top_k, H).unbind(1):
            out += by_token
    return out


def float64_oracle(
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    weights: ExpertWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    routed_scaling_factor: float = 1.0,
    requantise: bool = False,
) -> Oracle:
    """Compute the routed experts in float64 from dequantised inputs.

    It shares neither the plan nor the interleaving with the operator, so that a fault in those is seen too.

    Args:
        hidden_states: e4m3 [M, H]; hidden_states_scale: float32 [M, H / 128].
        weights: the experts in the canonical layout.
        topk_weights: float32 [M, top_k]; topk_ids: int [M, top_k].
        requantise: round the intermediate to e4m3 as the operator must. Without it the difference to the operator is
            the requantisation's error, about 2.3 % of the RMS, in which an element-wise bound near zero drowns.

    Returns:
        The exact result and the sum of the magnitudes of its terms, on the inputs' device.
    """
    x = dequantize_groups_fp8(hidden_states, hidden_states_scale, torch.float64)
    out = torch.zeros_like(x)
    sum_abs_terms = torch.zeros_like(x)
    order = torch.argsort(topk_ids.reshape(-1), stable=True)
    present, counts = torch.unique_consecutive(topk_ids.reshape(-1)[order], return_counts=True)
    route_weights = topk_weights.reshape(-1).to(torch.float64) * routed_scaling_factor
    top_k = topk_ids.shape[1]
    for expert, pair_ids in zip(present.tolist(), torch.split(order, counts.tolist()), strict=True):
        w1 = dequantize_blocks_fp8(weights.gate_up[expert], weights.gate_up_scale[expert], torch.float64)
        w2 = dequantize_blocks_fp8(weights.down[expert], weights.down_scale[expert], torch.float64)
        for chunk in torch.split(pair_ids, ORACLE_ROWS):
            tokens = torch.div(chunk, top_k, rounding_mode="floor")
            gate, up = (x[tokens] @ w1.T).chunk(2, dim=-1)
            hidden = functional.silu(gate) * up
            if requantise:
                hidden = dequantize_groups_fp8(*per_token_group_quant_fp8_reference(hidden), torch.float64)
            hidden = hidden * route_weights[chunk, None]
            for columns in range(0, w2.shape[1], GROUP):
                term = hidden[:, columns : columns + GROUP] @ w2[:, columns : columns + GROUP].T
                out.index_add_(0, tokens, term)
                sum_abs_terms.index_add_(0, tokens, term.abs())
    return Oracle(out, sum_abs_terms)
