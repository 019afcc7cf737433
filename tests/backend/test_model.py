"""The decoder: attention against an independent one, KV cache, padding, and names of its parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from alphamoe_backend.geometry import ModelPreset, MoEGeometry
from alphamoe_backend.inputs import StaticInputs
from alphamoe_backend.kv_cache import KVCache
from alphamoe_backend.model import Qwen3MoEModel, RotaryTable
from alphamoe_backend.parallel import TensorParallelGroup
from alphamoe_backend.weights import SeededWeights, dense_shapes
from alphamoe_tracers.ranges import RangeDomain

PRESET = ModelPreset(
    name="small",
    moe=MoEGeometry(E=4, H=128, I=128, top_k=2),
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=512,
    rope_theta=10_000.0,
)
CPU = torch.device("cpu")


class SmoothMoE:
    """Stands in for router and experts: differentiable, so that rounding cannot flip a route or an e4m3 value."""

    def __init__(self, layer: int, router_weight: Tensor) -> None:
        self.router_weight = router_weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix each token with a few directions of its own."""
        return torch.tanh(hidden @ self.router_weight.T) @ self.router_weight


def weights(dtype: torch.dtype = torch.float32) -> SeededWeights:
    """Give the test model's weights."""
    return SeededWeights(PRESET, layers=2, seed=3, dtype=dtype, device=CPU)


def small_model() -> Qwen3MoEModel:
    """Build the test model in float32 on one rank."""
    return Qwen3MoEModel(
        PRESET,
        layers=2,
        weights=weights(),
        group=TensorParallelGroup(),
        ranges=RangeDomain(enabled=False),
        build_moe=SmoothMoE,
    )


def cache_for(slots: int) -> KVCache:
    """Give a KV cache of 64 places a slot, filled with values that would show if a mask let them through."""
    cache = KVCache(layers=2, slots=slots, kv_heads=2, max_len=40, head_dim=32, dtype=torch.float32, device=CPU)
    cache.keys.normal_(std=30.0, generator=torch.Generator().manual_seed(1))
    cache.values.normal_(std=30.0, generator=torch.Generator().manual_seed(2))
    return cache


ROTARY = RotaryTable(PRESET.head_dim, PRESET.rope_theta, 64, CPU)


def prefill(model: Qwen3MoEModel, cache: KVCache, ids: list[int], slot: int, rows: int | None = None) -> Tensor:
    """Prefill one request and give the logits [vocab] after its last token."""
    inputs = StaticInputs(rows or len(ids), prefill=True, scratch_slot=cache.scratch_slot, device=CPU)
    inputs.fill(ids, list(range(len(ids))), [slot] * len(ids))
    return model.forward(inputs, cache, ROTARY)[0]


def decode(
    model: Qwen3MoEModel, cache: KVCache, ids: list[int], positions: list[int], slots: list[int], rows: int
) -> Tensor:
    """Decode one token of each request and give logits [requests, vocab]."""
    inputs = StaticInputs(rows, prefill=False, scratch_slot=cache.scratch_slot, device=CPU)
    inputs.fill(ids, positions, slots)
    return model.forward(inputs, cache, ROTARY)[: len(ids)]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Give a made-up prompt."""
    return torch.randint(PRESET.vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_dense_parameters_have_hugging_faces_names_and_shapes() -> None:
    """On one rank the state dict is exactly a checkpoint's, without the experts."""
    shapes = {name: tuple(tensor.shape) for name, tensor in small_model().state_dict().items()}
    assert shapes == dense_shapes(PRESET, 2)


def test_a_rank_of_four_holds_its_slices_and_copies_of_kv_heads() -> None:
    """One query head, one KV head and a quarter of o_proj's columns, of the ranks' common model."""
    source = weights()
    model = Qwen3MoEModel(
        PRESET,
        layers=1,
        weights=source,
        group=TensorParallelGroup(2, 4, "gloo"),
        ranges=RangeDomain(enabled=False),
        build_moe=SmoothMoE,
    )
    held = model.state_dict()
    prefix = "model.layers.0.self_attn"
    q, k, o = (f"{prefix}.{name}_proj.weight" for name in "qko")
    assert torch.equal(held[q], source.tensor(q)[64:96])
    assert torch.equal(held[k], source.tensor(k)[32:64])
    assert torch.equal(held[o], source.tensor(o)[:, 64:96])


