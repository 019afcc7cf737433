"""Replays the fused W8A8 kernel: our own on compute capability 9.0, elsewhere FlashInfer's or the torch reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_backend.kernels.launch import MAX_H, SOURCE_NAME, SYMBOL, choose_variant, variant, variants
from alphamoe_sanitizer_replays.plugins.protocol import CompiledAhead, PreparedReplay
from alphamoe_sanitizer_replays.plugins.uploads import experts_in_use, upload, upload_rows
from alphamoe_tracers.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from alphamoe_backend.geometry import LocalGeometry
    from alphamoe_backend.kernels.jit import Cubin
    from alphamoe_backend.kernels.launch import Variant
    from alphamoe_backend.quantization.fp8 import ExpertWeights
    from alphamoe_sanitizer_replays.captures.records import Capture
    from alphamoe_sanitizer_replays.captures.store import StoredCapture
    from alphamoe_sanitizer_replays.results import OutputCheck

ARCH = "sm_90a"
_WEIGHTS = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
_INPUTS = (
    "hidden_states",
    "hidden_states_scale",
    *_WEIGHTS,
    "sorted_token_ids",
    "expert_ids",
    "num_tokens_post_padded",
    "topk_weights",
)
"""In the order of the operator's arguments; ``out`` follows."""


class AlphaMoEW8A8:
    """Captures of :class:`alphamoe_backend.experts.alphamoe.AlphaMoEExperts`."""

    name = "alphamoe_w8a8"

    def variants(self, capture: Capture) -> tuple[str, ...]:
        """List all compiled variants, the one that was captured first."""
        own = capture.launch.variant if capture.launch is not None else None
        names = [known.name for known in variants()]
        return tuple(sorted(names, key=lambda name: name != own))

    def materialise(self, stored: StoredCapture) -> dict[str, Tensor]:
        """Give every input and weight on the CPU; weights of a seed are drawn again and interleaved."""
        from alphamoe_sanitizer_replays.plugins.materialise import materialise_experts

        return materialise_experts(stored, _interleaved)

    def prepare(
        self,
        capture: Capture,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        variant: str | None,
        source: Path | None,
    ) -> PreparedReplay:
        """Upload what the plan uses, load one variant, and give the launch; see the protocol.

        Raises:
            UsageError: the device has no fused kernel, or a variant or source was asked for where there is no choice.
        """
        import torch

        from alphamoe_backend.experts import alphamoe_w8a8

        block_m, top_k = int(capture.arguments["block_m"]), int(capture.arguments["top_k"])
        started = time.perf_counter()
        runs = experts_in_use(
            tensors["expert_ids"], tensors["num_tokens_post_padded"], block_m, tensors["gemm1_weights"].shape[0]
        )
        inputs = [
            upload_rows(tensors[name], runs, device) if name in _WEIGHTS else upload(tensors[name], device)
            for name in _INPUTS
        ]
        # A CPU's reference adds in the dtype that was captured, the kernels in bfloat16.
        dtype = getattr(torch, capture.tensor("out").dtype) if device.type == "cpu" else torch.bfloat16
        zeros = torch.zeros(tensors["hidden_states"].shape, dtype=dtype)
        out = torch.empty(zeros.shape, dtype=dtype, device=device)
        call = (*inputs, out)
        timings_s = {"upload": time.perf_counter() - started}
        factor = float(capture.arguments.get("routed_scaling_factor", 1.0))
        geometry = alphamoe_w8a8.check_tensors(call, top_k=top_k, block_m=block_m, float32_out=device.type == "cpu")
        implementation = alphamoe_w8a8.implementation(device)
        if implementation == "hopper":
            launch, chosen, cubin = self._hopper(capture, call, geometry, factor, variant, source, timings_s)
            return PreparedReplay(
                launch=launch,
                outputs=lambda: {"out": out.cpu()},
                renew=lambda: _copy(out, zeros),
                symbols=(SYMBOL,),
                variant=chosen,
                source_sha256=cubin.source_sha256,
                cubin_sha256=cubin.sha256,
                timings_s=timings_s,
            )
        if device.type == "cuda" and implementation == "reference":
            raise UsageError(
                f"{torch.cuda.get_device_name(device)} has no fused kernel to replay",
                "use a GPU of compute capability 9.0, or --device cpu for the torch reference",
            )
        if source is not None:
            raise UsageError(f"{source}: a source can only be compiled for a GPU of compute capability 9.0")

        def call_operator() -> None:
            alphamoe_w8a8.alphamoe_fp8_block_scale_aligned_moe(
                *inputs, top_k=top_k, block_m=block_m, routed_scaling_factor=factor, out=out
            )

        return PreparedReplay(
            launch=call_operator,
            outputs=lambda: {"out": out.detach().cpu().clone()},
            renew=lambda: _copy(out, zeros),
            symbols=(SYMBOL,) if device.type == "cuda" else (),
            launches=1 if device.type == "cuda" else 0,
            variant=implementation,
            timings_s=timings_s,
        )

    def _hopper(
        self,
        capture: Capture,
        call: tuple[Tensor, ...],
        geometry: LocalGeometry,
        factor: float,
        name: str | None,
        source: Path | None,
        timings_s: dict[str, float],
    ) -> tuple[Callable[[], None], str, Cubin]:
        """Compile and load one variant on the device of ``call``; give its launch, its name and its cubin."""
        import torch

        from alphamoe_backend.kernels import jit
        from alphamoe_backend.kernels.launcher import launcher

        device = call[0].device
        index = device.index if device.index is not None else torch.cuda.current_device()
        sms = torch.cuda.get_device_properties(index).multi_processor_count
        chosen = _chosen(capture, geometry, name, sms)
        if source is not None:
            jit.replace_source(SOURCE_NAME, source)
        started = time.perf_counter()
        kernel = launcher(device)
        kernel.prepare(only=chosen)
        # The launcher loaded it with the same words, so this is what it launches.
        loaded = jit.load(SOURCE_NAME, ARCH, chosen.defines(), SYMBOL, chosen.dynamic_smem_bytes(MAX_H), index)
        timings_s["compile"] = time.perf_counter() - started
        M, plan_blocks = call[0].shape[0], call[7].shape[0]

        def launch() -> None:
            kernel.launch(geometry, call, M=M, plan_blocks=plan_blocks, routed_scaling_factor=factor, variant=chosen)

        return launch, chosen.name, loaded.cubin

    def compile_ahead(self, capture: Capture, variant: str | None, source: Path | None) -> CompiledAhead:
        """Put the variant's cubin into the disk cache, so that a replay under a tool finds it.

        Raises:
            AlphaMoEError: no NVRTC, or the source does not compile.
        """
        from alphamoe_backend.geometry import LocalGeometry
        from alphamoe_backend.kernels import jit

        record = capture.geometry
        if record is None:
            return CompiledAhead()
        geometry = LocalGeometry(record.E, record.H, record.I_local, record.top_k, record.block_m)
        started = time.perf_counter()
        chosen = _chosen(capture, geometry, variant, capture.sm_count or 132)
        text = jit.file_text(source) if source is not None else jit.source_text(SOURCE_NAME)
        cubin = jit.compile_source(SOURCE_NAME, text, ARCH, chosen.defines())
        return CompiledAhead(time.perf_counter() - started, cubin.source_sha256, cubin.sha256)

    def check(self, stored: StoredCapture, tensors: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> OutputCheck:
        """Compare ``out`` with the captured one and the float64 oracle; see :mod:`output_check`."""
        from alphamoe_sanitizer_replays.plugins.output_check import check_experts

        return check_experts(stored, tensors, outputs, _canonical)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _chosen(capture: Capture, geometry: LocalGeometry, name: str | None, sm_count: int) -> Variant:
    if name is None and capture.launch is not None:
        name = capture.launch.variant
    return variant(name) if name is not None else choose_variant(geometry, capture.M, sm_count)


def _interleaved(weights: ExpertWeights) -> dict[str, Tensor]:
    from alphamoe_backend.quantization.fp8 import interleave_gated

    gate_up, gate_up_scale = interleave_gated(weights.gate_up, weights.gate_up_scale)
    return dict(zip(_WEIGHTS, (gate_up, gate_up_scale, weights.down, weights.down_scale), strict=True))


def _canonical(tensors: Mapping[str, Tensor]) -> ExpertWeights:
    from alphamoe_backend.quantization.fp8 import ExpertWeights, deinterleave_gated

    gate_up, gate_up_scale, down, down_scale = (tensors[name] for name in _WEIGHTS)
    return ExpertWeights(*deinterleave_gated(gate_up, gate_up_scale), down, down_scale)


PLUGIN = AlphaMoEW8A8()
