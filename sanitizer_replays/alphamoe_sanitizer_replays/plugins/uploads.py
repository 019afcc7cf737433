"""Bring inputs to the device by copies from the host alone, so that a tool sees every byte that was written.

Nothing here launches a kernel: memory comes from ``torch.empty`` and is filled by ``copy_`` of contiguous tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT_BYTES = 16
"""What the kernels' vector copies need; a tensor that is mapped from a file may begin elsewhere."""


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Give ``tensor`` on the device; on a CPU itself, or a copy where it is not aligned."""
    import torch

    if device.type == "cpu":
        return tensor.contiguous() if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    there.copy_(tensor.contiguous())
    return there


def experts_in_use(expert_ids: Tensor, num_tokens_post_padded: Tensor, block_m: int, E: int) -> list[tuple[int, int]]:
    """List the experts that a plan sends tokens to as half-open runs of neighbours, ascending.

    Args:
        expert_ids: int32 [blocks] on the CPU; num_tokens_post_padded: int32 [1].
        block_m: rows of a block.
        E: experts; an entry outside [0, E) is none.
    """
    used = expert_ids[: int(num_tokens_post_padded[0]) // block_m].tolist()
    runs: list[tuple[int, int]] = []
    for expert in sorted({expert for expert in used if 0 <= expert < E}):
        if runs and runs[-1][1] == expert:
            runs[-1] = (runs[-1][0], expert + 1)
        else:
            runs.append((expert, expert + 1))
    return runs


def upload_rows(tensor: Tensor, runs: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Give a tensor of which only some entries of the first dimension were written.

    The others stay unwritten on a GPU, so that initcheck tells a read of an expert that no token was sent to.
    """
    import torch

    if device.type == "cpu":
        return upload(tensor, device)
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    for first, end in runs:
        there[first:end].copy_(tensor[first:end])
    return there
