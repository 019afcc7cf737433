"""The stock two-GEMM experts: rounding points, tiles, and the Triton kernels interpreted, compiled and on a GPU."""

import functools
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from alphamoe_backend.experts.factory import create_experts
from alphamoe_backend.experts.reference import float64_oracle
from alphamoe_backend.experts.registry import required_symbols
from alphamoe_backend.experts.triton_stock import StockExperts, stock_block_m, stock_tiles
from alphamoe_backend.geometry import LocalGeometry, preset
from alphamoe_backend.quantization.fp8 import ExpertWeights, per_token_group_quant_fp8, quantize_blocks_fp8
from alphamoe_backend.routing import topk_softmax

GEOMETRY = LocalGeometry(E=16, H=256, I_local=256, top_k=4)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@functools.cache
def make_weights(geometry: LocalGeometry, device: str = "cpu") -> ExpertWeights:
    """Give seeded experts whose result has an RMS above 1."""
    generator = torch.Generator().manual_seed(11)
    gate_up = torch.randn((geometry.E, geometry.N, geometry.H), generator=generator) / geometry.H**0.5
    down = torch.randn((geometry.E, geometry.H, geometry.I_local), generator=generator) / 4
    parts = (*quantize_blocks_fp8(gate_up), *quantize_blocks_fp8(down))
    return ExpertWeights(*(part.to(device) for part in parts))


def make_inputs(geometry: LocalGeometry, M: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give hidden states, routing weights and experts."""
    generator = torch.Generator().manual_seed(M)
    hidden = torch.randn((M, geometry.H), generator=generator) * 3
    return hidden, *topk_softmax(torch.randn((M, geometry.E), generator=generator), geometry.top_k)


@pytest.mark.parametrize("M", [1, 7, 64, 300])
def test_the_stock_experts_are_right_on_a_cpu(M: int) -> None:
    """On a CPU the stock experts are within the fused kernels' tolerance of float64, whatever block size M chooses."""
    weights = make_weights(GEOMETRY)
    hidden, topk_weights, topk_ids = make_inputs(GEOMETRY, M)
    out = StockExperts(GEOMETRY, weights).dispatch(hidden.to(torch.bfloat16), topk_weights, topk_ids)
    q, q_scale = per_token_group_quant_fp8(hidden.to(torch.bfloat16))
    oracle = float64_oracle(q, q_scale, weights, topk_weights, topk_ids)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - oracle.out).norm() / oracle.out.norm()) <= 0.03


def test_both_backends_compute_the_same_layer() -> None:
    """Fused and stock experts agree to within requantisation on the same canonical weights."""
    weights = make_weights(GEOMETRY)
    inputs = make_inputs(GEOMETRY, 20)
    fused, stock = (
        create_experts(name, GEOMETRY, weights).dispatch(*inputs) for name in ("flashinfer_alphamoe", "triton")
    )
    assert float((fused - stock).norm() / stock.norm()) < 0.01


