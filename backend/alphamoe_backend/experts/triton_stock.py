"""The stock two-GEMM experts: the baseline, and what a silent fallback looks like.

Kernels, in order: ``fused_moe_kernel`` (gate and up), ``act_and_mul_kernel``, ``_per_token_group_quant_8bit``,
``fused_moe_kernel`` (down, times the routing weight), ``_moe_sum_reduce_kernel``. Weights stay in the canonical layout.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alphamoe_backend.experts.registry import STOCK_SYMBOL, KernelSubmission, new_identity
from alphamoe_backend.experts.stock_reference import stock_experts_reference
from alphamoe_backend.geometry import LocalGeometry
from alphamoe_backend.quantization.fp8 import ExpertWeights, per_token_group_quant_fp8
from alphamoe_backend.routing import AlignedPlan, align_block_size
from alphamoe_backend.workspaces import Workspaces, buffer
from alphamoe_tracers.errors import UsageError

SM_COUNT = 132
"""Streaming multiprocessors of an H200; tiles are made small enough to give each of them work."""


@dataclass(frozen=True)
class StockTiles:
    """Tile sizes of one ``fused_moe_kernel`` launch."""

    block_m: int
    block_n: int
    group_m: int
    num_warps: int
    num_stages: int


def stock_block_m(M: int, geometry: LocalGeometry) -> int:
    """Choose the rows of a block from the mean number of tokens that an expert gets."""
    rows = M * geometry.top_k / geometry.E
    for block_m, up_to in ((16, 24.0), (32, 48.0), (64, 160.0)):
        if rows <= up_to:
            return block_m
    return 128


def stock_tiles(M: int, geometry: LocalGeometry, N: int) -> StockTiles:
    """Choose the tiles of the GEMM whose weights have ``N`` rows, for M tokens.

    A weight's scale covers 128 rows, so block_n divides 128; it shrinks while the launch would leave processors idle.
    """
    block_m = stock_block_m(M, geometry)
    pairs = M * geometry.top_k
    blocks = max(min(pairs, geometry.E), pairs // block_m)
    block_n = 128
    while block_n > 32 and blocks * (N // block_n) < 2 * SM_COUNT:
        block_n //= 2
    if block_m >= 64:
        return StockTiles(block_m, block_n, group_m=8, num_warps=8 if block_m == 128 else 4, num_stages=3)
    return StockTiles(block_m, block_n, group_m=8 if M > 64 else 1, num_warps=4, num_stages=4)


@functools.cache
def triton_available() -> bool:
    """Say whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _kernels() -> Any:
    if not triton_available():
        raise UsageError(
            "the stock experts need triton on a GPU, and it is not installed",
            hint="pip install 'alphamoe-trace[triton]'",
        )
    from alphamoe_backend.experts import _stock_kernels

    return _stock_kernels


