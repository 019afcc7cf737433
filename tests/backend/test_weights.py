"""Seeded weights: names, shapes, and slices of one full model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from alphamoe_backend.geometry import PRESETS, ModelPreset, MoEGeometry
from alphamoe_backend.quantization.fp8 import dequantize_blocks_fp8
from alphamoe_backend.weights import SeededWeights, dense_shapes, expert_shapes, shard_kv_heads

SMALL = ModelPreset(
    name="small", moe=MoEGeometry(E=3, H=128, I=512, top_k=2), layers=2, heads=4, kv_heads=2, head_dim=32, vocab=64
)


def seeded(seed: int = 0, preset: ModelPreset = SMALL, layers: int = 2) -> SeededWeights:
    """Make float32 weights on the CPU."""
    return SeededWeights(preset, layers=layers, seed=seed, dtype=torch.float32, device=torch.device("cpu"))


def test_names_and_shapes_are_hugging_faces() -> None:
    """Spot checks against the parameter list of a published Qwen3-MoE checkpoint's layout."""
    preset = PRESETS["qwen3-next-80b"]
    shapes = dense_shapes(preset, 4)
    assert len(shapes) == 3 + 4 * 9
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (preset.vocab, 2048)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (16 * 256, 2048)
    assert shapes["model.layers.3.self_attn.k_proj.weight"] == (2 * 256, 2048)
    assert shapes["model.layers.3.self_attn.o_proj.weight"] == (2048, 16 * 256)
    assert shapes["model.layers.3.self_attn.k_norm.weight"] == (256,)
    assert shapes["model.layers.3.mlp.gate.weight"] == (512, 2048)
    experts = expert_shapes(preset, 3)
    assert len(experts) == 3 * 512
    assert experts["model.layers.3.mlp.experts.511.up_proj.weight"] == (512, 2048)
    assert experts["model.layers.3.mlp.experts.0.down_proj.weight"] == (2048, 512)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_ranks_experts_together_are_the_full_models(world_size: int) -> None:
    """Gate, up and down slices of all ranks, put side by side, are bitwise what one rank holds alone."""
    whole = seeded().experts(1, 0, 1)
    parts = [seeded().experts(1, rank, world_size) for rank in range(world_size)]
    width = 512 // world_size
    gates = torch.cat([part.gate_up.view(torch.uint8)[:, :width] for part in parts], dim=1)
    ups = torch.cat([part.gate_up.view(torch.uint8)[:, width:] for part in parts], dim=1)
    assert torch.equal(torch.cat([gates, ups], dim=1), whole.gate_up.view(torch.uint8))
    blocks = width // 128
    scales = [part.gate_up_scale[:, half * blocks : (half + 1) * blocks] for half in (0, 1) for part in parts]
    assert torch.equal(torch.cat(scales, dim=1), whole.gate_up_scale)
    down = torch.cat([part.down.view(torch.uint8) for part in parts], dim=2)
    assert torch.equal(down, whole.down.view(torch.uint8))
    assert torch.equal(torch.cat([part.down_scale for part in parts], dim=2), whole.down_scale)


def test_weights_depend_on_seed_layer_and_name_and_on_nothing_else() -> None:
    """Order of drawing and depth of the model change nothing; seed, layer and name each do."""
    name = "model.layers.0.self_attn.k_proj.weight"
    other = name.replace("k_proj", "v_proj")
    weights = seeded()
    later = weights.tensor(other)
    first = weights.tensor(name)
    assert torch.equal(first, seeded(layers=1).tensor(name))
    assert not torch.equal(first, later)
    assert not torch.equal(first, weights.tensor(name.replace("layers.0", "layers.1")))
    assert not torch.equal(first, seeded(seed=1).tensor(name))
    assert not torch.equal(
        weights.experts(0, 0, 1).down.view(torch.uint8), weights.experts(1, 0, 1).down.view(torch.uint8)
    )


def test_experts_beyond_one_batch_differ_from_those_of_the_first() -> None:
    """More experts than are drawn at once: none is left unset and none repeats."""
    many = dataclasses.replace(SMALL, moe=MoEGeometry(E=40, H=128, I=128, top_k=2))
    down = seeded(preset=many).experts(0, 0, 1)
    real = dequantize_blocks_fp8(down.down, down.down_scale)
    spread = real.flatten(1).std(dim=1) * 128**0.5
    assert ((spread > 0.9) & (spread < 1.1)).all()
    assert len({tuple(row.tolist()) for row in real[:, 0, :8]}) == 40


def test_fewer_kv_heads_than_ranks_are_replicated_to_their_query_heads() -> None:
    """With two KV heads, ranks 0 and 1 of four hold the first and ranks 2 and 3 the second; one rank holds both."""
    full = torch.arange(2 * 32 * 3.0).reshape(64, 3)
    first, second = full[:32], full[32:]
    shards = [shard_kv_heads(full, 2, rank, 4) for rank in range(4)]
    assert [torch.equal(shards[rank], want) for rank, want in enumerate((first, first, second, second))] == [True] * 4
    assert torch.equal(shard_kv_heads(full, 2, 1, 2), second)
    assert torch.equal(shard_kv_heads(full, 2, 0, 1), full)
