"""Captures that bring the guards of the fused kernel into play which the real model's sizes never reach.

H 2048 divides by everything that the kernel cuts it into, so the tails of both pipelines are never ragged there. Here
H is 384 (three K blocks for two or four groups of warps; 3 to 24 tiles of down rows for 8 or 16 a slot), some experts
have no token (their weights stay unwritten in a replay, which initcheck can tell), the last one has, half of the tokens
all go to the same experts (full and cut windows), and the unused tail of the plan names a real token and an expert
without weights.

ring3 has H 1152: nine K blocks for two groups of warps in a ring of four slots, so that the slot of the last, half
empty item held a full one before. Who reads the missing K block there reads old weights; with H 384 it reads what no
one has written, which is zeros in a process that launches one kernel, and initcheck does not watch shared memory.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from kernel_cases import make_batch, make_experts

from alphamoe_backend.experts.alphamoe_w8a8 import alphamoe_fp8_block_scale_aligned_moe, implementation
from alphamoe_backend.geometry import LocalGeometry
from alphamoe_backend.kernels.jit import compile_cubin
from alphamoe_backend.kernels.launch import SOURCE_NAME, SYMBOL, choose_variant, shape_for_blocks
from alphamoe_backend.routing import AlignedPlan, align_block_size
from alphamoe_sanitizer_replays.captures.records import Capture, GeometryRecord, LaunchInfo
from alphamoe_sanitizer_replays.captures.store import write_capture

GEOMETRY = LocalGeometry(E=16, H=384, I_local=256, top_k=4)
USED_EXPERTS = (0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 15)
"""6, 7 and 14 have no token. The last of all has: behind its weights ends the buffer."""
RAGGED_M = {"ragged3": 3, "ragged150": 150, "ring3": 3}
RAGGED_H = {"ring3": 1152}
"""Where it is not :data:`GEOMETRY`'s."""


def ragged_ids(M: int, generator: torch.Generator) -> torch.Tensor:
    """Draw int32 [M, top_k] among the used experts; the later half of the tokens goes where the first one does."""
    order = torch.rand((M, len(USED_EXPERTS)), generator=generator).argsort(dim=-1)
    ids = torch.tensor(USED_EXPERTS, dtype=torch.int32)[order[:, : GEOMETRY.top_k]]
    ids[0] = torch.tensor([15, 0, 5, 9], dtype=torch.int32)
    if M > 8:
        ids[M // 2 :] = ids[0]
    return ids.contiguous()


def with_tail(plan: AlignedPlan) -> AlignedPlan:
    """Let the unused tail of a plan name token 0 and expert 6, which no kernel may look at."""
    used = int(plan.num_tokens_post_padded)
    ids, experts = plan.sorted_token_ids.clone(), plan.expert_ids.clone()
    if used >= len(ids):
        raise ValueError("the plan has no unused tail")
    ids[used:] = 0
    experts[used // GEOMETRY.block_m :] = 6
    return AlignedPlan(ids, experts, plan.num_tokens_post_padded)


def write_ragged(folder: Path, name: str, device: torch.device) -> Path:
    """Make one ragged dispatch, run it with what the device has, and store it as a capture with its weights."""
    M = RAGGED_M[name]
    geometry = dataclasses.replace(GEOMETRY, H=RAGGED_H.get(name, GEOMETRY.H))
    # Drawn on the CPU, so that the windows are cut the same way everywhere.
    generator = torch.Generator().manual_seed(M)
    experts = make_experts(geometry, generator)
    batch = make_batch(geometry, M, generator)
    ids = ragged_ids(M, generator)
    plan = with_tail(align_block_size(ids, geometry.block_m, geometry.E))
    batch = dataclasses.replace(batch, topk_ids=ids, plan=plan)
    weights = {
        "gemm1_weights": experts.gate_up,
        "gemm1_weights_scale": experts.gate_up_scale,
        "gemm2_weights": experts.canonical.down,
        "gemm2_weights_scale": experts.canonical.down_scale,
    }
    call = [batch.q, batch.q_scale, *weights.values(), *plan, batch.topk_weights]
    out = alphamoe_fp8_block_scale_aligned_moe(*[tensor.to(device) for tensor in call], top_k=geometry.top_k)
    launch, cubin_sha256, source_sha256, sm_count = None, None, None, None
    if implementation(device) == "hopper":
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        chosen = choose_variant(geometry, M, sm_count)
        shape = shape_for_blocks(geometry, chosen, plan.expert_ids.shape[0])
        launch = LaunchInfo(shape.variant, shape.grid, shape.block, shape.cluster, shape.dynamic_smem_bytes)
        cubin = compile_cubin(SOURCE_NAME, "sm_90a", chosen.defines())
        cubin_sha256, source_sha256 = cubin.sha256, cubin.source_sha256
    capture = Capture(
        plugin="alphamoe_w8a8",
        symbols=(SYMBOL,),
        run_id=None,
        rank=0,
        rank_source="none",
        world_size=1,
        layer=0,
        M=M,
        geometry=GeometryRecord(geometry.E, geometry.H, geometry.I_local, geometry.top_k, geometry.block_m),
        launch=launch,
        source_sha256=source_sha256,
        cubin_sha256=cubin_sha256,
        arguments={"top_k": geometry.top_k, "block_m": geometry.block_m, "routed_scaling_factor": 1.0},
        tensors=(),
        gpu_name=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        compute_capability=None,
        sm_count=sm_count,
        versions={},
        created="",
        bytes=0,
        notes=("made by tests/gpu/mutation_inputs.py",),
    )
    directory = folder / name
    write_capture(
        directory,
        capture,
        {
            "hidden_states": ("input", batch.q),
            "hidden_states_scale": ("input", batch.q_scale),
            "sorted_token_ids": ("input", plan.sorted_token_ids),
            "expert_ids": ("input", plan.expert_ids),
            "num_tokens_post_padded": ("input", plan.num_tokens_post_padded),
            "topk_weights": ("input", batch.topk_weights),
            "topk_ids": ("input", ids),
            "out": ("output", out),
        },
        weights=weights,
        weights_directory=directory,
    )
    return directory


def make_ragged(folder: Path, device: torch.device) -> dict[str, Path]:
    """Write the ragged captures that are not there yet and give their folders by name."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        name: folder / name if (folder / name).is_dir() else write_ragged(folder, name, device) for name in RAGGED_M
    }
