"""Inputs and oracles for the checks of the fused kernel on a GPU (see kernel_check.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from alphamoe_backend.geometry import GROUP, LocalGeometry
from alphamoe_backend.quantization.fp8 import ExpertWeights, dequantize_blocks_fp8, interleave_gated
from alphamoe_backend.routing import AlignedPlan, align_block_size

FP8 = torch.float8_e4m3fn
E4M3_MAX = 448.0
RMS = 1.15
"""Of every reference: the tolerance's absolute part is meant for outputs of about one."""

QWEN = LocalGeometry(E=512, H=2048, I_local=128, top_k=10)
QWEN_TP2 = LocalGeometry(E=512, H=2048, I_local=256, top_k=10)
GLM = LocalGeometry(E=256, H=6144, I_local=512, top_k=8)
SMALL = LocalGeometry(E=16, H=256, I_local=128, top_k=4)


@dataclass(frozen=True)
class Experts:
    """Expert weights of one geometry in both layouts."""

    geometry: LocalGeometry
    canonical: ExpertWeights
    gate_up: Tensor
    """Interleaved by 8 rows."""
    gate_up_scale: Tensor


@dataclass(frozen=True)
class Batch:
    """One dispatch: quantised tokens, their routing and its plan."""

    q: Tensor
    q_scale: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    plan: AlignedPlan


@dataclass(frozen=True)
class Oracles:
    """float64 results [M, H] for one batch."""

    requantised: Tensor
    """With the intermediate rounded to e4m3 as the operator does: what single elements are held against."""
    exact: Tensor
    """Without: what the whole output is held against."""
    sum_abs_terms: Tensor


def _e4m3(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.empty(shape, dtype=FP8, device=generator.device)
    for part in values if len(shape) == 3 else (values,):
        part.copy_(torch.randn(part.shape, generator=generator, device=generator.device))
    return values


def _scales(shape: tuple[int, ...], level: float, generator: torch.Generator) -> Tensor:
    """Draw scales that differ by up to three times, so that a wrong scale index shows."""
    return level * (0.5 + torch.rand(shape, generator=generator, device=generator.device))


def make_experts(geometry: LocalGeometry, generator: torch.Generator) -> Experts:
    """Draw weights whose outputs have an RMS of about ``RMS``."""
    E, H, I_local = geometry.E, geometry.H, geometry.I_local
    canonical = ExpertWeights(
        gate_up=_e4m3((E, 2 * I_local, H), generator),
        gate_up_scale=_scales((E, 2 * I_local // GROUP, H // GROUP), 1.5 * H**-0.5, generator),
        down=_e4m3((E, H, I_local), generator),
        down_scale=_scales((E, H // GROUP, I_local // GROUP), 0.58 * (geometry.top_k / I_local) ** 0.5, generator),
    )
    gate_up, gate_up_scale = interleave_gated(canonical.gate_up, canonical.gate_up_scale)
    return Experts(geometry, canonical, gate_up, gate_up_scale)


def make_batch(geometry: LocalGeometry, M: int, generator: torch.Generator, *, skewed: bool = False) -> Batch:
    """Draw tokens and a routing: uniform over the experts, or every token to the same ``top_k`` of them."""
    device = generator.device
    order = torch.rand((M, geometry.E), generator=generator, device=device)
    ids = order.argsort(dim=-1)[:, : geometry.top_k].to(torch.int32).contiguous()
    if skewed:
        ids = ids[:1].expand(M, -1).contiguous()
    weights = torch.rand((M, geometry.top_k), generator=generator, device=device) + 0.2
    return Batch(
        q=_e4m3((M, geometry.H), generator),
        q_scale=_scales((M, geometry.H // GROUP), 1.0, generator),
        topk_weights=weights / weights.sum(dim=-1, keepdim=True),
        topk_ids=ids,
        plan=align_block_size(ids, geometry.block_m, geometry.E),
    )


def spoil_tail(plan: AlignedPlan, generator: torch.Generator) -> AlignedPlan:
    """Fill the plan beyond its used length with plausible and with wild numbers, which the kernel must not look at."""
    used = int(plan.num_tokens_post_padded)
    ids, experts = plan.sorted_token_ids.clone(), plan.expert_ids.clone()
    for tail, most in ((ids[used:], 2**31 - 1), (experts[used // 8 :], 2**31 - 1)):
        wild = torch.randint(-(2**31), most, tail.shape, generator=generator, device=tail.device)
        tail.copy_(torch.where(wild % 2 == 0, wild, wild.abs() % 7).to(torch.int32))
    return AlignedPlan(ids, experts, plan.num_tokens_post_padded)


def oracles(experts: Experts, batch: Batch, routed_scaling_factor: float = 1.0) -> Oracles:
    """Compute the routed experts in float64, an expert at a time, without the plan and without the interleaving."""
    weights, top_k = experts.canonical, experts.geometry.top_k
    M, H = batch.q.shape
    x = batch.q.to(torch.float64).view(M, -1, GROUP) * batch.q_scale.to(torch.float64)[..., None]
    x = x.view(M, H)
    requantised, exact, sum_abs = (torch.zeros_like(x) for _ in range(3))
    order = torch.argsort(batch.topk_ids.reshape(-1), stable=True)
    present, counts = torch.unique_consecutive(batch.topk_ids.reshape(-1)[order], return_counts=True)
    route_weights = batch.topk_weights.reshape(-1, 1).to(torch.float64) * routed_scaling_factor
    for expert, pairs in zip(present.tolist(), torch.split(order, counts.tolist()), strict=True):
        w1 = dequantize_blocks_fp8(weights.gate_up[expert], weights.gate_up_scale[expert], torch.float64)
        w2 = dequantize_blocks_fp8(weights.down[expert], weights.down_scale[expert], torch.float64)
        for chunk in torch.split(pairs, 8192):
            tokens = torch.div(chunk, top_k, rounding_mode="floor")
            gate, up = (x[tokens] @ w1.T).chunk(2, dim=-1)
            inner = functional.silu(gate) * up
            groups = inner.view(len(chunk), -1, GROUP)
            scale = (groups.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).clamp_min(1e-300)
            rounded = ((groups / scale).to(torch.float32).to(FP8).to(torch.float64) * scale).view_as(inner)
            exact.index_add_(0, tokens, (inner @ w2.T) * route_weights[chunk])
            for column in range(0, inner.shape[1], GROUP):
                columns = slice(column, column + GROUP)
                term = (rounded[:, columns] @ w2[:, columns].T) * route_weights[chunk]
                requantised.index_add_(0, tokens, term)
                sum_abs.index_add_(0, tokens, term.abs_())
    return Oracles(requantised, exact, sum_abs)


def levelled(experts: Experts, batch: Batch) -> tuple[Batch, Oracles]:
    """Scale the routing weights so that the reference has an RMS of ``RMS``; few tokens spread by several times."""
    level = RMS / float(oracles(experts, batch).requantised.square().mean().sqrt())
    batch = replace(batch, topk_weights=batch.topk_weights * level)
    return batch, oracles(experts, batch)


def kernel_tensors(experts: Experts, batch: Batch, out: Tensor) -> tuple[Tensor, ...]:
    """Give the eleven tensors of a launch, in order."""
    return (
        batch.q,
        batch.q_scale,
        experts.gate_up,
        experts.gate_up_scale,
        experts.canonical.down,
        experts.canonical.down_scale,
        *batch.plan,
        batch.topk_weights,
        out,
    )
