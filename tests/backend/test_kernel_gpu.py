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
from alphamoe_backend.experts.tolerance import element_tolerance
from alphamoe_backend.geometry import LocalGeometry
from alphamoe_backend.kernels.jit import known_sources
from alphamoe_backend.kernels.launch import variant, variants
from alphamoe_backend.kernels.launcher import launcher
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
    """The operator gives the reference's output up to rounding, at token counts of several variants."""
    given = tensors(hopper, M)
    out = alphamoe_fp8_block_scale_aligned_moe(*given, top_k=TOP_K)
    expected = alphamoe_fp8_block_scale_aligned_moe_reference(*given, top_k=TOP_K)
    difference = (out.double() - expected.double()).norm() / expected.double().norm()
    assert float(difference) < 0.02


@pytest.mark.parametrize("name", [candidate.name for candidate in variants()])
def test_each_variant_is_right_at_every_element(hopper: torch.device, name: str) -> None:
    """Full and ragged windows of each variant stay within the tolerance of the reference, element by element."""
    M = 170
    given = tensors(hopper, M)
    out = torch.zeros((M, H), dtype=torch.bfloat16, device=hopper)
    launcher(hopper).launch(
        LocalGeometry(E, H, I_LOCAL, TOP_K),
        (*given, out),
        M=M,
        plan_blocks=given[7].shape[0],
        routed_scaling_factor=1.0,
        variant=variant(name),
    )
    expected = torch.zeros((M, H), device=hopper)
    alphamoe_fp8_block_scale_aligned_moe_reference(*given, top_k=TOP_K, out=expected)
    expected = expected.double()
    assert float(expected.square().mean().sqrt()) > 1
    assert bool(((out.double() - expected).abs() <= element_tolerance(expected, expected.abs())).all())


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
