"""FP8 quantisation: rounding, zeros, NaN, and the interleaving of gate and up."""

import pytest
import torch

from alphamoe_backend.geometry import LocalGeometry
from alphamoe_backend.quantization.fp8 import (
    FP8,
    ExpertWeights,
    deinterleave_gated,
    dequantize_blocks_fp8,
    dequantize_groups_fp8,
    interleave_gated,
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_reference,
    quantize_blocks_fp8,
)
from alphamoe_tracers.errors import UsageError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Give seeded normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_are_scaled_by_their_own_largest_magnitude(dtype: torch.dtype) -> None:
    """Each group has scale amax / 448, its largest magnitude becomes 448, and the error stays below half a step."""
    x = normal(5, 384).to(dtype)
    q, scale = per_token_group_quant_fp8(x)
    groups = x.float().view(5, 3, 128)
    assert q.dtype == FP8
    assert q.shape == (5, 384)
    assert torch.equal(scale, groups.abs().amax(-1) / torch.tensor(448.0))
    assert torch.equal(q.float().view(5, 3, 128).abs().amax(-1), torch.full((5, 3), 448.0))
    error = (dequantize_groups_fp8(q, scale) - x.float()).view(5, 3, 128).abs()
    # e4m3 has 3 bits of mantissa: half a step is 1/16 of the value, or 2^-10 steps of the scale below its normals.
    assert bool((error <= groups.abs() / 16 * 1.0001 + scale[..., None] * 2**-10).all())


def test_zeros_dequantise_to_exact_zeros() -> None:
    """A group of zeros has scale 0 and gives zeros, not NaN; its neighbours keep their scale."""
    x = normal(3, 256)
    x[1, :128] = 0
    q, scale = per_token_group_quant_fp8(x)
    assert scale[1, 0] == 0
    assert scale[1, 1] > 0
    assert torch.equal(dequantize_groups_fp8(q, scale)[1, :128], torch.zeros(128))


def test_magnitudes_whose_scale_underflows_are_zeros() -> None:
    """A group so small that amax / 448 is 0 in float32 gives zeros, not infinities or NaN."""
    q, scale = per_token_group_quant_fp8(torch.full((1, 128), 1e-45))
    assert torch.equal(dequantize_groups_fp8(q, scale), torch.zeros(1, 128))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_nan_or_infinity_stays_visible(bad: float) -> None:
    """A NaN or an infinity makes its own element NaN after dequantisation, and no other group."""
    x = normal(2, 256)
    x[0, 5] = bad
    back = dequantize_groups_fp8(*per_token_group_quant_fp8(x))
    assert torch.isnan(back[0, 5])
    assert not torch.isnan(back[0, 128:]).any()
    assert not torch.isnan(back[1]).any()


def test_quantisation_is_bitwise_repeatable() -> None:
    """The same input gives the same bytes."""
    x = normal(9, 512)
    first, second = per_token_group_quant_fp8(x), per_token_group_quant_fp8(x.clone())
    assert torch.equal(first[0].view(torch.uint8), second[0].view(torch.uint8))
    assert torch.equal(first[1], second[1])


def test_columns_must_fill_groups() -> None:
    """A width that is no multiple of the group is refused."""
    with pytest.raises(UsageError, match="200 columns"):
        per_token_group_quant_fp8(torch.zeros(1, 200))
    with pytest.raises(UsageError, match="128 x 200"):
        quantize_blocks_fp8(torch.zeros(2, 128, 200))


def test_weight_blocks_share_one_scale() -> None:
    """A 128 x 128 block has scale amax / 448 of its own, whatever the neighbours hold."""
    w = normal(2, 256, 384)
    w[1, 128:, :128] *= 100
    w[0, :128, 128:256] = 0
    q, scale = quantize_blocks_fp8(w)
    assert scale.shape == (2, 2, 3)
    for e, n, k in ((0, 0, 0), (1, 1, 0), (1, 0, 2)):
        block = w[e, n * 128 : n * 128 + 128, k * 128 : k * 128 + 128]
        assert scale[e, n, k] == block.abs().max() / torch.tensor(448.0)
    assert scale[0, 0, 1] == 0
    torch.testing.assert_close(dequantize_blocks_fp8(q, scale), w, rtol=1 / 16, atol=0.02)


def test_gate_and_up_alternate_by_eight_rows_and_scales_by_one() -> None:
    """Row 16 j + i of the interleaved weight is gate row 8 j + i, and row 16 j + 8 + i is up row 8 j + i."""
    E, I_local, H = 2, 256, 128
    rows = torch.arange(2 * I_local, dtype=torch.float32).view(1, -1, 1).expand(E, -1, H)
    bytes_ = (rows % 251).to(torch.uint8).contiguous()
    scale = torch.arange(E * 4, dtype=torch.float32).view(E, 4, 1)
    w, s = interleave_gated(bytes_.view(FP8), scale)
    gate, up = bytes_[:, :I_local], bytes_[:, I_local:]
    for j in range(I_local // 8):
        assert torch.equal(w.view(torch.uint8)[:, 16 * j : 16 * j + 8], gate[:, 8 * j : 8 * j + 8])
        assert torch.equal(w.view(torch.uint8)[:, 16 * j + 8 : 16 * j + 16], up[:, 8 * j : 8 * j + 8])
    assert s[0, :, 0].tolist() == [0, 2, 1, 3]
    assert w.is_contiguous()
    assert s.is_contiguous()


def test_interleaving_can_be_undone() -> None:
    """Deinterleaving gives the canonical bytes and scales back, also for the weight of a single expert."""
    q, scale = quantize_blocks_fp8(normal(3, 768, 256))
    back, back_scale = deinterleave_gated(*interleave_gated(q, scale))
    assert torch.equal(back.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(back_scale, scale)
    w, s = interleave_gated(q, scale)
    one, one_scale = deinterleave_gated(w[1], s[1])
    assert torch.equal(one.view(torch.uint8), q[1].view(torch.uint8))
    assert torch.equal(one_scale, scale[1])


def test_expert_weights_of_another_shape_are_refused_by_name() -> None:
    """A tensor that does not fit the geometry is named."""
    geometry = LocalGeometry(E=2, H=256, I_local=128, top_k=1)
    gate_up, gate_up_scale = quantize_blocks_fp8(normal(2, 256, 256))
    down, down_scale = quantize_blocks_fp8(normal(2, 256, 128))
    ExpertWeights(gate_up, gate_up_scale, down, down_scale).check(geometry)
    with pytest.raises(UsageError, match="down_scale"):
        ExpertWeights(gate_up, gate_up_scale, down, down_scale.double()).check(geometry)
    with pytest.raises(UsageError, match="expert weight down "):
        ExpertWeights(gate_up, gate_up_scale, gate_up, down_scale).check(geometry)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("M", [1, 7, 911])
def test_the_gpu_kernel_gives_the_bytes_of_the_cpu(M: int, dtype: torch.dtype) -> None:
    """Triton, torch on the GPU and torch on the CPU agree bit for bit; NaNs agree in place."""
    x = normal(M, 2048, seed=M).to(dtype)
    x[0, :128] = 0
    x[-1, 300] = float("nan")
    expected, expected_scale = per_token_group_quant_fp8(x)
    for quantise in (per_token_group_quant_fp8, per_token_group_quant_fp8_reference):
        q, scale = (part.cpu() for part in quantise(x.cuda()))
        nan = torch.isnan(expected.float())
        assert torch.equal(torch.isnan(q.float()), nan)
        assert torch.equal(q.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])
        assert torch.equal(scale.nan_to_num(-1), expected_scale.nan_to_num(-1))
