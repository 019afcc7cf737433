"""Planted faults: a run made wrong on purpose, to show that its evidence says so.

``fallback:rank=N`` makes rank N build its MoE layers with the stock two-GEMM experts while the run goes on claiming
the AlphaMoE backend: what a silent fallback of one rank looks like. Tokens stay (nearly) the same; the witness must
find ``fused_moe_kernel`` on that rank and no AlphaMoE kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from alphamoe_tracers.errors import UsageError

_FALLBACK = re.compile(r"fallback:rank=(\d+)")


@dataclass(frozen=True)
class FallbackFault:
    """One rank that falls back to the stock experts."""

    rank: int


def parse_fault(text: str | None, world_size: int) -> FallbackFault | None:
    """Read the value of ``--inject-fault``.

    Args:
        text: ``fallback:rank=N``, or None for no fault.
        world_size: ranks of the run; N must be one of them.

    Raises:
        UsageError: when it is not understood or names a rank that the run does not have.
    """
    if text is None:
        return None
    matched = _FALLBACK.fullmatch(text)
    if matched is None:
        raise UsageError(f"unknown fault {text!r}", "Use --inject-fault fallback:rank=N.")
    rank = int(matched[1])
    if rank >= world_size:
        raise UsageError(
            f"fault {text!r} names rank {rank}, but the run has ranks 0 to {world_size - 1}",
            "Name one of the run's ranks, or raise --ranks.",
        )
    return FallbackFault(rank)
