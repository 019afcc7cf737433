"""The MoE layer: what it computes, what it submits, and the ranges around it."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from alphamoe_backend.dispatch import DispatchRecorder
from alphamoe_backend.experts.factory import create_experts
from alphamoe_backend.experts.reference import float64_oracle
from alphamoe_backend.experts.registry import forbidden_symbols, required_symbols
from alphamoe_backend.geometry import LocalGeometry, preset
from alphamoe_backend.layer import AlphaMoELayer
from alphamoe_backend.quantization.fp8 import ExpertWeights, per_token_group_quant_fp8, quantize_blocks_fp8
from alphamoe_backend.routing import topk_softmax
from alphamoe_backend.workspaces import Workspaces
from alphamoe_tracers.errors import UsageError
from alphamoe_tracers.records import Receipt

MOE = preset("tiny").moe


@functools.cache
def full_weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give the unquantised router, gate/up [E, 2, I, H] and down [E, H, I] of the tiny model."""
    generator = torch.Generator().manual_seed(5)
    router = torch.randn((MOE.E, MOE.H), generator=generator) / MOE.H**0.5
    gate_up = torch.randn((MOE.E, 2, MOE.I, MOE.H), generator=generator) / MOE.H**0.5
    down = torch.randn((MOE.E, MOE.H, MOE.I), generator=generator) / 4
    return router, gate_up, down


@functools.cache
def rank_weights(rank: int, world_size: int) -> tuple[LocalGeometry, ExpertWeights]:
    """Cut one rank's slice out of the full model and quantise it."""
    local = MOE.local(world_size)
    _, gate_up, down = full_weights()
    columns = slice(rank * local.I_local, (rank + 1) * local.I_local)
    mine = gate_up[:, :, columns].reshape(MOE.E, 2 * local.I_local, MOE.H)
    return local, ExpertWeights(*quantize_blocks_fp8(mine), *quantize_blocks_fp8(down[:, :, columns]))


def make_layer(backend: str, *, rank: int = 0, world_size: int = 1, **options: Any) -> AlphaMoELayer:
    """Build layer 3 of the tiny model on one rank."""
    local, weights = rank_weights(rank, world_size)
    return AlphaMoELayer(3, full_weights()[0], create_experts(backend, local, weights), **options)


def make_hidden(M: int) -> torch.Tensor:
    """Give seeded hidden states."""
    return torch.randn((M, MOE.H), generator=torch.Generator().manual_seed(M)) * 3


class RecordingRanges:
    """Stands in for a RangeDomain and remembers the names in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def range(self, name: str, payload: int | None = None) -> Iterator[None]:
        """Remember the range, and its end."""
        self.names.append(name)
        yield
        self.names.append(f"/{name}")


@pytest.mark.parametrize("backend", ["flashinfer_alphamoe", "triton"])
def test_the_layer_computes_the_routed_experts(backend: str) -> None:
    """Router, quantisation and experts together give the oracle's result for the routing of the float32 logits."""
    hidden = make_hidden(12)
    _, weights = rank_weights(0, 1)
    topk_weights, topk_ids = topk_softmax(hidden @ full_weights()[0].T, MOE.top_k)
    oracle = float64_oracle(*per_token_group_quant_fp8(hidden), weights, topk_weights, topk_ids)
    out = make_layer(backend)(hidden)
    assert out.dtype == hidden.dtype
    assert float((out.double() - oracle.out).norm() / oracle.out.norm()) <= 0.03


def test_partial_sums_add_up_to_the_single_rank() -> None:
    """The partial sums of two and of four ranks add up to one rank's result in float32."""
    hidden = make_hidden(10)
    whole = make_layer("flashinfer_alphamoe")(hidden)
    for world_size in (2, 4):
        parts = [make_layer("flashinfer_alphamoe", rank=r, world_size=world_size)(hidden) for r in range(world_size)]
        torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-4, atol=1e-3)


