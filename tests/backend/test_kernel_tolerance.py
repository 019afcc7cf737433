"""The tolerance accepts a right output and refuses every kind of wrong one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alphamoe_backend.experts.reference import alphamoe_fp8_block_scale_aligned_moe_reference
from alphamoe_backend.experts.tolerance import Comparison, compare
from alphamoe_backend.quantization.fp8 import interleave_gated, quantize_blocks_fp8
from alphamoe_backend.routing import align_block_size, topk_softmax

M, E, H, I_LOCAL, TOP_K = 24, 4, 256, 128, 2


@pytest.fixture(scope="module")
def problem() -> dict[str, Tensor]:
    """Inputs whose outputs have an RMS of a few units, the float32 result, and the sum of the magnitudes."""
    generator = torch.Generator().manual_seed(11)
    w1, w1_scale = quantize_blocks_fp8(torch.randn((E, 2 * I_LOCAL, H), generator=generator) * 1.5 * H**-0.5)
    w2, w2_scale = quantize_blocks_fp8(torch.randn((E, H, I_LOCAL), generator=generator) * 0.4)
    q = torch.randn((M, H), generator=generator).to(torch.float8_e4m3fn)
    topk_weights, topk_ids = topk_softmax(torch.randn((M, E), generator=generator), TOP_K)
    gate_up, gate_up_scale = interleave_gated(w1, w1_scale)
    return {
        "q": q,
        "q_scale": torch.ones(M, H // 128),
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "down": w2,
        "down_scale": w2_scale,
        "topk_weights": topk_weights,
        "topk_ids": topk_ids,
    }


def run(problem: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16, **changes: Tensor) -> Tensor:
    given = {**problem, **changes}
    plan = align_block_size(given["topk_ids"], 8, E)
    names = ("q", "q_scale", "gate_up", "gate_up_scale", "down", "down_scale")
    out = torch.zeros(M, H, dtype=dtype)
    return alphamoe_fp8_block_scale_aligned_moe_reference(
        *(given[name] for name in names), *plan, given["topk_weights"], top_k=TOP_K, out=out
    )


@pytest.fixture(scope="module")
def reference(problem: dict[str, Tensor]) -> Tensor:
    """The result without the bfloat16 additions, in float64."""
    return run(problem, torch.float32).to(torch.float64)


def judged(out: Tensor, reference: Tensor) -> Comparison:
    return compare(out, reference, reference.abs())


def test_a_right_output_is_accepted(problem: dict[str, Tensor], reference: Tensor) -> None:
    """bfloat16 additions stay inside the tolerance."""
    comparison = judged(run(problem), reference)
    assert comparison.ok
    assert comparison.reference_rms > 1
    assert 0 < comparison.relative_error < 0.01


def test_an_all_zero_output_is_refused(reference: Tensor) -> None:
    """A kernel that wrote nothing does not pass."""
    comparison = judged(torch.zeros(M, H, dtype=torch.bfloat16), reference)
    assert not comparison.ok
    assert comparison.relative_error == pytest.approx(1.0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_element_is_refused_and_named(problem: dict[str, Tensor], reference: Tensor, poison: float) -> None:
    """A single NaN or infinity fails the whole output, with its coordinates."""
    out = run(problem)
    out[3, 200] = poison
    comparison = judged(out, reference)
    assert comparison.bad_elements == 1
    assert not comparison.ok
    assert "[3, 200]" in comparison.problem


def test_swapped_gate_and_up_are_refused(problem: dict[str, Tensor], reference: Tensor) -> None:
    """silu(up) * gate is no output of this operator."""
    rows = problem["gate_up"].view(torch.uint8).view(E, -1, 2, 8, H).flip(2).reshape(E, 2 * I_LOCAL, H)
    swapped = run(problem, gate_up=rows.contiguous().view(torch.float8_e4m3fn))
    assert not judged(swapped, reference).ok


def test_a_dropped_route_is_refused(problem: dict[str, Tensor], reference: Tensor) -> None:
    """One token without its weakest expert fails."""
    weights = problem["topk_weights"].clone()
    weights[5, 1] = 0.0
    assert not judged(run(problem, topk_weights=weights), reference).ok


def test_a_small_systematic_error_is_refused(problem: dict[str, Tensor], reference: Tensor) -> None:
    """Five per cent too much everywhere hides inside each element's tolerance but not in the norm."""
    comparison = judged(run(problem).double() * 1.05, reference)
    assert comparison.bad_elements == 0
    assert "relative error" in comparison.problem


def test_a_reference_of_small_values_proves_nothing(reference: Tensor) -> None:
    """An output is not accepted against a reference so small that the absolute tolerance covers everything."""
    small = reference * 1e-3
    assert "RMS" in judged(small, small).problem


def test_nothing_compared_is_not_accepted(reference: Tensor) -> None:
    """An empty or misshapen output is no success."""
    assert not judged(torch.zeros(0, H), reference[:0]).ok
    assert not judged(torch.zeros(M, H // 2), reference).ok


def test_the_norm_is_taken_against_the_exact_result_when_given(problem: dict[str, Tensor], reference: Tensor) -> None:
    """With an exact result that lies 10 % away the elements pass and the whole does not."""
    comparison = compare(run(problem), reference, reference.abs(), reference * 1.1)
    assert comparison.bad_elements == 0
    assert not comparison.ok
