"""The FlashInfer-shaped operator: what it refuses, and which implementation it calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from alphamoe_backend.experts import alphamoe_w8a8, flashinfer
from alphamoe_backend.experts.alphamoe_w8a8 import alphamoe_fp8_block_scale_aligned_moe, implementation
from alphamoe_backend.experts.reference import alphamoe_fp8_block_scale_aligned_moe_reference, float64_oracle
from alphamoe_backend.experts.tolerance import compare
from alphamoe_backend.quantization.fp8 import (
    ExpertWeights,
    interleave_gated,
    per_token_group_quant_fp8,
    quantize_blocks_fp8,
)
from alphamoe_backend.routing import align_block_size, topk_softmax
from alphamoe_tracers.errors import UsageError

M, E, H, I_LOCAL, TOP_K = 5, 4, 256, 128, 2


@pytest.fixture
def call() -> dict[str, Any]:
    """A valid call of the operator on the CPU."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights = ExpertWeights(
        *quantize_blocks_fp8(normal(E, 2 * I_LOCAL, H) * H**-0.5), *quantize_blocks_fp8(normal(E, H, I_LOCAL) * 0.5)
    )
    q, q_scale = per_token_group_quant_fp8(normal(M, H))
    topk_weights, topk_ids = topk_softmax(normal(M, E), TOP_K)
    gate_up, gate_up_scale = interleave_gated(weights.gate_up, weights.gate_up_scale)
    plan = align_block_size(topk_ids, 8, E)
    return {
        "hidden_states": q,
        "hidden_states_scale": q_scale,
        "gemm1_weights": gate_up,
        "gemm1_weights_scale": gate_up_scale,
        "gemm2_weights": weights.down,
        "gemm2_weights_scale": weights.down_scale,
        **plan._asdict(),
        "topk_weights": topk_weights,
        "top_k": TOP_K,
        "_oracle": float64_oracle(q, q_scale, weights, topk_weights, topk_ids),
    }


def operator(call: dict[str, Any], **changes: Any) -> Tensor:
    return alphamoe_fp8_block_scale_aligned_moe(
        **{name: value for name, value in {**call, **changes}.items() if not name.startswith("_")}
    )


def test_a_cpu_gets_the_reference(call: dict[str, Any]) -> None:
    """Without a GPU the operator is the torch reference, and close to the float64 oracle."""
    assert implementation(torch.device("cpu")) == "reference"
    out = operator(call)
    assert out.dtype == torch.bfloat16
    oracle = call["_oracle"]
    assert compare(out, oracle.out, oracle.sum_abs_terms).relative_error < 0.03


