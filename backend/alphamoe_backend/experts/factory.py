"""Build the experts of one layer for a MoE runner backend."""

from __future__ import annotations

from alphamoe_backend.experts.alphamoe import AlphaMoEExperts
from alphamoe_backend.experts.registry import Experts, known_backend
from alphamoe_backend.experts.triton_stock import StockExperts
from alphamoe_backend.geometry import LocalGeometry
from alphamoe_backend.quantization.fp8 import ExpertWeights


def create_experts(moe_runner_backend: str, geometry: LocalGeometry, weights: ExpertWeights) -> Experts:
    """Build the experts of one layer.

    Args:
        moe_runner_backend: a key of :data:`alphamoe_backend.experts.registry.BACKENDS`.
        geometry: this rank's slice.
        weights: in the canonical layout; the AlphaMoE backend makes its own interleaved copy of the gate/up weight.

    Raises:
        UsageError: no such backend, or weights of another shape or dtype than the geometry's.
    """
    known_backend(moe_runner_backend)
    weights.check(geometry)
    return (StockExperts if moe_runner_backend == "triton" else AlphaMoEExperts)(geometry, weights)
