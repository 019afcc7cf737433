"""Bring inputs to the device, and outputs back, by copies alone, so that a tool sees every byte that was written.

Nothing here launches a kernel: memory comes from ``torch.empty`` and is filled by ``copy_`` of contiguous tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alphamoe_tracers.errors import EvidenceError

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


class Placed:
    """One argument on its device: a stretch of memory, filled by a copy from the host, and the view that is passed."""

    def __init__(self, tensor: Tensor, strides: tuple[int, ...] | None, device: torch.device) -> None:
        """Copy a tensor.

        Args:
            tensor: on the CPU, contiguous; not written into.
            strides: in elements; null or of another rank: contiguous. Elements between are zeros.
        """
        import torch

        shape = tuple(tensor.shape)
        steps = strides if strides is not None and len(strides) == len(shape) else tensor.contiguous().stride()
        length = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True)) if tensor.numel() else 0
        if any(step < 0 for step in steps) or length > (1 << 40):
            raise EvidenceError(f"strides {list(steps)} of a tensor of shape {list(shape)} cannot be")
        self._flat = _zeros(length, tensor.dtype)
        if tensor.numel():
            # Dimensions of step 0 repeat one element: it is written once.
            index = tuple(slice(0, 1) if step == 0 else slice(None) for step in steps)
            self._flat.as_strided(shape, steps)[index].copy_(tensor[index])
        self._there = torch.empty_like(self._flat, device=device)
        self._there.copy_(self._flat)
        self.view = self._there.as_strided(shape, steps)
        """The tensor as the call gets it."""

    def renew(self) -> None:
        """Make the memory as it was before the first launch."""
        self._there.copy_(self._flat)


def download(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host without a kernel, whatever its strides are."""
    if tensor.device.type == "cpu":
        return tensor.detach().clone().contiguous()
    shape, steps = tuple(tensor.shape), tensor.stride()
    if tensor.numel() == 0:
        return tensor.detach().cpu()
    length = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    flat = tensor.detach().as_strided((length,), (1,), tensor.storage_offset())
    return flat.cpu().as_strided(shape, steps).contiguous()


def _zeros(length: int, dtype: torch.dtype) -> Tensor:
    import torch

    # By bytes: not every dtype of a capture can be filled.
    return torch.zeros(length * dtype.itemsize, dtype=torch.uint8).view(dtype)
