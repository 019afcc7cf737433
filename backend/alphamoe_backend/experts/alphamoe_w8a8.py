"""The fused W8A8 experts behind FlashInfer's interface and layouts, on whatever device there is.

On compute capability 10.0 and 10.3 with flashinfer >= 0.7.2 FlashInfer's own kernel runs, on 9.0 the Hopper kernel of
this package, and elsewhere (a CPU, another GPU) the torch reference.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from alphamoe_backend.experts import flashinfer, reference
from alphamoe_backend.geometry import GROUP, LocalGeometry
from alphamoe_tracers.errors import UsageError

Implementation = Literal["flashinfer", "hopper", "reference"]

FP8 = torch.float8_e4m3fn
ALIGNMENT_BYTES = 16
"""What the kernels' vector copies and additions need of every row."""
_FIX = "see docs of alphamoe_fp8_block_scale_aligned_moe for shapes and layouts"


# One object for all calls of one geometry: cheaper than a new one, and found faster by what is remembered for it.
_geometry = functools.lru_cache(maxsize=256)(LocalGeometry)


@functools.cache
def _hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index) == (9, 0)


def implementation(device: torch.device) -> Implementation:
    """Say which implementation serves ``device``."""
    if device.type != "cuda":
        return "reference"
    if _hopper(device.index if device.index is not None else torch.cuda.current_device()):
        return "hopper"
    return "flashinfer" if flashinfer.usable(device) else "reference"


