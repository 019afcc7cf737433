"""The fused kernel on a Hopper GPU, in short; tests/gpu/kernel_check.py is the long form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alphamoe_backend.experts.alphamoe_w8a8 import (
    alphamoe_fp8_block_scale_aligned_moe,
    implementation,
    prepare,
)
from alphamoe_backend.experts.reference import alphamoe_fp8_block_scale_aligned_moe_reference
from alphamoe_backend.kernels.jit import known_sources
from alphamoe_backend.quantization.fp8 import interleave_gated, quantize_blocks_fp8
from alphamoe_backend.routing import align_block_size, topk_softmax

pytestmark = pytest.mark.gpu
E, H, I_LOCAL, TOP_K = 16, 256, 128, 4


@pytest.fixture
def hopper() -> torch.device:
    device = torch.device("cuda", 0)
    if implementation(device) != "hopper":
        pytest.skip("needs compute capability 9.0")
    prepare(device)
    return device


def tensors(device: torch.device, M: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(device=device).manual_seed(M)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    gate_up = interleave_gated(*quantize_blocks_fp8(normal(E, 2 * I_LOCAL, H) * H**-0.5))
    down = quantize_blocks_fp8(normal(E, H, I_LOCAL) * 0.5)
    topk_weights, topk_ids = topk_softmax(normal(M, E), TOP_K)
    q = normal(M, H).to(torch.float8_e4m3fn)
    plan = align_block_size(topk_ids, 8, E)
    return (q, torch.ones(M, H // 128, device=device), *gate_up, *down, *plan, topk_weights)


@pytest.mark.parametrize("M", [1, 9, 64, 300])
def test_the_kernel_agrees_with_the_reference(hopper: torch.device, M: int) -> None:
    """Every variant that the launch rule chooses gives the reference's output up to rounding."""
    given = tensors(hopper, M)
    out = alphamoe_fp8_block_scale_aligned_moe(*given, top_k=TOP_K)
    expected = alphamoe_fp8_block_scale_aligned_moe_reference(*given, top_k=TOP_K)
    difference = (out.double() - expected.double()).norm() / expected.double().norm()
    assert float(difference) < 0.02


def test_a_captured_launch_replays(hopper: torch.device) -> None:
    """A launch can be captured in a CUDA graph, and a replay with new inputs in the same buffers is right."""
    given = tensors(hopper, 8)
    out = torch.zeros((8, H), dtype=torch.bfloat16, device=hopper)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.zero_()
        alphamoe_fp8_block_scale_aligned_moe(*given, top_k=TOP_K, out=out)
    given[0].view(torch.uint8).copy_(given[0].view(torch.uint8).flip(0))
    graph.replay()
    expected = alphamoe_fp8_block_scale_aligned_moe_reference(*given, top_k=TOP_K)
    assert float((out.double() - expected.double()).norm() / expected.double().norm()) < 0.02


def test_loaded_cubins_are_vouched_for(hopper: torch.device) -> None:
    """Every variant that was loaded maps to the hash of the one source."""
    assert len(set(known_sources().values())) == 1
    assert len(known_sources()) >= 4
