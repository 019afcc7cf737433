"""FP8 W8A8: e4m3 activations scaled by token and group of 128, e4m3 weights scaled by 128 x 128 blocks.

A value dequantises to ``float32(e4m3) * scale`` with ``scale = amax / 448``. A group of zeros has scale 0 and
dequantises to exact zeros; a NaN makes its group's scale NaN, so that it stays visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphamoe_backend.geometry import GROUP, LocalGeometry
from alphamoe_tracers.errors import UsageError

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INTERLEAVE_ROWS = 8


@dataclass(frozen=True)
class ExpertWeights:
    """Quantised experts of one rank in the canonical layout: all gate rows, then all up rows."""

    gate_up: Tensor
    """e4m3 [E, 2 * I_local, H]."""
    gate_up_scale: Tensor
    """float32 [E, 2 * I_local / 128, H / 128]."""
    down: Tensor
    """e4m3 [E, H, I_local]."""
    down_scale: Tensor
    """float32 [E, H / 128, I_local / 128]."""

    def check(self, geometry: LocalGeometry) -> None:
        """Refuse tensors that are not what ``geometry`` says.

        Raises:
            UsageError: naming the first tensor whose shape or dtype is wrong.
        """
        E, H, N, K = geometry.E, geometry.H, geometry.N, geometry.I_local
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "gate_up": ((E, N, H), FP8),
            "gate_up_scale": ((E, N // GROUP, H // GROUP), torch.float32),
            "down": ((E, H, K), FP8),
            "down_scale": ((E, H // GROUP, K // GROUP), torch.float32),
        }
        for name, (shape, dtype) in expected.items():
            tensor: Tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise UsageError(
                    f"expert weight {name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}",
                    hint="quantise with quantize_blocks_fp8 and cut by rank before building the experts",
                )


def _divide(values: Tensor, scale: Tensor) -> Tensor:
    # A zero scale (zeros, or an amax so small that amax / 448 underflows) must give zeros, not 0 / 0.
    quotient = values / torch.where(scale == 0, torch.ones_like(scale), scale)
    return quotient.clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _scale(amax: Tensor) -> Tensor:
    # Divided by a tensor: CUDA turns a division by a Python number into a product with its reciprocal,
    # which rounds otherwise than the CPU and the Triton kernel do.
    return amax / torch.full((), FP8_MAX, device=amax.device)


def per_token_group_quant_fp8_reference(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Quantise activations in plain torch; see :func:`per_token_group_quant_fp8`, whose result is bitwise the same."""
    groups = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    scale = _scale(groups.abs().amax(dim=-1))
    return _divide(groups, scale.unsqueeze(-1)).reshape(x.shape), scale


def per_token_group_quant_fp8(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Quantise activations by token and group of ``group`` columns.

    Args:
        x: float16, bfloat16 or float32 [M, K], K a multiple of ``group``.
        group: columns that share a scale.

    Returns:
        e4m3 [M, K] and scale float32 [M, K / group], both contiguous and row-major.

    Raises:
        UsageError: K is not a multiple of ``group``.
    """
    if x.shape[-1] % group:
        raise UsageError(f"{x.shape[-1]} columns are not a multiple of the quantisation group of {group}")
    if x.is_cuda:
        from alphamoe_backend.quantization import fp8_triton

        if fp8_triton.available():
            return fp8_triton.per_token_group_quant(x, group)
    return per_token_group_quant_fp8_reference(x, group)


def _blocks(w: Tensor) -> Tensor:
    N, K = w.shape[-2:]
    return w.reshape(*w.shape[:-2], N // GROUP, GROUP, K // GROUP, GROUP)


def quantize_blocks_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights by blocks of 128 x 128.

    Args:
        w: float [..., N, K], N and K multiples of 128.

    Returns:
        e4m3 [..., N, K] and scale float32 [..., N / 128, K / 128].

    Raises:
        UsageError: N or K is not a multiple of 128.
    """
    N, K = w.shape[-2:]
    if N % GROUP or K % GROUP:
        raise UsageError(f"a weight of {N} x {K} cannot be cut into blocks of {GROUP} x {GROUP}")
    blocks = _blocks(w.to(torch.float32))
    scale = _scale(blocks.abs().amax(dim=(-3, -1)))
    quantised = _divide(blocks, scale[..., :, None, :, None])
    return quantised.reshape(w.shape), scale


def dequantize_blocks_fp8(w: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Give ``w`` [..., N, K] back in ``dtype``, each 128 x 128 block times its scale."""
    return (_blocks(w.to(dtype)) * scale.to(dtype)[..., :, None, :, None]).reshape(w.shape)


def dequantize_groups_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Give activations ``x`` [M, K] back in ``dtype``, each group times its scale [M, K / group]."""
    groups = x.to(dtype).reshape(*scale.shape, -1)
    return (groups * scale.to(dtype).unsqueeze(-1)).reshape(x.shape)


def _swap(t: Tensor, outer: int, rows: int) -> Tensor:
    R, K = t.shape[-2:]
    pieces = t.reshape(*t.shape[:-2], outer, R // (outer * rows), rows, K)
    return pieces.transpose(-4, -3).reshape(t.shape).contiguous()


def interleave_gated(w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Alternate 8 gate rows with 8 up rows, and their scales row by row, as the fused kernels read them.

    Args:
        w: e4m3 [E, 2I, K], gate rows first.
        scale: float32 [E, 2I / 128, K / 128].

    Returns:
        The same shapes, contiguous: rows g0-7, u0-7, g8-15, ...; scales g0, u0, g1, ...
    """
    # Moved as bytes: not every device copies the fp8 dtype through arbitrary strides.
    return _swap(w.view(torch.uint8), 2, INTERLEAVE_ROWS).view(w.dtype), _swap(scale, 2, 1)


def deinterleave_gated(w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Undo :func:`interleave_gated`: all gate rows, then all up rows."""
    pairs, scale_pairs = w.shape[-2] // (2 * INTERLEAVE_ROWS), scale.shape[-2] // 2
    return _swap(w.view(torch.uint8), pairs, INTERLEAVE_ROWS).view(w.dtype), _swap(scale, scale_pairs, 1)