def test_the_output_is_added_to(call: dict[str, Any]) -> None:
    """``out`` keeps what it held, and the same tensor comes back."""
    held = torch.full((M, H), 2.0)
    assert operator(call, out=held) is held
    torch.testing.assert_close(held, 2.0 + operator(call, out=torch.zeros(M, H)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hidden_states", lambda t: t.to(torch.bfloat16), "hidden_states is torch.bfloat16"),
        ("hidden_states", lambda t: t[0], r"hidden_states must be \[M, H\]"),
        ("hidden_states_scale", lambda t: t[:, :1].contiguous(), r"hidden_states_scale has the shape \[5, 1\]"),
        ("gemm1_weights", lambda t: t[:, :128].contiguous(), "I_local=64 must be multiples of 128"),
        ("gemm1_weights_scale", lambda t: t.double(), "gemm1_weights_scale is torch.float64"),
        ("gemm2_weights", lambda t: t[:, :128].contiguous(), r"gemm2_weights has the shape \[4, 128, 128\]"),
        ("gemm2_weights_scale", lambda t: t[:, :, 0], r"gemm2_weights_scale has the shape \[4, 2\]"),
        ("sorted_token_ids", lambda t: t[:-1], "sorted_token_ids has the shape"),
        ("sorted_token_ids", lambda t: t.long(), "sorted_token_ids is torch.int64"),
        ("num_tokens_post_padded", lambda t: t.expand(2), r"num_tokens_post_padded has the shape \[2\]"),
        ("topk_weights", lambda t: t.t().contiguous().t(), "topk_weights is not contiguous"),
        ("top_k", lambda _: 3, r"topk_weights has the shape \[5, 2\], not \[5, 3\]"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(call: dict[str, Any], name: str, change: Any, message: str) -> None:
    """Each tensor's dtype, shape and layout is checked before anything runs, and the message names it."""
    with pytest.raises(UsageError, match=message):
        operator(call, **{name: change(call[name])})


@pytest.mark.parametrize("block_m", [0, 4, 12])
def test_a_block_that_is_no_multiple_of_eight_is_refused(call: dict[str, Any], block_m: int) -> None:
    """block_m is a positive multiple of 8."""
    with pytest.raises(UsageError, match=f"block_m={block_m}"):
        operator(call, block_m=block_m)


def test_a_misaligned_weight_is_refused(call: dict[str, Any]) -> None:
    """The kernels copy 16 bytes at a time, so a tensor that begins elsewhere is named and refused."""
    weight = call["gemm2_weights"].view(torch.uint8)
    held = torch.zeros(weight.numel() + 16, dtype=torch.uint8)
    start = (8 - held.data_ptr()) % 16
    shifted = held[start : start + weight.numel()].view(weight.shape).copy_(weight).view(torch.float8_e4m3fn)
    with pytest.raises(UsageError, match="gemm2_weights begins 8 bytes past"):
        operator(call, gemm2_weights=shifted)


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        ((9, 0), None, "hopper"),
        ((9, 0), "0.7.2", "hopper"),
        ((10, 0), "0.7.2", "flashinfer"),
        ((10, 3), "0.7.2.post1", "flashinfer"),
        ((10, 3), "0.7.1", "reference"),
        ((10, 3), None, "reference"),
        ((8, 0), "0.7.2", "reference"),
    ],
)
def test_the_device_chooses_the_implementation(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str | None, expected: str
) -> None:
    """Ours on Hopper, FlashInfer's on its two Blackwell chips when new enough, the reference elsewhere."""
    monkeypatch.setattr(alphamoe_w8a8, "_hopper", lambda _: capability == (9, 0))
    monkeypatch.setattr(flashinfer, "_capability", lambda _: capability)
    monkeypatch.setattr(flashinfer, "installed_version", lambda: version)
    assert implementation(torch.device("cuda", 0)) == expected


def test_flashinfer_is_called_with_the_operators_arguments(
    monkeypatch: pytest.MonkeyPatch, call: dict[str, Any]
) -> None:
    """Where FlashInfer serves the device its operator gets the tensors in order and the output to add to."""
    seen: list[Any] = []

    def stand_in(*tensors: Tensor, **options: Any) -> Tensor:
        seen.append(options)
        return alphamoe_fp8_block_scale_aligned_moe_reference(*tensors, **options)

    expected = operator(call)
    monkeypatch.setattr(alphamoe_w8a8, "implementation", lambda _: "flashinfer")
    monkeypatch.setattr(flashinfer, "alphamoe_fp8_block_scale_aligned_moe", stand_in)
    out = torch.zeros(M, H, dtype=torch.bfloat16)
    assert operator(call, out=out, routed_scaling_factor=1.0) is out
    assert torch.equal(out, expected)
    assert seen[0]["out"] is out
    assert seen[0]["block_m"] == 8


def test_the_hopper_kernel_takes_bfloat16_only(monkeypatch: pytest.MonkeyPatch, call: dict[str, Any]) -> None:
    """A float32 output, fine for the reference, is refused where the kernel would run."""
    monkeypatch.setattr(alphamoe_w8a8, "implementation", lambda _: "hopper")
    with pytest.raises(UsageError, match=r"out is torch\.float32"):
        operator(call, out=torch.zeros(M, H))
