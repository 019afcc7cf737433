"""The torch reference: against the float64 oracle, and its rounding points one by one."""

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from alphamoe_backend.experts.reference import alphamoe_fp8_block_scale_aligned_moe_reference, float64_oracle
from alphamoe_backend.quantization.fp8 import (
    ExpertWeights,
    dequantize_blocks_fp8,
    dequantize_groups_fp8,
    interleave_gated,
    per_token_group_quant_fp8,
    quantize_blocks_fp8,
)
from alphamoe_backend.routing import align_block_size, topk_softmax


class Case(NamedTuple):
    """Inputs of one call."""

    q: Tensor
    q_scale: Tensor
    weights: ExpertWeights
    topk_weights: Tensor
    topk_ids: Tensor


@functools.cache
def make_weights(E: int, H: int, I_local: int) -> ExpertWeights:
    """Give seeded experts."""
    generator = torch.Generator().manual_seed(99)
    gate_up = torch.randn((E, 2 * I_local, H), generator=generator) / H**0.5
    down = torch.randn((E, H, I_local), generator=generator) / 4
    return ExpertWeights(*quantize_blocks_fp8(gate_up), *quantize_blocks_fp8(down))


def make_case(M: int, *, E: int = 16, H: int = 256, I_local: int = 256, top_k: int = 4, seed: int = 0) -> Case:
    """Give seeded inputs whose result has an RMS above 1."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((M, H), generator=generator) * 3
    topk_weights, topk_ids = topk_softmax(torch.randn((M, E), generator=generator), top_k)
    return Case(*per_token_group_quant_fp8(hidden), make_weights(E, H, I_local), topk_weights, topk_ids)


def run(case: Case, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Plan and run the reference."""
    w = case.weights
    plan = align_block_size(case.topk_ids, 8, w.gate_up.shape[0])
    return alphamoe_fp8_block_scale_aligned_moe_reference(
        case.q,
        case.q_scale,
        *interleave_gated(w.gate_up, w.gate_up_scale),
        w.down,
        w.down_scale,
        *plan,
        case.topk_weights,
        top_k=case.topk_ids.shape[1],
        routed_scaling_factor=factor,
        out=out,
    )


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Give the relative Frobenius error."""
    return float((out.double() - ref).norm() / ref.norm())


def token_by_token(case: Case) -> Tensor:
    """Compute the operator from its definition in float64, one token and route at a time."""
    w = case.weights
    x = dequantize_groups_fp8(case.q, case.q_scale, torch.float64)
    w1 = dequantize_blocks_fp8(w.gate_up, w.gate_up_scale, torch.float64)
    w2 = dequantize_blocks_fp8(w.down, w.down_scale, torch.float64)
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, expert in zip(case.topk_weights[token], case.topk_ids[token].tolist(), strict=True):
            gate, up = (w1[expert] @ x[token]).chunk(2)
            out[token] += weight.double() * (w2[expert] @ (functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("M", [1, 2, 7, 8, 9, 64])
def test_the_oracle_is_the_definition(M: int) -> None:
    """The chunked oracle equals a token-by-token computation, and no term sum is below its result."""
    case = make_case(M, seed=M)
    oracle = float64_oracle(case.q, case.q_scale, case.weights, case.topk_weights, case.topk_ids)
    torch.testing.assert_close(oracle.out, token_by_token(case), rtol=1e-10, atol=1e-10)
    assert bool((oracle.sum_abs_terms >= oracle.out.abs() - 1e-9).all())


@pytest.mark.parametrize("M", [1, 2, 7, 8, 9, 64, 512])
def test_the_reference_is_within_the_published_error(M: int) -> None:
    """The Frobenius error is requantisation's, at most 0.03; beyond it no element is off by more than its additions."""
    case = make_case(M, seed=M)
    oracle = float64_oracle(case.q, case.q_scale, case.weights, case.topk_weights, case.topk_ids)
    out = run(case)
    assert oracle.out.square().mean().sqrt() >= 1
    assert out.dtype == torch.bfloat16
    assert relative_error(out, oracle.out) <= 0.03
    rounded = float64_oracle(case.q, case.q_scale, case.weights, case.topk_weights, case.topk_ids, requantise=True)
    bound = torch.maximum(0.1 + 0.1 * rounded.out.abs(), 2 * rounded.sum_abs_terms * 2**-7)
    assert bool(((out.double() - rounded.out).abs() <= bound).all())
    assert relative_error(out, rounded.out) < 0.006


def test_swapped_gate_and_up_are_seen() -> None:
    """The oracle tells a swap of gate and up apart, which interleaving could hide."""
    case = make_case(16)
    w = case.weights
    oracle = float64_oracle(case.q, case.q_scale, w, case.topk_weights, case.topk_ids)
    swapped = ExpertWeights(w.gate_up.roll(256, 1), w.gate_up_scale.roll(2, 1), w.down, w.down_scale)
    assert relative_error(run(case._replace(weights=swapped)), oracle.out) > 0.3


def test_all_tokens_in_one_expert_even_twice() -> None:
    """A routing that sends every route of every token to one expert adds each route."""
    case = make_case(20)
    case = case._replace(topk_ids=torch.full_like(case.topk_ids, 5))
    oracle = float64_oracle(case.q, case.q_scale, case.weights, case.topk_weights, case.topk_ids)
    assert relative_error(run(case), oracle.out) <= 0.03


