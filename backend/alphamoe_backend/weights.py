"""Where a decoder's weights come from, and which slice of them a rank holds.

Seeded weights are slices of one full model: a tensor is drawn whole, from a generator that its name and the seed
determine, and cut afterwards. So the ranks of any world size together hold the same model. (CPU and CUDA generators
differ: a model belongs to the kind of device that it was drawn on.)
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import torch
from torch import Tensor

from alphamoe_backend.geometry import GROUP, ModelPreset
from alphamoe_backend.quantization.fp8 import FP8, ExpertWeights, quantize_blocks_fp8

EXPERT_BATCH = 32
"""Experts drawn from one generator. Part of what the weights are: another number is another model."""

NORM_SPREAD = 0.1
"""Standard deviation of norm weights around 1, so that a norm applied wrongly shows."""


def dense_shapes(preset: ModelPreset, layers: int) -> dict[str, tuple[int, ...]]:
    """List the parameters outside the experts by Hugging Face's name for Qwen3-MoE, with their full shapes."""
    H, E = preset.hidden, preset.moe.E
    q_rows, kv_rows = preset.heads * preset.head_dim, preset.kv_heads * preset.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (preset.vocab, H)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (H,),
            f"{prefix}.self_attn.q_proj.weight": (q_rows, H),
            f"{prefix}.self_attn.k_proj.weight": (kv_rows, H),
            f"{prefix}.self_attn.v_proj.weight": (kv_rows, H),
            f"{prefix}.self_attn.o_proj.weight": (H, q_rows),
            f"{prefix}.self_attn.q_norm.weight": (preset.head_dim,),
            f"{prefix}.self_attn.k_norm.weight": (preset.head_dim,),
            f"{prefix}.post_attention_layernorm.weight": (H,),
            f"{prefix}.mlp.gate.weight": (E, H),
        }
    return shapes | {"model.norm.weight": (H,), "lm_head.weight": (preset.vocab, H)}


def expert_shapes(preset: ModelPreset, layer: int) -> dict[str, tuple[int, ...]]:
    """List one layer's expert parameters by Hugging Face's names, before quantisation and interleaving."""
    H, inner = preset.hidden, preset.moe.I
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(preset.moe.E):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        shapes[f"{prefix}.gate_proj.weight"] = (inner, H)
        shapes[f"{prefix}.up_proj.weight"] = (inner, H)
        shapes[f"{prefix}.down_proj.weight"] = (H, inner)
    return shapes


class WeightSource(Protocol):
    """Gives a model its weights: seeded here, from a checkpoint in a later issue."""

    def tensor(self, name: str) -> Tensor:
        """Give a parameter of the full model by its Hugging Face name, in the model's dtype; not for experts."""

    def experts(self, layer: int, rank: int, world_size: int) -> ExpertWeights:
        """Give one rank's slice of a layer's experts: whole experts, a slice of the intermediate size."""


def shard(full: Tensor, dim: int, rank: int, parts: int) -> Tensor:
    """Give part ``rank`` of ``parts`` equal parts of ``full`` along ``dim``, as a tensor of its own."""
    return full.chunk(parts, dim)[rank].clone(memory_format=torch.contiguous_format)


def shard_kv_heads(full: Tensor, kv_heads: int, rank: int, world_size: int) -> Tensor:
    """Give the rows of ``full`` [kv_heads * head_dim, H] that ``rank`` needs.

    Where there are fewer KV heads than ranks, neighbouring ranks hold a copy of the same head: the one that their
    query heads belong to.
    """
    if kv_heads >= world_size:
        return shard(full, 0, rank, world_size)
    return shard(full, 0, rank * kv_heads // world_size, kv_heads)


class SeededWeights:
    """Random weights that keep activations of order one and greedy tokens varied.

    Linear weights have variance 1 / fan-in, embeddings variance 1, norm weights lie around 1: each sublayer then adds
    somewhat less than what the residual stream already holds, and logits have about unit variance.
    """

    def __init__(
        self, preset: ModelPreset, *, layers: int, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Describe the model; nothing is drawn yet.

        Args:
            preset: shapes.
            layers: layers of the model; a deeper model of the same seed begins with the same layers.
            seed: any integer.
            dtype: of dense weights (experts are e4m3 with float32 scales).
            device: where weights are drawn and live.
        """
        self._preset = preset
        self._seed = seed
        self._dtype = dtype
        self._device = device
        self._shapes = dense_shapes(preset, layers)

    def tensor(self, name: str) -> Tensor:
        """Give a parameter of the full model; see :class:`WeightSource`."""
        shape = self._shapes[name]
        drawn = torch.randn(shape, generator=self._generator(name), device=self._device)
        if len(shape) == 1:
            drawn.mul_(NORM_SPREAD).add_(1.0)
        elif name != "model.embed_tokens.weight":
            drawn.div_(math.sqrt(shape[1]))
        return drawn.to(self._dtype)

    def experts(self, layer: int, rank: int, world_size: int) -> ExpertWeights:
        """Give one rank's slice of a layer's experts; see :class:`WeightSource`.

        Blocks are quantised in the full model and cut afterwards, so that every world size holds the same e4m3 values
        and scales. Takes about 3 GB beside the result at the largest preset.
        """
        moe = self._preset.moe
        local = moe.local(world_size)
        E, H, inner, width = moe.E, moe.H, moe.I, local.I_local
        rows = slice(rank * width, (rank + 1) * width)
        blocks = slice(rank * width // GROUP, (rank + 1) * width // GROUP)
        byte, real = torch.uint8, torch.float32
        # Moved as bytes: not every device copies the fp8 dtype through arbitrary strides.
        gate_up = torch.empty((E, 2, width, H), dtype=byte, device=self._device)
        gate_up_scale = torch.empty((E, 2, width // GROUP, H // GROUP), dtype=real, device=self._device)
        down = torch.empty((E, H, width), dtype=byte, device=self._device)
        down_scale = torch.empty((E, H // GROUP, width // GROUP), dtype=real, device=self._device)
        for first in range(0, E, EXPERT_BATCH):
            batch = slice(first, min(first + EXPERT_BATCH, E))
            count = batch.stop - first
            generator = self._generator(f"model.layers.{layer}.mlp.experts.{first}")
            drawn = torch.randn((count, 2, inner, H), generator=generator, device=self._device)
            values, scales = quantize_blocks_fp8(drawn.div_(math.sqrt(H)))
            gate_up[batch] = values.view(byte)[:, :, rows]
            gate_up_scale[batch] = scales[:, :, blocks]
            drawn = torch.randn((count, H, inner), generator=generator, device=self._device)
            values, scales = quantize_blocks_fp8(drawn.div_(math.sqrt(inner)))
            down[batch] = values.view(byte)[:, :, rows]
            down_scale[batch] = scales[:, :, blocks]
        return ExpertWeights(
            gate_up=gate_up.view(FP8).flatten(1, 2),
            gate_up_scale=gate_up_scale.flatten(1, 2),
            down=down.view(FP8),
            down_scale=down_scale,
        )

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator(self._device)
        # torch takes 64-bit seeds; 63 bits are the same number signed and unsigned.
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return generator
