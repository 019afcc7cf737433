"""FlashInfer's own AlphaMoE kernel on Blackwell. Written from its documented interface, not yet run on it."""

from __future__ import annotations

import functools
import importlib.metadata
import re

import torch
from torch import Tensor

MINIMUM_VERSION = (0, 7, 2)
CAPABILITIES = ((10, 0), (10, 3))


def installed_version() -> str | None:
    """Give the version of the installed flashinfer-python, or None."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def version_suffices(version: str | None) -> bool:
    """Say whether a version such as ``0.7.2.post1`` is 0.7.2 or later; a release candidate of 0.7.2 is not."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(.*)", version or "")
    if match is None:
        return False
    release = tuple(int(part) for part in match.groups()[:3])
    prerelease = re.match(r"\.?(a|b|rc|dev)\d*", match[4]) is not None
    return release > MINIMUM_VERSION or (release == MINIMUM_VERSION and not prerelease)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def usable(device: torch.device) -> bool:
    """Say whether FlashInfer's kernel serves this device: compute capability 10.0 or 10.3 and flashinfer >= 0.7.2."""
    if device.type != "cuda":
        return False
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _capability(index) in CAPABILITIES and version_suffices(installed_version())


def alphamoe_fp8_block_scale_aligned_moe(
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
    block_m: int,
    routed_scaling_factor: float,
    out: Tensor,
) -> Tensor:
    """Call FlashInfer's operator of this name; the layouts are those of ``experts.alphamoe_w8a8``.

    FlashInfer reads ``expert_ids`` only below the plan's used length, so the -1 of the unused tail is not seen.
    """
    from flashinfer import fused_moe

    fused_moe.alphamoe_fp8_block_scale_aligned_moe(
        hidden_states,
        hidden_states_scale,
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        topk_weights,
        top_k=top_k,
        block_m=block_m,
        routed_scaling_factor=routed_scaling_factor,
        out=out,
    )
    return out