def prepare(device: torch.device) -> None:
    """Compile and load what ``device`` needs, before a graph is captured or a clock is started.

    Raises:
        AlphaMoEError: compiling or loading failed.
    """
    if implementation(device) == "hopper":
        from alphamoe_backend.kernels.launcher import launcher

        launcher(device).prepare()


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
    block_m: int = 8,
    routed_scaling_factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Run up GEMM, SwiGLU, requantisation and down GEMM of all routed experts, adding into ``out``.

    Args:
        hidden_states: e4m3 [M, H].
        hidden_states_scale: float32 [M, H / 128], row-major.
        gemm1_weights: e4m3 [E, 2 * I_local, H], gate and up rows interleaved by 8.
        gemm1_weights_scale: float32 [E, 2 * I_local / 128, H / 128], interleaved by 1: even rows gate, odd rows up.
        gemm2_weights: e4m3 [E, H, I_local].
        gemm2_weights_scale: float32 [E, H / 128, I_local / 128].
        sorted_token_ids: int32 [blocks * block_m], ``token * top_k + route``; anything >= M * top_k is padding.
        expert_ids: int32 [blocks]; entries beyond the used length are never looked at.
        num_tokens_post_padded: int32 [1] on the device, the used length in rows.
        topk_weights: float32 [M, top_k].
        top_k: experts a token.
        block_m: rows of a plan block; the Hopper kernel knows 8 only.
        routed_scaling_factor: multiplies every routing weight.
        out: bfloat16 [M, H]; contributions are added to what it holds, so the caller zeroes it. The torch reference
            also takes float32. Zeros of bfloat16 when absent.

    Returns:
        ``out``. On a GPU the order of the bfloat16 additions, and so the last bits, differ from run to run.

    Raises:
        UsageError: a tensor has another shape, dtype, device, layout or alignment than said here, or the geometry is
            outside what the kernel was written for.
    """
    device = hidden_states.device
    chosen = implementation(device)
    M, H = hidden_states.shape if hidden_states.dim() == 2 else (0, 0)
    if out is None:
        out = torch.zeros((M, H), dtype=torch.bfloat16, device=device)
    tensors = (
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
        out,
    )
    geometry = check_tensors(tensors, top_k=top_k, block_m=block_m, float32_out=chosen == "reference")
    if chosen == "hopper":
        from alphamoe_backend.kernels.launcher import launcher

        launcher(device).launch(
            geometry,
            tensors,
            M=M,
            plan_blocks=expert_ids.shape[0],
            routed_scaling_factor=routed_scaling_factor,
        )
        return out
    call = (
        flashinfer.alphamoe_fp8_block_scale_aligned_moe
        if chosen == "flashinfer"
        else reference.alphamoe_fp8_block_scale_aligned_moe_reference
    )
    call(*tensors[:-1], top_k=top_k, block_m=block_m, routed_scaling_factor=routed_scaling_factor, out=out)
    return out


_NAMES = (
    "hidden_states",
    "hidden_states_scale",
    "gemm1_weights",
    "gemm1_weights_scale",
    "gemm2_weights",
    "gemm2_weights_scale",
    "sorted_token_ids",
    "expert_ids",
    "num_tokens_post_padded",
    "topk_weights",
    "out",
)
_DTYPES = (
    FP8,
    torch.float32,
    FP8,
    torch.float32,
    FP8,
    torch.float32,
    torch.int32,
    torch.int32,
    torch.int32,
    torch.float32,
    torch.bfloat16,
)


def check_tensors(tensors: tuple[Tensor, ...], *, top_k: int, block_m: int, float32_out: bool = False) -> LocalGeometry:
    """Check the eleven tensors of a call, in the order of the arguments with ``out`` last.

    Args:
        float32_out: let ``out`` be float32.

    Returns:
        The geometry that their shapes say.

    Raises:
        UsageError: naming the first tensor that is wrong, what it is and what it should be.
    """
    hidden, w1, w2, blocks = tensors[0], tensors[2], tensors[4], tensors[7]
    if hidden.dim() != 2 or w1.dim() != 3 or w2.dim() != 3 or blocks.dim() != 1:
        raise UsageError(
            "hidden_states must be [M, H], the weights [E, rows, columns] and expert_ids [blocks], not "
            f"{list(hidden.shape)}, {list(w1.shape)}, {list(w2.shape)} and {list(blocks.shape)}",
            hint=_FIX,
        )
    M, H = hidden.shape
    E, N, _ = w1.shape
    I_local, n_blocks = N // 2, blocks.shape[0]
    if M < 1 or top_k < 1 or block_m < 8 or block_m % 8:
        raise UsageError(f"M={M} and top_k={top_k} must be positive, block_m={block_m} a multiple of 8", hint=_FIX)
    if H % GROUP or N % (2 * GROUP) or not H or not N:
        raise UsageError(f"H={H} and I_local={N / 2:g} must be multiples of {GROUP}", hint=_FIX)
    k_blocks, slices = H // GROUP, I_local // GROUP
    shapes: tuple[tuple[int, ...], ...] = (
        (M, H),
        (M, k_blocks),
        (E, N, H),
        (E, 2 * slices, k_blocks),
        (E, H, I_local),
        (E, k_blocks, slices),
        (n_blocks * block_m,),
        (n_blocks,),
        (1,),
        (M, top_k),
        (M, H),
    )
    device = hidden.device
    for name, tensor, dtype, shape in zip(_NAMES, tensors, _DTYPES, shapes, strict=True):
        if tensor.dtype != dtype and not (float32_out and name == "out" and tensor.dtype == torch.float32):
            raise UsageError(f"{name} is {tensor.dtype}, not {dtype}", hint=_FIX)
        if tensor.shape != shape:
            raise UsageError(f"{name} has the shape {list(tensor.shape)}, not {list(shape)}", hint=_FIX)
        if tensor.device != device:
            raise UsageError(f"{name} is on {tensor.device}, hidden_states on {device}", hint="move them together")
        if not tensor.is_contiguous():
            raise UsageError(f"{name} is not contiguous (strides {tensor.stride()})", hint="call .contiguous() on it")
        if tensor.data_ptr() % ALIGNMENT_BYTES and len(shape) > 1:
            raise UsageError(
                f"{name} begins {tensor.data_ptr() % ALIGNMENT_BYTES} bytes past a multiple of {ALIGNMENT_BYTES}",
                hint="pass a tensor that begins at its storage, not a slice that starts elsewhere",
            )
    return _geometry(E, H, I_local, top_k, block_m)
