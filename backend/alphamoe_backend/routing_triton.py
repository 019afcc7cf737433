"""Routing in two Triton launches, where plain torch needs thirty; the plan is the same, element for element."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _kernels() -> Any:
    from alphamoe_backend import _routing_kernels

    return _routing_kernels


def _power_of_two(n: int, at_least: int) -> int:
    return max(at_least, 1 << (n - 1).bit_length())


def topk_softmax(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose experts on the device of ``router_logits`` [M, E]; see ``routing.topk_softmax``."""
    M, E = router_logits.shape
    weights = torch.empty((M, top_k), dtype=torch.float32, device=router_logits.device)
    ids = torch.empty((M, top_k), dtype=torch.int32, device=router_logits.device)
    _kernels()._router_topk_softmax[(M,)](
        router_logits.contiguous(),
        weights,
        ids,
        E=E,
        BINS=_power_of_two(E, 2),
        TOP_K=top_k,
        SLOTS=_power_of_two(top_k, 2),
        num_warps=1 if E <= 512 else 4,
    )
    return weights, ids


def align_block_size(topk_ids: Tensor, block_m: int, E: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Align int32 ids on their device to ``capacity`` blocks; see ``routing.align_block_size``."""
    device, pairs = topk_ids.device, topk_ids.numel()
    sorted_token_ids = torch.empty(capacity * block_m, dtype=torch.int32, device=device)
    expert_ids = torch.empty(capacity, dtype=torch.int32, device=device)
    num_tokens_post_padded = torch.empty(1, dtype=torch.int32, device=device)
    _kernels()._route_align_block_size[(E,)](
        topk_ids.contiguous(),
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        pairs,
        capacity,
        E=E,
        BINS=_power_of_two(E, 2),
        BLOCK_M=block_m,
        PAD=_power_of_two(block_m, 2),
        CHUNK=1024 if pairs > 256 else 256,
        num_warps=4,
    )
    return sorted_token_ids, expert_ids, num_tokens_post_padded