def test_out_accumulates_and_runs_are_bitwise_equal() -> None:
    """Contributions are added to what out holds, and two runs give the same bits."""
    case = make_case(33)
    assert torch.equal(run(case), run(case))
    seeded = torch.full((33, 256), 3.0)
    assert run(case, out=seeded) is seeded
    plain = run(case, out=torch.zeros(33, 256))
    torch.testing.assert_close(seeded, plain + 3.0, rtol=1e-5, atol=1e-4)


def test_float32_out_keeps_what_bfloat16_rounds() -> None:
    """With a float32 out nothing is rounded to bfloat16; a bfloat16 one differs by no more than its additions."""
    case = make_case(9)
    exact, rounded = run(case, out=torch.zeros(9, 256)), run(case)
    assert not torch.equal(exact, exact.to(torch.bfloat16).float())
    assert 0 < relative_error(rounded, exact.double()) < 0.01


def test_contributions_are_added_in_bfloat16_by_group_then_route() -> None:
    """Each contribution, by intermediate group, then route, is rounded to bfloat16 and added in bfloat16."""
    case = make_case(3, top_k=2)
    expected = torch.zeros((3, 256), dtype=torch.bfloat16)
    for columns in (slice(0, 128), slice(128, 256)):
        for route in range(2):
            only = torch.zeros((3, 256), dtype=torch.bfloat16)
            w = case.weights
            down = w.down.view(torch.uint8).clone()
            down[:, :, : columns.start] = 0
            down[:, :, columns.stop :] = 0
            weights = torch.zeros_like(case.topk_weights)
            weights[:, route] = case.topk_weights[:, route]
            masked = ExpertWeights(w.gate_up, w.gate_up_scale, down.view(w.down.dtype), w.down_scale)
            run(case._replace(weights=masked, topk_weights=weights), out=only)
            expected += only
    assert torch.equal(run(case), expected)


def test_the_intermediate_is_requantised_by_token_and_group() -> None:
    """With an identity-like down weight the result shows e4m3 values times the token's own scale."""
    case = make_case(4, E=1, I_local=128, H=128, top_k=1)
    identity, scale = quantize_blocks_fp8(torch.eye(128)[None])
    w = ExpertWeights(case.weights.gate_up, case.weights.gate_up_scale, identity, scale)
    x = dequantize_groups_fp8(case.q, case.q_scale)
    gate, up = (x @ dequantize_blocks_fp8(w.gate_up, w.gate_up_scale)[0].T).chunk(2, -1)
    inner = functional.silu(gate) * up
    expected = dequantize_groups_fp8(*per_token_group_quant_fp8(inner))
    out = run(case._replace(weights=w), out=torch.zeros(4, 128))
    # Sums in another order may move an element over a rounding boundary: one e4m3 step, never more than a few.
    close = torch.isclose(out, expected, rtol=1e-4, atol=1e-5)
    assert close.float().mean() > 0.98
    assert relative_error(out, inner.double()) > 0.01


def test_the_scaling_factor_multiplies() -> None:
    """A routed scaling factor of 2 doubles a float32 result."""
    case = make_case(5)
    torch.testing.assert_close(
        run(case, torch.zeros(5, 256), factor=2.0), 2 * run(case, torch.zeros(5, 256)), rtol=1e-6, atol=1e-5
    )


def test_rows_after_the_used_ones_are_not_read() -> None:
    """Garbage in the plan behind num_tokens_post_padded changes nothing."""
    case = make_case(6)
    w = case.weights
    plan = align_block_size(case.topk_ids, 8, 16)
    used = int(plan.num_tokens_post_padded[0])
    dirty_ids, dirty_experts = plan.sorted_token_ids.clone(), plan.expert_ids.clone()
    assert used < dirty_ids.numel() or used // 8 == dirty_experts.numel()
    dirty_ids = torch.cat([dirty_ids[:used], torch.zeros(80, dtype=torch.int32)])
    dirty_experts = torch.cat([dirty_experts[: used // 8], torch.full((10,), 99, dtype=torch.int32)])
    out = alphamoe_fp8_block_scale_aligned_moe_reference(
        case.q,
        case.q_scale,
        *interleave_gated(w.gate_up, w.gate_up_scale),
        w.down,
        w.down_scale,
        dirty_ids,
        dirty_experts,
        plan.num_tokens_post_padded,
        case.topk_weights,
        top_k=4,
    )
    assert torch.equal(out, run(case))


def test_a_nan_reaches_only_its_token() -> None:
    """A NaN in one token's input is visible in that token's output and in no other."""
    case = make_case(6)
    scale = case.q_scale.clone()
    scale[2, 1] = float("nan")
    out = run(case._replace(q_scale=scale))
    assert torch.isnan(out[2]).all()
    assert not torch.isnan(out[[0, 1, 3, 4, 5]]).any()


def test_zero_tokens_give_exact_zeros() -> None:
    """A token of zeros has exact zeros as its result, through both quantisations."""
    case = make_case(4)
    q, scale = per_token_group_quant_fp8(torch.zeros(4, 256))
    assert torch.equal(run(case._replace(q=q, q_scale=scale)).float(), torch.zeros(4, 256))


@pytest.mark.gpu
def test_the_reference_refuses_a_capture() -> None:
    """Inside a CUDA graph capture the reference is one clear error instead of a broken graph."""
    from alphamoe_backend.experts.reference import refuse_capture
    from alphamoe_tracers.errors import AlphaMoEError

    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(AlphaMoEError, match="cannot be captured"):
        refuse_capture(torch.device("cuda"))