def naive_attention(x: Tensor) -> Tensor:
    """Compute layer 0's attention over one prompt head by head in float64."""

    def get(name: str) -> Tensor:
        return weights().tensor(f"model.layers.0.self_attn.{name}.weight").double()

    def norm(t: Tensor, weight: Tensor) -> Tensor:
        return t / (t.pow(2).mean(-1, keepdim=True) + PRESET.rms_norm_eps).sqrt() * weight

    def rope(t: Tensor) -> Tensor:
        out = torch.empty_like(t)
        half = PRESET.head_dim // 2
        for position in range(t.shape[0]):
            for pair in range(half):
                angle = torch.tensor(position * PRESET.rope_theta ** (-2 * pair / PRESET.head_dim), dtype=torch.float64)
                a, b = t[position, pair], t[position, pair + half]
                out[position, pair] = a * angle.cos() - b * angle.sin()
                out[position, pair + half] = b * angle.cos() + a * angle.sin()
        return out

    x = x.double()
    heads = []
    for head in range(PRESET.heads):
        rows = slice(head * 32, head * 32 + 32)
        kv_rows = slice(head // 2 * 32, head // 2 * 32 + 32)
        q = rope(norm(x @ get("q_proj")[rows].T, get("q_norm")))
        k = rope(norm(x @ get("k_proj")[kv_rows].T, get("k_norm")))
        v = x @ get("v_proj")[kv_rows].T
        scores = (q @ k.T / 32**0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ v)
    return torch.cat(heads, dim=1) @ get("o_proj").T


def test_attention_equals_an_independent_computation_head_by_head() -> None:
    """Norm before rotation, halves rotated (neox), causal, two query heads to a KV head."""
    model = small_model()
    seen: list[tuple[Tensor, Tensor]] = []
    model.model.layers[0].self_attn.register_forward_hook(
        lambda module, arguments, output: seen.append((arguments[0], output))
    )
    prefill(model, cache_for(1), prompt(9), 0)
    x, output = seen[0]
    torch.testing.assert_close(output.double(), naive_attention(x), rtol=1e-4, atol=1e-5)


def test_decoding_over_the_cache_equals_recomputing_the_whole_prompt() -> None:
    """Token after token, over a cache full of other requests' large values."""
    model, ids = small_model(), prompt(12)
    cache = cache_for(2)
    prefill(model, cache, ids[:5], 1)
    for place in range(5, 12):
        logits = decode(model, cache, [ids[place]], [place], [1], rows=1)[0]
        recomputed = prefill(model, cache_for(2), ids[: place + 1], 0)
        torch.testing.assert_close(logits, recomputed, rtol=1e-4, atol=1e-4)


def test_padding_rows_change_no_real_row_of_a_prefill() -> None:
    """Logits and stored keys of a padded prefill are those of the unpadded one, and no other slot is written."""
    model, ids = small_model(), prompt(13)
    plain, padded = cache_for(2), cache_for(2)
    untouched = padded.keys[:, 0].clone()
    logits = prefill(model, plain, ids, 1)
    torch.testing.assert_close(prefill(model, padded, ids, 1, rows=16), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded.keys[:, :2], plain.keys[:, :2], rtol=1e-5, atol=1e-5)
    assert torch.equal(padded.keys[:, 0], untouched)


def test_padding_rows_change_no_real_row_of_a_decode() -> None:
    """Two requests of different lengths decode alike with and without six rows of padding, and alone."""
    model = small_model()
    prompts = [prompt(5, seed=1), prompt(9, seed=2)]
    results = []
    for rows in (2, 8):
        cache = cache_for(2)
        for slot, ids in enumerate(prompts):
            prefill(model, cache, ids, slot)
        results.append(decode(model, cache, [7, 8], [5, 9], [0, 1], rows))
    alone = cache_for(2)
    prefill(model, alone, prompts[1], 1)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decode(model, alone, [8], [9], [1], 1)[0], results[0][1], rtol=1e-5, atol=1e-5)


def test_activations_stay_of_order_one_and_greedy_tokens_vary() -> None:
    """The residual stream grows slowly, logits have about unit spread, and different prompts end differently."""
    model = small_model()
    streams: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda module, arguments, output: streams.append(arguments[0]))
    logits = [prefill(model, cache_for(1), prompt(16, seed), 0) for seed in range(8)]
    spread = torch.stack(streams).std()
    assert 0.5 < spread < 5
    assert 0.5 < torch.stack(logits).std() < 2
    assert len({int(row.argmax()) for row in logits}) >= 7
