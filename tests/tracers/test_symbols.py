"""Symbol forms and classes."""

from __future__ import annotations

import pytest

from alphamoe_tracers.symbols import base_name, demangle, is_truncated, symbol_class, triton_base

GROUPED_GEMM = "cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape"


@pytest.mark.parametrize(
    ("full", "base"),
    [
        ("void combineKernel<half, DispatchLayout::RANK_MAJOR>(Args)", "combineKernel"),
        ("void cutlass::device_kernel<ns::GroupedGemm<e4m3, 128>>(P)", "device_kernel"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s16…", "Kernel"),
        ("fused_moe_kernel", "fused_moe_kernel"),
        ("void at::native::(anonymous namespace)::fill<at::f(int)>(int, (anonymous namespace)::Q)", "fill"),
        ("(anonymous namespace)::bar", "bar"),
        ("void f<(int)4, (a::b)3, (x < y)>(float const*, int)", "f"),
        ("std::enable_if<!(false), void>::type internal::gemv::kernel<int, 3>(P<int>)", "kernel"),
        ("ncclDevKernel_AllReduce_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllReduce_RING_LL"),
        ("void k<void (*)(int)>(int)", "k"),
        ("", ""),
    ],
)
def test_base_name_has_no_decoration(full: str, base: str) -> None:
    """Namespace, template arguments, return type and parameters are gone (case T4)."""
    assert base_name(full) == base


def test_demangling_leaves_other_names_alone() -> None:
    """A valid mangled name is expanded; anything else comes back as it was."""
    assert demangle("_Z11moe_scatterPfi") == "moe_scatter(float*, int)"
    assert demangle("_Z12moe_scatter4PfiE") == "_Z12moe_scatter4PfiE"
    assert demangle("kernel_alpha_moe_w8a8_up_down") == "kernel_alpha_moe_w8a8_up_down"


def test_triton_signature_is_the_only_suffix_removed() -> None:
    """The plain name and its signature form are one kernel, a different kernel with a longer name is not."""
    assert triton_base("fused_moe_kernel_0d1d2de3") == "fused_moe_kernel"
    assert triton_base("fused_moe_kernel_gptq_awq") == "fused_moe_kernel_gptq_awq"
    assert triton_base("triton_per_fused_mul_sum_0") == "triton_per_fused_mul_sum_0"


def test_truncated_names_are_recognised() -> None:
    """A name that a tool cut cannot prove absence."""
    assert is_truncated("void cutlass::Kernel<cutlass_80_tensorop_s16…")
    assert is_truncated("void foo<bar...")
    assert not is_truncated("void foo<bar>()")


@pytest.mark.parametrize(
    ("full", "expected"),
    [
        ("kernel_alpha_moe_w8a8_up_down", "alphamoe.w8a8"),
        ("void fused_moe_w8a8_wgmma_up_down_acc_kernel<104, 128, 32, 8, 1, 128>(int)", "alphamoe.w8a8"),
        ("kernel_alpha_moe_fused_router_small", "alphamoe.router"),
        ("kernel_alpha_moe_fused_router_tiny_other", None),
        ("kernel_alpha_moe_nvfp4_up_workspace_c388_up", "alphamoe.nvfp4"),
        ("_router_topk_softmax", "moe.router"),
        ("_route_align_block_size", "moe.align"),
        ("fused_moe_kernel", "moe.gemm"),
        ("fused_moe_kernel_0d1d2de3", "moe.gemm"),
        ("fused_moe_kernel_gptq_awq", "moe.gemm"),
        ("fused_moe_router_cudacore_kernel", "moe.router"),
        ("void sglang::moe_fused_gate_kernel<float>(int)", "moe.router"),
        ("void flashinfer::activation::act_and_mul_kernel<bf16>(int)", "activation"),
        ("_per_token_group_quant_8bit", "quant.activation"),
        ("void moe_sum_reduce_warp_per_token_vec_kernel<8>(int)", "moe.combine"),
        (f"void cutlass::device_kernel<{GROUPED_GEMM}<int>>>(P)", "moe.gemm"),
        ("void cutlass::device_kernel<ns::Reduce<f32>>(P)", None),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("alphamoe_trace_sentinel_graph_step", "collector.sentinel"),
        ("alphamoe_trace_sentinel_imposter", None),
    ],
)
def test_symbol_class_matches_the_right_part_of_the_name(full: str, expected: str | None) -> None:
    """Classes match the base name, or the full name where identity lives in the template arguments."""
    assert symbol_class(base_name(full), full) == expected