@pytest.mark.parametrize("M", [1, 8, 64, 512, 4096, 16384])
@pytest.mark.parametrize("world_size", [1, 4])
def test_tiles_fit_scales_and_fill_the_card(M: int, world_size: int) -> None:
    """block_n divides a scale block, and a launch that could fill an H200 does: tiles shrink before processors idle."""
    geometry = preset("qwen3-next-80b").moe.local(world_size)
    for N in (geometry.N, geometry.H):
        tiles = stock_tiles(M, geometry, N)
        assert 128 % tiles.block_n == 0
        assert N % tiles.block_n == 0
        pairs = M * geometry.top_k
        launched = min(pairs, geometry.E) * (N // tiles.block_n)
        assert launched >= 132 or tiles.block_n == 32


def test_block_m_follows_the_tokens_of_an_expert() -> None:
    """Small batches use blocks of 16 rows, large ones 64 and 128, and one block size serves both GEMMs of an M."""
    geometry = preset("qwen3-next-80b").moe.local(4)
    assert [stock_block_m(M, geometry) for M in (1, 512, 2048, 4096, 16384)] == [16, 16, 32, 64, 128]
    assert stock_tiles(4096, geometry, geometry.N).block_m == stock_tiles(4096, geometry, geometry.H).block_m


def test_submissions_name_the_stock_symbol_twice() -> None:
    """The stock experts submit fused_moe_kernel for each of the two GEMMs."""
    experts = StockExperts(GEOMETRY, make_weights(GEOMETRY))
    assert [s.symbol for s in experts.submissions(8)] == list(required_symbols("triton")) * 2


INTERPRETED = """
import torch
from test_triton_stock import GEOMETRY, make_inputs, make_weights
from alphamoe_backend.experts.stock_reference import stock_experts_reference
from alphamoe_backend.experts.triton_stock import StockExperts, stock_block_m, stock_fused_experts
from alphamoe_backend.quantization.fp8 import per_token_group_quant_fp8
from dataclasses import replace

for M, geometry in ((1, GEOMETRY), (20, replace(GEOMETRY, E=4, I_local=128, top_k=2))):
    weights = make_weights(geometry)
    hidden, topk_weights, topk_ids = make_inputs(geometry, M)
    q, s = per_token_group_quant_fp8(hidden)
    plan = StockExperts(geometry, weights).plan(topk_ids)
    out = stock_fused_experts(q, s, weights, plan, topk_weights, geometry, dtype=torch.float32)
    expected = stock_experts_reference(
        q, s, weights, plan, topk_weights, block_m=stock_block_m(M, geometry), dtype=torch.float32
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    print("agree", M)
"""


@needs_triton
def test_the_triton_kernels_interpreted_on_a_cpu_give_the_reference() -> None:
    """Triton's interpreter runs both GEMMs, the activation and the sum to the torch path's result in float32."""
    # A process of its own: triton decides at import whether kernels are interpreted.
    paths = [os.path.dirname(__file__), *sys.path]  # noqa: PTH120
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["agree", "1", "agree", "20"]


@needs_triton
@pytest.mark.parametrize(("M", "tensor_core"), [(1, "mma.sync"), (4096, "wgmma")])
def test_the_gemm_compiles_for_hopper_without_a_gpu(M: int, tensor_core: str) -> None:
    """The GEMM compiles for sm_90 under its stock name, with tensor cores and pipelined weight loads."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from alphamoe_backend.experts._stock_kernels import fused_moe_kernel

    geometry = preset("qwen3-next-80b").moe.local(4)
    tiles = stock_tiles(M, geometry, geometry.N)
    pointers = {"a": "fp8e4nv", "a_scale": "fp32", "b": "fp8e4nv", "b_scale": "fp32", "c": "bf16"}
    pointers |= {"topk_weights": "fp32", "sorted_token_ids": "i32", "expert_ids": "i32"}
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | {"num_tokens_post_padded": "*i32"}
    signature |= {"pairs": "i32", "routed_scaling_factor": "fp32"}
    constants = {
        "N": geometry.N,
        "K": geometry.H,
        "A_ROW_DIVISOR": geometry.top_k,
        "MUL_ROUTED_WEIGHT": False,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "GROUP_M": tiles.group_m,
    }
    names = fused_moe_kernel.arg_names
    source = ASTSource(
        fn=fused_moe_kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in pointers},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )
    assert compiled.metadata.name == "fused_moe_kernel"
    assert tensor_core in compiled.asm["ptx"]
    assert "cp.async" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 8, 64, 512, 911, 4096])
def test_the_triton_kernels_are_right_on_a_gpu(M: int) -> None:
    """On a GPU, eager and replayed from a graph, the stock experts are within tolerance of the float64 oracle."""
    geometry = LocalGeometry(E=64, H=2048, I_local=128, top_k=10)
    weights = make_weights(geometry, "cuda")
    hidden, topk_weights, topk_ids = (part.cuda() for part in make_inputs(geometry, M))
    hidden = hidden.to(torch.bfloat16)
    q, q_scale = per_token_group_quant_fp8(hidden)
    oracle = float64_oracle(q, q_scale, weights, topk_weights, topk_ids)
    experts = StockExperts(geometry, weights)
    eager = experts.dispatch(hidden, topk_weights, topk_ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = experts.dispatch(hidden, topk_weights, topk_ids)
    replayed.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert float((eager.double() - oracle.out).norm() / oracle.out.norm()) <= 0.03
    assert torch.equal(eager, replayed)


@pytest.mark.gpu
def test_the_stock_kernels_launch_under_their_usual_names() -> None:
    """torch.profiler sees each stock kernel under the symbol that serving engines are known by."""
    geometry = LocalGeometry(E=16, H=256, I_local=128, top_k=4)
    experts = StockExperts(geometry, make_weights(geometry, "cuda"))
    inputs = [part.cuda() for part in make_inputs(geometry, 9)]
    experts.dispatch(*inputs)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        experts.dispatch(*inputs)
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["fused_moe_kernel"] == 2
    assert counts["act_and_mul_kernel"] == 1
    assert counts["_per_token_group_quant_8bit"] == 2
    assert counts["_moe_sum_reduce_kernel"] == 1
