"""A Qwen3-MoE decoder in plain torch, tensor-parallel, with Hugging Face's parameter names and shapes.

Query heads, the rows of q/k/v, the columns of o_proj and the experts' intermediate size are split over the ranks;
embeddings, norms, router and lm_head are replicated. Each layer makes two all-reduces. A forward takes a flat list of
tokens, so that dispatch M is simply its length: a prefill is one request's prompt, a decode is one token a request.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from alphamoe_backend.geometry import ModelPreset
from alphamoe_backend.kv_cache import KVCache
from alphamoe_backend.parallel import TensorParallelGroup
from alphamoe_backend.weights import WeightSource, shard, shard_kv_heads
from alphamoe_tracers.ranges import RangeDomain


class ForwardInputs(Protocol):
    """The tokens of one forward, int64 tensors on the model's device."""

    prefill: bool
    """One request's prompt from its beginning, causal; otherwise one token for each of the rows' requests."""
    input_ids: Tensor
    """[T]."""
    positions: Tensor
    """[T]: place of each token in its request, from 0."""
    slots: Tensor
    """[T]: KV cache slot of each token's request."""
    logits_rows: Tensor
    """[R]: the rows whose logits are wanted."""


class Weight(nn.Module):
    """One weight under the name that a checkpoint gives it, taken without a copy and never trained."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Linear(Weight):
    """A projection without bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, in] to [T, out]."""
        return functional.linear(x, self.weight)


class RMSNorm(Weight):
    """Root mean square norm over the last dimension, computed in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(weight)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., n]."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self._eps)


class RotaryTable:
    """Cosines and sines of rotary position embeddings over the halves of a head (the neox arrangement)."""

    def __init__(self, head_dim: int, theta: float, max_len: int, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
        angles = torch.arange(max_len, dtype=torch.float64, device=device)[:, None] * theta**-exponents
        self._table = torch.stack([angles.cos(), angles.sin()], dim=1).to(torch.float32)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Give cosine and sine at ``positions`` [T], float32 [T, 1, head_dim / 2] each."""
        cosine, sine = self._table.index_select(0, positions).unsqueeze(2).unbind(1)
        return cosine, sine


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate heads ``x`` [T, heads, head_dim] in float32 and give them back in their dtype."""
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with a norm on each query and key head; gives this rank's partial sum."""

    def __init__(self, preset: ModelPreset, layer: int, weights: WeightSource, group: TensorParallelGroup) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}.self_attn"
        rank, world_size = group.rank, group.world_size
        self._layer = layer
        self._head_dim = preset.head_dim
        self._heads = preset.heads // world_size
        self._kv_heads = max(preset.kv_heads // world_size, 1)
        self._scale = preset.head_dim**-0.5
        self.q_proj = Linear(shard(weights.tensor(f"{prefix}.q_proj.weight"), 0, rank, world_size))
        self.k_proj, self.v_proj = (
            Linear(shard_kv_heads(weights.tensor(f"{prefix}.{name}.weight"), preset.kv_heads, rank, world_size))
            for name in ("k_proj", "v_proj")
        )
        self.o_proj = Linear(shard(weights.tensor(f"{prefix}.o_proj.weight"), 1, rank, world_size))
        self.q_norm, self.k_norm = (
            RMSNorm(weights.tensor(f"{prefix}.{name}.weight"), preset.rms_norm_eps) for name in ("q_norm", "k_norm")
        )

    def forward(self, x: Tensor, step: StepState) -> Tensor:
        """Attend from ``x`` [T, H] to the cache and to itself, storing its keys and values; gives [T, H]."""
        inputs, cache = step.inputs, step.cache
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self._head_dim)))
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self._head_dim)))
        v = self.v_proj(x).unflatten(-1, (-1, self._head_dim))
        rotated = rotate(torch.cat([q, k], dim=1), step.cosine, step.sine)
        q, k = rotated[:, : self._heads], rotated[:, self._heads :]
        cache.write(self._layer, inputs.slots, inputs.positions, k, v)
        attended = self._causal(q, k, v) if step.hidden_places is None else self._cached(q, step, step.hidden_places)
        partial: Tensor = self.o_proj(attended)
        return partial

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend inside one prompt; rows after the last real token are seen by none before them."""
        share = self._heads // self._kv_heads
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.repeat_interleave(share, dim=1).transpose(0, 1)[None],
            v.repeat_interleave(share, dim=1).transpose(0, 1)[None],
            is_causal=True,
            scale=self._scale,
        )
        return out[0].transpose(0, 1).flatten(1)

    def _cached(self, q: Tensor, step: StepState, hidden_places: Tensor) -> Tensor:
        """Attend from one token of each request to all places of its slot, those after it masked: static shapes."""
        keys, values = step.cache.gather(self._layer, step.inputs.slots)
        grouped = q.reshape(q.shape[0], self._kv_heads, -1, self._head_dim)
        scores = torch.matmul(grouped, keys.transpose(-1, -2)) * self._scale
        scores = scores.masked_fill(hidden_places, float("-inf"))
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(probabilities, values).flatten(1)


class MoELayer(Protocol):
    """Router and experts of one layer; :class:`alphamoe_backend.layer.AlphaMoELayer`."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [M, H] to this rank's partial sum [M, H]."""


