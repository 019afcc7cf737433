"""The activation quantisation as one Triton kernel, under the name that serving engines use for it.

Bitwise the same as the torch form in :mod:`alphamoe_backend.quantization.fp8`: divisions are rounded to nearest, not
Triton's default approximation.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor


@functools.cache
def available() -> bool:
    """Say whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernel() -> Any:
    from alphamoe_backend.quantization._fp8_kernels import _per_token_group_quant_8bit

    return _per_token_group_quant_8bit


def per_token_group_quant(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` [M, K] on its CUDA device; see ``fp8.per_token_group_quant_fp8``."""
    x = x.contiguous()
    M, K = x.shape
    quantised = torch.empty((M, K), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((M, K // group), dtype=torch.float32, device=x.device)
    groups = M * (K // group)
    if groups:
        # Eight groups a program: one group of 128 keeps a warp busy for a few instructions only.
        per_program = 8
        grid = ((groups + per_program - 1) // per_program,)
        _kernel()[grid](x, quantised, scale, groups, GROUP=group, GROUPS_PER_PROGRAM=per_program, num_warps=4)
    return quantised, scale
