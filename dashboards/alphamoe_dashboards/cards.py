"""Rooflines: what a card can do at most, and what one launch of a MoE kernel has to move and multiply.

Peaks are the vendors' data sheets: dense rates (no sparsity), bytes and operations a second.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BLOCK = 128
FUSED_SYMBOL = "kernel_alpha_moe_w8a8_up_down"
STOCK_SYMBOL = "fused_moe_kernel"


@dataclass(frozen=True)
class Card:
    """Peaks of one GPU."""

    name: str
    bytes_per_s: float
    fp8_flop_per_s: float | None
    """Null where the card has no FP8 tensor cores."""
    bf16_flop_per_s: float


CARDS = (
    Card("H200", 4.8e12, 1.979e15, 0.9895e15),
    Card("H100 PCIe", 2.0e12, 1.513e15, 0.7565e15),
    Card("H100", 3.35e12, 1.979e15, 0.9895e15),
    Card("H20", 4.0e12, 0.296e15, 0.148e15),
    Card("B300", 8.0e12, 4.5e15, 2.25e15),
    Card("B200", 8.0e12, 4.5e15, 2.25e15),
    Card("A100-SXM4-80GB", 2.039e12, None, 0.312e15),
    Card("A100", 1.555e12, None, 0.312e15),
    Card("V100", 0.9e12, None, 0.125e15),
)
"""The first whose name is part of the GPU's name wins."""


def card_of(gpu_name: str | None) -> Card | None:
    """Return the peaks of a GPU by the name that its driver gives, None where it is not known here."""
    wanted = (gpu_name or "").replace("_", " ").upper()
    return next((card for card in CARDS if card.name.upper() in wanted), None)


@dataclass(frozen=True)
class Work:
    """What all launches of one layer's experts do for M tokens on one rank."""

    flop: float
    bytes: float
    experts: float
    """Experts touched on average when routing is uniform; the real routing plan is not recorded."""


def experts_touched(M: int, E: int, top_k: int) -> float:
    """Return the expected number of distinct experts of M tokens under uniform routing: E (1 - (1 - k/E)**M)."""
    return E * (1 - (1 - min(top_k / E, 1)) ** M)


def moe_work(M: int, E: int, H: int, I_local: int, top_k: int) -> Work:
    """Return the operations and the least bytes of one FP8 block-scaled MoE layer on one rank.

    Operations: three GEMM slices (gate, up, down) of H x I_local for each of the M x top_k expanded rows. Bytes: the
    weights of the touched experts with their scales once, the activations with their scales once, the bf16 output once.
    """
    flop = 6.0 * M * top_k * H * I_local
    experts = experts_touched(M, E, top_k)
    weights = experts * 3 * H * I_local * (1 + 4 / SCALE_BLOCK**2)
    activations = M * H * (1 + 4 / SCALE_BLOCK)
    return Work(flop, weights + activations + 2.0 * M * H, experts)