def stock_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    c: Tensor,
    plan: AlignedPlan,
    topk_weights: Tensor,
    tiles: StockTiles,
    *,
    a_row_divisor: int,
    mul_routed_weight: bool,
    routed_scaling_factor: float,
) -> None:
    """Launch ``fused_moe_kernel`` once: rows ``pair // a_row_divisor`` of a [*, K] times b [E, N, K] to c [pairs, N].

    Raises:
        UsageError: triton is not installed.
    """
    _, N, K = b.shape
    # Whole groups of blocks, so that the swizzle never skips a block of the last, shorter group.
    m_blocks = -(-plan.expert_ids.numel() // tiles.group_m) * tiles.group_m
    _kernels().fused_moe_kernel[(m_blocks * (N // tiles.block_n),)](
        a,
        a_scale,
        b,
        b_scale,
        c,
        topk_weights,
        plan.sorted_token_ids,
        plan.expert_ids,
        plan.num_tokens_post_padded,
        topk_weights.numel(),
        routed_scaling_factor,
        N=N,
        K=K,
        A_ROW_DIVISOR=a_row_divisor,
        MUL_ROUTED_WEIGHT=mul_routed_weight,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        GROUP_M=tiles.group_m,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def stock_fused_experts(
    q: Tensor,
    q_scale: Tensor,
    weights: ExpertWeights,
    plan: AlignedPlan,
    topk_weights: Tensor,
    geometry: LocalGeometry,
    *,
    dtype: torch.dtype = torch.bfloat16,
    routed_scaling_factor: float = 1.0,
    workspaces: Workspaces | None = None,
) -> Tensor:
    """Launch the stock kernels on the current stream, without a host synchronisation.

    Args:
        q: e4m3 [M, H]; q_scale: float32 [M, H / 128].
        weights: in the canonical layout.
        plan: aligned to ``stock_block_m(M, geometry)``.
        topk_weights: float32 [M, top_k].
        dtype: of the result and of what is stored between the kernels.

    Returns:
        ``dtype`` [M, H], overwritten by the next call with the same workspaces.

    Raises:
        UsageError: triton is not installed.
    """
    kernels = _kernels()
    M, H = q.shape
    I_local, top_k = geometry.I_local, geometry.top_k
    pairs, device = M * top_k, q.device
    gate_up = buffer(workspaces, "stock.gate_up", (pairs, 2 * I_local), dtype, device)
    inner = buffer(workspaces, "stock.inner", (pairs, I_local), dtype, device)
    by_pair = buffer(workspaces, "stock.by_pair", (pairs, H), dtype, device)
    out = buffer(workspaces, "experts.out", (M, H), dtype, device)
    topk_weights = topk_weights.contiguous()
    stock_gemm(
        q,
        q_scale,
        weights.gate_up,
        weights.gate_up_scale,
        gate_up,
        plan,
        topk_weights,
        stock_tiles(M, geometry, 2 * I_local),
        a_row_divisor=top_k,
        mul_routed_weight=False,
        routed_scaling_factor=1.0,
    )
    act_block = 1024
    act_grid = (-(-pairs * I_local // act_block),)
    kernels.act_and_mul_kernel[act_grid](gate_up, inner, pairs * I_local, I=I_local, BLOCK=act_block, num_warps=4)
    inner_q, inner_scale = per_token_group_quant_fp8(inner)
    stock_gemm(
        inner_q,
        inner_scale,
        weights.down,
        weights.down_scale,
        by_pair,
        plan,
        topk_weights,
        stock_tiles(M, geometry, H),
        a_row_divisor=1,
        mul_routed_weight=True,
        routed_scaling_factor=routed_scaling_factor,
    )
    sum_block = 256 if M < SM_COUNT else 1024
    sum_grid = (M, -(-H // sum_block))
    kernels._moe_sum_reduce_kernel[sum_grid](by_pair, out, H=H, TOP_K=top_k, BLOCK=sum_block, num_warps=4)
    return out


class StockExperts:
    """The stock experts of one layer; on a CPU the same rounding points in plain torch."""

    name = "triton"

    def __init__(self, geometry: LocalGeometry, weights: ExpertWeights) -> None:
        weights.check(geometry)
        self.geometry = geometry
        self.weights = weights
        self.identity = new_identity(self.name)

    def submissions(self, M: int) -> tuple[KernelSubmission, ...]:
        """List the two GEMM launches, whose symbol is the same."""
        block_m = stock_block_m(M, self.geometry)
        return (
            KernelSubmission("triton_fused_moe_gate_up", STOCK_SYMBOL, block_m),
            KernelSubmission("triton_fused_moe_down", STOCK_SYMBOL, block_m),
        )

    def plan(self, topk_ids: Tensor) -> AlignedPlan:
        """Align topk_ids int32 [M, top_k] to this M's block size."""
        return align_block_size(topk_ids, stock_block_m(topk_ids.shape[0], self.geometry), self.geometry.E)

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
        if q.is_cuda:
            return stock_fused_experts(
                q, q_scale, self.weights, plan, topk_weights, self.geometry, dtype=dtype, workspaces=workspaces
            )
        block_m = stock_block_m(q.shape[0], self.geometry)
        return stock_experts_reference(q, q_scale, self.weights, plan, topk_weights, block_m=block_m, dtype=dtype)

    def dispatch(self, hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Quantise, plan and run: hidden [M, H] to this rank's partial sum in the same dtype."""
        q, q_scale = per_token_group_quant_fp8(hidden)
        return self.run(q, q_scale, self.plan(topk_ids), topk_weights, hidden.dtype)