class MoEFactory(Protocol):
    """Builds the MoE part of a layer, so that the model knows nothing of backends and receipts."""

    def __call__(self, layer: int, router_weight: Tensor) -> MoELayer:
        """Give the layer's MoE for the replicated router weight [E, H]."""


class StepState:
    """What the layers of one forward share."""

    def __init__(self, inputs: ForwardInputs, cache: KVCache, rotary: RotaryTable) -> None:
        self.inputs = inputs
        self.cache = cache
        self.cosine, self.sine = rotary.at(inputs.positions)
        self.hidden_places = None if inputs.prefill else cache.hidden_places(inputs.positions)


class DecoderLayer(nn.Module):
    """Attention and experts, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        preset: ModelPreset,
        layer: int,
        weights: WeightSource,
        group: TensorParallelGroup,
        ranges: RangeDomain,
        build_moe: MoEFactory,
    ) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}"
        self._layer = layer
        self._group = group
        self._ranges = ranges
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(weights.tensor(f"{prefix}.{name}.weight"), preset.rms_norm_eps)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        self.self_attn = Attention(preset, layer, weights, group)
        self.mlp = nn.Module()
        self.mlp.gate = Weight(weights.tensor(f"{prefix}.mlp.gate.weight"))
        self._moe = build_moe(layer, self.mlp.gate.weight)

    def forward(self, residual: Tensor, step: StepState) -> Tensor:
        """Map the residual stream [T, H] to the next layer's."""
        with self._ranges.range("layer", self._layer):
            with self._ranges.range("attention"):
                attended = self.self_attn(self.input_layernorm(residual), step)
            residual = residual + self._summed(attended)
            mixed = self._moe.forward(self.post_attention_layernorm(residual))
            return residual + self._summed(mixed)

    def _summed(self, partial: Tensor) -> Tensor:
        with self._ranges.range("all_reduce"):
            return self._group.all_reduce(partial, self._layer)


class Decoder(nn.Module):
    """Embedding, layers and final norm: what a checkpoint calls ``model``."""

    def __init__(
        self,
        preset: ModelPreset,
        layers: int,
        weights: WeightSource,
        group: TensorParallelGroup,
        ranges: RangeDomain,
        build_moe: MoEFactory,
    ) -> None:
        super().__init__()
        self.embed_tokens = Weight(weights.tensor("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(
            DecoderLayer(preset, layer, weights, group, ranges, build_moe) for layer in range(layers)
        )
        self.norm = RMSNorm(weights.tensor("model.norm.weight"), preset.rms_norm_eps)


class Qwen3MoEModel(nn.Module):
    """The decoder with its head.

    Its state dict holds this rank's slice of every dense parameter under the checkpoint's name; the experts live
    quantised and stacked inside their MoE objects.
    """

    def __init__(
        self,
        preset: ModelPreset,
        *,
        layers: int,
        weights: WeightSource,
        group: TensorParallelGroup,
        ranges: RangeDomain,
        build_moe: MoEFactory,
    ) -> None:
        """Load this rank's slices.

        Args:
            preset: shapes.
            layers: how many of the preset's layers to build.
            weights: the full model.
            group: this rank's collectives.
            ranges: NVTX domain of the layers.
            build_moe: makes the experts of a layer.
        """
        super().__init__()
        self.preset = preset
        self._ranges = ranges
        self.model = Decoder(preset, layers, weights, group, ranges, build_moe)
        self.lm_head = Linear(weights.tensor("lm_head.weight"))

    def forward(self, inputs: ForwardInputs, cache: KVCache, rotary: RotaryTable) -> Tensor:
        """Run the tokens of ``inputs``, storing their keys and values in ``cache``.

        Returns:
            float32 [R, vocab] for ``inputs.logits_rows``.
        """
        step = StepState(inputs, cache, rotary)
        hidden = functional.embedding(inputs.input_ids, self.model.embed_tokens.weight)
        for layer in self.model.layers:
            hidden = layer(hidden, step)
        with self._ranges.range("lm_head"):
            if inputs.prefill:
                hidden = hidden.index_select(0, inputs.logits_rows)
            logits: Tensor = self.lm_head(self.model.norm(hidden))
            return logits.to(torch.float32)