def receipts_of(backend: str, M: int) -> list[Receipt]:
    """Run one eager forward of the layer under a recorder."""
    receipts: list[Receipt] = []
    recorder = DispatchRecorder("run", 1, receipts.append)
    layer = make_layer(backend, world_size=4, recorder=recorder)
    with recorder.forward(
        step=0,
        purpose="witness",
        request_ids=("r",),
        forward_mode="EXTEND",
        execution="eager",
        M=M,
        real_tokens=M,
        batch_size=1,
    ):
        layer(make_hidden(M))
    return receipts


def test_the_fused_layer_submits_one_kernel_with_its_geometry() -> None:
    """One submission a layer names the operator, its symbol, M and this rank's geometry; no GPU is device -1."""
    (receipt,) = receipts_of("flashinfer_alphamoe", 9)
    (kernel,) = receipt.kernels
    assert kernel.kernel == "alphamoe_fp8_block_scale_aligned_moe"
    assert (kernel.symbol,) == required_symbols("flashinfer_alphamoe")
    assert (kernel.layer, kernel.M, kernel.E, kernel.H, kernel.I_local) == (3, 9, 16, 256, 128)
    assert (kernel.top_k, kernel.block_m, kernel.captured, kernel.device) == (4, 8, False, -1)


def test_a_fallback_is_visible_in_what_the_layer_submits() -> None:
    """A layer built with the stock experts submits the stock symbol, which the fused backend forbids."""
    (receipt,) = receipts_of("triton", 9)
    symbols = {kernel.symbol for kernel in receipt.kernels}
    assert symbols == set(forbidden_symbols("flashinfer_alphamoe"))
    assert len(receipt.kernels) == 2


def test_a_layer_serves_without_a_recorder() -> None:
    """In a process that never heard of the profiler the layer gives the same result."""
    hidden = make_hidden(4)
    recorded = make_layer("flashinfer_alphamoe", recorder=DispatchRecorder("run", 0))
    assert torch.equal(make_layer("flashinfer_alphamoe")(hidden), recorded(hidden))


def test_ranges_name_the_phases_in_order() -> None:
    """router, quant and experts are pushed and popped in order, none inside another."""
    ranges = RecordingRanges()
    make_layer("flashinfer_alphamoe", ranges=ranges)(make_hidden(2))
    assert ranges.names == ["router", "/router", "quant", "/quant", "experts", "/experts"]


def test_no_tokens_give_no_rows_and_no_submission() -> None:
    """A forward of zero tokens gives zero rows and submits nothing."""
    recorder = DispatchRecorder("run", 0)
    out = make_layer("flashinfer_alphamoe", recorder=recorder)(make_hidden(0))
    assert out.shape == (0, MOE.H)
    assert recorder.unscoped == 0


def test_a_router_of_another_shape_is_refused() -> None:
    """A router weight that does not fit the experts names the layer and both shapes."""
    local, weights = rank_weights(0, 1)
    with pytest.raises(UsageError, match=r"router weight of layer 7 is \(4, 256\)"):
        AlphaMoELayer(7, torch.zeros(4, 256), create_experts("triton", local, weights))


def test_workspaces_do_not_change_results() -> None:
    """With workspaces a layer gives the same bits, forward after forward and M after M, in a reused buffer."""
    plain = make_layer("flashinfer_alphamoe")
    reusing = make_layer("flashinfer_alphamoe", workspaces=Workspaces())
    for M in (4, 4, 9, 4):
        assert torch.equal(reusing(make_hidden(M)), plain(make_hidden(M)))
    assert reusing(make_hidden(4)).data_ptr() == reusing(make_hidden(4)).data_ptr()


def test_an_unknown_backend_names_the_known_ones() -> None:
    """A mistyped backend is one line with the known names."""
    local, weights = rank_weights(0, 1)
    with pytest.raises(UsageError) as refusal:
        create_experts("alphamoe", local, weights)
    assert "flashinfer_alphamoe, triton" in refusal.value.hint


def test_identities_of_experts_are_unique() -> None:
    """Two experts objects of one backend have different identities, so that their graphs have different keys."""
    local, weights = rank_weights(0, 4)
    first, second = (create_experts("triton", local, weights) for _ in range(2))
    assert first.identity != second.identity
