"""Shapes of the routed experts and of the decoders around them, without torch.

A preset describes a Qwen3-MoE decoder (RMSNorm, QK-norm, grouped-query attention, RoPE, router, routed experts). For
``qwen3-next-80b`` and ``glm-5.2`` the geometry of the routed experts is the real model's; their linear or sparse
attention and their shared experts are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alphamoe_tracers.errors import UsageError

Quantization = Literal["fp8_w8a8", "nvfp4"]

GROUP = 128
"""Elements that share one scale along K, and rows of a weight block."""


@dataclass(frozen=True)
class LocalGeometry:
    """Routed experts as one tensor-parallel rank holds them: all E experts, a slice of the intermediate size."""

    E: int
    H: int
    I_local: int
    top_k: int
    block_m: int = 8

    @property
    def N(self) -> int:  # noqa: N802 (the field's own name)
        """Rows of the first GEMM's weight: gate and up together."""
        return 2 * self.I_local


@dataclass(frozen=True)
class MoEGeometry:
    """Routed experts of the full model.

    Attributes:
        E: experts. H: hidden size. I: intermediate size of one expert. top_k: experts a token is sent to.
        block_m: rows that the routing plan pads each expert to.
        quantization: format of the expert weights and activations.
    """

    E: int
    H: int
    I: int  # noqa: E741 (the field's own name)
    top_k: int
    block_m: int = 8
    quantization: Quantization = "fp8_w8a8"

    def world_sizes(self) -> tuple[int, ...]:
        """List the tensor-parallel sizes that leave every rank whole groups of 128 intermediate columns."""
        groups = self.I // GROUP
        return tuple(size for size in range(1, groups + 1) if self.I % (GROUP * size) == 0)

    def local(self, world_size: int) -> LocalGeometry:
        """Give the slice that one of ``world_size`` ranks holds.

        Raises:
            UsageError: the slice is not a multiple of 128 columns; the hint lists the sizes that work.
        """
        if world_size not in self.world_sizes():
            sizes = ", ".join(map(str, self.world_sizes())) or "none"
            raise UsageError(
                f"an intermediate size of {self.I} cannot be cut over {world_size} ranks in multiples of {GROUP}",
                hint=f"use --ranks with one of: {sizes}",
            )
        return LocalGeometry(self.E, self.H, self.I // world_size, self.top_k, self.block_m)


@dataclass(frozen=True)
class ModelPreset:
    """A decoder whose weights are seeded, or that a checkpoint of this shape is loaded into."""

    name: str
    moe: MoEGeometry
    layers: int
    """Layers of the real model; a run usually takes fewer (``--layers``)."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 32768
    """32,768 is the vocabulary of the tokenizer in use (mistral's v3), not that of the model named by the preset."""
    rope_theta: float = 10_000_000.0
    rms_norm_eps: float = 1e-6
    note: str = ""

    @property
    def hidden(self) -> int:
        """Hidden size, shared by attention and experts."""
        return self.moe.H

    def world_sizes(self) -> tuple[int, ...]:
        """List the tensor-parallel sizes that both the experts and the attention heads can be cut into.

        KV heads are replicated where there are fewer of them than ranks, so one count must divide the other.
        """
        return tuple(
            size
            for size in self.moe.world_sizes()
            if self.heads % size == 0 and (self.kv_heads % size == 0 or size % self.kv_heads == 0)
        )

    def check_world_size(self, world_size: int) -> None:
        """Refuse a number of ranks that this model cannot be cut into.

        Raises:
            UsageError: with the numbers that work in the hint.
        """
        if world_size not in self.world_sizes():
            sizes = ", ".join(map(str, self.world_sizes()))
            raise UsageError(
                f"{self.name} cannot be cut over {world_size} ranks", hint=f"use --ranks with one of: {sizes}"
            )


PRESETS: dict[str, ModelPreset] = {
    preset.name: preset
    for preset in (
        ModelPreset(
            name="tiny",
            moe=MoEGeometry(E=16, H=256, I=512, top_k=4),
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=64,
            note="for a CPU; no real model has this shape",
        ),
        ModelPreset(
            name="qwen3-next-80b",
            moe=MoEGeometry(E=512, H=2048, I=512, top_k=10),
            layers=48,
            heads=16,
            kv_heads=2,
            head_dim=256,
            note="routed experts as in Qwen3-Next-80B-A3B; linear attention and shared experts are not modelled",
        ),
        ModelPreset(
            name="glm-5.2",
            moe=MoEGeometry(E=256, H=6144, I=2048, top_k=8, quantization="nvfp4"),
            layers=78,
            heads=64,
            kv_heads=8,
            head_dim=128,
            note="routed experts as in GLM-5.2; its attention and shared experts are not modelled",
        ),
    )
}


def preset(name: str) -> ModelPreset:
    """Look a preset up by name.

    Raises:
        UsageError: no such preset; the hint lists the ones there are.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise UsageError(f"unknown model {name!r}", hint=f"use --model with one of: {', '.join(PRESETS)}") from None
