"""Routing on the device: softmax top-k with renormalisation, and the block-aligned plan of the fused kernels.

Everything here has static shapes and no host synchronisation, so it can be captured in a CUDA graph. On a GPU with
triton two kernels do it (:mod:`alphamoe_backend.routing_triton`); elsewhere torch does, with the same plan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alphamoe_backend import routing_triton
from alphamoe_backend.quantization.fp8_triton import available as triton_available


class AlignedPlan(NamedTuple):
    """Token-expert pairs grouped by expert, each group padded to whole blocks of ``block_m`` rows."""

    sorted_token_ids: Tensor
    """int32 [capacity * block_m]: ``token * top_k + route``; padding and the unused tail hold ``M * top_k``."""
    expert_ids: Tensor
    """int32 [capacity]: the expert of each block; the unused tail holds -1."""
    num_tokens_post_padded: Tensor
    """int32 [1] on the device: rows in use, a multiple of block_m."""


def plan_capacity(pairs: int, block_m: int, E: int) -> int:
    """Give the number of blocks that no routing of ``pairs`` pairs over ``E`` experts can exceed."""
    nonempty = min(E, pairs)
    return nonempty + (pairs - nonempty) // block_m


def topk_softmax(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token as Qwen3-MoE does: softmax over all, top-k, renormalised.

    Args:
        router_logits: float [M, E].
        top_k: experts a token.

    Returns:
        weights float32 [M, top_k] that sum to 1, and expert ids int32 [M, top_k], by falling weight.
    """
    if router_logits.is_cuda and triton_available():
        return routing_triton.topk_softmax(router_logits, top_k)
    probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    weights, ids = torch.topk(probabilities, top_k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), ids.to(torch.int32)


def align_block_size(topk_ids: Tensor, block_m: int, E: int) -> AlignedPlan:
    """Group token-expert pairs by expert and pad each group to whole blocks.

    Experts ascend, and tokens ascend inside an expert, so the plan is the same in every run.

    Args:
        topk_ids: int [M, top_k] in [0, E).
        block_m: rows of a block.
        E: experts.

    Returns:
        The plan, its arrays as large as the worst routing of this M needs (:func:`plan_capacity`).
    """
    topk_ids = topk_ids.to(torch.int32)
    if topk_ids.is_cuda and triton_available():
        return AlignedPlan(
            *routing_triton.align_block_size(topk_ids, block_m, E, plan_capacity(topk_ids.numel(), block_m, E))
        )
    return align_block_size_torch(topk_ids, block_m, E)


def align_block_size_torch(topk_ids: Tensor, block_m: int, E: int) -> AlignedPlan:
    """Align int32 ids in plain torch; see :func:`align_block_size`."""
    device = topk_ids.device
    flat = topk_ids.reshape(-1)
    pairs = flat.numel()
    capacity = plan_capacity(pairs, block_m, E)
    sorted_experts, order = torch.sort(flat, stable=True)
    # searchsorted counts without atomics and, unlike bincount, without reading a maximum back to the host.
    bounds = torch.searchsorted(sorted_experts, torch.arange(E + 1, device=device, dtype=torch.int32), out_int32=True)
    starts = bounds[:-1]
    blocks = torch.div(bounds[1:] - starts + (block_m - 1), block_m, rounding_mode="floor")
    block_ends = torch.cumsum(blocks, 0, dtype=torch.int32)
    shift = (block_ends - blocks) * block_m - starts
    rows = torch.arange(pairs, device=device, dtype=torch.int32) + shift.index_select(0, sorted_experts)
    sorted_token_ids = torch.full((capacity * block_m,), pairs, dtype=torch.int32, device=device)
    sorted_token_ids.scatter_(0, rows.long(), order.to(torch.int32))
    block_numbers = torch.arange(capacity, device=device, dtype=torch.int32)
    expert_ids = torch.searchsorted(block_ends, block_numbers, right=True, out_int32=True)
    expert_ids = expert_ids.masked_fill_(expert_ids == E, -1)
    return AlignedPlan(sorted_token_ids, expert_ids, block_ends[-1:] * block_m)
