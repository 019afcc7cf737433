"""Replays the stock experts' two ``fused_moe_kernel`` launches; what lies between them is worked out on the host.

The activation, the quantisation and the sum over routes are kernels of their own, which initcheck would not see write.
So the first product is brought to the CPU, activated and quantised there with the same rounding points, and brought
back for the second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_backend.experts.registry import STOCK_SYMBOL
from alphamoe_sanitizer_replays.plugins.protocol import PreparedReplay
from alphamoe_sanitizer_replays.plugins.uploads import experts_in_use, upload, upload_rows
from alphamoe_tracers.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from alphamoe_backend.geometry import LocalGeometry
    from alphamoe_backend.quantization.fp8 import ExpertWeights
    from alphamoe_sanitizer_replays.captures.records import Capture
    from alphamoe_sanitizer_replays.captures.store import StoredCapture
    from alphamoe_sanitizer_replays.results import OutputCheck

_WEIGHTS = ("gate_up", "gate_up_scale", "down", "down_scale")
_PLAN = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")


class TritonStock:
    """Captures of :class:`alphamoe_backend.experts.triton_stock.StockExperts`."""

    name = "triton_stock"

    def variants(self, capture: Capture) -> tuple[str, ...]:
        """List nothing: the tiles follow from M."""
        return ()

    def materialise(self, stored: StoredCapture) -> dict[str, Tensor]:
        """Give every input and weight on the CPU; weights of a seed are drawn again."""
        from alphamoe_sanitizer_replays.plugins.materialise import materialise_experts

        return materialise_experts(stored, lambda weights: {name: getattr(weights, name) for name in _WEIGHTS})

    def prepare(
        self,
        capture: Capture,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        variant: str | None,
        source: Path | None,
    ) -> PreparedReplay:
        """Upload what the plan uses and give the two launches; see the protocol.

        Raises:
            UsageError: a variant or a source was asked for, or triton is not installed.
        """
        import torch

        from alphamoe_backend.geometry import LocalGeometry

        if variant is not None or source is not None:
            raise UsageError("the stock experts have no variants, and no source that could be replaced")
        top_k, block_m = int(capture.arguments["top_k"]), int(capture.arguments["block_m"])
        factor = float(capture.arguments.get("routed_scaling_factor", 1.0))
        dtype: torch.dtype = getattr(torch, capture.tensor("out").dtype)
        E, N, H = tensors["gate_up"].shape
        geometry = LocalGeometry(E, H, N // 2, top_k, block_m)
        started = time.perf_counter()
        runs = experts_in_use(tensors["expert_ids"], tensors["num_tokens_post_padded"], block_m, E)
        placed = {
            name: upload_rows(tensor, runs, device) if name in _WEIGHTS else upload(tensor, device)
            for name, tensor in tensors.items()
            if name != "topk_ids"
        }
        if device.type == "cuda":
            return _on_gpu(placed, geometry, dtype, factor, device, started)
        timings_s = {"upload": time.perf_counter() - started}
        results: dict[str, Tensor] = {}

        def reference() -> None:
            from alphamoe_backend.experts.stock_reference import stock_experts_reference
            from alphamoe_backend.routing import AlignedPlan

            results["out"] = stock_experts_reference(
                placed["hidden_states"],
                placed["hidden_states_scale"],
                _weights(placed),
                AlignedPlan(*(placed[name] for name in _PLAN)),
                placed["topk_weights"],
                block_m=block_m,
                dtype=dtype,
                routed_scaling_factor=factor,
            )

        return PreparedReplay(
            launch=reference, outputs=lambda: dict(results), launches=0, variant="reference", timings_s=timings_s
        )

    def check(self, stored: StoredCapture, tensors: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> OutputCheck:
        """Compare ``out`` with the captured one and the float64 oracle; see :mod:`output_check`."""
        from alphamoe_sanitizer_replays.plugins.output_check import check_experts

        return check_experts(stored, tensors, outputs, _weights)


def _weights(tensors: Mapping[str, Tensor]) -> ExpertWeights:
    from alphamoe_backend.quantization.fp8 import ExpertWeights

    return ExpertWeights(*(tensors[name] for name in _WEIGHTS))


def _on_gpu(
    placed: Mapping[str, Tensor],
    geometry: LocalGeometry,
    dtype: torch.dtype,
    factor: float,
    device: torch.device,
    started: float,
) -> PreparedReplay:
    """Allocate what lies between the launches and give them. ``started`` is when the upload began."""
    import torch
    from torch.nn import functional

    from alphamoe_backend.experts.triton_stock import stock_gemm, stock_tiles
    from alphamoe_backend.quantization.fp8 import FP8, per_token_group_quant_fp8_reference
    from alphamoe_backend.routing import AlignedPlan

    M, H = placed["hidden_states"].shape
    pairs, inner_size = M * geometry.top_k, geometry.I_local
    plan = AlignedPlan(*(placed[name] for name in _PLAN))
    gate_up = torch.empty((pairs, geometry.N), dtype=dtype, device=device)
    inner = torch.empty((pairs, inner_size), dtype=FP8, device=device)
    inner_scale = torch.empty((pairs, inner_size // 128), dtype=torch.float32, device=device)
    by_pair = torch.empty((pairs, H), dtype=dtype, device=device)
    timings_s = {"upload": time.perf_counter() - started}

    def first() -> None:
        stock_gemm(
            placed["hidden_states"],
            placed["hidden_states_scale"],
            placed["gate_up"],
            placed["gate_up_scale"],
            gate_up,
            plan,
            placed["topk_weights"],
            stock_tiles(M, geometry, geometry.N),
            a_row_divisor=geometry.top_k,
            mul_routed_weight=False,
            routed_scaling_factor=1.0,
        )

    def second() -> None:
        stock_gemm(
            inner,
            inner_scale,
            placed["down"],
            placed["down_scale"],
            by_pair,
            plan,
            placed["topk_weights"],
            stock_tiles(M, geometry, H),
            a_row_divisor=1,
            mul_routed_weight=True,
            routed_scaling_factor=factor,
        )

    def launch() -> None:
        first()
        gate, up = gate_up.cpu().to(torch.float32).chunk(2, dim=-1)
        values, scales = per_token_group_quant_fp8_reference((functional.silu(gate) * up).to(dtype))
        inner.copy_(values)
        inner_scale.copy_(scales)
        second()

    def again() -> None:
        first()
        second()

    def outputs() -> dict[str, Tensor]:
        return {"out": by_pair.cpu().view(M, geometry.top_k, H).to(torch.float32).sum(dim=1).to(dtype)}

    return PreparedReplay(
        launch=launch, outputs=outputs, again=again, symbols=(STOCK_SYMBOL,), launches=2, timings_s=timings_s
    )


PLUGIN = TritonStock()
