"""Captures made by hand on the CPU: what the backend's layers would have stored, at the tiny preset's shapes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from alphamoe_backend.experts.factory import create_experts
from alphamoe_backend.experts.triton_stock import stock_block_m
from alphamoe_backend.geometry import preset
from alphamoe_backend.quantization.fp8 import ExpertWeights, interleave_gated, per_token_group_quant_fp8
from alphamoe_backend.routing import topk_softmax
from alphamoe_backend.weights import SeededWeights
from alphamoe_sanitizer_replays.captures.records import Capture, GeometryRecord, SeededWeightsFrom, TensorRole
from alphamoe_sanitizer_replays.captures.store import StoredCapture, open_capture, write_capture

SEED, LAYER, RANK, WORLD_SIZE = 7, 1, 2, 4
ORIGIN = SeededWeightsFrom(model="tiny", layers=2, seed=SEED, dtype="float32", device_kind="cpu")


def make_capture(
    folder: Path, *, backend: str = "flashinfer_alphamoe", M: int = 3, store_weights: bool = False, shrink: float = 0.1
) -> StoredCapture:
    """Run one dispatch of seeded experts on the CPU and store it as a capture in ``folder``.

    Args:
        shrink: of the activations, so that outputs are as small as a rank's real partial sums.
    """
    model = preset("tiny")
    geometry = model.moe.local(WORLD_SIZE)
    weights = SeededWeights(model, layers=2, seed=SEED, dtype=torch.float32, device=torch.device("cpu")).experts(
        LAYER, RANK, WORLD_SIZE
    )
    experts = create_experts(backend, geometry, weights)
    generator = torch.Generator().manual_seed(M)
    q, q_scale = per_token_group_quant_fp8(torch.randn((M, geometry.H), generator=generator) * shrink)
    topk_weights, topk_ids = topk_softmax(torch.randn((M, geometry.E), generator=generator), geometry.top_k)
    plan = experts.plan(topk_ids)
    out = experts.run(q, q_scale, plan, topk_weights, torch.bfloat16)
    stock = backend == "triton"
    block_m = stock_block_m(M, geometry) if stock else geometry.block_m
    inputs = {
        "hidden_states": q,
        "hidden_states_scale": q_scale,
        **plan._asdict(),
        "topk_weights": topk_weights,
        "topk_ids": topk_ids,
    }
    tensors: dict[str, tuple[TensorRole, Tensor]] = {name: ("input", tensor) for name, tensor in inputs.items()}
    tensors["out"] = ("output", out)
    capture = Capture(
        plugin="triton_stock" if stock else "alphamoe_w8a8",
        symbols=("fused_moe_kernel",) if stock else ("kernel_alpha_moe_w8a8_up_down",),
        run_id=None,
        rank=RANK,
        rank_source="engine",
        world_size=WORLD_SIZE,
        layer=LAYER,
        M=M,
        geometry=GeometryRecord(geometry.E, geometry.H, geometry.I_local, geometry.top_k, block_m),
        arguments={"top_k": geometry.top_k, "block_m": block_m, "routed_scaling_factor": 1.0},
        weights_from=None if store_weights else ORIGIN,
        tensors=(),
        gpu_name=None,
        compute_capability=None,
        versions={},
        created="2026-01-01T00:00:00Z",
        bytes=0,
    )
    directory = folder / f"{capture.plugin}-M={M}"
    write_capture(
        directory,
        capture,
        tensors,
        weights=_named(weights, stock=stock),
        weights_directory=folder if store_weights else None,
    )
    return open_capture(directory)


def _named(weights: ExpertWeights, *, stock: bool) -> dict[str, Tensor]:
    if stock:
        return dict(vars(weights))
    gate_up, gate_up_scale = interleave_gated(weights.gate_up, weights.gate_up_scale)
    return {
        "gemm1_weights": gate_up,
        "gemm1_weights_scale": gate_up_scale,
        "gemm2_weights": weights.down,
        "gemm2_weights_scale": weights.down_scale,
    }
