"""What the fused experts accept, and one clear message for each thing that they do not.

More geometries are admitted than were proven on hardware: :func:`is_validated` tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from alphamoe_backend.geometry import GROUP, LocalGeometry, MoEGeometry
from alphamoe_tracers.errors import UsageError

MAX_TOP_K = 16

VALIDATED: tuple[LocalGeometry, ...] = (
    LocalGeometry(E=512, H=2048, I_local=128, top_k=10),
    LocalGeometry(E=512, H=2048, I_local=512, top_k=10),
)
"""Slices whose kernel was checked against the float64 oracle on an H200 (docs/measurements.md)."""


@dataclass(frozen=True)
class AdmissionRequest:
    """A layer that wants the fused experts, in a serving engine's terms. Dtypes are torch's names for them."""

    geometry: MoEGeometry
    world_size: int
    ep_size: int = 1
    """Ranks that the experts are spread over."""
    all_to_all_backend: str = "none"
    hidden_dtype: str = "bfloat16"
    weight_dtype: str = "float8_e4m3fn"
    weight_block_shape: tuple[int, int] | None = (GROUP, GROUP)
    activation: str = "silu"
    gated: bool = True
    gate_limit: float | None = None
    """A clamp or another SwiGLU parameter (alpha, beta, limit)."""
    bias: bool = False
    router_weight_on_input: bool = False
    no_combine: bool = False
    fused_shared_experts: int = 0
    torch_compile: bool = False
    speculative_decoding: bool = False
    router_only: bool = False
    """``SGLANG_FLASHINFER_ALPHAMOE_ROUTER_ONLY``."""
    device: str = "cuda"


def is_validated(local: LocalGeometry) -> bool:
    """Say whether the kernel was proven on hardware for exactly this slice."""
    return local in VALIDATED


def describe_validated() -> str:
    """List the validated slices in one line."""
    return "; ".join(f"E{g.E} H{g.H} I_local {g.I_local} top-k {g.top_k} block_m {g.block_m}" for g in VALIDATED)


def _modes(r: AdmissionRequest) -> Iterator[tuple[bool, str, str]]:
    yield r.ep_size != 1, f"expert parallelism of {r.ep_size} ranks is not supported", "use ep_size 1 (tensor parallel)"
    yield (
        r.all_to_all_backend != "none",
        f"the all-to-all backend {r.all_to_all_backend!r} is not supported",
        "use tensor parallelism, which needs no all-to-all",
    )
    yield r.torch_compile, "torch.compile around the fused experts is not supported", "switch torch.compile off"
    yield r.speculative_decoding, "speculative decoding is not supported", "switch speculative decoding off"
    yield (
        r.fused_shared_experts != 0,
        f"{r.fused_shared_experts} shared experts fused into the routed ones are not supported",
        "run shared experts as layers of their own (disable shared-experts fusion)",
    )
    yield (
        r.router_only,
        "SGLANG_FLASHINFER_ALPHAMOE_ROUTER_ONLY is on, and this backend has no router kernel of its own yet",
        "unset it",
    )


def _formats(r: AdmissionRequest) -> Iterator[tuple[bool, str, str]]:
    yield (
        r.geometry.quantization == "nvfp4",
        "NVFP4 experts are not supported: their kernels come in a later release",
        "use an FP8 W8A8 model, for example --model qwen3-next-80b",
    )
    yield (
        r.geometry.quantization not in ("fp8_w8a8", "nvfp4"),
        f"experts quantised as {r.geometry.quantization!r} are not supported",
        "use FP8 W8A8 with 128 x 128 blocks",
    )
    # The torch reference that serves a CPU adds in float32 too.
    dtypes = ("bfloat16",) if r.device.startswith("cuda") else ("bfloat16", "float32")
    yield r.hidden_dtype not in dtypes, f"hidden states of {r.hidden_dtype} are not supported", f"use {dtypes[0]}"
    yield (
        r.weight_dtype != "float8_e4m3fn",
        f"expert weights of {r.weight_dtype} are not supported",
        "quantise them to float8_e4m3fn with 128 x 128 blocks",
    )
    yield (
        r.weight_block_shape != (GROUP, GROUP),
        f"weight scales by {_shape(r.weight_block_shape)} are not supported",
        "use block scales of 128 x 128",
    )


def _function(r: AdmissionRequest) -> Iterator[tuple[bool, str, str]]:
    yield r.activation != "silu", f"the activation {r.activation!r} is not supported", "only SiLU is fused"
    yield not r.gated, "experts without a gate are not supported", "only gate/up experts (SwiGLU) are fused"
    yield r.gate_limit is not None, "a clamp or another SwiGLU parameter is not supported", "only plain SwiGLU is fused"
    yield r.bias, "experts with a bias are not supported", "use another MoE runner backend for this model"
    yield (
        r.router_weight_on_input,
        "routing weights applied to the input are not supported",
        "apply them to the experts' output",
    )
    yield r.no_combine, "returning the routes uncombined is not supported", "let the experts sum over the routes"


def _shapes(r: AdmissionRequest) -> Iterator[tuple[bool, str, str]]:
    g = r.geometry
    yield g.H % GROUP != 0 or g.H <= 0, f"a hidden size of {g.H} is not a multiple of {GROUP}", "pad the model"
    yield g.I % GROUP != 0 or g.I <= 0, f"an intermediate size of {g.I} is not a multiple of {GROUP}", "pad the experts"
    yield (
        not 1 <= g.top_k <= MAX_TOP_K,
        f"top-k {g.top_k} is not supported: 1 to {MAX_TOP_K} are",
        "use another MoE runner backend for this model",
    )
    yield g.top_k > g.E, f"top-k {g.top_k} exceeds the {g.E} experts", "correct the geometry"
    yield g.block_m != 8, f"a block_m of {g.block_m} is not supported", "use block_m 8"


def _shape(shape: tuple[int, int] | None) -> str:
    return "tensor" if shape is None else f"{shape[0]} x {shape[1]} blocks"


def check_admission(request: AdmissionRequest) -> None:
    """Refuse a layer that the fused experts would compute wrongly or not at all.

    Raises:
        UsageError: the first thing that is not supported, with the way out in the hint.
    """
    for group in (_modes, _formats, _function, _shapes):
        for refused, message, hint in group(request):
            if refused:
                raise UsageError(f"flashinfer_alphamoe: {message}", hint=hint)
    request.geometry.local(request.world_size)
